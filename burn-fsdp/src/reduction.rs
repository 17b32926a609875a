//! How many values become one.

use burn::tensor::DType;

use crate::GradientAverage;

/// How values of several ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Their sum, added in rank order.
    Sum,
    /// Their sum divided by their number.
    Mean,
    /// The largest; NaN if any is NaN.
    Max,
    /// The smallest; NaN if any is NaN.
    Min,
}

/// A [`ReduceOp`] with the divisions around it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Reduction {
    pub(crate) op: ReduceOp,
    pub(crate) pre_divide: f64,
    pub(crate) post_divide: f64,
}

impl Reduction {
    pub(crate) fn plain(op: ReduceOp) -> Self {
        Self {
            op,
            pre_divide: 1.0,
            post_divide: 1.0,
        }
    }

    pub(crate) fn mean(world_size: usize) -> Self {
        Self {
            post_divide: world_size as f64,
            ..Self::plain(ReduceOp::Sum)
        }
    }

    /// In f16 the mean divides by a power of two near the root of the size before the sum, and by
    /// the rest after it, as PyTorch does.
    pub(crate) fn new(average: GradientAverage, world_size: usize, dtype: DType) -> Self {
        match average {
            GradientAverage::Sum => Self::plain(ReduceOp::Sum),
            GradientAverage::Factor(factor) => Self {
                post_divide: factor,
                ..Self::plain(ReduceOp::Sum)
            },
            GradientAverage::Mean if dtype == DType::F16 => {
                let mut pre = 1;
                while world_size.is_multiple_of(pre) && world_size / pre > pre {
                    pre *= 2;
                }
                Self {
                    pre_divide: pre as f64,
                    post_divide: world_size as f64 / pre as f64,
                    ..Self::plain(ReduceOp::Sum)
                }
            }
            GradientAverage::Mean => Self::mean(world_size),
        }
    }
}

/// Which norm of all gradients taken as one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NormType {
    /// The sum of absolute values.
    L1,
    /// The Euclidean norm.
    L2,
    /// The largest absolute value.
    Inf,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_in_half_precision_is_divided_before_and_after() {
        let divisions = |world| {
            let r = Reduction::new(GradientAverage::Mean, world, DType::F16);
            (r.pre_divide, r.post_divide)
        };
        assert_eq!(divisions(1), (1.0, 1.0));
        assert_eq!(divisions(4), (2.0, 2.0));
        assert_eq!(divisions(8), (4.0, 2.0));
        let (pre, post) = divisions(3);
        assert_eq!(pre * post, 3.0);
    }
}
