//! From the tensors of a unit into slots.

use burn::tensor::DType;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::std::FastDivmod;

use super::buffer::{Buffer, elem};
use super::launch::{Place, Work, address_type, grid, groups, wide, width, works};
use super::packing::{Member, Packing};
use super::rounding::{Key, Rounding, cast, cast_by_chance};

/// Casts and packs this rank's shards of all members into its slot. Padding becomes zeros.
///
/// Shards are as long as their layouts say, each of any dtype; `slot` holds one slot. Enqueues on
/// the calling thread's stream and returns at once.
pub(crate) fn pack(
    client: &Client,
    packing: &Packing,
    shards: &[Buffer],
    slot: &Buffer,
    rounding: Rounding,
) {
    assert_eq!(
        shards.len(),
        packing.members.len(),
        "every member of a packing has a shard"
    );
    assert_eq!(
        slot.len,
        packing.shard_len(),
        "shards are packed into one slot"
    );
    let members: Vec<_> = packing.members.iter().map(Member::shard).collect();
    let sources: Vec<_> = shards.iter().map(Some).collect();
    let into = Slots {
        buffer: slot,
        ranks: 1,
        len: packing.shard_len(),
    };
    fill(client, &members, &sources, &into, 1.0, rounding);
}

/// Divides the full gradients by `pre_divide`, casts them and packs them into the slots of all
/// ranks. Absent gradients and padding become zeros.
///
/// Gradients are as long as their layouts say, each of any dtype; `slots` holds a slot for every
/// rank. Divides in f32, or in f64 where the gradient or `slots` is. Enqueues on the calling
/// thread's stream and returns at once.
pub(crate) fn pack_gradients(
    client: &Client,
    packing: &Packing,
    gradients: &[Option<Buffer>],
    slots: &Buffer,
    pre_divide: f64,
) {
    assert_eq!(
        gradients.len(),
        packing.members.len(),
        "every member of a packing has a gradient or none"
    );
    assert_eq!(
        slots.len,
        packing.world_size * packing.shard_len(),
        "gradients are packed into a slot for each of {} ranks",
        packing.world_size
    );
    let sources: Vec<_> = gradients.iter().map(Option::as_ref).collect();
    let into = Slots {
        buffer: slots,
        ranks: packing.world_size,
        len: packing.shard_len(),
    };
    let nearest = Rounding::Nearest;
    fill(
        client,
        &packing.members,
        &sources,
        &into,
        pre_divide,
        nearest,
    );
}

/// Slots of consecutive ranks.
struct Slots<'a> {
    buffer: &'a Buffer,
    ranks: usize,
    /// Of one slot.
    len: usize,
}

