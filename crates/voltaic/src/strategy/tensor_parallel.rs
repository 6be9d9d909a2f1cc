//! Training with layers divided among ranks, around a strategy for the ranks that have the same slices.
//!
//! [`TensorParallelism`] divides the module before the inner strategy gets it, which then averages or shards this rank's slices. Ranks of
//! one group along `tp` get the same batches, so that what they all have stays the same; norms and overflows are put together over both
//! dimensions, and checkpoints name each element by its place in the whole tensor.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tch::{Kind, Tensor};

use super::inference::plan_of;
use super::peers::SentVotes;
use super::sharded::{ShardedGrads, ShardedState};
use super::strategy::Strategy;
use super::votes::Votes;
use crate::accelerator::rng;
use crate::checkpoint::{Shard, ShardSpec};
use crate::device::Device;
use crate::distributed::{ProcessGroup, ReduceOp, World, collective_scope};
use crate::error::{ConfigError, Result};
use crate::nn::parallel::{TensorShard, Values, has_dropout, is_even, make_whole, parallelize};
use crate::nn::{Module, ModuleExt, ModuleHooks, Parameter, StateEntry};
use crate::optim::{
    ConfiguredOptimizer, GradientClip, OffloadState, OffloadStates, Optimizer, OptimizerState, Optimizers,
    ParamGroup, ParamValue, clip_to_norm, local_norm,
};
use crate::precision::{LossScaler, Precision};
use crate::strategy::deepspeed::inference::{InferenceConfig, TensorParallel};

/// A strategy around another one, for layers that are divided.
#[derive(Debug)]
pub(crate) struct TensorParallelism {
    inner: Box<dyn Strategy>,
    /// Parameters of the module that have slices, by fqn.
    slices: BTreeMap<String, (Parameter, Arc<TensorShard>)>,
    device: Device,
    /// The backward pass in progress completes a window.
    syncs: bool,
}

impl TensorParallelism {
    /// Around a strategy whose mesh has ranks along `tp`.
    pub(crate) fn new(inner: Box<dyn Strategy>) -> Self {
        Self { inner, slices: BTreeMap::new(), device: Device::Cpu, syncs: false }
    }

    fn tp(&self) -> Option<&Arc<ProcessGroup>> {
        self.inner.world().mesh().tp.group()
    }

    fn is_first(&self) -> bool {
        self.inner.world().mesh().tp.rank == 0
    }

    fn shard(&self, fqn: &str) -> Option<&Arc<TensorShard>> {
        self.slices.get(fqn).map(|(_, shard)| shard)
    }

    /// Where elements of this rank's slice lie in the whole parameter.
    fn in_full(&self, fqn: &str, own: ShardSpec) -> ShardSpec {
        match self.shard(fqn) {
            Some(shard) => ShardSpec { range: own.range, ..shard.spec() },
            None => own,
        }
    }

    /// The same of shards, named `<kind>.<fqn>` if `has_kind`. What all ranks along `tp` have, the first of them saves.
    fn shards_in_full(&self, shards: Vec<Shard>, has_kind: bool) -> Result<Vec<Shard>> {
        let in_full = |Shard { name, spec, values }: Shard| {
            let fqn = if has_kind { name.split_once('.').map_or("", |(_, fqn)| fqn) } else { &name };
            if self.shard(fqn).is_none() && !self.is_first() {
                let values = values.f_narrow(0, 0, 0)?;
                return Ok(Shard { name, spec: ShardSpec { range: 0..0, ..spec }, values });
            }
            let spec = self.in_full(fqn, spec);
            Ok(Shard { name, spec, values })
        };
        shards.into_iter().map(in_full).collect()
    }

    /// All ranks along `tp` draw what the first of them would.
    fn draw_alike(&self) -> Result<()> {
        let Some(group) = self.tp() else { return Ok(()) };
        let _named = collective_scope("random states");
        let states = rng::states(self.device)?;
        for (_, state) in &states {
            group.broadcast(state, 0)?;
        }
        rng::set_states(&states)
    }

    /// Whether the votes of the ranks along `tp` are put together here: the inner strategy asks the ranks along `dp_shard` alone.
    fn agrees(&self) -> bool {
        self.inner.sharded_state().is_some()
    }

