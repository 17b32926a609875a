//! The autodiff operation that turns a shard into the full parameter.
//!
//! Forward unshards the parameter's unit. Backward hands the full gradient to the unit, which
//! reduces when it has them all. The operation is memory-bound whatever the device's checkpointing
//! strategy: an operation that needs the full parameter in backward asks for it again, and the unit
//! is unsharded again. That is what resharding after forward comes down to: the graph holds none.
//!
//! # Note: vectors
//!
//! Parameters of one dimension are the exception: the graph may hold them. With gradient
//! checkpointing Burn computes the residual stream again at the start of backward, through every
//! addition of a bias in every unit. Gathering each unit for that would cost one all-gather a unit
//! more, to save what is a fraction of a percent of it.
//!
//! Frozen parameters are another. An operation that is not tracked is nobody's parent in Burn's
//! graph, so there is no way back to it. What needs a frozen parameter in backward holds it.
//!
//! # Note: views
//!
//! A view of a parameter is another operation, which under the default strategy keeps what it is
//! given, and Burn's `linear` may take one, depending on the shapes. So train on
//! `device.autodiff().gradient_checkpointing()` for the memory that sharding promises.

use std::marker::PhantomData;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::retro_forward::RetroForward;
use burn::backend::autodiff::checkpoint::state::BackwardStates;
use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Autodiff, Backend, Dispatch, DispatchKindConversion, DispatchTensor, Flex, TensorMetadata,
    backend_extension,
};
use burn::tensor::{Shape, Tensor};

use crate::schedule::Phase;
use crate::state::{FsdpState, HandOut};
use crate::{FsdpError, Result, order};

/// Unshards a parameter. All ranks must call this for the same units, in the same order.
///
/// # Panics
///
/// If the collective fails; `val()` cannot return an error.
pub(crate) fn unshard<const D: usize>(shard: Tensor<D>, member: MemberHandle) -> Tensor<D> {
    #[cfg(feature = "cube")]
    if member.is_offloaded(&shard) {
        return offloaded::unshard(shard, member);
    }
    Tensor::from_dispatch(<Dispatch as UnshardBackend>::unshard(
        shard.into_dispatch(),
        member,
    ))
}

/// A parameter of a unit.
#[derive(Clone, Debug)]
pub(crate) struct MemberHandle {
    pub(crate) state: Arc<FsdpState>,
    pub(crate) unit: usize,
    pub(crate) member: usize,
}

impl MemberHandle {
    fn is_vector(&self) -> bool {
        self.shape().len() <= 1
    }

    fn shape(&self) -> &[usize] {
        &self.state.plan.param(self.unit, self.member).shape
    }

    /// The full parameter as a primitive of the backend it is on.
    fn full<B: Backend>(&self, phase: Phase) -> FloatTensor<B>
    where
        DispatchTensor: DispatchKindConversion<B>,
    {
        self.shaped::<B>(or_panic(self.state.full(self.unit, self.member, phase)))
    }

    /// A flat full parameter as a primitive in its own shape.
    fn shaped<B: Backend>(&self, flat: Tensor<1>) -> FloatTensor<B>
    where
        DispatchTensor: DispatchKindConversion<B>,
    {
        let shape = Shape::from(self.shape().to_vec());
        let flat = flat
            .try_into_primitive::<B>()
            .expect("a unit is gathered on the device it is computed with");
        B::float_reshape(flat, shape)
    }
}

/// The backends that can unshard.
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub(crate) trait UnshardBackend: Backend {
    /// The full parameter, of which `shard` is this rank's part.
    fn unshard(shard: FloatTensor<Self>, member: MemberHandle) -> FloatTensor<Self>;
}

impl UnshardBackend for Flex {
    fn unshard(_shard: FloatTensor<Self>, member: MemberHandle) -> FloatTensor<Self> {
        member.full::<Self>(Phase::Forward)
    }
}

// With Burn's fusion, `Cube` is a backend of operations that run later. A collective must not: two
// ranks may run what they have put off at different times. This runs at once, as `full` does.
#[cfg(feature = "cube")]
impl UnshardBackend for burn::backend::Cube {
    fn unshard(_shard: FloatTensor<Self>, member: MemberHandle) -> FloatTensor<Self> {
        member.full::<Self>(Phase::Forward)
    }
}

impl<B: UnshardBackend, C: CheckpointStrategy> UnshardBackend for Autodiff<B, C>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    fn unshard(shard: FloatTensor<Self>, member: MemberHandle) -> FloatTensor<Self> {
        record::<B, B>(shard, member)
    }
}

