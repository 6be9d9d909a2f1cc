//! Hooks of module calls: order and values are PyTorch's, whatever is done within them.

#![allow(unused_must_use, reason = "calls are made for their hooks here")]

use std::cell::Cell;
use std::sync::{Arc, Mutex};

use serde_json::Value;
use voltaic::ffi::GradHook;
use voltaic::nn::{
    Callable, Forward, Linear, Module, ModuleCall, ModuleExt, ModuleHooks, MultiheadAttention, Relu,
    Sequential, Which,
};
use voltaic::{Kind, Tensor};

const CPU: (Kind, tch::Device) = (Kind::Float, tch::Device::Cpu);

/// As `Block` of fixtures/calls/record.py.
#[derive(Module)]
struct Block {
    fc: Linear,
}

impl Forward for Block {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        Ok(x + self.fc.call(&self.fc.forward(x)?.tanh())?)
    }
}

#[derive(Module)]
struct Gate {
    value: Linear,
}

impl Callable<(Tensor, Tensor)> for Gate {
    type Output = Tensor;

    fn forward_with(&self, (x, gate): &(Tensor, Tensor)) -> anyhow::Result<Tensor> {
        Ok(self.value.call(x)? * gate)
    }
}

#[derive(Module)]
struct Net {
    first: Linear,
    block: Block,
    gate: Gate,
}

impl Forward for Net {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        let hidden = self.block.call(&self.first.call(x)?)?;
        let gate = hidden.narrow(1, 0, 2).sigmoid();
        self.gate.call(&(hidden, gate))
    }
}

fn fixture() -> Value {
    serde_json::from_str(include_str!("../fixtures/calls/hooks.json")).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

fn net(fixture: &Value) -> (Net, Tensor) {
    let net = Net {
        first: Linear::new(4, 3).unwrap(),
        block: Block { fc: Linear::new(3, 3).unwrap() },
        gate: Gate { value: Linear::new(3, 2).unwrap() },
    };
    let tensor = |values: &Value, shape: &[i64]| {
        Tensor::from_slice(&numbers(values)).to_kind(Kind::Float).reshape(shape)
    };
    let state: Vec<(String, Tensor)> = net
        .state_dict()
        .into_iter()
        .map(|(fqn, own)| (fqn.clone(), tensor(&fixture["state"][&fqn], &own.size())))
        .collect();
    net.load_state_dict(&state, true).unwrap();
    (net, tensor(&fixture["input"], &[2, 4]))
}

fn flat(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().to_kind(Kind::Double).contiguous().view(-1)).unwrap()
}

fn assert_close(ours: &[f64], theirs: &[f64], what: &str) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (a, b) in ours.iter().zip(theirs) {
        assert!((a - b).abs() <= 1e-5 * b.abs().max(1.0), "{what}: {ours:?} {theirs:?}");
    }
}

fn assert_same_grads(net: &Net, theirs: &Value, what: &str) {
    for (fqn, parameter) in net.named_parameters() {
        assert_close(&flat(&parameter.grad()), &numbers(&theirs[&fqn]), &format!("{what}: {fqn}"));
    }
}

type Log = Arc<Mutex<Vec<(&'static str, String, Vec<Option<Vec<f64>>>)>>>;

fn note<'a>(
    log: &Log,
    kind: &'static str,
    call: &ModuleCall<'_>,
    tensors: impl IntoIterator<Item = Option<&'a Tensor>>,
) {
    let values = tensors.into_iter().map(|tensor| tensor.map(flat)).collect();
    log.lock().unwrap().push((kind, call.fqn().to_owned(), values));
}

