//! The norm of a sharded gradient, and clipping by it.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use crate::comm::Call;
use crate::config::NonFinite;
use crate::path::{PathStack, follow_path};
use crate::plan::ShardingPlan;
use crate::{FsdpError, FsdpModule, NormType, Result, norm};

/// Keeps a gradient of norm zero from being divided by zero, as PyTorch does.
const EPSILON: f64 = 1e-6;

impl<M: Module> FsdpModule<M> {
    /// The norm of the full gradient, of which `grads` holds this rank's shards. The same number on
    /// all ranks.
    ///
    /// All ranks must call this, in the same order. Replicated parameters count once, padding and
    /// ignored parameters not at all. Summed in f64.
    ///
    /// # Errors
    ///
    /// A failure of the group.
    pub fn grad_norm(&self, grads: &GradientsParams, norm: NormType) -> Result<f64> {
        self.norm(grads, norm, None)
    }

    fn norm(&self, grads: &GradientsParams, norm: NormType, max_norm: Option<f64>) -> Result<f64> {
        let mut local = LocalNorm {
            plan: self.plan(),
            path: PathStack::default(),
            grads,
            counts_replicated: self.mesh().shard_rank() == 0,
            seen: HashSet::new(),
            flat: Vec::new(),
        };
        self.visit(&mut local);
        let own = norm::before_root(norm, &local.flat)?;
        let message = own.to_le_bytes().to_vec();
        let subject = match max_norm {
            Some(max_norm) => format!("the gradient norm to clip at {max_norm}"),
            None => format!("the gradient norm ({norm:?})"),
        };
        let call = Call::new("agreement", subject).with_detail(self.state.context.module);
        let all = self.mesh().group().engine().exchange(call, message)?;
        let parts = all.iter().map(|bytes| {
            let bytes = bytes.as_slice().try_into();
            f64::from_le_bytes(bytes.expect("every rank sends one f64"))
        });
        // Copies of the model hold equal gradients, so the first speaks for all. But should one
        // hold a NaN, no copy may step.
        let is_heard =
            |(rank, part): &(usize, f64)| *rank < self.mesh().shard_size() || !part.is_finite();
        let total = parts
            .enumerate()
            .filter(is_heard)
            .fold(0.0, |total, (_, part)| norm::join(norm, total, part));
        Ok(match norm {
            NormType::L2 => total.sqrt(),
            NormType::L1 | NormType::Inf => total,
        })
    }

    /// Scales the gradients so that the norm of the full gradient is at most `max_norm`; the
    /// gradients, and the norm before. The same factor on all ranks.
    ///
    /// All ranks must call this, in the same order. The factor is
    /// `min(1, max_norm / (norm + 1e-6))`, as in PyTorch. Ignored parameters are neither counted nor
    /// scaled. On a norm that is NaN or infinite every rank does what
    /// [`NonFinite`](crate::NonFinite) says.
    ///
    /// # Errors
    ///
    /// [`FsdpError::NonFiniteNorm`] on every rank, unless the policy is to skip; a `max_norm` that
    /// is not positive; a failure of the group.
    pub fn clip_grad_norm(
        &self,
        mut grads: GradientsParams,
        max_norm: f64,
    ) -> Result<(GradientsParams, f64)> {
        if max_norm.is_nan() || max_norm <= 0.0 {
            return Err(FsdpError::argument(format!(
                "max_norm must be positive, not {max_norm}"
            )));
        }
        let norm = self.norm(&grads, NormType::L2, Some(max_norm))?;
        if !norm.is_finite() {
            return match self.config.non_finite {
                NonFinite::Error => Err(FsdpError::NonFiniteNorm { norm }),
                NonFinite::Skip => Ok((GradientsParams::new(), norm)),
            };
        }
        let factor = max_norm / (norm + EPSILON);
        if factor < 1.0 {
            let mut take = TakeGradients {
                plan: self.plan(),
                path: PathStack::default(),
                grads: &mut grads,
                taken: Vec::new(),
            };
            self.visit(&mut take);
            let (ids, flat): (Vec<_>, Vec<_>) = take.taken.into_iter().unzip();
            let scaled = ids.into_iter().zip(norm::scale(flat, factor)?);
            self.visit(&mut PutGradients {
                grads: &mut grads,
                flat: scaled.collect(),
            });
        }
        Ok((grads, norm))
    }
}

/// The gradients that this rank counts.
struct LocalNorm<'a> {
    plan: &'a ShardingPlan,
    path: PathStack,
    grads: &'a GradientsParams,
    counts_replicated: bool,
    /// A gradient is its id's, and several parameters may have one id.
    seen: HashSet<ParamId>,
    flat: Vec<Tensor<1>>,
}

impl ModuleVisitor for LocalNorm<'_> {
    follow_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(index) = self.plan.find(&self.path.join()) else {
            return;
        };
        let placement = self.plan.param(index.unit, index.member).placement;
        let counts = self.counts_replicated || placement != crate::Placement::Replicate;
        if !counts || !self.seen.insert(param.id) {
            return;
        }
        let Some(gradient) = self.grads.get::<D>(param.id) else {
            return;
        };
        let len = gradient.shape().num_elements();
        self.flat.push(gradient.inner().reshape([len]));
    }
}

/// Takes the gradients of all sharded and replicated parameters.
struct TakeGradients<'a> {
    plan: &'a ShardingPlan,
    path: PathStack,
    grads: &'a mut GradientsParams,
    taken: Vec<(ParamId, Tensor<1>)>,
}

impl ModuleVisitor for TakeGradients<'_> {
    follow_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.plan.find(&self.path.join()).is_none() {
            return;
        }
        if let Some(gradient) = self.grads.remove::<D>(param.id) {
            let len = gradient.shape().num_elements();
            self.taken.push((param.id, gradient.inner().reshape([len])));
        }
    }
}

/// Puts gradients back in the shapes of their parameters.
struct PutGradients<'a> {
    grads: &'a mut GradientsParams,
    flat: HashMap<ParamId, Tensor<1>>,
}

impl ModuleVisitor for PutGradients<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(flat) = self.flat.remove(&param.id) {
            let gradient = flat.reshape::<D, _>(param.shape());
            self.grads.register(param.id, gradient);
        }
    }
}
