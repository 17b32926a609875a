//! `burn-dcp inspect`: prints what a checkpoint holds.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use burn_fsdp_dcp::{Checkpoint, TensorInfo, TensorSource};
use serde::Serialize;

use crate::failure::{Failure, Outcome};
use crate::open::{Opened, names_in, open_any};
use crate::text;
use crate::tree::{Tree, described};

/// Prints what a checkpoint holds
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The checkpoint, of any format
    path: PathBuf,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// Print only the tensor of this name, with where its parts are
    #[arg(long, value_name = "NAME")]
    tensor: Option<String>,
    /// Print the files, and where the parts of every tensor are
    #[arg(long)]
    files: bool,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let opened = open_any(&args.path)?;
    if let Some(name) = &args.tensor {
        check_name(&opened, name)?;
    }
    let report = Report::new(&opened, args);
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &report).map_err(io::Error::from)?;
        writeln!(out)?;
    } else if let Some(name) = &args.tensor {
        writeln!(out, "{name}  {}", described(&opened.tensors()[name]))?;
        report.print_chunks(out, name, "  ")?;
    } else {
        report.print(&opened, out)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn check_name(opened: &Opened, name: &str) -> Result<(), Failure> {
    if opened.tensors().contains_key(name) {
        return Ok(());
    }
    let nearest: Vec<String> = text::nearest(name, opened.tensors().keys())
        .iter()
        .map(|name| format!("\"{name}\""))
        .collect();
    let advice = if nearest.is_empty() {
        "inspect without --tensor lists the names".to_string()
    } else {
        format!("did you mean {}?", nearest.join(" or "))
    };
    let path = opened.location();
    Err(Failure::of(format!(
        "{path} has no tensor \"{name}\"; {advice}"
    )))
}

/// All that is told, in the order in which the JSON document has it.
#[derive(Serialize)]
struct Report<'a> {
    format: &'static str,
    path: String,
    #[serde(flatten)]
    origin: Origin,
    totals: Totals,
    tensors: Vec<Tensor<'a>>,
    states: Vec<State<'a>>,
    /// What PyTorch keeps beside tensors.
    values: BTreeMap<&'a str, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    files: Option<Vec<File>>,
}

/// What only our own checkpoints tell. The keys are always there.
#[derive(Default, Serialize)]
struct Origin {
    id: Option<String>,
    step: Option<u64>,
    created: Option<u64>,
    world_size: Option<u64>,
    metrics: BTreeMap<String, f64>,
}

#[derive(Serialize)]
struct Totals {
    tensors: usize,
    elements: u64,
    bytes: u64,
}

#[derive(Serialize)]
struct Tensor<'a> {
    name: &'a str,
    dtype: String,
    shape: &'a [u64],
    bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    chunks: Option<Vec<Chunk<'a>>>,
}

/// A part of a tensor, and where it is.
#[derive(Serialize)]
struct Chunk<'a> {
    rank: u64,
    offsets: &'a [u64],
    sizes: &'a [u64],
    file: &'a str,
    at: u64,
    bytes: u64,
}

#[derive(Serialize)]
struct State<'a> {
    name: &'a str,
    rank: Option<u64>,
    bytes: u64,
}

#[derive(Serialize)]
struct File {
    name: String,
    bytes: Option<u64>,
    rank: Option<u64>,
}

impl<'a> Report<'a> {
    fn new(opened: &'a Opened, args: &Args) -> Self {
        let own = opened.burn();
        let with_chunks = own.filter(|_| args.files || args.tensor.is_some());
        let all = opened.tensors();
        let elements = |info: &TensorInfo| info.bytes() / info.dtype.size() as u64;
        let chosen = { all.iter() }
            .filter(|(name, _)| args.tensor.as_ref().is_none_or(|wanted| *name == wanted));
        let tensor = |(name, info): (&'a String, &'a TensorInfo)| Tensor {
            name,
            dtype: text::dtype(info.dtype),
            shape: &info.shape,
            bytes: info.bytes(),
            chunks: with_chunks.map(|checkpoint| chunks(checkpoint, name)),
        };
        Self {
            format: opened.format().name(),
            path: opened.location(),
            origin: own.map(origin).unwrap_or_default(),
            totals: Totals {
                tensors: all.len(),
                elements: all.values().map(elements).sum(),
                bytes: all.values().map(TensorInfo::bytes).sum(),
            },
            tensors: chosen.map(tensor).collect(),
            states: own.map(states).unwrap_or_default(),
            values: values(opened),
            files: args.files.then(|| files(opened)),
        }
    }

