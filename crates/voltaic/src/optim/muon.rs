//! Muon, with PyTorch's numbers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::adam::AdamRule;
use super::engine::Engine;
use super::formula::{self, check_common, check_rate, settings};
use super::muon_rule::MuonRule;
use super::optimizer::{BuildOptimizer, Optimizer};
use super::param_group::{AdjustLr, GroupOptions, Merged, ParamGroupSpec};
use super::problems::Problems;
use super::setters::setters;
use crate::error::Result;

const NAME: &str = "Muon";

settings! {
    /// Muon (Keller Jordan, 2024), as `torch.optim.Muon`: for the matrices of hidden layers. All parameters must have two dimensions;
    /// give others, and embeddings, to [`AdamW`](super::AdamW), or use [`MuonWithAuxAdam`](super::MuonWithAuxAdam) for all.
    ///
    /// Where ranks have parts of a matrix (ZeRO), they gather it at each step.
    ///
    /// With gradient `g`: `m = momentum * m + (1 - momentum) * g`; `u = NS((1 - momentum) * g + momentum * m)`;
    /// `w -= lr * weight_decay * w`; `w -= lr * ratio * u`. `NS` makes the matrix nearly orthogonal by some steps of a Newton-Schulz
    /// iteration in bfloat16, and `ratio` follows the shape ([`AdjustLr`]).
    Muon,
    /// Part of the weights taken away per unit of learning rate and step. At least 0.
    weight_decay: f64,
    /// Momentum factor, in [0, 1).
    momentum: f64,
    /// Nesterov momentum: the update looks ahead by the gradient.
    nesterov: bool,
    /// Coefficients of the Newton-Schulz iteration.
    ns_coefficients: (f64, f64, f64),
    /// Least norm that a matrix is divided by before the iteration, at least 0.
    eps: f64,
    /// Steps of the iteration, below 100.
    ns_steps: u64,
    /// How the learning rate follows the shape of a matrix.
    adjust_lr_fn: AdjustLr,
}

impl Default for Muon {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            weight_decay: 0.1,
            momentum: 0.95,
            nesterov: true,
            ns_coefficients: (3.4445, -4.775, 2.0315),
            eps: 1e-7,
            ns_steps: 5,
            adjust_lr_fn: AdjustLr::default(),
            maximize: false,
            master_weights: false,
        }
    }
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
        NAME
    }

    fn gathers_whole_parameters(&self) -> bool {
        true
    }

    fn build(&self, groups: Vec<ParamGroupSpec>) -> Result<Box<dyn Optimizer>> {
        let mut problems = Problems::new("optimizer");
        check_shapes(&groups, &mut problems);
        problems.finish()?;
        let adam = AdamRule { name: NAME, decoupled: true };
        let rule = MuonRule::over(NAME, adam, &groups);
        let groups = formula::groups(
            NAME,
            groups,
            &["momentum", "nesterov", "eps"],
            |own| Merged {
                lr: own.lr.unwrap_or(self.lr),
                weight_decay: own.weight_decay.unwrap_or(self.weight_decay),
                maximize: own.maximize.unwrap_or(self.maximize),
                options: GroupOptions::Muon {
                    momentum: own.momentum.unwrap_or(self.momentum),
                    nesterov: own.nesterov.unwrap_or(self.nesterov),
                    ns_coefficients: self.ns_coefficients,
                    ns_steps: self.ns_steps,
                    eps: own.eps.unwrap_or(self.eps),
                    adjust_lr_fn: self.adjust_lr_fn,
                },
            },
            |merged, at, problems| {
                check_common(merged, at, problems);
                let GroupOptions::Muon { momentum, ns_coefficients: (a, b, c), ns_steps, eps, .. } =
                    merged.options
                else {
                    return;
                };
                check_rate(format!("{at}.momentum"), momentum, problems);
                problems.require_not_negative(format!("{at}.eps"), eps);
                problems.require(ns_steps < 100, format!("{at}.ns_steps"), ns_steps, "below 100");
                let numbers = [a, b, c].iter().all(|number| number.is_finite());
                let shown = format!("[{a}, {b}, {c}]");
                problems.require(numbers, format!("{at}.ns_coefficients"), shown, "three numbers");
            },
        )?;
        Ok(Box::new(Engine::new(rule, groups, self.master_weights)?))
    }
}
