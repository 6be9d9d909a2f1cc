//! Optimizers given by the formula of one parameter, written with libtorch's operators: those for which libtorch has no
//! fused kernel. A step of them can be captured in a graph like any other.

use tch::{Kind, Tensor};

use super::engine::{Engine, Rule, Slot};
use super::optimizer::Optimizer;
use super::param_group::{
    GroupOptions, Merged, Overrides, ParamGroup, ParamGroupSpec, SavedGroup, build_groups,
};
use super::problems::Problems;
use super::replay::Rate;
use crate::error::Result;
use crate::ffi::TensorList;

/// How one parameter is updated.
pub(super) trait Formula: Send {
    /// Names of the tensors kept for a parameter; `step` is a count.
    const STATE: &'static [&'static str];

    /// Name of the optimizer, such as `Lion`.
    const NAME: &'static str;

    /// Which of [`Formula::STATE`] a group has need of.
    fn needs(_options: GroupOptions, _index: usize) -> bool {
        true
    }

    /// What a state tensor holds at first.
    fn initial(&self, _index: usize) -> f64 {
        0.0
    }

    /// Updates `weights` by `grad`, to which the direction is applied already; `state` is in the order of
    /// [`Formula::STATE`], without those that are not needed.
    fn update(
        &self,
        group: &ParamGroup,
        lr: &Rate<'_>,
        weights: &mut Tensor,
        grad: Tensor,
        state: &mut [Tensor],
    ) -> Result<()>;
}

/// `state = beta * state + (1 - beta) * value`.
pub(super) fn mix(state: &mut Tensor, value: &Tensor, beta: f64) -> Result<()> {
    let _ = state.f_mul_scalar_(beta)?.f_add_(&value.f_mul_scalar(1.0 - beta)?)?;
    Ok(())
}

/// The gradient with the L2 penalty of the group.
pub(super) fn with_penalty(group: &ParamGroup, weights: &Tensor, grad: Tensor) -> Result<Tensor> {
    if group.weight_decay == 0.0 {
        return Ok(grad);
    }
    Ok(grad.f_add(&weights.f_mul_scalar(group.weight_decay)?)?)
}

/// The rule of a formula.
pub(super) struct FormulaRule<F>(pub(super) F);

/// What a step works on.
pub(super) struct FormulaLists {
    options: GroupOptions,
    /// Parameters, which have the gradients, and what is updated.
    entries: Vec<Entry>,
}

struct Entry {
    leaf: Tensor,
    weights: Tensor,
    state: Vec<Tensor>,
}

impl<F: Formula> Rule for FormulaRule<F> {
    const STATE: &'static [&'static str] = F::STATE;
    type Lists = FormulaLists;

    fn name(&self) -> &'static str {
        F::NAME
    }

    fn lists(&self, group: &ParamGroup, members: &mut [Slot], active: &[usize]) -> Result<FormulaLists> {
        let mut entries = Vec::with_capacity(active.len());
        for member in active {
            let slot = &mut members[*member];
            let mut state = Vec::new();
            for index in (0..F::STATE.len()).filter(|index| F::needs(group.options, *index)) {
                let tensor = match &slot.state[index] {
                    Some(tensor) => tensor.shallow_clone(),
                    None if Self::is_count(index) => {
                        Tensor::f_zeros([0; 0], (Kind::Float, slot.param.device()))?
                    }
                    None => {
                        let weights = slot.weights().detach();
                        weights.f_full_like(self.0.initial(index))?
                    }
                };
                slot.state[index] = Some(tensor.shallow_clone());
                state.push(tensor);
            }
            let leaf = slot.param.leaf().shallow_clone();
            let weights = slot.weights().shallow_clone(); // the same tensor, whose memory may be changed
            entries.push(Entry { leaf, weights, state });
        }
        Ok(FormulaLists { options: group.options, entries })
    }

    fn fits(&self, group: &ParamGroup, lists: &FormulaLists) -> bool {
        (0..F::STATE.len()).all(|index| F::needs(group.options, index) == F::needs(lists.options, index))
    }

    fn update(
        &self,
        group: &ParamGroup,
        rate: Rate<'_>,
        lists: &mut FormulaLists,
        grads: &mut TensorList,
    ) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        for Entry { leaf, weights, state } in &mut lists.entries {
            let grad = leaf.grad().f_to_kind(weights.kind())?;
            let grad = if group.maximize { grad.f_neg()? } else { grad };
            self.0.update(group, &rate, weights, grad, state)?;
        }
        grads.clear();
        Ok(())
    }

    fn required(group: &SavedGroup) -> Vec<usize> {
        (0..F::STATE.len()).filter(|index| F::needs(group.options, *index)).collect()
    }

    fn is_count(index: usize) -> bool {
        F::STATE.get(index) == Some(&"step")
    }
}

