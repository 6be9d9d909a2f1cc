//! What is within what: events of a thread as a tree.

use std::collections::HashMap;

use crate::ffi::{EventScope, KinetoEvent};

/// Operators and ranges of the host, each with what is around it.
#[derive(Debug)]
pub(super) struct Nest<'a> {
    /// By thread and start; what is around an event comes before it.
    pub nodes: Vec<Node<'a>>,
    /// Where the nodes of a thread are.
    threads: HashMap<u64, std::ops::Range<usize>>,
}

/// An event with what is around it.
#[derive(Debug)]
pub(super) struct Node<'a> {
    pub event: &'a KinetoEvent,
    /// The node that is directly around.
    pub parent: Option<usize>,
    /// Whether a node of the same name is around it.
    is_within_its_like: bool,
    /// The first of those around it that ends later, and how many such steps there are.
    outlasting: Option<usize>,
    depth: usize,
    /// A node that is several such steps away, itself if there is none. Ways of any length have few of these jumps: the numbers of
    /// steps are those of a skew-binary number.
    jump: usize,
}

impl Node<'_> {
    fn end_ns(&self) -> i64 {
        self.event.start_ns + self.event.duration_ns
    }
}

impl<'a> Nest<'a> {
    pub fn new(events: &'a [KinetoEvent]) -> Self {
        let mut sorted: Vec<&KinetoEvent> = events
            .iter()
            .filter(|event| event.scope != EventScope::Other && event.device_type == 0)
            .collect();
        // what began earlier, or at the same time and ended later, is around what follows
        sorted.sort_by_key(|event| (event.thread, event.start_ns, std::cmp::Reverse(event.duration_ns)));
        let mut nest = Self { nodes: Vec::with_capacity(sorted.len()), threads: HashMap::new() };
        let mut open: Vec<usize> = Vec::new();
        let mut open_names: HashMap<&str, usize> = HashMap::new();
        for event in sorted {
            let at = nest.nodes.len();
            let thread = nest.threads.entry(event.thread).or_insert(at..at);
            if thread.start == thread.end {
                open.clear();
                open_names.clear();
            }
            thread.end = at + 1;
            while let Some(closed) = open.pop_if(|last| nest.nodes[*last].end_ns() <= event.start_ns) {
                open_names.entry(&nest.nodes[closed].event.name).and_modify(|count| *count -= 1);
            }
            let count = open_names.entry(&event.name).or_default();
            nest.push(event, open.last().copied(), *count > 0);
            *count += 1;
            open.push(at);
        }
        nest
    }

    fn push(&mut self, event: &'a KinetoEvent, parent: Option<usize>, is_within_its_like: bool) {
        let (at, end_ns) = (self.nodes.len(), event.start_ns + event.duration_ns);
        let mut outlasting = parent;
        while let Some(other) = outlasting.filter(|&other| self.nodes[other].end_ns() <= end_ns) {
            outlasting = self.nodes[other].outlasting;
        }
        let (jump, depth) = outlasting.map_or((at, 0), |other| {
            let other_jump = self.nodes[other].jump;
            let next_jump = self.nodes[other_jump].jump;
            let steps = |from: usize, to: usize| self.nodes[from].depth - self.nodes[to].depth;
            let are_alike = steps(other, other_jump) == steps(other_jump, next_jump);
            (if are_alike { next_jump } else { other }, self.nodes[other].depth + 1)
        });
        self.nodes.push(Node { event, parent, is_within_its_like, outlasting, depth, jump });
    }

    /// The innermost node of a thread at a time.
    pub fn innermost(&self, thread: u64, at_ns: i64) -> Option<usize> {
        let range = self.threads.get(&thread)?.clone();
        let begun = self.nodes[range.clone()].partition_point(|node| node.event.start_ns <= at_ns);
        let last = (range.start + begun).checked_sub(1).filter(|last| range.contains(last))?;
        let is_over = |at: usize| self.nodes[at].end_ns() < at_ns;
        let mut at = last;
        while is_over(at) {
            let node = &self.nodes[at];
            at = if node.jump != at && is_over(node.jump) { node.jump } else { node.outlasting? };
        }
        Some(at)
    }

