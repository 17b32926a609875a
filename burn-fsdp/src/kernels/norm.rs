//! Sums over all elements of many buffers, as norms need them.
//!
//! # Note: a blocked sum
//!
//! A unit adds [`TERMS`] elements apart from each other, and what it found is one element of a
//! buffer [`TERMS`] times shorter, which is summed in the same way until one is left. The order is
//! the same each time, so equal buffers have equal sums, and the relative error in f32 is at most
//! about 2^-24 times `TERMS` for each of the few levels, however long the buffers are.

use burn::tensor::DType;
use cubecl::client::Client;
use cubecl::prelude::*;

use super::buffer::{Buffer, elem};
use super::gradients::larger;
use super::launch::{Work, address_type, grid, groups, wide, width, works};
use crate::NormType;

/// Vectors that one unit adds.
const TERMS: usize = 32;

/// The norm of all elements taken as one vector, before the root (L2: the sum of squares), as a buffer
/// of one element. NaN if one of them is.
///
/// Buffers of any dtypes and lengths. Sums in f32, or in f64 if one of them is, of which the result
/// is. Enqueues on the calling thread's stream and returns at once.
pub(crate) fn norm(client: &Client, norm: NormType, buffers: &[Buffer]) -> Buffer {
    let dtype = wide(buffers.iter().map(|buffer| buffer.dtype));
    let mut partials = shorten(client, norm, buffers, dtype);
    // Squares are taken once. What is left is not negative, so that its absolute values are itself.
    let rest = match norm {
        NormType::L1 | NormType::L2 => NormType::L1,
        NormType::Inf => NormType::Inf,
    };
    while partials.len > 1 {
        partials = shorten(client, rest, &[partials], dtype);
    }
    partials
}

/// One element for every [`TERMS`] vectors of the buffers, at least one.
fn shorten(client: &Client, norm: NormType, buffers: &[Buffer], dtype: DType) -> Buffer {
    let filled = buffers
        .iter()
        .enumerate()
        .filter(|(_, buffer)| buffer.len > 0);
    let keys = filled.map(|(i, buffer)| {
        let dtypes = [buffer.dtype, dtype];
        let width = width(client, &dtypes, &[buffer.len, buffer.offset()]);
        (i, (buffer.dtype, width))
    });
    let groups = groups(client, keys, 1);
    if groups.is_empty() {
        return zero(client, dtype);
    }
    let terms = |i: usize, width: usize| buffers[i].len / width;
    let sums = |i: usize, width| terms(i, width).div_ceil(TERMS);
    let of_group = groups.iter().flat_map(|group| {
        let width = group.key.1;
        group.members.iter().map(move |i| sums(*i, width))
    });
    let shorter = Buffer::empty(client, of_group.sum(), dtype);
    let mut done = 0;
    for group in groups {
        let (from, width) = group.key;
        let members = || group.members.iter().copied();
        let (works, items) = works(members().map(|i| sums(i, width)));
        let (count, dim) = grid(client, items);
        let longest: usize = members().map(|i| buffers[i].len).sum();
        // SAFETY: the kernel checks that a unit has work and stays within the lengths it is given,
        // which are those of the buffers; `shorter` has an element for every item of all groups.
        unsafe {
            norm_kernel::launch_unchecked(
                client,
                count,
                dim,
                address_type(longest.max(shorter.len)),
                width,
                members().map(|i| buffers[i].arg()).collect(),
                works.into_iter().collect(),
                members().map(|i| terms(i, width)).collect(),
                shorter.arg(),
                done,
                norm,
                [elem(from), elem(dtype)],
            );
        }
        done += items;
    }
    shorter
}

