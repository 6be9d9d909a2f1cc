//! How Muon updates matrices, unsharded ones and those of which ranks have shards, and AdamW the other parameters beside them.

use std::sync::Arc;

use tch::Tensor;

use super::adam::{AdamRule, Lists as AdamLists};
use super::engine::{Rule, Slot};
use super::formula::mix;
use super::newton_schulz;
use super::param_group::{AdjustLr, GroupOptions, ParamGroup, ParamGroupSpec, SavedGroup};
use super::replay::Rate;
use super::unsharded_params::UnshardedParameters;
use crate::error::Result;
use crate::ffi::{self, TensorList};
use crate::nn::Parameter;

/// The rule of both optimizers.
pub(super) struct MuonRule {
    name: &'static str,
    /// For groups with its options.
    adam: AdamRule,
    /// Where ranks have shards of parameters.
    unsharded: Option<Arc<dyn UnshardedParameters>>,
}

const MOMENTUM: usize = 4;

/// What a step works on.
pub(super) enum MuonLists {
    Adam(AdamLists),
    Matrices(Vec<Matrix>),
}

/// A matrix, or this rank's shard of it.
pub(super) struct Matrix {
    param: Parameter,
    weights: Tensor,
    buffer: Tensor,
    shape: Vec<i64>,
    /// The gradient, while the update is in its place.
    hidden: Option<Hidden>,
}

struct Hidden {
    grad: Tensor,
    update: Tensor,
}

impl Matrix {
    /// The gradient, and the update if it is in its place.
    fn gradient(&self) -> Result<(Tensor, Option<Tensor>)> {
        let shown = self.param.leaf().grad();
        Ok(match &self.hidden {
            Some(hidden) if shown.defined() && ffi::tensor_id(&shown)? == ffi::tensor_id(&hidden.update)? => {
                (hidden.grad.shallow_clone(), Some(shown))
            }
            _ => (shown, None),
        })
    }
}

fn is_muon(options: GroupOptions) -> bool {
    matches!(options, GroupOptions::Muon { .. } | GroupOptions::MuonWithAuxAdam { .. })
}

/// Momentum factor, and whether the update looks ahead by the gradient.
fn momentum_of(options: GroupOptions) -> (f64, bool) {
    match options {
        GroupOptions::Muon { momentum, nesterov, .. } => (momentum, nesterov),
        GroupOptions::MuonWithAuxAdam { momentum, .. } => (momentum, true),
        _ => (0.0, false),
    }
}

/// The update of an unsharded parameter, without the learning rate, in float32.
fn orthogonal(options: GroupOptions, direction: &Tensor) -> Result<Tensor> {
    let size = direction.size();
    let sides = || match size[..] {
        [.., rows, columns] => (rows as f64, columns as f64),
        _ => (1.0, 1.0),
    };
    let (update, ratio) = match options {
        GroupOptions::Muon { ns_coefficients, ns_steps, eps, adjust_lr_fn, .. } => {
            let (rows, columns) = sides();
            let ratio = match adjust_lr_fn {
                AdjustLr::Original => (rows / columns.max(1.0)).max(1.0).sqrt(),
                AdjustLr::MatchRmsAdamw => 0.2 * rows.max(columns).sqrt(),
            };
            (newton_schulz::pytorch(direction, ns_coefficients, ns_steps, eps)?, ratio)
        }
        GroupOptions::MuonWithAuxAdam { ns_method, .. } => {
            // as DeepSpeed: a kernel is one matrix, whose ratio is that of its last two dimensions; others are many matrices
            let (rows, columns) = sides();
            let ratio = if rows > columns { (rows / columns.max(1.0)).sqrt() } else { 1.0 };
            let flat = if size.len() == 4 { Some(direction.f_flatten(1, -1)?) } else { None };
            (newton_schulz::deepspeed(flat.as_ref().unwrap_or(direction), ns_method)?, ratio)
        }
        _ => return Ok(direction.shallow_clone()),
    };
    Ok(update.f_mul_scalar(ratio)?.f_reshape(size)?)
}

impl MuonRule {
    /// For matrices in these groups.
    pub(super) fn over<'a>(
        name: &'static str,
        adam: AdamRule,
        matrices: impl IntoIterator<Item = &'a ParamGroupSpec>,
    ) -> Self {
        let mut unsharded = None;
        for group in matrices {
            for (_, parameter) in &group.params {
                group.unsharded.iter().for_each(|unsharded| unsharded.claim(parameter));
            }
            unsharded = unsharded.or(group.unsharded.clone());
        }
        Self { name, adam, unsharded }
    }

    /// What is to be subtracted, without the learning rate, for this gradient and the momentum that has it: shape and dtype of the
    /// weights.
    ///
    /// # Collective
    /// If ranks have shards.
    fn update_of(
        &self,
        group: &ParamGroup,
        matrix: &Matrix,
        grad: &Tensor,
        buffer: &Tensor,
    ) -> Result<Tensor> {
        let (momentum, nesterov) = momentum_of(group.options);
        let direction = if nesterov {
            let mut ahead = grad.f_mul_scalar(1.0 - momentum)?;
            let _ = ahead.f_add_(&buffer.f_mul_scalar(1.0 - (1.0 - momentum))?)?;
            ahead
        } else {
            buffer.shallow_clone()
        };
        let update = match &self.unsharded {
            Some(unsharded) if matrix.shape != matrix.weights.size() => {
                match unsharded.unshard(&matrix.param, &direction)? {
                    Some(all) => unsharded.shard_of(&matrix.param, &orthogonal(group.options, &all)?)?,
                    None => direction,
                }
            }
            _ => orthogonal(group.options, &direction)?,
        };
        Ok(update.f_to_kind(matrix.weights.kind())?)
    }

    fn step(&self, group: &ParamGroup, rate: &Rate<'_>, matrix: &mut Matrix) -> Result<()> {
        let (grad, update) = matrix.gradient()?;
        let grad = directed(group, &grad, &matrix.weights)?;
        mix(&mut matrix.buffer, &grad, momentum_of(group.options).0)?;
        let update = match update {
            Some(update) => update.f_to_kind(matrix.weights.kind())?,
            None => self.update_of(group, matrix, &grad, &matrix.buffer)?,
        };
        rate.decay(&mut matrix.weights, group)?;
        let _ = matrix.weights.f_sub_(&rate.times(&update)?)?;
        unhide(matrix)
    }
}

