//! The text as tokens, and which stretch of it each rank sees when.

use std::collections::BTreeSet;
use std::ops::Range;

use burn::prelude::*;
use burn_fsdp_examples::rng::Rng;

/// Shakespeare's sonnets.
pub(crate) const SONNETS: &str = include_str!("../../../data/sonnets.txt");

/// The characters of a text, numbered in their own order.
#[derive(Clone, Debug)]
pub(crate) struct Vocabulary {
    chars: Vec<char>,
}

impl Vocabulary {
    pub(crate) fn of(text: &str) -> Self {
        let chars: BTreeSet<char> = text.chars().collect();
        Self {
            chars: chars.into_iter().collect(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.chars.len()
    }

    /// Tokens of `text`; characters that the vocabulary lacks are left out.
    pub(crate) fn encode(&self, text: &str) -> Vec<usize> {
        text.chars()
            .filter_map(|c| self.chars.binary_search(&c).ok())
            .collect()
    }

    pub(crate) fn decode(&self, tokens: &[usize]) -> String {
        tokens
            .iter()
            .filter_map(|&token| self.chars.get(token))
            .collect()
    }
}

/// A text in tokens.
#[derive(Clone, Debug)]
pub(crate) struct Corpus {
    pub(crate) vocabulary: Vocabulary,
    tokens: Vec<usize>,
}

/// Token sequences and, for each position, the token that follows: both `[batch, time]`.
#[derive(Clone, Debug)]
pub(crate) struct Batch {
    pub(crate) inputs: Tensor<2, Int>,
    pub(crate) targets: Tensor<2, Int>,
}

impl Corpus {
    pub(crate) fn new(text: &str) -> Self {
        let vocabulary = Vocabulary::of(text);
        let tokens = vocabulary.encode(text);
        Self { vocabulary, tokens }
    }

    pub(crate) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// The samples of these numbers, each a stretch of `seq_len` tokens that starts anywhere.
    pub(crate) fn batch(
        &self,
        seed: u64,
        samples: Range<usize>,
        seq_len: usize,
        device: &Device,
    ) -> Batch {
        let count = samples.len();
        let starts = samples.map(|sample| self.start(seed, sample, seq_len));
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        for start in starts {
            let stretch = &self.tokens[start..=start + seq_len];
            inputs.extend(stretch[..seq_len].iter().map(|&token| token as i32));
            targets.extend(stretch[1..].iter().map(|&token| token as i32));
        }
        let tensor = |tokens| Tensor::from_ints(TensorData::new(tokens, [count, seq_len]), device);
        Batch {
            inputs: tensor(inputs),
            targets: tensor(targets),
        }
    }

    fn start(&self, seed: u64, sample: usize, seq_len: usize) -> usize {
        Rng::new(seed, sample as u64).below(self.len() - seq_len)
    }
}

/// Deals out the numbered samples: to steps, within a step to micro-batches, within these to ranks.
///
/// A sample's content depends on its number alone, so any number of ranks that share one global batch
/// train on the same text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Schedule {
    pub(crate) world_size: usize,
    pub(crate) micro_batches: usize,
    pub(crate) batch_size: usize,
}

impl Schedule {
    pub(crate) fn samples(&self, step: usize, micro_batch: usize, rank: usize) -> Range<usize> {
        let slot = (step * self.micro_batches + micro_batch) * self.world_size + rank;
        slot * self.batch_size..(slot + 1) * self.batch_size
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEQ_LEN: usize = 16;

    /// What all ranks together see in a step, by global batch of 6.
    fn step_inputs(world_size: usize, step: usize) -> Vec<i32> {
        let corpus = Corpus::new(SONNETS);
        let schedule = Schedule {
            world_size,
            micro_batches: 1,
            batch_size: 6 / world_size,
        };
        let device = Device::flex();
        (0..world_size)
            .flat_map(|rank| {
                let samples = schedule.samples(step, 0, rank);
                let batch = corpus.batch(42, samples, SEQ_LEN, &device);
                let data = batch.inputs.into_data_as::<i32>();
                data.try_into_vec::<i32>().expect("tokens are i32")
            })
            .collect()
    }

    #[test]
    fn one_two_and_three_ranks_see_the_same_samples() {
        for step in [0, 1, 7] {
            let alone = step_inputs(1, step);
            assert_eq!(alone.len(), 6 * SEQ_LEN);
            assert_eq!(step_inputs(2, step), alone);
            assert_eq!(step_inputs(3, step), alone);
        }
        assert_ne!(step_inputs(1, 0), step_inputs(1, 1));
    }

    #[test]
    fn no_sample_is_dealt_twice_and_none_is_left_out() {
        let schedule = Schedule {
            world_size: 3,
            micro_batches: 2,
            batch_size: 4,
        };
        let mut dealt = Vec::new();
        for step in 0..2 {
            for micro_batch in 0..2 {
                for rank in 0..3 {
                    dealt.extend(schedule.samples(step, micro_batch, rank));
                }
            }
        }
        assert_eq!(dealt, (0..2 * 2 * 3 * 4).collect::<Vec<_>>());
    }

    #[test]
    fn targets_are_the_inputs_shifted_by_one() {
        let corpus = Corpus::new("abcdefgh");
        let batch = corpus.batch(1, 0..5, 3, &Device::flex());
        let inputs = batch.inputs.into_data_as::<i32>();
        let targets = batch.targets.into_data_as::<i32>();
        let next: Vec<i32> = inputs.iter::<i32>().map(|token| token + 1).collect();
        assert_eq!(targets.iter::<i32>().collect::<Vec<_>>(), next);
    }

    #[test]
    fn a_sequence_one_shorter_than_the_text_is_the_longest_that_fits() {
        let corpus = Corpus::new("abcd");
        let batch = corpus.batch(1, 0..4, 3, &Device::flex());
        assert_eq!(batch.inputs.dims(), [4, 3]);
    }

    #[test]
    fn text_survives_the_way_to_tokens_and_back() {
        let vocabulary = Vocabulary::of(SONNETS);
        assert_eq!(vocabulary.decode(&vocabulary.encode(SONNETS)), SONNETS);
        assert_eq!(vocabulary.len(), 61);
    }

    #[test]
    fn characters_outside_the_vocabulary_are_left_out() {
        let vocabulary = Vocabulary::of("abc");
        assert_eq!(vocabulary.decode(&vocabulary.encode("a-é-c")), "ac");
    }
}
