//! Samples, ratios, a start line for ranks that are threads, and peak memory.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use burn_fsdp::{FsdpError, Result};

/// Whether this process was started to measure.
///
/// `cargo bench` passes `--bench` to every target. Anything else that happens to run the target
/// (`cargo test --all-targets`, a test runner listing its tests) should be over at once.
pub fn asked_to_run() -> bool {
    let asked = ["--bench", "--help", "-h"];
    std::env::args().any(|arg| asked.contains(&arg.as_str()))
}

/// The times that one contender took, one a round.
#[derive(Debug, Clone, Default)]
pub struct Samples(Vec<Duration>);

impl Samples {
    /// Adds a round.
    pub fn push(&mut self, time: Duration) {
        self.0.push(time);
    }

    /// The slowest rank of every round: a collective is over when the last rank is.
    ///
    /// # Panics
    ///
    /// If the ranks did not run the same number of rounds.
    pub fn slowest(ranks: &[Samples]) -> Samples {
        Self::per_round(ranks, |times| times.max().expect("at least one rank"))
    }

    /// The mean over the contenders of every round.
    ///
    /// # Panics
    ///
    /// If the contenders did not run the same number of rounds.
    pub fn mean(contenders: &[Samples]) -> Samples {
        let count = contenders.len() as u32;
        Self::per_round(contenders, |times| times.sum::<Duration>() / count)
    }

    fn per_round(
        all: &[Samples],
        reduce: impl Fn(&mut dyn Iterator<Item = Duration>) -> Duration,
    ) -> Samples {
        let rounds = all.first().map_or(0, |samples| samples.0.len());
        assert!(all.iter().all(|samples| samples.0.len() == rounds));
        let round = |i: usize| reduce(&mut all.iter().map(|samples| samples.0[i]));
        Samples((0..rounds).map(round).collect())
    }

    /// The least disturbed round.
    ///
    /// # Panics
    ///
    /// If there is none.
    pub fn min(&self) -> Duration {
        *self.0.iter().min().expect("at least one round")
    }

    /// The round in the middle.
    ///
    /// # Panics
    ///
    /// If there is none.
    pub fn median(&self) -> Duration {
        let mut sorted = self.0.clone();
        sorted.sort();
        sorted[sorted.len() / 2]
    }

    /// This contender's time over another's: `(by the least, by the median)`.
    pub fn ratio_to(&self, other: &Samples) -> (f64, f64) {
        (
            self.min().as_secs_f64() / other.min().as_secs_f64(),
            self.median().as_secs_f64() / other.median().as_secs_f64(),
        )
    }
}

impl fmt::Display for Samples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = format!("{} / {}", Time(self.min()), Time(self.median()));
        f.pad(&text)
    }
}

struct Time(Duration);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_secs_f64() {
            s if s < 1e-3 => write!(f, "{:.1} us", s * 1e6),
            s if s < 1.0 => write!(f, "{:.2} ms", s * 1e3),
            s => write!(f, "{s:.3} s"),
        }
    }
}

/// A size in bytes, in the unit that reads best.
#[derive(Debug, Clone, Copy)]
pub struct Bytes(pub usize);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.0 {
            n if n < 1 << 20 => format!("{} KiB", n >> 10),
            n => format!("{} MiB", n >> 20),
        };
        f.pad(&text)
    }
}

/// Lets all ranks go at the same moment.
///
/// Waking a sleeping thread takes longer than gathering a small unit, so this one spins.
#[derive(Debug)]
pub struct StartLine {
    ranks: usize,
    arrived: AtomicUsize,
}

impl StartLine {
    /// A start line for as many threads.
    pub fn new(ranks: usize) -> Self {
        Self {
            ranks,
            arrived: AtomicUsize::new(0),
        }
    }

    /// Returns when every rank has called this as often as the caller.
    ///
    /// # Errors
    ///
    /// If a rank has not come within a minute, as one that failed never will.
    pub fn wait(&self) -> Result<()> {
        let ticket = self.arrived.fetch_add(1, Ordering::SeqCst);
        let all_here = (ticket / self.ranks + 1) * self.ranks;
        let since = Instant::now();
        while self.arrived.load(Ordering::SeqCst) < all_here {
            if since.elapsed() > Duration::from_secs(60) {
                return Err(FsdpError::other("a rank never reached the start line"));
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}

/// The most memory this process ever had resident, where the system says so.
pub fn peak_resident() -> Option<Bytes> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kib: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Bytes(kib << 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(millis: &[u64]) -> Samples {
        Samples(millis.iter().copied().map(Duration::from_millis).collect())
    }

    #[test]
    fn a_round_takes_as_long_as_its_slowest_rank() {
        let slowest = Samples::slowest(&[samples(&[1, 5]), samples(&[2, 3])]);
        assert_eq!(slowest.min(), Duration::from_millis(2));
        assert_eq!(slowest.median(), Duration::from_millis(5));
    }

    #[test]
    fn the_start_line_lets_nobody_go_early() {
        let line = StartLine::new(3);
        let passed = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for round in 0..50 {
                        line.wait().unwrap();
                        assert!(passed.load(Ordering::SeqCst) >= 3 * round);
                        passed.fetch_add(1, Ordering::SeqCst);
                        line.wait().unwrap();
                    }
                });
            }
        });
        assert_eq!(passed.into_inner(), 150);
    }
}
