//! Cheap results of a forward pass are computed again where backward needs them, as far as that lowers the most memory in use at once.
//!
//! A result lies at the same place again, so that what reads it stays as it is, and other memory lies there meanwhile. What computes it again
//! is what computed it, a node or the part of a chain that it takes, from what memory still holds then: results are the same bit for bit.
//! What is taken, one result after the other, is where the most memory is in use, for as long as that falls.

use std::collections::BTreeSet;

use super::elementwise::is_float;
use super::memory::{Life, Usage};
use super::program::{Program, Recomputed};
use crate::ffi::PlannedChain;
use crate::graph::ir::{Graph, Operand};
use crate::kernels::{ChainOp, ChainStep};

/// A result is looked at if it is at least this part of the most memory in use at once.
const SMALLEST_PART: i64 = 1000;

/// Operators that read each number about once, beside those of chains; without what ends in `_`, which writes over what it reads.
const CHEAP: &[&str] = &[
    "abs",
    "add",
    "bitwise_and",
    "bitwise_not",
    "bitwise_or",
    "cat",
    "clamp",
    "clone",
    "cos",
    "div",
    "elu",
    "eq",
    "exp",
    "fill",
    "ge",
    "gelu",
    "gt",
    "hardtanh",
    "le",
    "leaky_relu",
    "log",
    "log_sigmoid",
    "logical_and",
    "logical_not",
    "logical_or",
    "lt",
    "masked_fill",
    "mul",
    "native_layer_norm",
    "ne",
    "neg",
    "pow",
    "reciprocal",
    "relu",
    "rsqrt",
    "rsub",
    "sigmoid",
    "silu",
    "sin",
    "softplus",
    "sqrt",
    "sub",
    "tanh",
    "where",
    "_log_softmax",
    "_softmax",
    "_to_copy",
];

/// Computes again what lowers the peak of memory.
pub(super) fn run(program: &mut Program) {
    if program.graph.nodes.iter().all(|node| node.backward_node.is_empty()) {
        return;
    }
    let before = Usage::of(program).peak().0;
    program.recomputed = chosen(program);
    if Usage::of(program).peak().0 >= before {
        program.recomputed.clear();
    }
}

/// What lowers the most memory in use at once, in the order in which it runs.
fn chosen(program: &Program) -> Vec<Recomputed> {
    let mut plan = Plan::of(program);
    let mut lowest = plan.usage.peak().0;
    let mut candidates = plan.candidates(lowest / SMALLEST_PART);
    let mut num_taken = 0;
    loop {
        let (peak, at) = plan.usage.peak();
        let Some((index, best)) = plan.best(&candidates, at) else { break };
        candidates.remove(index);
        if plan.take(best, peak) && plan.usage.peak().0 < lowest {
            (lowest, num_taken) = (plan.usage.peak().0, plan.taken.len());
        }
    }
    let mut taken = plan.taken;
    taken.truncate(num_taken); // what came later has not lowered the peak
    taken.sort_by_key(|again| (again.before, again.node));
    taken
}

/// A result that may be computed again.
struct Candidate {
    again: Recomputed,
    buffer: usize,
    /// When its memory is free then.
    free: Life,
    /// How much longer other buffers must hold what they hold.
    longer: Vec<(usize, Life)>,
}

/// A program while it is decided what is computed again.
struct Plan<'a> {
    program: &'a Program,
    usage: Usage,
    /// Per buffer: the nodes that use it, in order.
    uses: Vec<Vec<usize>>,
    /// Per buffer: the first and the last node that writes to it.
    writers: Vec<Option<(usize, usize)>>,
    /// Per buffer: when it holds nothing, since it is computed again.
    free: Vec<Option<Life>>,
    /// Per node: its place among the chains.
    chains: Vec<Option<usize>>,
    taken: Vec<Recomputed>,
}

impl<'a> Plan<'a> {
    fn of(program: &'a Program) -> Self {
        let (num_nodes, num_buffers) = (program.graph.nodes.len(), program.graph.buffers.len());
        let mut plan = Plan {
            program,
            usage: Usage::of(program),
            uses: vec![Vec::new(); num_buffers],
            writers: vec![None; num_buffers],
            free: vec![None; num_buffers],
            chains: vec![None; num_nodes],
            taken: Vec::new(),
        };
        for index in (0..num_nodes).filter(|&node| program.runs[node]) {
            let (reads, _) = program.accesses(index);
            let writes = program.writes(index);
            for &buffer in &writes {
                plan.writers[buffer] =
                    Some(plan.writers[buffer].map_or((index, index), |(first, _)| (first, index)));
            }
            reads.union(&writes).for_each(|&buffer| plan.uses[buffer].push(index));
        }
        for (at, chain) in program.chains.iter().enumerate() {
            plan.chains[chain.planned.node] = Some(at);
        }
        plan
    }

