//! Operators element by element, as steps of a chain: which there are, and what of a recording is one.

use crate::graph::ir::{Graph, Node, Operand, Value};
use crate::kernels::ChainOp;

/// How a node reads a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    /// Number by number, as the result is written.
    Whole,
    /// So many numbers, which repeat.
    Repeated(i64),
}

/// A node that can be a step.
#[derive(Debug)]
pub(super) struct Elementwise {
    pub(super) node: usize,
    /// None if the result is the first operand in another format.
    pub(super) op: Option<ChainOp>,
    pub(super) number: f32,
    /// Values; one or two.
    pub(super) operands: Vec<(usize, Access)>,
    /// The value that is written.
    pub(super) result: usize,
    /// Numbers of it.
    pub(super) len: i64,
}

/// What an operator does with its arguments: which of them are tensors, and a number.
struct Meaning {
    op: Option<ChainOp>,
    operands: &'static [usize],
    number: f64,
}

impl Elementwise {
    /// A node as a step; none if it is something else, or its tensors do not lie in memory one number after the other.
    pub(super) fn of(graph: &Graph, index: usize) -> Option<Self> {
        let node = &graph.nodes[index];
        let Meaning { op, operands, number } = meaning(graph, node)?;
        let [Operand::Tensor(result)] = node.results[..] else { return None };
        let result = usize::try_from(result).ok()?;
        let value = &graph.values[result];
        let len: i64 = value.size.iter().product();
        if !is_float(value) || !is_dense(value) || len == 0 {
            return None;
        }
        let writes = operands.first().and_then(|&at| tensor(node, at)).filter(|_| node.writes);
        let buffer = graph.buffer_of(result);
        // memory that was there before may be that of another tensor, too
        let is_own = match writes {
            Some(written) => same_place(graph, written, result) && buffer.made_by().is_some(),
            None => !node.writes && buffer.made_by() == Some(index) && value.offset == 0,
        };
        let operands = operands.iter().map(|&at| access(graph, tensor(node, at)?, result));
        let operands: Vec<(usize, Access)> = operands.collect::<Option<_>>()?;
        let on_one_device = |(operand, access): &(usize, Access)| {
            *access == Access::Repeated(1) && op.is_some()
                || graph.buffer_of(*operand).is_on_cpu == buffer.is_on_cpu
        };
        let reads_apart = |(operand, access): &(usize, Access)| {
            graph.values[*operand].buffer != value.buffer
                || (*access == Access::Whole && same_place(graph, *operand, result))
        };
        let is_step = is_own && operands.iter().all(|read| on_one_device(read) && reads_apart(read));
        is_step.then_some(Self { node: index, op, number: number as f32, operands, result, len })
    }
}

/// The tensor at a position of the arguments.
fn tensor(node: &Node, at: usize) -> Option<usize> {
    match node.arguments.get(at)? {
        Operand::Tensor(value) => usize::try_from(*value).ok(),
        _ => None,
    }
}

fn constant(node: &Node, at: usize) -> Option<&str> {
    match node.arguments.get(at)? {
        Operand::Constant(text) => Some(text),
        _ => None,
    }
}

fn number(node: &Node, at: usize) -> Option<f64> {
    constant(node, at)?.parse().ok()
}

