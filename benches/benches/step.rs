//! A training step of a small GPT at world 2, against dense training of the same model.
//!
//! Three contenders take turns, each in processes of its own that stay warm and sleep between turns:
//!
//! - `sharded`: one process of `--world` ranks with one thread each.
//! - `independent`: as many dense processes of one thread each at once, each on one rank's batch. They
//!   exchange nothing: no data parallel run can be faster.
//! - `one dense`: one dense process with as many threads, on the batches of all ranks at once.
//!
//! Time is a step's, the mean of a round; rows give the least / median over the rounds. Memory is the
//! peak resident size of each process (a sharded process holds all its ranks).

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::prelude::*;
use burn_fsdp::{DeviceMesh, FsdpConfig, FullyShard, LaunchConfig, Result};
use burn_fsdp_benches::harness::{Bytes, Samples, asked_to_run, peak_resident};
use burn_fsdp_examples::gpt::{Gpt, GptConfig};
use clap::{Parser, ValueEnum};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// A training step of a small GPT, sharded, against dense training of the same model.
#[derive(Parser, Debug, Clone)]
struct Args {
    /// A tiny model and few rounds, to see that it runs
    #[arg(long, conflicts_with = "large")]
    quick: bool,
    /// 25 million parameters instead of 4.2
    #[arg(long)]
    large: bool,
    /// Number of ranks
    #[arg(long, default_value_t = 2)]
    world: usize,
    /// Sequences a rank
    #[arg(long, default_value_t = 4)]
    batch: usize,
    /// Turns of each contender [default: 7, or 2 with --quick]
    #[arg(long)]
    rounds: Option<usize>,
    /// Steps a turn
    #[arg(long, default_value_t = 4)]
    steps: usize,
    /// Train on a device with gradient checkpointing
    #[arg(long)]
    checkpointing: bool,
    /// What a process started by this bench does
    #[arg(long, hide = true)]
    role: Option<Role>,
    /// Passed by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Sharded,
    /// Dense, on one rank's batch.
    Part,
    /// Dense, on the batches of all ranks.
    Whole,
}

impl Args {
    fn model(&self) -> GptConfig {
        match (self.quick, self.large) {
            (true, _) => GptConfig::new(64, 16, 32, 2, 2),
            (_, false) => GptConfig::new(2048, 128, 256, 4, 4),
            (_, true) => GptConfig::new(3072, 128, 512, 7, 8),
        }
    }

    fn device(&self) -> Device {
        let device = Device::flex().autodiff();
        match self.checkpointing {
            true => device.gradient_checkpointing(),
            false => device,
        }
    }
}

fn main() -> Result<()> {
    if !asked_to_run() {
        return Ok(());
    }
    let args = Args::parse();
    match args.role {
        None => compare(&args),
        Some(Role::Sharded) => train_sharded(&args)?,
        Some(Role::Part) => train_dense(&args, args.batch),
        Some(Role::Whole) => train_dense(&args, args.batch * args.world),
    }
    Ok(())
}

// ---- the parent: starts the contenders and lets them take turns

