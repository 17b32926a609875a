//! The entry: from a module of whole parameters to one of shards.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use burn::module::{Module, Param, Reparameterizer};
use burn::tensor::{DType, Device, Shape, Tensor};

use crate::board::{AfterForward, Context, MemberSpec, UnitSpec};
use crate::buffers::broadcast_buffers;
use crate::comm::{Call, ProcessGroup, host};
use crate::config::{OffloadPolicy, ReshardAfterForward};
use crate::full::{lift, scatter};
use crate::mesh::DeviceMesh;
use crate::module::FsdpModule;
use crate::param::ShardedParam;
use crate::placement::{Placement, ShardLayout};
use crate::plan::{MemberIndex, ParamPlan, ROOT, ShardingPlan};
use crate::state::FsdpState;
use crate::tree::{Tied, Untied, placeholder_value};
use crate::unshard::MemberHandle;
use crate::{FsdpConfig, FsdpError, Result};

/// Fully sharded data parallelism for any [`Module`].
pub trait FullyShard: Module {
    /// Splits the module's parameters over the ranks of `mesh`, so that each keeps its shard of
    /// parameters, gradients and optimizer state.
    ///
    /// Parameters are grouped into units ([`FsdpConfig::with_units`]); in forward and backward a
    /// unit's parameters are gathered together when the first of them is used, and let go when the
    /// next unit is. The module's own code does not change: it works if it reads weights through
    /// `Param::val()`, which is what Burn's layers do. Call it through the returned
    /// [`FsdpModule`], which dereferences to it.
    ///
    /// Rank 0's values are taken: it initialises one parameter at a time, in traversal order, and
    /// scatters it; other ranks never hold a parameter that they have not initialised already.
    /// With the same seed the weights equal those of an unsharded module initialised in traversal
    /// order. Buffers (running statistics, integer and boolean parameters) are broadcast and stay
    /// whole on each rank; so do parameters without elements or dimensions, which are reduced like
    /// any other.
    ///
    /// All ranks must call this with equal modules and settings, in the same order.
    ///
    /// # Errors
    ///
    /// On every rank: a module without parameters, one that has reparameterizations, tied
    /// parameters in two units, mixed dtypes in a unit, a pattern that matches nothing, a placement
    /// or a group size that does not fit, ranks that disagree, or a failure of the group.
    ///
    /// # Example
    ///
    /// ```
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::tensor::{Device, Tensor};
    /// use burn_fsdp::{DeviceMesh, FsdpConfig, FullyShard, launch};
    ///
    /// launch(2, |pg| {
    ///     let device = Device::flex().autodiff();
    ///     let linear: Linear = LinearConfig::new(6, 4).init(&device);
    ///     let model = linear.fully_shard(&DeviceMesh::shard(&pg), &FsdpConfig::new())?;
    ///     assert_eq!(model.weight.dims(), [6, 4]);
    ///     assert_eq!(model.memory().shard_bytes, (3 * 4 + 2) * 4);
    ///
    ///     let loss = model.forward(Tensor::<2>::ones([1, 6], &device)).sum();
    ///     let grads = model.backward(loss);
    ///     assert_eq!(grads.get::<2>(model.weight.id).unwrap().dims(), [3, 4]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), burn_fsdp::FsdpError>(())
    /// ```
    fn fully_shard(self, mesh: &DeviceMesh, config: &FsdpConfig) -> Result<FsdpModule<Self>>;
}

