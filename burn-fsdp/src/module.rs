//! [`FsdpModule`]: a sharded module that looks like the module it shards.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Bool, Device, Int, Tensor};

use crate::comm::CollectiveCounts;
use crate::full::{gather, lift};
use crate::memory::MemoryStats;
use crate::param::{CopyScope, refuse_move, strip};
use crate::path::{PathStack, follow_path};
use crate::plan::ShardingPlan;
use crate::schedule::{Event, Phase};
use crate::state::FsdpState;
use crate::{DeviceMesh, FsdpConfig, FsdpError, Result};

/// A module of which each rank keeps its shard. Made by
/// [`fully_shard`](crate::FullyShard::fully_shard).
///
/// It dereferences to the module, so the module's own methods and fields are there. A field's
/// `shape()` and `dims()` are those of the full parameter; its value is a placeholder, and
/// `Param::val()` is the full parameter, for which **all ranks must ask in the same order**.
///
/// As a [`Module`] it shows what this rank holds: visitors and mappers, and so optimizers,
/// gradients and records, meet each shard under its parameter's path, id and rank. Only
/// [`num_params`](Module::num_params) counts full parameters. Clones, and what
/// [`valid`](Module::valid) returns, are independent of the original; all ranks must make them, in
/// the same order. A clone of a part of the module can be used but not changed. It cannot be moved to another
/// device: [`to_device`](Module::to_device) and [`fork`](Module::fork) panic if asked to.
pub struct FsdpModule<M> {
    inner: M,
    pub(crate) state: Arc<FsdpState>,
    pub(crate) config: FsdpConfig,
}

impl<M> FsdpModule<M> {
    pub(crate) fn new(inner: M, state: Arc<FsdpState>, config: FsdpConfig) -> Self {
        Self {
            inner,
            state,
            config,
        }
    }

    /// The module with its placeholders, without counting as a call of it.
    pub(crate) fn inner(&self) -> &M {
        &self.inner
    }

    /// The same sharded module after `change` of what is inside.
    pub(crate) fn with_inner(self, change: impl FnOnce(M) -> M) -> Self {
        Self {
            inner: change(self.inner),
            ..self
        }
    }

    /// What was decided for each parameter.
    pub fn plan(&self) -> &ShardingPlan {
        &self.state.plan
    }

