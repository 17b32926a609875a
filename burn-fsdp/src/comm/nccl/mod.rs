//! Ranks with an NVIDIA GPU each, which talk by NCCL.
//!
//! [`engine`] and [`watch`] know NCCL and the device only through [`Driver`](driver::Driver), so that
//! they are tested without either, on devices that run what is queued in any order that is allowed
//! and object to what is not.

mod bundle;
mod driver;
mod engine;
#[cfg(test)]
mod fake;
mod join;
#[cfg(test)]
mod tests;
mod watch;
