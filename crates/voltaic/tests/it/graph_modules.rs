//! `trainer.graph=modules`: whose graphs the calls by `ctx.graphed` get, and what hooks get of them.

use voltaic::data::Loaders;
use voltaic::graph::{CacheStats, CompileBackend, HpuGraph};
use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::nn::{Forward, Linear};
use voltaic::optim::{Optimizers, Sgd};
use voltaic::trainer::{GraphMode, GraphReport};
use voltaic::{Kind, Module, Tensor};

use crate::probe::silent;
use crate::rng::seeded;
use crate::stages::loader;

/// What a hook does to the two layers before every third batch.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Change {
    Nothing,
    SwapsLayers,
    SwapsWeights,
}

#[derive(Module)]
struct Net {
    first: Linear,
    second: Linear,
    #[module(skip)]
    change: Change,
    /// Outputs as hooks got them, with copies of then.
    #[module(skip)]
    seen: Vec<(Tensor, Tensor)>,
}

impl LightningModule for Net {
    type Batch = Tensor;

    fn training_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let hidden = ctx.graphed(&self.first, batch)?;
        ctx.output("hidden", &hidden);
        let result = ctx.graphed(&self.second, &hidden.f_tanh()?)?;
        Ok(result.f_square()?.f_mean(Kind::Float)?)
    }

    fn on_train_batch_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        if ctx.batch_idx() % 3 == 2 {
            match self.change {
                Change::Nothing => {}
                Change::SwapsLayers => std::mem::swap(&mut self.first, &mut self.second),
                Change::SwapsWeights => std::mem::swap(&mut self.first.weight, &mut self.second.weight),
            }
        }
        Ok(())
    }

    fn on_train_batch_end(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        let hidden = ctx.outputs().tensor("hidden")?;
        assert!(!hidden.requires_grad());
        self.seen.push((hidden.shallow_clone(), hidden.copy()));
        Ok(())
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Sgd::new(0.125).into()
    }
}

fn fit(change: Change, graph: GraphMode) -> (Net, GraphReport) {
    let _seeded = seeded(1);
    let (first, second) = (Linear::new(2, 2).unwrap(), Linear::new(2, 2).unwrap());
    let mut net = Net { first, second, change, seen: Vec::new() };
    let mut trainer = silent().accelerator("cpu").max_epochs(2).graph(graph).build().unwrap();
    trainer.fit(&mut net, &mut Loaders::new().train(loader(16))).unwrap();
    (net, trainer.graph_report().clone())
}

#[test]
fn layers_and_weights_that_hooks_exchange_keep_their_graphs_apart() {
    for change in [Change::Nothing, Change::SwapsLayers, Change::SwapsWeights] {
        let ((eager, _), (graphed, report)) = (fit(change, GraphMode::Off), fit(change, GraphMode::Modules));
        assert!(report.modules.iter().all(|(_, stats)| stats.hits > 0), "{change:?}: {report:?}");
        assert_eq!(eager.seen.len(), 16);
        for (step, ((eager, _), (graphed, then))) in eager.seen.iter().zip(&graphed.seen).enumerate() {
            assert!(eager.allclose(graphed, 1e-5, 1e-7, false), "{change:?}: output of step {step} differs");
            assert!(graphed.equal(then), "{change:?}: what a hook kept of step {step} is another now");
        }
        for (eager, graphed) in [(&eager.first, &graphed.first), (&eager.second, &graphed.second)] {
            assert!(eager.weight.allclose(&graphed.weight, 1e-5, 1e-7, false), "{change:?}");
        }
    }
}

#[test]
fn the_report_names_modules_by_fqn() {
    let (_, report) = fit(Change::Nothing, GraphMode::Modules);
    let names: Vec<&str> = report.modules.iter().map(|(name, _)| name.as_ref()).collect();
    assert_eq!(names, ["first (Linear)", "second (Linear)"]);
}

/// Gives as many numbers as are positive, which no graph can.
#[derive(Module)]
struct Selects;