/// All kinds of hooks on all modules, in the order of the script.
fn listen(hooks: &ModuleHooks, log: &Log) {
    for fqn in ["", "first", "block", "block.fc", "gate", "gate.value"] {
        let own = log.clone();
        let _ = hooks.register_forward_pre_hook(fqn, move |call, inputs| {
            note(&own, "forward_pre", call, inputs.iter().map(Some));
            Ok(())
        });
        let own = log.clone();
        let _ = hooks.register_forward_hook(fqn, move |call, inputs, outputs| {
            note(&own, "forward", call, inputs.iter().chain(outputs.iter()).map(Some));
            Ok(())
        });
        let own = log.clone();
        let _ = hooks.register_full_backward_pre_hook(fqn, move |call, grad_outputs| {
            note(&own, "backward_pre", call, grad_outputs.iter().map(Option::as_ref));
            Ok(())
        });
        let own = log.clone();
        let _ = hooks.register_full_backward_hook(fqn, move |call, grad_inputs, grad_outputs| {
            let grads = grad_inputs.iter().chain(grad_outputs);
            note(&own, "backward", call, grads.map(Option::as_ref));
            Ok(())
        });
    }
}

#[test]
fn order_and_values_of_hooks_are_pytorchs() {
    let fixture = fixture();
    let (mut net, x) = net(&fixture);
    let (hooks, log) = (ModuleHooks::new(), Log::default());
    listen(&hooks, &log);
    for run in fixture["runs"].as_array().unwrap() {
        let name = run["name"].as_str().unwrap();
        net.train(name != "eval");
        for parameter in net.parameters() {
            parameter.shallow_clone().zero_grad();
        }
        log.lock().unwrap().clear();
        let input = x.detach().copy().set_requires_grad(name != "input without gradient");
        let output = hooks
            .within(&net, || -> anyhow::Result<Tensor> {
                let output = net.call(&input)?;
                output.sum(Kind::Float).f_backward()?;
                Ok(output)
            })
            .unwrap()
            .unwrap();
        assert_close(&flat(&output), &numbers(&run["output"]), name);
        assert_same_grads(&net, &run["grads"], name);
        let (ours, theirs) = (log.lock().unwrap(), run["log"].as_array().unwrap());
        let names: Vec<_> = ours.iter().map(|(kind, fqn, _)| (*kind, fqn.as_str())).collect();
        let their_names: Vec<_> =
            theirs.iter().map(|entry| (entry[0].as_str().unwrap(), entry[1].as_str().unwrap())).collect();
        assert_eq!(names, their_names, "{name}");
        for ((kind, fqn, values), theirs) in ours.iter().zip(theirs) {
            let what = format!("{name}: {kind} of {fqn}");
            let theirs = theirs[2].as_array().unwrap();
            assert_eq!(values.len(), theirs.len(), "{what}");
            for (own, theirs) in values.iter().zip(theirs) {
                assert_eq!(own.is_none(), theirs.is_null(), "{what}");
                if let Some(own) = own {
                    assert_close(own, &numbers(theirs), &what);
                }
            }
        }
    }
    assert!(hooks.never_called().is_empty());
}

#[test]
fn hooks_change_what_pytorchs_change() {
    let fixture = fixture();
    let (net, x) = net(&fixture);
    let hooks = ModuleHooks::new();
    let _ = hooks.register_forward_pre_hook("block", |_, inputs| {
        inputs[0] = &inputs[0] * 2.0;
        Ok(())
    });
    let _ = hooks.register_forward_hook("block.fc", |_, _, outputs| {
        outputs[0] = &outputs[0] + 1.0;
        Ok(())
    });
    let times = |grad: &mut Option<Tensor>, factor: f64| *grad = grad.take().map(|grad| grad * factor);
    let _ = hooks.register_full_backward_pre_hook("gate", move |_, grads| {
        times(&mut grads[0], 3.0);
        Ok(())
    });
    let _ = hooks.register_full_backward_hook(Which::from("first"), move |_, grads, _| {
        times(&mut grads[0], 5.0);
        Ok(())
    });
    let _ = hooks.register_full_backward_hook(Which::of_type::<Gate>(), move |call, grads, _| {
        assert_eq!(
            call.module_as::<Gate>().unwrap().value.weight.size(),
            [2, 3],
            "the module is there in backward"
        );
        times(&mut grads[0], 7.0);
        times(&mut grads[1], 11.0);
        Ok(())
    });
    let input = x.copy().set_requires_grad(true);
    let output = hooks
        .within(&net, || -> anyhow::Result<Tensor> {
            let output = net.call(&input)?;
            output.sum(Kind::Float).f_backward()?;
            Ok(output)
        })
        .unwrap()
        .unwrap();
    let changed = &fixture["changed"];
    assert_close(&flat(&output), &numbers(&changed["output"]), "output");
    assert_same_grads(&net, &changed["grads"], "changed");
    assert_close(&flat(&input.grad()), &numbers(&changed["grad_input"]), "input");
}

