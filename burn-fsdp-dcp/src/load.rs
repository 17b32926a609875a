//! From tensors on disk into modules.

use std::collections::{BTreeMap, HashMap};

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Bool, Bytes, DType, Int, Tensor, TensorData};
use burn_fsdp::{ProcessGroup, ShardSpec};
use regex::Regex;

use crate::region::Region;
use crate::report::LoadReport;
use crate::source::TensorSource;
use crate::{DcpError, Result, codec};

/// What to do where checkpoint and model differ. By default they may not: names, shapes and dtypes must
/// be equal, and the error lists all that are not.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    partial: bool,
    cast: bool,
    renames: Vec<(Regex, String)>,
    ignores: Vec<Regex>,
}

impl LoadOptions {
    /// The defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Loads what fits and leaves the rest; the report tells.
    pub fn with_partial(mut self, partial: bool) -> Self {
        self.partial = partial;
        self
    }

    /// Casts floating tensors to the model's dtype.
    pub fn with_cast(mut self, cast: bool) -> Self {
        self.cast = cast;
        self
    }

    /// Replaces matches of a regular expression in the checkpoint's names, `$1` being a group; several
    /// apply one after another.
    ///
    /// # Errors
    ///
    /// [`DcpError::InvalidArgument`] if it is no regular expression.
    pub fn with_rename(mut self, pattern: &str, replacement: &str) -> Result<Self> {
        self.renames
            .push((parse(pattern)?, replacement.to_string()));
        Ok(self)
    }

    /// Leaves alone what a regular expression finds in a name, in the model and in the checkpoint.
    ///
    /// # Errors
    ///
    /// [`DcpError::InvalidArgument`] if it is no regular expression.
    pub fn with_ignore(mut self, pattern: &str) -> Result<Self> {
        self.ignores.push(parse(pattern)?);
        Ok(self)
    }

    pub(crate) fn rename(&self, name: &str) -> String {
        let rename = |name: String, (pattern, to): &(Regex, String)| {
            pattern.replace_all(&name, to.as_str()).into_owned()
        };
        self.renames.iter().fold(name.to_string(), rename)
    }

    pub(crate) fn ignores(&self, name: &str) -> bool {
        self.ignores.iter().any(|pattern| pattern.is_match(name))
    }
}

pub(crate) fn parse(pattern: &str) -> Result<Regex> {
    Regex::new(pattern).map_err(DcpError::argument)
}

/// Which tensor of a source goes into which of a model.
pub(crate) struct Matching {
    /// Names in the source by names in the model.
    sources: BTreeMap<String, String>,
    pub(crate) report: LoadReport,
}

impl Matching {
    /// Compares a model with the tensors of a source whose names begin with `prefix`.
    pub(crate) fn new(
        specs: &BTreeMap<String, ShardSpec>,
        source: &dyn TensorSource,
        prefix: &str,
        options: &LoadOptions,
    ) -> Result<Self> {
        let mut offered = BTreeMap::new();
        for name in source.tensors().keys() {
            if let Some(rest) = name.strip_prefix(prefix)
                && let Some(other) = offered.insert(options.rename(rest), name.clone())
            {
                let detail = format!("\"{other}\" and \"{name}\" are renamed to the same name");
                return Err(DcpError::argument(detail));
            }
        }
        let mut matching = Self {
            sources: BTreeMap::new(),
            report: LoadReport::default(),
        };
        let under_any_name = names_of_ids(specs, &offered);
        for (name, spec) in specs {
            if options.ignores(name) {
                matching.report.ignored.push(name.clone());
                continue;
            }
            // A tied parameter may be there under any of its names; the first has its way.
            match under_any_name.get(&spec.id) {
                Some(source_name) => matching.add(name, spec, source_name, source, options),
                None => matching.report.missing.push(name.clone()),
            }
        }
        let unexpected = offered.into_keys().filter(|name| !specs.contains_key(name));
        let unexpected = { unexpected }.filter(|name| !options.ignores(name));
        matching.report.unexpected.extend(unexpected);
        Ok(matching)
    }

    fn add(
        &mut self,
        name: &str,
        spec: &ShardSpec,
        source_name: &str,
        source: &dyn TensorSource,
        options: &LoadOptions,
    ) {
        let info = &source.tensors()[source_name];
        let shape: Vec<u64> = spec.global_shape.iter().map(|n| *n as u64).collect();
        let same_dtype = info.dtype == spec.dtype || both_bool(info.dtype, spec.dtype);
        let castable = options.cast && info.dtype.is_float() && spec.dtype.is_float();
        if info.shape != shape || !(same_dtype || castable) {
            let kind = |dtype: DType, shape: &[u64]| format!("{dtype:?} {shape:?}");
            let (expected, got) = (kind(spec.dtype, &shape), kind(info.dtype, &info.shape));
            self.report
                .mismatched
                .push((name.to_string(), expected, got));
            return;
        }
        if same_dtype {
            self.report.loaded.push(name.to_string());
        } else {
            let dtypes = [info.dtype, spec.dtype].map(|dtype| format!("{dtype:?}"));
            let [from, to] = dtypes;
            self.report.cast.push((name.to_string(), from, to));
        }
        self.sources
            .insert(name.to_string(), source_name.to_string());
    }

