//! What a module is made of, found by traversing it.

use std::collections::{HashMap, HashSet};

use burn::module::{
    Module, ModuleMapper, ModuleVisitor, Param, ParamId, Reparameterization, Reparameterizer,
};
use burn::tensor::{DType, Device, Shape, Tensor};

use crate::config::ModuleNode;
use crate::path::{PathStack, follow_path};
use crate::{FsdpError, Result};

/// A module seen as paths.
#[derive(Debug, Default)]
pub(crate) struct ModuleTree {
    pub(crate) nodes: Vec<ModuleNode>,
    pub(crate) params: Vec<FoundParam>,
}

#[derive(Debug)]
pub(crate) struct FoundParam {
    pub(crate) path: String,
    pub(crate) id: ParamId,
    pub(crate) shape: Vec<usize>,
    pub(crate) owner: String,
    /// Whether this is a `Param`, not a running statistic that poses as one.
    pub(crate) is_parameter: bool,
}

impl ModuleTree {
    pub(crate) fn of<M: Module>(module: &M) -> Result<Self> {
        let mut walk = Walk::default();
        module.visit(&mut walk);
        if let Some(path) = walk.reparameterized.into_iter().next() {
            return Err(FsdpError::AlreadyReparameterized { path });
        }
        // A running statistic drops a reparameterization; a parameter keeps it.
        let mut probed = Walk::default();
        module
            .clone()
            .apply_reparameterization(AttachProbe)
            .visit(&mut probed);
        let mut tree = walk.tree;
        for param in &mut tree.params {
            param.is_parameter = probed.reparameterized.contains(&param.path);
        }
        Ok(tree)
    }

    pub(crate) fn param_paths(&self) -> impl Iterator<Item = &str> + Clone {
        self.params.iter().map(|param| param.path.as_str())
    }
}

/// Collects the nodes and parameters of a module, in traversal order.
#[derive(Default)]
struct Walk {
    tree: ModuleTree,
    stack: Vec<usize>,
    reparameterized: HashSet<String>,
}

const REPARAMETERIZATION: &str = "Reparameterization";

impl ModuleVisitor for Walk {
    fn enter_module(&mut self, name: &str, container: &str) {
        let parent = self.stack.last().map(|&i| &mut self.tree.nodes[i]);
        if container == REPARAMETERIZATION {
            self.reparameterized
                .extend(parent.as_ref().map(|node| node.path.clone()));
        }
        // The container is what holds the name, so it tells the type of the parent.
        let path = match parent {
            Some(parent) => {
                if let Some((_, type_name)) = container.split_once(':') {
                    parent.type_name = type_name.to_string();
                }
                format!("{}.{name}", parent.path)
            }
            None => name.to_string(),
        };
        self.stack.push(self.tree.nodes.len());
        self.tree.nodes.push(ModuleNode {
            path,
            type_name: String::new(),
            is_element: matches!(container, "Vec" | "Array"),
        });
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.stack.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = |i: &usize| self.tree.nodes[*i].path.clone();
        let parent = self.stack.iter().rev().nth(1);
        self.tree.params.push(FoundParam {
            path: self.stack.last().map(path).unwrap_or_default(),
            id: param.id,
            shape: true_shape(param),
            owner: parent
                .map(|&i| self.tree.nodes[i].type_name.clone())
                .unwrap_or_default(),
            is_parameter: false,
        });
    }
}

/// The shape of the value that `param` has, or will have once it is initialised.
///
/// A parameter that is not initialised declares the shape in which it is recorded. A column-layout
/// `Linear` turns that around, and its load mapper shows how.
fn true_shape<const D: usize>(param: &Param<Tensor<D>>) -> Vec<usize> {
    if param.is_initialized() || D == 0 {
        return param.lazy_shape().to_vec();
    }
    let declared = placeholder_value::<D>(&param.lazy_shape(), &param.lazy_device(), DType::F32);
    let loaded = param.clone().transform_for_load(declared, param.id);
    loaded.shape().to_vec()
}

/// A tensor of this shape that holds one NaN.
pub(crate) fn placeholder_value<const D: usize>(
    shape: &Shape,
    device: &Device,
    dtype: DType,
) -> Tensor<D> {
    if shape.num_elements() == 0 {
        return Tensor::zeros(shape.clone(), (device, dtype));
    }
    Tensor::<D>::full([1; D], f32::NAN, (device, dtype)).expand(shape.clone())
}

/// Parameters that have the id of an earlier one and are not tied to it: a clone that was frozen, or
/// given other values. Of parameters that are not initialised yet this cannot be told; they are
/// taken for tied, and checked once they are.
#[derive(Debug, Default)]
pub(crate) struct Untied {
    /// Their paths.
    pub(crate) paths: Vec<String>,
    /// The first two that are both trained: their gradients would be one in Burn.
    pub(crate) conflict: Option<(String, String)>,
}

impl Untied {
    pub(crate) fn of<M: Module>(module: &M) -> Self {
        let mut find = FindUntied::default();
        module.visit(&mut find);
        find.untied
    }
}

#[derive(Default)]
struct FindUntied {
    path: PathStack,
    first: HashMap<ParamId, (String, Tied)>,
    untied: Untied,
}

/// What parameters that are tied have in common.
#[derive(Clone, Debug)]
pub(crate) struct Tied {
    shape: Vec<usize>,
    flat: Tensor<1>,
    trained: bool,
}

impl Tied {
    pub(crate) fn of<const D: usize>(param: &Param<Tensor<D>>) -> Self {
        let value = param.val();
        let shape = value.shape();
        Self {
            trained: value.is_require_grad(),
            flat: value.inner().reshape([shape.num_elements()]),
            shape: shape.to_vec(),
        }
    }

    pub(crate) fn is_tied_to(&self, other: &Self) -> bool {
        self.shape == other.shape
            && self.trained == other.trained
            && self.flat.dtype() == other.flat.dtype()
            && self.flat.to_data() == other.flat.to_data()
    }
}

impl ModuleVisitor for FindUntied {
    follow_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !param.is_initialized() || D == 0 {
            return;
        }
        let (path, tied) = (self.path.join(), Tied::of(param));
        let Some((first_path, first)) = self.first.get(&param.id) else {
            self.first.insert(param.id, (path, tied));
            return;
        };
        if !first.is_tied_to(&tied) {
            if first.trained && tied.trained && self.untied.conflict.is_none() {
                self.untied.conflict = Some((first_path.clone(), path.clone()));
            }
            self.untied.paths.push(path);
        }
    }
}

/// A reparameterization that does nothing, to see who keeps it.
#[derive(Clone, Debug)]
struct Probe;

impl Module for Probe {
    fn collect_devices(&self, devices: burn::module::Devices) -> burn::module::Devices {
        devices
    }
    fn fork(self, _device: &burn::tensor::Device) -> Self {
        self
    }
    fn to_device(self, _device: &burn::tensor::Device) -> Self {
        self
    }
    fn train(self) -> Self {
        self
    }
    fn valid(&self) -> Self {
        Self
    }
    fn materialize(self) -> Self {
        self
    }
    fn visit<V: ModuleVisitor>(&self, _visitor: &mut V) {}
    fn map<P: ModuleMapper>(self, _mapper: &mut P) -> Self {
        self
    }
}

impl Reparameterization for Probe {
    const NAME: &'static str = "probe";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        base
    }
}

struct AttachProbe;

impl Reparameterizer for AttachProbe {
    type Reparam = Probe;

    fn reparameterize<const D: usize>(
        &mut self,
        _path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Probe>) {
        (param, Some(Probe))
    }
}
