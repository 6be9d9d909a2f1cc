//! A chain writes over what it reads for the last time: fewer lines of the caches, and less memory.

use super::program::{Chain, Program};

/// Has the results of chains lie in the memory of operands that nothing reads later.
pub(super) fn run(program: &mut Program) {
    let (first, mut last) = uses(program);
    for at in 0..program.chains.len() {
        for output in program.chains[at].planned.outputs.clone() {
            let Ok(output) = usize::try_from(output) else { continue };
            let node = program.chains[at].planned.node;
            let buffer = program.graph.values[output].buffer;
            if first[buffer] != Some(node) || !is_free(program, output) {
                continue;
            }
            let over = dead_input(program, &program.chains[at], output, |buffer| last[buffer] == Some(node));
            if let Some(over) = over {
                program.merge(over, buffer);
                program.num_in_place += 1;
                last[over] = last[buffer];
            }
        }
    }
}

/// Whether a value is all of a buffer that the graph makes and that is not visible outside it.
fn is_free(program: &Program, value: usize) -> bool {
    let value = &program.graph.values[value];
    let buffer = &program.graph.buffers[value.buffer];
    let bytes = if value.dtype == "BFloat16" { 2 } else { 4 };
    let numbers: i64 = value.size.iter().product();
    buffer.made_by().is_some()
        && !buffer.is_kept
        && value.offset == 0
        && buffer.bytes == bytes * numbers as u64
}

/// The buffer of an input which is read number by number where the output is written, for the last time, and which the chain uses in no
/// other way.
fn dead_input(
    program: &Program,
    chain: &Chain,
    output: usize,
    is_last: impl Fn(usize) -> bool,
) -> Option<usize> {
    let planned = &chain.planned;
    let value_of = |value: i64| usize::try_from(value).ok();
    let buffer_of = |value: usize| program.graph.values[value].buffer;
    let is_used_once = |buffer: usize| {
        let operands = planned.inputs.iter().chain(&planned.outputs).filter_map(|value| value_of(*value));
        operands.filter(|value| buffer_of(*value) == buffer).count() == 1
    };
    let is_whole = |at: usize| planned.periods[at] == planned.len;
    let inputs = planned.inputs.iter().enumerate().filter(|(at, _)| is_whole(*at));
    let (own, values) = (buffer_of(output), &program.graph.values);
    let mut buffers = inputs.filter_map(|(_, value)| value_of(*value)).filter(|&input| {
        let (other, now) = (&program.graph.buffers[buffer_of(input)], &program.graph.buffers[own]);
        values[input].dtype == values[output].dtype
            && values[input].size.iter().product::<i64>() == planned.len
            && is_free(program, input)
            && !program.is_kept_frozen(buffer_of(input))
            && is_last(buffer_of(input))
            && is_used_once(buffer_of(input))
            && buffer_of(input) < own
            && (other.bytes, other.is_on_cpu) == (now.bytes, now.is_on_cpu)
    });
    buffers.next().map(buffer_of)
}

/// The first and the last node that runs and uses a buffer, by buffer.
fn uses(program: &Program) -> (Vec<Option<usize>>, Vec<Option<usize>>) {
    let mut first = vec![None; program.graph.buffers.len()];
    let mut last = first.clone();
    for (index, node) in program.graph.nodes.iter().enumerate().filter(|(index, _)| program.runs[*index]) {
        for value in node.values() {
            let buffer = program.graph.values[value].buffer;
            first[buffer].get_or_insert(index);
            last[buffer] = Some(index);
        }
    }
    for again in &program.recomputed {
        let (reads, writes) = program.recomputes(again);
        for value in reads.into_iter().chain(writes) {
            let buffer = program.graph.values[value].buffer;
            last[buffer] = last[buffer].max(Some(again.before));
        }
    }
    (first, last)
}
