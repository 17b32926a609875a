//! Which parameter is in which unit, and how it is placed. Decided from the module alone, before
//! anything is communicated, so that ranks can check that they decided alike.

use std::any::type_name;
use std::collections::{HashMap, HashSet};
use std::fmt;

use burn::module::{Module, ParamId};

use crate::config::{ModuleNode, ParamInfo, UnitConfig, path_matches};
use crate::placement::ShardLayout;
use crate::tree::{FoundParam, ModuleTree};
use crate::{FsdpConfig, FsdpError, Placement, Result, UnitPolicy};

/// Names shown in an error about a pattern that matches nothing.
const KNOWN_SHOWN: usize = 8;

/// What [`fully_shard`](crate::FullyShard::fully_shard) decided for a module: its units, and the
/// placement of every parameter. Prints as a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardingPlan {
    units: Vec<UnitPlan>,
    index: HashMap<String, MemberIndex>,
    tied: HashSet<(usize, usize)>,
    /// Ignored parameters, with their shapes.
    ignored: HashMap<String, Vec<usize>>,
    buffers: HashSet<String>,
    shard_size: usize,
}

/// One unit: parameters that share one all-gather and one reduce-scatter.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnitPlan {
    /// The path of its module; empty for the root unit.
    pub name: String,
    /// Its parameters, in traversal order; a tied parameter once, under its first path.
    pub params: Vec<ParamPlan>,
    pub(crate) config: UnitConfig,
}

/// One parameter of a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ParamPlan {
    /// Its path.
    pub path: String,
    /// Its full shape.
    pub shape: Vec<usize>,
    /// How it is placed over the shard dimension of the mesh.
    pub placement: Placement,
}

impl ParamPlan {
    pub(crate) fn layout(&self, shard_size: usize) -> ShardLayout {
        ShardLayout::new(&self.shape, self.placement, shard_size)
    }
}

/// Where a path leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemberIndex {
    pub(crate) unit: usize,
    pub(crate) member: usize,
    /// Whether this path is a further name of a tied parameter.
    pub(crate) is_alias: bool,
}

/// The index of the root unit.
pub(crate) const ROOT: usize = 0;

impl ShardingPlan {
    pub(crate) fn new<M: Module>(
        module: &M,
        config: &FsdpConfig,
        shard_size: usize,
        untied: &HashSet<String>,
    ) -> Result<Self> {
        let tree = ModuleTree::of(module)?;
        // A sharded module shows its shards as plain parameters, so only its type tells.
        if type_name::<M>().contains(concat!(env!("CARGO_CRATE_NAME"), "::module::FsdpModule<"))
            && let Some(param) = tree.params.first()
        {
            let path = param.path.clone();
            return Err(FsdpError::AlreadyReparameterized { path });
        }
        check_patterns("ignored pattern", &config.ignored, tree.param_paths())?;
        let ignored = |path: &str| config.ignored.iter().any(|p| path_matches(p, path));

        let unit_paths = unit_paths(&tree, &config.units, &ignored)?;
        let mut plan = Self {
            units: vec![UnitPlan::new("")],
            index: HashMap::new(),
            tied: HashSet::new(),
            ignored: HashMap::new(),
            buffers: HashSet::new(),
            shard_size,
        };
        let mut unit_of_name = HashMap::from([(String::new(), ROOT)]);
        let mut first_paths = HashMap::<ParamId, String>::new();
        for param in &tree.params {
            if !param.is_parameter {
                plan.buffers.insert(param.path.clone());
                continue;
            }
            if ignored(&param.path) {
                plan.ignored.insert(param.path.clone(), param.shape.clone());
                continue;
            }
            if param.shape.is_empty() {
                return Err(FsdpError::argument(format!(
                    "parameter \"{}\" has no dimension to shard; give it one of size 1",
                    param.path
                )));
            }
            let name = innermost(&unit_paths, &param.path);
            if let Some(first) = first_paths.get(&param.id)
                && !untied.contains(&param.path)
            {
                plan.add_alias(first.clone(), param, name)?;
                continue;
            }
            first_paths.entry(param.id).or_insert(param.path.clone());
            let unit = *unit_of_name.entry(name.to_string()).or_insert_with(|| {
                plan.units.push(UnitPlan::new(name));
                plan.units.len() - 1
            });
            let placement = choose_placement(config, param)?;
            let params = &mut plan.units[unit].params;
            let index = MemberIndex {
                unit,
                member: params.len(),
                is_alias: false,
            };
            plan.index.insert(param.path.clone(), index);
            params.push(ParamPlan {
                path: param.path.clone(),
                shape: param.shape.clone(),
                placement,
            });
        }
        if first_paths.is_empty() {
            return Err(FsdpError::NoParameters);
        }
        plan.apply_overrides(config)?;
        Ok(plan)
    }

