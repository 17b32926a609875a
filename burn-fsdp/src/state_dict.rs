//! Full state dicts: whole tensors by path.
//!
//! Names are parameter paths. Full tensors are laid out as Burn records them, that is, after a
//! parameter's save mapper (a column-layout `Linear` stores its weight transposed in memory).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};

use crate::buffers::{broadcast_data, with_value};
use crate::comm::Call;
use crate::full::{gather, lift, scatter};
use crate::path::{PathStack, follow_path};
use crate::plan::MemberIndex;
use crate::state::FsdpState;
use crate::{FsdpError, FsdpModule, Result};

/// Whole tensors by path: floating, integer and boolean parameters, and running statistics.
pub type StateDict = BTreeMap<String, TensorData>;

/// Who gets a full state dict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateDictTarget {
    /// Rank 0; the others get an empty one.
    RankZero,
    /// Every rank.
    AllRanks,
}

/// What to do with a full state dict that does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadMode {
    /// Refuse it before anything is loaded.
    Strict,
    /// Load what fits and report the rest.
    Partial,
}

/// What became of each name when a full state dict was loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadReport {
    /// Loaded.
    pub loaded: Vec<String>,
    /// In the model only.
    pub missing: Vec<String>,
    /// In the state dict only.
    pub unexpected: Vec<String>,
    /// Of another shape or dtype: the name, what the model has, what the state dict has.
    pub mismatched: Vec<(String, String, String)>,
}

impl LoadReport {
    /// Whether the state dict and the model have the same names, shapes and dtypes.
    pub fn is_exact(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty() && self.mismatched.is_empty()
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} loaded", self.loaded.len())?;
        if !self.missing.is_empty() {
            write!(f, "; missing: {}", self.missing.join(", "))?;
        }
        if !self.unexpected.is_empty() {
            write!(f, "; unexpected: {}", self.unexpected.join(", "))?;
        }
        for (name, expected, got) in &self.mismatched {
            write!(
                f,
                "; {name}: the model has {expected}, the state dict {got}"
            )?;
        }
        Ok(())
    }
}

impl<M: Module> FsdpModule<M> {
    /// The whole model, gathered one parameter at a time.
    ///
    /// All ranks must call this, in the same order. Beside the result a rank holds one full
    /// parameter at a time.
    ///
    /// # Errors
    ///
    /// A failure of the group.
    pub fn full_state_dict(&self, target: StateDictTarget) -> Result<StateDict> {
        self.sync_running_statistics();
        let mut gather = GatherFull {
            state: &self.state,
            path: PathStack::default(),
            keeps: target == StateDictTarget::AllRanks || self.mesh().group().rank() == 0,
            dict: Ok(StateDict::new()),
        };
        self.inner().visit(&mut gather);
        gather.dict
    }

    /// Loads rank 0's full state dict into the shards; what other ranks pass is ignored. Ids and
    /// what is trained stay as they are. A tied parameter may be there under any of its names.
    ///
    /// All ranks must call this, in the same order. Beside its state dict a rank holds one full
    /// parameter at a time.
    ///
    /// # Errors
    ///
    /// On every rank: [`FsdpError::StateDictMismatch`], listing all that does not fit, in
    /// [`LoadMode::Strict`]; a failure of the group. The model is gone then; keep a clone to go on
    /// with.
    pub fn load_full_state_dict(
        self,
        dict: StateDict,
        mode: LoadMode,
    ) -> Result<(Self, LoadReport)> {
        // What is pending must not come in later.
        self.sync_running_statistics();
        let is_source = self.mesh().group().rank() == 0;
        let mut dict = dict;
        if is_source {
            fill_in_tied(&self, &mut dict);
        }
        let offered = broadcast_kinds(&self, &dict)?;
        let report = compare(&self, &offered);
        if mode == LoadMode::Strict && !report.is_exact() {
            return Err(FsdpError::StateDictMismatch(Box::new(report)));
        }
        let state = self.state.clone();
        let mut load = LoadFull {
            state: &state,
            path: PathStack::default(),
            names: report.loaded.iter().cloned().collect(),
            dict: is_source.then_some(dict),
            shard: None,
            error: None,
        };
        let loaded = self.with_inner(|inner| inner.map(&mut load));
        load.error.map_or(Ok((loaded, report)), Err)
    }
}

