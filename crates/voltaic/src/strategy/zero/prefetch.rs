//! Weights that come ahead of their use, and stay until their next one: stage 3's order of units, and its bounds.
//!
//! A step needs units in the order of its modules' calls, forward and backward. The next step most likely does the same, so the units
//! that come next are gathered while the present ones are used (DeepSpeed's trace of parameters). Ranks call modules in the same
//! order, and so they gather ahead in the same order; a step that differs from the last one gathers each unit when it is needed.

use super::reducer::Reducer;
use super::unit::Unit;
use crate::error::Result;

/// In which order a step needs units.
#[derive(Debug, Default)]
pub(super) struct Order {
    /// Of the last step.
    recorded: Vec<usize>,
    /// Of this step so far.
    current: Vec<usize>,
    /// A training step is in progress.
    is_open: bool,
    /// It has been like the last one so far.
    is_known: bool,
}

impl Order {
    /// A training step begins.
    pub fn begin(&mut self) {
        if !self.current.is_empty() {
            self.recorded = std::mem::take(&mut self.current);
        }
        self.is_open = true;
        self.is_known = !self.recorded.is_empty();
    }

    /// Its backward pass has ended.
    pub fn end(&mut self) {
        self.is_open = false;
    }

    /// A unit is needed now.
    fn need(&mut self, unit: usize) {
        if self.is_open {
            self.is_known &= self.recorded.get(self.current.len()) == Some(&unit);
            self.current.push(unit);
        }
    }

    /// The units that come next; none where that is not known.
    fn upcoming(&self) -> &[usize] {
        let is_known = self.is_open && self.is_known;
        if is_known { self.recorded.get(self.current.len()..).unwrap_or_default() } else { &[] }
    }

    /// Elements of the units between now and the next use of `unit`, those of `unit` not included.
    fn distance(&self, unit: usize, len: impl Fn(usize) -> usize) -> Option<usize> {
        let upcoming = self.upcoming();
        let next = upcoming.iter().position(|other| *other == unit)?;
        Some(upcoming[..next].iter().map(|other| len(*other)).sum())
    }
}

impl Reducer {
    /// Elements of weights that come and go, and are in memory now.
    pub fn live(&self) -> usize {
        self.units.iter().map(Unit::live).sum()
    }

    /// Makes a unit's weights whole, and starts to gather those that come next.
    ///
    /// # Collective
    /// All ranks must call it.
    pub fn need(&mut self, unit: usize) -> Result<()> {
        if !self.units[unit].is_divided() {
            return Ok(());
        }
        self.order.need(unit);
        if self.units[unit].live() == 0 {
            self.make_room(self.units[unit].layout.len())?;
        }
        self.with_unit(unit, Unit::gather)?;
        self.max_live = self.max_live.max(self.live());
        self.prefetch()
    }

    /// [`Reducer::need`] for somebody who lets go of the weights by [`Reducer::let_go`].
    pub fn hold(&mut self, unit: usize) -> Result<()> {
        self.need(unit)?;
        self.units[unit].hold();
        Ok(())
    }

    /// [`Reducer::need`] for a module whose backward pass begins: the weights stay until their gradients are there.
    pub fn need_in_backward(&mut self, unit: usize) -> Result<()> {
        self.need(unit)?;
        self.units[unit].begin_backward();
        Ok(())
    }

    /// Ends a hold. The weights stay if they are needed again before many others.
    pub fn let_go(&mut self, unit: usize) -> Result<()> {
        self.units[unit].let_go();
        let len = |unit: usize| self.units[unit].layout.len();
        let distance = self.order.distance(unit, len);
        let is_needed = distance.is_some_and(|distance| distance <= self.config.max_reuse_distance);
        if is_needed && self.live() <= self.config.max_live_parameters {
            return Ok(());
        }
        self.units[unit].release()
    }

    /// Frees weights that nobody uses now, those first that are needed last, until `len` more elements are within the bound.
    fn make_room(&mut self, len: usize) -> Result<()> {
        let bound = self.config.max_live_parameters.saturating_sub(len);
        while self.live() > bound {
            let idle = self.units.iter().enumerate().filter(|(_, unit)| unit.is_idle());
            let len = |unit: usize| self.units[unit].layout.len();
            let next_use = |unit: usize| self.order.distance(unit, len).unwrap_or(usize::MAX);
            let Some(last) = idle.map(|(unit, _)| unit).max_by_key(|unit| next_use(*unit)) else { break };
            self.units[last].release()?;
        }
        Ok(())
    }

    /// Starts to gather the units that come next, as far as the bounds allow.
    fn prefetch(&mut self) -> Result<()> {
        let mut arriving: usize = self.units.iter().map(Unit::arriving).sum();
        let mut live = self.live();
        for unit in self.order.upcoming().to_vec() {
            let len = self.units[unit].layout.len();
            if self.units[unit].live() > 0 {
                continue; // it is here, or on its way
            }
            (arriving, live) = (arriving + len, live + len);
            if arriving > self.config.prefetch_bucket_size || live > self.config.max_live_parameters {
                break;
            }
            self.with_unit(unit, Unit::start)?;
            self.max_live = self.max_live.max(live);
        }
        Ok(())
    }

    /// A training step is over, or has failed: what was gathered for it is of no use any more.
    pub fn end_step(&mut self) -> Result<()> {
        self.order.end();
        self.units.iter_mut().try_for_each(|unit| {
            unit.settle()?;
            unit.end_backward()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(order: &mut Order, units: &[usize]) {
        order.begin();
        units.iter().for_each(|unit| order.need(*unit));
        order.end();
    }

    #[test]
    fn what_comes_next_is_what_came_next_in_the_last_step() {
        let mut order = Order::default();
        step(&mut order, &[0, 1, 1, 0]);
        assert!(order.upcoming().is_empty(), "no step is in progress");
        order.begin();
        assert_eq!(order.upcoming(), [0, 1, 1, 0]);
        order.need(0);
        order.need(1);
        assert_eq!(order.upcoming(), [1, 0]);
        assert_eq!(order.distance(0, |_| 10), Some(10));
        assert_eq!(order.distance(1, |_| 10), Some(0));
        assert_eq!(order.distance(2, |_| 10), None);
    }

    #[test]
    fn a_step_that_differs_is_not_foretold_and_is_the_next_ones_model() {
        let mut order = Order::default();
        step(&mut order, &[0, 1, 2]);
        order.begin();
        order.need(0);
        order.need(2);
        assert!(order.upcoming().is_empty());
        order.need(2);
        order.end();
        order.begin();
        assert_eq!(order.upcoming(), [0, 2, 2]);
        [0, 2, 2, 1].into_iter().for_each(|unit| order.need(unit));
        assert!(order.upcoming().is_empty(), "a longer step ends what is known");
    }

    #[test]
    fn evaluation_between_steps_is_not_recorded() {
        let mut order = Order::default();
        step(&mut order, &[0, 1]);
        order.need(5);
        order.begin();
        assert_eq!(order.upcoming(), [0, 1]);
    }
}
