//! Every order of `Fabric`'s calls trains what a loop in plain tch does in float64, with each strategy and with a scaled loss, or is
//! refused.

use std::path::Path;

use tempfile::TempDir;
use voltaic::nn::{Callable, Forward, ModuleExt, Parameter};
use voltaic::optim::{GradientClip, Optimizers, ParamGroupSpec, Sgd};
use voltaic::precision::disable_casts;
use voltaic::strategy::StrategyConfig;
use voltaic::trainer::{Fabric, FabricModule, FabricOptimizers};
use voltaic::{Kind, Module, Tensor};

use crate::ddp::{FOLDER, folder_of_parent, numbers};
use crate::probe::{has_hpu, own_process, plays, text_of};

const LR: f64 = 0.25;

/// `x * weight + bias`.
#[derive(Module)]
struct Part {
    weight: Parameter,
    bias: Parameter,
}

impl Forward for Part {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        Ok(x * self.weight.tensor() + self.bias.tensor())
    }
}

#[derive(Module)]
struct Net {
    generator: Part,
    critic: Part,
}

impl Net {
    fn new() -> Self {
        let part = |phase: f64| Part {
            weight: Parameter::new(numbers(&[6], phase)),
            bias: Parameter::new(numbers(&[6], phase + 1.0)),
        };
        Self { generator: part(0.0), critic: part(2.0) }
    }

    fn optimizers(&self) -> Optimizers {
        let of = |part: &Part, name: &str| {
            let names = [format!("{name}.weight"), format!("{name}.bias")];
            let parameters = [part.weight.clone(), part.bias.clone()];
            Optimizers::new(Sgd::new(LR))
                .groups([ParamGroupSpec::new(names.into_iter().zip(parameters).collect::<Vec<_>>())])
        };
        of(&self.generator, "generator").and(of(&self.critic, "critic"))
    }
}

/// What a loss is computed from.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Pass {
    /// The critic's view of what is generated.
    Both,
    Critic,
    /// Gradients of the critic that are infinite when they are scaled, and are left out.
    Huge,
}
use Pass::{Both, Critic, Huge};