/// The shape and dtype of a tensor as text, to compare and to show.
fn kind(shape: &[usize], dtype: DType) -> String {
    format!("{dtype:?} {shape:?}")
}

/// Offers a tied parameter under all of its names, if it is offered under any. Where the names have
/// different values, the first in traversal order has its way.
fn fill_in_tied<M>(model: &FsdpModule<M>, dict: &mut StateDict) {
    for names in model.plan().tied_names() {
        let offered = names.iter().find_map(|name| dict.get(name)).cloned();
        if let Some(value) = offered {
            for name in names {
                dict.insert(name, value.clone());
            }
        }
    }
}

/// Rank 0's names and kinds, on every rank.
fn broadcast_kinds<M>(model: &FsdpModule<M>, dict: &StateDict) -> Result<BTreeMap<String, String>> {
    let lines = dict
        .iter()
        .map(|(name, data)| format!("{name}\t{}", kind(data.shape(), data.dtype())));
    let text = lines.collect::<Vec<_>>().join("\n").into_bytes();
    let text = model.mesh().group().broadcast_bytes(0, text)?;
    let text = String::from_utf8_lossy(&text);
    let pairs = text.lines().filter_map(|line| line.split_once('\t'));
    Ok(pairs.map(|(n, k)| (n.to_string(), k.to_string())).collect())
}

fn compare<M: Module>(model: &FsdpModule<M>, offered: &BTreeMap<String, String>) -> LoadReport {
    let mut expected = CollectKinds {
        state: &model.state,
        path: PathStack::default(),
        kinds: BTreeMap::new(),
    };
    model.inner().visit(&mut expected);
    let expected = expected.kinds;

    let mut report = LoadReport::default();
    for (name, expected) in &expected {
        match offered.get(name) {
            None => report.missing.push(name.clone()),
            Some(offered) if offered == expected => report.loaded.push(name.clone()),
            Some(offered) => {
                let mismatch = (name.clone(), expected.clone(), offered.clone());
                report.mismatched.push(mismatch);
            }
        }
    }
    let unexpected = offered.keys().filter(|name| !expected.contains_key(*name));
    report.unexpected.extend(unexpected.cloned());
    report
}

/// The kinds of a model's tensors, as a state dict has them.
struct CollectKinds<'a> {
    state: &'a FsdpState,
    path: PathStack,
    kinds: BTreeMap<String, String>,
}

impl ModuleVisitor for CollectKinds<'_> {
    follow_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.path.is_inside_shard() {
            return;
        }
        // A placeholder has the shape and the save mapper of the parameter.
        let saved = param.transform_for_save();
        let path = self.path.join();
        let dtype = match self.state.plan.find(&path) {
            Some(MemberIndex { unit, member, .. }) => {
                self.state.shard(unit, member).map(|shard| shard.dtype())
            }
            None => Ok(saved.dtype()),
        };
        let dtype = dtype.unwrap_or(saved.dtype());
        self.kinds.insert(path, kind(&saved.shape(), dtype));
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let saved = param.transform_for_save();
        self.kinds
            .insert(self.path.join(), kind(&saved.shape(), saved.dtype()));
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        let saved = param.transform_for_save();
        self.kinds
            .insert(self.path.join(), kind(&saved.shape(), saved.dtype()));
    }
}

/// Gathers the parameters of a model one after another.
struct GatherFull<'a> {
    state: &'a FsdpState,
    path: PathStack,
    keeps: bool,
    dict: Result<StateDict>,
}

impl GatherFull<'_> {
    fn keep(&mut self, data: impl FnOnce() -> TensorData) {
        if let Ok(dict) = &mut self.dict
            && self.keeps
        {
            dict.insert(self.path.join(), data());
        }
    }
}

