//! A result that another operator has computed already is taken from there.

use std::collections::HashMap;

use super::program::Program;
use crate::graph::ir::{Node, Operand, Value};

/// Merges the results of operators that compute the same from the same, as long as the earlier result would be kept anyway: a result
/// that a backward pass computes again, to save memory, is left alone.
pub(super) fn run(program: &mut Program) {
    let is_written = written_later(program);
    let mut last_reads = last_reads(program);
    let mut known: HashMap<String, usize> = HashMap::new();
    let mut last_writes = vec![0_usize; program.graph.buffers.len()];
    for index in 0..program.graph.nodes.len() {
        if !program.runs[index] {
            continue;
        }
        if let Some(result) = only_result(program, index)
            && !is_written[program.graph.values[result].buffer]
        {
            let key = key(program, &program.graph.nodes[index], &program.graph.values[result]);
            if let Some(&earlier) = known.get(&key)
                && is_same(program, (earlier, index), &last_writes, &last_reads)
            {
                let buffer = program.graph.values[result].buffer;
                merge(program, earlier, index);
                let kept = program.merged[buffer];
                last_reads[kept] = last_reads[kept].max(last_reads[buffer]);
                continue;
            }
            known.insert(key, index);
        }
        for buffer in program.accesses(index).1 {
            last_writes[buffer] = index + 1;
        }
    }
}

/// Whether no node that runs reads other values than the earlier one did, whose result is still needed.
fn is_same(
    program: &Program,
    (earlier, now): (usize, usize),
    last_writes: &[usize],
    last_reads: &[Option<usize>],
) -> bool {
    let (reads, _) = program.accesses(earlier);
    let Some(result) = only_result(program, earlier) else { return false };
    reads.iter().all(|&buffer| last_writes[buffer] <= earlier)
        && last_reads[program.graph.values[result].buffer].is_some_and(|reader| reader >= now)
}

/// The result of a node that computes one new tensor from its arguments and nothing else.
fn only_result(program: &Program, index: usize) -> Option<usize> {
    let node = &program.graph.nodes[index];
    let is_pure = !node.writes && !node.has_hidden_effect() && !node.reads_data && !node.changes_view;
    match node.results[..] {
        [Operand::Tensor(value)] if is_pure => {
            let value = usize::try_from(value).ok()?;
            let buffer = program.graph.buffer_of(value);
            (buffer.made_by() == Some(index) && !buffer.is_kept).then_some(value)
        }
        _ => None,
    }
}

/// Buffers that a node writes to after the one that made them.
pub(super) fn written_later(program: &Program) -> Vec<bool> {
    let mut is_written = vec![false; program.graph.buffers.len()];
    for (index, _) in program.runs.iter().enumerate().filter(|(_, runs)| **runs) {
        for buffer in program.accesses(index).1 {
            is_written[buffer] |= program.graph.buffers[buffer].made_by() != Some(index);
        }
    }
    is_written
}

fn last_reads(program: &Program) -> Vec<Option<usize>> {
    let mut last = vec![None; program.graph.buffers.len()];
    for (index, _) in program.runs.iter().enumerate().filter(|(_, runs)| **runs) {
        for buffer in program.accesses(index).0 {
            last[buffer] = Some(index);
        }
    }
    last
}

/// The same text for the same operator with the same arguments, whose result lies in memory in the same way.
fn key(program: &Program, node: &Node, result: &Value) -> String {
    let place = |value: &Value| {
        let buffer = &program.graph.buffers[value.buffer];
        // a number that became a tensor is another one each time; its hash tells numbers of up to 8 bytes apart
        let from = match (buffer.is_constant, buffer.content) {
            (true, Some(content)) if buffer.bytes <= 8 => format!("constant {} {content}", buffer.bytes),
            _ => format!("buffer {}", value.buffer),
        };
        format!("{from} {} {} {:?} {:?}", value.dtype, value.offset, value.size, value.stride)
    };
    let tensor = |&index: &i64| {
        usize::try_from(index).map_or_else(|_| "none".to_owned(), |at| place(&program.graph.values[at]))
    };
    let operand = |operand: &Operand| match operand {
        Operand::Constant(text) => text.clone(),
        Operand::Tensor(index) => tensor(index),
        Operand::Tensors(indices) => format!("{:?}", indices.iter().map(tensor).collect::<Vec<_>>()),
    };
    let arguments: Vec<String> = node.arguments.iter().map(operand).collect();
    let Value { dtype, offset, size, stride, .. } = result;
    format!("{} {arguments:?} {dtype} {offset} {size:?} {stride:?}", node.op)
}

/// Takes the result of `earlier` for that of `now`, which does not run.
fn merge(program: &mut Program, earlier: usize, now: usize) {
    let (Some(kept), Some(dropped)) = (only_result(program, earlier), only_result(program, now)) else {
        return;
    };
    let (kept, dropped) = (program.graph.values[kept].buffer, program.graph.values[dropped].buffer);
    program.merge(kept, dropped);
    program.num_merged += 1;
    program.runs[now] = false;
}
