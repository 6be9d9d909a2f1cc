//! Weights at the precision that the optimizer has them in, for callbacks that put others in their place for a while.

use std::collections::HashMap;

use tch::{Kind, Tensor};

use crate::checkpoint::{Checkpoint, MASTER, Shard, optimizer_name, parameter_of};
use crate::error::Result;
use crate::module::HookContext;

/// Puts master weights in the place of the 16-bit weights of a state dict. Names of one tensor get the same. What is of 16 bits
/// and has no master is in float32, too: a frozen weight may get its master later.
pub(super) fn with_masters(
    ctx: &mut HookContext,
    state: Vec<(String, Tensor)>,
) -> Result<Vec<(String, Tensor)>> {
    let masters: HashMap<String, Tensor> = ctx.master_weights()?.into_iter().collect();
    if masters.is_empty() {
        return Ok(state);
    }
    let address = |tensor: &Tensor| (tensor.data_ptr() as usize, tensor.numel());
    let named = state.iter().filter_map(|(fqn, weight)| Some((address(weight), masters.get(fqn)?)));
    let by_address: HashMap<(usize, usize), &Tensor> =
        named.filter(|((address, numel), _)| *address != 0 && *numel > 0).collect();
    let of = |(fqn, weight): (String, Tensor)| {
        let master = masters.get(&fqn).or_else(|| by_address.get(&address(&weight)).copied());
        let value = match master {
            Some(master) => master.shallow_clone(),
            None if matches!(weight.kind(), Kind::BFloat16 | Kind::Half) => weight.f_to_kind(Kind::Float)?,
            None => weight,
        };
        Ok((fqn, value))
    };
    state.into_iter().map(of).collect()
}

/// Master weights of a checkpoint: whole tensors by fqn, and this rank's shards, called by their fqn.
#[derive(Default)]
pub(super) struct Masters {
    pub whole: Vec<(String, Tensor)>,
    pub shards: Vec<Shard>,
}

/// Puts `weights` in the place of the master weights of a checkpoint, so that a resumed run trains from them. Returns what was
/// there.
pub(super) fn exchange_masters(checkpoint: &mut Checkpoint, weights: &[(String, Tensor)]) -> Result<Masters> {
    let by_fqn: HashMap<&str, &Tensor> = weights.iter().map(|(fqn, weight)| (fqn.as_str(), weight)).collect();
    let mut there = Masters::default();
    let Some(training) = &mut checkpoint.training else { return Ok(there) };
    for (name, master) in training.optimizers.iter_mut().flatten() {
        let Some(fqn) = parameter_of(name) else { continue };
        if let Some(weight) = by_fqn.get(fqn) {
            let weight = weight.f_to_device(master.device())?.f_to_kind(master.kind())?;
            there.whole.push((fqn.to_owned(), std::mem::replace(master, weight)));
        }
    }
    let prefixes: Vec<String> =
        (0..training.optimizers.len()).map(|index| optimizer_name(index, &format!("{MASTER}."))).collect();
    for shard in &mut checkpoint.shards {
        let fqn = prefixes.iter().find_map(|prefix| shard.name.strip_prefix(prefix.as_str()));
        let Some((fqn, weight)) = fqn.and_then(|fqn| Some((fqn.to_owned(), by_fqn.get(fqn)?))) else {
            continue;
        };
        let weight = shard.spec.of(weight)?.f_to_device(shard.values.device())?;
        let weight = weight.f_to_kind(shard.values.kind())?;
        let values = std::mem::replace(&mut shard.values, weight);
        there.shards.push(Shard { name: fqn, spec: shard.spec.clone(), values });
    }
    Ok(there)
}
