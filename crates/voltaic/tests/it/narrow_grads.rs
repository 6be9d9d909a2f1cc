//! Weights of float32 whose gradients come in 16 bits, and which are kept rounded to 16 bits too.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tch::{Kind, Tensor};
use voltaic::error::Result;
use voltaic::ffi;
use voltaic::nn::{Member, Module, Parameter};
use voltaic::optim::*;

use crate::probe::{own_process, plays, text_of};

/// Lengths around those of vectors and blocks; the last one is worth a second thread.
const LENGTHS: [usize; 8] = [1, 8, 9, 31, 257, 1003, 4099, 33_001];
const NARROW: [Kind; 2] = [Kind::BFloat16, Kind::Half];

/// Numbers between -0.5 and 0.5.
fn numbers(len: usize, seed: usize) -> Tensor {
    ((Tensor::arange(len as i64, (Kind::Float, tch::Device::Cpu)) * 0.618_034 + seed as f64 * 0.371).frac())
        - 0.5
}

/// Parameters that are slices of one tensor, one behind the other, so that they begin anywhere.
struct Slices(Vec<(String, Parameter)>);

impl Slices {
    fn new() -> Self {
        let all = numbers(LENGTHS.iter().sum(), 3) * 0.5;
        let mut start = 0;
        let slices = LENGTHS.map(|len| {
            let slice = all.narrow(0, start, len as i64);
            start += len as i64;
            (format!("w{len}"), Parameter::new(slice))
        });
        Self(slices.into())
    }

    fn weights(&self) -> Vec<Tensor> {
        self.0.iter().map(|(_, param)| param.detach().copy()).collect()
    }

    /// Gradients that this dtype holds, in `shown`.
    fn set_grads(&self, step: usize, dtype: Kind, shown: Kind) {
        for (i, (_, param)) in self.0.iter().enumerate().filter(|(i, _)| !(i + step).is_multiple_of(4)) {
            let grad = numbers(param.numel(), 100 + 10 * step + i).to_kind(dtype).to_kind(shown);
            ffi::set_grad(param.leaf(), &grad).unwrap();
        }
    }
}

impl Module for Slices {
    fn members<'a>(&'a self, visit: &mut dyn FnMut(&str, Member<'a>)) {
        self.0.iter().for_each(|(name, param)| visit(name, Member::Parameter(param)));
    }

    fn children_mut<'a>(&'a mut self, _: &mut dyn FnMut(&str, &'a mut dyn Module)) {}
}

/// Tensors of 16 bits by the id of their parameter.
#[derive(Debug)]
struct Rounded(Mutex<HashMap<u64, Tensor>>);

impl UnshardedParameters for Rounded {
    fn shape(&self, _: &Parameter) -> Option<Vec<i64>> {
        None
    }

    fn claim(&self, _: &Parameter) {}

    fn unshard(&self, _: &Parameter, values: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(values.shallow_clone()))
    }

    fn shard_of(&self, _: &Parameter, unsharded: &Tensor) -> Result<Tensor> {
        Ok(unsharded.shallow_clone())
    }

    fn rounded(&self, shard: &Parameter) -> Option<Tensor> {
        self.0.lock().unwrap().get(&shard.id()).map(Tensor::shallow_clone)
    }
}

fn optimizers() -> Vec<(&'static str, fn() -> Optimizers)> {
    vec![
        ("AdamW", || AdamW::new(1e-2).weight_decay(0.1).into()),
        ("Adam", || Adam::new(1e-2).weight_decay(0.1).amsgrad(true).betas((0.3, 0.9)).into()),
        ("maximize", || Adam::new(1e-2).maximize(true).bias_correction(false).into()),
        ("SGD", || Sgd::new(0.1).weight_decay(0.1).into()),
        ("momentum", || Sgd::new(0.1).momentum(0.9).dampening(0.2).weight_decay(0.1).into()),
        ("Nesterov", || Sgd::new(0.1).momentum(0.9).nesterov(true).maximize(true).into()),
        ("Adagrad", || Adagrad::new(0.1).lr_decay(0.1).weight_decay(0.1).into()),
        ("Lion", || Lion::new(1e-2).weight_decay(0.1).into()),
        ("RMSprop", || RmsProp::new(1e-2).momentum(0.9).into()),
    ]
}

