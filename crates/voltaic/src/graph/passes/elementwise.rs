//! What can be a part of a chain, and the operators element by element among it.

use crate::graph::ir::{Graph, Node, Operand, Value};
use crate::kernels::ChainOp;

/// How a node reads or writes a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    /// Number by number, as all of a chain.
    Whole,
    /// So many numbers, which repeat; what is written of as many are the sums over the rows.
    Repeated(i64),
    /// A number for each row.
    ByRow,
}

impl Access {
    /// How many numbers of a chain of `len` numbers, as a plan says it.
    pub(super) fn period(self, len: i64) -> i64 {
        match self {
            Self::Whole => len,
            Self::Repeated(period) => period,
            Self::ByRow => 0,
        }
    }
}

/// What a step takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// An operand of the node, by its number.
    Operand(usize),
    /// The result of an earlier step of the node.
    Step(usize),
}

/// A part of what a node computes.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) op: ChainOp,
    pub(super) a: Source,
    pub(super) b: Source,
    pub(super) number: f64,
}

/// A node that can be a part of a chain.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) node: usize,
    pub(super) steps: Vec<Step>,
    /// Values that are read.
    pub(super) operands: Vec<(usize, Access)>,
    /// Values that are written, and what to each.
    pub(super) results: Vec<(usize, Access, Source)>,
    /// Numbers that it works on.
    pub(super) len: i64,
    /// Those of a row, if it goes by rows.
    pub(super) row: Option<i64>,
}

impl Member {
    /// The result is the operand in another format. An explicit cast rounds, also where what follows computes in float32.
    pub(super) fn is_cast(&self) -> bool {
        self.steps.is_empty()
    }

    /// Casts, norms and their gradients are faster as chains of one.
    pub(super) fn is_faster_alone(&self) -> bool {
        let is_gradient = |step: &Step| step.op == ChainOp::NormBackward;
        self.is_cast() || self.is_norm() || self.steps.iter().any(is_gradient)
    }

    /// Its gradient computes again from what it read, as it is in memory, with the moments that it gave.
    pub(super) fn is_norm(&self) -> bool {
        self.steps.iter().any(|step| step.op == ChainOp::RowRstd)
    }

    /// Registers that it needs of its own.
    pub(super) fn registers(&self) -> usize {
        self.operands.len() + self.steps.len().max(1) + usize::from(self.is_norm())
    }
}

/// What an operator does with its arguments: which of them are tensors, and a number.
struct Meaning {
    op: Option<ChainOp>,
    operands: &'static [usize],
    number: f64,
}

/// Why a node is no part of a chain.
pub(super) const OTHER_OPERATOR: &str = "not among the operators that chains have";
pub(super) const OTHER_DTYPE: &str = "of another dtype than float32 and bfloat16";
pub(super) const NOT_DENSE: &str = "its tensors do not lie in memory one number after the other";
pub(super) const NOT_OWN: &str = "it writes memory that was there before the step, or a part of a tensor";
pub(super) const OTHER_OPERANDS: &str =
    "its operands are of a dtype, shape or layout that chains do not read";

/// A node that goes number by number, as a part of a chain, or why it is none.
pub(super) fn of(graph: &Graph, index: usize) -> Result<Member, &'static str> {
    let node = &graph.nodes[index];
    let Meaning { op, operands, number } = meaning(node).ok_or(OTHER_OPERATOR)?;
    let [Operand::Tensor(result)] = node.results[..] else { return Err(OTHER_OPERATOR) };
    let result = usize::try_from(result).map_err(|_| OTHER_OPERATOR)?;
    let value = &graph.values[result];
    let len: i64 = value.size.iter().product();
    if !is_float(value) {
        return Err(OTHER_DTYPE);
    }
    if !is_dense(value) || len == 0 {
        return Err(NOT_DENSE);
    }
    let writes = operands.first().and_then(|&at| tensor(node, at)).filter(|_| node.writes);
    let buffer = graph.buffer_of(result);
    // memory that was there before may be that of another tensor, too
    let is_own = match writes {
        Some(written) => same_place(graph, written, result) && buffer.made_by().is_some(),
        None => !node.writes && is_new(graph, index, result),
    };
    let operands = operands.iter().map(|&at| access(graph, tensor(node, at)?, result));
    let operands: Vec<(usize, Access)> = operands.collect::<Option<_>>().ok_or(OTHER_OPERANDS)?;
    let on_one_device = |(operand, access): &(usize, Access)| {
        *access == Access::Repeated(1) && op.is_some()
            || graph.buffer_of(*operand).is_on_cpu == buffer.is_on_cpu
    };
    let reads_apart = |(operand, access): &(usize, Access)| {
        graph.values[*operand].buffer != value.buffer
            || (*access == Access::Whole && same_place(graph, *operand, result))
    };
    if !is_own {
        return Err(NOT_OWN);
    }
    if !operands.iter().all(|read| on_one_device(read) && reads_apart(read)) {
        return Err(OTHER_OPERANDS);
    }
    let (a, b) = (Source::Operand(0), Source::Operand(operands.len() - 1));
    let steps: Vec<Step> = op.map(|op| Step { op, a, b, number }).into_iter().collect();
    let source = if steps.is_empty() { a } else { Source::Step(0) };
    Ok(Member {
        node: index,
        steps,
        operands,
        results: vec![(result, Access::Whole, source)],
        len,
        row: None,
    })
}

/// Whether a node made the memory of a value, which begins there.
pub(super) fn is_new(graph: &Graph, node: usize, value: usize) -> bool {
    graph.buffer_of(value).made_by() == Some(node) && graph.values[value].offset == 0
}

/// The tensor at a position of the arguments.
pub(super) fn tensor(node: &Node, at: usize) -> Option<usize> {
    match node.arguments.get(at)? {
        Operand::Tensor(value) => usize::try_from(*value).ok(),
        _ => None,
    }
}

pub(super) fn constant(node: &Node, at: usize) -> Option<&str> {
    match node.arguments.get(at)? {
        Operand::Constant(text) => Some(text),
        _ => None,
    }
}

pub(super) fn number(node: &Node, at: usize) -> Option<f64> {
    constant(node, at)?.parse().ok()
}

fn meaning(node: &Node) -> Option<Meaning> {
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
        "_to_copy" => Some(Meaning { op: None, operands: ONE, number: 0.0 }),
        _ => None,
    }
}

/// Formats that chains compute with.
pub(super) fn is_float(value: &Value) -> bool {
    matches!(value.dtype.as_str(), "Float" | "BFloat16")
}

/// Whether the numbers lie one after the other, the last dimension first.
pub(super) fn is_dense(value: &Value) -> bool {
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
pub(super) fn access(graph: &Graph, operand: usize, result: usize) -> Option<(usize, Access)> {
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
