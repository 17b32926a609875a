//! The library's own count of unsharded memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes one rank holds for one sharded module. See [`FsdpModule::memory`](crate::FsdpModule::memory).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Bytes of unsharded parameters alive now, those the autodiff graph still holds included.
    pub live_unsharded_bytes: usize,
    /// The most that were alive at once since sharding, or since
    /// [`reset_peak_memory`](crate::FsdpModule::reset_peak_memory).
    pub peak_unsharded_bytes: usize,
    /// Bytes of this rank's shards, padding included. Gradients take the same again once reduced,
    /// Adam's state twice that.
    pub shard_bytes: usize,
}

#[derive(Debug, Default)]
pub(crate) struct MemoryCounter {
    live: AtomicUsize,
    peak: AtomicUsize,
}

impl MemoryCounter {
    pub(crate) fn live(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }

    pub(crate) fn peak(&self) -> usize {
        self.peak.load(Ordering::Relaxed)
    }

    pub(crate) fn reset_peak(&self) {
        self.peak.store(self.live(), Ordering::Relaxed);
    }
}

/// Counts `bytes` as alive for as long as it exists.
#[derive(Debug)]
pub(crate) struct MemoryGuard {
    counter: Arc<MemoryCounter>,
    bytes: usize,
}

impl MemoryGuard {
    pub(crate) fn new(counter: &Arc<MemoryCounter>, bytes: usize) -> Self {
        let live = counter.live.fetch_add(bytes, Ordering::Relaxed) + bytes;
        counter.peak.fetch_max(live, Ordering::Relaxed);
        Self {
            counter: counter.clone(),
            bytes,
        }
    }
}

impl Drop for MemoryGuard {
    fn drop(&mut self) {
        self.counter.live.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_outlives_the_guards_that_made_it() {
        let counter = Arc::new(MemoryCounter::default());
        let first = MemoryGuard::new(&counter, 10);
        drop(MemoryGuard::new(&counter, 5));
        assert_eq!((counter.live(), counter.peak()), (10, 15));
        drop(first);
        counter.reset_peak();
        assert_eq!((counter.live(), counter.peak()), (0, 0));
    }
}
