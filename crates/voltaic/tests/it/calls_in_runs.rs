//! Calls of modules in a trainer's runs: hooks of a LightningModule, graphs in place, ranges of the profiler.

use std::sync::{Arc, Mutex};

use tempfile::TempDir;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::graph::{ModuleCacher, WrapOptions, make_graphed_callables_inplace, wrap_in_hpu_graph_inplace};
use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::nn::{Callable, Dropout, Forward, Linear, Module, ModuleExt, ModuleHooks, Which};
use voltaic::optim::{Optimizers, Sgd};
use voltaic::profiler::SimpleProfilerConfig;
use voltaic::trainer::GraphMode;
use voltaic::{Kind, Tensor};

use crate::ddp::numbered;
use crate::probe::{own_process, plays, silent, text_of};

const CPU: (Kind, tch::Device) = (Kind::Float, tch::Device::Cpu);

#[derive(Module)]
struct Encoder {
    fc: Linear,
}

impl Forward for Encoder {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        Ok(self.fc.call(x)?.f_relu_()?)
    }
}

type Register = dyn FnMut(&ModuleHooks) + Send;

/// Registers hooks once, and calls or forwards its encoder.
#[derive(Module)]
struct Net {
    encoder: Encoder,
    dropout: Dropout,
    head: Linear,
    #[module(skip)]
    register: Box<Register>,
    calls: bool,
}

impl Net {
    fn new(register: impl FnMut(&ModuleHooks) + Send + 'static) -> Self {
        let net = Self {
            encoder: Encoder { fc: Linear::new(4, 8).unwrap() },
            dropout: Dropout::new(0.0).unwrap(),
            head: Linear::new(8, 2).unwrap(),
            register: Box::new(register),
            calls: true,
        };
        numbered(&net);
        net
    }
}

impl Forward for Net {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        let hidden = if self.calls { self.encoder.call(x)? } else { self.encoder.forward(x)? };
        self.head.call(&self.dropout.call(&hidden)?)
    }
}

impl LightningModule for Net {
    type Batch = Tensor;

    fn on_fit_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        (self.register)(ctx.module_hooks());
        Ok(())
    }

    fn training_step(&self, x: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let loss = self.call(x)?.f_square()?.f_mean(Kind::Float)?;
        ctx.log("train_loss", &loss);
        Ok(loss)
    }

    fn validation_step(&self, x: &Tensor, ctx: &mut StepContext) -> anyhow::Result<()> {
        ctx.log("val_loss", self.call(x)?.f_mean(Kind::Float)?);
        Ok(())
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Sgd::new(0.1).into()
    }
}

fn loader() -> DataLoader<Tensor> {
    let x = crate::ddp::numbers(&[12, 4], 0.5);
    DataLoader::new(TensorDataset::new(x).unwrap()).batch_size(4).build().unwrap()
}

fn data() -> Loaders<Tensor> {
    Loaders::new().train(loader())
}

fn weights(net: &Net) -> Vec<Vec<f32>> {
    let flat = |p: &voltaic::nn::Parameter| Vec::try_from(p.detach().contiguous().view(-1)).unwrap();
    net.parameters().iter().map(flat).collect()
}

type Seen = Arc<Mutex<Vec<String>>>;

fn watching(seen: &Seen) -> impl FnMut(&ModuleHooks) + Send + 'static {
    let seen = seen.clone();
    move |hooks| {
        let own = seen.clone();
        let _ = hooks.register_forward_hook("encoder*", move |call, _, _| {
            own.lock().unwrap().push(format!("forward {}", call.fqn()));
            Ok(())
        });
        let own = seen.clone();
        let _ = hooks.register_full_backward_hook("encoder", move |call, grad_inputs, grad_outputs| {
            let encoder: &Encoder = call.module_as().unwrap();
            assert_eq!(grad_outputs[0].as_ref().unwrap().size(), [4, encoder.fc.weight.size()[0]]);
            assert!(grad_inputs[0].is_none());
            own.lock().unwrap().push(format!("backward {}", call.fqn()));
            Ok(())
        });
    }
}

