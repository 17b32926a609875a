//! `burn-dcp merge`: writes all tensors, whole, into one safetensors file.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use burn_fsdp_dcp::{ExportOptions, TensorSource, export_safetensors};

use crate::failure::{Failure, Outcome};
use crate::open::open_any;
use crate::progress::bar;
use crate::select::{Choice, Selection};
use crate::text;

/// Writes all tensors, whole, into one safetensors file
///
/// Tensors keep the layout in which they are saved.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The checkpoint, of any format
    path: PathBuf,
    /// The file to write, NAME.safetensors
    out: PathBuf,
    #[command(flatten)]
    choice: Choice,
    /// Replace the file if it is there
    #[arg(long)]
    overwrite: bool,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let target = args.out.display();
    if args.out.is_dir() {
        return Err(Failure::of(format!(
            "{target} is a directory; name a file in it, such as {}",
            args.out.join("model.safetensors").display()
        )));
    }
    if args
        .out
        .extension()
        .is_none_or(|ending| ending != "safetensors")
    {
        return Err(Failure::of(format!(
            "{target} does not end in .safetensors; add it, so that the file is known for what it is"
        )));
    }
    let opened = open_any(&args.path)?;
    let selection = Selection::new(&opened, &args.choice)?;
    let bar = bar(selection.bytes(), "merge");
    let selection = selection.with_bar(&bar);
    let options = ExportOptions::new().overwrite(args.overwrite);
    export_safetensors(&selection, &args.out, &options)?;
    bar.finish_and_clear();
    let (tensors, bytes) = (selection.tensors().len(), text::bytes(selection.bytes()));
    writeln!(
        out,
        "wrote {}, {bytes}, to {target}",
        text::counted(tensors, "tensor")
    )?;
    Ok(ExitCode::SUCCESS)
}
