//! Boxes in the coordinates of a whole tensor, and how one lies in another. Pure arithmetic.

use serde::{Deserialize, Serialize};

/// The elements of a tensor from `offsets`, `sizes` of them in each dimension.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Region {
    /// Where it begins.
    pub offsets: Vec<u64>,
    /// How far it goes.
    pub sizes: Vec<u64>,
}

/// A contiguous run of elements that two regions, each laid out row by row, have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Its first element in the region read from.
    pub from: u64,
    /// Its first element in the region written to.
    pub to: u64,
    /// Its length in elements.
    pub len: u64,
}

impl Run {
    /// The run in pieces of `most` elements at most.
    pub(crate) fn pieces(self, most: u64) -> impl Iterator<Item = Self> {
        (0..self.len).step_by(most as usize).map(move |at| Self {
            from: self.from + at,
            to: self.to + at,
            len: most.min(self.len - at),
        })
    }
}

impl Region {
    /// A whole tensor of this shape.
    pub fn whole(shape: &[u64]) -> Self {
        Self {
            offsets: vec![0; shape.len()],
            sizes: shape.to_vec(),
        }
    }

    /// The number of elements; none if it does not fit in 64 bits.
    pub fn volume(&self) -> Option<u64> {
        volume(&self.sizes)
    }

    /// Whether it has no element.
    pub fn is_empty(&self) -> bool {
        self.sizes.contains(&0)
    }

    /// Whether it lies within a tensor of this shape.
    pub fn fits(&self, shape: &[u64]) -> bool {
        let dims = self.offsets.iter().zip(&self.sizes).zip(shape);
        self.offsets.len() == shape.len() && self.sizes.len() == shape.len() && { dims }
            .all(|((o, s), n)| o.checked_add(*s).is_some_and(|end| end <= *n))
    }

    /// What both have in common, unless that is nothing. Both lie in one tensor.
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        let mut common = self.clone();
        for d in 0..self.sizes.len() {
            let start = self.offsets[d].max(other.offsets[d]);
            let end = self.end(d).min(other.end(d));
            if start >= end {
                return None;
            }
            common.offsets[d] = start;
            common.sizes[d] = end - start;
        }
        Some(common)
    }

    fn end(&self, dim: usize) -> u64 {
        self.offsets[dim] + self.sizes[dim]
    }

    /// The runs that take what both have in common from this region to `to`, in ascending order of
    /// both.
    pub fn runs<'a>(&'a self, to: &'a Self) -> impl Iterator<Item = Run> + 'a {
        let common = self.intersection(to);
        common.into_iter().flat_map(move |common| {
            // The dimensions behind `inner` are whole in both, so they are contiguous.
            let rank = common.sizes.len();
            let is_whole =
                |d: usize| self.sizes[d] == common.sizes[d] && to.sizes[d] == common.sizes[d];
            let inner = (0..rank).rev().find(|&d| !is_whole(d)).unwrap_or(0);
            let len = common.sizes[inner.min(rank)..].iter().product();
            let outer: Vec<u64> = common.sizes[..inner.min(rank)].to_vec();
            let count: u64 = outer.iter().product();
            (0..count).map(move |n| {
                let mut at = common.offsets.clone();
                let mut rest = n;
                for d in (0..outer.len()).rev() {
                    at[d] += rest % outer[d];
                    rest /= outer[d];
                }
                Run {
                    from: self.place(&at),
                    to: to.place(&at),
                    len,
                }
            })
        })
    }

    /// The number of the element at these coordinates of the whole tensor.
    fn place(&self, at: &[u64]) -> u64 {
        let dims = at.iter().zip(&self.offsets).zip(&self.sizes);
        dims.fold(0, |place, ((at, offset), size)| {
            place * size + (at - offset)
        })
    }
}

/// The number of elements of a shape; none if it does not fit in 64 bits.
pub(crate) fn volume(shape: &[u64]) -> Option<u64> {
    // A zero makes it none at all, however large the rest.
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(1u64, |v, n| v.checked_mul(*n))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn region(offsets: &[u64], sizes: &[u64]) -> Region {
        Region {
            offsets: offsets.to_vec(),
            sizes: sizes.to_vec(),
        }
    }

    #[test]
    fn rows_are_taken_in_one_run() {
        let from = region(&[2, 0], &[4, 3]);
        let to = region(&[0, 0], &[3, 3]);
        let runs: Vec<_> = from.runs(&to).collect();
        assert_eq!(
            runs,
            [Run {
                from: 0,
                to: 6,
                len: 3
            }]
        );
    }

    #[test]
    fn columns_are_taken_row_by_row() {
        let from = region(&[0, 0], &[2, 4]);
        let to = region(&[0, 2], &[2, 2]);
        let runs: Vec<_> = from.runs(&to).map(|r| (r.from, r.to, r.len)).collect();
        assert_eq!(runs, [(2, 0, 2), (6, 2, 2)]);
    }

    #[test]
    fn a_scalar_is_one_run() {
        let scalar = Region::whole(&[]);
        let runs: Vec<_> = scalar.runs(&scalar).collect();
        assert_eq!(
            runs,
            [Run {
                from: 0,
                to: 0,
                len: 1
            }]
        );
    }

    #[test]
    fn regions_apart_have_nothing_in_common() {
        let from = region(&[0, 0], &[2, 2]);
        assert_eq!(from.runs(&region(&[2, 0], &[1, 2])).count(), 0);
        assert_eq!(from.intersection(&region(&[1, 1], &[0, 1])), None);
    }

    #[test]
    fn a_volume_beyond_64_bits_is_none() {
        assert_eq!(volume(&[u64::MAX, 2]), None);
        assert_eq!(volume(&[u64::MAX, 2, 0]), Some(0));
        assert!(!region(&[u64::MAX], &[1]).fits(&[10]));
    }

    /// Two regions of one tensor.
    fn pairs() -> impl Strategy<Value = (Vec<u64>, Region, Region)> {
        let dim = (1u64..6).prop_flat_map(|n| {
            let part = (0..n).prop_flat_map(move |o| (Just(o), 0..=n - o));
            (Just(n), part.clone(), part)
        });
        prop::collection::vec(dim, 0..4).prop_map(|dims| {
            let shape = dims.iter().map(|(n, ..)| *n).collect();
            let part = |spans: Vec<(u64, u64)>| {
                let (offsets, sizes) = spans.into_iter().unzip();
                Region { offsets, sizes }
            };
            let first = part(dims.iter().map(|(_, span, _)| *span).collect());
            (
                shape,
                first,
                part(dims.iter().map(|(.., span)| *span).collect()),
            )
        })
    }

    proptest! {
        #[test]
        fn runs_take_exactly_the_common_elements((shape, from, to) in pairs()) {
            let whole = Region::whole(&shape);
            let numbers: Vec<u64> = (0..whole.volume().unwrap()).collect();
            let take = |region: &Region| {
                let mut out = vec![u64::MAX; region.volume().unwrap() as usize];
                for run in whole.runs(region) {
                    for i in 0..run.len {
                        out[(run.to + i) as usize] = numbers[(run.from + i) as usize];
                    }
                }
                out
            };
            let (source, want) = (take(&from), take(&to));
            prop_assert!(!want.contains(&u64::MAX));
            let mut got = vec![u64::MAX; want.len()];
            for run in from.runs(&to) {
                for i in 0..run.len {
                    got[(run.to + i) as usize] = source[(run.from + i) as usize];
                }
            }
            for (got, want) in got.iter().zip(&want) {
                let expected = if source.contains(want) { *want } else { u64::MAX };
                prop_assert_eq!(*got, expected);
            }
        }
    }
}