/// The gradient in the dtype of the weights, in the direction that is descended.
fn directed(group: &ParamGroup, grad: &Tensor, weights: &Tensor) -> Result<Tensor> {
    let grad = grad.f_to_kind(weights.kind())?;
    Ok(if group.maximize { grad.f_neg()? } else { grad })
}

/// Puts the gradient back in its place.
fn unhide(matrix: &mut Matrix) -> Result<()> {
    if let (grad, Some(_)) = matrix.gradient()? {
        ffi::set_grad(matrix.param.leaf(), &grad)?;
    }
    matrix.hidden = None;
    Ok(())
}

impl Rule for MuonRule {
    const STATE: &'static [&'static str] =
        &["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step", "momentum_buffer"];
    type Lists = MuonLists;
    const HAS_OPERATOR: bool = true;

    fn name(&self) -> &'static str {
        self.name
    }

    fn lists(&self, group: &ParamGroup, members: &mut [Slot], active: &[usize]) -> Result<MuonLists> {
        if !is_muon(group.options) {
            return Ok(MuonLists::Adam(self.adam.lists(group, members, active)?));
        }
        let mut matrices = Vec::with_capacity(active.len());
        for member in active {
            let slot = &mut members[*member];
            let buffer = match &slot.state[MOMENTUM] {
                Some(buffer) => buffer.shallow_clone(),
                None => slot.new_state(0.0)?,
            };
            slot.state[MOMENTUM] = Some(buffer.shallow_clone());
            let shape = self.unsharded.as_ref().and_then(|unsharded| unsharded.shape(&slot.param));
            let shape = shape.unwrap_or_else(|| slot.param.size());
            // the same tensor, whose memory may be changed
            let weights = slot.weights().shallow_clone();
            matrices.push(Matrix { param: slot.param.clone(), weights, buffer, shape, hidden: None });
        }
        Ok(MuonLists::Matrices(matrices))
    }

    fn fits(&self, group: &ParamGroup, lists: &MuonLists) -> bool {
        match lists {
            MuonLists::Adam(lists) => self.adam.fits(group, lists),
            MuonLists::Matrices(_) => is_muon(group.options),
        }
    }

    fn update(
        &self,
        group: &ParamGroup,
        rate: Rate<'_>,
        lists: &mut MuonLists,
        grads: &mut TensorList,
    ) -> Result<()> {
        let matrices = match lists {
            MuonLists::Adam(lists) => return self.adam.update(group, rate, lists, grads),
            MuonLists::Matrices(matrices) => matrices,
        };
        let _no_grad = tch::no_grad_guard();
        grads.clear();
        matrices.iter_mut().try_for_each(|matrix| self.step(group, &rate, matrix))
    }

    fn update_in_one_pass(
        &self,
        group: &ParamGroup,
        lists: &mut MuonLists,
        grads: &mut TensorList,
        rounded: Option<&TensorList>,
    ) -> Result<bool> {
        match lists {
            MuonLists::Adam(lists) => self.adam.update_in_one_pass(group, lists, grads, rounded),
            MuonLists::Matrices(_) => Ok(false),
        }
    }

    fn limits_updates(&self, group: &ParamGroup) -> bool {
        matches!(group.options, GroupOptions::MuonWithAuxAdam { .. })
    }

    fn show_updates(&self, group: &ParamGroup, lists: &mut MuonLists) -> Result<()> {
        let MuonLists::Matrices(matrices) = lists else { return Ok(()) };
        let _no_grad = tch::no_grad_guard();
        for matrix in matrices {
            if let (grad, None) = matrix.gradient()? {
                let own = directed(group, &grad, &matrix.weights)?;
                let mut buffer = matrix.buffer.copy();
                mix(&mut buffer, &own, momentum_of(group.options).0)?;
                let dtype = matrix.param.kind();
                let update = self.update_of(group, matrix, &own, &buffer)?.f_to_kind(dtype)?;
                ffi::set_grad(matrix.param.leaf(), &update)?;
                matrix.hidden = Some(Hidden { grad, update });
            }
        }
        Ok(())
    }

    fn show_gradients(&self, lists: &mut MuonLists) -> Result<()> {
        match lists {
            MuonLists::Adam(_) => Ok(()),
            MuonLists::Matrices(matrices) => matrices.iter_mut().try_for_each(unhide),
        }
    }

    fn required(group: &SavedGroup) -> Vec<usize> {
        if is_muon(group.options) { vec![MOMENTUM] } else { AdamRule::required(group) }
    }

    fn keeps(group: &SavedGroup, index: usize) -> bool {
        is_muon(group.options) == (index == MOMENTUM)
    }

    fn is_count(index: usize) -> bool {
        AdamRule::is_count(index)
    }
}
