use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::DType;

/// The result of everything in this crate that can fail.
pub type Result<T, E = FsdpError> = std::result::Result<T, E>;

/// What went wrong, on which rank, and what was expected.
///
/// Every rank of a group that fails returns the same cause, so the type is cheap to clone.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FsdpError {
    // ---- sharding
    /// The module owns no floating-point parameter.
    #[error("the module has no floating-point parameter to shard")]
    NoParameters,
    /// The parameter carries another reparameterization (LoRA, QLoRA or a second `fully_shard`).
    #[error(
        "parameter \"{path}\" already has a reparameterization (LoRA, QLoRA or an earlier \
         fully_shard); a parameter can carry one only"
    )]
    AlreadyReparameterized {
        /// Path of the parameter.
        path: String,
    },
    /// A configured pattern selects nothing.
    #[error("{what} \"{pattern}\" matches nothing in the module; known: {}", known.join(", "))]
    PatternUnmatched {
        /// What the pattern was for.
        what: &'static str,
        /// The pattern as configured.
        pattern: String,
        /// What could have been matched (the first few).
        known: Vec<String>,
    },
    /// One parameter is reached by paths of two units.
    #[error(
        "\"{first}\" (unit \"{first_unit}\") and \"{second}\" (unit \"{second_unit}\") are one tied \
         parameter in two units; choose units so that one of them holds both, or, if they are meant \
         to be two parameters, build each by itself instead of cloning one"
    )]
    TiedAcrossUnits {
        /// The first path.
        first: String,
        /// The unit of the first path.
        first_unit: String,
        /// The second path.
        second: String,
        /// The unit of the second path.
        second_unit: String,
    },
    /// Trainable parameters of one unit differ in dtype.
    #[error(
        "unit \"{unit}\" mixes dtypes ({}); put them in separate units or cast the module first",
        params.iter().map(|(path, dtype)| format!("{path}: {dtype:?}")).collect::<Vec<_>>().join(", ")
    )]
    MixedDtypes {
        /// The unit.
        unit: String,
        /// One parameter for each dtype.
        params: Vec<(String, DType)>,
    },
    /// The placement function asked for a dimension the parameter does not have.
    #[error("cannot shard \"{path}\" of shape {shape:?} on dim {dim}: it has {} dims", shape.len())]
    ShardDimOutOfRange {
        /// Path of the parameter.
        path: String,
        /// The asked dimension.
        dim: usize,
        /// The full shape.
        shape: Vec<usize>,
    },
    /// The group size of [`ReshardAfterForward::Groups`](crate::ReshardAfterForward::Groups) is no
    /// proper factor of the shard size.
    #[error(
        "reshard_after_forward to groups of {group} needs a proper factor of the shard size {shard_size}"
    )]
    InvalidReshardGroup {
        /// The asked group size.
        group: usize,
        /// Ranks over which parameters are sharded.
        shard_size: usize,
    },
    /// The mesh does not fit the process group.
    #[error("a mesh of {replicate} x {shard} ranks does not fit a process group of {world_size}")]
    InvalidMesh {
        /// Size of the replicate dimension.
        replicate: usize,
        /// Size of the shard dimension.
        shard: usize,
        /// Size of the process group.
        world_size: usize,
    },
    /// A setting or an argument that cannot work, with the reason.
    #[error("{0}")]
    InvalidArgument(String),
    /// The engine cannot work on tensors of this device.
    #[error("the {engine} engine does not support tensors on {device}")]
    UnsupportedDevice {
        /// The engine.
        engine: &'static str,
        /// The device of the tensor.
        device: String,
    },
    /// Ranks called with different modules, settings or arguments.
    #[error("ranks disagree on {what}: rank 0 has {expected}, rank {rank} has {got}")]
    RanksDisagree {
        /// What must be equal everywhere.
        what: String,
        /// The first rank that differs from rank 0.
        rank: usize,
        /// The value on rank 0.
        expected: String,
        /// The value on `rank`.
        got: String,
    },

    // ---- communication
    /// Two ranks issued different collectives at the same position.
    #[error(
        "collective mismatch: rank {rank_a} called {call_a}, rank {rank_b} called {call_b}{}",
        if call_a == call_b {
            "; they differ in the module or copy they belong to, in its parameters' shapes or dtypes, \
             or in how often its parameters were changed"
        } else {
            ""
        }
    )]
    CollectiveMismatch {
        /// The rank that came first.
        rank_a: usize,
        /// What it called.
        call_a: String,
        /// The rank that differed.
        rank_b: usize,
        /// What it called.
        call_b: String,
    },
    /// A rank waited longer than the group's timeout.
    #[error(
        "rank {rank}: {call} timed out after {after:?}{}; last calls: {}",
        if missing.is_empty() {
            "; all ranks have called it, but it does not end".to_string()
        } else {
            format!(" waiting for ranks {missing:?}")
        },
        last_calls.iter().enumerate().map(|(r, c)| format!("rank {r}: {c}")).collect::<Vec<_>>().join("; ")
    )]
    Timeout {
        /// The rank that gave up.
        rank: usize,
        /// The collective it waited in.
        call: String,
        /// How long it waited.
        after: Duration,
        /// The ranks that did not come; none if all did.
        missing: Vec<usize>,
        /// What every rank called last.
        last_calls: Vec<String>,
    },
    /// A rank panicked or returned an error; this is what it said.
    #[error("rank {rank} failed: {cause}")]
    RankFailed {
        /// The rank that failed first.
        rank: usize,
        /// Its panic message or error.
        cause: String,
    },
    /// A rank returned while another waits for it in a collective.
    #[error("rank {rank} waits in {call} for rank {gone}, which has already returned")]
    RankReturned {
        /// The rank that waits.
        rank: usize,
        /// The collective it waits in.
        call: String,
        /// The rank that will not come.
        gone: usize,
    },
    /// The processes of a job did not find each other.
    #[error("rendezvous at {address}: {reason}")]
    Rendezvous {
        /// Where rank 0 was to listen.
        address: String,
        /// What happened.
        reason: String,
    },
    /// A rank called [`ProcessGroup::abort`](crate::ProcessGroup::abort).
    #[error("rank {rank} aborted the group: {reason}")]
    Aborted {
        /// The rank that aborted.
        rank: usize,
        /// Its reason.
        reason: String,
    },

    /// NCCL, or the CUDA driver it needs, can't be loaded.
    #[error("NCCL can't be used: {reason}")]
    NcclUnavailable {
        /// What was looked for, and what to do.
        reason: String,
    },
    /// NCCL, or the device under it, reported an error.
    #[error("rank {rank}: NCCL failed in {call}: {cause}")]
    Nccl {
        /// The rank it failed on.
        rank: usize,
        /// The oldest collective under way.
        call: String,
        /// What NCCL said.
        cause: String,
    },

    // ---- training
    /// Gradients of a unit were not reduced because not every parameter of it was used.
    #[error(
        "the gradients of unit \"{unit}\" are incomplete: {} got none in this backward; call \
         `model.backward(loss)`, which completes units with unused parameters",
        if missing.is_empty() { "some uses of its parameters".to_string() } else { missing.join(", ") }
    )]
    IncompleteUnit {
        /// The unit.
        unit: String,
        /// Its parameters without a gradient.
        missing: Vec<String>,
    },
    /// Gradients of backwards without sync wait to be reduced.
    #[error(
        "gradients kept without sync were not reduced; run the last backward before a step with \
         gradient sync on"
    )]
    UnsyncedGradients,
    /// Parameters were updated after a forward used them and before its backward, which would now
    /// compute with other values.
    #[error(
        "the parameters of unit \"{unit}\" were updated between this forward and its backward; call \
         backward first, or run the forward again"
    )]
    UpdatedBeforeBackward {
        /// The unit.
        unit: String,
    },
    /// The optimizer clips per parameter, which on shards would use the norm of a shard.
    #[error(
        "the optimizer clips each parameter by itself, which is wrong on shards; remove its \
         grad_clipping and call `model.clip_grad_norm(grads, max_norm)`"
    )]
    OptimizerClipsGradients,
    /// The total gradient norm is NaN or infinite; no rank may step.
    #[error("the total gradient norm is {norm}; the parameters were left unchanged")]
    NonFiniteNorm {
        /// The norm, equal on all ranks.
        norm: f64,
    },
    /// No unit of this name.
    #[error("no unit is named \"{name}\"; units: {}", known.join(", "))]
    UnknownUnit {
        /// The asked name.
        name: String,
        /// The names of the units ("" is the root).
        known: Vec<String>,
    },
    /// A full state dict does not fit the model; everything that does not is listed.
    #[error("the state dict does not fit the model: {0}")]
    StateDictMismatch(Box<crate::LoadReport>),

    /// An error of the user's own code. See [`FsdpError::other`].
    #[error(transparent)]
    Other(Arc<dyn Error + Send + Sync>),
}

impl FsdpError {
    /// Wraps an error of the caller's own, so that it can be returned from a rank.
    pub fn other(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Other(Arc::from(error.into()))
    }

    pub(crate) fn argument(reason: impl Into<String>) -> Self {
        Self::InvalidArgument(reason.into())
    }
}