    fn with_all_along_tp(&self, votes: Votes) -> Result<Votes> {
        match self.tp().filter(|_| self.agrees()) {
            Some(group) => SentVotes::start(group, votes)?.receive(),
            None => Ok(votes),
        }
    }
}

impl Strategy for TensorParallelism {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn knows_mesh(&self) -> bool {
        self.world().mesh().pp.size == 1
    }

    fn world(&self) -> &World {
        self.inner.world()
    }

    fn timeout(&self) -> Option<Duration> {
        self.inner.timeout()
    }

    fn place(&mut self, module: &dyn Module, device: Device, dtype: Option<Kind>) -> Result<()> {
        self.device = device;
        if let Some(group) = self.tp() {
            let size = group.world_size();
            let config = InferenceConfig {
                tensor_parallel: TensorParallel { tp_grain_size: 1, ..TensorParallel::size(size as u64) },
                ..InferenceConfig::default()
            };
            parallelize(module, group, &plan_of(module, &config, size)?, Values::OfRankZero)?;
        }
        if has_dropout(module) && !is_even(module) {
            let what = "ranks have different numbers of features, and layers drop some of them at random: the ranks would not \
                        draw the same numbers for what they all have";
            let remedy = "use a number of ranks that divides heads and features, or dropout=0";
            return Err(ConfigError::new("tensor_parallel", what, remedy).into());
        }
        self.inner.place(module, device, dtype)
    }

    fn prepare(&mut self, module: &dyn Module, calls: &ModuleHooks) -> Result<()> {
        let sliced = |(fqn, parameter): (String, Parameter)| {
            let shard = parameter.tensor_shard()?;
            Some((fqn, (parameter, shard)))
        };
        self.slices = module.named_parameters().into_iter().filter_map(sliced).collect();
        self.inner.prepare(module, calls)
    }

    fn optimizers(&mut self, asked: Optimizers, module: &dyn Module) -> Result<Vec<ConfiguredOptimizer>> {
        if let Some(name) = asked.looks_at_whole_parameters().next() {
            let what = format!("{name} with layers divided among ranks: it looks at whole parameters");
            return Err(ConfigError::new("configure_optimizers", what, "use AdamW, Adam or SGD").into());
        }
        let is_first = self.is_first();
        let shards_states = self.inner.sharded_state().is_some();
        let built = self.inner.optimizers(asked, module)?;
        let world = self.inner.world();
        let (tp, all) = (world.mesh().tp.group().cloned(), world.group().cloned());
        let (Some(tp), Some(all)) = (tp, all) else { return Ok(built) };
        let wrap = |built: ConfiguredOptimizer| {
            let norms = if shards_states { all.clone() } else { tp.clone() };
            let shards = self.slices.iter().map(|(fqn, (_, shard))| (fqn.clone(), shard.clone())).collect();
            let (inner, tp) = (built.optimizer, tp.clone());
            let optimizer = Box::new(SlicedOptimizer { inner, tp, norms, shards, is_first });
            ConfiguredOptimizer { optimizer, ..built }
        };
        Ok(built.into_iter().map(wrap).collect())
    }

    fn allowed_differences(&self) -> Vec<String> {
        self.inner.allowed_differences()
    }

    fn sharded_state(&self) -> Option<&dyn ShardedState> {
        Some(self)
    }

    fn begin_forward(&mut self, module: &dyn Module, opens: bool) -> Result<()> {
        if opens {
            self.draw_alike()?;
        }
        self.inner.begin_forward(module, opens)
    }

    fn begin_evaluation(&mut self, module: &dyn Module, num_batches: &[Vec<usize>]) -> Result<()> {
        self.inner.begin_evaluation(module, num_batches)
    }

    fn begin_backward(&mut self, loss: &Tensor, syncs: bool, votes: Votes) -> Result<()> {
        self.syncs = syncs;
        self.inner.begin_backward(loss, syncs, votes)
    }

    fn end_backward(&mut self, done: Result<()>) -> Result<Votes> {
        let votes = self.inner.end_backward(done)?;
        if self.syncs { self.with_all_along_tp(votes) } else { Ok(votes) }
    }

