//! Synthetic digits, and a small convolutional model that reads them.

use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::prelude::*;
use burn::tensor::activation::relu;

use crate::rng::Rng;

/// Side of an image, in pixels.
pub const SIDE: usize = 12;
const GLYPH_WIDTH: usize = 5;
const GLYPH_HEIGHT: usize = 7;

/// The digits 0 to 9, each a bitmap with one string a row.
#[rustfmt::skip]
const GLYPHS: [[&str; GLYPH_HEIGHT]; 10] = [
    [" ### ", "#   #", "#  ##", "# # #", "##  #", "#   #", " ### "],
    ["  #  ", " ##  ", "  #  ", "  #  ", "  #  ", "  #  ", " ### "],
    [" ### ", "#   #", "    #", "   # ", "  #  ", " #   ", "#####"],
    [" ### ", "#   #", "    #", "  ## ", "    #", "#   #", " ### "],
    ["   # ", "  ## ", " # # ", "#  # ", "#####", "   # ", "   # "],
    ["#####", "#    ", "#### ", "    #", "    #", "#   #", " ### "],
    [" ### ", "#    ", "#    ", "#### ", "#   #", "#   #", " ### "],
    ["#####", "    #", "   # ", "  #  ", " #   ", " #   ", " #   "],
    [" ### ", "#   #", "#   #", " ### ", "#   #", "#   #", " ### "],
    [" ### ", "#   #", "#   #", " ####", "    #", "    #", " ### "],
];

/// A set of images, each drawn when asked for: the digit, its place and the noise follow from the
/// set's seed and the image's number.
#[derive(Clone, Debug)]
pub struct Digits {
    seed: u64,
    len: usize,
}

/// Images `[batch, side, side]` and the digits they show.
#[derive(Clone, Debug)]
pub struct DigitsBatch {
    pub images: Tensor<3>,
    pub targets: Tensor<1, Int>,
}

impl Digits {
    /// The set to train on.
    pub fn train() -> Self {
        Self { seed: 1, len: 6000 }
    }

    /// A set of other images to test with.
    pub fn test() -> Self {
        Self { seed: 2, len: 600 }
    }

    /// Batches of `batch_size` images, of which `rank` gets its part out of `world_size`.
    ///
    /// Every rank gets equally many batches of equal size; images left over are left out.
    pub fn batches<'a>(
        &'a self,
        batch_size: usize,
        rank: usize,
        world_size: usize,
        device: &'a Device,
    ) -> impl Iterator<Item = DigitsBatch> + 'a {
        let share = batch_size / world_size;
        (0..self.len / batch_size).map(move |batch| {
            let first = batch * batch_size + rank * share;
            self.batch(first..first + share, device)
        })
    }

    fn batch(&self, items: std::ops::Range<usize>, device: &Device) -> DigitsBatch {
        let count = items.len();
        let (mut pixels, mut targets) = (Vec::new(), Vec::new());
        for item in items {
            let mut rng = Rng::new(self.seed, item as u64);
            let digit = rng.below(GLYPHS.len());
            targets.push(digit as i32);
            pixels.extend(draw(digit, &mut rng));
        }
        DigitsBatch {
            images: Tensor::from_data(TensorData::new(pixels, [count, SIDE, SIDE]), device),
            targets: Tensor::from_ints(targets.as_slice(), device),
        }
    }
}

/// The digit somewhere on the canvas, under noise.
fn draw(digit: usize, rng: &mut Rng) -> Vec<f32> {
    let left = rng.below(SIDE - GLYPH_WIDTH + 1);
    let top = rng.below(SIDE - GLYPH_HEIGHT + 1);
    let mut pixels: Vec<f32> = (0..SIDE * SIDE).map(|_| 0.4 * rng.uniform()).collect();
    for (y, row) in GLYPHS[digit].iter().enumerate() {
        for (x, mark) in row.bytes().enumerate() {
            if mark == b'#' {
                pixels[(top + y) * SIDE + left + x] += 0.6;
            }
        }
    }
    pixels
}