fn build(
    asked: Optimizers,
    slices: &Slices,
    unsharded: Option<Arc<dyn UnshardedParameters>>,
) -> Box<dyn Optimizer> {
    asked.build_over_shards(slices, &Parameter::clone, unsharded).unwrap().remove(0).optimizer
}

/// What a step does to the gradients before it.
type Prepare = fn(&mut dyn Optimizer);

const PREPARED: [(&str, Prepare); 3] = [
    ("norm", |optimizer| drop(optimizer.clip(GradientClip::Norm(0.5)).unwrap())),
    ("value", |optimizer| drop(optimizer.clip(GradientClip::Value(0.2)).unwrap())),
    ("scaled", |optimizer| assert!(optimizer.unscale(1.0 / 3.0).unwrap())),
];

#[test]
fn gradients_of_16_bits_are_float32_once_they_are_scaled_or_clipped() {
    let of_each_kind: [(&str, fn() -> Optimizers); 2] =
        [("AdamW", || AdamW::new(1e-2).into()), ("RMSprop", || RmsProp::new(1e-2).into())];
    for ((name, make), dtype) in of_each_kind.into_iter().flat_map(|case| NARROW.map(|dtype| (case, dtype))) {
        for (prepared, prepare) in PREPARED {
            let train = |shown: Kind| {
                let slices = Slices::new();
                let mut optimizer = build(make(), &slices, None);
                let mut norms = Vec::new();
                for step in 0..2 {
                    optimizer.zero_grad().unwrap();
                    slices.set_grads(step, dtype, shown);
                    prepare(&mut *optimizer);
                    norms.push(optimizer.grad_norm(2.0).unwrap());
                    optimizer.step().unwrap();
                }
                (slices.weights(), norms)
            };
            let ((narrow, narrow_norms), (wide, wide_norms)) = (train(dtype), train(Kind::Float));
            let what = format!("{name}, {dtype:?}, {prepared}");
            assert!(narrow_norms.iter().zip(&wide_norms).all(|(a, b)| a.equal(b)), "{what}: norms");
            for ((narrow, wide), len) in narrow.iter().zip(&wide).zip(LENGTHS) {
                assert!(narrow.equal(wide), "{what}: {len}");
            }
        }
    }
}

/// Weights and states after three steps with gradients that `dtype` holds, in `shown`, and `dtype` for rounded weights if there are to be
/// some.
fn train(make: fn() -> Optimizers, dtype: Kind, shown: Kind, rounds: bool) -> Vec<(String, Tensor)> {
    let slices = Slices::new();
    // one has none
    let numbered = slices.0.iter().filter(|(_, param)| param.numel() != 9);
    let rounded: HashMap<u64, Tensor> =
        numbered.map(|(_, param)| (param.id(), param.detach().to_kind(dtype) * 0.0)).collect();
    let of = |param: &Parameter| rounded.get(&param.id());
    let shared = rounded.iter().map(|(id, tensor)| (*id, tensor.shallow_clone())).collect();
    let unsharded: Arc<dyn UnshardedParameters> = Arc::new(Rounded(Mutex::new(shared)));
    let mut optimizer = build(make(), &slices, rounds.then_some(unsharded));
    for step in 0..3 {
        optimizer.zero_grad().unwrap();
        slices.set_grads(step, dtype, shown);
        let version = |param: &Parameter| of(param).map(Tensor::internal_version);
        let versions: Vec<_> = slices.0.iter().map(|(_, param)| version(param)).collect();
        optimizer.step().unwrap();
        for (i, (fqn, param)) in slices.0.iter().enumerate().filter(|_| rounds) {
            let changed = version(param) > versions[i];
            assert_eq!(
                changed,
                of(param).is_some() && !(i + step).is_multiple_of(4),
                "{fqn}: autograd is told of writes"
            );
            if let Some(rounded) = of(param).filter(|_| changed) {
                assert!(rounded.equal(&param.detach().to_kind(dtype)), "{fqn}");
            }
        }
    }
    let weights = slices.0.iter().map(|(fqn, param)| (fqn.clone(), param.detach().copy()));
    weights
        .chain(optimizer.state_dict().tensors.into_iter().map(|(name, state)| (name, state.copy())))
        .collect()
}

