//! The gradients of a unit: those of this rank, which are reduced, and the shard of their mean that the optimizer steps with.

use tch::{Kind, Tensor};

use super::unit::Unit;
use crate::dtype::bytes_of;
use crate::error::Result;
use crate::ffi;
use crate::nn::Parameter;
use crate::strategy::sparse;

impl Unit {
    /// All gradients of this rank times `scale` in one tensor, with the sums that there are; they are taken from the parameters.
    pub fn take_grads(&mut self, scale: f64) -> Result<Tensor> {
        let Some(mut sums) = self.sums.take() else { return self.take_flat(self.layout.kind, scale) };
        let _no_grad = tch::no_grad_guard();
        let last = self.take_flat(sums.kind(), 1.0)?;
        let _ = sums.f_add_(&last)?.f_mul_scalar_(scale)?;
        Ok(sums.f_to_kind(self.layout.kind)?)
    }

    /// Adds this rank's gradients of one backward pass to sums of this dtype; they are taken from the parameters.
    pub fn add_to_sums(&mut self, dtype: Kind) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let flat = self.take_flat(dtype, 1.0)?;
        match &mut self.sums {
            Some(sums) => {
                let _ = sums.f_add_(&flat)?;
            }
            None => self.sums = Some(flat),
        }
        Ok(())
    }

    fn take_flat(&mut self, dtype: Kind, scale: f64) -> Result<Tensor> {
        let flat = self.layout.empty_flat(dtype)?;
        let had = self.layout.places.iter().map(|place| place.parameter.grad().defined());
        self.had_grad.iter_mut().zip(had).for_each(|(known, had)| *known |= had);
        ffi::fill_bucket(self.leaves(), &self.layout.views(&flat)?, scale).map_err(|error| {
            let names = self.layout.places.iter().map(|place| place.fqn.as_str());
            sparse::explain(error, "zero", names.zip(self.leaves()))
        })?;
        ffi::clear_grads(self.leaves())?;
        Ok(flat)
    }

    /// Adds this rank's shard of the mean gradients of one backward pass; sums of a window have this dtype.
    pub fn add_grads(&mut self, shard: Tensor, dtype: Option<Kind>) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        self.widen_grads()?; // more than a window is added up in the dtype of the shard
        let own = dtype.unwrap_or(self.layout.kind);
        let shard = self.moved.to(self.layout.storage, &shard, self.layout.pins)?;
        let dtype = self.grads.as_ref().map_or(own, Tensor::kind);
        if self.layout.pins && (self.grads.is_some() || dtype != shard.kind()) {
            self.wait_for_copies()?;
        }
        let shard = shard.f_to_kind(dtype)?;
        match &mut self.grads {
            Some(grads) => {
                let _ = grads.f_add_(&shard)?;
            }
            None => self.grads = Some(shard),
        }
        Ok(())
    }

    /// Whether gradients are of 16 bits, and the shard of float32.
    fn has_narrow_grads(&self) -> bool {
        let is_half = |grads: &Tensor| matches!(grads.kind(), Kind::BFloat16 | Kind::Half);
        self.shard.kind() == Kind::Float && self.grads.as_ref().is_some_and(is_half)
    }

    /// Gradients of 16 bits that the optimizer has become float32, before they are changed.
    pub fn widen_grads(&mut self) -> Result<()> {
        if !self.are_shown || !self.has_narrow_grads() {
            return Ok(());
        }
        let Some(narrow) = self.grads.as_ref() else { return Ok(()) };
        let _no_grad = tch::no_grad_guard();
        let grads = narrow.f_to_kind(self.shard.kind())?;
        for (place, sharded) in self.layout.places.iter().zip(&self.sharded_params) {
            let own = sharded.grad();
            if own.defined() {
                let mut grad = self.layout.param_shard(&grads, place, self.rank)?;
                if own.kind() != narrow.kind() {
                    grad.f_copy_(&own)?; // clipped by itself
                }
                ffi::set_grad(sharded.leaf(), &grad)?;
            }
        }
        self.grads = Some(grads);
        Ok(())
    }

    /// Shows the gradients to the optimizer, in a dtype that it takes: those of parameters that had one on any rank.
    pub fn show_grads(&mut self, had_grad: &[bool]) -> Result<()> {
        let stays = self.takes_narrow_grads && self.has_narrow_grads();
        let Some(grads) = &mut self.grads else { return Ok(()) };
        if !stays {
            *grads = grads.f_to_kind(self.shard.kind())?;
            self.file_grads = self.file_grads.map(|_| self.shard.kind());
        }
        self.are_shown = true;
        for (index, _) in had_grad.iter().enumerate().filter(|(_, had)| **had) {
            let sharded = &self.sharded_params[index];
            let grad = self.layout.param_shard(grads, &self.layout.places[index], self.rank)?;
            if (grad.numel() > 0 || self.claimed[index]) && !sharded.grad().defined() {
                ffi::set_grad(sharded.leaf(), &grad)?;
            }
        }
        Ok(())
    }

    /// Shows the optimizer whether the parameter at `index` has a gradient, also if this rank has nothing of it.
    pub fn claim(&mut self, index: usize) {
        self.claimed[index] = true;
    }

    /// Whether there are gradients to step with; the same on all ranks.
    pub fn has_grads(&self) -> bool {
        self.grads.is_some()
    }

    /// The dtype of the gradients, if there are some.
    pub fn grads_dtype(&self) -> Option<Kind> {
        self.file_grads.or_else(|| self.grads.as_ref().map(Tensor::kind))
    }

    /// Whether a file is the memory of the gradients.
    pub fn has_grads_in_file(&self) -> bool {
        self.file_grads.is_some()
    }

    /// Whether gradients that are rounded to this dtype can be in a file, in the dtype of the shard. None are in memory then.
    pub fn takes_grads_in_file(&self, dtype: Kind) -> bool {
        let fits = self.shard.kind() == dtype || (self.shard.kind() == Kind::Float && dtype != Kind::Double);
        self.is_shard_in_file && fits && (self.grads.is_none() || self.has_grads_in_file())
    }

    /// The gradients are in a tensor whose memory is a file, rounded to this dtype.
    pub fn put_grads_into(&mut self, flat: &Tensor, dtype: Kind) {
        (self.grads, self.file_grads) = (Some(flat.shallow_clone()), Some(dtype));
    }

    /// The file of the gradients is broken.
    pub fn lose_grads_in_file(&mut self) {
        if self.file_grads.take().is_some() {
            self.grads = None;
        }
    }

    /// Drops all gradients.
    pub fn drop_grads(&mut self) -> Result<()> {
        ffi::clear_grads(self.leaves().chain(self.sharded_params.iter().map(Parameter::leaf)))?;
        (self.grads, self.file_grads, self.are_shown) = (None, None, false);
        self.sums = None;
        self.had_grad.fill(false);
        Ok(())
    }

    /// This rank's own sums in an open window, by name, where they have a dtype of their own.
    pub fn own_sums(&self) -> Result<Vec<(&str, Tensor)>> {
        let Some(sums) = &self.sums else { return Ok(Vec::new()) };
        let views = self.layout.views(sums)?;
        let had = self.layout.places.iter().zip(&self.had_grad).zip(views).filter(|((_, had), _)| **had);
        Ok(had.map(|((place, _), view)| (place.fqn.as_str(), view)).collect())
    }

    /// Puts back what [`Unit::own_sums`] gave for the parameter at `index`.
    ///
    /// # Errors
    /// libtorch's, if the size is another one.
    pub fn restore_sums(&mut self, index: usize, dtype: Kind, values: &Tensor) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let sums = match self.sums.take() {
            Some(sums) => sums,
            None => self.layout.empty_flat(dtype)?.f_zero_()?,
        };
        let own = self.layout.views(&sums)?.swap_remove(index).f_copy_(values);
        self.sums = Some(sums);
        own?;
        self.had_grad[index] = true;
        Ok(ffi::clear_grads([self.layout.places[index].parameter.leaf()])?)
    }

    /// This rank's shard of the gradients of each parameter, if there are some: its name, whether it has had a gradient on this
    /// rank, and the shard; in the dtype of the weights' shard if the optimizer has them.
    pub fn pending(&self) -> Result<Vec<(&str, bool, Tensor)>> {
        let Some(grads) = &self.grads else { return Ok(Vec::new()) };
        let kind =
            if self.are_shown { self.shard.kind() } else { self.grads_dtype().unwrap_or(grads.kind()) };
        self.layout
            .places
            .iter()
            .enumerate()
            .zip(&self.had_grad)
            .map(|((index, place), had)| {
                let grad = place.to_rows(&self.current_grad(grads, index)?)?.f_to_kind(kind)?;
                Ok((place.fqn.as_str(), *had, grad))
            })
            .collect()
    }

    /// This rank's shard of the gradient of the parameter at `index`: of `grads`, unless what clipped it has made a float32 one.
    fn current_grad(&self, grads: &Tensor, index: usize) -> Result<Tensor> {
        let own = self.sharded_params[index].grad();
        match own.defined() && own.kind() != grads.kind() {
            true => Ok(own),
            false => self.layout.param_shard(grads, &self.layout.places[index], self.rank),
        }
    }

    /// This rank's shard of the gradient of the parameter at `index`, as it lies in memory, if there is one; shared.
    pub fn grad_param_shard(&self, index: usize) -> Result<Option<Tensor>> {
        let Some(grads) = self.grads.as_ref().filter(|_| self.had_grad[index]) else { return Ok(None) };
        self.current_grad(grads, index).map(Some)
    }

    /// Puts back what [`Unit::pending`] gave for the parameter at `index`.
    ///
    /// # Errors
    /// libtorch's, if the size is another one.
    pub fn restore_pending(&mut self, index: usize, had_grad: bool, values: &Tensor) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let grads = match &self.grads {
            Some(grads) => grads.shallow_clone(),
            None => {
                let len = [self.layout.shard_len as i64];
                Tensor::f_zeros(len, (values.kind(), self.layout.storage))?
            }
        };
        let place = &self.layout.places[index];
        let grad = self.layout.param_shard(&grads, place, self.rank)?;
        self.grads = Some(grads);
        grad.shallow_clone().f_copy_(&place.to_memory_order(values)?)?;
        self.had_grad[index] = had_grad;
        let is_shown = self.grads_dtype() == Some(self.shard.kind());
        self.are_shown |= is_shown;
        if had_grad && grad.numel() > 0 && is_shown {
            ffi::set_grad(self.sharded_params[index].leaf(), &grad)?;
        }
        Ok(())
    }

    /// Bytes of gradients: of its shard, or of all if those stay unsharded; and those of its shard in host memory.
    pub fn grad_bytes(&self, stay_unsharded: bool) -> (usize, usize) {
        let shard = self.grads.as_ref().filter(|_| !self.has_grads_in_file()).map_or(0, bytes_of);
        let (shard, offloaded) = if self.layout.is_stored_apart() { (0, shard) } else { (shard, 0) };
        let sums = self.sums.as_ref().map_or(0, bytes_of);
        let is_trained = self.trained().any(|trained| trained);
        let all = self.layout.len() * self.layout.kind.elt_size_in_bytes();
        (sums + if stay_unsharded && is_trained { shard.max(all) } else { shard }, offloaded)
    }
}
