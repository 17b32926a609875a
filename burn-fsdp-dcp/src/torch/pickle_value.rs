//! What a pickle is made of, and why one is not read.

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

/// One value; those it holds are given by their numbers. There are millions in the metadata of a large
/// checkpoint, so it is kept small.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value<'a> {
    None,
    Bool(bool),
    Int(i64),
    /// An integer that needs more than 64 bits.
    Long(Box<i128>),
    Float(f64),
    Str(&'a str),
    Bytes(&'a [u8]),
    Tuple(Vec<Id>),
    List(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    /// A class, function or constant: module and name.
    Global(Box<(&'a str, &'a str)>),
    /// What calling a class or function with these arguments would give, then told its state.
    Object {
        class: Id,
        args: Id,
        state: Option<Id>,
    },
    /// What the program that wrote the pickle keeps outside of it.
    Persistent(Id),
}
