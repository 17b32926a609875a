//! Object stores, through the crate `object_store`, whose calls are asynchronous while ours wait.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::io::{self, Write};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};

use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    Error, GetOptions, GetRange, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt,
    ObjectStoreScheme,
};
use tokio::runtime::Runtime;
use url::Url;

use super::{ReadFile, Storage, WriteFile};
use crate::{DcpError, Result};

/// Larger objects are written, and longer ranges read, in parts of this.
const PART: usize = 16 << 20;
/// So many parts are under way at once; together they bound the memory that an object takes.
const UNDER_WAY: usize = 4;
/// Parts double in size after so many, as stores take ten thousand for an object.
const PARTS_OF_A_SIZE: usize = 2500;
/// They travel in threads of their own, not the caller's.
const THREADS: usize = 2;

/// Objects under a prefix in Amazon S3, Google Cloud Storage, Azure Blob Storage or whatever else
/// implements [`ObjectStore`].
///
/// Requests are repeated as the store says, which for those from URLs is for three minutes. An upload
/// that is cut short by the death of the process is never seen, but some stores keep what it sent until a
/// rule of the bucket clears it away.
///
/// Calls wait for the store, so a task of an asynchronous runtime should make them where waiting is
/// allowed. They are answered on threads of this storage, which no such task can hold up.
#[derive(Clone, Debug)]
pub struct ObjectStorage {
    shared: Arc<Shared>,
    prefix: Path,
}

impl ObjectStorage {
    /// Objects whose names begin with `prefix` and a `/`; all if it is empty.
    ///
    /// # Errors
    ///
    /// If the prefix is no name of an object, or threads can't be started.
    pub fn new(store: Arc<dyn ObjectStore>, prefix: &str) -> Result<Self> {
        let root = match prefix.trim_matches('/') {
            "" => store.to_string(),
            prefix => format!("{store}/{prefix}"),
        };
        let prefix = Path::parse(prefix).map_err(|error| invalid(&root, &error))?;
        Self::rooted(store, prefix, root)
    }

    /// What a URL names: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix` and the other
    /// forms of [`ObjectStoreScheme`], each with the feature of its cloud; `file:///directory`; or
    /// `memory:///`, which is empty each time, so that ranks must share one.
    ///
    /// Credentials and the like are found in environment variables that begin with `AWS_`, `GOOGLE_` and
    /// `AZURE_`, under the names that `object_store` gives them.
    ///
    /// # Errors
    ///
    /// [`DcpError::InvalidArgument`] if it is no such URL, a feature is missing, or the store can't be set
    /// up from the environment.
    pub fn from_url(url: &str) -> Result<Self> {
        let parsed = Url::parse(url).map_err(|error| invalid(url, &error))?;
        let (scheme, prefix) =
            ObjectStoreScheme::parse(&parsed).map_err(|error| invalid(url, &error))?;
        let (feature, is_enabled) = match scheme {
            ObjectStoreScheme::Local => {
                let files = LocalFileSystem::new()
                    .with_fsync(true)
                    .with_automatic_cleanup(true);
                return Self::rooted(Arc::new(files), prefix, displayed(parsed));
            }
            ObjectStoreScheme::Memory => ("object-store", true),
            ObjectStoreScheme::AmazonS3 => ("aws", cfg!(feature = "aws")),
            ObjectStoreScheme::GoogleCloudStorage => ("gcp", cfg!(feature = "gcp")),
            ObjectStoreScheme::MicrosoftAzure => ("azure", cfg!(feature = "azure")),
            _ => return Err(invalid(url, &"checkpoints are not kept behind this scheme")),
        };
        if !is_enabled {
            let detail = format!("this build lacks the feature \"{feature}\" of burn-fsdp-dcp");
            return Err(invalid(url, &detail));
        }
        let (store, prefix) = object_store::parse_url_opts(&parsed, options_from_environment())
            .map_err(|error| invalid(url, &error))?;
        Self::rooted(store.into(), prefix, displayed(parsed))
    }

    fn rooted(store: Arc<dyn ObjectStore>, prefix: Path, root: String) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("object-store")
            .enable_all()
            .build()
            .map_err(|error| DcpError::io("start", "threads for an object store", error))?;
        let shared = Arc::new(Shared {
            store,
            root,
            runtime: Some(runtime),
        });
        Ok(Self { shared, prefix })
    }

    fn object(&self, path: &str) -> Result<Object> {
        let name = self.display(path);
        let at = match (self.prefix.as_ref(), path) {
            ("", path) => Path::parse(path),
            (prefix, path) => Path::parse(format!("{prefix}/{path}")),
        };
        Ok(Object {
            at: at.map_err(|error| invalid(&name, &error))?,
            name,
            shared: self.shared.clone(),
        })
    }
}

