//! Layouts: what voltaic's kernels give lies in memory as what libtorch's give, and they write where libtorch's may.

use tch::{Device, Kind, Tensor};

use crate::beside::{Results, compare};
use crate::channels_last;

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);
const KINDS: [Kind; 2] = [Kind::Float, Kind::BFloat16];

fn numbers(sizes: &[i64], kind: Kind) -> Tensor {
    let all = sizes.iter().product::<i64>();
    (Tensor::arange(all, FLOAT) * 0.37).sin().view(sizes).to_kind(kind)
}

/// Others, which are not as the inputs.
fn grads(sizes: &[i64], kind: Kind) -> Tensor {
    let all = sizes.iter().product::<i64>();
    (Tensor::arange(all, FLOAT) * 0.73 + 0.2).cos().view(sizes).to_kind(kind)
}

/// A tensor of these sizes in several layouts.
fn layouts(sizes: &[i64], kind: Kind) -> Vec<(&'static str, Tensor)> {
    let plain = numbers(sizes, kind);
    let dim = sizes.len() as i64;
    let mut all = vec![("contiguous", plain.copy())];
    let swapped = |a: i64, b: i64| plain.transpose(a, b).contiguous().transpose(a, b);
    if dim >= 2 {
        all.push(("transposed", swapped(dim - 2, dim - 1)));
        let wide = plain.repeat(&*[vec![1; sizes.len() - 1], vec![2]].concat());
        all.push(("narrow", wide.narrow(dim - 1, 1, sizes[sizes.len() - 1])));
        let mut one = sizes.to_vec();
        one[0] = 1;
        all.push(("expanded", numbers(&one, kind).expand(sizes, false)));
        let mut one = sizes.to_vec();
        one[sizes.len() - 2] = 1;
        all.push(("expanded rows", numbers(&one, kind).expand(sizes, false)));
        let mut one = sizes.to_vec();
        one[sizes.len() - 1] = 1;
        all.push(("expanded columns", numbers(&one, kind).expand(sizes, false)));
        let every_second: Vec<i64> = sizes.iter().map(|size| 2 * size).collect();
        let scattered = numbers(&every_second, kind);
        all.push(("every second", (0..dim).fold(scattered, |x, d| x.slice(d, 0, None, 2))));
    }
    if dim == 4 {
        all.push(("channels last", channels_last(&plain)));
        all.push(("heads", swapped(1, 2)));
        all.push(("batches last", plain.permute([1, 2, 3, 0]).contiguous().permute([3, 0, 1, 2])));
        let mut one = sizes.to_vec();
        one[1] = 1;
        all.push(("expanded channels", numbers(&one, kind).expand(sizes, false)));
    }
    all
}

/// The output and the gradients of the inputs.
fn push(
    results: &mut Results,
    what: &str,
    inputs: &[&Tensor],
    f: impl Fn(&[Tensor]) -> Result<Tensor, tch::TchError>,
) {
    let leaves: Vec<Tensor> = inputs.iter().map(|x| x.detach().set_requires_grad(true)).collect();
    let out = match f(&leaves) {
        Ok(out) => out,
        Err(error) => return results.push((what.to_owned(), Err(first_line(&error.to_string())))),
    };
    results.push((format!("{what}, output"), Ok(out.detach())));
    let sizes = out.size();
    let mut column = sizes.clone();
    column[sizes.len() - 1] = 1;
    let expanded = grads(&column, out.kind()).expand(&*sizes, false);
    let grads = [("dense", grads(&sizes, out.kind())), ("expanded", expanded)];
    for (name, grad) in grads {
        let grads = voltaic::ffi::autograd_grad(&[out.shallow_clone()], &[grad], &leaves).unwrap();
        for (i, grad) in grads.into_iter().enumerate() {
            results.push((format!("{what}, {name} gradient {i}"), Ok(grad.unwrap())));
        }
    }
}

fn attentions() -> Results {
    let mut results = Results::new();
    for kind in KINDS {
        for dim in [8, 1] {
            let queries = layouts(&[2, 3, 5, dim], kind);
            for (layout, query) in &queries {
                let same = [query, query, query];
                let what = format!("{layout} {kind:?} dim {dim}");
                push(&mut results, &what, &same, |x| attend(x, false));
                push(&mut results, &format!("causal {what}"), &same, |x| attend(x, true));
            }
            for (layout, key) in layouts(&[2, 3, 7, dim], kind) {
                let (_, query) = &queries[queries.len() - 3];
                let what = format!("key {layout} {kind:?} dim {dim}");
                push(&mut results, &what, &[query, &key, &key], |x| attend(x, false));
            }
        }
        // windows that overlap, as `unfold` makes them
        let windows = numbers(&[2, 3, 24], kind).unfold(2, 8, 4);
        push(&mut results, &format!("windows {kind:?}"), &[&windows, &windows, &windows], |x| {
            attend(x, false)
        });
        // as a layer that computes all three at once has them
        let all = numbers(&[2, 5, 3 * 24], kind).split(24, 2);
        let heads: Vec<Tensor> = all.iter().map(|x| x.view([2, 5, 3, 8]).transpose(1, 2)).collect();
        push(&mut results, &format!("split {kind:?}"), &[&heads[0], &heads[1], &heads[2]], |x| {
            attend(x, true)
        });
    }
    results
}

