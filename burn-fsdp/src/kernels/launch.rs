//! What the launches have in common: which buffers go together, how wide, and how a unit of a
//! kernel finds its work.

use burn::tensor::DType;
use cubecl::calculate_cube_count_elemwise;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::std::FastDivmod;

use super::packing::Member;

/// A kernel is compiled for its number of buffers, and its code grows with them.
pub(super) const BUFFERS_PER_LAUNCH: usize = 16;
/// As slots are aligned.
const WIDEST: usize = 8;

/// Buffers of one launch.
pub(super) struct Group<K> {
    /// What they have in common.
    pub(super) key: K,
    /// Their indices, in ascending order.
    pub(super) members: Vec<usize>,
}

/// Puts buffers of equal key together, in the order they come. `others` is how many buffers the
/// kernel has beside them and its scalars, which some runtimes bind as one more.
pub(super) fn groups<K: PartialEq>(
    client: &Client,
    keys: impl IntoIterator<Item = (usize, K)>,
    others: usize,
) -> Vec<Group<K>> {
    let bindings = client.properties().hardware.max_bindings as usize;
    let limit = BUFFERS_PER_LAUNCH
        .min(bindings.saturating_sub(others + 1))
        .max(1);
    let mut groups: Vec<Group<K>> = Vec::new();
    for (member, key) in keys {
        let open = |group: &&mut Group<K>| group.key == key && group.members.len() < limit;
        match groups.iter_mut().find(open) {
            Some(group) => group.members.push(member),
            None => groups.push(Group {
                key,
                members: vec![member],
            }),
        }
    }
    groups
}

/// The widest vectors that fit all these lengths and offsets of buffers of these dtypes.
pub(super) fn width(client: &Client, dtypes: &[DType], lens: &[usize]) -> usize {
    let bytes = dtypes.iter().map(DType::size).max().unwrap_or(1);
    let fits =
        |width: &usize| *width <= WIDEST && lens.iter().all(|len| len.is_multiple_of(*width));
    let mut widths = client.io_optimized_vector_sizes(bytes);
    widths.find(fits).unwrap_or(1)
}

/// The dtype of arithmetic on values of these.
pub(crate) fn wide(dtypes: impl IntoIterator<Item = DType>) -> DType {
    let mut dtypes = dtypes.into_iter();
    if dtypes.any(|dtype| dtype == DType::F64) {
        DType::F64
    } else {
        DType::F32
    }
}

/// Cubes for so many work items, one for each unit.
pub(super) fn grid(client: &Client, items: usize) -> (CubeCount, CubeDim) {
    let dim = CubeDim::new(client, items);
    (calculate_cube_count_elemwise(client, items, dim), dim)
}

/// The type of indices into buffers of at most `longest` elements: signed, so that units beyond the
/// last item do not wrap around, nor fast divisions overflow.
pub(super) fn address_type(longest: usize) -> AddressType {
    AddressType::from_len_signed(longest)
}

/// The work items of one buffer in a launch over several.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Work {
    first: usize,
    pub(super) items: usize,
}

#[cube]
impl Work {
    pub(super) fn contains(&self, item: usize) -> bool {
        item >= self.first && item - self.first < self.items
    }

    /// The index of an item within the buffer's own.
    pub(super) fn index(&self, item: usize) -> usize {
        item - self.first
    }
}

/// The work of buffers with so many items each, one after another, and the number of all.
pub(super) fn works(items: impl Iterator<Item = usize>) -> (Vec<WorkLaunch>, usize) {
    let mut total = 0;
    let works = items.map(|items| {
        let work = WorkLaunch::new(total, items);
        total += items;
        work
    });
    (works.collect(), total)
}

/// A [`Member`], in vectors.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Place {
    pub(super) slot: usize,
    pub(super) full: usize,
    shard_len: usize,
    run: FastDivmod<usize>,
    row: usize,
    pub(super) rank_stride: usize,
}

impl Member {
    pub(super) fn place(&self, width: usize) -> PlaceLaunch {
        PlaceLaunch::new(
            self.slot.start / width,
            self.full.start / width,
            self.shard_len / width,
            self.run / width,
            self.row / width,
            self.rank_stride / width,
        )
    }

    /// The member as a tensor that is nothing but one shard.
    pub(super) fn shard(&self) -> Self {
        Self {
            full: 0..self.shard_len,
            run: self.shard_len,
            row: self.shard_len,
            rank_stride: 0,
            ..self.clone()
        }
    }
}

#[cube]
impl Place {
    /// Where an element of a rank's slot lies in the full tensor, and whether it does: slots are
    /// padded, and so are shards of uneven tensors.
    pub(super) fn full_index(&self, rank: usize, index: usize) -> (usize, bool) {
        let (outer, inner) = self.run.div_mod(index);
        let column = rank * self.rank_stride + inner;
        let exists = index < self.shard_len && column < self.row;
        (outer * self.row + column, exists)
    }
}

#[cfg(all(test, any(feature = "cpu", feature = "cuda")))]
mod tests {
    use super::super::reference::client;
    use super::*;

    #[test]
    fn buffers_of_one_key_share_launches_of_limited_size() {
        let keys = (0..40).map(|member| (member, member == 3));
        let groups = groups(&client(), keys, 1);
        let sizes: Vec<_> = groups.iter().map(|group| group.members.len()).collect();
        assert_eq!(sizes, [16, 1, 16, 7]);
        assert_eq!(groups[1].members, [3]);
        assert_eq!(groups[3].members.last(), Some(&39));
    }

    #[test]
    fn vectors_are_as_wide_as_lengths_and_offsets_allow() {
        let client = client();
        let width = |lens: &[usize]| width(&client, &[DType::F32, DType::BF16], lens);
        assert_eq!(width(&[64, 24, 0]), 8.min(width(&[1 << 20])));
        assert_eq!(width(&[64, 6]), 2);
        assert_eq!(width(&[64, 7]), 1);
    }

    #[test]
    fn long_buffers_are_indexed_by_64_bits() {
        assert_eq!(address_type(i32::MAX as usize), AddressType::U32);
        assert_eq!(address_type(i32::MAX as usize + 1), AddressType::U64);
    }
}
