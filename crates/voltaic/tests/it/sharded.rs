//! A strategy of the tests that shards weights, gradients and optimizer states among ranks, and reshards weights while
//! they are not used: a run with it is the run without it, bit for bit.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use tempfile::TempDir;
use voltaic::callback::{
    EmaWeightAveragingConfig, ModelCheckpoint, ModelCheckpointConfig, StochasticWeightAveraging,
    WeightAveraging,
};
use voltaic::checkpoint::{Checkpoint, Shard, ShardSpec};
use voltaic::distributed::{ReduceOp, World};
use voltaic::error::Result;
use voltaic::ffi::{ReleasableStorage, clear_grads, set_grad};
use voltaic::nn::{Member, Module, ModuleExt, ModuleHooks, Parameter, Sharding};
use voltaic::optim::{
    ConfiguredOptimizer, GradientClip, Optimizer, OptimizerState, Optimizers, ParamGroup, clip_grad_norm,
    grad_norm,
};
use voltaic::strategy::{ShardedGrads, ShardedState, Strategy, Votes};
use voltaic::trainer::{GraphMode, TrainerBuilder};
use voltaic::{Kind, Tensor};

use crate::compare;
use crate::ddp::{FOLDER, Net, builder, folder_of_parent, loaders};
use crate::probe::{own_process, plays, text_of};

/// The shards of this rank, by the weight's id.
#[derive(Debug)]
struct Shards {
    world: World,
    held: Mutex<HashMap<u64, Held>>,
}

#[derive(Debug)]
struct Held {
    /// `[ceil(numel / ranks)]`, padded with zeros.
    shard: Parameter,
    storage: ReleasableStorage,
}

impl Shards {
    fn chunk(&self, numel: usize) -> i64 {
        numel.div_ceil(self.world.world_size) as i64
    }

    /// This rank's shard of a whole tensor.
    fn shard_of(&self, whole: &Tensor) -> Result<Tensor> {
        let chunk = self.chunk(whole.numel());
        let padding = chunk * self.world.world_size as i64 - whole.numel() as i64;
        let flat = whole.f_detach()?.f_reshape([-1_i64])?.f_constant_pad_nd([0, padding])?;
        Ok(flat.f_narrow(0, chunk * self.world.rank as i64, chunk)?.copy())
    }

    /// The whole tensor of this size, of which each rank has a shard.
    fn whole(&self, shard: &Tensor, size: &[i64]) -> Result<Tensor> {
        let shard = shard.f_detach()?;
        let all = match self.world.group().filter(|group| group.world_size() > 1) {
            Some(group) => group.all_gather(&shard)?.f_flatten(0, -1)?,
            None => shard,
        };
        Ok(all.f_narrow(0, 0, size.iter().product())?.f_view(size)?)
    }

    fn shard(&self, parameter: &Parameter) -> Parameter {
        self.held.lock().unwrap()[&parameter.id()].shard.clone()
    }
}

impl Sharding for Shards {
    fn unshard(&self, parameter: &Parameter) -> Result<()> {
        let whole = self.whole(self.shard(parameter).leaf(), &parameter.size())?;
        self.held.lock().unwrap().get_mut(&parameter.id()).unwrap().storage.refill(&whole)?;
        parameter.set_sharded(false)
    }

    fn reshard(&self, parameter: &Parameter, is_changed: bool) -> Result<()> {
        if parameter.is_sharded() {
            return Ok(());
        }
        if is_changed {
            let _no_grad = tch::no_grad_guard();
            self.shard(parameter).leaf().shallow_clone().f_copy_(&self.shard_of(parameter.leaf())?)?;
        }
        self.held.lock().unwrap().get_mut(&parameter.id()).unwrap().storage.release()?;
        parameter.set_sharded(true)
    }
}

/// Weights, gradients and optimizer states in shards.
#[derive(Debug)]
struct Sharded {
    world: World,
    votes: Votes,
    syncs: bool,
    shards: Option<Arc<Shards>>,
    parameters: Vec<(String, Parameter)>,
}

impl Sharded {
    fn build(world: World) -> Result<Box<dyn Strategy>> {
        let (votes, parameters) = (Votes::default(), Vec::new());
        Ok(Box::new(Self { world, votes, syncs: false, shards: None, parameters }))
    }

