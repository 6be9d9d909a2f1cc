//! The ways of the specification to train and to test by graphs, on real digits: each gives the bits of a run without.

use std::cell::RefCell;
use std::fs;
use std::path::Path;

use tch::{Kind, Tensor};
use voltaic::data::{DataLoader, Loaders, Mnist, MnistSplit};
use voltaic::graph::{
    GraphedModule, HpuGraph, ModuleCacher, WrapOptions, graph, make_graphed_callables, wrap_in_hpu_graph,
};
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::functional::{accuracy, cross_entropy};
use voltaic::nn::{Flatten, Forward, Linear, ModuleExt, Relu, Sequential};
use voltaic::optim::{AdamW, Optimizers};
use voltaic::trainer::{Trainer, TrainerBuilder};
use voltaic::{Device, Module, ffi};

use crate::support::{CPU, HPU, bits, start};

const BATCH: i64 = 200;

fn perceptron() -> Sequential {
    ffi::manual_seed(7).unwrap();
    let net = Sequential::new()
        .add(Flatten::default())
        .add(Linear::new(784, 128).unwrap())
        .add(Relu)
        .add(Linear::new(128, 10).unwrap());
    net.to_device(Device::Hpu(0)).unwrap();
    net
}

/// Trains and tests any network in the plain way.
#[derive(Module)]
struct Plain<N: Forward> {
    net: N,
}

fn plain<N: Forward>(net: N) -> Plain<N> {
    Plain { net }
}

fn log_test(ctx: &mut StepContext, logits: &Tensor, y: &Tensor) -> anyhow::Result<()> {
    ctx.log("test_loss", cross_entropy(logits, y)?);
    ctx.log("test_acc", accuracy(logits, y)?);
    Ok(())
}

impl<N: Forward> LightningModule for Plain<N> {
    type Batch = (Tensor, Tensor);

    fn training_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let loss = cross_entropy(&self.net.forward(x)?, y)?;
        ctx.log("train_loss", &loss);
        Ok(loss)
    }

    fn test_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        log_test(ctx, &self.net.forward(x)?, y)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(AdamW::new(1e-2).into())
    }
}

/// Captures by hand and replays: the whole training step with its optimizer, and the test step.
#[derive(Module)]
struct ByHand {
    net: Sequential,
    #[module(skip)]
    state: RefCell<ByHandState>,
}

struct ByHandState {
    graph: HpuGraph,
    x: Tensor,
    y: Tensor,
    logits: Tensor,
    loss: Tensor,
}

fn by_hand() -> ByHand {
    let state = ByHandState {
        graph: HpuGraph::new(),
        x: Tensor::zeros([BATCH, 1, 28, 28], (Kind::Float, HPU)),
        y: Tensor::zeros([BATCH], (Kind::Int64, HPU)),
        logits: Tensor::new(),
        loss: Tensor::new(),
    };
    ByHand { net: perceptron(), state: RefCell::new(state) }
}

impl LightningModule for ByHand {
    type Batch = (Tensor, Tensor);

    fn automatic_optimization(&self) -> bool {
        false
    }

    fn training_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let state = &mut *self.state.borrow_mut();
        state.x.copy_(x);
        state.y.copy_(y);
        match ctx.batch_idx() {
            // the first batch warms up, the second one is captured
            batch_idx @ 0..=1 => {
                let capture = (batch_idx == 1).then(|| graph(&mut state.graph)).transpose()?;
                ctx.optimizer(0)?.zero_grad()?;
                let loss = cross_entropy(&self.net.forward(&state.x)?, &state.y)?;
                ctx.manual_backward(&loss)?;
                ctx.optimizer(0)?.step()?;
                state.loss = loss.detach();
                drop(loss);
                capture.map_or(Ok(()), voltaic::graph::CaptureGuard::end)?;
            }
            _ => state.graph.replay()?,
        }
        ctx.log("train_loss", &state.loss);
        Ok(ctx.no_loss())
    }

    fn test_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        let state = &mut *self.state.borrow_mut();
        state.x.copy_(x);
        state.y.copy_(y);
        if ctx.batch_idx() == 0 {
            let capture = graph(&mut state.graph)?;
            state.logits = self.net.forward(&state.x)?;
            capture.end()?;
        } else {
            state.graph.replay()?;
        }
        log_test(ctx, &state.logits, &state.y)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(AdamW::new(1e-2).into())
    }
}

fn loader(split: MnistSplit) -> DataLoader<(Tensor, Tensor)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/digits");
    let digits = Mnist::open(&folder, split).unwrap();
    DataLoader::new(digits).batch_size(BATCH as usize).drop_last(true).build().unwrap()
}

fn trainer(root: &Path) -> TrainerBuilder {
    Trainer::builder()
        .accelerator("hpu")
        .devices(1)
        .default_root_dir(root)
        .max_epochs(1)
        .limit_train_batches(6)
        .limit_test_batches(4)
        .log_every_n_steps(1_u64)
        .enable_progress_bar(false)
        .enable_model_summary(false)
        .enable_checkpointing(false)
}

/// The losses of six steps and the weights after them.
fn fit<M: LightningModule<Batch = (Tensor, Tensor)>>(mut module: M) -> (String, Vec<Vec<u8>>) {
    let root = tempfile::tempdir().unwrap();
    let mut trainer = trainer(root.path()).build().unwrap();
    trainer.fit(&mut module, &mut Loaders::new().train(loader(MnistSplit::Train))).unwrap();
    let metrics = fs::read_to_string(root.path().join("lightning_logs/version_0/metrics.csv")).unwrap();
    let losses = metrics.lines().map(|line| line.rsplit(',').next().unwrap_or_default()).collect::<Vec<_>>();
    (losses.join(" "), module.state_dict().iter().map(|(_, tensor)| bits(tensor)).collect())
}

/// Loss and accuracy over four batches.
fn test<M: LightningModule<Batch = (Tensor, Tensor)>>(mut module: M) -> Vec<(String, f64)> {
    let root = tempfile::tempdir().unwrap();
    let mut trainer = trainer(root.path()).build().unwrap();
    let metrics = trainer.test(&mut module, &mut Loaders::new().test(loader(MnistSplit::Test))).unwrap();
    metrics.into_iter().collect()
}

#[test]
fn training_is_the_same_in_all_modes() {
    let _rng = start();
    let sample = Tensor::rand([BATCH, 1, 28, 28], (Kind::Float, CPU)).to_device(HPU);
    let without = fit(plain(perceptron()));
    assert_eq!(without.0.split_whitespace().count(), 7, "a header and six losses: {}", without.0);
    assert!(without == fit(by_hand()), "captured and replayed by hand");
    let callable = make_graphed_callables(perceptron(), &sample, 1).unwrap();
    assert!(without == fit(plain(callable)), "make_graphed_callables");
    let cached = ModuleCacher::new(10).wrap(perceptron());
    assert!(without == fit(plain(cached)), "ModuleCacher");
}

#[test]
fn testing_is_the_same_in_all_modes() {
    let _rng = start();
    let without = test(plain(perceptron()));
    assert_eq!(without.len(), 2, "{without:?}");
    assert_eq!(without, test(by_hand()), "captured and replayed by hand");
    let options = WrapOptions { disable_tensor_cache: true, ..WrapOptions::default() };
    let wrapped: GraphedModule<_> = wrap_in_hpu_graph(perceptron(), options);
    assert_eq!(without, test(plain(wrapped)), "wrap_in_hpu_graph");
}
