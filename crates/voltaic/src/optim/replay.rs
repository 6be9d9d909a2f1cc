//! What a captured step of an optimizer takes from its groups.

use tch::Tensor;

use super::param_group::{GroupOptions, ParamGroup};
use crate::error::Result;
use crate::ffi::{self, LearningRate};

/// The numbers of the groups: learning rates, which replays read, and others, which are constants of a graph.
pub(super) struct Replayed {
    /// Of each group: the number, and the tensor that holds it.
    lrs: Vec<(f64, Tensor)>,
    constants: Vec<Constants>,
    /// Counts how often the constants have changed.
    changes: u64,
}

#[derive(PartialEq)]
struct Constants {
    weight_decay: f64,
    maximize: bool,
    options: GroupOptions,
}

impl Replayed {
    pub(super) fn of(groups: &[ParamGroup]) -> Self {
        let lrs = groups.iter().map(|group| (group.lr, Tensor::from(group.lr))).collect();
        Self { lrs, constants: groups.iter().map(Constants::of).collect(), changes: 0 }
    }

    /// Writes the learning rates that have changed. Gives how often other numbers have.
    pub(super) fn refresh(&mut self, groups: &[ParamGroup]) -> Result<u64> {
        for ((lr, tensor), group) in self.lrs.iter_mut().zip(groups) {
            if *lr != group.lr {
                let _ = tensor.f_fill_(group.lr)?;
                *lr = group.lr;
            }
        }
        if !self.constants.iter().zip(groups).all(|(constants, group)| *constants == Constants::of(group)) {
            self.constants = groups.iter().map(Constants::of).collect();
            self.changes += 1;
        }
        Ok(self.changes)
    }

    /// The learning rate of group number `index`, for a step that is being captured.
    pub(super) fn lr(&self, index: usize, group: &ParamGroup) -> LearningRate<'_> {
        let (lr, tensor) = &self.lrs[index];
        if *lr != group.lr {
            ffi::refuse_recording("the learning rate is set just before the optimizer steps");
            return LearningRate::Number(group.lr);
        }
        LearningRate::Tensor(tensor)
    }
}

impl Constants {
    fn of(group: &ParamGroup) -> Self {
        Self { weight_decay: group.weight_decay, maximize: group.maximize, options: group.options }
    }
}
