//! Process groups: how ranks talk, whatever carries the bytes.
//!
//! [`ProcessGroup`] is one rank's handle. It knows flat tensors and their geometry, and no module.
//! An [`Engine`] moves the data; `local` is the one for ranks that are threads of one process,
//! `process` the one for ranks that are processes, over a [`Wire`](wire::Wire) such as `tcp`.
//!
//! # Note: no silent hang
//!
//! Collectives of a group are matched by position. Each carries a [`Call`]; if two ranks issue
//! different calls at one position, or all wait for each other in different groups, all ranks get
//! the same error. A rank that fails makes every other return its cause at the next collective, or
//! at once if it waits in one. Every wait has a timeout.

mod buffer;
#[cfg(feature = "cube")]
mod bundle;
mod cause;
#[cfg(feature = "cube")]
pub(crate) mod cube;
#[cfg(feature = "cube")]
mod cube_gather;
#[cfg(feature = "cube")]
mod cube_reduce;
mod env;
mod expected;
mod from_env;
mod gather;
pub(crate) mod host;
mod launch;
mod local;
mod local_wire;
mod message;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "cube")]
mod nccl;
mod open_gathers;
mod part;
mod process;
mod rendezvous;
mod tcp;
#[cfg(test)]
mod testing;
mod wire;

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use burn::tensor::{DType, Device, Tensor};

pub use from_env::launch_from_env;
pub use launch::{LaunchConfig, launch};

use self::wire::Wire;
use crate::memory::{MemoryCounter, MemoryGuard};
use crate::placement::ShardLayout;
use crate::reduction::{ReduceOp, Reduction};
use crate::{FsdpError, GradientAverage, Placement, Result};

/// What identifies a collective across ranks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Call {
    pub(crate) op: &'static str,
    pub(crate) subject: Arc<str>,
    pub(crate) dtype: Option<DType>,
    pub(crate) len: usize,
    /// Tells calls apart that look the same: the dtypes and layouts of all their tensors.
    pub(crate) detail: u64,
}

impl Call {
    pub(crate) fn new(op: &'static str, subject: impl Into<Arc<str>>) -> Self {
        Self {
            op,
            subject: subject.into(),
            dtype: None,
            len: 0,
            detail: 0,
        }
    }

    /// An all-gather of these inputs, which are not none.
    pub(crate) fn gather(subject: impl Into<Arc<str>>, inputs: &[GatherInput]) -> Self {
        let len = inputs.iter().map(|input| input.layout.full_len()).sum();
        let kinds = inputs.iter().map(|input| (&input.layout, input.dtype));
        Self::new("all-gather", subject)
            .of(inputs[0].dtype, len)
            .with_detail(kinds.collect::<Vec<_>>())
    }

    pub(crate) fn with_detail(mut self, detail: impl Hash) -> Self {
        let mut hasher = DefaultHasher::new();
        (self.detail, detail).hash(&mut hasher);
        self.detail = hasher.finish();
        self
    }

    pub(crate) fn of(mut self, dtype: DType, len: usize) -> Self {
        self.dtype = Some(dtype);
        self.len = len;
        self
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.op, self.subject)?;
        match self.dtype {
            Some(dtype) => write!(f, " ({} elements, {dtype:?})", self.len),
            None => Ok(()),
        }
    }
}

/// One tensor of an all-gather: this rank's shard, and the dtype to gather it in.
#[derive(Debug)]
pub(crate) struct GatherInput {
    pub(crate) layout: ShardLayout,
    pub(crate) shard: Tensor<1>,
    pub(crate) dtype: DType,
}

/// One tensor of a reduction: this rank's full contribution (none: zeros), what it is sent in, and
/// what the result is wanted in.
#[derive(Debug)]
pub(crate) struct ReduceInput {
    pub(crate) layout: ShardLayout,
    pub(crate) contribution: Option<Tensor<1>>,
    pub(crate) reduce_dtype: DType,
    pub(crate) out_dtype: DType,
}

