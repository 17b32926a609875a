//! MPI over buffers that it owns.
//!
//! The safe part of the crate `mpi` borrows the buffers of an operation for a scope. Ours stay
//! under way from turn to turn of a loop, so here a [`Request`] owns what MPI reads and writes until
//! MPI is done with it, and calls nobody can get wrong are made of its C functions.
//!
//! Nothing here can be sent to another thread, which is all that `MPI_THREAD_FUNNELED` asks for.

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::mem::{self, MaybeUninit};
use std::ops::Range;
use std::ptr;
use std::rc::Rc;

use ::mpi::ffi;
use bytes::Bytes;

use crate::comm::buffer::SharedBuffer;

/// Of all messages between two ranks. There is one kind, in one order.
const TAG: c_int = 1;

/// MPI counts with an `int`. Longer messages are described as several blocks of this length; in
/// tests a shorter one, so that they have such messages.
const BLOCK: usize = if cfg!(test) { 16 << 20 } else { 1 << 30 };

/// Messages that come in one buffer begin at multiples of this, as those do that come in their own:
/// numbers in them can be read where they are.
const ALIGN: usize = align_of::<u128>();

/// A call of MPI that failed, or cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("{call}: {reason}")]
pub(super) struct MpiError {
    call: &'static str,
    reason: String,
}

type Result<T> = std::result::Result<T, MpiError>;

fn error<T>(call: &'static str, reason: impl Into<String>) -> Result<T> {
    let reason = reason.into();
    Err(MpiError { call, reason })
}

/// The result of a call that returned `code`.
fn check(call: &'static str, code: c_int) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0_u8; ffi::MPI_MAX_ERROR_STRING as usize];
    let mut len = 0;
    // SAFETY: the text has the length that MPI asks for, and `len` is how much of it is written.
    let known = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut len) };
    if known != ffi::MPI_SUCCESS as c_int {
        return error(call, format!("error {code}"));
    }
    error(call, String::from_utf8_lossy(&text[..len as usize]))
}

fn int(call: &'static str, n: usize) -> Result<c_int> {
    match c_int::try_from(n) {
        Ok(n) => Ok(n),
        Err(_) => error(call, format!("{n} is more than MPI counts")),
    }
}

fn ints(call: &'static str, numbers: impl Iterator<Item = usize>) -> Result<Vec<c_int>> {
    numbers.map(|n| int(call, n)).collect()
}

/// Where a buffer of this length starts. An empty one has any address, and MPI gives some a meaning
/// (`MPI_IN_PLACE`), but null none.
fn start_of(address: *mut u8, len: usize) -> *mut c_void {
    match len {
        0 => ptr::null_mut(),
        _ => address.cast(),
    }
}

fn byte() -> ffi::MPI_Datatype {
    // SAFETY: a constant.
    unsafe { ffi::RSMPI_UINT8_T }
}

/// MPI, initialised by this thread. Whatever uses it holds on to it.
#[derive(Debug)]
pub(super) struct Universe {
    of_this_thread: PhantomData<*const ()>,
}

impl Universe {
    /// Waits for all ranks. If MPI itself cannot start, it ends the process.
    pub(super) fn init() -> Result<Rc<Self>> {
        let mut initialised = 0;
        // SAFETY: may be called at any time.
        check("MPI_Initialized", unsafe {
            ffi::MPI_Initialized(&mut initialised)
        })?;
        if initialised != 0 {
            return error(
                "MPI_Init_thread",
                "this process has initialised MPI already; only burn-fsdp may, and only once",
            );
        }
        let mut provided = 0;
        // SAFETY: MPI allows null for the arguments of the program.
        check("MPI_Init_thread", unsafe {
            let (argc, argv) = (ptr::null_mut(), ptr::null_mut());
            ffi::MPI_Init_thread(argc, argv, ffi::RSMPI_THREAD_FUNNELED, &mut provided)
        })?;
        // SAFETY: a constant.
        if provided < unsafe { ffi::RSMPI_THREAD_FUNNELED } {
            return error(
                "MPI_Init_thread",
                "this MPI does not support threads (MPI_THREAD_FUNNELED), so it cannot work beside \
                 a computation",
            );
        }
        Ok(Rc::new(Self {
            of_this_thread: PhantomData,
        }))
    }

    /// The communicator of all ranks.
    pub(super) fn world(self: &Rc<Self>) -> Result<Communicator> {
        // SAFETY: a constant.
        Communicator::new(unsafe { ffi::RSMPI_COMM_WORLD }, self)
    }