    fn reshard_all(&self) -> Result<()> {
        let Some(shards) = &self.shards else { return Ok(()) };
        self.parameters.iter().try_for_each(|(_, parameter)| shards.reshard(parameter, false))
    }
}

impl Strategy for Sharded {
    fn name(&self) -> &'static str {
        "sharded"
    }

    fn world(&self) -> &World {
        &self.world
    }

    fn prepare(&mut self, module: &dyn Module, _calls: &ModuleHooks) -> Result<()> {
        let shards = Arc::new(Shards { world: self.world.clone(), held: Mutex::default() });
        self.parameters = module.named_parameters();
        for (fqn, parameter) in &self.parameters {
            assert_eq!(parameter.fqn().as_deref(), Some(fqn.as_str()));
            let shard = Parameter::new(shards.shard_of(parameter.leaf())?);
            let storage = ReleasableStorage::of(parameter.leaf());
            shards.held.lock().unwrap().insert(parameter.id(), Held { shard, storage });
            parameter.attach_sharding(shards.clone())?;
        }
        self.shards = Some(shards);
        self.reshard_all()
    }

    fn optimizers(&mut self, asked: Optimizers, _module: &dyn Module) -> Result<Vec<ConfiguredOptimizer>> {
        let shards = self.shards.clone().unwrap();
        let own = self.parameters.iter().map(|(fqn, parameter)| (fqn.clone(), shards.shard(parameter)));
        let built = asked.build(&ShardedParams(own.collect()))?.into_iter();
        Ok(built
            .map(|built| ConfiguredOptimizer {
                optimizer: Box::new(ShardedOptimizer {
                    inner: built.optimizer,
                    shards: shards.clone(),
                    parameters: self.parameters.clone(),
                }),
                ..built
            })
            .collect())
    }

    fn sharded_state(&self) -> Option<&dyn ShardedState> {
        Some(self)
    }

    fn begin_forward(&mut self, _module: &dyn Module, _opens: bool) -> Result<()> {
        self.reshard_all()
    }

    fn begin_backward(&mut self, _loss: &Tensor, syncs: bool, votes: Votes) -> Result<()> {
        (self.votes, self.syncs) = (votes, syncs);
        self.parameters.iter().try_for_each(|(_, parameter)| parameter.try_tensor().map(drop))
    }

    fn end_backward(&mut self, done: Result<()>) -> Result<Votes> {
        done?;
        self.reshard_all()?;
        let Some(shards) = self.shards.as_ref().filter(|_| self.syncs) else { return Ok(Votes::default()) };
        let _no_grad = tch::no_grad_guard();
        for (_, parameter) in self.parameters.iter().filter(|(_, parameter)| parameter.grad().defined()) {
            // as DDP: each times 1 / ranks, then added
            let grad = parameter.grad().f_mul_scalar(1.0 / self.world.world_size as f64)?;
            if let Some(group) = self.world.group().filter(|group| group.world_size() > 1) {
                group.all_reduce(&grad, ReduceOp::Sum)?;
            }
            set_grad(shards.shard(parameter).leaf(), &shards.shard_of(&grad)?)?;
            clear_grads([parameter.leaf()])?;
        }
        self.agree(self.votes)
    }

    fn agree(&self, votes: Votes) -> Result<Votes> {
        let Some(group) = self.world.group().filter(|group| group.world_size() > 1) else { return Ok(votes) };
        let all = group.all_gather_object(&votes.numbers())?;
        Ok(Votes::from_numbers(std::array::from_fn(|index| all.iter().map(|votes| votes[index]).sum())))
    }

    fn finish(&mut self, _module: &dyn Module) -> Result<()> {
        for (_, parameter) in &self.parameters {
            parameter.try_tensor()?;
            parameter.detach_sharding()?;
        }
        Ok(())
    }

    fn teardown(&mut self) {
        self.shards = None;
        self.parameters.clear();
    }
}

