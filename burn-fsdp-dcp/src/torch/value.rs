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
        Value::Int(value) => TorchValue::Int((*value).into()),
        Value::Long(value) => TorchValue::Int(**value),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn value_of(bytes: &[u8]) -> TorchValue {
        let pickle = Pickle::parse(bytes, &[]).unwrap();
        TorchValue::from_pickle(&pickle, bytes.len())
    }

    fn reason_of(bytes: &[u8]) -> String {
        match value_of(bytes) {
            TorchValue::Unsupported(reason) => reason,
            value => panic!("{value:?}"),
        }
    }

    #[test]
    fn what_nests_too_deep_is_not_read() {
        let mut bytes = b"\x80\x02)".to_vec();
        bytes.extend(std::iter::repeat_n(0x85, 1_000_000));
        bytes.push(b'.');
        assert!(reason_of(&bytes).contains("nested deeper"));
        assert!(reason_of(b"\x80\x02]q\0h\0a.").contains("nested deeper"));
    }

    #[test]
    fn what_shares_too_much_is_not_read() {
        let mut bytes = b"\x80\x04)\x94".to_vec();
        for n in 0..30 {
            bytes.extend([b'h', n, b'h', n, 0x86, 0x94]);
        }
        // All but the last pair are left on the stack, so they are put into one tuple.
        bytes.insert(2, b'(');
        bytes.extend(b"t.");
        assert!(reason_of(&bytes).contains("larger than what it was read from"));
    }

    #[test]
    fn what_is_shared_a_little_is_read() {
        let text = TorchValue::Str("a".to_string());
        let pair = TorchValue::Tuple(vec![text.clone(), text]);
        assert_eq!(value_of(b"\x80\x04\x8c\x01a\x94h\0\x86."), pair);
    }
}
