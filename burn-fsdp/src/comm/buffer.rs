//! Host buffers that several ranks fill together and then read.

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{AllocationProperty, Bytes};
use parking_lot::Mutex;

use crate::memory::MemoryGuard;

/// Freed buffers by size, so that a unit finds the memory of the last step again instead of asking
/// the operating system for fresh pages. It never holds more than was in use at once.
#[derive(Debug, Default)]
pub(crate) struct BufferPool {
    free: Mutex<HashMap<usize, Vec<Box<[u128]>>>>,
}

impl BufferPool {
    pub(crate) fn take(self: &Arc<Self>, len: usize) -> SharedBuffer {
        let words = len.div_ceil(size_of::<u128>());
        let recycled = self.free.lock().get_mut(&words).and_then(Vec::pop);
        let words = recycled.unwrap_or_else(|| vec![0; words].into_boxed_slice());
        SharedBuffer {
            words: UnsafeCell::new(words),
            len,
            pool: self.clone(),
        }
    }
}

/// Memory that ranks write disjoint parts of, before any of them reads.
#[derive(Debug)]
pub(crate) struct SharedBuffer {
    words: UnsafeCell<Box<[u128]>>,
    len: usize,
    pool: Arc<BufferPool>,
}

// SAFETY: concurrent access is through `slice_mut`, whose callers write disjoint ranges, and through
// `FilledBuffer`, which exists only once all writers are done.
unsafe impl Sync for SharedBuffer {}

impl SharedBuffer {
    fn as_ptr(&self) -> *mut u8 {
        // SAFETY: only the pointer of the box is read; nothing replaces the box while it is shared.
        unsafe { (*self.words.get()).as_ptr().cast_mut().cast() }
    }

    /// The bytes of `range`, for writing.
    ///
    /// # Safety
    ///
    /// No other slice of this buffer may overlap `range`, and no [`FilledBuffer`] may exist yet.
    #[allow(clippy::mut_from_ref)] // The contract above is what makes it right.
    pub(crate) unsafe fn slice_mut(&self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: within the allocation, initialised by `BufferPool::take`, unaliased by contract.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr().add(range.start), range.len()) }
    }
}

impl Drop for SharedBuffer {
    fn drop(&mut self) {
        let words = std::mem::take(self.words.get_mut());
        self.pool
            .free
            .lock()
            .entry(words.len())
            .or_default()
            .push(words);
    }
}

/// One rank's read-only hold on a buffer that all ranks have filled.
#[derive(Debug)]
pub(crate) struct FilledBuffer {
    buffer: Arc<SharedBuffer>,
    _counted: MemoryGuard,
}

impl FilledBuffer {
    /// # Safety
    ///
    /// Every [`SharedBuffer::slice_mut`] of `buffer` must have ended, and none may follow.
    pub(crate) unsafe fn new(buffer: Arc<SharedBuffer>, counted: MemoryGuard) -> Self {
        Self {
            buffer,
            _counted: counted,
        }
    }

    /// The buffer as Burn's bytes, without a copy; whoever writes to them gets a private copy.
    pub(crate) fn into_bytes(self) -> Bytes {
        Bytes::from_shared(bytes::Bytes::from_owner(self), AllocationProperty::Native)
    }
}

impl AsRef<[u8]> for FilledBuffer {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: all writes have ended, by the contract of `new`.
        unsafe { std::slice::from_raw_parts(self.buffer.as_ptr(), self.buffer.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MemoryCounter;

    #[test]
    fn parts_written_by_threads_are_read_as_one() {
        let pool = Arc::new(BufferPool::default());
        let buffer = Arc::new(pool.take(40));
        std::thread::scope(|scope| {
            for part in 0..4u8 {
                let buffer = &buffer;
                scope.spawn(move || {
                    let start = part as usize * 10;
                    // SAFETY: the four ranges are disjoint and nobody reads yet.
                    unsafe { buffer.slice_mut(start..start + 10) }.fill(part);
                });
            }
        });
        let counter = Arc::new(MemoryCounter::default());
        // SAFETY: the writers have been joined.
        let filled = unsafe { FilledBuffer::new(buffer, MemoryGuard::new(&counter, 40)) };
        let bytes = filled.into_bytes();
        assert_eq!(counter.live(), 40);
        assert!(bytes.iter().enumerate().all(|(i, &b)| b as usize == i / 10));
        drop(bytes);
        assert_eq!(counter.live(), 0);
    }

    #[test]
    fn a_dropped_buffer_is_taken_again() {
        let pool = Arc::new(BufferPool::default());
        let first = pool.take(100).as_ptr();
        assert_eq!(pool.take(97).as_ptr(), first);
    }
}
