//! What graphs once did otherwise than the code, without a word.

use std::sync::Mutex;

use tch::{Kind, Tensor};
use voltaic::data::Loaders;
use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::nn::{Buffer, Forward, Linear, ModuleExt, Parameter};
use voltaic::optim::{Lion, Optimizers, Sgd};
use voltaic::trainer::{GraphMode, GraphReport};
use voltaic::{Device, Module, ffi};

use crate::graph_pitfalls::{regression, trainer};
use crate::silent::silent;
use crate::support::{CPU, bits, start};

/// What is peculiar about a network.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Case {
    Plain,
    /// A hook sets a factor in each epoch.
    EpochFactor,
    /// A hook freezes a weight within an epoch.
    Freezes,
    /// A number that a hook sets in each batch, out of sight of the graph, is logged.
    Logs,
    /// The step writes to its batch and cannot be captured.
    WritesBatch,
    /// The step keeps a tensor, which a hook reads.
    Keeps,
    /// The step replaces the memory of a buffer.
    Replaces,
    /// Random numbers as many as there are features.
    Noise,
    /// A parameter without dimensions, by a rule that the kernels have not.
    Scalar,
}

#[derive(Module)]
struct Inner {
    fc: Linear,
    scalar: Parameter,
    buffer: Buffer,
    factor: f64,
    #[module(skip)]
    kept: Mutex<Option<Tensor>>,
    #[module(skip)]
    case: Case,
}

impl Forward for Inner {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        let x = if self.case == Case::Noise { x.f_add(&x.f_randn_like()?)? } else { x.shallow_clone() };
        let out = self.fc.forward(&x)?;
        let mean = out.f_detach()?.f_mean(Kind::Float)?;
        match self.case {
            Case::Keeps => *self.kept.lock().unwrap() = Some(mean),
            Case::Replaces => self.buffer.set_data(&mean)?,
            _ => {}
        }
        Ok((out * self.factor).f_mul(self.scalar.tensor())?)
    }
}

#[derive(Module)]
struct Net {
    inner: Inner,
    #[module(skip)]
    number: Mutex<f64>,
    /// What was seen after each batch.
    #[module(skip)]
    seen: Vec<Vec<u8>>,
    #[module(skip)]
    case: Case,
}

impl LightningModule for Net {
    type Batch = (Tensor, Tensor);

    fn training_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let error = ctx.graphed(&self.inner, x)?.f_sub(y)?;
        if self.case == Case::WritesBatch {
            let _ = y.shallow_clone().f_mul_scalar_(0.5)?;
            let _ = ctx.batch_idx();
        }
        if self.case == Case::Logs {
            ctx.log("number", *self.number.lock().unwrap()).on_step(true);
        }
        Ok(error.f_square()?.f_mean(Kind::Float)?)
    }

    fn on_train_epoch_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        if self.case == Case::EpochFactor {
            self.inner.factor = 1.0 / (1.0 + ctx.current_epoch() as f64);
        }
        Ok(())
    }

    fn on_train_batch_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        *self.number.lock().unwrap() += 1.0;
        if self.case == Case::Freezes && ctx.current_epoch() == 0 {
            let _ = self.inner.fc.weight.set_requires_grad(ctx.batch_idx() < 7);
        }
        // three samples in place of four, so that there are graphs of two kinds
        if ctx.batch_idx() % 2 == 1 {
            let (x, y) = ctx.batch_mut::<(Tensor, Tensor)>()?;
            (*x, *y) = (x.narrow(0, 0, 3), y.narrow(0, 0, 3));
        }
        Ok(())
    }

    fn on_train_batch_end(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        let target = ctx.batch::<(Tensor, Tensor)>()?.1.shallow_clone();
        self.seen.push(bits(&target));
        self.seen.extend(ctx.loss().map(bits));
        self.seen.extend(self.inner.kept.lock().unwrap().as_ref().map(bits));
        self.seen
            .extend(ctx.metric("number_step").or(ctx.metric("number")).map(|n| n.to_le_bytes().to_vec()));
        self.seen.push(bits(self.inner.buffer.tensor()));
        Ok(())
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(if self.case == Case::Scalar { Lion::new(0.01).into() } else { Sgd::new(0.1).into() })
    }
}

/// What was seen, then the weights.
fn run(case: Case, device: Device, graph: GraphMode) -> (Vec<Vec<u8>>, GraphReport) {
    ffi::manual_seed(5).unwrap();
    let scalar = |value: f32| Tensor::from(value);
    let inner = Inner {
        fc: Linear::new(3, 2).unwrap(),
        scalar: Parameter::new(scalar(0.7)),
        buffer: Buffer::new(scalar(0.0)),
        factor: 1.0,
        kept: Mutex::default(),
        case,
    };
    let mut net = Net { inner, number: Mutex::new(0.0), seen: Vec::new(), case };
    let mut trainer = trainer(device, graph);
    ffi::manual_seed(6).unwrap();
    let data = regression();
    ffi::manual_seed(7).unwrap();
    trainer.fit(&mut net, &mut Loaders::new().train(data)).unwrap();
    let mut seen = std::mem::take(&mut net.seen);
    seen.extend(net.state_dict().iter().map(|(_, tensor)| bits(tensor)));
    (seen, trainer.graph_report().clone())
}

