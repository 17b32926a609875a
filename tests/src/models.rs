//! Models as a Burn user writes them: nothing here knows of sharding.

use burn::module::Param;
use burn::nn::transformer::{
    TransformerDecoder, TransformerDecoderConfig, TransformerDecoderInput, TransformerEncoder,
    TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Gelu, GroupNorm, GroupNormConfig, Gru,
    GruConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, Lstm, LstmConfig, RmsNorm,
    RmsNormConfig, RotaryEncoding, RotaryEncodingConfig, SwiGlu, SwiGluConfig,
    attention::generate_autoregressive_mask,
    conv::{Conv2d, Conv2dConfig},
};
use burn::prelude::*;
use burn::tensor::activation::softmax;

use crate::{Input, cross_entropy, regression};

/// Three linear layers, no Vec: everything is the root unit.
#[derive(Module, Debug)]
pub struct Mlp {
    pub fc1: Linear,
    pub fc2: Linear,
    pub fc3: Linear,
    pub act: Gelu,
}

impl Mlp {
    pub fn new(dims: [usize; 4], device: &Device) -> Self {
        Self {
            fc1: LinearConfig::new(dims[0], dims[1]).init(device),
            fc2: LinearConfig::new(dims[1], dims[2]).init(device),
            fc3: LinearConfig::new(dims[2], dims[3]).init(device),
            act: Gelu::new(),
        }
    }
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.act.forward(self.fc1.forward(x));
        let x = self.act.forward(self.fc2.forward(x));
        self.fc3.forward(x)
    }
    pub fn loss(&self, input: &Input) -> Tensor<1> {
        let d = self.fc1.weight.dims()[0];
        regression(self.forward(input.floats(1, &[d])), input)
    }
}

/// A residual layer of [`Stack`].
#[derive(Module, Debug)]
pub struct Layer {
    pub norm: LayerNorm,
    pub fc: Linear,
    pub act: Gelu,
}

/// A Vec of layers between two linear ones: the units are the layers and the root.
#[derive(Module, Debug)]
pub struct Stack {
    pub inp: Linear,
    pub layers: Vec<Layer>,
    pub out: Linear,
}

impl Stack {
    pub fn new(layers: usize, d: usize, device: &Device) -> Self {
        Self {
            inp: LinearConfig::new(3, d).init(device),
            layers: (0..layers)
                .map(|_| Layer {
                    norm: LayerNormConfig::new(d).init(device),
                    fc: LinearConfig::new(d, d).init(device),
                    act: Gelu::new(),
                })
                .collect(),
            out: LinearConfig::new(d, 2).init(device),
        }
    }
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let mut x = self.inp.forward(x);
        for layer in &self.layers {
            x = x.clone() + layer.act.forward(layer.fc.forward(layer.norm.forward(x)));
        }
        self.out.forward(x)
    }
    pub fn loss(&self, input: &Input) -> Tensor<1> {
        regression(self.forward(input.floats(1, &[3])), input)
    }
}

/// The attention of shared/goldens/gpt.py.
#[derive(Module, Debug)]
pub struct Attention {
    pub qkv: Linear,
    pub proj: Linear,
    pub heads: usize,
}

impl Attention {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [b, t, d] = x.dims();
        let hd = d / self.heads;
        let parts = self.qkv.forward(x.clone()).split(d, 2);
        let [q, k, v]: [Tensor<3>; 3] = parts.try_into().expect("three parts");
        let heads = |x: Tensor<3>| x.reshape([b, t, self.heads, hd]).swap_dims(1, 2);
        let scores = heads(q)
            .matmul(heads(k).transpose())
            .mul_scalar(1.0 / (hd as f64).sqrt());
        let mask = generate_autoregressive_mask(1, t, &x.device()).unsqueeze_dim::<4>(1);
        let scores = scores.mask_fill(mask.expand([b, self.heads, t, t]), f32::NEG_INFINITY);
        let out = softmax(scores, 3)
            .matmul(heads(v))
            .swap_dims(1, 2)
            .reshape([b, t, d]);
        self.proj.forward(out)
    }
}

