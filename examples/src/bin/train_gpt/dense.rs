//! What the dense run has to do by hand.

use burn::module::{ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::prelude::*;

/// Draws every parameter's initial value now, in the order of the model's fields.
///
/// Left alone, a parameter draws its value when first used, so that the order of use would decide which
/// random numbers it gets.
pub(crate) fn initialize<M: Module>(model: &M) {
    model.visit(&mut Initialize);
}

struct Initialize;

impl ModuleVisitor for Initialize {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        param.val();
    }
}

/// Scales the gradients down to a global norm of at most `limit` (0 for none) and returns the norm before.
///
/// The clipping of Burn's optimizers would limit each parameter's norm on its own.
pub(crate) fn clip_grad_norm<M: Module>(
    model: &M,
    mut grads: GradientsParams,
    limit: f64,
) -> (GradientsParams, f64) {
    let mut sum = SumOfSquares {
        grads: &grads,
        sum: 0.0,
    };
    model.visit(&mut sum);
    let norm = sum.sum.sqrt();
    let factor = limit / (norm + 1e-6);
    if limit > 0.0 && factor < 1.0 {
        model.visit(&mut Scale {
            grads: &mut grads,
            factor,
        });
    }
    (grads, norm)
}

struct SumOfSquares<'a> {
    grads: &'a GradientsParams,
    sum: f64,
}

impl ModuleVisitor for SumOfSquares<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.get::<D>(param.id) {
            self.sum += (grad.clone() * grad).sum().into_scalar::<f64>();
        }
    }
}

struct Scale<'a> {
    grads: &'a mut GradientsParams,
    factor: f64,
}

impl ModuleVisitor for Scale<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.remove::<D>(param.id) {
            self.grads.register(param.id, grad * self.factor);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::nn::{Linear, LinearConfig};

    fn grads_of_ones() -> (Linear, GradientsParams) {
        let device = Device::flex().autodiff();
        let model = LinearConfig::new(3, 3).init(&device);
        let loss = model.forward(Tensor::<2>::ones([1, 3], &device)).sum();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        (model, grads)
    }

    #[test]
    fn the_norm_is_taken_over_all_parameters_together() {
        let (model, grads) = grads_of_ones();
        let (grads, norm) = clip_grad_norm(&model, grads, 1.0);
        assert!((norm - 12f64.sqrt()).abs() < 1e-6, "9 weights, 3 biases");
        let (_, clipped) = clip_grad_norm(&model, grads, 0.0);
        assert!((clipped - 1.0).abs() < 1e-5);
    }

    #[test]
    fn small_gradients_and_no_limit_leave_gradients_alone() {
        let (model, grads) = grads_of_ones();
        let (grads, before) = clip_grad_norm(&model, grads, 100.0);
        let (grads, between) = clip_grad_norm(&model, grads, 0.0);
        let (_, after) = clip_grad_norm(&model, grads, 0.0);
        assert_eq!([between, after], [before, before]);
    }
}
