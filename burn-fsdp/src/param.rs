//! A sharded parameter: the reparameterization that stands behind a module's `Param`.
//!
//! The `Param` itself keeps a *placeholder*: one NaN expanded to the full shape, without storage and
//! frozen. Code that reads `param.shape()` or `.dims()`, as several forwards in burn-nn do, sees
//! what it expects, and code that computes with it by mistake sees NaN at once. The shard is a
//! nested `Param` with the original id.

use std::any::Any;
use std::cell::RefCell;
use std::sync::Arc;

use burn::module::{
    Devices, Module, ModuleMapper, ModuleVisitor, Param, ParamId, Reparameterization,
};
use burn::tensor::{Device, Tensor};

use crate::state::FsdpState;
use crate::unit::Shard;
use crate::unshard::{MemberHandle, unshard};

/// The name under which visitors enter a sharded parameter.
pub(crate) const NAME: &str = "fsdp";

#[derive(Debug)]
pub(crate) struct ShardedParam {
    shard: RankedParam,
    handle: MemberHandle,
    /// Whether this is a further name of a tied parameter, which follows the first.
    is_alias: bool,
}

impl ShardedParam {
    pub(crate) fn new<const D: usize>(shard: Param<Tensor<D>>, handle: MemberHandle) -> Self {
        let param = Self {
            shard: RankedParam::new(shard),
            handle,
            is_alias: false,
        };
        param.show_shard();
        param
    }

    /// A further name of the parameter that `shard` belongs to.
    pub(crate) fn alias(shard: RankedParam, handle: MemberHandle) -> Self {
        Self {
            shard,
            handle,
            is_alias: true,
        }
    }

    /// Lets the unit see this parameter's shard.
    fn show_shard(&self) {
        if self.is_alias {
            return;
        }
        let MemberHandle {
            state,
            unit,
            member,
        } = &self.handle;
        let (flat, trainable) = self.shard.flat();
        state.set_shard(*unit, *member, Shard { flat, trainable });
        state.set_tied(*unit, *member, &self.shard);
    }

    /// The same parameter in a copy of the module, with this shard.
    fn copied(&self, shard: RankedParam) -> Self {
        let copy = Self {
            shard,
            handle: MemberHandle {
                state: CopyScope::state_for(&self.handle.state),
                ..self.handle.clone()
            },
            is_alias: self.is_alias,
        };
        // Without a scope the copy shares the state, and the shard is the one it has.
        if !Arc::ptr_eq(&copy.handle.state, &self.handle.state) {
            copy.show_shard();
        }
        copy
    }
}

impl Clone for ShardedParam {
    fn clone(&self) -> Self {
        self.copied(self.shard.clone())
    }
}

impl Module for ShardedParam {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.shard.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        self.to_device(device)
    }

    fn to_device(self, device: &Device) -> Self {
        refuse_move(&self.handle.state.context.shard_device, device);
        self
    }

    fn valid(&self) -> Self {
        self.copied(self.shard.valid())
    }

    fn train(self) -> Self {
        let trained = Self {
            shard: self.shard.train(),
            ..self
        };
        trained.show_shard();
        trained
    }

    fn materialize(self) -> Self {
        self
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.shard.visit(visitor);
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        let MemberHandle {
            state,
            unit,
            member,
        } = &self.handle;
        if self.is_alias {
            // The mapper may count the names it meets, but the first name's value is the one.
            drop(self.shard.map(mapper));
            let shard = state.tied(*unit, *member);
            return Self {
                shard: shard.expect("the first name of a tied parameter comes first"),
                handle: self.handle.clone(),
                is_alias: true,
            };
        }
        state.release_shard(*unit, *member);
        let id = self.shard.id();
        let mapped = Self {
            shard: self.shard.map(mapper),
            handle: self.handle.clone(),
            is_alias: false,
        };
        if mapped.shard.id() != id {
            state.note_new_ids();
        }
        mapped.show_shard();
        mapped
    }
}

impl Reparameterization for ShardedParam {
    const NAME: &'static str = NAME;

