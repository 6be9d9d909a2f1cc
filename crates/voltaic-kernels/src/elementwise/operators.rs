//! Operators element by element on whole tensors, by all threads.

use crate::element::{Bf16, Element};
use crate::elementwise::gelu::{Gelu, GeluBackward};
use crate::elementwise::pointwise::{Add, AddUp, Convert, Map, MapOnto, Pointwise, Relu, ReluBackward};
use crate::processor::{prefetch, run_vectorized};
use crate::threads::GRAIN;
use crate::views::{Floats, FloatsMut, for_units, in_one_format};

/// Numbers that are worked on while those two steps later are brought into the cache. Processors do that by themselves only
/// within a page.
const STREAMED: usize = 256;

/// Asks for what comes two blocks after this one.
#[inline(always)]
fn ask_ahead<T>(block: &[T]) {
    prefetch(block.as_ptr().wrapping_add(2 * STREAMED), STREAMED);
}

/// Whether there is anything two blocks after block `i` of `len` numbers.
#[inline(always)]
fn is_followed(i: usize, len: usize) -> bool {
    (i + 2) * STREAMED < len
}

/// GELU, by the error function or by tanh.
///
/// # Panics
/// If formats or lengths differ, as all functions of this file.
pub fn gelu(input: Floats, output: FloatsMut, is_tanh: bool) {
    fn run<T: Element>(input: &[T], output: &mut [T], is_tanh: bool) {
        assert_eq!(input.len(), output.len());
        for_units(output, 1, GRAIN, |part, output| {
            let (input, len) = (&input[part], output.len());
            let blocks = input.chunks(STREAMED).zip(output.chunks_mut(STREAMED));
            for (i, (input, output)) in blocks.enumerate() {
                if is_followed(i, len) {
                    ask_ahead(input);
                }
                run_vectorized(Gelu { input, output, is_tanh });
            }
        });
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
        for_units(output, 1, GRAIN, |part, output| {
            let (grad, input, len) = (&grad[part.clone()], &input[part], output.len());
            let blocks = grad.chunks(STREAMED).zip(input.chunks(STREAMED)).zip(output.chunks_mut(STREAMED));
            for (i, ((grad, input), output)) in blocks.enumerate() {
                if is_followed(i, len) {
                    ask_ahead(grad);
                    ask_ahead(input);
                }
                run_vectorized(GeluBackward { grad, input, output, is_tanh });
            }
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
    for_units(output, 1, GRAIN, |part, output| {
        let (other, len) = (&other[part.clone()], output.len());
        let blocks = other.chunks(STREAMED).zip(output.chunks_mut(STREAMED)).enumerate();
        let Some(input) = input else {
            for (i, (other, output)) in blocks {
                if is_followed(i, len) {
                    ask_ahead(other);
                    ask_ahead(output);
                }
                run_vectorized(MapOnto { operator, output, other });
            }
            return;
        };
        for (input, (i, (other, output))) in input[part].chunks(STREAMED).zip(blocks) {
            if is_followed(i, len) {
                ask_ahead(input);
                ask_ahead(other);
                ask_ahead(output);
            }
            run_vectorized(Map { operator, input, other, output });
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
        for_units(output, 1, GRAIN, |part, output| {
            let (input, len) = (&input[part], output.len());
            let blocks = input.chunks(STREAMED).zip(output.chunks_mut(STREAMED));
            for (i, (numbers, copy)) in blocks.enumerate() {
                if is_followed(i, len) {
                    ask_ahead(numbers);
                    ask_ahead(copy);
                }
                run_vectorized(Convert { numbers, copy });
            }
        });
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
