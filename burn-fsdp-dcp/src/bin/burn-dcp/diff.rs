//! `burn-dcp diff`: compares the tensors of two checkpoints.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use burn::tensor::{BoolStore, DType};
use burn_fsdp_dcp::{Region, TensorInfo, TensorSource};
use indicatif::ProgressBar;

use crate::failure::{Failure, Outcome};
use crate::open::open_any;
use crate::progress::bar;
use crate::select::cast;
use crate::text;
use crate::tree::described;

/// As much of a tensor is read at once.
const PIECE: u64 = 16 << 20;

/// Compares the tensors of two checkpoints
///
/// Prints what differs. Numbers are equal if |a - b| <= atol + rtol * |b|; NaN equals NaN. The exit code
/// is 0 if all is equal, 1 if not.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A checkpoint, of any format
    a: PathBuf,
    /// Another, of any format
    b: PathBuf,
    /// How much numbers may differ, as a fraction of that in B
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    rtol: f64,
    /// How much numbers may differ, whatever their size
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    atol: f64,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    for (option, value) in [("--rtol", args.rtol), ("--atol", args.atol)] {
        // Not a number is no number either.
        if value.is_nan() || value < 0.0 {
            return Err(Failure::of(format!(
                "{option} {value} is no tolerance; give 0 or more"
            )));
        }
    }
    let (a, b) = (open_any(&args.a)?, open_any(&args.b)?);
    let total = { a.tensors().iter() }.filter(|(name, _)| b.tensors().contains_key(*name));
    let bar = bar(total.map(|(_, info)| info.bytes()).sum(), "diff");
    let mut differ = 0;
    let mut equal = 0;
    for (name, info) in a.tensors() {
        let Some(other) = b.tensors().get(name) else {
            differ += 1;
            writeln!(out, "{name}: only in A, {}", described(info))?;
            continue;
        };
        let mut found = Vec::new();
        if info.shape != other.shape {
            found.push(format!(
                "shape {:?} in A, {:?} in B",
                info.shape, other.shape
            ));
        }
        if !is_same_type(info.dtype, other.dtype) {
            let (a, b) = (text::dtype(info.dtype), text::dtype(other.dtype));
            found.push(format!("type {a} in A, {b} in B"));
        }
        if info.shape == other.shape {
            let difference = Pair {
                a: (&a, info),
                b: (&b, other),
                name,
            }
            .compare(args, &bar)?;
            found.extend(difference.describe());
        }
        if found.is_empty() {
            equal += 1;
        } else {
            differ += 1;
            bar.suspend(|| writeln!(out, "{name}: {}", found.join("; ")))?;
        }
    }
    for (name, info) in b.tensors() {
        if !a.tensors().contains_key(name) {
            differ += 1;
            writeln!(out, "{name}: only in B, {}", described(info))?;
        }
    }
    bar.finish_and_clear();
    writeln!(
        out,
        "{} equal, {differ} different",
        text::counted(equal, "tensor")
    )?;
    Ok(ExitCode::from(u8::from(differ > 0)))
}

fn is_same_type(a: DType, b: DType) -> bool {
    let is_bool = |dtype| matches!(dtype, DType::Bool(BoolStore::Native | BoolStore::U8));
    a == b || is_bool(a) && is_bool(b)
}

/// A tensor that both have, of one shape.
struct Pair<'a> {
    a: (&'a dyn TensorSource, &'a TensorInfo),
    b: (&'a dyn TensorSource, &'a TensorInfo),
    name: &'a str,
}

impl Pair<'_> {
    fn compare(&self, args: &Args, bar: &ProgressBar) -> Result<Difference, Failure> {
        let mut difference = Difference::default();
        let (a, b) = (self.a.1, self.b.1);
        let width = a.dtype.size().max(b.dtype.size()) as u64;
        let mut pieces = Vec::new();
        cut(&Region::whole(&a.shape), 0, PIECE / width, &mut pieces);
        for piece in pieces {
            let (from_a, from_b) = rayon::join(
                || self.a.0.read(self.name, &piece),
                || self.b.0.read(self.name, &piece),
            );
            let (from_a, from_b) = (from_a?, from_b?);
            bar.inc(from_a.len() as u64);
            // Mostly they are equal to the bit.
            if a.dtype == b.dtype && from_a == from_b {
                difference.count += from_a.len() as u64 / a.dtype.size() as u64;
                continue;
            }
            let of = |bytes, dtype| {
                Numbers::new(bytes, dtype).map_err(|why| {
                    Failure::of(format!("tensor \"{}\" can't be compared: {why}", self.name))
                })
            };
            difference.add(&of(from_a, a.dtype)?, &of(from_b, b.dtype)?, args);
        }
        Ok(difference)
    }
}

/// Cuts a region into rows of `most` elements at most, and rows too long into pieces.
fn cut(region: &Region, dim: usize, most: u64, pieces: &mut Vec<Region>) {
    let Some(volume) = region.volume().filter(|volume| *volume > 0) else {
        return;
    };
    if volume <= most || dim == region.sizes.len() {
        pieces.push(region.clone());
        return;
    }
    let rows = (most / (volume / region.sizes[dim])).max(1);
    let (start, end) = (region.offsets[dim], region.offsets[dim] + region.sizes[dim]);
    for offset in (start..end).step_by(rows as usize) {
        let mut part = region.clone();
        part.offsets[dim] = offset;
        part.sizes[dim] = rows.min(end - offset);
        cut(&part, dim + 1, most, pieces);
    }
}

/// Elements as numbers that lose nothing.
enum Numbers {
    Whole(Vec<i128>),
    Float(Vec<f64>),
}

