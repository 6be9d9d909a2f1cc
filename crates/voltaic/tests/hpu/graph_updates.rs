//! `trainer.graph=step`: optimizer steps by graphs, and what keeps them from it.

use std::cell::Cell;

use tch::Tensor;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::nn::functional::cross_entropy;
use voltaic::nn::{Dropout, Forward, Linear};
use voltaic::optim::{
    Adam, ExponentialLr, Interval, LrSchedulerSpec, OneCycleLr, Optimizer, Optimizers, ParamGroupSpec, Sgd,
};
use voltaic::trainer::{GraphMode, GraphReport, Trainer};
use voltaic::{Module, ffi};

use crate::graph::{Pair, digits, fit};
use crate::heap;
use crate::process::{own_process, plays, text_of};
use crate::support::start;

/// What is special about a run.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Case {
    TwoGroups,
    CyclesMomentum,
    DropsGradients,
    ReplacesGradients,
    SkipsLayer,
    Freezes,
    SwitchesMode,
    EverySecond,
    AsksForStep,
    SetsRate,
    Logs,
    OfOnesOwn,
}

#[derive(Module)]
struct Net {
    first: Linear,
    dropout: Dropout,
    second: Linear,
    #[module(skip)]
    case: Case,
    #[module(skip)]
    steps: Cell<u64>,
}

fn net(case: Case) -> Net {
    Net {
        first: Linear::new(784, 10).unwrap(),
        dropout: Dropout::new(0.5).unwrap(),
        second: Linear::new(10, 10).unwrap(),
        case,
        steps: Cell::new(0),
    }
}

impl LightningModule for Net {
    type Batch = Pair;

    fn training_step(&self, (x, y): &Pair, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let mut logits = self.dropout.forward(&self.first.forward(&x.flatten(1, -1))?)?;
        if self.case != Case::SkipsLayer || x.size()[0] == 4 {
            logits = self.second.forward(&logits)?;
        }
        let loss = cross_entropy(&logits, y)?;
        ctx.log("train_loss", &loss);
        Ok(loss)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        let every_step = |spec: LrSchedulerSpec| spec.interval(Interval::Step);
        Ok(match self.case {
            Case::TwoGroups => {
                use voltaic::nn::ModuleExt;
                let groups = [
                    ParamGroupSpec::new(self.first.named_parameters()).lr(0.02).weight_decay(0.1),
                    ParamGroupSpec::new(
                        self.second.named_parameters().into_iter().map(|(name, p)| (format!("2.{name}"), p)),
                    ),
                ];
                Optimizers::new(Adam::new(0.01).amsgrad(true))
                    .groups(groups)
                    .scheduler(every_step(LrSchedulerSpec::new(ExponentialLr::new(0.9))))
            }
            Case::CyclesMomentum => Optimizers::new(Sgd::new(0.1).momentum(0.9))
                .scheduler(every_step(LrSchedulerSpec::new(OneCycleLr::new(0.1, 100)))),
            _ => Optimizers::new(Sgd::new(0.1).momentum(0.9)),
        })
    }

    fn on_train_batch_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        if self.case == Case::SwitchesMode && ctx.batch_idx() == 12 {
            self.dropout.set_training(ctx.current_epoch() == 1);
        }
        Ok(())
    }

    fn on_train_epoch_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        if self.case == Case::Freezes {
            let _ = self.first.weight.set_requires_grad(ctx.current_epoch() != 1);
        }
        Ok(())
    }

    fn on_after_backward(&self, ctx: &mut HookContext) -> anyhow::Result<()> {
        let is_odd = ctx.batch_idx() % 2 == 1;
        match self.case {
            Case::DropsGradients if is_odd => ffi::clear_grads([self.second.weight.tensor()])?,
            Case::ReplacesGradients if is_odd => {
                let grad = self.second.weight.grad();
                ffi::set_grad(&self.second.weight, &(grad * 2.0))?;
            }
            _ => {}
        }
        Ok(())
    }

    fn optimizer_step(&self, optimizer: &mut dyn Optimizer, ctx: &mut HookContext) -> anyhow::Result<()> {
        self.steps.set(self.steps.get() + 1);
        match self.case {
            Case::EverySecond if self.steps.get().is_multiple_of(2) => return Ok(()),
            Case::AsksForStep if ctx.global_step().is_multiple_of(2) => return Ok(()),
            Case::SetsRate => optimizer.param_groups_mut()[0].lr = 0.1 / self.steps.get() as f64,
            Case::Logs => {
                ctx.log("weight", self.first.weight.detach().mean(tch::Kind::Float));
            }
            Case::OfOnesOwn => {
                let _no_grad = tch::no_grad_guard();
                let weight = &self.second.weight;
                let mut data = weight.detach();
                let _ = data.subtract_(&(weight.grad() * 0.1));
                return Ok(());
            }
            _ => {}
        }
        Ok(optimizer.step()?)
    }
}

/// The report of a run by graphs, after it was compared with a run without.
fn check(case: Case, make: fn() -> Net, batch: usize) -> GraphReport {
    let data = digits(4 * 20);
    let mut reports = ["cpu", "hpu"].map(|accelerator| {
        let run = |graph| {
            let configure = |t: voltaic::trainer::TrainerBuilder| t.max_epochs(3).gradient_clip_val(0.5);
            fit(make, &data, batch, configure, (accelerator, graph))
        };
        let eager = run(GraphMode::Off);
        let graphed = run(GraphMode::Step);
        assert_eq!(eager.metrics, graphed.metrics, "{case:?} on {accelerator}");
        assert!(eager.weights == graphed.weights, "{case:?} on {accelerator}");
        assert_eq!(graphed.report.refusal, None, "{case:?} on {accelerator}");
        assert!(graphed.report.replayed_steps > 0, "{case:?} on {accelerator}: {:?}", graphed.report);
        let modules = run(GraphMode::Modules);
        assert!(eager.weights == modules.weights, "{case:?} on {accelerator} by modules");
        graphed.report
    });
    assert_eq!(reports[0], reports[1], "{case:?}");
    std::mem::take(&mut reports[0])
}

