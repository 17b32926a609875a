//! A sharded parameter: the reparameterization that stands behind a module's `Param`.
//!
//! The `Param` itself keeps a *placeholder*: one NaN expanded to the full shape, without storage and
//! frozen. Code that reads `param.shape()` or `.dims()`, as several forwards in burn-nn do, sees
//! what it expects, and code that computes with it by mistake sees NaN at once. The shard is a
//! nested `Param` with the original id.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor, Param, Reparameterization};
use burn::tensor::{Device, Tensor};

use crate::board::Shard;
use crate::path::SHARD_NAME;
use crate::ranked::RankedParam;
use crate::state::FsdpState;
use crate::unshard::{MemberHandle, unshard};

#[derive(Debug)]
pub(crate) struct ShardedParam {
    shard: RankedParam,
    handle: MemberHandle,
    /// Whether this is a further name of a tied parameter, which follows the first.
    is_alias: bool,
    /// Whether this is a copy that a user made of a part of a sharded module. It gathers what the
    /// original has, so it must not be changed by itself.
    is_borrowed: bool,
}

impl ShardedParam {
    pub(crate) fn new<const D: usize>(shard: Param<Tensor<D>>, handle: MemberHandle) -> Self {
        let param = Self {
            shard: RankedParam::new(shard),
            handle,
            is_alias: false,
            is_borrowed: false,
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
            is_borrowed: false,
        }
    }

    /// Lets the unit see this parameter's shard.
    fn show_shard(&self) {
        if self.is_alias || self.is_borrowed {
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
        let state = CopyScope::state_for(&self.handle.state);
        let copy = Self {
            shard,
            is_alias: self.is_alias,
            is_borrowed: state.is_none(),
            handle: MemberHandle {
                state: state.unwrap_or_else(|| self.handle.state.clone()),
                ..self.handle
            },
        };
        copy.show_shard();
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

    /// # Panics
    ///
    /// On a copy of a part of a sharded module.
    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        assert!(
            !self.is_borrowed,
            "a clone of a part of a sharded module shares its parameters with the module and cannot \
             be changed by itself; clone the whole `FsdpModule`"
        );
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
                is_borrowed: false,
            };
        }
        state.release_shard(*unit, *member);
        let id = self.shard.id();
        let mapped = Self {
            shard: self.shard.map(mapper),
            handle: self.handle.clone(),
            is_alias: false,
            is_borrowed: false,
        };
        if mapped.shard.id() != id {
            state.note_new_ids();
        }
        mapped.show_shard();
        mapped
    }
}

impl Reparameterization for ShardedParam {
    const NAME: &'static str = SHARD_NAME;

    fn apply<const D: usize>(&self, placeholder: Tensor<D>) -> Tensor<D> {
        if BARE.get() {
            return placeholder;
        }
        unshard(self.shard.value::<D>(), self.handle.clone())
    }
}

/// Strips a sharded module of its shards: what is left are placeholders.
pub(crate) fn strip<M: Module>(module: M) -> M {
    BARE.set(true);
    let module = module.materialize();
    BARE.set(false);
    module
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
    /// Whether parameters show their placeholders.
    static BARE: Cell<bool> = const { Cell::new(false) };
    static COPYING: RefCell<Option<(Arc<FsdpState>, Arc<FsdpState>)>> = const { RefCell::new(None) };
}

impl CopyScope {
    pub(crate) fn enter(original: &Arc<FsdpState>, copy: &Arc<FsdpState>) -> Self {
        COPYING.set(Some((original.clone(), copy.clone())));
        Self
    }

    /// The state of the copy being made, if one of `state`'s module is.
    fn state_for(state: &Arc<FsdpState>) -> Option<Arc<FsdpState>> {
        COPYING.with_borrow(|copying| match copying {
            Some((original, copy)) if Arc::ptr_eq(original, state) => Some(copy.clone()),
            _ => None,
        })
    }
}

impl Drop for CopyScope {
    fn drop(&mut self) {
        COPYING.set(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn staying_on_the_device_is_no_move() {
        refuse_move(&Device::flex(), &Device::flex().autodiff());
    }
}
