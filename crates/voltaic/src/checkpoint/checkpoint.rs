//! What a checkpoint holds.

use std::collections::HashSet;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::chunk::ShardSpec;
use crate::error::{ConfigError, Result};

/// Version of the file layout; a file of a later version is refused. Version 2 added the checksum.
pub const FORMAT_VERSION: u32 = 2;

/// Everything a run needs to resume where it stopped.
#[derive(Debug, Default)]
pub struct Checkpoint {
    /// The module's state dict.
    pub weights: Vec<(String, Tensor)>,
    /// All but the weights; `None` if only the weights were saved.
    pub training: Option<TrainingState>,
    /// Facts about the run that do not depend on the kind of checkpoint.
    pub meta: CheckpointMeta,
    /// What this rank has of tensors that are sharded among ranks, which are in none of the other lists; empty if none is.
    pub shards: Vec<Shard>,
    /// Other names of weights in `shards` that are tied, each with the name that they have there.
    pub tied: Vec<(String, String)>,
}

/// What one rank has of a tensor that is sharded among ranks.
#[derive(Debug)]
pub struct Shard {
    /// The name that the tensor has in a file, such as `conv.weight` or `voltaic:optimizer.0.exp_avg.conv.weight`.
    pub name: String,
    /// Where the elements lie in the unsharded tensor.
    pub spec: ShardSpec,
    /// The elements, in row-major order: `[spec.range.len()]`, perhaps none.
    pub values: Tensor,
}

/// Facts about the run that wrote a checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointMeta {
    /// Layout of the file.
    pub format_version: u32,
    /// voltaic's version.
    pub voltaic_version: String,
    /// The epoch in progress, from 0.
    pub epoch: u64,
    /// Optimizer steps done.
    pub global_step: u64,
    /// Type of the module.
    pub module: String,
    /// The values that made the module.
    pub hyper_parameters: serde_json::Value,
    /// Names of frozen parameters that are left out, if some are.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub frozen: Vec<String>,
}

/// State of the training loop.
#[derive(Debug, Default)]
pub struct TrainingState {
    /// Tensors of each optimizer, by name.
    pub optimizers: Vec<Vec<(String, Tensor)>>,
    /// Gradients of an accumulation window that was not complete, by fqn.
    pub grads: Vec<(String, Tensor)>,
    /// Tensors that callbacks keep, by name.
    pub callbacks: Vec<(String, Tensor)>,
    /// Tensors that the module has given in `on_save_checkpoint`, by name.
    pub module: Vec<(String, Tensor)>,
    /// Scales and histories of layers that compute in float8, by fqn and name.
    pub fp8: Vec<(String, Tensor)>,
    /// What the module's metrics have accumulated in an epoch that is not over, by fqn and part.
    pub metrics: Vec<(String, Tensor)>,
    /// States of random number generators, by device name.
    pub rng: Vec<(String, Tensor)>,
    /// Everything else, as JSON: loop position, groups, schedules, callbacks, metrics.
    pub json: serde_json::Value,
    /// The local state of ranks 1, 2, ...; empty if there was one rank.
    pub ranks: Vec<RankState>,
    /// Parameters that have had a gradient, of those whose gradients are among the shards of the checkpoint.
    pub had_grad: Vec<String>,
}

/// The local state of a rank other than 0. Rank 0's is in [`TrainingState`].
#[derive(Debug, Default)]
pub struct RankState {
    /// Its gradients of an accumulation window that was not complete, by fqn.
    pub grads: Vec<(String, Tensor)>,
    /// What its metrics had accumulated in an epoch that was not over, by fqn and part.
    pub metrics: Vec<(String, Tensor)>,
    /// States of its random number generators, by device name.
    pub rng: Vec<(String, Tensor)>,
    /// Scales and histories of its layers that compute in float8, by fqn and name.
    pub fp8: Vec<(String, Tensor)>,
    /// The values that it logged in an epoch that was not over.
    pub logged: serde_json::Value,
}

/// The checkpoints a callback has saved.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CheckpointPaths {
    /// The best by the monitored metric, else the newest.
    pub best: Option<PathBuf>,
    /// The newest.
    pub last: Option<PathBuf>,
    /// The folder they go to, if it is known before the run.
    pub folder: Option<PathBuf>,
}

