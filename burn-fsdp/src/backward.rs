//! From a loss to this rank's shard gradients.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use crate::path::{PathStack, follow_path};
use crate::schedule::UnitGradient;
use crate::unshard::or_panic;
use crate::{FsdpModule, Result};

impl<M: Module> FsdpModule<M> {
    /// Computes the gradients of `loss` and reduces them over the ranks: what it returns are this
    /// rank's shards, under the parameters' ids.
    ///
    /// All ranks must call this. Each unit's gradients are reduced as soon as backward has them
    /// all. Those of units with parameters that this forward did not use, on all ranks or on some,
    /// are reduced at the end, with zeros where a rank has none; a parameter used on no rank gets
    /// no gradient. Two small messages between the ranks see to that.
    ///
    /// `GradientsParams::from_grads(loss.backward(), &model)` works too if every trainable
    /// parameter was used on every rank. Without gradient sync nothing is returned.
    ///
    /// # Panics
    ///
    /// If the group fails; see [`try_backward`](Self::try_backward).
    pub fn backward<const D: usize>(&self, loss: Tensor<D>) -> GradientsParams {
        or_panic(self.state.begin_backward());
        let grads = loss.backward();
        // The graph is gone with the loss; what is left of it would only hold memory.
        drop(loss);
        let mut grads = GradientsParams::from_grads(grads, self);
        self.add(&mut grads, or_panic(self.state.finish_backward()));
        grads
    }

    /// As [`backward`](Self::backward), but a failure of the group is an error.
    ///
    /// # Errors
    ///
    /// The cause of the failure, equal on all ranks.
    pub fn try_backward<const D: usize>(&self, loss: Tensor<D>) -> Result<GradientsParams> {
        let backward = AssertUnwindSafe(|| self.backward(loss));
        catch_unwind(backward).or_else(|panic| match self.mesh().group().engine().failure() {
            Some(cause) => Err(cause),
            None => resume_unwind(panic),
        })
    }

    fn add(&self, grads: &mut GradientsParams, gradients: Vec<UnitGradient>) {
        if gradients.is_empty() {
            return;
        }
        let mut sums = HashMap::<_, Tensor<1>>::new();
        for UnitGradient { unit, reduced } in gradients {
            let place = (unit, reduced.member);
            let sum = match sums.remove(&place) {
                Some(earlier) => earlier + reduced.gradient,
                None => reduced.gradient,
            };
            sums.insert(place, sum);
        }
        self.visit(&mut AddGradients {
            module: self,
            path: PathStack::default(),
            gradients: sums,
            grads,
        });
    }
}

struct AddGradients<'a, M> {
    module: &'a FsdpModule<M>,
    path: PathStack,
    gradients: HashMap<(usize, usize), Tensor<1>>,
    grads: &'a mut GradientsParams,
}

impl<M> ModuleVisitor for AddGradients<'_, M> {
    follow_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(index) = self.module.plan().find(&self.path.join()) else {
            return;
        };
        let Some(gradient) = self.gradients.remove(&(index.unit, index.member)) else {
            return;
        };
        let gradient = gradient.reshape::<D, _>(param.shape());
        let gradient = match self.grads.remove::<D>(param.id) {
            Some(earlier) => earlier + gradient,
            None => gradient,
        };
        self.grads.register(param.id, gradient);
    }
}
