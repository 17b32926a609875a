//! The small values that a checkpoint keeps beside its tensors.

use super::pickle::{Node, Pickle, Value};

/// How deep lists and tuples may lie in each other.
const DEPTH: usize = 32;
/// Values may share what they hold, and copies of it must not outgrow what was read.
const COPIES: usize = 16;
const COPIES_FROM: usize = 1 << 20;

/// A value that a checkpoint of PyTorch keeps beside its tensors: a learning rate, the names of the
/// parameters of a group.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum TorchValue {
    /// `None`.
    None,
    /// A `bool`.
    Bool(bool),
    /// An `int`, if it fits.
    Int(i128),
    /// A `float`.
    Float(f64),
    /// A `str`.
    Str(String),
    /// A `list`.
    List(Vec<TorchValue>),
    /// A `tuple`.
    Tuple(Vec<TorchValue>),
    /// Anything else, with the reason why it was not read.
    Unsupported(String),
}

impl TorchValue {
    /// The value that a pickle stands for; of the bytes that it was read from, `len`.
    pub(super) fn from_pickle(pickle: &Pickle<'_>, len: usize) -> Self {
        let mut room = (len * COPIES).max(COPIES_FROM);
        convert(pickle.root(), 0, &mut room).unwrap_or_else(Self::Unsupported)
    }
}

fn convert(node: Node<'_>, depth: usize, room: &mut usize) -> Result<TorchValue, String> {
    if depth > DEPTH {
        return Err(format!("it is nested deeper than {DEPTH}"));
    }
    let cost = size_of::<TorchValue>() + node.str().map_or(0, str::len);
    *room = { room.checked_sub(cost) }.ok_or("it is larger than what it was read from")?;
    let mut items = || {
        let items = node.items().into_iter().flatten();
        { items.map(|item| convert(item, depth + 1, room)) }.collect::<Result<Vec<_>, _>>()
    };
    Ok(match node.value() {
        Value::None => TorchValue::None,
        Value::Bool(value) => TorchValue::Bool(*value),
        Value::Int(value) => TorchValue::Int(*value),
        Value::Float(value) => TorchValue::Float(*value),
        Value::Str(text) => TorchValue::Str(text.to_string()),
        Value::List(_) => TorchValue::List(items()?),
        Value::Tuple(_) => TorchValue::Tuple(items()?),
        Value::Bytes(_) => return Err("it holds bytes".into()),
        Value::Dict(_) => return Err("it holds a dict".into()),
        Value::Global(..) | Value::Object { .. } | Value::Persistent(_) => {
            return Err("it holds an object".into());
        }
    })
}
