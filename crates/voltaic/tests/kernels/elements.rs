//! Kernels that go element by element.

use tch::{Device, Kind, Tensor};

use crate::{assert_close, channels_last, install};

#[test]
fn gelu_and_its_derivative() {
    install();
    for kind in [Kind::Float, Kind::BFloat16] {
        // an odd length, so that the end of the vectors is seen, and steps of 2^-6, which bfloat16 holds around 0
        let x = (Tensor::arange(1025, (Kind::Double, Device::Cpu)) / 64.0 - 8.0).to_kind(kind);
        for approximate in ["none", "tanh"] {
            let x64 = x.to_kind(Kind::Double).set_requires_grad(true);
            let expected = x64.gelu(approximate);
            let weights = Tensor::arange(1025, (Kind::Double, Device::Cpu)).sin().to_kind(kind);
            (&expected * weights.to_kind(Kind::Double)).sum(Kind::Double).backward();
            let leaf = x.detach().copy().set_requires_grad(true);
            let y = leaf.gelu(approximate);
            (&y * weights).sum(kind).backward(); // a dense gradient, which that of a sum is not
            let tolerance = if kind == Kind::Float { 3e-7 } else { 4e-3 };
            assert_close(approximate, &y, &expected.detach(), tolerance);
            assert_close("derivative", &leaf.grad(), &x64.grad(), tolerance);
        }
    }
    let far = Tensor::from_slice(&[f32::NEG_INFINITY, -100.0, 0.0, 100.0, f32::INFINITY, f32::NAN]);
    let y = Vec::<f32>::try_from(far.gelu("none")).unwrap();
    assert!(y[0].is_nan(), "{y:?}"); // -infinity times 0, as in libtorch
    assert_eq!(y[1..3], [0.0, 0.0]);
    assert_eq!(y[3..5], [100.0, f32::INFINITY]);
    assert!(y[5].is_nan());
    let turned = Tensor::randn([5, 7], (Kind::Float, Device::Cpu)).tr();
    assert_close("turned", &turned.gelu("none"), &turned.to_kind(Kind::Double).gelu("none"), 3e-7);
}

#[test]
fn max_pooling_is_libtorchs_bit_for_bit() {
    install();
    tch::manual_seed(4);
    // channels that fill vectors, leave a rest, or are too few for one
    let sizes = [vec![3, 5, 8, 6], vec![2, 3, 4, 66], vec![2, 4, 4], vec![4, 32, 6, 4], vec![2, 37, 2, 8]];
    for (size, kind) in sizes.iter().flat_map(|size| [(size, Kind::Float), (size, Kind::BFloat16)]) {
        let plain = Tensor::randn(&**size, (Kind::Float, Device::Cpu)).to_kind(kind);
        let grad =
            Tensor::randn([size.iter().product::<i64>() / 4], (Kind::Float, Device::Cpu)).to_kind(kind);
        let layouts = if size.len() == 4 { vec![plain.copy(), channels_last(&plain)] } else { vec![plain] };
        for x in layouts {
            let [x, x64] = [x.copy(), x.to_kind(Kind::Double)].map(|x| x.set_requires_grad(true));
            let [(y, at), (y64, at64)] =
                [&x, &x64].map(|x| x.max_pool2d_with_indices([2, 2], [2, 2], [0, 0], [1, 1], false));
            assert_eq!((y.stride(), at.stride()), (y64.stride(), at64.stride()));
            assert_eq!(y.to_kind(Kind::Double), y64);
            assert_eq!(at, at64);
            let grad = grad.view(&*y.size()).clamp_min(0.0) * -1.0; // half of it -0
            (y * &grad).sum(kind).backward();
            (y64 * grad.to_kind(Kind::Double)).sum(Kind::Double).backward();
            let [grad, grad64] = [x, x64].map(|x| x.grad());
            assert_eq!(grad.to_kind(Kind::Double), grad64);
            assert_eq!(grad.signbit(), grad64.signbit());
            assert_eq!(grad.stride(), grad64.stride());
        }
    }
    // odd sides, and other windows, are libtorch's
    let x = Tensor::randn([1, 1, 5, 7], (Kind::Float, Device::Cpu));
    for (window, stride, padding) in [(2, 2, 0), (3, 2, 1), (2, 1, 0)] {
        let pool =
            |x: &Tensor| x.max_pool2d([window, window], [stride, stride], [padding, padding], [1, 1], false);
        assert_eq!(pool(&x).to_kind(Kind::Double), pool(&x.to_kind(Kind::Double)));
    }
}

#[test]
fn random_masks_are_libtorchs_bit_for_bit() {
    install();
    let draw = |kind, len, p| {
        let mut mask = Tensor::empty([len], (kind, Device::Cpu));
        let _ = mask.f_bernoulli_float_(p).unwrap();
        mask.to_kind(Kind::Double)
    };
    for kind in [Kind::Float, Kind::BFloat16] {
        for p in [0.0, 0.25, 0.3, 0.5, 0.9, 1.0] {
            let drawn = [kind, Kind::Double].map(|kind| {
                tch::manual_seed(5);
                // lengths that leave the generator anywhere in its words, and one number between
                let masks = [3, 1000, 624, 1].map(|len| draw(kind, len, p));
                (masks, Tensor::rand([3], (Kind::Float, Device::Cpu)), draw(kind, 312, p))
            });
            assert_eq!(drawn[0], drawn[1], "p = {p}");
        }
    }
    let mut mask = Tensor::empty([2], (Kind::Float, Device::Cpu));
    let message = mask.f_bernoulli_float_(1.5).unwrap_err().to_string();
    assert!(message.contains("1.5"), "{message}");
}

