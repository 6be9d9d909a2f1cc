//! Weights that are sharded, touched from all sides: none is read or written empty.

use std::path::Path;

use voltaic::callback::{
    Callback, OnExceptionCheckpoint, OnExceptionCheckpointConfig, PredictionWriter, PredictionWriterConfig,
    StochasticWeightAveraging, WriteInterval,
};
use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::nn::{Buffer, Callable, Forward, Linear, ModuleExt, Parameter};
use voltaic::optim::{GradientClip, Optimizer, Optimizers, Sgd, clip_grad_norm, clip_grad_value, grad_norm};
use voltaic::{Kind, Module, Tensor};

use crate::models::{Batch, Small, all_loaders, loaders, numbers};
use crate::ranks::{STAGES, assert_same, folder_of_rank, on_ranks, output, weights};
use crate::shards::staged;

/// Reads and writes weights by hand between steps, as a user does who has never heard of sharded weights.
struct ByHand(Vec<f64>);

impl Callback for ByHand {
    fn on_train_batch_end(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        let _no_grad = tch::no_grad_guard();
        for (index, parameter) in module.parameters().iter().enumerate() {
            self.0.push(parameter.norm().double_value(&[]));
            if ctx.batch_idx() == 1 && index % 2 == 0 {
                let _ = parameter.tensor().shallow_clone().clamp_(-0.05, 0.05);
            }
        }
        for (_, weight) in module.state_dict() {
            self.0.push(weight.sum(Kind::Double).double_value(&[]));
        }
        let _ = tch::no_grad(|| module.parameters()[0].detach().narrow(0, 0, 1).fill_(0.25));
        Ok(())
    }

    fn on_train_end(&mut self, _ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        self.0.push(module.num_parameters(true) as f64);
        Ok(())
    }
}

struct Told(std::sync::Arc<std::sync::Mutex<Vec<f64>>>, ByHand);

impl Callback for Told {
    fn on_train_batch_end(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        self.1.on_train_batch_end(ctx, module)
    }

    fn on_train_end(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        self.1.on_train_end(ctx, module)?;
        self.0.lock().unwrap().append(&mut self.1.0);
        Ok(())
    }
}

/// What is seen and what is written is that of a data-parallel run.
fn by_hand(ranks: usize, folder: &Path) {
    let run = |strategy: &str, precision: &str| {
        let seen = std::sync::Arc::default();
        let builder = staged(ranks, strategy, folder);
        let callback = Told(std::sync::Arc::clone(&seen), ByHand(Vec::new()));
        let builder = builder.precision(precision).max_epochs(1).callback(callback);
        let mut net = Small { has_masters: strategy == "ddp" && precision != "32-true", ..Small::new() };
        builder.build().unwrap().fit(&mut net, &mut loaders(24)).unwrap();
        let seen = seen.lock().unwrap().clone();
        (weights(&net), seen)
    };
    let (expected, expected_seen) = run("ddp", "32-true");
    for stage in STAGES {
        let (own, seen) = run(stage, "32-true");
        assert_same(stage, &own, &expected);
        assert_eq!(seen, expected_seen, "{stage}");
    }
    // master weights follow what was written
    let (expected, expected_seen) = run("zero1", "bf16-true");
    let (own, seen) = run("zero3", "bf16-true");
    assert_same("bf16", &own, &expected);
    assert_eq!(seen, expected_seen, "bf16");
    let first = own.iter().find(|(name, _)| name == "first.weight").unwrap().1.double_value(&[0, 0]);
    assert_eq!(first, 0.25);
}

/// An average of the weights, and the summary.
fn average(ranks: usize, folder: &Path) {
    let run = |strategy: &str| {
        let builder = staged(ranks, strategy, folder);
        let builder = builder.callback(StochasticWeightAveraging::new(0.02).unwrap());
        let mut net = Small::new();
        let mut trainer = builder.enable_model_summary(true).max_epochs(4).build().unwrap();
        trainer.fit(&mut net, &mut all_loaders(24)).unwrap();
        weights(&net)
    };
    let expected = run("ddp");
    for stage in STAGES {
        assert_same(stage, &run(stage), &expected);
    }
}

/// Fails in its third step.
#[derive(Module)]
struct Failing {
    net: Small,
    begun: Buffer,
}

lightning_module!(Failing, Batch, |net| net.net.configure_optimizers(), |net, (x, y), ctx| {
    let _ = net.begun.tensor().shallow_clone().f_add_scalar_(1)?;
    anyhow::ensure!(ctx.batch_idx() < 2, "enough");
    let out = net.net.second.forward(&net.net.first.forward(x)?.relu())?;
    Ok((out - y).square().mean(Kind::Float))
});

