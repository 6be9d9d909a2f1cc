//! A recorded graph as data: operators, the values they take and give, and the memory behind the values.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write as _};
use std::ops::Range;

use serde::Deserialize;

/// Operators in the order in which they ran, below autograd: of forward, backward and optimizer alike.
///
/// Printed with `Display` it is one line for each operator; [`Graph::to_dot`] draws it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Graph {
    /// The operators.
    pub nodes: Vec<Node>,
    /// What they take and give.
    pub values: Vec<Value>,
    /// The memory of the values.
    pub buffers: Vec<Buffer>,
    pub(super) refusal: String,
    pub(super) refused_node: i64,
    /// It works on a Gaudi card, not on an emulated one.
    #[serde(default)]
    pub(super) is_on_card: bool,
    #[serde(skip)]
    pub(super) names: BTreeMap<usize, String>,
}

/// One call of an operator.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Node {
    /// Its name with overload, such as `aten::add.Tensor`.
    pub op: String,
    /// What it was called with.
    pub arguments: Vec<Operand>,
    /// What it gave.
    pub results: Vec<Operand>,
    pub(super) blocks: Vec<Block>,
    /// It writes to an argument.
    #[serde(default)]
    pub writes: bool,
    /// Positions of the arguments that it writes to.
    #[serde(default)]
    pub(super) written: Vec<usize>,
    /// It draws random numbers.
    #[serde(default)]
    pub is_random: bool,
    #[serde(default)]
    pub(super) reads_data: bool,
    #[serde(default)]
    pub(super) has_dynamic_shape: bool,
    #[serde(default)]
    pub(super) changes_view: bool,
    /// Where the caller said that it was; empty if he did not.
    pub scope: String,
    /// The node of autograd that called it, such as `AddmmBackward0`; empty outside a backward pass.
    pub backward_node: String,
}

/// An argument or a result.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Operand {
    /// Anything but tensors, as text.
    Constant(String),
    /// Index of a value; -1 for none.
    Tensor(i64),
    /// Indices of values.
    Tensors(Vec<i64>),
}

impl Operand {
    /// Indices of the values, without those that are absent.
    pub fn values(&self) -> impl Iterator<Item = usize> {
        let indices = match self {
            Self::Constant(_) => &[][..],
            Self::Tensor(index) => std::slice::from_ref(index),
            Self::Tensors(indices) => indices,
        };
        indices.iter().filter_map(|&index| usize::try_from(index).ok())
    }
}

/// A tensor: a buffer, and how the tensor lies in it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Value {
    /// Index of its buffer.
    pub buffer: usize,
    /// libtorch's name of its dtype, such as `Float`.
    pub dtype: String,
    /// Where it begins in the buffer, in elements.
    pub offset: i64,
    /// Its shape.
    pub size: Vec<i64>,
    /// Its strides, in elements.
    pub stride: Vec<i64>,
}

/// Memory of one or more values.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Buffer {
    /// Its size.
    pub bytes: u64,
    node: i64,
    /// A tensor outside the graph shares it when the recording ends.
    pub is_kept: bool,
    pub(super) is_on_cpu: bool,
    /// A tensor outside shares it when the recording is read, though the graph made it.
    #[serde(default)]
    pub(super) is_held: bool,
    /// If it was there before or is kept.
    #[serde(default)]
    pub(super) address: u64,
    /// It was there before, and nothing outside the graph holds it: a constant.
    #[serde(default)]
    pub(super) is_constant: bool,
    /// It is a parameter whose changes are watched.
    #[serde(skip)]
    pub(super) is_weight: bool,
    /// It was there before, and the graph or another one of the same capture writes to it.
    #[serde(skip)]
    pub(super) is_written: bool,
    /// Hash of what it holds, if it was there before and has no name.
    #[serde(skip)]
    pub(super) content: Option<u64>,
}

impl Buffer {
    /// Index of the node that made it; none if it was there before, as weights and inputs are.
    pub fn made_by(&self) -> Option<usize> {
        usize::try_from(self.node).ok()
    }
}

/// What a kernel took from the allocator.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Block {
    pub(super) bytes: u64,
    /// Whose memory it is; negative if it belongs to no value.
    buffer: i64,
    pub(super) is_given_back: bool,
}

impl Block {
    /// Memory that the kernel uses while it runs only.
    pub(super) fn is_temporary(&self) -> bool {
        self.is_given_back && self.buffer < 0
    }
}

/// Operators that make tensors without computing anything.
const EMPTIES: [&str; 6] =
    ["empty", "empty_strided", "empty_like", "empty_permuted", "new_empty", "new_empty_strided"];