impl Sharded {
    /// This rank's elements of a weight, without the padding.
    fn shard_spec(&self, fqn: &str) -> Option<(ShardSpec, Parameter)> {
        let (_, parameter) = self.parameters.iter().find(|(own, _)| own == fqn)?;
        let shards = self.shards.as_ref()?;
        let (size, chunk) = (parameter.size(), shards.chunk(parameter.numel()) as usize);
        let end = |rank: usize| (rank * chunk).min(parameter.numel());
        let range = end(self.world.rank)..end(self.world.rank + 1);
        Some((ShardSpec::flat(&size, range), shards.shard(parameter)))
    }

    fn named_shard(&self, fqn: &str, name: &str, values: &Tensor) -> Result<Option<Shard>> {
        let Some((spec, _)) = self.shard_spec(fqn) else { return Ok(None) };
        let values = values.f_detach()?.f_narrow(0, 0, spec.range.len() as i64)?;
        Ok(Some(Shard { name: name.to_owned(), spec, values }))
    }
}

impl ShardedState for Sharded {
    fn save_weights(&self) -> Result<Vec<Shard>> {
        let own = |(fqn, parameter): &(String, Parameter)| {
            let leaf = self.shards.as_ref().map(|shards| shards.shard(parameter));
            leaf.map_or(Ok(None), |leaf| self.named_shard(fqn, fqn, leaf.leaf()))
        };
        self.parameters.iter().filter_map(|pair| own(pair).transpose()).collect()
    }

    fn weight_shard(&self, fqn: &str) -> Option<ShardSpec> {
        self.shard_spec(fqn).map(|(shard, _)| shard)
    }

    fn load_weight(&self, fqn: &str, values: &Tensor) -> Result<()> {
        let Some((_, own)) = self.shard_spec(fqn) else { return Ok(()) };
        let _no_grad = tch::no_grad_guard();
        own.leaf().detach().f_narrow(0, 0, values.numel() as i64)?.f_copy_(values)?;
        Ok(())
    }

    fn state_shard(&self, fqn: &str) -> Option<ShardSpec> {
        self.weight_shard(fqn)
    }

