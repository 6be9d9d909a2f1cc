//! Numbers at the edges of their formats: what voltaic's kernels make of them is what libtorch's make.

use tch::{Device, Kind, Tensor};

use crate::beside::{Both, Found, Results, are_close, compare, edges, magnitudes};
use crate::{channels_last, install};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);
const KINDS: [Kind; 2] = [Kind::Float, Kind::BFloat16];

/// Each number many times, so that vectors are full of it, and a few more for the rest of a vector.
fn often(numbers: &Tensor) -> Tensor {
    let rows = numbers.unsqueeze(1).expand([-1, 35], false).contiguous();
    rows.flatten(0, -1)
}

/// All pairs of numbers, as two tensors.
fn all_pairs(a: &Tensor, b: &Tensor) -> [Tensor; 2] {
    let shape = [a.size()[0], b.size()[0], 64]; // a multiple of vectors: libtorch's NaNs are others in the rest of one
    [a.view([-1, 1, 1]), b.view([1, -1, 1])].map(|x| x.expand(shape, false).contiguous().flatten(0, -1))
}

fn ok(name: impl Into<String>, tensor: Tensor) -> (String, Result<Tensor, String>) {
    (name.into(), Ok(tensor))
}

/// The gradient of `input`, for a gradient of the output.
fn gradient(input: &Tensor, grad: &Tensor, f: impl Fn(&Tensor) -> Tensor) -> Tensor {
    let leaf = input.detach().set_requires_grad(true);
    let out = f(&leaf);
    voltaic::ffi::autograd_grad(&[out], &[grad.shallow_clone()], &[leaf]).unwrap().remove(0).unwrap()
}

// ---- GELU ----

fn gelus() -> Results {
    let mut results = Results::new();
    let numbers = often(&Tensor::cat(&[edges(), magnitudes()], 0));
    for kind in KINDS {
        let x = numbers.to_kind(Kind::Double).to_kind(kind);
        for approximate in ["none", "tanh"] {
            let what = format!("{approximate} {kind:?}");
            results.push(ok(format!("{what} output"), x.gelu(approximate)));
            let ones = x.ones_like();
            results.push(ok(format!("{what} gradient"), gradient(&x, &ones, |x| x.gelu(approximate))));
            let grads = Tensor::full_like(&x, -1e30);
            results.push(ok(format!("{what} large gradient"), gradient(&x, &grads, |x| x.gelu(approximate))));
        }
    }
    results
}

/// Whether outputs and gradients of this function are libtorch's within rounding, number by number: beside 1e38 nothing else
/// would be seen.
fn is_gelu(both: &Both) -> Result<(), String> {
    let Some((ours, theirs)) = both.found()? else { return Ok(()) };
    let numbers = |x: &Tensor| Vec::<f64>::try_from(x.to_kind(Kind::Double)).unwrap();
    let inputs = Tensor::cat(&[edges(), magnitudes()], 0);
    let inputs = numbers(&often(&inputs).to_kind(Kind::Double).to_kind(ours.numbers.kind()));
    let is_output = both.name.contains("output");
    let rounding = if both.name.contains("BFloat16") { 8e-3 } else { 1e-6 };
    let scale = if both.name.contains("large") { 1e30 } else { 1.0 };
    for ((x, a), b) in inputs.into_iter().zip(numbers(&ours.numbers)).zip(numbers(&theirs.numbers)) {
        // libtorch's vectors make a NaN of infinity, and infinity of the largest numbers; its scalars do not
        let b = if is_output && both.name.contains("none") && x > 1e38 { x } else { b };
        // libtorch's vectors of AVX2 make 0 of what its scalars, and ours, make -0 of
        let is_zero = a == 0.0 && b == 0.0 && !voltaic::kernels::has_avx512();
        let is_same =
            is_zero || a == b && a.is_sign_negative() == b.is_sign_negative() || a.is_nan() && b.is_nan();
        // up to 14.4 the normal density is a number of float32, if one below the normal ones that vectors may lose
        let is_near = x.abs() < 14.5
            && (a - b).abs() <= scale * rounding * x.abs().max(if is_output { 1e-30 } else { 1.0 });
        if !is_same && !is_near {
            return Err(format!("{a:e} of {x:e}, not {b:e}"));
        }
    }
    Ok(())
}

