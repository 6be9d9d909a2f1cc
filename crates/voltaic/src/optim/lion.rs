//! Lion and Lamb, with DeepSpeed's numbers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::formula::{self, Formula, check_common, check_rate, mix, settings};
use super::optimizer::{BuildOptimizer, Optimizer};
use super::param_group::{GroupOptions, Merged, ParamGroup, ParamGroupSpec};
use super::replay::Rate;
use super::setters::setters;
use crate::error::Result;

settings! {
    /// Lion (arXiv:2302.06675), as DeepSpeed's.
    ///
    /// With gradient `g`: `w -= lr * weight_decay * w`; `w -= lr * sign(beta1 * m + (1 - beta1) * g)`;
    /// `m = beta2 * m + (1 - beta2) * g`.
    Lion,
    /// Decay rates of the mean of gradients in the update, and of the one that is kept, each in [0, 1).
    betas: (f64, f64),
    /// Part of the weights taken away per unit of learning rate and step. At least 0.
    weight_decay: f64,
}

impl Default for Lion {
    fn default() -> Self {
        Self { lr: 1e-3, betas: (0.9, 0.999), weight_decay: 0.0, maximize: false, master_weights: false }
    }
}

impl BuildOptimizer for Lion {
    fn name(&self) -> &'static str {
        LionFormula::NAME
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn build(&self, groups: Vec<ParamGroupSpec>) -> Result<Box<dyn Optimizer>> {
        formula::build(
            LionFormula,
            self.master_weights,
            groups,
            &["betas"],
            |own| Merged {
                lr: own.lr.unwrap_or(self.lr),
                weight_decay: own.weight_decay.unwrap_or(self.weight_decay),
                maximize: own.maximize.unwrap_or(self.maximize),
                options: GroupOptions::Lion { betas: own.betas.unwrap_or(self.betas) },
            },
            |merged, at, problems| {
                check_common(merged, at, problems);
                let GroupOptions::Lion { betas } = merged.options else { return };
                check_rate(format!("{at}.betas[0]"), betas.0, problems);
                check_rate(format!("{at}.betas[1]"), betas.1, problems);
            },
        )
    }
}

struct LionFormula;

impl Formula for LionFormula {
    const STATE: &'static [&'static str] = &["exp_avg"];
    const NAME: &'static str = "Lion";

    fn update(
        &self,
        group: &ParamGroup,
        lr: &Rate<'_>,
        weights: &mut Tensor,
        grad: Tensor,
        state: &mut [Tensor],
    ) -> Result<()> {
        let (GroupOptions::Lion { betas }, [mean]) = (group.options, state) else { return Ok(()) };
        lr.decay(weights, group)?;
        let mut direction = mean.copy();
        mix(&mut direction, &grad, betas.0)?;
        let _ = weights.f_sub_(&lr.times(&direction.f_sign()?)?)?;
        mix(mean, &grad, betas.1)
    }
}

settings! {
    /// LAMB (arXiv:1904.00962), as DeepSpeed's: Adam's change of a parameter, scaled by the norm of the parameter over that of
    /// the change.
    ///
    /// `u = m / (sqrt(v) + eps) + weight_decay * w`; `w -= lr * correction * clamp(|w| / |u|, min_coeff, max_coeff) * u`,
    /// where the quotient is 1 if a norm is 0, and the correction is `sqrt(1 - beta2^t) / (1 - beta1^t)`.
    Lamb,
    /// Decay rates of the running means of the gradient and of its square, each in [0, 1).
    betas: (f64, f64),
    /// Term added to the denominator against division by zero, at least 0.
    eps: f64,
    /// Adds `eps` below the root.
    eps_inside_sqrt: bool,
    /// This times the weights is added to the change. At least 0.
    weight_decay: f64,
    /// Whether the running means are corrected for their start at 0.
    bias_correction: bool,
    /// Largest quotient of the norms.
    max_coeff: f64,
    /// Smallest quotient of the norms, at least 0.
    min_coeff: f64,
}

