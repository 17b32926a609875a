//! What one rank puts into a checkpoint.

use std::collections::BTreeMap;

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
use burn_fsdp::{DeviceMesh, FsdpModule, ShardSpec, dense_specs};
use ciborium::Value;
use regex::Regex;
use serde::Serialize;

use crate::host::{self, HostBytes};
use crate::optimizer::{OPTIMIZER, SCALARS};
use crate::piece::{Copies, Piece, State, drop_further_names};
use crate::stateful::Stateful;
use crate::{DcpError, Result, codec, optimizer};

/// The name of the state with each rank's own running statistics.
pub(crate) const RUNNING: &str = "model.running";
/// The prefix of a model's tensors in a checkpoint.
pub(crate) const MODEL: &str = "model.";
/// The name of the state of a learning rate scheduler.
pub(crate) const SCHEDULER: &str = "scheduler";

/// What one rank puts into a checkpoint: its shards, and values of any kind.
///
/// A snapshot takes no copy of a model: it holds the tensors, and they are read when they are written.
/// As Burn's tensors are values, later steps don't change what it holds; but while it lives, an
/// optimizer can't update them in place.
#[derive(Debug)]
pub struct Snapshot {
    pub(crate) step: u64,
    pub(crate) metrics: BTreeMap<String, f64>,
    pub(crate) pieces: BTreeMap<String, Piece>,
    pub(crate) states: BTreeMap<String, State>,
    optimizer: Option<OptimizerState>,
    excluded: Vec<Regex>,
    /// What was added twice.
    twice: Option<&'static str>,
}

impl Snapshot {
    /// An empty snapshot, taken after this training step.
    pub fn new(step: u64) -> Self {
        Self {
            step,
            metrics: BTreeMap::new(),
            pieces: BTreeMap::new(),
            states: BTreeMap::new(),
            optimizer: None,
            excluded: Vec::new(),
            twice: None,
        }
    }

    /// Adds the shards of a model, as `model.` and their paths. Parameters that are replicated, and
    /// shards of which a hybrid mesh holds copies, are written once, by ranks in turn. Running
    /// statistics, of which each rank has its own, are those of rank 0; each rank's are saved beside, for
    /// a run that goes on at the same world size.
    ///
    /// All ranks must call this, in the same order, though it does not communicate.
    pub fn model<M: Module>(mut self, model: &FsdpModule<M>) -> Self {
        model.sync_running_statistics();
        self.add_module(model, model.shard_specs(), copies_in(model.mesh()));
        self
    }

    /// Adds a model that is not sharded, and equal on all ranks.
    pub fn dense_model<M: Module>(mut self, model: &M) -> Self {
        self.add_module(model, dense_specs(model), Copies::Everywhere);
        self
    }

    fn add_module<M: Module>(
        &mut self,
        model: &M,
        mut specs: BTreeMap<String, ShardSpec>,
        shard_copies: Copies,
    ) {
        if self.pieces.keys().any(|name| name.starts_with(MODEL)) {
            self.twice = Some("model");
        }
        drop_further_names(&mut specs);
        let mut add = AddTensors {
            path: Vec::new(),
            specs,
            shard_copies,
            snapshot: self,
            running: BTreeMap::new(),
        };
        model.visit(&mut add);
        if !add.running.is_empty() {
            let running = codec::encode_value(RUNNING, &add.running);
            let running = running.expect("a map of names and bytes can be encoded");
            let state = State {
                is_of_rank: true,
                bytes: running,
            };
            self.states.insert(RUNNING.to_string(), state);
        }
    }

    /// Adds an optimizer's state for a sharded model: tensors as `optimizer.`, the parameter's path
    /// and the name that the optimizer gives them, sharded as the parameter is, and scalars. A copy of
    /// the state is made, as Burn hands it out.
    pub fn optimizer<M: Module>(self, optim: &ModuleOptimizer, model: &FsdpModule<M>) -> Self {
        self.add_optimizer(optim, model.shard_specs(), copies_in(model.mesh()))
    }

    /// Adds an optimizer's state for a model that is not sharded, and equal on all ranks.
    pub fn dense_optimizer<M: Module>(self, optim: &ModuleOptimizer, model: &M) -> Self {
        self.add_optimizer(optim, dense_specs(model), Copies::Everywhere)
    }

