//! What the kernels and NCCL compute, on values in f64 that are rounded to their dtypes.
//!
//! Members lie in a slot one after another, without the padding of the real packing.

use burn::tensor::{DType, bf16, f16};

use crate::comm::bundle::Bundle;
use crate::comm::nccl::driver::NcclOp;
use crate::placement::ShardLayout;

fn round(value: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F64 => value,
        DType::F32 => value as f32 as f64,
        DType::F16 => f16::from_f64(value).to_f64(),
        DType::BF16 => bf16::from_f64(value).to_f64(),
        other => unreachable!("{other:?} is no dtype of a collective"),
    }
}

/// In f32 where no dtype involved is wider.
fn divide(value: f64, by: f64, is_wide: bool) -> f64 {
    match is_wide {
        true => value / by,
        false => (value as f32 / by as f32) as f64,
    }
}

/// Where the members' shards start in a slot.
fn starts(bundle: &Bundle) -> impl Iterator<Item = (usize, &ShardLayout)> {
    let mut end = 0;
    bundle.layouts.iter().map(move |layout| {
        let start = end;
        end += layout.shard_len();
        (start, layout)
    })
}

pub(super) fn pack(bundle: &Bundle, shards: &[Vec<f64>]) -> Vec<f64> {
    let values = shards
        .iter()
        .flatten()
        .map(|&value| round(value, bundle.dtype));
    let mut slot: Vec<_> = values.collect();
    slot.resize(bundle.packing.shard_len(), f64::NAN);
    slot
}

pub(super) fn unpack(bundle: &Bundle, slots: &[f64]) -> Vec<f64> {
    let mut full = vec![f64::NAN; bundle.packing.full_len()];
    for (member, (start, layout)) in starts(bundle).enumerate() {
        let place = bundle.packing.full(member).start;
        for rank in 0..bundle.world_size() {
            let slot = bundle.packing.slot(rank).start + start;
            for span in layout.spans(rank) {
                full[place + span.full..][..span.len]
                    .copy_from_slice(&slots[slot + span.shard..][..span.len]);
            }
        }
    }
    full
}

/// `dtypes` are those of the tensors that are there, whose values `full` has.
pub(super) fn pack_full(
    bundle: &Bundle,
    full: &[Vec<f64>],
    dtypes: &[Option<DType>],
    by: f64,
) -> Vec<f64> {
    let mut slots = vec![0.0; bundle.slots_len()];
    let mut full = full.iter();
    for ((start, layout), dtype) in starts(bundle).zip(dtypes) {
        let Some(dtype) = dtype else { continue };
        let full = full.next().expect("there are values for each dtype");
        let is_wide = [*dtype, bundle.dtype].contains(&DType::F64);
        for rank in 0..bundle.world_size() {
            let slot = bundle.packing.slot(rank).start + start;
            for span in layout.spans(rank) {
                for i in 0..span.len {
                    let value = divide(full[span.full + i], by, is_wide);
                    slots[slot + span.shard + i] = round(value, bundle.dtype);
                }
            }
        }
    }
    slots
}

pub(super) fn finish(bundle: &Bundle, slot: &[f64], dtypes: &[DType], by: f64) -> Vec<Vec<f64>> {
    let shard = |((start, layout), dtype): ((usize, &ShardLayout), &DType)| {
        let is_wide = [*dtype, bundle.dtype].contains(&DType::F64);
        let finished = |value: &f64| {
            let divided = divide(*value, by, is_wide);
            round(round(divided, bundle.dtype), *dtype)
        };
        slot[start..][..layout.shard_len()]
            .iter()
            .map(finished)
            .collect()
    };
    starts(bundle).zip(dtypes).map(shard).collect()
}

/// What NCCL makes of one element of all ranks, added in rank order.
pub(super) fn reduce(values: impl ExactSizeIterator<Item = f64>, op: NcclOp, dtype: DType) -> f64 {
    let (world_size, is_wide) = (values.len() as f64, dtype == DType::F64);
    let add = |a: f64, b: f64| match is_wide {
        true => a + b,
        false => (a as f32 + b as f32) as f64,
    };
    let reduced = values.reduce(|a, b| match op {
        NcclOp::Sum | NcclOp::Avg => add(a, b),
        NcclOp::Max if a.is_nan() || a > b => a,
        NcclOp::Min if a.is_nan() || a < b => a,
        NcclOp::Max | NcclOp::Min => b,
    });
    let reduced = reduced.expect("a communicator has ranks");
    match op {
        NcclOp::Avg => round(divide(reduced, world_size, is_wide), dtype),
        _ => round(reduced, dtype),
    }
}
