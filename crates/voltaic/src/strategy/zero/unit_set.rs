//! The units of a rank, and their gradients on the way to the ranks that step with them, unit by unit, while backward computes the next
//! ones. `prefetch` and `update` have what the set does with weights and with files.
//!
//! A hook of each parameter tells when its gradient is complete. When a unit's are, they are written into one tensor, each
//! divided by the number of ranks, which are then added up shard by shard, in the order of the ranks: the arithmetic of data-parallel
//! training. Units leave in their order on all ranks, whatever order hooks run in.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use tch::{Kind, Tensor};

use super::config::{ZeroConfig, ZeroStage};
use super::order::Order;
use super::order_digest::{NUMBERS, OrderDigest, first_difference};
use super::report::Peaks;
use super::swapper::Files;
use super::unit::{NO_OPTIMIZER, Unit};
use super::unsharded_storage::Tally;
use super::weight_shard::Moved;
use crate::checkpoint::parameter_of;
use crate::distributed::{ProcessGroup, ReduceOp, Work, collective_scope};
use crate::dtype::bytes_of;
use crate::error::{ConfigError, Error, Result};
use crate::ffi::GradHook;
use crate::optim::OffloadStates;
use crate::strategy::votes::Votes;

/// Most units on their way where gradients do not stay unsharded: the memory of a third one would be needed.
const MAX_SENT: usize = 2;

/// A unit's gradients on their way.
#[derive(Debug)]
struct Sent {
    unit: usize,
    work: Option<Work>,
    /// Left alone until they have arrived.
    given: Tensor,
    shard: Tensor,
}

/// All units of a rank, which hooks, the strategy and its optimizers share.
#[derive(Debug)]
pub(super) struct UnitSet {
    pub config: ZeroConfig,
    /// The ranks that shard states among each other (`dp_shard`), if there are several.
    pub group: Option<Arc<ProcessGroup>>,
    pub units: Vec<Unit>,
    /// What the sum of each unit's gradients is called.
    names: Vec<Arc<str>>,
    /// For each unit, how many of its gradients are still to come in this backward pass.
    waiting: Vec<usize>,
    is_ready: Vec<Vec<bool>>,
    /// Units that have left in this backward pass.
    num_sent: usize,
    sent: VecDeque<Sent>,
    /// Hooks count: this backward is one whose gradients travel.
    pub is_active: bool,
    /// The trainer runs backward, whether its gradients travel or not.
    pub is_in_backward: bool,
    /// A parameter that got a gradient from elsewhere since the last backward whose gradients travelled.
    own_backward: Option<String>,
    /// The votes of all ranks, if this backward completes a window.
    votes: Option<Votes>,
    /// Why a hook failed.
    pub failure: Option<Error>,
    /// In which order units are needed.
    pub order: Order,
    /// What has been gathered since ranks last compared.
    pub order_digest: OrderDigest,
    /// What units have in memory.
    pub tally: Arc<Tally>,
    /// The places of parameters: unit and index, by id and by fqn.
    by_id: HashMap<u64, (usize, usize)>,
    by_fqn: HashMap<String, (usize, usize)>,
    /// Bytes of gradients of this backward pass that are complete and not on their way yet.
    unsharded_grads: usize,
    /// The most elements of sharded weights that were unsharded at once.
    pub max_live: usize,
    /// What the rank has held.
    pub peaks: Peaks,
    /// What units have moved between the device and host memory.
    pub moved: Arc<Moved>,
    /// What units have in files.
    pub files: Files,
}

impl UnitSet {
    /// Whether all weights together fit on the devices of all ranks.
    ///
    /// # Collective
    /// All ranks must call it.
    pub fn fits_on_device(&mut self) -> Result<bool> {
        let mut fits_on_device = true;
        for unit in &mut self.units {
            fits_on_device &= unit.try_reserve()?;
        }
        self.units.iter_mut().try_for_each(Unit::release_reserved)?;
        let Some(group) = &self.group else { return Ok(fits_on_device) };
        let short = Tensor::f_from_slice(&[f32::from(u8::from(!fits_on_device))])?;
        group.all_reduce(&short, ReduceOp::Sum)?;
        Ok(short.f_double_value(&[0])? == 0.0)
    }