impl Checkpoint {
    /// Tensors that a callback keeps under names with this prefix, by the rest of the name; they are shared.
    pub fn callback_tensors(&self, prefix: &str) -> Vec<(String, Tensor)> {
        let saved = self.training.iter().flat_map(|training| &training.callbacks);
        saved
            .filter_map(|(name, tensor)| {
                Some((name.strip_prefix(prefix)?.to_owned(), tensor.shallow_clone()))
            })
            .collect()
    }

    /// Renames weights by what their names begin with: `(from, to)`, of several the first that fits. `key` is what asked for it.
    ///
    /// # Errors
    /// If no name begins with one of them, or two weights would have one name.
    pub(crate) fn rename(&mut self, rules: &[(String, String)], key: &str) -> Result<(), ConfigError> {
        if rules.is_empty() {
            return Ok(());
        }
        let refuse = |what: String, remedy: &'static str| Err(ConfigError::new(key, what, remedy));
        let mut is_used = vec![false; rules.len()];
        let mut renamed = |name: &mut String| {
            let found = rules.iter().zip(&mut is_used).find(|((from, _), _)| name.starts_with(from));
            if let Some(((from, to), is_used)) = found {
                *is_used = true;
                name.replace_range(..from.len(), to);
            }
        };
        self.weights.iter_mut().for_each(|(name, _)| renamed(name));
        self.meta.frozen.iter_mut().for_each(&mut renamed);
        if let Some(((from, to), _)) = rules.iter().zip(is_used).find(|(_, is_used)| !is_used) {
            return refuse(
                format!("no name that is left for {from}={to} begins with {from}"),
                "leave it out",
            );
        }
        let mut names: Vec<&str> = self.weights.iter().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        match names.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => {
                refuse(format!("two weights would be {}", pair[0]), "rename one of them to another name")
            }
            None => Ok(()),
        }
    }

    /// Leaves out weights with these names, of parameters that are frozen.
    pub(crate) fn leave_out(&mut self, frozen: Vec<String>) {
        self.keep(&|name| !frozen.iter().any(|frozen| frozen == name));
        self.meta.frozen = frozen;
    }

    /// Leaves out weights whose names do not pass.
    pub(crate) fn keep(&mut self, stays: &dyn Fn(&str) -> bool) {
        self.weights.retain(|(name, _)| stays(name));
        self.shards.retain(|shard| stays(&shard.name));
        self.tied.retain(|(alias, _)| stays(alias));
    }

    /// The checkpoint with all its tensors on the host; those that are there are shared.
    ///
    /// # Errors
    /// If a tensor cannot be copied.
    pub fn to_host(&self) -> Result<Self> {
        self.with_tensors(|tensor| Ok(tensor.f_to_device(tch::Device::Cpu)?))
    }

    /// A copy on the host that shares no memory with the run.
    ///
    /// # Errors
    /// If memory of the host runs out.
    pub fn snapshot(&self) -> Result<Self> {
        self.with_tensors(copied)
    }

    fn with_tensors(&self, convert: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let training = self.training.as_ref().map(|training| training.with_tensors(&convert));
        let weights = converted(&self.weights, &convert)?;
        let shards = converted_shards(&self.shards, &convert)?;
        let (meta, tied) = (self.meta.clone(), self.tied.clone());
        Ok(Self { weights, training: training.transpose()?, meta, shards, tied })
    }
}

impl TrainingState {
    /// The same without tensors, with room for those of optimizers.
    pub(super) fn without_tensors(&self) -> Self {
        let optimizers = self.optimizers.iter().map(|_| Vec::new()).collect();
        Self { optimizers, json: self.json.clone(), ..Self::default() }
    }

    /// The local state of rank 0, or of another rank that saves its own shards; tensors are shared.
    pub(super) fn own(&self) -> Result<RankState> {
        let shared = |tensors: &[(String, Tensor)]| converted(tensors, &|tensor| Ok(tensor.shallow_clone()));
        Ok(RankState {
            grads: shared(&self.grads)?,
            metrics: shared(&self.metrics)?,
            rng: shared(&self.rng)?,
            fp8: shared(&self.fp8)?,
            logged: self.json["metrics"].clone(),
        })
    }

