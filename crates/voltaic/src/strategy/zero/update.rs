//! The files of a unit around its update: read before, written afterwards, and what becomes of errors.
//!
//! A rank whose disk fails in the middle of a step takes part in the rest of it, since the others wait for it, and at the end all ranks
//! have its error. The last checkpoint is then what is left of the run.

use std::ops::Range;

use super::unit_set::UnitSet;
use crate::distributed::{ReduceOp, collective_scope};
use crate::error::{ConfigError, Error, Problem, Result};
use crate::optim::Optimizer;

impl UnitSet {
    fn is_stepped(&self, optimizer: usize, number: usize) -> bool {
        let swapper = self.files.optimizer.as_ref();
        let unit = &self.units[number];
        unit.optimizer == optimizer && unit.has_grads() && swapper.is_some_and(|swapper| swapper.has(number))
    }

    /// Before a unit is updated: reads what it has in files, and starts to read what the next one has.
    pub fn swap_in(&mut self, optimizer: usize, number: usize) -> Result<()> {
        if number >= self.units.len() || !self.is_stepped(optimizer, number) {
            return Ok(());
        }
        let next = (number + 1..self.units.len()).find(|next| self.is_stepped(optimizer, *next));
        let Self { units, files, .. } = self;
        let has_grads = |unit: usize| units[unit].has_grads_in_file();
        let Some(swapper) = &mut files.optimizer else { return Ok(()) };
        if files.failure.is_none() {
            let begun = swapper
                .begin(number, has_grads(number))
                .and_then(|()| next.map_or(Ok(()), |next| swapper.read_ahead(next, has_grads(next))));
            files.failure = begun.err();
        }
        match files.failure {
            Some(_) => swapper.pretend(number),
            None => Ok(()),
        }
    }

    /// After these units were updated: what their weights are gathered from is renewed, and their files are written.
    pub fn swap_out(&mut self, index: usize, units: Range<usize>, optimizer: &dyn Optimizer) -> Result<()> {
        if self.files.is_empty() {
            return Ok(());
        }
        let (first, end) = (units.start, units.end.min(self.units.len()));
        for number in first..end {
            if self.units[number].optimizer == index && self.files.failure.is_none() {
                self.files.failure = self.write_unit(number, first, optimizer).err();
            }
        }
        Ok(())
    }

    fn write_unit(&mut self, number: usize, asked: usize, optimizer: &dyn Optimizer) -> Result<()> {
        self.units[number].refresh_weight_shard()?;
        self.swap_states(number, asked, optimizer)?;
        let Some(swapper) = &mut self.files.optimizer else { return Ok(()) };
        swapper.end(number)
    }

    /// Moves the states that the optimizer has made of a unit into files; it knows them as those of the unit `asked`.
    fn swap_states(&mut self, number: usize, asked: usize, optimizer: &dyn Optimizer) -> Result<()> {
        if self.files.optimizer.is_none() || !self.units[number].layout.swaps_shard {
            return Ok(());
        }
        let tensors = optimizer.unit_state(asked);
        let of_unit = tensors.iter().filter_map(|(name, tensor)| {
            let (state, fqn) = name.split_once('.')?;
            let (unit, index) = self.place_of(fqn)?;
            (unit == number).then(|| (index, state, tensor.shallow_clone()))
        });
        let states: Vec<_> = of_unit.collect();
        let Self { units, files, .. } = self;
        files.optimizer.as_mut().map_or(Ok(()), |swapper| {
            swapper.swap_shard(number, &mut units[number])?;
            swapper.swap_states(number, &units[number], &states)
        })
    }

    /// Moves all states that an optimizer was given into files.
    pub fn swap_all_states(&mut self, index: usize, optimizer: &dyn Optimizer) -> Result<()> {
        let num_units = optimizer.num_units();
        for number in 0..self.units.len() {
            if self.units[number].optimizer == index {
                self.swap_states(number, if num_units == 1 { 0 } else { number }, optimizer)?;
            }
        }
        Ok(())
    }

    /// After a step: waits until all is in files. The error of a rank is one on all.
    ///
    /// # Collective
    /// All ranks must call it.
    pub fn finish_files(&mut self) -> Result<()> {
        if self.files.is_empty() {
            return Ok(());
        }
        let mut failure = self.files.failure.take();
        if let Some(swapper) = &mut self.files.optimizer {
            let done = swapper.finish();
            failure = failure.or(done.err());
            let left = swapper.abandon();
            failure = failure.or(left.err());
        }
        let _named = collective_scope("swapped files");
        let own = failure.as_ref().map(|error| error.to_string());
        let Some(group) = self.group() else {
            self.files.is_torn |= failure.is_some();
            return failure.map_or(Ok(()), Err);
        };
        let failed = tch::Tensor::f_from_slice(&[f32::from(u8::from(failure.is_some()))])?;
        group.all_reduce(&failed, ReduceOp::Sum)?;
        if failed.f_double_value(&[0])? == 0.0 {
            return Ok(());
        }
        let remedy = failure.as_ref().and_then(Error::remedy).map(std::borrow::Cow::into_owned);
        let all = group.all_gather_object(&(own, remedy))?;
        self.files.is_torn = true;
        if let Some(failure) = failure {
            return Err(failure);
        }
        let first =
            all.into_iter().enumerate().find_map(|(rank, (text, remedy))| Some((rank, text?, remedy)));
        let Some((rank, text, remedy)) = first else { return Ok(()) };
        let remedy = remedy.unwrap_or_else(|| "look at the log of that rank".to_owned());
        let what = text.strip_suffix(&remedy).and_then(|text| text.strip_suffix("; ")).unwrap_or(&text);
        Err(ConfigError::at("zero_optimization", Problem::new(format!("rank {rank}: {what}"), remedy)).into())
    }

    /// An error if a step has failed half way, so that weights and states are not those of one step.
    pub fn check_not_torn(&self) -> Result<()> {
        if !self.files.is_torn {
            return Ok(());
        }
        let what = "a step has failed half way, and weights and optimizer states are not those of one step";
        Err(ConfigError::new("checkpoint", what, "go on from the last checkpoint (ckpt_path=last)").into())
    }
}
