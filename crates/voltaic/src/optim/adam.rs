//! Adam and AdamW.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::engine::{Engine, Rule, Slot};
use super::optimizer::{BuildOptimizer, Optimizer};
use super::param_group::build_groups;
use super::param_group::{GroupOptions, Merged, Overrides, ParamGroup, ParamGroupSpec, SavedGroup};
use super::problems::Problems;
use super::replay::Rate;
use super::setters::setters;
use crate::error::Result;
use crate::ffi::{AdamLists, AdamOptions, TensorList};

macro_rules! adam_config {
    ($(#[$doc:meta])* $name:ident, $weight_decay:literal, $decoupled:literal, $(#[$decay_doc:meta])*) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            /// Learning rate, at least 0.
            pub lr: f64,
            /// Decay rates of the running means of the gradient and of its square, each in [0, 1).
            pub betas: (f64, f64),
            /// Term added to the denominator against division by zero, at least 0.
            pub eps: f64,
            $(#[$decay_doc])*
            pub weight_decay: f64,
            /// Divides by the largest second moment so far (arXiv:1904.09237) instead of the present one.
            pub amsgrad: bool,
            /// Whether the running means are corrected for their start at 0; DeepSpeed can do without.
            pub bias_correction: bool,
            /// Ascends instead of descends.
            pub maximize: bool,
            /// Updates parameters in bfloat16 or float16 in float32 copies, which lose no small updates, and rounds
            /// these to the parameters after each step (arXiv:1710.03740, section 3.1). Such copies and moments take
            /// 12 bytes a weight.
            pub master_weights: bool,
        }

        impl Default for $name {
            fn default() -> Self {
                Self {
                    lr: 1e-3,
                    betas: (0.9, 0.999),
                    eps: 1e-8,
                    weight_decay: $weight_decay,
                    amsgrad: false,
                    bias_correction: true,
                    maximize: false,
                    master_weights: false,
                }
            }
        }

        impl $name {
            /// PyTorch's settings with another learning rate.
            pub fn new(lr: f64) -> Self {
                Self { lr, ..Self::default() }
            }

            setters! {
                /// Sets the learning rate.
                lr: f64,
                /// Sets the decay rates of the running means.
                betas: (f64, f64),
                /// Sets the term added to the denominator.
                eps: f64,
                /// Sets the weight decay.
                weight_decay: f64,
                /// Sets whether the largest second moment is used.
                amsgrad: bool,
                /// Sets whether the running means are corrected for their start at 0.
                bias_correction: bool,
                /// Sets whether the objective is ascended.
                maximize: bool,
                /// Sets whether parameters of a lower dtype are updated in float32 copies.
                master_weights: bool,
            }
        }

        impl BuildOptimizer for $name {
            fn name(&self) -> &'static str {
                stringify!($name)
            }

            fn is_elementwise(&self) -> bool {
                true
            }

            fn build(&self, groups: Vec<ParamGroupSpec>) -> Result<Box<dyn Optimizer>> {
                let Self { lr, betas, eps, weight_decay, amsgrad, bias_correction, maximize, master_weights } = *self;
                let settings = Settings { lr, betas, eps, weight_decay, amsgrad, bias_correction, maximize };
                let rule = AdamRule { name: stringify!($name), decoupled: $decoupled };
                let groups = settings.groups(rule.name, groups)?;
                Ok(Box::new(Engine::new(rule, groups, master_weights)?))
            }
        }
    };
}

adam_config! {
    /// Adam (arXiv:1412.6980), as `torch.optim.Adam`: weight decay is added to the gradient (L2 penalty).
    ///
    /// With gradient `g` at step `t`: `m = beta1 * m + (1 - beta1) * g`; `v = beta2 * v + (1 - beta2) * g²`;
    /// `w -= lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)`.
    ///
    /// ```
    /// use voltaic::optim::Adam;
    /// let adam = Adam::new(3e-4).betas((0.9, 0.95));
    /// # assert_eq!(adam.eps, 1e-8);
    /// ```
    Adam, 0.0, false,
    /// L2 penalty: this times the weights is added to the gradient. At least 0.
}

adam_config! {
    /// AdamW (arXiv:1711.05101), as `torch.optim.AdamW`: [`Adam`] with weight decay applied to the weights
    /// themselves, `w -= lr * weight_decay * w`, before the update.
    ///
    /// ```
    /// use voltaic::optim::AdamW;
    /// let adamw = AdamW::new(1e-3).weight_decay(0.1);
    /// # assert_eq!(adamw.betas, (0.9, 0.999));
    /// ```
    AdamW, 0.01, true,
    /// Part of the weights taken away per unit of learning rate and step. At least 0.
}

/// The settings of both.
#[derive(Clone, Copy)]
struct Settings {
    lr: f64,
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    amsgrad: bool,
    bias_correction: bool,
    maximize: bool,
}

impl Settings {
    /// These settings with those that a group has of its own.
    fn with(&self, own: &Overrides) -> Self {
        Self {
            lr: own.lr.unwrap_or(self.lr),
            betas: own.betas.unwrap_or(self.betas),
            eps: own.eps.unwrap_or(self.eps),
            weight_decay: own.weight_decay.unwrap_or(self.weight_decay),
            amsgrad: own.amsgrad.unwrap_or(self.amsgrad),
            bias_correction: self.bias_correction,
            maximize: own.maximize.unwrap_or(self.maximize),
        }
    }

