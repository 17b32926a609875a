//! The instructions of a pickle, run as far as they describe plain data.

use std::collections::HashMap;

use super::pickle_value::{Allowed, Id, PickleError, Result, Value};

/// The instructions of plain data, by their codes.
pub(super) mod op {
    pub(in crate::torch) const PROTO: u8 = 0x80;
    pub(in crate::torch) const FRAME: u8 = 0x95;
    pub(in crate::torch) const STOP: u8 = b'.';
    pub(in crate::torch) const MARK: u8 = b'(';
    pub(in crate::torch) const NONE: u8 = b'N';
    pub(in crate::torch) const NEWTRUE: u8 = 0x88;
    pub(in crate::torch) const NEWFALSE: u8 = 0x89;
    pub(in crate::torch) const BININT: u8 = b'J';
    pub(in crate::torch) const BININT1: u8 = b'K';
    pub(in crate::torch) const BININT2: u8 = b'M';
    pub(in crate::torch) const LONG1: u8 = 0x8a;
    pub(in crate::torch) const BINFLOAT: u8 = b'G';
    pub(in crate::torch) const BINUNICODE: u8 = b'X';
    pub(in crate::torch) const SHORT_BINUNICODE: u8 = 0x8c;
    pub(in crate::torch) const BINUNICODE8: u8 = 0x8d;
    pub(in crate::torch) const BINBYTES: u8 = b'B';
    pub(in crate::torch) const SHORT_BINBYTES: u8 = b'C';
    pub(in crate::torch) const BINBYTES8: u8 = 0x8e;
    pub(in crate::torch) const EMPTY_TUPLE: u8 = b')';
    pub(in crate::torch) const TUPLE: u8 = b't';
    pub(in crate::torch) const TUPLE1: u8 = 0x85;
    pub(in crate::torch) const TUPLE2: u8 = 0x86;
    pub(in crate::torch) const TUPLE3: u8 = 0x87;
    pub(in crate::torch) const EMPTY_LIST: u8 = b']';
    pub(in crate::torch) const APPEND: u8 = b'a';
    pub(in crate::torch) const APPENDS: u8 = b'e';
    pub(in crate::torch) const EMPTY_DICT: u8 = b'}';
    pub(in crate::torch) const SETITEM: u8 = b's';
    pub(in crate::torch) const SETITEMS: u8 = b'u';
    pub(in crate::torch) const GLOBAL: u8 = b'c';
    pub(in crate::torch) const STACK_GLOBAL: u8 = 0x93;
    pub(in crate::torch) const REDUCE: u8 = b'R';
    pub(in crate::torch) const NEWOBJ: u8 = 0x81;
    pub(in crate::torch) const BUILD: u8 = b'b';
    pub(in crate::torch) const BINPERSID: u8 = b'Q';
    pub(in crate::torch) const BINPUT: u8 = b'q';
    pub(in crate::torch) const LONG_BINPUT: u8 = b'r';
    pub(in crate::torch) const MEMOIZE: u8 = 0x94;
    pub(in crate::torch) const BINGET: u8 = b'h';
    pub(in crate::torch) const LONG_BINGET: u8 = b'j';
}

/// Runs a pickle. Every instruction is a byte at least, makes one value at most and takes what it joins
/// from the stack, so everything here is bounded by the length of the pickle.
pub(super) struct Machine<'a, 'w> {
    bytes: &'a [u8],
    allowed: &'w Allowed,
    at: usize,
    /// Where the instruction being run began.
    op_at: usize,
    values: Vec<Value<'a>>,
    stack: Vec<Id>,
    /// The heights of the stack at its marks.
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
}