    /// Nodes of forward and which of their results may be computed again, if it is as large as `bytes`.
    fn candidates(&self, bytes: i64) -> Vec<(usize, usize)> {
        let graph = &self.program.graph;
        let is_running = |&node: &usize| self.program.runs[node] && !self.program.frozen[node];
        let nodes = (0..graph.nodes.len()).filter(is_running).filter(|&node| {
            graph.nodes[node].backward_node.is_empty()
                && (self.chains[node].is_some() || is_cheap(graph, node))
        });
        let results = nodes.flat_map(|node| {
            let values = graph.nodes[node].results.iter().flat_map(Operand::values);
            values.map(move |value| (node, value))
        });
        results
            .filter(|&(node, value)| self.is_own(node, value) && graph.buffer_of(value).bytes as i64 > bytes)
            .collect()
    }

    /// Whether a result is in planned memory that nothing but its node writes to.
    fn is_own(&self, node: usize, value: usize) -> bool {
        let buffer = self.program.graph.values[value].buffer;
        self.is_planned(buffer) && self.writers[buffer] == Some((node, node))
    }

    /// Whether a buffer has planned memory for as long as it is used.
    fn is_planned(&self, buffer: usize) -> bool {
        let of = &self.program.graph.buffers[buffer];
        of.made_by().is_some() && !of.is_kept && !self.program.is_kept_frozen(buffer)
    }

    /// What saves most where the most memory is in use.
    fn best(&self, candidates: &[(usize, usize)], at: usize) -> Option<(usize, Candidate)> {
        let mut best: Option<(u64, usize, Candidate)> = None;
        for (index, &(node, value)) in candidates.iter().enumerate() {
            let Some(candidate) = self.candidate(node, value, at) else { continue };
            let saved = self.saved(&candidate, at);
            if saved > best.as_ref().map_or(0, |(most, ..)| *most) {
                best = Some((saved, index, candidate));
            }
        }
        best.map(|(_, index, candidate)| (index, candidate))
    }

    /// Bytes that a candidate saves at a node.
    fn saved(&self, candidate: &Candidate, at: usize) -> u64 {
        let bytes = |buffer: usize| self.program.graph.buffers[buffer].bytes;
        let is_then = |(_, life): &&(usize, Life)| life.0 <= at && at <= life.1;
        let longer: u64 = candidate.longer.iter().filter(is_then).map(|(buffer, _)| bytes(*buffer)).sum();
        bytes(candidate.buffer).saturating_sub(longer)
    }

    /// A result computed again, so that its memory is free at a node; none if it is used there, or what computes it is gone later.
    fn candidate(&self, node: usize, value: usize, at: usize) -> Option<Candidate> {
        let graph = &self.program.graph;
        let buffer = graph.values[value].buffer;
        let next = self.uses[buffer].partition_point(|&user| user < at);
        let (&last, &before) = (self.uses[buffer].get(next.checked_sub(1)?)?, self.uses[buffer].get(next)?);
        if before == at || self.free[buffer].is_some() || graph.nodes[before].backward_node.is_empty() {
            return None;
        }
        let chain = match self.chains[node] {
            Some(chain) => Some(self.part(&self.program.chains[chain].planned, value, before)?),
            None => None,
        };
        let again = Recomputed { node, before, chain };
        let (reads, writes) = self.program.recomputes(&again);
        let mut longer = Vec::new();
        for buffer in reads.into_iter().map(|value| graph.values[value].buffer).collect::<BTreeSet<_>>() {
            if self.writers[buffer].is_some_and(|(_, last)| last > node) {
                return None;
            }
            longer.extend(self.longer(buffer, before).map(|life| (buffer, life)));
        }
        let is_right = writes.into_iter().all(|value| self.is_own(node, value));
        is_right.then_some(Candidate { again, buffer, free: (last + 1, before - 1), longer })
    }

    /// How much longer a buffer must hold what it holds, so that it is there at a node; none if it is anyway.
    fn longer(&self, buffer: usize, at: usize) -> Option<Life> {
        let uses = &self.uses[buffer];
        let next = uses.partition_point(|&user| user < at);
        let is_free = self.free[buffer].is_some_and(|(first, last)| first <= at && at <= last);
        let is_there = !self.is_planned(buffer) || next < uses.len() && !is_free;
        let last = uses.get(next.checked_sub(1)?)?;
        (!is_there).then_some((last + 1, at))
    }

