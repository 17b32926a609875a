//! A small GPT, written as any Burn user would: nothing in this file knows about sharding.

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{
    Embedding, EmbeddingConfig, Gelu, LayerNorm, LayerNormConfig, Linear, LinearConfig,
};
use burn::prelude::*;
use burn::tensor::activation::softmax;

/// The size of a [`Gpt`].
#[derive(Config, Debug)]
pub struct GptConfig {
    /// Number of tokens.
    pub vocab: usize,
    /// Longest sequence.
    pub seq: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Attention heads a block.
    pub heads: usize,
    /// Number of blocks.
    pub layers: usize,
}

impl GptConfig {
    /// Initialises the model on `device`.
    pub fn init(&self, device: &Device) -> Gpt {
        let block = || Block {
            norm_attention: LayerNormConfig::new(self.d_model).init(device),
            attention: Attention {
                qkv: LinearConfig::new(self.d_model, 3 * self.d_model).init(device),
                output: LinearConfig::new(self.d_model, self.d_model).init(device),
                heads: self.heads,
            },
            norm_mlp: LayerNormConfig::new(self.d_model).init(device),
            up: LinearConfig::new(self.d_model, 4 * self.d_model).init(device),
            down: LinearConfig::new(4 * self.d_model, self.d_model).init(device),
            gelu: Gelu::new(),
        };
        Gpt {
            token: EmbeddingConfig::new(self.vocab, self.d_model).init(device),
            position: EmbeddingConfig::new(self.seq, self.d_model).init(device),
            blocks: (0..self.layers).map(|_| block()).collect(),
            norm: LayerNormConfig::new(self.d_model).init(device),
            head: LinearConfig::new(self.d_model, self.vocab)
                .with_bias(false)
                .init(device),
        }
    }
}

/// A decoder-only transformer with pre-norm blocks.
#[derive(Module, Debug)]
pub struct Gpt {
    token: Embedding,
    position: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

impl Gpt {
    /// Logits `[batch, seq, vocab]` of the next token.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [_, seq] = tokens.dims();
        let device = tokens.device();
        let positions = Tensor::arange(0..seq as i64, &device).unsqueeze();
        let mut x = self.token.forward(tokens) + self.position.forward(positions);
        for block in &self.blocks {
            x = block.forward(x);
        }
        self.head.forward(self.norm.forward(x))
    }

    /// Mean cross entropy of `targets` `[batch, seq]`.
    pub fn loss(&self, tokens: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        let logits = self.forward(tokens);
        let [batch, seq, vocab] = logits.dims();
        CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(
                logits.reshape([batch * seq, vocab]),
                targets.reshape([batch * seq]),
            )
    }
}

/// Attention, then a two-layer perceptron, each with its norm before it and a residual around it.
#[derive(Module, Debug)]
pub struct Block {
    norm_attention: LayerNorm,
    attention: Attention,
    norm_mlp: LayerNorm,
    up: Linear,
    down: Linear,
    gelu: Gelu,
}

impl Block {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = x.clone() + self.attention.forward(self.norm_attention.forward(x));
        let hidden = self
            .gelu
            .forward(self.up.forward(self.norm_mlp.forward(x.clone())));
        x + self.down.forward(hidden)
    }
}

/// Causal self-attention with one projection for queries, keys and values.
#[derive(Module, Debug)]
pub struct Attention {
    qkv: Linear,
    output: Linear,
    heads: usize,
}

impl Attention {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [batch, seq, d_model] = x.dims();
        let d_head = d_model / self.heads;
        let [query, key, value]: [Tensor<4>; 3] = self
            .qkv
            .forward(x)
            .chunk(3, 2)
            .into_iter()
            .map(|part| {
                part.reshape([batch, seq, self.heads, d_head])
                    .swap_dims(1, 2)
            })
            .collect::<Vec<_>>()
            .try_into()
            .expect("a width of 3 x d_model parts in three");
        let future = Tensor::<2, Bool>::tril_mask([seq, seq], 0, &query.device());
        let scores = query
            .matmul(key.swap_dims(2, 3))
            .div_scalar((d_head as f64).sqrt())
            .mask_fill(future.unsqueeze(), f32::NEG_INFINITY);
        let mixed = softmax(scores, 3).matmul(value).swap_dims(1, 2);
        self.output.forward(mixed.reshape([batch, seq, d_model]))
    }
}
