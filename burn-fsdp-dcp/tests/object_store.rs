//! Checkpoints in object stores: in memory, in files, and in one that fails.

mod common;

use std::fmt;
use std::future::Future;
use std::io::Write;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use burn::module::Module;
use burn::nn::LinearConfig;
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::prelude::*;
use burn::tensor::TensorData;
use burn_fsdp::{
    DeviceMesh, FsdpConfig, FsdpModule, FullyShard, ProcessGroup, StateDict, StateDictTarget,
};
use burn_fsdp_dcp::{
    Checkpoint, DcpError, LoadOptions, Location, Manager, ManagerConfig, ObjectStorage,
    PendingSave, Region, SaveOptions, Saver, Snapshot, Storage, TensorSource,
};
use common::{ranks, ranks_ok};
use futures_core::Stream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, UploadPart,
};

/// As large as the parts in which objects are written.
const PART: usize = 16 << 20;

#[derive(Module, Debug)]
struct Net {
    first: nn::Linear,
    second: nn::Linear,
}

fn device() -> Device {
    Device::flex().autodiff().gradient_checkpointing()
}

impl Net {
    /// `d` is the width. The values are always the same, as Burn's generator is shared by all tests.
    fn new(d: usize, device: &Device) -> Self {
        let linear = |seed: usize| {
            let mut linear = LinearConfig::new(d, d).with_bias(false).init(device);
            let value = |i: usize| ((i * 7919 + seed) % 1009) as f32 / 1009.0 - 0.5;
            linear.weight = linear.weight.map(|old| {
                let data = TensorData::new((0..d * d).map(value).collect::<Vec<_>>(), old.shape());
                Tensor::from_data(data, device).set_require_grad(true)
            });
            linear
        };
        Self {
            first: linear(1),
            second: linear(2),
        }
    }
}

struct Trained {
    model: FsdpModule<Net>,
    optim: ModuleOptimizer,
}

impl Trained {
    fn new(pg: &ProcessGroup, d: usize) -> burn_fsdp::Result<Self> {
        let model = Net::new(d, &device());
        Ok(Self {
            model: model.fully_shard(&DeviceMesh::shard(pg), &FsdpConfig::new())?,
            optim: AdamWConfig::new().init(),
        })
    }

    fn train(mut self, steps: usize, d: usize) -> burn_fsdp::Result<Self> {
        for step in 0..steps {
            let input = Tensor::<2>::ones([2, d], &device()) * (step + 1) as f32;
            let output = self.model.second.forward(self.model.first.forward(input));
            let grads = self.model.try_backward(output.powf_scalar(2.0).mean())?;
            self.model = self.model.step(&mut self.optim, 1e-2, grads)?;
        }
        Ok(self)
    }

    fn snapshot(&self, step: u64) -> Snapshot {
        let snapshot = Snapshot::new(step).model(&self.model);
        snapshot.optimizer(&self.optim, &self.model)
    }

    fn whole(&self) -> burn_fsdp::Result<StateDict> {
        self.model.full_state_dict(StateDictTarget::AllRanks)
    }
}

/// Saves a model of so many steps over what is there, in the foreground or the background.
fn overwrite(
    pg: &ProcessGroup,
    to: &Location,
    steps: usize,
    in_background: bool,
) -> burn_fsdp_dcp::Result<()> {
    let snapshot = Trained::new(pg, 5)?.train(steps, 5)?.snapshot(steps as u64);
    let options = SaveOptions::new()
        .with_overwrite(true)
        .with_max_file_bytes(200)
        .with_timeout(Duration::from_secs(5));
    let mut saver = Saver::new(pg, options)?;
    if in_background {
        let pending = saver.save_async(to, snapshot);
        return pending.and_then(PendingSave::finish).map(drop);
    }
    saver.save(to, snapshot).map(drop)
}

type Contents = Vec<(String, Vec<u8>)>;

/// Every tensor of a checkpoint, whole.
fn contents(checkpoint: &Checkpoint) -> Contents {
    let tensors = checkpoint.tensors().iter();
    let read = |(name, info): (&String, &burn_fsdp_dcp::TensorInfo)| {
        let bytes = checkpoint.read(name, &Region::whole(&info.shape));
        (name.clone(), bytes.unwrap())
    };
    tensors.map(read).collect()
}