    fn print(&self, opened: &Opened, out: &mut dyn Write) -> io::Result<()> {
        match opened.burn().map(Checkpoint::manifest) {
            Some(manifest) => {
                let ranks = text::counted(manifest.world_size as usize, "rank");
                let created = text::utc(manifest.created);
                writeln!(out, "step {}, by {ranks}, {created}", manifest.step)?;
                writeln!(out, "checkpoint {}", manifest.id)?;
                for (name, value) in &manifest.metrics {
                    writeln!(out, "metric {name} = {value}")?;
                }
            }
            None => writeln!(out, "a checkpoint of the format \"{}\"", self.format)?,
        }
        let Totals {
            tensors,
            elements,
            bytes,
        } = self.totals;
        let tensors = text::counted(tensors, "tensor");
        writeln!(
            out,
            "{tensors}, {elements} elements, {}\n",
            text::bytes(bytes)
        )?;
        Tree::new(opened.tensors()).print(out, &mut |out, name, indent| {
            self.print_chunks(out, name, indent)
        })?;
        if !self.states.is_empty() {
            writeln!(out, "\nstates")?;
        }
        for state in &self.states {
            let of = state
                .rank
                .map_or(String::new(), |rank| format!(" of rank {rank}"));
            writeln!(out, "  {}{of}  {}", state.name, text::bytes(state.bytes))?;
        }
        if !self.values.is_empty() {
            writeln!(out, "\nvalues")?;
        }
        for (name, value) in &self.values {
            writeln!(out, "  {name} = {value}")?;
        }
        if let Some(files) = &self.files {
            writeln!(out, "\nfiles")?;
            for File { name, bytes, rank } in files {
                let of = rank.map_or(String::new(), |rank| format!("  rank {rank}"));
                let bytes = bytes.map_or(String::new(), |n| format!("  {}", text::bytes(n)));
                writeln!(out, "  {name}{of}{bytes}")?;
            }
        }
        Ok(())
    }

    fn print_chunks(&self, out: &mut dyn Write, name: &str, indent: &str) -> io::Result<()> {
        let tensor = self.tensors.iter().find(|tensor| tensor.name == name);
        for chunk in tensor
            .and_then(|tensor| tensor.chunks.as_ref())
            .into_iter()
            .flatten()
        {
            let Chunk {
                rank,
                offsets,
                sizes,
                file,
                at,
                bytes,
            } = chunk;
            let bytes = text::bytes(*bytes);
            writeln!(
                out,
                "{indent}rank {rank}: {sizes:?} at {offsets:?}, {bytes} from byte {at} of {file}"
            )?;
        }
        Ok(())
    }
}

fn origin(checkpoint: &Checkpoint) -> Origin {
    let manifest = checkpoint.manifest();
    Origin {
        id: Some(manifest.id.to_string()),
        step: Some(manifest.step),
        created: Some(manifest.created),
        world_size: Some(manifest.world_size),
        metrics: manifest.metrics.clone(),
    }
}

fn chunks<'a>(checkpoint: &'a Checkpoint, name: &str) -> Vec<Chunk<'a>> {
    let manifest = checkpoint.manifest();
    let chunks = manifest.tensors[name].chunks.iter();
    let chunk = |chunk: &'a burn_fsdp_dcp::ChunkEntry| {
        // The manifest was checked when it was opened.
        let file = &manifest.files[chunk.extent.file as usize];
        Chunk {
            rank: file.rank,
            offsets: &chunk.region.offsets,
            sizes: &chunk.region.sizes,
            file: &file.name,
            at: chunk.extent.offset,
            bytes: chunk.extent.len,
        }
    };
    chunks.map(chunk).collect()
}

fn states(checkpoint: &Checkpoint) -> Vec<State<'_>> {
    let states = checkpoint.manifest().states.iter();
    let states = states.flat_map(|(name, entries)| {
        entries.iter().map(move |entry| State {
            name,
            rank: entry.rank,
            bytes: entry.extent.len,
        })
    });
    states.collect()
}

fn values(opened: &Opened) -> BTreeMap<&str, String> {
    let Opened::Torch(checkpoint) = opened else {
        return BTreeMap::new();
    };
    let values = checkpoint.values().iter();
    values
        .map(|(name, value)| (name.as_str(), text::torch_value(value)))
        .collect()
}

fn files(opened: &Opened) -> Vec<File> {
    match opened {
        Opened::Burn(checkpoint) => { checkpoint.manifest().files.iter() }
            .map(|file| File {
                name: file.name.clone(),
                bytes: Some(file.len),
                rank: Some(file.rank),
            })
            .collect(),
        Opened::Hf(checkpoint) => { checkpoint.files().iter() }
            .map(|file| File {
                name: file.display().to_string(),
                bytes: file.metadata().ok().map(|metadata| metadata.len()),
                rank: None,
            })
            .collect(),
        Opened::Torch(checkpoint) => {
            let dir = PathBuf::from(checkpoint.location());
            let names = names_in(&dir).unwrap_or_default().into_iter();
            let data = names.filter(|name| name.ends_with(".distcp"));
            data.map(|name| File {
                bytes: dir
                    .join(&name)
                    .metadata()
                    .ok()
                    .map(|metadata| metadata.len()),
                name,
                rank: None,
            })
            .collect()
        }
    }
}
