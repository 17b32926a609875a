//! Pickles of plain data, read without running anything.
//!
//! A pickle is a program. This reads the instructions that plain data needs, and keeps references to
//! Python's classes and functions as names: nothing is ever called. All values lie side by side in one
//! arena and refer to each other by number. So what a pickle shares stays shared, no depth of nesting
//! can exhaust the stack, and memory grows with the length of the pickle, whatever it claims.

use std::fmt;

use super::pickle_machine::Machine;
pub(super) use super::pickle_value::{Allowed, Id, PickleError, Result, Value};

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
            Value::Long(n) => u64::try_from(**n).ok(),
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
            Value::Global(name) => Some(**name),
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

#[cfg(test)]
mod tests {
    use super::super::pickle_writer::PickleWriter;
    use super::*;
    use proptest::prelude::*;

    const NAMES: &Allowed = &[("torch", &["Size", "float32"])];

    fn error_of(bytes: &[u8]) -> String {
        Pickle::parse(bytes, NAMES).unwrap_err().to_string()
    }

    #[test]
    fn what_is_written_is_read() {
        let mut writer = PickleWriter::new();
        writer.object("torch", "Size", |p| {
            p.dict(|p| {
                p.str("numbers");
                p.ints(&[0, 300, 1 << 40, u64::MAX]);
                p.str("list");
                p.list(|p| {
                    p.none();
                    p.bool(true);
                    p.persistent(|p| p.str("kept"));
                    p.call("torch", "float32", |p| p.str("argument"));
                });
            });
        });
        let bytes = writer.finish();
        let pickle = Pickle::parse(&bytes, NAMES).unwrap();
        let root = pickle.root();
        assert_eq!(root.class(), Some(("torch", "Size")));
        let numbers = root.field("numbers").and_then(Node::items).unwrap();
        let numbers: Vec<_> = numbers.map(|n| n.u64().unwrap()).collect();
        assert_eq!(numbers, [0, 300, 1 << 40, u64::MAX]);
        let list = root.field("list").unwrap();
        assert!(list.item(0).unwrap().is_none());
        assert_eq!(*list.item(1).unwrap().value(), Value::Bool(true));
        let kept = list.item(2).and_then(Node::persistent);
        assert_eq!(kept.and_then(Node::str), Some("kept"));
        let call = list.item(3).unwrap();
        assert_eq!(call.class(), Some(("torch", "float32")));
        assert_eq!(
            call.args().unwrap().item(0).unwrap().str(),
            Some("argument")
        );
    }

    #[test]
    fn protocol_4_is_read_in_several_frames() {
        let mut bytes = b"\x80\x04\x95\x08\0\0\0\0\0\0\0(\x8c\x01a\x94h\0N".to_vec();
        bytes.extend(
            b"\x95\x1c\0\0\0\0\0\0\0\x8d\x02\0\0\0\0\0\0\0bcX\x01\0\0\0dG?\xf8\0\0\0\0\0\0t.",
        );
        let pickle = Pickle::parse(&bytes, NAMES).unwrap();
        let items: Vec<_> = pickle.root().items().unwrap().map(Node::value).collect();
        let expected = [
            Value::Str("a"),
            Value::Str("a"),
            Value::None,
            Value::Str("bc"),
            Value::Str("d"),
            Value::Float(1.5),
        ];
        assert_eq!(items, expected.iter().collect::<Vec<_>>());
    }

    #[test]
    fn long_integers_have_their_sign() {
        let int = |bytes: &[u8]| {
            let pickle = [b"\x80\x04\x8a", bytes, b"."].concat();
            let pickle = Pickle::parse(&pickle, NAMES).unwrap();
            match pickle.root().value() {
                Value::Int(n) => i128::from(*n),
                Value::Long(n) => **n,
                value => panic!("{value:?}"),
            }
        };
        assert_eq!(int(b"\x00"), 0);
        assert_eq!(int(b"\x01\xff"), -1);
        assert_eq!(int(b"\x02\xff\x00"), 255);
        assert_eq!(int(b"\x05\x00\x00\x00\x80\xff"), -(1 << 31));
        assert_eq!(
            int(b"\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00"),
            u64::MAX.into()
        );
        assert!(error_of(b"\x80\x04\x8a\x11aaaaaaaaaaaaaaaaa.").contains("128 bits"));
    }