#[test]
fn gelu_far_from_0_is_libtorchs() {
    compare("edges::gelu_far_from_0_is_libtorchs", gelus, is_gelu);
}

// ---- numbers that are moved, compared and added ----

fn moves() -> Results {
    let mut results = Results::new();
    let numbers = Tensor::cat(&[edges(), magnitudes()], 0);
    let wide = often(&numbers);
    let narrow = wide.to_kind(Kind::BFloat16);
    results.push(ok("cast to bfloat16", narrow.copy()));
    // all bfloat16 there are
    let all =
        Tensor::arange(1 << 16, (Kind::Int64, Device::Cpu)).to_kind(Kind::Int16).view_dtype(Kind::BFloat16);
    results.push(ok("cast to float32", all.to_kind(Kind::Float)));
    results.push(ok("relu", all.relu()));
    results.push(ok("relu_", all.copy().relu_()));
    results.push(ok("few", all.narrow(0, 0x7fbf, 3).to_kind(Kind::Float).to_kind(Kind::BFloat16)));
    let upper = edges().view_dtype(Kind::Int).to_kind(Kind::Int64).bitwise_right_shift_tensor_scalar(16);
    let some = Tensor::cat(
        &[
            upper.to_kind(Kind::Int16).view_dtype(Kind::BFloat16),
            all.narrow(0, 0x7f7e, 5),
            all.narrow(0, 0xff7e, 5),
        ],
        0,
    );
    let [a, b] = all_pairs(&some, &some);
    results.push(ok("add", &a + &b));
    results.push(ok("add_", a.copy().f_add_(&b).unwrap()));
    let [x, y] = all_pairs(&edges(), &some);
    // which of two NaNs a sum is may be chosen by the compiler
    for (name, sum) in [("float32 and bfloat16", &x + &y), ("bfloat16 and float32", &y + &x)] {
        results.push(ok(format!("sums of {name}"), sum.masked_fill(&sum.isnan(), f64::NAN)));
    }
    // which keeps the bits of a NaN
    let grad = gradient(&a, &b, Tensor::relu);
    results.push(ok("gradient of relu", grad.masked_fill(&grad.isnan(), f64::NAN)));
    for kind in KINDS {
        let numbers = if kind == Kind::Float { edges() } else { some.shallow_clone() };
        let n = numbers.size()[0];
        // windows of two numbers each, in all orders
        let [a, b] = [numbers.view([-1, 1]), numbers.view([1, -1])].map(|x| x.expand([n, n], false));
        for (order, window) in
            [[&a, &b, &b, &b], [&b, &a, &b, &a], [&b, &b, &a, &a], [&a, &a, &a, &b]].iter().enumerate()
        {
            let images = Tensor::stack(window, 0).view([2, 2, n, n]).permute([2, 3, 0, 1]).contiguous();
            for (layout, x) in [("usual", images.copy()), ("channels last", channels_last(&images))] {
                let (y, at) = x.max_pool2d_with_indices([2, 2], [2, 2], [0, 0], [1, 1], false);
                results.push(ok(format!("pool {kind:?} {layout} {order}"), y.copy()));
                results.push(ok(format!("indices {kind:?} {layout} {order}"), at));
                let grad = gradient(&x, &y, |x| x.max_pool2d([2, 2], [2, 2], [0, 0], [1, 1], false));
                results.push(ok(format!("gradient of pool {kind:?} {layout} {order}"), grad));
            }
        }
    }
    results
}

#[test]
fn what_is_moved_compared_and_added_is_libtorchs_to_the_bit() {
    compare("edges::what_is_moved_compared_and_added_is_libtorchs_to_the_bit", moves, Both::are_same);
}