/// Which all-gather of a module's unit this is. See [`Engine::all_gather`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GatherKey {
    /// The number that the module is registered under.
    pub(crate) module: u64,
    pub(crate) unit: usize,
    /// How often the unit's shards have been replaced.
    pub(crate) generation: u64,
}

/// Where an engine finds this rank's shards of a unit that another rank wants to gather.
pub(crate) trait GatherSource: Send + Sync {
    /// `None` if the shards are not, or no longer, of this generation.
    fn gather_inputs(&self, unit: usize, generation: u64) -> Option<Vec<GatherInput>>;
}

/// What an all-gather has brought.
#[derive(Debug)]
pub(crate) struct Gathered {
    /// The full tensors, flat, in the order of the inputs.
    pub(crate) tensors: Vec<Tensor<1>>,
    /// Counts the bytes of tensors that can't tell when they are dropped.
    pub(crate) _counted: Vec<MemoryGuard>,
}

/// An all-gather under way. Dropping it abandons the result, not the other ranks.
pub(crate) trait GatherWork: fmt::Debug + Send {
    /// Blocks until all ranks have contributed.
    fn wait(self: Box<Self>) -> Result<Gathered>;
}

/// A reduction under way. Dropping it abandons the result, not the other ranks.
pub(crate) trait ReduceWork: fmt::Debug + Send {
    /// This rank's shards, in the order of the inputs. Blocks until all ranks have contributed.
    fn wait(self: Box<Self>) -> Result<Vec<Tensor<1>>>;
}

/// A reduction that is done.
impl ReduceWork for Vec<Tensor<1>> {
    fn wait(self: Box<Self>) -> Result<Vec<Tensor<1>>> {
        Ok(*self)
    }
}

/// What moves data between ranks. All ranks must make the same calls in the same order.
///
/// A call that fails leaves the group failed: it, and every later call on any rank, returns the
/// first cause. Results are on the device of the inputs; where this rank has no input, on that of
/// another, or on [`ProcessGroup::device`].
pub(crate) trait Engine: fmt::Debug + Send + Sync {
    fn rank(&self) -> usize;

    fn world_size(&self) -> usize;

    /// Gives every rank all ranks' messages, in rank order. Lengths may differ.
    fn exchange(&self, call: Call, message: Vec<u8>) -> Result<Vec<Arc<Vec<u8>>>>;

    /// Remembers where a module has its shards. Its number is the same on all ranks.
    fn register(&self, number: u64, module: Weak<dyn GatherSource>);

    /// Starts gathering. Unsharded bytes are counted on `memory` until what was gathered is dropped:
    /// the tensors themselves on the host, [`Gathered`] on other devices.
    ///
    /// With a key, an engine may match ranks by the key instead of by position, and take the shards
    /// of a rank that has not called from where it registered them. An engine that does lets a rank
    /// skip units that others use.
    fn all_gather(
        &self,
        call: Call,
        key: Option<GatherKey>,
        inputs: Vec<GatherInput>,
        memory: &Arc<MemoryCounter>,
    ) -> Result<Box<dyn GatherWork>>;

    /// Starts reducing each input, to leave this rank's shard of it, flat and padded, on `device`;
    /// the whole of it where it is replicated. All ranks must wait for their reductions in the order
    /// in which they start them, as waiting may communicate.
    fn reduce(
        &self,
        call: Call,
        inputs: Vec<ReduceInput>,
        reduction: Reduction,
        device: &Device,
    ) -> Result<Box<dyn ReduceWork>>;

    /// Gives every rank its shard of `root`'s tensor, flat and padded, on `device`. Only `root`
    /// passes a tensor.
    fn scatter(
        &self,
        call: Call,
        root: usize,
        layout: &ShardLayout,
        source: Option<Tensor<1>>,
        device: &Device,
    ) -> Result<Tensor<1>>;

    /// Splits the group into those of equal `color`, in rank order.
    fn split(&self, color: usize) -> Result<Arc<dyn Engine>>;

    /// A wire between the ranks of the group, with positions of its own. A collective.
    fn control(&self) -> Result<Arc<dyn Wire>>;