impl Node {
    /// Name without `aten::` and overload.
    pub fn name(&self) -> &str {
        let name = self.op.split_once("::").map_or(self.op.as_str(), |(_, name)| name);
        name.split('.').next().unwrap_or(name)
    }

    /// The values it takes, then those it gives.
    pub(super) fn values(&self) -> impl Iterator<Item = usize> {
        self.arguments.iter().chain(&self.results).flat_map(Operand::values)
    }

    pub(super) fn makes_empty_tensor(&self) -> bool {
        EMPTIES.contains(&self.name())
    }

    /// The values that it writes to.
    pub(super) fn written(&self) -> impl Iterator<Item = usize> {
        self.written.iter().filter_map(|&position| self.arguments.get(position)).flat_map(Operand::values)
    }

    /// It may change memory that no result shows.
    pub(super) fn has_hidden_effect(&self) -> bool {
        self.is_random || self.results.is_empty() || self.name().contains("batch_norm")
    }

    /// It computes new tensors from its arguments alone, of sizes that their sizes tell.
    pub(super) fn is_pure(&self) -> bool {
        !self.writes
            && !self.has_hidden_effect()
            && !self.reads_data
            && !self.has_dynamic_shape
            && !self.changes_view
            && self.written().next().is_none()
    }
}

impl Graph {
    /// Number of operators.
    pub fn num_nodes(&self) -> usize {
        self.nodes.len()
    }

    /// How often each operator occurs, by name with overload.
    pub fn op_counts(&self) -> BTreeMap<&str, usize> {
        let mut counts = BTreeMap::new();
        for node in &self.nodes {
            *counts.entry(node.op.as_str()).or_insert(0) += 1;
        }
        counts
    }

    /// Name given to a buffer that was there before the recording, such as the fqn of a parameter.
    pub fn buffer_name(&self, buffer: usize) -> Option<&str> {
        self.names.get(&buffer).map(String::as_str)
    }

    pub(super) fn buffer_of(&self, value: usize) -> &Buffer {
        &self.buffers[self.values[value].buffer]
    }

    /// Notes which buffers that were there before the graphs of one capture write.
    pub(super) fn note_writes(graphs: &mut [Self]) {
        let mut written = BTreeSet::new();
        for graph in &*graphs {
            let was_there = |buffer: &usize| graph.buffers[*buffer].made_by().is_none();
            let found = (0..graph.buffers.len()).filter(was_there).filter(|&buffer| graph.writes_to(buffer));
            written.extend(found.map(|buffer| graph.buffers[buffer].address));
        }
        for buffer in graphs.iter_mut().flat_map(|graph| &mut graph.buffers) {
            buffer.is_written = buffer.made_by().is_none() && written.contains(&buffer.address);
        }
    }

    /// Whether a buffer is a constant: it was there before, nothing else refers to it, and nothing writes to it.
    pub(super) fn holds_constant(&self, index: usize) -> bool {
        let buffer = &self.buffers[index];
        // the results of an earlier part have names
        buffer.is_constant
            && buffer.made_by().is_none()
            && !buffer.is_written
            && self.buffer_name(index).is_none()
    }

    /// Whether a buffer is a parameter that may be frozen, and is not written.
    pub(super) fn holds_weight(&self, index: usize) -> bool {
        let buffer = &self.buffers[index];
        buffer.is_weight && buffer.made_by().is_none() && !buffer.is_written
    }

    /// Where a buffer lies that was there before the recording or outlives it.
    pub(super) fn addresses(&self, buffer: usize) -> Range<usize> {
        let start = self.buffers[buffer].address as usize;
        start..start + self.buffers[buffer].bytes as usize
    }

    /// What a replay writes that others may see: memory that was there before, and what is kept.
    pub(super) fn written_outside(&self) -> Vec<Range<usize>> {
        let is_seen = |buffer: &usize| match self.buffers[*buffer].made_by() {
            None => !self.buffers[*buffer].is_constant && self.writes_to(*buffer),
            Some(_) => self.buffers[*buffer].is_kept,
        };
        (0..self.buffers.len()).filter(is_seen).map(|buffer| self.addresses(buffer)).collect()
    }

    /// Whether a replay writes to a buffer.
    fn writes_to(&self, buffer: usize) -> bool {
        let mut written = self.nodes.iter().flat_map(Node::written);
        written.any(|value| self.values[value].buffer == buffer)
    }

