//! Objects that are saved beside a model.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Result;

/// Something whose state goes into a checkpoint: a sampler, an early-stopping rule, counters.
pub trait Stateful {
    /// What is saved.
    type State: Serialize + DeserializeOwned;

    /// The state now.
    fn state(&self) -> Self::State;

    /// Goes on from a saved state.
    ///
    /// # Errors
    ///
    /// If the state is not one of this object.
    fn load_state(&mut self, state: Self::State) -> Result<()>;
}