    pub fn new(
        config: ZeroConfig,
        group: Option<Arc<ProcessGroup>>,
        mut units: Vec<Unit>,
        files: Files,
    ) -> Self {
        let (mut by_id, mut by_fqn) = (HashMap::new(), HashMap::new());
        for (number, unit) in units.iter().enumerate() {
            for (index, place) in unit.layout.places.iter().enumerate() {
                by_id.insert(place.parameter.id(), (number, index));
                by_fqn.insert(place.fqn.clone(), (number, index));
            }
        }
        let tally = Arc::new(Tally::default());
        let moved = Arc::new(Moved::default());
        for unit in &mut units {
            unit.count_in(&tally);
            unit.moved = moved.clone();
            unit.forget_rounded();
        }
        Self {
            files,
            moved,
            tally,
            by_id,
            by_fqn,
            config,
            group,
            waiting: Vec::new(),
            is_ready: Vec::new(),
            names: units.iter().map(|unit| format!("gradients of {}", unit.layout.title()).into()).collect(),
            units,
            num_sent: 0,
            sent: VecDeque::new(),
            is_active: false,
            is_in_backward: false,
            own_backward: None,
            votes: None,
            failure: None,
            order: Order::default(),
            order_digest: OrderDigest::default(),
            unsharded_grads: 0,
            max_live: 0,
            peaks: Peaks::default(),
        }
    }

    pub fn group(&self) -> Option<&ProcessGroup> {
        self.group.as_deref()
    }

    fn ranks(&self) -> usize {
        self.group.as_ref().map_or(1, |group| group.world_size())
    }

    /// Before a backward pass. With `syncs` its gradients complete a window; `votes` are those of all ranks.
    pub fn begin(&mut self, syncs: bool, votes: Votes) {
        self.failure = None;
        self.sent.clear();
        self.is_in_backward = true;
        self.votes = syncs.then_some(votes);
        self.is_active = syncs || self.config.stage >= ZeroStage::Two;
        if !self.is_active {
            return;
        }
        self.own_backward = None; // what there is already travels, too
        (self.num_sent, self.unsharded_grads) = (0, 0);
        // a leaf module waits for the end of its backward pass, too
        let num_awaited =
            |unit: &Unit| unit.trained().filter(|trained| *trained).count() + usize::from(unit.is_leaf);
        self.waiting = self.units.iter().map(num_awaited).collect();
        self.is_ready = self.units.iter().map(|unit| vec![false; unit.layout.places.len()]).collect();
    }

    /// A gradient is complete.
    pub fn ready(&mut self, unit: usize, index: usize) -> Result<()> {
        if !self.is_in_backward {
            let fqn = &self.units[unit].layout.places[index].fqn;
            self.own_backward.get_or_insert_with(|| fqn.clone());
        }
        if !self.is_active {
            return Ok(());
        }
        let (was_sent, was_ready) =
            (self.num_sent > unit, std::mem::replace(&mut self.is_ready[unit][index], true));
        if was_ready {
            let is_new = was_sent && self.units[unit].layout.places[index].parameter.grad().defined();
            return if is_new { Err(repeated_gradient(&self.units[unit], index)) } else { Ok(()) };
        }
        if was_sent {
            return Err(late_gradient(&self.units[unit], index));
        }
        self.waiting[unit] -= 1;
        self.unsharded_grads += bytes_of(&self.units[unit].layout.places[index].parameter.grad());
        self.note_gradients();
        if self.waiting[unit] == 0 && self.units[unit].trained().all(|trained| trained) {
            self.units[unit].end_backward()?; // all that used the weights have had their turn
        }
        self.send_complete()
    }

