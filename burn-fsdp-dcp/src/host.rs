//! Tensors as bytes on the host.

use std::ops::Range;

use burn::backend::Flex;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{Tensor, TensorData};

/// Bytes on the host, in whatever form they were found.
pub(crate) type HostBytes = Box<dyn AsRef<[u8]> + Send>;

/// The elements of a tensor of the CPU backend where they are.
struct View {
    tensor: FloatTensor<Flex>,
    range: Range<usize>,
}

impl AsRef<[u8]> for View {
    fn as_ref(&self) -> &[u8] {
        &self.tensor.bytes()[self.range.clone()]
    }
}

/// The bytes of a tensor without a copy, if it is on the CPU backend and in one piece.
///
/// Burn's tensors are values: a later step that changes a parameter in place does so on a copy, as long
/// as this lives.
pub(crate) fn view<const D: usize>(tensor: &Tensor<D>) -> Option<HostBytes> {
    let tensor = tensor.clone().try_into_primitive::<Flex>().ok()?;
    if !tensor.is_contiguous() {
        return None;
    }
    let size = tensor.dtype().size();
    let start = tensor.layout().start_offset() * size;
    let range = start..start + tensor.layout().num_elements() * size;
    (range.end <= tensor.bytes().len()).then(|| Box::new(View { tensor, range }) as HostBytes)
}

struct Owned(burn::tensor::Bytes);

impl AsRef<[u8]> for Owned {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

pub(crate) fn owned(data: TensorData) -> HostBytes {
    Box::new(Owned(data.into_parts().0))
}