    /// Whether a replay reads or writes a buffer of a name that begins so.
    pub(crate) fn uses_named(&self, prefix: &str) -> bool {
        let was_there = |index: &usize| self.buffers[*index].made_by().is_none();
        self.names.iter().any(|(buffer, name)| name.starts_with(prefix) && was_there(buffer))
    }

    /// Whether a replay writes to a buffer of a name that begins so.
    pub(crate) fn writes_to_named(&self, prefix: &str) -> bool {
        let mut named = self.names.iter().filter(|(_, name)| name.starts_with(prefix));
        named.any(|(buffer, _)| self.writes_to(*buffer))
    }

    /// Whether a replay writes to the buffer of this name.
    pub(super) fn writes_to_tensor(&self, name: &str) -> bool {
        self.names.iter().any(|(buffer, known)| known == name && self.writes_to(*buffer))
    }

    /// Whether the nodes before this one have no visible effect: they write to no memory that existed before, and draw no random
    /// numbers.
    pub(super) fn is_pure_before(&self, node: usize) -> bool {
        let was_there = |value: usize| self.buffer_of(value).made_by().is_none();
        !self.nodes[..node].iter().any(|node| node.has_hidden_effect() || node.written().any(was_there))
    }

    /// Names the buffers that earlier parts of the same capture made, so that two captures can be compared: each has
    /// results of its own.
    pub(super) fn name_results_of(&mut self, earlier: &[Self]) {
        let mut results = BTreeMap::new();
        for (part, graph) in earlier.iter().enumerate() {
            let kept = graph.buffers.iter().enumerate().filter(|(_, b)| b.is_kept && b.made_by().is_some());
            results.extend(
                kept.map(|(index, buffer)| (buffer.address, format!("result {index} of part {part}"))),
            );
        }
        for (index, buffer) in self.buffers.iter().enumerate().filter(|(_, b)| b.made_by().is_none()) {
            if let Some(name) = results.get(&buffer.address) {
                self.names.entry(index).or_insert_with(|| name.clone());
            }
        }
    }

    /// Buffers that were there before and have no name.
    pub(super) fn unnamed(&self) -> Vec<usize> {
        let was_there = |index: &usize| self.buffers[*index].made_by().is_none();
        (0..self.buffers.len()).filter(was_there).filter(|index| !self.names.contains_key(index)).collect()
    }

    /// Whether a node only gives views of memory that is there, or does nothing at all.
    pub(super) fn is_view(&self, index: usize) -> bool {
        let node = &self.nodes[index];
        if node.changes_view {
            return true;
        }
        let mut results = node.results.iter().flat_map(Operand::values).peekable();
        !node.writes
            && !node.has_hidden_effect()
            && results.peek().is_some()
            && results.all(|value| self.buffer_of(value).made_by() != Some(index))
    }

    /// Where a node is, for messages: the scope it was called in, or the weights used last before it.
    pub fn place(&self, index: usize) -> String {
        let node = &self.nodes[index];
        if !node.scope.is_empty() {
            return format!("in {}", node.scope);
        }
        if !node.backward_node.is_empty() {
            return format!("in the backward pass ({})", node.backward_node);
        }
        // inputs and gradients have names with blanks, weights have not
        let is_weight = |name: &&String| !name.contains(' ');
        let named = self.nodes[..=index].iter().rev().find_map(|node| {
            node.values().find_map(|value| self.names.get(&self.values[value].buffer).filter(is_weight))
        });
        match named.map(|name| name.rsplit_once('.').map_or(name.as_str(), |(layer, _)| layer)) {
            Some(layer) => format!("in or after `{layer}`"),
            None => "before the first weights".to_owned(),
        }
    }

    /// In what two recordings of the same code differ; none if one can stand for the other.
    pub fn difference(&self, other: &Self) -> Option<String> {
        for (index, (a, b)) in self.nodes.iter().zip(&other.nodes).enumerate() {
            if a.op != b.op {
                return Some(format!(
                    "operator {index}, {}, was {} and is {}",
                    self.place(index),
                    a.op,
                    b.op
                ));
            }
            let operands = a.arguments.iter().chain(&a.results).zip(b.arguments.iter().chain(&b.results));
            for (at, (ours, theirs)) in operands.enumerate() {
                if let Some(what) = self.operand_difference(ours, other, theirs) {
                    return Some(format!("argument {at} of {} {} {what}", a.op, self.place(index)));
                }
            }
        }
        let (ours, theirs) = (self.nodes.len(), other.nodes.len());
        (ours != theirs).then(|| format!("there were {ours} operators and are {theirs}"))
    }

