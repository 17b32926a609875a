//! Parameters and gradients as plain numbers by path.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::prelude::*;
use burn_fsdp::StateDict;

/// Shape and values by path.
pub type Values = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

struct Collect<'a> {
    path: Vec<String>,
    saved: bool,
    grads: Option<&'a GradientsParams>,
    out: Values,
}

impl ModuleVisitor for Collect<'_> {
    fn enter_module(&mut self, name: &str, _kind: &str) {
        self.path.push(name.to_string());
    }
    fn exit_module(&mut self, _name: &str, _kind: &str) {
        self.path.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = match self.grads {
            Some(grads) => grads.get::<D>(param.id),
            None if self.saved => Some(param.transform_for_save().val()),
            None => Some(param.val()),
        };
        if let Some(tensor) = tensor {
            let dims = tensor.dims().to_vec();
            let values = tensor.try_into_vec_as::<f32>().expect("readable");
            self.out.insert(self.path.join("."), (dims, values));
        }
    }
}

/// Every float value that the module shows to a visitor: of a sharded module, this rank's shards.
pub fn local_values<M: Module>(module: &M) -> Values {
    let mut collect = Collect {
        path: vec![],
        saved: false,
        grads: None,
        out: Values::new(),
    };
    module.visit(&mut collect);
    collect.out
}

/// Every float value of a dense module in the layout in which Burn records it, which is that of a full state
/// dict: a column-layout `Linear` is transposed.
pub fn saved_values<M: Module>(module: &M) -> Values {
    let mut collect = Collect {
        path: vec![],
        saved: true,
        grads: None,
        out: Values::new(),
    };
    module.visit(&mut collect);
    collect.out
}

/// Every gradient by the path of its parameter.
pub fn gradients_of<M: Module>(module: &M, grads: &GradientsParams) -> Values {
    let mut collect = Collect {
        path: vec![],
        saved: false,
        grads: Some(grads),
        out: Values::new(),
    };
    module.visit(&mut collect);
    collect.out
}

/// A full state dict as plain numbers.
pub fn state_values(state: &StateDict) -> Values {
    state
        .iter()
        .map(|(path, data)| {
            let values = data.try_to_vec_as::<f32>().expect("a float");
            (path.clone(), (data.shape().to_vec(), values))
        })
        .collect()
}

/// What a rank holds of a tensor sharded on `dim`: rows [rank * ceil(n / world), ..), zero padded.
pub fn shard_of(
    full: &(Vec<usize>, Vec<f32>),
    dim: usize,
    world: usize,
    rank: usize,
) -> (Vec<usize>, Vec<f32>) {
    let (shape, values) = full;
    let n = shape[dim];
    let per = n.div_ceil(world);
    let outer: usize = shape[..dim].iter().product();
    let inner: usize = shape[dim + 1..].iter().product();
    let mut out_shape = shape.clone();
    out_shape[dim] = per;
    let mut out = Vec::with_capacity(outer * per * inner);
    for o in 0..outer {
        for row in rank * per..(rank + 1) * per {
            if row < n {
                let at = (o * n + row) * inner;
                out.extend_from_slice(&values[at..at + inner]);
            } else {
                out.extend(std::iter::repeat_n(0.0, inner));
            }
        }
    }
    (out_shape, out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oracle_cuts_rows_as_torch_chunk_does_and_pads_with_zeros() {
        let full = (vec![5, 2], (0..10).map(|x| x as f32 + 1.0).collect());
        assert_eq!(shard_of(&full, 0, 4, 0), (vec![2, 2], vec![1., 2., 3., 4.]));
        assert_eq!(
            shard_of(&full, 0, 4, 2),
            (vec![2, 2], vec![9., 10., 0., 0.])
        );
        assert_eq!(shard_of(&full, 0, 4, 3), (vec![2, 2], vec![0.; 4]));
        assert_eq!(
            shard_of(&full, 1, 2, 1),
            (vec![5, 1], vec![2., 4., 6., 8., 10.])
        );
    }
}
