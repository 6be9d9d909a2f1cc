//! The perceptron and the conv net in Burn, on its CPU back end "flex".

use anyhow::bail;
use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig};
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::optim::{AdamConfig, AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Distribution, Int, Tensor};
use measure::{Job, StepClock};

const BATCH: usize = 64;
const NUM_BATCHES: usize = 8;
const LEARNING_RATE: f64 = 1e-3;

fn main() -> anyhow::Result<()> {
    let job = Job::from_args()?;
    if job.variant != "plain" {
        bail!("variant: there is no {}; use plain", job.variant);
    }
    if job.precision != "32-true" {
        bail!("precision: there is no {}; use 32-true", job.precision);
    }
    let device = Device::flex().autodiff();
    device.seed(1);
    match job.workload.as_str() {
        // Burn's own defaults of epsilon and decay are not PyTorch's
        "mlp" => {
            let adamw = AdamWConfig::new().with_epsilon(1e-8).with_weight_decay(0.01).init();
            train(&job, Mlp::new(&device), adamw, &device)
        }
        "cnn" => train(&job, ConvNet::new(&device), AdamConfig::new().with_epsilon(1e-8).init(), &device),
        other => bail!("workload: {other} is not written for Burn; use mlp or cnn"),
    }
}

trait Network: Module {
    fn forward(&self, images: Tensor<4>) -> Tensor<2>;
}

fn train<N: Network>(
    job: &Job,
    mut net: N,
    mut optimizer: ModuleOptimizer,
    device: &Device,
) -> anyhow::Result<()> {
    let cross_entropy: CrossEntropyLoss = CrossEntropyLossConfig::new().init(device);
    let batch = |_| {
        let images = Tensor::<4>::random([BATCH, 1, 28, 28], Distribution::Default, device);
        let labels = Tensor::<1>::random([BATCH], Distribution::Uniform(0.0, 10.0), device).int();
        (images, labels)
    };
    let batches: Vec<(Tensor<4>, Tensor<1, Int>)> = (0..NUM_BATCHES).map(batch).collect();
    let (mut clock, mut losses) = (StepClock::default(), Vec::new());
    for step in 0..job.total_steps() {
        clock.tick();
        let (images, labels) = batches[step % NUM_BATCHES].clone();
        let loss = cross_entropy.forward(net.forward(images), labels);
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        net = optimizer.step(LEARNING_RATE, net, gradients);
        losses.push(loss.detach());
    }
    let losses = losses.into_iter().map(|loss| f64::from(loss.into_scalar::<f32>())).collect();
    let num_threads = std::thread::available_parallelism()?.get();
    clock.print_report(job, losses, rayon_threads().unwrap_or(num_threads), None)
}

/// What Burn's thread pool goes by.
fn rayon_threads() -> Option<usize> {
    std::env::var("RAYON_NUM_THREADS").ok()?.parse().ok()
}

#[derive(Module, Debug)]
struct Mlp {
    fc1: Linear,
    fc2: Linear,
}

impl Mlp {
    fn new(device: &Device) -> Self {
        Self { fc1: LinearConfig::new(784, 256).init(device), fc2: LinearConfig::new(256, 10).init(device) }
    }
}

impl Network for Mlp {
    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        self.fc2.forward(relu(self.fc1.forward(images.flatten(1, 3))))
    }
}

#[derive(Module, Debug)]
struct ConvNet {
    conv1: Conv2d,
    conv2: Conv2d,
    pool: MaxPool2d,
    dropout1: Dropout,
    dropout2: Dropout,
    fc1: Linear,
    fc2: Linear,
}

impl ConvNet {
    fn new(device: &Device) -> Self {
        Self {
            conv1: Conv2dConfig::new([1, 32], [3, 3]).init(device),
            conv2: Conv2dConfig::new([32, 64], [3, 3]).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            dropout1: DropoutConfig::new(0.25).init(),
            dropout2: DropoutConfig::new(0.5).init(),
            fc1: LinearConfig::new(64 * 12 * 12, 128).init(device),
            fc2: LinearConfig::new(128, 10).init(device),
        }
    }
}

impl Network for ConvNet {
    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = relu(self.conv1.forward(images));
        let x = self.pool.forward(relu(self.conv2.forward(x)));
        let x = self.dropout1.forward(x).flatten(1, 3);
        self.fc2.forward(self.dropout2.forward(relu(self.fc1.forward(x))))
    }
}