    /// Sends the units that are complete, as far as none before them is not.
    fn send_complete(&mut self) -> Result<()> {
        while self.num_sent < self.units.len() && self.waiting[self.num_sent] == 0 {
            self.send_next()?;
        }
        Ok(())
    }

    /// The gradients of the inputs of a leaf module are there: those of its parameters are complete, and the others get none.
    pub fn end_of_leaf(&mut self, unit: usize) -> Result<()> {
        let calls = &mut self.units[unit].open_calls;
        *calls = calls.saturating_sub(1);
        if *calls > 0 || !self.is_active {
            return Ok(());
        }
        self.waiting[unit] = 0;
        self.units[unit].end_backward()?;
        self.send_complete()
    }

    /// An error if gradients came from a backward pass that was not the trainer's, and are this rank's alone.
    pub fn check_averaged(&self) -> Result<()> {
        let Some(name) = self.own_backward.as_ref().filter(|_| self.group.is_some()) else {
            return Ok(());
        };
        let what = format!("the gradient of `{name}` comes from loss.backward(), and is this rank's alone");
        let remedy =
            "call ctx.manual_backward(&loss), or backward of Fabric, which average gradients over the ranks";
        Err(ConfigError::new("optimizer.step", what, remedy).into())
    }

    fn send_next(&mut self) -> Result<()> {
        let limit = if self.config.stage == ZeroStage::One { usize::MAX } else { MAX_SENT };
        while self.sent.len() >= limit {
            self.receive_next()?;
        }
        let (index, scale) = (self.num_sent, self.config.gradient_reduction.factors(self.ranks()).0);
        let unit = &mut self.units[index];
        if !unit.trained().any(|trained| trained) {
            self.num_sent += 1;
            return Ok(());
        }
        let _named = collective_scope(&self.names[index]);
        let ready = unit.leaves().zip(&self.is_ready[index]).filter(|(_, is_ready)| **is_ready);
        let sent: usize = ready.map(|(leaf, _)| bytes_of(&leaf.grad())).sum();
        self.unsharded_grads = self.unsharded_grads.saturating_sub(sent);
        let mut given = unit.take_grads(scale)?;
        if let Some(dtype) = self.config.communication_dtype.filter(|dtype| *dtype != given.kind()) {
            given = given.f_to_kind(dtype)?;
        }
        let (work, shard) = match self.group.as_deref() {
            Some(group) if unit.layout.shard_len > 0 => {
                let len = [unit.layout.shard_len as i64];
                let shard = Tensor::f_empty(len, (given.kind(), given.device()))?;
                (Some(group.start_reduce_scatter_into(&shard, &given, ReduceOp::Sum)?), shard)
            }
            _ => (None, given.shallow_clone()),
        };
        if work.is_some() {
            self.order_digest.note(self.units.len() + index);
        }
        self.sent.push_back(Sent { unit: index, work, given, shard });
        self.num_sent += 1;
        Ok(())
    }

    fn receive_next(&mut self) -> Result<()> {
        let Some(Sent { unit, work, shard, .. }) = self.sent.pop_front() else { return Ok(()) };
        work.map_or(Ok(()), Work::wait)?;
        let scale = self.config.gradient_reduction.factors(self.ranks()).1;
        let shard = if scale == 1.0 { shard } else { shard.f_mul_scalar(scale)? };
        let dtype = self.config.grad_accum_dtype.unwrap_or(self.units[unit].layout.kind);
        self.files.add_grads(unit, &mut self.units[unit], shard, dtype)?;
        self.note_gradients();
        Ok(())
    }

    fn note_gradients(&mut self) {
        let stay_unsharded = self.config.stage == ZeroStage::One;
        let both = self.units.iter().map(|unit| unit.grad_bytes(stay_unsharded));
        let (shards, offloaded) = both.fold((0, 0), |all, unit| (all.0 + unit.0, all.1 + unit.1));
        let sent: usize = self.sent.iter().map(|sent| bytes_of(&sent.given)).sum();
        // those of stage 1 are counted as unsharded
        let bytes = if stay_unsharded { shards } else { shards + self.unsharded_grads + sent };
        self.peaks.gradients = self.peaks.gradients.max(bytes);
        self.peaks.offloaded_gradients = self.peaks.offloaded_gradients.max(offloaded);
    }

