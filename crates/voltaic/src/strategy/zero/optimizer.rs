//! An optimizer whose state is sharded over the ranks.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tch::{Kind, Tensor};

use super::report::state_bytes;
use super::swapper::Swapper;
use super::unit::Unit;
use super::unit_set::UnitSet;
use super::values;
use crate::config::format_size;
use crate::distributed::{ReduceOp, Work, collective_scope};
use crate::error::{ConfigError, Result};
use crate::optim::{
    GradientClip, OffloadState, OffloadStates, Optimizer, OptimizerState, Optimizers, ParamGroup, ParamValue,
    clip_to_norm, local_norm,
};

/// Steps this rank's shard of the parameters, and gives all ranks the unsharded ones.
pub(super) struct ZeroOptimizer {
    /// Over sharded parameters, under the parameters' names.
    pub inner: Box<dyn Optimizer>,
    pub index: usize,
    pub set: Arc<Mutex<UnitSet>>,
    /// The log has the size of its state.
    pub has_logged_size: bool,
    /// States of its units are on the host for a while.
    pub has_offloaded: bool,
}

impl ZeroOptimizer {
    fn set(&self) -> MutexGuard<'_, UnitSet> {
        self.set.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a parameter is in no unit: frozen, or there is none of that name.
    fn is_unsharded(&self, fqn: &str) -> bool {
        self.set().place_of(fqn).is_none()
    }

    /// Whether gradients are in files, which are not to be written for nothing.
    fn has_grads_in_files(&self) -> bool {
        self.set().units.iter().any(Unit::has_grads_in_file)
    }

    /// Sharded parameters with a gradient, as the leaves that have it.
    fn leaves(&self) -> Vec<Tensor> {
        let params = self.inner.param_groups().iter().flat_map(ParamGroup::params);
        params.map(|(_, sharded)| sharded.leaf().shallow_clone()).collect()
    }

    /// The norm of what is in the place of gradients.
    ///
    /// # Collective
    /// All ranks must call it.
    fn norm(&self, norm_type: f64) -> Result<Tensor> {
        let leaves = self.leaves();
        let own = local_norm(&leaves, norm_type)?;
        // not the dtype of the norm: it is float32 on a rank without gradients
        let wide = leaves.iter().any(|leaf| leaf.kind() == Kind::Double).then_some(Kind::Double);
        let (kind, device) = (wide.unwrap_or(own.kind()), own.device());
        let all = self.set().all_norms(&own, wide.unwrap_or(Kind::Float))?;
        let dim: Option<&[i64]> = None;
        Ok(all.f_linalg_norm(norm_type, dim, false, None)?.f_to_device(device)?.f_to_kind(kind)?)
    }
}

