//! Operators element by element and row by row, one after the other on each block of numbers while the first cache holds it: memory is
//! read and written once for all of them, and what is between two of them stays in float32.

use std::ffi::c_void;
use std::ops::Range;

use crate::element::{Bf16, Element};
use crate::elementwise::gelu::{Gelu, GeluBackward};
use crate::elementwise::row_steps;
use crate::kernel::{Kernel, blocks};
use crate::math::{sigmoid, tanh};
use crate::memory::sized;
use crate::processor::{prefetch, run_vectorized};
use crate::scratch::{Scratch, WithScratch};
use crate::threads::{GRAIN, parallel_for};
use crate::views::{Dtype, Shared, slice_mut_of, slice_of};

/// Numbers of a block, if a row is not longer. All registers of a chain together are 32 KiB.
const BLOCK: usize = 256;
/// The most parts of the rows that are summed up apart, whatever the number of threads, which so changes no result.
const MAX_PARTS: usize = 32;

/// What so many numbers later is needed is brought into the cache. Processors do that by themselves only within a page.
const AHEAD: usize = 512;

thread_local! {
    static REGISTERS: Scratch<Vec<f32>> = Scratch::default();
    static SUMS: Scratch<Vec<f32>> = Scratch::default();
}

/// What a step of a chain does with its operands `a` and `b` and its number `n`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum ChainOp {
    /// `a + n b`
    Add,
    /// `a b`
    Mul,
    /// `a / b`
    Div,
    /// `a + n`
    AddNumber,
    /// `n a`
    MulNumber,
    /// `a / n`
    DivNumber,
    /// `max(a, 0)`; NaN stays.
    Relu,
    /// `a`, a gradient, where `b` is above `n`, else 0.
    ThresholdBackward,
    /// Its hyperbolic tangent.
    Tanh,
    /// `a (1 - b^2)`
    TanhBackward,
    /// `1 / (1 + exp(-a))`
    Sigmoid,
    /// `a b (1 - b)`
    SigmoidBackward,
    /// [`Gelu`](crate::Gelu) by the error function.
    Gelu,
    /// [`Gelu`](crate::Gelu) by tanh.
    GeluTanh,
    /// [`GeluBackward`](crate::GeluBackward) of the gradient `a` at `b`, by the error function.
    GeluBackward,
    /// The same by tanh.
    GeluTanhBackward,
    /// The nearest number of bfloat16.
    Round,
    /// The mean of the row, as all of its numbers, as the next one.
    RowMean,
    /// `1 / sqrt(variance + n)` of the row, whose mean `b` is.
    RowRstd,
    /// `a - mean(a) - b mean(a b)`, with means of the row.
    NormBackward,
    /// Of the row, as the next ones.
    Softmax,
    /// `log(softmax(a))`
    LogSoftmax,
    /// Of the gradient `a`, where `b` is the result.
    SoftmaxBackward,
    /// As above.
    LogSoftmaxBackward,
    /// `-b` at the place `a` of the row, else 0; 0 everywhere if that is `n`.
    NllBackward,
}

impl ChainOp {
    const ALL: [Self; 25] = [
        Self::Add,
        Self::Mul,
        Self::Div,
        Self::AddNumber,
        Self::MulNumber,
        Self::DivNumber,
        Self::Relu,
        Self::ThresholdBackward,
        Self::Tanh,
        Self::TanhBackward,
        Self::Sigmoid,
        Self::SigmoidBackward,
        Self::Gelu,
        Self::GeluTanh,
        Self::GeluBackward,
        Self::GeluTanhBackward,
        Self::Round,
        Self::RowMean,
        Self::RowRstd,
        Self::NormBackward,
        Self::Softmax,
        Self::LogSoftmax,
        Self::SoftmaxBackward,
        Self::LogSoftmaxBackward,
        Self::NllBackward,
    ];

    /// The operator of a number, which is `op as i32`.
    pub fn of_number(number: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|op| *op as i32 == number)
    }
}

/// One operator of a chain. Its result is the next register; those of the inputs come first.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChainStep {
    /// What it computes.
    pub op: ChainOp,
    /// The register of its first operand.
    pub a: usize,
    /// That of its second; any earlier one where the operator has only one.
    pub b: usize,
    /// The number that the operator may have.
    pub number: f32,
}

/// Numbers that a chain reads.
#[derive(Debug, Clone, Copy)]
pub struct ChainInput {
    /// Where they are.
    pub data: *const c_void,
    /// Their format.
    pub dtype: Dtype,
    /// How many there are, which are repeated to the length of the chain; a divisor of it. 0 if each row has one number.
    pub period: usize,
}

