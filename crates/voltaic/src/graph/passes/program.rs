//! A recording on its way through the passes.

use std::collections::{BTreeMap, BTreeSet};

use crate::ffi::PlannedChain;
use crate::graph::ir::{Graph, Operand};

/// What of a recording is run, and how.
#[derive(Debug, Clone)]
pub(in crate::graph) struct Program {
    /// The recording. What a chain reads and writes are the operands of its last node; merged buffers are one.
    pub(in crate::graph) graph: Graph,
    /// Per node.
    pub(in crate::graph) runs: Vec<bool>,
    /// Per node: it runs again only after a weight was written to; else its result is kept.
    pub(in crate::graph) frozen: Vec<bool>,
    /// Per buffer: the buffer whose memory it is, itself or an earlier one.
    pub(in crate::graph) merged: Vec<usize>,
    /// By their last node.
    pub(in crate::graph) chains: Vec<Chain>,
    /// Nodes that do not run, since another one has the same result.
    pub(in crate::graph) num_merged: usize,
    /// Concatenations that do not run.
    pub(in crate::graph) num_joined: usize,
    /// Values that lie elsewhere than when they were recorded.
    pub(in crate::graph) moved: Vec<usize>,
    /// Results in the memory of operands.
    pub(in crate::graph) num_in_place: usize,
    /// What is computed once more, in the order in which that runs.
    pub(in crate::graph) recomputed: Vec<Recomputed>,
    /// What the passes say of it, if that is asked for.
    pub(in crate::graph) notes: Option<Notes>,
}

/// Why an operator is no part of a chain, or a chain is not longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::graph) struct Why {
    pub(in crate::graph) what: &'static str,
    /// The operator that is in the way.
    pub(in crate::graph) node: Option<usize>,
}

/// What passes say of single operators, by node.
#[derive(Debug, Clone, Default)]
pub(in crate::graph) struct Notes {
    /// The pass that has left an operator out.
    pub(in crate::graph) left_out: BTreeMap<usize, &'static str>,
    /// Of operators that run by themselves, and of the last ones of chains.
    pub(in crate::graph) whys: BTreeMap<usize, Why>,
}

/// Operators element by element that run as one.
#[derive(Debug, Clone)]
pub(in crate::graph) struct Chain {
    /// Their nodes; they run in the place of the last.
    pub(in crate::graph) members: Vec<usize>,
    pub(in crate::graph) planned: PlannedChain,
}

/// Results that are computed once more where they are needed again: meanwhile their memory is free.
#[derive(Debug, Clone)]
pub(in crate::graph) struct Recomputed {
    /// What computed them, the last node of a chain.
    pub(in crate::graph) node: usize,
    /// They are computed again just before this node.
    pub(in crate::graph) before: usize,
    /// The part of a chain that this takes; none if the node runs again.
    pub(in crate::graph) chain: Option<PlannedChain>,
}

impl Program {
    pub(super) fn of(graph: Graph) -> Self {
        let merged = (0..graph.buffers.len()).collect();
        let runs = vec![true; graph.nodes.len()];
        Self {
            frozen: vec![false; graph.nodes.len()],
            runs,
            merged,
            graph,
            chains: Vec::new(),
            num_merged: 0,
            moved: Vec::new(),
            num_joined: 0,
            num_in_place: 0,
            recomputed: Vec::new(),
            notes: None,
        }
    }

    /// Whether a buffer keeps a result from replay to replay.
    pub(in crate::graph) fn is_kept_frozen(&self, buffer: usize) -> bool {
        self.graph.buffers[buffer].made_by().is_some_and(|node| self.frozen[node])
    }

    /// The weights that frozen results are computed from.
    pub(in crate::graph) fn frozen_weights(&self) -> BTreeSet<usize> {
        let frozen = (0..self.runs.len()).filter(|&node| self.runs[node] && self.frozen[node]);
        let read = frozen.flat_map(|node| self.accesses(node).0);
        read.filter(|&buffer| self.graph.buffers[buffer].made_by().is_none()).collect()
    }

    /// Has a buffer be the memory of an earlier one.
    pub(super) fn merge(&mut self, kept: usize, dropped: usize) {
        for value in self.graph.values.iter_mut().filter(|value| value.buffer == dropped) {
            value.buffer = kept;
        }
        self.merged.iter_mut().filter(|of| **of == dropped).for_each(|of| *of = kept);
    }

    /// The values that are read to compute results once more, and these.
    pub(in crate::graph) fn recomputes(&self, again: &Recomputed) -> (Vec<usize>, Vec<usize>) {
        let node = &self.graph.nodes[again.node];
        let values = |of: &[i64]| of.iter().filter_map(|&value| usize::try_from(value).ok()).collect();
        match &again.chain {
            Some(chain) => (values(&chain.inputs), values(&chain.outputs)),
            None => (
                node.arguments.iter().flat_map(Operand::values).collect(),
                node.results.iter().flat_map(Operand::values).collect(),
            ),
        }
    }

    /// The buffers that a node writes, without what a random operator may only read: its schema says what it writes.
    pub(super) fn writes(&self, index: usize) -> BTreeSet<usize> {
        let node = &self.graph.nodes[index];
        if !node.is_random || node.results.is_empty() {
            return self.accesses(index).1;
        }
        let values = node.results.iter().flat_map(Operand::values).chain(node.written());
        values.map(|value| self.graph.values[value].buffer).collect()
    }

    /// The buffers that a node reads, and those that it writes.
    pub(super) fn accesses(&self, index: usize) -> (BTreeSet<usize>, BTreeSet<usize>) {
        let node = &self.graph.nodes[index];
        let buffer = |value: usize| self.graph.values[value].buffer;
        let reads: BTreeSet<usize> = node.arguments.iter().flat_map(Operand::values).map(buffer).collect();
        let results = node.results.iter().flat_map(Operand::values);
        let mut writes: BTreeSet<usize> = results.chain(node.written()).map(buffer).collect();
        if node.has_hidden_effect() {
            writes.extend(&reads);
        }
        (reads, writes)
    }
}