    /// The report, or the error that the options make of it.
    pub(crate) fn check(report: LoadReport, options: &LoadOptions) -> Result<LoadReport> {
        if options.partial || report.is_exact() {
            return Ok(report);
        }
        Err(DcpError::Mismatch(Box::new(report)))
    }

    /// Loads into a module what has been matched; reads one tensor at a time. `own` has this rank's
    /// running statistics, where they are known.
    pub(crate) fn load<M: Module>(
        self,
        module: M,
        specs: &BTreeMap<String, ShardSpec>,
        source: &dyn TensorSource,
        own: BTreeMap<String, Vec<u8>>,
    ) -> Result<M> {
        let mut load = LoadTensors {
            own,
            path: Vec::new(),
            sources: self.sources,
            specs,
            source,
            error: None,
        };
        let module = module.map(&mut load);
        load.error.map_or(Ok(module), Err)
    }
}

fn both_bool(a: DType, b: DType) -> bool {
    matches!((a, b), (DType::Bool(_), DType::Bool(_)))
}

/// For each parameter with a name that is offered, that name in the source.
fn names_of_ids(
    specs: &BTreeMap<String, ShardSpec>,
    offered: &BTreeMap<String, String>,
) -> HashMap<ParamId, String> {
    let mut names = HashMap::new();
    for (name, spec) in specs {
        if let Some(source_name) = offered.get(name) {
            names.entry(spec.id).or_insert(source_name.clone());
        }
    }
    names
}

/// The part of the whole tensor that a rank holds.
pub(crate) fn region_of(spec: &ShardSpec) -> Region {
    let wide = |shape: &[usize]| shape.iter().map(|n| *n as u64).collect();
    Region {
        offsets: wide(&spec.offsets),
        sizes: wide(&spec.sizes),
    }
}

/// Puts tensors of a source in the place of a module's.
struct LoadTensors<'a> {
    path: Vec<String>,
    sources: BTreeMap<String, String>,
    specs: &'a BTreeMap<String, ShardSpec>,
    source: &'a dyn TensorSource,
    own: BTreeMap<String, Vec<u8>>,
    error: Option<DcpError>,
}

impl LoadTensors<'_> {
    /// What to put in the place of the tensor at the current path, as it is stored; none to leave it.
    fn stored(&mut self) -> Option<TensorData> {
        let path = self.path.join(".");
        let source_name = self.sources.get(&path)?;
        if self.error.is_some() {
            return None;
        }
        let read = self.read(&self.specs[&path], source_name);
        read.map_err(|error| self.error = Some(error)).ok()
    }

    fn read(&self, spec: &ShardSpec, source_name: &str) -> Result<TensorData> {
        let dtype = self.source.tensors()[source_name].dtype;
        let region = region_of(spec);
        let len = region.volume().unwrap_or(u64::MAX) * dtype.size() as u64;
        let own = self
            .own
            .get(source_name)
            .filter(|own| spec.is_buffer && own.len() as u64 == len);
        let bytes = match own {
            Some(bytes) => bytes.clone(),
            None => self.source.read(source_name, &region)?,
        };
        if matches!(dtype, DType::Bool(_)) && bytes.iter().any(|byte| *byte > 1) {
            let detail = format!("tensor \"{source_name}\" has booleans that are neither 0 nor 1");
            return Err(DcpError::corrupt(self.source.location(), detail));
        }
        let local = TensorData::from_bytes(Bytes::from_bytes_vec(bytes), spec.sizes.clone(), dtype);
        let local = if dtype.is_float() {
            local.convert_dtype(spec.dtype)
        } else {
            local
        };
        Ok(spec.to_stored(local))
    }
}

/// A tensor with this value where the old one was.
macro_rules! put {
    ($old:expr, $value:expr) => {{
        let (device, dtype) = ($old.device(), $old.dtype());
        Tensor::from_data($value, (&device, dtype))
    }};
}

impl ModuleMapper for LoadTensors<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(value) = self.stored() else {
            return param;
        };
        param.map(|old| {
            let new: Tensor<D> = put!(old, value);
            if old.is_autodiff() {
                new.set_require_grad(old.is_require_grad())
            } else {
                new
            }
        })
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        match self.stored() {
            Some(value) => param.map(|old| put!(old, value)),
            None => param,
        }
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        match self.stored() {
            Some(value) => param.map(|old| put!(old, value)),
            None => param,
        }
    }
}

/// Makes one rank's error everyone's: all ranks must call this, and all return `Ok`, or the error of
/// the lowest rank that failed.
pub(crate) fn agree<T>(group: &ProcessGroup, result: Result<T>) -> Result<T> {
    if let Err(DcpError::Group(error)) = result {
        return Err(error.into());
    }
    let (value, error) = match result {
        Ok(value) => (Some(value), None),
        Err(error) => (None, Some(error)),
    };
    let all = group.all_gather_bytes(codec::encode_table(&error))?;
    for (rank, bytes) in all.iter().enumerate() {
        let error: Option<DcpError> = codec::decode_table(bytes, "a message between ranks")?;
        if let Some(error) = error {
            return Err(on_rank(rank, error));
        }
    }
    Ok(value.expect("a rank without a value has an error"))
}

pub(crate) fn on_rank(rank: usize, error: DcpError) -> DcpError {
    match error {
        error @ DcpError::OnRank { .. } => error,
        error => DcpError::OnRank {
            rank,
            error: Box::new(error),
        },
    }
}
