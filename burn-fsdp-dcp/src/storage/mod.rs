//! Where checkpoints are kept.
//!
//! A storage needs no rename of directories, and no listing that is up to date: a checkpoint exists
//! from the moment that its manifest does, and manifests are replaced by [`Storage::replace`] alone.

mod local;
#[cfg(feature = "object-store")]
mod object;

use std::fmt::Debug;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::{DcpError, Result};

pub use local::LocalStorage;
#[cfg(feature = "object-store")]
pub use object::ObjectStorage;

/// More than the manifest of any checkpoint has.
const MOST_OF_A_TABLE: u64 = 4 << 30;

/// A place for files under names with `/` between directories. Shared by all ranks.
pub trait Storage: Debug + Send + Sync {
    /// How messages name a file or directory.
    fn display(&self, path: &str) -> String;

    /// A new file to be written from the start. It replaces one of that name, and need not be visible
    /// before it is finished.
    ///
    /// # Errors
    ///
    /// What the system says, as all below.
    fn create(&self, path: &str) -> Result<Box<dyn WriteFile>>;

    /// A file to be read; none if it is not there.
    ///
    /// # Errors
    ///
    /// As above.
    fn open(&self, path: &str) -> Result<Option<Arc<dyn ReadFile>>>;

    /// Puts `bytes` in the place of what is at `path`, so that whatever happens, readers find the old
    /// or the new, whole; and the new for good, once this returns.
    ///
    /// # Errors
    ///
    /// As above.
    fn replace(&self, path: &str, bytes: &[u8]) -> Result<()>;

    /// The names in a directory, of files and of directories; none if it is not there.
    ///
    /// # Errors
    ///
    /// As above.
    fn list(&self, dir: &str) -> Result<Vec<String>>;

    /// Removes a file, or does nothing if it is not there.
    ///
    /// # Errors
    ///
    /// As above.
    fn remove(&self, path: &str) -> Result<()>;

    /// Removes a directory that has no files, or does nothing.
    ///
    /// # Errors
    ///
    /// As above.
    fn remove_empty_dir(&self, dir: &str) -> Result<()>;
}

/// A file being written.
pub trait WriteFile: Write + Send {
    /// Ends it. Its bytes are there for good once this returns; a file that is dropped without may be
    /// half there, or not at all.
    ///
    /// # Errors
    ///
    /// What the system says.
    fn finish(self: Box<Self>) -> Result<()>;
}

/// A file being read.
pub trait ReadFile: Debug + Send + Sync {
    /// Its length in bytes.
    fn len(&self) -> u64;

    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `buffer` from `offset` on.
    ///
    /// # Errors
    ///
    /// What the system says, and if the file ends before.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()>;
}

/// A directory in a storage. Made from a path, [from a URL](Self::from_url), or [`of`](Self::of) any storage.
#[derive(Clone, Debug)]
pub struct Location {
    storage: Arc<dyn Storage>,
    dir: String,
}

impl Location {
    /// A directory, with `/` between names, of a storage; its root if empty.
    pub fn of(storage: Arc<dyn Storage>, dir: impl Into<String>) -> Self {
        let dir = dir.into().trim_matches('/').to_string();
        Self { storage, dir }
    }

    /// What a URL names, such as `s3://bucket/run`; or a path, if it has no scheme. With the feature
    /// `object-store`, and that of a cloud, as `ObjectStorage::from_url` has it.
    ///
    /// `memory:///` is empty each time. Ranks that share one share the location.
    ///
    /// # Errors
    ///
    /// [`DcpError::InvalidArgument`](crate::DcpError::InvalidArgument) if it is no such URL, or needs a
    /// feature that this build lacks, which it names.
    pub fn from_url(url: &str) -> Result<Self> {
        match url.split_once("://") {
            None => Ok(Self::from(url)),
            Some((scheme, _)) => Self::in_object_store(scheme, url),
        }
    }

    #[cfg(feature = "object-store")]
    fn in_object_store(_scheme: &str, url: &str) -> Result<Self> {
        Ok(Self::of(Arc::new(ObjectStorage::from_url(url)?), ""))
    }

    #[cfg(not(feature = "object-store"))]
    fn in_object_store(scheme: &str, _url: &str) -> Result<Self> {
        Err(crate::DcpError::argument(format!(
            "{scheme} URLs need the feature \"object-store\" of burn-fsdp-dcp, or that of their cloud: \
             \"aws\", \"gcp\" or \"azure\""
        )))
    }

    /// A directory or file in this one.
    pub fn join(&self, name: &str) -> Self {
        Self::of(self.storage.clone(), self.path(name))
    }

    pub(crate) fn storage(&self) -> &dyn Storage {
        &*self.storage
    }

    /// The path of a file in this directory.
    pub(crate) fn path(&self, name: &str) -> String {
        if self.dir.is_empty() {
            return name.to_string();
        }
        format!("{}/{name}", self.dir)
    }

    /// How messages name a file in this directory.
    pub(crate) fn display_file(&self, name: &str) -> String {
        self.storage.display(&self.path(name))
    }

    pub(crate) fn list(&self) -> Result<Vec<String>> {
        self.storage.list(&self.dir)
    }

    /// A whole file, if it is there. It is a table, so not large.
    pub(crate) fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let Some(file) = self.storage.open(&self.path(name))? else {
            return Ok(None);
        };
        let mut bytes = Vec::new();
        if file.len() > MOST_OF_A_TABLE || bytes.try_reserve_exact(file.len() as usize).is_err() {
            let detail = format!("it has {} bytes, far too many", file.len());
            return Err(DcpError::corrupt(self.display_file(name), detail));
        }
        bytes.resize(file.len() as usize, 0);
        file.read_at(&mut bytes, 0)?;
        Ok(Some(bytes))
    }

    pub(crate) fn replace(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.storage.replace(&self.path(name), bytes)
    }

    pub(crate) fn remove(&self, name: &str) -> Result<()> {
        self.storage.remove(&self.path(name))
    }

    pub(crate) fn remove_if_empty(&self) -> Result<()> {
        self.storage.remove_empty_dir(&self.dir)
    }
}

impl std::fmt::Display for Location {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.storage.display(&self.dir))
    }
}

impl From<&Path> for Location {
    fn from(path: &Path) -> Self {
        Self::of(Arc::new(LocalStorage::new(path)), "")
    }
}

impl From<PathBuf> for Location {
    fn from(path: PathBuf) -> Self {
        Self::from(path.as_path())
    }
}

impl From<&PathBuf> for Location {
    fn from(path: &PathBuf) -> Self {
        Self::from(path.as_path())
    }
}

impl From<&str> for Location {
    fn from(path: &str) -> Self {
        Self::from(Path::new(path))
    }
}

impl From<&Location> for Location {
    fn from(location: &Location) -> Self {
        location.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_scheme_is_a_path() {
        let location = Location::from_url("runs/a:b").unwrap();
        assert_eq!(
            location.to_string(),
            Path::new("runs/a:b").to_string_lossy()
        );
    }

    #[cfg(not(feature = "aws"))]
    #[test]
    fn a_url_whose_feature_is_missing_is_refused_with_its_name() {
        let error = Location::from_url("s3://bucket/run").unwrap_err();
        assert!(error.to_string().contains("\"aws\""), "{error}");
    }
}
