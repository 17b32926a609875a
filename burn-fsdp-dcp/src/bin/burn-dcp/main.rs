//! `burn-dcp`: looks into checkpoints, checks, compares, converts and removes them.

mod convert;
mod diff;
mod failure;
mod inspect;
mod merge;
mod open;
mod progress;
mod prune;
mod reshard;
mod select;
mod text;
mod tree;
mod verify;

use std::io::{self, Write};
use std::panic;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Parser, Subcommand};

use failure::{Failure, Outcome};

/// Looks into checkpoints, checks, compares, converts and removes them.
///
/// A PATH is the directory of a checkpoint of burn-fsdp-dcp. `inspect`, `diff`, `merge` and `convert`
/// take checkpoints of PyTorch (directories with a file `.metadata`) and safetensors files, or
/// directories of them, as well.
///
/// Exit codes: 0 if all is well, 1 if a checkpoint is bad or two differ, 2 for errors.
#[derive(Debug, Parser)]
#[command(name = "burn-dcp", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// Each is described where its arguments are.
#[derive(Debug, Subcommand)]
enum Command {
    Inspect(inspect::Args),
    Verify(verify::Args),
    Diff(diff::Args),
    Merge(merge::Args),
    Convert(convert::Args),
    Reshard(reshard::Args),
    Prune(prune::Args),
}

fn main() -> ExitCode {
    // A fault of the tool itself is told in one line, as any other.
    panic::set_hook(Box::new(|info| {
        complain(&format!(
            "internal error, please report it: {}",
            text::one_line(&info.to_string())
        ));
    }));
    let _ = log::set_logger(&Warnings);
    log::set_max_level(log::LevelFilter::Warn);
    match panic::catch_unwind(run) {
        Ok(Ok(code)) => code,
        // Whoever read the output has seen enough; what a shell reports of a program ended by SIGPIPE.
        Ok(Err(Failure::Output(error))) if error.kind() == io::ErrorKind::BrokenPipe => {
            ExitCode::from(141)
        }
        Ok(Err(failure)) => {
            complain(&failure.to_string());
            ExitCode::from(2)
        }
        Err(_) => ExitCode::from(2),
    }
}

fn run() -> Outcome {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let mut out = io::BufWriter::new(io::stdout().lock());
    let code = match cli.command {
        Command::Inspect(args) => inspect::run(&args, &mut out),
        Command::Verify(args) => verify::run(&args, &mut out),
        Command::Diff(args) => diff::run(&args, &mut out),
        Command::Merge(args) => merge::run(&args, &mut out),
        Command::Convert(args) => convert::run(&args, &mut out),
        Command::Reshard(args) => reshard::run(&args, &mut out),
        Command::Prune(args) => prune::run(&args, &mut out),
    };
    // What was found before an error is told as well.
    let flushed = out.flush();
    // Dropped with something left in it, it would try again.
    let _ = out.into_parts();
    let code = code?;
    flushed?;
    Ok(code)
}

/// Help and version as they are, errors in one line.
fn usage(error: &clap::Error) -> Outcome {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            let mut out = io::stdout().lock();
            write!(out, "{}", error.render())?;
            out.flush()?;
            Ok(ExitCode::SUCCESS)
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => Err(Failure::of(
            "no command is given; burn-dcp --help lists them",
        )),
        _ => {
            let text = error.render().to_string();
            let what = text.split("\n\nUsage").next().unwrap_or(&text);
            let what = what.split("\n\nFor more").next().unwrap_or(what);
            let what = what.trim_start_matches("error: ").replace("\n\n", "; ");
            let what = text::one_line(&what);
            Err(Failure::of(format!("{what}; see burn-dcp --help")))
        }
    }
}

/// Says something on stderr, if there is one.
fn complain(what: &str) {
    let _ = writeln!(io::stderr(), "burn-dcp: {what}");
}

/// What the library warns of.
struct Warnings;

impl log::Log for Warnings {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::Level::Warn
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            complain(&format!(
                "warning: {}",
                text::one_line(&record.args().to_string())
            ));
        }
    }

    fn flush(&self) {}
}
