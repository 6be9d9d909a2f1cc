//! What is kept of graphs that are compiled while `graph show` records them.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use crate::ffi::GraphPlan;
use crate::graph::ir::{Graph, Operand, Value};
use crate::graph::passes::{self, Owner, Passes, Program, pieces};
use crate::graph::plan::{PlanStats, plan};

thread_local!(static SHOWN: RefCell<Option<Vec<ShownGraph>>> = const { RefCell::new(None) });

/// Whether the graphs that this thread compiles are kept to be shown.
pub(in crate::graph) fn is_asked() -> bool {
    SHOWN.with_borrow(Option::is_some)
}

/// Runs `body`; also gives the graphs that this thread has compiled meanwhile, as far as they are labelled.
pub(crate) fn shown<R>(body: impl FnOnce() -> R) -> (R, Vec<ShownGraph>) {
    SHOWN.set(Some(Vec::new()));
    let result = body();
    let mut shown = SHOWN.take().unwrap_or_default();
    shown.retain(|graph| !graph.label.is_empty());
    (result, shown)
}

/// Says what the graphs are that were compiled last, if they are to be shown.
pub(crate) fn label_shown(num_graphs: usize, label: impl FnOnce() -> String) {
    SHOWN.with_borrow_mut(|shown| {
        let Some(shown) = shown else { return };
        let label = label();
        shown.iter_mut().rev().take(num_graphs).for_each(|graph| graph.label.clone_from(&label));
    });
}

/// Keeps a graph to be shown.
pub(in crate::graph) fn add(recorded: &Graph, program: Program, plan: &GraphPlan, stats: PlanStats) {
    SHOWN.with_borrow_mut(|shown| {
        shown
            .iter_mut()
            .for_each(|shown| shown.push(ShownGraph::new(recorded, program.clone(), plan, stats)));
    });
}

/// A captured step before and after the passes of compile.
#[derive(Debug, Clone)]
pub struct ShownGraph {
    pub(super) label: String,
    pub(super) graph: Graph,
    pub(super) program: Program,
    pub(super) recorded: Side,
    pub(super) compiled: Side,
    /// What was planned for the replay.
    stats: PlanStats,
}

/// Sums over the operators of a step that run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GraphTotals {
    /// Calls of kernels; a chain is one.
    pub num_calls: usize,
    /// As if each call read each of its operands as a whole.
    pub read_bytes: u64,
    /// What all calls write.
    pub written_bytes: u64,
    /// Memory that a replay works in beside what is kept.
    pub planned_bytes: u64,
    /// The most of it that holds anything at once.
    pub peak_bytes: u64,
    /// The operator that runs then, by its number.
    pub peak_at: usize,
}

/// What runs, before or after the passes.
#[derive(Debug, Clone)]
pub(super) struct Side {
    pub(super) totals: GraphTotals,
    pub(super) pieces: Vec<PlacedPiece>,
}

/// Memory in use from one operator to another.
#[derive(Debug, Clone, Copy)]
pub(super) struct PlacedPiece {
    /// The operator that makes it first.
    pub(super) node: usize,
    pub(super) first: usize,
    pub(super) last: usize,
    pub(super) bytes: u64,
    /// Where it lies in the planned memory.
    pub(super) start: u64,
    /// The buffer that it is; none for what a kernel needs while it runs.
    pub(super) buffer: Option<usize>,
}

impl Side {
    fn new(program: &Program, plan: &GraphPlan) -> Self {
        let pieces: Vec<PlacedPiece> = pieces(program)
            .into_iter()
            .flat_map(|piece| {
                let (buffer, start) = match piece.owner {
                    Owner::Buffer(index) => (Some(index), plan.buffer_offsets[index]),
                    Owner::Block(index) => (None, plan.block_offsets[index]),
                };
                let start = start.saturating_sub(GraphPlan::HEADER_BYTES);
                let (bytes, node) = (piece.bytes, piece.lives.first().map_or(0, |life| life.0));
                let placed = move |(first, last)| PlacedPiece { node, first, last, bytes, start, buffer };
                piece.lives.into_iter().map(placed)
            })
            .collect();
        let mut totals = GraphTotals { planned_bytes: plan.arena_bytes, ..GraphTotals::default() };
        let mut in_use = vec![0_u64; program.runs.len()];
        for piece in &pieces {
            in_use[piece.first..=piece.last].iter_mut().for_each(|bytes| *bytes += piece.bytes);
        }
        for (node, bytes) in in_use.into_iter().enumerate().filter(|(node, _)| program.runs[*node]) {
            if bytes > totals.peak_bytes {
                (totals.peak_bytes, totals.peak_at) = (bytes, node);
            }
            if program.frozen[node] {
                continue;
            }
            let (read, written) = traffic(&program.graph, node);
            totals.num_calls += 1;
            totals.read_bytes += read;
            totals.written_bytes += written;
        }
        for again in &program.recomputed {
            let (reads, writes) = program.recomputes(again);
            let sum = |values: Vec<usize>| {
                values.iter().map(|&value| bytes(&program.graph.values[value])).sum::<u64>()
            };
            totals.num_calls += 1;
            totals.read_bytes += sum(reads);
            totals.written_bytes += sum(writes);
        }
        Self { totals, pieces }
    }
}

