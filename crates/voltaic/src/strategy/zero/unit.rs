//! Parameters that are communicated together: the weights, and this rank's shard of them, which the optimizer changes.

use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use tch::{Kind, Tensor};

use super::flat::{Layout, Place, copied, narrow};
use super::unsharded_storage::{Arrival, Tally, UnshardedStorage};
use super::weight_shard::{Moved, ShardFile, WeightShard};
use crate::device::Device;
use crate::distributed::{ProcessGroup, Work, collective_scope};
use crate::error::Result;
use crate::ffi;
use crate::nn::{GradShare, Parameter};
use crate::optim::take_edit;

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
    /// The module whose calls unshard and reshard its weights.
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
    /// This rank's shard of the weights: a view of `flat`, or beside it ([`Unit::has_own_shard`]).
    pub(super) shard: Tensor,
    /// A file is the memory of `shard`.
    pub is_shard_in_file: bool,
    /// Copies of `shard` that the weights are gathered from.
    pub(super) weight_shard: WeightShard,
    /// The device may still copy from what is in pinned memory.
    is_copying: bool,
    /// Counts what moves between the device and host memory.
    pub moved: Arc<Moved>,
    pub has_master: bool,
    /// The shard is to be in float32 once one of the parameters is trained.
    pub wants_master: bool,
    /// Set if the weights are sharded: only `shard` is always in memory.
    storage: Option<UnshardedStorage>,
    /// What this rank has of each parameter: views of `shard`.
    pub sharded_params: Vec<Parameter>,
    /// The gradients of `shard`, mean over the ranks; there once some have come. They may have 16 bits where the shard is in float32.
    pub(super) grads: Option<Tensor>,
    /// Set if a file is the memory of `grads`: the dtype to which they are rounded, which may be narrower than theirs.
    pub(super) file_grads: Option<Kind>,
    /// The optimizer has them: they are those of a whole window.
    pub(super) are_shown: bool,
    /// The optimizer takes gradients of 16 bits for weights of float32.
    pub takes_narrow_grads: bool,
    /// Of which sharded parameters the optimizer writes the new weights rounded, too.
    is_rounded: Vec<bool>,
    /// Sums of this rank's own gradients in an open window, where they have a dtype of their own; unsharded.
    pub(super) sums: Option<Tensor>,
    /// Which parameters have had a gradient on this rank since gradients were dropped.
    pub had_grad: Vec<bool>,
    /// Of which parameters the optimizer is shown an empty gradient if this rank has nothing of them.
    pub(super) claimed: Vec<bool>,
    /// What operations of its weights are called.
    name: Arc<str>,
    /// How often each weight had been written to when its shard was taken last: autograd counts. While weights are sharded their
    /// count is one higher, so that a backward pass refuses to use them.
    versions: Vec<i64>,
}

impl Unit {
    /// Lays the parameters out in one tensor, which they are views of from now on.
    pub fn new(layout: Layout, optimizer: usize, rank: usize, masters: bool) -> Result<Self> {
        Self::make(layout, optimizer, (rank, masters), None, true)
    }

    /// The same of stage 3: the weights of a `module` are sharded between its calls; they are unsharded at first. Without `keeps_values`, for weights that are
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
        let shard = layout.shard(&flat, rank)?;
        let wants_master = masters && matches!(layout.kind, Kind::BFloat16 | Kind::Half);
        let has_master = wants_master && layout.places.iter().any(|place| place.parameter.requires_grad());
        let own_kind = if has_master { Kind::Float } else { layout.kind };
        let has_own_shard = has_master || module.is_some() || layout.is_stored_apart();
        let shard = if has_own_shard { layout.stored(&shard, own_kind, layout.storage)? } else { shard };
        let own = module.is_none().then(|| layout.shard(&flat, rank)).transpose()?;
        let weight_shard = WeightShard::of(&layout, &shard, own)?;
        let storage = module.is_some().then(|| UnshardedStorage::of(&flat, layout.len()));
        let sharded = |place| {
            let sharded = Parameter::new(layout.param_shard(&shard, place, rank)?);
            let _ = sharded.set_requires_grad(place.parameter.requires_grad());
            sharded.set_grad_share(GradShare::Shard);
            Ok(sharded)
        };
        let sharded_params = layout.places.iter().map(sharded).collect::<Result<_>>()?;
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
            shard,
            is_shard_in_file: false,
            weight_shard,
            is_copying: false,
            moved: Arc::default(),
            has_master,
            wants_master,
            storage,
            sharded_params,
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

