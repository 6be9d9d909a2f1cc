//! Products of matrices.

use tch::{Device, Kind, Tensor};

use crate::{assert_close, install};

/// A float32 matrix, its rows next to each other or its columns.
fn matrix(rows: i64, columns: i64, is_turned: bool) -> Tensor {
    if is_turned {
        Tensor::randn([columns, rows], (Kind::Float, Device::Cpu)).tr()
    } else {
        Tensor::randn([rows, columns], (Kind::Float, Device::Cpu))
    }
}

fn in_float64(tensors: [&Tensor; 2]) -> [Tensor; 2] {
    tensors.map(|tensor| tensor.to_kind(Kind::Double))
}

#[test]
fn products_of_all_layouts_and_sizes() {
    install();
    tch::manual_seed(1);
    let few_rows_and_long_columns = [(16, 33, 300), (64, 256, 784), (127, 70, 257), (15, 20, 300)];
    let long_columns = [(128, 33, 513), (130, 257, 600), (300, 7, 1100)];
    let for_tiles = [(1100, 70, 65), (64, 800, 100), (70, 64, 1200), (97, 400, 385)];
    let others = [(1, 1, 1), (3, 5, 7), (64, 10, 256), (1, 300, 40), (130, 257, 65), (200, 1, 9)];
    let by_dots = [(1, 71, 300), (4, 300, 64), (5, 66, 250), (8, 257, 129)];
    let all = few_rows_and_long_columns.into_iter().chain(long_columns).chain(for_tiles);
    let all = all.chain(by_dots).chain(others);
    for (rows, columns, depth) in all {
        for layout in 0..4 {
            let (a, b) = (matrix(rows, depth, layout & 1 != 0), matrix(depth, columns, layout & 2 != 0));
            let [a64, b64] = in_float64([&a, &b]);
            let expected = a64.mm(&b64);
            let what = format!("{rows} x {columns} x {depth}, layout {layout}");
            assert_close(&what, &a.mm(&b), &expected, 2e-6);
            let mut out = Tensor::full([columns, rows], f64::NAN, (Kind::Float, Device::Cpu)).tr();
            let _ = a.mm_out(&out, &b);
            assert_close(&what, &out, &expected, 2e-6);
            let bias = matrix(1, columns, false).squeeze();
            let with_bias = bias.to_kind(Kind::Double) + &expected;
            assert_close(&what, &bias.addmm(&a, &b), &with_bias, 2e-6);
            out = out.fill(f64::NAN);
            let _ = bias.addmm_out(&out, &a, &b);
            assert_close(&what, &out, &with_bias, 2e-6);
        }
    }
}

#[test]
fn products_of_batches() {
    install();
    tch::manual_seed(2);
    let a = Tensor::randn([3, 4, 33], (Kind::Float, Device::Cpu));
    let b = Tensor::randn([3, 9, 33], (Kind::Float, Device::Cpu)).transpose(1, 2);
    let [a64, b64] = in_float64([&a, &b]);
    assert_close("bmm", &a.bmm(&b), &a64.bmm(&b64), 2e-6);
    let shared = b.narrow(0, 0, 1).expand([3, 33, 9], false);
    assert_close("shared", &a.bmm(&shared), &a64.bmm(&shared.to_kind(Kind::Double)), 2e-6);
    let more_rows = a.repeat([1, 3, 1]);
    assert_close("more rows", &more_rows.bmm(&b), &a64.repeat([1, 3, 1]).bmm(&b64), 2e-6);
}

#[test]
fn an_output_that_is_an_input_and_other_calls_are_libtorchs() {
    install();
    tch::manual_seed(3);
    let a = matrix(4, 4, false);
    let expected = a.to_kind(Kind::Double).mm(&a.to_kind(Kind::Double));
    let twice = Tensor::ones([4, 4], (Kind::Float, Device::Cpu));
    assert_close("in place", &a.copy().mm(&a), &expected, 2e-6);
    let scaled = twice.f_addmm(&a, &a).unwrap();
    assert_close("ones", &scaled, &(expected + 1.0), 2e-6);
    assert_eq!(matrix(0, 4, false).mm(&a).size(), [0, 4]);
    assert_eq!(
        matrix(2, 0, false).mm(&matrix(0, 3, false)),
        Tensor::zeros([2, 3], (Kind::Float, Device::Cpu))
    );
    let message = a.f_mm(&matrix(3, 4, false)).unwrap_err().to_string();
    assert!(message.contains("cannot be multiplied"), "{message}");
    let message = a.f_mm(&matrix(4, 4, false).to_kind(Kind::Double)).unwrap_err().to_string();
    assert!(message.contains("dtype"), "{message}");
}

#[test]
fn a_nan_is_not_lost() {
    install();
    let a = Tensor::from_slice(&[1f32, f32::NAN, 0.0, 0.0]).view([2, 2]);
    let ones = Tensor::ones([2, 2], (Kind::Float, Device::Cpu));
    let isnan = a.mm(&ones).isnan();
    assert_eq!(Vec::<bool>::try_from(isnan.view(-1)).unwrap(), [true, true, false, false]);
}

