//! Parameters that travel together: the weights, this rank's part of them that the optimizer changes, and its gradients.

use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use tch::{Kind, Tensor};

use super::flat::{Layout, Place, copied, narrow};
use super::gathered_storage::{Arrival, GatheredStorage, Tally};
use super::weight_shard::{Moved, ShardFile, WeightShard};
use crate::device::Device;
use crate::distributed::{ProcessGroup, Work, collective_scope};
use crate::dtype::bytes_of;
use crate::error::Result;
use crate::ffi;
use crate::nn::Parameter;
use crate::optim::take_edit;
use crate::strategy::sparse;

/// Stands for the optimizer of a unit that none changes.
pub(super) const NO_OPTIMIZER: usize = usize::MAX;

/// The state that counts steps, and is not like its parameter.
pub(super) const STEP: &str = "step";

/// A unit on one rank.
#[derive(Debug)]
pub(super) struct Unit {
    pub layout: Layout,
    /// The numbers of its first and its last parameter, by which its files are called.
    pub ids: RangeInclusive<usize>,
    /// The module whose calls its weights come and go with.
    pub module: Option<String>,
    /// Its gradients are reduced when the backward pass of the module is done, whether each parameter has one or not.
    pub is_leaf: bool,
    /// Calls of the module in this batch whose backward pass is not done yet.
    pub open_calls: usize,
    /// The optimizer that changes it.
    pub optimizer: usize,
    pub(super) rank: usize,
    /// All weights, of which the parameters are views.
    pub(super) flat: Tensor,
    /// This rank's part: of `flat` itself, or beside it ([`Unit::has_own_part`]).
    pub(super) part: Tensor,
    /// A file is the memory of `part`.
    pub is_part_in_file: bool,
    /// Copies of `part` that the weights are gathered from.
    pub(super) weight_shard: WeightShard,
    /// The device may still copy from what is in pinned memory.
    is_copying: bool,
    /// Counts what moves between the device and host memory.
    pub moved: Arc<Moved>,
    pub has_master: bool,
    /// The part is to be in float32 once one of the parameters is trained.
    pub wants_master: bool,
    /// Set if the weights are sharded: only `part` is always in memory.
    storage: Option<GatheredStorage>,
    /// What this rank has of each parameter: views of `part`.
    pub slices: Vec<Parameter>,
    /// The gradients of `part`, mean over the ranks; there once some have come. They may have 16 bits where the part is in float32.
    pub(super) grads: Option<Tensor>,
    /// Set if a file is the memory of `grads`: the dtype to which they are rounded, which may be narrower than theirs.
    file_grads: Option<Kind>,
    /// The optimizer has them: they are those of a whole window.
    are_shown: bool,
    /// The optimizer takes gradients of 16 bits for weights of float32.
    pub takes_narrow_grads: bool,
    /// Of which slices the optimizer writes the new weights rounded, too.
    is_rounded: Vec<bool>,
    /// Sums of this rank's own gradients in an open window, where they have a dtype of their own; whole.
    pub(super) sums: Option<Tensor>,
    /// Which parameters have had a gradient on this rank since gradients were dropped.
    pub had_grad: Vec<bool>,
    /// Of which parameters the optimizer is shown an empty gradient if this rank has nothing of them.
    claimed: Vec<bool>,
    /// What operations of its weights are called.
    name: Arc<str>,
    /// How often each weight had been written to when its part was taken last: autograd counts. While weights are away their
    /// count is one higher, so that a backward pass refuses to use them.
    versions: Vec<i64>,
}

impl Unit {
    /// Lays the parameters out in one tensor, which they are views of from now on.
    pub fn new(layout: Layout, optimizer: usize, rank: usize, masters: bool) -> Result<Self> {
        Self::make(layout, optimizer, (rank, masters), None, true)
    }