/// The MLP of shared/goldens/gpt.py.
#[derive(Module, Debug)]
pub struct FeedForward {
    pub fc1: Linear,
    pub fc2: Linear,
    pub act: Gelu,
}

/// A block of [`Gpt`].
#[derive(Module, Debug)]
pub struct Block {
    pub ln1: LayerNorm,
    pub attn: Attention,
    pub ln2: LayerNorm,
    pub mlp: FeedForward,
}

impl Block {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = x.clone() + self.attn.forward(self.ln1.forward(x));
        let y = self
            .mlp
            .act
            .forward(self.mlp.fc1.forward(self.ln2.forward(x.clone())));
        x + self.mlp.fc2.forward(y)
    }
}

/// The GPT of shared/goldens/gpt.py.
#[derive(Module, Debug)]
pub struct Gpt {
    pub tok_emb: Embedding,
    pub pos_emb: Embedding,
    pub blocks: Vec<Block>,
    pub ln_f: LayerNorm,
    pub head: Linear,
}

impl Gpt {
    pub fn new(
        layers: usize,
        d: usize,
        heads: usize,
        vocab: usize,
        seq: usize,
        device: &Device,
    ) -> Self {
        let linear = |i, o| LinearConfig::new(i, o).init(device);
        Self {
            tok_emb: EmbeddingConfig::new(vocab, d).init(device),
            pos_emb: EmbeddingConfig::new(seq, d).init(device),
            blocks: (0..layers)
                .map(|_| Block {
                    ln1: LayerNormConfig::new(d).init(device),
                    attn: Attention {
                        qkv: linear(d, 3 * d),
                        proj: linear(d, d),
                        heads,
                    },
                    ln2: LayerNormConfig::new(d).init(device),
                    mlp: FeedForward {
                        fc1: linear(d, 4 * d),
                        fc2: linear(4 * d, d),
                        act: Gelu::new(),
                    },
                })
                .collect(),
            ln_f: LayerNormConfig::new(d).init(device),
            head: LinearConfig::new(d, vocab).with_bias(false).init(device),
        }
    }
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [_, t] = tokens.dims();
        let pos = Tensor::<1, Int>::arange(0..t as i64, &tokens.device()).unsqueeze::<2>();
        let mut x = self.tok_emb.forward(tokens) + self.pos_emb.forward(pos);
        for block in &self.blocks {
            x = block.forward(x);
        }
        self.head.forward(self.ln_f.forward(x))
    }
    /// Predicts random tokens: the loss stays near ln(vocab).
    pub fn loss(&self, input: &Input) -> Tensor<1> {
        let (seq, vocab) = (self.pos_emb.weight.dims()[0], self.tok_emb.weight.dims()[0]);
        let tokens = input.ints(1, seq + 1, vocab as u64);
        let targets = tokens.clone().narrow(1, 1, seq);
        cross_entropy(self.forward(tokens.narrow(1, 0, seq)), targets)
    }
}

/// burn-nn's encoder with a head.
#[derive(Module, Debug)]
pub struct EncoderNet {
    pub encoder: TransformerEncoder,
    pub head: Linear,
}

impl EncoderNet {
    pub fn new(norm_first: bool, device: &Device) -> Self {
        Self {
            encoder: TransformerEncoderConfig::new(6, 7, 2, 2)
                .with_dropout(0.0)
                .with_norm_first(norm_first)
                .init(device),
            head: LinearConfig::new(6, 3).init(device),
        }
    }
    pub fn loss(&self, input: &Input) -> Tensor<1> {
        let x = self
            .encoder
            .forward(TransformerEncoderInput::new(input.floats(1, &[5, 6])));
        regression(self.head.forward(x), input)
    }
}

