//! CubeCL kernels around the collectives of one unit: cast and pack, unpack, reduce, norm, scale.
//!
//! A collective moves one flat buffer, a unit has many tensors. [`Packing`] says where each lies;
//! the kernels copy between the two and cast on the way.
//!
//! Every function here enqueues its kernels on the calling thread's stream and returns at once.
//! Preconditions (lengths, dtypes) are asserted on the calling thread, before anything is enqueued.
//!
//! # Note: launches
//!
//! All members of a unit that can use vectors of the same width share a launch, up to
//! [`launch::BUFFERS_PER_LAUNCH`] or what the device binds at once. What a kernel must know of them travels
//! with the launch as scalars: there is no table to upload, to keep or to look up.
//!
//! # Note: rounding
//!
//! Values are narrowed to nearest, ties to even, once: f64 to bf16 too. Arithmetic is in f32, or in
//! f64 where a buffer involved is. A device whose language allows an inexact division (WGSL) may
//! differ in the last bit there.

mod buffer;
mod gradients;
mod launch;
mod norm;
mod pack;
mod packing;
#[cfg(all(test, any(feature = "cpu", feature = "cuda")))]
mod reference;
mod rounding;
mod scale;
#[cfg(all(test, any(feature = "cpu", feature = "cuda")))]
mod speed;
mod unpack;

pub(crate) use buffer::Buffer;
pub(crate) use gradients::{combine, finish};
pub(crate) use launch::wide;
pub(crate) use norm::norm;
pub(crate) use pack::{pack, pack_gradients};
pub(crate) use packing::Packing;
pub(crate) use rounding::Rounding;
pub(crate) use scale::scale;
pub(crate) use unpack::unpack;
