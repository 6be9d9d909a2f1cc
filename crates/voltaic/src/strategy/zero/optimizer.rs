//! An optimizer whose state is divided among the ranks.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::{Kind, Tensor};

use super::reducer::Reducer;
use super::report::state_bytes;
use super::values;
use crate::config::format_size;
use crate::distributed::{ReduceOp, Work, collective_scope};
use crate::error::{ConfigError, Result};
use crate::optim::{
    GradientClip, Optimizer, OptimizerState, Optimizers, ParamGroup, ParamValue, clip_to_norm, part_norm,
};

/// The state that counts steps, and is not like its parameter.
pub(super) const STEP: &str = "step";

/// Steps this rank's part of the parameters, and gives all ranks the whole ones.
pub(super) struct ZeroOptimizer {
    /// Over slices of the parameters, under their names.
    pub inner: Box<dyn Optimizer>,
    pub index: usize,
    pub reducer: Arc<Mutex<Reducer>>,
    /// The log has the size of its state.
    pub has_logged_size: bool,
}

impl ZeroOptimizer {
    fn reducer(&self) -> MutexGuard<'_, Reducer> {
        self.reducer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this rank has all of a parameter, or there is none of that name.
    fn is_whole(&self, fqn: &str) -> bool {
        self.reducer().place_of(fqn).is_none()
    }

    /// Slices with a gradient, as the leaves that have it.
    fn leaves(&self) -> Vec<Tensor> {
        let params = self.inner.param_groups().iter().flat_map(ParamGroup::params);
        params.map(|(_, slice)| slice.leaf().shallow_clone()).collect()
    }

    /// The norm of what is in the place of gradients.
    ///
    /// # Collective
    /// All ranks must call it.
    fn norm(&self, norm_type: f64) -> Result<Tensor> {
        let leaves = self.leaves();
        let own = part_norm(&leaves, norm_type)?;
        // not the dtype of the norm: it is float32 on a rank without gradients
        let wide = leaves.iter().any(|leaf| leaf.kind() == Kind::Double).then_some(Kind::Double);
        let (kind, device) = (wide.unwrap_or(own.kind()), own.device());
        let all = self.reducer().all_norms(&own, wide.unwrap_or(Kind::Float))?;
        let dim: Option<&[i64]> = None;
        Ok(all.f_linalg_norm(norm_type, dim, false, None)?.f_to_device(device)?.f_to_kind(kind)?)
    }
}

/// An error if one of these optimizers cannot work on parts of parameters.
pub(super) fn check_divisible(asked: &Optimizers, strategy: &str, allows_untested: bool) -> Result<()> {
    if let Some(name) = asked.not_divisible().next() {
        let what = format!("{name} with {strategy}: it needs whole parameters, and ranks have parts of them");
        return Err(ConfigError::new("configure_optimizers", what, "use AdamW, or the strategy ddp").into());
    }
    match asked.not_elementwise().next() {
        Some(name) if !allows_untested => {
            let what = "is not known to update each element by itself";
            let what = format!("{name} with {strategy}: it {what}, and ranks have parts of parameters");
            let remedy = "use AdamW, Adam or SGD, or the strategy ddp";
            Err(ConfigError::new("configure_optimizers", what, remedy).into())
        }
        _ => Ok(()),
    }
}

impl Optimizer for ZeroOptimizer {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    /// Unit by unit: the weights of one travel while the next one is updated.
    ///
    /// # Collective
    /// All ranks must call it.
    fn step(&mut self) -> Result<()> {
        self.reducer().begin_update()?;
        let num_units = self.inner.num_units();
        let mut gathers = Vec::new();
        for unit in 0..num_units {
            self.inner.step_unit(unit)?;
            let mut reducer = self.reducer();
            // an optimizer that knows no units has one, in which all are updated
            let end = if unit + 1 == num_units { reducer.units.len() } else { unit + 1 };
            gathers.extend(reducer.end_update(self.index, unit..end)?);
        }
        if !std::mem::replace(&mut self.has_logged_size, true) {
            let bytes = state_bytes(&self.inner.state_dict());
            tracing::info!("{}: this rank holds optimizer states of {}", self.name(), format_size(bytes));
            self.reducer().peaks.states += bytes;
        }
        gathers.into_iter().try_for_each(Work::wait)
    }

