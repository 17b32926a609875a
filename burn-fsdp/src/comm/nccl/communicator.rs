//! NCCL's communicators.

use std::ffi::CStr;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::Duration;

use burn::tensor::DType;
use cudarc::nccl::result::{self as nccl, NcclError};
use cudarc::nccl::sys::{self, ncclComm, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId};
use parking_lot::Mutex;

use super::driver::{Collective, NcclOp, Outcome, UniqueId};

/// A call that takes longer is stuck in NCCL, and ends when the communicator is aborted under it.
const LONGEST_CALL: Duration = Duration::from_secs(5);

/// One rank's membership.
#[derive(Debug)]
pub(super) struct Communicator {
    /// Null once it has been aborted or destroyed.
    comm: AtomicPtr<ncclComm>,
    /// Held by calls that use it, as to end it frees it.
    in_use: Mutex<()>,
    rank: usize,
    world_size: usize,
}

/// Where the elements of a collective are, for the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Elements {
    pub(super) address: u64,
    pub(super) len: usize,
    pub(super) dtype: DType,
}

pub(super) fn unique_id() -> Outcome<UniqueId> {
    let id = said(nccl::get_uniqueid())?;
    Ok(id.internal.map(|byte| byte as u8))
}

impl Communicator {
    /// Blocks until all ranks have joined. The device of the thread's context becomes this rank's.
    pub(super) fn join(id: &UniqueId, rank: usize, world_size: usize) -> Outcome<Self> {
        let id = ncclUniqueId {
            internal: id.map(|byte| byte as _),
        };
        let mut comm = null_mut();
        // SAFETY: `comm` is written before this returns; NCCL checks the rest.
        said(unsafe { nccl::comm_init_rank(&mut comm, world_size as _, id, rank as _) })?;
        Ok(Self::new(comm, rank, world_size))
    }

    /// Blocks until all ranks have called it.
    pub(super) fn split(&self, color: usize, key: usize) -> Outcome<Self> {
        let _held = self.in_use.lock();
        let comm = self.get()?;
        let mut split = null_mut();
        // SAFETY: `comm` is alive and `split` written before this returns; without a configuration
        // the new one is like this one.
        let status =
            unsafe { sys::ncclCommSplit(comm, color as _, key as _, &mut split, null_mut()) };
        said(status.result())?;
        let (mut rank, mut world_size) = (0, 0);
        // SAFETY: NCCL has just made it, and writes to two integers.
        unsafe {
            said(sys::ncclCommUserRank(split, &mut rank).result())?;
            said(sys::ncclCommCount(split, &mut world_size).result())?;
        }
        Ok(Self::new(split, rank as usize, world_size as usize))
    }

    fn new(comm: *mut ncclComm, rank: usize, world_size: usize) -> Self {
        Self {
            comm: AtomicPtr::new(comm),
            in_use: Mutex::default(),
            rank,
            world_size,
        }
    }

    fn get(&self) -> Outcome<*mut ncclComm> {
        let comm = self.comm.load(Ordering::Acquire);
        match comm.is_null() {
            true => Err("the communicator has ended".to_string()),
            false => Ok(comm),
        }
    }

    /// Queues collectives on a stream as one operation; none if the communicator has ended.
    ///
    /// # Safety
    ///
    /// The elements must be alive, and not be used otherwise, until the stream has got past this.
    pub(super) unsafe fn run(
        &self,
        collectives: &[Collective<Elements>],
        stream: sys::cudaStream_t,
    ) -> Outcome<()> {
        let _held = self.in_use.lock();
        let Ok(comm) = self.get() else {
            return Ok(());
        };
        said(nccl::group_start())?;
        // SAFETY: by the contract of this function.
        let queue = |collective| unsafe { self.queue(collective, comm, stream) };
        let queued = collectives.iter().try_for_each(queue);
        // A group that has begun has to end.
        let ended = said(nccl::group_end()).map(drop);
        queued.and(ended)
    }

    /// # Safety
    ///
    /// As of [`run`](Self::run), and `comm` must be this one.
    unsafe fn queue(
        &self,
        collective: &Collective<Elements>,
        comm: *mut ncclComm,
        stream: sys::cudaStream_t,
    ) -> Outcome<()> {
        let Elements {
            address,
            len,
            dtype,
        } = *collective.buffer();
        let kind = data_type(dtype)?;
        let slot = len / self.world_size;
        let own = address + (self.rank * slot * dtype.size()) as u64;
        // SAFETY: within the buffer, which the caller vouches for.
        let status = unsafe {
            match *collective {
                Collective::AllGather { .. } => {
                    nccl::all_gather(own as _, address as _, slot, kind, comm, stream)
                }
                Collective::ReduceScatter { op, .. } => {
                    let op = reduce_op(op);
                    nccl::reduce_scatter(address as _, own as _, slot, kind, op, comm, stream)
                }
                Collective::AllReduce { op, .. } => {
                    let op = reduce_op(op);
                    nccl::all_reduce(address as _, address as _, len, kind, op, comm, stream)
                }
                Collective::Broadcast { root, .. } => {
                    let root = root as _;
                    nccl::broadcast(address as _, address as _, len, kind, root, comm, stream)
                }
            }
        };
        said(status).map(drop)
    }