    /// After backward: waits for the gradients. Returns the votes of all ranks if the window is complete.
    pub fn finish(&mut self) -> Result<Votes> {
        while self.num_sent < self.units.len() {
            self.send_next()?; // some parameters of it have no part in the loss
        }
        while !self.sent.is_empty() {
            self.receive_next()?;
        }
        self.files.finish_grads();
        if let Some(unit) = self.units.iter().find(|unit| unit.layout.is_stored_apart()) {
            unit.wait_for_copies()?; // all units have one device, and copies are made in its order
            self.units.iter_mut().for_each(Unit::note_copied);
        }
        let Some(votes) = self.votes.take() else { return Ok(Votes::default()) };
        self.moved.steps.fetch_add(1, Ordering::Relaxed); // also of steps that are left out
        let _named = collective_scope("gradients that there are");
        let had =
            self.units.iter().flat_map(|unit| unit.had_grad.iter().map(|had| f32::from(u8::from(*had))));
        let own = self.order_digest.numbers();
        let mut numbers: Vec<f32> = own.into_iter().chain(had).collect();
        if let Some(group) = &self.group {
            let sums = Tensor::f_from_slice(&numbers)?;
            group.all_reduce(&sums, ReduceOp::Sum)?;
            let len = numbers.len();
            sums.f_copy_data(&mut numbers, len)?;
        }
        let (orders, had) = numbers.split_at(NUMBERS);
        self.compare_orders(own, orders)?;
        let had: Vec<bool> = had.iter().map(|sum| *sum != 0.0).collect();
        let mut rest = had.as_slice();
        for unit in &mut self.units {
            let (own, others) = rest.split_at(unit.had_grad.len());
            unit.had_grad.copy_from_slice(own);
            unit.show_grads(own)?;
            rest = others;
        }
        self.note_gradients();
        Ok(votes)
    }

    /// An error if ranks have gathered other weights, or in another order.
    ///
    /// # Collective
    /// All ranks must call it.
    pub fn check_order(&mut self) -> Result<()> {
        let own = self.order_digest.numbers();
        let Some(group) = self.group().filter(|_| self.units.iter().any(Unit::shards_weights)) else {
            return Ok(());
        };
        let _named = collective_scope("order of weights");
        let sums = Tensor::f_from_slice(&own)?;
        group.all_reduce(&sums, ReduceOp::Sum)?;
        let mut all = [0.0; NUMBERS];
        sums.f_copy_data(&mut all, NUMBERS)?;
        self.compare_orders(own, &all)
    }

    /// The same with this rank's digest and the sums of all.
    fn compare_orders(&mut self, own: [f32; NUMBERS], sums: &[f32]) -> Result<()> {
        let ranks = self.ranks() as f32;
        let last = self.order_digest.last();
        self.order_digest.clear();
        if own.iter().zip(sums).all(|(own, sum)| own * ranks == *sum) {
            return Ok(());
        }
        let _named = collective_scope("order of weights");
        let all = self.group().map_or_else(|| Ok(Vec::new()), |group| group.all_gather_object(&last))?;
        let name = |unit: Option<usize>| {
            let gradients = |at: usize| self.names.get(at - self.units.len()).map_or("others", AsRef::as_ref);
            let title = |at: usize| self.units.get(at).map_or_else(|| gradients(at), Unit::name);
            unit.map_or("nothing more", title).to_owned()
        };
        let what = first_difference(&all).map_or_else(
            || "ranks exchanged weights and gradients in other orders".to_owned(),
            |(rank, own, zero)| {
                format!(
                    "rank {rank} exchanged {} where rank 0 exchanged {}, and took them for those",
                    name(own),
                    name(zero)
                )
            },
        );
        let remedy = "let all ranks call the same modules in the same order, name the module whose shards they choose among in \
            leaf_modules, or use zero2";
        Err(ConfigError::new("trainer.strategy", what, remedy).into())
    }

