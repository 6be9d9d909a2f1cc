//! Optimizers whose steps are captured by hand.

use std::cell::Cell;

use tch::{Kind, Tensor};
use voltaic::data::Loaders;
use voltaic::graph::{HpuGraph, StaticTensor};
use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::nn::{Forward, Linear};
use voltaic::optim::{
    AdamW, BuildOptimizer, Optimizer, OptimizerState, Optimizers, ParamGroup, ParamGroupSpec, Sgd,
};
use voltaic::trainer::GraphMode;
use voltaic::{Device, Module};

use crate::graph_pitfalls::{regression, trainer};
use crate::support::{bits, start};

/// Captures its first step, with that of the optimizer.
#[derive(Module)]
struct FirstUse {
    fc: Linear,
    graph: HpuGraph,
    optimizer: String,
}

/// An optimizer of a user's own, which makes its state at its first step.
struct OwnMomentum {
    inner: Box<dyn Optimizer>,
    momentum: Option<Tensor>,
}

impl Optimizer for OwnMomentum {
    fn name(&self) -> &'static str {
        "OwnMomentum"
    }

    fn step(&mut self) -> voltaic::Result<()> {
        let _no_grad = tch::no_grad_guard();
        let param = self.inner.param_groups()[0].params()[0].1.tensor().shallow_clone();
        let momentum = match self.momentum.take() {
            Some(momentum) => momentum,
            None => param.f_zeros_like()?,
        };
        let momentum = self.momentum.insert(momentum);
        let _ = momentum.f_mul_scalar_(0.9)?.f_add_(&param.grad())?;
        let _ = param.shallow_clone().f_sub_(&momentum.f_mul_scalar(0.1)?)?;
        Ok(())
    }

    fn zero_grad(&mut self) -> voltaic::Result<()> {
        self.inner.zero_grad()
    }

    fn param_groups(&self) -> &[ParamGroup] {
        self.inner.param_groups()
    }

    fn param_groups_mut(&mut self) -> &mut [ParamGroup] {
        self.inner.param_groups_mut()
    }

    fn state_dict(&self) -> OptimizerState {
        let momentum =
            self.momentum.iter().map(|tensor| ("momentum.fc.weight".to_owned(), tensor.shallow_clone()));
        OptimizerState { tensors: momentum.collect(), groups: self.inner.state_dict().groups }
    }

    fn load_state_dict(&mut self, state: OptimizerState) -> voltaic::Result<()> {
        self.momentum = state.tensors.into_iter().next().map(|(_, tensor)| tensor);
        Ok(())
    }
}

/// Builds one.
struct Own;

impl BuildOptimizer for Own {
    fn name(&self) -> &'static str {
        "OwnMomentum"
    }

    fn build(&self, groups: Vec<ParamGroupSpec>) -> voltaic::Result<Box<dyn Optimizer>> {
        Ok(Box::new(OwnMomentum { inner: Sgd::new(0.1).build(groups)?, momentum: None }))
    }
}

lightning_module!(
    FirstUse,
    (Tensor, Tensor),
    manual(|net| if net.optimizer == "own" { Optimizers::new(Own) } else { AdamW::new(0.1).into() }),
    |net, (x, y), ctx| {
        net.graph.capture(|| {
            ctx.optimizer(0)?.zero_grad()?;
            let loss = net.fc.forward(x)?.f_sub(y)?.f_square()?.f_mean(Kind::Float)?;
            ctx.manual_backward(&loss)?;
            ctx.optimizer(0)?.step()?;
            Ok(loss.f_detach()?)
        })
    }
);

#[test]
fn state_that_is_made_in_a_capture_is_refused_by_name() {
    let _rng = start();
    let fit = |optimizer: &str| {
        let mut net = FirstUse {
            fc: Linear::new(3, 2).unwrap(),
            graph: HpuGraph::new(),
            optimizer: optimizer.to_owned(),
        };
        trainer(Device::Cpu, GraphMode::Off).fit(&mut net, &mut Loaders::new().train(regression()))
    };
    fit("AdamW").unwrap();
    let error = fit("own").unwrap_err().to_string();
    assert!(error.contains("`momentum.fc.weight` of optimizer OwnMomentum was made while"), "{error}");
    assert!(error.contains("run one step before it"), "{error}");
}

#[test]
fn graphs_of_steps_with_manual_optimization_are_refused() {
    let _rng = start();
    let mut net =
        FirstUse { fc: Linear::new(3, 2).unwrap(), graph: HpuGraph::new(), optimizer: String::new() };
    let result = trainer(Device::Cpu, GraphMode::Step).fit(&mut net, &mut Loaders::new().train(regression()));
    assert_error!(result, "trainer.graph", "manual optimization");
}

/// What changes in the optimizer after three steps.
#[derive(Clone, Copy, PartialEq)]
enum Change {
    Nothing,
    Rate,
    WeightDecay,
}

