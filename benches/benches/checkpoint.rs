//! Checkpoints against what the disk and the memory give.
//!
//! - `save`: all ranks save; beside it, all ranks write as many bytes to a file each, raw, with fsync.
//! - `load`: all ranks load what the same number has saved; beside it, all read as many bytes raw.
//! - `load of N`: all ranks load what N have saved; with the bytes read over the bytes needed.
//! - `async`: what the trainer waits for; beside it, one copy of the same bytes in memory.
//! - `plan`: checking that chunks tile their tensors, by their number.
//!
//! Files are read from the page cache on either side, unless the machine drops it.

use std::hint::black_box;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use burn::module::{Module, Param};
use burn::prelude::*;
use burn_fsdp::{DeviceMesh, FsdpConfig, FullyShard, LaunchConfig, ProcessGroup, Result};
use burn_fsdp_benches::harness::{Bytes, Samples, asked_to_run};
use burn_fsdp_dcp::{Checkpoint, LoadOptions, Region, SaveOptions, Saver, Snapshot, check_tiling};
use clap::Parser;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Checkpoints against what the disk and the memory give.
#[derive(Parser, Debug)]
struct Args {
    /// Few rounds of a small model, to see that it runs
    #[arg(long)]
    quick: bool,
    /// The ranks that save and load
    #[arg(long, default_value_t = 2)]
    world: usize,
    /// The size of the model in MiB
    #[arg(long, default_value_t = 512)]
    mib: usize,
    /// Where to write
    #[arg(long, default_value = "target/bench-checkpoint")]
    dir: std::path::PathBuf,
    /// Passed by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
}

/// Matrices of 16 MiB.
#[derive(Module, Debug)]
struct Matrices {
    layers: Vec<Matrix>,
}

#[derive(Module, Debug)]
struct Matrix {
    weight: Param<Tensor<2>>,
}

const SIDE: usize = 2048;

impl Matrices {
    fn new(mib: usize) -> Self {
        let device = Device::flex();
        let weight = || Tensor::random([SIDE, SIDE], burn::tensor::Distribution::Default, &device);
        let layer = |_| Matrix {
            weight: Param::from_tensor(weight()),
        };
        Self {
            layers: (0..mib.div_ceil(16)).map(layer).collect(),
        }
    }
}

fn main() -> Result<()> {
    if !asked_to_run() {
        return Ok(());
    }
    let args = Args::parse();
    let (mib, rounds) = if args.quick { (32, 2) } else { (args.mib, 7) };
    let bytes = mib.div_ceil(16) * (16 << 20);
    println!("{} of f32 over {} ranks", Bytes(bytes), args.world);
    println!(
        "{:<12} {:>24} {:>24}   its speed as a share",
        "", "least / median", "beside it"
    );
    std::fs::create_dir_all(&args.dir).map_err(burn_fsdp::FsdpError::other)?;
    save_and_load(&args, mib, rounds)?;
    for world in [1, 3, args.world * 2] {
        load_of(&args, mib, world)?;
    }
    plans(args.quick);
    std::fs::remove_dir_all(&args.dir).map_err(burn_fsdp::FsdpError::other)
}

/// The times of one rank.
#[derive(Default)]
struct Times {
    save: Samples,
    write: Samples,
    load: Samples,
    read: Samples,
    blocked: Samples,
    copy: Samples,
}

fn save_and_load(args: &Args, mib: usize, rounds: usize) -> Result<()> {
    let times = LaunchConfig::new(args.world).launch(|pg| measure(args, &pg, mib, rounds))?;
    let slowest = |of: fn(&Times) -> &Samples| {
        Samples::slowest(&times.iter().map(|t| of(t).clone()).collect::<Vec<_>>())
    };
    row("save", &slowest(|t| &t.save), &slowest(|t| &t.write));
    row("load", &slowest(|t| &t.load), &slowest(|t| &t.read));
    row("async", &slowest(|t| &t.blocked), &slowest(|t| &t.copy));
    Ok(())
}

fn row(name: &str, ours: &Samples, beside: &Samples) {
    let (least, median) = ours.ratio_to(beside);
    println!(
        "{name:<12} {ours:>24} {beside:>24}   {:.0} % / {:.0} %",
        100.0 / least,
        100.0 / median
    );
}

