//! Weights of 16 bits beside those of float32 that are updated.

use tch::{Kind, Tensor};

use crate::error::{ConfigError, Result};
use crate::ffi::TensorList;

/// Tensors of 16 bits that each step writes, and the weights they are rounded from.
pub(super) struct Rounding {
    targets: TensorList,
    weights: TensorList,
    /// The targets of all weights that a step updates, undefined where there is none.
    all: TensorList,
}

impl Rounding {
    /// For weights in the order in which a step updates them, each with its name and what is rounded from it. `None` if nothing is.
    ///
    /// # Errors
    /// [`ConfigError`] if a target has not as many elements of 16 bits on the same device; libtorch's.
    pub(super) fn of<'a>(
        weights: impl IntoIterator<Item = (&'a str, &'a Tensor, Option<Tensor>)>,
    ) -> Result<Option<Self>> {
        let (mut targets, mut rounded, mut all) = (Vec::new(), Vec::new(), Vec::new());
        for (fqn, weights, target) in weights {
            let Some(target) = target else {
                all.push(Tensor::new());
                continue;
            };
            let is_narrow = matches!(target.kind(), Kind::BFloat16 | Kind::Half);
            if !is_narrow || target.size() != weights.size() || target.device() != weights.device() {
                let told = |tensor: &Tensor| {
                    format!("{:?}{:?} on {:?}", tensor.kind(), tensor.size(), tensor.device())
                };
                let what = format!("{} for {fqn}, which is {}", told(&target), told(weights));
                let remedy = "give a tensor of bfloat16 or float16, of the same shape and on the same device";
                return Err(ConfigError::new("UnshardedParameters::rounded", what, remedy).into());
            }
            all.push(target.shallow_clone());
            targets.push(target);
            rounded.push(weights);
        }
        if targets.is_empty() {
            return Ok(None);
        }
        let [targets, all] = [TensorList::new(&targets)?, TensorList::new(&all)?];
        Ok(Some(Self { targets, weights: TensorList::new(rounded)?, all }))
    }

    /// For a kernel that rounds.
    pub(super) fn all(&self) -> &TensorList {
        &self.all
    }

    /// Rounds all weights to their targets.
    pub(super) fn write(&self) -> Result<()> {
        Ok(self.targets.copy_from(&self.weights)?)
    }
}
