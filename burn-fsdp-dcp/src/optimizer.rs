//! A Burn optimizer's state as tensors under the parameters' paths, and back.
//!
//! Burn's record of an optimizer is keyed by parameter id, and ids differ from process to process. Its
//! public form is bytes in the burnpack format: tensors and scalars named by id and field, and the path
//! of each id.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::tensor::{Bytes, DType, Device, TensorData};
use burn_fsdp::ShardSpec;
use burn_pack::{Reader, Scalar, Tensor, Writer};
use serde::{Deserialize, Serialize};

use crate::host;
use crate::load::{Matching, region_of};
use crate::piece::{Copies, Piece, State, drop_further_names};
use crate::region::Region;
use crate::report::LoadReport;
use crate::source::TensorSource;
use crate::{DcpError, LoadOptions, Result, codec};

/// The prefix of an optimizer's tensors in a checkpoint.
pub(crate) const OPTIMIZER: &str = "optimizer.";
/// The name of the state with an optimizer's scalars.
pub(crate) const SCALARS: &str = "optimizer.scalars";

/// What is kept of each parameter beside tensors, by its path.
type States = BTreeMap<String, ParamState>;

#[derive(Debug, Serialize, Deserialize)]
struct ParamState {
    /// The parameter's shape, whole.
    shape: Vec<u64>,
    scalars: BTreeMap<String, SavedScalar>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum SavedScalar {
    Int(i64),
    UInt(u64),
    Float(f64),
    Bool(bool),
}

impl From<Scalar> for SavedScalar {
    fn from(scalar: Scalar) -> Self {
        match scalar {
            Scalar::Int(value) => Self::Int(value),
            Scalar::UInt(value) => Self::UInt(value),
            Scalar::Float(value) => Self::Float(value),
            Scalar::Bool(value) => Self::Bool(value),
        }
    }
}

impl From<SavedScalar> for Scalar {
    fn from(scalar: SavedScalar) -> Self {
        match scalar {
            SavedScalar::Int(value) => Self::Int(value),
            SavedScalar::UInt(value) => Self::UInt(value),
            SavedScalar::Float(value) => Self::Float(value),
            SavedScalar::Bool(value) => Self::Bool(value),
        }
    }
}

fn broken(detail: impl ToString) -> DcpError {
    DcpError::BadState {
        name: "optimizer".to_string(),
        detail: detail.to_string(),
    }
}

/// An optimizer's record as tensors by name, and its scalars.
pub(crate) fn take_apart(
    record: OptimizerRecord,
    mut specs: BTreeMap<String, ShardSpec>,
    shard_copies: Copies,
) -> Result<(BTreeMap<String, Piece>, State)> {
    drop_further_names(&mut specs);
    let paths: HashMap<u64, &String> = specs.iter().map(|(p, s)| (s.id.val(), p)).collect();
    let path_of = |id: u64| {
        let known = paths.get(&id).copied();
        known.ok_or_else(|| {
            broken(format!(
                "it has state for parameter {id}, which is not of this model"
            ))
        })
    };
    let record = record.into_bytes().map_err(broken)?;
    let reader = Reader::from_bytes(record).map_err(broken)?;

    let mut states = States::new();
    for (name, value) in reader.scalars() {
        let (id, field) = split_name(name)?;
        let path = path_of(id)?;
        let state = states.entry(path.clone()).or_insert_with(|| ParamState {
            shape: shape_of(&specs[path]),
            scalars: BTreeMap::new(),
        });
        state.scalars.insert(field.to_string(), (*value).into());
    }
    let mut pieces = BTreeMap::new();
    for tensor in reader.into_tensors().map_err(broken)? {
        let (name, dtype, shape, _, bytes) = tensor.into_parts().map_err(broken)?;
        let (id, field) = split_name(&name)?;
        let path = path_of(id)?;
        let spec = &specs[path];
        let name = format!("{OPTIMIZER}{path}.{field}");
        let data = TensorData::from_bytes(bytes, shape.clone(), dtype);
        let piece = if shape.to_vec() == spec.stored_shape() {
            let owned = spec.clone();
            Piece::new(spec, dtype, shard_copies, true, move || {
                host::owned(owned.to_local(data))
            })
        } else if is_split(spec) && shape.num_elements() > 1 {
            return Err(broken(format!(
                "it keeps a tensor of shape {shape:?} for the part {:?} of parameter \"{path}\", so it does \
                 not treat each element by itself, and its state can't be saved",
                spec.stored_shape()
            )));
        } else {
            // Not of the parameter's shape, so not split with it.
            let shape: Vec<u64> = shape.iter().map(|n| *n as u64).collect();
            Piece {
                dtype,
                region: Region::whole(&shape),
                shape,
                copies: Copies::Everywhere,
                data: Box::new(|| host::owned(data)),
                is_on_host: true,
            }
        };
        pieces.insert(name, piece);
    }
    let scalars = State {
        is_of_rank: false,
        bytes: codec::encode_value(SCALARS, &states)?,
    };
    Ok((pieces, scalars))
}

/// A name of Burn's record: the parameter's id and the field.
fn split_name(name: &str) -> Result<(u64, &str)> {
    let parts = name.split_once('.');
    let parts = parts.and_then(|(id, field)| Some((id.parse().ok()?, field)));
    parts.ok_or_else(|| {
        broken(format!(
            "its record has an entry \"{name}\", which names no parameter"
        ))
    })
}

/// Whether ranks hold different parts of the parameter.
fn is_split(spec: &ShardSpec) -> bool {
    spec.stored_shape() != spec.global_shape || spec.sizes != spec.global_shape
}

fn shape_of(spec: &ShardSpec) -> Vec<u64> {
    spec.global_shape.iter().map(|n| *n as u64).collect()
}

/// Loads an optimizer's state for a module with these specs. Options apply to the parameters' paths.
pub(crate) fn load(
    optim: ModuleOptimizer,
    specs: &BTreeMap<String, ShardSpec>,
    source: &dyn TensorSource,
    states: &[u8],
    options: &LoadOptions,
) -> Result<(ModuleOptimizer, LoadReport)> {
    check_default_device()?;
    let states: States = codec::decode_value(SCALARS, states)?;
    let (params, report) = match_params(specs, &states, source, options)?;
    let mut tensors = Vec::new();
    let mut metadata = Vec::new();
    let mut scalars = Vec::new();
    for Param { path, saved_path } in params {
        let spec = &specs[&path];
        let id = spec.id.val();
        for (source_name, field) in fields_of(source, &saved_path, &states) {
            let stored = read(source, source_name, spec)?;
            let (bytes, shape, dtype) = stored.into_parts();
            let name = format!("{id}.{field}");
            tensors.push(Tensor::new(name, dtype, shape, Some(id), bytes));
        }
        metadata.push((id.to_string(), path));
        for (field, value) in &states[&saved_path].scalars {
            scalars.push((format!("{id}.{field}"), (*value).into()));
        }
    }
    let count = tensors.len();
    let mut writer = Writer::new(tensors);
    for (id, path) in &metadata {
        writer = writer.with_metadata(id, path);
    }
    for (name, value) in scalars {
        writer = writer.with_scalar(&name, value);
    }
    let bytes = writer.into_bytes().map_err(broken)?;
    let optim = optim.load_record(OptimizerRecord::from_bytes(bytes).map_err(broken)?);
    // Burn drops state that is not of the optimizer's kind without a word.
    let kept = optim.to_record().len();
    if kept != count {
        return Err(broken(format!(
            "the checkpoint has {count} tensors of state, of which this optimizer takes {kept}: \
             it is of another kind"
        )));
    }
    Ok((optim, report))
}

/// Burn restores an optimizer's state on its default device, and panics if that can't be used: as where
/// a program that was built for CUDA runs without.
fn check_default_device() -> Result<()> {
    let device = Device::default();
    let try_it = || burn::Tensor::<1>::zeros([1], &device).into_data();
    let tried = catch_unwind(AssertUnwindSafe(try_it));
    tried.map(drop).map_err(|_| {
        broken(format!(
            "Burn restores it on its default device, {device:?}, which can't be used here; name another in \
             the variable BURN_DEVICE, such as BURN_DEVICE=flex"
        ))
    })
}

/// A tensor of state as it is stored for a parameter.
fn read(source: &dyn TensorSource, name: &str, spec: &ShardSpec) -> Result<TensorData> {
    let info = &source.tensors()[name];
    // Burn makes tensors of a record in the default type, and the next step would panic.
    let default: DType = Device::default().settings().float_dtype.into();
    if info.dtype.is_float() && info.dtype != default {
        return Err(broken(format!(
            "\"{name}\" is {:?}, and Burn restores an optimizer's state as {default:?} only; train with \
             parameters of that type (mixed precision keeps them so)",
            info.dtype
        )));
    }
    let bytes = |region: &Region| source.read(name, region).map(Bytes::from_bytes_vec);
    if info.shape == shape_of(spec) {
        let local = bytes(&region_of(spec))?;
        let local = TensorData::from_bytes(local, spec.sizes.clone(), info.dtype);
        return Ok(spec.to_stored(local));
    }
    let shape: Vec<usize> = info.shape.iter().map(|n| *n as usize).collect();
    let whole = bytes(&Region::whole(&info.shape))?;
    Ok(TensorData::from_bytes(whole, shape, info.dtype))
}

/// A parameter whose state is loaded.
struct Param {
    path: String,
    /// Its path in the checkpoint.
    saved_path: String,
}

fn match_params(
    specs: &BTreeMap<String, ShardSpec>,
    states: &States,
    source: &dyn TensorSource,
    options: &LoadOptions,
) -> Result<(Vec<Param>, LoadReport)> {
    let mut report = LoadReport::default();
    let mut params = Vec::new();
    let mut ids = HashSet::new();
    for (saved_path, state) in states {
        let path = options.rename(saved_path);
        if options.ignores(&path) {
            report.ignored.push(path);
            continue;
        }
        let Some(spec) = specs.get(&path) else {
            report.unexpected.push(path);
            continue;
        };
        let shape = shape_of(spec);
        if state.shape != shape {
            let (expected, got) = (format!("{shape:?}"), format!("{:?}", state.shape));
            report.mismatched.push((path, expected, got));
            continue;
        }
        // A tied parameter has one state, that under the first of its names.
        if !ids.insert(spec.id) {
            report.unexpected.push(path);
            continue;
        }
        let fields = fields_of(source, saved_path, states);
        let names = fields.map(|(_, field)| format!("{path}.{field}"));
        report.loaded.extend(names);
        params.push(Param {
            path,
            saved_path: saved_path.clone(),
        });
    }
    Matching::check(report, options).map(|report| (params, report))
}

/// The tensors of a parameter's state, and the optimizer's names for them.
fn fields_of<'a>(
    source: &'a dyn TensorSource,
    path: &str,
    states: &'a States,
) -> impl Iterator<Item = (&'a String, &'a str)> {
    let prefix = format!("{OPTIMIZER}{path}.");
    let names = source.tensors().range(prefix.clone()..);
    let names = names.map(|(name, _)| name);
    let own = { names }.map_while(move |name| Some((name, name.strip_prefix(&prefix)?)));
    let path = path.to_string();
    own.filter(move |(_, field)| {
        // Not of a parameter whose path begins with this one's.
        let ends = field.match_indices('.').map(|(at, _)| &field[..at]);
        !{ ends }.any(|more| states.contains_key(&format!("{path}.{more}")))
    })
}
