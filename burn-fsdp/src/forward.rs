//! Forward under a mixed-precision policy.

use burn::module::Module;
use burn::tensor::{Bool, DType, Int, Tensor};

use crate::FsdpModule;

impl<M: Module> FsdpModule<M> {
    /// Runs `f` on the module with floating inputs cast to `param_dtype`, unless
    /// `cast_forward_inputs` is off, and casts floating outputs to `output_dtype`.
    ///
    /// A forward without it is fine where inputs need no cast (token ids, say).
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn::tensor::{DType, Device, Tensor};
    /// # use burn_fsdp::*;
    /// # launch(1, |pg| {
    /// # let device = Device::flex().autodiff();
    /// let policy = MixedPrecisionPolicy::bf16().with_output_dtype(DType::F32);
    /// let config = FsdpConfig::new().with_mixed_precision(policy);
    /// let model = LinearConfig::new(3, 2).init(&device)
    ///     .fully_shard(&DeviceMesh::shard(&pg), &config)?;
    /// let input = Tensor::<2>::ones([1, 3], &device);
    /// let output = model.forward_with(input, |model, input| model.forward(input));
    /// assert_eq!(output.dtype(), DType::F32);
    /// # Ok(())
    /// # })?;
    /// # Ok::<(), FsdpError>(())
    /// ```
    pub fn forward_with<I: CastFloats, O: CastFloats>(
        &self,
        input: I,
        f: impl FnOnce(&M, I) -> O,
    ) -> O {
        let policy = self.config.mixed_precision;
        let input = match policy.param_dtype {
            Some(dtype) if policy.cast_forward_inputs => input.cast_floats(dtype),
            _ => input,
        };
        let output = f(self, input);
        match policy.output_dtype {
            Some(dtype) => output.cast_floats(dtype),
            None => output,
        }
    }
}

/// A value whose floating tensors can be cast.
pub trait CastFloats {
    /// The same with floating tensors in `dtype`; everything else is left alone.
    fn cast_floats(self, dtype: DType) -> Self;
}

impl<const D: usize> CastFloats for Tensor<D> {
    fn cast_floats(self, dtype: DType) -> Self {
        if self.dtype() == dtype {
            return self;
        }
        self.cast(dtype)
    }
}

impl<const D: usize> CastFloats for Tensor<D, Int> {
    fn cast_floats(self, _dtype: DType) -> Self {
        self
    }
}

impl<const D: usize> CastFloats for Tensor<D, Bool> {
    fn cast_floats(self, _dtype: DType) -> Self {
        self
    }
}

impl<T: CastFloats> CastFloats for Option<T> {
    fn cast_floats(self, dtype: DType) -> Self {
        self.map(|value| value.cast_floats(dtype))
    }
}

impl<T: CastFloats> CastFloats for Vec<T> {
    fn cast_floats(self, dtype: DType) -> Self {
        self.into_iter().map(|v| v.cast_floats(dtype)).collect()
    }
}

impl CastFloats for () {
    fn cast_floats(self, _dtype: DType) -> Self {}
}

macro_rules! cast_tuple {
    ($($name:ident),+) => {
        impl<$($name: CastFloats),+> CastFloats for ($($name,)+) {
            fn cast_floats(self, dtype: DType) -> Self {
                #[allow(non_snake_case)]
                let ($($name,)+) = self;
                ($($name.cast_floats(dtype),)+)
            }
        }
    };
}
cast_tuple!(A, B);
cast_tuple!(A, B, C);
cast_tuple!(A, B, C, E);