    /// Makes the group fail with `cause`, unless it has already.
    fn fail(&self, cause: FsdpError);

    /// What the group failed with.
    fn failure(&self) -> Option<FsdpError>;

    /// Says that this rank has returned: those who wait for it fail.
    fn leave(&self);
}

/// Numbers of collectives made so far. Control messages and barriers are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CollectiveCounts {
    /// All-gathers.
    pub all_gathers: usize,
    /// Reduce-scatters.
    pub reduce_scatters: usize,
    /// All-reduces.
    pub all_reduces: usize,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) all_gathers: AtomicUsize,
    pub(crate) reduce_scatters: AtomicUsize,
    pub(crate) all_reduces: AtomicUsize,
}

impl Counters {
    pub(crate) fn bump(counter: &AtomicUsize) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn counts(&self) -> CollectiveCounts {
        CollectiveCounts {
            all_gathers: self.all_gathers.load(Ordering::Relaxed),
            reduce_scatters: self.reduce_scatters.load(Ordering::Relaxed),
            all_reduces: self.all_reduces.load(Ordering::Relaxed),
        }
    }
}

/// One rank's handle on a group of ranks. Clones are the same rank.
///
/// Except for [`rank`](Self::rank), [`world_size`](Self::world_size), [`counts`](Self::counts),
/// [`failure`](Self::failure), [`abort`](Self::abort), [`local_rank`](Self::local_rank),
/// [`description`](Self::description) and [`device`](Self::device), every method is a collective:
/// **all ranks must call it, in the same order**. If they don't, or one of them fails, all get the
/// same error. Tensors that come back are outside autodiff.
#[derive(Clone, Debug)]
pub struct ProcessGroup {
    engine: Arc<dyn Engine>,
    description: Arc<str>,
    device: Device,
    local_rank: usize,
    counters: Arc<Counters>,
    /// Modules sharded over this group so far.
    modules: Arc<AtomicU64>,
}

impl ProcessGroup {
    pub(crate) fn new(
        engine: Arc<dyn Engine>,
        description: impl Into<Arc<str>>,
        device: Device,
        local_rank: usize,
    ) -> Self {
        Self {
            engine,
            description: description.into(),
            device,
            local_rank,
            counters: Default::default(),
            modules: Default::default(),
        }
    }

    pub(crate) fn engine(&self) -> &dyn Engine {
        &*self.engine
    }

    /// A number for a module that all ranks are about to shard over this group.
    pub(crate) fn next_module(&self) -> u64 {
        self.modules.fetch_add(1, Ordering::Relaxed)
    }

    /// This rank's number, from 0.
    pub fn rank(&self) -> usize {
        self.engine.rank()
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.engine.world_size()
    }

    /// This rank's number among those of its host, which is what to choose a device by. Ranks that
    /// are threads are on one host.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// Which rank this is, how it reaches the others, and who started it, as a text for logs.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// The device that was chosen for this rank. Tensors of others will do as well.
    pub fn device(&self) -> Device {
        self.device.clone()
    }

    /// The collectives made through this handle and its clones. Those of a sharded module are
    /// counted by [`FsdpModule::collectives`](crate::FsdpModule::collectives).
    pub fn counts(&self) -> CollectiveCounts {
        self.counters.counts()
    }

    /// Why the group has failed, if it has. Does not communicate.
    pub fn failure(&self) -> Option<FsdpError> {
        self.engine.failure()
    }

    /// Makes the group fail: every other rank returns [`FsdpError::Aborted`] from the collective
    /// it waits in, or from its next one.
    pub fn abort(&self, reason: impl Into<String>) {
        self.engine.fail(FsdpError::Aborted {
            rank: self.rank(),
            reason: reason.into(),
        });
    }

    /// Waits for all ranks.
    ///
    /// # Errors
    ///
    /// As every collective: [`FsdpError::CollectiveMismatch`], [`FsdpError::Timeout`],
    /// [`FsdpError::RankReturned`], or the cause of another rank's failure.
    pub fn barrier(&self) -> Result<()> {
        let call = Call::new("barrier", "the group");
        self.engine.exchange(call, Vec::new()).map(drop)
    }

