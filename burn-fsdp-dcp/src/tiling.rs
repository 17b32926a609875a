//! Whether chunks tile their tensor: each element in exactly one.

use crate::region::{Region, volume};
use crate::{DcpError, Result};

/// Dimensions along which one tensor may be split. More would be no layout that anyone has.
const MOST_SPLIT: usize = 8;

/// Checks that regions lie within a tensor of this shape and tile it, in `O(n log n)`.
///
/// A box is told by its corners: give each the sign of the parity of its upper ends. Over boxes that
/// tile a larger one, the signed corners add up to those of the larger, and only then: they are the
/// mixed derivative of the sum of the boxes' indicator functions, which determines it.
///
/// # Errors
///
/// [`DcpError::InvalidChunks`], naming the tensor and the rule that is broken.
pub fn check_tiling<'a>(
    tensor: &str,
    shape: &[u64],
    regions: impl Iterator<Item = &'a Region> + Clone,
) -> Result<()> {
    let invalid = |detail: String| DcpError::InvalidChunks {
        tensor: tensor.to_string(),
        detail,
    };
    let mut covered: u128 = 0;
    let mut split = vec![false; shape.len()];
    for region in regions.clone() {
        if !region.fits(shape) {
            return Err(invalid(format!(
                "the chunk at {:?} of size {:?} is not within the shape {shape:?}",
                region.offsets, region.sizes
            )));
        }
        if region.is_empty() {
            return Err(invalid(format!(
                "the chunk at {:?} is empty",
                region.offsets
            )));
        }
        covered += u128::from(region.volume().unwrap_or(u64::MAX));
        for (split, (size, full)) in split.iter_mut().zip(region.sizes.iter().zip(shape)) {
            *split |= size != full;
        }
    }
    let total =
        volume(shape).ok_or_else(|| invalid(format!("the shape {shape:?} is too large")))?;
    if covered < u128::from(total) {
        return Err(invalid(format!(
            "chunks hold only {covered} of its {total} elements"
        )));
    }
    if covered > u128::from(total) {
        return Err(invalid(format!(
            "chunks overlap: they hold {covered} elements of {total}"
        )));
    }
    let split: Vec<usize> = (0..shape.len()).filter(|&d| split[d]).collect();
    if split.len() > MOST_SPLIT {
        let detail = format!(
            "it is split along {} dimensions; {MOST_SPLIT} at most",
            split.len()
        );
        return Err(invalid(detail));
    }
    match uncancelled_corner(shape, &split, regions) {
        None => Ok(()),
        Some(corner) => Err(invalid(format!(
            "chunks overlap, and leave elements out, near {corner:?} in dimensions {split:?}"
        ))),
    }
}

/// A corner at which the regions' signed corners don't add up to those of the whole.
fn uncancelled_corner<'a>(
    shape: &[u64],
    split: &[usize],
    regions: impl Iterator<Item = &'a Region>,
) -> Option<Vec<u64>> {
    let whole = Region::whole(shape);
    let mut corners = Vec::new();
    let mut add = |region: &Region, sign: i64| {
        for which in 0..1usize << split.len() {
            let at = |(i, &d): (usize, &usize)| {
                region.offsets[d] + (which >> i & 1) as u64 * region.sizes[d]
            };
            let parity = if which.count_ones().is_multiple_of(2) {
                sign
            } else {
                -sign
            };
            corners.push((Corner::new(split.iter().enumerate().map(at)), parity));
        }
    };
    regions.for_each(|region| add(region, 1));
    if !whole.is_empty() {
        add(&whole, -1);
    }
    corners.sort_unstable_by_key(|(corner, _)| *corner);
    let same = corners.chunk_by(|a, b| a.0 == b.0);
    let is_left = |group: &&[(Corner, i64)]| group.iter().map(|(_, sign)| sign).sum::<i64>() != 0;
    let left = { same }.find(is_left)?;
    Some(left[0].0.0[..split.len()].to_vec())
}

