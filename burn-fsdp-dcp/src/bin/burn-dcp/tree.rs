//! Names as a tree, split at dots.

use std::collections::BTreeMap;
use std::io::{self, Write};

use burn_fsdp_dcp::TensorInfo;

use crate::text;

/// What is under one part of a name.
#[derive(Debug, Default)]
pub(crate) struct Tree<'a> {
    tensor: Option<(&'a str, &'a TensorInfo)>,
    children: BTreeMap<Key<'a>, Tree<'a>>,
}

/// Numbers are in order of their value, before words.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Key<'a> {
    Number(u64, &'a str),
    Word(&'a str),
}

impl<'a> Key<'a> {
    fn new(part: &'a str) -> Self {
        part.parse()
            .map_or(Self::Word(part), |number| Self::Number(number, part))
    }

    fn text(&self) -> &'a str {
        match self {
            Self::Number(_, text) | Self::Word(text) => text,
        }
    }
}

impl<'a> Tree<'a> {
    pub(crate) fn new(tensors: &'a BTreeMap<String, TensorInfo>) -> Self {
        let mut root = Self::default();
        for (name, info) in tensors {
            let parts = name.split('.');
            let leaf = parts.fold(&mut root, |tree, part| {
                tree.children.entry(Key::new(part)).or_default()
            });
            leaf.tensor = Some((name, info));
        }
        root
    }

    /// Prints it, and under each tensor what `details` prints, given the indentation.
    pub(crate) fn print(
        &self,
        out: &mut dyn Write,
        details: &mut dyn FnMut(&mut dyn Write, &str, &str) -> io::Result<()>,
    ) -> io::Result<()> {
        // Shapes begin in one column.
        let column = self.width(0);
        self.print_children(out, 0, column, details)
    }

    fn width(&self, depth: usize) -> usize {
        let children = self.children.iter();
        let widths = children.map(|(key, child)| {
            let own = depth * 2 + key.text().chars().count();
            own.max(child.width(depth + 1))
        });
        widths.max().unwrap_or(0)
    }

    fn print_children(
        &self,
        out: &mut dyn Write,
        depth: usize,
        column: usize,
        details: &mut dyn FnMut(&mut dyn Write, &str, &str) -> io::Result<()>,
    ) -> io::Result<()> {
        let indent = "  ".repeat(depth);
        for (key, child) in &self.children {
            let width = column - depth * 2;
            match child.tensor {
                Some((name, info)) => {
                    writeln!(out, "{indent}{:width$}  {}", key.text(), described(info))?;
                    details(out, name, &format!("{indent}    "))?;
                }
                None => {
                    let bytes = text::bytes(child.bytes());
                    writeln!(out, "{indent}{:width$}  ({bytes})", key.text())?;
                }
            }
            child.print_children(out, depth + 1, column, details)?;
        }
        Ok(())
    }

    fn bytes(&self) -> u64 {
        let own = self.tensor.map_or(0, |(_, info)| info.bytes());
        own + self.children.values().map(Self::bytes).sum::<u64>()
    }
}

/// A tensor's type, shape and size.
pub(crate) fn described(info: &TensorInfo) -> String {
    let bytes = text::bytes(info.bytes());
    format!("{} {:?}  {bytes}", text::dtype(info.dtype), info.shape)
}