/// Fails unless they are the same bits; those of Adagrad by the kernel may differ from libtorch's by roundings of square roots.
fn compare(what: &str, (name, actual): (&str, &[(String, Tensor)]), expected: &[(String, Tensor)]) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    for ((fqn, actual), (_, expected)) in actual.iter().zip(expected) {
        let is_alike = match name {
            "Adagrad" => actual.allclose(expected, 1e-6, 1e-7, false),
            _ => actual.equal(expected),
        };
        assert!(is_alike, "{what}: {fqn}");
    }
}

#[test]
fn a_step_takes_gradients_of_16_bits_and_writes_rounded_weights() {
    for ((name, make), dtype) in optimizers().into_iter().flat_map(|case| NARROW.map(|dtype| (case, dtype))) {
        let plain = train(make, dtype, Kind::Float, false);
        for (shown, rounds) in [(Kind::Float, true), (dtype, true), (dtype, false)] {
            let narrow = train(make, dtype, shown, rounds);
            compare(&format!("{name}, {shown:?}, rounds {rounds}"), (name, &narrow), &plain);
        }
    }
}

#[test]
fn kernels_give_the_bits_of_libtorch_with_any_number_of_threads() {
    if !plays("kernels") {
        text_of(&own_process("kernels").env("VOLTAIC_CPU_KERNELS", "1").output().unwrap());
        return;
    }
    let cases = || optimizers().into_iter().zip(NARROW.into_iter().cycle());
    let expected: Vec<_> = cases().map(|((_, make), dtype)| train(make, dtype, Kind::Float, false)).collect();
    assert!(ffi::install_kernels().unwrap(), "this processor has no vectors");
    for threads in [1, 3] {
        tch::set_num_threads(threads);
        for (((name, make), dtype), expected) in cases().zip(&expected) {
            for (shown, rounds) in [(Kind::Float, false), (Kind::Float, true), (dtype, false), (dtype, true)]
            {
                let actual = train(make, dtype, shown, rounds);
                let what = format!("{name}, {threads} threads, {shown:?}, rounds {rounds}");
                compare(&what, (name, &actual), expected);
            }
        }
    }
}

#[test]
fn a_rounded_tensor_that_does_not_fit_is_an_error() {
    let slices = Slices::new();
    let rounded = slices.0.iter().map(|(_, param)| (param.id(), param.detach().copy())).collect();
    let mut adam = build(AdamW::new(0.1).into(), &slices, Some(Arc::new(Rounded(Mutex::new(rounded)))));
    slices.set_grads(1, Kind::Float, Kind::Float);
    assert_error!(adam.step(), "Float[1] on Cpu for w1", "bfloat16 or float16");
}

#[test]
fn a_gradient_that_is_set_as_a_whole_is_not_rounded() {
    let slices = Slices::new();
    let mut adam = build(AdamW::new(0.1).into(), &slices, None);
    slices.set_grads(1, Kind::BFloat16, Kind::BFloat16);
    let values = numbers(1003, 5);
    adam.set_full_value("w1003", ParamValue::Gradient, &values).unwrap();
    let shown = adam.full_value("w1003", ParamValue::Gradient).unwrap().unwrap();
    assert!(shown.equal(&values));
}
