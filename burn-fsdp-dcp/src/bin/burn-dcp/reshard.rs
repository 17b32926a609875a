//! `burn-dcp reshard`: writes a checkpoint anew, as another number of ranks would have.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use burn_fsdp_dcp::{SaveOptions, reshard};

use crate::failure::Outcome;
use crate::open::open_own;
use crate::progress::bar;
use crate::text;

/// Writes a checkpoint anew, as another number of ranks would have
///
/// Loading needs no such thing: any number of ranks loads any checkpoint. But each rank reads from fewer
/// files, and less beside what it needs, from one that was written by as many ranks. States are kept.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The checkpoint
    path: PathBuf,
    /// The directory to write
    out: PathBuf,
    /// The number of ranks
    #[arg(long, value_name = "N")]
    world_size: usize,
    /// Replace the checkpoint that is there; it stays until the new one is whole
    #[arg(long)]
    overwrite: bool,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let checkpoint = open_own(&args.path)?;
    let options = SaveOptions::new().with_overwrite(args.overwrite);
    let bar = bar(checkpoint.manifest().payload_bytes(), "reshard");
    let written = reshard(&checkpoint, &args.out, args.world_size, &options, |bytes| {
        bar.inc(bytes);
    });
    bar.finish_and_clear();
    let manifest = written?;
    let (from, to) = (checkpoint.manifest().world_size, manifest.world_size);
    writeln!(
        out,
        "wrote {} as {}, from {from}, to {}",
        text::bytes(manifest.payload_bytes()),
        text::counted(to as usize, "rank"),
        args.out.display()
    )?;
    Ok(ExitCode::SUCCESS)
}
