//! The place of an unshard in the order of backward.
//!
//! Burn runs backward by node depth, deepest first, and an operation on a leaf has depth 1. An
//! unshard with the shard as its only parent would therefore run last, with all full gradients
//! alive at once. So it gets a second, untracked parent of a depth as great as anything its forward
//! has made so far: a rung of a ladder of untracked nodes.
//!
//! The n-th hand-out of a forward takes the n-th rung, [`STRIDE`] below the one before. That makes
//! backward visit unshards in exactly the reverse order of use. As long as fewer than `STRIDE`
//! operations lie between two hand-outs, each also runs as soon as the operations that used the
//! parameter have; if more do, it runs somewhat later, which costs memory and nothing else.
//!
//! # Note: why not a clock
//!
//! Counting the nodes made since the forward began would fit more tightly, but Burn's counter is
//! one for all threads. Ranks that are threads would get depths that depend on each other's speed,
//! and with the depths the order in which Burn adds up the gradients of a value used three times or
//! more: the last bits would differ from run to run.

use std::any::{Any, TypeId};
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::LazyLock;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::tensor::{Device, FloatTensor};
use burn::backend::{Autodiff, Backend};
use burn::tensor::{FloatDType, Shape};
use parking_lot::Mutex;

/// Depth between two rungs. Attention has some forty operations between two parameters.
const STRIDE: usize = 64;
/// Rungs after which a thread that does not call backward starts again from the top. A forward with
/// more hand-outs is right all the same, but reduces some units late.
const LONGEST: usize = 1 << 12;

/// Rungs after which the steps between them are freed.
const SWEEP: usize = 16;

type Rungs = HashMap<TypeId, Vec<Box<dyn Any + Send>>>;

/// The rungs made so far, for each backend; they are never dropped.
static LADDER: LazyLock<Mutex<Rungs>> = LazyLock::new(Default::default);

thread_local! {
    /// The rung that the next hand-out on this thread takes. A rank runs on one thread.
    static NEXT: Cell<usize> = const { Cell::new(0) };
    static BACKWARD_SEEN: Cell<bool> = const { Cell::new(false) };
}

/// Notes that a backward runs on this thread: the next hand-out begins a new forward.
pub(crate) fn backward_seen() {
    BACKWARD_SEEN.set(true);
}

/// An untracked node deeper than those of earlier hand-outs.
pub(crate) fn next_rung<B: Backend>(device: &Device<B>) -> FloatTensor<Autodiff<B>> {
    if BACKWARD_SEEN.take() || NEXT.get() == LONGEST {
        NEXT.set(0);
    }
    let rung = NEXT.get();
    NEXT.set(rung + 1);

    let mut ladder = LADDER.lock();
    let rungs = ladder.entry(TypeId::of::<B>()).or_default();
    while rungs.len() <= rung {
        let node = match rungs.last() {
            Some(above) => descend::<B>(above_as::<B>(above)),
            None => first::<B>(device),
        };
        rungs.push(Box::new(node));
        if rungs.len().is_multiple_of(SWEEP) {
            sweep::<B>(device);
        }
    }
    above_as::<B>(&rungs[rung])
}

fn above_as<B: Backend>(rung: &Box<dyn Any + Send>) -> FloatTensor<Autodiff<B>> {
    rung.downcast_ref::<FloatTensor<Autodiff<B>>>()
        .expect("the ladder of a backend holds its tensors")
        .clone()
}

fn first<B: Backend>(device: &Device<B>) -> FloatTensor<Autodiff<B>> {
    let one_element = B::float_zeros(Shape::new([1]), device, FloatDType::F32);
    FloatTensor::<Autodiff<B>>::new(one_element)
}

/// Burn frees what is left of dropped nodes when a backward ends, so this runs the smallest there is.
/// Else the steps between rungs would stay, a kilobyte each, until the user's.
fn sweep<B: Backend>(device: &Device<B>) {
    first::<B>(device).require_grad().backward();
}

fn descend<B: Backend>(mut node: FloatTensor<Autodiff<B>>) -> FloatTensor<Autodiff<B>> {
    for _ in 0..STRIDE {
        node = <Step as Backward<B, 1>>::prepare::<BalancedCheckpointing>(Step, [node.node()])
            .compute_bound()
            .stateless(node.primitive().clone());
    }
    node
}

/// An operation that does nothing but be one deeper than its parent.
#[derive(Debug)]
struct Step;

impl<B: Backend> Backward<B, 1> for Step {
    type State = ();

    fn backward(self, _ops: Ops<(), 1>, _grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        unreachable!("no rung is tracked, so none is in a backward");
    }
}
