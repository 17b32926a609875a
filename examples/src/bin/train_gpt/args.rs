//! The command line.

use std::path::PathBuf;

use burn::prelude::*;
use burn_fsdp::{FsdpConfig, FsdpError, MixedPrecisionPolicy, NonFinite};
use burn_fsdp_examples::gpt::GptConfig;
use clap::{Parser, ValueEnum};

use crate::data::{Corpus, Schedule};
use crate::device::DeviceArg;

/// No count is larger, so that sizes computed from them fit into a `usize`.
const LARGEST: usize = 1_000_000;

/// Trains a small GPT on Shakespeare's sonnets, character by character, with parameters, gradients and
/// optimizer state sharded over ranks: threads of this process, or processes if a launcher has started it.
///
/// At the end it prints what each rank held, draws the loss curve and lets the model write a few lines.
#[derive(Parser, Clone, Debug)]
#[command(name = "train_gpt", version)]
pub(crate) struct Args {
    /// Ranks to shard over, as threads. A launcher (burn-fsdp run, torchrun, mpirun, srun) has its own number.
    #[arg(long, default_value_t = 2, value_parser = at_least_one, value_name = "N")]
    pub(crate) world_size: usize,

    /// Train one dense model on the same global batches instead, for comparison.
    #[arg(long)]
    pub(crate) single: bool,

    /// Where to train; all but flex need the feature of their name.
    #[arg(long, value_enum, default_value_t = DeviceArg::Flex)]
    pub(crate) device: DeviceArg,

    /// Optimizer steps.
    #[arg(long, default_value_t = 300, value_parser = at_least_one, value_name = "N")]
    pub(crate) steps: usize,

    /// Sequences per rank and micro-batch.
    #[arg(long, default_value_t = 8, value_parser = at_least_one, value_name = "N")]
    pub(crate) batch_size: usize,

    /// Micro-batches whose gradients are summed before each step.
    #[arg(long, default_value_t = 1, value_parser = at_least_one, value_name = "N")]
    pub(crate) accumulate: usize,

    /// Number format of gathered parameters, activations and gradients; the sharded masters stay f32.
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    pub(crate) precision: Precision,

    /// Train without gradient checkpointing: faster, but autodiff keeps views of the gathered parameters, so
    /// that the whole model is unsharded between forward and backward.
    #[arg(long)]
    pub(crate) no_checkpointing: bool,

    /// Transformer blocks; each is gathered and freed as one unit.
    #[arg(long, default_value_t = 4, value_parser = at_least_one, value_name = "N")]
    pub(crate) layers: usize,

    /// Width of the model.
    #[arg(long, default_value_t = 96, value_parser = at_least_one, value_name = "N")]
    pub(crate) d_model: usize,

    /// Attention heads; must divide the width.
    #[arg(long, default_value_t = 4, value_parser = at_least_one, value_name = "N")]
    pub(crate) heads: usize,

    /// Characters per sequence.
    #[arg(long, default_value_t = 64, value_parser = at_least_one, value_name = "N")]
    pub(crate) seq: usize,

    /// Highest learning rate, reached after a warmup.
    #[arg(long, default_value_t = 1e-2, value_parser = positive, value_name = "RATE")]
    pub(crate) lr: f64,

    /// Largest gradient norm; larger gradients are scaled down to it. 0 for no limit.
    #[arg(long, default_value_t = 1.0, value_parser = not_negative, value_name = "NORM")]
    pub(crate) clip: f64,

    /// Seed of weights, data order and sampled text.
    #[arg(long, default_value_t = 42, value_name = "SEED")]
    pub(crate) seed: u64,

    /// Threads of each rank [default: its share of the cores].
    #[arg(long, value_parser = at_least_one, value_name = "N")]
    pub(crate) threads_per_rank: Option<usize>,

    /// Folder for checkpoints, one every --save-every steps and one at the end.
    #[arg(long, value_name = "DIR", conflicts_with = "single")]
    pub(crate) checkpoint_dir: Option<PathBuf>,

