//! Weights that are divided, touched from all sides: none is read or written empty.

use std::path::Path;

use voltaic::callback::{Callback, StochasticWeightAveraging};
use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::nn::{Forward, ModuleExt};
use voltaic::optim::Optimizers;
use voltaic::{Kind, Module, Tensor};

use crate::models::{Batch, Small, all_loaders, loaders};
use crate::ranks::{assert_same, on_ranks, silent, weights};
use crate::shards::staged;

/// Reads and writes weights by hand between steps, as a user does who has never heard of divided weights.
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
        let builder =
            if strategy == "ddp" { silent(ranks, "ddp", folder) } else { staged(ranks, strategy, folder) };
        let callback = Told(std::sync::Arc::clone(&seen), ByHand(Vec::new()));
        let builder = builder.precision(precision).max_epochs(1).callback(callback);
        let mut net = Small { has_masters: strategy == "ddp" && precision != "32-true", ..Small::new() };
        builder.build().unwrap().fit(&mut net, &mut loaders(24)).unwrap();
        let seen = seen.lock().unwrap().clone();
        (weights(&net), seen)
    };
    let (expected, expected_seen) = run("ddp", "32-true");
    for stage in ["zero1", "zero2", "zero3"] {
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

#[test]
fn two_ranks_touch_weights_by_hand() {
    on_ranks("touch::two_ranks_touch_weights_by_hand", 2, by_hand);
}

/// An average of the weights, and the summary.
fn average(ranks: usize, folder: &Path) {
    let run = |strategy: &str| {
        let builder =
            if strategy == "ddp" { silent(ranks, "ddp", folder) } else { staged(ranks, strategy, folder) };
        let builder = builder.callback(StochasticWeightAveraging::new(0.02).unwrap());
        let mut net = Small::new();
        let mut trainer = builder.enable_model_summary(true).max_epochs(4).build().unwrap();
        trainer.fit(&mut net, &mut all_loaders(24)).unwrap();
        weights(&net)
    };
    let expected = run("ddp");
    for stage in ["zero1", "zero2", "zero3"] {
        assert_same(stage, &run(stage), &expected);
    }
}

#[test]
fn two_ranks_average_weights() {
    on_ranks("touch::two_ranks_average_weights", 2, average);
}

/// Fails in its third step.
#[derive(Module)]
struct Failing {
    net: Small,
}

impl LightningModule for Failing {
    type Batch = Batch;

    fn training_step(&self, (x, y): &Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        anyhow::ensure!(ctx.batch_idx() < 2, "enough");
        let out = self.net.second.forward(&self.net.first.forward(x)?.relu())?;
        Ok((out - y).square().mean(Kind::Float))
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        self.net.configure_optimizers()
    }
}

/// After a failure a weight that is divided says so, at once, and nothing waits for ranks that are gone.
fn after_a_failure(ranks: usize, folder: &Path) {
    let mut net = Failing { net: Small::new() };
    let mut trainer = staged(ranks, "zero3", folder).build().unwrap();
    let error = trainer.fit(&mut net, &mut loaders(24)).unwrap_err().to_string();
    assert!(error.contains("enough"), "{error}");
    let begun = std::time::Instant::now();
    let errors = [
        net.net.first.weight.try_tensor().unwrap_err(),
        net.try_state_dict().unwrap_err(),
        trainer.save_weights(&net, folder.join("empty.ckpt"), None).unwrap_err(),
    ];
    for text in errors.iter().map(ToString::to_string) {
        let says = text.contains("is divided among the ranks") && text.contains("load the last checkpoint");
        assert!(says, "{text}");
    }
    assert!(begun.elapsed() < std::time::Duration::from_secs(5));
    assert!(!folder.join("empty.ckpt").exists());
}

#[test]
fn two_ranks_know_after_a_failure() {
    on_ranks("touch::two_ranks_know_after_a_failure", 2, after_a_failure);
}
