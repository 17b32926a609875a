//! What a reduction does with the slots it received.

use burn::tensor::DType;
use cubecl::client::Client;
use cubecl::prelude::*;

use super::buffer::{Buffer, elem};
use super::launch::{Place, Work, address_type, grid, groups, wide, width, works};
use super::packing::Packing;
use super::rounding::cast;
use crate::ReduceOp;

/// Adds one rank's contribution to the total, or takes the larger or smaller of both; NaN wins. The
/// first replaces what is in the total. [`ReduceOp::Mean`] adds; [`finish`] divides.
///
/// `part` and `total` are equally long; `total` is of f32, or of f64, which f64 parts need. Enqueues
/// on the calling thread's stream and returns at once.
pub(crate) fn combine(client: &Client, op: ReduceOp, part: &Buffer, total: &Buffer, first: bool) {
    assert_eq!(
        part.len, total.len,
        "a contribution is as long as the total"
    );
    assert!(
        total.dtype == wide([part.dtype, total.dtype]),
        "{:?} cannot be combined in {:?}",
        part.dtype,
        total.dtype
    );
    if part.len == 0 {
        return;
    }
    let op = match op {
        ReduceOp::Mean => ReduceOp::Sum,
        op => op,
    };
    let dtypes = [part.dtype, total.dtype];
    let width = width(client, &dtypes, &[part.len, part.offset(), total.offset()]);
    let items = part.len / width;
    let (count, dim) = grid(client, items);
    // SAFETY: the kernel checks that a unit has work, and both buffers are of this length.
    unsafe {
        combine_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(part.len),
            width,
            part.arg(),
            total.arg(),
            items,
            op,
            first,
            [part.elem(), total.elem()],
        );
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn combine_kernel<I: Float, C: Float, N: Size>(
    part: &[Vector<I, N>],
    total: &mut [Vector<C, N>],
    items: usize,
    #[comptime] op: ReduceOp,
    #[comptime] first: bool,
    #[define(I, C)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS >= items {
        terminate!();
    }
    let part = Vector::<C, N>::cast_from(part[ABSOLUTE_POS]);
    if first {
        total[ABSOLUTE_POS] = part;
    } else {
        let held = total[ABSOLUTE_POS];
        total[ABSOLUTE_POS] = match op {
            ReduceOp::Sum | ReduceOp::Mean => held + part,
            ReduceOp::Max => larger(held, part),
            ReduceOp::Min => smaller(held, part),
        };
    }
}

/// The larger of each pair; NaN if either is.
#[cube]
pub(super) fn larger<C: Float, N: Size>(a: Vector<C, N>, b: Vector<C, N>) -> Vector<C, N> {
    let larger = select_many(a.greater_than(&b), a, b);
    select_many(a.is_nan(), a, larger)
}

/// The smaller of each pair; NaN if either is.
#[cube]
fn smaller<C: Float, N: Size>(a: Vector<C, N>, b: Vector<C, N>) -> Vector<C, N> {
    let smaller = select_many(a.less_than(&b), a, b);
    select_many(a.is_nan(), a, smaller)
}

