//! Activations on the emulated HPU: dropped, or moved to the host, until the backward pass needs them.

use std::sync::{Arc, Mutex};

use voltaic::accelerator::memory_stats;
use voltaic::ffi;
use voltaic::nn::{
    Callable, CheckpointPolicy, CheckpointSettings, CheckpointStats, Linear, ModuleExt, ModuleHooks,
    Sequential, Tanh, checkpoint, checkpoint_fn, save_on_host,
};
use voltaic::{Device, Kind, Tensor};

use crate::support::{HPU, same_bits, start};

/// Bytes of one tensor of the chain.
const BYTES: u64 = 64 * 1024 * 4;

fn chain(x: &Tensor) -> anyhow::Result<Tensor> {
    Ok((0..8).try_fold(x.shallow_clone(), |x, _| x.f_sin())?)
}

/// Bytes in use after the forward pass, beside input and output, and the gradient.
fn run(code: impl FnOnce(&Tensor) -> anyhow::Result<Tensor>) -> (u64, Tensor) {
    let x = Tensor::randn([64, 1024], (Kind::Float, HPU)).set_requires_grad(true);
    let in_use = || memory_stats(Device::Hpu(0)).unwrap().in_use as u64;
    let before = in_use();
    // what comes in is made within the chain of autograd, so that it is kept for the segment alone
    let out = code(&(&x * 1.0)).unwrap();
    let kept = in_use() - before;
    out.sum(Kind::Float).backward();
    let grad = x.grad();
    (kept, grad)
}

#[test]
fn activations_leave_the_device_until_backward() {
    let _guard = start();
    let seeded = || voltaic::ffi::manual_seed(3).unwrap();
    seeded();
    let (plain, expected) = run(chain);
    assert_eq!(plain, 9 * BYTES, "the inputs of eight operators, and the output");
    seeded();
    let (dropped, grad) = run(|x| checkpoint_fn(x, chain));
    assert_eq!(dropped, 2 * BYTES, "input and output");
    assert!(same_bits(&grad, &expected));
    seeded();
    let (on_host, grad) = {
        let _settings = CheckpointSettings { inputs_on_host: true, ..Default::default() }.enter();
        run(|x| checkpoint_fn(x, chain))
    };
    assert_eq!(on_host, BYTES, "the output");
    assert!(same_bits(&grad, &expected));
    seeded();
    let before = CheckpointStats::of_thread().offloaded_bytes;
    let (moved, grad) = run(|x| save_on_host(|| chain(x)));
    assert_eq!(moved, BYTES, "the output");
    assert_eq!(CheckpointStats::of_thread().offloaded_bytes - before, 8 * BYTES);
    assert!(same_bits(&grad, &expected));
}

/// Where autograd would hand the work to a thread of the device, which knows no modules.
#[test]
fn a_gradient_of_a_gradient_finds_its_modules() {
    let _guard = start();
    let run = |checkpoints: bool| {
        ffi::manual_seed(3).unwrap();
        let net = Sequential::new().add(Linear::new(6, 6).unwrap()).add(Tanh);
        net.to_device(Device::Hpu(0)).unwrap();
        let x = Tensor::randn([4, 6], (Kind::Float, HPU)).set_requires_grad(true);
        ffi::set_engine_multithreading(true).unwrap();
        let step = || {
            let out = if checkpoints { checkpoint(&net, &x) } else { net.call(&x) }.unwrap();
            let grads = Tensor::f_run_backward(&[&out.square().sum(Kind::Float)], &[&x], true, true).unwrap();
            grads[0].square().sum(Kind::Float).backward();
        };
        ModuleHooks::new().within(&net, step).unwrap();
        assert!(ffi::engine_multithreading().unwrap(), "as before");
        ffi::set_engine_multithreading(false).unwrap();
        net.parameters().iter().map(|parameter| parameter.grad()).collect::<Vec<_>>()
    };
    for (own, expected) in run(true).iter().zip(&run(false)) {
        assert!(same_bits(own, expected));
    }
}

/// Bytes of one tensor of the blocks.
const SIDE: i64 = 64;

