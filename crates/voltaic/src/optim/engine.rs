//! What all optimizers share: finding the gradients, keeping the lists that the kernels take, saving and loading
//! state. An optimizer adds a [`Rule`].

use std::collections::HashMap;

use serde_json::Value;
use tch::{Kind, Tensor};

use super::clip::{GradientClip, grad_norm};
use super::masters::take_edit;
use super::offload_states::{OffloadState, OffloadStates, Offloaded, move_grad};
use super::optimizer::{Optimizer, OptimizerState, parameters};
use super::param_group::{ParamGroup, SavedGroup};
use super::replay::{Rate, Replayed};
use super::rounding::Rounding;
use super::values::{ParamValue, Unsharded};
use crate::checkpoint::MASTER;
use crate::error::{CheckpointError, ConfigError, OptimError, Problem, Result, first_of};
use crate::ffi::{self, GradStatus, Gradients, RecordingPause, TensorList};
use crate::nn::Parameter;

/// How one kind of optimizer updates parameters.
pub(super) trait Rule: Send {
    /// Names of the tensors kept for a parameter.
    const STATE: &'static [&'static str];
    /// What the kernel takes, kept between steps.
    type Lists: Send;
    /// Whether [`Rule::update`] calls an operator of libtorch's that does all, in place of which voltaic puts its own.
    const HAS_OPERATOR: bool;

    /// Whether [`Rule::update_in_one_pass`] gives the bits of [`Rule::update`].
    const IS_EXACT_IN_ONE_PASS: bool = true;

    /// Name of the optimizer, such as `AdamW`.
    fn name(&self) -> &'static str;

    /// Lists of the members `active` of a bucket. Makes the state that is missing.
    fn lists(&self, group: &ParamGroup, members: &mut [Slot], active: &[usize]) -> Result<Self::Lists>;

    /// Whether lists made earlier still fit the hyper-parameters of the group.
    fn fits(&self, group: &ParamGroup, lists: &Self::Lists) -> bool;

    /// Updates the parameters of `lists`, which have `grads`.
    fn update(
        &self,
        group: &ParamGroup,
        rate: Rate<'_>,
        lists: &mut Self::Lists,
        grads: &mut TensorList,
    ) -> Result<()>;

    /// The same in one pass over memory, by a kernel that takes gradients of 16 bits for weights of float32, and writes the weights
    /// rounded, too. `false`, with nothing done, if there is none for this rule or for these tensors.
    fn update_in_one_pass(
        &self,
        _group: &ParamGroup,
        _lists: &mut Self::Lists,
        _grads: &mut TensorList,
        _rounded: Option<&TensorList>,
    ) -> Result<bool> {
        Ok(false)
    }

    /// Whether clipping limits updates of this group in the place of gradients.
    fn limits_updates(&self, _group: &ParamGroup) -> bool {
        false
    }

    /// Puts the updates in the place of the gradients, until the next update of the parameters.
    fn show_updates(&self, _group: &ParamGroup, _lists: &mut Self::Lists) -> Result<()> {
        Ok(())
    }

    /// Puts the gradients back.
    fn show_gradients(&self, _lists: &mut Self::Lists) -> Result<()> {
        Ok(())
    }

    /// Whether a parameter of the group may have a tensor of [`Rule::STATE`] at this index.
    fn keeps(_group: &SavedGroup, _index: usize) -> bool {
        true
    }

    /// Which of [`Rule::STATE`] a parameter that has any state must have.
    fn required(group: &SavedGroup) -> Vec<usize>;

    /// Whether the tensor is a count rather than laid out as its parameter.
    fn is_count(index: usize) -> bool;
}

/// A parameter and its state.
pub(super) struct Slot {
    pub(super) fqn: String,
    pub(super) param: Parameter,
    /// In the order of [`Rule::STATE`], and last the master copy; absent until the parameter has had a gradient.
    pub(super) state: Vec<Option<Tensor>>,
    /// How often the weight had been written to when its master copy was last the same: autograd counts.
    version: i64,
    /// Whether states are float32, whatever the parameter is.
    has_float32_states: bool,
}

impl Slot {
    /// What is updated: the master copy if there is one, else the parameter.
    pub(super) fn weights(&self) -> &Tensor {
        self.state.last().and_then(Option::as_ref).unwrap_or(self.param.leaf())
    }

