//! Convolutions and their gradients.

use tch::{Device, Kind, Tensor};
use voltaic::ffi;

use crate::{assert_close, channels_last, install};

/// A convolution of images `[batch, inputs, height, width]`.
#[derive(Clone, Copy, Debug)]
struct Case {
    images: [i64; 4],
    outputs: i64,
    kernel: [i64; 2],
    stride: [i64; 2],
    padding: [i64; 2],
    dilation: i64,
    groups: i64,
}

const SQUARE: Case = Case {
    images: [3, 256, 4, 4],
    outputs: 256,
    kernel: [3, 3],
    stride: [1, 1],
    padding: [1, 1],
    dilation: 1,
    groups: 1,
};

#[test]
fn convolutions_agree_with_float64() {
    install();
    ffi::manual_seed(6).unwrap();
    let cases = [
        SQUARE,
        Case { images: [3, 256, 8, 8], stride: [2, 2], ..SQUARE },
        Case { images: [2, 256, 7, 5], stride: [2, 2], outputs: 320, ..SQUARE },
        Case { images: [2, 256, 4, 9], stride: [1, 3], ..SQUARE },
        Case { images: [2, 256, 1, 1], ..SQUARE },
        Case { images: [2, 256, 2, 2], padding: [2, 0], kernel: [3, 1], ..SQUARE },
        Case { images: [1, 256, 5, 5], padding: [0, 0], ..SQUARE },
        Case { images: [1, 512, 8, 7], outputs: 512, ..SQUARE },
        // by tiles
        Case { images: [2, 48, 33, 34], outputs: 80, ..SQUARE }, // more than a block
        Case { images: [18, 32, 3, 4], outputs: 32, padding: [0, 0], ..SQUARE },
        Case { images: [17, 16, 3, 3], outputs: 32, padding: [0, 0], ..SQUARE },
        Case { images: [1, 32, 5, 140], outputs: 16, padding: [2, 2], ..SQUARE },
        Case { images: [17, 64, 2, 1], outputs: 48, ..SQUARE },
        Case { images: [20, 48, 7, 8], outputs: 32, padding: [2, 2], ..SQUARE },
        Case { images: [16, 704, 4, 4], outputs: 704, ..SQUARE }, // sums of so many weights are there once for all threads
        // by tiles, and these by AMX where it is
        Case { images: [3, 80, 19, 22], outputs: 144, ..SQUARE },
        Case { images: [3, 144, 9, 11], outputs: 160, padding: [2, 2], ..SQUARE },
        Case { images: [1, 128, 8, 8], outputs: 128, padding: [0, 0], ..SQUARE },
        // what is libtorch's
        Case { images: [1, 64, 4, 4], outputs: 64, ..SQUARE },
        Case { dilation: 2, padding: [2, 2], ..SQUARE },
        Case { groups: 2, ..SQUARE },
    ];
    for case in cases {
        let [batch, inputs, ..] = case.images;
        let draw = |sizes: &[i64]| Tensor::randn(sizes, (Kind::Double, Device::Cpu));
        let weight = draw(&[case.outputs, inputs / case.groups, case.kernel[0], case.kernel[1]]) * 0.05;
        let (input, bias) = (draw(&case.images), draw(&[case.outputs]));
        let dilation = [case.dilation; 2];
        let out = input.conv2d(&weight, Some(&bias), case.stride, case.padding, dilation, case.groups);
        assert_eq!(out.size()[0], batch);
        // without AVX-512 those of float32 are libtorch's, whose AVX2 adds up in longer chains: 3.6e-6 with 704 channels
        let float = if voltaic::kernels::has_avx512() { 3e-6 } else { 5e-6 };
        for (kind, tolerance) in [(Kind::Float, float), (Kind::BFloat16, 0.02)] {
            let given = [&input, &weight, &bias, &out.randn_like()].map(|tensor| tensor.to_kind(kind));
            let expected =
                forward_and_grads(case, &given.each_ref().map(|tensor| tensor.to_kind(Kind::Double)));
            let [input, weight, bias, grad] = &given;
            let last = [channels_last(input), channels_last(weight), bias.copy(), channels_last(grad)];
            // gradients in the usual order are turned
            let mixed = [channels_last(input), channels_last(weight), bias.copy(), grad.copy()];
            for (layout, given) in [("usual", &given), ("channels last", &last), ("mixed", &mixed)] {
                for (i, (a, expected)) in forward_and_grads(case, given).iter().zip(&expected).enumerate() {
                    assert_close(&format!("{case:?}, {kind:?}, {layout}, {i}"), a, expected, tolerance);
                }
            }
        }
    }
}

