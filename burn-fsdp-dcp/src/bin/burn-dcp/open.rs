//! Opening checkpoints of any format.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use burn_fsdp_dcp::{
    Checkpoint, DcpError, HfCheckpoint, Region, Result, TensorInfo, TensorSource, TorchCheckpoint,
};
use clap::ValueEnum;

/// A format that can be read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// A checkpoint of burn-fsdp-dcp
    Burn,
    /// A checkpoint of torch.distributed.checkpoint
    Torch,
    /// Safetensors files, as Hugging Face has them
    Hf,
}

impl Format {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Burn => "burn",
            Self::Torch => "torch",
            Self::Hf => "hf",
        }
    }
}

/// A checkpoint of any format.
#[derive(Debug)]
pub(crate) enum Opened {
    Burn(Checkpoint),
    Torch(TorchCheckpoint),
    Hf(HfCheckpoint),
}

impl Opened {
    pub(crate) fn format(&self) -> Format {
        match self {
            Self::Burn(_) => Format::Burn,
            Self::Torch(_) => Format::Torch,
            Self::Hf(_) => Format::Hf,
        }
    }

    /// The checkpoint, if it is one of our own.
    pub(crate) fn burn(&self) -> Option<&Checkpoint> {
        match self {
            Self::Burn(checkpoint) => Some(checkpoint),
            _ => None,
        }
    }

    fn source(&self) -> &dyn TensorSource {
        match self {
            Self::Burn(source) => source,
            Self::Torch(source) => source,
            Self::Hf(source) => source,
        }
    }
}

impl TensorSource for Opened {
    fn location(&self) -> String {
        self.source().location()
    }

    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        self.source().tensors()
    }

    fn read(&self, name: &str, region: &Region) -> Result<Vec<u8>> {
        self.source().read(name, region)
    }
}

/// Opens a checkpoint of whatever format it is.
pub(crate) fn open_any(path: &Path) -> Result<Opened> {
    open_as(path, detect(path)?)
}

/// Opens a checkpoint of this format.
pub(crate) fn open_as(path: &Path, format: Format) -> Result<Opened> {
    Ok(match format {
        Format::Burn => Opened::Burn(open_own(path)?),
        Format::Torch => Opened::Torch(TorchCheckpoint::open(path)?),
        Format::Hf => Opened::Hf(HfCheckpoint::open(path)?),
    })
}

/// Opens a checkpoint of our own.
pub(crate) fn open_own(path: &Path) -> Result<Checkpoint> {
    match detect(path)? {
        Format::Burn => Checkpoint::open(path),
        other => Err(no_checkpoint(
            path,
            format!(
                "it is of the format \"{}\", not of burn-fsdp-dcp",
                other.name()
            ),
        )),
    }
}

/// Which format is at a path.
pub(crate) fn detect(path: &Path) -> Result<Format> {
    let metadata = fs::metadata(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => no_checkpoint(path, "there is nothing of that name"),
        _ => io(path, &error),
    })?;
    let file_name = path.file_name().unwrap_or_default().to_string_lossy();
    if !metadata.is_dir() {
        if is_safetensors(&file_name) || file_name.ends_with(".safetensors.index.json") {
            return Ok(Format::Hf);
        }
        return Err(no_checkpoint(
            path,
            match file_name.as_ref() {
                "manifest" | ".metadata" => "it is one file of one",
                _ => "it is a file of another kind",
            },
        ));
    }
    let names = names_in(path)?;
    let has = |wanted: &str| names.iter().any(|name| name == wanted);
    if has("manifest") {
        return Ok(Format::Burn);
    }
    if has(".metadata") {
        return Ok(Format::Torch);
    }
    if names.iter().any(|name| is_own_shard(name)) {
        let reason = "it has shard files and no manifest, so a save was cut short";
        return Err(no_checkpoint(path, reason));
    }
    if names.iter().any(|name| is_safetensors(name)) {
        return Ok(Format::Hf);
    }
    Err(no_checkpoint(
        path,
        match steps_among(&names).last() {
            Some((step, name)) => {
                format!("it holds those of several steps; {name} is that of step {step}")
            }
            None => "it has no manifest, no .metadata and no safetensors file".to_string(),
        },
    ))
}

fn is_safetensors(name: &str) -> bool {
    name.ends_with(".safetensors")
}

/// Whether a file is named as our own shards are: by an id of 32 digits.
fn is_own_shard(name: &str) -> bool {
    let id = name
        .strip_prefix("shard-")
        .and_then(|rest| rest.split('-').next());
    id.is_some_and(|id| id.len() == 32 && id.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// The directories of checkpoints of a run, by step.
pub(crate) fn steps_among(names: &[String]) -> Vec<(u64, &String)> {
    let mut steps: Vec<(u64, &String)> = names
        .iter()
        .filter_map(|name| Some((name.strip_prefix("step-")?.parse().ok()?, name)))
        .collect();
    steps.sort_unstable();
    steps
}

pub(crate) fn names_in(dir: &Path) -> Result<Vec<String>> {
    let failed = |error| io(dir, &error);
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed)? {
        // A name that is no text is none that is looked for.
        names.extend(entry.map_err(failed)?.file_name().into_string());
    }
    names.sort_unstable();
    Ok(names)
}

fn io(path: &Path, error: &std::io::Error) -> DcpError {
    DcpError::Io {
        op: "read".to_string(),
        path: path.display().to_string(),
        message: error.to_string(),
    }
}

fn no_checkpoint(path: &Path, reason: impl Into<String>) -> DcpError {
    DcpError::NotACheckpoint {
        path: path.display().to_string(),
        reason: reason.into(),
    }
}