// ---- batch norm ----

/// Images whose channels each are what their name says.
fn channels() -> Vec<(&'static str, Tensor)> {
    let shape = [2, 1, 5, 7];
    let full = |x: f64| Tensor::full(shape, x, FLOAT);
    let signs = || Tensor::arange(70, FLOAT).remainder(2.0).view(shape) * 2.0 - 1.0;
    let with = |x: f64| {
        let images = signs();
        let _ = images.view([-1]).get(33).fill_(x);
        images
    };
    vec![
        ("0", full(0.0)),
        ("-0", full(-0.0)),
        ("1", full(1.0)),
        ("1e20", full(1e20)),
        ("-1e20", full(-1e20)),
        ("1e38", full(1e38)),
        ("largest", full(f64::from(f32::MAX))),
        ("smallest", full(1e-40)),
        ("signs", signs()),
        ("signs of 1e15", signs() * 1e15),
        ("signs of 1e20", signs() * 1e20),
        ("signs of 1e38", signs() * 1e38),
        ("signs of 1e-20", signs() * 1e-20),
        ("signs of 1e-40", signs() * 1e-40),
        ("one of 1e20", with(1e20)),
        ("one of 1e38", with(1e38)),
        ("infinite", with(f64::INFINITY)),
        ("-infinite", with(f64::NEG_INFINITY)),
        ("NaN", with(f64::NAN)),
        ("both", with(f64::INFINITY) + with(f64::NEG_INFINITY)),
        ("all infinite", full(f64::INFINITY)),
        ("plain", signs() * 3.0 + 1.0),
    ]
}

fn norms() -> Results {
    let mut results = Results::new();
    for kind in KINDS {
        for eps in [1e-5, 0.0] {
            for (name, channel) in channels() {
                // beside channels that are not at the edge
                let plain = (Tensor::arange(3 * 70, FLOAT) * 0.7).sin().view([2, 3, 5, 7]);
                let images = Tensor::cat(&[&plain, &channel], 1).to_kind(kind);
                let x = channels_last(&images).set_requires_grad(true);
                let ones = || Tensor::ones([4], FLOAT).set_requires_grad(true);
                let (weight, bias) = (ones(), ones());
                let (mean, var) = (Tensor::zeros([4], FLOAT), Tensor::ones([4], FLOAT));
                let y =
                    x.batch_norm(Some(&weight), Some(&bias), Some(&mean), Some(&var), true, 0.1, eps, false);
                let grad = (Tensor::arange(280, FLOAT) * 0.3).cos().view([2, 4, 5, 7]).to_kind(kind);
                let grads =
                    voltaic::ffi::autograd_grad(&[y.shallow_clone()], &[grad], &[x, weight, bias]).unwrap();
                let grads = grads.into_iter().flatten();
                let all = [y.detach(), mean, var].into_iter().chain(grads);
                let names = ["output", "mean", "variance", "grad", "grad of weight", "grad of bias"];
                for (what, tensor) in names.iter().zip(all) {
                    results.push(ok(format!("{name} {kind:?} {eps} {what}"), tensor));
                }
            }
        }
    }
    results
}

#[test]
fn batch_norm_of_channels_at_the_edge_is_libtorchs() {
    compare("edges::batch_norm_of_channels_at_the_edge_is_libtorchs", norms, |both| {
        let Some((Found { numbers: ours, .. }, Found { numbers: theirs, .. })) = both.found()? else {
            return Ok(());
        };
        if both.name.contains("1e20 Float") && !both.name.contains("of 1e20") {
            // what differs from the mean is what rounding it left
            let is_finite = ours.isfinite().all().int64_value(&[]) == 1;
            return if is_finite { Ok(()) } else { Err("not finite".into()) };
        }
        // channel by channel, since numbers of one are small beside those of another
        let channels = |x: &Tensor| if x.dim() == 4 { x.transpose(0, 1) } else { x.shallow_clone() };
        let tolerance = if both.name.contains("BFloat16") { 2e-2 } else { 1e-5 };
        (0..4).try_for_each(|channel| {
            are_close(&channels(ours).get(channel), &channels(theirs).get(channel), tolerance, 1e-30)
                .map_err(|failure| format!("channel {channel}: {failure}"))
        })
    });
}

