//! The path of a parameter while a module is traversed.

/// The name under which visitors enter the shard behind a placeholder.
pub(crate) const SHARD_NAME: &str = "fsdp";

/// Where a traversal is, in the module as its author sees it.
#[derive(Debug, Default)]
pub(crate) struct PathStack {
    names: Vec<String>,
    inside_shard: bool,
}

impl PathStack {
    /// Goes one step down; a shard keeps the path of its parameter. Whether the step is one that the
    /// module's author knows of.
    pub(crate) fn enter(&mut self, name: &str, container: &str) -> bool {
        if is_shard(name, container) {
            self.inside_shard = true;
        } else {
            self.names.push(name.to_string());
        }
        !self.inside_shard
    }

    /// The reverse of [`enter`](Self::enter).
    pub(crate) fn exit(&mut self, name: &str, container: &str) -> bool {
        if is_shard(name, container) {
            self.inside_shard = false;
            return false;
        }
        self.names.pop();
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

/// The steps of a visitor or mapper that only wants to know where it is, in its field `path`.
macro_rules! follow_path {
    () => {
        fn enter_module(&mut self, name: &str, container: &str) {
            self.path.enter(name, container);
        }

        fn exit_module(&mut self, name: &str, container: &str) {
            self.path.exit(name, container);
        }
    };
}
pub(crate) use follow_path;

fn is_shard(name: &str, container: &str) -> bool {
    name == SHARD_NAME && container == "Reparameterization"
}