    fn operand_difference(&self, ours: &Operand, other: &Self, theirs: &Operand) -> Option<String> {
        if let (Operand::Constant(a), Operand::Constant(b)) = (ours, theirs) {
            return (a != b).then(|| format!("was {a} and is {b}"));
        }
        if ours.values().count() != theirs.values().count() {
            return Some("was another number of tensors".to_owned());
        }
        ours.values().zip(theirs.values()).find_map(|(a, b)| {
            let (x, y) = (&self.values[a], &other.values[b]);
            if (&x.dtype, &x.size, &x.stride, x.offset) != (&y.dtype, &y.size, &y.stride, y.offset) {
                return Some(format!("was {} and is {}", self.describe(a), other.describe(b)));
            }
            let (p, q) = (&self.buffers[x.buffer], &other.buffers[y.buffer]);
            if p.node != q.node || p.is_kept != q.is_kept {
                return Some("was another tensor".to_owned());
            }
            match (self.buffer_name(x.buffer), other.buffer_name(y.buffer)) {
                (Some(a), Some(b)) => (a != b).then(|| format!("was {a} and is {b}")),
                _ if p.is_constant => {
                    (p.content != q.content).then(|| format!("had other values in {}", self.describe(a)))
                }
                _ if p.made_by().is_some() => None, // by the same node
                _ => (p.address != q.address).then(|| "was another tensor".to_owned()),
            }
        })
    }

    /// Dtype and shape of a value, such as `Float[8, 64]`.
    pub(super) fn describe(&self, value: usize) -> String {
        format!("{}{:?}", self.values[value].dtype, self.values[value].size)
    }

    fn write_operand(&self, text: &mut String, operand: &Operand) {
        let value = |text: &mut String, index: i64| {
            let Ok(index) = usize::try_from(index) else { return text.push_str("none") };
            match self.names.get(&self.values[index].buffer) {
                Some(name) => _ = write!(text, "%{index}:{name}"),
                None => _ = write!(text, "%{index}"),
            }
        };
        match operand {
            Operand::Constant(constant) => text.push_str(constant),
            Operand::Tensor(index) => value(text, *index),
            Operand::Tensors(indices) => {
                text.push('[');
                for (at, index) in indices.iter().enumerate() {
                    text.push_str(if at > 0 { ", " } else { "" });
                    value(text, *index);
                }
                text.push(']');
            }
        }
    }

    fn write_list(&self, text: &mut String, operands: &[Operand]) {
        for (at, operand) in operands.iter().enumerate() {
            text.push_str(if at > 0 { ", " } else { "" });
            self.write_operand(text, operand);
        }
    }

    /// The graph in the language of Graphviz: a box for each operator that computes, an ellipse for what was there
    /// before.
    pub fn to_dot(&self) -> String {
        let mut dot = "digraph graph_of_operators {\n  node [shape=box];\n".to_owned();
        let mut writer: Vec<Option<usize>> = self.buffers.iter().map(|_| None).collect();
        for (index, node) in self.nodes.iter().enumerate().filter(|(index, _)| !self.is_view(*index)) {
            _ = writeln!(dot, "  n{index} [label=\"{}\"];", node.op);
            for value in node.arguments.iter().flat_map(Operand::values) {
                let buffer = self.values[value].buffer;
                let from = match writer[buffer] {
                    Some(from) => format!("n{from}"),
                    None => {
                        let name =
                            self.buffer_name(buffer).map_or_else(|| self.describe(value), str::to_owned);
                        _ = writeln!(dot, "  b{buffer} [shape=ellipse, label=\"{name}\"];");
                        format!("b{buffer}")
                    }
                };
                _ = writeln!(dot, "  {from} -> n{index} [label=\"{}\"];", self.describe(value));
            }
            for value in node.results.iter().flat_map(Operand::values) {
                writer[self.values[value].buffer] = Some(index);
            }
        }
        dot.push_str("}\n");
        dot
    }
}

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, node) in self.nodes.iter().enumerate() {
            let mut line = String::new();
            self.write_list(&mut line, &node.results);
            line.push_str(if node.results.is_empty() { "" } else { " = " });
            line.push_str(&node.op);
            line.push('(');
            self.write_list(&mut line, &node.arguments);
            line.push(')');
            let shapes: Vec<String> =
                node.results.iter().flat_map(Operand::values).map(|value| self.describe(value)).collect();
            let note = if self.is_view(index) { "  # view" } else { "" };
            writeln!(f, "{line}  {}{note}", shapes.join(", "))?;
        }
        Ok(())
    }
}