    /// The weights, which are unsharded, become those of rank 0.
    ///
    /// # Collective
    /// All ranks must call it.
    pub fn take_from_rank_zero(&mut self, group: &ProcessGroup) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let _named = collective_scope(&self.name);
        if self.layout.shard_len > 0 {
            group.broadcast(&self.flat, 0)?;
        }
        if self.has_own_shard() {
            self.shard.f_copy_(&self.layout.shard(&self.flat, self.rank)?)?;
            self.weight_shard.set_stale();
        }
        Ok(())
    }

    /// Tries to allocate the memory of the weights until [`Unit::release_reserved`], without values.
    pub fn try_reserve(&mut self) -> Result<bool> {
        self.storage.as_mut().map_or(Ok(true), UnshardedStorage::try_reserve)
    }

    /// Frees the memory of [`Unit::try_reserve`].
    pub fn release_reserved(&mut self) -> Result<()> {
        self.storage.as_mut().map_or(Ok(()), UnshardedStorage::release_reserved)
    }

    /// Gives the weights back to the module, unsharded and in memory of the host. The unit has its shard left.
    ///
    /// # Collective
    /// All ranks must call it.
    pub fn leave_on_host(&mut self, group: Option<&ProcessGroup>) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        self.unshard(group)?;
        for place in &self.layout.places {
            let values = place.parameter.leaf().f_detach()?.f_to_device(tch::Device::Cpu)?;
            place.parameter.detach_sharding()?;
            place.parameter.set_data(&values)?;
        }
        self.storage.iter_mut().try_for_each(UnshardedStorage::release)?;
        Ok(())
    }

    fn current_versions(&self) -> Result<Vec<i64>> {
        self.leaves().map(|leaf| Ok(leaf.f_internal_version()?)).collect()
    }

    /// Copies into the shard what was written to weights without [`Parameter::update`], since this was last called.
    pub fn take_changes(&mut self) -> Result<()> {
        if self.is_sharded() || self.arriving() > 0 {
            return Ok(());
        }
        if !self.has_own_shard() {
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

    /// Waits for what is copied to pinned memory.
    pub fn wait_for_copies(&self) -> Result<()> {
        if self.layout.pins { Ok(ffi::synchronize(Device::of(&self.flat)?)?) } else { Ok(()) }
    }

    /// Copies from and to pinned memory that were started are done.
    pub fn note_copied(&mut self) {
        self.is_copying = false;
    }

    /// What the optimizer is to write the weight at `index` to, rounded, whenever it changes its sharded parameter.
    pub fn rounded_param_shard(&mut self, index: usize) -> Result<Option<Tensor>> {
        let Some(rounded) = self.weight_shard.rounded() else { return Ok(None) };
        let shard = self.param_shard_in(rounded, index)?;
        self.is_rounded[index] = true;
        Ok(Some(shard))
    }

    /// Another optimizer works on the unit from now on, which may write rounded weights.
    pub fn forget_rounded(&mut self) {
        self.is_rounded.fill(false);
    }

    /// After an optimizer step: starts to give all ranks the weights of all. `None` if there is no other rank.
    pub fn start_gather(&mut self, group: Option<&ProcessGroup>) -> Result<Option<Work>> {
        let _no_grad = tch::no_grad_guard();
        let _named = collective_scope(&self.name);
        let own = self.layout.shard(&self.flat, self.rank)?;
        if self.has_own_shard() {
            self.keep_copies()?;
            self.weight_shard.copy_to(&own, &self.shard, &self.moved)?;
            self.is_copying = self.layout.pins;
        }
        match group {
            Some(group) if self.layout.shard_len > 0 => {
                Ok(Some(group.start_all_gather_into(&self.flat, &own)?))
            }
            _ => Ok(None),
        }
    }

    /// Whether `shard` does not share the memory of the weights: it is in float32, on another device, or all that stays.
    pub fn has_own_shard(&self) -> bool {
        self.has_master || self.storage.is_some() || self.layout.is_stored_apart()
    }

    /// Whether the weights are sharded while they are not used (stage 3).
    pub fn shards_weights(&self) -> bool {
        self.storage.is_some()
    }

    /// Bytes of the copies of its shard on a device.
    pub fn weight_shard_bytes_on(&self, device: tch::Device) -> usize {
        self.weight_shard.bytes_on(device)
    }

    /// Whether the weights are sharded now, and not in memory.
    pub fn is_sharded(&self) -> bool {
        self.storage.as_ref().is_some_and(UnshardedStorage::is_released)
    }

    /// Which elements of the parameter at `index`, flattened, this rank has.
    pub fn range(&self, index: usize) -> Range<usize> {
        self.layout.range(&self.layout.places[index], self.rank)
    }

    /// This rank's elements of the weight at `index`, in its dtype, as [`Unit::range`] counts them.
    pub fn weight_param_shard(&self, index: usize) -> Result<Tensor> {
        let place = &self.layout.places[index];
        if self.storage.is_some() {
            return place
                .to_rows(&self.sharded_params[index].leaf().f_detach()?.f_to_kind(self.layout.kind)?);
        }
        let own = self.layout.shard(&self.flat, self.rank)?;
        place.to_rows(&self.layout.param_shard(&own, place, self.rank)?)
    }

    /// Which parameters are trained.
    pub fn trained(&self) -> impl Iterator<Item = bool> {
        self.sharded_params.iter().map(Parameter::requires_grad)
    }

    /// Lets parameters be trained that were frozen and are not any more. Returns whether there are some.
    pub fn unfreeze(&mut self) -> Result<bool> {
        let pairs = self.layout.places.iter().zip(&self.sharded_params);
        let is_unfrozen = |(place, sharded): &(&Place, &Parameter)| {
            place.parameter.requires_grad() && !sharded.requires_grad()
        };
        let unfrozen: Vec<Parameter> =
            pairs.filter(is_unfrozen).map(|(_, sharded)| sharded.clone()).collect();
        if unfrozen.is_empty() {
            return Ok(false);
        }
        self.make_master()?;
        unfrozen.iter().for_each(|sharded| drop(sharded.set_requires_grad(true)));
        Ok(true)
    }

    /// Makes the master weights of a unit that was frozen, if it is to have some.
    pub fn make_master(&mut self) -> Result<()> {
        if self.has_master || !self.wants_master {
            return Ok(());
        }
        let _no_grad = tch::no_grad_guard();
        self.take_changes()?;
        self.shard = self.layout.stored(&self.shard, Kind::Float, self.layout.storage)?;
        self.is_shard_in_file = false;
        let file = self.weight_shard.file().cloned();
        let own = (!self.shards_weights()).then(|| self.layout.shard(&self.flat, self.rank)).transpose()?;
        self.weight_shard = WeightShard::of(&self.layout, &self.shard, own)?;
        file.map_or(Ok(()), |file| self.put_weight_shard_into(file))?;
        for (place, sharded) in self.layout.places.iter().zip(&self.sharded_params) {
            sharded.set_data(&self.layout.param_shard(&self.shard, place, self.rank)?)?;
        }
        self.has_master = true;
        if !self.shards_weights() {
            self.versions = self.current_versions()?; // those of sharded weights are counted, and differ while these are sharded
        }
        Ok(())
    }

    /// Unshards the weights, if they are sharded.
    ///
    /// # Collective
    /// All ranks must call it.
    pub fn unshard(&mut self, group: Option<&ProcessGroup>) -> Result<()> {
        self.start_unshard(group)?;
        self.wait_for_unshard()
    }

    /// Starts to unshard the weights, if they are sharded. They are used after [`Unit::wait_for_unshard`].
    ///
    /// # Collective
    /// All ranks must call it.
    pub fn start_unshard(&mut self, group: Option<&ProcessGroup>) -> Result<()> {
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
    pub fn wait_for_unshard(&mut self) -> Result<()> {
        let Some(Arrival(work)) = self.storage.as_mut().and_then(|storage| storage.set_arriving(None)) else {
            return Ok(());
        };
        work.map_or(Ok(()), Work::wait)?;
        self.set_versions(0)?;
        self.layout.places.iter().try_for_each(|place| place.parameter.set_sharded(false))
    }

    fn set_versions(&self, more: i64) -> Result<()> {
        let versions = self.leaves().zip(&self.versions);
        Ok(versions.into_iter().try_for_each(|(leaf, version)| ffi::set_version(leaf, version + more))?)
    }

    /// The optimizer has stepped.
    pub fn renew_after_step(&mut self) -> Result<()> {
        let stepped = (0..self.sharded_params.len()).filter(|index| self.had_grad[*index]);
        match stepped.into_iter().all(|index| self.is_rounded[index] || self.range(index).is_empty()) {
            true => self.weight_shard.set_written(),
            false => self.note_change(),
        }
        self.renew_versions()
    }

    /// The shard has been changed: autograd is not to take the weights for those that it has saved.
    pub fn renew(&mut self) -> Result<()> {
        self.note_change();
        self.renew_versions()
    }

    fn renew_versions(&mut self) -> Result<()> {
        if self.is_sharded() {
            self.versions.iter_mut().for_each(|version| *version += 2); // they come back as others
            return self.set_versions(1);
        }
        self.versions = self.current_versions()?;
        let stepped = self.versions.iter_mut().zip(&self.had_grad).filter(|(_, had)| **had);
        stepped.for_each(|(version, _)| *version += 1);
        self.set_versions(0)
    }

    /// The shard has changed, and the weights are gathered from it next.
    pub fn note_change(&mut self) {
        self.weight_shard.set_stale();
    }

    /// The dtype of its shard.
    pub fn shard_kind(&self) -> Kind {
        self.shard.kind()
    }

    /// Its shard, if that is to be in a file between steps.
    pub fn swappable_shard(&self) -> Option<&Tensor> {
        (self.layout.swaps_shard && self.has_own_shard()).then_some(&self.shard)
    }

    /// Moves the shard into a tensor of its length and dtype whose memory is a file.
    pub fn move_shard(&mut self, to: &Tensor) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let mut to = to.shallow_clone();
        to.f_copy_(&self.shard)?;
        for (index, sharded) in self.sharded_params.iter().enumerate() {
            sharded.leaf().shallow_clone().f_set_data(&self.param_shard_in(&to, index)?)?;
        }
        (self.shard, self.is_shard_in_file) = (to, true);
        Ok(())
    }

    /// The place of the parameter at `index` in a tensor as long as the shard: a view.
    pub fn param_shard_in(&self, shard: &Tensor, index: usize) -> Result<Tensor> {
        self.layout.param_shard(shard, &self.layout.places[index], self.rank)
    }

    /// Keeps what the weights are gathered from in a file.
    pub fn put_weight_shard_into(&mut self, file: ShardFile) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        self.weight_shard.put_into(file, &self.shard, &self.moved)
    }

    /// Takes the shard as it is over to what the weights are gathered from.
    pub fn refresh_weight_shard(&mut self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        self.keep_copies()?;
        self.weight_shard.refresh(&self.shard, &self.moved)?;
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

    /// Begins a use: the weights stay unsharded until [`Unit::end_use`].
    pub fn begin_use(&mut self) {
        self.storage.iter_mut().for_each(|storage| storage.uses += 1);
    }

    /// Ends a use; [`Unit::reshard`] frees the memory after the last one.
    pub fn end_use(&mut self) {
        self.storage.iter_mut().for_each(|storage| storage.uses = storage.uses.saturating_sub(1));
    }

    /// The weights stay until [`Unit::end_backward`].
    pub fn begin_backward(&mut self) {
        self.storage.iter_mut().for_each(|storage| storage.is_in_backward = true);
    }

    /// All that used the weights in backward have had their turn.
    pub fn end_backward(&mut self) -> Result<()> {
        self.storage.iter_mut().for_each(|storage| storage.is_in_backward = false);
        self.reshard()
    }

    /// The weights stay until [`Unit::reshard_after_step`].
    pub fn keep_until_step_end(&mut self) {
        self.storage.iter_mut().for_each(|storage| storage.is_kept_until_step_end = true);
    }

    /// Weights that are unsharded are accessed: outside of a call of their module they stay.
    pub fn keep_unsharded(&mut self) {
        self.storage.iter_mut().for_each(|storage| storage.is_kept_until_step_end |= storage.uses == 0);
    }

    /// Ends [`Unit::keep_until_step_end`]: frees the memory of weights that are not in use.
    pub fn reshard_after_step(&mut self) -> Result<()> {
        self.storage.iter_mut().for_each(|storage| storage.is_kept_until_step_end = false);
        self.reshard()
    }

    /// After a call: drops gradients, and reshards the weights.
    pub fn end_call(&mut self) -> Result<()> {
        self.drop_grads()?;
        self.optimizer = NO_OPTIMIZER;
        self.claimed.fill(false);
        if let Some(storage) = &mut self.storage {
            (storage.uses, storage.is_kept_until_step_end, storage.is_in_backward) = (0, false, false);
        }
        self.wait_for_unshard()?;
        self.reshard()
    }

    /// Before another call with the same weights, some of which may have been frozen or unfrozen since.
    pub fn begin_call(&mut self) -> Result<()> {
        self.unfreeze()?;
        for (place, sharded) in self.layout.places.iter().zip(&self.sharded_params) {
            let _ = sharded.set_requires_grad(place.parameter.requires_grad());
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

    /// Elements of sharded weights that are in memory or on their way.
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
        let is_used = |storage: &UnshardedStorage| {
            storage.uses > 0 || storage.is_kept_until_step_end || storage.is_in_backward
        };
        let is_idle = |storage: &UnshardedStorage| !is_used(storage) && !storage.is_arriving();
        self.live() > 0 && self.storage.as_ref().is_some_and(is_idle)
    }

    /// Frees the memory of the weights, unless they are in use.
    pub fn reshard(&mut self) -> Result<()> {
        if !self.is_idle() {
            return Ok(());
        }
        self.take_changes()?;
        self.storage.iter_mut().try_for_each(UnshardedStorage::release)?;
        self.set_versions(1)?;
        self.layout.places.iter().try_for_each(|place| place.parameter.set_sharded(true))
    }

    /// The weights have been changed from outside: takes this rank's shard of them over.
    pub fn write_back(&mut self, index: usize) -> Result<()> {
        if !self.has_own_shard() {
            return Ok(());
        }
        let _no_grad = tch::no_grad_guard();
        let place = &self.layout.places[index];
        let own = self.layout.param_shard(&self.layout.shard(&self.flat, self.rank)?, place, self.rank)?;
        let shard = self.sharded_params[index].leaf();
        take_edit(shard, &self.moved.to(shard.device(), &own, false)?)?;
        self.weight_shard.set_stale();
        self.versions[index] = place.parameter.leaf().f_internal_version()?;
        Ok(())
    }

    /// Writes the parameter at `index`: this rank's `shard` of the values, and the unsharded weight where it is in memory.
    /// [`Unit::renew`] has to follow.
    pub fn write(&mut self, index: usize, values: &Tensor, shard: &Tensor) -> Result<()> {
        self.wait_for_unshard()?;
        if !self.is_sharded() {
            self.layout.places[index].parameter.leaf().f_detach()?.f_copy_(values)?;
            self.write_back(index)?;
        }
        Ok(self.sharded_params[index].leaf().f_detach()?.f_copy_(shard)?)
    }

    /// What this rank has of a tensor like the parameter at `index`, as a copy in the order of its elements in memory.
    pub fn param_shard_of(&self, index: usize, unsharded: &Tensor) -> Result<Tensor> {
        let flat = self.layout.places[index].to_memory_order(&unsharded.f_reshape([-1_i64])?)?;
        copied(&narrow(&flat, self.range(index))?)
    }

    /// Unsharded tensors like the parameters, from what each rank has of them. `None` where no rank has any.
    ///
    /// # Collective
    /// All ranks must call it, for the same unit.
    pub fn unsharded(
        &self,
        group: Option<&ProcessGroup>,
        sharded_params: &[Option<Tensor>],
        kind: Kind,
    ) -> Result<Vec<Tensor>> {
        self.layout.unsharded(self.rank, group, sharded_params, kind)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::nn::Sharding;

    /// Draws initial values when they are needed.
    #[derive(Debug, Default)]
    struct Draws(AtomicUsize);

    impl Sharding for Draws {
        fn unshard(&self, parameter: &Parameter) -> Result<()> {
            self.0.fetch_add(1, Ordering::Relaxed);
            parameter.set_sharded(false)
        }

        fn reshard(&self, _parameter: &Parameter, _is_changed: bool) -> Result<()> {
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
            parameter.attach_sharding(draws.clone()).unwrap();
            parameter.set_sharded(true).unwrap();
            let layout = Layout::of(vec![("weight".to_owned(), parameter.clone())], 2);
            let unit = Unit::of_module(layout, 1, false, (Some("net"), keeps_values)).unwrap();
            assert_eq!(draws.0.load(Ordering::Relaxed), expected);
            assert!(!parameter.is_sharded() && !parameter.is_kept() && unit.live() > 0);
            assert_eq!(parameter.size(), [3, 5]);
        }
    }
}