/// After a failure a weight that is sharded says so, at once, and nothing waits for ranks that are gone.
fn after_a_failure(ranks: usize, folder: &Path) {
    let begun = Buffer::new(Tensor::zeros([1], (Kind::Int64, tch::Device::Cpu)));
    let mut net = Failing { net: Small::new(), begun };
    let config = OnExceptionCheckpointConfig { dirpath: folder.into(), ..Default::default() };
    let saver = OnExceptionCheckpoint::new(config).unwrap();
    let mut trainer = staged(ranks, "zero3", folder).callback(saver).build().unwrap();
    assert_error!(trainer.fit(&mut net, &mut loaders(24)), "enough");
    let begun = std::time::Instant::now();
    let errors = [
        net.net.first.weight.try_tensor().unwrap_err(),
        net.try_state_dict().unwrap_err(),
        trainer.save_weights(&net, folder.join("empty.ckpt"), None).unwrap_err(),
    ];
    for text in errors.iter().map(ToString::to_string) {
        let says = text.contains("is sharded over the ranks") && text.contains("load the last checkpoint");
        assert!(says, "{text}");
    }
    assert!(begun.elapsed() < std::time::Duration::from_secs(5));
    assert!(!folder.join("empty.ckpt").exists());
    assert!(!folder.join("on_exception.ckpt").exists());
    assert_eq!(net.begun.tensor().int64_value(&[0]), 3, "what no checkpoint needs is not copied, nor undone");
}

/// Takes norms of gradients, and looks at predictions and the summary.
#[derive(Module)]
struct Normed {
    net: Small,
    #[module(skip)]
    is_sharded: bool,
    #[module(skip)]
    norms: std::sync::Mutex<Vec<f64>>,
}

impl LightningModule for Normed {
    type Batch = Batch;

    fn training_step(&self, batch: &Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        self.net.training_step(batch, ctx)
    }

    fn configure_gradient_clipping(
        &self,
        optimizer: &mut dyn Optimizer,
        clip: Option<GradientClip>,
        _ctx: &mut HookContext,
    ) -> anyhow::Result<()> {
        self.norms.lock().unwrap().push(optimizer.grad_norm(2.0)?.double_value(&[]));
        let of_module = self.net.parameters();
        let params = optimizer.param_groups().iter().flat_map(|group| group.params());
        let of_optimizer: Vec<Parameter> = params.map(|(_, sharded)| sharded.clone()).collect();
        for found in [
            grad_norm(&of_module, 2.0).map(drop),
            clip_grad_norm(&of_module, 1e9).map(drop),
            clip_grad_value(&of_module, 1e9),
            grad_norm(&of_optimizer, 2.0).map(drop),
            clip_grad_norm(&of_optimizer, 1e9).map(drop),
        ] {
            let text = found.err().map(|error| error.to_string()).unwrap_or_default();
            assert_eq!(text.contains("the gradients are sharded over the ranks"), self.is_sharded, "{text}");
        }
        clip_grad_value(&of_optimizer, 1e9)?; // of each element by itself
        Ok(clip.map_or(Ok(()), |clip| optimizer.clip(clip).map(drop))?)
    }

    fn predict_step(&self, batch: &Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        self.net.predict_step(batch, ctx)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        self.net.configure_optimizers()
    }
}

/// Norms are those of all ranks or an error, and predictions are written whole.
fn norms_and_predictions(ranks: usize, folder: &Path) {
    let mut found = Vec::new();
    for strategy in ["ddp", "zero1", "zero2", "zero3"] {
        let builder = staged(ranks, strategy, folder);
        let written = folder.join(strategy);
        let config = PredictionWriterConfig {
            output_dir: Some(written.clone()),
            write_interval: WriteInterval::Epoch,
            ..Default::default()
        };
        let writer = PredictionWriter::from(config);
        let mut net =
            Normed { net: Small::new(), is_sharded: strategy != "ddp", norms: std::sync::Mutex::default() };
        let mut trainer = builder.gradient_clip_val(0.1).max_epochs(1).callback(writer).build().unwrap();
        trainer.fit(&mut net, &mut loaders(24)).unwrap();
        trainer.predict(&mut net, &mut all_loaders(8)).unwrap();
        drop(grad_norm(&net.net.parameters(), 2.0).unwrap()); // when the fit is over nothing is sharded
        trainer.world().barrier().unwrap();
        let mut files: Vec<_> =
            std::fs::read_dir(&written).unwrap().map(|file| file.unwrap().path()).collect();
        files.sort();
        let tensors: Vec<_> = files.iter().flat_map(|file| crate::ranks::sorted_file(file)).collect();
        assert!(tensors.iter().any(|(name, tensor)| name.contains("prediction") && tensor.numel() > 0));
        found.push((net.norms.into_inner().unwrap(), tensors));
    }
    let (norms, predictions) = &found[0];
    for (own, of_stage) in &found[1..] {
        assert_eq!(own.len(), norms.len());
        let is_near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-6 * b.abs();
        assert!(own.iter().zip(norms).all(is_near), "{own:?} {norms:?}");
        crate::ranks::assert_within("predictions", of_stage, predictions, 1e-6);
    }
}

