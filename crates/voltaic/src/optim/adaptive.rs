//! Adagrad, RMSprop and Adadelta, with PyTorch's numbers.

use tch::Tensor;
use voltaic_macros::settings;

use super::checks::{not_negative, rate};
use super::formula::{Formula, formula_optimizer, mix, with_penalty};
use super::param_group::{GroupOptions, ParamGroup};
use super::replay::Rate;
use super::settings::optimizer;
use crate::error::Result;
use crate::ffi::{StepKind, StepRule};

/// Adagrad (Duchi et al., JMLR 12, 2011), as `torch.optim.Adagrad`.
///
/// With gradient `g` at step `t`: `s += g²`; `w -= lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)`.
#[settings(lr = 1e-2)]
pub struct Adagrad {
    /// The learning rate is divided by 1 plus this times the steps before. At least 0.
    #[setting(default = 0.0, check = not_negative)]
    pub lr_decay: f64,
    /// L2 penalty: this times the weights is added to the gradient. At least 0.
    #[setting(default = 0.0, check = not_negative, per_group)]
    pub weight_decay: f64,
    /// What the sum of squares begins with, at least 0.
    #[setting(default = 0.0, check = not_negative)]
    pub initial_accumulator_value: f64,
    /// Term added to the denominator against division by zero, at least 0.
    #[setting(default = 1e-10, check = not_negative, per_group)]
    pub eps: f64,
}

optimizer!(Adagrad = "Adagrad", |adagrad| GroupOptions::Adagrad {
    lr_decay: adagrad.lr_decay,
    eps: adagrad.eps
});
formula_optimizer!(Adagrad);

impl Formula for Adagrad {
    const STATE: &'static [&'static str] = &["sum", "step"];

    const IS_EXACT_IN_ONE_PASS: bool = false; // libtorch's square roots are the MKL's

    fn initial(&self, _: usize) -> f64 {
        self.initial_accumulator_value
    }

    fn step_rule(group: &ParamGroup) -> Option<StepRule> {
        let GroupOptions::Adagrad { lr_decay, eps } = group.options else { return None };
        let rule = StepRule::new(StepKind::Adagrad, group.lr, group.weight_decay, group.maximize);
        Some(StepRule { lr_decay, eps, ..rule })
    }

    fn update(
        group: &ParamGroup,
        lr: &Rate<'_>,
        weights: &mut Tensor,
        grad: Tensor,
        state: &mut [Tensor],
    ) -> Result<()> {
        let (GroupOptions::Adagrad { lr_decay, eps }, [sum, step]) = (group.options, state) else {
            return Ok(());
        };
        let grad = with_penalty(group, weights, grad)?;
        let _ = sum.f_addcmul_(&grad, &grad)?;
        let change = lr.times(&grad)?.f_div(&sum.f_sqrt()?.f_add_scalar_(eps)?)?;
        let change = if lr_decay == 0.0 {
            change
        } else {
            change.f_div(&step.f_mul_scalar(lr_decay)?.f_add_scalar_(1.0)?.f_to_kind(change.kind())?)?
        };
        let _ = step.f_add_scalar_(1.0)?;
        let _ = weights.f_sub_(&change)?;
        Ok(())
    }
}

/// RMSprop (Hinton's lecture 6e, 2012), as `torch.optim.RMSprop`.
///
/// With gradient `g`: `v = alpha * v + (1 - alpha) * g²`; `w -= lr * g / (sqrt(v) + eps)`. `centered` takes the square of
/// the running mean of `g` away from `v`; with momentum, the quotients are summed up in a buffer.
#[settings(lr = 1e-2)]
pub struct RmsProp {
    /// Decay rate of the running mean of squares, in [0, 1).
    #[setting(default = 0.99, check = rate)]
    pub alpha: f64,
    /// Term added to the denominator against division by zero, at least 0.
    #[setting(default = 1e-8, check = not_negative, per_group)]
    pub eps: f64,
    /// L2 penalty: this times the weights is added to the gradient. At least 0.
    #[setting(default = 0.0, check = not_negative, per_group)]
    pub weight_decay: f64,
    /// Momentum factor, at least 0; 0 keeps no buffer.
    #[setting(default = 0.0, check = not_negative, per_group)]
    pub momentum: f64,
    /// Divides by the standard deviation.
    #[setting(default = false)]
    pub centered: bool,
}