fn measure(args: &Args, pg: &ProcessGroup, mib: usize, rounds: usize) -> Result<Times> {
    let mut model = Matrices::new(mib).fully_shard(&DeviceMesh::shard(pg), &FsdpConfig::new())?;
    let mut saver = Saver::new(pg, SaveOptions::new().with_overwrite(true))?;
    let dir = args.dir.join("checkpoint");
    let raw = args.dir.join(format!("raw-{}", pg.rank()));
    let payload = vec![7u8; model.memory().shard_bytes];
    let mut copy = vec![0u8; payload.len()];
    let mut times = Times::default();
    for round in 0..rounds as u64 {
        times.write.push(timed(pg, || write(&raw, &payload))?);
        times.save.push(timed(pg, || {
            saver
                .save(&dir, Snapshot::new(round).model(&model))
                .map(drop)
        })?);
        times.read.push(timed(pg, || {
            std::fs::read(&raw).map(|bytes| drop(black_box(bytes)))
        })?);
        let checkpoint = Checkpoint::open_on(pg, &dir)?;
        let start = Instant::now();
        model = checkpoint.load_model(model, &LoadOptions::new())?.0;
        times.load.push(start.elapsed());
        let start = Instant::now();
        copy.copy_from_slice(black_box(&payload));
        times.copy.push(start.elapsed());
        black_box(&mut copy);
        let start = Instant::now();
        let pending = saver.save_async(&dir, Snapshot::new(round).model(&model))?;
        times.blocked.push(start.elapsed());
        pending.finish()?;
    }
    Ok(times)
}

/// The time of an action that all ranks begin together.
fn timed<E: std::error::Error + Send + Sync + 'static>(
    pg: &ProcessGroup,
    action: impl FnOnce() -> Result<(), E>,
) -> Result<Duration> {
    pg.barrier()?;
    let start = Instant::now();
    action().map_err(burn_fsdp::FsdpError::other)?;
    Ok(start.elapsed())
}

fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = std::fs::File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Loads what another number of ranks has saved.
fn load_of(args: &Args, mib: usize, world: usize) -> Result<()> {
    let dir = args.dir.join("resharded");
    LaunchConfig::new(world).launch(|pg| {
        let model = Matrices::new(mib).fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
        let mut saver = Saver::new(&pg, SaveOptions::new().with_overwrite(true))?;
        saver.save(&dir, Snapshot::new(0).model(&model))?;
        Ok(())
    })?;
    let loads = LaunchConfig::new(args.world).launch(|pg| {
        let model = Matrices::new(mib).fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
        let needed = model.memory().shard_bytes as f64;
        let checkpoint = Checkpoint::open_on(&pg, &dir)?;
        let start = Instant::now();
        checkpoint.load_model(model, &LoadOptions::new())?;
        Ok((start.elapsed(), checkpoint.bytes_read() as f64 / needed))
    })?;
    let slowest = loads
        .iter()
        .map(|(time, _)| *time)
        .max()
        .unwrap_or_default();
    let read = loads.iter().map(|(_, ratio)| *ratio).fold(0.0, f64::max);
    println!(
        "load of {world:<4} {slowest:>24.2?} {:>24}   bytes read / needed {read:.3}",
        ""
    );
    Ok(())
}

fn plans(quick: bool) {
    let counts: &[u64] = if quick {
        &[1_000, 10_000]
    } else {
        &[10_000, 100_000, 1_000_000]
    };
    for &count in counts {
        let rows: Vec<Region> = (0..count)
            .map(|i| Region {
                offsets: vec![i, 0],
                sizes: vec![1, 8],
            })
            .collect();
        let side = (count as f64).sqrt() as u64;
        let tiles: Vec<Region> = (0..side * side)
            .map(|i| Region {
                offsets: vec![i / side * 4, i % side * 4],
                sizes: vec![4, 4],
            })
            .collect();
        let check = |shape: [u64; 2], regions: &[Region]| {
            let start = Instant::now();
            check_tiling("t", &shape, regions.iter()).expect("they tile it");
            start.elapsed()
        };
        let (rows, tiles) = (
            check([count, 8], &rows),
            check([side * 4, side * 4], &tiles),
        );
        println!("plan         {count:>9} chunks: {rows:.1?} in rows, {tiles:.1?} in tiles");
    }
}