#[test]
fn hooks_removed_and_added_within_hooks_run_as_pytorchs() {
    let fixture = fixture();
    let (net, x) = net(&fixture);
    let hooks = ModuleHooks::new();
    let log = Arc::new(Mutex::new(Vec::new()));
    let say = |word: &'static str| {
        let log = log.clone();
        move || log.lock().unwrap().push(word)
    };
    let handles = Arc::new(Mutex::new(Vec::<voltaic::nn::RemovableHandle>::new()));
    let (inner, own, first, third, after) =
        (hooks.clone(), handles.clone(), say("first"), say("third"), say("after"));
    let handle = hooks.register_forward_pre_hook("first", move |_, _| {
        first();
        own.lock().unwrap().iter().for_each(voltaic::nn::RemovableHandle::remove);
        let (third, after) = (third.clone(), after.clone());
        let _ = inner.register_forward_pre_hook("first", move |_, _| {
            third();
            Ok(())
        });
        let _ = inner.register_forward_hook("first", move |_, _, _| {
            after();
            Ok(())
        });
        Ok(())
    });
    let second = say("second");
    let other = hooks.register_forward_pre_hook("first", move |_, _| {
        second();
        Ok(())
    });
    handles.lock().unwrap().extend([handle, other]);
    hooks
        .within(&net, || {
            for _ in 0..2 {
                net.first.call(&x).unwrap();
                say("call done")();
            }
        })
        .unwrap();
    let theirs = fixture["within"].as_array().unwrap().iter().map(|entry| entry[0].as_str().unwrap());
    assert_eq!(*log.lock().unwrap(), theirs.collect::<Vec<_>>());
}

fn counted(hooks: &ModuleHooks, which: impl Into<Which>) -> Arc<Mutex<Vec<String>>> {
    let calls = Arc::new(Mutex::new(Vec::new()));
    let own = calls.clone();
    let _ = hooks.register_forward_hook(which, move |call, _, _| {
        own.lock().unwrap().push(call.fqn().to_owned());
        Ok(())
    });
    calls
}

#[test]
fn forward_and_call_of_voltaics_layers_are_one_call() {
    let net = Sequential::new().add(Linear::new(4, 4).unwrap()).add(Relu).add(Relu);
    let hooks = ModuleHooks::new();
    let calls = counted(&hooks, Which::All);
    let x = Tensor::ones([2, 4], CPU);
    hooks.within(&net, || (net.forward(&x).unwrap(), net.call(&x).unwrap())).unwrap();
    // modules without fields are told apart by their place
    assert_eq!(*calls.lock().unwrap(), ["0", "1", "2", "", "0", "1", "2", ""]);
    net.call(&x).unwrap();
    assert_eq!(calls.lock().unwrap().len(), 8, "outside of the scope nobody hears");
}