/// burn-nn's decoder with a head.
#[derive(Module, Debug)]
pub struct DecoderNet {
    pub decoder: TransformerDecoder,
    pub head: Linear,
}

impl DecoderNet {
    pub fn new(device: &Device) -> Self {
        Self {
            decoder: TransformerDecoderConfig::new(6, 7, 2, 2)
                .with_dropout(0.0)
                .init(device),
            head: LinearConfig::new(6, 3).init(device),
        }
    }
    pub fn loss(&self, input: &Input) -> Tensor<1> {
        let mask = generate_autoregressive_mask(input.batch(), 5, &input.device);
        let input_ =
            TransformerDecoderInput::new(input.floats(1, &[5, 6]), input.floats(2, &[3, 6]));
        let x = self.decoder.forward(input_.target_mask_attn(mask));
        regression(self.head.forward(x), input)
    }
}

/// A block in the manner of LLaMA: RmsNorm, rotary attention, SwiGLU.
#[derive(Module, Debug)]
pub struct LlamaBlock {
    pub norm1: RmsNorm,
    pub query: Linear,
    pub key: Linear,
    pub value: Linear,
    pub output: Linear,
    pub norm2: RmsNorm,
    pub gate: SwiGlu,
    pub down: Linear,
    pub rope: RotaryEncoding,
}

/// Two such blocks.
#[derive(Module, Debug)]
pub struct Llama {
    pub emb: Embedding,
    pub blocks: Vec<LlamaBlock>,
    pub norm: RmsNorm,
    pub head: Linear,
}

impl Llama {
    pub fn new(device: &Device) -> Self {
        let d = 6;
        let linear = |i, o| LinearConfig::new(i, o).with_bias(false).init(device);
        Self {
            emb: EmbeddingConfig::new(7, d).init(device),
            blocks: (0..2)
                .map(|_| LlamaBlock {
                    norm1: RmsNormConfig::new(d).init(device),
                    query: linear(d, d),
                    key: linear(d, d),
                    value: linear(d, d),
                    output: linear(d, d),
                    norm2: RmsNormConfig::new(d).init(device),
                    gate: SwiGluConfig::new(d, 7).init(device),
                    down: linear(7, d),
                    rope: RotaryEncodingConfig::new(5, d).init(device),
                })
                .collect(),
            norm: RmsNormConfig::new(d).init(device),
            head: linear(d, 7),
        }
    }
    pub fn loss(&self, input: &Input) -> Tensor<1> {
        let tokens = input.ints(1, 6, 7);
        let mut x = self.emb.forward(tokens.clone().narrow(1, 0, 5));
        for block in &self.blocks {
            let y = block.norm1.forward(x.clone());
            let q = block.rope.forward(block.query.forward(y.clone()));
            let k = block.rope.forward(block.key.forward(y.clone()));
            let v = block.value.forward(y);
            let mask = generate_autoregressive_mask(input.batch(), 5, &input.device);
            let scores = q
                .matmul(k.transpose())
                .div_scalar(6f64.sqrt())
                .mask_fill(mask, f32::NEG_INFINITY);
            x = x + block.output.forward(softmax(scores, 2).matmul(v));
            x = x.clone()
                + block
                    .down
                    .forward(block.gate.forward(block.norm2.forward(x)));
        }
        cross_entropy(
            self.head.forward(self.norm.forward(x)),
            tokens.narrow(1, 1, 5),
        )
    }
}

/// LSTM, then GRU: loops over `val()`.
#[derive(Module, Debug)]
pub struct Recurrent {
    pub lstm: Lstm,
    pub gru: Gru,
    pub head: Linear,
}

impl Recurrent {
    pub fn new(device: &Device) -> Self {
        Self {
            lstm: LstmConfig::new(3, 5, true).init(device),
            gru: GruConfig::new(5, 7, true).init(device),
            head: LinearConfig::new(7, 3).init(device),
        }
    }
    pub fn loss(&self, input: &Input) -> Tensor<1> {
        let (x, _) = self.lstm.forward(input.floats(1, &[4, 3]), None);
        regression(self.head.forward(self.gru.forward(x, None)), input)
    }
}