/// What an undamaged checkpoint holds; none if there is none.
fn good(location: &Location) -> Option<(u64, Contents)> {
    let checkpoint = match Checkpoint::open(location) {
        Err(DcpError::NotACheckpoint { .. }) => return None,
        opened => opened.unwrap(),
    };
    checkpoint.verify(|_| ()).unwrap();
    Some((checkpoint.step(), contents(&checkpoint)))
}

/// The names of the files that a checkpoint consists of.
fn files_of(location: &Location) -> Vec<String> {
    let checkpoint = Checkpoint::open(location).unwrap();
    let files = checkpoint.manifest().files.iter();
    let mut names: Vec<_> = files.map(|file| file.name.clone()).collect();
    names.push("manifest".to_string());
    names.sort();
    names
}

/// A fresh place in memory and one in files, with a storage that sees the same.
fn places(dir: &tempfile::TempDir) -> [(Location, Arc<ObjectStorage>); 2] {
    let memory = ObjectStorage::new(Arc::new(InMemory::new()), "runs").unwrap();
    let url = format!("file://{}", dir.path().join("runs").display());
    let files = ObjectStorage::from_url(&url).unwrap();
    [memory, files].map(|storage| {
        let storage = Arc::new(storage);
        (Location::of(storage.clone(), "run"), storage)
    })
}

#[test]
fn what_two_ranks_saved_three_load() {
    let dir = tempfile::tempdir().unwrap();
    for (place, storage) in places(&dir) {
        for in_background in [false, true] {
            let to = place.join(&in_background.to_string());
            let saved = ranks_ok(2, |pg| {
                overwrite(pg, &to, 1, in_background)?;
                overwrite(pg, &to, 2, in_background)?;
                Ok(Trained::new(pg, 5)?.train(2, 5)?.whole()?)
            });
            let checkpoint = Checkpoint::open(&to).unwrap();
            checkpoint.verify(|_| ()).unwrap();
            assert_eq!(checkpoint.step(), 2);
            let names = storage.list(&format!("run/{in_background}")).unwrap();
            assert_eq!(names, files_of(&to), "something is left");

            let loaded = ranks_ok(3, |pg| {
                let fresh = Trained::new(pg, 5)?;
                let checkpoint = Checkpoint::open_on(pg, &to)?;
                let options = LoadOptions::new();
                let (model, _) = checkpoint.load_model(fresh.model, &options)?;
                let (optim, _) = checkpoint.load_optimizer(fresh.optim, &model, &options)?;
                let trained = Trained { model, optim };
                let again = to.join("again");
                Saver::new(pg, SaveOptions::new())?.save(again, trained.snapshot(2))?;
                Ok(trained.whole()?)
            });
            for loaded in &loaded {
                assert_eq!(*loaded, saved[0]);
            }
            assert_eq!(good(&to.join("again")), good(&to));
        }
    }
}

#[test]
fn a_manager_keeps_the_latest_and_goes_on_from_it() {
    let dir = tempfile::tempdir().unwrap();
    for (place, storage) in places(&dir) {
        for in_background in [false, true] {
            let root = place.join(&in_background.to_string());
            let config = ManagerConfig::new()
                .with_keep_latest(2)
                .in_background(in_background);
            ranks_ok(2, |pg| {
                let model = Trained::new(pg, 3)?.model;
                let mut manager = Manager::new(pg, &root, config.clone())?;
                assert!(manager.latest()?.is_none());
                for step in [1, 2, 3, 10] {
                    manager.save(Snapshot::new(step).model(&model))?;
                }
                manager.finish()
            });
            let names = storage.list(&format!("run/{in_background}")).unwrap();
            assert_eq!(names, ["step-10", "step-3"]);
            // The newest loses its end.
            let manifest = format!("run/{in_background}/step-10/manifest");
            storage.replace(&manifest, b"half").unwrap();
            let found = ranks_ok(3, |pg| {
                let mut manager = Manager::new(pg, &root, config.clone())?;
                let resume = manager.latest()?.expect("there is a good one");
                assert_eq!(resume.skipped.len(), 1);
                Ok((manager.steps()?, resume.checkpoint.step()))
            });
            assert_eq!(found[0], (vec![3, 10], 3));
        }
    }
}