    /// Every rank's bytes, in rank order. Lengths may differ.
    ///
    /// # Errors
    ///
    /// As [`barrier`](Self::barrier).
    pub fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        let call = Call::new("all-gather", "bytes");
        let all = self.engine.exchange(call, bytes)?;
        Ok(all.iter().map(|bytes| bytes.to_vec()).collect())
    }

    /// Rank `root`'s bytes, on every rank; what the others pass is ignored.
    ///
    /// # Errors
    ///
    /// As [`barrier`](Self::barrier), and if `root` is no rank.
    pub fn broadcast_bytes(&self, root: usize, bytes: Vec<u8>) -> Result<Vec<u8>> {
        self.check_root(root)?;
        let bytes = if self.rank() == root {
            bytes
        } else {
            Vec::new()
        };
        let call = Call::new("broadcast", format!("bytes from rank {root}"));
        Ok(self.engine.exchange(call, bytes)?[root].to_vec())
    }

    /// The ranks' tensors of `n` elements each, as one of `world_size * n`, in rank order.
    ///
    /// # Errors
    ///
    /// As [`barrier`](Self::barrier); lengths and dtypes must be equal on all ranks.
    pub fn all_gather(&self, tensor: Tensor<1>) -> Result<Tensor<1>> {
        let (len, dtype) = (tensor.dims()[0], tensor.dtype());
        check_dtype(dtype)?;
        Counters::bump(&self.counters.all_gathers);
        let input = GatherInput {
            layout: ShardLayout::flat(
                len * self.world_size(),
                Placement::Shard(0),
                self.world_size(),
            ),
            shard: detached(tensor),
            dtype,
        };
        let inputs = vec![input];
        let call = Call::gather("a tensor", &inputs);
        let work = self
            .engine
            .all_gather(call, None, inputs, &Default::default())?;
        Ok(work.wait()?.tensors.remove(0))
    }

    /// This rank's `1 / world_size` of the reduced tensor.
    ///
    /// # Errors
    ///
    /// As [`barrier`](Self::barrier), and if the length is not a multiple of the number of ranks.
    pub fn reduce_scatter(&self, tensor: Tensor<1>, op: ReduceOp) -> Result<Tensor<1>> {
        let len = tensor.dims()[0];
        if !len.is_multiple_of(self.world_size()) {
            return Err(FsdpError::argument(format!(
                "reduce-scatter of {len} elements over {} ranks: the length must be a multiple of \
                 the number of ranks",
                self.world_size()
            )));
        }
        Counters::bump(&self.counters.reduce_scatters);
        self.reduce_tensor("reduce-scatter", tensor, op, Placement::Shard(0))
    }

    /// The reduced tensor, whole, on every rank.
    ///
    /// # Errors
    ///
    /// As [`barrier`](Self::barrier); lengths and dtypes must be equal on all ranks.
    pub fn all_reduce(&self, tensor: Tensor<1>, op: ReduceOp) -> Result<Tensor<1>> {
        Counters::bump(&self.counters.all_reduces);
        self.reduce_tensor("all-reduce", tensor, op, Placement::Replicate)
    }

    fn reduce_tensor(
        &self,
        name: &'static str,
        tensor: Tensor<1>,
        op: ReduceOp,
        placement: Placement,
    ) -> Result<Tensor<1>> {
        let (len, dtype) = (tensor.dims()[0], tensor.dtype());
        check_dtype(dtype)?;
        let device = tensor.device();
        let input = ReduceInput {
            layout: ShardLayout::flat(len, placement, self.world_size()),
            contribution: Some(detached(tensor)),
            reduce_dtype: dtype,
            out_dtype: dtype,
        };
        let reduction = match op {
            ReduceOp::Mean => Reduction::new(GradientAverage::Mean, self.world_size(), dtype),
            op => Reduction::plain(op),
        };
        let call = Call::new(name, format!("a tensor ({op:?})")).of(dtype, len);
        let inputs = vec![input];
        let work = self.engine.reduce(call, inputs, reduction, &device)?;
        Ok(work.wait()?.remove(0))
    }

    /// Rank `root`'s tensor, on every rank. The others pass one of the same length and dtype.
    ///
    /// # Errors
    ///
    /// As [`barrier`](Self::barrier), and if `root` is no rank.
    pub fn broadcast(&self, tensor: Tensor<1>, root: usize) -> Result<Tensor<1>> {
        self.check_root(root)?;
        let (len, dtype) = (tensor.dims()[0], tensor.dtype());
        check_dtype(dtype)?;
        let layout = ShardLayout::flat(len, Placement::Replicate, self.world_size());
        let call = Call::new("broadcast", format!("a tensor from rank {root}")).of(dtype, len);
        let device = tensor.device();
        let source = (self.rank() == root).then(|| detached(tensor));
        self.engine.scatter(call, root, &layout, source, &device)
    }

    /// The subgroup of the ranks that pass the same `color`, in rank order.
    pub(crate) fn split(&self, color: usize) -> Result<Self> {
        let engine = self.engine.split(color)?;
        let (rank, size) = (engine.rank(), engine.world_size());
        let description = format!("rank {rank} of {size} in a part of {}", self.description);
        let (device, local_rank) = (self.device(), self.local_rank);
        Ok(Self::new(engine, description, device, local_rank))
    }

    /// Checks that `value` is the same on all ranks; the error names `what`.
    pub(crate) fn agree(&self, what: &str, value: &str) -> Result<()> {
        let call = Call::new("agreement", what.to_string());
        let all = self.engine.exchange(call, value.as_bytes().to_vec())?;
        match all.iter().position(|other| other != &all[0]) {
            None => Ok(()),
            Some(rank) => {
                let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                let (expected, got) = first_difference(&text(&all[0]), &text(&all[rank]));
                Err(FsdpError::RanksDisagree {
                    what: what.to_string(),
                    rank,
                    expected,
                    got,
                })
            }
        }
    }

    fn check_root(&self, root: usize) -> Result<()> {
        if root < self.world_size() {
            return Ok(());
        }
        Err(FsdpError::argument(format!(
            "root {root} is no rank of a group of {}",
            self.world_size()
        )))
    }
}