#[test]
fn attention_is_one_call_by_each_of_its_methods() {
    let layer = MultiheadAttention::new(4, 2).unwrap();
    let hooks = ModuleHooks::new();
    let inputs = Arc::new(Mutex::new(Vec::new()));
    let own = inputs.clone();
    let _ = hooks.register_forward_hook("", move |_, inputs, outputs| {
        own.lock().unwrap().push((inputs.len(), outputs.len()));
        Ok(())
    });
    let x = Tensor::ones([3, 2, 4], CPU);
    let plain = layer.forward(&x).unwrap();
    let heard = hooks
        .within(&layer, || {
            layer.attend_with_weights(&x, &x, &x, &Default::default()).unwrap();
            layer.attend(&x, &x, &x, &Default::default()).unwrap();
            layer.call(&x).unwrap()
        })
        .unwrap();
    assert_eq!(heard, plain, "listening changes no bit");
    assert_eq!(*inputs.lock().unwrap(), [(3, 2), (3, 1), (1, 1)]);
}

#[test]
fn an_error_or_a_panic_of_a_hook_leaves_the_next_call_as_it_was() {
    let net = Sequential::new().add(Linear::new(4, 4).unwrap());
    let hooks = ModuleHooks::new();
    let mut count = 0;
    let _ = hooks.register_forward_hook("0", move |_, _, _| {
        count += 1;
        assert!(count != 2, "second call");
        anyhow::ensure!(count != 1, "first call");
        Ok(())
    });
    let calls = counted(&hooks, Which::All);
    let x = Tensor::ones([2, 4], CPU);
    let call = || hooks.within(&net, || net.call(&x)).unwrap();
    let error = format!("{:#}", call().unwrap_err());
    assert_eq!(error, "forward hook of 0 (Linear): first call");
    let quiet = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call));
    std::panic::set_hook(quiet);
    assert!(panicked.is_err());
    calls.lock().unwrap().clear();
    call().unwrap();
    assert_eq!(*calls.lock().unwrap(), ["0", ""]);
}