#[test]
fn gradients_of_weights_have_their_layout_and_are_there_if_asked_for() {
    install();
    ffi::manual_seed(7).unwrap();
    let draw = |sizes: [i64; 4]| channels_last(&Tensor::randn(sizes, (Kind::Float, Device::Cpu)));
    let (input, weight) = (draw(SQUARE.images), draw([256, 256, 3, 3]).set_requires_grad(true));
    let out = input.conv2d(&weight, None::<&Tensor>, [1, 1], [1, 1], [1, 1], 1);
    out.sum(Kind::Float).backward();
    assert_eq!(weight.grad().stride(), weight.stride());
    let (input, frozen) = (input.set_requires_grad(true), weight.detach());
    input.conv2d(&frozen, None::<&Tensor>, [1, 1], [1, 1], [1, 1], 1).sum(Kind::Float).backward();
    assert!(input.grad().defined() && !frozen.grad().defined());
}

/// They reach the outputs that see them, and at most those of the same tiles.
#[test]
fn infinite_numbers_are_not_lost() {
    install();
    for channels in [32, 128] {
        for number in [f64::INFINITY, f64::NAN] {
            let ones = |sizes: [i64; 4]| channels_last(&Tensor::ones(sizes, (Kind::Float, Device::Cpu)));
            let (input, weight) = (ones([1, channels, 16, 16]), ones([channels, channels, 3, 3]));
            let _ = input.get(0).get(5).get(6).get(7).fill_(number);
            let out = input.conv2d(&weight, None::<&Tensor>, [1, 1], [1, 1], [1, 1], 1);
            let seeing = out.narrow(2, 5, 3).narrow(3, 6, 3);
            assert_eq!(seeing.isfinite().any().int64_value(&[]), 0, "{channels} channels, {number}");
            let is_finite =
                |rows: [i64; 2]| out.narrow(2, rows[0], rows[1]).isfinite().all().int64_value(&[]);
            assert_eq!([is_finite([0, 4]), is_finite([8, 8])], [1, 1], "{channels} channels, {number}");
        }
    }
}

/// What is computed by tiles of 4 x 4 outputs in bfloat16 loses nothing that bfloat16 has: the error (root of the mean square)
/// is that of rounding the exact result.
#[test]
fn in_bfloat16_tiles_are_as_exact_as_rounding() {
    install();
    ffi::manual_seed(9).unwrap();
    for channels in [32, 128] {
        let case = Case { images: [8, channels, 8, 12], outputs: channels, ..SQUARE };
        let draw = |sizes: &[i64]| channels_last(&Tensor::randn(sizes, (Kind::BFloat16, Device::Cpu)));
        let (input, weight) = (draw(&case.images), draw(&[channels, channels, 3, 3]));
        let bias = Tensor::randn([channels], (Kind::BFloat16, Device::Cpu));
        let given = [input, weight, bias, draw(&case.images)];
        let exact = forward_and_grads(case, &given.each_ref().map(|tensor| tensor.to_kind(Kind::Double)));
        let got = forward_and_grads(case, &given);
        for (what, (got, exact)) in ["output", "input", "weight"].iter().zip(got.iter().zip(&exact)) {
            let error =
                |tensor: &Tensor| (tensor.to_kind(Kind::Double) - exact).square().mean(Kind::Double).sqrt();
            let ratio = (error(got) / error(&exact.to_kind(Kind::BFloat16))).double_value(&[]);
            assert!((0.9999..1.0001).contains(&ratio), "{channels} channels, {what}: {ratio}");
        }
    }
}