/// An error if one of these optimizers cannot work on shards of parameters.
pub(super) fn check_divisible(asked: &Optimizers, strategy: &str, allows_untested: bool) -> Result<()> {
    if let Some(name) = asked.not_divisible().next() {
        let what =
            format!("{name} with {strategy}: it needs unsharded parameters, and ranks have shards of them");
        return Err(ConfigError::new("configure_optimizers", what, "use AdamW, or the strategy ddp").into());
    }
    match asked.not_elementwise().next() {
        Some(name) if !allows_untested => {
            let what = "is not known to update each element by itself";
            let what = format!("{name} with {strategy}: it {what}, and ranks have shards of parameters");
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
        self.reload_states(&OffloadState::ALL)?;
        let start = Instant::now();
        self.set().begin_update()?;
        let num_units = self.inner.num_units();
        let mut gathers = Vec::new();
        for unit in 0..num_units {
            self.set().swap_in(self.index, unit)?;
            self.inner.step_unit(unit)?;
            let mut set = self.set();
            // an optimizer that knows no units has one, in which all are updated
            let end = if unit + 1 == num_units { set.units.len() } else { unit + 1 };
            gathers.extend(set.end_update(self.index, unit..end)?);
            set.swap_out(self.index, unit..end, self.inner.as_ref())?;
        }
        self.set().finish_files()?;
        self.set().files.updating += start.elapsed();
        if !std::mem::replace(&mut self.has_logged_size, true) {
            let mut set = self.set();
            let device = set.units.first().map_or(tch::Device::Cpu, |unit| unit.layout.device);
            let (own, offloaded) = state_bytes(&self.inner.state_dict(), device);
            let in_files = set.files.optimizer.as_ref().map_or(0, Swapper::state_bytes);
            let (own, offloaded) = match device {
                tch::Device::Cpu => (own.saturating_sub(in_files), offloaded),
                _ => (own, offloaded.saturating_sub(in_files)),
            };
            let places = [(offloaded, "host memory"), (in_files, "files")].into_iter();
            let places = places.filter(|(bytes, _)| *bytes > 0);
            let places: String =
                places.map(|(bytes, place)| format!(", {} of them in {place}", format_size(bytes))).collect();
            tracing::info!(
                "{}: this rank holds optimizer states of {}{places}",
                self.name(),
                format_size(own + offloaded + in_files)
            );
            set.peaks.states += own;
            set.peaks.offloaded_states += offloaded;
        }
        gathers.into_iter().try_for_each(Work::wait)
    }

    fn zero_grad(&mut self) -> Result<()> {
        self.inner.zero_grad()?;
        self.set().drop_grads(self.index)
    }

    fn offload_states(&mut self, states: &OffloadStates) -> Result<()> {
        if states.includes(OffloadState::OptimStates) {
            let include = vec![OffloadState::OptimStates]; // what else it has is the units'
            self.inner.offload_states(&OffloadStates { include, ..*states })?;
        }
        self.has_offloaded = true;
        self.set().offload_states(self.index, states)
    }

    fn reload_states(&mut self, states: &[OffloadState]) -> Result<()> {
        if !self.has_offloaded {
            return Ok(());
        }
        self.inner.reload_states(states)?;
        self.set().own_units(self.index).try_for_each(|unit| unit.reload_states(states))?;
        self.has_offloaded = OffloadState::ALL.iter().any(|state| !states.contains(state));
        Ok(())
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
        if inverse != 1.0 {
            self.set().widen_grads(self.index)?;
        }
        let is_finite = match inverse == 1.0 && self.has_grads_in_files() {
            true => {
                let leaves = self.leaves();
                let largest = local_norm(leaves.iter().filter(|leaf| leaf.numel() > 0), f64::INFINITY)?;
                largest.f_double_value(&[])?.is_finite()
            }
            false => self.inner.unscale(inverse)?,
        };
        let Some(group) = self.set().group.clone() else { return Ok(is_finite) };
        let _named = collective_scope("overflow");
        let num_failed = Tensor::f_from_slice(&[f32::from(u8::from(!is_finite))])?;
        group.all_reduce(&num_failed, ReduceOp::Sum)?;
        Ok(num_failed.f_double_value(&[0])? == 0.0)
    }

    /// # Collective
    /// All ranks must call it.
    fn grad_norm(&mut self, norm_type: f64) -> Result<Tensor> {
        if norm_type == 0.0 {
            let what = "0, which counts tensors, but ranks have shards of them";
            return Err(ConfigError::new("norm_type", what, "use another norm, such as 2").into());
        }
        self.set().widen_grads(self.index)?;
        self.inner.show_updates(true)?;
        let norm = self.norm(norm_type);
        self.inner.show_updates(false)?;
        norm
    }

    /// # Collective
    /// All ranks must call it.
    fn show_updates(&mut self, are_shown: bool) -> Result<()> {
        self.set().widen_grads(self.index)?;
        self.inner.show_updates(are_shown)
    }

    /// # Collective
    /// All ranks must call it.
    fn clip(&mut self, clip: GradientClip) -> Result<Option<Tensor>> {
        self.set().widen_grads(self.index)?;
        match clip {
            GradientClip::Norm(max_norm) => {
                self.inner.show_updates(true)?;
                let norm = self.norm(2.0)?;
                if self.has_grads_in_files() && norm.f_double_value(&[])? < 0.999 * max_norm - 1e-6 {
                    return Ok(Some(norm));
                }
                clip_to_norm(&self.leaves(), &norm, max_norm)?;
                Ok(Some(norm))
            }
            GradientClip::Value(_) => self.inner.clip(clip),
        }
    }

    /// The state of this rank's shard, with tensors of one dimension.
    fn state_dict(&self) -> OptimizerState {
        self.inner.state_dict()
    }

    fn load_state_dict(&mut self, state: OptimizerState) -> Result<()> {
        self.reload_states(&OffloadState::ALL)?;
        self.inner.load_state_dict(state)?;
        self.set().swap_all_states(self.index, self.inner.as_ref())
    }

    fn take_state_dict(&mut self, state: OptimizerState) -> Result<()> {
        self.inner.take_state_dict(state)?;
        self.set().swap_all_states(self.index, self.inner.as_ref())
    }

    /// # Collective
    /// All ranks must call it.
    fn master_weights(&mut self) -> Result<Vec<(String, Tensor)>> {
        values::masters(&mut self.set(), self.index)
    }

    fn set_master_weights(&mut self, values: &[(String, Tensor)]) -> Result<()> {
        values::set_masters(&mut self.set(), self.index, values)
    }

    fn full_value(&self, fqn: &str, value: ParamValue<'_>) -> Result<Option<Tensor>> {
        match self.is_unsharded(fqn) {
            true => self.inner.full_value(fqn, value),
            false => values::full(&mut self.set(), self.inner.as_ref(), fqn, value),
        }
    }

    fn set_full_value(&mut self, fqn: &str, value: ParamValue<'_>, values: &Tensor) -> Result<()> {
        match self.is_unsharded(fqn) {
            true => self.inner.set_full_value(fqn, value, values),
            false => values::set_full(&mut self.set(), self.inner.as_ref(), fqn, value, values),
        }
    }

    fn local_value(&self, fqn: &str, value: ParamValue<'_>) -> Result<Option<Tensor>> {
        match self.is_unsharded(fqn) {
            true => self.inner.local_value(fqn, value),
            false => values::local(&mut self.set(), self.inner.as_ref(), fqn, value),
        }
    }

    fn set_local_value(&mut self, fqn: &str, value: ParamValue<'_>, values: &Tensor) -> Result<()> {
        match self.is_unsharded(fqn) {
            true => self.inner.set_local_value(fqn, value, values),
            false => values::set_local(&mut self.set(), self.inner.as_ref(), fqn, value, values),
        }
    }
}