    /// A new state tensor, laid out as the parameter.
    pub(super) fn new_state(&self, value: f64) -> Result<Tensor> {
        let state = self.weights().detach().f_full_like(value)?;
        Ok(if self.has_float32_states { state.f_to_kind(Kind::Float)? } else { state })
    }

    /// The weight and its master copy are the same now, but for rounding.
    fn note_weight(&mut self) -> Result<()> {
        self.version = self.param.leaf().f_internal_version()?;
        Ok(())
    }

    /// Takes what was written to the weight, other than by a step, over to the master copy.
    fn take_changes(&self) -> Result<()> {
        let Some(Some(master)) = self.state.last() else { return Ok(()) };
        let weight = self.param.leaf();
        if weight.f_internal_version()? == self.version || weight.size() != master.size() {
            return Ok(()); // the step refuses one of another size
        }
        take_edit(master, weight)
    }
}

/// Parameters of one group and unit that share dtype and device: one kernel call updates them.
struct Bucket<L> {
    group: usize,
    unit: usize,
    members: Vec<Slot>,
    gradients: Gradients,
    /// Whether the members are of a lower dtype, and copies of them in float32 are updated in their place.
    has_masters: bool,
    /// Whether these copies stay. Without, a kernel rounds the updated members, or copies are made for each step; states are float32
    /// all the same.
    keeps_masters: bool,
    /// Whether a kernel may update the members without copies, until one has declined; and whether the lists are for that.
    may_be_in_place: bool,
    is_in_place: bool,
    cached: Option<CachedLists<L>>,
}

impl<L> Bucket<L> {
    /// Whether weights of float32 are updated, by gradients that may have 16 bits. A strategy may have cast shards since the first step.
    fn updates_float32(&self) -> bool {
        self.has_masters || self.members.first().is_some_and(|slot| slot.param.kind() == Kind::Float)
    }

    /// Takes what was written to weights over to their master copies: an edit counts.
    fn take_changes(&mut self) -> Result<()> {
        if !self.keeps_masters {
            return Ok(());
        }
        self.members.iter_mut().try_for_each(|slot| {
            slot.take_changes()?;
            slot.note_weight()
        })
    }
}

/// What the last step worked on.
struct CachedLists<L> {
    /// Which parameters had a gradient.
    status: Vec<GradStatus>,
    lists: L,
    /// Weights of 16 bits beside those that are updated, if there are some.
    rounding: Option<Rounding>,
}

/// An optimizer that follows rule `R`.
pub(super) struct Engine<R: Rule> {
    rule: R,
    groups: Vec<ParamGroup>,
    /// In the order of their units.
    buckets: Vec<Bucket<R::Lists>>,
    /// There once a step is to be captured.
    replayed: Option<Replayed>,
    /// Counts how often steps took to other tensors.
    memory: u64,
    /// What is on the host for a while.
    offloaded: Offloaded,
    /// Parameters whose gradients are on the host, and where these are to be.
    grads_away: Vec<(Parameter, tch::Device)>,
}

impl<R: Rule> Engine<R> {
    /// With `master_weights`, parameters in bfloat16 and float16 are updated in float32 copies.
    pub(super) fn new(rule: R, groups: Vec<ParamGroup>, master_weights: bool) -> Result<Self> {
        let mut buckets = Vec::new();
        for (index, group) in groups.iter().enumerate() {
            let mut alike: Vec<(_, Vec<Slot>)> = Vec::new();
            for ((fqn, param), unit) in group.by_unit() {
                let state = (0..=R::STATE.len()).map(|_| None).collect();
                let is_half = matches!(param.kind(), Kind::BFloat16 | Kind::Half);
                let keeps_master = master_weights && is_half && !group.has_master_elsewhere(param);
                let has_float32_states = keeps_master || is_half && group.float32_states;
                let kind = (unit, param.kind(), param.device(), keeps_master);
                let (fqn, param) = (fqn.clone(), param.clone());
                let slot = Slot { fqn, param, state, version: 0, has_float32_states };
                match alike.iter_mut().find(|(other, _)| *other == kind) {
                    Some((_, slots)) => slots.push(slot),
                    None => alike.push((kind, vec![slot])),
                }
            }
            for ((unit, _, _, keeps_masters), members) in alike {
                let gradients = Gradients::of(members.iter().map(|slot| slot.param.leaf()))?;
                let has_masters = members.first().is_some_and(|slot| slot.has_float32_states);
                buckets.push(Bucket {
                    group: index,
                    unit,
                    members,
                    gradients,
                    has_masters,
                    keeps_masters,
                    may_be_in_place: has_masters && !keeps_masters && !rule.limits_updates(group),
                    is_in_place: false,
                    cached: None,
                });
            }
        }
        buckets.sort_by_key(|bucket| bucket.unit);
        let (offloaded, grads_away) = (Offloaded::default(), Vec::new());
        Ok(Self { rule, groups, buckets, replayed: None, memory: 0, offloaded, grads_away })
    }

