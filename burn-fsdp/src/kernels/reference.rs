//! What the kernels should do, in plain Rust, one element after another; and what their tests share.
//!
//! Every value of every dtype is a value of f64, so the reference computes in that and rounds where
//! the kernels do.

use burn::tensor::{DType, bf16, f16};
use cubecl::client::Client;
use proptest::prelude::*;

use super::{Buffer, Packing};
use crate::placement::ShardLayout;
use crate::{Placement, ReduceOp};

pub(super) const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

/// The device to test on: what `BURN_FSDP_TEST_DEVICE` names, the CPU by default.
pub(super) fn client() -> Client {
    let device = match std::env::var("BURN_FSDP_TEST_DEVICE").as_deref() {
        #[cfg(feature = "cpu")]
        Err(_) | Ok("cpu") => cubecl::Device::cpu(),
        #[cfg(feature = "cuda")]
        Ok("cuda") => cubecl::Device::cuda(0),
        name => panic!("BURN_FSDP_TEST_DEVICE={name:?}: built without this device"),
    };
    device.expect("the device is there").client()
}

pub(super) fn upload(client: &Client, values: &[f64], dtype: DType) -> Buffer {
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|x| match dtype {
            DType::F64 => x.to_le_bytes().to_vec(),
            DType::F32 => (*x as f32).to_le_bytes().to_vec(),
            DType::F16 => f16::from_f64(*x).to_le_bytes().to_vec(),
            _ => bf16::from_f64(*x).to_le_bytes().to_vec(),
        })
        .collect();
    Buffer {
        handle: client.create_from_slice(&bytes),
        len: values.len(),
        dtype,
    }
}

pub(super) fn read(client: &Client, buffer: &Buffer) -> Vec<f64> {
    if buffer.len == 0 {
        return Vec::new();
    }
    let bytes = client.read_one(buffer.handle.clone());
    let bytes = bytes.expect("no kernel before failed");
    let bytes = bytes.chunks_exact(buffer.dtype.size()).take(buffer.len);
    bytes
        .map(|x| match buffer.dtype {
            DType::F64 => f64::from_le_bytes(x.try_into().unwrap()),
            DType::F32 => f64::from(f32::from_le_bytes(x.try_into().unwrap())),
            DType::F16 => f16::from_le_bytes(x.try_into().unwrap()).to_f64(),
            _ => bf16::from_le_bytes(x.try_into().unwrap()).to_f64(),
        })
        .collect()
}

/// Compares bits, so that zeros have a sign; all NaN are equal.
pub(super) fn assert_same(got: &[f64], expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let same = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
        assert!(same, "element {i} is {got:e}, not {expected:e}");
    }
}

/// The nearest value of a dtype, of two the even one.
pub(super) fn round(x: f64, dtype: DType) -> f64 {
    let (mantissa, min_exponent, max) = match dtype {
        DType::F16 => (10, -14, f16::MAX.to_f64()),
        DType::BF16 => (7, -126, bf16::MAX.to_f64()),
        DType::F32 => return f64::from(x as f32),
        _ => return x,
    };
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let exponent = ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023;
    let step = 2f64.powi(exponent.max(min_exponent) - mantissa);
    let rounded = (x / step).round_ties_even() * step;
    if rounded.abs() > max {
        f64::INFINITY.copysign(x)
    } else {
        rounded
    }
}

/// bf16 by chance, of an element of a slot.
pub(super) fn round_by_chance(x: f64, key: [u32; 2], index: usize) -> f64 {
    let mix = |mut bits: u32| {
        bits = (bits ^ (bits >> 16)).wrapping_mul(0x85eb_ca6b);
        bits = (bits ^ (bits >> 13)).wrapping_mul(0xc2b2_ae35);
        bits ^ (bits >> 16)
    };
    let x = x as f32;
    if !x.is_finite() {
        return f64::from(x);
    }
    let noise = mix(mix(index as u32 ^ key[0]) ^ key[1]) & 0xffff;
    f64::from(f32::from_bits(
        x.to_bits().wrapping_add(noise) & 0xffff_0000,
    ))
}

/// The quotient as the arithmetic for these dtypes has it.
pub(super) fn divide(x: f64, by: f64, dtypes: [DType; 2]) -> f64 {
    if dtypes.contains(&DType::F64) {
        x / by
    } else {
        f64::from(x as f32 / by as f32)
    }
}

/// A rank's shard of a full tensor, padded with zeros.
pub(super) fn shard(layout: &ShardLayout, rank: usize, full: &[f64]) -> Vec<f64> {
    let mut shard = vec![0.0; layout.shard_len()];
    for span in layout.spans(rank) {
        shard[span.shard..][..span.len].copy_from_slice(&full[span.full..][..span.len]);
    }
    shard
}

