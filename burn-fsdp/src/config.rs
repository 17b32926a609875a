//! What a user can choose. Every default is FSDP2's.

use std::fmt;
use std::sync::Arc;

use burn::tensor::DType;

use crate::{FsdpError, Placement, Result};

/// Dtypes of communication and compute, apart from those of the stored parameters.
///
/// The shards and the optimizer keep the parameter's original dtype (the master copy). This is a
/// policy for whole units, not autocast: operations are not listed anywhere, and Burn's panic on
/// operands of two dtypes. So floating inputs must be in `param_dtype`, which
/// [`forward_with`](crate::FsdpModule::forward_with) sees to, and a module that makes f32 tensors of
/// its own in forward does not fit: of burn-nn, `BatchNorm` (its statistics) and the recurrent
/// modules (their first state). Keep those in a unit without the policy
/// ([`FsdpConfig::with_unit`]) and cast around them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MixedPrecisionPolicy {
    /// The dtype a shard is cast to before the all-gather, and in which the forward sees the
    /// parameter. `None`: the original dtype.
    pub param_dtype: Option<DType>,
    /// The dtype of gradient reduction and of accumulation without sync. `None`: the original
    /// dtype of the parameter.
    pub reduce_dtype: Option<DType>,
    /// The dtype floating outputs of [`forward_with`](crate::FsdpModule::forward_with) are cast to.
    /// `None`: they are left alone.
    pub output_dtype: Option<DType>,
    /// Whether [`forward_with`](crate::FsdpModule::forward_with) casts floating inputs to
    /// `param_dtype`. Integers and booleans are never cast.
    pub cast_forward_inputs: bool,
}

impl MixedPrecisionPolicy {
    /// Everything in the original dtype.
    pub fn new() -> Self {
        Self {
            param_dtype: None,
            reduce_dtype: None,
            output_dtype: None,
            cast_forward_inputs: true,
        }
    }

    /// Gather and compute in bf16, reduce in f32.
    pub fn bf16() -> Self {
        Self::new()
            .with_param_dtype(DType::BF16)
            .with_reduce_dtype(DType::F32)
    }

    /// Gather and compute in f16, reduce in f32.
    pub fn f16() -> Self {
        Self::new()
            .with_param_dtype(DType::F16)
            .with_reduce_dtype(DType::F32)
    }

    /// Sets [`param_dtype`](Self::param_dtype).
    pub fn with_param_dtype(mut self, dtype: DType) -> Self {
        self.param_dtype = Some(dtype);
        self
    }

    /// Sets [`reduce_dtype`](Self::reduce_dtype).
    pub fn with_reduce_dtype(mut self, dtype: DType) -> Self {
        self.reduce_dtype = Some(dtype);
        self
    }

    /// Sets [`output_dtype`](Self::output_dtype).
    pub fn with_output_dtype(mut self, dtype: DType) -> Self {
        self.output_dtype = Some(dtype);
        self
    }

    /// Sets [`cast_forward_inputs`](Self::cast_forward_inputs).
    pub fn with_cast_forward_inputs(mut self, cast: bool) -> Self {
        self.cast_forward_inputs = cast;
        self
    }
}

impl Default for MixedPrecisionPolicy {
    fn default() -> Self {
        Self::new()
    }
}

/// What becomes of a unit's unsharded parameters after its forward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReshardAfterForward {
    /// `Always` for every unit but the root, which is needed again first in backward.
    #[default]
    Auto,
    /// Freed, and gathered again in backward (ZeRO-3).
    Always,
    /// Kept until the unit's gradients are reduced (ZeRO-2): more memory, one all-gather less.
    Never,
    /// Resharded over groups of this many neighbouring ranks, which must be a factor of the shard
    /// size: backward gathers within the group only. `1` means `Never`, the shard size `Always`.
    Groups(usize),
}

/// Where shards, their gradients and the optimizer's state live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OffloadPolicy {
    /// On the device of the model.
    #[default]
    None,
    /// In host memory; gathered units live on the device of the model.
    Cpu,
}

/// How gradients of ranks are combined.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum GradientAverage {
    /// Divided by the number of ranks. In f16 half of the division comes before the sum and half
    /// after, so that neither overflows nor underflows.
    #[default]
    Mean,
    /// Summed.
    Sum,
    /// Summed, then divided by this (a global token count, say).
    Factor(f64),
}

/// What every rank does when the total gradient norm is NaN or infinite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NonFinite {
    /// [`clip_grad_norm`](crate::FsdpModule::clip_grad_norm) is an error on every rank.
    #[default]
    Error,
    /// It returns no gradients, so that the following optimizer step changes nothing.
    Skip,
}