    /// What of a chain computes a result again. It reads other results of the chain that are there, and not what the chain wrote over.
    fn part(&self, chain: &PlannedChain, wanted: usize, before: usize) -> Option<PlannedChain> {
        let graph = &self.program.graph;
        let num_inputs = chain.inputs.len();
        let buffer_of = |value: i64| usize::try_from(value).ok().map(|value| graph.values[value].buffer);
        let is_there = |&(value, _): &(i64, i64)| {
            chain.outputs.iter().all(|&output| buffer_of(output) != buffer_of(value))
        };
        let inputs = chain.inputs.iter().copied().zip(chain.periods.iter().copied());
        let mut sources: Vec<Option<(i64, i64)>> = inputs.map(|input| Some(input).filter(is_there)).collect();
        sources.resize(num_inputs + chain.steps.len(), None);
        let at = chain.outputs.iter().position(|&output| output == wanted as i64)?;
        let register = usize::try_from(chain.registers[at]).ok()?;
        for (other, &value) in chain.outputs.iter().enumerate().filter(|(other, _)| *other != at) {
            let (index, period) = (usize::try_from(value).ok()?, chain.output_periods[other]);
            let from = usize::try_from(chain.registers[other]).ok()?;
            let is_exact = match graph.values[index].dtype.as_str() {
                "Float" => true,
                _ => from >= num_inputs && chain.steps[from - num_inputs].op == ChainOp::Round,
            };
            let is_alike = is_float(&graph.values[index]) && (period == chain.len || period == 0);
            let buffer = graph.values[index].buffer;
            if from >= num_inputs
                && is_exact
                && is_alike
                && self.writers[buffer].is_some_and(|(_, last)| last == chain.node)
                && self.longer(buffer, before).is_none()
            {
                sources[from] = Some((value, period));
            }
        }
        let output = (wanted as i64, chain.output_periods[at]);
        if output.1 == chain.len { cut(chain, &sources, register, output) } else { None }
    }

    /// Decides for a candidate, unless the most memory in use at once would be more than `peak`. Gives whether it did.
    fn take(&mut self, candidate: Candidate, peak: i64) -> bool {
        let Candidate { again, buffer, free, longer } = candidate;
        let mut changes = vec![(buffer, free, -1)];
        changes.extend(longer.iter().map(|&(buffer, life)| (buffer, life, 1)));
        let program = self.program;
        let bytes = |buffer: usize| program.graph.buffers[buffer].bytes as i64;
        changes.iter().for_each(|&(buffer, life, sign)| self.usage.add(life, sign * bytes(buffer)));
        if self.usage.peak().0 > peak {
            changes.iter().for_each(|&(buffer, life, sign)| self.usage.add(life, -sign * bytes(buffer)));
            return false;
        }
        for (buffer, (_, last)) in longer {
            if let Some(free) = self.free[buffer].as_mut().filter(|free| free.0 <= last && last <= free.1) {
                free.0 = last + 1;
            }
        }
        for value in program.recomputes(&again).0 {
            let buffer = program.graph.values[value].buffer;
            if let Err(at) = self.uses[buffer].binary_search(&again.before) {
                self.uses[buffer].insert(at, again.before);
            }
        }
        self.free[buffer] = Some(free);
        self.taken.push(again);
        true
    }
}

/// Whether a node computes new tensors from its arguments alone, with little work.
fn is_cheap(graph: &Graph, index: usize) -> bool {
    let node = &graph.nodes[index];
    node.is_pure() && node.op.starts_with("aten::") && CHEAP.contains(&node.name())
}

/// The steps of a chain that a register needs; none if an input is gone. `sources` are the registers that are read from memory: values and
/// their periods.
fn cut(
    chain: &PlannedChain,
    sources: &[Option<(i64, i64)>],
    register: usize,
    (output, output_period): (i64, i64),
) -> Option<PlannedChain> {
    let num_inputs = chain.inputs.len();
    let mut is_needed = vec![false; sources.len()];
    is_needed[register] = true;
    for at in (num_inputs..=register).rev().filter(|&at| sources[at].is_none()) {
        let ChainStep { a, b, .. } = chain.steps[at - num_inputs];
        let now = is_needed[at];
        is_needed[a] |= now;
        is_needed[b] |= now;
    }
    if (0..num_inputs).any(|at| is_needed[at] && sources[at].is_none()) {
        return None;
    }
    let read: Vec<usize> = (0..sources.len()).filter(|&at| is_needed[at] && sources[at].is_some()).collect();
    let steps: Vec<usize> = (0..sources.len()).filter(|&at| is_needed[at] && sources[at].is_none()).collect();
    let mut places = vec![0; sources.len()];
    read.iter().chain(&steps).enumerate().for_each(|(place, &at)| places[at] = place);
    let step = |&at: &usize| {
        let step = chain.steps[at - num_inputs];
        ChainStep { a: places[step.a], b: places[step.b], ..step }
    };
    let (inputs, periods) = read.iter().filter_map(|&at| sources[at]).unzip();
    Some(PlannedChain {
        node: chain.node,
        len: chain.len,
        row: chain.row,
        steps: steps.iter().map(step).collect(),
        inputs,
        periods,
        outputs: vec![output],
        registers: vec![places[register] as i32],
        output_periods: vec![output_period],
    })
}
