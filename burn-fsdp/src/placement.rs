//! How one tensor is split over the ranks of a group. Pure arithmetic.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Where the elements of a parameter live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Placement {
    /// Split along this dimension. Rank `r` of `W` holds the indices
    /// `r * ceil(n / W) .. (r + 1) * ceil(n / W)`, cut at `n`: the rule of `torch.chunk`, and so of
    /// PyTorch FSDP2. Later ranks may hold fewer, or none.
    Shard(usize),
    /// Whole on every rank; its gradient is averaged over them.
    Replicate,
}

impl std::fmt::Display for Placement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Shard(dim) => write!(f, "Shard({dim})"),
            Self::Replicate => f.write_str("Replicate"),
        }
    }
}

/// The geometry of one tensor over `world_size` ranks.
///
/// Around the split dimension a row-major tensor is `outer x dim x inner`. A shard is stored as
/// `outer x chunk x inner`, padded with zeros to the same size on every rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ShardLayout {
    shape: Vec<usize>,
    placement: Placement,
    world_size: usize,
    outer: usize,
    dim: usize,
    inner: usize,
    chunk: usize,
}

/// One contiguous run of elements that a full tensor and a shard have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) full: usize,
    pub(crate) shard: usize,
    pub(crate) len: usize,
}

impl ShardLayout {
    /// The caller has checked that `Shard(dim)` is within `shape`.
    pub(crate) fn new(shape: &[usize], placement: Placement, world_size: usize) -> Self {
        let (outer, dim, inner, chunk) = match placement {
            Placement::Shard(d) => (
                shape[..d].iter().product(),
                shape[d],
                shape[d + 1..].iter().product(),
                shape[d].div_ceil(world_size),
            ),
            Placement::Replicate => (1, 1, shape.iter().product(), 1),
        };
        Self {
            shape: shape.to_vec(),
            placement,
            world_size,
            outer,
            dim,
            inner,
            chunk,
        }
    }

    /// A flat tensor of `len` elements.
    pub(crate) fn flat(len: usize, placement: Placement, world_size: usize) -> Self {
        Self::new(&[len], placement, world_size)
    }

    /// The same tensor and placement over another number of ranks.
    pub(crate) fn with_world_size(&self, world_size: usize) -> Self {
        Self::new(&self.shape, self.placement, world_size)
    }

    pub(crate) fn world_size(&self) -> usize {
        self.world_size
    }

    /// Whether every rank's shard is the full tensor.
    pub(crate) fn is_whole(&self) -> bool {
        self.placement == Placement::Replicate || self.world_size == 1
    }

    /// Elements of the full tensor.
    pub(crate) fn full_len(&self) -> usize {
        self.outer * self.dim * self.inner
    }

    /// Elements of a stored shard, padding included. Equal on all ranks.
    pub(crate) fn shard_len(&self) -> usize {
        self.outer * self.chunk * self.inner
    }

    /// Elements of a stored shard that are contiguous in the full tensor, padding included.
    pub(crate) fn run_len(&self) -> usize {
        self.chunk * self.inner
    }

    /// Elements of the full tensor over which every rank has one run.
    pub(crate) fn row_len(&self) -> usize {
        self.dim * self.inner
    }

    /// Shape of a stored shard, padding included. Equal on all ranks.
    pub(crate) fn shard_shape(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if let Placement::Shard(d) = self.placement {
            shape[d] = self.chunk;
        }
        shape
    }

    /// Indices along the split dimension that `rank` owns; the whole tensor where replicated.
    pub(crate) fn indices(&self, rank: usize) -> Range<usize> {
        match self.placement {
            Placement::Shard(_) => {
                let start = (rank * self.chunk).min(self.dim);
                start..(start + self.chunk).min(self.dim)
            }
            Placement::Replicate => 0..self.dim,
        }
    }

    /// Global offsets and sizes of what `rank` owns, padding excluded.
    pub(crate) fn local_box(&self, rank: usize) -> (Vec<usize>, Vec<usize>) {
        let mut offsets = vec![0; self.shape.len()];
        let mut sizes = self.shape.clone();
        if let Placement::Shard(d) = self.placement {
            let indices = self.indices(rank);
            offsets[d] = indices.start;
            sizes[d] = indices.len();
        }
        (offsets, sizes)
    }