    /// The dtype of the sums that this rank keeps of its own gradients in a window, if it is another one than theirs.
    pub fn sums_dtype(&self, unit: usize) -> Option<Kind> {
        let is_unsharded = self.config.stage == ZeroStage::One;
        self.config.grad_accum_dtype.filter(|dtype| is_unsharded && *dtype != self.units[unit].layout.kind)
    }

    /// After a backward pass whose gradients stay this rank's.
    pub fn keep_sums(&mut self) -> Result<()> {
        for unit in 0..self.units.len() {
            if let Some(dtype) = self.sums_dtype(unit) {
                self.units[unit].add_to_sums(dtype)?;
            }
        }
        Ok(())
    }

    /// The backward pass has failed; what was on its way is of no use.
    pub fn abandon(&mut self) {
        self.sent.clear();
        self.votes = None;
    }

    /// Copies into the shards what was written to weights by hand.
    pub fn take_changes(&mut self) -> Result<()> {
        self.units.iter_mut().try_for_each(Unit::take_changes)
    }

    /// Before an optimizer's step: copies into the shards what was written to weights by hand, and reshards the weights that are not in
    /// use.
    pub fn begin_update(&mut self) -> Result<()> {
        self.take_changes()?;
        self.units.iter_mut().try_for_each(|unit| {
            unit.wait_for_unshard()?;
            unit.reshard_after_step()?;
            unit.begin_update()
        })
    }

    /// Gradients of 16 bits of an optimizer's weights of float32 become float32, before they are changed.
    pub fn widen_grads(&mut self, optimizer: usize) -> Result<()> {
        let mut units = self.units.iter_mut().filter(|unit| unit.optimizer == optimizer);
        units.try_for_each(Unit::widen_grads)
    }

    /// After an optimizer has updated these units: starts to give all ranks the weights of those that are unsharded, and stay so.
    ///
    /// # Collective
    /// All ranks must call it.
    pub fn end_update(&mut self, optimizer: usize, units: Range<usize>) -> Result<Vec<Work>> {
        let Self { units: all, group, .. } = self;
        let mut works = Vec::new();
        let units = all.iter_mut().take(units.end).skip(units.start);
        for unit in units.filter(|unit| unit.optimizer == optimizer && unit.has_grads()) {
            unit.renew_after_step()?;
            if !unit.is_sharded() {
                works.extend(unit.start_gather(group.as_deref())?);
            }
        }
        Ok(works)
    }

    /// The units that an optimizer changes, and those that none changes.
    pub fn own_units(&mut self, optimizer: usize) -> impl Iterator<Item = &mut Unit> {
        let is_own = move |unit: &&mut Unit| unit.optimizer == optimizer || unit.optimizer == NO_OPTIMIZER;
        self.units.iter_mut().filter(is_own)
    }

    /// Drops the gradients of an optimizer's parameters.
    pub fn drop_grads(&mut self, optimizer: usize) -> Result<()> {
        self.own_units(optimizer).try_for_each(Unit::drop_grads)
    }

    /// Moves states of an optimizer's units to memory of the host. Sharded weights are resharded.
    pub fn offload_states(&mut self, optimizer: usize, states: &OffloadStates) -> Result<()> {
        self.take_changes()?;
        self.own_units(optimizer).try_for_each(|unit| {
            unit.wait_for_unshard()?;
            unit.reshard_after_step()?;
            unit.offload_states(states)
        })
    }

    /// Keeps the error of a hook, of which autograd would pass on the text only, and returns one for autograd.
    pub fn fail(&mut self, error: Error, what: &'static str) -> anyhow::Error {
        self.failure = Some(error);
        anyhow::anyhow!(what)
    }