impl Storage for ObjectStorage {
    fn display(&self, path: &str) -> String {
        let root = &self.shared.root;
        if path.is_empty() || root.ends_with('/') {
            return format!("{root}{path}");
        }
        format!("{root}/{path}")
    }

    fn create(&self, path: &str) -> Result<Box<dyn WriteFile>> {
        Ok(Box::new(ObjectWrite {
            object: self.object(path)?,
            part: Vec::new(),
            upload: None,
        }))
    }

    fn open(&self, path: &str) -> Result<Option<Arc<dyn ReadFile>>> {
        let object = self.object(path)?;
        let (store, at) = object.store_and_path();
        match object.wait(async move { store.head(&at).await }) {
            Ok(meta) => Ok(Some(Arc::new(ObjectRead { object, meta }))),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(object.failed("open", &error)),
        }
    }

    fn replace(&self, path: &str, bytes: &[u8]) -> Result<()> {
        let object = self.object(path)?;
        object
            .put(bytes.to_vec())
            .map_err(|error| object.failed("write", &error))
    }

    fn list(&self, dir: &str) -> Result<Vec<String>> {
        let object = self.object(dir)?;
        let (store, at) = object.store_and_path();
        let listed = match object.wait(async move { store.list_with_delimiter(Some(&at)).await }) {
            Ok(listed) => listed,
            Err(Error::NotFound { .. }) => return Ok(Vec::new()),
            Err(error) => return Err(object.failed("list", &error)),
        };
        let objects = listed.objects.iter().map(|meta| &meta.location);
        let paths = objects.chain(&listed.common_prefixes);
        let mut names: Vec<String> = paths
            .filter_map(|path| path.filename().map(str::to_string))
            .collect();
        names.sort_unstable();
        // A store may have an object and others beneath it.
        names.dedup();
        Ok(names)
    }

    fn remove(&self, path: &str) -> Result<()> {
        let object = self.object(path)?;
        let (store, at) = object.store_and_path();
        match object.wait(async move { store.delete(&at).await }) {
            Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(object.failed("remove", &error)),
        }
    }

    /// There are no directories but in the names of objects.
    fn remove_empty_dir(&self, _dir: &str) -> Result<()> {
        Ok(())
    }
}

/// An object that is there or is to be.
#[derive(Clone, Debug)]
struct Object {
    shared: Arc<Shared>,
    at: Path,
    /// How messages name it.
    name: String,
}

impl Object {
    /// For a future of its own.
    fn store_and_path(&self) -> (Arc<dyn ObjectStore>, Path) {
        (self.shared.store.clone(), self.at.clone())
    }

    fn wait<T: Send + 'static>(
        &self,
        future: impl Future<Output = object_store::Result<T>> + Send + 'static,
    ) -> object_store::Result<T> {
        self.shared.start(future).wait()
    }

    /// Writes it in one step.
    fn put(&self, bytes: Vec<u8>) -> object_store::Result<()> {
        let (store, at) = self.store_and_path();
        self.wait(async move { store.put(&at, bytes.into()).await })
            .map(drop)
    }

    fn failed(&self, op: &str, error: &Error) -> DcpError {
        DcpError::io(op, &self.name, without_credentials(&error.to_string()))
    }
}

struct ObjectWrite {
    object: Object,
    /// What is not yet sent.
    part: Vec<u8>,
    /// Once it is more than a part.
    upload: Option<Upload>,
}

struct Upload {
    parts: Box<dyn MultipartUpload>,
    sent: usize,
    under_way: VecDeque<Answer<()>>,
}

impl ObjectWrite {
    fn part_len(&self) -> usize {
        let sent = self.upload.as_ref().map_or(0, |upload| upload.sent);
        PART << (sent / PARTS_OF_A_SIZE)
    }

    /// Sends a part on its way, once there is room for it.
    fn send(&mut self) -> object_store::Result<()> {
        let upload = match &mut self.upload {
            Some(upload) => upload,
            none => none.insert(Upload::start(&self.object)?),
        };
        while upload.under_way.len() >= UNDER_WAY {
            upload.wait_for_one()?;
        }
        let part = std::mem::take(&mut self.part);
        upload.send(&self.object.shared, part);
        self.part.reserve_exact(self.part_len());
        Ok(())
    }
}