#[test]
fn relu_and_sums_in_bfloat16_are_libtorchs_bit_for_bit() {
    install();
    tch::manual_seed(6);
    let draw = |size: &[i64]| {
        let numbers = Tensor::randn(size, (Kind::Float, Device::Cpu));
        numbers.view([-1]).narrow(0, 0, 3).copy_(&Tensor::from_slice(&[f32::NAN, -0.0, 0.0]));
        numbers.to_kind(Kind::BFloat16)
    };
    // bfloat16 is a part of float32, of which these operators are libtorch's
    let same = |what: &str, y: &Tensor, by_libtorch: Tensor| {
        let rounded = by_libtorch.to_kind(Kind::BFloat16);
        assert!(y.allclose(&rounded, 0.0, 0.0, true), "{what}");
        assert_eq!(y.stride(), rounded.stride(), "{what}");
    };
    let float = |x: &Tensor| x.to_kind(Kind::Float);
    for size in [vec![2, 3], vec![7, 131], vec![3, 5, 40, 200]] {
        let (a, b, grad) = (draw(&size), draw(&size), draw(&size));
        let [a, b, grad] = [a, b, grad].map(|x| x.transpose(0, 1)); // dense, in another order
        same("relu", &a.relu(), float(&a).relu());
        same("relu_", &a.copy().relu_(), float(&a).relu());
        same("add", &(&a + &b), float(&a) + float(&b));
        same("add_", &a.copy().f_add_(&b).unwrap(), float(&a) + float(&b));
        same("twice itself", &a.copy().f_add_(&a).unwrap(), float(&a) * 2);
        let itself = a.copy();
        same("itself in place", &itself.shallow_clone().f_add_(&itself).unwrap(), float(&a) * 2);
        same("a row for all", &(&a + b.select(0, 0)), float(&a) + float(&b.select(0, 0)));
        same("half of it", &a.f_sub(&(&b * 0.5)).unwrap(), float(&a) - float(&(&b * 0.5)));
        let gradient_of = |x: &Tensor, grad: &Tensor| {
            let x = x.detach().set_requires_grad(true);
            voltaic::ffi::autograd_grad(&[x.relu()], &[grad.copy()], &[x]).unwrap().remove(0).unwrap()
        };
        let expected = gradient_of(&float(&a), &float(&grad));
        same("gradient", &gradient_of(&a, &grad), expected.copy());
        same("gradient in the usual order", &gradient_of(&a, &grad.contiguous()), expected);
    }
    let both = draw(&[100]);
    let message = both.narrow(0, 0, 50).f_add_(&both.narrow(0, 1, 50)).unwrap_err().to_string();
    assert!(message.contains("overlap"), "{message}");
}

#[test]
fn sums_with_float32_are_libtorchs_bit_for_bit() {
    install();
    tch::manual_seed(7);
    let float = |x: &Tensor| x.to_kind(Kind::Float);
    for size in [vec![1, 1], vec![7, 131], vec![300, 1000]] {
        let wide = Tensor::randn(&*size, (Kind::Float, Device::Cpu)).tr();
        let narrow = Tensor::randn(&*size, (Kind::Float, Device::Cpu)).to_kind(Kind::BFloat16).tr();
        let expected = &wide + float(&narrow);
        for sum in [&wide + &narrow, &narrow + &wide, wide.copy().f_add_(&narrow).unwrap()] {
            assert_eq!((&sum, sum.kind(), sum.stride()), (&expected, Kind::Float, wide.stride()));
        }
        assert_eq!(narrow.copy().f_add_(&wide).unwrap(), expected.to_kind(Kind::BFloat16));
        assert_eq!(&wide + narrow.contiguous(), expected, "in another order");
        assert_eq!(&wide + narrow.select(0, 0), &wide + float(&narrow).select(0, 0), "a row for all");
    }
}

#[test]
fn casts_are_libtorchs_bit_for_bit() {
    install();
    let bits = |x: &Tensor| {
        Vec::<i64>::try_from(x.view_dtype(Kind::Int16).to_kind(Kind::Int64).flatten(0, -1)).unwrap()
    };
    // all upper halves of a float32, with lower ones that are rounded down, up and to even
    let upper = Tensor::arange(1 << 16, (Kind::Int64, Device::Cpu)) * (1 << 16);
    for lower in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
        let wide = (&upper + lower).to_kind(Kind::Int).view_dtype(Kind::Float);
        let narrow = wide.to_kind(Kind::BFloat16);
        let by_libtorch = wide.to_kind(Kind::Double).to_kind(Kind::BFloat16);
        let is_number = wide.isnan().logical_not();
        assert_eq!(bits(&narrow.masked_select(&is_number)), bits(&by_libtorch.masked_select(&is_number)));
        assert_eq!(narrow.isnan(), wide.isnan());
        let widened = narrow.to_kind(Kind::Float);
        assert!(widened.allclose(&narrow.to_kind(Kind::Double).to_kind(Kind::Float), 0.0, 0.0, true));
    }
    let turned = Tensor::randn([3, 5, 7], (Kind::Float, Device::Cpu)).permute([2, 0, 1]);
    assert_eq!(turned.to_kind(Kind::BFloat16).stride(), turned.stride());
    let part = turned.narrow(0, 1, 3);
    let expected = part.to_kind(Kind::Double).to_kind(Kind::BFloat16);
    let narrow = part.to_kind(Kind::BFloat16);
    assert_eq!((&narrow, narrow.stride()), (&expected, expected.stride()));
    let x = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    (x.to_kind(Kind::BFloat16) * 3.0).sum(Kind::Float).backward();
    assert_eq!(x.grad(), Tensor::from_slice(&[3.0f32, 3.0]));
}