fn check(case: Case, modes: &[GraphMode], reason: Option<&str>) {
    for device in [Device::Cpu, Device::Hpu(0)] {
        let (eager, _) = run(case, device, GraphMode::Off);
        for mode in modes {
            let (graphed, report) = run(case, device, *mode);
            let differs = eager.iter().zip(&graphed).position(|(eager, graphed)| eager != graphed);
            assert_eq!(differs, None, "{case:?} on {device} by {mode}: {report:?}");
            if *mode == GraphMode::Step {
                let is_why = |why: &String| reason.is_some_and(|reason| why.contains(reason));
                assert_eq!(report.refusal.as_ref().is_some_and(is_why), reason.is_some(), "{report:?}");
                assert_eq!(report.replayed_steps > 0, reason.is_none(), "{case:?}: {report:?}");
            }
        }
    }
}

const BOTH: [GraphMode; 2] = [GraphMode::Step, GraphMode::Modules];

#[test]
fn a_plain_step_is_replayed() {
    let _rng = start();
    check(Case::Plain, &BOTH, None);
}

#[test]
fn plain_values_that_a_hook_changes_make_other_graphs() {
    let _rng = start();
    check(Case::EpochFactor, &BOTH, None);
}

#[test]
fn a_weight_that_is_frozen_within_an_epoch_makes_another_graph() {
    let _rng = start();
    check(Case::Freezes, &BOTH, None);
}

#[test]
fn numbers_that_are_logged_are_compared() {
    let _rng = start();
    check(Case::Logs, &BOTH, Some("`number`"));
}

#[test]
fn a_batch_is_left_as_a_step_leaves_it_that_cannot_be_captured() {
    let _rng = start();
    check(Case::WritesBatch, &BOTH, Some("batch_idx"));
}

#[test]
fn what_the_code_keeps_is_no_part_of_a_graph() {
    let _rng = start();
    check(Case::Keeps, &BOTH, Some("keeps its result"));
    check(Case::Replaces, &BOTH, Some(""));
}

#[test]
fn operators_that_draw_through_others_draw_from_their_device() {
    let _rng = start();
    check(Case::Noise, &BOTH, None);
}

#[test]
fn a_replayed_rate_is_a_number_to_a_scalar_parameter_too() {
    let _rng = start();
    check(Case::Scalar, &BOTH, None);
}

/// libtorch's kernel for the CPU takes momentum of 16 bits for one of 32.
#[test]
fn momentum_of_16_bits_is_that_of_32_rounded() {
    let _rng = start();
    for kind in [Kind::BFloat16, Kind::Half] {
        for size in [5_i64, 16, 40, 100] {
            let net = Linear::builder(size, 1).bias(false).build().unwrap();
            net.weight.set_data(&Tensor::zeros([1, size], (kind, CPU))).unwrap();
            let mut optimizer =
                Optimizers::from(Sgd::new(1.0).momentum(0.5)).build(&net).unwrap().remove(0).optimizer;
            let grad = Tensor::arange(size, (kind, CPU)).reshape([1, size]);
            for factor in [1.0, 1.5, 1.75] {
                ffi::set_grad(net.weight.leaf(), &grad).unwrap();
                optimizer.step().unwrap();
                let expected = (grad.to_kind(Kind::Float) * factor).to_kind(kind);
                let state = optimizer.state_dict();
                assert!(state.tensors[0].1.equal(&expected), "{kind:?}, {size}: {:?}", state.tensors[0]);
            }
        }
    }
}

/// Steps by hand twice, in mixed precision: the second forward pass must see the weights of the first update.
#[derive(Module)]
struct Twice {
    fc: Linear,
    #[module(skip)]
    losses: Mutex<Vec<f64>>,
}

lightning_module!(Twice, (Tensor, Tensor), manual(Sgd::new(0.1)), |net, (x, y), ctx| {
    for _ in 0..2 {
        ctx.optimizer(0)?.zero_grad()?;
        let loss = net.fc.forward(x)?.f_sub(y)?.f_square()?.f_mean(Kind::Float)?;
        ctx.manual_backward(&loss)?;
        ctx.optimizer(0)?.step()?;
        net.losses.lock().unwrap().push(loss.f_double_value(&[])?);
    }
    Ok(ctx.no_loss())
});

#[test]
fn mixed_precision_sees_the_weights_of_a_step_by_hand() {
    let _rng = start();
    for accelerator in ["cpu", "hpu"] {
        let mut net = Twice { fc: Linear::new(3, 2).unwrap(), losses: Mutex::default() };
        let mut trainer = silent()
            .accelerator(accelerator)
            .devices(1)
            .precision("bf16-mixed")
            .max_steps(2)
            .build()
            .unwrap();
        trainer.fit(&mut net, &mut Loaders::new().train(regression())).unwrap();
        let losses = net.losses.into_inner().unwrap();
        assert!(losses[1] < losses[0], "{accelerator}: {losses:?}");
    }
}
