//! What ranks exchange is dense.

use tch::Tensor;

use crate::error::{Error, OptimError, Problem, TorchError};

/// Why gradients could not be put together: the parameter whose gradient is sparse, if there is one.
#[cold]
pub(super) fn explain<'a>(
    error: TorchError,
    strategy: &'static str,
    mut params: impl Iterator<Item = (&'a str, &'a Tensor)>,
) -> Error {
    let is_sparse = |(_, param): &(&str, &Tensor)| {
        let grad = param.grad();
        grad.defined() && grad.is_sparse()
    };
    match params.find(is_sparse) {
        Some((fqn, _)) => {
            let problem = Problem::new(
                "is sparse, and ranks exchange dense ones",
                "compute it densely (sparse=false for embeddings)",
            );
            OptimError::Gradient { optimizer: strategy, fqn: fqn.to_owned(), problem }.into()
        }
        None => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::TorchErrorKind;

    #[test]
    fn the_parameter_with_the_sparse_gradient_is_named() {
        let leaf = || tch::Tensor::ones([4, 2], (tch::Kind::Float, tch::Device::Cpu)).set_requires_grad(true);
        let (dense, sparse) = (leaf(), leaf());
        let looked_up = tch::Tensor::embedding(&sparse, &tch::Tensor::from_slice(&[1_i64]), -1, false, true);
        (looked_up.sum(tch::Kind::Float) + dense.sum(tch::Kind::Float)).backward();
        let error = || TorchError::new("fill_bucket", TorchErrorKind::Other, "no");
        let told =
            explain(error(), "ddp", [("head", &dense), ("words.weight", &sparse)].into_iter()).to_string();
        assert_eq!(
            told,
            "ddp: the gradient of words.weight is sparse, and ranks exchange dense ones; compute it densely \
             (sparse=false for embeddings)"
        );
        let other = explain(error(), "ddp", [("head", &dense)].into_iter()).to_string();
        assert_eq!(other, "libtorch: fill_bucket: no");
    }
}