#[test]
fn a_lightning_module_registers_hooks_for_its_modules() {
    let seen = Seen::default();
    let mut net = Net::new(watching(&seen));
    let mut trainer = silent().max_epochs(1).limit_train_batches(2).num_sanity_val_steps(0).build().unwrap();
    trainer.fit(&mut net, &mut data().val(loader())).unwrap();
    let step = ["forward encoder.fc", "forward encoder", "backward encoder"];
    let evaluation = ["forward encoder.fc", "forward encoder"].repeat(3);
    let expected = [step.as_slice(), &step, &evaluation].concat();
    assert_eq!(*seen.lock().unwrap(), expected);

    // listening changes no bit of the training
    let mut plain = Net::new(|_| {});
    let mut trainer = silent().max_epochs(1).limit_train_batches(2).num_sanity_val_steps(0).build().unwrap();
    trainer.fit(&mut plain, &mut data().val(loader())).unwrap();
    assert_eq!(weights(&net), weights(&plain));

    // hooks of a trainer are for all its runs
    let calls = Arc::new(Mutex::new(0));
    let own = calls.clone();
    let handle =
        trainer.module_hooks().register_forward_pre_hook(Which::of_type::<Dropout>(), move |_, _| {
            *own.lock().unwrap() += 1;
            Ok(())
        });
    trainer.validate(&mut plain, &mut data().val(loader())).unwrap();
    handle.remove();
    trainer.validate(&mut plain, &mut data().val(loader())).unwrap();
    assert_eq!(*calls.lock().unwrap(), 3);
}

#[test]
fn what_a_hook_reports_is_the_error_of_the_run() {
    for (panics, expected) in
        [(false, "forward hook of encoder.fc (Linear): no room"), (true, "broken invariant")]
    {
        let mut net = Net::new(move |hooks| {
            let _ = hooks.register_forward_hook("encoder.fc", move |_, _, _| {
                assert!(!panics, "broken invariant");
                anyhow::bail!("no room")
            });
        });
        let error = silent().max_epochs(1).build().unwrap().fit(&mut net, &mut data()).unwrap_err();
        assert_contains!(format!("{:#}", anyhow::Error::from(error)), "training_step", expected);
    }
}

#[test]
fn a_hook_that_forward_ran_past_is_an_error_after_the_first_step() {
    let mut net = Net::new(watching(&Seen::default()));
    net.calls = false;
    let mut own = Net::new(|hooks| {
        let _ = hooks.register_forward_hook("encoder", |_, _, _| Ok(()));
    });
    own.calls = false;
    let mut trainer = silent().max_epochs(1).build().unwrap();
    let error = trainer.fit(&mut own, &mut data()).unwrap_err().to_string();
    let expected = "the forward hook of encoder (Encoder) was not called in the first step, though modules below it were; \
                    call it by `.call(&input)` (trait Callable) in place of `.forward(&input)`, or register the hook for a \
                    module that is called";
    assert!(error.contains(expected), "{error}");
    assert_eq!(trainer.global_step(), 0);
    let mut other = Net::new(|hooks| {
        let _ = hooks.register_forward_hook("decoder", |_, _, _| Ok(()));
    });
    assert_error!(
        silent().max_epochs(1).build().unwrap().fit(&mut other, &mut data()),
        "Net has no module for a forward hook of `decoder`; register it for one of: encoder, encoder.fc, dropout, head"
    );
}

#[test]
fn a_hook_within_a_captured_step_refuses_the_capture_with_its_reason() {
    if plays("graph") {
        let train = |register: Box<dyn FnMut(&ModuleHooks) + Send>, mode| {
            let mut net = Net::new(register);
            let mut trainer = silent().max_epochs(4).graph(mode).build().unwrap();
            trainer.fit(&mut net, &mut data()).unwrap();
            (weights(&net), trainer.graph_report().clone())
        };
        let seen = Seen::default();
        let (plain, _) = train(Box::new(|_| {}), GraphMode::Off);
        let (graphed, report) = train(Box::new(|_| {}), GraphMode::Step);
        assert!(report.replayed_steps > 0, "{report:?}");
        let (heard, report) = train(Box::new(watching(&seen)), GraphMode::Step);
        assert_eq!(report.replayed_steps, 0, "{report:?}");
        assert!((graphed == plain) && (heard == plain));
        let calls = seen.lock().unwrap();
        assert_eq!(
            calls.iter().filter(|call| *call == "forward encoder").count(),
            12,
            "each step, also those captured"
        );
        print!("{report:?}");
        return;
    }
    let output = own_process("graph").env("RUST_LOG", "warn").output().unwrap();
    let text = text_of(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("hook of encoder") && text.contains("a replay would not call"), "{text}");
}