    fn apply<const D: usize>(&self, _placeholder: Tensor<D>) -> Tensor<D> {
        unshard(self.shard.value::<D>(), self.handle.clone())
    }
}

/// # Panics
///
/// If `to` is another device.
pub(crate) fn refuse_move(from: &Device, to: &Device) {
    assert!(
        from.clone().inner() == to.clone().inner(),
        "a sharded module stays on its device: it is on {from:?} and was asked to move to {to:?}; \
         move the module before `fully_shard`"
    );
}

/// While it lives, sharded parameters that this thread copies join the copy's state instead of
/// staying with the original's, so that training a copy never confuses the original.
pub(crate) struct CopyScope;

thread_local! {
    static COPYING: RefCell<Option<(Arc<FsdpState>, Arc<FsdpState>)>> = const { RefCell::new(None) };
}

impl CopyScope {
    pub(crate) fn enter(original: &Arc<FsdpState>, copy: &Arc<FsdpState>) -> Self {
        COPYING.set(Some((original.clone(), copy.clone())));
        Self
    }

    fn state_for(state: &Arc<FsdpState>) -> Arc<FsdpState> {
        COPYING.with_borrow(|copying| match copying {
            Some((original, copy)) if Arc::ptr_eq(original, state) => copy.clone(),
            _ => state.clone(),
        })
    }
}

impl Drop for CopyScope {
    fn drop(&mut self) {
        COPYING.set(None);
    }
}

macro_rules! ranked_param {
    ($($variant:ident = $rank:literal),+) => {
        /// A `Param` of any rank.
        #[derive(Clone, Debug)]
        pub(crate) enum RankedParam {
            $($variant(Param<Tensor<$rank>>)),+
        }

        impl RankedParam {
            fn new<const D: usize>(param: Param<Tensor<D>>) -> Self {
                let param: Box<dyn Any> = Box::new(param);
                match D {
                    $($rank => Self::$variant(
                        *param.downcast().expect("D is the rank of the parameter"),
                    ),)+
                    rank => panic!("Burn has no parameters of rank {rank}"),
                }
            }

            fn value<const D: usize>(&self) -> Tensor<D> {
                let value: Box<dyn Any> = match self {
                    $(Self::$variant(param) => Box::new(param.val())),+
                };
                *value.downcast().expect("a parameter keeps its rank")
            }
        }
    };
}

ranked_param!(
    R0 = 0,
    R1 = 1,
    R2 = 2,
    R3 = 3,
    R4 = 4,
    R5 = 5,
    R6 = 6,
    R7 = 7,
    R8 = 8
);

/// Evaluates an expression for the parameter inside, whatever its rank.
macro_rules! with_param {
    ($ranked:expr, $param:ident => $body:expr) => {
        match $ranked {
            RankedParam::R0($param) => $body,
            RankedParam::R1($param) => $body,
            RankedParam::R2($param) => $body,
            RankedParam::R3($param) => $body,
            RankedParam::R4($param) => $body,
            RankedParam::R5($param) => $body,
            RankedParam::R6($param) => $body,
            RankedParam::R7($param) => $body,
            RankedParam::R8($param) => $body,
        }
    };
}

impl RankedParam {
    fn id(&self) -> ParamId {
        with_param!(self, param => param.id)
    }

    /// The value without autodiff, flat, and whether it is trained.
    fn flat(&self) -> (Tensor<1>, bool) {
        with_param!(self, param => {
            let value = param.val();
            let trainable = value.is_require_grad();
            let len = value.shape().num_elements();
            (value.inner().reshape([len]), trainable)
        })
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        with_param!(self, param => param.collect_devices(devices))
    }

    fn valid(&self) -> Self {
        with_param!(self, param => Self::new(param.valid()))
    }

    fn train(self) -> Self {
        with_param!(self, param => Self::new(Module::train(param)))
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        with_param!(self, param => Module::visit(param, visitor))
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        with_param!(self, param => Self::new(Module::map(param, mapper)))
    }
}
