//! Tensors on devices of CubeCL as buffers, and back.
//!
//! With Burn's fusion an operation runs when somebody looks at its result. Whoever takes a buffer
//! looks, so what fills it has been enqueued on the device when [`buffer_of`] returns; and what is
//! made of a buffer by [`tensor_of`] is there at once.
//!
//! # Note: buffers that other threads read
//!
//! Each thread has a stream. CubeCL makes a stream wait for that of a buffer it reads, unless it has
//! done so since the buffer was *allocated*; what fills the buffer may have been enqueued later. So
//! what other threads are to read is allocated and filled in one task of the device's thread, by
//! [`filled`], or waited for, by [`DeviceBuffer::settle`].

use std::fmt;

use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::{Cube, CubeDevice, DispatchDevice};
use burn::tensor::{Device, Shape, Tensor};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::future::block_on;
use cubecl_environment::stream::StreamId;

use crate::kernels::Buffer;
use crate::{FsdpError, Result};

/// The device as CubeCL knows it; `None` if it is none of CubeCL's.
pub(crate) fn device_of(device: &Device) -> Option<CubeDevice> {
    match device.clone().inner().as_dispatch() {
        DispatchDevice::Cube(device) => Some(device.clone()),
        _ => None,
    }
}

/// The elements of a tensor; a copy only if they are not contiguous.
pub(crate) fn buffer_of(tensor: Tensor<1>) -> Result<DeviceBuffer> {
    let device = tensor.device();
    let primitive = tensor.try_into_primitive::<Cube>().map_err(|_| {
        FsdpError::argument(format!(
            "this rank's tensor is on {device:?}, those of other ranks are on a device of CubeCL; \
             all ranks of a group must train on one kind of device"
        ))
    })?;
    let tensor = into_contiguous(resolve(primitive));
    Ok(DeviceBuffer {
        buffer: Buffer {
            handle: tensor.handle.clone(),
            len: tensor.meta.num_elements(),
            dtype: tensor.dtype,
        },
        device: tensor.device,
    })
}

/// Runs `fill`, which allocates buffers and enqueues the kernels that fill them, with nothing of other
/// threads in between. Then other threads may read them.
pub(crate) fn filled<T: Send + 'static>(
    client: &Client,
    fill: impl FnOnce() -> T + Send,
) -> Result<T> {
    client.exclusive(fill).map_err(FsdpError::other)
}

/// The buffer as a flat tensor, without a copy.
pub(crate) fn tensor_of(buffer: Buffer, device: &CubeDevice) -> Tensor<1> {
    let (client, device) = (device.client(), device.clone());
    let shape = Shape::new([buffer.len]);
    let tensor = CubeTensor::new_contiguous(client, device, shape, buffer.handle, buffer.dtype);
    Tensor::from_primitive::<Cube>(promise(tensor))
}

#[cfg(not(feature = "fusion"))]
fn resolve(tensor: CubeTensor) -> CubeTensor {
    tensor
}

#[cfg(not(feature = "fusion"))]
fn promise(tensor: CubeTensor) -> CubeTensor {
    tensor
}

#[cfg(feature = "fusion")]
use fused::{promise, resolve};

#[cfg(feature = "fusion")]
mod fused {
    use burn::backend::fusion::custom::{OperationIr, StreamId};
    use burn::backend::fusion::{NoOp, get_client};
    use burn::backend::ir::InitOperationIr;
    use burn::backend::tensor::FloatTensor;
    use burn::backend::{Cube, TensorMetadata};
    use burn_cubecl::CubeBackend;
    use burn_cubecl::tensor::CubeTensor;

    /// Runs what the tensor waits for.
    pub(super) fn resolve(tensor: FloatTensor<Cube>) -> CubeTensor {
        let client = tensor.client.clone();
        client.resolve_tensor_float::<CubeBackend>(tensor)
    }

    /// A tensor for lazy operations to work on, which is there already.
    pub(super) fn promise(tensor: CubeTensor) -> FloatTensor<Cube> {
        let client = get_client::<CubeBackend>(&tensor.device);
        let (shape, dtype) = (tensor.shape(), tensor.dtype);
        let register = || client.register_tensor_handle(tensor.into());
        let init = InitOperationIr::create(shape, dtype, register);
        client
            .register(
                StreamId::current(),
                OperationIr::Init(init),
                NoOp::<CubeBackend>::new(),
            )
            .remove(0)
    }
}

/// A buffer with the device it is on, as ranks show it to each other.
#[derive(Clone)]
pub(crate) struct DeviceBuffer {
    pub(crate) buffer: Buffer,
    pub(crate) device: CubeDevice,
}

impl DeviceBuffer {
    /// Waits for what fills the buffer, if another thread has enqueued that.
    pub(crate) fn settle(&self) -> Result<()> {
        let stream = self.buffer.handle.stream;
        if stream == StreamId::current() {
            return Ok(());
        }
        let client = self.device.client();
        let done = stream.executes(|| block_on(client.sync()));
        done.map_err(FsdpError::other)
    }

    /// The elements on `device`: copied there if they are on another.
    pub(crate) fn on(&self, device: &CubeDevice) -> Buffer {
        if self.device == *device {
            return self.buffer.clone();
        }
        let (mut from, to): (Client, Client) = (self.device.client(), device.client());
        let elem = dtype_to_elem_type(self.buffer.dtype);
        Buffer {
            handle: from.to_client(self.buffer.handle.clone(), &to, elem),
            ..self.buffer
        }
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Buffer { len, dtype, .. } = &self.buffer;
        write!(f, "{len} elements, {dtype:?}, on {:?}", self.device)
    }
}
