use std::ops::Range;

use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::DType;
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::BufferArg;
use cubecl::server::Handle;

use crate::comm::host;

/// `len` elements of `dtype` on a device, contiguous.
#[derive(Clone, Debug)]
pub(crate) struct Buffer {
    pub(crate) handle: Handle,
    pub(crate) len: usize,
    pub(crate) dtype: DType,
}

impl Buffer {
    /// Memory of any content.
    pub(crate) fn empty(client: &Client, len: usize, dtype: DType) -> Self {
        Self {
            handle: client.empty(len * dtype.size()),
            len,
            dtype,
        }
    }

    /// Some of the elements, in the same memory. Some runtimes bind it to a kernel only where it
    /// starts at a multiple of the device's `memory.alignment`, as slots and full tensors of a
    /// [`Packing`](super::Packing) do.
    pub(crate) fn range(&self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "{range:?} is no range of a buffer of {} elements",
            self.len
        );
        let bytes = |elements: usize| (elements * self.dtype.size()) as u64;
        let handle = self.handle.clone();
        let end = bytes(self.len - range.end);
        Self {
            handle: handle.offset_start(bytes(range.start)).offset_end(end),
            len: range.len(),
            dtype: self.dtype,
        }
    }

    /// Elements before the first, in the memory that the device allocated. Vectors are aligned where
    /// it is a multiple of their width.
    pub(super) fn offset(&self) -> usize {
        let bytes = self.handle.offset_start.unwrap_or(0) as usize;
        assert!(
            bytes.is_multiple_of(self.dtype.size()),
            "a buffer of {:?} starts at byte {bytes}, between two elements",
            self.dtype
        );
        bytes / self.dtype.size()
    }

    pub(super) fn elem(&self) -> ElemType {
        elem(self.dtype)
    }

    /// For a kernel that stays within `len`.
    pub(super) fn arg(&self) -> BufferArg {
        let bytes = self.len * self.dtype.size();
        let held = self.handle.size_in_used();
        assert!(
            bytes as u64 <= held,
            "{} elements of {:?} need {bytes} bytes, not {held}",
            self.len,
            self.dtype
        );
        // SAFETY: the memory holds `len` elements, as just checked.
        unsafe { BufferArg::from_raw_parts(self.handle.clone(), self.len) }
    }
}

/// The element type of a floating dtype.
pub(super) fn elem(dtype: DType) -> ElemType {
    assert!(
        host::is_supported(dtype),
        "{dtype:?} is no dtype of a sharded parameter"
    );
    dtype_to_elem_type(dtype)
}

#[cfg(all(test, any(feature = "cpu", feature = "cuda")))]
mod tests {
    use super::super::reference::{client, read, upload};
    use super::*;

    #[test]
    fn a_range_of_a_range_is_a_range_of_the_buffer() {
        let client = client();
        let values: Vec<f64> = (0..40).map(f64::from).collect();
        let buffer = upload(&client, &values, DType::BF16);
        let part = buffer.range(8..32).range(2..5);
        assert_eq!((part.len, part.offset()), (3, 10));
        assert_eq!(read(&client, &part), [10.0, 11.0, 12.0]);
        assert_eq!(buffer.range(40..40).len, 0);
    }

    #[test]
    #[should_panic(expected = "3..41 is no range of a buffer of 40 elements")]
    fn a_range_beyond_the_buffer_is_refused() {
        Buffer::empty(&client(), 40, DType::F32).range(3..41);
    }

    #[test]
    #[should_panic(expected = "I32 is no dtype of a sharded parameter")]
    fn integers_are_refused() {
        elem(DType::I32);
    }

    #[test]
    #[should_panic(expected = "9 elements of F32 need 36 bytes, not 32")]
    fn memory_that_is_too_small_is_refused() {
        let mut buffer = Buffer::empty(&client(), 8, DType::F32);
        buffer.len = 9;
        buffer.arg();
    }
}
