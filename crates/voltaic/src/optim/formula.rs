//! Optimizers given by the formula of one parameter, written with libtorch's operators: those for which libtorch has no
//! fused kernel. A step of them can be captured in a graph like any other.

use tch::{Kind, Tensor};

use super::engine::{Rule, Slot};
use super::param_group::{GroupOptions, ParamGroup, SavedGroup};
use super::replay::Rate;
use super::settings::Settings;
use crate::error::Result;
use crate::ffi::{StepLists, StepRule, TensorList};

/// How one parameter is updated, for the settings of an optimizer.
pub(super) trait Formula: Settings + Send {
    /// Names of the tensors kept for a parameter; `step` is a count.
    const STATE: &'static [&'static str];

    /// Whether each element is updated by itself.
    const IS_ELEMENTWISE: bool = true;

    /// Which of [`Formula::STATE`] a group has need of.
    fn needs(_options: GroupOptions, _index: usize) -> bool {
        true
    }

    /// What a state tensor holds at first.
    fn initial(&self, _index: usize) -> f64 {
        0.0
    }

    /// Whether a kernel's results are the same bits. One that rounds otherwise serves where the weights are rounded to 16 bits anyway.
    const IS_EXACT_IN_ONE_PASS: bool = true;

    /// The same for a kernel, if there is one.
    fn step_rule(_group: &ParamGroup) -> Option<StepRule> {
        None
    }

    /// Updates `weights` by `grad`, to which the direction is applied already; `state` is in the order of
    /// [`Formula::STATE`], without those that are not needed.
    fn update(
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

/// The rule of a formula, with the optimizer's settings.
pub(super) struct FormulaRule<F>(pub(super) F);

/// What a step works on.
pub(super) struct FormulaLists {
    options: GroupOptions,
    /// Parameters, which have the gradients, and what is updated.
    entries: Vec<Entry>,
    /// For a kernel: all weights, and their states but for counts.
    weights: TensorList,
    states: Vec<TensorList>,
}

struct Entry {
    leaf: Tensor,
    weights: Tensor,
    state: Vec<Tensor>,
}

impl<F: Formula> Rule for FormulaRule<F> {
    const STATE: &'static [&'static str] = F::STATE;
    type Lists = FormulaLists;
    const HAS_OPERATOR: bool = false;
    const IS_EXACT_IN_ONE_PASS: bool = F::IS_EXACT_IN_ONE_PASS;

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
                    None => slot.new_state(self.0.initial(index))?,
                };
                slot.state[index] = Some(tensor.shallow_clone());
                state.push(tensor);
            }
            let leaf = slot.param.leaf().shallow_clone();
            let weights = slot.weights().shallow_clone(); // the same tensor, whose memory may be changed
            entries.push(Entry { leaf, weights, state });
        }
        let weights = TensorList::new(entries.iter().map(|entry| &entry.weights))?;
        let kept = (0..F::STATE.len()).filter(|index| F::needs(group.options, *index));
        let of_all = kept.enumerate().filter(|(_, index)| !Self::is_count(*index));
        let of_all = of_all.map(|(kept, _)| TensorList::new(entries.iter().map(|entry| &entry.state[kept])));
        let states = of_all.collect::<Result<_, _>>()?;
        Ok(FormulaLists { options: group.options, entries, weights, states })
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
            F::update(group, &rate, weights, grad, state)?;
        }
        grads.clear();
        Ok(())
    }

    fn update_in_one_pass(
        &self,
        group: &ParamGroup,
        lists: &mut FormulaLists,
        grads: &mut TensorList,
        rounded: Option<&TensorList>,
    ) -> Result<bool> {
        let Some(rule) = F::step_rule(group) else { return Ok(false) };
        let states: Vec<&TensorList> = lists.states.iter().collect();
        let step = StepLists { params: &lists.weights, states: &states, rounded };
        let count = F::STATE.iter().position(|name| *name == "step");
        let steps = lists.entries.iter().filter_map(|entry| entry.state.get(count?));
        let counts = steps.clone().map(|step| Ok(step.f_double_value(&[])?)).collect::<Result<Vec<f64>>>()?;
        let is_done = step.step(grads, &rule, count.map(|_| counts.as_slice()))?;
        if is_done {
            steps.map(Tensor::shallow_clone).try_for_each(|mut step| step.f_add_scalar_(1.0).map(drop))?;
        }
        Ok(is_done)
    }

    fn required(group: &SavedGroup) -> Vec<usize> {
        (0..F::STATE.len()).filter(|index| F::needs(group.options, *index)).collect()
    }

    fn is_count(index: usize) -> bool {
        F::STATE.get(index) == Some(&"step")
    }
}

/// Builds the optimizer of a formula.
macro_rules! formula_optimizer {
    ($type:ident) => {
        impl $crate::optim::optimizer::BuildOptimizer for $type {
            fn name(&self) -> &'static str {
                <Self as $crate::optim::settings::Settings>::NAME
            }

            fn is_elementwise(&self) -> bool {
                <Self as $crate::optim::formula::Formula>::IS_ELEMENTWISE
            }

            /// The others take norms of parameters.
            fn needs_unsharded_parameters(&self) -> bool {
                !self.is_elementwise()
            }

            fn build(
                &self,
                groups: Vec<$crate::optim::param_group::ParamGroupSpec>,
            ) -> $crate::error::Result<Box<dyn $crate::optim::optimizer::Optimizer>> {
                let rule = $crate::optim::formula::FormulaRule(self.clone());
                let groups = $crate::optim::settings::Settings::groups(self, groups)?;
                Ok(Box::new($crate::optim::engine::Engine::new(rule, groups, self.master_weights)?))
            }
        }
    };
}
pub(super) use formula_optimizer;