impl<M: Module> FullyShard for M {
    fn fully_shard(self, mesh: &DeviceMesh, config: &FsdpConfig) -> Result<FsdpModule<Self>> {
        config.check()?;
        let group = mesh.group();
        let untied = broadcast_untied(&self, group)?;
        let plan = ShardingPlan::new(&self, config, mesh.shard_size(), &untied)?;
        let plan = Arc::new(plan);
        group.agree("the structure of the module", &plan.description())?;
        group.agree("the FSDP settings", &config.description())?;

        let device = device_of(&self)?.inner();
        let specs = unit_specs(&plan, mesh, config)?;
        let shard_device = match config.offload {
            OffloadPolicy::None => device.clone(),
            OffloadPolicy::Cpu => Device::flex(),
        };
        let context = Context {
            module: group.next_module(),
            mesh: mesh.clone(),
            average: config.average,
            compute_device: device,
            shard_device,
            memory: Default::default(),
            counters: Default::default(),
        };
        let state = FsdpState::new(plan.clone(), context, specs, !config.no_prefetch);

        let module = broadcast_buffers(self, &plan, group)?;
        let mut outcome = Outcome::default();
        let module = module.apply_reparameterization(Sharder {
            plan: &plan,
            state: &state,
            group,
            outcome: &mut outcome,
            tied: HashMap::new(),
        });
        if let Some(error) = outcome.error {
            return Err(error);
        }
        check_dtypes(&plan, &outcome.dtypes)?;
        // Copies of a module share their running statistics, and ranks may have copied one module.
        // Putting it in training mode parts them, and changes nothing else in a module that trains.
        let module = if outcome.is_autodiff {
            Module::train(module)
        } else {
            module
        };
        Ok(FsdpModule::new(module, state, config.clone()))
    }
}

/// What rank 0 finds, as its values are taken.
fn broadcast_untied<M: Module>(module: &M, group: &ProcessGroup) -> Result<HashSet<String>> {
    let own = match group.rank() {
        0 => Untied::of(module),
        _ => Untied::default(),
    };
    let conflict = own.conflict.map(|(a, b)| format!("{a}\n{b}"));
    let conflict = group.broadcast_bytes(0, conflict.unwrap_or_default().into_bytes())?;
    if let Some((a, b)) = String::from_utf8_lossy(&conflict).split_once('\n') {
        return Err(FsdpError::argument(format!(
            "\"{a}\" and \"{b}\" have one parameter id, other values, and are both trained; Burn's \
             gradients and optimizers go by the id, so build one of them by itself or freeze it"
        )));
    }
    let paths = group.broadcast_bytes(0, own.paths.join("\n").into_bytes())?;
    let paths = String::from_utf8_lossy(&paths);
    Ok(paths.lines().map(str::to_string).collect())
}

fn device_of<M: Module>(module: &M) -> Result<Device> {
    let devices = module.devices();
    let [device] = devices.as_slice() else {
        return Err(FsdpError::argument(format!(
            "a sharded module lives on one device of each rank; this one is on {devices:?}"
        )));
    };
    Ok(device.clone())
}

fn unit_specs(
    plan: &ShardingPlan,
    mesh: &DeviceMesh,
    config: &FsdpConfig,
) -> Result<Vec<Arc<UnitSpec>>> {
    let mut subgroups = HashMap::new();
    let units = plan.units().iter().enumerate();
    units
        .map(|(i, unit)| {
            let precision = unit
                .config
                .mixed_precision
                .unwrap_or(config.mixed_precision);
            let float = |dtype: Option<DType>| match dtype {
                Some(dtype) if !host::is_supported(dtype) => Err(FsdpError::argument(format!(
                    "{dtype:?} is no dtype for mixed precision; use f32, f64, f16 or bf16"
                ))),
                dtype => Ok(dtype),
            };
            let policy = unit.config.reshard_after_forward;
            let policy = policy.unwrap_or(config.reshard_after_forward);
            let member = |param: &ParamPlan| MemberSpec {
                path: param.path.clone(),
                layout: param.layout(plan.shard_size()),
            };
            Ok(Arc::new(UnitSpec {
                name: unit.name.as_str().into(),
                members: unit.params.iter().map(member).collect(),
                after_forward: after_forward(policy, i == ROOT, mesh, &mut subgroups)?,
                param_dtype: float(precision.param_dtype)?,
                reduce_dtype: float(precision.reduce_dtype)?,
            }))
        })
        .collect()
}