/// Bytes that a node reads and writes, each tensor once.
pub(super) fn traffic(graph: &Graph, node: usize) -> (u64, u64) {
    let node = &graph.nodes[node];
    let sum = |values: &mut dyn Iterator<Item = usize>| {
        let places: BTreeSet<_> = values
            .map(|value| &graph.values[value])
            .map(|value| (value.buffer, value.offset, &value.size, &value.stride, bytes(value)))
            .collect();
        places.into_iter().map(|(.., bytes)| bytes).sum::<u64>()
    };
    let reads = !node.makes_empty_tensor();
    let read = sum(&mut node.arguments.iter().flat_map(Operand::values).filter(|_| reads));
    (read, sum(&mut node.results.iter().flat_map(Operand::values).chain(node.written())))
}

/// Bytes of the elements of a value; those that repeat count once.
pub(super) fn bytes(value: &Value) -> u64 {
    let size = match value.dtype.as_str() {
        "ComplexDouble" => 16,
        "Double" | "Long" | "ComplexFloat" | "UInt64" => 8,
        "Float" | "Int" | "ComplexHalf" | "UInt32" => 4,
        "Half" | "BFloat16" | "Short" | "UInt16" => 2,
        _ => 1,
    };
    let sizes = value.size.iter().zip(&value.stride).filter(|(_, stride)| **stride != 0);
    size * sizes.map(|(size, _)| *size as u64).product::<u64>()
}

impl ShownGraph {
    fn new(recorded: &Graph, program: Program, plan_of_it: &GraphPlan, stats: PlanStats) -> Self {
        let before = passes::run(recorded, Passes::NONE, false);
        let (plan_before, _) = plan(before.clone(), plan_of_it.uses_out_variants);
        Self {
            label: String::new(),
            graph: recorded.clone(),
            recorded: Side::new(&before, &plan_before),
            compiled: Side::new(&program, plan_of_it),
            program,
            stats,
        }
    }

    /// What it is, such as `training_step`.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// The operators as they were recorded.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// What would run without the passes; views and what has no effect do not.
    pub fn recorded(&self) -> GraphTotals {
        self.recorded.totals
    }

    /// What runs after the passes.
    pub fn compiled(&self) -> GraphTotals {
        self.compiled.totals
    }

    /// What was planned for the replay.
    pub fn plan_stats(&self) -> PlanStats {
        self.stats
    }

    /// Operators that run as one, by the number of the last: the numbers of all.
    pub fn chains(&self) -> BTreeMap<usize, &[usize]> {
        self.program.chains.iter().map(|chain| (chain.planned.node, &chain.members[..])).collect()
    }

    /// Why an operator that runs is no part of a chain, or a chain that ends there is not longer; none of those that do not run.
    pub fn why(&self, node: usize) -> Option<String> {
        if !self.program.runs[node] || self.program.frozen[node] {
            return None;
        }
        let notes = self.program.notes.as_ref()?;
        let Some(why) = notes.whys.get(&node) else {
            return Some(
                "fuse_elementwise does not run: it is switched off, or there are no kernels".to_owned(),
            );
        };
        Some(match why.node {
            Some(node) => format!("{} {} {node}", why.what, self.graph.nodes[node].op),
            None => why.what.to_owned(),
        })
    }

    /// What becomes of an operator: `chain 3`, `alone`, or why it does not run.
    pub(super) fn fate(&self, node: usize) -> String {
        if let Some(chain) = self.program.chains.iter().position(|chain| chain.members.contains(&node)) {
            return format!("chain {chain}");
        }
        let left_out = self.program.notes.as_ref().and_then(|notes| notes.left_out.get(&node));
        match left_out {
            _ if self.program.runs[node] && self.program.frozen[node] => "constant",
            _ if self.program.runs[node] => "alone",
            Some(&"common_subexpressions") => "equal",
            Some(&"concatenations") => "joined",
            Some(&pass) => pass,
            None if self.graph.is_view(node) => "view",
            None if self.graph.nodes[node].makes_empty_tensor() => "memory",
            None => "no use",
        }
        .to_owned()
    }
}