fn zero(client: &Client, dtype: DType) -> Buffer {
    Buffer {
        handle: client.create_from_slice(&[0; 8][..dtype.size()]),
        len: 1,
        dtype,
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn norm_kernel<I: Float, C: Float, N: Size>(
    buffers: &Sequence<Box<[Vector<I, N>]>>,
    works: &Sequence<Work>,
    terms: &Sequence<usize>,
    sums: &mut [C],
    first_sum: usize,
    #[comptime] norm: NormType,
    #[define(I, C)] _dtypes: [ElemType; 2],
) {
    #[unroll]
    for m in 0..works.len() {
        if works[m].contains(ABSOLUTE_POS) {
            let work = &works[m];
            let mut index = work.index(ABSOLUTE_POS);
            let mut total = Vector::<C, N>::new(C::from_int(0));
            // Neighbouring units read neighbouring vectors.
            while index < terms[m] {
                let value = Vector::<C, N>::cast_from(buffers[m][index]);
                total = match norm {
                    NormType::L1 => total + value.abs(),
                    NormType::L2 => total + value * value,
                    NormType::Inf => larger(total, value.abs()),
                };
                index += work.items;
            }
            let mut sum = Vector::<C, Const<1>>::new(total.extract(0usize));
            #[unroll]
            for lane in 1..N::value() {
                let lane = Vector::<C, Const<1>>::new(total.extract(lane));
                sum = match norm {
                    NormType::L1 | NormType::L2 => sum + lane,
                    NormType::Inf => larger(sum, lane),
                };
            }
            sums[first_sum + ABSOLUTE_POS] = sum.extract(0usize);
        }
    }
}

#[cfg(all(test, any(feature = "cpu", feature = "cuda")))]
mod tests {
    use proptest::prelude::*;

    use super::super::reference::{client, dtype, read, round, upload, values};
    use super::*;

    fn only(client: &Client, buffer: &Buffer) -> f64 {
        assert_eq!(buffer.len, 1);
        read(client, buffer)[0]
    }

    /// Values whose squares f32 holds.
    fn moderate(seed: u64, len: usize, dtype: DType) -> Vec<f64> {
        let values = values(seed, len, dtype).into_iter();
        let moderate = |x: f64| if x.abs() < 1e6 { x } else { round(0.3, dtype) };
        values.map(moderate).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]

        #[test]
        fn sums_are_those_of_f64_but_for_rounding(
            buffers in prop::collection::vec((dtype(), 0..3000usize), 0..6),
            seed: u64,
        ) {
            let client = client();
            let held = buffers.iter().map(|(dtype, len)| moderate(seed, *len, *dtype));
            let held: Vec<_> = held.collect();
            let uploaded = buffers.iter().zip(&held);
            let uploaded: Vec<_> = uploaded.map(|((dtype, _), x)| upload(&client, x, *dtype)).collect();
            let all = || held.iter().flatten();
            let squares: f64 = all().map(|x| x * x).sum();
            let absolute: f64 = all().map(|x| x.abs()).sum();
            let largest = all().fold(0.0, |m: f64, x| m.max(x.abs()));
            let result = norm(&client, NormType::L2, &uploaded);
            assert_eq!(result.dtype, wide(buffers.iter().map(|(dtype, _)| *dtype)));
            // Two levels of as many additions as a unit makes, and its lanes; squares that f32 holds
            // as subnormals only.
            let bound = |sum: f64| sum * 2f64.powi(-24) * 2.0 * (TERMS + 8) as f64 + 1e-36;
            assert!((only(&client, &result) - squares).abs() <= bound(squares));
            let result = only(&client, &norm(&client, NormType::L1, &uploaded));
            assert!((result - absolute).abs() <= bound(absolute));
            let result = only(&client, &norm(&client, NormType::Inf, &uploaded));
            assert_eq!(result, round(largest, result_dtype(&buffers)));
        }
    }

    fn result_dtype(buffers: &[(DType, usize)]) -> DType {
        wide(buffers.iter().map(|(dtype, _)| *dtype))
    }

    #[test]
    fn a_long_sum_in_f32_is_as_good_as_its_levels_are_few() {
        const LEN: usize = (1 << 22) + 5;
        let client = client();
        let x = f64::from(0.1f32);
        let buffer = upload(&client, &vec![x; LEN], DType::F32);
        let exact = x * x * LEN as f64;
        let buffers = [buffer];
        let got = only(&client, &norm(&client, NormType::L2, &buffers));
        // At one element a vector there are five levels. Added one by one, 5e-3 of it would be lost.
        let bound = exact * 2f64.powi(-24) * 5.0 * TERMS as f64;
        assert!((got - exact).abs() <= bound, "{got} is not {exact}");
        let again = only(&client, &norm(&client, NormType::L2, &buffers));
        assert_eq!(got.to_bits(), again.to_bits());
    }

    #[test]
    fn buffers_of_several_launches_are_in_one_sum() {
        let client = client();
        let buffers: Vec<_> = (1..=40)
            .map(|len| upload(&client, &vec![2.0; len], DType::F32))
            .collect();
        let count = (1..=40).sum::<usize>() as f64;
        let sum = only(&client, &norm(&client, NormType::L2, &buffers));
        assert_eq!(sum, 4.0 * count);
    }

    #[test]
    fn one_nan_or_infinity_is_heard() {
        let client = client();
        for place in [0, 999, 4000] {
            let mut values = vec![1.0; 4001];
            values[place] = f64::NAN;
            let buffer = [upload(&client, &values, DType::BF16)];
            for kind in [NormType::L2, NormType::L1, NormType::Inf] {
                assert!(only(&client, &norm(&client, kind, &buffer)).is_nan());
            }
            values[place] = f64::NEG_INFINITY;
            let buffer = [upload(&client, &values, DType::BF16)];
            for kind in [NormType::L2, NormType::L1, NormType::Inf] {
                assert_eq!(only(&client, &norm(&client, kind, &buffer)), f64::INFINITY);
            }
        }
    }

    #[test]
    fn the_sum_over_nothing_is_zero() {
        let client = client();
        let empty = Buffer::empty(&client, 0, DType::F64);
        assert_eq!(only(&client, &norm(&client, NormType::L2, &[])), 0.0);
        assert_eq!(only(&client, &norm(&client, NormType::Inf, &[empty])), 0.0);
    }
}
