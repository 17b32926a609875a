//! The two layouts of a model's tensors: Burn's and PyTorch's.

use std::collections::BTreeMap;
use std::ops::Deref;

use burn_fsdp::ShardSpec;

use crate::{DcpError, Region, Result, TensorInfo, TensorSource};

/// Whose names and shapes the tensors of a checkpoint have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TensorLayout {
    /// As Burn's modules have them in memory.
    #[default]
    Burn,
    /// As PyTorch's modules of the same kind name and shape them; see [`pytorch_layout`].
    PyTorch,
}

/// What PyTorch makes of one of Burn's tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PyTorchTensor {
    /// Its name there.
    pub name: String,
    /// Whether rows and columns are exchanged.
    pub is_transposed: bool,
}

/// A parameter that differs between the two: the module that owns it, its name in Burn and in PyTorch,
/// and whether it is a matrix that is transposed.
type Rule = (&'static str, &'static str, &'static str, bool);

/// All that differs among the modules of `burn-nn` that PyTorch has too. Embeddings, convolutions and
/// running statistics are the same in both. Attention and recurrent modules are built otherwise
/// (PyTorch packs several matrices in one), so they need names and tensors of their own.
const RULES: [Rule; 11] = [
    ("Linear", "weight", "weight", true),
    ("LayerNorm", "gamma", "weight", false),
    ("LayerNorm", "beta", "bias", false),
    ("RmsNorm", "gamma", "weight", false),
    ("GroupNorm", "gamma", "weight", false),
    ("GroupNorm", "beta", "bias", false),
    ("BatchNorm", "gamma", "weight", false),
    ("BatchNorm", "beta", "bias", false),
    ("InstanceNorm", "gamma", "weight", false),
    ("InstanceNorm", "beta", "bias", false),
    ("PRelu", "alpha", "weight", false),
];

/// The PyTorch form of each tensor of a model.
///
/// `specs` is what [`FsdpModule::shard_specs`](burn_fsdp::FsdpModule::shard_specs) or
/// [`dense_specs`](burn_fsdp::dense_specs) says of the model. The type of the module that owns a tensor
/// decides, so a module of one's own that is called `Linear` is taken for Burn's.
pub fn pytorch_layout(specs: &BTreeMap<String, ShardSpec>) -> BTreeMap<String, PyTorchTensor> {
    let forms = specs
        .iter()
        .map(|(path, spec)| (path.clone(), pytorch_form(path, spec)));
    forms.collect()
}

fn pytorch_form(path: &str, spec: &ShardSpec) -> PyTorchTensor {
    let (prefix, leaf) = path.rsplit_once('.').unwrap_or(("", path));
    let rule = RULES
        .iter()
        .find(|rule| (rule.0, rule.1) == (&*spec.owner, leaf));
    let (_, _, name, is_matrix) = rule.copied().unwrap_or(("", leaf, leaf, false));
    PyTorchTensor {
        name: match prefix {
            "" => name.to_string(),
            prefix => format!("{prefix}.{name}"),
        },
        is_transposed: is_matrix && spec.global_shape.len() == 2,
    }
}

/// The tensors of another source in the other layout. Tensors that the model doesn't have keep name and
/// shape. `S` refers to the source: it is a reference, a `Box` or an `Arc`.
#[derive(Debug)]
pub struct LayoutSource<S> {
    inner: S,
    tensors: BTreeMap<String, TensorInfo>,
    origins: BTreeMap<String, Origin>,
}

/// Where a tensor comes from.
#[derive(Debug)]
struct Origin {
    name: String,
    is_transposed: bool,
}

impl<S> LayoutSource<S>
where
    S: Deref,
    S::Target: TensorSource,
{
    /// Presents the tensors of a PyTorch model under the names and in the shapes of the Burn model
    /// that `specs` describes. The names of its tensors begin with `prefix`, such as `model.`, in
    /// `inner` and here.
    ///
    /// # Errors
    ///
    /// [`DcpError::InvalidArgument`] if two tensors would have one name.
    pub fn from_pytorch(
        inner: S,
        specs: &BTreeMap<String, ShardSpec>,
        prefix: &str,
    ) -> Result<Self> {
        let forms = pytorch_layout(specs).into_iter();
        let renamed = forms.map(|(burn, torch)| (torch.name, (burn, torch.is_transposed)));
        Self::new(inner, renamed.collect(), prefix)
    }

    /// Presents the tensors of the Burn model that `specs` describes as PyTorch has them. The names of
    /// its tensors begin with `prefix`, such as `model.`, in `inner` and here.
    ///
    /// # Errors
    ///
    /// [`DcpError::InvalidArgument`] if two tensors would have one name.
    pub fn to_pytorch(inner: S, specs: &BTreeMap<String, ShardSpec>, prefix: &str) -> Result<Self> {
        let forms = pytorch_layout(specs).into_iter();
        let renamed = forms.map(|(burn, torch)| (burn, (torch.name, torch.is_transposed)));
        Self::new(inner, renamed.collect(), prefix)
    }

    /// `renamed` has, for names of `inner` behind the prefix, the name here and whether rows and columns are exchanged.
    fn new(inner: S, renamed: BTreeMap<String, (String, bool)>, prefix: &str) -> Result<Self> {
        let (mut tensors, mut origins) = (BTreeMap::new(), BTreeMap::new());
        for (name, info) in inner.tensors() {
            let known = name.strip_prefix(prefix).and_then(|name| renamed.get(name));
            let (new, is_matrix) = match known {
                Some((new, is_matrix)) => (format!("{prefix}{new}"), *is_matrix),
                None => (name.clone(), false),
            };
            let mut info = info.clone();
            // A tensor that is no matrix after all is left for the comparison with the model.
            let is_plain = matches!(info.dtype.size(), 1 | 2 | 4 | 8);
            let is_transposed = is_matrix && info.shape.len() == 2 && is_plain;
            if is_transposed {
                info.shape.reverse();
            }
            let origin = Origin {
                name: name.clone(),
                is_transposed,
            };
            if let Some(Origin { name: other, .. }) = origins.insert(new.clone(), origin) {
                return Err(DcpError::argument(format!(
                    "tensors {other:?} and {name:?} would both be called {new:?}"
                )));
            }
            tensors.insert(new, info);
        }
        Ok(Self {
            inner,
            tensors,
            origins,
        })
    }
}

impl<S> TensorSource for LayoutSource<S>
where
    S: Deref + std::fmt::Debug + Send + Sync,
    S::Target: TensorSource,
{
    fn location(&self) -> String {
        self.inner.location()
    }

    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    fn read(&self, name: &str, region: &Region) -> Result<Vec<u8>> {
        let Some(origin) = self.origins.get(name) else {
            return Err(DcpError::argument(format!(
                "{} has no tensor {name:?}",
                self.location()
            )));
        };
        if !origin.is_transposed {
            return self.inner.read(&origin.name, region);
        }
        let info = &self.tensors[name];
        if !region.fits(&info.shape) {
            return Err(DcpError::argument(format!(
                "{region:?} is not within tensor {name:?} of shape {:?}",
                info.shape
            )));
        }
        let mut there = region.clone();
        there.offsets.reverse();
        there.sizes.reverse();
        let bytes = self.inner.read(&origin.name, &there)?;
        let (rows, columns) = (there.sizes[0] as usize, there.sizes[1] as usize);
        let size = info.dtype.size();
        if bytes.len() != rows * columns * size {
            let detail = format!(
                "tensor {name:?}: {} bytes were read of {there:?}",
                bytes.len()
            );
            return Err(DcpError::foreign(self.location(), detail));
        }
        Ok(transpose(&bytes, rows, columns, size))
    }
}

/// Transposes a matrix of elements of `size` bytes.
fn transpose(bytes: &[u8], rows: usize, columns: usize, size: usize) -> Vec<u8> {
    match size {
        1 => transpose_elements::<1>(bytes, rows, columns),
        2 => transpose_elements::<2>(bytes, rows, columns),
        4 => transpose_elements::<4>(bytes, rows, columns),
        _ => transpose_elements::<8>(bytes, rows, columns),
    }
}

/// In tiles, so that both sides stay in the cache.
fn transpose_elements<const N: usize>(bytes: &[u8], rows: usize, columns: usize) -> Vec<u8> {
    const TILE: usize = 32;
    let mut out = vec![0; bytes.len()];
    let (from, _) = bytes.as_chunks::<N>();
    let (to, _) = out.as_chunks_mut::<N>();
    for top in (0..rows).step_by(TILE) {
        for left in (0..columns).step_by(TILE) {
            for row in top..(top + TILE).min(rows) {
                for column in left..(left + TILE).min(columns) {
                    to[column * rows + row] = from[row * columns + column];
                }
            }
        }
    }
    out
}
