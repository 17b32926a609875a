//! The arithmetic of collectives on host memory: copy with cast, and reduction.

use std::ops::Range;

use burn::backend::Flex;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{AllocationProperty, Bytes, DType, Element, Tensor, TensorData, bf16, f16};
use rayon::prelude::*;

use super::buffer::SharedBuffer;
use crate::placement::ShardLayout;
use crate::reduction::{ReduceOp, Reduction};
use crate::{FsdpError, Result};

pub(crate) type HostTensor = FloatTensor<Flex>;

/// Elements handled at a time: small enough for the first-level cache.
const BLOCK: usize = 2048;
/// Elements from which a rank's own threads share the work.
const PARALLEL: usize = 1 << 17;

/// The tensor's elements, contiguous in host memory; a copy only if they are not so already.
pub(crate) fn host(tensor: &Tensor<1>) -> Result<HostTensor> {
    let primitive =
        tensor
            .clone()
            .try_into_primitive::<Flex>()
            .map_err(|_| FsdpError::UnsupportedDevice {
                engine: "local",
                device: format!("{:?}", tensor.device()),
            })?;
    Ok(if primitive.is_contiguous() {
        primitive
    } else {
        primitive.to_contiguous()
    })
}

/// Whether the tensor is one of the host.
pub(crate) fn is_host(tensor: &Tensor<1>) -> bool {
    tensor.clone().try_into_primitive::<Flex>().is_ok()
}

pub(crate) fn from_bytes(bytes: Bytes, len: usize, dtype: DType) -> Tensor<1> {
    Tensor::from_primitive::<Flex>(host_from_bytes(bytes, len, dtype))
}

fn host_from_bytes(bytes: Bytes, len: usize, dtype: DType) -> HostTensor {
    HostTensor::from_data(TensorData::from_bytes(bytes, [len], dtype))
}

/// Elements that another process has sent; a copy only if they are not where numbers may be.
pub(crate) fn received(bytes: bytes::Bytes, dtype: DType) -> HostTensor {
    let len = bytes.len() / dtype.size();
    let is_aligned = (bytes.as_ptr() as usize).is_multiple_of(dtype.size());
    let bytes = match is_aligned {
        true => bytes,
        false => {
            let mut aligned = SharedBuffer::new(bytes.len(), None);
            aligned.as_mut_slice().copy_from_slice(&bytes);
            aligned.freeze()
        }
    };
    let bytes = Bytes::from_shared(bytes, AllocationProperty::Native);
    host_from_bytes(bytes, len, dtype)
}

/// A floating type that host memory holds.
pub(crate) trait HostFloat: Element + bytemuck::Pod + Send + Sync {
    const WIDE: bool = false;
    fn widen(self) -> f64;
    fn narrow(value: f64) -> Self;
    fn to_single(self) -> f32;
    fn from_single(value: f32) -> Self;
}

macro_rules! host_float {
    ($type:ty, $to_f32:expr, $from_f32:expr, $to_f64:expr, $from_f64:expr, $wide:expr) => {
        impl HostFloat for $type {
            const WIDE: bool = $wide;
            #[inline(always)]
            fn widen(self) -> f64 {
                $to_f64(self)
            }
            #[inline(always)]
            fn narrow(value: f64) -> Self {
                $from_f64(value)
            }
            #[inline(always)]
            fn to_single(self) -> f32 {
                $to_f32(self)
            }
            #[inline(always)]
            fn from_single(value: f32) -> Self {
                $from_f32(value)
            }
        }
    };
}
host_float!(f32, |x| x, |x| x, |x| x as f64, |x| x as f32, false);
host_float!(f64, |x| x as f32, |x| x as f64, |x| x, |x| x, true);
host_float!(
    f16,
    f16::to_f32,
    f16::from_f32,
    f16::to_f64,
    f16::from_f64,
    false
);
host_float!(
    bf16,
    bf16::to_f32,
    bf16::from_f32,
    bf16::to_f64,
    bf16::from_f64,
    false
);

macro_rules! with_float {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $T = f32;
                $body
            }
            DType::F64 => {
                type $T = f64;
                $body
            }
            DType::F16 => {
                type $T = ::burn::tensor::f16;
                $body
            }
            DType::BF16 => {
                type $T = ::burn::tensor::bf16;
                $body
            }
            other => unreachable!("{other:?} is no dtype of a sharded parameter"),
        }
    };
}
pub(crate) use with_float;

