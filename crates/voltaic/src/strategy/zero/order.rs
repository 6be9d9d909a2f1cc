//! In which order a step needs the units of stage 3, as the last step needed them (DeepSpeed's trace of parameters).
//!
//! A step needs units in the order of its modules' calls, forward and backward, and the next step most likely does the same. Ranks
//! call modules in the same order, so all have the same trace. Calls that are repeated within backward, to recompute checkpointed
//! activations, are not in the order.

use std::collections::HashMap;

/// In which order a step needs units.
#[derive(Debug, Default)]
pub(super) struct Order {
    /// Of the last step.
    recorded: Recorded,
    /// Of this step so far.
    current: Vec<usize>,
    /// A training step is in progress.
    is_open: bool,
    /// It has been like the last one so far.
    is_known: bool,
}

/// The order of a step that is over.
#[derive(Debug, Default)]
struct Recorded {
    units: Vec<usize>,
    /// By unit: at which of `units` it is.
    uses: HashMap<usize, Vec<usize>>,
    /// By place in `units`: elements of all before it.
    before: Vec<usize>,
}

impl Recorded {
    fn of(units: Vec<usize>, len: impl Fn(usize) -> usize) -> Self {
        let mut uses: HashMap<usize, Vec<usize>> = HashMap::new();
        let (mut before, mut elements) = (Vec::with_capacity(units.len()), 0);
        for (at, unit) in units.iter().enumerate() {
            uses.entry(*unit).or_default().push(at);
            before.push(elements);
            elements += len(*unit);
        }
        Self { units, uses, before }
    }
}

impl Order {
    /// A training step begins; `len` are the elements of units.
    pub fn begin(&mut self, len: impl Fn(usize) -> usize) {
        let last = std::mem::take(&mut self.current);
        if !last.is_empty() && last != self.recorded.units {
            self.recorded = Recorded::of(last, len);
        }
        self.is_open = true;
        self.is_known = !self.recorded.units.is_empty();
    }

    /// Its backward pass has ended.
    pub fn end(&mut self) {
        self.is_open = false;
    }

    /// Records that a unit is needed now.
    pub fn record(&mut self, unit: usize) {
        if self.is_open {
            self.is_known &= self.recorded.units.get(self.current.len()) == Some(&unit);
            self.current.push(unit);
        }
    }

    /// The unit that comes after so many others; nothing where that is not known.
    pub fn upcoming(&self, after: usize) -> Option<usize> {
        let is_known = self.is_open && self.is_known;
        self.recorded.units.get(self.current.len() + after).filter(|_| is_known).copied()
    }

    /// Elements of the units between now and the next use of `unit`, those of `unit` not included.
    pub fn distance(&self, unit: usize) -> Option<usize> {
        self.upcoming(0)?;
        let now = self.current.len();
        let uses = self.recorded.uses.get(&unit)?;
        let next = *uses.get(uses.partition_point(|at| *at < now))?;
        Some(self.recorded.before[next] - self.recorded.before[now])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The elements of a unit.
    fn len(unit: usize) -> usize {
        [10, 1, 100, 0, 0, 0][unit]
    }

    fn upcoming(order: &Order) -> Vec<usize> {
        (0..).map_while(|after| order.upcoming(after)).collect()
    }

    fn step(order: &mut Order, units: &[usize]) {
        order.begin(len);
        units.iter().for_each(|unit| order.record(*unit));
        order.end();
    }

    #[test]
    fn what_comes_next_is_what_came_next_in_the_last_step() {
        let mut order = Order::default();
        step(&mut order, &[0, 1, 1, 0]);
        assert!(upcoming(&order).is_empty(), "no step is in progress");
        order.begin(len);
        assert_eq!(upcoming(&order), [0, 1, 1, 0]);
        order.record(0);
        order.record(1);
        assert_eq!(upcoming(&order), [1, 0]);
        assert_eq!([0, 1, 2].map(|unit| order.distance(unit)), [Some(1), Some(0), None]);
        order.record(1);
        assert_eq!([0, 1, 2].map(|unit| order.distance(unit)), [Some(0), None, None]);
    }

    #[test]
    fn a_step_that_differs_is_not_predicted_and_is_the_next_ones_model() {
        let mut order = Order::default();
        step(&mut order, &[0, 1, 2]);
        order.begin(len);
        order.record(0);
        order.record(2);
        assert!(upcoming(&order).is_empty());
        order.record(2);
        order.end();
        order.begin(len);
        assert_eq!(upcoming(&order), [0, 2, 2]);
        [0, 2, 2, 1].into_iter().for_each(|unit| order.record(unit));
        assert!(upcoming(&order).is_empty(), "a longer step ends what is known");
    }

    #[test]
    fn evaluation_between_steps_is_not_recorded() {
        let mut order = Order::default();
        step(&mut order, &[0, 1]);
        order.record(5);
        order.begin(len);
        assert_eq!(upcoming(&order), [0, 1]);
    }
}
