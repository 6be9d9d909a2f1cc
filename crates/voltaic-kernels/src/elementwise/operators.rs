//! Operators element by element on whole tensors, by all threads.

use std::ops::Range;

use crate::element::{Bf16, Element};
use crate::elementwise::gelu::{Gelu, GeluBackward};
use crate::elementwise::pointwise::{Add, AddUp, Convert, Map, MapOnto, Pointwise, Relu, ReluBackward};
use crate::kernel::blocks;
use crate::processor::{prefetch, run_vectorized};
use crate::threads::GRAIN;
use crate::views::{Floats, FloatsMut, Shared, for_units, in_one_format};

/// Numbers that are worked on while those two steps later are brought into the cache. Processors do that by themselves only
/// within a page.
const STREAMED: usize = 256;

/// Calls `run` for parts of the output on all threads, and before it `prefetch` for the part that comes soon.
fn stream<T: Send>(
    output: &mut [T],
    prefetch: impl Fn(Range<usize>) + Sync,
    run: impl Fn(Range<usize>, &mut [T]) + Sync,
) {
    for_units(output, 1, GRAIN, |part, output| {
        for (block, output) in blocks(part.clone(), STREAMED).zip(output.chunks_mut(STREAMED)) {
            let soon = block.start + 2 * STREAMED;
            if soon < part.end {
                prefetch(soon..(soon + STREAMED).min(part.end));
            }
            run(block, output);
        }
    });
}

/// Asks for numbers of a tensor that are to be in the cache soon.
fn ask_for<T>(numbers: &[T], soon: &Range<usize>) {
    let numbers = &numbers[soon.clone()];
    prefetch(numbers.as_ptr(), numbers.len());
}

/// GELU, by the error function or by tanh.
///
/// # Panics
/// If formats or lengths differ, as all functions of this file.
pub fn gelu(input: Floats, output: FloatsMut, is_tanh: bool) {
    fn run<T: Element>(input: &[T], output: &mut [T], is_tanh: bool) {
        assert_eq!(input.len(), output.len());
        let soon = |soon| ask_for(input, &soon);
        stream(output, soon, |part, output| run_vectorized(Gelu { input: &input[part], output, is_tanh }));
    }
    in_one_format!([input] [output] => run(input, output, is_tanh));
}

/// The gradient of [`gelu`], of that of its output and its input.
///
/// # Panics
/// As [`gelu`].
pub fn gelu_backward(grad: Floats, input: Floats, output: FloatsMut, is_tanh: bool) {
    fn run<T: Element>(grad: &[T], input: &[T], output: &mut [T], is_tanh: bool) {
        assert_eq!([grad.len(), input.len()], [output.len(); 2]);
        let soon = |soon| {
            ask_for(grad, &soon);
            ask_for(input, &soon);
        };
        stream(output, soon, |part, output| {
            let (grad, input) = (&grad[part.clone()], &input[part]);
            run_vectorized(GeluBackward { grad, input, output, is_tanh });
        });
    }
    in_one_format!([grad input] [output] => run(grad, input, output, is_tanh));
}

/// ReLU; without an input that of the output's own numbers, as all operators here whose first input may be none.
///
/// # Panics
/// As [`gelu`].
pub fn relu(input: Option<&[Bf16]>, output: &mut [Bf16]) {
    let nothing = vec![(); output.len()]; // of no size
    map(Relu, input, &nothing, output);
}

/// The gradient of [`relu`], of that of its result and the result.
///
/// # Panics
/// As [`gelu`].
pub fn relu_backward(grad: Option<&[Bf16]>, result: &[Bf16], output: &mut [Bf16]) {
    map(ReluBackward, grad, result, output);
}

/// `input + other`, in float32 and rounded once.
///
/// # Panics
/// As [`gelu`].
pub fn add(input: Option<Floats>, other: &[Bf16], output: FloatsMut) {
    match (input, output) {
        (None, FloatsMut::Float32(output)) => map(Add, None, other, output),
        (None, FloatsMut::Bfloat16(output)) => map(Add, None, other, output),
        (Some(input), output) => in_one_format!([input] [output] => map(Add, Some(input), other, output)),
    }
}

fn map<F: Pointwise<T, U>, T: Element, U: Copy + Sync>(
    operator: F,
    input: Option<&[T]>,
    other: &[U],
    output: &mut [T],
) {
    let len = output.len();
    assert!(other.len() == len && input.is_none_or(|input| input.len() == len), "{} of {len}", other.len());
    let address = Shared(output.as_mut_ptr());
    let soon = |soon: Range<usize>| {
        input.iter().for_each(|input| ask_for(input, &soon));
        ask_for(other, &soon);
        address.prefetch(soon);
    };
    stream(output, soon, |part, output| {
        let other = &other[part.clone()];
        match input {
            None => run_vectorized(MapOnto { operator, output, other }),
            Some(input) => run_vectorized(Map { operator, input: &input[part], other, output }),
        }
    });
}

/// Writes numbers in the other format.
///
/// # Panics
/// If the formats are equal, or the lengths differ.
pub fn convert(input: Floats, output: FloatsMut) {
    fn run<T: Element, U: Element>(input: &[T], output: &mut [U]) {
        assert_eq!(input.len(), output.len());
        let address = Shared(output.as_mut_ptr());
        let soon = |soon: Range<usize>| {
            ask_for(input, &soon);
            address.prefetch(soon);
        };
        stream(output, soon, |part, copy| run_vectorized(Convert { numbers: &input[part], copy }));
    }
    match (input, output) {
        (Floats::Float32(input), FloatsMut::Bfloat16(output)) => run(input, output),
        (Floats::Bfloat16(input), FloatsMut::Float32(output)) => run(input, output),
        _ => unreachable!("tensors of two formats"),
    }
}

/// Sums of several slices, number by number, in float32 and in their order, on this thread.
///
/// # Panics
/// If there are none, or one is of another format or shorter than the output.
pub fn add_up(parts: &[Floats], output: FloatsMut) {
    macro_rules! of_format {
        ($format:ident, $out:expr) => {{
            let slices = parts.iter().map(|part| match part {
                Floats::$format(part) => *part,
                _ => unreachable!("slices of one format"),
            });
            run_vectorized(AddUp { parts: &slices.collect::<Vec<_>>(), out: $out });
        }};
    }
    match output {
        FloatsMut::Float32(out) => of_format!(Float32, out),
        FloatsMut::Bfloat16(out) => of_format!(Bfloat16, out),
    }
}
