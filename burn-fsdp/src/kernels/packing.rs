use std::ops::Range;

use crate::placement::ShardLayout;

/// Members start at multiples of this in a slot, so that vectors fit.
const SLOT_ALIGN: usize = 8;
/// Slots, and members of a full buffer, start at multiples of this, so that they can be bound to a
/// kernel or made a tensor: 512 bytes of the smallest dtype, which no runtime exceeds.
const BUFFER_ALIGN: usize = 256;

/// How the members of a unit lie in the flat buffers of a collective.
///
/// Every rank's shards lie one after another in a *slot* of `shard_len` elements, the slots of all
/// ranks one after another in rank order, and the full tensors one after another in a buffer of
/// `full_len`. All lengths count elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Packing {
    pub(super) world_size: usize,
    pub(super) members: Vec<Member>,
    shard_len: usize,
    full_len: usize,
}

/// Where one member lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Member {
    /// Its place in a slot, padding included.
    pub(super) slot: Range<usize>,
    /// Its place in the full buffer.
    pub(super) full: Range<usize>,
    /// Elements of a shard: a multiple of `run`.
    pub(super) shard_len: usize,
    /// Elements of a shard that are contiguous in the full tensor.
    pub(super) run: usize,
    /// Elements of the full tensor over which every rank has one such run.
    pub(super) row: usize,
    /// From one rank's run to the next's: `run`, or 0 where every rank holds all.
    pub(super) rank_stride: usize,
}

impl Member {
    /// Elements of the tensor that the slots are filled from.
    pub(super) fn tensor_len(&self) -> usize {
        self.full.len()
    }
}

impl Packing {
    /// The packing of tensors that are all over the same number of ranks.
    pub(crate) fn new(layouts: &[ShardLayout]) -> Self {
        let world_size = layouts.first().map_or(1, ShardLayout::world_size);
        let (mut shard_end, mut full_end) = (0, 0);
        let mut members: Vec<_> = layouts
            .iter()
            .map(|layout| {
                assert_eq!(
                    layout.world_size(),
                    world_size,
                    "the members of a packing are over the same number of ranks"
                );
                let slot = shard_end;
                let full = full_end;
                shard_end = (slot + layout.shard_len()).next_multiple_of(SLOT_ALIGN);
                full_end = (full + layout.full_len()).next_multiple_of(BUFFER_ALIGN);
                Member {
                    slot: slot..shard_end,
                    full: full..full + layout.full_len(),
                    shard_len: layout.shard_len(),
                    run: layout.run_len(),
                    row: layout.row_len(),
                    rank_stride: if layout.is_whole() {
                        0
                    } else {
                        layout.run_len()
                    },
                }
            })
            .collect();
        let shard_len = shard_end.next_multiple_of(BUFFER_ALIGN);
        if let Some(last) = members.last_mut() {
            last.slot.end = shard_len;
        }
        Self {
            world_size,
            members,
            shard_len,
            full_len: full_end,
        }
    }

    /// Elements of one rank's slot, padding included.
    pub(crate) fn shard_len(&self) -> usize {
        self.shard_len
    }

    /// Elements of the buffer of all full tensors, padding included.
    pub(crate) fn full_len(&self) -> usize {
        self.full_len
    }

    /// The full tensor of a member, in the full buffer.
    pub(crate) fn full(&self, member: usize) -> Range<usize> {
        self.members[member].full.clone()
    }

    /// The slot of a rank, in the buffer of all slots.
    pub(crate) fn slot(&self, rank: usize) -> Range<usize> {
        rank * self.shard_len..(rank + 1) * self.shard_len
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Placement;

    fn layouts(world_size: usize) -> Vec<ShardLayout> {
        let shard =
            |shape: &[usize], dim| ShardLayout::new(shape, Placement::Shard(dim), world_size);
        let bias = ShardLayout::new(&[3], Placement::Replicate, world_size);
        vec![
            shard(&[5, 7], 0),
            bias,
            shard(&[300, 4], 1),
            shard(&[0, 4], 0),
        ]
    }

    #[test]
    fn members_start_where_vectors_and_buffers_may() {
        let packing = Packing::new(&layouts(2));
        let slots: Vec<_> = packing.members.iter().map(|m| m.slot.clone()).collect();
        assert_eq!(slots, [0..24, 24..32, 32..632, 632..768]);
        assert_eq!(packing.shard_len(), 768);
        assert_eq!(packing.slot(1), 768..1536);
        let full: Vec<_> = (0..4).map(|member| packing.full(member)).collect();
        assert_eq!(full, [0..35, 256..259, 512..1712, 1792..1792]);
        assert_eq!(packing.full_len(), 1792);
    }

    #[test]
    fn a_packing_of_nothing_is_empty() {
        let packing = Packing::new(&[]);
        assert_eq!((packing.shard_len(), packing.full_len()), (0, 0));
        assert_eq!(packing.slot(3), 0..0);
    }

    #[test]
    #[should_panic(expected = "over the same number of ranks")]
    fn members_over_different_groups_are_refused() {
        Packing::new(&[layouts(2), layouts(3)].concat());
    }
}