    /// Waits for all ranks to get here. Not done if something still uses MPI: it would never end.
    pub(super) fn finalize(self: Rc<Self>) -> Result<()> {
        if Rc::into_inner(self).is_none() {
            return error("MPI_Finalize", "an operation is still under way");
        }
        // SAFETY: MPI is initialised, by this thread, and nothing uses it any more.
        check("MPI_Finalize", unsafe { ffi::MPI_Finalize() })
    }
}

/// The ranks of a group, numbered from 0. Not freed before MPI is finalised: that takes all ranks.
#[derive(Debug)]
pub(super) struct Communicator {
    raw: ffi::MPI_Comm,
    rank: usize,
    size: usize,
    universe: Rc<Universe>,
}

impl Communicator {
    fn new(raw: ffi::MPI_Comm, universe: &Rc<Universe>) -> Result<Self> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: `raw` is a communicator. Errors return from here on.
        check("MPI_Comm_set_errhandler", unsafe {
            ffi::MPI_Comm_set_errhandler(raw, ffi::RSMPI_ERRORS_RETURN)
        })?;
        // SAFETY: as above.
        check("MPI_Comm_rank", unsafe {
            ffi::MPI_Comm_rank(raw, &mut rank)
        })?;
        // SAFETY: as above.
        check("MPI_Comm_size", unsafe {
            ffi::MPI_Comm_size(raw, &mut size)
        })?;
        Ok(Self {
            raw,
            rank: rank as usize,
            size: size as usize,
            universe: universe.clone(),
        })
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// One of the same ranks, whose messages are told apart. Waits for all of them.
    pub(super) fn duplicate(&self) -> Result<Self> {
        let mut copy = self.raw;
        // SAFETY: `raw` is a communicator.
        check("MPI_Comm_dup", unsafe {
            ffi::MPI_Comm_dup(self.raw, &mut copy)
        })?;
        Self::new(copy, &self.universe)
    }

    /// The communicator of some ranks, in this order. Waits for all of them, but for no others.
    pub(super) fn subset(&self, ranks: &[usize]) -> Result<Self> {
        let call = "MPI_Comm_create_group";
        let ranks = ints(call, ranks.iter().copied())?;
        let len = int(call, ranks.len())?;
        let mut all = MaybeUninit::uninit();
        let mut some = MaybeUninit::uninit();
        let mut raw = self.raw;
        // SAFETY: `raw` is a communicator, and each call fills in what the next one reads.
        unsafe {
            check("MPI_Comm_group", {
                ffi::MPI_Comm_group(self.raw, all.as_mut_ptr())
            })?;
            check("MPI_Group_incl", {
                let all = all.assume_init();
                ffi::MPI_Group_incl(all, len, ranks.as_ptr(), some.as_mut_ptr())
            })?;
            let some_ranks = some.assume_init();
            check(call, {
                ffi::MPI_Comm_create_group(self.raw, some_ranks, TAG, &mut raw)
            })?;
            check("MPI_Group_free", ffi::MPI_Group_free(some.as_mut_ptr()))?;
            check("MPI_Group_free", ffi::MPI_Group_free(all.as_mut_ptr()))?;
        }
        Self::new(raw, &self.universe)
    }

    /// Starts sending a message to a rank. Messages between two ranks keep their order.
    pub(super) fn send(&self, to: usize, message: Bytes) -> Result<Request> {
        let (len, to) = (int("MPI_Isend", message.len())?, int("MPI_Isend", to)?);
        let held = Held {
            outgoing: vec![message],
            ..Held::new(&self.universe)
        };
        Request::start(held, |held, request| {
            let message = &held.outgoing[0];
            let buffer = start_of(message.as_ptr().cast_mut(), message.len());
            // SAFETY: the request holds the message.
            check("MPI_Isend", unsafe {
                ffi::MPI_Isend(buffer, len, byte(), to, TAG, self.raw, request)
            })
        })
    }

    /// A message that has come, and who sent it.
    pub(super) fn receive(&self) -> Result<Option<(usize, Vec<u8>)>> {
        let mut found = 0;
        let mut status = MaybeUninit::uninit();
        // SAFETY: `raw` is a communicator; the others are written.
        check("MPI_Iprobe", unsafe {
            let from = ffi::RSMPI_ANY_SOURCE;
            ffi::MPI_Iprobe(from, TAG, self.raw, &mut found, status.as_mut_ptr())
        })?;
        if found == 0 {
            return Ok(None);
        }
        // SAFETY: it is written if a message was found.
        let status = unsafe { status.assume_init() };
        let mut len = 0;
        // SAFETY: the status is that of a message.
        check("MPI_Get_count", unsafe {
            ffi::MPI_Get_count(&status, byte(), &mut len)
        })?;
        let mut message = vec![0_u8; len as usize];
        let (buffer, from) = (message.as_mut_ptr().cast(), status.MPI_SOURCE);
        // SAFETY: the buffer has the length of the message. As only this thread receives, it is
        // the one that was found.
        check("MPI_Recv", unsafe {
            let status = ffi::RSMPI_STATUS_IGNORE;
            ffi::MPI_Recv(buffer, len, byte(), from, TAG, self.raw, status)
        })?;
        Ok(Some((from as usize, message)))
    }