fn attend(inputs: &[Tensor], is_causal: bool) -> Result<Tensor, tch::TchError> {
    let [query, key, value] = inputs else { unreachable!() };
    Tensor::f_scaled_dot_product_attention(query, key, value, None::<Tensor>, 0.0, is_causal, None, false)
}

fn images() -> Results {
    let mut results = Results::new();
    for kind in KINDS {
        for sizes in [[2, 32, 8, 8], [2, 1, 6, 4], [1, 48, 4, 4], [3, 5, 3, 1], [1, 1, 2, 2]] {
            let channels = sizes[1];
            for (layout, x) in layouts(&sizes, kind) {
                let what = format!("{layout} {kind:?} {sizes:?}");
                let weights = [
                    ("plain", numbers(&[32, channels, 3, 3], kind)),
                    ("last", channels_last(&numbers(&[32, channels, 3, 3], kind))),
                    ("expanded", numbers(&[1, channels, 3, 3], kind).expand([32, channels, 3, 3], false)),
                ];
                for (name, weight) in &weights {
                    let bias = numbers(&[32], kind);
                    // oneDNN leaves out the gradients of taps that see nothing
                    for stride in if sizes[3] == 1 { 1..2 } else { 1..3 } {
                        push(
                            &mut results,
                            &format!("conv {stride} {name} {what}"),
                            &[&x, weight, &bias],
                            |x| x[0].f_conv2d(&x[1], Some(&x[2]), [stride, stride], [1, 1], [1, 1], 1),
                        );
                    }
                    push(&mut results, &format!("conv without bias {name} {what}"), &[&x, weight], |x| {
                        x[0].f_conv2d(&x[1], None::<&Tensor>, [1, 1], [1, 1], [1, 1], 1)
                    });
                }
                let pointwise = numbers(&[32, channels, 1, 1], kind);
                push(&mut results, &format!("conv 1 x 1 {what}"), &[&x, &pointwise], |x| {
                    x[0].f_conv2d(&x[1], None::<&Tensor>, [1, 1], [0, 0], [1, 1], 1)
                });
                push(&mut results, &format!("pool {what}"), &[&x], |x| {
                    x[0].f_max_pool2d([2, 2], [2, 2], [0, 0], [1, 1], false)
                });
                let ones = Tensor::ones([channels], FLOAT);
                push(&mut results, &format!("batch norm {what}"), &[&x, &ones, &ones], |x| {
                    x[0].f_batch_norm(
                        Some(&x[1]),
                        Some(&x[2]),
                        None::<&Tensor>,
                        None::<&Tensor>,
                        true,
                        0.1,
                        1e-5,
                        false,
                    )
                });
                push(&mut results, &format!("batch norm without weights {what}"), &[&x], |x| {
                    let none = None::<&Tensor>;
                    x[0].f_batch_norm(none, none, none, none, true, 0.1, 1e-5, false)
                });
            }
        }
    }
    results
}

fn elements() -> Results {
    let mut results = Results::new();
    for kind in KINDS {
        let other = if kind == Kind::Float { Kind::BFloat16 } else { Kind::Float };
        for sizes in [&[7, 9][..], &[2, 3, 5, 4], &[1, 6], &[4, 1, 3, 1], &[5]] {
            for (layout, x) in layouts(sizes, kind) {
                let what = format!("{layout} {kind:?} {sizes:?}");
                push(&mut results, &format!("gelu {what}"), &[&x], |x| x[0].f_gelu("none"));
                push(&mut results, &format!("tanh gelu {what}"), &[&x], |x| x[0].f_gelu("tanh"));
                push(&mut results, &format!("relu {what}"), &[&x], |x| x[0].f_relu());
                push(&mut results, &format!("cast {what}"), &[&x], |x| x[0].f_to_kind(other));
                for (name, y) in layouts(sizes, kind).into_iter().chain(layouts(sizes, other)) {
                    let what = format!("add {name} {:?} to {what}", y.kind());
                    push(&mut results, &what, &[&x, &y], |x| x[0].f_add(&x[1]));
                }
            }
        }
    }
    results
}

