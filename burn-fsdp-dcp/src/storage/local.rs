//! The local file system, or one that all machines mount.

use std::fs::{self, File};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{ReadFile, Storage, WriteFile};
use crate::{DcpError, Result};

/// Small writes are put together up to this.
const BUFFER: usize = 1 << 20;

/// What is about to be done to a path; may refuse.
type Watch = Arc<dyn Fn(&'static str, &Path) -> io::Result<()> + Send + Sync>;

/// Files under a directory.
#[derive(Clone)]
pub struct LocalStorage {
    root: PathBuf,
    watch: Option<Watch>,
}

impl std::fmt::Debug for LocalStorage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalStorage")
            .field("root", &self.root)
            .finish_non_exhaustive()
    }
}

impl LocalStorage {
    /// Files under `root`, which is created when the first is written.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        let root = root.into();
        let is_here = root.as_os_str().is_empty();
        Self {
            root: if is_here { PathBuf::from(".") } else { root },
            watch: None,
        }
    }

    /// Calls `watch` before everything that changes a file or directory, with what it is: `mkdir`,
    /// `create`, `write`, `fsync`, `rename`, `unlink`, `rmdir`. An error takes its place. For tests of
    /// what is left when a process dies, or a disk is full, at any moment.
    pub fn with_watch(
        mut self,
        watch: impl Fn(&'static str, &Path) -> io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        self.watch = Some(Arc::new(watch));
        self
    }

    fn place(&self, path: &str) -> PathBuf {
        if path.is_empty() {
            return self.root.clone();
        }
        self.root.join(path)
    }

    fn attempt<T>(
        &self,
        op: &'static str,
        path: &Path,
        action: impl FnOnce() -> io::Result<T>,
    ) -> Result<T> {
        attempt(self.watch.as_ref(), op, path, action)
            .map_err(|error| DcpError::io(op, path.display(), error))
    }

    /// Makes the directories down to a file's, and sees to it that they stay.
    fn make_dirs(&self, file: &Path) -> Result<()> {
        let Some(dir) = file.parent().filter(|dir| !dir.as_os_str().is_empty()) else {
            return Ok(());
        };
        if dir.is_dir() {
            return Ok(());
        }
        self.make_dirs(dir)?;
        let made = self.attempt("mkdir", dir, || match fs::create_dir(dir) {
            // Another rank was first.
            Err(error) if error.kind() == ErrorKind::AlreadyExists && dir.is_dir() => Ok(()),
            made => made,
        });
        made?;
        self.sync_dir(dir.parent().unwrap_or(dir))
    }

    /// Makes renames and removals in a directory last.
    fn sync_dir(&self, dir: &Path) -> Result<()> {
        let dir = if dir.as_os_str().is_empty() {
            Path::new(".")
        } else {
            dir
        };
        // Where directories can't be opened, there is nothing to be done about them.
        let Ok(handle) = File::open(dir) else {
            return Ok(());
        };
        self.attempt("fsync", dir, || match handle.sync_all() {
            Err(error) if error.kind() == ErrorKind::InvalidInput => Ok(()),
            synced => synced,
        })
    }

    /// Writes a temporary file, and renames it to `path`.
    fn put(&self, temporary: &str, path: &str, bytes: &[u8]) -> Result<()> {
        let (from, to) = (self.place(temporary), self.place(path));
        let mut file = self.create(temporary)?;
        file.write_all(bytes)
            .map_err(|error| DcpError::io("write", from.display(), error))?;
        file.finish()?;
        self.attempt("rename", &to, || fs::rename(&from, &to))?;
        self.sync_dir(to.parent().unwrap_or(&to))
    }
}

fn attempt<T>(
    watch: Option<&Watch>,
    op: &'static str,
    path: &Path,
    action: impl FnOnce() -> io::Result<T>,
) -> io::Result<T> {
    if let Some(watch) = watch {
        watch(op, path)?;
    }
    action()
}