/// Unshards, and records the operation. The shard is on backend `S`, the full parameter on `B`; Burn's
/// graph does not mind.
fn record<S: Backend, B: Backend>(
    shard: FloatTensor<Autodiff<S>>,
    member: MemberHandle,
) -> FloatTensor<Autodiff<B>>
where
    DispatchTensor: DispatchKindConversion<S> + DispatchKindConversion<B>,
{
    let rung = order::next_rung::<S>(&shard.primitive().device());
    let retro = Regather::<S, B> {
        leaf: shard.id(),
        generation: member.state.generation(member.unit),
        member: member.clone(),
        backends: PhantomData,
    };
    let operation = UnshardOperation::<S>(PhantomData);
    let nodes = [shard.node(), rung.node()];
    let operation = Backward::<B, 2>::prepare::<BalancedCheckpointing>(operation, nodes);
    let operation = if shard.is_tracked() && !member.is_vector() {
        operation
            .memory_bound()
            .retro_forward(retro)
            .parents([&shard])
    } else {
        operation.compute_bound()
    };
    let full = member.full::<B>(Phase::Forward);
    match operation.stateful() {
        OpsKind::Tracked(operation) => {
            let MemberHandle {
                state,
                unit,
                member: index,
            } = &member;
            let hand_out = state.hand_out(*unit, *index, shard.id());
            operation.finish(HandedOut { member, hand_out }, full)
        }
        OpsKind::UnTracked(operation) => operation.finish(full),
    }
}

/// Shards on the host of parameters that are computed with on a device of CubeCL.
#[cfg(feature = "cube")]
mod offloaded {
    use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;

    use super::*;
    use crate::comm::cube::device_of;

    type Cube = burn::backend::Cube;

    impl MemberHandle {
        pub(super) fn is_offloaded<const D: usize>(&self, shard: &Tensor<D>) -> bool {
            let compute_device = &self.state.context.compute_device;
            device_of(compute_device).is_some() && device_of(&shard.device()).is_none()
        }
    }

    /// Burn picks an operation by the backend of its input, and wants its output on the same. So this
    /// picks by hand.
    pub(super) fn unshard<const D: usize>(shard: Tensor<D>, member: MemberHandle) -> Tensor<D> {
        type Plain<B> = Autodiff<B, NoCheckpointing>;
        type Checkpointed<B> = Autodiff<B, BalancedCheckpointing>;
        if let Ok(shard) = shard.clone().try_into_primitive::<Checkpointed<Flex>>() {
            return Tensor::from_primitive::<Checkpointed<Cube>>(record::<Flex, Cube>(
                shard, member,
            ));
        }
        if let Ok(shard) = shard.try_into_primitive::<Plain<Flex>>() {
            return Tensor::from_primitive::<Plain<Cube>>(record::<Flex, Cube>(shard, member));
        }
        Tensor::from_primitive::<Cube>(member.full::<Cube>(Phase::Forward))
    }
}

/// Makes the full parameter again, for an operation that needs it in backward.
#[derive(Debug, Clone)]
struct Regather<S: Backend, B: Backend> {
    leaf: NodeId,
    generation: u64,
    member: MemberHandle,
    backends: PhantomData<(S, B)>,
}

impl<S: Backend, B: Backend> RetroForward for Regather<S, B>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    fn forward(&self, states: &mut BackwardStates, out: NodeId) {
        // The shard itself is the unit's to read; this only settles Burn's count of uses.
        states.get_state::<FloatTensor<S>>(&self.leaf);
        order::backward_seen();
        let MemberHandle {
            state,
            unit,
            member,
        } = &self.member;
        let flat = or_panic(state.full_again(*unit, *member, self.generation));
        states.save(out, self.member.shaped::<B>(flat));
    }
}

#[derive(Clone, Debug)]
struct HandedOut {
    member: MemberHandle,
    hand_out: HandOut,
}

/// With the shard on backend `S`.
#[derive(Debug)]
struct UnshardOperation<S>(PhantomData<S>);

impl<S: Backend, B: Backend> Backward<B, 2> for UnshardOperation<S>
where
    DispatchTensor: DispatchKindConversion<S> + DispatchKindConversion<B>,
{
    type State = HandedOut;

    fn backward(
        self,
        ops: Ops<HandedOut, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        order::backward_seen();
        let HandedOut { member, hand_out } = ops.state;
        let gradient = grads.consume::<B>(&ops.node);
        let flat = B::float_reshape(
            gradient.clone(),
            Shape::new([gradient.shape().num_elements()]),
        );
        drop(gradient);
        let flat = Tensor::<1>::from_primitive::<B>(flat);
        let (state, unit) = (&member.state, member.unit);
        let reduced = or_panic(state.take_gradient(unit, member.member, &hand_out, flat));
        for reduced in reduced {
            let node = reduced
                .node
                .expect("a complete pass has handed out every trainable parameter");
            let gradient = reduced
                .gradient
                .try_into_primitive::<S>()
                .expect("a gradient goes to the device of its shard");
            let shape = state.shard_shape(unit, reduced.member);
            grads.register::<S>(node, S::float_reshape(gradient, shape));
        }
    }
}

/// Nothing but a panic can leave a forward or a backward.
pub(crate) fn or_panic<T>(result: Result<T, FsdpError>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}