optimizer!(RmsProp = "RMSprop", |rms_prop| GroupOptions::RmsProp {
    alpha: rms_prop.alpha,
    eps: rms_prop.eps,
    momentum: rms_prop.momentum,
    centered: rms_prop.centered,
});
formula_optimizer!(RmsProp);

impl Formula for RmsProp {
    const STATE: &'static [&'static str] = &["square_avg", "momentum_buffer", "grad_avg"];

    fn needs(options: GroupOptions, index: usize) -> bool {
        let GroupOptions::RmsProp { momentum, centered, .. } = options else { return index == 0 };
        match index {
            1 => momentum > 0.0,
            2 => centered,
            _ => true,
        }
    }

    fn update(
        group: &ParamGroup,
        lr: &Rate<'_>,
        weights: &mut Tensor,
        grad: Tensor,
        state: &mut [Tensor],
    ) -> Result<()> {
        let GroupOptions::RmsProp { alpha, eps, momentum, centered } = group.options else { return Ok(()) };
        let Some((square, others)) = state.split_first_mut() else { return Ok(()) };
        let grad = with_penalty(group, weights, grad)?;
        mix(square, &grad.f_mul(&grad)?, alpha)?;
        let variance = match others.last_mut().filter(|_| centered) {
            Some(mean) => {
                mix(mean, &grad, alpha)?;
                square.f_sub(&mean.f_mul(mean)?)?
            }
            None => square.shallow_clone(),
        };
        let quotient = grad.f_div(&variance.f_sqrt()?.f_add_scalar_(eps)?)?;
        let change = match others.first_mut().filter(|_| momentum > 0.0) {
            Some(buffer) => buffer.f_mul_scalar_(momentum)?.f_add_(&quotient)?,
            None => quotient,
        };
        let _ = weights.f_sub_(&lr.times(&change)?)?;
        Ok(())
    }
}

/// Adadelta (arXiv:1212.5701), as `torch.optim.Adadelta`.
///
/// With gradient `g`: `v = rho * v + (1 - rho) * g²`; `d = sqrt(u + eps) / sqrt(v + eps) * g`;
/// `u = rho * u + (1 - rho) * d²`; `w -= lr * d`.
#[settings(lr = 1.0)]
pub struct Adadelta {
    /// Decay rate of both running means, in [0, 1).
    #[setting(default = 0.9, check = rate)]
    pub rho: f64,
    /// Term added to both means, at least 0.
    #[setting(default = 1e-6, check = not_negative, per_group)]
    pub eps: f64,
    /// L2 penalty: this times the weights is added to the gradient. At least 0.
    #[setting(default = 0.0, check = not_negative, per_group)]
    pub weight_decay: f64,
}

optimizer!(Adadelta = "Adadelta", |adadelta| GroupOptions::Adadelta { rho: adadelta.rho, eps: adadelta.eps });
formula_optimizer!(Adadelta);

impl Formula for Adadelta {
    const STATE: &'static [&'static str] = &["square_avg", "acc_delta"];

    fn update(
        group: &ParamGroup,
        lr: &Rate<'_>,
        weights: &mut Tensor,
        grad: Tensor,
        state: &mut [Tensor],
    ) -> Result<()> {
        let (GroupOptions::Adadelta { rho, eps }, [square, sum]) = (group.options, state) else {
            return Ok(());
        };
        let grad = with_penalty(group, weights, grad)?;
        mix(square, &grad.f_mul(&grad)?, rho)?;
        let root = |mean: &Tensor| -> Result<Tensor> { Ok(mean.f_add_scalar(eps)?.f_sqrt()?) };
        let change = root(sum)?.f_div_(&root(square)?)?.f_mul_(&grad)?;
        mix(sum, &change.f_mul(&change)?, rho)?;
        let _ = weights.f_sub_(&lr.times(&change)?)?;
        Ok(())
    }
}
