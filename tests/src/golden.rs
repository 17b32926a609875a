//! Numbers from PyTorch FSDP2 (`tests/data`, a copy of what the tests need of shared/goldens).

use std::path::PathBuf;

use burn::module::{Module, ModuleMapper, Param};
use burn::prelude::*;
use safetensors::SafeTensors;

use crate::Values;
use crate::models::Gpt;

/// The golden model's sizes.
pub const LAYERS: usize = 2;
pub const D_MODEL: usize = 32;
pub const HEADS: usize = 2;
pub const VOCAB: usize = 64;
pub const SEQ: usize = 16;
/// Samples of a global batch.
pub const BATCH: usize = 12;
pub const STEPS: usize = 20;

fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("data")
        .join(name)
}

/// PyTorch's name of a Burn path, and whether the tensor is transposed.
fn torch_name(path: &str) -> (String, bool) {
    let (owner, leaf) = path.rsplit_once('.').expect("a dotted path");
    let last = owner.rsplit('.').next().unwrap_or(owner);
    match leaf {
        "gamma" => (format!("{owner}.weight"), false),
        "beta" => (format!("{owner}.bias"), false),
        "weight" => (path.to_string(), !last.ends_with("emb")),
        _ => (path.to_string(), false),
    }
}

fn transpose((shape, values): (Vec<usize>, Vec<f32>)) -> (Vec<usize>, Vec<f32>) {
    let (r, c) = (shape[0], shape[1]);
    let out = (0..r * c).map(|i| values[(i % r) * c + i / r]).collect();
    (vec![c, r], out)
}

/// A safetensors file of the goldens, as read, by PyTorch's names.
///
/// # Panics
///
/// When the file is missing or broken.
pub fn read_file(name: &str) -> Values {
    let bytes = std::fs::read(data(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    file.iter()
        .map(|(key, view)| {
            assert_eq!(view.dtype(), safetensors::Dtype::F32, "{key}");
            let values = view
                .data()
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect();
            (key.to_string(), (view.shape().to_vec(), values))
        })
        .collect()
}

/// A golden tensor for each of `paths`, in Burn's layout.
///
/// # Panics
///
/// When the file lacks one, or holds one that no path asks for.
pub fn read_as_burn<'a>(name: &str, paths: impl Iterator<Item = &'a String>) -> Values {
    let mut file = read_file(name);
    let out = paths
        .map(|path| {
            let (key, transposed) = torch_name(path);
            let tensor = file
                .remove(&key)
                .unwrap_or_else(|| panic!("{name} has no {key}"));
            (
                path.clone(),
                if transposed {
                    transpose(tensor)
                } else {
                    tensor
                },
            )
        })
        .collect();
    assert!(file.is_empty(), "{name}: not asked for: {:?}", file.keys());
    out
}

struct Assign<'a> {
    path: Vec<String>,
    values: &'a Values,
}

impl ModuleMapper for Assign<'_> {
    fn enter_module(&mut self, name: &str, _kind: &str) {
        self.path.push(name.to_string());
    }
    fn exit_module(&mut self, _name: &str, _kind: &str) {
        self.path.pop();
    }
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (shape, values) = &self.values[&self.path.join(".")];
        param.map(|old| {
            assert_eq!(old.dims().as_slice(), shape);
            let data = burn::tensor::TensorData::new(values.clone(), shape.clone());
            Tensor::from_data(data, &old.device()).require_grad()
        })
    }
}

/// Puts `values` into a dense module.
pub fn assign<M: Module>(module: M, values: &Values) -> M {
    module.map(&mut Assign {
        path: vec![],
        values,
    })
}

/// The golden model with the golden initial weights.
pub fn model(device: &Device) -> Gpt {
    let model = Gpt::new(LAYERS, D_MODEL, HEADS, VOCAB, SEQ, device);
    let paths = crate::local_values(&model);
    assign(model, &read_as_burn("init.safetensors", paths.keys()))
}

/// Losses and norms of a run.
#[derive(Debug)]
pub struct Run {
    pub loss: Vec<f64>,
    pub grad_norm: Vec<f64>,
}

/// A run of goldens.json.
///
/// # Panics
///
/// When there is none of that name.
pub fn run(variant: &str, world: usize) -> Run {
    let text = std::fs::read_to_string(data("goldens.json")).expect("goldens.json");
    let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let run = &json["runs"][variant][format!("world{world}")];
    let list = |key: &str| -> Vec<f64> {
        let list = run[key]
            .as_array()
            .unwrap_or_else(|| panic!("{variant} world{world} has no {key}"));
        list.iter().map(|x| x.as_f64().expect("a number")).collect()
    };
    Run {
        loss: list("loss"),
        grad_norm: list("grad_norm"),
    }
}

/// One sequence of the golden token stream (see goldens.json, tokens.formula).
pub fn sample(step: usize, micro: usize, sample: usize) -> Vec<i64> {
    let mut x = (1_000_003u32.wrapping_mul(step as u32))
        .wrapping_add(10_007u32.wrapping_mul(micro as u32))
        .wrapping_add(101u32.wrapping_mul(sample as u32))
        .wrapping_add(7);
    let mut next = || {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        i64::from(x >> 16)
    };
    let mut tokens = vec![next() % VOCAB as i64];
    while tokens.len() <= SEQ {
        tokens.push((5 * tokens[tokens.len() - 1] + 3 + next() % 4) % VOCAB as i64);
    }
    tokens
}

/// Inputs and targets of global samples `first..first + count`.
pub fn batch(
    step: usize,
    micro: usize,
    first: usize,
    count: usize,
    device: &Device,
) -> (Tensor<2, Int>, Tensor<2, Int>) {
    let rows: Vec<i64> = (first..first + count)
        .flat_map(|s| sample(step, micro, s))
        .collect();
    let tokens = Tensor::<2, Int>::from_data(
        burn::tensor::TensorData::new(rows, [count, SEQ + 1]),
        device,
    );
    (tokens.clone().narrow(1, 0, SEQ), tokens.narrow(1, 1, SEQ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_token_stream_is_the_one_of_the_goldens() {
        let text = std::fs::read_to_string(data("goldens.json")).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        for (name, want) in json["tokens"]["examples"].as_object().unwrap() {
            let numbers: Vec<usize> = name
                .split(|c: char| !c.is_ascii_digit())
                .filter(|s| !s.is_empty())
                .map(|s| s.parse().unwrap())
                .collect();
            let want: Vec<i64> = want
                .as_array()
                .unwrap()
                .iter()
                .map(|x| x.as_i64().unwrap())
                .collect();
            assert_eq!(sample(numbers[0], numbers[1], numbers[2]), want, "{name}");
        }
    }

    #[test]
    fn torch_names_follow_the_layout() {
        assert_eq!(
            torch_name("blocks.0.ln1.gamma"),
            ("blocks.0.ln1.weight".into(), false)
        );
        assert_eq!(
            torch_name("tok_emb.weight"),
            ("tok_emb.weight".into(), false)
        );
        assert_eq!(torch_name("head.weight"), ("head.weight".into(), true));
        let t = transpose((vec![2, 3], vec![1., 2., 3., 4., 5., 6.]));
        assert_eq!(t, (vec![3, 2], vec![1., 4., 2., 5., 3., 6.]));
    }
}