#[test]
fn what_is_not_finite_is_as_in_float64() {
    install();
    tch::manual_seed(5);
    for (rows, columns, depth) in [(9, 7, 30), (130, 257, 600), (1100, 70, 400)] {
        for special in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN, f64::from(f32::MAX)] {
            let (a, b) = (matrix(rows, depth, false), matrix(depth, columns, true));
            let _ = a.get(rows / 2).get(depth - 1).fill_(special);
            // what float64 holds and float32 does not is infinite
            let bias = matrix(1, columns, false).squeeze();
            let [a64, b64] = in_float64([&a, &b]);
            let exact = a64.mm(&b64).to_kind(Kind::Float);
            let with_bias = (a64.mm(&b64) + &bias).to_kind(Kind::Float);
            for (result, exact) in [(a.mm(&b), exact), (bias.addmm(&a, &b), with_bias)] {
                assert_eq!(result.isnan(), exact.isnan(), "{special}");
                assert_eq!(result.isinf(), exact.isinf(), "{special}");
                let finite = exact.isfinite();
                assert_eq!(
                    result.sign().masked_select(&finite.logical_not()),
                    exact.sign().masked_select(&finite.logical_not())
                );
                assert_close("finite", &result.masked_select(&finite), &exact.masked_select(&finite), 2e-6);
            }
        }
    }
}

#[test]
fn numbers_keep_their_24_bits() {
    install();
    tch::manual_seed(6);
    let signs = Tensor::randn([96, 1024], (Kind::Float, Device::Cpu));
    let exponents = Tensor::randint_low(-80, 80, [96, 1024], (Kind::Float, Device::Cpu));
    let numbers = signs * exponents.exp2();
    let ones = Tensor::eye(1024, (Kind::Float, Device::Cpu));
    let kept = numbers.mm(&ones);
    let rounded = ones.mm(&numbers.tr().contiguous()).tr();
    for (product, tolerance) in [(kept, 0.0), (rounded, 2f64.powi(-23))] {
        let apart = ((product - &numbers) / &numbers).abs().max().double_value(&[]);
        assert!(apart <= tolerance, "{apart:e} of a number");
    }
}

/// Small integers, whose products and sums are exact.
fn integers(rows: i64, columns: i64, is_turned: bool) -> Tensor {
    let draw = |sizes| Tensor::randint_low(-3, 4, sizes, (Kind::BFloat16, Device::Cpu));
    if is_turned { draw([columns, rows]).tr() } else { draw([rows, columns]) }
}

#[test]
fn in_bfloat16_sums_are_rounded_once() {
    install();
    tch::manual_seed(4);
    for (rows, columns, depth) in [
        (1, 1, 1),
        (3, 1, 7),
        (1, 9, 4),
        (64, 10, 256),
        (130, 70, 65),
        (600, 530, 33),
        (7, 1100, 5),
        (1, 71, 300),
        (8, 257, 129),
    ] {
        for layout in 0..4 {
            let (a, b) = (integers(rows, depth, layout & 1 != 0), integers(depth, columns, layout & 2 != 0));
            let [a64, b64] = in_float64([&a, &b]);
            let exact = a64.mm(&b64);
            let rounded = |exact: &Tensor| exact.to_kind(Kind::BFloat16);
            let what = format!("{rows} x {columns} x {depth}, layout {layout}");
            assert_eq!(a.mm(&b), rounded(&exact), "{what}");
            let bias = integers(1, columns, false).squeeze_dim(0);
            let with_bias = bias.to_kind(Kind::Double) + &exact;
            assert_eq!(bias.addmm(&a, &b), rounded(&with_bias), "{what}");
            // columns in one piece are libtorch's; so is a view of every second one
            for out in [integers(rows, columns, false), integers(rows, columns, true)] {
                let _ = a.mm_out(&out, &b);
                assert_eq!(out, rounded(&exact), "{what}");
                let _ = bias.addmm_out(&out, &a, &b);
                assert_eq!(out, rounded(&with_bias), "{what}");
            }
            let scattered = integers(rows, 2 * depth, false).slice(1, 0, None, 2);
            let exact = scattered.to_kind(Kind::Double).mm(&b64);
            assert_eq!(scattered.mm(&b), rounded(&exact), "{what}");
        }
    }
    let (a, b) =
        (integers(12, 33, false).view([3, 4, 33]), integers(27, 33, false).view([3, 9, 33]).transpose(1, 2));
    let [a64, b64] = in_float64([&a, &b]);
    assert_eq!(a.bmm(&b), a64.bmm(&b64).to_kind(Kind::BFloat16));
    let more_rows = a.repeat([1, 3, 1]);
    assert_eq!(more_rows.bmm(&b), a64.repeat([1, 3, 1]).bmm(&b64).to_kind(Kind::BFloat16));
    let heads = a.view([3, 4, 3, 11]).transpose(1, 2).reshape([9, 4, 11]);
    assert_eq!(heads.bmm(&heads.transpose(1, 2)).size(), [9, 4, 4]);
    let nan = Tensor::from_slice(&[1f32, f32::NAN, 0.0, 0.0]).to_kind(Kind::BFloat16).view([2, 2]);
    let isnan = nan.mm(&nan.ones_like()).isnan();
    assert_eq!(Vec::<bool>::try_from(isnan.view(-1)).unwrap(), [true, true, false, false]);
}