on_ranks_tests! {
    two_ranks_touch_weights_by_hand: 2, by_hand;
    two_ranks_average_weights: 2, average;
    two_ranks_know_after_a_failure: 2, after_a_failure;
    two_ranks_take_norms_and_write_predictions: 2, norms_and_predictions;
}

/// The summary of a module whose weights are sharded is that of the whole one.
#[test]
fn the_summary_is_of_whole_weights() {
    const STRATEGY: &str = "VOLTAIC_TEST_STRATEGY";
    let test = "touch::the_summary_is_of_whole_weights";
    if let Some(folder) = folder_of_rank() {
        let strategy = std::env::var(STRATEGY).unwrap();
        let builder = staged(2, &strategy, &folder);
        let mut trainer = builder.enable_model_summary(true).max_epochs(1).build().unwrap();
        return trainer.fit(&mut Small::new(), &mut loaders(24)).unwrap();
    }
    let summary = |strategy: &str| {
        let folder = tempfile::tempdir().unwrap();
        let output = output(test, 2, folder.path(), &[(STRATEGY, strategy)]);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && text.contains("300") && text.contains("first"), "{text}");
        text
    };
    let expected = summary("ddp");
    for stage in STAGES {
        assert_eq!(summary(stage), expected, "{stage}");
    }
}

/// Keeps what it computes with its weight in a field, and returns something else.
#[derive(Module)]
struct Aside {
    weight: Parameter,
    #[module(skip)]
    kept: std::sync::Mutex<Option<Tensor>>,
}

impl Forward for Aside {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        let out = x.f_matmul(&self.weight)?.f_matmul(&self.weight)?; // backward needs the weight
        *self.kept.lock().unwrap() = Some(out.f_square()?.f_mean(Kind::Float)?);
        Ok(x * 2.0)
    }
}

#[derive(Module)]
struct UsesAside {
    aside: Aside,
    out: Linear,
}

lightning_module!(UsesAside, Batch, Sgd::new(0.05), |net, (x, y), _| {
    let doubled = net.aside.call(x)?;
    let aside = net.aside.kept.lock().unwrap().take().unwrap();
    Ok(aside + (net.out.call(&doubled)? - y).square().mean(Kind::Float))
});

/// Weights that are freed after the forward pass, and again needed by what did not leave a module by its outputs.
#[test]
fn a_loss_that_is_kept_aside_is_refused() {
    on_ranks("touch::a_loss_that_is_kept_aside_is_refused", 2, |ranks, folder| {
        let weight = Parameter::new(numbers(&[5, 5], 1.0));
        let aside = Aside { weight, kept: std::sync::Mutex::default() };
        let mut net = UsesAside { aside, out: Linear::new(5, 3).unwrap() };
        let mut trainer = staged(ranks, "zero3", folder).max_epochs(1).build().unwrap();
        let error = trainer.fit(&mut net, &mut loaders(8)).unwrap_err().to_string();
        assert!(error.contains("backward needs a weight that is not in memory"), "{error}");
        assert!(error.contains("return from a module what the loss is computed from"), "{error}");
    });
}

/// Keeps a view of a weight, and reads it in the next step.
#[derive(Module)]
struct Viewed {
    out: Linear,
    #[module(skip)]
    kept: std::sync::Mutex<Option<Tensor>>,
}

lightning_module!(Viewed, Batch, Sgd::new(0.05), |net, (x, y), _| {
    let mut kept = net.kept.lock().unwrap();
    let row = match &*kept {
        Some(row) => row.f_sum(Kind::Float)?,
        None => {
            let row = net.out.weight.tensor().detach().narrow(0, 0, 1);
            kept.insert(row).f_sum(Kind::Float)?
        }
    };
    Ok((net.out.call(x)? - y).square().mean(Kind::Float) + row * 0.0)
});

/// Memory that is freed is not read through what knows of it still.
#[test]
fn a_view_that_is_kept_aside_is_refused() {
    on_ranks("touch::a_view_that_is_kept_aside_is_refused", 2, |ranks, folder| {
        let mut net = Viewed { out: Linear::new(5, 3).unwrap(), kept: std::sync::Mutex::default() };
        let mut trainer = staged(ranks, "zero3", folder).max_epochs(1).build().unwrap();
        assert_error!(trainer.fit(&mut net, &mut loaders(8)), "it is a view of a weight, kept from before");
    });
}