    /// Members that keep master copies, or are to have some.
    fn with_masters(&self) -> impl Iterator<Item = &Slot> {
        self.buckets.iter().filter(|bucket| bucket.keeps_masters).flat_map(|bucket| &bucket.members)
    }

    fn with_masters_mut(&mut self) -> impl Iterator<Item = &mut Slot> {
        self.buckets.iter_mut().filter(|bucket| bucket.keeps_masters).flat_map(|bucket| &mut bucket.members)
    }

    fn take_changes(&mut self) -> Result<()> {
        self.buckets.iter_mut().try_for_each(Bucket::take_changes)
    }

    /// Why the kernel refused, in terms of the parameters; the kernel's own error if it is not known.
    fn explain(&self, bucket: usize, error: crate::error::Error) -> crate::error::Error {
        let bucket = &self.buckets[bucket];
        for slot in &bucket.members {
            for (index, state) in slot.state.iter().enumerate() {
                let dtype = if bucket.has_masters { Kind::Float } else { slot.param.kind() };
                if let Some(state) = state
                    && !R::is_count(index)
                    && describe(state) != describe_as(slot.param.leaf(), dtype)
                {
                    return OptimError::Moved {
                        optimizer: self.rule.name(),
                        fqn: slot.fqn.clone(),
                        parameter: describe(slot.param.leaf()),
                        state: format!("{} is {}", state_name::<R>(index), describe(state)),
                        remedy: "move or cast the module before the first step of its optimizer".into(),
                    }
                    .into();
                }
            }
        }
        error
    }

    /// Where each parameter is: bucket and member, by fqn.
    fn places(&self) -> HashMap<&str, (usize, usize)> {
        let buckets = self.buckets.iter().enumerate();
        let places = buckets.flat_map(|(b, bucket)| {
            bucket.members.iter().enumerate().map(move |(m, slot)| (slot.fqn.as_str(), (b, m)))
        });
        places.collect()
    }

    fn check_groups(&self, groups: &Value, problems: &mut Vec<String>) -> Vec<SavedGroup> {
        let saved: Vec<SavedGroup> = match serde_json::from_value(groups.clone()) {
            Ok(saved) => saved,
            Err(error) => {
                problems.push(format!("its param groups are not those of {}: {error}", self.rule.name()));
                return Vec::new();
            }
        };
        if saved.len() != self.groups.len() {
            problems.push(format!("it has {} param groups, not {}", saved.len(), self.groups.len()));
            return Vec::new();
        }
        for (index, (saved, own)) in saved.iter().zip(&self.groups).enumerate() {
            if std::mem::discriminant(&saved.options) != std::mem::discriminant(&own.options) {
                problems.push(format!("param group {index} is not one of {}", self.rule.name()));
            }
            // one that is frozen needs no state
            let trained = own.params().iter().filter(|(_, parameter)| parameter.requires_grad());
            let trained: Vec<&str> = trained.map(|(fqn, _)| fqn.as_str()).collect();
            let own: Vec<&str> = own.params().iter().map(|(fqn, _)| fqn.as_str()).collect();
            for fqn in &trained {
                if !saved.params.iter().any(|name| name == fqn) {
                    problems.push(format!("missing {fqn} in param group {index}"));
                }
            }
            for fqn in &saved.params {
                if !own.contains(&fqn.as_str()) {
                    problems.push(format!("unexpected {fqn} in param group {index}"));
                }
            }
        }
        saved
    }

