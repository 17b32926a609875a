//! How fast the kernels are, against a copy on the same device.
//!
//! `cargo test -p burn-fsdp --lib --features cuda --release kernels::speed -- --ignored --nocapture`, with
//! `BURN_FSDP_TEST_DEVICE=cuda`.

use std::time::Instant;

use burn::tensor::DType;
use cubecl::client::Client;
use cubecl::future::block_on;
use cubecl::prelude::*;

use super::buffer::elem;
use super::launch::{address_type, grid, width};
use super::reference::client;
use super::*;
use crate::placement::ShardLayout;
use crate::{NormType, Placement};

/// Width of a transformer's block, whose parameters are one unit.
const WIDTH: usize = 2048;
/// The same where a kernel is slow, to see that this runs.
const WIDTH_OF_A_CPU: usize = 64;
const RANKS: usize = 4;
const ROUNDS: u32 = 20;

#[cube(launch_unchecked, address_type = "dynamic")]
fn copy_kernel<E: Float, N: Size>(
    from: &[Vector<E, N>],
    to: &mut [Vector<E, N>],
    items: usize,
    #[define(E)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < items {
        to[ABSOLUTE_POS] = from[ABSOLUTE_POS];
    }
}

fn copy(client: &Client, from: &Buffer, to: &Buffer) {
    let width = width(client, &[from.dtype], &[from.len]);
    let items = from.len / width;
    let (count, dim) = grid(client, items);
    let address = address_type(from.len);
    // SAFETY: both buffers are as long, and the kernel checks that a unit has work.
    unsafe {
        copy_kernel::launch_unchecked(
            client,
            count,
            dim,
            address,
            width,
            from.arg(),
            to.arg(),
            items,
            elem(from.dtype),
        );
    }
}

/// Bytes a second, read and written, of what `run` enqueues; the best of a few tries.
fn speed(client: &Client, bytes: usize, run: impl Fn()) -> f64 {
    let wait = || block_on(client.sync()).expect("no kernel fails");
    let time = || {
        let start = Instant::now();
        (0..ROUNDS).for_each(|_| run());
        wait();
        start.elapsed().as_secs_f64() / f64::from(ROUNDS)
    };
    run();
    wait();
    let best = (0..3).map(|_| time()).fold(f64::INFINITY, f64::min);
    bytes as f64 / best
}

/// The parameters of a block: attention, its output, two layers of a perceptron, their biases and two
/// norms.
fn block(width: usize, ranks: usize) -> Packing {
    let matrices = [(3, 1), (1, 1), (4, 1), (1, 4)].map(|(a, b)| vec![a * width, b * width]);
    let vectors = [3, 1, 4, 1, 1, 1, 1, 1].map(|n| vec![n * width]);
    let shapes = matrices.into_iter().chain(vectors);
    let layouts = shapes.map(|shape| ShardLayout::new(&shape, Placement::Shard(0), ranks));
    Packing::new(&layouts.collect::<Vec<_>>())
}

#[test]
#[ignore = "measures, and asserts nothing"]
fn kernels_are_measured_against_a_copy() {
    let client = client();
    let is_cpu = client.properties().hardware.num_cpu_cores.is_some();
    let width = if is_cpu { WIDTH_OF_A_CPU } else { WIDTH };
    let packing = block(width, RANKS);
    let members = || packing.members.iter();
    let empty = |len, dtype| Buffer::empty(&client, len, dtype);
    let shards = |dtype| -> Vec<_> { members().map(|m| empty(m.shard_len, dtype)).collect() };
    let fulls = |dtype| -> Vec<_> {
        let full = members().map(|member| Some(empty(member.tensor_len(), dtype)));
        full.collect()
    };
    let (shard_len, full_len) = (packing.shard_len(), packing.full_len());
    let slots_len = RANKS * shard_len;

    let bytes = |len: usize, dtypes: &[DType]| -> usize {
        dtypes.iter().map(|dtype| len * dtype.size()).sum()
    };
    let (from, to) = (empty(full_len, DType::F32), empty(full_len, DType::F32));
    let copied = bytes(full_len, &[DType::F32; 2]);
    let reference = speed(&client, copied, || copy(&client, &from, &to));
    println!(
        "SPEED copy f32 | {:.1} GB/s | 1.00 of a copy",
        reference / 1e9
    );
    let row = |name: &str, bytes: usize, run: &dyn Fn()| {
        let speed = speed(&client, bytes, run);
        let ratio = speed / reference;
        println!(
            "SPEED {name} | {:.1} GB/s | {ratio:.2} of a copy",
            speed / 1e9
        );
    };

    for to in [DType::F32, DType::BF16] {
        let (from, slot) = (shards(DType::F32), empty(shard_len, to));
        let name = format!("pack f32 to {}", to.name());
        row(&name, bytes(shard_len, &[DType::F32, to]), &|| {
            pack(&client, &packing, &from, &slot, Rounding::Nearest);
        });
    }
    for dtype in [DType::F32, DType::BF16] {
        let (slots, full) = (empty(slots_len, dtype), empty(full_len, dtype));
        let name = format!("unpack {}", dtype.name());
        row(&name, bytes(full_len, &[dtype; 2]), &|| {
            unpack(&client, &packing, 0..RANKS, &slots, &full);
        });
    }
    for from in [DType::F32, DType::BF16] {
        let (full, slots) = (fulls(from), empty(slots_len, DType::F32));
        let name = format!("pack gradients {} to f32", from.name());
        row(&name, bytes(full_len, &[from, DType::F32]), &|| {
            pack_gradients(&client, &packing, &full, &slots, 4.0);
        });
    }
    let (total, gradients) = (empty(shard_len, DType::F32), shards(DType::F32));
    row("finish f32", bytes(shard_len, &[DType::F32; 2]), &|| {
        finish(
            &client,
            &packing,
            &total,
            DType::F32,
            &gradients,
            4.0,
            false,
        );
    });
    row("norm f32", bytes(shard_len, &[DType::F32]), &|| {
        norm(&client, NormType::L2, &gradients);
    });
    row("scale f32", bytes(shard_len, &[DType::F32; 2]), &|| {
        scale(&client, &gradients, 0.999);
    });
}
