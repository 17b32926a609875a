//! `burn-dcp prune`: removes old checkpoints of a run.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use burn_fsdp_dcp::{Better, Checkpoint, Location, prunable, prune};

use crate::failure::{Failure, Outcome};
use crate::open::{names_in, steps_among};
use crate::text;

/// Removes old checkpoints of a run
///
/// Asks nothing, and prints what it removes. What saves that were cut short have left goes as well, but
/// for what is newer than the newest checkpoint.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The directory with a directory step-N for each checkpoint
    dir: PathBuf,
    /// Keep this many of the latest
    #[arg(long, value_name = "K")]
    keep_latest: usize,
    /// Keep the N best by a metric as well, such as 2:loss:lower
    #[arg(long, value_name = "N:METRIC:lower|higher")]
    keep_best: Option<String>,
    /// Only print what would be removed
    #[arg(long)]
    dry_run: bool,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    if args.keep_latest == 0 {
        return Err(Failure::of(
            "--keep-latest 0 would keep none; the latest is always kept, so give 1 at least",
        ));
    }
    let best = args.keep_best.as_deref().map(parse_best).transpose()?;
    check_dir(args, best.as_ref())?;
    let root = Location::from(&args.dir);
    let planned = prunable(&root, args.keep_latest, best.as_ref())?;
    if planned.is_empty() {
        writeln!(out, "nothing to remove")?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.dry_run {
        for step in planned {
            writeln!(out, "would remove step-{step}")?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    // Told after the fact, so that a reader who leaves stops nothing halfway.
    let removed = prune(&root, args.keep_latest, best.as_ref(), |_| ())?;
    for step in &removed {
        writeln!(out, "removed step-{step}")?;
    }
    let left: Vec<String> = { planned.iter() }
        .filter(|step| !removed.contains(step))
        .map(|step| format!("step-{step}"))
        .collect();
    if left.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    let left = left.join(", ");
    Err(Failure::of(format!(
        "{left} could not be removed; see to its permissions"
    )))
}

fn parse_best(text: &str) -> Result<(usize, String, Better), Failure> {
    // A metric's name may have colons itself.
    let parts = text.split_once(':').and_then(|(count, rest)| {
        let (metric, better) = rest.rsplit_once(':')?;
        let better = match better {
            "lower" => Better::Lower,
            "higher" => Better::Higher,
            _ => return None,
        };
        Some((count.parse().ok()?, metric.to_string(), better))
    });
    parts.filter(|(_, metric, _)| !metric.is_empty()).ok_or_else(|| {
        Failure::of(format!(
            "--keep-best \"{text}\" is not N:METRIC:lower or N:METRIC:higher; write such as 2:loss:lower"
        ))
    })
}

/// That there are checkpoints, and one with the metric: a slip in its name must not remove the best.
fn check_dir(args: &Args, best: Option<&(usize, String, Better)>) -> Result<(), Failure> {
    let dir = args.dir.display();
    let names = names_in(&args.dir)?;
    let steps = steps_among(&names);
    if steps.is_empty() {
        return Err(Failure::of(format!(
            "{dir} has no checkpoints; give the directory that holds step-N for each step"
        )));
    }
    let Some((_, metric, _)) = best else {
        return Ok(());
    };
    let checkpoints = steps
        .iter()
        .map(|(_, name)| Checkpoint::open(args.dir.join(name)));
    let metrics: BTreeSet<String> = checkpoints
        .flatten()
        .flat_map(|checkpoint| checkpoint.manifest().metrics.clone().into_keys())
        .collect();
    if metrics.contains(metric) {
        return Ok(());
    }
    let known: Vec<&String> = metrics.iter().collect();
    Err(Failure::of(
        match text::nearest(metric, metrics.iter()).first() {
            Some(near) => format!(
                "no checkpoint in {dir} has a metric \"{metric}\"; did you mean \"{near}\"?"
            ),
            None => {
                format!("no checkpoint in {dir} has a metric \"{metric}\"; they have {known:?}")
            }
        },
    ))
}