/// Builds the optimizer of a formula; `merge` gives the numbers of one group and `check` what is wrong with the settings.
pub(super) fn build<F: Formula + 'static>(
    formula: F,
    master_weights: bool,
    specs: Vec<ParamGroupSpec>,
    accepted: &'static [&'static str],
    merge: impl Fn(&Overrides) -> Merged,
    check: impl Fn(&Merged, &str, &mut Problems),
) -> Result<Box<dyn Optimizer>> {
    let groups = groups(F::NAME, specs, accepted, merge, check)?;
    Ok(Box::new(Engine::new(FormulaRule(formula), groups, master_weights)?))
}

/// The groups of optimizer `name`; see [`build`].
pub(super) fn groups(
    name: &str,
    specs: Vec<ParamGroupSpec>,
    accepted: &'static [&'static str],
    merge: impl Fn(&Overrides) -> Merged,
    check: impl Fn(&Merged, &str, &mut Problems),
) -> Result<Vec<ParamGroup>> {
    build_groups(
        specs,
        |problems| check(&merge(&Overrides::default()), "init_args", problems),
        |own, at, problems| {
            let merged = merge(own);
            check(&merged, at, problems);
            for (key, set) in [
                ("momentum", own.momentum.is_some()),
                ("dampening", own.dampening.is_some()),
                ("nesterov", own.nesterov.is_some()),
                ("betas", own.betas.is_some()),
                ("eps", own.eps.is_some()),
                ("amsgrad", own.amsgrad.is_some()),
            ] {
                if set && !accepted.contains(&key) {
                    problems.add(format!("{at}.{key}"), format!("is not a setting of {name}"), "remove it");
                }
            }
            merged
        },
    )
}

/// Checks what all these optimizers have.
pub(super) fn check_common(merged: &Merged, at: &str, problems: &mut Problems) {
    problems.require_not_negative(format!("{at}.lr"), merged.lr);
    problems.require_not_negative(format!("{at}.weight_decay"), merged.weight_decay);
}

/// Checks that a decay rate is below 1.
pub(super) fn check_rate(key: String, rate: f64, problems: &mut Problems) {
    problems.require((0.0..1.0).contains(&rate), key, rate, "at least 0 and below 1");
}

/// A struct of settings with defaults, setters, and `new(lr)`.
macro_rules! settings {
    ($(#[$doc:meta])* $name:ident, $($(#[$field_doc:meta])* $field:ident: $type:ty,)*) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            /// Learning rate, at least 0.
            pub lr: f64,
            $($(#[$field_doc])* pub $field: $type,)*
            /// Ascends instead of descends.
            pub maximize: bool,
            /// Updates parameters in bfloat16 or float16 in float32 copies, which lose no small updates, and rounds
            /// these to the parameters after each step (arXiv:1710.03740, section 3.1).
            pub master_weights: bool,
        }

        impl $name {
            /// The standard settings with another learning rate.
            pub fn new(lr: f64) -> Self {
                Self { lr, ..Self::default() }
            }

            setters! {
                $($(#[$field_doc])* $field: $type,)*
                /// Sets whether the objective is ascended.
                maximize: bool,
                /// Sets whether parameters of a lower dtype are updated in float32 copies.
                master_weights: bool,
            }
        }
    };
}
pub(super) use settings;
