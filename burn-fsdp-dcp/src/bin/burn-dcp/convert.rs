//! `burn-dcp convert`: writes the tensors of a checkpoint in another format.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use burn_fsdp_dcp::{
    DcpError, ExportOptions, SaveOptions, TensorSource, export_safetensors, export_torch,
    write_checkpoint,
};
use clap::ValueEnum;

use crate::failure::{Failure, Outcome};
use crate::open::{Format, Opened, detect, names_in, open_any, open_as};
use crate::progress::bar;
use crate::select::{Choice, Selection};
use crate::text;

/// Files of Hugging Face are no larger than this.
const HF_FILE: u64 = 5_000_000_000;

/// Writes the tensors of a checkpoint in another format
///
/// Tensors keep the layout in which they are saved: PyTorch has the weights of linear layers transposed,
/// and only a program with the model knows which those are. States are kept from burn to burn alone.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The checkpoint to read
    source: PathBuf,
    /// The directory to write, or for "hf" a file NAME.safetensors
    target: PathBuf,
    /// The format to read
    #[arg(long, value_enum, default_value_t = ReadFormat::Auto)]
    from: ReadFormat,
    /// The format to write
    #[arg(long, value_enum)]
    to: Format,
    #[command(flatten)]
    choice: Choice,
    /// Replace the checkpoint that is there
    #[arg(long)]
    overwrite: bool,
}

/// A format to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ReadFormat {
    /// Whichever it is
    Auto,
    /// A checkpoint of burn-fsdp-dcp
    Burn,
    /// A checkpoint of torch.distributed.checkpoint
    Torch,
    /// Safetensors files, as Hugging Face has them
    Hf,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let opened = match args.from {
        ReadFormat::Auto => open_any(&args.source)?,
        ReadFormat::Burn => open_as(&args.source, Format::Burn)?,
        ReadFormat::Torch => open_as(&args.source, Format::Torch)?,
        ReadFormat::Hf => open_as(&args.source, Format::Hf)?,
    };
    check_target(args)?;
    let selection = Selection::new(&opened, &args.choice)?;
    let bar = bar(selection.bytes(), "convert");
    let selection = selection.with_bar(&bar);
    write(args, &opened, &selection)?;
    bar.finish_and_clear();
    let tensors = text::counted(selection.tensors().len(), "tensor");
    let (bytes, to) = (text::bytes(selection.bytes()), args.to.name());
    writeln!(
        out,
        "wrote {tensors}, {bytes}, to {} as {to}",
        args.target.display()
    )?;
    let left = what_is_left(args, &opened);
    if left > 0 {
        let left = text::counted(left, "state");
        writeln!(out, "left out {left}, which {to} has no place for")?;
    }
    Ok(ExitCode::SUCCESS)
}

/// That nothing of another format is in the place of the target: one directory would be two checkpoints.
fn check_target(args: &Args) -> Result<(), Failure> {
    let target = args.target.display();
    let is_file_target = args.to == Format::Hf && is_safetensors(&args.target);
    if args.target.is_file() && !is_file_target {
        return Err(Failure::of(format!("{target} is a file; name a directory")));
    }
    if !args.target.exists() {
        return Ok(());
    }
    match detect(&args.target) {
        Ok(format) if format != args.to => Err(Failure::of(format!(
            "{target} holds a checkpoint of the format \"{}\"; choose another place",
            format.name()
        ))),
        Ok(_) if !args.overwrite => Err(Failure::from_existing(&args.target)),
        _ => Ok(()),
    }
}

fn is_safetensors(path: &Path) -> bool {
    path.extension()
        .is_some_and(|ending| ending == "safetensors")
}

fn write(args: &Args, opened: &Opened, selection: &Selection<'_>) -> Result<(), Failure> {
    match args.to {
        Format::Burn => {
            let options = SaveOptions::new().with_overwrite(args.overwrite);
            write_checkpoint(selection, opened.burn(), &args.target, &options, |_| ())?;
        }
        Format::Torch => write_torch(selection, &args.target)?,
        Format::Hf => {
            let mut options = ExportOptions::new().overwrite(args.overwrite);
            if !is_safetensors(&args.target) {
                options = options.with_max_file_bytes(HF_FILE);
            }
            export_safetensors(selection, &args.target, &options)?;
        }
    }
    Ok(())
}

/// Writes beside the target and puts it there when it is whole.
fn write_torch(selection: &Selection<'_>, target: &Path) -> Result<(), Failure> {
    if !target.exists() {
        return Ok(export_torch(selection, target, |name| {
            Some(name.to_string())
        })?);
    }
    let beside = target.join(format!(".burn-dcp-{}", std::process::id()));
    let written = export_torch(selection, &beside, |name| Some(name.to_string()))
        .and_then(|()| replace_torch(&beside, target));
    if written.is_err() {
        // What can't be removed stays under a name of its own.
        let _ = fs::remove_dir_all(&beside);
    }
    Ok(written?)
}

/// Moves a checkpoint of PyTorch to where another is: the file that makes it one goes first and comes
/// last, so that there is never a mixture.
fn replace_torch(beside: &Path, target: &Path) -> Result<(), DcpError> {
    let failed = |path: &Path| {
        let path = path.display().to_string();
        move |error: std::io::Error| DcpError::Io {
            op: "replace".to_string(),
            path,
            message: error.to_string(),
        }
    };
    let (marker, is_data) = (".metadata", |name: &String| name.ends_with(".distcp"));
    if target.join(marker).exists() {
        fs::remove_file(target.join(marker)).map_err(failed(target))?;
    }
    for name in names_in(target)?.into_iter().filter(is_data) {
        fs::remove_file(target.join(&name)).map_err(failed(target))?;
    }
    for name in names_in(beside)?.into_iter().filter(|name| name != marker) {
        fs::rename(beside.join(&name), target.join(&name)).map_err(failed(target))?;
    }
    fs::rename(beside.join(marker), target.join(marker)).map_err(failed(target))?;
    fs::remove_dir(beside).map_err(failed(beside))
}

/// How many states are not in what was written.
fn what_is_left(args: &Args, opened: &Opened) -> usize {
    match opened {
        Opened::Burn(checkpoint) if args.to != Format::Burn => checkpoint.manifest().states.len(),
        Opened::Torch(checkpoint) => checkpoint.values().len(),
        _ => 0,
    }
}