impl<'a, 'w> Machine<'a, 'w> {
    pub(super) fn new(bytes: &'a [u8], allowed: &'w Allowed) -> Self {
        Self {
            bytes,
            allowed,
            at: 0,
            op_at: 0,
            values: Vec::new(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
        }
    }

    /// The values, and which of them the pickle stands for.
    pub(super) fn run(mut self) -> Result<(Vec<Value<'a>>, Id)> {
        if u32::try_from(self.bytes.len()).is_err() {
            return Err(self.bad("it is longer than 4 GiB"));
        }
        while self.peek() != Some(op::STOP) {
            self.op_at = self.at;
            let code = self.number::<1>()?[0];
            self.step(code)?;
        }
        self.op_at = self.at;
        let root = self.pop()?;
        if !self.stack.is_empty() || !self.marks.is_empty() {
            return Err(self.bad("it ends with values left over"));
        }
        if self.at + 1 != self.bytes.len() {
            return Err(self.bad("it ends before the bytes do"));
        }
        Ok((self.values, root))
    }

    fn step(&mut self, code: u8) -> Result<()> {
        match code {
            op::PROTO => {
                let [version] = self.number()?;
                if !(2..=5).contains(&version) {
                    return Err(self.bad(format!("protocol {version} is not known")));
                }
            }
            // Frames only help a reader to buffer.
            op::FRAME => {
                let len = u64::from_le_bytes(self.number()?);
                self.check_length(len)?;
            }
            op::MARK => self.marks.push(self.stack.len()),
            op::NONE => self.push(Value::None),
            op::NEWTRUE => self.push(Value::Bool(true)),
            op::NEWFALSE => self.push(Value::Bool(false)),
            op::BININT1 => {
                let [n] = self.number()?;
                self.push(Value::Int(n.into()));
            }
            op::BININT2 => {
                let n = u16::from_le_bytes(self.number()?);
                self.push(Value::Int(n.into()));
            }
            op::BININT => {
                let n = i32::from_le_bytes(self.number()?);
                self.push(Value::Int(n.into()));
            }
            op::LONG1 => {
                let n = self.long()?;
                let short = i64::try_from(n).map(Value::Int);
                self.push(short.unwrap_or_else(|_| Value::Long(Box::new(n))));
            }
            op::BINFLOAT => {
                let x = f64::from_be_bytes(self.number()?);
                self.push(Value::Float(x));
            }
            op::SHORT_BINUNICODE | op::BINUNICODE | op::BINUNICODE8 => {
                let bytes = self.counted(code)?;
                let text = self.text(bytes)?;
                self.push(Value::Str(text));
            }
            op::SHORT_BINBYTES | op::BINBYTES | op::BINBYTES8 => {
                let bytes = self.counted(code)?;
                self.push(Value::Bytes(bytes));
            }
            op::EMPTY_TUPLE => self.push(Value::Tuple(Vec::new())),
            op::TUPLE1 => self.tuple(1)?,
            op::TUPLE2 => self.tuple(2)?,
            op::TUPLE3 => self.tuple(3)?,
            op::TUPLE => {
                let items = self.pop_mark()?;
                self.push(Value::Tuple(items));
            }
            op::EMPTY_LIST => self.push(Value::List(Vec::new())),
            op::APPEND => {
                let item = self.pop()?;
                self.append(vec![item])?;
            }
            op::APPENDS => {
                let items = self.pop_mark()?;
                self.append(items)?;
            }
            op::EMPTY_DICT => self.push(Value::Dict(Vec::new())),
            op::SETITEM => {
                let value = self.pop()?;
                let key = self.pop()?;
                self.set_items(&[key, value])?;
            }
            op::SETITEMS => {
                let items = self.pop_mark()?;
                self.set_items(&items)?;
            }
            op::GLOBAL => {
                let module = self.line()?;
                let name = self.line()?;
                self.global(module, name)?;
            }
            op::STACK_GLOBAL => {
                let name = self.pop_text()?;
                let module = self.pop_text()?;
                self.global(module, name)?;
            }
            op::REDUCE | op::NEWOBJ => self.object()?,
            op::BUILD => self.build()?,
            op::BINPERSID => {
                let id = self.pop()?;
                self.push(Value::Persistent(id));
            }
            op::BINPUT => {
                let [n] = self.number()?;
                self.put(n.into())?;
            }
            op::LONG_BINPUT => {
                let n = u32::from_le_bytes(self.number()?);
                self.put(n)?;
            }
            op::MEMOIZE => self.put(self.memo.len() as u32)?,
            op::BINGET => {
                let [n] = self.number()?;
                self.get(n.into())?;
            }
            op::LONG_BINGET => {
                let n = u32::from_le_bytes(self.number()?);
                self.get(n)?;
            }
            code => {
                return Err(self.bad(format!("instruction {code:#04x} is not one of plain data")));
            }
        }
        Ok(())
    }

    fn tuple(&mut self, len: usize) -> Result<()> {
        self.check_height(len)?;
        let items = self.stack.split_off(self.stack.len() - len);
        self.push(Value::Tuple(items));
        Ok(())
    }

    fn append(&mut self, items: Vec<Id>) -> Result<()> {
        match self.top()? {
            Value::List(list) => list.extend(items),
            _ => return Err(self.bad("only lists can be appended to")),
        }
        Ok(())
    }

    fn set_items(&mut self, items: &[Id]) -> Result<()> {
        if !items.len().is_multiple_of(2) {
            return Err(self.bad("a key has no value"));
        }
        match self.top()? {
            Value::Dict(dict) => dict.extend(items.chunks_exact(2).map(|pair| (pair[0], pair[1]))),
            _ => return Err(self.bad("only dicts have items")),
        }
        Ok(())
    }

    fn global(&mut self, module: &'a str, name: &'a str) -> Result<()> {
        let of_module = self.allowed.iter().filter(|(known, _)| *known == module);
        if !{ of_module }.any(|(_, names)| names.contains(&name)) {
            return Err(PickleError::Forbidden {
                at: self.op_at,
                module: excerpt(module),
                name: excerpt(name),
            });
        }
        self.push(Value::Global(Box::new((module, name))));
        Ok(())
    }

    fn object(&mut self) -> Result<()> {
        let args = self.pop()?;
        let class = self.pop()?;
        if !matches!(self.get_value(class), Value::Global(..)) {
            return Err(self.bad("what is called is not a name"));
        }
        if !matches!(self.get_value(args), Value::Tuple(_)) {
            return Err(self.bad("arguments are not a tuple"));
        }
        self.push(Value::Object {
            class,
            args,
            state: None,
        });
        Ok(())
    }

    fn build(&mut self) -> Result<()> {
        let told = self.pop()?;
        match self.top()? {
            Value::Object { state, .. } if state.is_none() => *state = Some(told),
            _ => return Err(self.bad("only a new object takes a state")),
        }
        Ok(())
    }

    fn put(&mut self, n: u32) -> Result<()> {
        self.check_height(1)?;
        self.memo.insert(n, self.stack[self.stack.len() - 1]);
        Ok(())
    }

    fn get(&mut self, n: u32) -> Result<()> {
        let Some(id) = self.memo.get(&n) else {
            return Err(self.bad(format!("no value was noted under {n}")));
        };
        self.stack.push(*id);
        Ok(())
    }

    fn push(&mut self, value: Value<'a>) {
        self.stack.push(Id(self.values.len() as u32));
        self.values.push(value);
    }

    fn pop(&mut self) -> Result<Id> {
        self.check_height(1)?;
        let id = self.stack.pop();
        id.ok_or_else(|| self.bad("a value is missing"))
    }

    fn pop_text(&mut self) -> Result<&'a str> {
        let id = self.pop()?;
        match self.get_value(id) {
            Value::Str(text) => Ok(text),
            _ => Err(self.bad("a name is not text")),
        }
    }

