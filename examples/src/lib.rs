//! What the example programs share. The programs are in `src/bin`:
//!
//! - `train_gpt`: a small GPT on Shakespeare's sonnets, sharded or dense (`--single`).
//! - `train_digits_dense` and `train_digits`: one training script before and after sharding; compare them
//!   with `diff`.

pub mod digits;
pub mod gpt;
pub mod rng;
