//! Operators element by element, one after the other on each block of numbers while the first cache holds it: memory is read and written
//! once for all of them, and what is between two of them stays in float32.

use std::ffi::c_void;
use std::ops::Range;

use crate::element::{Bf16, Element};
use crate::elementwise::gelu::{Gelu, GeluBackward};
use crate::kernel::{Kernel, blocks};
use crate::math::{sigmoid, tanh};
use crate::processor::run_vectorized;
use crate::threads::{GRAIN, parallel_for};
use crate::views::{Dtype, slice_mut_of, slice_of};

/// Numbers of a block. All registers of a chain together are 32 KiB.
const BLOCK: usize = 256;

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
}

impl ChainOp {
    const ALL: [Self; 17] = [
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
    /// How many there are, which are repeated to the length of the chain; a divisor of it.
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
    /// Numbers of each output.
    pub len: usize,
}

// SAFETY: the addresses are those of memory that threads may share, as `Chain::run` asks.
unsafe impl Sync for Chain<'_> {}

impl Chain<'_> {
    /// Most inputs and steps together.
    pub const REGISTERS: usize = 32;

    /// Computes the outputs, by all threads.
    ///
    /// # Safety
    /// Inputs and outputs must be valid during the call, and no other thread may use them. An output may lie where an input of `len` numbers of
    /// its format lies, otherwise it shares no memory with any of them.
    ///
    /// # Panics
    /// If there are too many registers, or a step reads one that comes later.
    pub unsafe fn run(&self) {
        let first = self.inputs.len();
        assert!(first + self.steps.len() <= Self::REGISTERS, "{} registers", first + self.steps.len());
        let is_earlier = |(i, step): (usize, &ChainStep)| step.a < first + i && step.b < first + i;
        assert!(self.steps.iter().enumerate().all(is_earlier), "a step reads a later one");
        assert!(self.outputs.iter().all(|output| output.register < first + self.steps.len()));
        assert!(self.inputs.iter().all(|input| input.period > 0 && self.len.is_multiple_of(input.period)));
        parallel_for(self.len, GRAIN, |range| run_vectorized(Part { chain: self, range }));
    }
}

/// What one thread does of a chain.
struct Part<'a> {
    chain: &'a Chain<'a>,
    range: Range<usize>,
}

impl Kernel for Part<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Chain { steps, inputs, outputs, .. } = *self.chain;
        let mut registers = [[0.0_f32; BLOCK]; Chain::REGISTERS];
        for (input, register) in inputs.iter().zip(&mut registers).filter(|(input, _)| input.period == 1) {
            load(input, 0, register);
        }
        for block in blocks(self.range, BLOCK) {
            let len = block.len();
            for (input, register) in inputs.iter().zip(&mut registers).filter(|(input, _)| input.period > 1) {
                load(input, block.start, &mut register[..len]);
            }
            for (i, step) in steps.iter().enumerate() {
                let (before, rest) = registers.split_at_mut(inputs.len() + i);
                apply(step, &before[step.a][..len], &before[step.b][..len], &mut rest[0][..len]);
            }
            for output in outputs {
                store(output, block.start, &registers[output.register][..len]);
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
        match input.dtype {
            // SAFETY: `Chain::run` asks for so many numbers there; nothing is written while the slice is there.
            Dtype::Float32 => widen(part, unsafe { slice_of(input.data.cast::<f32>().add(at), len) }),
            // SAFETY: as above.
            Dtype::Bfloat16 => widen(part, unsafe { slice_of(input.data.cast::<Bf16>().add(at), len) }),
        }
        (at, done) = (0, done + len);
    }
}

#[inline(always)]
fn widen<T: Element>(register: &mut [f32], numbers: &[T]) {
    register.iter_mut().zip(numbers).for_each(|(wide, number)| *wide = number.to_f32());
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
    numbers.iter_mut().zip(register).for_each(|(number, wide)| *number = T::from_f32(*wide));
}

#[inline(always)]
fn one(out: &mut [f32], a: &[f32], f: impl Fn(f32) -> f32) {
    out.iter_mut().zip(a).for_each(|(out, a)| *out = f(*a));
}

#[inline(always)]
fn two(out: &mut [f32], a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) {
    out.iter_mut().zip(a).zip(b).for_each(|((out, a), b)| *out = f(*a, *b));
}

#[inline(always)]
fn apply(step: &ChainStep, a: &[f32], b: &[f32], out: &mut [f32]) {
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
        ChainOp::Sigmoid => one(out, a, |a| sigmoid(a).0),
        ChainOp::SigmoidBackward => two(out, a, b, |a, b| a * b * (1.0 - b)),
        ChainOp::Gelu | ChainOp::GeluTanh => {
            Gelu { input: a, output: out, is_tanh: step.op == ChainOp::GeluTanh }.run();
        }
        ChainOp::GeluBackward | ChainOp::GeluTanhBackward => {
            let is_tanh = step.op == ChainOp::GeluTanhBackward;
            GeluBackward { grad: a, input: b, output: out, is_tanh }.run();
        }
        ChainOp::Round => one(out, a, |a| Bf16::from_f32(a).to_f32()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(steps: &[ChainStep], inputs: &[ChainInput], register: usize, out: &mut [f32]) {
        let output = ChainOutput { data: out.as_mut_ptr().cast(), dtype: Dtype::Float32, register };
        let chain = Chain { steps, inputs, outputs: &[output], len: out.len() };
        // SAFETY: the slices live during the call, and the output is one of its own or an input of its length.
        unsafe { chain.run() };
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
    fn every_operator_has_its_number() {
        for (number, op) in ChainOp::ALL.into_iter().enumerate() {
            assert_eq!((op as i32, ChainOp::of_number(number as i32)), (number as i32, Some(op)));
        }
        assert_eq!(ChainOp::of_number(17), None);
    }
}
