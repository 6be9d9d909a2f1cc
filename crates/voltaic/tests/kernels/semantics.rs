//! What libtorch promises of every operator, where voltaic's kernels stand in: derivatives of derivatives, empty tensors,
//! dtypes that they leave alone, autocast, inference mode.

use tch::{Device, Kind, Tensor};
use voltaic::ffi::InferenceMode;

use crate::beside::{Results, compare};
use crate::channels_last;

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

type Operator = (&'static str, Vec<i64>, Box<dyn Fn(&Tensor) -> Result<Tensor, tch::TchError>>);

fn numbers(sizes: &[i64], step: f64) -> Tensor {
    let all = sizes.iter().product::<i64>();
    (Tensor::arange(all, FLOAT) * step).sin().view(sizes)
}

/// Operators that kernels stand in for, with the sizes of an input whose first dimension is the batch.
fn operators(kind: Kind) -> Vec<Operator> {
    let of = move |sizes: &[i64], step: f64| numbers(sizes, step).to_kind(kind);
    let weight = of(&[24, 32], 0.31);
    let kernel = channels_last(&of(&[16, 16, 3, 3], 0.17));
    let (gamma, beta) = (of(&[16], 0.7), of(&[16], 0.9));
    let [mean, var] = [Tensor::zeros([16], FLOAT), Tensor::ones([16], FLOAT)];
    let right = of(&[32, 24], 0.43);
    let attend = |x: &Tensor, is_causal| {
        let none: Option<Tensor> = None;
        Tensor::f_scaled_dot_product_attention(x, x, x, none, 0.0, is_causal, None::<f64>, false)
    };
    vec![
        ("gelu", vec![8, 32], Box::new(|x| x.f_gelu("none"))),
        ("gelu by tanh", vec![8, 32], Box::new(|x| x.f_gelu("tanh"))),
        ("relu", vec![8, 32], Box::new(|x| (x * x).f_relu())),
        ("add", vec![8, 32], Box::new(|x| (x * x).f_add(&(x * 2.0)))),
        ("cast", vec![8, 32], Box::new(|x| (x * x).f_to_kind(Kind::Float))),
        ("linear", vec![16, 32], Box::new(move |x| (x * x).f_linear(&weight, None::<Tensor>))),
        ("product", vec![16, 32], Box::new(move |x| (x * x).f_matmul(&right))),
        ("product with itself", vec![3, 16, 16], Box::new(|x| x.f_matmul(&x.transpose(1, 2)))),
        (
            "max-pool",
            vec![2, 16, 8, 8],
            Box::new(|x| (channels_last(x) * x).f_max_pool2d([2, 2], [2, 2], [0, 0], [1, 1], false)),
        ),
        (
            "convolution",
            vec![2, 16, 8, 8],
            Box::new(move |x| {
                channels_last(&(x * x)).f_conv2d(&kernel, None::<Tensor>, [1, 1], [1, 1], [1, 1], 1)
            }),
        ),
        (
            "batch norm",
            vec![4, 16, 8, 8],
            Box::new(move |x| {
                let (mean, var) = (mean.copy(), var.copy());
                let x = channels_last(x);
                x.f_batch_norm(Some(&gamma), Some(&beta), Some(&mean), Some(&var), true, 0.1, 1e-5, false)
            }),
        ),
        ("attention", vec![2, 2, 16, 16], Box::new(move |x| attend(x, false))),
        ("causal attention", vec![2, 2, 16, 16], Box::new(move |x| attend(x, true))),
    ]
}

fn first_line(error: tch::TchError) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

/// The derivative of the derivative, both by an uneven weight.
fn second(x: &Tensor, f: &dyn Fn(&Tensor) -> Result<Tensor, tch::TchError>) -> Result<Tensor, tch::TchError> {
    let x = x.detach().set_requires_grad(true);
    let y = f(&x)?;
    let weight = numbers(&y.size(), 0.53).to_kind(y.kind());
    let first = Tensor::f_run_backward(&[(y * weight).f_sum(Kind::Float)?], &[&x], true, true)?.remove(0);
    let weight = numbers(&first.size(), 0.29).to_kind(first.kind());
    Ok(Tensor::f_run_backward(&[(first * weight).f_sum(Kind::Float)?], &[&x], false, false)?.remove(0))
}

fn seconds() -> Results {
    let mut results = Results::new();
    for kind in [Kind::Float, Kind::BFloat16] {
        for (name, sizes, operator) in operators(kind) {
            let x = numbers(&sizes, 0.37).to_kind(kind);
            results.push((format!("{name} {kind:?}"), second(&x, &*operator).map_err(first_line)));
        }
    }
    results
}

#[test]
fn derivatives_of_derivatives_are_libtorchs() {
    compare("semantics::derivatives_of_derivatives_are_libtorchs", seconds, |both| {
        both.are_close(if both.name.contains("BFloat16") { 4e-2 } else { 1e-4 }, 1e-6)
    });
}

fn calls() -> Results {
    let mut results = Results::new();
    for kind in [Kind::Float, Kind::BFloat16, Kind::Double, Kind::Half] {
        for (name, sizes, operator) in operators(kind) {
            let mut push = |what: &str, result: Result<Tensor, tch::TchError>| {
                results.push((format!("{name} {kind:?}, {what}"), result.map_err(first_line)));
            };
            let x = numbers(&sizes, 0.37).to_kind(kind);
            push("plain", operator(&x));
            let mut empty = sizes.clone();
            empty[0] = 0;
            push("of no batch", operator(&Tensor::zeros(&empty, (kind, Device::Cpu))));
            let expanded = x.narrow(0, 0, 1).expand(&sizes, false);
            push("of an expanded tensor", operator(&expanded));
            push("of every other row", operator(&Tensor::cat(&[&x, &x], 0).slice(0, 0, None, 2)));
            let leaf = x.detach().set_requires_grad(true);
            let without = tch::no_grad(|| operator(&leaf));
            assert!(without.as_ref().is_ok_and(|y| !y.requires_grad()) || without.is_err(), "{name}");
            push("without grad", without);
            let in_inference = InferenceMode::enter().map(|_mode| operator(&x));
            push("in inference mode", in_inference.unwrap());
            if kind == Kind::Float {
                push("with autocast", tch::autocast(true, || operator(&x)));
            }
            let hollow = x.flatten(0, -1);
            let _ = hollow.get(1).fill_(f64::NAN);
            // libtorch's vectors make a NaN of GELU of infinity, and its scalars do not: edges.rs has that
            let other = if name.starts_with("gelu") { f64::NAN } else { f64::INFINITY };
            let _ = hollow.get(3).fill_(other);
            push("of NaN and infinity", operator(&hollow.view(&sizes[..])));
        }
    }
    results
}

#[test]
fn calls_of_every_kind_are_libtorchs() {
    compare("semantics::calls_of_every_kind_are_libtorchs", calls, |both| {
        let is_low = ["BFloat16", "Half", "autocast"].iter().any(|low| both.name.contains(low));
        both.are_close(if is_low { 3e-2 } else { 1e-5 }, 1e-6)
    });
}

/// libtorch's kernel divides by the number of heads, and ends the process.
#[test]
fn attention_without_heads_is_empty() {
    crate::install();
    for kind in [Kind::Float, Kind::BFloat16, Kind::Double] {
        for (heads, is_causal) in [([2, 0, 5, 8], false), ([2, 0, 1, 8], true)] {
            let x = Tensor::zeros(heads, (kind, Device::Cpu)).set_requires_grad(true);
            let none: Option<Tensor> = None;
            let y = Tensor::scaled_dot_product_attention(&x, &x, &x, none, 0.0, is_causal, None, false);
            assert_eq!(y.size(), heads);
            y.sum(kind).backward();
            assert_eq!(x.grad().size(), heads);
        }
    }
}