/// What steps of a network leave behind.
fn train(
    net: &Net,
    sizes: &[i64],
    forward: impl Fn(&Net, &Tensor) -> anyhow::Result<Tensor>,
) -> Vec<Vec<f32>> {
    net.parameters().iter().for_each(|parameter| parameter.shallow_clone().zero_grad());
    for (step, size) in sizes.iter().enumerate() {
        let x = crate::ddp::numbers(&[*size, 4], step as f64);
        forward(net, &x).unwrap().square().mean(Kind::Float).backward();
    }
    net.parameters().iter().map(|p| Vec::try_from(p.grad().contiguous().view(-1)).unwrap()).collect()
}

#[test]
fn graphs_in_place_find_the_module_wherever_it_lies() {
    let sizes = [4, 4, 4, 3, 3, 4, 3];
    let net = Net::new(|_| {});
    let plain = train(&net, &sizes, |net, x| net.call(x));
    let graphs = ModuleCacher::new(10).inplace(&net);
    let moved = Box::new(net);
    assert_eq!(train(&moved, &sizes, |net, x| net.call(x)), plain);
    let stats = graphs.stats();
    assert_eq!((stats.misses, stats.checks, stats.hits, stats.uncached), (2, 2, 3, 0));
    // `forward` runs the code, and another module of the type has no part in it
    train(&moved, &sizes, |net, x| net.forward(x));
    let other = Net::new(|_| {});
    assert_eq!(train(&other, &sizes, |net, x| net.call(x)), plain);
    assert_eq!(graphs.stats().num_calls(), 7);
    drop(graphs);
    assert_eq!(train(&moved, &sizes, |net, x| net.call(x)), plain);
}

#[test]
fn hooks_of_a_module_run_around_its_replays_and_those_below_it_refuse_them() {
    let net = Net::new(|_| {});
    let plain = train(&net, &[4; 5], |net, x| net.call(x));
    for (fqn, hits) in [("", 3), ("encoder", 0)] {
        let graphs = ModuleCacher::new(10).inplace(&net);
        let hooks = ModuleHooks::new();
        let calls = Arc::new(Mutex::new(0));
        let own = calls.clone();
        let _ = hooks.register_forward_hook(fqn, move |_, _, _| {
            *own.lock().unwrap() += 1;
            Ok(())
        });
        let ran = train(&net, &[4; 5], |net, x| hooks.within(net, || net.call(x)).unwrap());
        assert_eq!(ran, plain);
        assert_eq!(*calls.lock().unwrap(), 5);
        assert_eq!(graphs.stats().hits, hits, "{fqn}");
        let reason = graphs.refusal().unwrap_or_default();
        assert_eq!(reason.contains("a forward hook of encoder ran"), hits == 0, "{reason}");
    }
}

#[test]
fn one_graph_in_place_is_left_out_in_other_modes() {
    let mut net = Net::new(|_| {});
    let plain = train(&net, &[4; 3], |net, x| net.call(x));
    let sample = Tensor::ones([4, 4], CPU);
    let graph = make_graphed_callables_inplace(&mut net, &sample, 2).unwrap();
    assert_eq!(train(&net, &[4; 3], |net, x| net.call(x)), plain);
    let replays = |graph: &voltaic::graph::GraphedCallableInPlace| graph.replay_stats()[0].replays;
    assert_eq!(replays(&graph), 3);
    net.dropout.set_training(false);
    let _ = net.call(&sample).unwrap();
    assert_eq!(replays(&graph), 3);
    drop(graph);
    let graphs = wrap_in_hpu_graph_inplace(&net, WrapOptions::default());
    let _no_grad = tch::no_grad_guard();
    for _ in 0..4 {
        let _ = net.call(&sample).unwrap();
    }
    assert_eq!((graphs.stats().misses, graphs.stats().hits), (1, 2));
}

/// A layer that keeps its mode in its own way, and tells nobody.
struct Doubles {
    training: bool,
}

