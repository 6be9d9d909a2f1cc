//! Small networks with what a division could get wrong.

use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::{BatchNorm2d, Callable, Conv2d, Forward, Linear, ModuleExt, Parameter};
use voltaic::optim::{AdamW, ExponentialLr, Interval, LrSchedulerSpec, Optimizers, ParamGroupSpec};
use voltaic::{Kind, Module, Tensor};

pub use crate::random_runs::numbers;

const CPU: tch::Device = tch::Device::Cpu;
pub type Batch = (Tensor, Tensor);

/// Gives parameters the same values everywhere.
pub fn numbered<M: Module>(net: M) -> M {
    for (number, parameter) in net.parameters().into_iter().enumerate() {
        parameter.set_data(&(numbers(&parameter.size(), number as f64) * 0.3)).unwrap();
    }
    net
}

pub fn squares(out: &Tensor, y: &Tensor) -> Tensor {
    (out - y).square().mean(Kind::Float)
}

/// Two layers.
#[derive(Module)]
pub struct Small {
    pub first: Linear,
    pub second: Linear,
    /// The optimizer keeps master weights itself.
    #[module(skip)]
    pub has_masters: bool,
}

impl Small {
    pub fn new() -> Self {
        let (first, second) = (Linear::new(5, 33).unwrap(), Linear::new(33, 3).unwrap());
        numbered(Self { first, second, has_masters: false })
    }
}

impl Small {
    pub fn loss(&self, x: &Tensor, y: &Tensor) -> anyhow::Result<Tensor> {
        let kind = self.first.weight.kind();
        let out = self.second.forward(&self.first.forward(&x.to_kind(kind))?.relu())?;
        Ok(squares(&out.to_kind(Kind::Float), y))
    }
}

impl LightningModule for Small {
    type Batch = Batch;

    fn training_step(&self, (x, y): &Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let loss = self.loss(x, y)?;
        ctx.log("train_loss", &loss).on_epoch(true);
        Ok(loss)
    }

    fn validation_step(&self, batch: &Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        let loss = self.training_step(batch, ctx)?;
        ctx.log("val_loss", &loss).sync_dist(true);
        Ok(())
    }

    fn test_step(&self, (x, y): &Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        let loss = self.loss(x, y)?;
        ctx.log("test_loss", &loss).sync_dist(true);
        Ok(())
    }

    fn predict_step(&self, (x, _): &Batch, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        self.second.forward(&self.first.forward(x)?.relu())
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        AdamW::new(0.01).master_weights(self.has_masters).into()
    }
}

/// Frozen, unused, tied, empty and scalar parameters, some with fewer elements than ranks, in two groups with a schedule.
#[derive(Module)]
pub struct Odd {
    frozen: Linear,
    unused: Linear,
    tied: Linear,
    again: Parameter,
    empty: Parameter,
    scale: Parameter,
    pair: Parameter,
    #[module(skip)]
    step: std::sync::atomic::AtomicU64,
}

impl Odd {
    pub fn new() -> Self {
        let tied = Linear::new(7, 7).unwrap();
        let net = Self {
            frozen: Linear::new(5, 7).unwrap(),
            unused: Linear::new(3, 5).unwrap(),
            again: tied.weight.clone(),
            tied,
            empty: Parameter::new(Tensor::zeros([0, 4], (Kind::Float, CPU))),
            scale: Parameter::new(Tensor::from(1.0_f32)),
            pair: Parameter::new(Tensor::ones([2], (Kind::Float, CPU))),
            step: Default::default(),
        };
        net.frozen.set_requires_grad(false);
        numbered(net)
    }
}

impl LightningModule for Odd {
    type Batch = Batch;

