//! `burn-fsdp run`: runs a program as all ranks of this node.

use std::convert::Infallible;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::mpsc;
use std::time::Duration;

use crate::failure::Failure;
use crate::job::{Job, JobArgs};
use crate::output::{Output, Stream};
use crate::rank::Rank;
use crate::signals::Signals;
use crate::supervisor::{Event, Grace, Supervisor};

/// How long what is left in the pipes may take after the last rank has ended. Only what has left its
/// rank's process group, as daemons do, can keep a pipe open for longer.
const DRAIN: Duration = Duration::from_secs(2);

const EXAMPLES: &str = "\
Examples:
  Four ranks on this machine:
    burn-fsdp run --nproc 4 -- ./train --lr 1e-3

  A rank for each GPU, with a log for each rank:
    burn-fsdp run --nproc auto --log-dir logs -- ./train

  Two nodes with eight ranks each, started on each node with its own --node-rank:
    burn-fsdp run --nproc 8 --nnodes 2 --node-rank 0 --master-addr node0 --master-port 29500 \\
        --secret-file ~/.job-secret -- ./train
";

/// Runs a program as all ranks of this node
///
/// Each rank is a process with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
/// and BURN_FSDP_SECRET set, as torchrun sets the first six, and with no standard input. With one node
/// the port and the secret are made up.
///
/// Lines that ranks write come with the rank's number before them. A progress bar, which writes over
/// its line, becomes a line a second.
///
/// SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are passed on to the ranks and to what they have
/// started. After one of the first three, ranks have the time of --grace to end by themselves. When a
/// rank fails, the others have that of --failure-grace, in which they say why they can't go on. Then
/// they are killed, with what they have started. What a rank leaves running is killed when it ends.
///
/// On Linux ranks are killed when the launcher is, though not what they have started.
///
/// The exit code is that of the first rank that failed, or 128 and the number of the signal that ended
/// it; 127 if the program is not found, 126 if it can't be run, and 2 for other errors.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    job: JobArgs,
    /// Seconds that ranks have to end after SIGINT, SIGTERM or SIGHUP
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    grace: u32,
    /// Seconds that ranks have to end after another has failed
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    failure_grace: u32,
    /// Write lines without the rank before them
    #[arg(long)]
    no_prefix: bool,
    /// Also append what rank N writes, as it is, to DIR/rank-N.out and DIR/rank-N.err
    #[arg(long, value_name = "DIR")]
    log_dir: Option<PathBuf>,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode, Failure> {
    let job = Job::new(&args.job)?;
    let signals =
        { Signals::hold() }.map_err(|error| Failure::system("cannot hold back signals", error))?;
    let (tell, events) = mpsc::channel();
    let (open, drained) = mpsc::channel::<Infallible>();
    let mut supervisor = Supervisor::new(args.grace());
    for local_rank in 0..job.nproc {
        let rank = start(args, &job, local_rank, &signals, &open);
        let rank = rank.inspect_err(|_| supervisor.kill())?;
        let (number, tell) = (rank.number, tell.clone());
        supervisor.add(number, rank.group);
        rank.watch(move |ending| {
            // Once the supervisor is gone, nobody cares.
            let _ = tell.send(Event::Ended {
                rank: number,
                ending,
            });
        });
    }
    signals.watch(move |signal| {
        let _ = tell.send(Event::Signal(signal));
    });
    let code = supervisor.run(&events);
    drop(open);
    // Ends by an error either way: all is copied, or the time is up.
    let _ = drained.recv_timeout(DRAIN);
    Ok(code)
}

impl Args {
    fn grace(&self) -> Grace {
        Grace {
            signal: Duration::from_secs(self.grace.into()),
            failure: Duration::from_secs(self.failure_grace.into()),
        }
    }

    /// Where a stream of a rank goes.
    fn output(&self, stream: Stream, rank: usize) -> Result<Output, Failure> {
        let log = self.log_dir.as_deref();
        let log = log.map(|dir| {
            open_log(dir, stream, rank)
                .map_err(|error| Failure::system(&format!("--log-dir {}", dir.display()), error))
        });
        Ok(Output {
            stream,
            prefix: if self.no_prefix {
                String::new()
            } else {
                format!("[{rank}] ")
            },
            log: log.transpose()?,
        })
    }
}

fn open_log(dir: &Path, stream: Stream, rank: usize) -> io::Result<File> {
    fs::create_dir_all(dir)?;
    let suffix = match stream {
        Stream::Out => "out",
        Stream::Err => "err",
    };
    let path = dir.join(format!("rank-{rank}.{suffix}"));
    File::options().create(true).append(true).open(path)
}

fn start<T: Clone + Send + 'static>(
    args: &Args,
    job: &Job,
    local_rank: usize,
    signals: &Signals,
    open: &T,
) -> Result<Rank, Failure> {
    let number = job.rank(local_rank);
    let out = args.output(Stream::Out, number)?;
    let err = args.output(Stream::Err, number)?;
    let mut command = Command::new(&args.command[0]);
    command.args(&args.command[1..]).envs(job.vars(local_rank));
    signals.release_in(&mut command);
    let mut rank =
        Rank::start(number, &mut command).map_err(|error| cannot_run(&args.command[0], &error))?;
    rank.copy_output(out, err, open);
    Ok(rank)
}

/// The exit codes are those of shells.
fn cannot_run(program: &OsString, error: &io::Error) -> Failure {
    let code = match error.kind() {
        io::ErrorKind::NotFound => 127,
        _ => 126,
    };
    Failure {
        code,
        what: format!("cannot run {}: {error}", program.display()),
    }
}
