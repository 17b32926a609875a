//! A GPT: token and position embeddings, pre-LayerNorm blocks, a head. Nothing here knows of sharding.

use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::FloatDType;
use burn::tensor::activation::{gelu, softmax};

/// The size of a [`Gpt`].
#[derive(Config, Debug)]
pub struct GptConfig {
    /// Number of tokens.
    pub vocab_size: usize,
    /// Longest sequence.
    pub seq_len: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Number of blocks.
    pub n_layers: usize,
    /// Attention heads of a block; they divide the width.
    pub n_heads: usize,
}

/// A decoder-only transformer.
#[derive(Module, Debug)]
pub struct Gpt {
    token_embedding: Embedding,
    position_embedding: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

#[derive(Module, Debug)]
struct Block {
    norm_attention: LayerNorm,
    attention: CausalAttention,
    norm_mlp: LayerNorm,
    mlp: Mlp,
}

#[derive(Module, Debug)]
struct CausalAttention {
    query_key_value: Linear,
    output: Linear,
    n_heads: usize,
}

#[derive(Module, Debug)]
struct Mlp {
    up: Linear,
    down: Linear,
}

impl GptConfig {
    /// The model with fresh parameters.
    pub fn init(&self, device: &Device) -> Gpt {
        Gpt {
            token_embedding: EmbeddingConfig::new(self.vocab_size, self.d_model).init(device),
            position_embedding: EmbeddingConfig::new(self.seq_len, self.d_model).init(device),
            blocks: (0..self.n_layers)
                .map(|_| self.init_block(device))
                .collect(),
            norm: LayerNormConfig::new(self.d_model).init(device),
            head: LinearConfig::new(self.d_model, self.vocab_size)
                .with_bias(false)
                .init(device),
        }
    }

    fn init_block(&self, device: &Device) -> Block {
        let d = self.d_model;
        Block {
            norm_attention: LayerNormConfig::new(d).init(device),
            attention: CausalAttention {
                query_key_value: LinearConfig::new(d, 3 * d).init(device),
                output: LinearConfig::new(d, d).init(device),
                n_heads: self.n_heads,
            },
            norm_mlp: LayerNormConfig::new(d).init(device),
            mlp: Mlp {
                up: LinearConfig::new(d, 4 * d).init(device),
                down: LinearConfig::new(4 * d, d).init(device),
            },
        }
    }
}

impl Gpt {
    /// Mean cross entropy of the predictions for `targets`, both `[batch, time]`.
    pub fn loss(&self, inputs: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        // In 16 bits a softmax over the vocabulary would lose what the loss is about.
        let logits = self.forward(inputs).cast(FloatDType::F32);
        CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(logits.flatten(0, 1), targets.flatten(0, 1))
    }

    /// Logits `[batch, time, vocab]` of the token after each of `tokens`, `[batch, time]`.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [_, time] = tokens.dims();
        let positions = Tensor::arange(0..time as i64, &tokens.device()).unsqueeze();
        let mut x =
            self.token_embedding.forward(tokens) + self.position_embedding.forward(positions);
        for block in &self.blocks {
            x = block.forward(x);
        }
        self.head.forward(self.norm.forward(x))
    }
}

impl Block {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let attended = self
            .attention
            .forward(self.norm_attention.forward(x.clone()));
        let x = x + attended;
        let expanded = self.mlp.forward(self.norm_mlp.forward(x.clone()));
        x + expanded
    }
}

impl CausalAttention {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [batch, time, d_model] = x.dims();
        let d_head = d_model / self.n_heads;
        let split = self.query_key_value.forward(x).chunk(3, 2);
        let [query, key, value]: [Tensor<3>; 3] = split
            .try_into()
            .expect("a last dimension of 3 x d_model splits into 3");
        let by_head = |part: Tensor<3>| {
            part.reshape([batch, time, self.n_heads, d_head])
                .swap_dims(1, 2)
        };

        let scores = by_head(query).matmul(by_head(key).transpose()) / (d_head as f64).sqrt();
        let future = Tensor::<2, Bool>::tril_mask([time, time], 0, &scores.device());
        let scores = scores.mask_fill(future.unsqueeze(), f32::NEG_INFINITY);
        let attended = softmax(scores, 3).matmul(by_head(value));
        self.output
            .forward(attended.swap_dims(1, 2).reshape([batch, time, d_model]))
    }
}

impl Mlp {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.down.forward(gelu(self.up.forward(x)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logits(tokens: [i32; 4]) -> Vec<f32> {
        let device = Device::flex();
        device.seed(1);
        let model = GptConfig::new(5, 4, 8, 2, 2).init(&device);
        let tokens = Tensor::<1, Int>::from_ints(tokens, &device).unsqueeze();
        model
            .forward(tokens)
            .into_data()
            .try_into_vec()
            .expect("logits are f32")
    }

    #[test]
    fn no_position_sees_the_tokens_after_it() {
        let (a, b) = (logits([1, 2, 3, 4]), logits([1, 2, 3, 0]));
        assert_eq!(a[..15], b[..15], "the first three positions");
        assert_ne!(a[15..], b[15..], "the last position");
    }
}