impl Numbers {
    fn new(bytes: Vec<u8>, dtype: DType) -> Result<Self, String> {
        if dtype.is_float() {
            let bytes = cast(bytes, dtype, DType::F64)?;
            let floats = bytes.as_chunks().0.iter();
            return Ok(Self::Float(
                floats.map(|b| f64::from_le_bytes(*b)).collect(),
            ));
        }
        macro_rules! whole {
            ($type:ty) => {
                bytes
                    .as_chunks()
                    .0
                    .iter()
                    .map(|b| i128::from(<$type>::from_le_bytes(*b)))
                    .collect()
            };
        }
        Ok(Self::Whole(match dtype {
            DType::I64 => whole!(i64),
            DType::I32 => whole!(i32),
            DType::I16 => whole!(i16),
            DType::I8 => whole!(i8),
            DType::U64 => whole!(u64),
            DType::U32 => whole!(u32),
            DType::U16 => whole!(u16),
            DType::U8 | DType::Bool(BoolStore::Native | BoolStore::U8) => whole!(u8),
            dtype => return Err(format!("numbers of the type {dtype:?} are not known")),
        }))
    }

    fn floats(&self) -> std::borrow::Cow<'_, [f64]> {
        match self {
            Self::Whole(numbers) => numbers.iter().map(|n| *n as f64).collect(),
            Self::Float(numbers) => numbers.into(),
        }
    }
}

/// How two tensors differ.
#[derive(Debug, Default, PartialEq)]
struct Difference {
    count: u64,
    /// Elements beyond the tolerance.
    beyond: u64,
    max_abs: f64,
    max_rel: f64,
}

impl Difference {
    fn add(&mut self, a: &Numbers, b: &Numbers, args: &Args) {
        if let (Numbers::Whole(a), Numbers::Whole(b)) = (a, b) {
            // The difference is exact, so that large numbers next to each other differ.
            for (a, b) in a.iter().zip(b) {
                self.add_one((a - b).unsigned_abs() as f64, *b as f64, args);
            }
            return;
        }
        for (a, b) in a.floats().iter().zip(b.floats().iter()) {
            let is_equal = a == b || a.is_nan() && b.is_nan();
            let apart = if is_equal { 0.0 } else { (a - b).abs() };
            // One is no number, and the other is.
            let apart = if apart.is_nan() { f64::INFINITY } else { apart };
            self.add_one(apart, *b, args);
        }
    }

    fn add_one(&mut self, apart: f64, b: f64, args: &Args) {
        self.count += 1;
        if apart == 0.0 {
            return;
        }
        self.max_abs = self.max_abs.max(apart);
        let relative = apart / b.abs();
        self.max_rel = self.max_rel.max(if relative.is_nan() {
            f64::INFINITY
        } else {
            relative
        });
        // Infinity is no room: what lies infinitely far is beyond any tolerance.
        let is_within = apart.is_finite() && apart <= args.atol + args.rtol * b.abs();
        self.beyond += u64::from(!is_within);
    }

    fn describe(&self) -> Option<String> {
        let Self {
            count,
            beyond,
            max_abs,
            max_rel,
        } = self;
        (*beyond > 0).then(|| {
            format!("{beyond} of {count} elements, max abs {max_abs:e}, max rel {max_rel:e}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(rtol: f64, atol: f64) -> Args {
        let (a, b) = (PathBuf::new(), PathBuf::new());
        Args { a, b, rtol, atol }
    }

    fn difference(a: &[f64], b: &[f64], args: &Args) -> Difference {
        let mut difference = Difference::default();
        let numbers = |n: &[f64]| Numbers::Float(n.to_vec());
        difference.add(&numbers(a), &numbers(b), args);
        difference
    }

    #[test]
    fn not_a_number_equals_itself_and_nothing_else() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        let exact = args(0.0, 0.0);
        assert_eq!(
            difference(&[nan, inf, 0.0], &[nan, inf, -0.0], &exact).beyond,
            0
        );
        let wide = args(1.0, 1e9);
        let found = difference(&[nan, 1.0, inf, 1.0], &[1.0, nan, -inf, inf], &wide);
        assert_eq!((found.beyond, found.max_abs), (4, inf));
    }

    #[test]
    fn tolerances_add_up() {
        let found = difference(&[1.1, 0.1], &[1.0, 0.0], &args(0.05, 0.06));
        assert_eq!((found.beyond, found.count), (1, 2));
        assert_eq!((found.max_abs * 1e3).round(), 100.0);
        assert_eq!(found.max_rel, f64::INFINITY);
    }

    #[test]
    fn large_whole_numbers_next_to_each_other_differ() {
        let numbers = |n: u64| Numbers::new(n.to_le_bytes().to_vec(), DType::U64).unwrap();
        let mut found = Difference::default();
        found.add(&numbers(u64::MAX), &numbers(u64::MAX - 1), &args(0.0, 0.0));
        assert_eq!((found.beyond, found.max_abs), (1, 1.0));
    }

    #[test]
    fn pieces_cover_a_tensor_in_order() {
        for (shape, most) in [
            (vec![5, 3], 7),
            (vec![2, 5], 4),
            (vec![2, 3, 4], 5),
            (vec![], 1),
        ] {
            let whole = Region::whole(&shape);
            let mut pieces = Vec::new();
            cut(&whole, 0, most, &mut pieces);
            let mut next = 0;
            for piece in &pieces {
                assert!(piece.fits(&shape) && piece.volume().unwrap() <= most);
                for run in whole.runs(piece) {
                    assert_eq!(run.from, next);
                    next += run.len;
                }
            }
            assert_eq!(next, whole.volume().unwrap());
        }
    }
}
