//! From gathered slots into full tensors.

use std::ops::Range;

use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::std::FastDivmod;

use super::buffer::{Buffer, elem};
use super::launch::{Place, Work, address_type, grid, groups, wide, width, works};
use super::packing::Packing;
use super::rounding::cast;

/// Casts and unpacks what these ranks gathered into the full tensors. A replicated member is taken
/// from the first of them. What other ranks own, and the padding between tensors, stays.
///
/// `slots` holds the slots of these ranks, one after another; `full` holds the full tensors as
/// [`Packing::full`] says. Both are of any dtype. Enqueues on the calling thread's stream and
/// returns at once.
pub(crate) fn unpack(
    client: &Client,
    packing: &Packing,
    ranks: Range<usize>,
    slots: &Buffer,
    full: &Buffer,
) {
    assert!(
        ranks.end <= packing.world_size,
        "ranks {ranks:?} of a packing over {}",
        packing.world_size
    );
    assert_eq!(
        slots.len,
        ranks.len() * packing.shard_len(),
        "slots of ranks {ranks:?} are unpacked"
    );
    assert_eq!(
        full.len,
        packing.full_len(),
        "full tensors are unpacked into a full buffer"
    );
    let members = &packing.members;
    let (from, to) = (slots.dtype, full.dtype);
    let between = wide([from, to]);
    let filled = (0..members.len()).filter(|i| members[*i].shard_len > 0);
    let keys = filled.map(|i| {
        let lens = [
            slots.offset(),
            full.offset(),
            members[i].run,
            members[i].row,
        ];
        (i, width(client, &[from, to], &lens))
    });
    for group in groups(client, keys, 2) {
        let width = group.key;
        let places = group.members.iter().map(|i| members[*i].place(width));
        let (works, items) = works(group.members.iter().map(|i| members[*i].shard_len / width));
        let (count, dim) = grid(client, ranks.len() * items);
        // SAFETY: the kernel checks that a unit has work, and the buffers are as long as the
        // packing says, so every index is within its buffer.
        unsafe {
            unpack_kernel::launch_unchecked(
                client,
                count,
                dim,
                address_type(slots.len.max(full.len)),
                width,
                slots.arg(),
                works.into_iter().collect(),
                places.collect(),
                full.arg(),
                ranks.len() * items,
                items,
                ranks.start,
                packing.shard_len() / width,
                [slots.elem(), elem(between), full.elem()],
            );
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn unpack_kernel<I: Float, C: Float, O: Float, N: Size>(
    slots: &[Vector<I, N>],
    works: &Sequence<Work>,
    places: &Sequence<Place>,
    full: &mut [Vector<O, N>],
    total: usize,
    items_of_rank: FastDivmod<usize>,
    first_rank: usize,
    slot_len: usize,
    #[define(I, C, O)] _dtypes: [ElemType; 3],
) {
    if ABSOLUTE_POS >= total {
        terminate!();
    }
    let (slot, item) = items_of_rank.div_mod(ABSOLUTE_POS);
    #[unroll]
    for m in 0..places.len() {
        if works[m].contains(item) {
            let place = &places[m];
            let index = works[m].index(item);
            let (target, exists) = place.full_index(first_rank + slot, index);
            // Every rank holds all of a replicated tensor.
            if exists && (slot == 0 || place.rank_stride > 0) {
                let value = slots[slot * slot_len + place.slot + index];
                full[place.full + target] = cast(cast::<I, C, N>(value));
            }
        }
    }
}

#[cfg(all(test, any(feature = "cpu", feature = "cuda")))]
mod tests {
    use burn::tensor::DType;
    use proptest::prelude::*;

    use super::super::reference::{
        self, assert_same, client, dtype, layouts, read, round, upload, values,
    };
    use super::super::{Rounding, pack};
    use super::*;
    use crate::Placement;
    use crate::placement::ShardLayout;

    /// What no tensor of a test holds.
    const UNTOUCHED: f64 = -77.0;

    /// Packs every rank's shards into its slot.
    fn gathered(
        client: &Client,
        layouts: &[ShardLayout],
        tensors: &[Vec<f64>],
        [from, wire]: [DType; 2],
    ) -> Buffer {
        let packing = Packing::new(layouts);
        let len = packing.world_size * packing.shard_len();
        let slots = Buffer::empty(client, len, wire);
        for rank in 0..packing.world_size {
            let shards = layouts.iter().zip(tensors).map(|(layout, tensor)| {
                upload(client, &reference::shard(layout, rank, tensor), from)
            });
            let shards: Vec<_> = shards.collect();
            let slot = slots.range(packing.slot(rank));
            pack(client, &packing, &shards, &slot, Rounding::Nearest);
        }
        slots
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn what_is_packed_gathered_and_unpacked_is_what_was(
            layouts in layouts(),
            [from, wire, to] in [dtype(), dtype(), dtype()],
            first in 0..5usize,
            seed: u64,
        ) {
            let client = client();
            let packing = Packing::new(&layouts);
            let tensors = layouts.iter().enumerate();
            let tensors: Vec<_> = tensors
                .map(|(i, layout)| values(seed ^ i as u64, layout.full_len(), from))
                .collect();
            let slots = gathered(&client, &layouts, &tensors, [from, wire]);
            let full = upload(&client, &vec![UNTOUCHED; packing.full_len()], to);
            // The ranks in two calls, as a caller that unpacks what has arrived would.
            let first = first.min(packing.world_size);
            for ranks in [first..packing.world_size, 0..first] {
                let slots = slots.range(packing.slot(ranks.start).start..packing.slot(ranks.end).start);
                unpack(&client, &packing, ranks, &slots, &full);
            }
            let mut expected = vec![UNTOUCHED; packing.full_len()];
            for (i, tensor) in tensors.iter().enumerate() {
                for (to_element, x) in expected[packing.full(i)].iter_mut().zip(tensor) {
                    *to_element = round(round(*x, wire), to);
                }
            }
            assert_same(&read(&client, &full), &expected);
        }
    }

    #[test]
    fn what_other_ranks_own_stays() {
        let client = client();
        let layouts = [
            ShardLayout::new(&[3, 4], Placement::Shard(1), 2),
            ShardLayout::flat(3, Placement::Replicate, 2),
        ];
        let packing = Packing::new(&layouts);
        let tensors = [vec![1.0; 12], vec![2.0; 3]];
        let slots = gathered(&client, &layouts, &tensors, [DType::F32; 2]);
        let full = upload(&client, &vec![UNTOUCHED; packing.full_len()], DType::F32);
        unpack(
            &client,
            &packing,
            1..2,
            &slots.range(packing.slot(1)),
            &full,
        );
        let got = read(&client, &full);
        assert_eq!(got[..4], [UNTOUCHED, UNTOUCHED, 1.0, 1.0]);
        assert_eq!(got[packing.full(1)], [2.0; 3]);
    }

    #[test]
    fn a_unit_of_more_members_than_a_launch_takes_is_unpacked_whole() {
        let client = client();
        let layout = ShardLayout::new(&[4, 3], Placement::Shard(1), 3);
        let layouts = vec![layout; 40];
        let packing = Packing::new(&layouts);
        let tensors: Vec<_> = (0..40).map(|i| values(i, 12, DType::F32)).collect();
        let slots = gathered(&client, &layouts, &tensors, [DType::F32; 2]);
        let full = Buffer::empty(&client, packing.full_len(), DType::F32);
        unpack(&client, &packing, 0..3, &slots, &full);
        let got = read(&client, &full);
        for (i, tensor) in tensors.iter().enumerate() {
            assert_same(&got[packing.full(i)], tensor);
        }
    }

    /// Buffers that need them are longer than tests can have.
    #[test]
    fn indices_of_64_bits_find_the_same_places() {
        let client = client();
        let layouts = [ShardLayout::new(&[4, 6], Placement::Shard(1), 2)];
        let packing = Packing::new(&layouts);
        let tensor = values(1, 24, DType::F32);
        let slots = gathered(
            &client,
            &layouts,
            std::slice::from_ref(&tensor),
            [DType::F32; 2],
        );
        let full = Buffer::empty(&client, packing.full_len(), DType::F32);
        let (works, items) = works([12].into_iter());
        let (count, dim) = grid(&client, 2 * items);
        // SAFETY: both buffers are as long as the packing says.
        unsafe {
            unpack_kernel::launch_unchecked(
                &client,
                count,
                dim,
                AddressType::U64,
                1,
                slots.arg(),
                works.into_iter().collect(),
                [packing.members[0].place(1)].into_iter().collect(),
                full.arg(),
                2 * items,
                items,
                0,
                packing.shard_len(),
                [slots.elem(), slots.elem(), full.elem()],
            );
        }
        assert_same(&read(&client, &full)[..24], &tensor);
    }

    fn unpack_one(ranks: Range<usize>, slots: usize, full: usize) {
        let client = client();
        let packing = Packing::new(&[ShardLayout::flat(10, Placement::Shard(0), 2)]);
        let buffer = |len| Buffer::empty(&client, len, DType::F32);
        unpack(&client, &packing, ranks, &buffer(slots), &buffer(full));
    }

    #[test]
    #[should_panic(expected = "ranks 1..3 of a packing over 2")]
    fn ranks_beyond_the_world_are_refused() {
        unpack_one(1..3, 512, 256);
    }

    #[test]
    #[should_panic(expected = "slots of ranks 0..2 are unpacked")]
    fn fewer_slots_than_ranks_are_refused() {
        unpack_one(0..2, 256, 256);
    }

    #[test]
    #[should_panic(expected = "full tensors are unpacked into a full buffer")]
    fn a_full_buffer_of_another_length_is_refused() {
        unpack_one(0..2, 512, 10);
    }
}