    fn save_optimizer(
        &self,
        _index: usize,
        optimizer: &dyn Optimizer,
    ) -> Result<(OptimizerState, Vec<Shard>)> {
        let OptimizerState { tensors, groups } = optimizer.state_dict();
        let (mut numbers, mut shards) = (Vec::new(), Vec::new());
        for (name, tensor) in tensors {
            let fqn = name.split_once('.').unwrap().1;
            match tensor.dim() {
                1 => shards.extend(self.named_shard(fqn, &name, &tensor)?),
                _ if self.world.rank == 0 => numbers.push((name, tensor)),
                _ => {}
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
        for Shard { name, values, .. } in shards {
            let Some((_, own)) = self.shard_spec(name.split_once('.').unwrap().1) else { continue };
            let padding = own.numel() as i64 - values.numel() as i64;
            state.tensors.push((name, values.f_constant_pad_nd([0, padding])?));
        }
        optimizer.load_state_dict(state)
    }

    fn save_grads(&self, module: &dyn Module) -> Result<ShardedGrads> {
        Ok(ShardedGrads { own: self.grads(module)?, ..ShardedGrads::default() })
    }

    fn grad_shard(&self, _fqn: &str) -> Option<ShardSpec> {
        None
    }

    fn load_grad(&self, _fqn: &str, _values: &Tensor) -> Result<()> {
        Ok(())
    }
}

/// The shards as a module, so that optimizers are built over them.
struct ShardedParams(Vec<(String, Parameter)>);

impl Module for ShardedParams {
    fn members<'a>(&'a self, visit: &mut dyn FnMut(&str, Member<'a>)) {
        self.0.iter().for_each(|(fqn, shard)| visit(fqn, Member::Parameter(shard)));
    }

    fn children_mut<'a>(&'a mut self, _visit: &mut dyn FnMut(&str, &'a mut dyn Module)) {}
}

struct ShardedOptimizer {
    inner: Box<dyn Optimizer>,
    shards: Arc<Shards>,
    parameters: Vec<(String, Parameter)>,
}

impl ShardedOptimizer {
    /// Stand-ins for the weights with their whole gradients, and this rank's shards.
    fn whole_grads(&self) -> Result<Vec<(Parameter, Parameter)>> {
        let shards = self.parameters.iter().map(|(_, parameter)| (parameter, self.shards.shard(parameter)));
        let with_grad = shards.filter(|(_, shard)| shard.grad().defined());
        with_grad
            .map(|(parameter, shard)| {
                let grad = self.shards.whole(&shard.grad(), &parameter.size())?.copy();
                let stand_in = Parameter::new(grad.zeros_like());
                set_grad(stand_in.leaf(), &grad)?;
                Ok((stand_in, shard))
            })
            .collect()
    }
}

impl Optimizer for ShardedOptimizer {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn step(&mut self) -> Result<()> {
        self.inner.step()?;
        self.parameters.iter().try_for_each(|(_, parameter)| self.shards.reshard(parameter, false))
    }

    fn zero_grad(&mut self) -> Result<()> {
        clear_grads(self.parameters.iter().map(|(_, parameter)| parameter.leaf()))?;
        self.inner.zero_grad()
    }

    fn param_groups(&self) -> &[ParamGroup] {
        self.inner.param_groups()
    }

    fn param_groups_mut(&mut self) -> &mut [ParamGroup] {
        self.inner.param_groups_mut()
    }

    fn unscale(&mut self, inverse: f64) -> Result<bool> {
        let finite = Tensor::from(i64::from(self.inner.unscale(inverse)?));
        if let Some(group) = self.shards.world.group() {
            group.all_reduce(&finite, ReduceOp::Min)?;
        }
        Ok(finite.int64_value(&[]) == 1)
    }

    fn grad_norm(&mut self, norm_type: f64) -> Result<Tensor> {
        let whole = self.whole_grads()?;
        grad_norm(whole.iter().map(|(stand_in, _)| stand_in), norm_type)
    }

    fn clip(&mut self, clip: GradientClip) -> Result<Option<Tensor>> {
        let GradientClip::Norm(max_norm) = clip else { return self.inner.clip(clip) };
        let whole = self.whole_grads()?;
        let norm = clip_grad_norm(whole.iter().map(|(stand_in, _)| stand_in), max_norm)?;
        whole.iter().try_for_each(|(stand_in, shard)| -> Result<()> {
            Ok(set_grad(shard.leaf(), &self.shards.shard_of(&stand_in.grad())?)?)
        })?;
        Ok(Some(norm))
    }

    fn state_dict(&self) -> OptimizerState {
        self.inner.state_dict()
    }

    fn load_state_dict(&mut self, state: OptimizerState) -> Result<()> {
        self.inner.load_state_dict(state)
    }
}

/// The tensors of a checkpoint, by name.
fn tensors(checkpoint: &Checkpoint) -> Vec<(String, Tensor)> {
    let training = checkpoint.training.iter();
    let rest = training.flat_map(|training| training.optimizers.iter().flatten().chain(&training.callbacks));
    let all = checkpoint.weights.iter().filter(|(name, _)| name != "seen").chain(rest);
    let mut all: Vec<_> = all.map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

fn assert_same(folder: &Path, other: &Path, file: &str) {
    let load = |folder: &Path| tensors(&Checkpoint::load(folder.join(file)).unwrap());
    let (found, expected) = (load(folder), load(other));
    assert!(!expected.is_empty());
    compare::assert_same(file, &found, &expected);
}

/// Trains with averages, clipping, accumulation, validation and checkpoints; goes on from the middle; leaves all files.
fn run(folder: &Path, make: &dyn Fn(&Path) -> TrainerBuilder) {
    let average = || {
        let config = EmaWeightAveragingConfig { decay: 0.75, ..Default::default() };
        WeightAveraging::ema(config).unwrap()
    };
    let callbacks = |builder: TrainerBuilder| {
        let config = ModelCheckpointConfig {
            dirpath: Some(folder.join("saved")),
            filename: Some("{epoch}".to_owned()),
            save_top_k: -1,
            ..Default::default()
        };
        builder.callback(ModelCheckpoint::new(config).unwrap()).callback(average())
    };
    let make = || {
        callbacks(make(folder).enable_checkpointing(true))
            .gradient_clip_val(0.05)
            .accumulate_grad_batches(2_u64)
    };
    let mut trainer = make().build().unwrap();
    let mut net = Net::new();
    trainer.fit(&mut net, &mut loaders(None)).unwrap();
    assert!(net.parameters().iter().all(|parameter| !parameter.is_kept() && !parameter.is_sharded()));
    trainer.save_checkpoint(&mut net, &mut loaders(None), folder.join("end.ckpt"), None).unwrap();
    let train_loss = trainer.metric("train_loss_epoch").unwrap();
    let val_loss = trainer.validate(&mut net, &mut loaders(None)).unwrap();
    if trainer.is_global_zero() {
        println!("\nmetrics {val_loss:?} {train_loss:?}");
    }
    // from the middle
    let mut resumed = make().build().unwrap();
    let mut net = Net::new();
    resumed.ckpt_path(folder.join("saved").join("epoch=0.ckpt"));
    resumed.fit(&mut net, &mut loaders(None)).unwrap();
    resumed.save_checkpoint(&mut net, &mut loaders(None), folder.join("resumed.ckpt"), None).unwrap();
}

const FILES: [&str; 5] =
    ["end.ckpt", "resumed.ckpt", "saved/epoch=0.ckpt", "saved/epoch=1.ckpt", "saved/epoch=2.ckpt"];

#[test]
fn one_process_that_takes_weights_away_trains_the_same() {
    let (plain, sharded) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    run(plain.path(), &builder);
    run(sharded.path(), &|folder| builder(folder).strategy(Sharded::build));
    FILES.iter().for_each(|file| assert_same(sharded.path(), plain.path(), file));
    // the same state goes on
    assert_same_within(sharded.path(), "resumed.ckpt", "end.ckpt");
}

fn assert_same_within(folder: &Path, file: &str, other: &str) {
    let load = |file: &str| tensors(&Checkpoint::load(folder.join(file)).unwrap());
    compare::assert_same(file, &load(file), &load(other));
}

#[test]
fn two_ranks_with_parts_of_the_weights_are_ddp() {
    for part in ["ddp", "sharded"] {
        if plays(part) {
            let make = |folder: &Path| {
                let builder = builder(folder).devices(2);
                if part == "ddp" { builder.strategy("ddp") } else { builder.strategy(Sharded::build) }
            };
            return run(&folder_of_parent(), &make);
        }
    }
    if std::env::var_os(FOLDER).is_some() {
        return;
    }
    let folders = ["ddp", "sharded"].map(|part| {
        let folder = TempDir::new().unwrap();
        let mut command = own_process(part);
        let text = text_of(&command.env(FOLDER, folder.path()).output().unwrap());
        let metrics = text.lines().find(|line| line.starts_with("metrics")).unwrap().to_owned();
        (folder, metrics)
    });
    let [(ddp, expected), (sharded, found)] = &folders;
    assert_eq!(found, expected);
    FILES.iter().for_each(|file| assert_same(sharded.path(), ddp.path(), file));
}

#[test]
fn stochastic_averages_of_weights_that_are_away_are_the_same() {
    let train = |folder: &Path, builder: TrainerBuilder| {
        let swa = StochasticWeightAveraging::new(0.02).unwrap();
        let mut trainer = builder.callback(swa).build().unwrap();
        let mut net = Net::new();
        trainer.fit(&mut net, &mut loaders(None)).unwrap();
        trainer.save_checkpoint(&mut net, &mut loaders(None), folder.join("end.ckpt"), None).unwrap();
    };
    let (plain, sharded) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    train(plain.path(), builder(plain.path()));
    train(sharded.path(), builder(sharded.path()).strategy(Sharded::build));
    assert_same(sharded.path(), plain.path(), "end.ckpt");
}

#[test]
fn what_does_not_go_with_a_strategy_of_ones_own_is_refused() {
    let folder = TempDir::new().unwrap();
    assert_error!(
        builder(folder.path()).graph(GraphMode::Step).strategy(Sharded::build).build(),
        "trainer.graph: step, but the program gives a strategy of its own"
    );
    let trainer = builder(folder.path()).strategy(Sharded::build).build().unwrap();
    assert_eq!(trainer.strategy(), "sharded");
    // a name after the value counts, and a configuration replaces both
    let trainer = builder(folder.path()).strategy(Sharded::build).strategy("single_device").build().unwrap();
    assert_eq!(trainer.strategy(), "single_device");
    let net = Net::new();
    assert_eq!(net.parameters()[0].kind(), Kind::Float);
}
