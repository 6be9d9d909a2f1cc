//! Gradients of attention that are concatenated at once, as those of one layer for query, key and value are, are written there in the first
//! place.

use super::program::Program;
use crate::graph::ir::{Graph, Operand, Value};

/// Leaves out what only concatenates results that can lie there from the start.
pub(super) fn run(program: &mut Program) {
    for index in 0..program.graph.nodes.len() {
        if !program.runs[index] || program.graph.nodes[index].op != "aten::cat" {
            continue;
        }
        let Some(places) = places(program, index) else { continue };
        for (value, place) in places {
            program.graph.values[value] = place;
            program.moved.push(value);
        }
        program.runs[index] = false;
        program.num_joined += 1;
    }
}

/// The values that become parts of the result of a node, and where they lie in it; none if one cannot.
fn places(program: &Program, index: usize) -> Option<Vec<(usize, Value)>> {
    let graph = &program.graph;
    let node = &graph.nodes[index];
    let [Operand::Tensors(parts), Operand::Constant(dim)] = &node.arguments[..] else { return None };
    let [Operand::Tensor(result)] = node.results[..] else { return None };
    let result = &graph.values[usize::try_from(result).ok()?];
    let dim: i64 = dim.parse().ok()?;
    let dim = usize::try_from(if dim < 0 { dim + result.size.len() as i64 } else { dim }).ok()?;
    if !is_all_of_a_buffer(graph, result, index) || dim >= result.size.len() {
        return None;
    }
    let width = |value: &Value| value.size[dim..].iter().product::<i64>();
    let (mut places, mut start) = (Vec::new(), 0);
    for &part in parts {
        let part = &graph.values[usize::try_from(part).ok()?];
        let is_part = part.size.len() == result.size.len() && part.size[..dim] == result.size[..dim];
        let value = if is_part { only_source(program, part, index)? } else { return None };
        let source = &graph.values[value];
        if source.dtype != result.dtype || places.iter().any(|(other, _)| *other == value) {
            return None;
        }
        let stride = strides(source, width(part), width(result))?;
        places.push((value, Value { buffer: result.buffer, offset: start, stride, ..source.clone() }));
        start += width(part);
    }
    Some(places)
}

/// Whether a value is all of the memory that a node made for it, in the usual order, and is not visible outside the graph.
fn is_all_of_a_buffer(graph: &Graph, value: &Value, node: usize) -> bool {
    let buffer = &graph.buffers[value.buffer];
    let mut expected = 1;
    let is_dense = value.size.iter().zip(&value.stride).rev().all(|(&size, &stride)| {
        let fits = size == 1 || stride == expected;
        expected *= size;
        fits
    });
    let bytes = if value.dtype == "BFloat16" { 2 } else { 4 };
    matches!(value.dtype.as_str(), "Float" | "BFloat16")
        && is_dense
        && value.offset == 0
        && buffer.made_by() == Some(node)
        && !buffer.is_kept
        && buffer.bytes == bytes * expected as u64
}

/// The result of a gradient of attention that a value is seen of, if nothing but the node `reader` reads it.
fn only_source(program: &Program, part: &Value, reader: usize) -> Option<usize> {
    let graph = &program.graph;
    let maker = graph.buffers[part.buffer].made_by()?;
    let made = &graph.nodes[maker];
    let has_places = made.op == "aten::_scaled_dot_product_flash_attention_for_cpu_backward";
    let is_own = |value: &usize| graph.values[*value].buffer == part.buffer;
    let others = |node: &usize| program.runs[*node] && *node != maker && *node != reader;
    let is_read = |node: usize| graph.nodes[node].values().any(|value| is_own(&value));
    if !has_places
        || !program.runs[maker]
        || !is_all_of_a_buffer(graph, part, maker)
        || made.arguments.iter().flat_map(Operand::values).any(|value| is_own(&value))
        || (0..graph.nodes.len()).filter(others).any(is_read)
    {
        return None;
    }
    let mut results = made.results.iter().flat_map(Operand::values).filter(is_own);
    let result = results.next().filter(|result| graph.values[*result].offset == 0);
    result.filter(|_| results.next().is_none())
}

/// Strides of a value whose memory is pieces of `width` numbers, when these begin `new_width` numbers after each other.
fn strides(value: &Value, width: i64, new_width: i64) -> Option<Vec<i64>> {
    let mut last_within = 0;
    let dims = value.size.iter().zip(&value.stride);
    let strides = dims.map(|(size, stride)| {
        if stride % width == 0 {
            return stride / width * new_width;
        }
        last_within += (size - 1) * stride;
        *stride
    });
    let strides = strides.collect();
    (last_within < width).then_some(strides)
}