    fn without_loss(&mut self, syncs: bool, votes: Votes) -> Result<Votes> {
        let votes = self.inner.without_loss(syncs, votes)?;
        if syncs { self.with_all_along_tp(votes) } else { Ok(votes) }
    }

    fn check_averaged(&self) -> Result<()> {
        self.inner.check_averaged()
    }

    fn grads(&self, module: &dyn Module) -> Result<Vec<(String, Tensor)>> {
        self.inner.grads(module)
    }

    fn drop_grads(&mut self, module: &dyn Module) -> Result<()> {
        self.inner.drop_grads(module)
    }

    fn set_grads(&mut self, module: &dyn Module, grads: &[(String, Tensor)]) -> Result<()> {
        self.inner.set_grads(module, grads)
    }

    fn loss_scaler(&self, precision: Precision) -> Option<LossScaler> {
        self.inner.loss_scaler(precision)
    }

    fn agree(&self, votes: Votes) -> Result<Votes> {
        self.with_all_along_tp(self.inner.agree(votes)?)
    }

    fn finish(&mut self, module: &dyn Module) -> Result<()> {
        self.inner.finish(module)
    }

    fn keeps(&self, module: &dyn Module) -> bool {
        let is_sliced = |(_, parameter): &(String, Parameter)| parameter.tensor_shard().is_some();
        self.inner.keeps(module) || module.named_parameters().iter().any(is_sliced)
    }

    /// Makes the layers whole, too.
    fn gather_weights(&mut self, module: &dyn Module) -> Result<()> {
        self.inner.gather_weights(module)?;
        self.slices.clear();
        make_whole(module)
    }

    fn excludes_frozen_parameters(&self) -> bool {
        self.inner.excludes_frozen_parameters()
    }

    fn teardown(&mut self) {
        self.inner.teardown();
    }
}

/// Of a strategy that shards states itself, its shards; else this rank's slices, which the first of the ranks with the same ones saves.
impl ShardedState for TensorParallelism {
    fn save_weights(&self) -> Result<Vec<Shard>> {
        if let Some(inner) = self.inner.sharded_state() {
            return self.shards_in_full(inner.save_weights()?, false);
        }
        let own = |(fqn, (parameter, shard)): (&String, &(Parameter, Arc<TensorShard>))| {
            let values = parameter.lasting_own()?.f_reshape([-1_i64])?;
            self.own_shard(fqn.clone(), shard, values)
        };
        self.slices.iter().map(own).collect()
    }

    fn weight_shard(&self, fqn: &str) -> Option<ShardSpec> {
        let of_inner = self.inner.sharded_state().and_then(|inner| inner.weight_shard(fqn));
        match of_inner {
            Some(own) => Some(self.in_full(fqn, own)),
            None => self.shard(fqn).map(|shard| shard.spec()),
        }
    }

    fn load_weight(&self, fqn: &str, values: &Tensor) -> Result<()> {
        if let Some(inner) = self.inner.sharded_state()
            && inner.weight_shard(fqn).is_some()
        {
            return inner.load_weight(fqn, values);
        }
        let Some((parameter, shard)) = self.slices.get(fqn) else { return Ok(()) };
        StateEntry::fill_own(parameter, &values.f_view(shard.local_shape().as_slice())?)
    }

    fn state_shard(&self, fqn: &str) -> Option<ShardSpec> {
        match self.inner.sharded_state() {
            Some(inner) => inner.state_shard(fqn).map(|own| self.in_full(fqn, own)),
            None => self.shard(fqn).map(|shard| shard.spec()),
        }
    }