    /// What has gone wrong in the background. Nothing is known while another call is under way.
    pub(super) fn failure(&self) -> Option<String> {
        let _held = self.in_use.try_lock()?;
        let comm = self.get().ok()?;
        let mut background = ncclResult_t::ncclSuccess;
        // SAFETY: `comm` is alive, and NCCL writes to one result.
        let asked = unsafe { sys::ncclCommGetAsyncError(comm, &mut background) };
        said(asked.result().and_then(|_| background.result())).err()
    }

    /// Ends what is under way, and the communicator.
    pub(super) fn abort(&self) -> Outcome<()> {
        self.end(nccl::comm_abort)
    }

    /// Ends the communicator once all ranks do.
    pub(super) fn destroy(&self) -> Outcome<()> {
        self.end(nccl::comm_destroy)
    }

    fn end(
        &self,
        end: unsafe fn(*mut ncclComm) -> Result<nccl::NcclStatus, NcclError>,
    ) -> Outcome<()> {
        let _held = self.in_use.try_lock_for(LONGEST_CALL);
        let comm = self.comm.swap(null_mut(), Ordering::AcqRel);
        if comm.is_null() {
            return Ok(());
        }
        // SAFETY: it was alive, nobody finds it any more, and who still has it is in a call that NCCL
        // ends first.
        said(unsafe { end(comm) }).map(drop)
    }
}

fn data_type(dtype: DType) -> Outcome<ncclDataType_t> {
    match dtype {
        DType::F64 => Ok(ncclDataType_t::ncclFloat64),
        DType::F32 => Ok(ncclDataType_t::ncclFloat32),
        DType::F16 => Ok(ncclDataType_t::ncclFloat16),
        DType::BF16 => Ok(ncclDataType_t::ncclBfloat16),
        other => Err(format!("{other:?} can't be sent")),
    }
}

fn reduce_op(op: NcclOp) -> ncclRedOp_t {
    match op {
        NcclOp::Sum => ncclRedOp_t::ncclSum,
        NcclOp::Avg => ncclRedOp_t::ncclAvg,
        NcclOp::Max => ncclRedOp_t::ncclMax,
        NcclOp::Min => ncclRedOp_t::ncclMin,
    }
}

/// The error as NCCL words it; the wrapper's own shows nothing.
fn said<T>(result: Result<T, NcclError>) -> Outcome<T> {
    result.map_err(|NcclError(code)| {
        // SAFETY: NCCL's texts are static, or for the last error its own, and end with a zero.
        let text = |text: *const std::ffi::c_char| match text.is_null() {
            true => String::new(),
            false => unsafe { CStr::from_ptr(text) }
                .to_string_lossy()
                .into_owned(),
        };
        let (kind, last) = unsafe {
            (
                sys::ncclGetErrorString(code),
                sys::ncclGetLastError(null_mut()),
            )
        };
        match (text(kind), text(last)) {
            (kind, last) if last.is_empty() => format!("{kind} (code {})", code as u32),
            (kind, last) => format!("{kind} (code {}): {last}", code as u32),
        }
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    use super::*;

    /// Where `libnccl.so` or `libnccl.so.2` is, for tests of NCCL without a GPU.
    const DIRECTORY: &str = "BURN_FSDP_TEST_NCCL_DIR";

    /// Needs the library on the path of the loader, which is read when a process starts.
    #[test]
    #[ignore = "run by `without_a_gpu_joining_fails_with_the_reason`"]
    fn joins_where_there_is_no_gpu() {
        let id = unique_id().unwrap();
        assert!(id.iter().any(|&byte| byte != 0));
        let error = Communicator::join(&id, 0, 1).unwrap_err();
        println!("NCCL says: {error}");
    }

    #[test]
    fn without_a_gpu_joining_fails_with_the_reason() {
        let Some(directory) = std::env::var_os(DIRECTORY) else {
            eprintln!("skipped: {DIRECTORY} is not set");
            return;
        };
        // SAFETY: loading it runs its initialisers, as any use of it does.
        if unsafe { cudarc::driver::sys::is_culib_present() } {
            eprintln!("skipped: this host has a CUDA driver");
            return;
        }
        let links = std::env::temp_dir().join(format!("burn-fsdp-nccl-{}", std::process::id()));
        std::fs::create_dir_all(&links).unwrap();
        let library = ["libnccl.so", "libnccl.so.2"].map(|name| Path::new(&directory).join(name));
        let library = library.iter().find(|path| path.exists());
        let library = library.expect("the directory has the library");
        std::os::unix::fs::symlink(library, links.join("libnccl.so")).unwrap();
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--ignored", "--nocapture"])
            .arg("comm::nccl::communicator::tests::joins_where_there_is_no_gpu")
            .env("LD_LIBRARY_PATH", &links)
            .output()
            .unwrap();
        std::fs::remove_dir_all(&links).unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}");
        assert!(text.contains("NCCL says: unhandled cuda error"), "{text}");
        assert!(text.contains("driver"), "{text}");
    }
}