    /// Leaves out master weights of parameters that are updated themselves.
    fn without_unused_masters(&self, state: &mut OptimizerState) {
        let places = self.places();
        let is_unused = |(name, _): &mut (String, Tensor)| {
            let place =
                name.split_once('.').filter(|(kind, _)| *kind == MASTER).and_then(|(_, fqn)| places.get(fqn));
            place.is_some_and(|(bucket, _)| !self.buckets[*bucket].keeps_masters)
        };
        let unused = state.tensors.extract_if(.., is_unused).count();
        if unused > 0 {
            tracing::info!(
                "the float32 master weights of {unused} parameters are left out: {} updates the parameters themselves; \
                 it keeps such copies of weights of 16 bits with master_weights=true",
                self.rule.name()
            );
        }
    }

    /// Where each given tensor belongs: bucket, member and index into [`Rule::STATE`].
    fn check_tensors(
        &self,
        state: &OptimizerState,
        saved: &[SavedGroup],
        problems: &mut Vec<String>,
    ) -> Vec<(usize, usize, usize)> {
        let places = self.places();
        let mut targets = Vec::with_capacity(state.tensors.len());
        let mut given: HashMap<(usize, usize), Vec<usize>> = HashMap::new();
        for (name, tensor) in &state.tensors {
            let target = name.split_once('.').and_then(|(kind, fqn)| {
                let (bucket, member) = *places.get(fqn)?;
                let index = match R::STATE.iter().position(|name| *name == kind) {
                    None if kind == MASTER && self.buckets[bucket].keeps_masters => {
                        return Some((bucket, member, R::STATE.len()));
                    }
                    index => index?,
                };
                let is_kept =
                    saved.get(self.buckets[bucket].group).is_none_or(|group| R::keeps(group, index));
                is_kept.then_some((bucket, member, index))
            });
            let Some(target @ (bucket, member, index)) = target else {
                problems.push(format!("unexpected {name}"));
                continue;
            };
            let expected = self.buckets[bucket].members[member].param.size();
            if R::is_count(index) {
                if tensor.numel() != 1 {
                    problems.push(format!("{name} has shape {:?}, not []", tensor.size()));
                }
            } else if tensor.size() != expected {
                problems.push(format!("{name} has shape {:?}, not {expected:?}", tensor.size()));
            }
            let found = given.entry((bucket, member)).or_default();
            if found.contains(&index) {
                problems.push(format!("{name} is given twice"));
            }
            found.push(index);
            targets.push(target);
        }
        // with none at all the state is of a run without master weights; a part of them is missing otherwise
        let has_masters = targets.iter().any(|(.., index)| *index == R::STATE.len());
        // ZeRO has master weights of parameters that have had no gradient yet, and no states
        let has_states = |found: &[usize]| found.iter().any(|index| *index != R::STATE.len());
        for ((bucket, member), found) in given.into_iter().filter(|(_, found)| has_states(found)) {
            let bucket = &self.buckets[bucket];
            let mut required = saved.get(bucket.group).map(R::required).unwrap_or_default();
            if bucket.keeps_masters && has_masters {
                required.push(R::STATE.len());
            }
            for index in required.into_iter().filter(|index| !found.contains(index)) {
                problems.push(format!("missing {}.{}", state_name::<R>(index), bucket.members[member].fqn));
            }
        }
        targets
    }
}

fn state_name<R: Rule>(index: usize) -> &'static str {
    R::STATE.get(index).copied().unwrap_or(MASTER)
}

/// Adds the states of the members of a bucket, by name.
fn add_states<R: Rule>(bucket: &Bucket<R::Lists>, tensors: &mut Vec<(String, Tensor)>) {
    for slot in &bucket.members {
        for (index, tensor) in slot.state.iter().enumerate() {
            if let Some(tensor) = tensor {
                tensors.push((format!("{}.{}", state_name::<R>(index), slot.fqn), tensor.shallow_clone()));
            }
        }
    }
}

fn describe(tensor: &Tensor) -> String {
    describe_as(tensor, tensor.kind())
}

fn describe_as(tensor: &Tensor, dtype: Kind) -> String {
    format!("{dtype:?}{:?} on {:?}", tensor.size(), tensor.device())
}