    /// The mesh that the module is sharded over.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.state.context.mesh
    }

    // ---- settings

    /// Whether backward reduces gradients (it does by default). Without, full gradients are kept
    /// unreduced, in the reduce dtype, and the next backward with sync reduces the sum: less
    /// communication, and the memory of a full gradient on each rank. Must be equal on all ranks.
    pub fn set_requires_gradient_sync(&self, sync: bool) {
        self.state.set_switches(|s| s.gradient_sync = sync);
    }

    /// Turns gradient sync off for as long as the guard lives. See
    /// [`set_requires_gradient_sync`](Self::set_requires_gradient_sync).
    pub fn no_sync(&self) -> NoSyncGuard {
        self.state.set_switches(|s| s.no_sync_guards += 1);
        NoSyncGuard {
            state: self.state.clone(),
        }
    }

    /// Whether backward all-reduces over the replicate dimension of a hybrid mesh (it does by
    /// default). Without, gradients are only reduce-scattered and kept for the next backward with
    /// all-reduce, and backward returns none. Must be equal on all ranks.
    pub fn set_requires_all_reduce(&self, all_reduce: bool) {
        self.state.set_switches(|s| s.all_reduce = all_reduce);
    }

    /// Whether backward reshards (it does by default). Without, units stay unsharded until their
    /// next forward, which saves an all-gather for each micro-batch.
    pub fn set_reshard_after_backward(&self, reshard: bool) {
        self.state
            .set_switches(|s| s.reshard_after_backward = reshard);
    }

    /// Gathers these units while `unit` is used in forward, instead of the one that followed it
    /// before. Must be equal on all ranks.
    ///
    /// # Errors
    ///
    /// [`FsdpError::UnknownUnit`].
    pub fn set_forward_prefetch(&self, unit: &str, units: &[&str]) -> Result<()> {
        self.set_prefetch(Phase::Forward, unit, units)
    }

    /// As [`set_forward_prefetch`](Self::set_forward_prefetch), for backward.
    ///
    /// # Errors
    ///
    /// [`FsdpError::UnknownUnit`].
    pub fn set_backward_prefetch(&self, unit: &str, units: &[&str]) -> Result<()> {
        self.set_prefetch(Phase::Backward, unit, units)
    }

    fn set_prefetch(&self, phase: Phase, unit: &str, ahead: &[&str]) -> Result<()> {
        let unit = self.plan().unit_index(unit)?;
        let ahead = ahead.iter().map(|name| self.plan().unit_index(name));
        let ahead = ahead.collect::<Result<_>>()?;
        self.state.set_prefetch(phase, unit, ahead);
        Ok(())
    }

    // ---- units by hand

    /// Unshards a unit now. It is resharded when another unit is used, or by
    /// [`reshard`](Self::reshard). All ranks must call this, in the same order.
    ///
    /// # Errors
    ///
    /// [`FsdpError::UnknownUnit`], or a failure of the group.
    pub fn unshard(&self, unit: &str) -> Result<()> {
        self.state.unshard(self.plan().unit_index(unit)?)
    }

    /// Reshards every unit. Does not communicate.
    pub fn reshard(&self) {
        self.state.reshard_all();
    }

    // ---- figures

    /// The memory this rank holds for the module's parameters.
    pub fn memory(&self) -> MemoryStats {
        self.state.memory()
    }

    /// Makes [`memory`](Self::memory) report the peak from now on.
    pub fn reset_peak_memory(&self) {
        self.state.context.memory.reset_peak();
    }

    /// The collectives made for this module. Between ranks that are one there are none.
    pub fn collectives(&self) -> CollectiveCounts {
        self.state.collectives()
    }

    /// Whether to note what units do. Off by default.
    pub fn record_events(&self, record: bool) {
        self.state.record_events(record);
    }

    /// What units did since events were turned on or last taken.
    pub fn take_events(&self) -> Vec<Event> {
        self.state.take_events()
    }
}

impl<M: Module> FsdpModule<M> {
    /// Applies an optimizer to the shards, after checking that this is safe.
    ///
    /// All ranks must call this: none changes its shards before all have come here, so that no rank
    /// gathers from shards of two steps. `optim.step(lr, model, grads)` does the same without the
    /// checks, and without waiting. On an error the model is gone;
    /// [`check_step`](Self::check_step) tells beforehand.
    ///
    /// # Errors
    ///
    /// As [`check_step`](Self::check_step), or a failure of the group.
    pub fn step(
        self,
        optim: &mut ModuleOptimizer,
        lr: impl Into<ModuleLearningRate>,
        grads: GradientsParams,
    ) -> Result<Self> {
        self.check_step(optim)?;
        self.mesh().group().barrier()?;
        Ok(optim.step(lr, self, grads))
    }

    /// Whether an optimizer may step now. Does not communicate.
    ///
    /// # Errors
    ///
    /// [`FsdpError::OptimizerClipsGradients`], [`FsdpError::IncompleteUnit`] after a plain
    /// `loss.backward()` that left parameters out, [`FsdpError::UnsyncedGradients`], or the cause of
    /// the group's failure.
    pub fn check_step(&self, optim: &ModuleOptimizer) -> Result<()> {
        if let Some(cause) = self.mesh().group().engine().failure() {
            return Err(cause);
        }
        if optim.has_gradient_clipping() {
            return Err(FsdpError::OptimizerClipsGradients);
        }
        self.state.check_complete()
    }