// ---- attention ----

fn attentions() -> Results {
    let mut results = Results::new();
    for kind in KINDS {
        for (queries, keys) in [(3, 5), (40, 70)] {
            let numbers = |phase: f64, rows: i64| {
                (Tensor::arange(2 * rows * 16, FLOAT) * 0.37 + phase).sin().view([1, 2, rows, 16])
            };
            let plain = || [numbers(0.0, queries), numbers(1.0, keys), numbers(2.0, keys)];
            let inf = f64::INFINITY;
            // what is NaN or infinite in libtorch's queries and keys is lost in some of its vectors, and kept in others;
            // in which input, rows from and how many, and what is there
            for (name, input, row, rows, number) in [
                ("all scores -infinite", 1, 0, keys, -inf),
                ("a score -infinite", 1, 2, 1, -inf),
                ("all but one -infinite", 1, 0, keys - 1, -inf),
                ("a value infinite", 2, 2, 1, inf),
                ("a value NaN", 2, 2, 1, f64::NAN),
                ("a key far below", 1, 2, 1, -1e4),
                ("a key far above", 1, 2, 1, 1e4),
                ("all keys 0", 1, 0, keys, 0.0),
            ] {
                let mut inputs = plain();
                inputs[0] = inputs[0].abs() + 0.5; // scores have the sign of the key
                let _ = inputs[input].narrow(2, row, rows).fill_(number);
                if name == "a key far below" {
                    // what is not seen may be anything finite
                    let _ = inputs[2].narrow(2, row, 1).fill_(3e38);
                }
                let inputs = inputs.map(|x| x.to_kind(kind).set_requires_grad(true));
                let [query, key, value] = &inputs;
                let y = Tensor::scaled_dot_product_attention(
                    query,
                    key,
                    value,
                    None::<Tensor>,
                    0.0,
                    false,
                    None,
                    false,
                );
                let grad = (Tensor::arange(y.numel() as i64, FLOAT) * 0.3).cos().view_as(&y).to_kind(kind);
                let grads = voltaic::ffi::autograd_grad(&[y.shallow_clone()], &[grad], &inputs).unwrap();
                let all = [y.detach()].into_iter().chain(grads.into_iter().flatten());
                for (what, tensor) in
                    ["output", "grad of query", "grad of key", "grad of value"].iter().zip(all)
                {
                    results.push(ok(format!("{name} {kind:?} {keys} {what}"), tensor));
                }
            }
        }
    }
    results
}

#[test]
fn attention_with_scores_at_the_edge_is_libtorchs() {
    compare("edges::attention_with_scores_at_the_edge_is_libtorchs", attentions, |both| {
        let scale = if both.name.contains("far above") { 1e4 } else { 1.0 }; // of the keys
        both.are_close(if both.name.contains("BFloat16") { 3e-2 } else { 1e-5 }, scale)
    });
}

#[test]
fn what_no_query_sees_adds_nothing() {
    install();
    // exp(-1e4) is 0, also times the largest number
    for kind in KINDS {
        let query = Tensor::ones([1, 1, 2, 4], FLOAT).to_kind(kind);
        let (key, value) = (Tensor::zeros([1, 1, 9, 4], FLOAT), Tensor::zeros([1, 1, 9, 4], FLOAT));
        let _ = key.select(2, 3).fill_(-1e4);
        let _ = value.select(2, 3).fill_(3e38);
        let (key, value) = (key.to_kind(kind), value.to_kind(kind));
        let y = Tensor::scaled_dot_product_attention(
            &query,
            &key,
            &value,
            None::<Tensor>,
            0.0,
            false,
            None,
            false,
        );
        assert_eq!(y, y.zeros_like(), "{kind:?}");
    }
}