fn unusable(optimizer: &'static str, slot: &Slot) -> OptimError {
    let grad = slot.param.grad();
    let (what, remedy) = if grad.is_sparse() {
        ("is sparse".to_owned(), "compute it densely (sparse=false for embeddings)".to_owned())
    } else {
        (
            format!("is {}, its parameter {}", describe(&grad), describe(slot.param.leaf())),
            "drop the gradient (zero_grad) when the parameter is cast, moved or resized".to_owned(),
        )
    };
    OptimError::Gradient { optimizer, fqn: slot.fqn.clone(), problem: Problem::new(what, remedy) }
}

/// Finds the gradients of a bucket, and makes lists of what has some if the last ones do not fit. Gives whether it made new ones;
/// `None` if there are no gradients.
fn find_gradients<R: Rule>(
    rule: &R,
    group: &ParamGroup,
    bucket: &mut Bucket<R::Lists>,
) -> Result<Option<bool>> {
    if let Some(slot) = bucket.members.iter().find(|slot| slot.param.is_sharded()) {
        let what = format!("{} is sharded, and an update of it would be lost", slot.fqn);
        let remedy = "let the strategy make the optimizer (Strategy::optimizers)";
        return Err(ConfigError::new("optimizer.step", what, remedy).into());
    }
    let status = bucket.gradients.collect()?;
    if !status.contains(&GradStatus::PRESENT) && !status.contains(&GradStatus::UNUSABLE) {
        return Ok(None);
    }
    let reusable = bucket
        .cached
        .as_ref()
        .is_some_and(|cached| cached.status == status && rule.fits(group, &cached.lists));
    if !reusable {
        if let Some(index) = status.iter().position(|status| *status == GradStatus::UNUSABLE) {
            return Err(unusable(rule.name(), &bucket.members[index]).into());
        }
        let status = status.to_vec();
        let active: Vec<usize> =
            (0..status.len()).filter(|index| status[*index] == GradStatus::PRESENT).collect();
        if let Some(CachedLists { lists, .. }) = &mut bucket.cached {
            rule.show_gradients(lists)?;
        }
        bucket.cached = None;
        if ffi::is_capturing_on_cuda() {
            return Err(OptimError::FirstStepCaptured { optimizer: rule.name() }.into());
        }
        let _unrecorded = RecordingPause::begin(); // captured, each replay would make the state again
        let rounding = rounding(group, bucket, &active)?;
        let lists = rule.lists(group, &mut bucket.members, &active)?;
        bucket.cached = Some(CachedLists { status, lists, rounding });
    }
    Ok(Some(!reusable))
}

/// One update of a bucket. Gives whether it made new lists.
fn step_bucket<R: Rule>(
    rule: &R,
    group: &ParamGroup,
    rate: Rate<'_>,
    bucket: &mut Bucket<R::Lists>,
) -> Result<bool> {
    let is_in_place = bucket.may_be_in_place && !ffi::is_recording();
    if bucket.is_in_place != is_in_place {
        (bucket.is_in_place, bucket.cached) = (is_in_place, None);
    }
    // should the kernel decline, states that were made for it are not there
    let absent: Vec<Vec<bool>> = match is_in_place {
        true => bucket.members.iter().map(|slot| slot.state.iter().map(Option::is_none).collect()).collect(),
        false => Vec::new(),
    };
    let Some(is_new) = find_gradients(rule, group, bucket)? else { return Ok(false) };
    let updates_float32 = bucket.updates_float32();
    let Some(CachedLists { lists, rounding, .. }) = &mut bucket.cached else { return Ok(is_new) };
    let needs_kernel = !R::HAS_OPERATOR || rounding.is_some() || is_in_place || bucket.gradients.are_narrow();
    let is_exact = R::IS_EXACT_IN_ONE_PASS || bucket.has_masters; // shards get the bits of unsharded parameters
    let may = updates_float32 && is_exact && !ffi::is_recording(); // what is recorded are libtorch's operators
    let grads = bucket.gradients.collected();
    let rounded = rounding.as_ref().map(Rounding::all);
    if !(may && needs_kernel && rule.update_in_one_pass(group, lists, grads, rounded)?) {
        if is_in_place {
            for (slot, absent) in bucket.members.iter_mut().zip(absent) {
                let made = slot.state.iter_mut().zip(absent).filter(|(_, was_absent)| *was_absent);
                made.for_each(|(state, _)| *state = None);
            }
            bucket.may_be_in_place = false;
            return step_bucket(rule, group, rate, bucket);
        }
        if updates_float32 {
            grads.to_float()?;
        }
        rule.update(group, rate, lists, grads)?;
        if let Some(rounding) = rounding {
            rounding.write()?;
        }
    }
    if bucket.has_masters {
        bucket.members.iter_mut().try_for_each(Slot::note_weight)?;
    }
    if bucket.has_masters && !bucket.keeps_masters && !is_in_place {
        rule.show_gradients(lists)?;
        bucket.cached = None;
        bucket.members.iter_mut().filter_map(|slot| slot.state.last_mut()).for_each(|copy| *copy = None);
    }
    Ok(is_new)
}

