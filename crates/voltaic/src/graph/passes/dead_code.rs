//! What has no effect is not run. Graphs that are not compiled have this pass, too.

use super::program::Program;
use crate::graph::ir::{Graph, Operand};

/// Runs only the nodes whose effect is seen outside the graph, and those that they need.
pub(super) fn run(program: &mut Program) {
    program.runs = needed_nodes(&program.graph);
}

fn needed_nodes(graph: &Graph) -> Vec<bool> {
    let mut is_read: Vec<bool> = graph.buffers.iter().map(|buffer| buffer.is_kept).collect();
    let mut runs = vec![false; graph.nodes.len()];
    for (index, node) in graph.nodes.iter().enumerate().rev() {
        if graph.is_view(index) || node.makes_empty_tensor() {
            continue;
        }
        // an operator may write to a tensor beside those that it gives, as casts to float8 do to a history
        let is_seen = node.results.iter().flat_map(Operand::values).chain(node.written()).any(|value| {
            let buffer = graph.values[value].buffer;
            is_read[buffer] || graph.buffers[buffer].made_by().is_none()
        });
        if !is_seen && !node.has_hidden_effect() {
            continue;
        }
        runs[index] = true;
        for value in node.arguments.iter().flat_map(Operand::values) {
            is_read[graph.values[value].buffer] = true;
        }
    }
    runs
}
