//! Why the launcher ends without having run the job.

/// What is said, and the exit code.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: u8,
    pub(crate) what: String,
}

impl Failure {
    /// Arguments that cannot work, or an environment in which none would.
    pub(crate) fn usage(what: impl Into<String>) -> Self {
        Self {
            code: 2,
            what: what.into(),
        }
    }

    /// Something that the system has refused.
    pub(crate) fn system(what: &str, error: impl std::fmt::Display) -> Self {
        Self::usage(format!("{what}: {error}"))
    }
}