impl Default for Lamb {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            betas: (0.9, 0.999),
            eps: 1e-8,
            eps_inside_sqrt: false,
            weight_decay: 0.0,
            bias_correction: true,
            max_coeff: 10.0,
            min_coeff: 0.01,
            maximize: false,
            master_weights: false,
        }
    }
}

impl BuildOptimizer for Lamb {
    fn name(&self) -> &'static str {
        LambFormula::NAME
    }

    fn build(&self, groups: Vec<ParamGroupSpec>) -> Result<Box<dyn Optimizer>> {
        formula::build(
            LambFormula,
            self.master_weights,
            groups,
            &["betas", "eps"],
            |own| Merged {
                lr: own.lr.unwrap_or(self.lr),
                weight_decay: own.weight_decay.unwrap_or(self.weight_decay),
                maximize: own.maximize.unwrap_or(self.maximize),
                options: GroupOptions::Lamb {
                    betas: own.betas.unwrap_or(self.betas),
                    eps: own.eps.unwrap_or(self.eps),
                    eps_inside_sqrt: self.eps_inside_sqrt,
                    bias_correction: self.bias_correction,
                    coeffs: (self.min_coeff, self.max_coeff),
                },
            },
            |merged, at, problems| {
                check_common(merged, at, problems);
                let GroupOptions::Lamb { betas, eps, coeffs, .. } = merged.options else { return };
                check_rate(format!("{at}.betas[0]"), betas.0, problems);
                check_rate(format!("{at}.betas[1]"), betas.1, problems);
                problems.require_not_negative(format!("{at}.eps"), eps);
                problems.require_not_negative(format!("{at}.min_coeff"), coeffs.0);
                let in_order = coeffs.1.is_finite() && coeffs.0 <= coeffs.1;
                problems.require(in_order, format!("{at}.max_coeff"), coeffs.1, "a number from min_coeff on");
            },
        )
    }
}

struct LambFormula;

impl Formula for LambFormula {
    const STATE: &'static [&'static str] = &["exp_avg", "exp_avg_sq", "step"];
    const NAME: &'static str = "Lamb";

    fn update(
        &self,
        group: &ParamGroup,
        lr: &Rate<'_>,
        weights: &mut Tensor,
        grad: Tensor,
        state: &mut [Tensor],
    ) -> Result<()> {
        let (
            GroupOptions::Lamb { betas, eps, eps_inside_sqrt, bias_correction, coeffs },
            [mean, square, step],
        ) = (group.options, state)
        else {
            return Ok(());
        };
        mix(mean, &grad, betas.0)?;
        mix(square, &grad.f_mul(&grad)?, betas.1)?;
        let _ = step.f_add_scalar_(1.0)?;
        let root = if eps_inside_sqrt {
            square.f_add_scalar(eps)?.f_sqrt()?
        } else {
            square.f_sqrt()?.f_add_scalar_(eps)?
        };
        let update = mean.f_div(&root)?.f_add_(&weights.f_mul_scalar(group.weight_decay)?)?;
        let norm = |tensor: &Tensor| tensor.f_norm();
        let (of_weights, of_update) = (norm(weights)?, norm(&update)?);
        let coeff = of_weights.f_div(&of_update)?.f_clamp(coeffs.0, coeffs.1)?;
        let has_both = of_weights.f_ne(0.0)?.f_logical_and(&of_update.f_ne(0.0)?)?;
        let mut factor = coeff.f_where_self(&has_both, &coeff.f_ones_like()?)?;
        if bias_correction {
            let power = |beta: f64| -> Result<Tensor> {
                Ok(Tensor::f_pow_scalar(beta, &step.f_to_kind(factor.kind())?)?
                    .f_neg()?
                    .f_add_scalar_(1.0)?)
            };
            factor = factor.f_mul(&power(betas.1)?.f_sqrt()?)?.f_div(&power(betas.0)?)?;
        }
        let _ = weights.f_sub_(&lr.times(&update.f_mul(&factor)?)?)?;
        Ok(())
    }
}
