//! Lion and Lamb, with DeepSpeed's numbers.

use tch::Tensor;
use voltaic_macros::settings;

use super::checks::{not_negative, rates};
use super::formula::{Formula, formula_optimizer, mix};
use super::param_group::{GroupOptions, ParamGroup};
use super::problems::Problems;
use super::replay::Rate;
use super::settings::optimizer;
use crate::error::Result;
use crate::ffi::{StepKind, StepRule};

/// Lion (arXiv:2302.06675), as DeepSpeed's.
///
/// With gradient `g`: `w -= lr * weight_decay * w`; `w -= lr * sign(beta1 * m + (1 - beta1) * g)`;
/// `m = beta2 * m + (1 - beta2) * g`.
#[settings(lr = 1e-3)]
pub struct Lion {
    /// Decay rates of the mean of gradients in the update, and of the one that is kept, each in [0, 1).
    #[setting(default = (0.9, 0.999), check = rates, per_group)]
    pub betas: (f64, f64),
    /// Part of the weights taken away per unit of learning rate and step. At least 0.
    #[setting(default = 0.0, check = not_negative, per_group)]
    pub weight_decay: f64,
}

optimizer!(Lion = "Lion", |lion| GroupOptions::Lion { betas: lion.betas });
formula_optimizer!(Lion);

impl Formula for Lion {
    const STATE: &'static [&'static str] = &["exp_avg"];

    fn step_rule(group: &ParamGroup) -> Option<StepRule> {
        let GroupOptions::Lion { betas } = group.options else { return None };
        Some(StepRule {
            betas,
            ..StepRule::new(StepKind::Lion, group.lr, group.weight_decay, group.maximize)
        })
    }

    fn update(
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

/// LAMB (arXiv:1904.00962), as DeepSpeed's: Adam's change of a parameter, scaled by the norm of the parameter over that of
/// the change.
///
/// `u = m / (sqrt(v) + eps) + weight_decay * w`; `w -= lr * correction * clamp(|w| / |u|, min_coeff, max_coeff) * u`,
/// where the quotient is 1 if a norm is 0, and the correction is `sqrt(1 - beta2^t) / (1 - beta1^t)`.
#[settings(lr = 1e-3)]
pub struct Lamb {
    /// Decay rates of the running means of the gradient and of its square, each in [0, 1).
    #[setting(default = (0.9, 0.999), check = rates, per_group)]
    pub betas: (f64, f64),
    /// Term added to the denominator against division by zero, at least 0.
    #[setting(default = 1e-8, check = not_negative, per_group)]
    pub eps: f64,
    /// Adds `eps` below the root.
    #[setting(default = false)]
    pub eps_inside_sqrt: bool,
    /// This times the weights is added to the change. At least 0.
    #[setting(default = 0.0, check = not_negative, per_group)]
    pub weight_decay: f64,
    /// Whether the running means are corrected for their start at 0.
    #[setting(default = true)]
    pub bias_correction: bool,
    /// Largest quotient of the norms.
    #[setting(default = 10.0)]
    pub max_coeff: f64,
    /// Smallest quotient of the norms, at least 0.
    #[setting(default = 0.01, check = not_negative)]
    pub min_coeff: f64,
}

optimizer!(Lamb = "Lamb", |lamb| GroupOptions::Lamb {
    betas: lamb.betas,
    eps: lamb.eps,
    eps_inside_sqrt: lamb.eps_inside_sqrt,
    bias_correction: lamb.bias_correction,
    coeffs: (lamb.min_coeff, lamb.max_coeff),
}, also check_coeffs);
formula_optimizer!(Lamb);

impl Lamb {
    fn check_coeffs(&self, problems: &mut Problems) {
        let in_order = self.max_coeff.is_finite() && self.min_coeff <= self.max_coeff;
        problems.require(in_order, "max_coeff", self.max_coeff, "a number from min_coeff on");
    }
}

impl Formula for Lamb {
    const STATE: &'static [&'static str] = &["exp_avg", "exp_avg_sq", "step"];
    const IS_ELEMENTWISE: bool = false;

    fn update(
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
