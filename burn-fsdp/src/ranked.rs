//! A `Param` of any rank, for what must hold parameters of all ranks.

use std::any::Any;

use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;

macro_rules! ranked_param {
    ($($variant:ident = $rank:literal),+) => {
        /// A `Param` of any rank.
        #[derive(Clone, Debug)]
        pub(crate) enum RankedParam {
            $($variant(Param<Tensor<$rank>>)),+
        }

        impl RankedParam {
            pub(crate) fn new<const D: usize>(param: Param<Tensor<D>>) -> Self {
                let param: Box<dyn Any> = Box::new(param);
                match D {
                    $($rank => Self::$variant(
                        *param.downcast().expect("D is the rank of the parameter"),
                    ),)+
                    rank => panic!("Burn has no parameters of rank {rank}"),
                }
            }

            pub(crate) fn value<const D: usize>(&self) -> Tensor<D> {
                let value: Box<dyn Any> = match self {
                    $(Self::$variant(param) => Box::new(param.val())),+
                };
                *value.downcast().expect("a parameter keeps its rank")
            }
        }
    };
}

ranked_param!(
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
    pub(crate) fn id(&self) -> ParamId {
        with_param!(self, param => param.id)
    }

    /// The value without autodiff, flat, and whether it is trained.
    pub(crate) fn flat(&self) -> (Tensor<1>, bool) {
        with_param!(self, param => {
            let value = param.val();
            let trainable = value.is_require_grad();
            let len = value.shape().num_elements();
            (value.inner().reshape([len]), trainable)
        })
    }

    pub(crate) fn collect_devices(&self, devices: Devices) -> Devices {
        with_param!(self, param => param.collect_devices(devices))
    }

    pub(crate) fn valid(&self) -> Self {
        with_param!(self, param => Self::new(param.valid()))
    }

    pub(crate) fn train(self) -> Self {
        with_param!(self, param => Self::new(Module::train(param)))
    }

    pub(crate) fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        with_param!(self, param => Module::visit(param, visitor))
    }

    pub(crate) fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        with_param!(self, param => Self::new(Module::map(param, mapper)))
    }
}
