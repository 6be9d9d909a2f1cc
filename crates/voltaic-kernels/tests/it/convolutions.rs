//! Convolutions and their gradients.

use voltaic_kernels::{
    Convolution, ConvolutionKernel, Dtype, Machine, Part, convolution, convolution_input_grad,
    convolution_kernel, convolution_weight_grad, has_strips,
};

use crate::random::Random;
use crate::{DTYPES, Numbers, assert_close, rounding, use_threads};

/// Calls `term` for each product of a convolution: with where its output, input and weight lie.
fn for_terms(sizes: &Convolution, mut term: impl FnMut(usize, usize, usize)) {
    let Convolution { images, in_channels, out_channels, in_size, out_size, kernel, stride, padding, .. } =
        *sizes;
    let inside = |dim: usize, out: usize, tap: usize| {
        let at = (out * stride[dim] + tap).checked_sub(padding[dim])?;
        (at < in_size[dim]).then_some(at)
    };
    for image in 0..images {
        for (y, x) in (0..out_size[0]).flat_map(|y| (0..out_size[1]).map(move |x| (y, x))) {
            for (row, column) in (0..kernel[0]).flat_map(|y| (0..kernel[1]).map(move |x| (y, x))) {
                let (Some(from_y), Some(from_x)) = (inside(0, y, row), inside(1, x, column)) else {
                    continue;
                };
                let out = ((image * out_size[0] + y) * out_size[1] + x) * out_channels;
                let input = ((image * in_size[0] + from_y) * in_size[1] + from_x) * in_channels;
                for (o, i) in (0..out_channels).flat_map(|o| (0..in_channels).map(move |i| (o, i))) {
                    let weight = ((o * kernel[0] + row) * kernel[1] + column) * in_channels + i;
                    term(out + o, input + i, weight);
                }
            }
        }
    }
}

/// Which parts are computed here; fails if one is wrong.
fn check(random: &mut Random, sizes: &Convolution) -> Vec<(Part, ConvolutionKernel)> {
    let dtype = sizes.dtype;
    let mut numbers = |len: usize| Numbers::new(dtype, random.numbers(len));
    let (input, weight) = (numbers(sizes.in_len()), numbers(sizes.weight_len()));
    let (grad, bias) = (numbers(sizes.out_len()), numbers(sizes.out_channels));
    // tiles lose some of float32's digits
    let tolerance = 8.0 * rounding(dtype).max(1e-6);
    let mut done = Vec::new();
    for part in [Part::Output, Part::InputGrad, Part::WeightGrad] {
        let Some(kernel) = convolution_kernel(sizes, part, false) else { continue };
        done.push((part, kernel));
        let what = format!("{part:?} of {sizes:?} by {kernel:?}");
        let (len, used, numbers) = match part {
            Part::Output => {
                let mut out = Numbers::new(dtype, vec![7.0; sizes.out_len()]);
                let bias = Some(bias.view());
                let used = convolution(sizes, input.view(), weight.view(), bias, out.view_mut());
                (sizes.out_len(), used, out.all())
            }
            Part::InputGrad => {
                let mut out = Numbers::new(dtype, vec![7.0; sizes.in_len()]);
                let used = convolution_input_grad(sizes, grad.view(), weight.view(), out.view_mut());
                (sizes.in_len(), used, out.all())
            }
            Part::WeightGrad => {
                let mut out = Numbers::new(dtype, vec![7.0; sizes.weight_len()]);
                let used = convolution_weight_grad(sizes, grad.view(), input.view(), out.view_mut());
                (sizes.weight_len(), used, out.all())
            }
        };
        let mut expected = vec![0.0; len];
        if part == Part::Output {
            expected.iter_mut().enumerate().for_each(|(i, out)| *out = bias.at(i % sizes.out_channels));
        }
        for_terms(sizes, |out, from, by| match part {
            Part::Output => expected[out] += input.at(from) * weight.at(by),
            Part::InputGrad => expected[from] += grad.at(out) * weight.at(by),
            Part::WeightGrad => expected[by] += grad.at(out) * input.at(from),
        });
        assert_eq!(used, Some(kernel), "{what}");
        assert_close(&what, &numbers, &expected, tolerance);
    }
    done
}

fn sizes(
    dtype: Dtype,
    [images, in_channels, out_channels]: [usize; 3],
    in_size: [usize; 2],
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
) -> Option<Convolution> {
    let out = |dim: usize| {
        let room = (in_size[dim] + 2 * padding[dim]).checked_sub(kernel[dim])?;
        Some(room / stride[dim] + 1)
    };
    let out_size = [out(0)?, out(1)?];
    Some(Convolution {
        dtype,
        are_channels_last: true,
        images,
        in_channels,
        out_channels,
        in_size,
        out_size,
        kernel,
        stride,
        padding,
    })
}

#[test]
fn convolutions_of_3_by_3_are_exact_at_any_size_of_image() {
    let mut random = Random::new(5);
    let mut done = Vec::new();
    for round in 0..60 {
        use_threads(1 + round % 3);
        let channels = [32, 48, 64];
        let shape = [random.between(1, 3), random.one_of(&channels), random.one_of(&channels)];
        let (in_size, padding) = ([random.between(1, 13), random.between(1, 13)], random.between(0, 2));
        let dtype = random.one_of(&DTYPES);
        let Some(sizes) = sizes(dtype, shape, in_size, [3, 3], [1, 1], [padding; 2]) else { continue };
        done.extend(check(&mut random, &sizes));
    }
    for part in [Part::Output, Part::InputGrad, Part::WeightGrad] {
        let is_done = done.contains(&(part, ConvolutionKernel::Tiles));
        assert_eq!(is_done, has_strips(), "{part:?} by tiles");
    }
}

#[test]
fn convolutions_by_patches_are_exact_with_any_kernel() {
    let mut random = Random::new(6);
    let mut done = Vec::new();
    for round in 0..40 {
        use_threads(1 + round % 3);
        let mut pair = |low, high| [random.between(low, high), random.between(low, high)];
        let (in_size, kernel, stride, padding) = (pair(1, 9), pair(1, 4), pair(1, 3), pair(0, 2));
        let shape = [random.between(1, 3), random.between(1, 20), random.between(1, 20)];
        let Some(sizes) = sizes(Dtype::Bfloat16, shape, in_size, kernel, stride, padding) else { continue };
        done.extend(check(&mut random, &sizes));
    }
    // those that are left where there is neither the MKL nor a processor with products from strips are tested in voltaic
    let serves = |machine: Machine| machine.has_mkl || machine.has_wide_units && machine.has_bf16_products;
    assert_eq!(done.is_empty(), !serves(Machine::here()), "{done:?}");
}

#[test]
fn convolutions_of_many_channels_are_exact() {
    let mut random = Random::new(7);
    use_threads(2);
    for dtype in DTYPES {
        for (channels, side, stride) in [([512, 256], 4, 1), ([128, 64], 4, 2)] {
            let sizes = sizes(dtype, [1, channels[1], channels[0]], [side; 2], [3, 3], [stride; 2], [1, 1]);
            check(&mut random, &sizes.unwrap());
        }
    }
}

#[test]
fn small_images_of_few_channels_are_libtorchs_in_float32() {
    let sizes = sizes(Dtype::Float32, [1, 3, 8], [8, 8], [3, 3], [1, 1], [1, 1]).unwrap();
    for part in [Part::Output, Part::InputGrad, Part::WeightGrad] {
        assert_eq!(convolution_kernel(&sizes, part, true), None, "{part:?}");
    }
}