/// What is rounded from the weights that are updated: parameters from their master copies, which are made if they are missing, or what
/// the strategy asks for.
fn rounding<L>(group: &ParamGroup, bucket: &mut Bucket<L>, active: &[usize]) -> Result<Option<Rounding>> {
    let _no_grad = tch::no_grad_guard();
    let uses_masters = bucket.has_masters && !bucket.is_in_place;
    for index in active.iter().filter(|_| uses_masters) {
        let Slot { param, state, .. } = &mut bucket.members[*index];
        if let Some(master @ None) = state.last_mut() {
            *master = Some(param.f_to_dtype(Kind::Float, false, true)?);
        }
    }
    Rounding::of(active.iter().map(|index| {
        let slot = &bucket.members[*index];
        let target = match (uses_masters, bucket.is_in_place) {
            (true, _) => Some(slot.param.leaf().shallow_clone()),
            (_, true) => None,
            _ => group.rounded(&slot.param),
        };
        (slot.fqn.as_str(), slot.weights(), target)
    }))
}

impl<R: Rule> Optimizer for Engine<R> {
    fn name(&self) -> &'static str {
        self.rule.name()
    }

    fn takes_narrow_grads(&self) -> bool {
        true
    }

    fn step(&mut self) -> Result<()> {
        (0..self.num_units()).try_for_each(|unit| self.step_unit(unit))
    }

    fn num_units(&self) -> usize {
        self.buckets.last().map_or(1, |bucket| bucket.unit + 1)
    }

    fn offload_states(&mut self, states: &OffloadStates) -> Result<()> {
        if self.replayed.is_some() {
            let what = format!("a step of {} is captured in a graph, which works on its states", self.name());
            return Err(ConfigError::new("offload_states", what, "leave the graph out").into());
        }
        self.take_changes()?;
        let (offloaded, pins) = (&mut self.offloaded, states.pin_memory);
        for slot in self.buckets.iter().flat_map(|bucket| &bucket.members) {
            for (index, state) in slot.state.iter().enumerate().filter(|(index, _)| !R::is_count(*index)) {
                let is_master = index == R::STATE.len();
                let kind = if is_master { OffloadState::HpParams } else { OffloadState::OptimStates };
                let state = state.iter().filter(|_| states.includes(kind));
                state.into_iter().try_for_each(|state| offloaded.offload(kind, state, pins))?;
            }
            let leaf = slot.param.leaf();
            let grad = leaf.grad();
            if states.includes(OffloadState::LpGrads) && grad.defined() && grad.device() != tch::Device::Cpu {
                self.grads_away.push((slot.param.clone(), grad.device()));
                move_grad(leaf, tch::Device::Cpu, pins)?;
            }
            if states.includes(OffloadState::LpParams) {
                offloaded.offload(OffloadState::LpParams, leaf, pins)?;
            }
        }
        Ok(())
    }

    fn reload_states(&mut self, states: &[OffloadState]) -> Result<()> {
        self.offloaded.reload(states)?;
        if !states.contains(&OffloadState::LpGrads) {
            return Ok(());
        }
        let mut grads = self.grads_away.drain(..);
        grads.try_for_each(|(param, device)| move_grad(param.leaf(), device, false))
    }

    fn step_unit(&mut self, unit: usize) -> Result<()> {
        self.reload_states(&OffloadState::ALL)?;
        let first = self.buckets.partition_point(|bucket| bucket.unit < unit);
        let end = self.buckets.partition_point(|bucket| bucket.unit <= unit);
        for index in first..end {
            let bucket = &mut self.buckets[index];
            bucket.take_changes()?;
            let group = &self.groups[bucket.group];
            let rate = match &self.replayed {
                Some(replayed) if ffi::is_recording() => replayed.rate(bucket.group, group),
                _ => Rate::of(group),
            };
            match step_bucket(&self.rule, group, rate, bucket) {
                Ok(takes_to_others) => self.memory += u64::from(takes_to_others),
                Err(error) => return Err(self.explain(index, error)),
            }
        }
        ffi::note_writes(); // weights may be parts of what the lists hold
        Ok(())
    }

    fn zero_grad(&mut self) -> Result<()> {
        self.show_updates(false)?;
        for bucket in &self.buckets {
            bucket.gradients.params().clear_grads()?;
        }
        Ok(())
    }

    fn prepare_replay(&mut self) -> Result<Option<u64>> {
        if self.buckets.iter().any(|bucket| bucket.has_masters && !bucket.keeps_masters) {
            return Ok(None); // each step makes tensors
        }
        self.take_changes()?; // a replay does not count as writing to a weight
        let replayed = match &mut self.replayed {
            Some(replayed) => replayed,
            none => none.insert(Replayed::of(&self.groups)),
        };
        Ok(Some(self.memory + replayed.refresh(&self.groups)?))
    }

    fn show_updates(&mut self, are_shown: bool) -> Result<()> {
        for index in 0..self.buckets.len() {
            let bucket = &mut self.buckets[index];
            let group = &self.groups[bucket.group];
            if !self.rule.limits_updates(group) {
                continue;
            }
            if are_shown {
                let Some(is_new) = find_gradients(&self.rule, group, bucket)? else { continue };
                self.memory += u64::from(is_new);
            }
            let Some(CachedLists { lists, .. }) = &mut bucket.cached else { continue };
            match are_shown {
                true => self.rule.show_updates(group, lists)?,
                false => self.rule.show_gradients(lists)?,
            }
        }
        Ok(())
    }

    fn grad_norm(&mut self, norm_type: f64) -> Result<Tensor> {
        self.show_updates(true)?;
        let norm = grad_norm(parameters(&self.groups), norm_type);
        self.show_updates(false)?;
        norm
    }

    fn clip(&mut self, clip: GradientClip) -> Result<Option<Tensor>> {
        self.show_updates(true)?;
        clip.apply(&self.groups)
    }

    fn param_groups(&self) -> &[ParamGroup] {
        &self.groups
    }

    fn param_groups_mut(&mut self) -> &mut [ParamGroup] {
        &mut self.groups
    }

    fn set_full_value(&mut self, fqn: &str, value: ParamValue<'_>, values: &Tensor) -> Result<()> {
        self.take_changes()?;
        Unsharded::of(self.name(), &self.groups, self.state_dict().tensors).set(fqn, value, values)?;
        self.with_masters_mut().try_for_each(Slot::note_weight)
    }

    fn master_weights(&mut self) -> Result<Vec<(String, Tensor)>> {
        self.take_changes()?;
        let _no_grad = tch::no_grad_guard();
        let copy = |slot: &Slot| Ok((slot.fqn.clone(), slot.weights().f_to_dtype(Kind::Float, false, true)?));
        self.with_masters().map(copy).collect()
    }

    fn set_master_weights(&mut self, values: &[(String, Tensor)]) -> Result<()> {
        self.reload_states(&OffloadState::ALL)?; // it makes those that are missing
        let _no_grad = tch::no_grad_guard();
        let values: HashMap<&str, &Tensor> =
            values.iter().map(|(fqn, values)| (fqn.as_str(), values)).collect();
        for slot in self.with_masters_mut() {
            let Some(values) = values.get(slot.fqn.as_str()) else { continue };
            slot.param.update(|weight| Ok(weight.shallow_clone().f_copy_(values)?))?;
            match slot.state.last_mut() {
                Some(Some(master)) => master.f_copy_(values)?,
                Some(none) => {
                    let mut master = slot.param.f_to_dtype(Kind::Float, false, true)?;
                    master.f_copy_(values)?;
                    *none = Some(master);
                }
                None => {}
            }
            slot.note_weight()?;
        }
        Ok(())
    }

    fn state_dict(&self) -> OptimizerState {
        let mut tensors = Vec::new();
        for slot in self.with_masters() {
            if let Err(error) = slot.take_changes() {
                tracing::warn!("what was written to {} is not in its master copy: {error}", slot.fqn);
            }
        }
        self.buckets.iter().for_each(|bucket| add_states::<R>(bucket, &mut tensors));
        OptimizerState { tensors, groups: self.groups.iter().map(ParamGroup::save).collect() }
    }

    fn unit_state(&self, unit: usize) -> Vec<(String, Tensor)> {
        let mut tensors = Vec::new();
        let of_unit = self.buckets.iter().filter(|bucket| bucket.unit == unit);
        of_unit.for_each(|bucket| add_states::<R>(bucket, &mut tensors));
        tensors
    }

    fn load_state_dict(&mut self, state: OptimizerState) -> Result<()> {
        self.load(state, false)
    }

    fn take_state_dict(&mut self, state: OptimizerState) -> Result<()> {
        self.load(state, true)
    }
}

