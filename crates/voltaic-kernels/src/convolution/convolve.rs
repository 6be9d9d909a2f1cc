//! Convolutions of images with the channels last, and their gradients, by the kernels that serve them.

use crate::choice::{ConvolutionKernel, Part, convolution_kernel};
use crate::convolution::sizes::Convolution;
use crate::convolution::{by_patches, by_tiles};
use crate::element::Bf16;
use crate::views::{Floats, FloatsMut, Shared};

/// Calls a function of `by_tiles` or `by_patches`, whichever serves a part of a convolution: `function(left factor, right
/// factor, ..., output)`.
macro_rules! by_kernel {
    ($sizes:expr, $part:expr, $function:ident($left:expr, $right:expr $(, $other:expr)*; $out:expr)) => {
        match ($left, $right, $out) {
            (Floats::Float32(left), Floats::Float32(right), FloatsMut::Float32(out)) => {
                let kernel = convolution_kernel($sizes, $part, false);
                assert_eq!(kernel, Some(ConvolutionKernel::Tiles), "{:?} of {:?}", $part, $sizes);
                let out = Shared(out.as_mut_ptr());
                by_tiles::$function::<f32, _, _>($sizes, left, right $(, $other.map(float32))*, out)
                    .then_some(ConvolutionKernel::Tiles)
            }
            (Floats::Bfloat16(left), Floats::Bfloat16(right), FloatsMut::Bfloat16(out)) => {
                let out = Shared(out.as_mut_ptr());
                let kernel = convolution_kernel($sizes, $part, false);
                let is_finite = match kernel {
                    Some(ConvolutionKernel::Tiles) => {
                        by_tiles::$function::<Bf16, _, _>($sizes, left, right $(, $other.map(bfloat16))*, out)
                    }
                    Some(ConvolutionKernel::Patches) => {
                        by_patches::$function($sizes, left, right $(, $other.map(bfloat16))*, out)
                    }
                    _ => unreachable!("{kernel:?} for {:?} of {:?}", $part, $sizes),
                };
                kernel.filter(|_| is_finite)
            }
            _ => unreachable!("tensors of one format"),
        }
    };
}

fn float32(numbers: Floats<'_>) -> &[f32] {
    match numbers {
        Floats::Float32(numbers) => numbers,
        Floats::Bfloat16(_) => unreachable!("tensors of one format"),
    }
}

fn bfloat16(numbers: Floats<'_>) -> &[Bf16] {
    match numbers {
        Floats::Bfloat16(numbers) => numbers,
        Floats::Float32(_) => unreachable!("tensors of one format"),
    }
}

/// Writes the outputs `[images, rows, columns, channels]`, for weights `[outputs, rows, columns, inputs]`. Gives the kernel that
/// did it if all are finite; if not, some may be wrong, and another has to do it.
///
/// # Panics
/// If formats or lengths differ from the sizes', or no kernel of this file serves them
/// ([`convolution_kernel`]), as all functions of this file.
pub fn convolution(
    sizes: &Convolution,
    input: Floats,
    weight: Floats,
    bias: Option<Floats>,
    output: FloatsMut,
) -> Option<ConvolutionKernel> {
    assert_eq!(
        [input.len(), weight.len(), output.len()],
        [sizes.in_len(), sizes.weight_len(), sizes.out_len()]
    );
    assert!(bias.is_none_or(|bias| bias.len() == sizes.out_channels));
    by_kernel!(sizes, Part::Output, output(input, weight, bias; output))
}

/// Writes the gradients of the inputs, of those of the outputs. Gives the kernel if all are finite.
///
/// # Panics
/// As [`convolution`].
pub fn convolution_input_grad(
    sizes: &Convolution,
    grad: Floats,
    weight: Floats,
    output: FloatsMut,
) -> Option<ConvolutionKernel> {
    assert_eq!(
        [grad.len(), weight.len(), output.len()],
        [sizes.out_len(), sizes.weight_len(), sizes.in_len()]
    );
    by_kernel!(sizes, Part::InputGrad, input_grad(grad, weight; output))
}

/// Writes the gradients of the weights, of those of the outputs. Gives the kernel if all are finite.
///
/// # Panics
/// As [`convolution`].
pub fn convolution_weight_grad(
    sizes: &Convolution,
    grad: Floats,
    input: Floats,
    output: FloatsMut,
) -> Option<ConvolutionKernel> {
    assert_eq!(
        [grad.len(), input.len(), output.len()],
        [sizes.out_len(), sizes.in_len(), sizes.weight_len()]
    );
    by_kernel!(sizes, Part::WeightGrad, weight_grad(grad, input; output))
}