    /// Folds the last update into every running statistic, as Burn does when the next comes. State
    /// dicts and checkpoints begin with it. Does not communicate, but makes a copy for a moment, so all
    /// ranks must call this, in the same order.
    pub fn sync_running_statistics(&self) {
        if self.plan().has_buffers() {
            // It is what Burn does before evaluation, and the statistics are shared with the copy.
            drop(self.valid());
        }
    }

    /// The dense module, with full parameters in their original dtype on every rank, trained or
    /// frozen as they are.
    ///
    /// All ranks must call this, in the same order. Parameters are gathered one after another.
    ///
    /// # Errors
    ///
    /// A failure of the group.
    pub fn into_dense(self) -> Result<M> {
        let mut restore = Restore {
            state: &self.state,
            trained: HashSet::new(),
            path: PathStack::default(),
            error: None,
        };
        self.inner.visit(&mut restore);
        let dense = strip(self.inner).map(&mut restore);
        restore.error.map_or(Ok(dense), Err)
    }

    /// Gives placeholders the ids of their shards, after shards have been loaded with new ones.
    fn with_ids_of_shards(self) -> Self {
        let mut ids = CollectIds::default();
        self.visit(&mut ids);
        let inner = self.inner.map(&mut SetIds {
            ids: ids.ids,
            path: PathStack::default(),
        });
        Self { inner, ..self }
    }
}

/// Holds gradient sync off until it is dropped. See [`FsdpModule::no_sync`].
#[derive(Debug)]
#[must_use = "gradient sync is off only as long as the guard lives"]
pub struct NoSyncGuard {
    state: Arc<FsdpState>,
}

impl Drop for NoSyncGuard {
    fn drop(&mut self) {
        self.state.set_switches(|s| s.no_sync_guards -= 1);
    }
}

impl<M> Deref for FsdpModule<M> {
    type Target = M;

    fn deref(&self) -> &M {
        self.state.module_called();
        &self.inner
    }
}

impl<M: Module> Clone for FsdpModule<M> {
    fn clone(&self) -> Self {
        self.copy(M::clone)
    }
}

impl<M: Module> FsdpModule<M> {
    /// A module of its own, whose parameters `copy` makes.
    fn copy(&self, copy: impl FnOnce(&M) -> M) -> Self {
        let state = self.state.for_copy();
        let scope = CopyScope::enter(&self.state, &state);
        let inner = copy(&self.inner);
        drop(scope);
        Self {
            inner,
            state,
            config: self.config.clone(),
        }
    }
}

impl<M: fmt::Debug> fmt::Debug for FsdpModule<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FsdpModule")
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}

/// The module, then its units and the placement of each parameter.
impl<M: fmt::Display> fmt::Display for FsdpModule<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mesh = self.mesh();
        writeln!(f, "{}", self.inner)?;
        writeln!(
            f,
            "sharded over {} ranks x {} copies; this is rank {}",
            mesh.shard_size(),
            mesh.replicate_size(),
            mesh.group().rank()
        )?;
        write!(f, "{}", self.plan())
    }
}

impl<M: Module> Module for FsdpModule<M> {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.inner.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        self.to_device(device)
    }

    fn to_device(self, device: &Device) -> Self {
        refuse_move(&self.state.context.compute_device, device);
        self
    }

    fn train(self) -> Self {
        Self {
            inner: Module::train(self.inner),
            ..self
        }
    }

    fn valid(&self) -> Self {
        self.copy(M::valid)
    }

    /// Shards are no adapter to fold in; see [`into_dense`](FsdpModule::into_dense).
    fn materialize(self) -> Self {
        self
    }

    fn num_params(&self) -> usize {
        let mut count = CountFull::default();
        self.inner.visit(&mut count);
        count.elements
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.inner.visit(&mut ShowShards {
            plan: self.plan(),
            path: PathStack::default(),
            to: visitor,
        });
    }

    fn map<P: ModuleMapper>(self, mapper: &mut P) -> Self {
        let plan = self.state.plan.clone();
        let inner = self.inner.map(&mut ShowShards {
            plan: &plan,
            path: PathStack::default(),
            to: mapper,
        });
        let mapped = Self { inner, ..self };
        if mapped.state.take_new_ids() {
            return mapped.with_ids_of_shards();
        }
        mapped
    }
}

