//! The path of a parameter while a module is traversed.

use crate::param;

/// Where a traversal is, in the module as its author sees it.
#[derive(Debug, Default)]
pub(crate) struct PathStack {
    names: Vec<String>,
    inside_shard: bool,
}

impl PathStack {
    pub(crate) fn enter(&mut self, name: &str) {
        self.names.push(name.to_string());
    }

    pub(crate) fn exit(&mut self) {
        self.names.pop();
    }

    /// As [`enter`](Self::enter), but a shard keeps the path of its parameter. Whether the step is
    /// one that the module's author knows of.
    pub(crate) fn enter_outside(&mut self, name: &str, container: &str) -> bool {
        if is_shard(name, container) {
            self.inside_shard = true;
        } else {
            self.enter(name);
        }
        !self.inside_shard
    }

    /// The reverse of [`enter_outside`](Self::enter_outside).
    pub(crate) fn exit_outside(&mut self, name: &str, container: &str) -> bool {
        if is_shard(name, container) {
            self.inside_shard = false;
            return false;
        }
        self.exit();
        true
    }

    /// Whether the traversal is at the shard behind a placeholder.
    pub(crate) fn is_inside_shard(&self) -> bool {
        self.inside_shard
    }

    pub(crate) fn join(&self) -> String {
        self.names.join(".")
    }
}

fn is_shard(name: &str, container: &str) -> bool {
    name == param::NAME && container == "Reparameterization"
}
