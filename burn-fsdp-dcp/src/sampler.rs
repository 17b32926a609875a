//! The order in which ranks take samples, which can be left and gone on with at another world size.

use serde::{Deserialize, Serialize};

use crate::stateful::Stateful;
use crate::{DcpError, Result};

/// Deals out the samples of a data set: each once in an epoch, to one rank.
///
/// The order of an epoch depends on the seed and the number of the epoch, not on the ranks. A *global
/// batch* is the next `world_size * batch_size` samples of it, of which each rank gets its slice. So
/// what is left of an epoch can be dealt out at another world size, and still each sample comes once.
#[derive(Clone, Debug)]
pub struct ShardedSampler {
    state: SamplerState,
    rank: usize,
    world_size: usize,
    batch_size: usize,
    order: Vec<u32>,
}

/// How far a [`ShardedSampler`] has come; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SamplerState {
    len: u32,
    seed: u64,
    shuffled: bool,
    epoch: u64,
    /// Samples of this epoch that all ranks together have been dealt.
    dealt: u32,
}

impl ShardedSampler {
    /// A sampler over `len` samples for one rank of `world_size`, which gets `batch_size` at a time,
    /// shuffled by `seed`.
    ///
    /// # Errors
    ///
    /// [`DcpError::InvalidArgument`] if there is no such rank, a size is zero, or `len` exceeds
    /// `u32::MAX`.
    pub fn new(
        len: usize,
        batch_size: usize,
        rank: usize,
        world_size: usize,
        seed: Option<u64>,
    ) -> Result<Self> {
        let len = u32::try_from(len).map_err(|_| DcpError::argument("too many samples"))?;
        if len == 0 || batch_size == 0 || rank >= world_size {
            return Err(DcpError::argument(format!(
                "{len} samples in batches of {batch_size} can't be dealt to rank {rank} of {world_size}"
            )));
        }
        let state = SamplerState {
            len,
            seed: seed.unwrap_or_default(),
            shuffled: seed.is_some(),
            epoch: 0,
            dealt: 0,
        };
        Ok(Self {
            order: state.order(),
            state,
            rank,
            world_size,
            batch_size,
        })
    }

    /// This rank's next samples; none at the end of an epoch, after which the next begins.
    ///
    /// The last global batch of an epoch is what is left, dealt out as evenly as it goes: its slices
    /// may be shorter, or empty. Ranks must then still take the step, as it is one of all.
    pub fn next_batch(&mut self) -> Option<Vec<usize>> {
        let left = self.order.len() - self.state.dealt as usize;
        if left == 0 {
            self.state.epoch += 1;
            self.state.dealt = 0;
            self.order = self.state.order();
            return None;
        }
        let global = left.min(self.world_size.saturating_mul(self.batch_size));
        let end_of = |rank: usize| self.state.dealt as usize + global * rank / self.world_size;
        let slice = &self.order[end_of(self.rank)..end_of(self.rank + 1)];
        let batch = slice.iter().map(|&sample| sample as usize).collect();
        self.state.dealt += global as u32;
        Some(batch)
    }

    /// The number of the epoch, from 0.
    pub fn epoch(&self) -> u64 {
        self.state.epoch
    }
}

impl Stateful for ShardedSampler {
    type State = SamplerState;

    fn state(&self) -> SamplerState {
        self.state
    }

    /// # Errors
    ///
    /// [`DcpError::InvalidArgument`] if the state is of a data set of another size.
    fn load_state(&mut self, state: SamplerState) -> Result<()> {
        if state.len != self.state.len || state.dealt > state.len {
            return Err(DcpError::argument(format!(
                "the state is of a sampler over {} samples, and this one has {}",
                state.len, self.state.len
            )));
        }
        self.state = state;
        self.order = self.state.order();
        Ok(())
    }
}

impl SamplerState {
    /// The samples in this epoch's order.
    fn order(&self) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.len).collect();
        if self.shuffled {
            // Fisher and Yates's shuffle.
            let mut random = SplitMix(mix(self.seed ^ mix(self.epoch)));
            for i in (1..order.len()).rev() {
                order.swap(i, random.below(i as u64 + 1) as usize);
            }
        }
        order
    }
}

/// SplitMix64 (Steele, Lea, Flood: *Fast splittable pseudorandom number generators*, 2014).
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `bound`, each equally likely but for one in 2^32.
    fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }
}

pub(crate) fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samplers(world: usize) -> Vec<ShardedSampler> {
        let new = |rank| ShardedSampler::new(23, 2, rank, world, Some(5)).unwrap();
        (0..world).map(new).collect()
    }

    #[test]
    fn each_sample_comes_once_in_an_epoch_whatever_the_world_size() {
        for world in [1, 2, 3, 5, 30] {
            let mut samplers = samplers(world);
            for epoch in 0..3 {
                let mut seen = Vec::new();
                for sampler in &mut samplers {
                    assert_eq!(sampler.epoch(), epoch);
                    seen.extend(std::iter::from_fn(|| sampler.next_batch()).flatten());
                }
                seen.sort_unstable();
                assert_eq!(seen, (0..23).collect::<Vec<_>>(), "world {world}");
            }
        }
    }

    #[test]
    fn an_epoch_that_goes_on_at_another_world_size_has_each_sample_once() {
        let mut seen = Vec::new();
        let mut before = samplers(2);
        for _ in 0..3 {
            seen.extend(before.iter_mut().filter_map(|s| s.next_batch()).flatten());
        }
        let state = before[1].state();
        assert_eq!(state, before[0].state());
        let mut after = samplers(3);
        for sampler in &mut after {
            sampler.load_state(state).unwrap();
            seen.extend(std::iter::from_fn(|| sampler.next_batch()).flatten());
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..23).collect::<Vec<_>>());
    }

    #[test]
    fn epochs_have_orders_of_their_own_that_the_seed_decides() {
        let epochs = |seed| {
            let mut sampler = ShardedSampler::new(50, 50, 0, 1, seed).unwrap();
            let first = sampler.next_batch().unwrap();
            assert_eq!(sampler.next_batch(), None);
            (first, sampler.next_batch().unwrap())
        };
        let (first, second) = epochs(Some(1));
        assert_ne!(first, second);
        assert_eq!(epochs(Some(1)), (first.clone(), second));
        assert_ne!(epochs(Some(2)).0, first);
        assert_eq!(epochs(None).0, (0..50).collect::<Vec<_>>());
    }

    #[test]
    fn the_state_of_another_data_set_is_refused() {
        let state = samplers(1)[0].state();
        let mut other = ShardedSampler::new(24, usize::MAX, 0, 3, Some(5)).unwrap();
        assert!(
            other
                .load_state(state)
                .unwrap_err()
                .to_string()
                .contains("23 samples")
        );
        assert_eq!(other.next_batch().map(|batch| batch.len()), Some(8));
    }

    #[test]
    fn senseless_sizes_are_refused() {
        for (len, batch, rank, world) in [(0, 1, 0, 1), (1, 0, 0, 1), (1, 1, 1, 1), (1, 1, 0, 0)] {
            assert!(ShardedSampler::new(len, batch, rank, world, None).is_err());
        }
    }
}
