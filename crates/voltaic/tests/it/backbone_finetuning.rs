//! A pretrained part of a network that is frozen until an epoch.

use std::path::Path;
use std::sync::{Arc, Mutex};

use tempfile::TempDir;
use voltaic::callback::{BackboneFinetuning, BackboneFinetuningConfig, LambdaCallback};

use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::{BatchNorm1d, Forward, Linear, ModuleExt};
use voltaic::optim::{AdamW, Optimizers, ParamGroupSpec};
use voltaic::trainer::{GraphMode, TrainerConfig};
use voltaic::{Module, Tensor};

use crate::checkpoints::{full_checkpoint, resumed};
use crate::probe::{loaders, silent};
use crate::rng::seeded;

#[derive(Module)]
struct Body {
    linear: Linear,
    bn: BatchNorm1d,
}

#[derive(Module)]
struct Net {
    body: Body,
    head: Linear,
    /// Optimizers get what is trained alone.
    #[module(skip)]
    selects: bool,
}

impl Net {
    fn new() -> Self {
        let body = Body { linear: Linear::new(2, 6).unwrap(), bn: BatchNorm1d::new(6).unwrap() };
        Self { body, head: Linear::new(6, 2).unwrap(), selects: false }
    }
}

impl LightningModule for Net {
    type Batch = Tensor;

    fn training_step(&self, x: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let hidden = self.body.bn.forward(&self.body.linear.forward(x)?)?.relu();
        Ok(self.head.forward(&hidden)?.square().mean(tch::Kind::Float))
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        let all = self.named_parameters().into_iter();
        let trained = all.filter(|(_, weight)| !self.selects || weight.requires_grad());
        Ok(Optimizers::new(AdamW::new(0.01)).groups([ParamGroupSpec::new(trained.collect::<Vec<_>>())]))
    }
}

/// State of the module after each epoch.
type States = Vec<Vec<(String, Tensor)>>;

fn state(module: &dyn Module) -> Vec<(String, Tensor)> {
    let copy = |(name, tensor): (String, Tensor)| (name, tensor.to_device(tch::Device::Cpu).copy());
    module.state_dict().into_iter().map(copy).collect()
}

/// Three epochs of six batches with checkpoints after the third batch of each, or what is left of them.
fn run(
    (accelerator, graph): (&str, GraphMode),
    train_bn: bool,
    folder: &Path,
    from: Option<&Path>,
) -> States {
    let states = Arc::new(Mutex::new(Vec::new()));
    let (own, to) = (states.clone(), folder.to_path_buf());
    let watch = LambdaCallback::new()
        .on_train_batch_end(move |ctx, _| {
            if ctx.batch_idx() == 2 {
                let path = to.join(format!("{}.ckpt", ctx.current_epoch()));
                ctx.request_checkpoint(full_checkpoint(path));
            }
            Ok(())
        })
        .on_train_epoch_end(move |_, module| {
            own.lock().unwrap().push(state(module));
            Ok(())
        });
    let _seeded = seeded(7);
    let mut net = Net::new();
    let before = state(&net);
    let config =
        BackboneFinetuningConfig { backbone: "body".into(), unfreeze_backbone_at_epoch: 1, train_bn };
    let builder = silent().accelerator(accelerator).graph(graph).max_epochs(3).limit_val_batches(0);
    let builder = builder.callback(BackboneFinetuning::new(config)).callback(watch);
    resumed(builder, from).fit(&mut net, &mut loaders()).unwrap();
    let states = std::mem::take(&mut *states.lock().unwrap());
    std::iter::once(before).chain(states).collect()
}

/// Names of what an epoch has changed.
fn changed(states: &States, epoch: usize) -> Vec<&str> {
    let pairs = states[epoch].iter().zip(&states[epoch + 1]);
    pairs.filter(|((_, before), (_, after))| before != after).map(|((name, _), _)| name.as_str()).collect()
}

#[test]
fn it_is_trained_from_its_epoch_on() {
    const HEAD: [&str; 2] = ["head.weight", "head.bias"];
    const STATISTICS: [&str; 3] =
        ["body.bn.running_mean", "body.bn.running_var", "body.bn.num_batches_tracked"];
    let on = [("cpu", GraphMode::Off), ("cpu", GraphMode::Step), ("hpu", GraphMode::Step)];
    for (on, train_bn) in on.into_iter().flat_map(|on| [(on, true), (on, false)]) {
        let folder = TempDir::new().unwrap();
        let states = run(on, train_bn, folder.path(), None);
        let first = changed(&states, 0);
        assert!(HEAD.iter().all(|name| first.contains(name)), "{first:?}");
        assert!(!first.contains(&"body.linear.weight"), "{first:?}");
        for name in ["body.bn.weight", "body.bn.bias"].into_iter().chain(STATISTICS) {
            assert_eq!(first.contains(&name), train_bn, "{name}: {first:?}");
        }
        for epoch in [1, 2] {
            let later = changed(&states, epoch);
            assert!(STATISTICS.iter().all(|name| later.contains(name)), "{later:?}");
            assert!(
                ["body.linear.weight", "body.bn.weight"].iter().all(|name| later.contains(name)),
                "{later:?}"
            );
        }
        for epoch in 0..3 {
            let path = folder.path().join(format!("{epoch}.ckpt"));
            let other = run(on, train_bn, TempDir::new().unwrap().path(), Some(&path));
            assert_eq!(other.last(), states.last(), "{on:?}, resumed in epoch {epoch}");
        }
    }
}

#[test]
fn a_recipe_names_it() {
    let fails = |backbone: &str, selects| {
        let text = format!(
            r#"{{"callbacks": [{{"class_path": "BackboneFinetuning", "init_args": {{"backbone": "{backbone}"}}}}]}}"#
        );
        let config: TrainerConfig = serde_json::from_str(&text).unwrap();
        let _seeded = seeded(7);
        let mut trainer = silent().callbacks(config.callbacks).build().unwrap();
        trainer.fit(&mut Net { selects, ..Net::new() }, &mut loaders()).unwrap_err().to_string()
    };
    let error = fails("bodi", false);
    assert_contains!(error, r#"BackboneFinetuning.backbone: "bodi" is no module of"#, "body, head");
    let error = fails("body", true);
    assert_contains!(
        error,
        "no optimizer has body.linear.weight",
        "from epoch 10 on",
        "configure_optimizers"
    );
}

#[test]
fn what_was_frozen_before_stays_frozen() {
    let fit = |freezes: fn(&str) -> bool| {
        let _seeded = seeded(7);
        let mut net = Net::new();
        let all = net.named_parameters().into_iter();
        all.filter(|(fqn, _)| freezes(fqn)).for_each(|(_, weight)| drop(weight.set_requires_grad(false)));
        let before = state(&net);
        let config = BackboneFinetuningConfig {
            backbone: "body".into(),
            unfreeze_backbone_at_epoch: 1,
            ..Default::default()
        };
        let builder = silent().max_epochs(2).limit_val_batches(0).callback(BackboneFinetuning::new(config));
        builder.build().unwrap().fit(&mut net, &mut loaders()).map_err(|error| error.to_string())?;
        Ok::<_, String>(vec![before, state(&net)])
    };
    let states = fit(|fqn| fqn == "body.linear.weight").unwrap();
    let changed = changed(&states, 0);
    assert!(!changed.contains(&"body.linear.weight"), "{changed:?}");
    assert!(changed.contains(&"body.linear.bias"), "{changed:?}");
    let error = fit(|fqn| fqn.starts_with("body.")).unwrap_err();
    assert_contains!(error, r#"nothing in "body" is trained"#, "set_requires_grad(true)");
}