    /// The same of stage 3: the weights of a `module` come and go with its calls; they are here at first. Without `keeps_values`, for weights that are
    /// to become rank 0's ([`Unit::take_from_rank_zero`]), initial values that are not drawn yet are never drawn.
    pub fn of_module(
        layout: Layout,
        rank: usize,
        masters: bool,
        (module, keeps_values): (Option<&str>, bool),
    ) -> Result<Self> {
        Self::make(layout, NO_OPTIMIZER, (rank, masters), module.map(str::to_owned), keeps_values)
    }

    fn make(
        layout: Layout,
        optimizer: usize,
        (rank, masters): (usize, bool),
        module: Option<String>,
        keeps_values: bool,
    ) -> Result<Self> {
        let _no_grad = tch::no_grad_guard();
        let flat = layout.empty_flat(layout.kind)?;
        for (place, mut view) in layout.places.iter().zip(layout.views(&flat)?) {
            if keeps_values || !place.parameter.drop_provisional()? {
                view.f_copy_(place.parameter.try_tensor()?)?;
            }
            place.parameter.set_data(&view)?;
        }
        let part = layout.part(&flat, rank)?;
        let wants_master = masters && matches!(layout.kind, Kind::BFloat16 | Kind::Half);
        let has_master = wants_master && layout.places.iter().any(|place| place.parameter.requires_grad());
        let own_kind = if has_master { Kind::Float } else { layout.kind };
        let has_own_part = has_master || module.is_some() || layout.is_stored_apart();
        let part = if has_own_part { layout.stored(&part, own_kind, layout.storage)? } else { part };
        let own = module.is_none().then(|| layout.part(&flat, rank)).transpose()?;
        let weight_shard = WeightShard::of(&layout, &part, own)?;
        let storage = module.is_some().then(|| GatheredStorage::of(&flat, layout.len()));
        let slice = |place| {
            let slice = Parameter::new(layout.slice(&part, place, rank)?);
            let _ = slice.set_requires_grad(place.parameter.requires_grad());
            Ok(slice)
        };
        let slices = layout.places.iter().map(slice).collect::<Result<_>>()?;
        let had_grad = vec![false; layout.places.len()];
        let (claimed, is_rounded) = (had_grad.clone(), had_grad.clone());
        let versions = vec![0; layout.places.len()];
        let name = module.clone().filter(|module| !module.is_empty()).unwrap_or_else(|| layout.title());
        let name = format!("weights of {name}").into();
        let unit = Self {
            layout,
            ids: 0..=0,
            module,
            is_leaf: false,
            open_calls: 0,
            optimizer,
            rank,
            flat,
            part,
            is_part_in_file: false,
            weight_shard,
            is_copying: false,
            moved: Arc::default(),
            has_master,
            wants_master,
            storage,
            slices,
            grads: None,
            file_grads: None,
            are_shown: false,
            takes_narrow_grads: false,
            is_rounded,
            sums: None,
            had_grad,
            claimed,
            name,
            versions,
        };
        Ok(Self { versions: unit.current_versions()?, ..unit })
    }

