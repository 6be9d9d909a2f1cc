//! Operators that go row by row, as parts of a chain: norms of layers, softmax and their gradients. A row is the last dimension, or the last
//! ones that a norm goes over.

use super::elementwise::{
    Access, Member, NOT_DENSE, OTHER_OPERANDS, Source, Step, access, constant, is_dense, is_float, is_new,
    number, tensor,
};
use crate::graph::ir::{Graph, Node, Operand};
use crate::kernels::{Chain, ChainOp};

/// A node that goes by rows, or why it is no part of a chain; none if it is another one.
pub(super) fn of(graph: &Graph, index: usize) -> Option<Result<Member, &'static str>> {
    let node = &graph.nodes[index];
    let softmax = |op| Rows::new(graph, index, 0)?.softmax(constant(node, 1)?, op);
    let gradient = |op| Rows::new(graph, index, 0)?.softmax_backward(constant(node, 2)?, op);
    let member = match node.op.strip_prefix("aten::")? {
        "native_layer_norm" => Rows::new(graph, index, 0)?.layer_norm(),
        "native_layer_norm_backward" => Rows::new(graph, index, 1)?.layer_norm_backward(),
        "_softmax" => softmax(ChainOp::Softmax),
        "_log_softmax" => softmax(ChainOp::LogSoftmax),
        "_softmax_backward_data" => gradient(ChainOp::SoftmaxBackward),
        "_log_softmax_backward_data" => gradient(ChainOp::LogSoftmaxBackward),
        "nll_loss_backward" => Rows::new(graph, index, 1)?.nll_backward(),
        _ => return None,
    };
    Some(member.ok_or(OTHER_OPERANDS).and_then(|member| check(graph, index, member)))
}

/// Whether a chain can have it.
fn check(graph: &Graph, index: usize, member: Member) -> Result<Member, &'static str> {
    let on_cpu = |value: usize| graph.buffer_of(value).is_on_cpu;
    let device = member.operands.first().map(|(value, _)| on_cpu(*value));
    if !member.row.is_some_and(|row| row > 1 && member.registers() * row as usize <= Chain::ROWS) {
        return Err("its rows are too long for the first cache, or have one number");
    }
    let fits = member.len > 0
        && member.operands.iter().all(|(value, access)| {
            let is_known = is_whole(graph, *value) || *access == Access::ByRow && is_integer(graph, *value);
            is_known && Some(on_cpu(*value)) == device
        })
        && member.results.iter().all(|(value, ..)| is_whole(graph, *value) && is_new(graph, index, *value));
    if fits { Ok(member) } else { Err(NOT_DENSE) }
}

fn is_whole(graph: &Graph, value: usize) -> bool {
    is_float(&graph.values[value]) && is_dense(&graph.values[value])
}

fn is_integer(graph: &Graph, value: usize) -> bool {
    graph.values[value].dtype == "Long" && is_dense(&graph.values[value])
}

/// A member in the making.
struct Rows<'a> {
    graph: &'a Graph,
    node: &'a Node,
    /// What has the shape of all.
    input: usize,
    member: Member,
}

impl<'a> Rows<'a> {
    /// Of a node whose argument at `input` has the shape of all.
    fn new(graph: &'a Graph, index: usize, input: usize) -> Option<Self> {
        let node = &graph.nodes[index];
        let input = tensor(node, input)?;
        let len = graph.values[input].size.iter().product();
        let (steps, operands, results) = (Vec::new(), Vec::new(), Vec::new());
        let member = Member { node: index, steps, operands, results, len, row: None };
        Some(Self { graph, node, input, member })
    }

    fn numbers(&self, value: usize) -> i64 {
        self.graph.values[value].size.iter().product()
    }

    /// Reads a tensor of the shape of all, or one that repeats.
    fn read(&mut self, value: usize) -> Option<Source> {
        let operand = access(self.graph, value, self.input)?;
        Some(self.operand(operand))
    }

    /// Reads a number for each row.
    fn read_by_row(&mut self, value: usize) -> Option<Source> {
        let has_one = self.numbers(value) == self.member.len / self.member.row?;
        has_one.then(|| self.operand((value, Access::ByRow)))
    }

    fn operand(&mut self, operand: (usize, Access)) -> Source {
        self.member.operands.push(operand);
        Source::Operand(self.member.operands.len() - 1)
    }

    fn step(&mut self, op: ChainOp, a: Source, b: Source, number: f64) -> Source {
        self.member.steps.push(Step { op, a, b, number });
        Source::Step(self.member.steps.len() - 1)
    }

    /// Writes a result, if it is wanted.
    fn write(&mut self, at: usize, access: Access, from: Source) -> Option<()> {
        let Operand::Tensor(value) = self.node.results.get(at)? else { return None };
        let Ok(value) = usize::try_from(*value) else { return Some(()) };
        let numbers = match access {
            Access::Whole => self.member.len,
            Access::Repeated(numbers) => numbers,
            Access::ByRow => self.member.len / self.member.row?,
        };
        self.member.results.push((value, access, from));
        (self.numbers(value) == numbers).then_some(())
    }

