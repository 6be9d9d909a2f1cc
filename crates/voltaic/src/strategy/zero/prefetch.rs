//! Prefetch: weights are gathered ahead of their use, and kept until the next one, within bounds.
//!
//! The next units are gathered while the present ones are used, in the same order on all ranks. A step that differs from the last one
//! gathers each unit when it is needed.

use super::unit::Unit;
use super::unit_set::UnitSet;
use crate::error::Result;
use crate::ffi;

impl UnitSet {
    /// Elements of sharded weights that are unsharded now.
    pub fn live(&self) -> usize {
        self.tally.live()
    }

    /// Unshards a unit's weights, and starts to gather those that come next. A call within a backward pass recomputes activations: it
    /// is not part of the step's order, since the next step may not need it.
    ///
    /// # Collective
    /// All ranks must call it.
    pub fn unshard(&mut self, unit: usize) -> Result<()> {
        if !ffi::is_in_backward() && self.units[unit].shards_weights() {
            self.order.record(unit);
        }
        self.unshard_and_prefetch(unit)
    }

    fn unshard_and_prefetch(&mut self, unit: usize) -> Result<()> {
        if !self.units[unit].shards_weights() {
            return Ok(());
        }
        if self.units[unit].live() == 0 {
            self.reshard_for(self.units[unit].layout.len())?;
        }
        self.unshard_alone(unit)?;
        self.max_live = self.max_live.max(self.live());
        self.prefetch()
    }

    /// Unshards a unit's weights, if they are sharded.
    ///
    /// # Collective
    /// All ranks must call it.
    pub fn unshard_alone(&mut self, unit: usize) -> Result<()> {
        self.start_unshard(unit)?;
        self.units[unit].wait_for_unshard()
    }

    /// Starts to unshard a unit's weights, if they are sharded.
    fn start_unshard(&mut self, unit: usize) -> Result<()> {
        if self.units[unit].is_sharded() {
            self.order_digest.note(unit);
        }
        self.with_unit(unit, Unit::start_unshard)
    }

    /// As [`UnitSet::unshard`]; the weights stay unsharded at least until [`UnitSet::reshard_after_use`].
    pub fn unshard_for_use(&mut self, unit: usize) -> Result<()> {
        self.unshard(unit)?;
        self.units[unit].begin_use();
        Ok(())
    }

    /// As [`UnitSet::unshard`], for a module whose backward pass begins: the weights are kept until their gradients are complete.
    pub fn unshard_in_backward(&mut self, unit: usize) -> Result<()> {
        if self.units[unit].shards_weights() {
            self.order.record(unit);
        }
        self.unshard_and_prefetch(unit)?;
        self.units[unit].begin_backward();
        Ok(())
    }

    /// Weights that a segment was recomputed with are those that its backward pass needs next: they stay unsharded for that, within the
    /// bound.
    pub fn keep_for_backward(&mut self, unit: usize) {
        if self.live() <= self.config.max_live_parameters {
            self.units[unit].begin_backward();
        }
    }

    /// Ends a use. The weights stay unsharded if they are needed again soon (`max_reuse_distance`).
    pub fn reshard_after_use(&mut self, unit: usize) -> Result<()> {
        self.units[unit].end_use();
        let distance = self.order.distance(unit);
        let is_needed = distance.is_some_and(|distance| distance <= self.config.max_reuse_distance);
        if is_needed && self.live() <= self.config.max_live_parameters {
            return Ok(());
        }
        self.units[unit].reshard()
    }

    /// Reshards unused weights, those that are needed last first, until `len` more elements are within the bound.
    fn reshard_for(&mut self, len: usize) -> Result<()> {
        let bound = self.config.max_live_parameters.saturating_sub(len);
        while self.live() > bound {
            let idle = self.units.iter().enumerate().filter(|(_, unit)| unit.is_idle());
            let next_use = |unit: usize| self.order.distance(unit).unwrap_or(usize::MAX);
            let Some(last) = idle.map(|(unit, _)| unit).max_by_key(|unit| next_use(*unit)) else { break };
            self.units[last].reshard()?;
        }
        Ok(())
    }

    /// Starts to gather the units that come next, as far as the bounds allow, and to read the shards of those after them that are in files,
    /// as far as there are buffers.
    fn prefetch(&mut self) -> Result<()> {
        if self.tally.is_full() {
            return Ok(());
        }
        let next = self.prefetch_next()?;
        for after in next.. {
            let Some(unit) = self.order.upcoming(after) else { break };
            if self.units[unit].is_sharded() && !self.units[unit].read_ahead()? {
                break;
            }
        }
        Ok(())
    }

    /// Returns how many units from now comes the first that is not on its way.
    fn prefetch_next(&mut self) -> Result<usize> {
        let (mut arriving, mut live) = (self.tally.arriving(), self.live());
        for after in 0.. {
            let Some(unit) = self.order.upcoming(after) else { return Ok(after) };
            let len = self.units[unit].layout.len();
            if self.units[unit].live() > 0 {
                continue; // it is unsharded, or being gathered
            }
            (arriving, live) = (arriving + len, live + len);
            if arriving > self.config.prefetch_bucket_size || live > self.config.max_live_parameters {
                return Ok(after);
            }
            self.start_unshard(unit)?;
            self.max_live = self.max_live.max(live);
        }
        Ok(usize::MAX)
    }

    /// Ends a training step, also a failed one: waits for gathers in progress, and reshards what backward has kept.
    pub fn end_step(&mut self) -> Result<()> {
        self.order.end();
        self.units.iter_mut().try_for_each(|unit| {
            unit.wait_for_unshard()?;
            unit.end_backward()
        })
    }
}
