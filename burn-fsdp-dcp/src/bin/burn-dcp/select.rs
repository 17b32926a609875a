//! Which tensors are taken, under which names and as what type.

use std::collections::BTreeMap;

use burn::tensor::{DType, TensorData};
use burn_fsdp_dcp::{DcpError, Region, Result, TensorInfo, TensorSource};
use clap::{Args, ValueEnum};
use indicatif::ProgressBar;
use regex::Regex;

use crate::failure::Failure;

/// Which tensors are taken, under which names and as what type.
#[derive(Debug, Args)]
pub(crate) struct Choice {
    /// Take only tensors in whose names this regular expression is found
    #[arg(long, value_name = "REGEX")]
    pub(crate) filter: Option<String>,
    /// Replace what a regular expression finds in names; $1 is a group. Several apply one after another
    #[arg(long, value_name = "REGEX=REPLACEMENT")]
    pub(crate) rename: Vec<String>,
    /// Cast floating-point tensors to this type, rounding to nearest
    #[arg(long, value_name = "TYPE")]
    pub(crate) dtype: Option<FloatType>,
}

/// A type to cast to.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum FloatType {
    /// 16 bits, 8 of them for the exponent
    Bf16,
    /// 16 bits, 5 of them for the exponent
    F16,
    /// 32 bits
    F32,
}

impl FloatType {
    fn dtype(self) -> DType {
        match self {
            Self::Bf16 => DType::BF16,
            Self::F16 => DType::F16,
            Self::F32 => DType::F32,
        }
    }
}

/// The chosen tensors of a source, as they are to be.
#[derive(Debug)]
pub(crate) struct Selection<'a> {
    source: &'a dyn TensorSource,
    infos: BTreeMap<String, TensorInfo>,
    /// Names in the source.
    names: BTreeMap<String, String>,
    bar: ProgressBar,
}

impl<'a> Selection<'a> {
    pub(crate) fn new(source: &'a dyn TensorSource, choice: &Choice) -> Result<Self, Failure> {
        let filter = { choice.filter.as_ref() }
            .map(|pattern| regex("--filter", pattern))
            .transpose()?;
        let mut renames = Vec::new();
        for rename in &choice.rename {
            // A regular expression may have the sign itself, a name hardly.
            let Some((pattern, to)) = rename.rsplit_once('=') else {
                return Err(Failure::of(format!(
                    "--rename \"{rename}\" has no \"=\"; write REGEX=REPLACEMENT"
                )));
            };
            renames.push((regex("--rename", pattern)?, to));
        }
        let mut infos = BTreeMap::new();
        let mut names: BTreeMap<String, String> = BTreeMap::new();
        for (name, info) in source.tensors() {
            if filter.as_ref().is_some_and(|filter| !filter.is_match(name)) {
                continue;
            }
            let to = renames.iter().fold(name.clone(), |name, (pattern, to)| {
                pattern.replace_all(&name, *to).into_owned()
            });
            if let Some(other) = names.insert(to.clone(), name.clone()) {
                return Err(Failure::of(format!(
                    "--rename makes \"{to}\" of both \"{other}\" and \"{name}\"; use a narrower REGEX"
                )));
            }
            let mut info = info.clone();
            if let Some(dtype) = choice.dtype.filter(|_| info.dtype.is_float()) {
                info.dtype = dtype.dtype();
            }
            infos.insert(to, info);
        }
        if infos.is_empty() && !source.tensors().is_empty() {
            return Err(Failure::of(format!(
                "--filter finds no tensor in {}; burn-dcp inspect lists the names",
                source.location()
            )));
        }
        Ok(Self {
            source,
            infos,
            names,
            bar: ProgressBar::hidden(),
        })
    }

    /// Moves a bar on with every byte read.
    pub(crate) fn with_bar(mut self, bar: &ProgressBar) -> Self {
        self.bar = bar.clone();
        self
    }

    /// The bytes of all that is chosen, as it is to be.
    pub(crate) fn bytes(&self) -> u64 {
        self.infos.values().map(TensorInfo::bytes).sum()
    }
}

impl TensorSource for Selection<'_> {
    fn location(&self) -> String {
        self.source.location()
    }

    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.infos
    }

    fn read(&self, name: &str, region: &Region) -> Result<Vec<u8>> {
        let (Some(from), Some(info)) = (self.names.get(name), self.infos.get(name)) else {
            let detail = format!("no tensor \"{name}\" is chosen");
            return Err(DcpError::InvalidArgument(detail));
        };
        let bytes = self.source.read(from, region)?;
        let bytes = cast(bytes, self.source.tensors()[from].dtype, info.dtype)
            .map_err(|why| DcpError::InvalidArgument(format!("tensor \"{from}\": {why}")))?;
        self.bar.inc(bytes.len() as u64);
        Ok(bytes)
    }
}

/// Elements as another floating-point type.
pub(crate) fn cast(bytes: Vec<u8>, from: DType, to: DType) -> Result<Vec<u8>, String> {
    if from == to {
        return Ok(bytes);
    }
    let count = bytes.len() / from.size();
    let data = TensorData::from_bytes_vec(bytes, [count], from);
    let data = data.try_cast(to).map_err(|error| error.to_string())?;
    Ok(data.into_parts().0.to_vec())
}

/// A regular expression given as an option.
fn regex(option: &str, pattern: &str) -> Result<Regex, Failure> {
    Regex::new(pattern).map_err(|error| {
        let text = error.to_string();
        // The last line says what is wrong, those before show where.
        let why = text.lines().last().unwrap_or(&text);
        let why = why.trim_start_matches("error: ");
        Failure::of(format!(
            "{option} \"{pattern}\" is no regular expression: {why}; put a \\ before what is meant as it is"
        ))
    })
}
