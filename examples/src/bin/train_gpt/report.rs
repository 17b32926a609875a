//! The summary after training.

use std::fs;

use crate::args::Args;
use crate::progress::tokens_per_second;
use crate::train::Outcome;

/// How many of the last steps the final loss is the mean of: a single batch's loss jumps about.
const LAST: usize = 10;

pub(crate) fn print(args: &Args, outcome: &Outcome) {
    println!();
    println!("rank   parameters held   peak unsharded");
    for (rank, held) in outcome.held.iter().enumerate() {
        let unsharded = match args.single {
            true => "(all of it)".into(),
            false => bytes(held.peak_unsharded),
        };
        println!("{rank:>4}   {:>15}   {unsharded:>14}", bytes(held.shards));
    }
    let peak = peak_rss().map_or("unknown".into(), bytes);
    println!();
    println!("parameters          {:>12}", outcome.parameters);
    println!(
        "peak process memory {peak:>12}   activations, optimizer and all ranks of the process included"
    );
    if let Some(taken) = outcome.device_memory {
        let taken = bytes(taken);
        println!("device memory       {taken:>12}   taken by the allocator, for all ranks on it");
    }
    println!("speed               {:>12.0}   tokens/s", speed(outcome));
    println!(
        "loss                {:>12.4}   mean of the last {} steps; {:.4} at the first",
        final_loss(outcome),
        outcome.records.len().min(LAST),
        outcome
            .records
            .first()
            .map_or(f64::NAN, |record| record.loss),
    );
}

fn speed(outcome: &Outcome) -> f64 {
    let tokens = outcome.tokens_per_step * outcome.records.len();
    outcome
        .records
        .last()
        .map_or(0.0, |record| tokens_per_second(tokens, record.elapsed))
}

fn final_loss(outcome: &Outcome) -> f64 {
    let from = outcome.records.len().saturating_sub(LAST);
    let last = &outcome.records[from..];
    last.iter().map(|record| record.loss).sum::<f64>() / last.len() as f64
}

/// The process's peak resident memory, where the system tells it.
fn peak_rss() -> Option<usize> {
    parse_peak_rss(&fs::read_to_string("/proc/self/status").ok()?)
}

fn parse_peak_rss(status: &str) -> Option<usize> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

fn bytes(count: usize) -> String {
    const KIB: f64 = 1024.0;
    let count = count as f64;
    if count < KIB * KIB {
        format!("{:.1} KiB", count / KIB)
    } else {
        format!("{:.1} MiB", count / KIB / KIB)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_memory_is_read_from_the_process_status() {
        let status = "Name:\ttrain_gpt\nVmPeak:\t  9000 kB\nVmHWM:\t    2048 kB\nVmRSS:\t 1 kB\n";
        assert_eq!(parse_peak_rss(status), Some(2 << 20));
        assert_eq!(parse_peak_rss("Name:\ttrain_gpt\n"), None);
    }

    #[test]
    fn byte_counts_are_shown_in_the_unit_that_suits_them() {
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(3 << 20), "3.0 MiB");
    }
}
