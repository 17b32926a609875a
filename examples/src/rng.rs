//! A small generator of pseudo-random numbers.
//!
//! Burn has one generator per process, which ranks that are threads would race for. Data and sampling
//! draw from this one, so that a sample depends on its number and nothing else.

/// SplitMix64.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator for item `index` of the stream `seed`.
    pub fn new(seed: u64, index: u64) -> Self {
        let mut rng = Self(seed);
        let stream = rng.next_u64();
        Self(stream ^ index.wrapping_mul(0xd605_bbb5_8c8a_bbad))
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A whole number in `0..bound`; 0 where `bound` is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next_u64()) * bound as u128) >> 64) as usize
    }

    /// A number in `[0, 1)`.
    pub fn uniform(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1u64 << 24) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_and_index_give_the_same_numbers() {
        let draw = |seed, index| Rng::new(seed, index).next_u64();
        assert_eq!(draw(1, 2), draw(1, 2));
        assert_ne!(draw(1, 2), draw(1, 3));
        assert_ne!(draw(1, 2), draw(2, 2));
    }

    #[test]
    fn numbers_below_a_bound_reach_every_value_and_stay_below_it() {
        let mut seen = [false; 5];
        let mut rng = Rng::new(7, 0);
        for _ in 0..200 {
            seen[rng.below(5)] = true;
        }
        assert_eq!(seen, [true; 5]);
        assert_eq!(rng.below(0), 0);
    }

    #[test]
    fn uniform_numbers_lie_between_zero_and_one() {
        let mut rng = Rng::new(7, 1);
        let draws: Vec<f32> = (0..1000).map(|_| rng.uniform()).collect();
        assert!(draws.iter().all(|x| (0.0..1.0).contains(x)));
        let mean = draws.iter().sum::<f32>() / 1000.0;
        assert!((mean - 0.5).abs() < 0.05, "mean {mean}");
    }
}