/// A module in the tree, as a unit policy sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModuleNode {
    /// The path from the root, for example `blocks.0.attn`.
    pub path: String,
    /// The name of its struct or enum, for example `Linear`; empty where Burn does not tell.
    pub type_name: String,
    /// Whether it is an element of a `Vec` or an array.
    pub is_element: bool,
}

type NodePredicate = Arc<dyn Fn(&ModuleNode) -> bool + Send + Sync>;
type PlacementFn = Arc<dyn Fn(&ParamInfo) -> Option<Placement> + Send + Sync>;

/// Which modules form units: groups of parameters that share one all-gather and one
/// reduce-scatter. What no unit holds belongs to the root unit; of nested units, the inner one wins.
#[derive(Clone, Default)]
pub enum UnitPolicy {
    /// Each element of every outermost `Vec` or array of modules that own parameters.
    #[default]
    Auto,
    /// The modules at these paths. `*` stands for one path component or a part of it, `**` for
    /// any number of them.
    Paths(Vec<String>),
    /// The modules of these struct or enum names.
    Types(Vec<String>),
    /// The modules that this function accepts.
    Function(NodePredicate),
}

impl UnitPolicy {
    /// The modules that `predicate` accepts. It must answer alike on all ranks.
    pub fn function(predicate: impl Fn(&ModuleNode) -> bool + Send + Sync + 'static) -> Self {
        Self::Function(Arc::new(predicate))
    }
}

impl fmt::Debug for UnitPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("Auto"),
            Self::Paths(paths) => f.debug_tuple("Paths").field(paths).finish(),
            Self::Types(types) => f.debug_tuple("Types").field(types).finish(),
            Self::Function(_) => f.write_str("Function"),
        }
    }
}

/// A parameter, as a placement function sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ParamInfo {
    /// The parameter's path, for example `blocks.0.attn.query.weight`.
    pub path: String,
    /// Its full shape.
    pub shape: Vec<usize>,
    /// The struct that owns it, for example `Linear`.
    pub owner: String,
}

/// What one unit does differently from the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnitConfig {
    pub(crate) mixed_precision: Option<MixedPrecisionPolicy>,
    pub(crate) reshard_after_forward: Option<ReshardAfterForward>,
}

impl UnitConfig {
    /// No difference.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the unit's own `param_dtype` and `reduce_dtype`.
    pub fn with_mixed_precision(mut self, policy: MixedPrecisionPolicy) -> Self {
        self.mixed_precision = Some(policy);
        self
    }

    /// Sets the unit's own policy after forward.
    pub fn with_reshard_after_forward(mut self, policy: ReshardAfterForward) -> Self {
        self.reshard_after_forward = Some(policy);
        self
    }
}

/// The settings of [`fully_shard`](crate::FullyShard::fully_shard). Must be equal on all ranks.
#[derive(Clone, Default)]
pub struct FsdpConfig {
    pub(crate) mixed_precision: MixedPrecisionPolicy,
    pub(crate) reshard_after_forward: ReshardAfterForward,
    pub(crate) units: UnitPolicy,
    pub(crate) unit_overrides: Vec<(String, UnitConfig)>,
    pub(crate) placement: Option<PlacementFn>,
    pub(crate) replicate_below: usize,
    pub(crate) ignored: Vec<String>,
    pub(crate) offload: OffloadPolicy,
    pub(crate) average: GradientAverage,
    pub(crate) non_finite: NonFinite,
    pub(crate) no_prefetch: bool,
}

impl FsdpConfig {
    /// Full precision, default units, every parameter on `Shard(0)`.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the dtypes of communication and compute. Default: the original ones.
    pub fn with_mixed_precision(mut self, policy: MixedPrecisionPolicy) -> Self {
        self.mixed_precision = policy;
        self
    }

    /// Sets what happens to unsharded parameters after forward.
    pub fn with_reshard_after_forward(mut self, policy: ReshardAfterForward) -> Self {
        self.reshard_after_forward = policy;
        self
    }

    /// Sets which modules form units.
    pub fn with_units(mut self, policy: UnitPolicy) -> Self {
        self.units = policy;
        self
    }

    /// Overrides settings for the units whose name matches `pattern` (`*` and `**` as in
    /// [`UnitPolicy::Paths`]; the root is `""`). Later calls win.
    pub fn with_unit(mut self, pattern: impl Into<String>, config: UnitConfig) -> Self {
        self.unit_overrides.push((pattern.into(), config));
        self
    }

    /// Chooses a placement for each parameter; `None` means `Shard(0)`. Must answer alike on all
    /// ranks.
    pub fn with_placement(
        mut self,
        placement: impl Fn(&ParamInfo) -> Option<Placement> + Send + Sync + 'static,
    ) -> Self {
        self.placement = Some(Arc::new(placement));
        self
    }