/// The first line in which two texts differ.
fn first_difference(a: &str, b: &str) -> (String, String) {
    let (mut a, mut b) = (a.lines(), b.lines());
    loop {
        match (a.next(), b.next()) {
            (Some(x), Some(y)) if x == y => continue,
            (x, y) => {
                let line = |line: Option<&str>| line.unwrap_or("nothing").trim().to_string();
                return (line(x), line(y));
            }
        }
    }
}

fn detached(tensor: Tensor<1>) -> Tensor<1> {
    tensor.without_autodiff()
}

/// `rank`'s shard of a flat full tensor, padded with zeros.
pub(crate) fn take_shard(full: &Tensor<1>, layout: &ShardLayout, rank: usize) -> Tensor<1> {
    if let Ok(full) = host::host(full) {
        return host::shard_of(&full, layout, rank);
    }
    let (device, dtype) = (full.device(), full.dtype());
    let zeros = |len: usize| Tensor::<1>::zeros([len], (&device, dtype));
    let mut parts = Vec::new();
    let mut end = 0;
    for span in layout.spans(rank) {
        parts.push(zeros(span.shard - end));
        parts.push(full.clone().slice(span.full..span.full + span.len));
        end = span.shard + span.len;
    }
    parts.push(zeros(layout.shard_len() - end));
    Tensor::cat(parts, 0)
}

fn check_dtype(dtype: DType) -> Result<()> {
    match dtype {
        DType::F32 | DType::F64 | DType::F16 | DType::BF16 => Ok(()),
        other => Err(FsdpError::argument(format!(
            "collectives carry f32, f64, f16 and bf16, not {other:?}"
        ))),
    }
}