fn compare(args: &Args) {
    let parameters = args.model().init(&args.device()).num_params();
    let config = args.model();
    println!(
        "GPT of {:.2} M parameters, {} ranks, batch {} x {} a rank, AdamW, f32{}",
        parameters as f64 / 1e6,
        args.world,
        args.batch,
        config.seq_len,
        if args.checkpointing {
            ", gradient checkpointing"
        } else {
            ""
        }
    );

    let mut sharded = [Contender::start(Role::Sharded, 1)];
    let mut independent: Vec<_> = (0..args.world)
        .map(|_| Contender::start(Role::Part, 1))
        .collect();
    let mut dense = [Contender::start(Role::Whole, args.world)];

    let rounds = args.rounds.unwrap_or(if args.quick { 2 } else { 7 });
    let warm_up = 1;
    let (mut time_sharded, mut time_dense) = (Samples::default(), Samples::default());
    let mut time_independent = vec![Samples::default(); args.world];
    for round in 0..warm_up + rounds {
        let sharded = take_turn(&mut sharded, args.steps);
        let independent = take_turn(&mut independent, args.steps);
        let dense = take_turn(&mut dense, args.steps);
        if round >= warm_up {
            time_sharded.push(sharded[0]);
            time_dense.push(dense[0]);
            for (samples, time) in time_independent.iter_mut().zip(independent) {
                samples.push(time);
            }
        }
    }
    let time_independent = Samples::mean(&time_independent);

    let tokens = (args.world * args.batch * config.seq_len) as f64;
    let row = |name: &str, time: &Samples, memory: &str| {
        let speed = tokens / time.median().as_secs_f64();
        println!("{name:<12} {time:>23} {speed:>9.0} tokens/s   peak resident {memory}");
    };
    println!("{:<12} {:>23}", "", "a step: least / median");
    let memory_sharded = match sharded[0].peak_resident() {
        Some(Bytes(n)) => format!("{} = {} a rank", Bytes(n), Bytes(n / args.world)),
        None => show(None),
    };
    let memory_independent: Vec<_> = independent
        .iter_mut()
        .map(|contender| show(contender.peak_resident()))
        .collect();
    let memory_dense = show(dense[0].peak_resident());
    row("sharded", &time_sharded, &memory_sharded);
    row(
        "independent",
        &time_independent,
        &memory_independent.join(" + "),
    );
    row("one dense", &time_dense, &memory_dense);

    let ratio = |name: &str, (least, median): (f64, f64)| {
        println!("sharded / {name:<12} {least:.3} by the least, {median:.3} by the median");
    };
    println!();
    ratio("independent", time_sharded.ratio_to(&time_independent));
    ratio("one dense", time_sharded.ratio_to(&time_dense));
}

fn show(bytes: Option<Bytes>) -> String {
    bytes.map_or("unknown".into(), |bytes| bytes.to_string())
}

/// A process of ours that trains when told to.
struct Contender {
    child: Child,
    orders: Option<ChildStdin>,
    replies: BufReader<ChildStdout>,
}

