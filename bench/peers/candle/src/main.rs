//! The perceptron and the conv net in candle, on the CPU, and what a GPT generates.
//!
//! Version 0.11.1 computes a wrong gradient of `max_pool2d`: its conv net takes the time that it takes, but learns
//! something else.

mod gpt;

use anyhow::bail;
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{AdamW, Conv2d, Dropout, Linear, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use measure::generate::GenerateJob;
use measure::{Job, StepClock};

const BATCH: usize = 64;
const NUM_BATCHES: usize = 8;

fn main() -> anyhow::Result<()> {
    if let Some(job) = GenerateJob::from_args()? {
        return gpt::run(&job);
    }
    let job = Job::from_args()?;
    if job.variant != "plain" {
        bail!("variant: there is no {}; use plain", job.variant);
    }
    if job.precision != "32-true" {
        bail!("precision: there is no {}; use 32-true", job.precision);
    }
    let variables = VarMap::new();
    let builder = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    // candle has AdamW only; without decay it is Adam
    let (net, weight_decay): (Box<dyn Network>, f64) = match job.workload.as_str() {
        "mlp" => (Box::new(Mlp::new(&builder)?), 0.01),
        "cnn" => (Box::new(ConvNet::new(&builder)?), 0.0),
        other => bail!("workload: {other} is not written for candle; use mlp or cnn"),
    };
    let params = ParamsAdamW { lr: 1e-3, weight_decay, ..ParamsAdamW::default() };
    train(&job, net.as_ref(), AdamW::new(variables.all_vars(), params)?)
}

trait Network {
    fn forward(&self, images: &Tensor) -> Result<Tensor>;
}

fn train(job: &Job, net: &dyn Network, mut optimizer: AdamW) -> anyhow::Result<()> {
    let batch = |_| {
        let images = Tensor::rand(0f32, 1., (BATCH, 1, 28, 28), &Device::Cpu)?;
        let labels = Tensor::rand(0f32, 10., BATCH, &Device::Cpu)?.to_dtype(DType::U32)?;
        Ok((images, labels))
    };
    let batches = (0..NUM_BATCHES).map(batch).collect::<Result<Vec<(Tensor, Tensor)>>>()?;
    let (mut clock, mut losses) = (StepClock::default(), Vec::new());
    for step in 0..job.total_steps() {
        clock.tick();
        let (images, labels) = &batches[step % NUM_BATCHES];
        let loss = candle_nn::loss::cross_entropy(&net.forward(images)?, labels)?;
        optimizer.backward_step(&loss)?;
        losses.push(loss.detach());
    }
    let losses = losses.iter().map(|loss| Ok(f64::from(loss.to_scalar::<f32>()?))).collect::<Result<_>>()?;
    clock.print_report(job, losses, candle_core::utils::get_num_threads(), None)
}

struct Mlp {
    fc1: Linear,
    fc2: Linear,
}

impl Mlp {
    fn new(builder: &VarBuilder) -> Result<Self> {
        Ok(Self {
            fc1: candle_nn::linear(784, 256, builder.pp("fc1"))?,
            fc2: candle_nn::linear(256, 10, builder.pp("fc2"))?,
        })
    }
}

impl Network for Mlp {
    fn forward(&self, images: &Tensor) -> Result<Tensor> {
        self.fc2.forward(&self.fc1.forward(&images.flatten_from(1)?)?.relu()?)
    }
}

struct ConvNet {
    conv1: Conv2d,
    conv2: Conv2d,
    dropout1: Dropout,
    dropout2: Dropout,
    fc1: Linear,
    fc2: Linear,
}

impl ConvNet {
    fn new(builder: &VarBuilder) -> Result<Self> {
        Ok(Self {
            conv1: candle_nn::conv2d(1, 32, 3, Default::default(), builder.pp("conv1"))?,
            conv2: candle_nn::conv2d(32, 64, 3, Default::default(), builder.pp("conv2"))?,
            dropout1: Dropout::new(0.25),
            dropout2: Dropout::new(0.5),
            fc1: candle_nn::linear(64 * 12 * 12, 128, builder.pp("fc1"))?,
            fc2: candle_nn::linear(128, 10, builder.pp("fc2"))?,
        })
    }
}

impl Network for ConvNet {
    fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let x = self.conv2.forward(&self.conv1.forward(images)?.relu()?)?.relu()?;
        let x = self.dropout1.forward(&x.max_pool2d(2)?, true)?.flatten_from(1)?;
        self.fc2.forward(&self.dropout2.forward(&self.fc1.forward(&x)?.relu()?, true)?)
    }
}
