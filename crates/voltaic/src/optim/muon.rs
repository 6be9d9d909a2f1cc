//! Muon, with PyTorch's numbers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::formula::{self, Formula, Rate, check_common, check_rate, mix, settings};
use super::optimizer::{BuildOptimizer, Optimizer};
use super::param_group::{AdjustLr, GroupOptions, Merged, ParamGroup, ParamGroupSpec};
use super::problems::Problems;
use super::setters::setters;
use crate::error::Result;

settings! {
    /// Muon (Keller Jordan, 2024), as `torch.optim.Muon`: for the matrices of hidden layers. All parameters must have two dimensions;
    /// give others, and embeddings, to [`AdamW`](super::AdamW).
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
        for (fqn, parameter) in group.params.iter().filter(|(_, parameter)| parameter.dim() != 2) {
            let what = format!("{fqn} has shape {:?}, and Muon is for matrices", parameter.size());
            let key = format!("param_groups[{index}].params");
            problems.add(key, what, "give it to another optimizer, such as AdamW");
        }
    }
}

impl BuildOptimizer for Muon {
    fn name(&self) -> &'static str {
        MuonFormula::NAME
    }

    fn needs_whole_parameters(&self) -> bool {
        true
    }

    fn build(&self, groups: Vec<ParamGroupSpec>) -> Result<Box<dyn Optimizer>> {
        let mut problems = Problems::new("optimizer");
        check_shapes(&groups, &mut problems);
        problems.finish()?;
        formula::build(
            MuonFormula,
            self.master_weights,
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
        )
    }
}

struct MuonFormula;

impl Formula for MuonFormula {
    const STATE: &'static [&'static str] = &["momentum_buffer"];
    const NAME: &'static str = "Muon";

    fn update(
        &self,
        group: &ParamGroup,
        lr: &Rate<'_>,
        weights: &mut Tensor,
        grad: Tensor,
        state: &mut [Tensor],
    ) -> Result<()> {
        let (
            GroupOptions::Muon { momentum, nesterov, ns_coefficients, ns_steps, eps, adjust_lr_fn },
            [buffer],
        ) = (group.options, state)
        else {
            return Ok(());
        };
        mix(buffer, &grad, momentum)?;
        let direction = if nesterov {
            let mut ahead = grad;
            mix(&mut ahead, buffer, 1.0 - momentum)?;
            ahead
        } else {
            buffer.shallow_clone()
        };
        let update = nearly_orthogonal(&direction, ns_coefficients, ns_steps, eps)?;
        let size = weights.size();
        let (rows, columns) = (size[0] as f64, size[1] as f64);
        let ratio = match adjust_lr_fn {
            AdjustLr::Original => (rows / columns.max(1.0)).max(1.0).sqrt(),
            AdjustLr::MatchRmsAdamw => 0.2 * rows.max(columns).sqrt(),
        };
        lr.decay(weights, group.weight_decay)?;
        let update = update.f_to_kind(weights.kind())?.f_mul_scalar(ratio)?;
        let _ = weights.f_sub_(&lr.times(&update)?)?;
        Ok(())
    }
}

/// Takes the singular values of a matrix to about 1, in bfloat16: products have float32 sums and are rounded once, as those of
/// `torch.addmm` are.
fn nearly_orthogonal(matrix: &Tensor, (a, b, c): (f64, f64, f64), steps: u64, eps: f64) -> Result<Tensor> {
    let size = matrix.size();
    let is_tall = size[0] > size[1];
    let rounded =
        |tensor: &Tensor| -> Result<Tensor> { Ok(tensor.f_to_kind(Kind::BFloat16)?.f_to_kind(Kind::Float)?) };
    let low = matrix.f_to_kind(Kind::BFloat16)?;
    let low = if is_tall { low.f_transpose(0, 1)? } else { low };
    let norm = low.f_norm()?.f_clamp_min(eps)?;
    let mut x = low.f_div(&norm)?.f_to_kind(Kind::Float)?;
    for _ in 0..steps {
        let gram = rounded(&x.f_matmul(&x.f_transpose(0, 1)?)?)?;
        let change = gram.f_matmul(&gram)?.f_mul_scalar_(c)?.f_add_(&gram.f_mul_scalar(b)?)?;
        let change = rounded(&change)?;
        x = rounded(&change.f_matmul(&x)?.f_add_(&x.f_mul_scalar(a)?)?)?;
    }
    Ok(if is_tall { x.f_transpose(0, 1)? } else { x })
}