/// Small integers, whose products and sums are exact.
fn integers(sizes: &[i64]) -> Tensor {
    Tensor::randint_low(-3, 4, sizes, (Kind::BFloat16, Device::Cpu))
}

/// The output, and the gradients of input, weight and bias.
fn forward_and_grads(case: Case, [input, weight, bias, grad]: &[Tensor; 4]) -> [Tensor; 4] {
    let [input, weight, bias] = [input, weight, bias].map(|tensor| tensor.detach().set_requires_grad(true));
    let dilation = [case.dilation; 2];
    let out = input.conv2d(&weight, Some(&bias), case.stride, case.padding, dilation, case.groups);
    (&out * grad).sum(out.kind()).backward();
    [out.detach(), input.grad(), weight.grad(), bias.grad()]
}

#[test]
fn in_bfloat16_sums_are_rounded_once() {
    install();
    ffi::manual_seed(8).unwrap();
    let small = Case { images: [3, 5, 6, 7], outputs: 4, ..SQUARE };
    let cases = [
        small,
        Case { stride: [2, 2], ..small },
        Case { stride: [3, 1], padding: [0, 2], ..small },
        Case { kernel: [1, 1], padding: [0, 0], ..small },
        Case { kernel: [1, 1], stride: [2, 2], padding: [0, 0], ..small }, // inputs that no output sees
        Case { kernel: [2, 4], stride: [3, 2], padding: [0, 1], ..small },
        Case { images: [2, 1, 28, 28], outputs: 8, padding: [0, 0], ..small },
        Case { images: [2, 3, 9, 9], outputs: 1, kernel: [7, 7], stride: [2, 2], padding: [3, 3], ..small },
        Case { images: [1, 40, 20, 33], outputs: 70, ..small }, // more than a block
        Case { images: [5, 8, 1, 1], outputs: 300, ..small },
        // what is libtorch's
        Case { dilation: 2, ..small },
        Case { images: [3, 4, 6, 7], groups: 2, ..small },
    ];
    for case in cases {
        let [batch, inputs, height, width] = case.images;
        let input = integers(&[batch, inputs, height, width]);
        let weight = integers(&[case.outputs, inputs / case.groups, case.kernel[0], case.kernel[1]]);
        let bias = integers(&[case.outputs]);
        let dilation = [case.dilation; 2];
        let out = input.conv2d(&weight, Some(&bias), case.stride, case.padding, dilation, case.groups);
        let given = [input, weight, bias, integers(&out.size())];
        let exact = forward_and_grads(case, &given.each_ref().map(|tensor| tensor.to_kind(Kind::Double)));
        let [input, weight, bias, grad] = &given;
        let last = [channels_last(input), channels_last(weight), bias.copy(), channels_last(grad)];
        let mixed = [channels_last(input), weight.copy(), bias.copy(), grad.copy()];
        for (layout, given) in [("usual", &given), ("channels last", &last), ("mixed", &mixed)] {
            let got = forward_and_grads(case, given);
            for (what, (got, exact)) in
                ["output", "input", "weight", "bias"].iter().zip(got.iter().zip(&exact))
            {
                assert_eq!(*got, exact.to_kind(Kind::BFloat16), "{case:?}, {layout}, {what}");
            }
        }
    }
}

#[test]
fn in_bfloat16_layouts_are_those_of_the_inputs() {
    install();
    let (input, weight) = (integers(&[2, 3, 5, 5]), integers(&[4, 3, 3, 3]));
    let convolve =
        |input: &Tensor, weight| input.conv2d::<Tensor>(weight, None, [1, 1], [1, 1], [1, 1], 1).stride();
    let usual = convolve(&input, &weight);
    assert_eq!(usual, [100, 25, 5, 1]);
    assert_eq!(convolve(&channels_last(&input), &weight), [100, 1, 20, 4]);
    assert_eq!(convolve(&input, &channels_last(&weight)), [100, 1, 20, 4]);
    let message = input.f_conv2d::<Tensor>(&integers(&[4, 2, 3, 3]), None, [1, 1], [1, 1], [1, 1], 1);
    assert!(message.unwrap_err().to_string().contains("channels"));
}