pub(super) fn pack(
    packing: &Packing,
    shards: &[Vec<f64>],
    round: impl Fn(f64, usize) -> f64,
) -> Vec<f64> {
    let mut slot = vec![0.0; packing.shard_len()];
    for (member, shard) in packing.members.iter().zip(shards) {
        for (i, x) in shard.iter().enumerate() {
            slot[member.slot.start + i] = round(*x, member.slot.start + i);
        }
    }
    slot
}

pub(super) fn pack_gradients(
    layouts: &[ShardLayout],
    packing: &Packing,
    gradients: &[Option<Vec<f64>>],
    value: impl Fn(f64) -> f64,
) -> Vec<f64> {
    let mut slots = vec![0.0; packing.world_size * packing.shard_len()];
    for (i, layout) in layouts.iter().enumerate() {
        let Some(gradient) = &gradients[i] else {
            continue;
        };
        for rank in 0..packing.world_size {
            let slot = packing.slot(rank).start + packing.members[i].slot.start;
            for span in layout.spans(rank) {
                for j in 0..span.len {
                    slots[slot + span.shard + j] = value(gradient[span.full + j]);
                }
            }
        }
    }
    slots
}

/// `total op part`, in f32 or f64.
pub(super) fn combine(op: ReduceOp, total: f64, part: f64, dtype: DType) -> f64 {
    match op {
        ReduceOp::Sum | ReduceOp::Mean if dtype == DType::F64 => total + part,
        ReduceOp::Sum | ReduceOp::Mean => f64::from(total as f32 + part as f32),
        _ if total.is_nan() || part.is_nan() => f64::NAN,
        ReduceOp::Max if total > part => total,
        ReduceOp::Min if total < part => total,
        ReduceOp::Max | ReduceOp::Min => part,
    }
}

/// Random values that a dtype holds, and those that are seldom right.
pub(super) fn values(seed: u64, len: usize, dtype: DType) -> Vec<f64> {
    let mut state = seed;
    let mut random = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    };
    let value = |_| {
        let (kind, bits) = (random() % 16, random());
        let sign = if bits & 1 == 0 { 1.0 } else { -1.0 };
        let unit = 1.0 + (bits >> 12) as f64 * 2f64.powi(-52);
        let x = match kind {
            0 => 0.0,
            1 => f64::INFINITY,
            2 => f64::NAN,
            // Half way between two of bf16 or of f16, and a little beside.
            3 => 1.0 + 2f64.powi(-8) * (bits % 128 * 2 + 1) as f64,
            4 => 1.0 + 2f64.powi(-11) * (bits % 1024 * 2 + 1) as f64,
            5 => 1.0 + 2f64.powi(-8) * (bits % 128 * 2 + 1) as f64 + 2f64.powi(-50),
            6 => 1.0 + 2f64.powi(-11) * (bits % 1024 * 2 + 1) as f64 - 2f64.powi(-50),
            // Around the largest and the smallest of f16, of bf16 and of f32.
            7 => unit * 65504.0 / 1.001,
            8 => unit * 2f64.powi(-14 - (bits % 14) as i32),
            9 => unit * 3.4e38 / 1.001,
            10 => unit * 2f64.powi(-126 - (bits % 26) as i32),
            _ => unit * 2f64.powi((bits % 16) as i32 - 8),
        };
        round(sign * x, dtype)
    };
    (0..len).map(value).collect()
}

/// Up to six members over up to five ranks.
pub(super) fn layouts() -> impl Strategy<Value = Vec<ShardLayout>> {
    let size = prop_oneof![0..4usize, 1..20usize, Just(8usize), Just(16usize)];
    let shape = prop::collection::vec(size, 1..4);
    let member = (shape, 0..4usize);
    (1..6usize, prop::collection::vec(member, 1..7)).prop_map(|(world_size, members)| {
        let layout = |(shape, dim): (Vec<usize>, usize)| {
            let placement = if dim < shape.len() {
                Placement::Shard(dim)
            } else {
                Placement::Replicate
            };
            ShardLayout::new(&shape, placement, world_size)
        };
        members.into_iter().map(layout).collect()
    })
}

pub(super) fn dtype() -> impl Strategy<Value = DType> {
    prop::sample::select(&DTYPES)
}

#[test]
fn the_reference_rounds_as_the_types_do() {
    for x in values(1, 5000, DType::F32) {
        assert_same(
            &[round(x, DType::BF16), round(x, DType::F16)],
            &[
                bf16::from_f32(x as f32).to_f64(),
                f16::from_f32(x as f32).to_f64(),
            ],
        );
    }
}
