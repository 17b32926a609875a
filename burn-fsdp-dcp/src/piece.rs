//! What goes into a checkpoint, piece by piece.

use std::collections::{BTreeMap, HashSet};

use burn::tensor::DType;
use burn_fsdp::{Placement, ShardSpec};

use crate::host::HostBytes;
use crate::load::region_of;
use crate::region::Region;

/// One rank's part of a tensor.
pub(crate) struct Piece {
    pub(crate) dtype: DType,
    /// Of the whole tensor.
    pub(crate) shape: Vec<u64>,
    pub(crate) region: Region,
    pub(crate) copies: Copies,
    /// Brings the part to the host.
    pub(crate) data: Box<dyn FnOnce() -> HostBytes + Send>,
    /// Whether it is there already.
    pub(crate) is_on_host: bool,
}

impl std::fmt::Debug for Piece {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Piece")
            .field("dtype", &self.dtype)
            .field("shape", &self.shape)
            .field("region", &self.region)
            .finish_non_exhaustive()
    }
}

/// Who else holds the same part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copies {
    /// `count` ranks do, and this is number `index` of them.
    Replicas { index: usize, count: usize },
    /// Every rank does.
    Everywhere,
    /// Every rank holds one, but they may differ: rank 0's counts.
    RankZero,
}

/// An encoded value.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) is_of_rank: bool,
    pub(crate) bytes: Vec<u8>,
}

impl Piece {
    pub(crate) fn bytes(&self) -> u64 {
        self.region.volume().unwrap_or(0) * self.dtype.size() as u64
    }

    pub(crate) fn leave_to_others(&mut self) {
        self.region.sizes.fill(0);
        if self.region.sizes.is_empty() {
            // A scalar has no dimension to be empty in.
            self.region = Region {
                offsets: vec![0],
                sizes: vec![0],
            };
        }
        self.data = Box::new(|| unreachable!("another rank writes this"));
    }

    /// The part of a tensor that `spec` describes, which `data` brings without padding.
    pub(crate) fn new(
        spec: &ShardSpec,
        dtype: DType,
        shard_copies: Copies,
        is_on_host: bool,
        data: impl FnOnce() -> HostBytes + Send + 'static,
    ) -> Self {
        Self {
            dtype,
            shape: spec.global_shape.iter().map(|n| *n as u64).collect(),
            region: region_of(spec),
            copies: match spec.placement {
                _ if spec.is_buffer => Copies::RankZero,
                Placement::Replicate => Copies::Everywhere,
                Placement::Shard(_) => shard_copies,
            },
            data: Box::new(data),
            is_on_host,
        }
    }
}

/// Leaves one name to each parameter, the first of its names.
pub(crate) fn drop_further_names(specs: &mut BTreeMap<String, ShardSpec>) {
    let mut seen = HashSet::new();
    specs.retain(|_, spec| seen.insert(spec.id));
}