    /// The weights, which are whole, become those of rank 0.
    ///
    /// # Collective
    /// All ranks must call it.
    pub fn take_from_rank_zero(&mut self, group: &ProcessGroup) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let _named = collective_scope(&self.name);
        if self.layout.part_len > 0 {
            group.broadcast(&self.flat, 0)?;
        }
        if self.has_own_part() {
            self.part.f_copy_(&self.layout.part(&self.flat, self.rank)?)?;
            self.weight_shard.set_stale();
        }
        Ok(())
    }

    /// Tries to allocate the memory of the weights until [`Unit::release_reserved`], without values.
    pub fn try_reserve(&mut self) -> Result<bool> {
        self.storage.as_mut().map_or(Ok(true), GatheredStorage::try_reserve)
    }

    /// Frees the memory of [`Unit::try_reserve`].
    pub fn release_reserved(&mut self) -> Result<()> {
        self.storage.as_mut().map_or(Ok(()), GatheredStorage::release_reserved)
    }

    /// Gives the weights back to the module, whole and in memory of the host. The unit has its part left.
    ///
    /// # Collective
    /// All ranks must call it.
    pub fn leave_on_host(&mut self, group: Option<&ProcessGroup>) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        self.gather(group)?;
        for place in &self.layout.places {
            let whole = place.parameter.leaf().f_detach()?.f_to_device(tch::Device::Cpu)?;
            place.parameter.detach_gather()?;
            place.parameter.set_data(&whole)?;
        }
        self.storage.iter_mut().try_for_each(GatheredStorage::release)?;
        Ok(())
    }

    fn current_versions(&self) -> Result<Vec<i64>> {
        self.leaves().map(|leaf| Ok(leaf.f_internal_version()?)).collect()
    }

    /// Copies into the part what was written to weights without [`Parameter::update`], since this was last called.
    pub fn take_changes(&mut self) -> Result<()> {
        if self.is_released() || self.arriving() > 0 {
            return Ok(());
        }
        if !self.has_own_part() {
            return self.layout.take_data(&self.flat);
        }
        for (index, now) in self.current_versions()?.into_iter().enumerate() {
            if now != self.versions[index] {
                self.write_back(index)?;
            }
        }
        Ok(())
    }

    /// The parameters' leaves, in their order.
    pub fn leaves(&self) -> impl Iterator<Item = &Tensor> {
        self.layout.places.iter().map(|place| place.parameter.leaf())
    }

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

    /// Adds this rank's part of the mean gradients of one backward pass; sums of a window have this dtype.
    pub fn add_grads(&mut self, part: Tensor, dtype: Option<Kind>) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        self.widen_grads()?; // more than a window is added up in the dtype of the part
        let own = dtype.unwrap_or(self.layout.kind);
        let part = self.moved.to(self.layout.storage, &part, self.layout.pins)?;
        let dtype = self.grads.as_ref().map_or(own, Tensor::kind);
        if self.layout.pins && (self.grads.is_some() || dtype != part.kind()) {
            self.wait_for_copies()?;
        }
        let part = part.f_to_kind(dtype)?;
        match &mut self.grads {
            Some(grads) => {
                let _ = grads.f_add_(&part)?;
            }
            None => self.grads = Some(part),
        }
        Ok(())
    }

    /// Waits for what is copied to pinned memory.
    pub fn wait_for_copies(&self) -> Result<()> {
        if self.layout.pins { Ok(ffi::synchronize(Device::of(&self.flat)?)?) } else { Ok(()) }
    }

    /// Copies from and to pinned memory that were started are done.
    pub fn note_copied(&mut self) {
        self.is_copying = false;
    }

    /// Whether gradients are of 16 bits, and the part of float32.
    fn has_narrow_grads(&self) -> bool {
        let is_half = |grads: &Tensor| matches!(grads.kind(), Kind::BFloat16 | Kind::Half);
        self.part.kind() == Kind::Float && self.grads.as_ref().is_some_and(is_half)
    }

    /// Gradients of 16 bits that the optimizer has become float32, before they are changed.
    pub fn widen_grads(&mut self) -> Result<()> {
        if !self.are_shown || !self.has_narrow_grads() {
            return Ok(());
        }
        let Some(narrow) = self.grads.as_ref() else { return Ok(()) };
        let _no_grad = tch::no_grad_guard();
        let grads = narrow.f_to_kind(self.part.kind())?;
        for (place, slice) in self.layout.places.iter().zip(&self.slices) {
            let own = slice.grad();
            if own.defined() {
                let mut grad = self.layout.slice(&grads, place, self.rank)?;
                if own.kind() != narrow.kind() {
                    grad.f_copy_(&own)?; // clipped by itself
                }
                ffi::set_grad(slice.leaf(), &grad)?;
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
            *grads = grads.f_to_kind(self.part.kind())?;
            self.file_grads = self.file_grads.map(|_| self.part.kind());
        }
        self.are_shown = true;
        for (index, _) in had_grad.iter().enumerate().filter(|(_, had)| **had) {
            let slice = &self.slices[index];
            let grad = self.layout.slice(grads, &self.layout.places[index], self.rank)?;
            if (grad.numel() > 0 || self.claimed[index]) && !slice.grad().defined() {
                ffi::set_grad(slice.leaf(), &grad)?;
            }
        }
        Ok(())
    }

    /// Shows the optimizer whether the parameter at `index` has a gradient, also if this rank has nothing of it.
    pub fn claim(&mut self, index: usize) {
        self.claimed[index] = true;
    }

    /// What the optimizer is to write the weight at `index` to, rounded, whenever it changes its slice.
    pub fn rounded_slice(&mut self, index: usize) -> Result<Option<Tensor>> {
        let Some(rounded) = self.weight_shard.rounded() else { return Ok(None) };
        let slice = self.slice_in(rounded, index)?;
        self.is_rounded[index] = true;
        Ok(Some(slice))
    }

    /// Another optimizer works on the unit from now on, which may write rounded weights.
    pub fn forget_rounded(&mut self) {
        self.is_rounded.fill(false);
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

    /// Whether gradients that are rounded to this dtype can be in a file, in the dtype of the part. None are in memory then.
    pub fn takes_grads_in_file(&self, dtype: Kind) -> bool {
        let fits = self.part.kind() == dtype || (self.part.kind() == Kind::Float && dtype != Kind::Double);
        self.is_part_in_file && fits && (self.grads.is_none() || self.has_grads_in_file())
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
        ffi::clear_grads(self.leaves().chain(self.slices.iter().map(Parameter::leaf)))?;
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

    /// This rank's part of the gradients of each parameter, if there are some: its name, whether it has had a gradient on this
    /// rank, and the part; in the dtype of the weights' part if the optimizer has them.
    pub fn pending(&self) -> Result<Vec<(&str, bool, Tensor)>> {
        let Some(grads) = &self.grads else { return Ok(Vec::new()) };
        let kind = if self.are_shown { self.part.kind() } else { self.grads_dtype().unwrap_or(grads.kind()) };
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

    /// This rank's part of the gradient of the parameter at `index`: of `grads`, unless what clipped it has made a float32 one.
    fn current_grad(&self, grads: &Tensor, index: usize) -> Result<Tensor> {
        let own = self.slices[index].grad();
        match own.defined() && own.kind() != grads.kind() {
            true => Ok(own),
            false => self.layout.slice(grads, &self.layout.places[index], self.rank),
        }
    }

    /// This rank's part of the gradient of the parameter at `index`, as it lies in memory, if there is one; shared.
    pub fn grad_slice(&self, index: usize) -> Result<Option<Tensor>> {
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
                let len = [self.layout.part_len as i64];
                Tensor::f_zeros(len, (values.kind(), self.layout.storage))?
            }
        };
        let place = &self.layout.places[index];
        let grad = self.layout.slice(&grads, place, self.rank)?;
        self.grads = Some(grads);
        grad.shallow_clone().f_copy_(&place.to_memory_order(values)?)?;
        self.had_grad[index] = had_grad;
        let is_shown = self.grads_dtype() == Some(self.part.kind());
        self.are_shown |= is_shown;
        if had_grad && grad.numel() > 0 && is_shown {
            ffi::set_grad(self.slices[index].leaf(), &grad)?;
        }
        Ok(())
    }

    /// After an optimizer step: starts to give all ranks the weights of all. `None` if there is nobody else.
    pub fn start_gather(&mut self, group: Option<&ProcessGroup>) -> Result<Option<Work>> {
        let _no_grad = tch::no_grad_guard();
        let _named = collective_scope(&self.name);
        let own = self.layout.part(&self.flat, self.rank)?;
        if self.has_own_part() {
            self.keep_copies()?;
            self.weight_shard.copy_to(&own, &self.part, &self.moved)?;
            self.is_copying = self.layout.pins;
        }
        match group {
            Some(group) if self.layout.part_len > 0 => {
                Ok(Some(group.start_all_gather_into(&self.flat, &own)?))
            }
            _ => Ok(None),
        }
    }

    /// Whether `part` is not a part of the weights themselves: it is in float32, on another device, or all that stays.
    pub fn has_own_part(&self) -> bool {
        self.has_master || self.storage.is_some() || self.layout.is_stored_apart()
    }

    /// Whether the weights are sharded.
    pub fn is_sharded(&self) -> bool {
        self.storage.is_some()
    }

    /// Bytes of gradients: of its part, or of all if those stay whole; and those of its part in host memory.
    pub fn grad_bytes(&self, stay_whole: bool) -> (usize, usize) {
        let part = self.grads.as_ref().filter(|_| !self.has_grads_in_file()).map_or(0, bytes_of);
        let (part, offloaded) = if self.layout.is_stored_apart() { (0, part) } else { (part, 0) };
        let sums = self.sums.as_ref().map_or(0, bytes_of);
        let is_trained = self.trained().any(|trained| trained);
        let whole = self.layout.len() * self.layout.kind.elt_size_in_bytes();
        (sums + if stay_whole && is_trained { part.max(whole) } else { part }, offloaded)
    }

    /// Bytes of the copies of its part on a device.
    pub fn shard_bytes_on(&self, device: tch::Device) -> usize {
        self.weight_shard.bytes_on(device)
    }

    /// Whether the weights are sharded, and not in memory.
    pub fn is_released(&self) -> bool {
        self.storage.as_ref().is_some_and(GatheredStorage::is_released)
    }

    /// Which elements of the parameter at `index`, flattened, this rank has.
    pub fn range(&self, index: usize) -> Range<usize> {
        self.layout.range(&self.layout.places[index], self.rank)
    }

    /// This rank's elements of the weight at `index`, in its dtype, as [`Unit::range`] counts them.
    pub fn weight_slice(&self, index: usize) -> Result<Tensor> {
        let place = &self.layout.places[index];
        if self.storage.is_some() {
            return place.to_rows(&self.slices[index].leaf().f_detach()?.f_to_kind(self.layout.kind)?);
        }
        let own = self.layout.part(&self.flat, self.rank)?;
        place.to_rows(&self.layout.slice(&own, place, self.rank)?)
    }

    /// Which parameters are trained.
    pub fn trained(&self) -> impl Iterator<Item = bool> {
        self.slices.iter().map(Parameter::requires_grad)
    }

    /// Lets parameters be trained that were frozen and are not any more. Returns whether there are some.
    pub fn unfreeze(&mut self) -> Result<bool> {
        let pairs = self.layout.places.iter().zip(&self.slices);
        let is_unfrozen =
            |(place, slice): &(&Place, &Parameter)| place.parameter.requires_grad() && !slice.requires_grad();
        let unfrozen: Vec<Parameter> = pairs.filter(is_unfrozen).map(|(_, slice)| slice.clone()).collect();
        if unfrozen.is_empty() {
            return Ok(false);
        }
        self.make_master()?;
        unfrozen.iter().for_each(|slice| drop(slice.set_requires_grad(true)));
        Ok(true)
    }

    /// Makes the master weights of a unit that was frozen, if it is to have some.
    pub fn make_master(&mut self) -> Result<()> {
        if self.has_master || !self.wants_master {
            return Ok(());
        }
        let _no_grad = tch::no_grad_guard();
        self.take_changes()?;
        self.part = self.layout.stored(&self.part, Kind::Float, self.layout.storage)?;
        self.is_part_in_file = false;
        let file = self.weight_shard.file().cloned();
        let is_whole = !self.is_sharded();
        let own = is_whole.then(|| self.layout.part(&self.flat, self.rank)).transpose()?;
        self.weight_shard = WeightShard::of(&self.layout, &self.part, own)?;
        file.map_or(Ok(()), |file| self.put_shard_into(file))?;
        for (place, slice) in self.layout.places.iter().zip(&self.slices) {
            slice.set_data(&self.layout.slice(&self.part, place, self.rank)?)?;
        }
        self.has_master = true;
        if !self.is_sharded() {
            self.versions = self.current_versions()?; // those of sharded weights are counted, and differ while these are away
        }
        Ok(())
    }

    /// Makes the weights whole, if they are not.
    ///
    /// # Collective
    /// All ranks must call it.
    pub fn gather(&mut self, group: Option<&ProcessGroup>) -> Result<()> {
        self.start(group)?;
        self.wait_for_gather()
    }

    /// Starts to make the weights whole, if they are not. They are used after [`Unit::wait_for_gather`].
    ///
    /// # Collective
    /// All ranks must call it.
    pub fn start(&mut self, group: Option<&ProcessGroup>) -> Result<()> {
        let Some(storage) = self.storage.as_mut().filter(|storage| storage.is_released()) else {
            return Ok(());
        };
        storage.restore()?;
        let arrival = Arrival(self.start_gather(group)?);
        if let Some(storage) = &mut self.storage {
            storage.set_arriving(Some(arrival));
        }
        Ok(())
    }

    /// Waits for weights that are on their way.
    pub fn wait_for_gather(&mut self) -> Result<()> {
        let Some(Arrival(work)) = self.storage.as_mut().and_then(|storage| storage.set_arriving(None)) else {
            return Ok(());
        };
        work.map_or(Ok(()), Work::wait)?;
        self.set_versions(0)?;
        self.layout.places.iter().try_for_each(|place| place.parameter.set_away(false))
    }

    fn set_versions(&self, more: i64) -> Result<()> {
        let versions = self.leaves().zip(&self.versions);
        Ok(versions.into_iter().try_for_each(|(leaf, version)| ffi::set_version(leaf, version + more))?)
    }

    /// The optimizer has stepped.
    pub fn renew_after_step(&mut self) -> Result<()> {
        let stepped = (0..self.slices.len()).filter(|index| self.had_grad[*index]);
        match stepped.into_iter().all(|index| self.is_rounded[index] || self.range(index).is_empty()) {
            true => self.weight_shard.set_written(),
            false => self.note_change(),
        }
        self.renew_versions()
    }

    /// The part has been changed: autograd is not to take the weights for those that it has saved.
    pub fn renew(&mut self) -> Result<()> {
        self.note_change();
        self.renew_versions()
    }

    fn renew_versions(&mut self) -> Result<()> {
        if self.is_released() {
            self.versions.iter_mut().for_each(|version| *version += 2); // they come back as others
            return self.set_versions(1);
        }
        self.versions = self.current_versions()?;
        let stepped = self.versions.iter_mut().zip(&self.had_grad).filter(|(_, had)| **had);
        stepped.for_each(|(version, _)| *version += 1);
        self.set_versions(0)
    }

    /// The part has changed, and the weights are gathered from it next.
    pub fn note_change(&mut self) {
        self.weight_shard.set_stale();
    }

    /// The dtype of its part.
    pub fn part_kind(&self) -> Kind {
        self.part.kind()
    }

    /// Its part, if that is to be in a file between steps.
    pub fn swappable_part(&self) -> Option<&Tensor> {
        (self.layout.swaps_part && self.has_own_part()).then_some(&self.part)
    }

    /// Moves the part into a tensor of its length and dtype whose memory is a file.
    pub fn move_part(&mut self, to: &Tensor) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let mut to = to.shallow_clone();
        to.f_copy_(&self.part)?;
        for (index, slice) in self.slices.iter().enumerate() {
            slice.leaf().shallow_clone().f_set_data(&self.slice_in(&to, index)?)?;
        }
        (self.part, self.is_part_in_file) = (to, true);
        Ok(())
    }

    /// The place of the parameter at `index` in a tensor as long as the part: a view.
    pub fn slice_in(&self, part: &Tensor, index: usize) -> Result<Tensor> {
        self.layout.slice(part, &self.layout.places[index], self.rank)
    }

    /// Keeps what the weights are gathered from in a file.
    pub fn put_shard_into(&mut self, file: ShardFile) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        self.weight_shard.put_into(file, &self.part, &self.moved)
    }

    /// Takes the part as it is over to what the weights are gathered from.
    pub fn refresh_shard(&mut self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        self.keep_copies()?;
        self.weight_shard.refresh(&self.part, &self.moved)?;
        self.is_copying = self.layout.pins;
        Ok(())
    }

    /// Waits for the device if it may still copy from what is about to be overwritten.
    fn keep_copies(&self) -> Result<()> {
        if self.is_copying && self.weight_shard.is_stale() { self.wait_for_copies() } else { Ok(()) }
    }

    /// Before an optimizer writes: waits for the device if it may still copy from what is written.
    pub fn begin_update(&mut self) -> Result<()> {
        if self.is_copying && self.weight_shard.rounded().is_some() {
            self.wait_for_copies()?;
            self.is_copying = false;
        }
        Ok(())
    }

    /// Starts to read what the weights are gathered from, if it is in a file. Returns false if there is no buffer for it.
    pub fn read_ahead(&self) -> Result<bool> {
        self.weight_shard.read_ahead()
    }

    /// Keeps the weights unsharded until [`Unit::unpin`].
    pub fn pin(&mut self) {
        self.storage.iter_mut().for_each(|storage| storage.pins += 1);
    }

    /// Ends a use; [`Unit::release`] may free the memory then.
    pub fn unpin(&mut self) {
        self.storage.iter_mut().for_each(|storage| storage.pins = storage.pins.saturating_sub(1));
    }

    /// The weights stay until [`Unit::end_backward`].
    pub fn begin_backward(&mut self) {
        self.storage.iter_mut().for_each(|storage| storage.is_in_backward = true);
    }

    /// All that used the weights in backward have had their turn.
    pub fn end_backward(&mut self) -> Result<()> {
        self.storage.iter_mut().for_each(|storage| storage.is_in_backward = false);
        self.release()
    }

    /// The weights stay until [`Unit::release_after_step`].
    pub fn keep_until_step_end(&mut self) {
        self.storage.iter_mut().for_each(|storage| storage.is_kept_until_step_end = true);
    }

    /// Weights that are here are touched: outside of a call of their module they stay.
    pub fn touch(&mut self) {
        self.storage.iter_mut().for_each(|storage| storage.is_kept_until_step_end |= storage.pins == 0);
    }

    /// Ends [`Unit::keep_until_step_end`]: frees the memory of weights that are not in use.
    pub fn release_after_step(&mut self) -> Result<()> {
        self.storage.iter_mut().for_each(|storage| storage.is_kept_until_step_end = false);
        self.release()
    }

    /// After a call: drops gradients, and frees the weights that come and go.
    pub fn end_call(&mut self) -> Result<()> {
        self.drop_grads()?;
        self.optimizer = NO_OPTIMIZER;
        self.claimed.fill(false);
        if let Some(storage) = &mut self.storage {
            (storage.pins, storage.is_kept_until_step_end, storage.is_in_backward) = (0, false, false);
        }
        self.wait_for_gather()?;
        self.release()
    }

    /// Before another call with the same weights, some of which may have been frozen or unfrozen since.
    pub fn begin_call(&mut self) -> Result<()> {
        self.unfreeze()?;
        for (place, slice) in self.layout.places.iter().zip(&self.slices) {
            let _ = slice.set_requires_grad(place.parameter.requires_grad());
        }
        Ok(())
    }

    /// What operations of its weights are called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Counts the unit's elements there from now on.
    pub fn count_in(&mut self, tally: &Arc<Tally>) {
        self.storage.iter_mut().for_each(|storage| storage.count_in(tally));
    }

    /// Elements of weights that come and go, and are in memory or on their way.
    pub fn live(&self) -> usize {
        let is_live = self.storage.as_ref().is_some_and(|storage| !storage.is_released());
        if is_live { self.layout.len() } else { 0 }
    }

    /// Elements that are on their way.
    pub fn arriving(&self) -> usize {
        let is_arriving = self.storage.as_ref().is_some_and(|storage| storage.is_arriving());
        if is_arriving { self.layout.len() } else { 0 }
    }

    /// Whether the weights are in memory, and not in use.
    pub fn is_idle(&self) -> bool {
        let is_used = |storage: &GatheredStorage| {
            storage.pins > 0 || storage.is_kept_until_step_end || storage.is_in_backward
        };
        let is_idle = |storage: &GatheredStorage| !is_used(storage) && !storage.is_arriving();
        self.live() > 0 && self.storage.as_ref().is_some_and(is_idle)
    }

    /// Frees the memory of the weights, unless they are in use.
    pub fn release(&mut self) -> Result<()> {
        if !self.is_idle() {
            return Ok(());
        }
        self.take_changes()?;
        self.storage.iter_mut().try_for_each(GatheredStorage::release)?;
        self.set_versions(1)?;
        self.layout.places.iter().try_for_each(|place| place.parameter.set_away(true))
    }

    /// The weights have been changed from outside: takes this rank's part of them over.
    pub fn write_back(&mut self, index: usize) -> Result<()> {
        if !self.has_own_part() {
            return Ok(());
        }
        let _no_grad = tch::no_grad_guard();
        let place = &self.layout.places[index];
        let own = self.layout.slice(&self.layout.part(&self.flat, self.rank)?, place, self.rank)?;
        let part = self.slices[index].leaf();
        take_edit(part, &self.moved.to(part.device(), &own, false)?)?;
        self.weight_shard.set_stale();
        self.versions[index] = place.parameter.leaf().f_internal_version()?;
        Ok(())
    }

    /// Writes the parameter at `index`: this rank's `slice` of the values, and the whole weight where it is in memory.
    /// [`Unit::renew`] has to follow.
    pub fn write(&mut self, index: usize, values: &Tensor, slice: &Tensor) -> Result<()> {
        self.wait_for_gather()?;
        if !self.is_released() {
            self.layout.places[index].parameter.leaf().f_detach()?.f_copy_(values)?;
            self.write_back(index)?;
        }
        Ok(self.slices[index].leaf().f_detach()?.f_copy_(slice)?)
    }

    /// What this rank has of a tensor like the parameter at `index`, as a copy in the order of its slice.
    pub fn slice_of(&self, index: usize, whole: &Tensor) -> Result<Tensor> {
        let flat = self.layout.places[index].to_memory_order(&whole.f_reshape([-1_i64])?)?;
        copied(&narrow(&flat, self.range(index))?)
    }

    /// Tensors like the parameters, whole, from what each rank has of them. `None` where no rank has any.
    ///
    /// # Collective
    /// All ranks must call it, for the same unit.
    pub fn whole(
        &self,
        group: Option<&ProcessGroup>,
        slices: &[Option<Tensor>],
        kind: Kind,
    ) -> Result<Vec<Tensor>> {
        self.layout.whole(self.rank, group, slices, kind)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::nn::Gather;

    /// Draws initial values when somebody needs them.
    #[derive(Debug, Default)]
    struct Draws(AtomicUsize);

    impl Gather for Draws {
        fn gather(&self, parameter: &Parameter) -> Result<()> {
            self.0.fetch_add(1, Ordering::Relaxed);
            parameter.set_away(false)
        }

        fn release(&self, _parameter: &Parameter, _is_changed: bool) -> Result<()> {
            Ok(())
        }

        fn is_provisional(&self) -> bool {
            true
        }
    }

    #[test]
    fn values_that_become_rank_zeros_are_not_drawn() {
        for (keeps_values, expected) in [(true, 1), (false, 0)] {
            let draws = Arc::new(Draws::default());
            let parameter = Parameter::new(Tensor::ones([3, 5], (Kind::Float, tch::Device::Cpu)));
            parameter.attach_gather(draws.clone()).unwrap();
            parameter.set_away(true).unwrap();
            let layout = Layout::of(vec![("weight".to_owned(), parameter.clone())], 2);
            let unit = Unit::of_module(layout, 1, false, (Some("net"), keeps_values)).unwrap();
            assert_eq!(draws.0.load(Ordering::Relaxed), expected);
            assert!(!parameter.is_away() && !parameter.is_kept() && unit.live() > 0);
            assert_eq!(parameter.size(), [3, 5]);
        }
    }
}
