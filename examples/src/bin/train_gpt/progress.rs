//! What is seen while training runs, and what is kept of it.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};

use crate::args::Args;

/// One optimizer step.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) loss: f64,
    pub(crate) grad_norm: f64,
    pub(crate) elapsed: Duration,
}

#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    /// Steps between printed lines where no bar can be drawn, as in a log file; 0 for none.
    line_every: usize,
    tokens_per_step: usize,
    started: Instant,
    records: Vec<Record>,
}

impl Progress {
    /// Starts the clock, or goes on after `records` of an earlier run. Of all ranks one is `visible`.
    pub(crate) fn new(args: &Args, visible: bool, records: Vec<Record>) -> Self {
        let visible = visible && !args.quiet;
        let bar = match visible {
            true => ProgressBar::new(args.steps as u64).with_style(style()),
            false => ProgressBar::hidden(),
        };
        let line_every = match visible && bar.is_hidden() {
            true => args.steps.div_ceil(10),
            false => 0,
        };
        bar.set_position(records.len() as u64);
        let earlier = records
            .last()
            .map_or(Duration::ZERO, |record| record.elapsed);
        Self {
            bar,
            line_every,
            tokens_per_step: args.tokens_per_step(),
            started: Instant::now()
                .checked_sub(earlier)
                .unwrap_or_else(Instant::now),
            records,
        }
    }

    pub(crate) fn records(&self) -> &[Record] {
        &self.records
    }

    pub(crate) fn step(&mut self, loss: f64, grad_norm: f64) {
        let elapsed = self.started.elapsed();
        self.records.push(Record {
            loss,
            grad_norm,
            elapsed,
        });
        let done = self.records.len();
        let speed = tokens_per_second(self.tokens_per_step * done, elapsed);
        let line = format!("loss {loss:.3}  norm {grad_norm:.2}  {speed:.0} tokens/s");
        if self.line_every > 0 && (done == 1 || done.is_multiple_of(self.line_every)) {
            eprintln!("step {done:>5}  {line}");
        }
        self.bar.set_message(line);
        self.bar.inc(1);
    }

    pub(crate) fn finish(self) -> Vec<Record> {
        self.bar.finish();
        self.records
    }
}

pub(crate) fn tokens_per_second(tokens: usize, elapsed: Duration) -> f64 {
    tokens as f64 / elapsed.as_secs_f64().max(1e-9)
}

fn style() -> ProgressStyle {
    ProgressStyle::with_template("{bar:30} {pos}/{len} [{elapsed}<{eta}] {msg}")
        .unwrap_or_else(|_| ProgressStyle::default_bar())
}
