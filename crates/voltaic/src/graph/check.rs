//! What cannot be replayed: results that go to the host, and shapes that depend on data.

use super::ir::{Graph, Node, Operand};
use crate::error::{GraphError, Problem};

/// Operators whose results have a shape that depends on data, though libtorch does not say so.
const DYNAMIC: [&str; 2] = ["aten::_pack_padded_sequence", "aten::_ctc_loss.Tensor"];

impl Graph {
    /// Why the recording cannot be replayed, with the operator and its place; none if it can.
    pub(super) fn problem(&self) -> Option<GraphError> {
        let found = self.nodes.iter().enumerate().find_map(|(index, node)| {
            let (what, remedy) = self.node_problem(index, node)?;
            Some((Some(index), what, remedy))
        });
        let refused = (!self.refusal.is_empty()).then(|| {
            let remedy = "leave it out of the graph: end the graph before it and begin another one after it";
            (usize::try_from(self.refused_node).ok(), self.refusal.clone(), remedy)
        });
        // the one that came first
        let first = match (found, refused) {
            (Some(found), Some(refused)) if refused.0 < found.0 => Some(refused),
            (found, refused) => found.or(refused),
        };
        first.map(|(index, reason, remedy)| {
            let op = index.map_or_else(|| "the code".to_owned(), |index| self.nodes[index].op.clone());
            let place =
                index.map_or_else(|| "before the first operator".to_owned(), |index| self.place(index));
            GraphError::NotCapturable { op, place, problem: Problem::new(reason, remedy) }
        })
    }

    /// The first tensor made here that something outside holds, though it is not `known` to be left behind.
    pub(super) fn kept_problem(&self, is_known: impl Fn(usize) -> bool) -> Option<GraphError> {
        let held =
            self.buffers.iter().enumerate().filter(|(index, buffer)| buffer.is_held && !is_known(*index));
        let node = held.filter_map(|(_, buffer)| buffer.made_by()).min()?;
        Some(GraphError::NotCapturable {
            op: self.nodes[node].op.clone(),
            place: self.place(node),
            problem: Problem::new(
                "the code keeps its result, which a replay does not make again",
                "return it, give it to ctx.output(), or copy it into a tensor that is there before",
            ),
        })
    }

    fn node_problem(&self, index: usize, node: &Node) -> Option<(String, &'static str)> {
        const SPLIT: &str = "compute it on the device, or leave it between two graphs (mark_step)";
        if node.reads_data {
            return Some((
                "its result is read back to the host, where the code may depend on it".to_owned(),
                SPLIT,
            ));
        }
        let is_dynamic = node.has_dynamic_shape || DYNAMIC.contains(&node.op.as_str());
        if is_dynamic && self.depends_on_data(node) {
            let what = "the shape of its result depends on data".to_owned();
            return Some((what, "use a mask or where(), or leave it between two graphs (mark_step)"));
        }
        self.copies_to_host(index).then(|| ("it copies from the device to the host".to_owned(), SPLIT))
    }

    /// Indexing has a fixed shape unless an index is a mask.
    fn depends_on_data(&self, node: &Node) -> bool {
        if node.name() != "index" {
            return true;
        }
        let indices = node.arguments.iter().filter(|argument| matches!(argument, Operand::Tensors(_)));
        indices
            .flat_map(Operand::values)
            .any(|value| matches!(self.values[value].dtype.as_str(), "Bool" | "Byte"))
    }

    fn copies_to_host(&self, index: usize) -> bool {
        let node = &self.nodes[index];
        let mut arguments = node.arguments.iter().flat_map(Operand::values);
        let mut results = node.results.iter().flat_map(Operand::values);
        arguments.any(|value| !self.buffer_of(value).is_on_cpu)
            && results.any(|value| self.buffer_of(value).is_on_cpu)
    }
}
