//! Narrowing of values to another dtype.

use burn::tensor::DType;
use cubecl::prelude::*;

use super::buffer::elem;

/// What becomes of a value that bf16 does not hold. All other dtypes round to nearest, always.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// To the nearest, ties to even.
    Nearest,
    /// Up or down by chance, so that the mean of many is the value itself: what updates smaller than
    /// half a step of bf16 need in order not to be lost.
    ///
    /// The choice depends on the seed and on the place in the slot alone. Values that bf16 holds,
    /// infinities and NaN stay as they are; above the largest finite one the upper is infinity.
    #[allow(dead_code)] // No policy asks for it yet.
    Stochastic {
        /// Another for each step.
        seed: u64,
    },
}

impl Rounding {
    /// A key for [`random_bits`]; similar seeds have different ones.
    pub(super) fn key(self) -> [u32; 2] {
        let Self::Stochastic { seed } = self else {
            return [0, 0];
        };
        // The finalizer of splitmix64.
        let mut key = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        key = (key ^ (key >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        key = (key ^ (key >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        key ^= key >> 31;
        [key as u32, (key >> 32) as u32]
    }
}

/// A key of random bits.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Key {
    low: u32,
    high: u32,
}

impl From<Rounding> for KeyLaunch {
    fn from(rounding: Rounding) -> Self {
        let [low, high] = rounding.key();
        Self::new(low, high)
    }
}

/// Casts to the nearest value, ties to even, in one rounding.
///
/// To bf16 by bits: some processors' instruction takes subnormal numbers for zero, which the CPU
/// runtime uses even to copy (so a copy of bf16 is a cast from f32). From f64 by way of an f32 that
/// keeps what decides a tie, so that nothing is rounded twice.
#[cube]
pub(super) fn cast<I: Float, O: Float, N: Size>(value: Vector<I, N>) -> Vector<O, N> {
    let from = elem_type_of::<I>().comptime();
    let to = elem_type_of::<O>().comptime();
    if comptime![from == to || to.size() > 2] {
        Vector::cast_from(value)
    } else {
        let value = if comptime![from.size() == 8] {
            to_odd(Vector::<f64, N>::cast_from(value))
        } else {
            Vector::<f32, N>::cast_from(value)
        };
        if comptime![to != elem(DType::BF16)] {
            Vector::cast_from(value)
        } else {
            let bits = Vector::<u32, N>::reinterpret(value);
            let is_odd = (bits >> Vector::new(16u32)) & Vector::new(1u32);
            upper_half(value, bits + Vector::new(0x7fffu32) + is_odd)
        }
    }
}

/// Rounds the f32 values of vector `index` to bf16 by chance. `O` is bf16.
#[cube]
pub(super) fn cast_by_chance<O: Float, N: Size>(
    value: Vector<f32, N>,
    index: usize,
    key: &Key,
) -> Vector<O, N> {
    let bits = Vector::<u32, N>::reinterpret(value);
    let noise = random_bits::<N>(index, key) & Vector::new(0xffffu32);
    upper_half(value, bits + noise)
}

/// The bf16 that the upper halves of these bits are; what is not finite stays.
#[cube]
fn upper_half<O: Float, N: Size>(value: Vector<f32, N>, bits: Vector<u32, N>) -> Vector<O, N> {
    let unrounded = Vector::<u32, N>::reinterpret(value);
    let exponent = Vector::new(0x7f80_0000u32);
    let is_finite = (unrounded & exponent).not_equal(&exponent);
    // The quiet bit, so that a NaN with nothing in its upper half does not become infinite.
    let special = select_many(
        value.is_nan(),
        unrounded | Vector::new(0x0040_0000u32),
        unrounded,
    );
    let upper = select_many(is_finite, bits, special) >> Vector::new(16u32);
    Vector::reinterpret(Vector::<u16, N>::cast_from(upper))
}

/// The nearest f32 values toward zero, but with the last bit set where something was lost: rounded
/// once more, to fewer bits, they become what the f64 values would have become.
#[cube]
fn to_odd<N: Size>(value: Vector<f64, N>) -> Vector<f32, N> {
    let nearest = Vector::<f32, N>::cast_from(value);
    let back = Vector::<f64, N>::cast_from(nearest);
    let bits = Vector::<u32, N>::reinterpret(nearest);
    let one = Vector::new(1u32);
    let bits = select_many(back.abs().greater_than(&value.abs()), bits - one, bits);
    let odd = Vector::<f32, N>::reinterpret(bits | one);
    let is_exact = back.equal(&value);
    select_many(value.is_nan(), nearest, select_many(is_exact, nearest, odd))
}

/// 32 random bits for each element of vector `index`: a hash of the key and of the element's place,
/// two rounds of murmur's finalizer. Repeats after 2^32 elements.
#[cube]
fn random_bits<N: Size>(index: usize, key: &Key) -> Vector<u32, N> {
    let mut place = Vector::<u32, N>::empty();
    let first = u32::cast_from(index * N::value());
    #[unroll]
    for lane in 0..N::value() {
        place.insert(lane, first + lane as u32);
    }
    mix(mix(place ^ Vector::new(key.low)) ^ Vector::new(key.high))
}

#[cube]
fn mix<N: Size>(bits: Vector<u32, N>) -> Vector<u32, N> {
    let bits = (bits ^ (bits >> Vector::new(16u32))) * Vector::new(0x85eb_ca6bu32);
    let bits = (bits ^ (bits >> Vector::new(13u32))) * Vector::new(0xc2b2_ae35u32);
    bits ^ (bits >> Vector::new(16u32))
}