// ---- products and convolutions ----

fn products() -> Results {
    let mut results = Results::new();
    for kind in KINDS {
        for [rows, columns, depth] in [[9, 7, 30], [33, 40, 65], [130, 70, 257]] {
            let numbers = |phase: f64, sizes: [i64; 2]| {
                (Tensor::arange(sizes[0] * sizes[1], FLOAT) * 0.37 + phase).sin().view(sizes)
            };
            for (i, number) in
                Vec::<f64>::try_from(edges().to_kind(Kind::Double)).unwrap().into_iter().enumerate()
            {
                let (a, b) = (numbers(0.0, [rows, depth]), numbers(1.0, [depth, columns]));
                let _ = a.get(rows / 2).get(depth - 1).fill_(number);
                let _ = b.get(0).get(columns / 2).fill_(number);
                let [a, b] = [a, b].map(|x| x.to_kind(kind));
                let bias = numbers(2.0, [1, columns]).squeeze().to_kind(kind);
                for (what, y) in [
                    ("mm", a.mm(&b)),
                    ("addmm", bias.addmm(&a, &b)),
                    ("bmm", a.unsqueeze(0).bmm(&b.unsqueeze(0))),
                ] {
                    results.push(ok(format!("{what} {kind:?} {rows} edge {i}"), y));
                }
            }
        }
    }
    results
}

#[test]
fn products_of_numbers_at_the_edge_are_libtorchs() {
    compare("edges::products_of_numbers_at_the_edge_are_libtorchs", products, |both| {
        both.are_close(if both.name.contains("BFloat16") { 1e-2 } else { 1e-5 }, 1e-30)
    });
}

fn convolutions() -> Results {
    let mut results = Results::new();
    for kind in KINDS {
        for [channels, side] in [[32, 16], [128, 8], [256, 4]] {
            let numbers = |phase: f64, sizes: [i64; 4]| {
                let all = sizes.iter().product::<i64>();
                channels_last(&(Tensor::arange(all, FLOAT) * 0.37 + phase).sin().view(sizes))
            };
            let (inf, largest) = (f64::INFINITY, f64::from(f32::MAX));
            for (name, tensor, number) in [
                ("a pixel infinite", 0, inf),
                ("a pixel -infinite", 0, -inf),
                ("a pixel NaN", 0, f64::NAN),
                ("a pixel large", 0, largest / 2.0),
                ("a weight infinite", 1, inf),
                ("a weight NaN", 1, f64::NAN),
                ("a gradient infinite", 2, inf),
                ("a gradient NaN", 2, f64::NAN),
            ] {
                let tensors = [
                    numbers(0.0, [2, channels, side, side]),
                    numbers(1.0, [channels, channels, 3, 3]) * 0.1,
                    numbers(2.0, [2, channels, side, side]),
                ];
                let _ = tensors[tensor].get(1).get(3).get(2).get(2).fill_(number);
                let [x, weight, grad] = tensors.map(|x| x.to_kind(kind));
                let leaves = [x, weight].map(|x| x.set_requires_grad(true));
                let y = leaves[0].conv2d(&leaves[1], None::<&Tensor>, [1, 1], [1, 1], [1, 1], 1);
                let grads = voltaic::ffi::autograd_grad(&[y.shallow_clone()], &[grad], &leaves).unwrap();
                let all = [y.detach()].into_iter().chain(grads.into_iter().flatten());
                for (what, tensor) in ["output", "grad of input", "grad of weight"].iter().zip(all) {
                    results.push(ok(format!("{name} {kind:?} {channels} {what}"), tensor));
                }
            }
        }
    }
    results
}

#[test]
fn convolutions_of_numbers_at_the_edge_are_libtorchs() {
    compare("edges::convolutions_of_numbers_at_the_edge_are_libtorchs", convolutions, |both| {
        both.are_close(if both.name.contains("BFloat16") { 2e-2 } else { 1e-5 }, 1e-30)
    });
}
