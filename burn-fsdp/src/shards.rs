//! What one rank holds of a module, in the coordinates of the whole: the ground that checkpoints
//! stand on.
//!
//! A shard is stored padded; here it is without padding. Coordinates are those of the tensor in memory,
//! not of Burn's records: a `Linear` with column layout has the same shape there as any other, and is
//! recorded transposed.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Bool, Bytes, DType, Int, Tensor, TensorData};

use crate::path::{PathStack, follow_path};
use crate::plan::ShardingPlan;
use crate::{FsdpModule, Placement};

/// One rank's tensors by path.
pub type ShardedStateDict = BTreeMap<String, ShardedTensor>;

/// What one rank holds of a tensor, without padding.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ShardedTensor {
    /// Where the local part belongs in the whole tensor.
    pub spec: ShardSpec,
    /// The local part; it may be empty.
    pub data: TensorData,
}

/// Which part of a tensor one rank holds.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ShardSpec {
    /// The parameter's id in this process, equal under all names of a tied parameter.
    pub id: ParamId,
    /// The dtype in which it is stored.
    pub dtype: DType,
    /// The type of the module that owns it, such as `Linear`.
    pub owner: String,
    /// The shape of the whole tensor.
    pub global_shape: Vec<usize>,
    /// How it is placed over the shard dimension of the mesh.
    pub placement: Placement,
    /// Where the local part begins in the whole tensor.
    pub offsets: Vec<usize>,
    /// The shape of the local part.
    pub sizes: Vec<usize>,
    /// Whether each rank has a value of its own, made from its batches: a running statistic.
    pub is_buffer: bool,
    stored_shape: Vec<usize>,
}

impl ShardSpec {
    /// The shape of the tensor as it is stored, padding included.
    pub fn stored_shape(&self) -> &[usize] {
        &self.stored_shape
    }

    /// The local part of a stored tensor, without padding. Also for what an optimizer keeps in the
    /// parameter's shape.
    ///
    /// # Panics
    ///
    /// If `stored` is not of [`stored_shape`](Self::stored_shape).
    pub fn to_local(&self, stored: TensorData) -> TensorData {
        assert_eq!(stored.shape().to_vec(), self.stored_shape, "stored shape");
        resize(stored, &self.sizes)
    }

    /// The reverse of [`to_local`](Self::to_local); padding is zero.
    ///
    /// # Panics
    ///
    /// If `local` is not of the shape [`sizes`](Self::sizes).
    pub fn to_stored(&self, local: TensorData) -> TensorData {
        assert_eq!(local.shape().to_vec(), self.sizes, "local shape");
        resize(local, &self.stored_shape)
    }
}

impl<M: Module> FsdpModule<M> {
    /// Which part this rank holds of each tensor: parameters under all their names, ignored ones,
    /// running statistics, integers and booleans. Does not communicate.
    pub fn shard_specs(&self) -> BTreeMap<String, ShardSpec> {
        let mut describe = Describe {
            sharded: Some((self.plan(), self.mesh().shard_rank())),
            ..Describe::default()
        };
        // The placeholders, which have the shapes of the whole.
        self.inner().visit(&mut describe);
        // The shards, for what only they know.
        let mut stored = Stored::default();
        self.visit(&mut stored);
        for (path, (id, dtype)) in stored.kinds {
            if let Some(spec) = describe.specs.get_mut(&path) {
                (spec.id, spec.dtype) = (id, dtype);
            }
        }
        describe.specs
    }

    /// What this rank holds of the model. Does not communicate.
    pub fn sharded_state_dict(&self) -> ShardedStateDict {
        let mut stored = Stored {
            wants_values: true,
            ..Stored::default()
        };
        self.visit(&mut stored);
        let specs = self.shard_specs().into_iter();
        let tensor = |(path, spec): (String, ShardSpec)| {
            let data = spec.to_local(stored.values.remove(&path)?);
            Some((path, ShardedTensor { spec, data }))
        };
        specs.filter_map(tensor).collect()
    }
}

/// The specs of a module that is not sharded: every tensor is whole.
pub fn dense_specs<M: Module>(module: &M) -> BTreeMap<String, ShardSpec> {
    let mut describe = Describe::default();
    module.visit(&mut describe);
    describe.specs
}