pub(crate) fn is_supported(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16)
}

fn slice<T: HostFloat>(tensor: &HostTensor) -> &[T] {
    tensor
        .as_slice()
        .expect("a host tensor is contiguous and of its own dtype")
}

fn convert<S: HostFloat, D: HostFloat>(src: &[S], dst: &mut [D]) {
    if S::dtype() == D::dtype() {
        dst.copy_from_slice(bytemuck::cast_slice(src));
    } else if S::WIDE || D::WIDE {
        for (d, s) in dst.iter_mut().zip(src) {
            *d = D::narrow(s.widen());
        }
    } else {
        for (d, s) in dst.iter_mut().zip(src) {
            *d = D::from_single(s.to_single());
        }
    }
}

/// Copies `src[start..]` over the whole of `dst`, cast to `dtype`.
pub(crate) fn copy_cast(src: &HostTensor, start: usize, dst: &mut [u8], dtype: DType) {
    with_float!(src.dtype(), S => with_float!(dtype, D => {
        let dst: &mut [D] = bytemuck::cast_slice_mut(dst);
        let src = &slice::<S>(src)[start..start + dst.len()];
        if dst.len() >= PARALLEL && rayon::current_num_threads() > 1 {
            let part = dst.len().div_ceil(rayon::current_num_threads());
            dst.par_chunks_mut(part)
                .zip(src.par_chunks(part))
                .for_each(|(d, s)| convert(s, d));
        } else {
            convert(src, dst);
        }
    }))
}

/// `rank`'s shard of a full tensor, padded with zeros.
pub(crate) fn shard_of(full: &HostTensor, layout: &ShardLayout, rank: usize) -> Tensor<1> {
    let dtype = full.dtype();
    with_float!(dtype, T => {
        let mut shard = vec![T::default(); layout.shard_len()];
        for span in layout.spans(rank) {
            let target = &mut shard[span.shard..span.shard + span.len];
            copy_cast(full, span.full, bytemuck::cast_slice_mut(target), dtype);
        }
        from_bytes(Bytes::from_elems(shard), layout.shard_len(), dtype)
    })
}

/// One rank's contribution to a reduction; absent means zeros.
pub(crate) type Contribution<'a> = Option<&'a HostTensor>;