    fn add_alias(&mut self, first: String, param: &FoundParam, unit: &str) -> Result<()> {
        let index = self.index[&first];
        let first_unit = &self.units[index.unit].name;
        if first_unit != unit {
            return Err(FsdpError::TiedAcrossUnits {
                first,
                first_unit: first_unit.clone(),
                second: param.path.clone(),
                second_unit: unit.to_string(),
            });
        }
        let alias = MemberIndex {
            is_alias: true,
            ..index
        };
        self.index.insert(param.path.clone(), alias);
        self.tied.insert((index.unit, index.member));
        Ok(())
    }

    fn apply_overrides(&mut self, config: &FsdpConfig) -> Result<()> {
        let patterns: Vec<_> = config
            .unit_overrides
            .iter()
            .map(|(p, _)| p.clone())
            .collect();
        let names = self.units.iter().map(|unit| unit.name.as_str());
        check_patterns("unit pattern", &patterns, names)?;
        for unit in &mut self.units {
            for (pattern, config) in &config.unit_overrides {
                if path_matches(pattern, &unit.name) {
                    unit.config = *config;
                }
            }
        }
        Ok(())
    }

    /// The units; the first is the root, which may be empty.
    pub fn units(&self) -> &[UnitPlan] {
        &self.units
    }

    /// The number of ranks over which parameters are sharded.
    pub fn shard_size(&self) -> usize {
        self.shard_size
    }

    /// Paths of floating tensors that are no unit's, sorted: ignored parameters and running
    /// statistics.
    pub fn left_alone(&self) -> impl Iterator<Item = &str> {
        let mut paths: Vec<_> = self.ignored.keys().chain(&self.buffers).collect();
        paths.sort_unstable();
        paths.into_iter().map(String::as_str)
    }

    pub(crate) fn param(&self, unit: usize, member: usize) -> &ParamPlan {
        &self.units[unit].params[member]
    }

    pub(crate) fn layout(&self, unit: usize, member: usize) -> ShardLayout {
        self.param(unit, member).layout(self.shard_size)
    }

    /// The shape of the ignored parameter at `path`, if there is one.
    pub(crate) fn ignored(&self, path: &str) -> Option<&[usize]> {
        self.ignored.get(path).map(Vec::as_slice)
    }

    /// Whether there are running statistics.
    pub(crate) fn has_buffers(&self) -> bool {
        !self.buffers.is_empty()
    }

    /// Whether the floating tensor at `path` is a running statistic, not a parameter.
    pub(crate) fn is_buffer(&self, path: &str) -> bool {
        self.buffers.contains(path)
    }

    /// Everything that must be equal on all ranks, one line for each parameter.
    pub(crate) fn description(&self) -> String {
        let mut lines = Vec::new();
        for unit in &self.units {
            for ParamPlan {
                path,
                shape,
                placement,
            } in &unit.params
            {
                let unit = &unit.name;
                lines.push(format!("{path} {shape:?} {placement} in unit \"{unit}\""));
            }
        }
        lines.extend(self.left_alone().map(|path| format!("{path} left alone")));
        lines.join("\n")
    }

    pub(crate) fn find(&self, path: &str) -> Option<MemberIndex> {
        self.index.get(path).copied()
    }

    /// The names of each parameter that has several, in traversal order within a parameter.
    pub(crate) fn tied_names(&self) -> Vec<Vec<String>> {
        let names_of = |&(unit, member): &(usize, usize)| {
            let first = &self.param(unit, member).path;
            let is_later = |(name, index): &(&String, &MemberIndex)| {
                (index.unit, index.member) == (unit, member) && *name != first
            };
            let mut later: Vec<_> = self.index.iter().filter(is_later).map(|(n, _)| n).collect();
            later.sort_unstable();
            std::iter::once(first).chain(later).cloned().collect()
        };
        self.tied.iter().map(names_of).collect()
    }

    /// Whether the parameter has more than one path.
    pub(crate) fn is_tied(&self, unit: usize, member: usize) -> bool {
        self.tied.contains(&(unit, member))
    }

    pub(crate) fn unit_index(&self, name: &str) -> Result<usize> {
        let found = self.units.iter().position(|unit| unit.name == name);
        found.ok_or_else(|| FsdpError::UnknownUnit {
            name: name.to_string(),
            known: self.units.iter().map(|unit| unit.name.clone()).collect(),
        })
    }
}

