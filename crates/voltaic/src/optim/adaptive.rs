//! Adagrad, RMSprop and Adadelta, with PyTorch's numbers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::formula::{self, Formula, check_common, check_rate, mix, settings, with_penalty};
use super::optimizer::{BuildOptimizer, Optimizer};
use super::param_group::{GroupOptions, Merged, ParamGroup, ParamGroupSpec};
use super::replay::Rate;
use super::setters::setters;
use crate::error::Result;

settings! {
    /// Adagrad (Duchi et al., JMLR 12, 2011), as `torch.optim.Adagrad`.
    ///
    /// With gradient `g` at step `t`: `s += g²`; `w -= lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)`.
    Adagrad,
    /// The learning rate is divided by 1 plus this times the steps before. At least 0.
    lr_decay: f64,
    /// L2 penalty: this times the weights is added to the gradient. At least 0.
    weight_decay: f64,
    /// What the sum of squares begins with, at least 0.
    initial_accumulator_value: f64,
    /// Term added to the denominator against division by zero, at least 0.
    eps: f64,
}

impl Default for Adagrad {
    fn default() -> Self {
        Self {
            lr: 1e-2,
            lr_decay: 0.0,
            weight_decay: 0.0,
            initial_accumulator_value: 0.0,
            eps: 1e-10,
            maximize: false,
            master_weights: false,
        }
    }
}

impl BuildOptimizer for Adagrad {
    fn name(&self) -> &'static str {
        AdagradFormula::NAME
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn build(&self, groups: Vec<ParamGroupSpec>) -> Result<Box<dyn Optimizer>> {
        let begin = self.initial_accumulator_value;
        formula::build(
            AdagradFormula { begin },
            self.master_weights,
            groups,
            &["eps"],
            |own| Merged {
                lr: own.lr.unwrap_or(self.lr),
                weight_decay: own.weight_decay.unwrap_or(self.weight_decay),
                maximize: own.maximize.unwrap_or(self.maximize),
                options: GroupOptions::Adagrad { lr_decay: self.lr_decay, eps: own.eps.unwrap_or(self.eps) },
            },
            |merged, at, problems| {
                check_common(merged, at, problems);
                let GroupOptions::Adagrad { lr_decay, eps } = merged.options else { return };
                problems.require_not_negative(format!("{at}.lr_decay"), lr_decay);
                problems.require_not_negative(format!("{at}.eps"), eps);
                problems.require_not_negative(format!("{at}.initial_accumulator_value"), begin);
            },
        )
    }
}

struct AdagradFormula {
    begin: f64,
}

impl Formula for AdagradFormula {
    const STATE: &'static [&'static str] = &["sum", "step"];
    const NAME: &'static str = "Adagrad";

    fn initial(&self, _: usize) -> f64 {
        self.begin
    }

    fn update(
        &self,
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

settings! {
    /// RMSprop (Hinton's lecture 6e, 2012), as `torch.optim.RMSprop`.
    ///
    /// With gradient `g`: `v = alpha * v + (1 - alpha) * g²`; `w -= lr * g / (sqrt(v) + eps)`. `centered` takes the square of
    /// the running mean of `g` away from `v`; with momentum, the quotients are summed up in a buffer.
    RmsProp,
    /// Decay rate of the running mean of squares, in [0, 1).
    alpha: f64,
    /// Term added to the denominator against division by zero, at least 0.
    eps: f64,
    /// L2 penalty: this times the weights is added to the gradient. At least 0.
    weight_decay: f64,
    /// Momentum factor, at least 0; 0 keeps no buffer.
    momentum: f64,
    /// Divides by the standard deviation.
    centered: bool,
}

impl Default for RmsProp {
    fn default() -> Self {
        Self {
            lr: 1e-2,
            alpha: 0.99,
            eps: 1e-8,
            weight_decay: 0.0,
            momentum: 0.0,
            centered: false,
            maximize: false,
            master_weights: false,
        }
    }
}

impl BuildOptimizer for RmsProp {
    fn name(&self) -> &'static str {
        RmsPropFormula::NAME
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn build(&self, groups: Vec<ParamGroupSpec>) -> Result<Box<dyn Optimizer>> {
        formula::build(
            RmsPropFormula,
            self.master_weights,
            groups,
            &["eps", "momentum"],
            |own| Merged {
                lr: own.lr.unwrap_or(self.lr),
                weight_decay: own.weight_decay.unwrap_or(self.weight_decay),
                maximize: own.maximize.unwrap_or(self.maximize),
                options: GroupOptions::RmsProp {
                    alpha: self.alpha,
                    eps: own.eps.unwrap_or(self.eps),
                    momentum: own.momentum.unwrap_or(self.momentum),
                    centered: self.centered,
                },
            },
            |merged, at, problems| {
                check_common(merged, at, problems);
                let GroupOptions::RmsProp { alpha, eps, momentum, .. } = merged.options else { return };
                check_rate(format!("{at}.alpha"), alpha, problems);
                problems.require_not_negative(format!("{at}.eps"), eps);
                problems.require_not_negative(format!("{at}.momentum"), momentum);
            },
        )
    }
}

struct RmsPropFormula;

impl Formula for RmsPropFormula {
    const STATE: &'static [&'static str] = &["square_avg", "momentum_buffer", "grad_avg"];
    const NAME: &'static str = "RMSprop";

    fn needs(options: GroupOptions, index: usize) -> bool {
        let GroupOptions::RmsProp { momentum, centered, .. } = options else { return index == 0 };
        match index {
            1 => momentum > 0.0,
            2 => centered,
            _ => true,
        }
    }

    fn update(
        &self,
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

settings! {
    /// Adadelta (arXiv:1212.5701), as `torch.optim.Adadelta`.
    ///
    /// With gradient `g`: `v = rho * v + (1 - rho) * g²`; `d = sqrt(u + eps) / sqrt(v + eps) * g`;
    /// `u = rho * u + (1 - rho) * d²`; `w -= lr * d`.
    Adadelta,
    /// Decay rate of both running means, in [0, 1).
    rho: f64,
    /// Term added to both means, at least 0.
    eps: f64,
    /// L2 penalty: this times the weights is added to the gradient. At least 0.
    weight_decay: f64,
}

impl Default for Adadelta {
    fn default() -> Self {
        Self { lr: 1.0, rho: 0.9, eps: 1e-6, weight_decay: 0.0, maximize: false, master_weights: false }
    }
}

impl BuildOptimizer for Adadelta {
    fn name(&self) -> &'static str {
        AdadeltaFormula::NAME
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn build(&self, groups: Vec<ParamGroupSpec>) -> Result<Box<dyn Optimizer>> {
        formula::build(
            AdadeltaFormula,
            self.master_weights,
            groups,
            &["eps"],
            |own| Merged {
                lr: own.lr.unwrap_or(self.lr),
                weight_decay: own.weight_decay.unwrap_or(self.weight_decay),
                maximize: own.maximize.unwrap_or(self.maximize),
                options: GroupOptions::Adadelta { rho: self.rho, eps: own.eps.unwrap_or(self.eps) },
            },
            |merged, at, problems| {
                check_common(merged, at, problems);
                let GroupOptions::Adadelta { rho, eps } = merged.options else { return };
                check_rate(format!("{at}.rho"), rho, problems);
                problems.require_not_negative(format!("{at}.eps"), eps);
            },
        )
    }
}

struct AdadeltaFormula;

impl Formula for AdadeltaFormula {
    const STATE: &'static [&'static str] = &["square_avg", "acc_delta"];
    const NAME: &'static str = "Adadelta";

    fn update(
        &self,
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
