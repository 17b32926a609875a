//! The command-line tool, run as users run it.

mod look;
mod write;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::prelude::*;
use burn_fsdp::{DeviceMesh, FsdpConfig, FullyShard, ProcessGroup, launch};
use burn_fsdp_dcp::{Checkpoint, Region, SaveOptions, Saver, Snapshot, TensorSource};

/// A model with tensors that are split, one that is not, and one of whole numbers.
#[derive(Module, Debug)]
struct Net {
    layers: Vec<Linear>,
    scale: Param<Tensor<1>>,
    counts: Param<Tensor<1, Int>>,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            layers: (0..2)
                .map(|_| LinearConfig::new(5, 7).init(device))
                .collect(),
            scale: Param::from_tensor(Tensor::ones([2], device)),
            counts: Param::initialized(Default::default(), Tensor::from_ints([1, 2, 3], device)),
        }
    }
}

/// Saves a trained model with its optimizer and states, as `world` ranks.
fn save(dir: &Path, world: usize, step: u64, loss: f64) {
    let saved = launch(world, |pg: ProcessGroup| {
        let device = Device::flex().autodiff();
        device.seed(step);
        let config = FsdpConfig::new().with_replicate_below(3);
        let model = Net::new(&device).fully_shard(&DeviceMesh::shard(&pg), &config)?;
        let mut optim = AdamWConfig::new().init();
        let x = Tensor::<2>::ones([3, 5], &device);
        let y = model.layers[0].forward(x.clone()) + model.layers[1].forward(x);
        let loss_of = (y.clone() * y).mean() * model.scale.val().mean();
        let grads = model.try_backward(loss_of)?;
        let model = model.step(&mut optim, 1e-2, grads)?;
        let snapshot = Snapshot::new(step)
            .model(&model)
            .optimizer(&optim, &model)
            .state("words", &["a", "b"])?
            .rank_state("place", &pg.rank())?
            .metric("loss", loss);
        Saver::new(&pg, SaveOptions::new())?.save(dir, snapshot)?;
        Ok(())
    });
    saved.unwrap();
}

/// A checkpoint of two ranks in a directory of its own.
struct Fixture {
    dir: tempfile::TempDir,
    checkpoint: PathBuf,
}

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = dir.path().join("step-2");
        save(&checkpoint, 2, 2, 0.5);
        Self { dir, checkpoint }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The path of a shard file.
    fn shard(&self) -> PathBuf {
        let name = Checkpoint::open(&self.checkpoint).unwrap().manifest().files[0]
            .name
            .clone();
        self.checkpoint.join(name)
    }
}

/// What a run of the tool gave: exit code, stdout, stderr.
struct Ran(i32, String, String);

fn run_tool<'a>(args: impl IntoIterator<Item = &'a Path>) -> Ran {
    let output = Command::new(env!("CARGO_BIN_EXE_burn-dcp"))
        .args(args)
        .env("RUST_BACKTRACE", "1")
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let code = output.status.code().expect("it ends by itself");
    Ran(code, text(output.stdout), text(output.stderr))
}

/// Runs the tool with words and paths.
macro_rules! tool {
    ($($arg:expr),* $(,)?) => { run_tool([$(AsRef::<Path>::as_ref(&$arg)),*]) };
}

use tool;

impl Ran {
    /// Succeeded, with nothing on stderr; what it printed.
    fn ok(self) -> String {
        let Self(code, out, err) = self;
        assert_eq!((code, err.as_str()), (0, ""), "{out}");
        out
    }

    /// Failed with one line that has these words.
    fn fails(self, words: &[&str]) {
        let Self(code, out, err) = self;
        assert_eq!(code, 2, "{out}{err}");
        assert!(
            err.starts_with("burn-dcp: ") && err.lines().count() == 1,
            "{err}"
        );
        for word in words {
            assert!(err.contains(word), "{word} in {err}");
        }
    }
}

/// Every tensor, whole, in its type.
fn contents(source: &dyn TensorSource) -> Vec<(String, String, Vec<u8>)> {
    let tensors = source.tensors().iter();
    tensors
        .map(|(name, info)| {
            let bytes = source.read(name, &Region::whole(&info.shape)).unwrap();
            (name.clone(), format!("{info:?}"), bytes)
        })
        .collect()
}

fn contents_of(path: &Path) -> Vec<(String, String, Vec<u8>)> {
    contents(&Checkpoint::open(path).unwrap())
}

fn flip_byte_of(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(path, bytes).unwrap();
}
