//! Lets the model write.

use burn::prelude::*;
use burn_fsdp_examples::gpt::Gpt;
use burn_fsdp_examples::rng::Rng;

use crate::args::Args;
use crate::data::Corpus;

const PROMPT: &str = "\nShall I compare thee";
const LENGTH: usize = 240;
/// Below 1 the likelier characters gain on the others.
const TEMPERATURE: f32 = 0.7;

/// Continues the prompt one character at a time; the same seed and weights give the same text.
pub(crate) fn generate(model: &Gpt, args: &Args, corpus: &Corpus, device: &Device) -> String {
    let mut rng = Rng::new(args.seed, u64::MAX);
    let mut tokens = corpus.vocabulary.encode(PROMPT);
    // A text may have none of the prompt's characters, and the model needs one to start from.
    if tokens.is_empty() {
        tokens.push(0);
    }
    for _ in 0..LENGTH {
        let context: Vec<i32> = tokens[tokens.len().saturating_sub(args.seq)..]
            .iter()
            .map(|&token| token as i32)
            .collect();
        let time = context.len();
        let context = Tensor::from_ints(TensorData::new(context, [1, time]), device);
        let logits = model.forward(context).slice(s![0, time - 1, ..]);
        let logits: Vec<f32> = logits.into_data_as::<f32>().iter().collect();
        tokens.push(choose(&logits, rng.uniform()));
    }
    corpus.vocabulary.decode(&tokens)
}

/// The token at `point` in `[0, 1)` along the softmax of the logits.
fn choose(logits: &[f32], point: f32) -> usize {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f32> = logits
        .iter()
        .map(|logit| ((logit - highest) / TEMPERATURE).exp())
        .collect();
    let mut left = point * weights.iter().sum::<f32>();
    for (token, weight) in weights.iter().enumerate() {
        left -= weight;
        if left < 0.0 {
            return token;
        }
    }
    logits.len() - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_chosen_in_proportion_to_their_probability() {
        let logits = [1f32, 3.0, 0.0].map(|p| p.ln() * TEMPERATURE);
        let choices: Vec<usize> = (0..8).map(|i| choose(&logits, i as f32 / 8.0)).collect();
        assert_eq!(choices, [0, 0, 1, 1, 1, 1, 1, 1]);
    }

    #[test]
    fn rounding_at_the_far_end_still_chooses_a_token() {
        assert_eq!(choose(&[0.0, f32::NEG_INFINITY], 0.999_999_94), 0);
        assert_eq!(choose(&[f32::NAN, f32::NAN], 0.5), 1);
    }
}
