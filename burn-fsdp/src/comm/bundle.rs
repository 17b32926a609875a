//! Tensors of a collective that share a buffer on a device.

use std::ops::Range;

use burn::tensor::DType;

use crate::kernels::Packing;
use crate::placement::ShardLayout;

/// Tensors of one collective that travel in one buffer: those of one dtype, and either all split or
/// all whole on every rank.
#[derive(Clone, Debug)]
pub(super) struct Bundle {
    /// Their places among the tensors of the collective.
    pub(super) members: Vec<usize>,
    pub(super) layouts: Vec<ShardLayout>,
    /// Of one slot only where they are whole.
    pub(super) packing: Packing,
    pub(super) dtype: DType,
    pub(super) is_whole: bool,
}

impl Bundle {
    /// The bundles of these tensors, in an order that is the same on all ranks.
    pub(super) fn all<'a>(
        tensors: impl IntoIterator<Item = (usize, &'a ShardLayout, DType)>,
    ) -> Vec<Self> {
        let tensors: Vec<_> = tensors.into_iter().collect();
        let kind = |i: usize| (tensors[i].2, tensors[i].1.is_whole());
        let bundle = |((dtype, is_whole), all): ((DType, bool), Vec<usize>)| {
            let slots = |layout: &ShardLayout| match is_whole {
                true => layout.with_world_size(1),
                false => layout.clone(),
            };
            let layouts: Vec<_> = all.iter().map(|&i| slots(tensors[i].1)).collect();
            Self {
                members: all.iter().map(|&i| tensors[i].0).collect(),
                packing: Packing::new(&layouts),
                layouts,
                dtype,
                is_whole,
            }
        };
        let kinds = by_dtype(0..tensors.len(), kind);
        kinds.into_iter().map(bundle).collect()
    }

    /// The number of slots.
    pub(super) fn world_size(&self) -> usize {
        self.layouts[0].world_size()
    }

    /// Elements of all slots.
    pub(super) fn slots_len(&self) -> usize {
        self.world_size() * self.packing.shard_len()
    }

    /// The slot that a rank has its shards in.
    pub(super) fn slot(&self, rank: usize) -> Range<usize> {
        self.packing.slot(if self.is_whole { 0 } else { rank })
    }
}

/// Groups places by the dtype of what is there, in the order in which dtypes first occur.
fn by_dtype<K: PartialEq>(
    places: impl Iterator<Item = usize>,
    key: impl Fn(usize) -> K,
) -> Vec<(K, Vec<usize>)> {
    let mut groups: Vec<(K, Vec<usize>)> = Vec::new();
    for place in places {
        let key = key(place);
        match groups.iter_mut().find(|(of, _)| *of == key) {
            Some((_, places)) => places.push(place),
            None => groups.push((key, vec![place])),
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Placement;

    #[test]
    fn tensors_are_bundled_by_dtype_and_by_whether_they_are_split() {
        let split = ShardLayout::new(&[5, 2], Placement::Shard(0), 2);
        let whole = ShardLayout::new(&[3], Placement::Replicate, 2);
        let tensors = [
            (0, &split, DType::BF16),
            (1, &whole, DType::BF16),
            (2, &split, DType::F32),
            (3, &split, DType::BF16),
        ];
        let bundles = Bundle::all(tensors);
        let kinds: Vec<_> = bundles
            .iter()
            .map(|b| (b.members.as_slice(), b.dtype, b.is_whole, b.world_size()))
            .collect();
        assert_eq!(
            kinds,
            [
                ([0, 3].as_slice(), DType::BF16, false, 2),
                (&[1], DType::BF16, true, 1),
                (&[2], DType::F32, false, 2),
            ]
        );
        assert_eq!(bundles[1].slot(1), bundles[1].packing.slot(0));
        assert_eq!(bundles[2].slot(1), bundles[2].packing.slot(1));
    }

    #[test]
    fn a_single_rank_has_everything_whole() {
        let layout = ShardLayout::new(&[5, 2], Placement::Shard(0), 1);
        let bundles = Bundle::all([(0, &layout, DType::F32)]);
        assert!(bundles[0].is_whole);
        assert!(bundles[0].slots_len() >= 10);
    }
}