#[test]
fn results_of_named_operators_stay_on_the_device() {
    let _guard = start();
    let bytes = (SIDE * SIDE * 4) as u64;
    let weight = Tensor::randn([SIDE, SIDE], (Kind::Float, HPU)) * 0.1;
    let run = |names: Option<&[&str]>| {
        let x = numbers(SIDE).set_requires_grad(true);
        let in_use = || memory_stats(Device::Hpu(0)).unwrap().in_use as u64;
        let code = |(x, weight): &(Tensor, Tensor)| -> anyhow::Result<Tensor> {
            Ok((0..3).try_fold(x.shallow_clone(), |x, _| x.f_mm(weight)?.f_sin()?.f_exp())?)
        };
        let args = (&x * 1.0, weight.shallow_clone());
        let before = in_use();
        let out = match names {
            Some(names) => {
                CheckpointPolicy::must_save(names.iter().copied()).unwrap().checkpoint_fn(&args, code)
            }
            None => code(&args),
        }
        .unwrap();
        let kept = in_use() - before;
        out.sum(Kind::Float).backward();
        (kept / bytes, x.grad())
    };
    let (plain, expected) = run(None);
    // of each round the argument of sin, and the result of exp, which is the argument of the next product
    assert_eq!(plain, 6);
    for (names, kept) in [(&[][..], 1), (&["matmul"], 4), (&["matmul", "sin"], 7), (&["exp"], 3)] {
        let (own, grad) = run(Some(names));
        assert_eq!(own, kept, "{names:?}");
        assert!(same_bits(&grad, &expected), "{names:?}");
    }
}

fn numbers(side: i64) -> Tensor {
    (Tensor::arange(side * side, (Kind::Float, HPU)) * 0.37).sin().reshape([side, side])
}

/// While the backward pass of a block runs, what the block before it has saved comes back, tensor by tensor, ahead of its use.
#[test]
fn offloaded_activations_come_back_ahead_of_the_backward_pass() {
    let _guard = start();
    let run = |offload: bool| {
        let x = numbers(SIDE).set_requires_grad(true);
        let events = Arc::new(Mutex::new(Vec::new()));
        let note = |out: &Tensor, what: String| {
            let events = events.clone();
            let hook = move |_: Tensor| {
                let in_use = memory_stats(Device::Hpu(0)).unwrap().in_use;
                events.lock().unwrap().push((what.clone(), in_use as i64));
                Ok(None)
            };
            ffi::tensor_hook(out, hook).unwrap();
        };
        let block = |x: &Tensor, number: usize| -> anyhow::Result<Tensor> {
            (0..4).try_fold(x.shallow_clone(), |x, at| {
                let x = x.f_sin()?;
                note(&x, format!("{number}.{at}"));
                Ok(x)
            })
        };
        let mut y = &x * 1.0;
        for number in 0..3 {
            y = if offload { save_on_host(|| block(&y, number)) } else { block(&y, number) }.unwrap();
        }
        let loss = y.sum(Kind::Float);
        drop(y);
        let before = memory_stats(Device::Hpu(0)).unwrap().in_use as i64;
        loss.backward();
        let after = memory_stats(Device::Hpu(0)).unwrap().in_use as i64;
        assert!(!offload || after - before == SIDE * SIDE * 4, "the gradient alone is left");
        let tensors = |in_use: i64| (in_use - before) / (SIDE * SIDE * 4);
        let events = events.lock().unwrap();
        (events.iter().map(|(what, in_use)| (what.clone(), tensors(*in_use))).collect::<Vec<_>>(), x.grad())
    };
    let (_, expected) = run(false);
    let (events, grad) = run(true);
    assert!(same_bits(&grad, &expected));
    // at the gradient of an operator's output: on the device are the gradient, at first of one element, and what has come back
    let order: Vec<&str> = events.iter().map(|(what, _)| what.as_str()).collect();
    assert_eq!(order, ["2.3", "2.2", "2.1", "2.0", "1.3", "1.2", "1.1", "1.0", "0.3", "0.2", "0.1", "0.0"]);
    let counts: Vec<i64> = events.iter().map(|(_, tensors)| *tensors).collect();
    // the last block brings one of its own along; once its backward pass is over, all of the block before are there
    assert_eq!(counts, [0, 3, 4, 5, 5, 5, 5, 5, 5, 4, 3, 2]);
}