    fn pop_mark(&mut self) -> Result<Vec<Id>> {
        let Some(height) = self.marks.pop() else {
            return Err(self.bad("there is no mark"));
        };
        Ok(self.stack.split_off(height))
    }

    fn top(&mut self) -> Result<&mut Value<'a>> {
        self.check_height(1)?;
        let id = self.stack[self.stack.len() - 1];
        Ok(&mut self.values[id.0 as usize])
    }

    fn get_value(&self, id: Id) -> &Value<'a> {
        &self.values[id.0 as usize]
    }

    /// What is below a mark is out of reach.
    fn check_height(&self, len: usize) -> Result<()> {
        let floor = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() < floor + len {
            return Err(self.bad("a value is missing"));
        }
        Ok(())
    }

    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn number<const N: usize>(&mut self) -> Result<[u8; N]> {
        let bytes = self.take(N as u64)?;
        Ok(std::array::from_fn(|i| bytes[i]))
    }

    /// The bytes behind an instruction that gives their number first.
    fn counted(&mut self, code: u8) -> Result<&'a [u8]> {
        let len = match code {
            op::SHORT_BINUNICODE | op::SHORT_BINBYTES => u64::from(self.number::<1>()?[0]),
            op::BINUNICODE | op::BINBYTES => u32::from_le_bytes(self.number()?).into(),
            _ => u64::from_le_bytes(self.number()?),
        };
        self.take(len)
    }

    fn long(&mut self) -> Result<i128> {
        let len = self.number::<1>()?[0];
        let bytes = self.take(len.into())?;
        if bytes.len() > 16 {
            return Err(self.bad("an integer is longer than 128 bits"));
        }
        let sign = if bytes.last().is_some_and(|b| *b >= 0x80) {
            0xff
        } else {
            0
        };
        let mut all = [sign; 16];
        all[..bytes.len()].copy_from_slice(bytes);
        Ok(i128::from_le_bytes(all))
    }

    fn line(&mut self) -> Result<&'a str> {
        let rest = &self.bytes[self.at..];
        let Some(len) = rest.iter().position(|b| *b == b'\n') else {
            return Err(self.bad("a name does not end"));
        };
        self.at += len + 1;
        self.text(&rest[..len])
    }

    fn text(&self, bytes: &'a [u8]) -> Result<&'a str> {
        std::str::from_utf8(bytes).map_err(|_| self.bad("text is not UTF-8"))
    }

    fn take(&mut self, len: u64) -> Result<&'a [u8]> {
        self.check_length(len)?;
        let start = self.at;
        self.at += len as usize;
        Ok(&self.bytes[start..self.at])
    }

    fn check_length(&self, len: u64) -> Result<()> {
        let left = self.bytes.len() - self.at;
        if len > left as u64 {
            return Err(self.bad(format!("it asks for {len} bytes where {left} are left")));
        }
        Ok(())
    }

    fn bad(&self, detail: impl Into<String>) -> PickleError {
        PickleError::Malformed {
            at: self.op_at,
            detail: detail.into(),
        }
    }
}

/// Enough of a name for a message.
fn excerpt(name: &str) -> String {
    name.chars().take(100).collect()
}