/// Where a chain writes a register to.
#[derive(Debug, Clone, Copy)]
pub struct ChainOutput {
    /// Where it begins.
    pub data: *mut c_void,
    /// Its format.
    pub dtype: Dtype,
    /// Which register.
    pub register: usize,
    /// How many numbers are written: as many as the chain has; of a row, for the sums over all rows; 0 for the first number of each row.
    pub period: usize,
}

/// A chain over tensors.
#[derive(Debug, Clone, Copy)]
pub struct Chain<'a> {
    /// The operators in order.
    pub steps: &'a [ChainStep],
    /// What is read.
    pub inputs: &'a [ChainInput],
    /// What is written.
    pub outputs: &'a [ChainOutput],
    /// Numbers of each register.
    pub len: usize,
    /// Those of a row, a divisor of them; 0 if nothing goes by rows.
    pub row: usize,
}

// SAFETY: the addresses are those of memory that threads may share, as `Chain::run` asks.
unsafe impl Sync for Chain<'_> {}

impl Chain<'_> {
    /// Most inputs and steps together.
    pub const REGISTERS: usize = 32;
    /// Most numbers of a row, times inputs and steps.
    pub const ROWS: usize = 32_768;

    /// Computes the outputs, by all threads.
    ///
    /// # Safety
    /// Inputs and outputs must be valid during the call, and no other thread may use them. An output of all numbers may lie where an input
    /// of all numbers of its format lies, otherwise it shares no memory with any of them.
    ///
    /// # Panics
    /// If there are too many registers, or a step reads one that comes later.
    pub unsafe fn run(&self) {
        let first = self.inputs.len();
        let registers = first + self.steps.len();
        assert!(registers <= Self::REGISTERS, "{registers} registers");
        assert!(registers * self.row <= Self::ROWS, "{registers} registers of rows of {}", self.row);
        let is_earlier = |(i, step): (usize, &ChainStep)| step.a < first + i && step.b < first + i;
        assert!(self.steps.iter().enumerate().all(is_earlier), "a step reads a later one");
        assert!(self.outputs.iter().all(|output| output.register < registers));
        let fits = |period: usize| self.len.is_multiple_of(if period == 0 { self.row } else { period });
        assert!(fits(self.row.max(1)) && self.inputs.iter().all(|input| fits(input.period)));
        assert!(self.row > 0 || self.outputs.iter().all(|output| output.period == self.len));
        let num_sums = self.outputs.iter().filter(|output| self.is_sum(output)).count();
        if num_sums == 0 {
            let unit = self.row.max(1);
            parallel_for(self.len / unit, GRAIN.div_ceil(unit), |units| {
                self.run_part(units.start * unit..units.end * unit, &mut []);
            });
            return;
        }
        let unit = (self.len / self.row).div_ceil(MAX_PARTS) * self.row;
        let (parts, width) = (self.len.div_ceil(unit), num_sums * self.row);
        SUMS.with_borrow_mut(|sums| {
            let sums = sized(sums, parts * width);
            let shared = Shared(sums.as_mut_ptr());
            parallel_for(parts, GRAIN.div_ceil(unit), |range| {
                for part in range {
                    // SAFETY: each part has its own numbers, which live until all threads are done.
                    let own = unsafe { shared.slice_mut(part * width..(part + 1) * width) };
                    own.fill(0.0);
                    self.run_part(part * unit..((part + 1) * unit).min(self.len), own);
                }
            });
            let (total, others) = sums.split_at_mut(width);
            others.chunks_exact(width).for_each(|part| add_to(total, part));
            let outputs = self.outputs.iter().filter(|output| self.is_sum(output));
            outputs.zip(total.chunks_exact(self.row)).for_each(|(output, total)| store(output, 0, total));
        });
    }

    fn is_sum(&self, output: &ChainOutput) -> bool {
        output.period == self.row && self.row != self.len
    }

    fn run_part(&self, range: Range<usize>, sums: &mut [f32]) {
        let block = BLOCK.checked_div(self.row).map_or(BLOCK, |rows| rows.max(1) * self.row);
        REGISTERS.with_borrow_mut(|registers| {
            let registers = sized(registers, (self.inputs.len() + self.steps.len()) * block);
            run_vectorized(Part { chain: self, range, registers, block, sums });
        });
    }
}

#[inline(always)]
fn add_to(sums: &mut [f32], numbers: &[f32]) {
    for (sum, number) in sums.iter_mut().zip(numbers) {
        *sum += number;
    }
}

