//! What a captured step of an optimizer takes from its groups.

use tch::Tensor;

use super::param_group::{GroupOptions, ParamGroup};
use crate::error::Result;
use crate::ffi::{self, LearningRate};

/// The learning rate of an update, which a captured step reads when it runs.
#[derive(Clone, Copy)]
pub(super) struct Rate<'a> {
    pub(super) lr: LearningRate<'a>,
    /// What weight decay leaves of the weights, where replays read it.
    kept: Option<&'a Tensor>,
}

impl Rate<'_> {
    /// A rate that no replay will read.
    pub(super) fn of(group: &ParamGroup) -> Self {
        Self { lr: LearningRate::Number(group.lr), kept: None }
    }

    /// `tensor` times the rate.
    pub(super) fn times(&self, tensor: &Tensor) -> Result<Tensor> {
        Ok(match self.lr {
            LearningRate::Number(lr) => tensor.f_mul_scalar(lr)?,
            // beside a tensor without dimensions the rate would not be taken for a number, and make the result float64
            LearningRate::Tensor(lr) if tensor.dim() == 0 => {
                tensor.f_view([1])?.f_mul(lr)?.f_view([0_i64; 0])?
            }
            LearningRate::Tensor(lr) => tensor.f_mul(lr)?,
        })
    }

    /// Takes the weight decay of the group away from the weights: `w *= 1 - lr * weight_decay`.
    pub(super) fn decay(&self, weights: &mut Tensor, group: &ParamGroup) -> Result<()> {
        if group.weight_decay != 0.0 {
            let _ = match self.kept {
                Some(kept) if weights.dim() == 0 => weights.f_view([1])?.f_mul_(kept)?,
                Some(kept) => weights.f_mul_(kept)?,
                None => weights.f_mul_scalar_(kept_by(group))?,
            };
        }
        Ok(())
    }
}

/// What weight decay leaves of the weights.
fn kept_by(group: &ParamGroup) -> f64 {
    1.0 - group.lr * group.weight_decay
}

/// A number, and the tensor that holds it.
struct Scalar {
    number: f64,
    tensor: Tensor,
}

impl Scalar {
    fn of(number: f64) -> Self {
        Self { number, tensor: Tensor::from(number) }
    }

    fn set(&mut self, number: f64) -> Result<()> {
        if self.number != number {
            let _ = self.tensor.f_fill_(number)?;
            self.number = number;
        }
        Ok(())
    }
}

/// The numbers of the groups: learning rates, which replays read, and others, which are constants of a graph.
pub(super) struct Replayed {
    /// Of each group: its learning rate, and what weight decay leaves.
    rates: Vec<(Scalar, Scalar)>,
    constants: Vec<Constants>,
    /// Counts how often the constants have changed.
    changes: u64,
}

/// Weight decay, direction and options of a group.
type Constants = (f64, bool, GroupOptions);

fn constants(group: &ParamGroup) -> Constants {
    (group.weight_decay, group.maximize, group.options)
}

impl Replayed {
    pub(super) fn of(groups: &[ParamGroup]) -> Self {
        let rates = groups.iter().map(|group| (Scalar::of(group.lr), Scalar::of(kept_by(group)))).collect();
        Self { rates, constants: groups.iter().map(constants).collect(), changes: 0 }
    }

    /// Writes the learning rates that have changed. Gives how often other numbers have.
    pub(super) fn refresh(&mut self, groups: &[ParamGroup]) -> Result<u64> {
        for ((lr, kept), group) in self.rates.iter_mut().zip(groups) {
            lr.set(group.lr)?;
            kept.set(kept_by(group))?;
        }
        if !self.constants.iter().zip(groups).all(|(known, group)| *known == constants(group)) {
            self.constants = groups.iter().map(constants).collect();
            self.changes += 1;
        }
        Ok(self.changes)
    }

    /// The learning rate of group number `index`, for a step that is being captured.
    pub(super) fn rate(&self, index: usize, group: &ParamGroup) -> Rate<'_> {
        let (lr, kept) = &self.rates[index];
        if lr.number != group.lr {
            ffi::refuse_recording("the learning rate is set just before the optimizer steps");
            return Rate::of(group);
        }
        Rate { lr: LearningRate::Tensor(&lr.tensor), kept: Some(&kept.tensor) }
    }
}