/// Captures its first step and replays it.
#[derive(Module)]
struct Replays {
    fc: Linear,
    graph: HpuGraph,
    x: StaticTensor,
    y: StaticTensor,
    own: bool,
    #[module(skip)]
    change: Change,
    /// Without a graph.
    is_plain: bool,
    /// Once more when something has changed.
    captures_again: bool,
    #[module(skip)]
    captured: Cell<u32>,
}

impl LightningModule for Replays {
    type Batch = (Tensor, Tensor);

    fn automatic_optimization(&self) -> bool {
        false
    }

    fn training_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        if ctx.batch_idx() == 0 {
            self.x.set(&x.f_zeros_like()?)?;
            self.y.set(&y.f_zeros_like()?)?;
        }
        self.x.copy_(x)?;
        self.y.copy_(y)?;
        let is_due = ctx.batch_idx() == 0 || (self.captures_again && ctx.batch_idx() == 3);
        if !self.is_plain && !is_due {
            self.graph.replay()?;
            return Ok(ctx.no_loss());
        }
        let mut step = || {
            ctx.optimizer(0)?.zero_grad()?;
            let loss =
                self.fc.forward(&self.x.get())?.f_sub(&self.y.get())?.f_square()?.f_mean(Kind::Float)?;
            ctx.manual_backward(&loss)?;
            Ok(ctx.optimizer(0)?.step()?)
        };
        if self.is_plain {
            step()?;
        } else {
            self.graph.reset();
            self.graph.capture(step)?;
            self.captured.set(self.captured.get() + 1);
        }
        Ok(ctx.no_loss())
    }

    fn on_train_batch_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        if ctx.batch_idx() == 3 {
            for group in ctx.optimizers_mut().iter_mut().flat_map(|optimizer| optimizer.param_groups_mut()) {
                match self.change {
                    Change::Nothing => {}
                    Change::Rate => group.lr *= 0.5,
                    Change::WeightDecay => group.weight_decay = 0.5,
                }
            }
        }
        Ok(())
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(if self.own { Optimizers::new(Plain) } else { AdamW::new(0.1).into() })
    }
}

/// An optimizer of a user's own without state, whose replays follow nothing.
struct OwnSgd(Box<dyn Optimizer>);

impl Optimizer for OwnSgd {
    fn name(&self) -> &'static str {
        "OwnSgd"
    }

    fn step(&mut self) -> voltaic::Result<()> {
        let _no_grad = tch::no_grad_guard();
        for group in self.0.param_groups() {
            for (_, param) in group.params() {
                let update = param.grad().f_mul_scalar(group.lr)?;
                let _ = param.tensor().shallow_clone().f_sub_(&update)?;
            }
        }
        Ok(())
    }

    as_in!(0);
}

/// Builds one.
struct Plain;

impl BuildOptimizer for Plain {
    fn name(&self) -> &'static str {
        "OwnSgd"
    }

    fn build(&self, groups: Vec<ParamGroupSpec>) -> voltaic::Result<Box<dyn Optimizer>> {
        Ok(Box::new(OwnSgd(Sgd::new(0.1).build(groups)?)))
    }
}

/// The weights after two epochs, or why there are none.
fn fit(own: bool, change: Change, is_plain: bool, captures_again: bool) -> Result<Vec<u8>, String> {
    voltaic::ffi::manual_seed(5).unwrap();
    let mut net = Replays {
        fc: Linear::new(3, 2).unwrap(),
        graph: HpuGraph::new(),
        x: StaticTensor::default(),
        y: StaticTensor::default(),
        own,
        change,
        is_plain,
        captures_again,
        captured: Cell::new(0),
    };
    let result =
        trainer(Device::Hpu(0), GraphMode::Off).fit(&mut net, &mut Loaders::new().train(regression()));
    result.map(|()| bits(net.fc.weight.tensor())).map_err(|error| error.to_string())
}

#[test]
fn a_replay_follows_its_optimizer_or_is_refused() {
    let _rng = start();
    for own in [false, true] {
        for change in [Change::Nothing, Change::Rate, Change::WeightDecay] {
            let is_followed = change == Change::Nothing || (change == Change::Rate && !own);
            let replayed = fit(own, change, false, false);
            if own && change == Change::WeightDecay {
                continue; // it has none
            }
            if is_followed {
                assert_eq!(replayed, fit(own, change, true, false), "own {own}");
            } else {
                let error = replayed.unwrap_err();
                let name = if own { "OwnSgd" } else { "AdamW" };
                assert_contains!(&error, &format!("optimizer 0 ({name})"), "capture again");
            }
            let again = fit(own, change, false, true);
            assert_eq!(again, fit(own, change, true, false), "captured again, own {own}");
        }
    }
}