impl Contender {
    /// Starts this program again in `role`, with the flags it was itself given.
    fn start(role: Role, threads: usize) -> Self {
        let role = role.to_possible_value().expect("no role is skipped");
        let program = std::env::current_exe().expect("a running program has a path");
        let mut child = Command::new(program)
            .args(std::env::args_os().skip(1))
            .args(["--role", role.get_name()])
            .env("RAYON_NUM_THREADS", threads.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this program can be started again");
        let orders = child.stdin.take();
        let replies = BufReader::new(child.stdout.take().expect("stdout is piped"));
        Self {
            child,
            orders,
            replies,
        }
    }

    fn order(&mut self, steps: usize) {
        let orders = self.orders.as_mut().expect("open until dropped");
        writeln!(orders, "{steps}")
            .and_then(|()| orders.flush())
            .expect("the contender reads its orders");
    }

    fn reply(&mut self) -> String {
        let mut line = String::new();
        let read = self.replies.read_line(&mut line);
        assert!(
            matches!(read, Ok(n) if n > 0),
            "a contender ended; see its message above"
        );
        line.trim().to_owned()
    }

    /// Asks for no steps: the reply to that is the memory used so far.
    fn peak_resident(&mut self) -> Option<Bytes> {
        self.order(0);
        self.reply().parse().ok().map(Bytes)
    }
}

impl Drop for Contender {
    fn drop(&mut self) {
        self.orders = None; // no more orders: it ends
        let _ = self.child.wait();
    }
}

/// All contenders at once; the time of a step of each.
fn take_turn(contenders: &mut [Contender], steps: usize) -> Vec<Duration> {
    for contender in contenders.iter_mut() {
        contender.order(steps);
    }
    contenders
        .iter_mut()
        .map(|contender| {
            let nanos: u64 = contender.reply().parse().expect("nanoseconds");
            Duration::from_nanos(nanos) / steps as u32
        })
        .collect()
}

// ---- the contenders

/// Obeys orders until there are no more.
fn obey(
    orders: impl Iterator<Item = usize>,
    leads: bool,
    mut step: impl FnMut() -> Result<()>,
) -> Result<()> {
    for steps in orders {
        let start = Instant::now();
        for _ in 0..steps {
            step()?;
        }
        let time = start.elapsed();
        if leads {
            match steps {
                0 => println!(
                    "{}",
                    peak_resident().map_or(String::new(), |b| b.0.to_string())
                ),
                _ => println!("{}", time.as_nanos()),
            }
        }
    }
    Ok(())
}

fn read_orders() -> impl Iterator<Item = usize> {
    std::io::stdin()
        .lines()
        .map_while(|line| line.ok()?.trim().parse().ok())
}

fn train_dense(args: &Args, batch: usize) {
    let device = args.device();
    let mut model = Some(args.model().init(&device));
    let mut optim = AdamWConfig::new().init();
    let data = Batch::new(args, batch, 0, &device);
    obey(read_orders(), true, || {
        let dense = model.take().expect("put back by the step before");
        let loss = data.loss(&dense);
        let grads = GradientsParams::from_grads(loss.backward(), &dense);
        model = Some(optim.step(LEARNING_RATE, dense, grads));
        Ok(())
    })
    .expect("a dense step cannot fail");
}

fn train_sharded(args: &Args) -> Result<()> {
    // Ranks that wait for an order sleep, so that they do not disturb the others' turns.
    let (senders, receivers): (Vec<_>, Vec<Mutex<Receiver<usize>>>) = (0..args.world)
        .map(|_| channel())
        .map(|(sender, receiver)| (sender, Mutex::new(receiver)))
        .unzip();
    std::thread::spawn(move || {
        for steps in read_orders() {
            if senders.iter().any(|sender| sender.send(steps).is_err()) {
                break;
            }
        }
    });
    LaunchConfig::new(args.world)
        .with_threads_per_rank(1)
        .launch(|pg| {
            let device = args.device();
            let mesh = DeviceMesh::shard(&pg);
            let sharded = args
                .model()
                .init(&device)
                .fully_shard(&mesh, &FsdpConfig::new())?;
            let mut model = Some(sharded);
            let mut optim = AdamWConfig::new().init();
            let data = Batch::new(args, args.batch, pg.rank(), &device);
            let orders = receivers[pg.rank()].lock().expect("one rank each");
            obey(orders.iter(), pg.rank() == 0, || {
                let sharded = model.take().expect("put back by the step before");
                let loss = data.loss(&sharded);
                let grads = sharded.backward(loss);
                model = Some(sharded.step(&mut optim, LEARNING_RATE, grads)?);
                Ok(())
            })
        })?;
    Ok(())
}

const LEARNING_RATE: f64 = 1e-4;

/// Tokens and the tokens that follow them.
struct Batch {
    tokens: Tensor<2, Int>,
    targets: Tensor<2, Int>,
}

impl Batch {
    fn new(args: &Args, batch: usize, rank: usize, device: &Device) -> Self {
        let model = args.model();
        let (vocab, seq) = (model.vocab_size, model.seq_len);
        let mut state = 1 + rank as u64;
        let mut next = || {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 33) as i64 % vocab as i64
        };
        let mut draw = || {
            let tokens: Vec<i64> = (0..batch * seq).map(|_| next()).collect();
            Tensor::from_data(TensorData::new(tokens, [batch, seq]), device)
        };
        Self {
            tokens: draw(),
            targets: draw(),
        }
    }

    fn loss(&self, model: &Gpt) -> Tensor<1> {
        model.loss(self.tokens.clone(), self.targets.clone())
    }
}