fn after_forward(
    policy: ReshardAfterForward,
    is_root: bool,
    mesh: &DeviceMesh,
    subgroups: &mut HashMap<usize, ProcessGroup>,
) -> Result<AfterForward> {
    let shard_size = mesh.shard_size();
    match policy {
        ReshardAfterForward::Auto if is_root => Ok(AfterForward::Keep),
        ReshardAfterForward::Never | ReshardAfterForward::Groups(1) => Ok(AfterForward::Keep),
        ReshardAfterForward::Auto | ReshardAfterForward::Always => Ok(AfterForward::Free),
        ReshardAfterForward::Groups(size) if size == shard_size => Ok(AfterForward::Free),
        ReshardAfterForward::Groups(size) if !shard_size.is_multiple_of(size) => {
            Err(FsdpError::InvalidReshardGroup {
                group: size,
                shard_size,
            })
        }
        ReshardAfterForward::Groups(size) => {
            if let Some(group) = subgroups.get(&size) {
                return Ok(AfterForward::Regroup(group.clone()));
            }
            let group = mesh.shard_group().split(mesh.shard_rank() / size)?;
            subgroups.insert(size, group.clone());
            Ok(AfterForward::Regroup(group))
        }
    }
}

/// Trainable parameters of a unit must share a dtype, as they share a reduction.
fn check_dtypes(plan: &ShardingPlan, dtypes: &HashMap<String, DType>) -> Result<()> {
    for unit in plan.units() {
        let mut found: Vec<(String, DType)> = Vec::new();
        for param in &unit.params {
            if let Some(&dtype) = dtypes.get(&param.path)
                && found.iter().all(|(_, other)| *other != dtype)
            {
                found.push((param.path.clone(), dtype));
            }
        }
        if found.len() > 1 {
            return Err(FsdpError::MixedDtypes {
                unit: unit.name.clone(),
                params: found,
            });
        }
    }
    Ok(())
}

#[derive(Default)]
struct Outcome {
    error: Option<FsdpError>,
    /// Dtypes of trainable parameters, by path.
    dtypes: HashMap<String, DType>,
    is_autodiff: bool,
}

/// Replaces each planned parameter by a placeholder with its shard behind it.
struct Sharder<'a> {
    plan: &'a ShardingPlan,
    state: &'a Arc<FsdpState>,
    group: &'a ProcessGroup,
    outcome: &'a mut Outcome,
    /// On rank 0: tied parameters met so far.
    tied: HashMap<(usize, usize), Tied>,
}

impl Reparameterizer for Sharder<'_> {
    type Reparam = ShardedParam;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<ShardedParam>) {
        if self.outcome.error.is_some() {
            return (param, None);
        }
        let placed = match (self.plan.find(path), self.plan.ignored(path)) {
            (Some(index), _) => self.shard(path, index, param.clone()),
            (None, Some(shape)) => self.leave_whole(path, shape, param.clone()),
            (None, None) => return (param, None),
        };
        placed.unwrap_or_else(|error| {
            self.outcome.error = Some(error);
            (param, None)
        })
    }
}