impl Module for Doubles {
    fn members<'a>(&'a self, _: &mut dyn FnMut(&str, voltaic::nn::Member<'a>)) {}

    fn children_mut<'a>(&'a mut self, _: &mut dyn FnMut(&str, &'a mut dyn Module)) {}

    fn set_training(&mut self, training: bool) {
        self.training = training;
    }

    fn is_training(&self) -> Option<bool> {
        Some(self.training)
    }
}

impl Forward for Doubles {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        Ok(if self.training { x * 2.0 } else { x.shallow_clone() })
    }
}

#[test]
fn a_mode_that_was_changed_by_hand_is_another_graph() {
    let mut net =
        voltaic::nn::Sequential::new().add(Linear::new(4, 4).unwrap()).add(Doubles { training: true });
    let graphs = ModuleCacher::new(10).inplace(&net);
    let x = Tensor::ones([2, 4], CPU);
    let run = |net: &voltaic::nn::Sequential| {
        (0..3).for_each(|_| drop(net.call(&x).unwrap()));
        net.call(&x).unwrap().detach()
    };
    let _no_grad = tch::no_grad_guard();
    let doubled = run(&net);
    net.children_mut(&mut |name, child| {
        if name == "1" {
            child.set_training(false);
        }
    });
    assert_eq!(run(&net) * 2.0, doubled);
    assert_eq!(graphs.stats().num_graphs, 2);
}

#[test]
fn the_profiler_measures_calls_of_modules_if_asked() {
    for asked in [true, false] {
        let root = TempDir::new().unwrap();
        let config = SimpleProfilerConfig {
            dirpath: Some(root.path().to_owned()),
            filename: Some("p".to_owned()),
            record_module_names: asked,
            ..SimpleProfilerConfig::default()
        };
        let mut trainer = silent().max_epochs(1).profiler(config).build().unwrap();
        trainer.fit(&mut Net::new(|_| {}), &mut data()).unwrap();
        let report = std::fs::read_to_string(root.path().join("fit-p.txt")).unwrap();
        for name in [
            "[module]Net: ",
            "[module]Encoder: encoder",
            "[module]Linear: encoder.fc",
            "[module]Linear: head",
        ] {
            let row = report.lines().find(|line| line.contains(name));
            assert_eq!(row.is_some(), asked, "{report}");
            assert!(row.is_none_or(|row| row.contains(" 3 ")), "three steps: {report}");
        }
    }
}

#[test]
fn operations_count_for_the_module_whose_call_they_are_in() {
    #[derive(Module)]
    struct Scores {
        weight: voltaic::nn::Parameter,
    }
    impl Forward for Scores {
        fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
            // a product of activations alone, in the call of this module
            Ok(x.f_matmul(&x.f_transpose(0, 1)?)?.f_matmul(x)? * &*self.weight)
        }
    }
    #[derive(Module)]
    struct Model {
        fc: Linear,
        scores: Scores,
    }
    lightning_module!(Model, Tensor, Sgd::new(0.1), |net, x, _| Ok(net
        .scores
        .call(&net.fc.call(x)?)?
        .f_mean(Kind::Float)?));
    let weight = voltaic::nn::Parameter::new(Tensor::ones([8], CPU));
    let mut model = Model { fc: Linear::new(4, 8).unwrap(), scores: Scores { weight } };
    let flops = silent().build().unwrap().measure_flops(&mut model, &mut data()).unwrap();
    let expected = [("fc".to_owned(), 2 * 4 * 4 * 8), ("scores".to_owned(), 2 * (2 * 4 * 8 * 4))];
    assert_eq!(flops.layers, expected);
}

#[test]
fn hooks_run_on_each_rank() {
    if plays("rank") {
        let seen = Seen::default();
        let mut net = Net::new(watching(&seen));
        let folder = crate::ddp::folder_of_parent();
        let builder = silent().default_root_dir(folder).accelerator("cpu").devices(2).strategy("ddp");
        let mut trainer = builder.max_epochs(1).limit_train_batches(1).build().unwrap();
        trainer.fit(&mut net, &mut data()).unwrap();
        assert_eq!(*seen.lock().unwrap(), ["forward encoder.fc", "forward encoder", "backward encoder"]);
        println!("rank heard");
        return;
    }
    let folder = TempDir::new().unwrap();
    let output = own_process("rank").env(crate::ddp::FOLDER, folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", text_of(&output));
}