/// Configuration of [`Model`].
#[derive(Config, Debug)]
pub struct ModelConfig {
    #[config(default = 10)]
    pub num_classes: usize,
    #[config(default = 16)]
    pub channels: usize,
}

/// Two convolutions with batch normalization, and a linear layer.
#[derive(Module, Debug)]
pub struct Model {
    conv1: Conv2d,
    norm1: BatchNorm,
    conv2: Conv2d,
    norm2: BatchNorm,
    linear: Linear,
}

impl ModelConfig {
    /// Returns the initialized model.
    pub fn init(&self, device: &Device) -> Model {
        let conv = |channels| {
            Conv2dConfig::new(channels, [3, 3])
                .with_stride([2, 2])
                .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
                .init(device)
        };
        let (narrow, wide) = (self.channels, 2 * self.channels);
        Model {
            conv1: conv([1, narrow]),
            norm1: BatchNormConfig::new(narrow).init(device),
            conv2: conv([narrow, wide]),
            norm2: BatchNormConfig::new(wide).init(device),
            linear: LinearConfig::new(wide * (SIDE / 4).pow(2), self.num_classes).init(device),
        }
    }
}

impl Model {
    /// Scores `[batch, num_classes]` of images `[batch, side, side]`.
    pub fn forward(&self, images: Tensor<3>) -> Tensor<2> {
        let x = images.unsqueeze_dim::<4>(1);
        let x = relu(self.norm1.forward(self.conv1.forward(x)));
        let x = relu(self.norm2.forward(self.conv2.forward(x)));
        self.linear.forward(x.flatten(1, 3))
    }
}

/// The share of predictions that are right, in percent.
pub fn accuracy(output: Tensor<2>, targets: Tensor<1, Int>) -> f32 {
    let [count] = targets.dims();
    let predictions = output.argmax(1).flatten::<1>(0, 1);
    let correct: i64 = predictions.equal(targets).int().sum().into_scalar();
    100.0 * correct as f32 / count as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(batches: impl Iterator<Item = DigitsBatch>) -> (Vec<f32>, Vec<i32>) {
        let (mut pixels, mut targets) = (Vec::new(), Vec::new());
        for batch in batches {
            pixels.extend(batch.images.into_data_as::<f32>().iter::<f32>());
            targets.extend(batch.targets.into_data_as::<i32>().iter::<i32>());
        }
        (pixels, targets)
    }

    #[test]
    fn the_ranks_parts_of_a_batch_make_up_the_batch() {
        let (device, digits) = (Device::flex(), Digits::test());
        let whole = read(digits.batches(60, 0, 1, &device).take(1));
        let mut parts = (Vec::new(), Vec::new());
        for rank in 0..3 {
            let part = read(digits.batches(60, rank, 3, &device).take(1));
            parts.0.extend(part.0);
            parts.1.extend(part.1);
        }
        assert_eq!(parts, whole);
    }

    #[test]
    fn every_digit_occurs_and_images_differ() {
        let (pixels, targets) = read(Digits::train().batches(100, 0, 1, &Device::flex()).take(1));
        assert!((0..10).all(|digit| targets.contains(&digit)));
        let size = SIDE * SIDE;
        assert_ne!(pixels[..size], pixels[size..2 * size]);
    }

    #[test]
    fn training_and_test_images_differ() {
        let device = Device::flex();
        let train = read(Digits::train().batches(50, 0, 1, &device).take(1));
        let test = read(Digits::test().batches(50, 0, 1, &device).take(1));
        assert_ne!(train, test);
    }

    #[test]
    fn glyphs_differ_from_one_another_and_fill_their_box() {
        for (digit, glyph) in GLYPHS.iter().enumerate() {
            assert!(glyph.iter().all(|row| row.len() == GLYPH_WIDTH));
            assert!(!GLYPHS[..digit].contains(glyph));
        }
    }

    #[test]
    fn accuracy_is_the_share_of_right_predictions() {
        let device = Device::flex();
        let output = Tensor::from_data([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]], &device);
        let targets = Tensor::from_ints([1, 0, 0, 0], &device);
        assert_eq!(accuracy(output, targets), 75.0);
    }
}