    /// Adds the local state of each of so many ranks. Gradients of this checkpoint are the mean of all ranks so far: each rank starts
    /// from them if any rank had a gradient.
    pub(super) fn add_ranks(&mut self, ranks: usize, own: impl Fn(usize) -> Result<RankState>) -> Result<()> {
        let had: HashSet<&String> = self.had_grad.iter().collect();
        let shared = std::mem::take(&mut self.grads).into_iter().filter(|(fqn, _)| had.contains(fqn));
        let shared: Vec<(String, Tensor)> = shared.collect();
        let own = |rank: usize| {
            let mut state = own(rank)?;
            state.grads.extend(shared.iter().map(|(fqn, grad)| (fqn.clone(), grad.shallow_clone())));
            Ok::<_, crate::error::Error>(state)
        };
        let RankState { grads, metrics, rng, .. } = own(0)?;
        self.ranks = (1..ranks).map(own).collect::<Result<_>>()?;
        (self.grads, self.metrics, self.rng) = (grads, metrics, rng);
        Ok(())
    }

    /// The same with all tensors on the host; those that are there are shared.
    pub(crate) fn to_host(&self) -> Result<Self> {
        self.with_tensors(&|tensor| Ok(tensor.f_to_device(tch::Device::Cpu)?))
    }

    /// The same on the host when a fit is over: what the optimizers leave behind is shared, what the module may still change
    /// is not.
    pub(crate) fn of_finished_fit(&self) -> Result<Self> {
        let on_host = self.to_host()?;
        let (grads, metrics) = (converted(&self.grads, &copied)?, converted(&self.metrics, &copied)?);
        Ok(Self { grads, metrics, ..on_host })
    }

    fn with_tensors(&self, convert: &dyn Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let of_rank = |rank: &RankState| {
            Ok(RankState {
                grads: converted(&rank.grads, convert)?,
                metrics: converted(&rank.metrics, convert)?,
                rng: converted(&rank.rng, convert)?,
                fp8: converted(&rank.fp8, convert)?,
                logged: rank.logged.clone(),
            })
        };
        let optimizers = self.optimizers.iter().map(|tensors| converted(tensors, convert));
        Ok(Self {
            optimizers: optimizers.collect::<Result<_>>()?,
            grads: converted(&self.grads, convert)?,
            callbacks: converted(&self.callbacks, convert)?,
            module: converted(&self.module, convert)?,
            fp8: converted(&self.fp8, convert)?,
            metrics: converted(&self.metrics, convert)?,
            rng: converted(&self.rng, convert)?,
            json: self.json.clone(),
            ranks: self.ranks.iter().map(of_rank).collect::<Result<_>>()?,
            had_grad: self.had_grad.clone(),
        })
    }
}

/// A copy on the host.
fn copied(tensor: &Tensor) -> Result<Tensor> {
    match tensor.device() {
        tch::Device::Cpu => {
            let mut copy = tensor.f_empty_like()?;
            copy.f_copy_(tensor)?;
            Ok(copy)
        }
        _ => Ok(tensor.f_to_device(tch::Device::Cpu)?),
    }
}

fn converted(
    tensors: &[(String, Tensor)],
    convert: &dyn Fn(&Tensor) -> Result<Tensor>,
) -> Result<Vec<(String, Tensor)>> {
    tensors.iter().map(|(name, tensor)| Ok((name.clone(), convert(tensor)?))).collect()
}

/// The shards on the host; those that are there are shared.
pub(crate) fn shards_to_host(shards: &[Shard]) -> Result<Vec<Shard>> {
    converted_shards(shards, &|tensor| Ok(tensor.f_to_device(tch::Device::Cpu)?))
}

fn converted_shards(shards: &[Shard], convert: &dyn Fn(&Tensor) -> Result<Tensor>) -> Result<Vec<Shard>> {
    let convert = |shard: &Shard| {
        let (name, spec) = (shard.name.clone(), shard.spec.clone());
        Ok(Shard { name, spec, values: convert(&shard.values)? })
    };
    shards.iter().map(convert).collect()
}
