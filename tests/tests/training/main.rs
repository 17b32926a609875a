//! What happens around a step: accumulation, clipping, precision, memory, copies, state dicts, failures.

mod accumulate;
mod clip;
mod comm;
mod failures;
mod lifecycle;
mod memory;
mod mixed;
mod sharding;
mod state;
mod unusual;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::prelude::*;
use burn_fsdp::{DeviceMesh, FsdpConfig, FsdpModule, FullyShard, ProcessGroup, Result};
use burn_fsdp_tests::models::Stack;
use burn_fsdp_tests::{Input, Values, device, gradients_of, shard_of};

/// Layers of the model that most tests here train, and its width.
const LAYERS: usize = 3;
const D: usize = 5;

/// Units of [`stack`]: the layers and the root.
const UNITS: usize = LAYERS + 1;

fn stack(device: &Device) -> Stack {
    Stack::new(LAYERS, D, device)
}

fn sharded(pg: &ProcessGroup, config: &FsdpConfig) -> Result<FsdpModule<Stack>> {
    stack(&device()).fully_shard(&DeviceMesh::shard(pg), config)
}

/// This rank's two samples of a step.
fn mine(pg: &ProcessGroup, step: usize) -> Input {
    Input::new(step, pg.rank() * 2..pg.rank() * 2 + 2, &device())
}

/// The whole batch of a step.
fn all(world: usize, step: usize) -> Input {
    Input::new(step, 0..world * 2, &device())
}

/// The gradients of a dense loss.
fn dense_grads<M: Module>(model: &M, loss: Tensor<1>) -> Values {
    gradients_of(model, &GradientsParams::from_grads(loss.backward(), model))
}

/// Asserts that `shards` are this rank's parts of `factor` times the dense gradients.
#[track_caller]
fn assert_shards_of(dense: &Values, shards: &Values, factor: f32, world: usize, rank: usize) {
    assert_close_shards(dense, shards, factor, world, rank, 5e-6);
}

#[track_caller]
fn assert_close_shards(
    dense: &Values,
    shards: &Values,
    factor: f32,
    world: usize,
    rank: usize,
    bound: f32,
) {
    assert_eq!(
        dense.keys().collect::<Vec<_>>(),
        shards.keys().collect::<Vec<_>>()
    );
    for (path, full) in dense {
        let (shape, want) = shard_of(full, 0, world, rank);
        let largest = full.1.iter().fold(0f32, |a, b| a.max(b.abs())) * factor.abs();
        let got = &shards[path];
        assert_eq!(got.0, shape, "rank {rank} {path}");
        for (i, (a, b)) in want.iter().zip(&got.1).enumerate() {
            let a = a * factor;
            assert!(
                (a - b).abs() <= bound * largest + 1e-8,
                "rank {rank} {path}[{i}]: dense {a:e}, sharded {b:e}"
            );
        }
    }
}

#[track_caller]
fn assert_close(want: &Values, got: &Values, bound: f32) {
    assert_eq!(
        want.keys().collect::<Vec<_>>(),
        got.keys().collect::<Vec<_>>()
    );
    for (path, (shape, values)) in want {
        assert_eq!(&got[path].0, shape, "{path}");
        for (i, (a, b)) in values.iter().zip(&got[path].1).enumerate() {
            assert!((a - b).abs() <= bound, "{path}[{i}]: want {a:e}, got {b:e}");
        }
    }
}

/// Puts a NaN into the gradient of the first parameter.
fn poison<M: Module>(model: &M, grads: &mut GradientsParams) {
    struct First<'a>(&'a mut GradientsParams, bool);
    impl ModuleVisitor for First<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if !self.1
                && let Some(grad) = self.0.remove::<D>(param.id)
            {
                self.0.register(param.id, grad.mul_scalar(f32::NAN));
                self.1 = true;
            }
        }
    }
    let mut first = First(grads, false);
    model.visit(&mut first);
    assert!(first.1, "there is a gradient to poison");
}