    /// Steps between checkpoints, which are written while training goes on.
    #[arg(long, default_value_t = 50, value_parser = at_least_one, value_name = "N", requires = "checkpoint_dir")]
    pub(crate) save_every: usize,

    /// Checkpoints to keep, the latest.
    #[arg(long, default_value_t = 3, value_parser = at_least_one, value_name = "N", requires = "checkpoint_dir")]
    pub(crate) keep: usize,

    /// Go on from the newest good checkpoint, at whatever world size; from the start if there is none.
    #[arg(long, requires = "checkpoint_dir")]
    pub(crate) resume: bool,

    /// Folder for loss.svg and losses.csv.
    #[arg(long, default_value = "target/train_gpt", value_name = "DIR")]
    pub(crate) out: PathBuf,

    /// Print the summary only.
    #[arg(long)]
    pub(crate) quiet: bool,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Precision {
    F32,
    Bf16,
    F16,
}

impl Args {
    /// What no single value shows: whether the values fit one another and the text.
    pub(crate) fn check(&self, corpus: &Corpus) -> Result<(), String> {
        if !self.d_model.is_multiple_of(self.heads) {
            return Err(format!(
                "--heads {} does not divide --d-model {}",
                self.heads, self.d_model
            ));
        }
        if self.seq >= corpus.len() {
            return Err(format!(
                "--seq {} is too long: the text has {} characters, and each needs one after it",
                self.seq,
                corpus.len()
            ));
        }
        let samples = [self.batch_size, self.accumulate, self.steps]
            .into_iter()
            .try_fold(self.world_size, usize::checked_mul);
        if samples.and_then(|n| n.checked_mul(self.seq)).is_none() {
            return Err("the run would read more characters than can be counted".into());
        }
        self.device.device(0)?;
        if self.single && self.precision != Precision::F32 {
            return Err(
                "--single trains in f32 only: mixed precision is a policy of the sharded model"
                    .into(),
            );
        }
        Ok(())
    }

    /// What must be the same on all ranks.
    pub(crate) fn common(&self) -> Self {
        Self {
            device: DeviceArg::Flex,
            threads_per_rank: None,
            out: PathBuf::new(),
            quiet: false,
            ..self.clone()
        }
    }

    /// The device of a rank, by its number on its host.
    pub(crate) fn device(&self, local_rank: usize) -> Result<Device, FsdpError> {
        let device = self.device.device(local_rank).map_err(FsdpError::other)?;
        let device = device.autodiff();
        Ok(match self.no_checkpointing {
            false => device.gradient_checkpointing(),
            true => device,
        })
    }

    pub(crate) fn model(&self, corpus: &Corpus) -> GptConfig {
        GptConfig::new(
            corpus.vocabulary.len(),
            self.seq,
            self.d_model,
            self.layers,
            self.heads,
        )
    }

    pub(crate) fn fsdp(&self) -> FsdpConfig {
        match self.precision {
            Precision::F32 => FsdpConfig::new(),
            Precision::Bf16 => FsdpConfig::new().with_mixed_precision(MixedPrecisionPolicy::bf16()),
            // f16 overflows at 65504: leave out the odd step rather than stop.
            Precision::F16 => FsdpConfig::new()
                .with_mixed_precision(MixedPrecisionPolicy::f16())
                .with_non_finite(NonFinite::Skip),
        }
    }

    /// How samples are dealt to the ranks; the dense run is one rank with everyone's samples.
    pub(crate) fn schedule(&self) -> Schedule {
        let (world_size, batch_size) = match self.single {
            true => (1, self.world_size * self.batch_size),
            false => (self.world_size, self.batch_size),
        };
        Schedule {
            world_size,
            micro_batches: self.accumulate,
            batch_size,
        }
    }

    pub(crate) fn tokens_per_step(&self) -> usize {
        self.world_size * self.batch_size * self.accumulate * self.seq
    }