    fn save_optimizer(
        &self,
        index: usize,
        optimizer: &dyn Optimizer,
    ) -> Result<(OptimizerState, Vec<Shard>)> {
        if let Some(inner) = self.inner.sharded_state() {
            let (mut state, shards) = inner.save_optimizer(index, optimizer)?;
            if !self.is_first() {
                state.tensors.clear(); // numbers, which the first rank has, too
            }
            return Ok((state, self.shards_in_full(shards, true)?));
        }
        let OptimizerState { tensors, groups } = optimizer.state_dict();
        let (mut numbers, mut shards) = (Vec::new(), Vec::new());
        for (name, tensor) in tensors {
            let shard = name.split_once('.').and_then(|(_, fqn)| self.shard(fqn));
            match shard.filter(|shard| shard.local_shape() == tensor.size()) {
                Some(shard) => shards.push(self.own_shard(name, shard, tensor.f_reshape([-1_i64])?)?),
                None if self.inner.world().is_global_zero() => numbers.push((name, tensor)),
                None => {}
            }
        }
        Ok((OptimizerState { tensors: numbers, groups }, shards))
    }

    fn load_optimizer(
        &self,
        optimizer: &mut dyn Optimizer,
        mut state: OptimizerState,
        shards: Vec<Shard>,
    ) -> Result<()> {
        if let Some(inner) = self.inner.sharded_state() {
            return inner.load_optimizer(optimizer, state, shards);
        }
        for Shard { name, values, .. } in shards {
            let shape =
                name.split_once('.').and_then(|(_, fqn)| self.shard(fqn)).map(|shard| shard.local_shape());
            let values = match shape {
                Some(shape) => values.f_view(shape.as_slice())?,
                None => values,
            };
            state.tensors.push((name, values));
        }
        optimizer.load_state_dict(state)
    }

    fn save_grads(&self, module: &dyn Module) -> Result<ShardedGrads> {
        match self.inner.sharded_state() {
            Some(inner) => {
                let ShardedGrads { own, shards, had_grad } = inner.save_grads(module)?;
                Ok(ShardedGrads { own, shards: self.shards_in_full(shards, false)?, had_grad })
            }
            None => Ok(ShardedGrads { own: self.inner.grads(module)?, ..ShardedGrads::default() }),
        }
    }

    fn grad_shard(&self, fqn: &str) -> Option<ShardSpec> {
        self.inner.sharded_state()?.grad_shard(fqn).map(|own| self.in_full(fqn, own))
    }

    fn load_grad(&self, fqn: &str, values: &Tensor) -> Result<()> {
        self.inner.sharded_state().map_or(Ok(()), |inner| inner.load_grad(fqn, values))
    }
}

impl TensorParallelism {
    /// This rank's slice as its shard, without elements on ranks that have the same slice as another one before them.
    fn own_shard(&self, name: String, shard: &TensorShard, values: Tensor) -> Result<Shard> {
        let spec = shard.spec();
        if self.inner.world().mesh().dp.rank == 0 {
            return Ok(Shard { name, spec, values });
        }
        let values = values.f_narrow(0, 0, 0)?;
        Ok(Shard { name, spec: ShardSpec { range: 0..0, ..spec }, values })
    }
}

/// An optimizer over slices: norms and overflows are those of all ranks, whole values those of whole parameters.
struct SlicedOptimizer {
    inner: Box<dyn Optimizer>,
    tp: Arc<ProcessGroup>,
    /// The ranks that have gradients of which norms are put together, each element on one of them.
    norms: Arc<ProcessGroup>,
    /// Slices of parameters, by fqn.
    shards: BTreeMap<String, Arc<TensorShard>>,
    /// Counts what all ranks along `tp` have.
    is_first: bool,
}

impl SlicedOptimizer {
    /// The norm of what is in the place of gradients.
    fn norm(&self, norm_type: f64) -> Result<Tensor> {
        let params = self.inner.param_groups().iter().flat_map(ParamGroup::params);
        let counts = |fqn: &str| self.is_first || self.shards.contains_key(fqn);
        let leaves: Vec<&Tensor> =
            params.filter(|(fqn, _)| counts(fqn)).map(|(_, parameter)| parameter.leaf()).collect();
        // a rank without leaves to count has a norm on the host, in float32
        let mut all = self.inner.param_groups().iter().flat_map(ParamGroup::params);
        let wide = all.any(|(_, parameter)| parameter.leaf().kind() == Kind::Double);
        let kind = if wide { Kind::Double } else { Kind::Float };
        let own = local_norm(leaves, norm_type)?.f_to_device(tch::Device::Cpu)?.f_to_kind(kind)?; // sync point
        let _named = collective_scope("norms");
        let all = self.norms.all_gather(&own.f_reshape([1_i64])?)?.f_view([-1_i64])?;
        let dim: Option<&[i64]> = None;
        Ok(all.f_linalg_norm(norm_type, dim, false, None)?)
    }
}