/// Writes every element of the slots.
fn fill(
    client: &Client,
    members: &[Member],
    sources: &[Option<&Buffer>],
    slots: &Slots<'_>,
    divisor: f64,
    rounding: Rounding,
) {
    for (i, (member, source)) in members.iter().zip(sources).enumerate() {
        assert!(
            source.is_none_or(|source| source.len == member.tensor_len()),
            "member {i} of a packing has another length"
        );
    }
    let to = slots.buffer.dtype;
    let source = |i: usize| sources[i].filter(|source| source.len > 0);
    let filled = (0..members.len()).filter(|i| !members[*i].slot.is_empty());
    let keys = filled.map(|i| {
        let Some(source) = source(i) else {
            return (i, (None, width(client, &[to], &[slots.buffer.offset()])));
        };
        let dtypes = [source.dtype, to];
        let lens = [
            slots.buffer.offset(),
            source.offset(),
            members[i].run,
            members[i].row,
        ];
        (i, (Some(source.dtype), width(client, &dtypes, &lens)))
    });
    for group in groups(client, keys, 1) {
        let (from, width) = group.key;
        // Zeros are of the dtype they are written in.
        let from = from.unwrap_or(to);
        let by_chance = to == DType::BF16 && from != to && rounding != Rounding::Nearest;
        let between = if by_chance {
            DType::F32
        } else {
            wide([from, to])
        };
        let sources = group.members.iter().filter_map(|i| source(*i));
        let members = || group.members.iter().map(|i| &members[*i]);
        let (works, items) = works(members().map(|member| member.slot.len() / width));
        let (count, dim) = grid(client, slots.ranks * items);
        // SAFETY: the kernel checks that a unit has work, and lengths were checked against the
        // layouts, so every index is within its buffer.
        unsafe {
            fill_kernel::launch_unchecked(
                client,
                count,
                dim,
                address_type(slots.buffer.len),
                width,
                sources.map(Buffer::arg).collect(),
                works.into_iter().collect(),
                members().map(|member| member.place(width)).collect(),
                slots.buffer.arg(),
                slots.ranks * items,
                items,
                slots.len / width,
                InputScalar::new(divisor, elem(between)),
                rounding.into(),
                group.key.0.is_some(),
                divisor != 1.0,
                by_chance,
                [elem(from), elem(between), elem(to)],
            );
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn fill_kernel<I: Float, C: Float, O: Float, N: Size>(
    sources: &Sequence<Box<[Vector<I, N>]>>,
    works: &Sequence<Work>,
    places: &Sequence<Place>,
    slots: &mut [Vector<O, N>],
    total: usize,
    items_of_rank: FastDivmod<usize>,
    slot_len: usize,
    divisor: InputScalar,
    key: Key,
    #[comptime] is_present: bool,
    #[comptime] divides: bool,
    #[comptime] by_chance: bool,
    #[define(I, C, O)] _dtypes: [ElemType; 3],
) {
    if ABSOLUTE_POS >= total {
        terminate!();
    }
    let (rank, item) = items_of_rank.div_mod(ABSOLUTE_POS);
    #[unroll]
    for m in 0..places.len() {
        if works[m].contains(item) {
            let place = &places[m];
            let index = works[m].index(item);
            let target = place.slot + index;
            let mut value = Vector::<O, N>::new(O::from_int(0));
            if is_present {
                let (source, exists) = place.full_index(rank, index);
                if exists {
                    let mut wide = cast::<I, C, N>(sources[m][source]);
                    if divides {
                        wide /= Vector::new(divisor.get::<C>());
                    }
                    if by_chance {
                        value = cast_by_chance(Vector::cast_from(wide), target, &key);
                    } else {
                        value = cast(wide);
                    }
                }
            }
            slots[rank * slot_len + target] = value;
        }
    }
}

#[cfg(all(test, any(feature = "cpu", feature = "cuda")))]
mod tests {
    use proptest::prelude::*;

    use super::super::reference::{
        self, DTYPES, assert_same, client, divide, dtype, layouts, read, round, upload, values,
    };
    use super::*;
    use crate::Placement;
    use crate::placement::ShardLayout;

    /// One flat tensor that one rank holds.
    fn flat(len: usize) -> Packing {
        Packing::new(&[ShardLayout::flat(len, Placement::Shard(0), 1)])
    }

    fn packed(values: &[f64], from: DType, to: DType, rounding: Rounding) -> Vec<f64> {
        let client = client();
        let packing = flat(values.len());
        let slot = Buffer::empty(&client, packing.shard_len(), to);
        let shard = upload(&client, values, from);
        pack(&client, &packing, &[shard], &slot, rounding);
        read(&client, &slot)[..values.len()].to_vec()
    }

    #[test]
    fn every_dtype_is_cast_to_every_other_to_nearest_even() {
        for (from, to) in DTYPES.iter().flat_map(|from| DTYPES.map(|to| (*from, to))) {
            for len in [2048, 2047] {
                let values = values(7, len, from);
                let expected: Vec<_> = values.iter().map(|x| round(*x, to)).collect();
                let got = packed(&values, from, to, Rounding::Nearest);
                assert_same(&got, &expected);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn shards_are_packed_as_the_reference_packs_them(
            layouts in layouts(),
            from in prop::collection::vec(dtype(), 6),
            to in dtype(),
            seed: u64,
        ) {
            let client = client();
            let packing = Packing::new(&layouts);
            let shards = layouts.iter().zip(&from).enumerate();
            let shards: Vec<_> = shards
                .map(|(i, (layout, from))| values(seed ^ i as u64, layout.shard_len(), *from))
                .collect();
            let buffers = shards.iter().zip(&from).map(|(shard, from)| upload(&client, shard, *from));
            let buffers: Vec<_> = buffers.collect();
            let slot = Buffer::empty(&client, packing.shard_len(), to);
            pack(&client, &packing, &buffers, &slot, Rounding::Nearest);
            let expected = reference::pack(&packing, &shards, |x, _| round(x, to));
            assert_same(&read(&client, &slot), &expected);
        }

        #[test]
        fn gradients_are_packed_as_the_reference_packs_them(
            layouts in layouts(),
            present in prop::collection::vec(prop::bool::weighted(0.8), 6),
            from in dtype(),
            to in dtype(),
            pre_divide in prop::sample::select(vec![1.0, 2.0, 3.0, 7.1]),
            seed: u64,
        ) {
            let client = client();
            let packing = Packing::new(&layouts);
            let gradients = layouts.iter().zip(present).enumerate();
            let gradients: Vec<_> = gradients
                .map(|(i, (layout, present))| {
                    present.then(|| values(seed ^ i as u64, layout.full_len(), from))
                })
                .collect();
            let upload = |gradient: &Option<Vec<f64>>| Some(upload(&client, gradient.as_ref()?, from));
            let buffers: Vec<_> = gradients.iter().map(upload).collect();
            let len = packing.world_size * packing.shard_len();
            let slots = Buffer::empty(&client, len, to);
            pack_gradients(&client, &packing, &buffers, &slots, pre_divide);
            let value = |x| round(divide(x, pre_divide, [from, to]), to);
            let expected = reference::pack_gradients(&layouts, &packing, &gradients, value);
            assert_same(&read(&client, &slots), &expected);
        }
    }

    #[test]
    fn a_unit_of_more_members_than_a_launch_takes_is_packed_whole() {
        let client = client();
        let layouts: Vec<_> = (0..40)
            .map(|i| ShardLayout::new(&[i % 5, 3], Placement::Shard(0), 2))
            .collect();
        let packing = Packing::new(&layouts);
        let shards: Vec<_> = layouts
            .iter()
            .map(|layout| values(3, layout.shard_len(), DType::F32))
            .collect();
        let buffers: Vec<_> = shards
            .iter()
            .map(|s| upload(&client, s, DType::F32))
            .collect();
        let slot = Buffer::empty(&client, packing.shard_len(), DType::F32);
        pack(&client, &packing, &buffers, &slot, Rounding::Nearest);
        assert_same(
            &read(&client, &slot),
            &reference::pack(&packing, &shards, |x, _| x),
        );
    }

    #[test]
    fn rounding_by_chance_is_that_of_the_reference_for_every_seed() {
        for from in [DType::F32, DType::F64, DType::F16] {
            for (seed, len) in [(1, 1000), (2, 1001), (u64::MAX, 1000)] {
                let values = values(seed, len, from);
                let rounding = Rounding::Stochastic { seed };
                let key = rounding.key();
                let expected = values.iter().enumerate();
                let expected: Vec<_> = expected
                    .map(|(i, x)| reference::round_by_chance(*x, key, i))
                    .collect();
                assert_same(&packed(&values, from, DType::BF16, rounding), &expected);
            }
        }
    }

    #[test]
    fn rounding_by_chance_is_right_in_the_mean() {
        const COUNT: usize = 1 << 16;
        let step = 2f64.powi(-7);
        for (seed, part) in [(1, 0.3), (2, 0.5), (3, 0.01)] {
            let x = f64::from((1.0 + part * step) as f32);
            let rounding = Rounding::Stochastic { seed };
            let rounded = packed(&vec![x; COUNT], DType::F32, DType::BF16, rounding);
            assert!(rounded.iter().all(|r| *r == 1.0 || *r == 1.0 + step));
            let mean = rounded.iter().sum::<f64>() / COUNT as f64;
            // Five standard deviations of the mean of so many.
            let bound = 5.0 * step * (part * (1.0 - part) / COUNT as f64).sqrt();
            assert!((mean - x).abs() <= bound, "{x} became {mean} in the mean");
        }
    }

    #[test]
    fn rounding_by_chance_leaves_what_bf16_holds() {
        let values = values(5, 4000, DType::BF16);
        let rounding = Rounding::Stochastic { seed: 9 };
        assert_same(&packed(&values, DType::F32, DType::BF16, rounding), &values);
    }

    #[test]
    fn rounding_by_chance_differs_between_seeds_and_places() {
        let values = vec![1.0 + 2f64.powi(-8); 256];
        let rounded = |seed| {
            let rounding = Rounding::Stochastic { seed };
            packed(&values, DType::F32, DType::BF16, rounding)
        };
        assert_eq!(rounded(1), rounded(1));
        assert_ne!(rounded(1), rounded(2));
        assert_ne!(rounded(1)[..128], rounded(1)[128..]);
    }

    #[test]
    fn chance_does_not_touch_what_is_not_narrowed_to_bf16() {
        let values = values(5, 4000, DType::F32);
        let rounding = Rounding::Stochastic { seed: 9 };
        let expected: Vec<_> = values.iter().map(|x| round(*x, DType::F16)).collect();
        assert_same(
            &packed(&values, DType::F32, DType::F16, rounding),
            &expected,
        );
    }

    #[test]
    fn nothing_is_packed_from_no_members() {
        let client = client();
        let packing = Packing::new(&[]);
        let slot = Buffer::empty(&client, 0, DType::F32);
        pack(&client, &packing, &[], &slot, Rounding::Nearest);
        pack_gradients(&client, &packing, &[], &slot, 2.0);
    }

    #[test]
    #[should_panic(expected = "member 0 of a packing has another length")]
    fn a_shard_of_another_length_is_refused() {
        let client = client();
        let packing = flat(10);
        let shard = Buffer::empty(&client, 9, DType::F32);
        let slot = Buffer::empty(&client, packing.shard_len(), DType::F32);
        pack(&client, &packing, &[shard], &slot, Rounding::Nearest);
    }

    #[test]
    #[should_panic(expected = "every member of a packing has a shard")]
    fn a_missing_shard_is_refused() {
        let client = client();
        let packing = flat(10);
        let slot = Buffer::empty(&client, packing.shard_len(), DType::F32);
        pack(&client, &packing, &[], &slot, Rounding::Nearest);
    }

    #[test]
    #[should_panic(expected = "gradients are packed into a slot for each of 1 ranks")]
    fn slots_of_another_number_of_ranks_are_refused() {
        let client = client();
        let packing = flat(10);
        let slots = Buffer::empty(&client, 2 * packing.shard_len(), DType::F32);
        pack_gradients(&client, &packing, &[None], &slots, 1.0);
    }
}
