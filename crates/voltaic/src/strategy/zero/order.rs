//! In which order a step needs the units of stage 3, as the last step needed them (DeepSpeed's trace of parameters).
//!
//! A step needs units in the order of its modules' calls, forward and backward, and the next step most likely does the same. Ranks
//! call modules in the same order, and so they know the same.

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
    pub fn need(&mut self, unit: usize) {
        if self.is_open {
            self.is_known &= self.recorded.get(self.current.len()) == Some(&unit);
            self.current.push(unit);
        }
    }

    /// The units that come next; none where that is not known.
    pub fn upcoming(&self) -> &[usize] {
        let is_known = self.is_open && self.is_known;
        if is_known { self.recorded.get(self.current.len()..).unwrap_or_default() } else { &[] }
    }

    /// Elements of the units between now and the next use of `unit`, those of `unit` not included.
    pub fn distance(&self, unit: usize, len: impl Fn(usize) -> usize) -> Option<usize> {
        let upcoming = self.upcoming();
        let next = upcoming.iter().position(|other| *other == unit)?;
        Some(upcoming[..next].iter().map(|other| len(*other)).sum())
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
