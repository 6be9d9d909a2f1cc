//! `trainer.graph=modules`: whose graphs the calls by `ctx.graphed` get, and what hooks get of them.

use voltaic::data::Loaders;
use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::nn::Linear;
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