    fn add_optimizer(
        mut self,
        optim: &ModuleOptimizer,
        specs: BTreeMap<String, ShardSpec>,
        shard_copies: Copies,
    ) -> Self {
        let added = self.optimizer.replace(OptimizerState {
            record: optim.to_record(),
            specs,
            shard_copies,
        });
        if added.is_some() {
            self.twice = Some("optimizer");
        }
        self
    }

    /// Adds a learning rate scheduler, which is equal on all ranks.
    ///
    /// # Errors
    ///
    /// If its record can't be encoded.
    pub fn scheduler(self, scheduler: &ModuleLrScheduler) -> Result<Self> {
        let record = scheduler.to_record().into_bytes();
        let record = record.map_err(|error| bad_state(SCHEDULER, error))?;
        Ok(self.encoded(SCHEDULER, false, record.to_vec()))
    }

    /// Adds a value that is equal on all ranks; rank 0's is saved. Later values of a name replace
    /// earlier ones.
    ///
    /// # Errors
    ///
    /// If it can't be encoded, or the name is one of the library's own: `scheduler`, or one that begins
    /// with `model.` or `optimizer.`.
    pub fn state<T: Serialize + ?Sized>(self, name: &str, value: &T) -> Result<Self> {
        check_free(name)?;
        let bytes = codec::encode_value(name, value)?;
        Ok(self.encoded(name, false, bytes))
    }

    /// Adds a value of which each rank has its own.
    ///
    /// # Errors
    ///
    /// As [`state`](Self::state).
    pub fn rank_state<T: Serialize + ?Sized>(self, name: &str, value: &T) -> Result<Self> {
        check_free(name)?;
        let bytes = codec::encode_value(name, value)?;
        Ok(self.encoded(name, true, bytes))
    }

    /// Adds the state of something that has one, equal on all ranks.
    ///
    /// # Errors
    ///
    /// As [`state`](Self::state).
    pub fn stateful(self, name: &str, object: &impl Stateful) -> Result<Self> {
        self.state(name, &object.state())
    }

    /// Leaves out tensors and states in whose names a regular expression is found.
    ///
    /// # Errors
    ///
    /// [`DcpError::InvalidArgument`] if it is no regular expression.
    pub fn without(mut self, pattern: &str) -> Result<Self> {
        self.excluded.push(crate::load::parse(pattern)?);
        Ok(self)
    }

    /// Adds a figure by which checkpoints can be chosen; rank 0's counts.
    pub fn metric(mut self, name: &str, value: f64) -> Self {
        self.metrics.insert(name.to_string(), value);
        self
    }

    pub(crate) fn encoded(mut self, name: &str, is_of_rank: bool, bytes: Vec<u8>) -> Self {
        let state = State { is_of_rank, bytes };
        self.states.insert(name.to_string(), state);
        self
    }

    /// Leaves this rank only what it is to write, in the order of names.
    ///
    /// Ranks decide alike without a word, because they hold the same names and shapes. Where they
    /// don't, chunks fail to tile their tensors, and the save is refused.
    pub(crate) fn assign(&mut self, rank: usize, world_size: usize) {
        let excluded = |name: &String| self.excluded.iter().any(|pattern| pattern.is_match(name));
        self.pieces.retain(|name, _| !excluded(name));
        self.states.retain(|name, _| !excluded(name));
        let mut load = vec![0u64; world_size];
        let mut everywhere: Vec<(&String, u64)> = self
            .pieces
            .iter()
            .filter(|(_, piece)| piece.copies == Copies::Everywhere)
            .map(|(name, piece)| (name, piece.bytes()))
            .collect();
        // The largest first, each to the rank that has least.
        everywhere.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
        let mut writers = BTreeMap::new();
        for (name, bytes) in everywhere {
            let least = (0..world_size).min_by_key(|&r| (load[r], r)).unwrap_or(0);
            load[least] += bytes;
            writers.insert(name.clone(), least);
        }
        let mut turn = 0;
        for (name, piece) in &mut self.pieces {
            let writes = match piece.copies {
                Copies::Everywhere => writers[name] == rank,
                Copies::RankZero => rank == 0,
                Copies::Replicas { index, count } => {
                    turn += 1;
                    turn % count == index
                }
            };
            if !writes {
                piece.leave_to_others();
            }
        }
        self.states.retain(|_, state| state.is_of_rank || rank == 0);
    }