    /// The runs that map `rank`'s shard into the full tensor, in ascending order of both.
    pub(crate) fn spans(&self, rank: usize) -> impl Iterator<Item = Span> + use<> {
        let indices = self.indices(rank);
        let (dim, inner, chunk) = (self.dim, self.inner, self.chunk);
        let outer = if indices.is_empty() { 0 } else { self.outer };
        (0..outer).map(move |o| Span {
            full: (o * dim + indices.start) * inner,
            shard: o * chunk * inner,
            len: indices.len() * inner,
        })
    }

    /// Elements of the full tensor that `rank` owns.
    pub(crate) fn owned_len(&self, rank: usize) -> usize {
        self.outer * self.indices(rank).len() * self.inner
    }

    /// The runs of `rank`, and the place of each among its own elements without padding.
    pub(crate) fn packed_spans(&self, rank: usize) -> impl Iterator<Item = (usize, Span)> + use<> {
        self.spans(rank).scan(0, |next, span| {
            let place = *next;
            *next += span.len;
            Some((place, span))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owned(n: usize, world: usize) -> Vec<usize> {
        let layout = ShardLayout::new(&[n, 2], Placement::Shard(0), world);
        (0..world).map(|rank| layout.indices(rank).len()).collect()
    }

    #[test]
    fn rows_are_split_by_the_ceil_rule() {
        assert_eq!(owned(6, 4), [2, 2, 2, 0]);
        assert_eq!(owned(5, 4), [2, 2, 1, 0]);
        assert_eq!(owned(1, 4), [1, 0, 0, 0]);
        assert_eq!(owned(64, 3), [22, 22, 20]);
    }

    #[test]
    fn an_inner_dimension_is_split_into_strided_spans() {
        let layout = ShardLayout::new(&[2, 5, 3], Placement::Shard(1), 2);
        assert_eq!(layout.shard_shape(), [2, 3, 3]);
        let spans: Vec<_> = layout.spans(1).collect();
        assert_eq!(
            spans,
            [
                Span {
                    full: 9,
                    shard: 0,
                    len: 6
                },
                Span {
                    full: 24,
                    shard: 9,
                    len: 6
                }
            ]
        );
        assert_eq!(layout.local_box(1), (vec![0, 3, 0], vec![2, 2, 3]));
    }

    #[test]
    fn packed_runs_follow_each_other_without_padding() {
        let layout = ShardLayout::new(&[2, 5, 3], Placement::Shard(1), 2);
        let places: Vec<_> = layout.packed_spans(1).map(|(place, _)| place).collect();
        assert_eq!((places, layout.owned_len(1)), (vec![0, 6], 12));
        assert_eq!(layout.owned_len(0) + layout.owned_len(1), layout.full_len());
    }

    #[test]
    fn a_rank_beyond_the_rows_has_no_span() {
        let layout = ShardLayout::new(&[1, 4], Placement::Shard(0), 3);
        assert_eq!(layout.spans(2).count(), 0);
        assert_eq!(layout.shard_len(), 4);
    }

    #[test]
    fn shards_cover_every_element_exactly_once() {
        let sizes = [1, 2, 3, 5, 8];
        for (a, b, c) in sizes.iter().flat_map(|a| {
            let rest = sizes.iter().flat_map(|b| sizes.iter().map(move |c| (b, c)));
            rest.map(move |(b, c)| (*a, *b, *c))
        }) {
            for (dim, world) in (0..3).flat_map(|dim| (1..9).map(move |world| (dim, world))) {
                covers_once(
                    &ShardLayout::new(&[a, b, c], Placement::Shard(dim), world),
                    world,
                );
            }
        }
    }

    fn covers_once(layout: &ShardLayout, world: usize) {
        let mut seen = vec![0u8; layout.full_len()];
        for rank in 0..world {
            let mut used = vec![false; layout.shard_len()];
            for span in layout.spans(rank) {
                for i in 0..span.len {
                    seen[span.full + i] += 1;
                    assert!(!std::mem::replace(&mut used[span.shard + i], true));
                }
            }
        }
        assert!(seen.iter().all(|&times| times == 1), "{layout:?}");
    }
}
