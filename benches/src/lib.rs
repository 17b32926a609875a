//! What the benches share: a plain harness ([`harness`]).
//!
//! A bench prints ratios against something that ran beside it, in alternation, on the same machine.
//! None asserts a time: machines differ, and a timed test that fails on a busy one teaches nothing.

pub mod harness;