#[test]
fn large_tensors_travel_in_parts_of_which_few_are_under_way() {
    let store = Frail::new(Arc::new(InMemory::new()), usize::MAX);
    let seen = store.seen.clone();
    let storage = ObjectStorage::new(Arc::new(store), "").unwrap();
    let to = Location::of(Arc::new(storage), "large");
    // A rank's half of a matrix is larger than a part.
    let d = 3000;
    ranks_ok(2, |pg| {
        let model = Trained::new(pg, d)?.model;
        Saver::new(pg, SaveOptions::new())?.save(&to, Snapshot::new(1).model(&model))
    });
    let checkpoint = Checkpoint::open(&to).unwrap();
    for file in &checkpoint.manifest().files {
        assert!(file.len > 2 * PART as u64, "{}", file.len);
    }
    assert!(seen.parts.load(Ordering::SeqCst) >= 6, "{seen:?}");
    checkpoint.verify(|_| ()).unwrap();
    let [one, three] = [1, 3].map(|world| {
        ranks_ok(world, |pg| {
            // Other weights than those that were saved.
            let fresh = Trained::new(pg, d)?.train(1, d)?;
            let checkpoint = Checkpoint::open_on(pg, &to)?;
            let (model, _) = checkpoint.load_model(fresh.model, &LoadOptions::new())?;
            let optim = fresh.optim;
            Ok(Trained { model, optim }.whole()?)
        })
    });
    let expected = ranks_ok(1, |pg| Ok(Trained::new(pg, d)?.whole()?));
    assert!(one[0] == expected[0] && three[2] == expected[0]);
}

#[test]
fn an_object_of_many_parts_comes_back_as_it_went_with_bounded_memory() {
    let dir = tempfile::tempdir().unwrap();
    let files = object_store::local::LocalFileSystem::new_with_prefix(dir.path()).unwrap();
    for inner in [
        Arc::new(InMemory::new()) as Arc<dyn ObjectStore>,
        Arc::new(files),
    ] {
        let store = Frail::new(inner, usize::MAX);
        let seen = store.seen.clone();
        let storage = ObjectStorage::new(Arc::new(store), "a/b").unwrap();
        for len in [0, 1, PART - 1, PART, PART + 1, 7 * PART + 5] {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 31 + i / 4099) as u8).collect();
            seen.parts.store(0, Ordering::SeqCst);
            let mut file = storage.create("c/d").unwrap();
            for piece in bytes.chunks(999_983) {
                file.write_all(piece).unwrap();
            }
            file.finish().unwrap();
            let expected = if len <= PART { 0 } else { len.div_ceil(PART) };
            assert_eq!(seen.parts.load(Ordering::SeqCst), expected, "{len} bytes");

            let file = storage.open("c/d").unwrap().expect("it is there");
            assert_eq!(file.len(), len as u64);
            let mut read = vec![0; len];
            file.read_at(&mut read, 0).unwrap();
            assert!(read == bytes, "{len} bytes");
            let mut middle = vec![0; len / 3];
            file.read_at(&mut middle, len as u64 / 2).unwrap();
            assert!(middle == bytes[len / 2..][..len / 3], "{len} bytes");
            let mut beyond = [0; 2];
            assert!(
                file.read_at(&mut beyond, (len as u64).saturating_sub(1))
                    .is_err()
            );
        }
        let most = seen.most_under_way.load(Ordering::SeqCst);
        assert!((2..=4).contains(&most), "{most} parts at once");
    }
}

#[test]
fn an_object_that_is_not_finished_is_never_seen() {
    let store = Frail::new(Arc::new(InMemory::new()), usize::MAX);
    let seen = store.seen.clone();
    let storage = ObjectStorage::new(Arc::new(store), "").unwrap();
    storage.replace("object", b"old").unwrap();
    for len in [10, 3 * PART] {
        let mut file = storage.create("object").unwrap();
        file.write_all(&vec![1; len]).unwrap();
        drop(file);
        assert_eq!(read(&storage, "object").unwrap().unwrap(), b"old");
    }
    assert_eq!(seen.aborted.load(Ordering::SeqCst), 1);
}

#[test]
fn an_upload_that_fails_at_any_request_leaves_the_old_object_or_the_new() {
    let bytes = vec![7; 6 * PART + 1];
    for limit in 0.. {
        let inner: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let sound = ObjectStorage::new(inner.clone(), "").unwrap();
        sound.replace("object", b"old").unwrap();
        let store = Frail::new(inner, limit);
        let seen = store.seen.clone();
        let storage = ObjectStorage::new(Arc::new(store), "").unwrap();
        let written = storage.create("object").and_then(|mut file| {
            file.write_all(&bytes).map_err(|error| {
                assert!(error.to_string().contains("the network is gone"), "{error}");
                DcpError::InvalidArgument(error.to_string())
            })?;
            file.finish()
        });
        let found = read(&sound, "object").unwrap().unwrap();
        if written.is_ok() {
            assert!(found == bytes);
            // Upload, parts and completion.
            assert_eq!(limit, 9);
            return;
        }
        assert_eq!(found, b"old", "at {limit}");
        assert!(
            limit == 0 || seen.count.load(Ordering::SeqCst) > limit + 1,
            "no abort"
        );
    }
}