#[test]
fn an_error_or_a_panic_of_a_backward_hook_fails_backward() {
    let layer = Linear::new(4, 4).unwrap();
    for (panics, expected) in [(false, "no room"), (true, "broken invariant")] {
        let hooks = ModuleHooks::new();
        let _ = hooks.register_full_backward_hook("", move |_, _, _| {
            assert!(!panics, "broken invariant");
            anyhow::bail!("no room")
        });
        let x = Tensor::ones([2, 4], CPU);
        let output = hooks.within(&layer, || layer.call(&x)).unwrap().unwrap();
        let quiet = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let error = output.sum(Kind::Float).f_backward().unwrap_err().to_string();
        std::panic::set_hook(quiet);
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_hook_that_calls_its_module_does_not_hear_that() {
    let net = Sequential::new().add(Linear::new(4, 4).unwrap());
    let hooks = ModuleHooks::new();
    let heard = counted(&hooks, "0");
    let _ = hooks.register_forward_hook("0", |call, inputs, outputs| {
        let layer: &Linear = call.module_as().unwrap();
        outputs[0] = layer.call(&inputs[0])? + layer.call(&inputs[0])?;
        Ok(())
    });
    let x = Tensor::ones([2, 4], CPU);
    let output = hooks.within(&net, || net.call(&x)).unwrap().unwrap();
    assert!(output.allclose(&(net.forward(&x).unwrap() * 2.0), 1e-6, 1e-6, false));
    assert_eq!(*heard.lock().unwrap(), ["0", "0", "0"], "other hooks hear it");
}

#[test]
fn outputs_and_inputs_may_be_changed_in_place_under_backward_hooks() {
    let _rng = voltaic::ffi::manual_seed(1);
    let first = Linear::new(4, 4).unwrap();
    let second = Linear::new(4, 2).unwrap();
    #[derive(Module)]
    struct InPlace {
        first: Linear,
        second: Linear,
    }
    impl Forward for InPlace {
        fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
            let hidden = self.first.call(x)?.f_relu_()?;
            self.second.call(&hidden)
        }
    }
    let net = InPlace { first, second };
    let x = Tensor::randn([8, 4], CPU);
    let run = |hooks: &ModuleHooks| {
        net.parameters().iter().for_each(|parameter| parameter.shallow_clone().zero_grad());
        hooks.within(&net, || net.call(&x).unwrap().square().sum(Kind::Float).backward()).unwrap();
        net.parameters().iter().map(|parameter| parameter.grad().copy()).collect::<Vec<_>>()
    };
    let plain = run(&ModuleHooks::new());
    let hooks = ModuleHooks::new();
    let grads = Arc::new(Mutex::new(Vec::new()));
    let own = grads.clone();
    let _ = hooks.register_full_backward_hook("first", move |_, _, grads| {
        own.lock().unwrap().push(grads[0].as_ref().unwrap().copy());
        Ok(())
    });
    let _ = hooks.register_full_backward_hook("second", |_, _, _| Ok(()));
    assert_eq!(run(&hooks), plain);
    // the gradient is that of the layer's output, before relu_
    let grads = grads.lock().unwrap();
    assert!(
        grads[0]
            .sum_dim_intlist([0_i64].as_slice(), false, Kind::Float)
            .allclose(&plain[1], 1e-5, 1e-5, false)
    );
}

#[test]
fn an_input_that_is_not_used_has_no_gradient_and_the_hook_runs_at_the_end() {
    #[derive(Module)]
    struct Ignores {
        layer: Linear,
    }
    impl Forward for Ignores {
        fn forward(&self, _: &Tensor) -> anyhow::Result<Tensor> {
            Ok(self.layer.weight.sum(Kind::Float))
        }
    }
    let net = Ignores { layer: Linear::new(2, 2).unwrap() };
    let hooks = ModuleHooks::new();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let own = seen.clone();
    let _ = hooks.register_full_backward_hook("", move |_, grad_inputs, grad_outputs| {
        own.lock().unwrap().push((grad_inputs[0].is_none(), grad_outputs[0].is_some()));
        Ok(())
    });
    let x = Tensor::ones([2], CPU).set_requires_grad(true);
    let output = hooks.within(&net, || net.call(&x)).unwrap().unwrap();
    for _ in 0..2 {
        Tensor::run_backward(&[&output], &[&*net.layer.weight], true, false);
    }
    assert_eq!(*seen.lock().unwrap(), [(true, true), (true, true)]);
}

#[test]
fn hooks_follow_modules_that_move_between_batches() {
    #[derive(Module)]
    struct Tower {
        layers: Vec<Linear>,
    }
    impl Forward for Tower {
        fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
            self.layers.iter().try_fold(x.shallow_clone(), |x, layer| layer.call(&x))
        }
    }
    let mut tower = Tower { layers: vec![Linear::new(2, 2).unwrap()] };
    let hooks = ModuleHooks::new();
    let calls = counted(&hooks, Which::All);
    let x = Tensor::ones([1, 2], CPU);
    for layers in 1..5 {
        calls.lock().unwrap().clear();
        hooks.within(&tower, || tower.call(&x)).unwrap().unwrap();
        let mut expected: Vec<String> = (0..layers).map(|layer| format!("layers.{layer}")).collect();
        expected.push(String::new());
        assert_eq!(*calls.lock().unwrap(), expected);
        tower.layers.insert(0, Linear::new(2, 2).unwrap());
        let mut moved = Box::new(Tower { layers: std::mem::take(&mut tower.layers) });
        std::mem::swap(&mut *moved, &mut tower);
    }
}

#[test]
fn a_module_that_forward_ran_past_its_hook_is_named() {
    let net = Sequential::new().add(Sequential::new().add(Linear::new(2, 2).unwrap()));
    let hooks = ModuleHooks::new();
    let _ = hooks.register_forward_hook("encoder.*", |_, _, _| Ok(()));
    let error = hooks.within(&net, || ()).unwrap_err().to_string();
    assert_eq!(
        error,
        "Sequential has no module for a forward hook of `encoder.*`; register it for one of: 0, 0.0"
    );

    let (net, x) = self::net(&fixture());
    let hooks = ModuleHooks::new();
    let _ = hooks.register_forward_hook("block", |_, _, _| Ok(()));
    hooks.within(&net, || net.block.forward(&net.first.forward(&x).unwrap()).unwrap()).unwrap();
    assert_eq!(hooks.never_called(), ["block"]);
    hooks.within(&net, || net.call(&x).unwrap()).unwrap();
    assert!(hooks.never_called().is_empty());
}