    /// Replicates parameters of fewer elements than this. Default 0: none.
    pub fn with_replicate_below(mut self, num_elements: usize) -> Self {
        self.replicate_below = num_elements;
        self
    }

    /// Leaves the parameters at these paths alone: neither sharded nor gathered nor reduced. They
    /// stay whole on each rank as the module had them, and may drift apart.
    pub fn with_ignored<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.ignored.extend(patterns.into_iter().map(Into::into));
        self
    }

    /// Sets where shards live.
    pub fn with_offload(mut self, policy: OffloadPolicy) -> Self {
        self.offload = policy;
        self
    }

    /// Sets how gradients are combined.
    pub fn with_gradient_average(mut self, average: GradientAverage) -> Self {
        self.average = average;
        self
    }

    /// Sets what happens on a NaN or infinite gradient norm.
    pub fn with_non_finite(mut self, decision: NonFinite) -> Self {
        self.non_finite = decision;
        self
    }

    /// Whether the next unit, in the order recorded in earlier steps, is gathered ahead. Default:
    /// yes. Without it one unit and the root are unsharded at a time, instead of two and the root.
    pub fn with_prefetch(mut self, prefetch: bool) -> Self {
        self.no_prefetch = !prefetch;
        self
    }
}

impl FsdpConfig {
    /// Refuses what can be seen to be wrong without a module.
    pub(crate) fn check(&self) -> Result<()> {
        if let Some(dtype) = self.mixed_precision.output_dtype
            && !dtype.is_float()
        {
            return Err(FsdpError::argument(format!(
                "{dtype:?} is no dtype for floating outputs"
            )));
        }
        match self.average {
            GradientAverage::Factor(factor) if !factor.is_normal() => Err(FsdpError::argument(
                format!("a gradient factor must be finite and not zero, not {factor}"),
            )),
            _ => Ok(()),
        }
    }
}

impl FsdpConfig {
    /// Each setting with its value in one line.
    fn settings(&self) -> [(&'static str, String); 11] {
        let text = |value: &dyn fmt::Debug| format!("{value:?}");
        [
            ("mixed_precision", text(&self.mixed_precision)),
            ("reshard_after_forward", text(&self.reshard_after_forward)),
            ("units", text(&self.units)),
            ("unit_overrides", text(&self.unit_overrides)),
            ("placement", text(&self.placement.is_some())),
            ("replicate_below", text(&self.replicate_below)),
            ("ignored", text(&self.ignored)),
            ("offload", text(&self.offload)),
            ("average", text(&self.average)),
            ("non_finite", text(&self.non_finite)),
            ("prefetch", text(&!self.no_prefetch)),
        ]
    }

    /// One setting a line, for ranks to compare.
    pub(crate) fn description(&self) -> String {
        let settings = self.settings().into_iter();
        let lines = settings.map(|(name, value)| format!("{name}: {value}\n"));
        lines.collect()
    }
}

impl fmt::Debug for FsdpConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("FsdpConfig");
        for (name, value) in self.settings() {
            debug.field(name, &format_args!("{value}"));
        }
        debug.finish()
    }
}

/// Whether `path` matches `pattern`: `*` is any run of characters without a dot, `**` any run.
pub(crate) fn path_matches(pattern: &str, path: &str) -> bool {
    if let Some(rest) = pattern.strip_prefix("**") {
        return (0..=path.len())
            .filter(|&i| path.is_char_boundary(i))
            .any(|i| path_matches(rest, &path[i..]));
    }
    if let Some(rest) = pattern.strip_prefix('*') {
        let component = path.find('.').unwrap_or(path.len());
        return (0..=component)
            .filter(|&i| path.is_char_boundary(i))
            .any(|i| path_matches(rest, &path[i..]));
    }
    match (pattern.chars().next(), path.chars().next()) {
        (None, None) => true,
        (Some(a), Some(b)) if a == b => {
            path_matches(&pattern[a.len_utf8()..], &path[b.len_utf8()..])
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::path_matches;

    #[test]
    fn one_star_stays_within_a_component() {
        assert!(path_matches("blocks.*", "blocks.11"));
        assert!(path_matches("blocks.1*.weight", "blocks.11.weight"));
        assert!(!path_matches("blocks.*", "blocks.1.attn"));
        assert!(!path_matches("blocks.*", "blocks"));
        assert!(path_matches("", ""));
        assert!(!path_matches("", "blocks"));
    }

    #[test]
    fn two_stars_cross_components() {
        assert!(path_matches("**.bias", "blocks.1.attn.bias"));
        assert!(path_matches("blocks.**", "blocks.1.attn"));
        assert!(!path_matches("**.bias", "blocks.1.attn.weight"));
    }
}