    fn training_step(&self, (x, y): &Batch, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let hidden = self.tied.forward(&self.frozen.forward(x)?)?.relu().matmul(&self.again);
        let out = hidden.narrow(1, 0, 3) * self.scale.tensor()
            + self.pair.sum(Kind::Float)
            + self.empty.sum(Kind::Float);
        let mut loss = squares(&out, y);
        // of use in some steps only
        if self.step.fetch_add(1, std::sync::atomic::Ordering::Relaxed) % 4 == 2 {
            loss += self.unused.forward(&out)?.square().mean(Kind::Float);
        }
        Ok(loss)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        let trained = self.named_parameters().into_iter().filter(|(_, parameter)| parameter.requires_grad());
        let (matrices, others): (Vec<_>, Vec<_>) = trained.partition(|(_, parameter)| parameter.dim() >= 2);
        let groups = [ParamGroupSpec::new(others).weight_decay(0.0), ParamGroupSpec::new(matrices).lr(0.02)];
        let schedule = LrSchedulerSpec::new(ExponentialLr::new(0.9)).interval(Interval::Step);
        Ok(Optimizers::new(AdamW::new(0.01).weight_decay(0.1)).groups(groups).scheduler(schedule))
    }
}

/// A convolution, running statistics, a linear layer.
#[derive(Module)]
pub struct Cnn {
    conv: Conv2d,
    norm: BatchNorm2d,
    out: Linear,
}

impl Cnn {
    pub fn new() -> Self {
        numbered(Self {
            conv: Conv2d::new(1, 5, 3).unwrap(),
            norm: BatchNorm2d::new(5).unwrap(),
            out: Linear::new(5 * 4 * 4, 3).unwrap(),
        })
    }
}

lightning_module!(
    Cnn,
    Batch,
    voltaic::optim::Sgd::new(0.05).momentum(0.9).weight_decay(0.01),
    |net, (x, y), _| {
        let x = x.repeat([1, 8]).narrow(1, 0, 36).view([-1, 1, 6, 6]);
        let x = net.norm.call(&net.conv.call(&x)?)?.relu();
        Ok(squares(&net.out.call(&x.flatten(1, -1))?, y))
    }
);

/// Convolutions whose kernels have the channels last in memory.
#[derive(Module)]
pub struct Kernels {
    first: Conv2d,
    second: Conv2d,
    out: Linear,
}

impl Kernels {
    pub fn new() -> Self {
        let net = numbered(Self {
            first: Conv2d::new(4, 6, 2).unwrap(),
            second: Conv2d::new(6, 8, 2).unwrap(),
            out: Linear::new(8, 3).unwrap(),
        });
        net.to_channels_last().unwrap();
        net
    }

    /// Whether the kernels still are so.
    pub fn are_kept(&self) -> bool {
        [&self.first, &self.second].into_iter().all(|conv| conv.weight.tensor().stride()[1] == 1)
    }
}

lightning_module!(Kernels, Batch, AdamW::new(0.01), |net, (x, y), _| {
    let x = x.repeat([1, 8]).narrow(1, 0, 36).view([-1, 4, 3, 3]);
    let x = net.second.call(&net.first.call(&x)?.relu())?;
    Ok(squares(&net.out.call(&x.flatten(1, -1))?, y))
});

fn data(samples: i64, phase: f64) -> TensorDataset<Batch> {
    TensorDataset::new((numbers(&[samples, 5], phase), numbers(&[samples, 3], phase + 1.0))).unwrap()
}

/// Samples for [`Small`], [`Odd`] and [`Cnn`], which ranks divide.
pub fn loaders(samples: i64) -> Loaders<Batch> {
    let train = DataLoader::new(data(samples, 3.0)).batch_size(2).shuffle(true).seed(0);
    Loaders::new().train(train.build().unwrap())
}

/// With some for the other stages.
pub fn all_loaders(samples: i64) -> Loaders<Batch> {
    let val = || DataLoader::new(data(8, 5.0)).batch_size(2).build().unwrap();
    loaders(samples).val(val()).test(val()).predict(val())
}

/// Tokens for a small GPT.
pub fn tokens(samples: i64) -> Loaders<Batch> {
    let all = (numbers(&[samples, 17], 7.0) * 1000.0).to_kind(Kind::Int64).remainder(61);
    let (x, y) = (all.narrow(1, 0, 16).contiguous(), all.narrow(1, 1, 16).contiguous());
    let train = DataLoader::new(TensorDataset::new((x, y)).unwrap()).batch_size(2);
    Loaders::new().train(train.build().unwrap())
}