impl Pass {
    fn loss(self, x: &Tensor, part: impl Fn(usize, &Tensor) -> Tensor) -> Tensor {
        match self {
            Both => part(1, &part(0, x)).square().mean(None::<Kind>),
            Critic => (part(1, x) - 1.0).square().mean(None::<Kind>),
            Huge => part(1, x).mean(None::<Kind>) * 1e36,
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Call {
    Forward(Pass),
    ForwardWithin(Pass),
    /// From the oldest loss.
    Backward,
    /// The same within `no_backward_sync`.
    BackwardWithin,
    /// From the newest loss.
    BackwardNewest,
    BackwardNewestWithin,
    Clip,
    ClipOf(usize),
    Step,
    StepOf(usize),
    LeftOut(usize),
    Zero,
    /// By the optimizer itself.
    ZeroOf(usize),
    Toggle(usize),
    Untoggle,
    SaveAndLoad,
}
use Call::*;

/// What the last call of a script is.
#[derive(Clone, Copy, PartialEq)]
enum End {
    Done,
    Refused(&'static str),
    /// With a scaled loss only.
    ScaledRefused(&'static str),
}
use End::{Done, Refused, ScaledRefused};

const OPEN: End = Refused("an accumulation window is open");
const ADDED: End = ScaledRefused("were added to by another backward pass");
const ONE: [Call; 2] = [Forward(Both), Backward];

/// The calls before which one round was done, and how the last of them ends.
const SCRIPTS: &[(&[Call], End)] = &[
    (&[Clip, Step, Zero, Forward(Both), Backward, Step], Done),
    (&[Zero, Forward(Both), BackwardWithin, Forward(Both), Backward, Clip, Step, Zero], Done),
    (&[Forward(Both), BackwardWithin, Step], OPEN),
    (&[Forward(Both), BackwardWithin, StepOf(1)], OPEN),
    (&[Forward(Both), BackwardWithin, Clip], OPEN),
    (&[Forward(Both), BackwardWithin, ClipOf(0)], OPEN),
    (&[Forward(Both), BackwardWithin, SaveAndLoad, Step], OPEN),
    (&[Zero, Forward(Both), BackwardWithin, SaveAndLoad, Forward(Both), Backward, Step], Done),
    (&[Step, Zero, ForwardWithin(Both), Backward, Step], Done),
    (&[Step, Zero, Forward(Both), Forward(Both), BackwardWithin, Backward, Step], Done),
    (&[Step, Zero, Forward(Both), Forward(Both), BackwardNewestWithin, Backward, Step], Done),
    (&[Step, Zero, Forward(Both), Forward(Critic), BackwardNewestWithin, BackwardNewest, Step], Done),
    (&[Clip, Forward(Both), Backward, Step], ADDED),
    (&[Clip, Forward(Both), Backward, StepOf(1)], ADDED),
    (&[Clip, Forward(Both), Backward, Clip], ADDED),
    (&[Step, Forward(Both), Backward, Step], ADDED),
    (&[StepOf(1), Forward(Both), Backward, StepOf(0)], Done),
    (&[Clip, Clip, Step], Done),
    (&[Clip, ZeroOf(0), ZeroOf(1), Forward(Both), Backward, Step], Done),
    (&[Clip, SaveAndLoad, Step], Done),
    (&[Step, SaveAndLoad, Step], Done),
    (&[Step, SaveAndLoad, Forward(Both), Backward, Step], ADDED),
    (&[Step, SaveAndLoad, Zero, Forward(Both), Backward, Step], Done),
    (&[ClipOf(1), StepOf(0), StepOf(1), Zero, Forward(Both), Backward, StepOf(1), StepOf(0)], Done),
    // a GAN that toggles, and one that does not
    (
        &[
            Zero,
            Toggle(0),
            Forward(Both),
            Backward,
            StepOf(0),
            Zero,
            Untoggle,
            Toggle(1),
            Forward(Critic),
            Backward,
            ClipOf(1),
            StepOf(1),
            Zero,
            Untoggle,
            Toggle(0),
            Forward(Both),
            Backward,
            StepOf(0),
        ],
        Done,
    ),
    (
        &[
            StepOf(0),
            ZeroOf(1),
            Forward(Critic),
            Backward,
            StepOf(1),
            ZeroOf(0),
            Forward(Both),
            Backward,
            StepOf(0),
            ZeroOf(1),
            Forward(Critic),
            Backward,
            StepOf(1),
        ],
        Done,
    ),
    // the scale is another one when the first optimizer is stepped
    (
        &[
            Zero,
            Toggle(0),
            Forward(Both),
            Backward,
            Untoggle,
            Toggle(1),
            Forward(Huge),
            Backward,
            LeftOut(1),
            StepOf(0),
        ],
        Done,
    ),
];

fn input(rank: usize, number: usize) -> Tensor {
    numbers(&[3, 6], 0.7 * number as f64) * (1.0 + rank as f64)
}

/// The same in plain tch.
struct Oracle {
    /// Weight and bias of both parts.
    leaves: Vec<Tensor>,
    losses: Vec<Tensor>,
    num_passes: usize,
    ranks: usize,
    toggled: Option<usize>,
}

impl Oracle {
    fn new(ranks: usize) -> Self {
        let leaf = |tensor: &Tensor| tensor.to_kind(Kind::Double).set_requires_grad(true);
        let leaves =
            Net::new().parameters().iter().map(|parameter| leaf(&parameter.tensor().detach())).collect();
        Self { leaves, losses: Vec::new(), num_passes: 0, ranks, toggled: None }
    }

    fn forward(&mut self, pass: Pass) {
        let part = |index: usize, x: &Tensor| x * &self.leaves[2 * index] + &self.leaves[2 * index + 1];
        let of_rank = |rank| pass.loss(&input(rank, self.num_passes).to_kind(Kind::Double), part);
        let sum = (1..self.ranks).fold(of_rank(0), |sum, rank| sum + of_rank(rank));
        self.losses.push(sum / self.ranks as f64);
        self.num_passes += 1;
    }

    fn of(&self, index: usize) -> impl Iterator<Item = &Tensor> {
        self.leaves[2 * index..2 * index + 2].iter()
    }

    fn backward(&mut self, place: usize) {
        let before: Vec<Tensor> = self.leaves.iter().map(|leaf| leaf.grad()).collect();
        let before: Vec<_> =
            before.iter().map(|g| if g.defined() { g.copy() } else { Tensor::new() }).collect();
        self.losses.remove(place).backward();
        let Some(toggled) = self.toggled else { return };
        for (leaf, before) in self.of(1 - toggled).zip(&before[2 - 2 * toggled..]) {
            let mut grad = leaf.grad();
            if before.defined() {
                grad.copy_(before)
            } else {
                let _ = grad.zero_();
            }
        }
    }

    fn clip(&self, index: usize) {
        let norm = self.of(index).map(|leaf| f64::try_from(leaf.grad().square().sum(None::<Kind>)).unwrap());
        let factor = (MAX_NORM / (norm.sum::<f64>().sqrt() + 1e-6)).min(1.0);
        self.of(index).for_each(|leaf| drop(leaf.grad().g_mul_scalar_(factor)));
    }

    fn step(&self, index: usize) {
        let _no_grad = tch::no_grad_guard();
        for leaf in self.of(index).filter(|leaf| leaf.grad().defined()) {
            let _ = leaf.shallow_clone().g_sub_(&(leaf.grad() * LR));
        }
    }

    fn zero(&mut self, index: usize) {
        self.of(index).for_each(|leaf| leaf.shallow_clone().zero_grad());
    }

    fn call(&mut self, call: Call) {
        match call {
            Forward(pass) | ForwardWithin(pass) => self.forward(pass),
            Backward | BackwardWithin => self.backward(0),
            BackwardNewest | BackwardNewestWithin => self.backward(self.losses.len() - 1),
            Clip => (0..2).for_each(|index| self.clip(index)),
            ClipOf(index) => self.clip(index),
            Step => (0..2).for_each(|index| self.step(index)),
            StepOf(index) => self.step(index),
            Zero => (0..2).for_each(|index| self.zero(index)),
            ZeroOf(index) => self.zero(index),
            Toggle(index) => self.toggled = Some(index),
            Untoggle => self.toggled = None,
            LeftOut(_) | SaveAndLoad => {}
        }
    }
}

const MAX_NORM: f64 = 0.2;

/// What a script works on.
struct Loop<'a> {
    fabric: &'a mut Fabric,
    net: &'a mut FabricModule<Net>,
    optimizers: &'a mut FabricOptimizers,
    losses: Vec<Tensor>,
    num_passes: usize,
    folder: &'a Path,
}

impl Loop<'_> {
    fn forward(&mut self, pass: Pass) -> voltaic::Result<()> {
        let x = input(self.fabric.world().rank, self.num_passes).to_device(self.net.critic.weight.device());
        self.num_passes += 1;
        let device = self.fabric.device();
        let loss = self.fabric.forward(self.net, |net| {
            let parts = [&net.generator, &net.critic];
            let _float32 = disable_casts(device)?; // a scale of a power of two changes no bit then
            Ok(pass.loss(&x, |index, x| parts[index].call(x).unwrap()))
        })?;
        self.losses.push(loss);
        Ok(())
    }

    fn backward(&mut self, place: usize) -> voltaic::Result<()> {
        let loss = self.losses.remove(place);
        self.fabric.backward(self.net, &loss)
    }

    fn within(&mut self, body: impl FnOnce(&mut Loop) -> voltaic::Result<()>) -> voltaic::Result<()> {
        let Loop { fabric, net, optimizers, losses, num_passes, folder } = self;
        fabric.no_backward_sync(true, |fabric| {
            let losses_before = std::mem::take(losses);
            let mut own =
                Loop { fabric, net, optimizers, losses: losses_before, num_passes: *num_passes, folder };
            let done = body(&mut own);
            (*losses, *num_passes) = (own.losses, own.num_passes);
            done
        })
    }

    fn call(&mut self, call: Call) -> voltaic::Result<bool> {
        let newest = self.losses.len().saturating_sub(1);
        let done = match call {
            Forward(pass) => self.forward(pass),
            ForwardWithin(pass) => self.within(|own| own.forward(pass)),
            Backward => self.backward(0),
            BackwardWithin => self.within(|own| own.backward(0)),
            BackwardNewest => self.backward(newest),
            BackwardNewestWithin => self.within(|own| own.backward(newest)),
            Clip => self.fabric.clip_gradients(self.optimizers, GradientClip::Norm(MAX_NORM)).map(drop),
            ClipOf(index) => {
                let clip = GradientClip::Norm(MAX_NORM);
                self.fabric.clip_gradients_of(self.optimizers, index, clip).map(drop)
            }
            Step => return self.fabric.step(self.optimizers),
            StepOf(index) | LeftOut(index) => return self.fabric.step_optimizer(self.optimizers, index),
            Zero => self.optimizers.zero_grad(),
            ZeroOf(index) => self.optimizers.zero_grad_of(index),
            Toggle(index) => self.fabric.toggle_optimizer(self.net, self.optimizers, index),
            Untoggle => {
                self.fabric.untoggle_optimizer();
                Ok(())
            }
            SaveAndLoad => {
                let path = self.folder.join("between.ckpt");
                self.fabric.save(&path, (self.net, self.optimizers), &1)?;
                self.fabric.load::<_, i32>(&path, (self.net, self.optimizers)).map(drop)
            }
        };
        done.map(|()| true)
    }
}

fn run(strategy: &str, devices: i64, precision: &str, folder: &Path) {
    let mut fabric = Fabric::builder()
        .accelerator("hpu")
        .devices(devices)
        .strategy(StrategyConfig::from(strategy))
        .precision(precision)
        .default_root_dir(folder)
        .launch()
        .unwrap();
    let net = Net::new();
    let optimizers = net.optimizers();
    let (mut net, mut optimizers) = fabric.setup(net, optimizers).unwrap();
    let start = folder.join(format!("start_{precision}.ckpt"));
    fabric.save(&start, (&mut net, &mut optimizers), &0).unwrap();
    let is_scaled = precision == "16-mixed";
    let has_huge = |calls: &[Call]| calls.iter().any(|call| matches!(call, LeftOut(_)));
    for (calls, end) in SCRIPTS.iter().filter(|(calls, _)| is_scaled || !has_huge(calls)) {
        let at = format!("{strategy} {precision} {calls:?}");
        fabric.load::<_, i32>(&start, (&mut net, &mut optimizers)).unwrap();
        let mut oracle = Oracle::new(devices as usize);
        let mut own = Loop {
            fabric: &mut fabric,
            net: &mut net,
            optimizers: &mut optimizers,
            losses: Vec::new(),
            num_passes: 0,
            folder,
        };
        let steps_before = own.fabric.global_step();
        let refusal = match end {
            Refused(text) => Some(text),
            ScaledRefused(text) if is_scaled => Some(text),
            _ => None,
        };
        let num_refused = usize::from(refusal.is_some());
        let all: Vec<Call> = ONE.iter().chain(*calls).copied().collect();
        let (done, last) = all.split_at(all.len() - num_refused);
        for call in done {
            let is_done = own.call(*call).unwrap_or_else(|error| panic!("{at}, {call:?}: {error}"));
            assert_eq!(is_done, !matches!(call, LeftOut(_)), "{at}, {call:?}");
            oracle.call(*call);
        }
        for call in last {
            let error = own.call(*call).expect_err(&at).to_string();
            assert!(refusal.is_some_and(|text| error.contains(text)), "{at}: {error}");
        }
        let num_steps = done.iter().filter(|call| matches!(call, Step | StepOf(_) | LeftOut(_))).count();
        assert_eq!(own.fabric.global_step() - steps_before, num_steps as u64, "{at}");
        own.fabric.untoggle_optimizer();
        for ((name, own), expected) in net.state_dict().iter().zip(&oracle.leaves) {
            let expected = expected.detach();
            let differs = f64::try_from(
                (own.to_device(tch::Device::Cpu).to_kind(Kind::Double) - &expected).abs().max(),
            )
            .unwrap();
            // some tens of roundings of float32, of values up to 100
            assert!(
                differs <= 1e-5 * (1.0 + f64::try_from(expected.abs().max()).unwrap()),
                "{at}: {name} {differs}"
            );
        }
    }
    fabric.finish(net).unwrap();
}

#[test]
fn every_order_of_calls_trains_as_plain_tch_or_is_refused() {
    let strategies =
        [("hpu_single", 1), ("ddp_find_unused_parameters_true", 2), ("zero1", 2), ("zero2", 2), ("zero3", 2)];
    for (strategy, devices) in strategies {
        if plays(strategy) {
            for precision in ["32-true", "16-mixed"] {
                run(strategy, devices, precision, &folder_of_parent());
            }
            return println!("\nall scripts are done");
        }
    }
    if std::env::var_os(FOLDER).is_some() || !has_hpu() {
        return; // a loss is scaled on accelerators alone
    }
    for (strategy, _) in strategies {
        let folder = TempDir::new().unwrap();
        let mut process = own_process(strategy);
        process.env(FOLDER, folder.path()).env("VOLTAIC_HPU", "emulator").env("VOLTAIC_HPU_DEVICES", "2");
        let text = text_of(&process.output().unwrap());
        assert!(text.contains("all scripts are done"), "{strategy}: {text}");
    }
}