/// Divides this rank's reduced slot by `post_divide`, rounds it to `via`, the dtype of the reduction,
/// and casts it into the gradients of the members' shards, or adds it to what they hold.
///
/// `total` is a slot; it is divided in f32, or in f64 if it is of that. `gradients` are as long as the
/// shards. Dtypes may be any. Enqueues on the calling thread's stream and returns at once.
pub(crate) fn finish(
    client: &Client,
    packing: &Packing,
    total: &Buffer,
    via: DType,
    gradients: &[Buffer],
    post_divide: f64,
    accumulate: bool,
) {
    let members = &packing.members;
    assert_eq!(
        gradients.len(),
        members.len(),
        "every member of a packing has a gradient"
    );
    assert_eq!(
        total.len,
        packing.shard_len(),
        "gradients are taken from one slot"
    );
    for (i, (member, gradient)) in members.iter().zip(gradients).enumerate() {
        assert_eq!(
            gradient.len, member.shard_len,
            "member {i} of a packing has a gradient of another length"
        );
    }
    let filled = (0..members.len()).filter(|i| members[*i].shard_len > 0);
    let keys = filled.map(|i| {
        let to = gradients[i].dtype;
        let lens = [total.offset(), gradients[i].offset(), members[i].shard_len];
        (i, (to, width(client, &[total.dtype, to], &lens)))
    });
    for group in groups(client, keys, 1) {
        let (to, width) = group.key;
        let places = group.members.iter().map(|i| members[*i].place(width));
        let (works, items) = works(group.members.iter().map(|i| members[*i].shard_len / width));
        let (count, dim) = grid(client, items);
        let divided = elem(wide([total.dtype]));
        // SAFETY: the kernel checks that a unit has work, and lengths were checked against the
        // layouts, so every index is within its buffer.
        unsafe {
            finish_kernel::launch_unchecked(
                client,
                count,
                dim,
                address_type(total.len),
                width,
                total.arg(),
                group.members.iter().map(|i| gradients[*i].arg()).collect(),
                works.into_iter().collect(),
                places.collect(),
                InputScalar::new(post_divide, divided),
                post_divide != 1.0,
                accumulate,
                [total.elem(), divided, elem(via), elem(wide([to])), elem(to)],
            );
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn finish_kernel<T: Float, C: Float, V: Float, W: Float, O: Float, N: Size>(
    total: &[Vector<T, N>],
    gradients: &mut Sequence<Box<[Vector<O, N>]>>,
    works: &Sequence<Work>,
    places: &Sequence<Place>,
    divisor: InputScalar,
    #[comptime] divides: bool,
    #[comptime] accumulate: bool,
    #[define(T, C, V, W, O)] _dtypes: [ElemType; 5],
) {
    #[unroll]
    for m in 0..places.len() {
        if works[m].contains(ABSOLUTE_POS) {
            let index = works[m].index(ABSOLUTE_POS);
            let place = &places[m];
            let target = &mut gradients[m];
            let mut value = Vector::<C, N>::cast_from(total[place.slot + index]);
            if divides {
                value /= Vector::new(divisor.get::<C>());
            }
            let mut gradient = cast::<V, O, N>(cast(value));
            if accumulate {
                // Added as tensors of this dtype are, but without a device's own half arithmetic.
                let held = Vector::<W, N>::cast_from(target[index]);
                gradient = cast(held + Vector::<W, N>::cast_from(gradient));
            }
            target[index] = gradient;
        }
    }
}

#[cfg(all(test, any(feature = "cpu", feature = "cuda")))]
mod tests {
    use burn::tensor::{Bytes, Tensor};
    use proptest::prelude::*;

    use super::super::pack_gradients;
    use super::super::reference::{
        self, DTYPES, assert_same, client, divide, dtype, layouts, read, round, upload, values,
    };
    use super::*;
    use crate::Placement;
    use crate::comm::host;
    use crate::placement::ShardLayout;
    use crate::reduction::Reduction;

    const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min];

    #[test]
    fn contributions_are_combined_as_the_reference_does() {
        let client = client();
        for op in OPS {
            for (part, len) in DTYPES
                .iter()
                .flat_map(|part| [(*part, 1000), (*part, 1), (*part, 7)])
            {
                let total = wide([part]);
                let (a, b) = (values(1, len, part), values(2, len, part));
                let sum = Buffer::empty(&client, len, total);
                combine(&client, op, &upload(&client, &a, part), &sum, true);
                assert_same(&read(&client, &sum), &a);
                combine(&client, op, &upload(&client, &b, part), &sum, false);
                let both = a.iter().zip(&b);
                let expected: Vec<_> = both
                    .map(|(a, b)| reference::combine(op, *a, *b, total))
                    .collect();
                assert_same(&read(&client, &sum), &expected);
            }
        }
    }

    #[test]
    fn the_larger_and_the_smaller_of_nan_and_a_number_are_nan() {
        let client = client();
        for op in [ReduceOp::Max, ReduceOp::Min] {
            let total = upload(&client, &[f64::NAN, 1.0], DType::F32);
            let part = upload(&client, &[1.0, f64::NAN], DType::F32);
            combine(&client, op, &part, &total, false);
            assert!(read(&client, &total).iter().all(|x| x.is_nan()));
        }
    }

    #[test]
    fn an_empty_contribution_is_combined() {
        let client = client();
        let empty = Buffer::empty(&client, 0, DType::F32);
        combine(&client, ReduceOp::Sum, &empty, &empty, false);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn reduced_gradients_are_finished_as_the_reference_does(
            layouts in layouts(),
            to in prop::collection::vec(dtype(), 6),
            via in dtype(),
            total in dtype(),
            post_divide in prop::sample::select(vec![1.0, 2.0, 3.0, 7.1]),
            accumulate: bool,
            seed: u64,
        ) {
            let client = client();
            let packing = Packing::new(&layouts);
            let slot = values(seed, packing.shard_len(), total);
            let held = |i: usize| values(seed ^ i as u64, packing.members[i].shard_len, to[i]);
            let gradients = 0..layouts.len();
            let gradients: Vec<_> = gradients.map(|i| upload(&client, &held(i), to[i])).collect();
            let reduced = upload(&client, &slot, total);
            finish(&client, &packing, &reduced, via, &gradients, post_divide, accumulate);
            for (i, gradient) in gradients.iter().enumerate() {
                let start = packing.members[i].slot.start;
                let expected = held(i).into_iter().zip(&slot[start..]).map(|(held, x)| {
                    let x = round(divide(*x, post_divide, [total; 2]), via);
                    let x = round(x, to[i]);
                    let both = reference::combine(ReduceOp::Sum, held, x, wide([to[i]]));
                    if accumulate { round(both, to[i]) } else { x }
                });
                assert_same(&read(&client, gradient), &expected.collect::<Vec<_>>());
            }
        }
    }

    /// Reduces tensors of a layout on the device; every rank's shard.
    fn reduced(
        layout: &ShardLayout,
        parts: &[Vec<f64>],
        wire: DType,
        reduction: &Reduction,
    ) -> Vec<Vec<f64>> {
        let client = client();
        let packing = Packing::new(std::slice::from_ref(layout));
        let slots = parts.iter().map(|part| {
            let len = packing.world_size * packing.shard_len();
            let slots = Buffer::empty(&client, len, wire);
            let gradient = upload(&client, part, DType::F32);
            pack_gradients(
                &client,
                &packing,
                &[Some(gradient)],
                &slots,
                reduction.pre_divide,
            );
            slots
        });
        let slots: Vec<_> = slots.collect();
        let shard = |rank| {
            let total = Buffer::empty(&client, packing.shard_len(), DType::F32);
            for (i, slots) in slots.iter().enumerate() {
                let part = slots.range(packing.slot(rank));
                combine(&client, reduction.op, &part, &total, i == 0);
            }
            let gradient = Buffer::empty(&client, layout.shard_len(), DType::F32);
            let gradients = std::slice::from_ref(&gradient);
            let divide = reduction.post_divide;
            finish(&client, &packing, &total, wire, gradients, divide, false);
            read(&client, &gradient)
        };
        (0..packing.world_size).map(shard).collect()
    }

    #[test]
    fn a_reduction_on_a_device_has_the_bits_of_one_on_the_host() {
        let layout = ShardLayout::new(&[4, 7, 6], Placement::Shard(1), 3);
        for (wire, op) in [DType::F32, DType::BF16, DType::F16]
            .iter()
            .flat_map(|wire| [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min].map(|op| (*wire, op)))
        {
            let reduction = match op {
                ReduceOp::Sum => Reduction::new(crate::GradientAverage::Mean, 3, wire),
                op => Reduction::plain(op),
            };
            let parts: Vec<_> = (0..3)
                .map(|rank| values(rank, layout.full_len(), DType::F32))
                .collect();
            let tensors: Vec<_> = parts
                .iter()
                .map(|part| {
                    let part: Vec<_> = part.iter().map(|x| *x as f32).collect();
                    host::from_bytes(Bytes::from_elems(part), layout.full_len(), DType::F32)
                })
                .map(|tensor: Tensor<1>| host::host(&tensor).unwrap())
                .collect();
            let contributions: Vec<_> = tensors.iter().map(Some).collect();
            let got = reduced(&layout, &parts, wire, &reduction);
            for (rank, got) in got.iter().enumerate() {
                let mut expected = vec![0f32; layout.shard_len()];
                for span in layout.spans(rank) {
                    let out = &mut expected[span.shard..][..span.len];
                    host::reduce(&contributions, span.full, out, wire, &reduction);
                }
                let expected: Vec<_> = expected.into_iter().map(f64::from).collect();
                assert_same(got, &expected);
            }
        }
    }

    #[test]
    #[should_panic(expected = "a contribution is as long as the total")]
    fn contributions_of_another_length_are_refused() {
        let client = client();
        let buffer = |len| Buffer::empty(&client, len, DType::F32);
        combine(&client, ReduceOp::Sum, &buffer(8), &buffer(9), true);
    }

    #[test]
    #[should_panic(expected = "F64 cannot be combined in F32")]
    fn a_total_that_is_too_narrow_is_refused() {
        let client = client();
        let buffer = |dtype| Buffer::empty(&client, 8, dtype);
        combine(
            &client,
            ReduceOp::Sum,
            &buffer(DType::F64),
            &buffer(DType::F32),
            true,
        );
    }

    #[test]
    #[should_panic(expected = "member 0 of a packing has a gradient of another length")]
    fn a_gradient_of_another_length_is_refused() {
        let client = client();
        let packing = Packing::new(&[ShardLayout::flat(10, Placement::Shard(0), 1)]);
        let total = Buffer::empty(&client, packing.shard_len(), DType::F32);
        let gradients = [Buffer::empty(&client, 11, DType::F32)];
        let via = DType::F32;
        finish(&client, &packing, &total, via, &gradients, 1.0, false);
    }
}