impl Optimizer for SlicedOptimizer {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn step(&mut self) -> Result<()> {
        self.inner.step()
    }

    fn zero_grad(&mut self) -> Result<()> {
        self.inner.zero_grad()
    }

    fn param_groups(&self) -> &[ParamGroup] {
        self.inner.param_groups()
    }

    fn param_groups_mut(&mut self) -> &mut [ParamGroup] {
        self.inner.param_groups_mut()
    }

    fn takes_narrow_grads(&self) -> bool {
        self.inner.takes_narrow_grads()
    }

    fn offload_states(&mut self, states: &OffloadStates) -> Result<()> {
        self.inner.offload_states(states)
    }

    fn reload_states(&mut self, states: &[OffloadState]) -> Result<()> {
        self.inner.reload_states(states)
    }

    /// # Collective
    /// All ranks must call it.
    fn unscale(&mut self, inverse: f64) -> Result<bool> {
        let is_finite = self.inner.unscale(inverse)?;
        let _named = collective_scope("overflow");
        let num_failed = Tensor::f_from_slice(&[f32::from(u8::from(!is_finite))])?;
        self.tp.all_reduce(&num_failed, ReduceOp::Sum)?;
        Ok(num_failed.f_double_value(&[0])? == 0.0)
    }

    /// # Collective
    /// All ranks must call it.
    fn grad_norm(&mut self, norm_type: f64) -> Result<Tensor> {
        if norm_type == 0.0 {
            let what = "0, which counts tensors, but ranks have slices of them";
            return Err(ConfigError::new("norm_type", what, "use another norm, such as 2").into());
        }
        self.inner.show_updates(true)?;
        let norm = self.norm(norm_type);
        self.inner.show_updates(false)?;
        norm
    }

    fn show_updates(&mut self, are_shown: bool) -> Result<()> {
        self.inner.show_updates(are_shown)
    }

    /// # Collective
    /// All ranks must call it.
    fn clip(&mut self, clip: GradientClip) -> Result<Option<Tensor>> {
        let GradientClip::Norm(max_norm) = clip else { return self.inner.clip(clip) };
        self.inner.show_updates(true)?;
        let norm = self.norm(2.0)?;
        let params = self.inner.param_groups().iter().flat_map(ParamGroup::params);
        clip_to_norm(params.map(|(_, parameter)| parameter.leaf()), &norm, max_norm)?;
        Ok(Some(norm))
    }

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
        self.inner.master_weights()
    }

    fn set_master_weights(&mut self, values: &[(String, Tensor)]) -> Result<()> {
        self.inner.set_master_weights(values)
    }

    /// # Collective
    /// All ranks must call it.
    fn full_value(&self, fqn: &str, value: ParamValue<'_>) -> Result<Option<Tensor>> {
        let own = self.inner.full_value(fqn, value)?;
        match (self.shards.get(fqn), own) {
            (Some(shard), Some(own)) if own.size() == shard.local_shape() => Ok(Some(shard.whole(&own)?)),
            (_, own) => Ok(own),
        }
    }

    fn set_full_value(&mut self, fqn: &str, value: ParamValue<'_>, values: &Tensor) -> Result<()> {
        match self.shards.get(fqn).filter(|shard| shard.shape() == values.size()) {
            Some(shard) => {
                let own = shard.slice(values)?;
                self.inner.set_full_value(fqn, value, &own)
            }
            None => self.inner.set_full_value(fqn, value, values),
        }
    }

    fn local_value(&self, fqn: &str, value: ParamValue<'_>) -> Result<Option<Tensor>> {
        self.inner.local_value(fqn, value)
    }

    fn set_local_value(&mut self, fqn: &str, value: ParamValue<'_>, values: &Tensor) -> Result<()> {
        self.inner.set_local_value(fqn, value, values)
    }
}