impl fmt::Display for ShardingPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for unit in &self.units {
            let elements = |params: &[ParamPlan]| -> usize {
                params
                    .iter()
                    .map(|p| p.shape.iter().product::<usize>())
                    .sum()
            };
            writeln!(
                f,
                "unit \"{}\": {} parameters, {} elements",
                unit.name,
                unit.params.len(),
                elements(&unit.params)
            )?;
            for param in &unit.params {
                writeln!(f, "  {} {:?} {}", param.path, param.shape, param.placement)?;
            }
        }
        let left_alone: Vec<_> = self.left_alone().collect();
        if !left_alone.is_empty() {
            writeln!(f, "left alone: {}", left_alone.join(", "))?;
        }
        Ok(())
    }
}

impl UnitPlan {
    fn new(name: &str) -> Self {
        Self {
            name: name.to_string(),
            params: Vec::new(),
            config: UnitConfig::new(),
        }
    }
}

fn choose_placement(config: &FsdpConfig, param: &FoundParam) -> Result<Placement> {
    let num_elements: usize = param.shape.iter().product();
    // Without elements there is nothing to split.
    if num_elements == 0 || num_elements < config.replicate_below {
        return Ok(Placement::Replicate);
    }
    let info = ParamInfo {
        path: param.path.clone(),
        shape: param.shape.clone(),
        owner: param.owner.clone(),
    };
    let chosen = config.placement.as_ref().and_then(|choose| choose(&info));
    match chosen.unwrap_or(Placement::Shard(0)) {
        Placement::Shard(dim) if dim >= param.shape.len() => Err(FsdpError::ShardDimOutOfRange {
            path: info.path,
            dim,
            shape: info.shape,
        }),
        placement => Ok(placement),
    }
}

/// The longest of `units` that `path` lies in; the root's empty name if none.
fn innermost<'a>(units: &'a [String], path: &str) -> &'a str {
    let holds = |unit: &&String| {
        path.strip_prefix(unit.as_str())
            .is_some_and(|rest| rest.starts_with('.'))
    };
    let inner = units.iter().filter(holds).max_by_key(|unit| unit.len());
    inner.map_or("", String::as_str)
}

fn check_patterns<'a>(
    what: &'static str,
    patterns: &[String],
    candidates: impl Iterator<Item = &'a str> + Clone,
) -> Result<()> {
    for pattern in patterns {
        if !candidates.clone().any(|path| path_matches(pattern, path)) {
            let mut known: Vec<String> = Vec::new();
            for candidate in candidates.filter(|candidate| !candidate.is_empty()) {
                if known.len() < KNOWN_SHOWN && !known.iter().any(|k| k == candidate) {
                    known.push(candidate.to_string());
                }
            }
            return Err(FsdpError::PatternUnmatched {
                what,
                pattern: pattern.clone(),
                known,
            });
        }
    }
    Ok(())
}

/// Paths of the modules that `policy` makes units of.
fn unit_paths(
    tree: &ModuleTree,
    policy: &UnitPolicy,
    ignored: &dyn Fn(&str) -> bool,
) -> Result<Vec<String>> {
    let owns_parameters = |node: &&ModuleNode| {
        let prefix = format!("{}.", node.path);
        tree.params.iter().any(|param| {
            param.is_parameter && param.path.starts_with(&prefix) && !ignored(&param.path)
        })
    };
    let owners: Vec<&ModuleNode> = tree.nodes.iter().filter(owns_parameters).collect();
    match policy {
        UnitPolicy::Paths(patterns) => {
            let paths = owners.iter().map(|node| node.path.as_str());
            check_patterns("unit path", patterns, paths)?;
        }
        UnitPolicy::Types(types) => {
            let names = owners.iter().map(|node| node.type_name.as_str());
            check_patterns("unit type", types, names)?;
        }
        UnitPolicy::Auto | UnitPolicy::Function(_) => {}
    }
    let mut units: Vec<String> = Vec::new();
    for node in owners {
        let selected = match policy {
            UnitPolicy::Auto => node.is_element && innermost(&units, &node.path).is_empty(),
            UnitPolicy::Paths(patterns) => patterns.iter().any(|p| path_matches(p, &node.path)),
            UnitPolicy::Types(types) => types.contains(&node.type_name),
            UnitPolicy::Function(predicate) => predicate(node),
        };
        if selected {
            units.push(node.path.clone());
        }
    }
    Ok(units)
}