fn read(storage: &ObjectStorage, path: &str) -> burn_fsdp_dcp::Result<Option<Vec<u8>>> {
    let Some(file) = storage.open(path)? else {
        return Ok(None);
    };
    let mut bytes = vec![0; file.len() as usize];
    file.read_at(&mut bytes, 0)?;
    Ok(Some(bytes))
}

/// Fails a save over another at every request.
fn fail_everywhere(in_background: bool) {
    let wanted = |steps: usize| {
        let storage = ObjectStorage::new(Arc::new(InMemory::new()), "").unwrap();
        let to = Location::of(Arc::new(storage), "");
        ranks_ok(2, |pg| overwrite(pg, &to, steps, false));
        good(&to).unwrap()
    };
    let (old, new) = (wanted(1), wanted(2));
    let (mut olds, mut news) = (0, 0);
    for limit in 0.. {
        let inner: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let sound = ObjectStorage::new(inner.clone(), "run").unwrap();
        let sound = Location::of(Arc::new(sound), "");
        ranks_ok(2, |pg| overwrite(pg, &sound, 1, false));
        let store = Frail::new(inner, limit);
        let seen = store.seen.clone();
        let frail = Location::of(
            Arc::new(ObjectStorage::new(Arc::new(store), "run").unwrap()),
            "",
        );
        let results = ranks(2, |pg| overwrite(pg, &frail, 2, in_background));
        let was_refused = seen.count.load(Ordering::SeqCst) > limit;
        let found = good(&sound).expect("the old checkpoint is lost");
        assert!(found == old || found == new, "at {limit}");
        let errors: Vec<String> = { results.iter() }
            .filter_map(|result| Some(result.as_ref().err()?.to_string()))
            .collect();
        if errors.is_empty() {
            // What is removed after the commit may fail without harm.
            assert!(found == new, "at {limit}");
            news += 1;
        } else {
            assert_eq!(errors.len(), 2, "at {limit} the ranks say {results:?}");
            assert_eq!(errors[0], errors[1], "at {limit}");
            assert!(errors[0].contains("the network is gone"), "{}", errors[0]);
            olds += 1;
        }
        // A later save is none the worse, and clears away what this has left.
        ranks_ok(2, |pg| overwrite(pg, &sound, 2, false));
        assert!(good(&sound).as_ref() == Some(&new), "after {limit}");
        if !was_refused {
            assert!(olds > 4 && news > 1, "{olds} failed and {news} did not");
            return;
        }
    }
}

#[test]
fn a_save_that_fails_at_any_request_leaves_the_old_checkpoint_or_the_new() {
    fail_everywhere(false);
}

#[test]
fn a_save_in_the_background_that_fails_at_any_request_leaves_the_old_or_the_new() {
    fail_everywhere(true);
}

#[test]
fn an_object_that_is_missing_is_named() {
    let dir = tempfile::tempdir().unwrap();
    for (place, storage) in places(&dir) {
        let error = Checkpoint::open(&place).unwrap_err();
        assert!(matches!(error, DcpError::NotACheckpoint { .. }), "{error}");
        assert!(storage.open("run/none").unwrap().is_none());
        assert!(storage.list("run").unwrap().is_empty());
        storage.remove("run/none").unwrap();
        storage.remove_empty_dir("run").unwrap();

        ranks_ok(2, |pg| overwrite(pg, &place, 1, false));
        let lost = files_of(&place).pop().expect("it has files");
        storage.remove(&format!("run/{lost}")).unwrap();
        let checkpoint = Checkpoint::open(&place);
        let error = checkpoint.and_then(|c| c.verify(|_| ())).unwrap_err();
        let DcpError::MissingFile { file } = error.cause() else {
            panic!("{error}")
        };
        assert_eq!(*file, storage.display(&format!("run/{lost}")));
    }
}

