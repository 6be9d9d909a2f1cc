//! Adam and AdamW.

use tch::{Kind, Tensor};
use voltaic_macros::settings;

use super::checks::{not_negative, rates};
use super::engine::{Engine, Rule, Slot};
use super::optimizer::{BuildOptimizer, Optimizer};
use super::param_group::{GroupOptions, ParamGroup, ParamGroupSpec, SavedGroup};
use super::replay::Rate;
use super::settings::{Settings, optimizer};
use crate::error::Result;
use crate::ffi::{AdamLists, AdamOptions, StepKind, StepLists, StepRule, TensorList};

macro_rules! adam_config {
    ($(#[$doc:meta])* $name:ident = $class:literal, $weight_decay:literal, $decoupled:literal, $(#[$decay_doc:meta])*) => {
        $(#[$doc])*
        #[settings(lr = 1e-3)]
        pub struct $name {
            /// Decay rates of the running means of the gradient and of its square, each in [0, 1).
            #[setting(default = (0.9, 0.999), check = rates, per_group)]
            pub betas: (f64, f64),
            /// Term added to the denominator against division by zero, at least 0.
            #[setting(default = 1e-8, check = not_negative, per_group)]
            pub eps: f64,
            $(#[$decay_doc])*
            #[setting(default = $weight_decay, check = not_negative, per_group)]
            pub weight_decay: f64,
            /// Divides by the largest second moment so far (arXiv:1904.09237) instead of the present one.
            #[setting(default = false, per_group)]
            pub amsgrad: bool,
            /// Whether the running means are corrected for their start at 0; DeepSpeed can do without.
            #[setting(default = true)]
            pub bias_correction: bool,
            /// Ascends instead of descends.
            #[setting(default = false, per_group)]
            pub maximize: bool,
            /// Updates parameters in bfloat16 or float16 in float32 copies, which lose no small updates, and rounds
            /// these to the parameters after each step (arXiv:1710.03740, section 3.1). Such copies and moments take
            /// 12 bytes a weight.
            #[setting(default = false)]
            pub master_weights: bool,
        }

        optimizer!($name = $class, |adam| GroupOptions::Adam {
            betas: adam.betas,
            eps: adam.eps,
            amsgrad: adam.amsgrad,
            bias_correction: adam.bias_correction,
        });

        impl BuildOptimizer for $name {
            fn name(&self) -> &'static str {
                Self::NAME
            }

            fn is_elementwise(&self) -> bool {
                true
            }

            fn build(&self, groups: Vec<ParamGroupSpec>) -> Result<Box<dyn Optimizer>> {
                let rule = AdamRule { name: Self::NAME, decoupled: $decoupled };
                Ok(Box::new(Engine::new(rule, self.groups(groups)?, self.master_weights)?))
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
    Adam = "Adam", 0.0, false,
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
    AdamW = "AdamW", 0.01, true,
    /// Part of the weights taken away per unit of learning rate and step. At least 0.
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
        None => slot.new_state(0.0)?,
    };
    slot.state[index] = Some(state.shallow_clone());
    Ok(state)
}

impl Rule for AdamRule {
    const STATE: &'static [&'static str] = &["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"];
    type Lists = Lists;
    const HAS_OPERATOR: bool = true;

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

    fn update_in_one_pass(
        &self,
        group: &ParamGroup,
        Lists { lists, is_corrected }: &mut Lists,
        grads: &mut TensorList,
        rounded: Option<&TensorList>,
    ) -> Result<bool> {
        let GroupOptions::Adam { betas, eps, amsgrad, .. } = group.options else { return Ok(false) };
        let rule = StepRule {
            betas,
            eps,
            amsgrad,
            decoupled: self.decoupled,
            ..StepRule::new(StepKind::Adam, group.lr, group.weight_decay, group.maximize)
        };
        let counts = match is_corrected {
            true => Vec::<f32>::try_from(&lists.all_steps)?
                .into_iter()
                .map(|step| f64::from(step + 1.0))
                .collect(),
            false => vec![f64::INFINITY; lists.params.len()],
        };
        let mut states = vec![&lists.exp_avgs, &lists.exp_avg_sqs];
        states.extend(&lists.max_exp_avg_sqs);
        let step = StepLists { params: &lists.params, states: &states, rounded };
        let is_done = step.step(grads, &rule, Some(&counts))?;
        if is_done {
            let _ = lists.all_steps.f_add_scalar_(1.0)?;
        }
        Ok(is_done)
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
