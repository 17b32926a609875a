//! A Burn optimizer's state as tensors under the parameters' paths, and back.
//!
//! Burn's record of an optimizer is keyed by parameter id, and ids differ from process to process. Its
//! public form is bytes in the burnpack format: tensors and scalars named by id and field, and the path
//! of each id.

use std::collections::{BTreeMap, HashMap};

use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::tensor::TensorData;
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

/// Scalars by parameter path and field.
type Scalars = BTreeMap<String, BTreeMap<String, SavedScalar>>;

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

    let mut scalars = Scalars::new();
    for (name, value) in reader.scalars() {
        let (id, field) = split_name(name)?;
        let fields = scalars.entry(path_of(id)?.clone()).or_default();
        fields.insert(field.to_string(), (*value).into());
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
        bytes: codec::encode_value(SCALARS, &scalars)?,
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

/// Loads an optimizer's state for a module with these specs.
pub(crate) fn load(
    optim: ModuleOptimizer,
    specs: &BTreeMap<String, ShardSpec>,
    source: &dyn TensorSource,
    scalars: &[u8],
    options: &LoadOptions,
) -> Result<(ModuleOptimizer, LoadReport)> {
    let mut scalars: Scalars = codec::decode_value(SCALARS, scalars)?;
    scalars = { scalars }
        .into_iter()
        .map(|(path, s)| (options.rename(&path), s))
        .collect();
    let (fields, report) = match_fields(specs, source, &scalars, options)?;

    let mut tensors = Vec::new();
    for Field {
        source_name,
        path,
        field,
    } in fields
    {
        let spec = &specs[&path];
        let info = &source.tensors()[&source_name];
        let shape: Vec<u64> = spec.global_shape.iter().map(|n| *n as u64).collect();
        let stored = if info.shape == shape {
            let region = region_of(spec);
            let bytes = burn::tensor::Bytes::from_bytes_vec(source.read(&source_name, &region)?);
            spec.to_stored(TensorData::from_bytes(
                bytes,
                spec.sizes.clone(),
                info.dtype,
            ))
        } else {
            let bytes = source.read(&source_name, &Region::whole(&info.shape))?;
            let shape: Vec<usize> = info.shape.iter().map(|n| *n as usize).collect();
            TensorData::from_bytes(
                burn::tensor::Bytes::from_bytes_vec(bytes),
                shape,
                info.dtype,
            )
        };
        let (bytes, shape, dtype) = stored.into_parts();
        let id = spec.id.val();
        tensors.push(Tensor::new(
            format!("{id}.{field}"),
            dtype,
            shape,
            Some(id),
            bytes,
        ));
    }
    let count = tensors.len();
    let mut writer = Writer::new(tensors);
    for (path, fields) in &scalars {
        let Some(spec) = specs.get(path) else {
            continue;
        };
        let id = spec.id.val();
        writer = writer.with_metadata(&id.to_string(), path);
        for (field, value) in fields {
            writer = writer.with_scalar(&format!("{id}.{field}"), (*value).into());
        }
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

/// A tensor of an optimizer's state, and where it goes.
struct Field {
    source_name: String,
    path: String,
    field: String,
}

fn match_fields(
    specs: &BTreeMap<String, ShardSpec>,
    source: &dyn TensorSource,
    scalars: &Scalars,
    options: &LoadOptions,
) -> Result<(Vec<Field>, LoadReport)> {
    let mut report = LoadReport::default();
    let mut fields = Vec::new();
    let names = source
        .tensors()
        .keys()
        .filter_map(|name| Some((name, name.strip_prefix(OPTIMIZER)?)));
    for (source_name, rest) in names {
        let rest = options.rename(rest);
        // The path is the longest beginning that is one; what follows is the field.
        let ends = rest.match_indices('.').map(|(at, _)| at).rev();
        let found = { ends }
            .map(|at| (&rest[..at], &rest[at + 1..]))
            .find(|(path, _)| specs.contains_key(*path));
        match found {
            _ if options.ignores(&rest) => report.ignored.push(rest),
            Some((path, field)) => {
                report.loaded.push(rest.clone());
                fields.push(Field {
                    source_name: source_name.clone(),
                    path: path.to_string(),
                    field: field.to_string(),
                });
            }
            None => report.unexpected.push(rest),
        }
    }
    for path in scalars.keys().filter(|path| !specs.contains_key(*path)) {
        let is_told = |name: &String| name == path || name.starts_with(&format!("{path}."));
        if !options.ignores(path) && !report.unexpected.iter().any(is_told) {
            report.unexpected.push(path.clone());
        }
    }
    Matching::check(report, options).map(|report| (fields, report))
}
