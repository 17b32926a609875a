//! What a rank shows to the others in a collective between threads.

use std::any::Any;
use std::sync::Arc;

/// Of any type; all ranks of a collective show the same.
pub(super) type Part = Arc<dyn Any + Send + Sync>;