    /// Forgets what was measured in an earlier call.
    pub fn begin_call(&mut self) {
        self.order = Order::default();
        (self.max_live, self.peaks) = (0, Peaks::default());
        self.moved.clear();
        self.files.begin_call();
    }

    /// Whether no other code has a handle to one of the parameters: `kept` has one, beside the unit.
    pub fn is_orphaned(&self) -> bool {
        let places = self.units.iter().flat_map(|unit| &unit.layout.places);
        places.into_iter().all(|place| place.parameter.num_handles() <= 2)
    }

    /// Frees all units.
    pub fn clear(&mut self) {
        self.units.clear();
        self.by_id.clear();
        self.by_fqn.clear();
    }

    /// Runs `body` with a unit and the group.
    pub fn with_unit<R>(
        &mut self,
        unit: usize,
        body: impl FnOnce(&mut Unit, Option<&ProcessGroup>) -> R,
    ) -> R {
        body(&mut self.units[unit], self.group.as_deref())
    }

    /// The place of a parameter: its unit and its index there.
    pub fn place_of(&self, fqn: &str) -> Option<(usize, usize)> {
        self.by_fqn.get(fqn).copied()
    }

    /// The place of a parameter by its id.
    pub fn place_of_id(&self, id: u64) -> Option<(usize, usize)> {
        self.by_id.get(&id).copied()
    }

    /// Makes the master weights that a state has and units do not: of parameters that were frozen when this fit began.
    pub fn make_masters_of<'a>(&mut self, states: impl Iterator<Item = &'a str>) -> Result<()> {
        let masters = states.filter_map(parameter_of);
        let units: HashSet<usize> =
            masters.filter_map(|fqn| self.place_of(fqn)).map(|(unit, _)| unit).collect();
        units.into_iter().try_for_each(|unit| self.units[unit].make_master())
    }

    /// The norms of all ranks' shards, as one tensor of a dtype that is the same on all ranks.
    pub fn all_norms(&self, norm: &Tensor, kind: Kind) -> Result<Tensor> {
        let norm = norm.f_to_kind(kind)?.f_reshape([1_i64])?;
        match &self.group {
            Some(group) => Ok(group.all_gather(&norm)?.f_view([-1_i64])?),
            None => Ok(norm),
        }
    }
}

/// The error of a gradient that its rank's others do not wait for any more.
fn late_gradient(unit: &Unit, index: usize) -> Error {
    let fqn = &unit.layout.places[index].fqn;
    let what = format!("the gradient of {fqn} came when those of its leaf module were on their way");
    let remedy = "use the weights of a leaf module in its forward only, or leave it out of leaf_modules";
    ConfigError::new("trainer.strategy", what, remedy).into()
}

/// The error of a gradient that comes again in one backward pass, by a pass within it, when the first one was sent.
fn repeated_gradient(unit: &Unit, index: usize) -> Error {
    let fqn = &unit.layout.places[index].fqn;
    let what =
        format!("a second gradient of {fqn} came within one backward pass, when the first was on its way");
    let remedy = "take the gradients of a recomputed segment by autograd_grad and return them, so that autograd sums them up, in \
        place of a backward pass of its own";
    ConfigError::new("trainer.strategy", what, remedy).into()
}

/// Lets the gradients of these leaves, given by unit and index, be known when they are there, as long as the hooks live.
pub(super) fn hook_leaves(
    set: &Arc<Mutex<UnitSet>>,
    leaves: Vec<(usize, usize, Tensor)>,
) -> Result<Vec<GradHook>> {
    let hook = |(unit, index, leaf): (usize, usize, Tensor)| {
        let shared = set.clone();
        let hook = GradHook::register(&leaf, move || {
            let mut set = shared.lock().unwrap_or_else(PoisonError::into_inner);
            set.ready(unit, index).map_err(|error| {
                set.is_active = false;
                set.fail(error, "gradients could not be averaged")
            })
        });
        Ok(hook?)
    };
    leaves.into_iter().map(hook).collect()
}