#[test]
fn scopes_within_scopes_hear_both() {
    let net = Sequential::new().add(Linear::new(4, 4).unwrap());
    let (outer, inner) = (ModuleHooks::new(), ModuleHooks::new());
    let (by_outer, by_inner) = (counted(&outer, Which::All), counted(&inner, "0"));
    let x = Tensor::ones([2, 4], CPU);
    outer
        .within(&net, || {
            inner.within(&net, || net.call(&x).unwrap()).unwrap();
            net.call(&x).unwrap();
        })
        .unwrap();
    assert_eq!((by_outer.lock().unwrap().len(), by_inner.lock().unwrap().len()), (4, 1));
}

#[test]
fn a_leaf_has_many_hooks_that_go_in_any_order() {
    let w = Tensor::ones([3], CPU).set_requires_grad(true);
    let log = Arc::new(Mutex::new(Vec::new()));
    let hook = |name: usize| {
        let log = log.clone();
        GradHook::register(&w, move || {
            log.lock().unwrap().push(name);
            Ok(())
        })
        .unwrap()
    };
    let mut hooks: Vec<_> = (0..4).map(|name| Some(hook(name))).collect();
    let ran = || {
        log.lock().unwrap().clear();
        (&w * 2.0).sum(Kind::Float).backward();
        log.lock().unwrap().clone()
    };
    assert_eq!(ran(), [0, 1, 2, 3]);
    hooks[1] = None;
    assert_eq!(ran(), [0, 2, 3]);
    hooks[3] = None;
    hooks[0] = None;
    assert_eq!(ran(), [2]);
    hooks[0] = Some(hook(7));
    assert_eq!(ran(), [2, 7]);
    hooks.clear();
    assert!(ran().is_empty());
    assert_eq!(Arc::strong_count(&log), 1, "the closures are freed");
}

#[test]
fn hooks_are_of_their_thread() {
    let net = Sequential::new().add(Linear::new(4, 4).unwrap());
    let hooks = ModuleHooks::new();
    let calls = counted(&hooks, Which::All);
    let outside = Cell::new(0);
    hooks
        .within(&net, || {
            std::thread::spawn(|| {
                let other = Linear::new(4, 4).unwrap();
                other.call(&Tensor::ones([2, 4], CPU)).unwrap();
            })
            .join()
            .unwrap();
            outside.set(outside.get() + 1);
        })
        .unwrap();
    assert!(calls.lock().unwrap().is_empty());
}

/// Calls its layer when it is dropped.
struct LastCall(Linear);

impl Drop for LastCall {
    fn drop(&mut self) {
        self.0.call(&Tensor::ones([1, 2], CPU)).unwrap();
    }
}

#[test]
fn what_a_removed_hook_owns_may_call_modules_when_it_is_dropped() {
    let net = Sequential::new().add(Linear::new(2, 2).unwrap()).add(Relu);
    let hooks = ModuleHooks::new();
    let last = LastCall(Linear::new(2, 2).unwrap());
    let handle = hooks.register_forward_hook("0", move |_, _, _| {
        let _ = &last;
        Ok(())
    });
    let heard = counted(&hooks, "1");
    hooks
        .within(&net, || {
            let input = Tensor::ones([1, 2], CPU);
            net.call(&input).unwrap();
            handle.remove();
            net.call(&input).unwrap();
        })
        .unwrap();
    assert_eq!(heard.lock().unwrap().len(), 2);
}
