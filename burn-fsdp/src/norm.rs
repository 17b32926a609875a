//! Many tensors taken as one vector, wherever they are: its norm, and a multiple of it.

use burn::tensor::Tensor;

use crate::comm::host;
use crate::{NormType, Result};

/// The norm before the root: a sum of squares is what parts of a vector can add up.
pub(crate) fn before_root(norm: NormType, tensors: &[Tensor<1>]) -> Result<f64> {
    let (on_host, elsewhere): (Vec<_>, Vec<_>) = tensors.iter().partition(|t| host::is_host(t));
    let mut total = 0.0;
    for tensor in on_host {
        let part = match norm {
            NormType::L1 => host::sum_of(tensor, f64::abs),
            NormType::L2 => host::sum_of(tensor, |x| x * x),
            NormType::Inf => host::max_abs(tensor),
        };
        total = join(norm, total, part?);
    }
    if !elsewhere.is_empty() {
        total = join(norm, total, on_device(norm, &elsewhere)?);
    }
    Ok(total)
}

/// The norm of two vectors as one, all before the root.
pub(crate) fn join(norm: NormType, a: f64, b: f64) -> f64 {
    match norm {
        NormType::L1 | NormType::L2 => a + b,
        NormType::Inf if a.is_nan() || b.is_nan() => f64::NAN,
        NormType::Inf => a.max(b),
    }
}

/// The tensors times `factor`, in place where nobody else holds them.
pub(crate) fn scale(tensors: Vec<Tensor<1>>, factor: f64) -> Result<Vec<Tensor<1>>> {
    let (on_host, elsewhere): (Vec<_>, Vec<_>) = tensors
        .into_iter()
        .enumerate()
        .partition(|(_, t)| host::is_host(t));
    let (places, elsewhere): (Vec<_>, Vec<_>) = elsewhere.into_iter().unzip();
    let elsewhere = places.into_iter().zip(scale_on_device(elsewhere, factor)?);
    let on_host = on_host.into_iter().map(|(i, t)| (i, t.mul_scalar(factor)));
    let mut scaled: Vec<_> = on_host.chain(elsewhere).collect();
    scaled.sort_by_key(|(place, _)| *place);
    Ok(scaled.into_iter().map(|(_, tensor)| tensor).collect())
}

#[cfg(feature = "cube")]
fn on_device(norm: NormType, tensors: &[&Tensor<1>]) -> Result<f64> {
    use crate::comm::cube::{buffer_of, tensor_of};
    use crate::kernels;

    let buffers = tensors.iter().map(|tensor| buffer_of((*tensor).clone()));
    let buffers = buffers.collect::<Result<Vec<_>>>()?;
    let device = buffers[0].device.clone();
    let buffers: Vec<_> = buffers.iter().map(|buffer| buffer.on(&device)).collect();
    let client = device.client();
    let total = kernels::norm(&client, norm, &buffers);
    Ok(tensor_of(total, &device).into_scalar::<f64>())
}

#[cfg(not(feature = "cube"))]
fn on_device(_norm: NormType, tensors: &[&Tensor<1>]) -> Result<f64> {
    // Fails, and says on which device the tensor is.
    host::max_abs(tensors[0])
}

#[cfg(feature = "cube")]
fn scale_on_device(tensors: Vec<Tensor<1>>, factor: f64) -> Result<Vec<Tensor<1>>> {
    use crate::comm::cube::{buffer_of, tensor_of};
    use crate::kernels;

    let buffers = tensors.into_iter().map(buffer_of);
    let buffers = buffers.collect::<Result<Vec<_>>>()?;
    // Burn's own tensors are values: one that somebody else holds must keep its own.
    let is_own: Vec<_> = buffers.iter().map(|b| b.buffer.handle.can_mut()).collect();
    if let Some(first) = buffers.first() {
        let own = buffers.iter().zip(&is_own).filter(|(_, is_own)| **is_own);
        let own: Vec<_> = own.map(|(buffer, _)| buffer.buffer.clone()).collect();
        kernels::scale(&first.device.client(), &own, factor);
    }
    let scaled = buffers.into_iter().zip(is_own).map(|(buffer, is_own)| {
        let tensor = tensor_of(buffer.buffer, &buffer.device);
        if is_own {
            tensor
        } else {
            tensor.mul_scalar(factor)
        }
    });
    Ok(scaled.collect())
}

#[cfg(not(feature = "cube"))]
fn scale_on_device(tensors: Vec<Tensor<1>>, factor: f64) -> Result<Vec<Tensor<1>>> {
    let scaled = tensors.into_iter().map(|tensor| tensor.mul_scalar(factor));
    Ok(scaled.collect())
}
