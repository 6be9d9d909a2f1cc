//! A checkpoint of one file as the folder of one that ranks share.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use serde_json::Value;
use tch::Tensor;

use super::write::save_ranks;
use crate::checkpoint::checkpoint::{Checkpoint, RankState, Shard, TrainingState};
use crate::checkpoint::chunk::ShardSpec;
use crate::checkpoint::format::{cannot_hold, optimizer_name};
use crate::error::Result;

/// Writes a checkpoint as a folder, of which each of so many ranks has an equal shard of every parameter that is trained and of its
/// states.
///
/// # Errors
/// If it has no training state; if it has gradients or metrics of another number of ranks; if the folder cannot be written.
pub fn write_folder(checkpoint: &Checkpoint, path: &Path, ranks: usize) -> Result<()> {
    let module = &checkpoint.meta.module;
    let Some(training) = &checkpoint.training else {
        let remedy = "write a file: --to=safetensors, or --to=voltaic";
        return Err(cannot_hold(
            module,
            "it has no training state that ranks would shard".to_owned(),
            remedy,
        ));
    };
    if !(1..=1 << 16).contains(&ranks) {
        let what = format!("it cannot be sharded among {ranks} ranks");
        return Err(cannot_hold(module, what, "give the number of ranks with --partitions, at least 1"));
    }
    let (own, others) = local_states(training, ranks).ok_or_else(|| {
        let what = format!(
            "it has gradients or metrics of {} ranks within an epoch, which {ranks} cannot take over",
            training.ranks.len() + 1
        );
        cannot_hold(module, what, "give as many --partitions, or convert a checkpoint of the end of an epoch")
    })?;
    let trained = trained(&training.json);
    let mut all: Vec<Checkpoint> = Vec::with_capacity(ranks);
    for rank in 0..ranks {
        let json = training.json.clone();
        let optimizers = training.optimizers.iter().map(|_| Vec::new()).collect();
        let mut state = TrainingState { optimizers, json, ..TrainingState::default() };
        let RankState { grads, metrics, rng, fp8, .. } =
            shared(if rank == 0 { &own } else { &others[rank - 1] });
        (state.grads, state.metrics, state.rng, state.fp8) = (grads, metrics, rng, fp8);
        if rank > 0 {
            state.json["metrics"] = others[rank - 1].logged.clone();
        } else {
            state.callbacks = shared_list(&training.callbacks);
            state.module = shared_list(&training.module);
        }
        let meta = checkpoint.meta.clone();
        all.push(Checkpoint { training: Some(state), meta, ..Checkpoint::default() });
    }
    let mut firsts: HashMap<usize, &str> = HashMap::new();
    for (name, tensor) in &checkpoint.weights {
        match firsts.get(&(tensor.data_ptr() as usize)).filter(|_| tensor.numel() > 0) {
            Some(first) => all[0].tied.push((name.clone(), (*first).to_owned())),
            None if trained.contains(name.as_str()) => {
                firsts.insert(tensor.data_ptr() as usize, name);
                shard(&mut all, name.clone(), tensor)?;
            }
            None => all[0].weights.push((name.clone(), tensor.shallow_clone())),
        }
    }
    for (index, tensors) in training.optimizers.iter().enumerate() {
        for (name, tensor) in tensors {
            match tensor.dim() {
                0 => {
                    if let Some(state) = &mut all[0].training {
                        state.optimizers[index].push((name.clone(), tensor.shallow_clone()));
                    }
                }
                _ => shard(&mut all, optimizer_name(index, name), tensor)?,
            }
        }
    }
    save_ranks(&all, path)
}

/// Gives each rank its range of the flattened tensor.
fn shard(all: &mut [Checkpoint], name: String, tensor: &Tensor) -> Result<()> {
    let chunk = tensor.numel().div_ceil(all.len());
    for (rank, checkpoint) in all.iter_mut().enumerate() {
        let range = |at: usize| (at * chunk).min(tensor.numel());
        let spec = ShardSpec::flat(&tensor.size(), range(rank)..range(rank + 1));
        let values = spec.of(tensor)?;
        checkpoint.shards.push(Shard { name: name.clone(), spec, values });
    }
    Ok(())
}

/// Names of the parameters that optimizers have.
fn trained(json: &Value) -> HashSet<&str> {
    let optimizers = json["optimizers"].as_array().into_iter().flatten();
    let groups = optimizers.filter_map(|optimizer| optimizer[1].as_array()).flatten();
    let params = groups.filter_map(|group| group["params"].as_array()).flatten();
    params.filter_map(Value::as_str).collect()
}

/// The local states of rank 0 and of the others; those that there were none of are empty. `None` if there is something that only the
/// same ranks can go on with.
fn local_states(training: &TrainingState, ranks: usize) -> Option<(RankState, Vec<RankState>)> {
    let own = training.own().ok()?;
    let has_same = training.ranks.len() + 1 == ranks;
    let is_bound = |state: &RankState| !state.grads.is_empty() || !state.metrics.is_empty();
    if !has_same && (is_bound(&own) || training.ranks.iter().any(is_bound)) {
        return None;
    }
    let of_rank = |rank: usize| {
        let of_new_rank = || {
            let mut logged = own.logged.clone();
            logged["train"] = Value::Array(Vec::new()); // of an open epoch, which rank 0 counts
            RankState { logged, ..RankState::default() }
        };
        training.ranks.get(rank).map_or_else(of_new_rank, shared)
    };
    let others = (0..ranks - 1).map(of_rank).collect();
    Some((own, others))
}

fn shared(state: &RankState) -> RankState {
    let RankState { grads, metrics, rng, fp8, logged } = state;
    let [grads, metrics, rng, fp8] = [grads, metrics, rng, fp8].map(|tensors| shared_list(tensors));
    RankState { grads, metrics, rng, fp8, logged: logged.clone() }
}

fn shared_list(tensors: &[(String, Tensor)]) -> Vec<(String, Tensor)> {
    tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect()
}