#[test]
fn an_object_that_is_replaced_while_it_is_read_is_not_mixed_with_the_new() {
    let storage = ObjectStorage::new(Arc::new(InMemory::new()), "").unwrap();
    storage.replace("object", b"old").unwrap();
    let file = storage.open("object").unwrap().unwrap();
    storage.replace("object", b"new").unwrap();
    let error = file.read_at(&mut [0; 3], 0).unwrap_err();
    let expected = "cannot read InMemory/object: it was replaced while it was being read";
    assert_eq!(error.to_string(), expected);
    assert_eq!(read(&storage, "object").unwrap().unwrap(), b"new");
}

#[test]
fn a_directory_lists_what_is_in_it_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    for (_, storage) in places(&dir) {
        for name in [
            "run/manifest",
            "run/b",
            "run/deep/er/c",
            "run-2/manifest",
            "other",
            "runs/run/d",
        ] {
            storage.replace(name, b"").unwrap();
        }
        let list = |dir: &str| storage.list(dir).unwrap();
        assert_eq!(list(""), ["other", "run", "run-2", "runs"]);
        assert_eq!(list("run"), ["b", "deep", "manifest"]);
        assert_eq!(list("run/deep"), ["er"]);
        assert!(list("ru").is_empty());
        // A save removes what other saves have left, and no more.
        let to = Location::of(storage.clone(), "run");
        storage
            .replace(
                "run/shard-00000000000000000000000000000007-00000-000.safetensors",
                b"",
            )
            .unwrap();
        storage.remove("run/manifest").unwrap();
        ranks_ok(2, |pg| overwrite(pg, &to, 1, false));
        let mut expected = files_of(&to);
        expected.extend(["b".to_string(), "deep".to_string()]);
        expected.sort();
        assert_eq!(list("run"), expected);
    }
}

#[test]
fn urls_are_named_and_bad_ones_refused_without_their_secrets() {
    let location = Location::from_url("memory:///run").unwrap();
    assert_eq!(location.to_string(), "memory:///run");
    assert_eq!(location.join("a").to_string(), "memory:///run/a");
    let dir = tempfile::tempdir().unwrap();
    let url = format!("file://{}/with%20space/", dir.path().display());
    let files = Location::from_url(&url).unwrap();
    let path = Location::from_url(dir.path().join("with space").to_str().unwrap()).unwrap();
    ranks_ok(2, |pg| overwrite(pg, &files, 1, false));
    assert_eq!(good(&path), good(&files));

    let refused = |url: &str| {
        let error = Location::from_url(url).unwrap_err();
        assert!(matches!(error, DcpError::InvalidArgument(_)), "{error:?}");
        let message = error.to_string();
        assert!(!message.contains("secret"), "{message}");
        message
    };
    assert!(refused("floppy://a/b").contains("floppy"));
    assert!(refused("floppy://key:secret@a/b?sig=secret").contains("floppy://a/b"));
    assert!(refused("s3://key:secret@[bad/b").contains("s3://[bad/b"));
    assert!(refused("s3:///no-bucket").contains("s3"));
    assert!(refused("https://example.com/run?token=secret").contains("scheme"));
    assert!(refused("memory:///a//b").contains("memory:///a//b"));
    if !cfg!(feature = "aws") {
        assert!(refused("s3://key:secret@bucket/run").contains("feature \"aws\""));
        assert!(refused("gs://bucket/run").contains("feature \"gcp\""));
        assert!(refused("az://container/run").contains("feature \"azure\""));
    }
}

#[test]
fn a_task_of_another_runtime_may_save_and_load() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    runtime.block_on(async {
        let storage = ObjectStorage::from_url("memory:///run").unwrap();
        let mut file = storage.create("object").unwrap();
        file.write_all(&vec![1; 2 * PART]).unwrap();
        file.finish().unwrap();
        let mut dropped = storage.create("dropped").unwrap();
        dropped.write_all(&vec![1; 2 * PART]).unwrap();
        drop(dropped);
        assert_eq!(storage.list("").unwrap(), ["object"]);
        assert_eq!(read(&storage, "object").unwrap().unwrap().len(), 2 * PART);
    });
}

/// A store that counts requests, and refuses them from the `limit`-th on.
#[derive(Debug)]
struct Frail {
    inner: Arc<dyn ObjectStore>,
    seen: Arc<Seen>,
}

#[derive(Debug)]
struct Seen {
    limit: usize,
    count: AtomicUsize,
    parts: AtomicUsize,
    under_way: AtomicUsize,
    most_under_way: AtomicUsize,
    aborted: AtomicUsize,
}

type Answer<'a, T> = Pin<Box<dyn Future<Output = object_store::Result<T>> + Send + 'a>>;
type Answers<T> = Pin<Box<dyn Stream<Item = object_store::Result<T>> + Send>>;

