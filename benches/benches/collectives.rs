//! The local collectives against memcpy.
//!
//! - `unshard`: all-gather and unpack of one unit of eight weights, as a forward pass does it.
//! - `unshard to bf16`: the same with the cast of the f32 shards to bf16 on the way.
//! - `reduce-scatter`: the mean of a flat gradient over the ranks.
//!
//! Two yardsticks run beside each, on the same threads, in alternation, on buffers allocated before:
//!
//! - `part`: every rank copies `1 / world` of the unit, all at once: the unit moves once.
//! - `whole`: every rank copies the whole unit, all at once: what a private copy a rank would cost.
//!
//! A row says how long each took (least / median over the rounds) and the speed of the collective as
//! a share of the yardstick's: 100 % is memcpy speed. Sizes are those of the unit in f32.

use std::hint::black_box;
use std::time::{Duration, Instant};

use burn::module::{Initializer, Module};
use burn::nn::{Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn_fsdp::{
    DeviceMesh, FsdpConfig, FullyShard, LaunchConfig, MixedPrecisionPolicy, ProcessGroup, ReduceOp,
    Result,
};
use burn_fsdp_benches::harness::{Bytes, Samples, StartLine, asked_to_run};
use clap::Parser;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The local collectives against memcpy.
#[derive(Parser, Debug)]
struct Args {
    /// Few rounds of small units, to see that it runs
    #[arg(long)]
    quick: bool,
    /// Numbers of ranks
    #[arg(long, value_delimiter = ',', default_value = "2,4")]
    worlds: Vec<usize>,
    /// Threads that work for each rank
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Only the collectives whose name contains this
    filter: Option<String>,
    /// Passed by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Debug, Clone, Copy)]
enum Collective {
    Unshard,
    UnshardToBf16,
    ReduceScatter,
}

impl Collective {
    const ALL: [Self; 3] = [Self::Unshard, Self::UnshardToBf16, Self::ReduceScatter];

    fn name(self) -> &'static str {
        match self {
            Self::Unshard => "unshard",
            Self::UnshardToBf16 => "unshard to bf16",
            Self::ReduceScatter => "reduce-scatter",
        }
    }
}

fn main() -> Result<()> {
    if !asked_to_run() {
        return Ok(());
    }
    let args = Args::parse();
    let sizes: &[usize] = match args.quick {
        true => &[64 << 10, 1 << 20, 16 << 20],
        false => &[
            64 << 10,
            256 << 10,
            1 << 20,
            4 << 20,
            16 << 20,
            64 << 20,
            256 << 20,
        ],
    };
    let wanted = |collective: &Collective| {
        let filter = args.filter.as_deref().unwrap_or_default();
        collective.name().contains(filter)
    };
    for collective in Collective::ALL.into_iter().filter(wanted) {
        for &world in &args.worlds {
            println!(
                "\n{}, world {world}, {} thread(s) a rank (times: least / median)",
                collective.name(),
                args.threads
            );
            println!(
                "{:>8} {:>23} {:>23} {:>23}   {:>15}   {:>15}",
                "unit", "collective", "memcpy: part", "memcpy: whole", "of part", "of whole"
            );
            for &bytes in sizes {
                let case = Case {
                    collective,
                    world,
                    threads: args.threads,
                    bytes,
                    rounds: rounds(bytes, args.quick),
                };
                println!("{}", case.row()?);
            }
        }
    }
    Ok(())
}

/// About as much copying for every size.
fn rounds(bytes: usize, quick: bool) -> usize {
    let rounds = ((4 << 30) / bytes).clamp(20, 400);
    if quick { 5 } else { rounds }
}

struct Case {
    collective: Collective,
    world: usize,
    threads: usize,
    bytes: usize,
    rounds: usize,
}

/// What one rank measured.
#[derive(Default)]
struct RankSamples {
    collective: Samples,
    part: Samples,
    whole: Samples,
}

impl Case {
    fn row(&self) -> Result<String> {
        let line = StartLine::new(self.world);
        let ranks = LaunchConfig::new(self.world)
            .with_threads_per_rank(self.threads)
            .launch(|pg| self.rank(&pg, &line))?;
        let slowest = |pick: fn(&RankSamples) -> &Samples| {
            let all: Vec<_> = ranks.iter().map(|rank| pick(rank).clone()).collect();
            Samples::slowest(&all)
        };
        let collective = slowest(|rank| &rank.collective);
        let part = slowest(|rank| &rank.part);
        let whole = slowest(|rank| &rank.whole);
        Ok(format!(
            "{:>8} {collective:>23} {part:>23} {whole:>23}   {:>15}   {:>15}",
            Bytes(self.bytes),
            percent(part.ratio_to(&collective)),
            percent(whole.ratio_to(&collective)),
        ))
    }

    fn rank(&self, pg: &ProcessGroup, line: &StartLine) -> Result<RankSamples> {
        match self.collective {
            Collective::Unshard => self.unshard(pg, line, FsdpConfig::new()),
            Collective::UnshardToBf16 => {
                let policy = MixedPrecisionPolicy::new().with_param_dtype(DType::BF16);
                let config = FsdpConfig::new().with_mixed_precision(policy);
                self.unshard(pg, line, config)
            }
            Collective::ReduceScatter => self.reduce_scatter(pg, line),
        }
    }

    fn unshard(
        &self,
        pg: &ProcessGroup,
        line: &StartLine,
        config: FsdpConfig,
    ) -> Result<RankSamples> {
        let device = Device::flex().autodiff();
        let mesh = DeviceMesh::shard(pg);
        let model = Unit::init(self.bytes, &device).fully_shard(&mesh, &config)?;
        self.measure(line, || {
            let start = Instant::now();
            model.unshard("")?;
            let time = start.elapsed();
            // Nobody frees what a slower rank is still filling.
            line.wait()?;
            model.reshard();
            Ok(time)
        })
    }

    fn reduce_scatter(&self, pg: &ProcessGroup, line: &StartLine) -> Result<RankSamples> {
        let grad = Tensor::<1>::full([self.bytes / size_of::<f32>()], 0.5, &Device::flex());
        self.measure(line, || {
            let grad = grad.clone();
            let start = Instant::now();
            let shard = pg.reduce_scatter(grad, ReduceOp::Mean)?;
            let time = start.elapsed();
            black_box(shard);
            Ok(time)
        })
    }

    /// Runs the collective and both yardsticks by turns, after two rounds that don't count.
    fn measure(
        &self,
        line: &StartLine,
        mut collective: impl FnMut() -> Result<Duration>,
    ) -> Result<RankSamples> {
        const WARM_UP: usize = 2;
        let source = vec![1_u8; self.bytes];
        let mut target = vec![2_u8; self.bytes];
        let mut samples = RankSamples::default();
        for round in 0..WARM_UP + self.rounds {
            line.wait()?;
            let time = collective()?;
            line.wait()?;
            let part = memcpy(&source, &mut target, self.bytes / self.world);
            line.wait()?;
            let whole = memcpy(&source, &mut target, self.bytes);
            if round >= WARM_UP {
                samples.collective.push(time);
                samples.part.push(part);
                samples.whole.push(whole);
            }
        }
        Ok(samples)
    }
}

fn memcpy(source: &[u8], target: &mut [u8], bytes: usize) -> Duration {
    let start = Instant::now();
    target[..bytes].copy_from_slice(black_box(&source[..bytes]));
    black_box(&mut *target);
    start.elapsed()
}

fn percent((least, median): (f64, f64)) -> String {
    format!("{:.0} / {:.0} %", least * 100.0, median * 100.0)
}

/// Eight weights of equal size. They stand in fields, not in a `Vec`, so that they are one unit.
#[derive(Module, Debug)]
struct Unit {
    a: Linear,
    b: Linear,
    c: Linear,
    d: Linear,
    e: Linear,
    f: Linear,
    g: Linear,
    h: Linear,
}

impl Unit {
    fn init(bytes: usize, device: &Device) -> Self {
        let width = 64;
        let height = bytes / size_of::<f32>() / 8 / width;
        let weight = || {
            LinearConfig::new(height, width)
                .with_bias(false)
                .with_initializer(Initializer::Constant { value: 0.5 })
                .init(device)
        };
        Self {
            a: weight(),
            b: weight(),
            c: weight(),
            d: weight(),
            e: weight(),
            f: weight(),
            g: weight(),
            h: weight(),
        }
    }
}