impl<R: Rule> Engine<R> {
    /// Replaces state and hyper-parameters; with `takes` tensors that fit are not copied.
    fn load(&mut self, mut state: OptimizerState, takes: bool) -> Result<()> {
        self.reload_states(&OffloadState::ALL)?;
        self.without_unused_masters(&mut state);
        let mut problems = Vec::new();
        let saved = self.check_groups(&state.groups, &mut problems);
        let targets = self.check_tensors(&state, &saved, &mut problems);
        if !problems.is_empty() {
            problems.sort();
            return Err(CheckpointError::Mismatch {
                module: self.rule.name().to_owned(),
                problem: Problem::new(
                    first_of(&problems, 10),
                    "configure the optimizer and its param groups as when the state was saved",
                ),
            }
            .into());
        }
        let mut of_halves =
            targets.iter().filter(|(bucket, ..)| self.buckets[*bucket].keeps_masters).peekable();
        if of_halves.peek().is_some() && of_halves.all(|(.., index)| *index != R::STATE.len()) {
            tracing::info!(
                "the state has no float32 master weights: {} begins with the weights of 16 bits",
                self.rule.name()
            );
        }
        let mut loaded = Vec::with_capacity(targets.len());
        for ((bucket, member, index), (_, tensor)) in targets.into_iter().zip(&state.tensors) {
            let Bucket { members, has_masters, .. } = &self.buckets[bucket];
            let param = &members[member].param;
            let dtype = if *has_masters { Kind::Float } else { param.kind() };
            let fits = takes && !R::is_count(index) && tensor.is_contiguous() && param.is_contiguous();
            let fits = fits && (tensor.kind(), tensor.device()) == (dtype, param.device());
            let own = match fits {
                true => tensor.f_detach()?,
                false => copy_for(param, dtype, tensor, R::is_count(index))?,
            };
            loaded.push((bucket, member, index, own));
        }
        for bucket in &mut self.buckets {
            bucket.cached = None;
            bucket.members.iter_mut().for_each(|slot| slot.state.fill_with(|| None));
        }
        for (bucket, member, index, tensor) in loaded {
            self.buckets[bucket].members[member].state[index] = Some(tensor);
        }
        for (group, saved) in self.groups.iter_mut().zip(&saved) {
            group.load(saved);
        }
        self.with_masters_mut().try_for_each(Slot::note_weight)?;
        self.memory += 1;
        Ok(())
    }
}

/// A copy of `tensor` on the device of `param`: a float32 scalar for a count, else laid out as `param` in `dtype`.
fn copy_for(param: &Tensor, dtype: Kind, tensor: &Tensor, is_count: bool) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    let mut copy = if is_count {
        Tensor::f_zeros([0; 0], (Kind::Float, param.device()))?
    } else {
        param.f_to_dtype(dtype, false, true)?
    };
    copy.f_copy_(&if is_count { tensor.f_reshape([0; 0])? } else { tensor.shallow_clone() })?;
    Ok(copy)
}