impl Upload {
    fn start(object: &Object) -> object_store::Result<Self> {
        let (store, at) = object.store_and_path();
        Ok(Self {
            parts: object.wait(async move { store.put_multipart(&at).await })?,
            sent: 0,
            under_way: VecDeque::new(),
        })
    }

    fn send(&mut self, shared: &Shared, part: Vec<u8>) {
        // A store may start to work at the call already.
        let _context = shared.runtime().enter();
        let sending = self.parts.put_part(part.into());
        self.under_way.push_back(shared.start(sending));
        self.sent += 1;
    }

    fn wait_for_one(&mut self) -> object_store::Result<()> {
        self.under_way.pop_front().map_or(Ok(()), Answer::wait)
    }

    /// Makes an object of what was sent.
    fn complete(mut self, object: &Object) -> object_store::Result<()> {
        while !self.under_way.is_empty() {
            if let Err(error) = self.wait_for_one() {
                self.abort(object);
                return Err(error);
            }
        }
        let mut parts = self.parts;
        object.wait(async move {
            let completed = parts.complete().await;
            if completed.is_err() {
                // The first error is the one to be told.
                let _ = parts.abort().await;
            }
            completed.map(drop)
        })
    }

    /// Takes back what was sent.
    fn abort(mut self, object: &Object) {
        // What arrives after it is aborted would stay.
        while !self.under_way.is_empty() {
            let _ = self.wait_for_one();
        }
        let mut parts = self.parts;
        if let Err(error) = object.wait(async move { parts.abort().await }) {
            let error = object.failed("abort the upload of", &error);
            log::warn!("parts of an object may be left: {error}");
        }
    }
}

impl Write for ObjectWrite {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.part.len() == self.part_len() && !bytes.is_empty() {
            self.send()
                .map_err(|error| io::Error::other(without_credentials(&error.to_string())))?;
        }
        let taken = bytes.len().min(self.part_len() - self.part.len());
        self.part.extend_from_slice(&bytes[..taken]);
        Ok(taken)
    }

    /// Does nothing: there is no object before it is finished.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl WriteFile for ObjectWrite {
    fn finish(mut self: Box<Self>) -> Result<()> {
        let finished = match &self.upload {
            None => self.object.put(std::mem::take(&mut self.part)),
            Some(_) => self.send().and_then(|()| {
                let upload = self.upload.take().expect("it has begun");
                upload.complete(&self.object)
            }),
        };
        finished.map_err(|error| self.object.failed("write", &error))
    }
}

impl Drop for ObjectWrite {
    fn drop(&mut self) {
        if let Some(upload) = self.upload.take() {
            upload.abort(&self.object);
        }
    }
}

#[derive(Debug)]
struct ObjectRead {
    object: Object,
    meta: ObjectMeta,
}

impl ObjectRead {
    fn start(&self, range: Range<u64>) -> Answer<bytes::Bytes> {
        let (store, at) = self.object.store_and_path();
        let options = GetOptions {
            range: Some(GetRange::Bounded(range)),
            // So that what is read is of one object, whoever replaces it meanwhile.
            if_match: self.meta.e_tag.clone(),
            ..GetOptions::default()
        };
        let reading = async move { store.get_opts(&at, options).await?.bytes().await };
        self.object.shared.start(reading)
    }

    fn failed(&self, error: &Error) -> DcpError {
        match error {
            Error::Precondition { .. } => {
                let detail = "it was replaced while it was being read";
                DcpError::io("read", &self.object.name, detail)
            }
            error => self.object.failed("read", error),
        }
    }
}

impl ReadFile for ObjectRead {
    fn len(&self) -> u64 {
        self.meta.size
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let mut starts = (offset..).step_by(PART);
        let mut ranges = VecDeque::new();
        for piece in buffer.chunks_mut(PART) {
            let start = starts.next().expect("ranges have no end");
            ranges.push_back((piece, start));
        }
        let mut under_way = VecDeque::new();
        while !ranges.is_empty() || !under_way.is_empty() {
            while under_way.len() < UNDER_WAY
                && let Some((piece, start)) = ranges.pop_front()
            {
                let answer = self.start(start..start + piece.len() as u64);
                under_way.push_back((piece, answer));
            }
            let (piece, answer) = under_way.pop_front().expect("one has been started");
            let bytes: bytes::Bytes = answer.wait().map_err(|error| self.failed(&error))?;
            if bytes.len() != piece.len() {
                let detail = format!("{} bytes of {} came", bytes.len(), piece.len());
                return Err(DcpError::io("read", &self.object.name, detail));
            }
            piece.copy_from_slice(&bytes);
        }
        Ok(())
    }
}