impl ModuleVisitor for GatherFull<'_> {
    follow_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.path.is_inside_shard() || self.dict.is_err() {
            return;
        }
        let path = self.path.join();
        let Some(index) = self.state.plan.find(&path) else {
            self.keep(|| param.transform_for_save().val().into_data());
            return;
        };
        match gather(self.state, &path, index) {
            Ok(flat) => self.keep(|| {
                let full = flat.reshape::<D, _>(param.lazy_shape());
                let full = param.clone().map(|_placeholder| full);
                full.transform_for_save().val().into_data()
            }),
            Err(error) => self.dict = Err(error),
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.keep(|| param.transform_for_save().val().into_data());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.keep(|| param.transform_for_save().val().into_data());
    }
}

/// Scatters rank 0's tensors into the shards, one after another.
struct LoadFull<'a> {
    state: &'a FsdpState,
    path: PathStack,
    /// What to load, equal on all ranks.
    names: BTreeSet<String>,
    /// On rank 0.
    dict: Option<StateDict>,
    /// The shard scattered at a placeholder, for the parameter behind it.
    shard: Option<Tensor<1>>,
    error: Option<FsdpError>,
}

impl LoadFull<'_> {
    fn wants(&self, path: &str) -> bool {
        self.error.is_none() && self.names.contains(path)
    }

    fn offered(&mut self, path: &str) -> Option<TensorData> {
        self.dict.as_mut()?.remove(path)
    }

    /// Rank 0's data for a tensor that every rank holds whole; the rank's own after an error.
    fn whole(&mut self, path: &str, own: TensorData) -> TensorData {
        let group = self.state.context.mesh.group().clone();
        let offered = self.offered(path).unwrap_or_else(|| own.clone());
        broadcast_data(&group, offered).unwrap_or_else(|error| {
            self.error = Some(error);
            own
        })
    }

    fn scatter<const D: usize>(
        &mut self,
        path: &str,
        index: MemberIndex,
        placeholder: &Param<Tensor<D>>,
    ) -> Result<Tensor<1>> {
        let layout = self.state.plan.layout(index.unit, index.member);
        let device = &self.state.context.compute_device;
        let full = self.offered(path).map(|data| {
            let dtype = data.dtype();
            let data = Tensor::<D>::from_data(data, (device, dtype));
            let loaded = placeholder.clone().transform_for_load(data, placeholder.id);
            loaded.val().inner().reshape([layout.full_len()])
        });
        let call = Call::new("scatter", format!("parameter \"{path}\""));
        scatter(&self.state.context.mesh, call, &layout, full, device)
    }
}

impl ModuleMapper for LoadFull<'_> {
    follow_path!();

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join();
        if self.path.is_inside_shard() {
            return match self.shard.take() {
                Some(shard) => param.map(|old| replace(old, shard)),
                None => param,
            };
        }
        if !self.wants(&path) {
            return param;
        }
        match self.state.plan.find(&path) {
            Some(index) => {
                match self.scatter(&path, index, &param) {
                    Ok(shard) => self.shard = Some(shard),
                    Err(error) => self.error = Some(error),
                }
                param
            }
            None => param.map(|own| {
                let trained = own.is_require_grad();
                let value: Tensor<D> = with_value!(own, self.whole(&path, own.to_data()));
                value.set_require_grad(trained)
            }),
        }
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        let path = self.path.join();
        if !self.wants(&path) {
            return param;
        }
        param.map(|own| with_value!(own, self.whole(&path, own.to_data())))
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        let path = self.path.join();
        if !self.wants(&path) {
            return param;
        }
        param.map(|own| with_value!(own, self.whole(&path, own.to_data())))
    }
}

/// The shard in the place of the old one, with its autodiff.
fn replace<const D: usize>(old: Tensor<D>, shard: Tensor<1>) -> Tensor<D> {
    let trained = old.is_require_grad();
    let shard = lift(shard.reshape::<D, _>(old.shape()), &old.device());
    if old.is_autodiff() {
        shard.set_require_grad(trained)
    } else {
        shard
    }
}