    /// Starts sending every rank this message, for theirs, of which `lens` are the lengths. All
    /// ranks must, and know the same lengths.
    pub(super) fn all_gather(&self, message: Bytes, lens: Vec<usize>) -> Result<Request> {
        assert_eq!(lens.len(), self.size);
        let mut places: Vec<Range<usize>> = Vec::with_capacity(self.size);
        for len in lens {
            let start = places
                .last()
                .map_or(0, |last| last.end.next_multiple_of(ALIGN));
            places.push(start..start + len);
        }
        let total = places.last().map_or(0, |last| last.end);
        if total > BLOCK {
            let lens = places.iter().map(Range::len).collect();
            return self.all_to_all(vec![message; self.size], lens);
        }
        let call = "MPI_Iallgatherv";
        let held = Held {
            outgoing: vec![message],
            counts: ints(call, places.iter().map(Range::len))?,
            displacements: ints(call, places.iter().map(|place| place.start))?,
            incoming: Incoming::Joined(SharedBuffer::new(total, None), places),
            ..Held::new(&self.universe)
        };
        Request::start(held, |held, request| {
            let message = &held.outgoing[0];
            let Incoming::Joined(incoming, _) = &mut held.incoming else {
                unreachable!("it was made above");
            };
            let incoming = incoming.as_mut_slice();
            // SAFETY: the request holds all of them. The counts are the lengths of the messages,
            // and fit into what comes in.
            check(call, unsafe {
                ffi::MPI_Iallgatherv(
                    start_of(message.as_ptr().cast_mut(), message.len()),
                    message.len() as c_int,
                    byte(),
                    start_of(incoming.as_mut_ptr(), incoming.len()),
                    held.counts.as_ptr(),
                    held.displacements.as_ptr(),
                    byte(),
                    self.raw,
                    request,
                )
            })
        })
    }

    /// Starts sending each rank a message, for one from each, of which `lens` are the lengths. All
    /// ranks must. The messages are read and written where they lie, and this rank's own is not
    /// sent.
    pub(super) fn all_to_all(&self, messages: Vec<Bytes>, lens: Vec<usize>) -> Result<Request> {
        assert_eq!((messages.len(), lens.len()), (self.size, self.size));
        let own = (self.rank, messages[self.rank].clone());
        let buffer = |(rank, len)| SharedBuffer::new(if rank == self.rank { 0 } else { len }, None);
        let held = Held {
            outgoing: messages,
            incoming: Incoming::Apart(lens.into_iter().enumerate().map(buffer).collect(), own),
            displacements: vec![0; self.size],
            ..Held::new(&self.universe)
        };
        Request::start(held, |held, request| {
            let Incoming::Apart(incoming, _) = &mut held.incoming else {
                unreachable!("it was made above");
            };
            let sent = held.outgoing.iter().enumerate().map(|(rank, message)| {
                let len = if rank == self.rank { 0 } else { message.len() };
                (message.as_ptr().cast_mut(), len)
            });
            let received = incoming.iter_mut().map(|buffer| {
                let bytes = buffer.as_mut_slice();
                (bytes.as_mut_ptr(), bytes.len())
            });
            let blocks = (Blocks::new(sent)?, Blocks::new(received)?);
            let (sent, received) = held.blocks.insert(blocks);
            let displacements = held.displacements.as_ptr();
            // MPI_BOTTOM, from which the blocks count, is address zero.
            let bottom: *mut c_void = ptr::null_mut();
            // SAFETY: the request holds all of them, and the blocks are those of its messages.
            check("MPI_Ialltoallw", unsafe {
                ffi::MPI_Ialltoallw(
                    bottom,
                    sent.counts.as_ptr(),
                    displacements,
                    sent.types.as_ptr(),
                    bottom,
                    received.counts.as_ptr(),
                    displacements,
                    received.types.as_ptr(),
                    self.raw,
                    request,
                )
            })
        })
    }
}

/// Where the message to or from each rank lies: one element of a datatype of its own, or none.
#[derive(Debug)]
struct Blocks {
    counts: Vec<c_int>,
    types: Vec<ffi::MPI_Datatype>,
}

