//! Steps of optimizers beside libtorch's, bit for bit.

use tch::{Device, Kind, Tensor};
use voltaic::ffi;
use voltaic::nn::Parameter;
use voltaic::optim::{Adam, AdamW, BuildOptimizer, ParamGroupSpec, Sgd};

use crate::beside::{Results, compare};

/// Lengths around those of vectors, and those of DeepSpeed's `test_cpu_adam`; the last one is worth a second thread.
const LENGTHS: [i64; 13] = [1, 7, 8, 15, 16, 17, 22, 47, 64, 128, 1003, 1024, 1_048_576];

fn optimizers() -> Vec<(&'static str, Box<dyn BuildOptimizer>)> {
    vec![
        ("AdamW", Box::new(AdamW::new(1e-2).weight_decay(0.1))),
        ("Adam", Box::new(Adam::new(1e-2).weight_decay(0.1).amsgrad(true).betas((0.3, 0.9)))),
        ("Adam ascending", Box::new(Adam::new(1e-2).maximize(true))),
        ("SGD", Box::new(Sgd::new(0.1).weight_decay(0.1))),
        ("momentum", Box::new(Sgd::new(0.1).momentum(0.9).dampening(0.2).weight_decay(0.1))),
        ("Nesterov", Box::new(Sgd::new(0.1).momentum(0.9).nesterov(true).maximize(true))),
    ]
}

/// Numbers between -0.5 and 0.5, the same in each process.
fn numbers(len: i64, seed: usize) -> Tensor {
    let index = Tensor::arange(len, (Kind::Double, Device::Cpu));
    ((index * 0.618_034 + seed as f64 * 0.371).frac() - 0.5).to_kind(Kind::Float)
}

/// Weights and states after three steps.
fn steps() -> Results {
    let mut results = Vec::new();
    for kind in [Kind::Float, Kind::BFloat16] {
        for (name, optimizer) in optimizers() {
            let params: Vec<(String, Parameter)> = LENGTHS
                .into_iter()
                .enumerate()
                .map(|(i, len)| (format!("w{len}"), Parameter::new(numbers(len, i).to_kind(kind))))
                .collect();
            let mut built = optimizer.build(vec![ParamGroupSpec::new(params.clone())]).unwrap();
            for step in 0..3 {
                for (i, (_, parameter)) in params.iter().enumerate() {
                    let grad = numbers(parameter.numel() as i64, 100 + 10 * step + i).to_kind(kind);
                    ffi::set_grad(parameter.leaf(), &grad).unwrap();
                }
                built.step().unwrap();
            }
            let weights = params.into_iter().map(|(fqn, parameter)| (fqn, parameter.detach()));
            for (key, tensor) in weights.chain(built.state_dict().tensors) {
                results.push((format!("{name} {kind:?} {key}"), Ok(tensor)));
            }
        }
    }
    results
}

#[test]
fn steps_are_libtorchs_in_float32_and_bfloat16() {
    compare("steps::steps_are_libtorchs_in_float32_and_bfloat16", steps, |both| match both.found()? {
        Some((ours, theirs)) if !ours.numbers.equal(&theirs.numbers) => {
            let apart = (ours.numbers.to_kind(Kind::Double) - theirs.numbers.to_kind(Kind::Double)).abs();
            Err(format!("by up to {:e}", apart.max().double_value(&[])))
        }
        _ => Ok(()),
    });
}