    /// A node, and what is around it, from the inside.
    pub fn ancestors(&self, at: usize) -> impl Iterator<Item = usize> {
        std::iter::successors(Some(at), |&at| self.nodes[at].parent)
    }

    /// Whether a node of the same name is around this one.
    pub fn is_within_its_like(&self, at: usize) -> bool {
        self.nodes[at].is_within_its_like
    }

    /// Adds to each node what those within it have.
    pub fn totals(&self, own: &[i64]) -> Vec<i64> {
        let mut totals = own.to_vec();
        for at in (0..self.nodes.len()).rev() {
            if let Some(parent) = self.nodes[at].parent {
                totals[parent] += totals[at];
            }
        }
        totals
    }

    /// Nanoseconds of each node without those within it.
    pub fn own_ns(&self) -> Vec<i64> {
        let mut own: Vec<i64> = self.nodes.iter().map(|node| node.event.duration_ns).collect();
        for node in &self.nodes {
            if let Some(parent) = node.parent {
                own[parent] -= node.event.duration_ns;
            }
        }
        own.iter_mut().for_each(|own| *own = (*own).max(0));
        own
    }
}

#[cfg(test)]
pub(super) fn event(name: &str, start_ns: i64, duration_ns: i64, thread: u64) -> KinetoEvent {
    KinetoEvent {
        name: name.to_owned(),
        shapes: "[[2]]".to_owned(),
        start_ns,
        duration_ns,
        thread,
        flops: 10,
        bytes: 0,
        scope: EventScope::Operator,
        device_type: 0,
        system_thread: thread as i64,
        id: start_ns as u64,
        is_in_trace: true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_event_is_found() {
        let events = [
            event("outer", 10, 100, 1),
            event("inner", 20, 30, 1),
            event("innermost", 20, 10, 1),
            event("other", 20, 10, 2),
        ];
        let nest = Nest::new(&events);
        let at = |thread, ns| nest.innermost(thread, ns).map(|at| nest.nodes[at].event.name.as_str());
        assert_eq!(
            [at(1, 9), at(1, 10), at(1, 25), at(1, 40)],
            [None, Some("outer"), Some("innermost"), Some("inner")]
        );
        assert_eq!(
            [at(1, 60), at(1, 111), at(2, 19), at(2, 22), at(3, 22)],
            [Some("outer"), None, None, Some("other"), None]
        );
        assert_eq!(nest.own_ns(), [70, 20, 10, 10]);
        assert_eq!(nest.totals(&[1, 2, 4, 8]), [7, 6, 4, 8]);
    }

    #[test]
    fn many_ranges_within_each_other_are_found() {
        const COUNT: i64 = 200_000;
        // the last begins at COUNT - 1, and ends first
        let name = |at: i64| if at % 2 == 0 { "even" } else { "odd" };
        let events: Vec<_> = (0..COUNT).map(|at| event(name(at), at, 3 * COUNT - 2 * at, 1)).collect();
        let nest = Nest::new(&events);
        for at in 0..COUNT {
            assert_eq!(nest.innermost(1, 3 * COUNT - at), Some(at as usize));
            assert_eq!(nest.is_within_its_like(at as usize), at > 1);
        }
        assert_eq!(nest.innermost(1, 3 * COUNT + 1), None);
        // an event that outlives what it began in
        let crossed =
            [event("a", 0, 100, 1), event("b", 10, 20, 1), event("c", 20, 40, 1), event("a", 25, 2, 1)];
        let nest = Nest::new(&crossed);
        let names = [22, 26, 28, 40, 61].map(|ns| nest.innermost(1, ns));
        assert_eq!(names, [Some(2), Some(3), Some(2), Some(2), Some(0)]);
        let within: Vec<bool> = (0..4).map(|at| nest.is_within_its_like(at)).collect();
        assert_eq!(within, [false, false, false, true]);
    }
}