/// Collects the specs of a module's tensors from the outside, that is, of placeholders.
#[derive(Default)]
struct Describe<'a> {
    /// The plan and this rank's number among those of the shard dimension.
    sharded: Option<(&'a ShardingPlan, usize)>,
    path: PathStack,
    owners: Vec<String>,
    specs: BTreeMap<String, ShardSpec>,
}

impl Describe<'_> {
    fn insert(&mut self, id: ParamId, dtype: DType, shape: Vec<usize>) {
        let path = self.path.join();
        let member = self.sharded.and_then(|(plan, rank)| {
            let index = plan.find(&path)?;
            let layout = plan.layout(index.unit, index.member);
            let placement = plan.param(index.unit, index.member).placement;
            Some((placement, layout.local_box(rank), layout.shard_shape()))
        });
        let whole = || {
            let offsets = vec![0; shape.len()];
            let placement = Placement::Replicate;
            (placement, (offsets, shape.clone()), shape.clone())
        };
        let (placement, (offsets, sizes), stored_shape) = member.unwrap_or_else(whole);
        let is_buffer = self.sharded.is_some_and(|(plan, _)| plan.is_buffer(&path));
        self.specs.insert(
            path,
            ShardSpec {
                id,
                dtype,
                owner: self.owners.last().cloned().unwrap_or_default(),
                global_shape: shape,
                placement,
                offsets,
                sizes,
                is_buffer,
                stored_shape,
            },
        );
    }
}

impl ModuleVisitor for Describe<'_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        if self.path.enter(name, container) {
            let owner = container
                .split_once(':')
                .map_or(container, |(_, name)| name);
            self.owners.push(owner.to_string());
        }
    }

    fn exit_module(&mut self, name: &str, container: &str) {
        if self.path.exit(name, container) {
            self.owners.pop();
        }
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.path.is_inside_shard() {
            return;
        }
        // A lazy parameter is not made for this; its dtype is that of its device.
        let dtype = if param.is_initialized() {
            param.dtype()
        } else {
            param.lazy_device().settings().float_dtype.into()
        };
        self.insert(param.id, dtype, param.lazy_shape().to_vec());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let dtype = param.val().dtype();
        self.insert(param.id, dtype, param.lazy_shape().to_vec());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        let dtype = param.val().dtype();
        self.insert(param.id, dtype, param.lazy_shape().to_vec());
    }
}

/// Collects ids and dtypes of what is stored, and the values if wanted.
#[derive(Default)]
struct Stored {
    wants_values: bool,
    path: PathStack,
    kinds: BTreeMap<String, (ParamId, DType)>,
    values: BTreeMap<String, TensorData>,
}

impl Stored {
    fn insert(&mut self, id: ParamId, dtype: DType, value: impl FnOnce() -> TensorData) {
        let path = self.path.join();
        if self.wants_values {
            self.values.insert(path.clone(), value());
        }
        self.kinds.insert(path, (id, dtype));
    }
}

impl ModuleVisitor for Stored {
    follow_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.val();
        self.insert(param.id, tensor.dtype(), || tensor.into_data());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let tensor = param.val();
        self.insert(param.id, tensor.dtype(), || tensor.into_data());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        let tensor = param.val();
        self.insert(param.id, tensor.dtype(), || tensor.into_data());
    }
}

/// Cuts the tensor to `shape` at the end of each dimension, or fills it up with zeros.
fn resize(data: TensorData, shape: &[usize]) -> TensorData {
    if data.shape().to_vec() == shape {
        return data;
    }
    let (bytes, old, dtype) = data.into_parts();
    let size = dtype.size();
    let mut out = vec![0; shape.iter().product::<usize>() * size];
    let common: Vec<usize> = old.iter().zip(shape).map(|(a, b)| *a.min(b)).collect();
    if !common.contains(&0)
        && let Some((&run, outer)) = common.split_last()
    {
        let mut index = vec![0; outer.len()];
        loop {
            let place = |shape: &[usize]| {
                let row = index.iter().zip(shape).fold(0, |at, (i, n)| at * n + i);
                row * shape[shape.len() - 1] * size
            };
            let (from, to) = (place(&old), place(shape));
            out[to..to + run * size].copy_from_slice(&bytes[from..from + run * size]);
            // The next row, the last dimension first.
            let Some(dim) = (0..outer.len()).rev().find(|&d| index[d] + 1 < outer[d]) else {
                break;
            };
            index[dim] += 1;
            index[dim + 1..].fill(0);
        }
    }
    TensorData::from_bytes(Bytes::from_bytes_vec(out), shape.to_vec(), dtype)
}
