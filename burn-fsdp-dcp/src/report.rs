//! What became of each name when tensors were loaded.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What became of each name when tensors were loaded. Names are those of the model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LoadReport {
    /// Loaded as they are.
    pub loaded: Vec<String>,
    /// Loaded after a cast: the name, the dtype in the checkpoint, that of the model.
    pub cast: Vec<(String, String, String)>,
    /// In the model only.
    pub missing: Vec<String>,
    /// In the checkpoint only.
    pub unexpected: Vec<String>,
    /// Of another shape or dtype: the name, what the model has, what the checkpoint has.
    pub mismatched: Vec<(String, String, String)>,
    /// Left alone, as asked.
    pub ignored: Vec<String>,
}

impl LoadReport {
    /// Whether checkpoint and model have the same names, shapes and dtypes, but for what was cast or
    /// ignored on demand.
    pub fn is_exact(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty() && self.mismatched.is_empty()
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tensors fit", self.loaded.len() + self.cast.len())?;
        for (what, names) in [("missing", &self.missing), ("unexpected", &self.unexpected)] {
            if !names.is_empty() {
                write!(f, "; {what}: {}", names.join(", "))?;
            }
        }
        for (name, expected, got) in &self.mismatched {
            write!(
                f,
                "; {name}: the model has {expected}, the checkpoint {got}"
            )?;
        }
        Ok(())
    }
}