impl Sharder<'_> {
    fn shard<const D: usize>(
        &mut self,
        path: &str,
        index: MemberIndex,
        param: Param<Tensor<D>>,
    ) -> Result<(Param<Tensor<D>>, Option<ShardedParam>)> {
        let handle = MemberHandle {
            state: self.state.clone(),
            unit: index.unit,
            member: index.member,
        };
        let plan = self.plan.param(index.unit, index.member);
        if index.is_alias {
            self.check_tied(path, index, &param)?;
            let tied = self.state.tied(index.unit, index.member);
            let tied = tied.expect("the first name of a tied parameter comes first");
            let dtype = self.state.shard(index.unit, index.member)?.dtype();
            let sharded = ShardedParam::alias(tied, handle);
            return Ok((placeholder(param, &plan.shape, dtype), Some(sharded)));
        }
        let layout = self.plan.layout(index.unit, index.member);
        let (flat, trainable) = self.scatter(path, &layout, &param)?;
        if self.plan.is_tied(index.unit, index.member) && self.group.rank() == 0 {
            self.tied
                .insert((index.unit, index.member), Tied::of(&param));
        }
        let dtype = flat.dtype();
        if trainable {
            self.outcome.dtypes.insert(path.to_string(), dtype);
        }
        let device = param.lazy_device();
        self.outcome.is_autodiff |= device.is_autodiff();
        let flat = flat.to_device(&self.state.context.shard_device);
        let shard = lift(
            flat.reshape::<D, _>(Shape::from(layout.shard_shape())),
            &device,
        );
        let shard = Param::initialized(param.id, shard).set_require_grad(trainable);
        let sharded = ShardedParam::new(shard, handle);
        Ok((placeholder(param, &plan.shape, dtype), Some(sharded)))
    }

    /// Checks that rank 0's value under a further name is that under the first.
    fn check_tied<const D: usize>(
        &self,
        path: &str,
        index: MemberIndex,
        param: &Param<Tensor<D>>,
    ) -> Result<()> {
        let first = self.tied.get(&(index.unit, index.member));
        let is_tied = first.is_none_or(|first| first.is_tied_to(&Tied::of(param)));
        if self.group.broadcast_bytes(0, vec![is_tied.into()])? == [1] {
            return Ok(());
        }
        let first = &self.plan.param(index.unit, index.member).path;
        Err(FsdpError::argument(format!(
            "\"{first}\" and \"{path}\" have one parameter id but are not tied: one is frozen or has \
             other values. Initialise the module (read each `val()`) before it is cloned, and they \
             are taken for two"
        )))
    }

    /// An ignored parameter with rank 0's value, in a graph of its own: ranks may have copied one
    /// module, and their backwards would wait for each other in a graph that they share.
    fn leave_whole<const D: usize>(
        &self,
        path: &str,
        shape: &[usize],
        param: Param<Tensor<D>>,
    ) -> Result<(Param<Tensor<D>>, Option<ShardedParam>)> {
        let sends = self.group.rank() != 0 || host::is_supported(param.val().dtype());
        if self.group.broadcast_bytes(0, vec![sends.into()])? == [0] {
            // Quantized, say.
            return Ok((param, None));
        }
        let shard_size = self.plan.shard_size();
        let layout = ShardLayout::new(shape, Placement::Replicate, shard_size);
        let (flat, trainable) = self.scatter(path, &layout, &param)?;
        let device = param.lazy_device();
        let flat = flat.to_device(&device);
        let dtype = flat.dtype();
        let whole = lift(flat.reshape::<D, _>(Shape::from(shape.to_vec())), &device);
        let param = placeholder(param, shape, dtype)
            .map(|_| whole)
            .set_require_grad(trainable);
        Ok((param, None))
    }

    /// This rank's shard of rank 0's parameter, flat, and whether it is trained.
    fn scatter<const D: usize>(
        &self,
        path: &str,
        layout: &ShardLayout,
        param: &Param<Tensor<D>>,
    ) -> Result<(Tensor<1>, bool)> {
        let is_source = self.group.rank() == 0;
        let source = is_source.then(|| {
            let value = param.val();
            // Training mode shows whether the parameter is trained even where there is no autodiff.
            let trained = Module::train(param.clone()).is_require_grad();
            let len = value.shape().num_elements();
            (value.inner().reshape([len]), trained)
        });
        if let Some((value, _)) = &source
            && !host::is_supported(value.dtype())
        {
            return Err(FsdpError::argument(format!(
                "parameter \"{path}\" is {:?}; only f32, f64, f16 and bf16 can be sharded",
                value.dtype()
            )));
        }
        let trained = source.as_ref().map_or(0, |(_, trained)| u8::from(*trained));
        let trained = self.group.broadcast_bytes(0, vec![trained])?[0] == 1;
        let call = Call::new("scatter", format!("parameter \"{path}\""));
        let value = source.map(|(value, _)| value);
        let device = param.lazy_device().inner();
        let shard = scatter(&self.state.context.mesh, call, layout, value, &device)?;
        Ok((shard, trained))
    }
}

/// A parameter of the full shape that holds one NaN, frozen, with the original's id and mappers.
/// A parameter that was not initialised is not initialised by this.
fn placeholder<const D: usize>(
    param: Param<Tensor<D>>,
    shape: &[usize],
    dtype: DType,
) -> Param<Tensor<D>> {
    let (id, device) = (param.id, param.lazy_device());
    let nan = |shape: Shape| placeholder_value(&shape, &device, dtype);
    // Loading is the one way to give a parameter a value without initialising it first. Its mapper
    // may change the shape, so the value is set once more.
    let declared = param.lazy_shape();
    param
        .transform_for_load(nan(declared), id)
        .map(|_| nan(Shape::from(shape.to_vec())))
        .set_require_grad(false)
}