    /// Rises linearly over the first tenth, then falls along a cosine to a tenth of the peak.
    pub(crate) fn learning_rate(&self, step: usize) -> f64 {
        let warmup = self.steps.div_ceil(10);
        if step < warmup {
            return self.lr * (step + 1) as f64 / warmup as f64;
        }
        let progress = (step - warmup) as f64 / (self.steps - warmup) as f64;
        self.lr * (0.55 + 0.45 * (std::f64::consts::PI * progress).cos())
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".into()),
        Ok(number) if number > LARGEST => Err(format!("must be at most {LARGEST}")),
        Ok(number) => Ok(number),
        Err(_) => Err("not a whole number".into()),
    }
}

fn positive(text: &str) -> Result<f64, String> {
    match not_negative(text)? {
        0.0 => Err("must be greater than 0".into()),
        number => Ok(number),
    }
}

fn not_negative(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        Ok(_) => Err("must be finite and not negative".into()),
        Err(_) => Err("not a number".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::SONNETS;

    fn parse(args: &str) -> Result<Args, String> {
        let args = std::iter::once("train_gpt").chain(args.split_whitespace());
        let args = Args::try_parse_from(args).map_err(|error| error.to_string())?;
        args.check(&Corpus::new(SONNETS))?;
        Ok(args)
    }

    #[test]
    fn the_defaults_are_valid() {
        let args = parse("").expect("defaults");
        assert_eq!(args.tokens_per_step(), 2 * 8 * 64);
    }

    #[test]
    fn values_that_cannot_work_are_refused_with_the_reason() {
        for (args, reason) in [
            ("--world-size 0", "at least 1"),
            ("--world-size two", "not a whole number"),
            ("--steps 0", "at least 1"),
            ("--accumulate 0", "at least 1"),
            ("--threads-per-rank 0", "at least 1"),
            ("--d-model 1000001", "at most 1000000"),
            (
                "--world-size 1000000 --batch-size 1000000 --steps 1000000 --accumulate 1000000",
                "more characters than can be counted",
            ),
            ("--lr 0", "greater than 0"),
            ("--lr nan", "finite"),
            ("--clip -1", "unexpected argument"),
            ("--clip=-1", "not negative"),
            ("--precision f8", "invalid value"),
            ("--heads 7", "--heads 7 does not divide --d-model 96"),
            ("--seq 1000000", "the text has 94651 characters"),
            ("--single --precision bf16", "f32 only"),
            ("--single --checkpoint-dir d", "cannot be used with"),
            ("--resume", "--checkpoint-dir"),
            ("--checkpoint-dir d --save-every 0", "at least 1"),
        ] {
            let error = parse(args).expect_err(args);
            assert!(error.contains(reason), "{args}: {error}");
        }
    }

    #[test]
    fn the_dense_run_gets_the_samples_of_all_ranks() {
        let sharded = parse("--world-size 3 --batch-size 4").expect("valid");
        let dense = parse("--world-size 3 --batch-size 4 --single").expect("valid");
        let ranks: Vec<_> = (0..3)
            .flat_map(|rank| sharded.schedule().samples(5, 0, rank))
            .collect();
        assert_eq!(dense.schedule().samples(5, 0, 0).collect::<Vec<_>>(), ranks);
    }

    #[test]
    fn the_learning_rate_rises_to_its_peak_and_falls_to_a_tenth() {
        let args = parse("--steps 100 --lr 1").expect("valid");
        let rates: Vec<f64> = (0..100).map(|step| args.learning_rate(step)).collect();
        assert!(rates[..10].is_sorted());
        assert!((rates[9] - 1.0).abs() < 1e-9);
        assert!(rates[10..].is_sorted_by(|a, b| a >= b));
        assert!((0.1..0.11).contains(&rates[99]));
        assert!(parse("--steps 1").expect("valid").learning_rate(0) > 0.0);
    }
}