    /// Rows of which a tensor has a number each.
    fn rows_of(&mut self, value: usize) -> Option<()> {
        let rows = self.numbers(value);
        self.member.row = (rows > 0 && self.member.len % rows == 0).then(|| self.member.len / rows);
        self.member.row.map(|_| ())
    }

    /// `(x - mean) * rstd`
    fn normal(&mut self, x: Source, mean: Source, rstd: Source) -> Source {
        let centered = self.step(ChainOp::Add, x, mean, -1.0);
        self.step(ChainOp::Mul, centered, rstd, 0.0)
    }

    fn layer_norm(mut self) -> Option<Member> {
        let Operand::Tensor(means) = self.node.results.get(1)? else { return None };
        self.rows_of(usize::try_from(*means).ok()?)?;
        let x = self.read(self.input)?;
        let mean = self.step(ChainOp::RowMean, x, x, 0.0);
        let rstd = self.step(ChainOp::RowRstd, x, mean, number(self.node, 4)?);
        let mut result = self.normal(x, mean, rstd);
        for (at, op) in [(2, ChainOp::Mul), (3, ChainOp::Add)] {
            if let Some(factor) = tensor(self.node, at) {
                let factor = self.read(factor)?;
                result = self.step(op, result, factor, 1.0);
            }
        }
        self.write(0, Access::Whole, result)?;
        self.write(1, Access::ByRow, mean)?;
        self.write(2, Access::ByRow, rstd)?;
        Some(self.member)
    }

    fn layer_norm_backward(mut self) -> Option<Member> {
        let (means, rstds) = (tensor(self.node, 3)?, tensor(self.node, 4)?);
        self.rows_of(means)?;
        let (grad, x) = (self.read(tensor(self.node, 0)?)?, self.read(self.input)?);
        let (mean, rstd) = (self.read_by_row(means)?, self.read_by_row(rstds)?);
        let normal = self.normal(x, mean, rstd);
        let mut scaled = grad;
        if let Some(weight) = tensor(self.node, 5) {
            let weight = self.read(weight)?;
            scaled = self.step(ChainOp::Mul, grad, weight, 0.0);
        }
        let slope = self.step(ChainOp::NormBackward, scaled, normal, 0.0);
        let result = self.step(ChainOp::Mul, slope, rstd, 0.0);
        let product = self.step(ChainOp::Mul, grad, normal, 0.0);
        let sums = Access::Repeated(self.member.row?);
        self.write(0, Access::Whole, result)?;
        self.write(1, sums, product)?;
        self.write(2, sums, grad)?;
        Some(self.member)
    }

    /// Takes the last dimension for the row, if `dim` is that.
    fn last_dim(&mut self, dim: &str) -> Option<()> {
        let size = &self.graph.values[self.input].size;
        let dim: i64 = dim.parse().ok()?;
        let last = size.len() as i64 - 1;
        self.member.row = size.last().copied().filter(|_| dim == last || dim == -1);
        self.member.row.map(|_| ())
    }

    fn softmax(mut self, dim: &str, op: ChainOp) -> Option<Member> {
        self.last_dim(dim)?;
        let x = self.read(self.input)?;
        let result = self.step(op, x, x, 0.0);
        self.write(0, Access::Whole, result)?;
        Some(self.member)
    }

    fn softmax_backward(mut self, dim: &str, op: ChainOp) -> Option<Member> {
        self.last_dim(dim)?;
        let (grad, result) = (self.read(self.input)?, self.read(tensor(self.node, 1)?)?);
        let gradient = self.step(op, grad, result, 0.0);
        self.write(0, Access::Whole, gradient)?;
        Some(self.member)
    }

    /// The gradient of a loss by classes without weights.
    fn nll_backward(mut self) -> Option<Member> {
        self.last_dim("1")?;
        let (grad, classes) = (tensor(self.node, 0)?, tensor(self.node, 2)?);
        let (reduction, ignored) = (constant(self.node, 4)?, number(self.node, 5)?);
        if tensor(self.node, 3).is_some() || self.graph.values[self.input].size.len() != 2 {
            return None;
        }
        let classes = self.read_by_row(classes)?;
        let grad = match reduction {
            "0" => self.read_by_row(grad)?,
            "1" => {
                let (grad, total) = (self.read(grad)?, self.read(tensor(self.node, 6)?)?);
                self.step(ChainOp::Div, grad, total, 0.0)
            }
            _ => self.read(grad)?,
        };
        let gradient = self.step(ChainOp::NllBackward, classes, grad, ignored);
        self.write(0, Access::Whole, gradient)?;
        Some(self.member)
    }
}