impl Forward for Selects {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        Ok(x.f_masked_select(&x.f_gt(0.0)?)?)
    }
}

/// Validation calls both layers by graphs, tests make a graph by hand, and predictions make none.
#[derive(Module)]
struct Evaluated {
    layer: Linear,
    selects: Selects,
}

impl LightningModule for Evaluated {
    type Batch = Tensor;

    fn training_step(&self, batch: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        Ok(self.layer.forward(batch)?.f_mean(Kind::Float)?)
    }

    fn validation_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<()> {
        let hidden = ctx.graphed(&self.layer, batch)?;
        let sum = ctx.graphed(&self.selects, &hidden)?.f_sum(Kind::Float)?;
        ctx.log("sum", sum);
        Ok(())
    }

    fn test_step(&self, batch: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<()> {
        let graph = HpuGraph::new();
        _ = graph.capture(|| self.layer.forward(batch))?;
        Ok(graph.replay()?)
    }

    fn predict_step(&self, batch: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        self.layer.forward(batch)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Sgd::new(0.125).into()
    }
}

#[test]
fn the_report_tells_of_evaluation() {
    let data = || Loaders::new().train(loader(16)).val(loader(10)).test(loader(6)).predict(loader(6));
    let make = || {
        let _seeded = seeded(2);
        Evaluated { layer: Linear::new(2, 2).unwrap(), selects: Selects }
    };
    let compiled = || silent().accelerator("cpu").compile(CompileBackend::HpuBackend);
    for builder in [silent().accelerator("cpu").graph(GraphMode::Modules), compiled()] {
        let (mut net, mut trainer) = (make(), builder.build().unwrap());
        trainer.validate(&mut net, &mut data()).unwrap();
        let GraphReport { modules, refusal, captured_by_hand, .. } = trainer.graph_report().clone();
        let [(layer, of_layer), (selects, of_selects)] = &modules[..] else { panic!("{modules:?}") };
        assert_eq!((layer.as_str(), selects.as_str()), ("layer (Linear)", "selects (Selects)"));
        let counts = |stats: &CacheStats| (stats.misses, stats.checks, stats.hits, stats.uncached);
        assert_eq!((counts(of_layer), &of_layer.refusal), ((1, 1, 3, 0), &None), "of 5 batches");
        assert_eq!(counts(of_selects), (1, 0, 0, 4));
        let why = of_selects.refusal.as_deref().unwrap();
        assert!(why.contains("masked_select") && of_selects.to_string().contains(why), "{of_selects}");
        assert_eq!((refusal, captured_by_hand), (None, 0));

        trainer.test(&mut net, &mut data()).unwrap();
        let report = trainer.graph_report();
        assert_eq!((report.captured_by_hand, report.replayed_by_hand), (3, 3), "one of each batch");
        assert!(report.modules.is_empty(), "{report:?}");
        assert_contains!(report.refusal.as_deref().unwrap(), "no step called a module by ctx.graphed");
    }
    let why_not = |mode| {
        let (mut net, mut trainer) =
            (make(), silent().accelerator("cpu").max_epochs(1).graph(mode).build().unwrap());
        trainer.fit(&mut net, &mut data()).unwrap();
        let of_fit = trainer.graph_report().clone();
        trainer.predict(&mut net, &mut data()).unwrap();
        let report = trainer.graph_report();
        assert_eq!((report.replayed_steps, report.captured_by_hand, report.modules.len()), (0, 0, 0));
        (of_fit, report.refusal.clone())
    };
    let (of_fit, why) = why_not(GraphMode::Step);
    assert!(of_fit.replayed_steps > 0 && of_fit.refusal.is_none(), "{of_fit:?}");
    assert_contains!(why.unwrap(), "trainer.graph=step captures training steps; set trainer.graph=modules");
    assert_eq!(why_not(GraphMode::Off), (GraphReport::default(), None));
    let (of_fit, _) = why_not(GraphMode::Modules);
    assert_eq!(of_fit.modules.len(), 2, "of validation");
}
