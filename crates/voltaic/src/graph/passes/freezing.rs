//! What depends on constants alone, and where nothing has gradients on weights, is computed once, and again only after weights were
//! written to.
//!
//! Its results lie in memory of their own from replay to replay. So only those are frozen that need no more of it than what they are
//! computed from: a cast to fewer bits, a transposed copy, a sum; not a weight that is stored in few bits and read in many.

use std::collections::BTreeSet;

use super::common_subexpressions::written_later;
use super::program::Program;
use crate::graph::ir::Operand;

/// Results that are frozen whatever they are computed from.
const SMALL: u64 = 64 << 10;

/// Marks what depends on constants of the graph alone, or on nothing.
pub(super) fn of_constants(program: &mut Program) {
    run(program, |program, buffer| program.graph.holds_constant(buffer));
}

/// Marks what depends on weights, too.
pub(super) fn of_weights(program: &mut Program) {
    run(program, |program, buffer| {
        program.graph.holds_constant(buffer) || program.graph.holds_weight(buffer)
    });
}

fn run(program: &mut Program, is_given: fn(&Program, usize) -> bool) {
    let is_written = written_later(program);
    let buffers = 0..program.graph.buffers.len();
    let mut is_constant: Vec<bool> =
        buffers.map(|buffer| is_given(program, buffer) && !is_written[buffer]).collect();
    for index in 0..program.graph.nodes.len() {
        if program.runs[index] && can_freeze(program, index, &is_written, &is_constant) {
            program.frozen[index] = true;
            program.accesses(index).1.into_iter().for_each(|buffer| is_constant[buffer] = true);
        }
    }
}

fn can_freeze(program: &Program, index: usize, is_written: &[bool], is_constant: &[bool]) -> bool {
    let (graph, node) = (&program.graph, &program.graph.nodes[index]);
    let (reads, makes) = program.accesses(index);
    let is_own = |&buffer: &usize| {
        let made = &graph.buffers[buffer];
        made.made_by() == Some(index) && !made.is_kept && !is_written[buffer]
    };
    let bytes =
        |buffers: &BTreeSet<usize>| buffers.iter().map(|&buffer| graph.buffers[buffer].bytes).sum::<u64>();
    node.is_pure()
        && node.results.iter().flat_map(Operand::values).next().is_some()
        && reads.iter().all(|&buffer| is_constant[buffer])
        && makes.iter().all(is_own)
        && bytes(&makes) <= bytes(&reads).max(SMALL)
}