#[test]
fn groups_schedules_and_clipping_are_replayed() {
    let _rng = start();
    let report = check(Case::TwoGroups, || net(Case::TwoGroups), 4);
    assert_eq!((report.replayed_steps, report.captured_updates, report.replayed_updates), (55, 2, 53));
}

#[test]
fn an_update_of_ones_own_is_replayed() {
    let _rng = start();
    let report = check(Case::OfOnesOwn, || net(Case::OfOnesOwn), 4);
    assert_eq!(report.replayed_updates, 53, "{report:?}");
}

#[test]
fn gradients_that_a_hook_changes_are_not_those_of_the_graph() {
    let _rng = start();
    for (case, make) in [
        (Case::DropsGradients, (|| net(Case::DropsGradients)) as fn() -> Net),
        (Case::ReplacesGradients, || net(Case::ReplacesGradients)),
    ] {
        let report = check(case, make, 4);
        assert!(report.replayed_updates < report.replayed_steps / 2, "{case:?}: {report:?}");
    }
}

#[test]
fn updates_follow_frozen_parameters_modes_and_layers_that_are_left_out() {
    let _rng = start();
    for (case, make, batch) in [
        (Case::Freezes, (|| net(Case::Freezes)) as fn() -> Net, 4),
        (Case::SwitchesMode, || net(Case::SwitchesMode), 4),
        (Case::SkipsLayer, || net(Case::SkipsLayer), 7),
    ] {
        let report = check(case, make, batch);
        assert!(report.replayed_updates > 0, "{case:?}: {report:?}");
    }
}

#[test]
fn what_keeps_an_update_from_being_captured_is_told() {
    let _rng = start();
    for (case, make, reason) in [
        (Case::CyclesMomentum, (|| net(Case::CyclesMomentum)) as fn() -> Net, "change from step to step"),
        (Case::EverySecond, || net(Case::EverySecond), "not static"),
        (Case::AsksForStep, || net(Case::AsksForStep), "ctx.global_step()"),
        (Case::SetsRate, || net(Case::SetsRate), "learning rate is set"),
        (Case::Logs, || net(Case::Logs), "values are logged"),
    ] {
        let report = check(case, make, 4);
        let refusal = report.update_refusal.as_deref().unwrap_or_default();
        assert!(refusal.contains(reason), "{case:?}: {refusal}");
        assert_eq!(report.replayed_updates, 0, "{case:?}");
    }
}

/// Counts what each step takes from the heap, from the start of its batch to that of the next one.
#[derive(Module)]
struct Deep {
    first: Linear,
    layers: Vec<Linear>,
    dropouts: Vec<Dropout>,
    #[module(skip)]
    starts: Vec<u64>,
}

impl LightningModule for Deep {
    type Batch = Pair;

    fn training_step(&self, (x, y): &Pair, _: &mut StepContext) -> anyhow::Result<Tensor> {
        let mut hidden = self.first.forward(&x.flatten(1, -1))?;
        for (layer, dropout) in self.layers.iter().zip(&self.dropouts) {
            hidden = dropout.forward(&layer.forward(&hidden)?.relu())?;
        }
        Ok(cross_entropy(&hidden, y)?)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(Optimizers::new(Adam::new(0.01)))
    }

    fn on_train_batch_start(&mut self, _: &mut HookContext) -> anyhow::Result<()> {
        self.starts.push(heap::allocs());
        Ok(())
    }
}

#[test]
fn a_replayed_step_takes_as_much_from_the_heap_for_2_layers_as_for_20() {
    if !plays("replays") {
        // a product by the gemm crate takes two blocks to work in; that is not the replay's
        text_of(&own_process("replays").env("VOLTAIC_CPU_KERNELS", "0").output().unwrap());
        return;
    }
    let _rng = start();
    let counts = |num_layers: usize| {
        let mut net = Deep {
            first: Linear::new(784, 10).unwrap(),
            layers: (0..num_layers).map(|_| Linear::new(10, 10).unwrap()).collect(),
            dropouts: (0..num_layers).map(|_| Dropout::new(0.5).unwrap()).collect(),
            starts: Vec::with_capacity(64),
        };
        let root = tempfile::tempdir().unwrap();
        let (x, y) = digits(4 * 40);
        let loader = DataLoader::new(TensorDataset::new((x, y)).unwrap()).batch_size(4).build().unwrap();
        Trainer::builder()
            .accelerator("cpu")
            .devices(1)
            .default_root_dir(root.path())
            .enable_progress_bar(false)
            .enable_model_summary(false)
            .enable_checkpointing(false)
            .gradient_clip_val(0.5)
            .max_epochs(1)
            .graph(GraphMode::Step)
            .build()
            .unwrap()
            .fit(&mut net, &mut Loaders::new().train(loader))
            .unwrap();
        let steps: Vec<u64> = net.starts.windows(2).map(|pair| pair[1] - pair[0]).collect();
        steps[20..].iter().min().copied().unwrap()
    };
    assert_eq!(counts(2), counts(20));
}
