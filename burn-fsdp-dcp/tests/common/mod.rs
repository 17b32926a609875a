//! What several test binaries share.

use burn_fsdp::{ProcessGroup, launch};
use burn_fsdp_dcp::DcpError;

/// Ranks of one checkpoint operation, whose errors are the checkpoint's own.
pub(crate) fn ranks<T: Send>(
    world: usize,
    run: impl Fn(&ProcessGroup) -> burn_fsdp_dcp::Result<T> + Send + Sync,
) -> Vec<burn_fsdp_dcp::Result<T>> {
    launch(world, |pg| match run(&pg) {
        Err(DcpError::Group(error)) => Err(error),
        result => Ok(result),
    })
    .unwrap()
}

/// The same where all ranks succeed.
pub(crate) fn ranks_ok<T: Send>(
    world: usize,
    run: impl Fn(&ProcessGroup) -> burn_fsdp_dcp::Result<T> + Send + Sync,
) -> Vec<T> {
    let results = ranks(world, run).into_iter().enumerate();
    { results }
        .map(|(rank, r)| r.unwrap_or_else(|e| panic!("rank {rank}: {e}")))
        .collect()
}
