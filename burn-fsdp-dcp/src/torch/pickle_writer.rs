//! Pickles of plain data, written.

use super::pickle_machine::op;

/// Writes pickles, protocol 2. Each call adds one value, or joins those before it.
#[derive(Debug)]
pub(super) struct PickleWriter {
    bytes: Vec<u8>,
}

impl PickleWriter {
    pub(super) fn new() -> Self {
        Self {
            bytes: vec![op::PROTO, 2],
        }
    }

    pub(super) fn none(&mut self) {
        self.bytes.push(op::NONE);
    }

    pub(super) fn bool(&mut self, value: bool) {
        let code = if value { op::NEWTRUE } else { op::NEWFALSE };
        self.bytes.push(code);
    }

    pub(super) fn int(&mut self, value: u64) {
        if let Ok(small) = i32::try_from(value) {
            self.bytes.push(op::BININT);
            self.bytes.extend(small.to_le_bytes());
        } else {
            // A ninth byte keeps the sign positive.
            self.bytes.extend([op::LONG1, 9]);
            self.bytes.extend(value.to_le_bytes());
            self.bytes.push(0);
        }
    }

    /// Names of tensors and of files; they fit in 4 GiB.
    pub(super) fn str(&mut self, text: &str) {
        self.bytes.push(op::BINUNICODE);
        self.bytes.extend((text.len() as u32).to_le_bytes());
        self.bytes.extend(text.as_bytes());
    }

    pub(super) fn global(&mut self, module: &str, name: &str) {
        self.bytes.push(op::GLOBAL);
        self.bytes.extend(format!("{module}\n{name}\n").as_bytes());
    }

    pub(super) fn tuple(&mut self, items: impl FnOnce(&mut Self)) {
        self.marked(op::TUPLE, items);
    }

    pub(super) fn ints(&mut self, values: &[u64]) {
        self.tuple(|p| values.iter().for_each(|n| p.int(*n)));
    }

    pub(super) fn list(&mut self, items: impl FnOnce(&mut Self)) {
        self.bytes.push(op::EMPTY_LIST);
        self.marked(op::APPENDS, items);
    }

    /// The items are keys, each before its value.
    pub(super) fn dict(&mut self, items: impl FnOnce(&mut Self)) {
        self.bytes.push(op::EMPTY_DICT);
        self.marked(op::SETITEMS, items);
    }

    pub(super) fn persistent(&mut self, value: impl FnOnce(&mut Self)) {
        value(self);
        self.bytes.push(op::BINPERSID);
    }

    /// A function of a module called with these arguments.
    pub(super) fn call(&mut self, module: &str, name: &str, args: impl FnOnce(&mut Self)) {
        self.global(module, name);
        self.tuple(args);
        self.bytes.push(op::REDUCE);
    }

    /// A new object of a class, without a state.
    pub(super) fn instance(&mut self, module: &str, class: &str) {
        self.global(module, class);
        self.bytes.extend([op::EMPTY_TUPLE, op::NEWOBJ]);
    }

    /// A new object of a class, then told its state.
    pub(super) fn object(&mut self, module: &str, class: &str, state: impl FnOnce(&mut Self)) {
        self.instance(module, class);
        state(self);
        self.bytes.push(op::BUILD);
    }

    /// Notes the last value.
    #[cfg(test)]
    pub(super) fn put(&mut self, note: u8) {
        self.bytes.extend([op::BINPUT, note]);
    }

    /// A value that was noted, once more.
    #[cfg(test)]
    pub(super) fn get(&mut self, note: u8) {
        self.bytes.extend([op::BINGET, note]);
    }

    pub(super) fn finish(mut self) -> Vec<u8> {
        self.bytes.push(op::STOP);
        self.bytes
    }

    fn marked(&mut self, code: u8, items: impl FnOnce(&mut Self)) {
        self.bytes.push(op::MARK);
        items(self);
        self.bytes.push(code);
    }
}
