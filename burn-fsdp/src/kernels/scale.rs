use burn::tensor::DType;
use cubecl::client::Client;
use cubecl::prelude::*;

use super::buffer::{Buffer, elem};
use super::launch::{Work, address_type, grid, groups, wide, width, works};
use super::rounding::cast;

/// Multiplies all elements by `factor`, in place.
///
/// Buffers of any dtypes and lengths, none twice; each is multiplied in f32, or in f64 if it is
/// one, and rounded once. Enqueues on the calling thread's stream and returns at once.
pub(crate) fn scale(client: &Client, buffers: &[Buffer], factor: f64) {
    let filled = buffers
        .iter()
        .enumerate()
        .filter(|(_, buffer)| buffer.len > 0);
    let keys = filled.map(|(i, buffer)| {
        let width = width(client, &[buffer.dtype], &[buffer.len, buffer.offset()]);
        (i, (buffer.dtype, width))
    });
    for group in groups(client, keys, 0) {
        let (dtype, width) = group.key;
        let members = || group.members.iter().map(|i| &buffers[*i]);
        let longest = members().map(|buffer| buffer.len).sum();
        let (works, items) = works(members().map(|buffer| buffer.len / width));
        let (count, dim) = grid(client, items);
        let between: DType = wide([dtype]);
        // SAFETY: the kernel checks that a unit has work, which is as much as the buffers are long.
        unsafe {
            scale_kernel::launch_unchecked(
                client,
                count,
                dim,
                address_type(longest),
                width,
                members().map(Buffer::arg).collect(),
                works.into_iter().collect(),
                InputScalar::new(factor, elem(between)),
                [elem(dtype), elem(between)],
            );
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn scale_kernel<E: Float, C: Float, N: Size>(
    buffers: &mut Sequence<Box<[Vector<E, N>]>>,
    works: &Sequence<Work>,
    factor: InputScalar,
    #[define(E, C)] _dtypes: [ElemType; 2],
) {
    #[unroll]
    for m in 0..works.len() {
        if works[m].contains(ABSOLUTE_POS) {
            let index = works[m].index(ABSOLUTE_POS);
            let buffer = &mut buffers[m];
            let scaled = Vector::<C, N>::cast_from(buffer[index]) * Vector::new(factor.get::<C>());
            buffer[index] = cast(scaled);
        }
    }
}

#[cfg(all(test, any(feature = "cpu", feature = "cuda")))]
mod tests {
    use proptest::prelude::*;

    use super::super::reference::{assert_same, client, dtype, read, round, upload, values};
    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn buffers_are_scaled_as_the_reference_does(
            buffers in prop::collection::vec((dtype(), 0..70usize), 0..20),
            factor in prop::sample::select(vec![0.0, 0.1, 1.0, -3.3, f64::INFINITY]),
            seed: u64,
        ) {
            let client = client();
            let held = buffers.iter().map(|(dtype, len)| values(seed, *len, *dtype));
            let held: Vec<_> = held.collect();
            let scaled = buffers.iter().zip(&held);
            let scaled: Vec<_> = scaled.map(|((dtype, _), x)| upload(&client, x, *dtype)).collect();
            scale(&client, &scaled, factor);
            for (buffer, held) in scaled.iter().zip(&held) {
                let times = |x: &f64| match buffer.dtype {
                    DType::F64 => x * factor,
                    dtype => round(f64::from(*x as f32 * factor as f32), dtype),
                };
                let expected: Vec<_> = held.iter().map(times).collect();
                assert_same(&read(&client, buffer), &expected);
            }
        }
    }

    #[test]
    fn only_the_range_given_is_scaled() {
        let client = client();
        let buffer = upload(&client, &[1.0; 24], DType::F32);
        scale(&client, &[buffer.range(3..20)], 2.0);
        let expected: Vec<_> = (0..24)
            .map(|i| if (3..20).contains(&i) { 2.0 } else { 1.0 })
            .collect();
        assert_same(&read(&client, &buffer), &expected);
    }
}