/// Coordinates in the dimensions that are split.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Corner([u64; MOST_SPLIT]);

impl Corner {
    fn new(coordinates: impl Iterator<Item = u64>) -> Self {
        let mut corner = [0; MOST_SPLIT];
        corner
            .iter_mut()
            .zip(coordinates)
            .for_each(|(c, at)| *c = at);
        Self(corner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn check(shape: &[u64], boxes: &[(&[u64], &[u64])]) -> Result<()> {
        let regions: Vec<Region> = boxes
            .iter()
            .map(|(offsets, sizes)| Region {
                offsets: offsets.to_vec(),
                sizes: sizes.to_vec(),
            })
            .collect();
        check_tiling("t", shape, regions.iter())
    }

    fn fails_with(result: Result<()>, words: &str) {
        let text = result.unwrap_err().to_string();
        assert!(text.contains(words) && text.contains("\"t\""), "{text}");
    }

    #[test]
    fn rows_and_columns_that_fit_together_are_right() {
        check(&[4, 3], &[(&[0, 0], &[3, 3]), (&[3, 0], &[1, 3])]).unwrap();
        check(
            &[2, 2],
            &[(&[0, 0], &[1, 2]), (&[1, 0], &[1, 1]), (&[1, 1], &[1, 1])],
        )
        .unwrap();
        check(&[], &[(&[], &[])]).unwrap();
        check(&[0, 3], &[]).unwrap();
    }

    #[test]
    fn a_pinwheel_is_right() {
        let boxes: [(&[u64], &[u64]); 5] = [
            (&[0, 0], &[1, 2]),
            (&[0, 2], &[2, 1]),
            (&[2, 1], &[1, 2]),
            (&[1, 0], &[2, 1]),
            (&[1, 1], &[1, 1]),
        ];
        check(&[3, 3], &boxes).unwrap();
    }

    #[test]
    fn gaps_overlaps_and_strays_are_told() {
        fails_with(check(&[4], &[(&[0], &[3])]), "only 3 of its 4");
        fails_with(check(&[4], &[(&[0], &[3]), (&[2], &[2])]), "overlap");
        fails_with(check(&[4], &[(&[0], &[5])]), "not within");
        fails_with(check(&[4], &[(&[u64::MAX], &[2])]), "not within");
        fails_with(check(&[4], &[(&[0, 0], &[4, 1])]), "not within");
        fails_with(check(&[4], &[(&[0], &[4]), (&[2], &[0])]), "empty");
        fails_with(check(&[3], &[]), "only 0 of its 3");
        fails_with(check(&[u64::MAX, 3], &[]), "too large");
    }

    #[test]
    fn an_overlap_as_large_as_the_gap_is_told() {
        let boxes: [(&[u64], &[u64]); 2] = [(&[0, 0], &[2, 2]), (&[1, 0], &[2, 2])];
        fails_with(check(&[4, 2], &boxes), "leave elements out");
        let twice: [(&[u64], &[u64]); 2] = [(&[0, 0], &[1, 2]), (&[0, 0], &[1, 2])];
        fails_with(check(&[2, 2], &twice), "leave elements out");
    }

    proptest! {
        #[test]
        fn it_says_what_counting_every_element_says(
            boxes in prop::collection::vec((0u64..4, 1u64..4, 0u64..3, 1u64..4), 1..6)
        ) {
            let regions: Vec<Region> = boxes
                .iter()
                .map(|(a, b, c, d)| Region { offsets: vec![*a, *c], sizes: vec![*b, *d] })
                .collect();
            let mut seen = [0u8; 12];
            let mut inside = true;
            for region in &regions {
                inside &= region.fits(&[4, 3]);
                for run in region.runs(&Region::whole(&[4, 3])) {
                    for i in 0..run.len {
                        seen[(run.to + i) as usize] += 1;
                    }
                }
            }
            let tiles = inside && seen.iter().all(|n| *n == 1);
            prop_assert_eq!(check_tiling("t", &[4, 3], regions.iter()).is_ok(), tiles);
        }
    }
}