/// Reduces elements `start..start + out.len()` of the contributions, in rank order, into `out`.
///
/// Each contribution is rounded to `reduce_dtype` as if it had been sent in it; the sum is kept in
/// f32 (f64 if that is a dtype involved) and rounded once.
pub(crate) fn reduce<O: HostFloat>(
    contributions: &[Contribution<'_>],
    start: usize,
    out: &mut [O],
    reduce_dtype: DType,
    reduction: &Reduction,
) {
    let wide = contributions.iter().flatten().any(|c| is_wide(c));
    reduce_sent(contributions, start, out, reduce_dtype, reduction, wide);
}

/// The same for contributions that may have been [sent](write_sent): `wide` says whether one of
/// them was in f64 before.
pub(crate) fn reduce_sent<O: HostFloat>(
    contributions: &[Contribution<'_>],
    start: usize,
    out: &mut [O],
    reduce_dtype: DType,
    reduction: &Reduction,
    wide: bool,
) {
    let wide = wide || O::WIDE || reduce_dtype == DType::F64;
    let one_block = |(i, block): (usize, &mut [O])| {
        let start = start + i * BLOCK;
        if wide {
            reduce_block::<f64, O>(contributions, start, block, reduce_dtype, reduction);
        } else {
            reduce_block::<f32, O>(contributions, start, block, reduce_dtype, reduction);
        }
    };
    for_each_block(out, one_block);
}

/// Whether a contribution makes the sum be kept in f64.
pub(crate) fn is_wide(contribution: &HostTensor) -> bool {
    contribution.dtype() == DType::F64
}

/// Writes elements of a contribution, from `start` on, as they are sent: divided, and rounded to
/// `reduce_dtype`. What is reduced of them later must not be divided before the sum again.
///
/// The result is that of [`reduce`] bit for bit if `pre_divide` is a power of two.
pub(crate) fn write_sent(
    contribution: &HostTensor,
    start: usize,
    dst: &mut [u8],
    reduce_dtype: DType,
    reduction: &Reduction,
) {
    with_float!(reduce_dtype, R => {
        let dst: &mut [R] = bytemuck::cast_slice_mut(dst);
        let wide = R::WIDE || is_wide(contribution);
        for_each_block(dst, |(i, block)| {
            let start = start + i * BLOCK;
            let range = start..start + block.len();
            if wide {
                let mut scratch = [0f64; BLOCK];
                convert(sent(contribution, range, reduce_dtype, reduction, &mut scratch), block);
            } else {
                let mut scratch = [0f32; BLOCK];
                convert(sent(contribution, range, reduce_dtype, reduction, &mut scratch), block);
            }
        });
    })
}

fn for_each_block<T: Send>(values: &mut [T], f: impl Fn((usize, &mut [T])) + Send + Sync) {
    if values.len() >= PARALLEL && rayon::current_num_threads() > 1 {
        values.par_chunks_mut(BLOCK).enumerate().for_each(f);
    } else {
        values.chunks_mut(BLOCK).enumerate().for_each(f);
    }
}

fn reduce_block<A: Accumulator, O: HostFloat>(
    contributions: &[Contribution<'_>],
    start: usize,
    out: &mut [O],
    reduce_dtype: DType,
    reduction: &Reduction,
) {
    let mut acc = [A::ZERO; BLOCK];
    let mut scratch = [A::ZERO; BLOCK];
    let acc = &mut acc[..out.len()];
    let mut first = true;
    for tensor in contributions.iter().flatten() {
        let range = start..start + out.len();
        let part = sent(tensor, range, reduce_dtype, reduction, &mut scratch);
        if std::mem::take(&mut first) {
            acc.copy_from_slice(part);
        } else {
            match reduction.op {
                ReduceOp::Sum | ReduceOp::Mean => {
                    acc.iter_mut().zip(part).for_each(|(a, p)| *a = *a + *p)
                }
                ReduceOp::Max => acc
                    .iter_mut()
                    .zip(part)
                    .for_each(|(a, p)| *a = a.larger(*p)),
                ReduceOp::Min => acc
                    .iter_mut()
                    .zip(part)
                    .for_each(|(a, p)| *a = a.smaller(*p)),
            }
        }
    }
    divide(acc, reduction.post_divide);
    round(acc, reduce_dtype);
    convert(acc, out);
}

/// A block of a contribution as it is sent, in the type sums are kept in.
fn sent<'a, A: Accumulator>(
    tensor: &'a HostTensor,
    range: Range<usize>,
    reduce_dtype: DType,
    reduction: &Reduction,
    scratch: &'a mut [A; BLOCK],
) -> &'a [A] {
    let is_divided = reduction.pre_divide != 1.0;
    if tensor.dtype() == A::dtype() && A::holds(reduce_dtype) && !is_divided {
        return &slice::<A>(tensor)[range];
    }
    let loaded = &mut scratch[..range.len()];
    with_float!(tensor.dtype(), S => convert(&slice::<S>(tensor)[range], loaded));
    divide(loaded, reduction.pre_divide);
    if is_divided || tensor.dtype() != reduce_dtype {
        round(loaded, reduce_dtype);
    }
    loaded
}

/// The type sums are kept in.
trait Accumulator: HostFloat + std::ops::Add<Output = Self> + std::ops::Div<Output = Self> {
    const ZERO: Self;
    /// Whether values of this type need no rounding to be sent as `dtype`.
    fn holds(dtype: DType) -> bool;
    /// The larger; NaN if either is.
    fn larger(self, other: Self) -> Self;
    /// The smaller; NaN if either is.
    fn smaller(self, other: Self) -> Self;
}

macro_rules! accumulator {
    ($type:ty, $($own:pat_param)|+) => {
        impl Accumulator for $type {
            const ZERO: Self = 0.0;
            fn holds(dtype: DType) -> bool {
                matches!(dtype, $($own)|+)
            }
            fn larger(self, other: Self) -> Self {
                if self.is_nan() || self > other { self } else { other }
            }
            fn smaller(self, other: Self) -> Self {
                if self.is_nan() || self < other { self } else { other }
            }
        }
    };
}
accumulator!(f32, DType::F32 | DType::F64);
accumulator!(f64, DType::F64);

fn divide<A: Accumulator>(values: &mut [A], by: f64) {
    if by != 1.0 {
        let by = A::narrow(by);
        values.iter_mut().for_each(|v| *v = *v / by);
    }
}

fn round<A: Accumulator>(values: &mut [A], dtype: DType) {
    if A::holds(dtype) {
        return;
    }
    with_float!(dtype, R => {
        for value in values {
            *value = A::narrow(R::narrow(value.widen()).widen());
        }
    });
}

/// The sum of `f(x)` over the elements, in f64.
pub(crate) fn sum_of(tensor: &Tensor<1>, f: impl Fn(f64) -> f64) -> Result<f64> {
    let tensor = host(tensor)?;
    Ok(with_float!(tensor.dtype(), T => sum(slice::<T>(&tensor), f)))
}

/// The largest `|x|`; NaN if any element is.
pub(crate) fn max_abs(tensor: &Tensor<1>) -> Result<f64> {
    let tensor = host(tensor)?;
    Ok(with_float!(tensor.dtype(), T => slice::<T>(&tensor)
        .iter()
        .fold(0.0, |m: f64, x| m.larger(x.widen().abs()))))
}

/// Sums eight lanes apart, so that the loop does not wait for each addition.
fn sum<T: HostFloat>(values: &[T], f: impl Fn(f64) -> f64) -> f64 {
    let mut lanes = [0.0; 8];
    let chunks = values.chunks_exact(8);
    let rest: f64 = chunks.remainder().iter().map(|x| f(x.widen())).sum();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += f(x.widen());
        }
    }
    lanes.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor<T: HostFloat>(values: Vec<T>) -> HostTensor {
        let len = values.len();
        host(&from_bytes(Bytes::from_elems(values), len, T::dtype())).unwrap()
    }

    fn reduced(contributions: &[Contribution<'_>], len: usize, reduction: Reduction) -> Vec<f32> {
        let mut out = vec![0f32; len];
        reduce(contributions, 0, &mut out, DType::F32, &reduction);
        out
    }

    #[test]
    fn the_mean_counts_absent_contributions_as_zeros() {
        let a = tensor(vec![2.0f32; 5000]);
        let mean = reduced(&[Some(&a), None], 5000, Reduction::mean(2));
        assert!(mean.iter().all(|&x| x == 1.0));
    }

    #[test]
    fn half_precision_means_neither_overflow_nor_underflow() {
        let large = tensor(vec![f16::from_f32(60000.0); 3]);
        let small = tensor(vec![f16::from_f32(6e-8); 3]);
        for (input, expected) in [(large, 60000.0f32), (small, 5.96e-8)] {
            let parts = vec![Some(&input); 4];
            let mut out = vec![0f32; 3];
            let reduction = Reduction::new(crate::GradientAverage::Mean, 4, DType::F16);
            reduce(&parts, 0, &mut out, DType::F16, &reduction);
            assert!((out[0] - expected).abs() <= expected, "{out:?}");
            assert!(out[0].is_finite());
        }
    }

    #[test]
    fn a_reduction_in_bf16_rounds_each_contribution() {
        let parts = [tensor(vec![1.001f32]), tensor(vec![1.001f32])];
        let mut out = vec![0f32];
        let parts: Vec<_> = parts.iter().map(Some).collect();
        let sum = Reduction::new(crate::GradientAverage::Sum, 2, DType::BF16);
        reduce(&parts, 0, &mut out, DType::BF16, &sum);
        assert_eq!(out, [2.0]);
    }

    #[test]
    fn the_largest_of_nan_and_a_number_is_nan() {
        let parts = [tensor(vec![f32::NAN, 1.0]), tensor(vec![3.0f32, f32::NAN])];
        let parts: Vec<_> = parts.iter().map(Some).collect();
        let max = reduced(&parts, 2, Reduction::plain(ReduceOp::Max));
        assert!(max.iter().all(|x| x.is_nan()));
    }

    #[test]
    fn a_cast_copy_rounds_to_nearest_even() {
        let src = tensor(vec![0.0f32, 257.0 / 256.0, 259.0 / 256.0]);
        let mut dst = [0u8; 4];
        copy_cast(&src, 1, &mut dst, DType::BF16);
        let values: &[bf16] = bytemuck::cast_slice(&dst);
        assert_eq!(values, [bf16::from_f32(1.0), bf16::from_f32(260.0 / 256.0)]);
    }
}