    fn check(&self, at: &str, problems: &mut Problems) {
        problems.require_not_negative(format!("{at}.lr"), self.lr);
        for (index, beta) in [self.betas.0, self.betas.1].into_iter().enumerate() {
            let rule = "at least 0 and below 1";
            problems.require((0.0..1.0).contains(&beta), format!("{at}.betas[{index}]"), beta, rule);
        }
        problems.require_not_negative(format!("{at}.eps"), self.eps);
        problems.require_not_negative(format!("{at}.weight_decay"), self.weight_decay);
    }

    /// The groups of optimizer `name` with these settings.
    fn groups(&self, name: &str, groups: Vec<ParamGroupSpec>) -> Result<Vec<ParamGroup>> {
        build_groups(
            groups,
            |problems| self.check("init_args", problems),
            |own, at, problems| {
                let merged = self.with(own);
                merged.check(at, problems);
                for (key, set) in [
                    ("momentum", own.momentum.is_some()),
                    ("dampening", own.dampening.is_some()),
                    ("nesterov", own.nesterov.is_some()),
                ] {
                    if set {
                        problems.add(
                            format!("{at}.{key}"),
                            format!("is not a setting of {name}"),
                            "remove it",
                        );
                    }
                }
                let Settings { lr, betas, eps, weight_decay, amsgrad, bias_correction, maximize } = merged;
                let options = GroupOptions::Adam { betas, eps, amsgrad, bias_correction };
                Merged { lr, weight_decay, maximize, options }
            },
        )
    }
}

pub(super) struct AdamRule {
    pub(super) name: &'static str,
    pub(super) decoupled: bool,
}

const EXP_AVG: usize = 0;
const EXP_AVG_SQ: usize = 1;
const MAX_EXP_AVG_SQ: usize = 2;
const STEP: usize = 3;

/// A count of steps at which `1 - beta^step` is 1 for all decay rates.
const LATE: f64 = 1e30;

/// What the kernel takes.
pub(super) struct Lists {
    lists: AdamLists,
    is_corrected: bool,
}

fn is_corrected(options: GroupOptions) -> bool {
    matches!(options, GroupOptions::Adam { bias_correction: true, .. })
}

fn is_amsgrad(options: GroupOptions) -> bool {
    matches!(options, GroupOptions::Adam { amsgrad: true, .. })
}

/// The state tensor at `index`, made of zeros like the parameter if it is not there yet.
fn state_or_zeros(slot: &mut Slot, index: usize) -> Result<Tensor> {
    let state = match &slot.state[index] {
        Some(state) => state.shallow_clone(),
        None if index == STEP => Tensor::f_zeros([0; 0], (Kind::Float, slot.param.device()))?,
        None => slot.weights().detach().f_zeros_like()?,
    };
    slot.state[index] = Some(state.shallow_clone());
    Ok(state)
}

impl Rule for AdamRule {
    const STATE: &'static [&'static str] = &["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"];
    type Lists = Lists;

    fn name(&self) -> &'static str {
        self.name
    }

    fn lists(&self, group: &ParamGroup, members: &mut [Slot], active: &[usize]) -> Result<Lists> {
        let mut all = |index: usize| -> Result<Vec<Tensor>> {
            active.iter().map(|member| state_or_zeros(&mut members[*member], index)).collect()
        };
        let exp_avgs = TensorList::new(&all(EXP_AVG)?)?;
        let exp_avg_sqs = TensorList::new(&all(EXP_AVG_SQ)?)?;
        let max_exp_avg_sqs =
            if is_amsgrad(group.options) { Some(TensorList::new(&all(MAX_EXP_AVG_SQ)?)?) } else { None };
        // One tensor of all counts is counted up by one operation; each parameter's count is a view into it.
        let all_steps = Tensor::f_stack(&all(STEP)?, 0)?;
        let mut steps = Vec::with_capacity(active.len());
        for (entry, member) in active.iter().enumerate() {
            let step = all_steps.f_select(0, entry as i64)?;
            members[*member].state[STEP] = Some(step.shallow_clone());
            steps.push(step);
        }
        let params = TensorList::new(active.iter().map(|member| members[*member].weights()))?;
        let is_corrected = is_corrected(group.options);
        if !is_corrected {
            // after so many steps the kernel's correction is 1
            let late = all_steps.f_full_like(LATE)?;
            steps =
                (0..active.len() as i64).map(|entry| late.f_select(0, entry)).collect::<Result<_, _>>()?;
        }
        let steps = TensorList::new(&steps)?;
        let lists = AdamLists { params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, all_steps };
        Ok(Lists { lists, is_corrected })
    }

    fn fits(&self, group: &ParamGroup, Lists { lists, is_corrected: known }: &Lists) -> bool {
        let is_alike = lists.max_exp_avg_sqs.is_some() == is_amsgrad(group.options);
        is_alike && *known == is_corrected(group.options)
    }

    fn update(
        &self,
        group: &ParamGroup,
        rate: Rate<'_>,
        Lists { lists, .. }: &mut Lists,
        grads: &mut TensorList,
    ) -> Result<()> {
        let GroupOptions::Adam { betas, eps, amsgrad, .. } = group.options else { return Ok(()) };
        let options = AdamOptions {
            lr: rate.lr,
            betas,
            eps,
            weight_decay: group.weight_decay,
            amsgrad,
            maximize: group.maximize,
            decoupled: self.decoupled,
        };
        Ok(lists.step(grads, &options)?)
    }

    fn required(group: &SavedGroup) -> Vec<usize> {
        let mut required = vec![EXP_AVG, EXP_AVG_SQ, STEP];
        if is_amsgrad(group.options) {
            required.push(MAX_EXP_AVG_SQ);
        }
        required
    }

    fn is_count(index: usize) -> bool {
        index == STEP
    }
}