/// A store, and the threads that wait for it.
struct Shared {
    store: Arc<dyn ObjectStore>,
    /// How messages name the prefix.
    root: String,
    /// Until it is dropped.
    runtime: Option<Runtime>,
}

impl Shared {
    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("it is there until the drop")
    }

    fn start<T: Send + 'static>(
        &self,
        future: impl Future<Output = object_store::Result<T>> + Send + 'static,
    ) -> Answer<T> {
        let (answer, receiver) = mpsc::sync_channel(1);
        self.runtime().spawn(async move {
            // Whoever asked may have failed meanwhile.
            let _ = answer.send(future.await);
        });
        Answer(receiver)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // An ordinary drop waits, which tasks of another runtime may not.
            runtime.shutdown_background();
        }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the store, which may tell its credentials.
        f.debug_struct("Shared")
            .field("root", &self.root)
            .finish_non_exhaustive()
    }
}

/// What a store is about to say. It is awaited by a channel, as a runtime's own ways panic within
/// another.
struct Answer<T>(Receiver<object_store::Result<T>>);

impl<T> Answer<T> {
    fn wait(self) -> object_store::Result<T> {
        self.0.recv().unwrap_or_else(|_| {
            Err(Error::Generic {
                store: "object",
                source: "a request has panicked".into(),
            })
        })
    }
}

/// What the environment says about clouds, and no more: names such as `TIMEOUT` are options too.
fn options_from_environment() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os().filter_map(|(name, value)| {
        let (name, value) = (name.into_string().ok()?, value.into_string().ok()?);
        let is_about_clouds = ["AWS_", "GOOGLE_", "AZURE_"]
            .iter()
            .any(|cloud| name.starts_with(cloud));
        is_about_clouds.then_some((name, value))
    })
}

/// How messages name a URL.
fn displayed(mut url: Url) -> String {
    url.set_query(None);
    url.set_fragment(None);
    // That some have none to be removed is no failure.
    let _ = url.set_password(None);
    if !url.scheme().starts_with('a') {
        // It is Azure's container, and a user's name elsewhere.
        let _ = url.set_username("");
    }
    url.into()
}

fn invalid(url: &str, error: &dyn fmt::Display) -> DcpError {
    DcpError::argument(without_credentials(&format!("{url}: {error}")))
}

/// A message without the queries and users of the URLs in it, which may hold signatures and passwords.
fn without_credentials(message: &str) -> String {
    let is_end = |c: char| c.is_whitespace() || matches!(c, '"' | '\'' | ')' | '>');
    let mut clean = String::with_capacity(message.len());
    let mut rest = message;
    while let Some(at) = rest.find("://") {
        let (before, url) = rest.split_at(at + 3);
        clean.push_str(before);
        let (url, after) = url.split_at(url.find(is_end).unwrap_or(url.len()));
        let url = url.split('?').next().unwrap_or_default();
        let host_end = url.find('/').unwrap_or(url.len());
        let host = url[..host_end].rfind('@').map_or(0, |at| at + 1);
        clean.push_str(&url[host..]);
        rest = after;
    }
    clean + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_keep_hosts_and_paths_and_lose_passwords_and_queries() {
        let cases = [
            ("no address at all?", "no address at all?"),
            ("s3://b/p", "s3://b/p"),
            ("s3://key:secret@b/p: no", "s3://b/p: no"),
            ("s3://key:sec@ret@b", "s3://b"),
            (
                "GET https://a/b@c?sig=secret&x=1 failed (http://u:p@h/?q) twice",
                "GET https://a/b@c failed (http://h/) twice",
            ),
            ("\"gs://u@h?token\" and more", "\"gs://h\" and more"),
        ];
        for (message, clean) in cases {
            assert_eq!(without_credentials(message), clean);
        }
    }

    #[test]
    fn addresses_are_named_without_users_and_queries() {
        let named = |url: &str| displayed(Url::parse(url).unwrap());
        assert_eq!(named("s3://key:secret@b/p?token=t#f"), "s3://b/p");
        let azure = "abfss://container@account.dfs.core.windows.net/p";
        assert_eq!(named(azure), azure);
        assert_eq!(named("memory:///"), "memory:///");
    }
}