impl Frail {
    fn new(inner: Arc<dyn ObjectStore>, limit: usize) -> Self {
        let seen = Seen {
            limit,
            count: AtomicUsize::new(0),
            parts: AtomicUsize::new(0),
            under_way: AtomicUsize::new(0),
            most_under_way: AtomicUsize::new(0),
            aborted: AtomicUsize::new(0),
        };
        Self {
            inner,
            seen: Arc::new(seen),
        }
    }
}

impl Seen {
    fn attempt(&self) -> object_store::Result<()> {
        if self.count.fetch_add(1, Ordering::SeqCst) < self.limit {
            return Ok(());
        }
        Err(object_store::Error::Generic {
            store: "frail",
            source: "the network is gone".into(),
        })
    }
}

impl fmt::Display for Frail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Frail")
    }
}

/// As the crate `async_trait` would write it.
impl ObjectStore for Frail {
    fn put_opts<'a, 'b, 'c>(
        &'a self,
        location: &'b Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Answer<'c, PutResult>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        Box::pin(async move {
            self.seen.attempt()?;
            self.inner.put_opts(location, payload, options).await
        })
    }

    fn put_multipart_opts<'a, 'b, 'c>(
        &'a self,
        location: &'b Path,
        options: PutMultipartOptions,
    ) -> Answer<'c, Box<dyn MultipartUpload>>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        Box::pin(async move {
            self.seen.attempt()?;
            let inner = self.inner.put_multipart_opts(location, options).await?;
            let seen = self.seen.clone();
            Ok(Box::new(FrailUpload { inner, seen }) as Box<dyn MultipartUpload>)
        })
    }

    fn get_opts<'a, 'b, 'c>(
        &'a self,
        location: &'b Path,
        options: GetOptions,
    ) -> Answer<'c, GetResult>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        Box::pin(async move {
            self.seen.attempt()?;
            self.inner.get_opts(location, options).await
        })
    }

    fn delete_stream(&self, locations: Answers<Path>) -> Answers<Path> {
        match self.seen.attempt() {
            Ok(()) => self.inner.delete_stream(locations),
            Err(error) => Box::pin(Once(Some(error))),
        }
    }

    fn list(&self, prefix: Option<&Path>) -> Answers<ObjectMeta> {
        self.inner.list(prefix)
    }

    fn list_with_delimiter<'a, 'b, 'c>(&'a self, prefix: Option<&'b Path>) -> Answer<'c, ListResult>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        Box::pin(async move {
            self.seen.attempt()?;
            self.inner.list_with_delimiter(prefix).await
        })
    }

    fn copy_opts<'a, 'b, 'c, 'd>(
        &'a self,
        from: &'b Path,
        to: &'c Path,
        options: CopyOptions,
    ) -> Answer<'d, ()>
    where
        'a: 'd,
        'b: 'd,
        'c: 'd,
        Self: 'd,
    {
        self.inner.copy_opts(from, to, options)
    }
}

#[derive(Debug)]
struct FrailUpload {
    inner: Box<dyn MultipartUpload>,
    seen: Arc<Seen>,
}

impl MultipartUpload for FrailUpload {
    fn put_part(&mut self, part: PutPayload) -> UploadPart {
        let sending = self.inner.put_part(part);
        let seen = self.seen.clone();
        Box::pin(async move {
            seen.attempt()?;
            seen.parts.fetch_add(1, Ordering::SeqCst);
            let now = seen.under_way.fetch_add(1, Ordering::SeqCst) + 1;
            seen.most_under_way.fetch_max(now, Ordering::SeqCst);
            // As a network would.
            tokio::time::sleep(Duration::from_millis(20)).await;
            let sent = sending.await;
            seen.under_way.fetch_sub(1, Ordering::SeqCst);
            sent
        })
    }

    fn complete<'a, 'b>(&'a mut self) -> Answer<'b, PutResult>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(async move {
            self.seen.attempt()?;
            self.inner.complete().await
        })
    }

    fn abort<'a, 'b>(&'a mut self) -> Answer<'b, ()>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(async move {
            self.seen.aborted.fetch_add(1, Ordering::SeqCst);
            self.seen.attempt()?;
            self.inner.abort().await
        })
    }
}

/// A stream of one error.
struct Once(Option<object_store::Error>);

impl Stream for Once {
    type Item = object_store::Result<Path>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(self.0.take().map(Err))
    }
}
