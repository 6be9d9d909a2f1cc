//! Shards, weights and gradients of units that are moved to memory of the host between phases of training, and back.

use tch::Tensor;

use super::unit::Unit;
use crate::error::Result;
use crate::ffi;
use crate::nn::Parameter;
use crate::optim::{OffloadState, OffloadStates, move_grad, moved, take_place};

impl Unit {
    /// Moves these states to memory of the host.
    pub fn offload_states(&mut self, states: &OffloadStates) -> Result<()> {
        let host = tch::Device::Cpu;
        self.place_states(&|state| states.includes(state), [host; 3], states.pin_memory)
    }

    /// Moves these states back to where they are kept otherwise.
    pub fn reload_states(&mut self, states: &[OffloadState]) -> Result<()> {
        let layout = &self.layout;
        let homes = [layout.device, layout.storage, layout.weight_shard_storage];
        self.place_states(&|state| states.contains(&state), homes, false)
    }

    /// Moves states to where weights, the shard and the copies that weights are gathered from are to be.
    fn place_states(
        &mut self,
        includes: &dyn Fn(OffloadState) -> bool,
        [weights, shard, weight_shard]: [tch::Device; 3],
        pins: bool,
    ) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        if includes(OffloadState::LpParams) {
            if !self.shards_weights() {
                self.move_weights(weights, pins)?;
            }
            self.weight_shard.place(weight_shard, pins)?;
        }
        // without master weights the shard is what the module computes with
        let of_shard = if self.has_master { OffloadState::HpParams } else { OffloadState::LpParams };
        if self.has_own_shard() && includes(of_shard) && self.shard.device() != shard {
            self.use_shard(moved(&self.shard, shard, pins)?)?;
        }
        if includes(OffloadState::LpGrads) {
            self.leaves().try_for_each(|leaf| move_grad(leaf, weights, pins))?;
            if let Some(sums) = self.sums.as_mut().filter(|sums| sums.device() != weights) {
                *sums = moved(sums, weights, pins)?;
            }
            self.move_grads(shard, pins)?;
        }
        Ok(())
    }

    fn move_weights(&mut self, device: tch::Device, pins: bool) -> Result<()> {
        if self.flat.device() == device {
            return Ok(());
        }
        let flat = moved(&self.flat, device, pins)?;
        for (leaf, view) in self.leaves().zip(self.layout.views(&flat)?) {
            take_place(leaf, &view)?;
        }
        self.flat = flat;
        if self.has_own_shard() {
            return Ok(());
        }
        let own = self.layout.shard(&self.flat, self.rank)?;
        self.use_shard(own)
    }

    /// Makes this tensor, which has its values, the shard.
    fn use_shard(&mut self, shard: Tensor) -> Result<()> {
        for (index, sharded) in self.sharded_params.iter().enumerate() {
            take_place(sharded.leaf(), &self.param_shard_in(&shard, index)?)?;
        }
        self.shard = shard;
        Ok(())
    }

    /// Moves the gradients of the shard, which the optimizer sees by its parameters, unless they were clipped by themselves.
    fn move_grads(&mut self, device: tch::Device, pins: bool) -> Result<()> {
        let Some(grads) = self.grads.as_ref().filter(|grads| grads.device() != device) else { return Ok(()) };
        let (kind, grads) = (grads.kind(), moved(grads, device, pins)?);
        let shown = |(_, sharded): &(usize, &Parameter)| sharded.grad().defined();
        for (index, sharded) in self.sharded_params.iter().enumerate().filter(shown) {
            let own = sharded.grad();
            let own = match own.kind() == kind {
                true => self.param_shard_in(&grads, index)?,
                false => moved(&own, device, pins)?,
            };
            ffi::set_grad(sharded.leaf(), &own)?;
        }
        self.grads = Some(grads);
        Ok(())
    }
}