/// What one thread does of a chain.
struct Part<'a> {
    chain: &'a Chain<'a>,
    range: Range<usize>,
    /// `block` numbers of each, which is a multiple of a row.
    registers: &'a mut [f32],
    block: usize,
    /// Of each output that has them, the sums over the rows.
    sums: &'a mut [f32],
}

impl Kernel for Part<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { chain, range, registers, block: width, sums } = self;
        let Chain { steps, inputs, outputs, row, .. } = *chain;
        for (input, register) in inputs.iter().zip(registers.chunks_exact_mut(width)) {
            // what repeats in the same way in each block
            if input.period == 1 || input.period == row && row > 0 {
                load(input, 0, register);
            }
        }
        for block in blocks(range, width) {
            let len = block.len();
            for (input, register) in inputs.iter().zip(registers.chunks_exact_mut(width)) {
                match input.period {
                    0 => load_by_row(input, block.start / row, row, &mut register[..len]),
                    1 => {}
                    period if period == row => {}
                    _ => load(input, block.start, &mut register[..len]),
                }
            }
            for (i, step) in steps.iter().enumerate() {
                let (before, rest) = registers.split_at_mut((inputs.len() + i) * width);
                let operand = |register: usize| &before[register * width..][..len];
                apply(step, operand(step.a), operand(step.b), &mut rest[..len], row);
            }
            let mut next = 0;
            for output in outputs {
                let register = &registers[output.register * width..][..len];
                if chain.is_sum(output) {
                    let sums = &mut sums[next * row..][..row];
                    for numbers in register.chunks_exact(row) {
                        add_to(sums, numbers);
                    }
                    next += 1;
                } else if output.period == 0 {
                    for (i, numbers) in register.chunks_exact(row).enumerate() {
                        store(output, block.start / row + i, &numbers[..1]);
                    }
                } else {
                    store(output, block.start, register);
                }
            }
        }
    }
}

/// Reads the numbers from `start` on.
#[inline(always)]
fn load(input: &ChainInput, start: usize, register: &mut [f32]) {
    let (mut at, mut done) = (start % input.period, 0);
    while done < register.len() {
        let len = (input.period - at).min(register.len() - done);
        let part = &mut register[done..done + len];
        // SAFETY: `Chain::run` asks for so many numbers there; nothing is written while the slice is there.
        unsafe { read(input, at, part) };
        (at, done) = (0, done + len);
    }
}

/// Reads the number of each row from row `first` on.
#[inline(always)]
fn load_by_row(input: &ChainInput, first: usize, row: usize, register: &mut [f32]) {
    for (i, numbers) in register.chunks_exact_mut(row).enumerate() {
        let mut number = [0.0];
        // SAFETY: as above.
        unsafe { read(input, first + i, &mut number) };
        numbers.fill(number[0]);
    }
}

/// Reads numbers that follow each other.
///
/// # Safety
/// They must be valid for reads, and must not be written meanwhile.
#[inline(always)]
unsafe fn read(input: &ChainInput, at: usize, register: &mut [f32]) {
    let len = register.len();
    match input.dtype {
        Dtype::Float32 => {
            let from = input.data.cast::<f32>().wrapping_add(at);
            prefetch(from.wrapping_add(AHEAD), len);
            // SAFETY: as this function asks.
            widen(register, unsafe { slice_of(from, len) });
        }
        Dtype::Bfloat16 => {
            let from = input.data.cast::<Bf16>().wrapping_add(at);
            prefetch(from.wrapping_add(AHEAD), len);
            // SAFETY: as this function asks.
            widen(register, unsafe { slice_of(from, len) });
        }
    }
}

#[inline(always)]
fn widen<T: Element>(register: &mut [f32], numbers: &[T]) {
    for (wide, number) in register.iter_mut().zip(numbers) {
        *wide = number.to_f32();
    }
}

#[inline(always)]
fn store(output: &ChainOutput, start: usize, register: &[f32]) {
    let len = register.len();
    match output.dtype {
        Dtype::Float32 => {
            // SAFETY: the caller of `Chain::run` gives as many numbers there, for this call alone; each thread writes its own part.
            let numbers = unsafe { slice_mut_of(output.data.cast::<f32>().add(start), len) };
            narrow(numbers, register);
        }
        Dtype::Bfloat16 => {
            // SAFETY: as above.
            let numbers = unsafe { slice_mut_of(output.data.cast::<Bf16>().add(start), len) };
            narrow(numbers, register);
        }
    }
}

