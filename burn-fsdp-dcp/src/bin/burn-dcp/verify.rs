//! `burn-dcp verify`: reads every byte of checkpoints and checks it.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use burn_fsdp_dcp::{Checkpoint, DcpError};

use crate::failure::{Failure, Outcome};
use crate::open::{detect, names_in, open_own, steps_among};
use crate::progress::bar;
use crate::text;

/// Reads every byte of checkpoints and checks it
///
/// Prints `good`, or the first fault found, for each. The exit code is 1 if any is bad.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Checkpoints, or directories that hold those of several steps
    #[arg(required = true)]
    paths: Vec<PathBuf>,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let mut any_bad = false;
    for path in &args.paths {
        for found in find(path)? {
            let path = found.display();
            if !found.join("manifest").exists() {
                writeln!(out, "{path}: no checkpoint, a save was cut short")?;
                continue;
            }
            match verify(&found) {
                Ok(()) => writeln!(out, "{path}: good")?,
                Err(error) => {
                    any_bad = true;
                    writeln!(out, "{path}: bad: {}", text::one_line(&error.to_string()))?;
                }
            }
            // The next may take long.
            out.flush()?;
        }
    }
    Ok(ExitCode::from(u8::from(any_bad)))
}

/// The checkpoint at a path, or all that are in it.
fn find(path: &Path) -> Result<Vec<PathBuf>, Failure> {
    if path.join("manifest").exists() {
        return Ok(vec![path.to_path_buf()]);
    }
    if path.is_dir() {
        let names = names_in(path)?;
        let steps = steps_among(&names);
        let mut found: Vec<PathBuf> = { steps.iter() }.map(|(_, name)| path.join(name)).collect();
        // A model that was saved alone.
        found.extend(Some(path.join("model")).filter(|model| model.join("manifest").exists()));
        if !found.is_empty() {
            return Ok(found);
        }
    }
    // Says what is there instead.
    detect(path)?;
    open_own(path)?;
    Ok(vec![path.to_path_buf()])
}

fn verify(path: &Path) -> Result<(), DcpError> {
    let checkpoint = Checkpoint::open(path)?;
    let name = path
        .file_name()
        .unwrap_or(path.as_os_str())
        .to_string_lossy();
    let bar = bar(checkpoint.manifest().payload_bytes(), &name);
    let verified = checkpoint.verify(|bytes| bar.inc(bytes));
    bar.finish_and_clear();
    verified
}