fn products() -> Results {
    let mut results = Results::new();
    for kind in KINDS {
        for [rows, columns, depth] in [[9, 10, 12], [1, 10, 12], [9, 1, 12], [9, 10, 1], [40, 33, 70]] {
            for (left, a) in layouts(&[rows, depth], kind) {
                for (right, b) in layouts(&[depth, columns], kind) {
                    let what = format!("{left} by {right} {kind:?} {rows} {columns} {depth}");
                    push(&mut results, &format!("mm {what}"), &[&a, &b], |x| x[0].f_mm(&x[1]));
                    let bias = numbers(&[columns], kind);
                    push(&mut results, &format!("addmm {what}"), &[&bias, &a, &b], |x| {
                        x[0].f_addmm(&x[1], &x[2])
                    });
                }
            }
            for (left, a) in layouts(&[3, rows, depth], kind) {
                for (right, b) in layouts(&[3, depth, columns], kind) {
                    let what = format!("bmm {left} by {right} {kind:?} {rows} {columns} {depth}");
                    push(&mut results, &what, &[&a, &b], |x| x[0].f_bmm(&x[1]));
                }
            }
        }
    }
    results
}

fn outs() -> Results {
    let mut results = Results::new();
    let mut try_out =
        |what: String, out: Tensor, write: &dyn Fn(&Tensor) -> Result<Tensor, tch::TchError>| {
            results.push((what, write(&out).map_err(|error| first_line(&error.to_string())).map(|_| out)));
        };
    for kind in KINDS {
        let (a, b, bias) = (numbers(&[9, 12], kind), numbers(&[12, 10], kind), numbers(&[10], kind));
        let batch = |x: &Tensor| x.unsqueeze(0).repeat([3, 1, 1]);
        for (layout, out) in layouts(&[9, 10], kind) {
            try_out(format!("mm into {layout} {kind:?}"), out.shallow_clone(), &|out| a.f_mm_out(out, &b));
            try_out(format!("addmm into {layout} {kind:?}"), out, &|out| bias.f_addmm_out(out, &a, &b));
        }
        for (layout, out) in layouts(&[3, 9, 10], kind) {
            try_out(format!("bmm into {layout} {kind:?}"), out, &|out| batch(&a).f_bmm_out(out, &batch(&b)));
        }
        let overlapping = || Tensor::zeros([40], (kind, Device::Cpu)).as_strided([4, 10], [5, 1], 0);
        try_out(format!("gelu into rows within each other {kind:?}"), overlapping(), &|out| {
            numbers(&[4, 10], kind).f_gelu_out(out, "none")
        });
        for (layout, out) in layouts(&[4, 10], kind) {
            let x = numbers(&[4, 10], kind);
            try_out(format!("gelu into {layout} {kind:?}"), out.shallow_clone(), &|out| {
                x.f_gelu_out(out, "none")
            });
            try_out(format!("add into {layout} {kind:?}"), out.shallow_clone(), &|out| x.f_add_out(out, &x));
            try_out(format!("relu_ of {layout} {kind:?}"), out.shallow_clone(), &|out| {
                out.shallow_clone().f_relu_()
            });
            try_out(format!("add_ of {layout} {kind:?}"), out.shallow_clone(), &|out| {
                out.shallow_clone().f_add_(&x)
            });
        }
    }
    results
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}

fn assert_both(test: &str, compute: fn() -> Results) {
    compare(test, compute, |both| {
        // without AVX-512 libtorch computes these without oneDNN, and gives the gradient of a weight of one pixel other strides
        // for it; they say nothing of where numbers lie
        let is_without_onednn = both.name.starts_with("conv 1 x 1") && both.name.contains("BFloat16");
        if voltaic::kernels::has_avx512() || !is_without_onednn {
            both.lie_alike()?;
        }
        if both.name.contains("batch norm") && both.name.contains("heads") && both.name.contains("1], ") {
            return Ok(()); // libtorch takes the columns of such images for their channels
        }
        both.are_close(if both.name.contains("BFloat16") { 3e-2 } else { 1e-5 }, 1.0)
    });
}

#[test]
fn attention_lies_as_libtorchs() {
    assert_both("layouts::attention_lies_as_libtorchs", attentions);
}

#[test]
fn operators_on_images_lie_as_libtorchs() {
    assert_both("layouts::operators_on_images_lie_as_libtorchs", images);
}

#[test]
fn operators_by_element_lie_as_libtorchs() {
    assert_both("layouts::operators_by_element_lie_as_libtorchs", elements);
}

#[test]
fn products_lie_as_libtorchs() {
    assert_both("layouts::products_lie_as_libtorchs", products);
}

#[test]
fn given_outputs_are_written_or_refused_as_by_libtorch() {
    assert_both("layouts::given_outputs_are_written_or_refused_as_by_libtorch", outs);
}