    /// Reads all that this rank writes to the host, so that nothing refers to a device any more.
    pub(crate) fn stage(&mut self) {
        let wanted = |piece: &&mut Piece| !piece.is_on_host && !piece.region.is_empty();
        for piece in self.pieces.values_mut().filter(wanted) {
            let draw =
                std::mem::replace(&mut piece.data, Box::new(|| unreachable!("being staged")));
            let data = draw();
            piece.data = Box::new(move || data);
            piece.is_on_host = true;
        }
    }

    /// Refuses what would be saved in part only.
    pub(crate) fn check(&self) -> Result<()> {
        match self.twice {
            None => Ok(()),
            Some(what) => Err(DcpError::argument(format!(
                "a snapshot has one {what}, and two were added; save the other to a place of its own"
            ))),
        }
    }

    /// Takes an optimizer's record apart, and leaves this rank what it is to write of it. Apart from
    /// the rest, as it takes time that a save in the background should not take from training.
    pub(crate) fn take_optimizer_apart(&mut self, rank: usize, world_size: usize) -> Result<()> {
        let Some(OptimizerState {
            record,
            specs,
            shard_copies,
        }) = self.optimizer.take()
        else {
            return Ok(());
        };
        let mut parts = Self::new(self.step);
        let (pieces, scalars) = optimizer::take_apart(record, specs, shard_copies)?;
        parts.pieces = pieces;
        parts.states.insert(SCALARS.to_string(), scalars);
        parts.excluded = self.excluded.clone();
        parts.assign(rank, world_size);
        self.pieces.append(&mut parts.pieces);
        self.states.append(&mut parts.states);
        Ok(())
    }
}

/// An optimizer's record, and what it is of.
struct OptimizerState {
    record: OptimizerRecord,
    specs: BTreeMap<String, ShardSpec>,
    shard_copies: Copies,
}

impl std::fmt::Debug for OptimizerState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OptimizerState")
            .field("record", &self.record)
            .finish_non_exhaustive()
    }
}

/// Which of the copies of a shard this rank holds.
fn copies_in(mesh: &DeviceMesh) -> Copies {
    Copies::Replicas {
        index: mesh.replicate_rank(),
        count: mesh.replicate_size(),
    }
}

fn check_free(name: &str) -> Result<()> {
    let is_taken = name == SCHEDULER || name.starts_with(MODEL) || name.starts_with(OPTIMIZER);
    if is_taken {
        let detail = format!("the name \"{name}\" is the library's own; choose another");
        return Err(DcpError::argument(detail));
    }
    Ok(())
}

fn bad_state(name: &str, error: impl ToString) -> DcpError {
    DcpError::BadState {
        name: name.to_string(),
        detail: error.to_string(),
    }
}

/// Adds a module's tensors to a snapshot.
struct AddTensors<'a> {
    path: Vec<String>,
    specs: BTreeMap<String, ShardSpec>,
    shard_copies: Copies,
    snapshot: &'a mut Snapshot,
    /// This rank's running statistics, little-endian.
    running: BTreeMap<String, Value>,
}

impl AddTensors<'_> {
    fn add(
        &mut self,
        dtype: DType,
        view: Option<HostBytes>,
        read: impl Fn() -> TensorData + Send + 'static,
    ) {
        let path = self.path.join(".");
        let Some(spec) = self.specs.get(&path) else {
            return;
        };
        if spec.is_buffer {
            let bytes = read().into_parts().0.to_vec();
            self.running.insert(path.clone(), Value::Bytes(bytes));
        }
        let is_padded = spec.sizes != spec.stored_shape();
        let view = if is_padded { None } else { view };
        let owned = spec.clone();
        let is_on_host = view.is_some();
        let data = move || view.unwrap_or_else(|| host::owned(owned.to_local(read())));
        let piece = Piece::new(spec, dtype, self.shard_copies, is_on_host, data);
        self.snapshot.pieces.insert(format!("{MODEL}{path}"), piece);
    }
}

impl ModuleVisitor for AddTensors<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.val().without_autodiff();
        let view = host::view(&tensor);
        self.add(tensor.dtype(), view, move || tensor.to_data());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let tensor = param.val();
        self.add(tensor.dtype(), None, move || tensor.to_data());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        let tensor = param.val();
        self.add(tensor.dtype(), None, move || tensor.to_data());
    }
}