#[inline(always)]
fn narrow<T: Element>(numbers: &mut [T], register: &[f32]) {
    for (number, wide) in numbers.iter_mut().zip(register) {
        *number = T::from_f32(*wide);
    }
}

// Loops without `for_each`, and functions that are always inlined in place of long closures: what a compiler leaves a function of its own is
// compiled for no vectors.
#[inline(always)]
fn one(out: &mut [f32], a: &[f32], f: impl Fn(f32) -> f32) {
    for (out, a) in out.iter_mut().zip(a) {
        *out = f(*a);
    }
}

#[inline(always)]
fn two(out: &mut [f32], a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) {
    for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
        *out = f(*a, *b);
    }
}

#[inline(always)]
fn logistic(a: f32) -> f32 {
    sigmoid(a).0
}

/// Calls a function of `row_steps` for each row.
macro_rules! by_row {
    ($row:expr, ($a:ident, $b:ident, $out:ident) => $call:expr) => {
        for (($a, $b), $out) in
            $a.chunks_exact($row).zip($b.chunks_exact($row)).zip($out.chunks_exact_mut($row))
        {
            let _ = $b;
            $call;
        }
    };
}

#[inline(always)]
fn apply(step: &ChainStep, a: &[f32], b: &[f32], out: &mut [f32], row: usize) {
    let n = step.number;
    match step.op {
        ChainOp::Add if n == 1.0 => two(out, a, b, |a, b| a + b),
        ChainOp::Add => two(out, a, b, |a, b| b.mul_add(n, a)),
        ChainOp::Mul => two(out, a, b, |a, b| a * b),
        ChainOp::Div => two(out, a, b, |a, b| a / b),
        ChainOp::AddNumber => one(out, a, |a| a + n),
        ChainOp::MulNumber => one(out, a, |a| n * a),
        ChainOp::DivNumber => one(out, a, |a| a / n),
        ChainOp::Relu => one(out, a, |a| if a < 0.0 { 0.0 } else { a }),
        ChainOp::ThresholdBackward => two(out, a, b, |a, b| if b <= n { 0.0 } else { a }),
        ChainOp::Tanh => one(out, a, tanh),
        ChainOp::TanhBackward => two(out, a, b, |a, b| a * (-b).mul_add(b, 1.0)),
        ChainOp::Sigmoid => one(out, a, logistic),
        ChainOp::SigmoidBackward => two(out, a, b, |a, b| a * b * (1.0 - b)),
        ChainOp::Gelu | ChainOp::GeluTanh => {
            Gelu { input: a, output: out, is_tanh: step.op == ChainOp::GeluTanh }.run();
        }
        ChainOp::GeluBackward | ChainOp::GeluTanhBackward => {
            let is_tanh = step.op == ChainOp::GeluTanhBackward;
            GeluBackward { grad: a, input: b, output: out, is_tanh }.run();
        }
        ChainOp::Round => one(out, a, |a| Bf16::from_f32(a).to_f32()),
        ChainOp::RowMean => by_row!(row, (a, b, out) => row_steps::mean(a, out)),
        ChainOp::RowRstd => by_row!(row, (a, b, out) => row_steps::rstd(a, b, n, out)),
        ChainOp::NormBackward => by_row!(row, (a, b, out) => row_steps::norm_backward(a, b, out)),
        ChainOp::Softmax => by_row!(row, (a, b, out) => row_steps::softmax(a, out)),
        ChainOp::LogSoftmax => by_row!(row, (a, b, out) => row_steps::log_softmax(a, out)),
        ChainOp::SoftmaxBackward => by_row!(row, (a, b, out) => row_steps::softmax_backward(a, b, out)),
        ChainOp::LogSoftmaxBackward => {
            by_row!(row, (a, b, out) => row_steps::log_softmax_backward(a, b, out))
        }
        ChainOp::NllBackward => by_row!(row, (a, b, out) => row_steps::nll_backward(a, b, n, out)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(steps: &[ChainStep], inputs: &[ChainInput], register: usize, out: &mut [f32]) {
        let output = ChainOutput { period: out.len(), ..output(out, register) };
        let chain = Chain { steps, inputs, outputs: &[output], len: out.len(), row: 0 };
        // SAFETY: the slices live during the call, and the output is one of its own or an input of its length.
        unsafe { chain.run() };
    }

    fn output(out: &mut [f32], register: usize) -> ChainOutput {
        ChainOutput { data: out.as_mut_ptr().cast(), dtype: Dtype::Float32, register, period: 0 }
    }

    fn input<T>(numbers: &[T], dtype: Dtype) -> ChainInput {
        ChainInput { data: numbers.as_ptr().cast(), dtype, period: numbers.len() }
    }

    #[test]
    fn steps_follow_each_other_over_blocks_and_repeated_inputs() {
        let len = 3 * 700;
        let x: Vec<f32> = (0..len).map(|i| i as f32 * 0.25 - 200.0).collect();
        let bias: Vec<Bf16> = (0..700).map(|i| Bf16::from_f32((i % 13) as f32)).collect();
        let inputs =
            [input(&x, Dtype::Float32), input(&bias, Dtype::Bfloat16), input(&[3.0_f32], Dtype::Float32)];
        let steps = [
            ChainStep { op: ChainOp::Add, a: 0, b: 1, number: -2.0 },
            ChainStep { op: ChainOp::Mul, a: 3, b: 2, number: 0.0 },
            ChainStep { op: ChainOp::Relu, a: 4, b: 0, number: 0.0 },
            ChainStep { op: ChainOp::DivNumber, a: 5, b: 0, number: 4.0 },
        ];
        let mut out = vec![0.0; len];
        run(&steps, &inputs, 6, &mut out);
        for (i, (out, x)) in out.iter().zip(&x).enumerate() {
            let expected = ((x - 2.0 * (i % 700 % 13) as f32) * 3.0).max(0.0) / 4.0;
            assert_eq!(*out, expected, "{i}");
        }
    }

    #[test]
    fn an_output_may_lie_where_an_input_does() {
        let mut x: Vec<f32> = (0..1000).map(|i| i as f32).collect();
        let inputs = [input(&x, Dtype::Float32)];
        run(&[ChainStep { op: ChainOp::AddNumber, a: 0, b: 0, number: 1.0 }], &inputs, 1, &mut x);
        assert!(x.iter().enumerate().all(|(i, x)| *x == i as f32 + 1.0));
    }

    #[test]
    fn rows_are_normalized_and_summed_up() {
        for (rows, row) in [(1, 7), (3, 5), (70, 33), (50, 300)] {
            let x: Vec<f32> =
                (0..rows * row).map(|i| ((i * 37) % 101) as f32 * 0.125 + (i / row) as f32).collect();
            let factors: Vec<f32> = (0..row).map(|i| i as f32 + 1.0).collect();
            let inputs = [input(&x, Dtype::Float32), input(&factors, Dtype::Float32)];
            let steps = [
                ChainStep { op: ChainOp::RowMean, a: 0, b: 0, number: 0.0 },
                ChainStep { op: ChainOp::RowRstd, a: 0, b: 2, number: 1e-5 },
                ChainStep { op: ChainOp::Add, a: 0, b: 2, number: -1.0 },
                ChainStep { op: ChainOp::Mul, a: 4, b: 3, number: 0.0 },
                ChainStep { op: ChainOp::Mul, a: 5, b: 1, number: 0.0 },
            ];
            let (mut normal, mut means, mut sums) = (vec![0.0; rows * row], vec![0.0; rows], vec![0.0; row]);
            let outputs = [
                ChainOutput { period: row, ..output(&mut sums, 6) },
                output(&mut means, 2),
                ChainOutput { period: rows * row, ..output(&mut normal, 5) },
            ];
            let chain = Chain { steps: &steps, inputs: &inputs, outputs: &outputs, len: rows * row, row };
            // SAFETY: the vectors live during the call.
            unsafe { chain.run() };
            let mut expected_sums = vec![0.0; row];
            for (i, x) in x.chunks(row).enumerate() {
                let x: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
                let mean = x.iter().sum::<f64>() / row as f64;
                let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / row as f64;
                assert!((f64::from(means[i]) - mean).abs() < 1e-5 * mean.abs(), "{rows} x {row}");
                for (j, x) in x.iter().enumerate() {
                    let expected = (x - mean) / (variance + 1e-5).sqrt();
                    assert!((f64::from(normal[i * row + j]) - expected).abs() < 3e-5, "{rows} x {row}");
                    expected_sums[j] += expected * f64::from(factors[j]);
                }
            }
            for (sum, expected) in sums.iter().zip(&expected_sums) {
                assert!((f64::from(*sum) - expected).abs() < 1e-3 * (1.0 + expected.abs()), "{rows} x {row}");
            }
        }
    }

    #[test]
    fn every_operator_has_its_number() {
        for (number, op) in ChainOp::ALL.into_iter().enumerate() {
            assert_eq!((op as i32, ChainOp::of_number(number as i32)), (number as i32, Some(op)));
        }
        assert_eq!(ChainOp::of_number(ChainOp::ALL.len() as i32), None);
    }
}