/// Convolutions with batch and group normalisation.
#[derive(Module, Debug)]
pub struct ConvNet {
    pub conv1: Conv2d,
    pub batch_norm: BatchNorm,
    pub conv2: Conv2d,
    pub group_norm: GroupNorm,
    pub head: Linear,
}

impl ConvNet {
    pub fn new(device: &Device) -> Self {
        Self {
            conv1: Conv2dConfig::new([1, 3], [3, 3]).init(device),
            batch_norm: BatchNormConfig::new(3).init(device),
            conv2: Conv2dConfig::new([3, 5], [3, 3]).init(device),
            group_norm: GroupNormConfig::new(1, 5).init(device),
            head: LinearConfig::new(5, 3).init(device),
        }
    }
    pub fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let gelu = burn::tensor::activation::gelu::<4>;
        let x = gelu(self.batch_norm.forward(self.conv1.forward(x)));
        let x = gelu(self.group_norm.forward(self.conv2.forward(x)));
        let [b, c, ..] = x.dims();
        self.head
            .forward(x.reshape([b, c, 9]).mean_dim(2).reshape([b, c]))
    }
    pub fn loss(&self, input: &Input) -> Tensor<1> {
        regression(self.forward(input.floats(1, &[1, 7, 7])), input)
    }
}

/// An embedding whose table is also the head: one ParamId at two paths.
#[derive(Module, Debug)]
pub struct Tied {
    pub emb: Embedding,
    pub mid: Linear,
    pub head: Param<Tensor<2>>,
}

impl Tied {
    pub fn new(device: &Device) -> Self {
        let emb = EmbeddingConfig::new(7, 5).init(device);
        let head = emb.weight.clone();
        Self {
            emb,
            mid: LinearConfig::new(5, 5).init(device),
            head,
        }
    }
    pub fn loss(&self, input: &Input) -> Tensor<1> {
        let tokens = input.ints(1, 4, 7);
        let x = self.emb.forward(tokens.clone().narrow(1, 0, 3));
        let x = x.clone() + self.mid.forward(x).tanh();
        cross_entropy(
            x.matmul(self.head.val().transpose().unsqueeze()),
            tokens.narrow(1, 1, 3),
        )
    }
}

/// A parameter shared between two elements of a Vec: sharding it must be refused.
#[derive(Module, Debug)]
pub struct TiedAcross {
    pub layers: Vec<Linear>,
}

impl TiedAcross {
    pub fn new(device: &Device) -> Self {
        let first = LinearConfig::new(3, 3).init(device);
        let second = first.clone();
        Self {
            layers: vec![first, second],
        }
    }
}

/// Branches that a loss may use or not. By default `sometimes` are units of their own.
#[derive(Module, Debug)]
pub struct Branches {
    pub inp: Linear,
    pub always: Vec<Linear>,
    pub sometimes: Vec<Linear>,
    pub never: Linear,
    pub out: Linear,
}

impl Branches {
    pub fn new(device: &Device) -> Self {
        let linear = |i, o| LinearConfig::new(i, o).init(device);
        Self {
            inp: linear(3, 5),
            always: vec![linear(5, 5)],
            sometimes: vec![linear(5, 5), linear(5, 5)],
            never: linear(5, 7),
            out: linear(5, 2),
        }
    }
    /// Uses `sometimes` where `use_sometimes` says so, `never` never.
    pub fn loss(&self, input: &Input, use_sometimes: bool) -> Tensor<1> {
        let mut x = self.inp.forward(input.floats::<2>(1, &[3])).tanh();
        x = x.clone() + self.always[0].forward(x).tanh();
        if use_sometimes {
            for layer in &self.sometimes {
                x = x.clone() + layer.forward(x).tanh();
            }
        }
        regression(self.out.forward(x), input)
    }
}