    fn zero_grad(&mut self) -> Result<()> {
        self.inner.zero_grad()?;
        self.reducer().drop_grads(self.index)
    }

    fn param_groups(&self) -> &[ParamGroup] {
        self.inner.param_groups()
    }

    fn param_groups_mut(&mut self) -> &mut [ParamGroup] {
        self.inner.param_groups_mut()
    }

    /// # Collective
    /// All ranks must call it.
    fn unscale(&mut self, inverse: f64) -> Result<bool> {
        let is_finite = self.inner.unscale(inverse)?;
        let Some(group) = self.reducer().peers.clone() else { return Ok(is_finite) };
        let _named = collective_scope("overflow");
        let num_failed = Tensor::f_from_slice(&[f32::from(u8::from(!is_finite))])?;
        group.all_reduce(&num_failed, ReduceOp::Sum)?;
        Ok(num_failed.f_double_value(&[0])? == 0.0)
    }

    /// # Collective
    /// All ranks must call it.
    fn grad_norm(&mut self, norm_type: f64) -> Result<Tensor> {
        if norm_type == 0.0 {
            let what = "0, which counts tensors, but ranks have parts of them";
            return Err(ConfigError::new("norm_type", what, "use another norm, such as 2").into());
        }
        self.inner.show_updates(true)?;
        let norm = self.norm(norm_type);
        self.inner.show_updates(false)?;
        norm
    }

    /// # Collective
    /// All ranks must call it.
    fn show_updates(&mut self, are_shown: bool) -> Result<()> {
        self.inner.show_updates(are_shown)
    }

    /// # Collective
    /// All ranks must call it.
    fn clip(&mut self, clip: GradientClip) -> Result<()> {
        match clip {
            GradientClip::Norm(max_norm) => {
                self.inner.show_updates(true)?;
                let norm = self.norm(2.0)?;
                clip_to_norm(&self.leaves(), &norm, max_norm)
            }
            GradientClip::Value(_) => self.inner.clip(clip),
        }
    }

    /// The state of this rank's part, with tensors of one dimension.
    fn state_dict(&self) -> OptimizerState {
        self.inner.state_dict()
    }

    fn load_state_dict(&mut self, state: OptimizerState) -> Result<()> {
        self.inner.load_state_dict(state)
    }

    fn take_state_dict(&mut self, state: OptimizerState) -> Result<()> {
        self.inner.take_state_dict(state)
    }

    /// # Collective
    /// All ranks must call it.
    fn master_weights(&mut self) -> Result<Vec<(String, Tensor)>> {
        values::masters(&mut self.reducer(), self.index)
    }

    fn set_master_weights(&mut self, values: &[(String, Tensor)]) -> Result<()> {
        values::set_masters(&mut self.reducer(), self.index, values)
    }

    fn full_value(&self, fqn: &str, value: ParamValue<'_>) -> Result<Option<Tensor>> {
        match self.is_whole(fqn) {
            true => self.inner.full_value(fqn, value),
            false => values::full(&mut self.reducer(), self.inner.as_ref(), fqn, value),
        }
    }

    fn set_full_value(&mut self, fqn: &str, value: ParamValue<'_>, values: &Tensor) -> Result<()> {
        match self.is_whole(fqn) {
            true => self.inner.set_full_value(fqn, value, values),
            false => values::set_full(&mut self.reducer(), self.inner.as_ref(), fqn, value, values),
        }
    }

    fn local_value(&self, fqn: &str, value: ParamValue<'_>) -> Result<Option<Tensor>> {
        match self.is_whole(fqn) {
            true => self.inner.local_value(fqn, value),
            false => values::local(&mut self.reducer(), self.inner.as_ref(), fqn, value),
        }
    }

    fn set_local_value(&mut self, fqn: &str, value: ParamValue<'_>, values: &Tensor) -> Result<()> {
        match self.is_whole(fqn) {
            true => self.inner.set_local_value(fqn, value, values),
            false => values::set_local(&mut self.reducer(), self.inner.as_ref(), fqn, value, values),
        }
    }
}