fn meaning(graph: &Graph, node: &Node) -> Option<Meaning> {
    const ONE: &[usize] = &[0];
    const TWO: &[usize] = &[0, 1];
    let step = |op: ChainOp, operands, number| Some(Meaning { op: Some(op), operands, number });
    let is_tanh = |at| match constant(node, at)? {
        "tanh" => Some(true),
        "none" => Some(false),
        _ => None,
    };
    match node.op.strip_prefix("aten::")? {
        "add.Tensor" | "add_.Tensor" => step(ChainOp::Add, TWO, number(node, 2)?),
        "sub.Tensor" | "sub_.Tensor" => step(ChainOp::Add, TWO, -number(node, 2)?),
        "mul.Tensor" | "mul_.Tensor" => step(ChainOp::Mul, TWO, 0.0),
        "div.Tensor" | "div_.Tensor" => step(ChainOp::Div, TWO, 0.0),
        "add.Scalar" | "add_.Scalar" => step(ChainOp::AddNumber, ONE, number(node, 1)? * number(node, 2)?),
        "sub.Scalar" | "sub_.Scalar" => step(ChainOp::AddNumber, ONE, -number(node, 1)? * number(node, 2)?),
        "mul.Scalar" | "mul_.Scalar" => step(ChainOp::MulNumber, ONE, number(node, 1)?),
        "div.Scalar" | "div_.Scalar" => step(ChainOp::DivNumber, ONE, number(node, 1)?),
        "neg" | "neg_" => step(ChainOp::MulNumber, ONE, -1.0),
        "relu" | "relu_" => step(ChainOp::Relu, ONE, 0.0),
        "threshold_backward" => step(ChainOp::ThresholdBackward, TWO, number(node, 2)?),
        "tanh" | "tanh_" => step(ChainOp::Tanh, ONE, 0.0),
        "tanh_backward" => step(ChainOp::TanhBackward, TWO, 0.0),
        "sigmoid" | "sigmoid_" => step(ChainOp::Sigmoid, ONE, 0.0),
        "sigmoid_backward" => step(ChainOp::SigmoidBackward, TWO, 0.0),
        "gelu" => step(if is_tanh(1)? { ChainOp::GeluTanh } else { ChainOp::Gelu }, ONE, 0.0),
        "gelu_backward" => {
            let op = if is_tanh(2)? { ChainOp::GeluTanhBackward } else { ChainOp::GeluBackward };
            step(op, TWO, 0.0)
        }
        "_to_copy" => {
            let [Operand::Tensor(result)] = node.results[..] else { return None };
            let rounds = graph.values[usize::try_from(result).ok()?].dtype == "BFloat16";
            // an explicit cast rounds, also where what follows computes in float32
            Some(Meaning { op: rounds.then_some(ChainOp::Round), operands: ONE, number: 0.0 })
        }
        _ => None,
    }
}

/// Formats that chains compute with.
fn is_float(value: &Value) -> bool {
    matches!(value.dtype.as_str(), "Float" | "BFloat16")
}

/// Whether the numbers lie one after the other, the last dimension first.
fn is_dense(value: &Value) -> bool {
    let mut expected = 1;
    value.size.iter().zip(&value.stride).rev().all(|(&size, &stride)| {
        let fits = size == 1 || stride == expected;
        expected *= size;
        fits
    })
}

fn same_place(graph: &Graph, a: usize, b: usize) -> bool {
    let (a, b) = (&graph.values[a], &graph.values[b]);
    (a.buffer, a.offset, &a.dtype, &a.size) == (b.buffer, b.offset, &b.dtype, &b.size)
        && is_dense(a)
        && is_dense(b)
}

/// How a value is read for a result; none if chains cannot read it so.
fn access(graph: &Graph, operand: usize, result: usize) -> Option<(usize, Access)> {
    let value = &graph.values[operand];
    let without_ones = |size: &[i64]| size.iter().copied().skip_while(|n| *n == 1).collect::<Vec<_>>();
    let (own, whole) = (without_ones(&value.size), without_ones(&graph.values[result].size));
    let len: i64 = own.iter().product();
    if len == 1 && matches!(value.dtype.as_str(), "Float" | "Double" | "BFloat16" | "Long") {
        let is_whole = own == whole && is_float(value);
        return Some((operand, if is_whole { Access::Whole } else { Access::Repeated(1) }));
    }
    if !is_float(value) || !is_dense(value) || !whole.ends_with(&own) {
        return None;
    }
    Some((operand, if own == whole { Access::Whole } else { Access::Repeated(len) }))
}
