//! What holds of a program after each pass: nothing is read before it is there, and all that is seen outside happens.

use std::collections::BTreeSet;

use super::program::Program;
use crate::graph::ir::Operand;

/// Checks a program against the one before the pass; what is wrong is the error.
pub(super) fn check(program: &Program, before: &Program) -> Result<(), String> {
    reads_follow_writes(program)?;
    merged_buffers_are_alike(program)?;
    frozen_results_hold(program)?;
    recomputed_results_hold(program)?;
    let (now, then) = (effects(program), effects(before));
    match then.difference(&now).next() {
        Some((node, buffer)) => Err(format!("node {node} no longer writes buffer {buffer}")),
        None => chains_are_whole(program),
    }
}

/// Each buffer that a node reads was there, or was made before.
fn reads_follow_writes(program: &Program) -> Result<(), String> {
    let graph = &program.graph;
    let was_there = |buffer: usize| graph.buffers[buffer].made_by().is_none();
    let mut is_there: Vec<bool> = (0..graph.buffers.len()).map(was_there).collect();
    for (index, node) in graph.nodes.iter().enumerate() {
        let (reads, writes) = program.accesses(index);
        if !program.runs[index] {
            // memory without numbers in it
            if node.makes_empty_tensor() {
                writes.into_iter().for_each(|buffer| is_there[buffer] = true);
            }
            continue;
        }
        if let Some(buffer) = reads.iter().find(|buffer| !is_there[**buffer]) {
            return Err(format!("node {index} ({}) reads buffer {buffer} before it is made", node.op));
        }
        writes.into_iter().for_each(|buffer| is_there[buffer] = true);
    }
    Ok(())
}

/// What is frozen reads what was there before or is frozen, too, and nothing else writes to that or to the results.
fn frozen_results_hold(program: &Program) -> Result<(), String> {
    let was_there = |buffer: usize| program.graph.buffers[buffer].made_by().is_none();
    let mut constants = BTreeSet::new();
    for index in (0..program.runs.len()).filter(|&node| program.runs[node] && program.frozen[node]) {
        let (reads, writes) = program.accesses(index);
        if reads.iter().any(|&buffer| !was_there(buffer) && !program.is_kept_frozen(buffer)) {
            return Err(format!("frozen node {index} reads what is not"));
        }
        constants.extend(reads.into_iter().chain(writes));
    }
    let others = (0..program.runs.len()).filter(|&node| program.runs[node] && !program.frozen[node]);
    let mut writes =
        others.flat_map(|node| program.accesses(node).1.into_iter().map(move |buffer| (node, buffer)));
    match writes.find(|(_, buffer)| constants.contains(buffer)) {
        Some((node, buffer)) => Err(format!("node {node} writes to buffer {buffer}, which is frozen")),
        None => Ok(()),
    }
}

/// What is computed again reads what it read before, and gives what its node was the last to write there.
fn recomputed_results_hold(program: &Program) -> Result<(), String> {
    if program.recomputed.is_empty() {
        return Ok(());
    }
    let mut writers = vec![Vec::new(); program.graph.buffers.len()];
    for index in (0..program.runs.len()).filter(|&node| program.runs[node]) {
        program.writes(index).into_iter().for_each(|buffer| writers[buffer].push(index));
    }
    let mut earlier = 0;
    for again in &program.recomputed {
        let (node, before) = (again.node, again.before);
        let (reads, writes) = program.recomputes(again);
        let of = &program.graph.nodes[node];
        let has_order = node < before && earlier <= before && before < program.runs.len();
        let can_run = program.runs[node] && !program.frozen[node] && !of.writes && !of.has_hidden_effect();
        let buffer = |value: usize| program.graph.values[value].buffer;
        let last_writer = |value: usize| writers[buffer(value)].iter().rev().find(|&&writer| writer < before);
        let is_among =
            |operands: &[Operand], value| operands.iter().flat_map(Operand::values).any(|of| of == value);
        // a part of a chain reads what the chain gave there, even if that lies over what it read
        let gives = |value: usize| {
            is_among(&of.results, value) && (again.chain.is_some() || !is_among(&of.arguments, value))
        };
        let holds = |value: usize| match last_writer(value) {
            // what the node gave, and not what it read and wrote over
            Some(&writer) => writer < node || writer == node && gives(value),
            None => true,
        };
        let is_same = has_order && can_run && reads.into_iter().all(holds);
        if !is_same || !writes.into_iter().all(|value| last_writer(value) == Some(&node)) {
            return Err(format!("node {node} ({}) cannot run again before {before}", of.op));
        }
        earlier = before;
    }
    Ok(())
}

/// A merged buffer is as large as the earlier one that it is, which is no other's, and neither is used outside of the graph.
fn merged_buffers_are_alike(program: &Program) -> Result<(), String> {
    let merged = program.merged.iter().enumerate().filter(|(buffer, of)| buffer != *of);
    for (buffer, &of) in merged {
        let (own, other) = (&program.graph.buffers[buffer], &program.graph.buffers[of]);
        let is_right = of < buffer
            && program.merged[of] == of
            && own.bytes == other.bytes
            && own.is_on_cpu == other.is_on_cpu
            && !own.is_kept
            && !other.is_kept;
        if !is_right || program.graph.values.iter().any(|value| value.buffer == buffer) {
            return Err(format!("buffer {buffer} cannot be buffer {of}"));
        }
    }
    Ok(())
}

/// What is seen outside: the nodes that write memory which is there before or after, or have effects without results. The members of a
/// chain write what the chain does.
fn effects(program: &Program) -> BTreeSet<(usize, usize)> {
    let graph = &program.graph;
    let mut effects = BTreeSet::new();
    for (index, node) in graph.nodes.iter().enumerate().filter(|(index, _)| program.runs[*index]) {
        let chain = program.chains.iter().find(|chain| chain.planned.node == index);
        let members = chain.map_or(&[][..], |chain| &chain.members);
        for buffer in program.accesses(index).1 {
            if graph.buffers[buffer].is_kept || graph.buffers[buffer].made_by().is_none() {
                effects.extend(members.iter().chain([&index]).map(|node| (*node, buffer)));
            }
        }
        if node.has_hidden_effect() {
            effects.insert((index, usize::MAX));
        }
    }
    effects
}

/// No operator is in two chains, and none of a chain but the last runs by itself.
fn chains_are_whole(program: &Program) -> Result<(), String> {
    let mut members = BTreeSet::new();
    for chain in &program.chains {
        for &member in &chain.members {
            if !members.insert(member) || program.runs[member] != (member == chain.planned.node) {
                return Err(format!("node {member} runs twice"));
            }
        }
    }
    Ok(())
}
