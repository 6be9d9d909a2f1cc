//! Muon, with PyTorch's numbers.

use voltaic_macros::settings;

use super::adam::AdamRule;
use super::checks::{not_negative, rate};
use super::engine::Engine;
use super::muon_rule::MuonRule;
use super::optimizer::{BuildOptimizer, Optimizer};
use super::param_group::{AdjustLr, GroupOptions, ParamGroupSpec};
use super::problems::Problems;
use super::settings::{Settings, optimizer};
use crate::error::Result;

/// Muon (Keller Jordan, 2024), as `torch.optim.Muon`: for the matrices of hidden layers. All parameters must have two dimensions;
/// give others, and embeddings, to [`AdamW`](super::AdamW), or use [`MuonWithAuxAdam`](super::MuonWithAuxAdam) for all.
///
/// Where ranks have shards of a matrix (ZeRO), they gather it at each step.
///
/// With gradient `g`: `m = momentum * m + (1 - momentum) * g`; `u = NS((1 - momentum) * g + momentum * m)`;
/// `w -= lr * weight_decay * w`; `w -= lr * ratio * u`. `NS` makes the matrix nearly orthogonal by some steps of a Newton-Schulz
/// iteration in bfloat16, and `ratio` follows the shape ([`AdjustLr`]).
#[settings(lr = 1e-3)]
pub struct Muon {
    /// Part of the weights taken away per unit of learning rate and step. At least 0.
    #[setting(default = 0.1, check = not_negative, per_group)]
    pub weight_decay: f64,
    /// Momentum factor, in [0, 1).
    #[setting(default = 0.95, check = rate, per_group)]
    pub momentum: f64,
    /// Nesterov momentum: the update looks ahead by the gradient.
    #[setting(default = true, per_group)]
    pub nesterov: bool,
    /// Coefficients of the Newton-Schulz iteration.
    #[setting(default = (3.4445, -4.775, 2.0315), check = three_numbers)]
    pub ns_coefficients: (f64, f64, f64),
    /// Least norm that a matrix is divided by before the iteration, at least 0.
    #[setting(default = 1e-7, check = not_negative, per_group)]
    pub eps: f64,
    /// Steps of the iteration, below 100.
    #[setting(default = 5, check = below_100)]
    pub ns_steps: u64,
    /// How the learning rate follows the shape of a matrix.
    #[setting(default = AdjustLr::default())]
    pub adjust_lr_fn: AdjustLr,
}

optimizer!(Muon = "Muon", |muon| GroupOptions::Muon {
    momentum: muon.momentum,
    nesterov: muon.nesterov,
    ns_coefficients: muon.ns_coefficients,
    ns_steps: muon.ns_steps,
    eps: muon.eps,
    adjust_lr_fn: muon.adjust_lr_fn,
});

fn three_numbers(problems: &mut Problems, key: &str, &(a, b, c): &(f64, f64, f64)) {
    let are_finite = [a, b, c].iter().all(|number| number.is_finite());
    problems.require(are_finite, key, format!("[{a}, {b}, {c}]"), "three numbers");
}

fn below_100(problems: &mut Problems, key: &str, value: &u64) {
    problems.require(*value < 100, key, value, "below 100");
}

/// Refuses parameters that are no matrices.
fn check_shapes(groups: &[ParamGroupSpec], problems: &mut Problems) {
    for (index, group) in groups.iter().enumerate() {
        for (fqn, parameter) in &group.params {
            let shape = group.shape(parameter);
            if shape.len() != 2 {
                let what = format!("{fqn} has shape {shape:?}, and Muon is for matrices");
                let remedy = "give it to another optimizer, such as AdamW, or use MuonWithAuxAdam, which does so itself";
                problems.add(format!("param_groups[{index}].params"), what, remedy);
            }
        }
    }
}

impl BuildOptimizer for Muon {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn unshards_parameters(&self) -> bool {
        true
    }

    fn build(&self, groups: Vec<ParamGroupSpec>) -> Result<Box<dyn Optimizer>> {
        let mut problems = Problems::new("optimizer");
        check_shapes(&groups, &mut problems);
        problems.finish()?;
        let adam = AdamRule { name: Self::NAME, decoupled: true };
        let rule = MuonRule::over(Self::NAME, adam, &groups);
        Ok(Box::new(Engine::new(rule, self.groups(groups)?, self.master_weights)?))
    }
}