/// Shows a visitor or mapper each shard in the place of its placeholder.
struct ShowShards<'a, T> {
    plan: &'a ShardingPlan,
    path: PathStack,
    to: &'a mut T,
}

impl<T> ShowShards<'_, T> {
    fn is_placeholder(&self) -> bool {
        !self.path.is_inside_shard() && self.plan.find(&self.path.join()).is_some()
    }
}

impl<V: ModuleVisitor> ModuleVisitor for ShowShards<'_, V> {
    fn enter_module(&mut self, name: &str, container: &str) {
        if self.path.enter(name, container) {
            self.to.enter_module(name, container);
        }
    }

    fn exit_module(&mut self, name: &str, container: &str) {
        if self.path.exit(name, container) {
            self.to.exit_module(name, container);
        }
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.is_placeholder() {
            self.to.visit_float(param);
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.to.visit_int(param);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.to.visit_bool(param);
    }

    fn visit_flag(&mut self, flag: &Param<burn::module::Flag>) {
        self.to.visit_flag(flag);
    }
}

impl<P: ModuleMapper> ModuleMapper for ShowShards<'_, P> {
    fn enter_module(&mut self, name: &str, container: &str) {
        if self.path.enter(name, container) {
            self.to.enter_module(name, container);
        }
    }

    fn exit_module(&mut self, name: &str, container: &str) {
        if self.path.exit(name, container) {
            self.to.exit_module(name, container);
        }
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.is_placeholder() {
            param
        } else {
            self.to.map_float(param)
        }
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        self.to.map_int(param)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        self.to.map_bool(param)
    }

    fn map_flag(&mut self, flag: Param<burn::module::Flag>) -> Param<burn::module::Flag> {
        self.to.map_flag(flag)
    }
}

#[derive(Default)]
struct CountFull {
    path: PathStack,
    elements: usize,
}

impl ModuleVisitor for CountFull {
    follow_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.path.is_inside_shard() {
            self.elements += param.lazy_shape().num_elements();
        }
    }
}

/// Puts full parameters in the place of placeholders.
struct Restore<'a> {
    state: &'a FsdpState,
    /// Paths of the shards that are trained.
    trained: HashSet<String>,
    path: PathStack,
    error: Option<FsdpError>,
}

impl ModuleVisitor for Restore<'_> {
    follow_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.path.is_inside_shard() && Module::train(param.clone()).is_require_grad() {
            self.trained.insert(self.path.join());
        }
    }
}

impl ModuleMapper for Restore<'_> {
    follow_path!();

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join();
        let Some(index) = self.state.plan.find(&path).filter(|_| self.error.is_none()) else {
            return param;
        };
        match gather(self.state, &path, index) {
            Ok(full) => param
                .map(|placeholder| {
                    let full = full.to_device(&self.state.context.compute_device);
                    let shape = placeholder.shape();
                    lift(full.reshape::<D, _>(shape), &placeholder.device())
                })
                .set_require_grad(self.trained.contains(&path)),
            Err(error) => {
                self.error = Some(error);
                param
            }
        }
    }
}

#[derive(Default)]
struct CollectIds {
    path: PathStack,
    ids: HashMap<String, ParamId>,
}

impl ModuleVisitor for CollectIds {
    follow_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.ids.insert(self.path.join(), param.id);
    }
}

struct SetIds {
    ids: HashMap<String, ParamId>,
    path: PathStack,
}

impl ModuleMapper for SetIds {
    follow_path!();

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.ids.get(&self.path.join()) {
            Some(&id) if !self.path.is_inside_shard() && id != param.id => {
                let (_, value, mapper) = param.consume();
                Param::from_mapped_value(id, value, mapper)
            }
            _ => param,
        }
    }
}
