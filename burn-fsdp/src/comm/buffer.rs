//! Host buffers that several ranks fill together and then read.

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{AllocationProperty, Bytes};
use parking_lot::Mutex;

use crate::memory::MemoryGuard;

/// Freed buffers by size, so that a unit finds the memory of the last step again instead of asking
/// the operating system for fresh pages.
#[derive(Debug, Default)]
pub(crate) struct BufferPool {
    free: Mutex<HashMap<usize, Vec<Words>>>,
}

type Words = Box<[UnsafeCell<u128>]>;

/// Memory that ranks write disjoint parts of, before any of them reads.
#[derive(Debug)]
pub(crate) struct SharedBuffer {
    words: Words,
    len: usize,
    pool: Option<Arc<BufferPool>>,
}

// SAFETY: concurrent access is through `slice_mut`, whose callers write disjoint ranges, and through
// `FilledBuffer`, which exists only once all writers are done.
unsafe impl Sync for SharedBuffer {}

impl SharedBuffer {
    /// A buffer of `len` bytes, from the pool if there is one, to which it returns when dropped.
    pub(crate) fn new(len: usize, pool: Option<&Arc<BufferPool>>) -> Self {
        let words = len.div_ceil(size_of::<u128>());
        let recycled = pool.and_then(|pool| pool.free.lock().get_mut(&words)?.pop());
        Self {
            words: recycled.unwrap_or_else(|| zeroed(words)),
            len,
            pool: pool.cloned(),
        }
    }

    fn as_ptr(&self) -> *mut u8 {
        // A pointer to all cells, not to the first.
        UnsafeCell::raw_get(self.words.as_ptr()).cast()
    }

    /// All bytes, for the only holder.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: nobody else has the buffer.
        unsafe { self.slice_mut(0..self.len) }
    }

    /// The bytes, never to be written again.
    pub(crate) fn freeze(self) -> bytes::Bytes {
        let none = MemoryGuard::new(&Default::default(), 0);
        bytes::Bytes::from_owner(FilledBuffer::of(self, none))
    }

    /// The bytes of `range`, for writing.
    ///
    /// # Safety
    ///
    /// No other slice of this buffer may overlap `range`, and no [`FilledBuffer`] may exist yet.
    #[allow(clippy::mut_from_ref)] // The contract above is what makes it right.
    pub(crate) unsafe fn slice_mut(&self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: within the allocation, initialised by `new`, unaliased by contract.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr().add(range.start), range.len()) }
    }
}

fn zeroed(words: usize) -> Words {
    // A plain vector of zeros costs no page until it is written.
    let words = vec![0u128; words].into_boxed_slice();
    // SAFETY: `UnsafeCell<u128>` has the layout of `u128`.
    unsafe { Box::from_raw(Box::into_raw(words) as *mut [UnsafeCell<u128>]) }
}

impl Drop for SharedBuffer {
    fn drop(&mut self) {
        if let Some(pool) = &self.pool {
            let words = std::mem::take(&mut self.words);
            pool.free.lock().entry(words.len()).or_default().push(words);
        }
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

    /// The same for a buffer that nobody else has.
    pub(crate) fn of(buffer: SharedBuffer, counted: MemoryGuard) -> Self {
        // SAFETY: who could have written to it or could still is gone.
        unsafe { Self::new(Arc::new(buffer), counted) }
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
        let buffer = Arc::new(SharedBuffer::new(40, Some(&pool)));
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
        let take = |len| SharedBuffer::new(len, Some(&pool)).as_ptr();
        let first = take(100);
        assert_eq!(take(97), first);
    }
}
