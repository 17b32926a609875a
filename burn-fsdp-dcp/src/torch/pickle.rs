//! Pickles of plain data, read without running anything.
//!
//! A pickle is a program. This reads the instructions that plain data needs, and keeps references to
//! Python's classes and functions as names: nothing is ever called. All values lie side by side in one
//! arena and refer to each other by number. So what a pickle shares stays shared, no depth of nesting
//! can exhaust the stack, and memory grows with the length of the pickle, whatever it claims.

use std::fmt;

use super::pickle_machine::Machine;

/// Modules, and what may be referred to in each.
pub(super) type Allowed = [(&'static str, &'static [&'static str])];

/// Why a pickle is not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum PickleError {
    #[error("byte {at} of the pickle: {detail}")]
    Malformed { at: usize, detail: String },
    #[error("byte {at} of the pickle refers to {module}.{name}, which is not allowed")]
    Forbidden {
        at: usize,
        module: String,
        name: String,
    },
}

pub(super) type Result<T> = std::result::Result<T, PickleError>;

/// The number of a value in its pickle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Id(pub(super) u32);

/// One value; those it holds are given by their numbers.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value<'a> {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(&'a str),
    Bytes(&'a [u8]),
    Tuple(Vec<Id>),
    List(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    /// A class, function or constant: module and name.
    Global(&'a str, &'a str),
    /// What calling a class or function with these arguments would give, then told its state.
    Object {
        class: Id,
        args: Id,
        state: Option<Id>,
    },
    /// What the program that wrote the pickle keeps outside of it.
    Persistent(Id),
}

/// The values of a pickle.
pub(super) struct Pickle<'a> {
    values: Vec<Value<'a>>,
    root: Id,
}

/// A value with the pickle it is in.
#[derive(Clone, Copy)]
pub(super) struct Node<'p> {
    pickle: &'p Pickle<'p>,
    id: Id,
}

impl fmt::Debug for Pickle<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pickle of {} values", self.values.len())
    }
}

impl fmt::Debug for Node<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?}", self.id, self.value())
    }
}

impl<'a> Pickle<'a> {
    /// Reads a pickle that refers to nothing but what is allowed.
    pub(super) fn parse(bytes: &'a [u8], allowed: &Allowed) -> Result<Self> {
        let (values, root) = Machine::new(bytes, allowed).run()?;
        Ok(Self { values, root })
    }

    /// The number of values.
    pub(super) fn len(&self) -> usize {
        self.values.len()
    }

    /// The value that the pickle stands for.
    pub(super) fn root(&self) -> Node<'_> {
        Node {
            pickle: self,
            id: self.root,
        }
    }
}

impl<'p> Node<'p> {
    pub(super) fn value(self) -> &'p Value<'p> {
        &self.pickle.values[self.id.0 as usize]
    }

    fn at(self, id: Id) -> Self {
        Self { id, ..self }
    }

    pub(super) fn is_none(self) -> bool {
        matches!(self.value(), Value::None)
    }

    pub(super) fn str(self) -> Option<&'p str> {
        match self.value() {
            Value::Str(text) => Some(text),
            _ => None,
        }
    }

    pub(super) fn u64(self) -> Option<u64> {
        match self.value() {
            Value::Int(n) => u64::try_from(*n).ok(),
            _ => None,
        }
    }

    /// What a list or a tuple holds.
    pub(super) fn items(self) -> Option<impl ExactSizeIterator<Item = Self>> {
        match self.value() {
            Value::Tuple(ids) | Value::List(ids) => Some(ids.iter().map(move |id| self.at(*id))),
            _ => None,
        }
    }

    /// Item `n` of a list or a tuple.
    pub(super) fn item(self, n: usize) -> Option<Self> {
        self.items()?.nth(n)
    }

    /// What a dict holds.
    pub(super) fn pairs(self) -> Option<impl ExactSizeIterator<Item = (Self, Self)>> {
        match self.value() {
            Value::Dict(pairs) => Some({
                let nodes = pairs.iter();
                nodes.map(move |(key, value)| (self.at(*key), self.at(*value)))
            }),
            _ => None,
        }
    }

    /// Module and name of a class, function or constant.
    pub(super) fn global(self) -> Option<(&'p str, &'p str)> {
        match self.value() {
            Value::Global(module, name) => Some((module, name)),
            _ => None,
        }
    }

    /// Module and name of what made this object.
    pub(super) fn class(self) -> Option<(&'p str, &'p str)> {
        match self.value() {
            Value::Object { class, .. } => self.at(*class).global(),
            _ => None,
        }
    }

    /// The arguments that an object was made with.
    pub(super) fn args(self) -> Option<Self> {
        match self.value() {
            Value::Object { args, .. } => Some(self.at(*args)),
            _ => None,
        }
    }

    pub(super) fn state(self) -> Option<Self> {
        match self.value() {
            Value::Object { state, .. } => state.map(|id| self.at(id)),
            _ => None,
        }
    }

    /// A field of an object whose state is a dict.
    pub(super) fn field(self, name: &str) -> Option<Self> {
        let mut pairs = self.state()?.pairs()?;
        pairs
            .find(|(key, _)| key.str() == Some(name))
            .map(|(_, value)| value)
    }

    /// What a persistent reference holds.
    pub(super) fn persistent(self) -> Option<Self> {
        match self.value() {
            Value::Persistent(id) => Some(self.at(*id)),
            _ => None,
        }
    }
}
