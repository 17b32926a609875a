//! `cargo run -p burn-fsdp-examples --bin train_gpt -- --help`

mod args;
mod checkpoints;
mod data;
mod dense;
mod device;
mod generate;
mod plot;
mod progress;
mod report;
mod train;

use std::process::ExitCode;

use burn_fsdp::LaunchConfig;
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};

use args::Args;
use data::{Corpus, SONNETS};
use train::Outcome;

// Ranks that are threads contend for page faults when every large tensor is mapped and unmapped.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let args = Args::parse();
    args.device.make_default();
    let corpus = Corpus::new(SONNETS);
    if let Err(reason) = args.check(&corpus) {
        Args::command()
            .error(ErrorKind::ValueValidation, reason)
            .exit();
    }
    match run(&args, &corpus) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args, corpus: &Corpus) -> Result<(), Box<dyn std::error::Error>> {
    plot::prepare(&args.out)?;
    // One generator serves a device and all ranks on it: seed it before they start, not in each of them.
    // Rank 0 draws all weights.
    args.device(0)?.seed(args.seed);
    // The dense run is launched too, so that both can be given the same number of threads.
    let ranks = if args.single { 1 } else { args.world_size };
    let mut launch = LaunchConfig::new(ranks);
    if let Some(threads) = args.threads_per_rank {
        launch = launch.with_threads_per_rank(threads);
    }
    let outcomes = launch.launch_or_join(|group| match args.single {
        true => train::train_dense(args, corpus, &group),
        false => {
            let world_size = group.world_size();
            let args = Args {
                world_size,
                ..args.clone()
            };
            train::train_sharded(&args, corpus, &group)
        }
    })?;

    // Of ranks that are processes, one speaks for all.
    if let Some(first) = outcomes.first().filter(|outcome| outcome.rank == 0) {
        report::print(args, first);
        let picture = plot::save(&args.out, &title(args, first), &first.records)?;
        println!("loss curve          {}", picture.display());
        if let Some(sample) = &first.sample {
            println!("\n{}", sample.trim_start());
        }
    }
    Ok(())
}

fn title(args: &Args, outcome: &Outcome) -> String {
    match args.single {
        true => "GPT on Shakespeare's sonnets, dense".into(),
        false => format!(
            "GPT on Shakespeare's sonnets, sharded over {} ranks",
            outcome.held.len()
        ),
    }
}