    #[test]
    fn a_forbidden_name_is_an_error_where_it_stands() {
        let error = Pickle::parse(b"\x80\x02cos\nsystem\nX\x02\0\0\0ls\x85R.", NAMES).unwrap_err();
        let expected = PickleError::Forbidden {
            at: 2,
            module: "os".into(),
            name: "system".into(),
        };
        assert_eq!(error, expected);
        let stacked = b"\x80\x04\x8c\x08builtins\x94\x8c\x04eval\x94\x93.";
        assert!(error_of(stacked).contains("byte 20 of the pickle refers to builtins.eval"));
    }

    #[test]
    fn a_value_is_small() {
        assert!(size_of::<Value<'_>>() <= 32);
    }

    #[test]
    fn what_was_read_so_far_can_be_referred_to_while_it_grows() {
        // A list that holds itself.
        let pickle = Pickle::parse(b"\x80\x02]q\0h\0a.", NAMES).unwrap();
        let root = pickle.root();
        assert_eq!(root.item(0).unwrap().id, root.id);
    }

    #[test]
    fn a_million_nested_tuples_are_read() {
        let mut bytes = b"\x80\x02)".to_vec();
        bytes.extend(std::iter::repeat_n(0x85, 1_000_000));
        bytes.push(b'.');
        let pickle = Pickle::parse(&bytes, NAMES).unwrap();
        assert_eq!(pickle.len(), 1_000_001);
    }

    #[test]
    fn tuples_of_shared_tuples_take_no_more_than_their_bytes() {
        // Each has the one before twice: 2 ^ 100 values, if they were copied.
        let mut bytes = b"\x80\x04()\x94".to_vec();
        for n in 0..100 {
            bytes.extend([b'h', n, b'h', n, 0x86, 0x94]);
        }
        bytes.extend(b"t.");
        let pickle = Pickle::parse(&bytes, NAMES).unwrap();
        assert_eq!(pickle.len(), 102);
    }

    #[test]
    fn claimed_lengths_are_checked_before_anything_is_taken() {
        for code in [0x8d, 0x8e, 0x95] {
            let bytes = [b"\x80\x04", &[code][..], &[0xff; 8]].concat();
            let error = error_of(&bytes);
            assert!(
                error.contains("18446744073709551615 bytes where 0"),
                "{error}"
            );
        }
        for code in [b'X', b'B'] {
            let bytes = [b"\x80\x04", &[code][..], &[0xff; 4]].concat();
            assert!(error_of(&bytes).contains("4294967295 bytes"));
        }
    }

    #[test]
    fn instructions_without_what_they_need_are_errors() {
        let broken: [&[u8]; 14] = [
            b".",
            b"\x80\x09N.",
            b"t.",
            b"N(\x85.",
            b"h\x05.",
            b"\x94.",
            b"NNa.",
            b"NNNs.",
            b"}(Nu.",
            b"N)R.",
            b"ctorch\nSize\nNR.",
            b"NNb.",
            b"NN.",
            b"(N.",
        ];
        for bytes in broken {
            error_of(bytes);
        }
        assert!(error_of(b"\x80\x02N.N").contains("before the bytes do"));
        assert!(error_of(b"\x80\x02I1\n.").contains("0x49"));
    }

    proptest! {
        #[test]
        fn no_bytes_are_too_strange(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Pickle::parse(&bytes, NAMES);
        }

        #[test]
        fn no_instructions_are_too_strange(
            bytes in prop::collection::vec(
                prop::sample::select(b"(.NK\x88\x85\x86t]ae}su)cRb\x81Qq\x94hj\x93\x8c\x01\0".to_vec()),
                0..60,
            ),
        ) {
            let _ = Pickle::parse(&bytes, NAMES);
        }
    }
}
