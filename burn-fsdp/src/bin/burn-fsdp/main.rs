//! `burn-fsdp`: starts the ranks of a job as processes and looks after them.

#[cfg(not(unix))]
compile_error!("the launcher needs process groups and signals, so Unix; turn the feature off");

mod failure;
mod job;
mod lines;
mod nproc;
mod output;
mod rank;
mod run;
mod signals;
mod supervisor;

use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Parser, Subcommand};

use failure::Failure;
use output::{Stream, complain};

/// Starts the ranks of a job as processes and looks after them.
#[derive(Debug, Parser)]
#[command(name = "burn-fsdp", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// Each is described where its arguments are.
#[derive(Debug, Subcommand)]
enum Command {
    Run(run::Args),
}

fn main() -> ExitCode {
    let code = match Cli::try_parse() {
        Ok(Cli {
            command: Command::Run(args),
        }) => run::run(&args),
        Err(error) => usage(&error),
    };
    code.unwrap_or_else(|failure| {
        complain(&failure.what);
        ExitCode::from(failure.code)
    })
}

/// Help and version as they are, errors in one line.
fn usage(error: &clap::Error) -> Result<ExitCode, Failure> {
    let text = error.render().to_string();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            // Whoever has closed the output wants no help.
            let _ = Stream::Out.write(text.as_bytes());
            Ok(ExitCode::SUCCESS)
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => Err(Failure::usage(
            "no command is given; burn-fsdp --help lists them",
        )),
        _ => {
            let what = text.split("\n\nUsage").next().unwrap_or(&text);
            let what = what.split("\n\nFor more").next().unwrap_or(what);
            let what = what.trim_start_matches("error: ").replace("\n\n", "; ");
            let what = what.split_whitespace().collect::<Vec<_>>().join(" ");
            Err(Failure::usage(format!("{what}; see burn-fsdp run --help")))
        }
    }
}