impl Storage for LocalStorage {
    fn display(&self, path: &str) -> String {
        self.place(path).display().to_string()
    }

    fn create(&self, path: &str) -> Result<Box<dyn WriteFile>> {
        let path = self.place(path);
        self.make_dirs(&path)?;
        let file = self.attempt("create", &path, || File::create(&path))?;
        let file = Watched {
            file,
            path,
            watch: self.watch.clone(),
        };
        Ok(Box::new(LocalWrite(BufWriter::with_capacity(BUFFER, file))))
    }

    fn open(&self, path: &str) -> Result<Option<Arc<dyn ReadFile>>> {
        let path = self.place(path);
        let opened = File::open(&path).and_then(|file| {
            let metadata = file.metadata()?;
            if !metadata.is_file() {
                return Err(io::Error::other("it is not a file"));
            }
            let len = metadata.len();
            Ok(LocalRead {
                file,
                len,
                path: path.clone(),
            })
        });
        match opened {
            Ok(file) => Ok(Some(Arc::new(file))),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(DcpError::io("open", path.display(), error)),
        }
    }

    fn replace(&self, path: &str, bytes: &[u8]) -> Result<()> {
        let temporary = format!("{path}.tmp");
        let put = self.put(&temporary, path, bytes);
        if put.is_err() {
            let _ = self.remove(&temporary);
        }
        put
    }

    fn list(&self, dir: &str) -> Result<Vec<String>> {
        let dir = self.place(dir);
        let failed = |error: io::Error| DcpError::io("list", dir.display(), error);
        let entries = match fs::read_dir(&dir) {
            Ok(entries) => entries,
            Err(error) if is_no_dir(&error) => return Ok(Vec::new()),
            Err(error) => return Err(failed(error)),
        };
        let mut names = Vec::new();
        for entry in entries {
            // A name that is no text is none of ours.
            if let Ok(name) = entry.map_err(failed)?.file_name().into_string() {
                names.push(name);
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    fn remove(&self, path: &str) -> Result<()> {
        let path = self.place(path);
        self.attempt("unlink", &path, || unless_missing(fs::remove_file(&path)))
    }

    fn remove_empty_dir(&self, dir: &str) -> Result<()> {
        let dir = self.place(dir);
        self.attempt("rmdir", &dir, || match fs::remove_dir(&dir) {
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => Ok(()),
            removed => unless_missing(removed),
        })
    }
}

fn is_no_dir(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

fn unless_missing(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// A file whose writes can be refused.
struct Watched {
    file: File,
    path: PathBuf,
    watch: Option<Watch>,
}

impl Write for Watched {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let file = &mut self.file;
        attempt(self.watch.as_ref(), "write", &self.path, || {
            file.write(bytes)
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

struct LocalWrite(BufWriter<Watched>);

impl Write for LocalWrite {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl WriteFile for LocalWrite {
    fn finish(mut self: Box<Self>) -> Result<()> {
        let path = self.0.get_ref().path.clone();
        let failed = |op: &str, error: io::Error| DcpError::io(op, path.display(), error);
        self.0.flush().map_err(|error| failed("write", error))?;
        let Watched { file, watch, .. } = self.0.get_ref();
        attempt(watch.as_ref(), "fsync", &path, || file.sync_all())
            .map_err(|error| failed("fsync", error))
    }
}

#[derive(Debug)]
struct LocalRead {
    file: File,
    len: u64,
    path: PathBuf,
}

impl ReadFile for LocalRead {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        read_exact_at(&self.file, buffer, offset)
            .map_err(|error| DcpError::io("read", self.path.display(), error))
    }
}

#[cfg(unix)]
fn read_exact_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, buffer, offset)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut buffer: &mut [u8], mut offset: u64) -> io::Result<()> {
    use std::os::windows::fs::FileExt;
    while !buffer.is_empty() {
        match file.seek_read(buffer, offset)? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            n => {
                buffer = &mut buffer[n..];
                offset += n as u64;
            }
        }
    }
    Ok(())
}