impl Blocks {
    fn new(messages: impl Iterator<Item = (*mut u8, usize)>) -> Result<Self> {
        let mut blocks = Self {
            counts: Vec::new(),
            types: Vec::new(),
        };
        for (start, len) in messages {
            let datatype = if len == 0 { byte() } else { at(start, len)? };
            blocks.counts.push(c_int::from(len != 0));
            blocks.types.push(datatype);
        }
        Ok(blocks)
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        for (count, datatype) in self.counts.iter().zip(&mut self.types) {
            if *count != 0 {
                // SAFETY: it was made by `at`. Its errors have no consequence.
                unsafe { ffi::MPI_Type_free(datatype) };
            }
        }
    }
}

/// The datatype of these bytes at this address.
fn at(start: *mut u8, len: usize) -> Result<ffi::MPI_Datatype> {
    let call = "MPI_Type_create_hindexed";
    let offsets = (0..len).step_by(BLOCK);
    let lens: Vec<c_int> = offsets
        .clone()
        .map(|o| BLOCK.min(len - o) as c_int)
        .collect();
    let addresses: Vec<_> = offsets
        .map(|o| (start.expose_provenance() + o) as ffi::MPI_Aint)
        .collect();
    let count = int(call, lens.len())?;
    let mut datatype = byte();
    // SAFETY: there are `count` lengths and addresses. Making a datatype reads no memory there.
    unsafe {
        let (lens, addresses) = (lens.as_ptr(), addresses.as_ptr());
        check(call, {
            ffi::MPI_Type_create_hindexed(count, lens, addresses, byte(), &mut datatype)
        })?;
        check("MPI_Type_commit", ffi::MPI_Type_commit(&mut datatype))?;
    }
    Ok(datatype)
}

/// Messages that MPI writes, in rank order.
#[derive(Debug)]
enum Incoming {
    Nothing,
    /// One behind the other, at these places.
    Joined(SharedBuffer, Vec<Range<usize>>),
    /// Each by itself, and the rank and message of this rank itself.
    Apart(Vec<SharedBuffer>, (usize, Bytes)),
}

impl Incoming {
    fn into_messages(self) -> Vec<Bytes> {
        match self {
            Self::Nothing => Vec::new(),
            Self::Joined(all, places) => {
                let all = all.freeze();
                places.into_iter().map(|place| all.slice(place)).collect()
            }
            Self::Apart(messages, (own_rank, own)) => {
                let messages = messages.into_iter().map(SharedBuffer::freeze);
                let mut messages: Vec<_> = messages.collect();
                messages[own_rank] = own;
                messages
            }
        }
    }
}

/// What MPI reads and writes until an operation is complete.
#[derive(Debug)]
struct Held {
    outgoing: Vec<Bytes>,
    incoming: Incoming,
    counts: Vec<c_int>,
    displacements: Vec<c_int>,
    blocks: Option<(Blocks, Blocks)>,
    /// The last to go, as MPI frees the blocks.
    _universe: Rc<Universe>,
}

impl Held {
    fn new(universe: &Rc<Universe>) -> Self {
        Self {
            outgoing: Vec::new(),
            incoming: Incoming::Nothing,
            counts: Vec::new(),
            displacements: Vec::new(),
            blocks: None,
            _universe: universe.clone(),
        }
    }
}

/// An operation under way. Dropped before it is complete, it leaks what it holds: there is no way
/// to take it back from MPI.
#[derive(Debug)]
pub(super) struct Request {
    raw: ffi::MPI_Request,
    /// Until it is complete.
    held: Option<Box<Held>>,
}

impl Request {
    /// `post` gives MPI what is held, which stays where it is from then on.
    fn start(
        held: Held,
        post: impl FnOnce(&mut Held, &mut ffi::MPI_Request) -> Result<()>,
    ) -> Result<Self> {
        // SAFETY: a constant.
        let raw = unsafe { ffi::RSMPI_REQUEST_NULL };
        let mut request = Self { raw, held: None };
        let held = request.held.insert(Box::new(held));
        // If it fails, what MPI may have seen is leaked.
        post(held, &mut request.raw)?;
        Ok(request)
    }

    /// The messages that have come, once it is complete. Makes MPI go on with all its operations.
    pub(super) fn test(&mut self) -> Result<Option<Vec<Bytes>>> {
        let mut complete = 0;
        // SAFETY: the request was started, or is null, which is complete.
        check("MPI_Test", unsafe {
            ffi::MPI_Test(&mut self.raw, &mut complete, ffi::RSMPI_STATUS_IGNORE)
        })?;
        if complete == 0 {
            return Ok(None);
        }
        let messages = self.held.take().map(|held| held.incoming.into_messages());
        Ok(Some(messages.unwrap_or_default()))
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        mem::forget(self.held.take());
    }
}
