//! Runs in float8: by the trainer, on the CPU and on emulated HPUs, resumed, from files, beside bf16-mixed.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use tch::{Kind, Tensor};
use voltaic::Module;
use voltaic::callback::{ModelCheckpoint, ModelCheckpointConfig};
use voltaic::data::{
    DataLoader, DataModule, Loaders, MnistData, MnistDataConfig, MnistSet, ShakespeareData,
    ShakespeareDataConfig, TensorDataset,
};
use voltaic::models::{Classifier, Gpt, GptConfig, LeNet, LeNetConfig, Mlp, MlpConfig};
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::functional::{cross_entropy, mse_loss};
use voltaic::nn::{Callable, Forward, Linear, ModuleExt, te};
use voltaic::optim::{AdamW, CosineAnnealingLr, Interval, LrSchedulerSpec, Optimizers};
use voltaic::precision::HpuPrecisionPlugin;
use voltaic::precision::fp8::{DelayedScaling, Fp8Format, Recipe, fp8_autocast};
use voltaic::trainer::{GraphMode, PluginConfig, TrainerBuilder, seed_everything};

use crate::alone;
use crate::compare::assert_same;
use crate::operators::{CPU, start_hpu};
use crate::silent::silent;

pub type Batch = (Tensor, Tensor);

pub fn waves(size: &[i64], phase: f64) -> Tensor {
    let numel: i64 = size.iter().product();
    (Tensor::arange(numel, (Kind::Double, CPU)) * 12.9898 + phase).sin().to_kind(Kind::Float).reshape(size)
}

/// Two layers that compute in float8 where that holds.
#[derive(Module)]
pub struct Net {
    pub first: te::Linear,
    pub second: te::Linear,
    /// Enters a region by itself.
    pub enters: bool,
}

impl Net {
    pub fn new(enters: bool) -> Self {
        let net =
            Self { first: te::Linear::new(5, 16).unwrap(), second: te::Linear::new(16, 3).unwrap(), enters };
        for (number, parameter) in net.parameters().into_iter().enumerate() {
            parameter.set_data(&(waves(&parameter.size(), number as f64) * 0.3)).unwrap();
        }
        net
    }

    fn loss(&self, (x, y): &Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let _fp8 = match self.enters {
            true => Some(fp8_autocast(true, Some(hybrid().into()))?),
            false => None,
        };
        let out = ctx.graphed(self, x)?;
        Ok(mse_loss(&out.f_to_kind(Kind::Float)?, y)?)
    }
}

impl Forward for Net {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        self.second.call(&self.first.call(x)?.f_relu()?)
    }
}

impl LightningModule for Net {
    type Batch = Batch;

    fn training_step(&self, batch: &Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let loss = self.loss(batch, ctx)?;
        ctx.log("train_loss", &loss);
        Ok(loss)
    }

    fn validation_step(&self, batch: &Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        let loss = self.loss(batch, ctx)?;
        ctx.log("val_loss", loss);
        Ok(())
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        AdamW::new(0.01).into()
    }
}

/// Samples of which every other one is larger.
pub fn loaders(samples: i64, batch: usize) -> Loaders<Batch> {
    let sizes = Tensor::arange(samples, (Kind::Float, CPU)).remainder(2.0) * 9.0 + 1.0;
    let x = waves(&[samples, 5], 3.0) * sizes.reshape([-1, 1]);
    let dataset = TensorDataset::new((x, waves(&[samples, 3], 4.0))).unwrap();
    let val = TensorDataset::new((waves(&[7, 5], 5.0), waves(&[7, 3], 6.0))).unwrap();
    Loaders::new()
        .train(DataLoader::new(dataset).batch_size(batch).build().unwrap())
        .val(DataLoader::new(val).batch_size(4).build().unwrap())
}

pub fn hybrid() -> DelayedScaling {
    DelayedScaling { fp8_format: Fp8Format::Hybrid, amax_history_len: 3, ..DelayedScaling::default() }
}

pub fn plugin(recipe: impl Into<Recipe>, replace_layers: bool) -> PluginConfig {
    HpuPrecisionPlugin { replace_layers, recipe: Some(recipe.into()), ..HpuPrecisionPlugin::new("fp8") }
        .into()
}

/// Weights and scales, on the host.
pub fn left_by(net: &impl Module) -> Vec<(String, Tensor)> {
    let scales = te::fp8_state_dict(net.as_module()).unwrap();
    let all = net.state_dict().into_iter().chain(scales);
    all.map(|(name, tensor)| (name, tensor.to_device(CPU).copy())).collect()
}

pub fn trained(builder: TrainerBuilder) -> Vec<(String, Tensor)> {
    seed_everything(4).unwrap();
    let mut net = Net::new(false);
    builder.build().unwrap().fit(&mut net, &mut loaders(32, 4)).unwrap();
    left_by(&net)
}

fn names(all: &[(String, Tensor)], end: &str) -> usize {
    all.iter().filter(|(name, _)| name.ends_with(end)).count()
}

#[test]
fn an_emulated_hpu_trains_as_the_cpu_and_graphs_as_steps() {
    let _alone = alone();
    start_hpu();
    let of = |accelerator: &str, recipe: DelayedScaling, graph: GraphMode| {
        let builder = silent().max_epochs(2).accelerator(accelerator).devices(1).graph(graph);
        trained(match accelerator {
            "hpu" => builder.plugins([plugin(recipe, false)]),
            _ => builder.precision("fp8"),
        })
    };
    let cpu = of("cpu", DelayedScaling::default(), GraphMode::Off);
    assert_eq!((names(&cpu, "scale_fwd"), names(&cpu, "scale_bwd"), names(&cpu, "scale_hybrid")), (2, 2, 0));
    assert_same("hpu", &of("hpu", DelayedScaling::default(), GraphMode::Off), &cpu);
    for recipe in [DelayedScaling::default(), hybrid()] {
        let hpu = of("hpu", recipe.clone(), GraphMode::Off);
        assert!(
            hpu.iter().any(|(name, scale)| name.ends_with("/scale_bwd") && scale.double_value(&[0]) > 1.0)
        );
        for graph in [GraphMode::Step, GraphMode::Modules] {
            let what = format!("{recipe:?} by {graph}");
            let mut graphed = of("hpu", recipe.clone(), graph);
            // replays do not count passes, which matters with an interval alone
            let counts = |all: &mut Vec<(String, Tensor)>| all.retain(|(name, _)| !name.ends_with("run_cnt"));
            let mut eager = hpu.iter().map(|(name, tensor)| (name.clone(), tensor.copy())).collect();
            counts(&mut graphed);
            counts(&mut eager);
            assert_same(&what, &graphed, &eager);
        }
    }
    assert_same(
        "step on cpu",
        &no_counts(of("cpu", DelayedScaling::default(), GraphMode::Step)),
        &no_counts(cpu),
    );
}

#[test]
fn checkpointed_layers_train_as_others() {
    let _alone = alone();
    start_hpu();
    let run = |checkpointed: &[&str]| {
        let names: Vec<String> = checkpointed.iter().map(|fqn| (*fqn).to_owned()).collect();
        let builder = silent().max_epochs(2).accelerator("hpu").devices(1).plugins([plugin(hybrid(), false)]);
        trained(if names.is_empty() { builder } else { builder.activation_checkpointing(names) })
    };
    let plain = run(&[]);
    for checkpointed in [&["first"][..], &["first", "second"]] {
        assert_same(&format!("{checkpointed:?}"), &run(checkpointed), &plain);
    }
}

pub fn no_counts(mut all: Vec<(String, Tensor)>) -> Vec<(String, Tensor)> {
    all.retain(|(name, _)| !name.ends_with("run_cnt"));
    all
}

/// Full checkpoints after each step.
fn saving(folder: &Path) -> TrainerBuilder {
    let config = ModelCheckpointConfig {
        dirpath: Some(folder.to_path_buf()),
        every_n_train_steps: Some(1),
        save_top_k: -1,
        filename: Some("{step}".to_owned()),
        ..ModelCheckpointConfig::default()
    };
    silent().enable_checkpointing(true).max_epochs(2).callback(ModelCheckpoint::new(config).unwrap())
}

fn checkpoints(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|it| it == "ckpt"))
        .collect();
    found.sort();
    found
}

#[test]
fn a_resumed_run_is_the_uninterrupted_one_bit_for_bit() {
    let _alone = alone();
    start_hpu();
    let folder = tempfile::tempdir().unwrap();
    let build = |builder: TrainerBuilder| {
        builder
            .accelerator("hpu")
            .devices(1)
            .plugins([plugin(DelayedScaling { interval: 3, ..hybrid() }, false)])
    };
    let whole = trained(build(saving(folder.path())));
    let saved = checkpoints(folder.path());
    assert!(saved.len() >= 16, "{saved:?}");
    for path in saved.iter().step_by(3) {
        let mut net = Net::new(false);
        seed_everything(9).unwrap();
        let mut trainer = build(silent().max_epochs(2)).build().unwrap();
        trainer.ckpt_path(path.as_path());
        trainer.fit(&mut net, &mut loaders(32, 4)).unwrap();
        assert_same(&path.display().to_string(), &left_by(&net), &whole);
    }
}

#[test]
fn layers_beside_bf16_mixed_enter_a_region_by_themselves() {
    let _alone = alone();
    start_hpu();
    let run = |enters: bool| {
        seed_everything(4).unwrap();
        let mut net = Net::new(enters);
        let plugin: PluginConfig = HpuPrecisionPlugin::new("bf16-mixed").into();
        let builder = silent().max_epochs(1).accelerator("hpu").devices(1).plugins([plugin]);
        builder.build().unwrap().fit(&mut net, &mut loaders(32, 4)).unwrap();
        left_by(&net)
    };
    let (plain, fp8) = (run(false), run(true));
    assert_eq!((names(&plain, "scale_fwd"), names(&fp8, "scale_fwd")), (0, 2));
    assert!(!plain[0].1.equal(&fp8[0].1));
}

/// A network of plain layers.
#[derive(Module)]
struct Plain {
    fc: Linear,
}

impl LightningModule for Plain {
    type Batch = Batch;

    fn training_step(&self, (x, y): &Batch, _: &mut StepContext) -> anyhow::Result<Tensor> {
        Ok(mse_loss(&self.fc.forward(x)?, y)?)
    }

    fn validation_step(&self, (x, y): &Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        ctx.log("val_loss", mse_loss(&self.fc.forward(x)?, y)?);
        Ok(())
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        AdamW::new(0.01).into()
    }
}

#[test]
fn the_trainer_converts_if_it_is_told_to() {
    let _alone = alone();
    start_hpu();
    let run = |replaces: bool| {
        let mut net = Plain { fc: Linear::new(5, 3).unwrap() };
        let plugin = plugin(DelayedScaling::default(), replaces);
        let builder = silent().max_epochs(1).accelerator("hpu").devices(1).plugins([plugin]);
        builder.build().unwrap().fit(&mut net, &mut loaders(8, 4)).unwrap();
        te::fp8_state_dict(&net).unwrap().len()
    };
    assert!(run(false) == 0 && run(true) > 0);
}

/// Validation losses with bf16-mixed, fp8 by HYBRID, and fp8 by the default recipe, as means over seeds.
fn compared<M: LightningModule, D: DataModule<Batch = M::Batch>>(
    seeds: RangeInclusive<u64>,
    make: impl Fn(&mut D) -> M,
    data: impl Fn() -> D,
    configure: impl Fn(TrainerBuilder) -> TrainerBuilder,
) -> [f64; 3] {
    start_hpu();
    tch::set_num_threads(1); // products are small: two threads wait for each other
    let run = |seed: u64, plugin: PluginConfig| {
        seed_everything(seed).unwrap();
        let mut data = data();
        let mut net = make(&mut data);
        let builder = silent().max_epochs(1).accelerator("hpu").devices(1).plugins([plugin]);
        let mut trainer = configure(builder).build().unwrap();
        trainer.fit(&mut net, &mut data).unwrap();
        trainer.metric("val_loss").unwrap()
    };
    let hybrid = DelayedScaling { fp8_format: Fp8Format::Hybrid, ..DelayedScaling::default() };
    let plugins = [
        HpuPrecisionPlugin::new("bf16-mixed").into(),
        plugin(hybrid, true),
        plugin(DelayedScaling::default(), true),
    ];
    let count = seeds.clone().count() as f64;
    let mut means = [0.0; 3];
    for seed in seeds {
        let losses = plugins.each_ref().map(|plugin| run(seed, plugin.clone()));
        println!(
            "seed {seed}: bf16-mixed {:.4}, HYBRID {:.4}, default {:.4}",
            losses[0], losses[1], losses[2]
        );
        means.iter_mut().zip(losses).for_each(|(mean, loss)| *mean += loss / count);
    }
    means
}

/// That losses are within these parts of that of bf16-mixed.
fn assert_near([bf16, hybrid, default]: [f64; 3], of_hybrid: f64, of_default: f64) {
    assert!((hybrid / bf16 - 1.0).abs() < of_hybrid, "{hybrid} with HYBRID, {bf16} with bf16-mixed");
    assert!((default / bf16 - 1.0).abs() < of_default, "{default} by the default recipe, {bf16}");
}

/// LeNet on the digits that ship, with a learning rate that ends at 0: the last steps no longer move the loss.
#[derive(Module)]
struct Digits {
    net: LeNet,
}

impl LightningModule for Digits {
    type Batch = Batch;

    fn training_step(&self, (x, y): &Batch, _: &mut StepContext) -> anyhow::Result<Tensor> {
        Ok(cross_entropy(&self.net.call(x)?, y)?)
    }

    fn validation_step(&self, (x, y): &Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        ctx.log("val_loss", cross_entropy(&self.net.call(x)?, y)?);
        Ok(())
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        let steps = 10_800_u64.div_ceil(64); // an epoch
        let schedule = LrSchedulerSpec::new(CosineAnnealingLr::new(steps)).interval(Interval::Step);
        Ok(Optimizers::new(AdamW::new(1e-3)).scheduler(schedule))
    }
}

fn digits() -> MnistData {
    MnistData::new(MnistDataConfig { set: MnistSet::Subset, ..MnistDataConfig::default() })
}

fn lenet(seeds: RangeInclusive<u64>) -> [f64; 3] {
    compared(
        seeds,
        |_| Digits { net: LeNet::new(LeNetConfig::default()).unwrap() },
        digits,
        |builder| builder,
    )
}

#[test]
fn a_perceptron_learns_digits_as_with_bf16_mixed() {
    let _alone = alone();
    let make = |_: &mut MnistData| Classifier::new(Mlp::new(MlpConfig::default()).unwrap());
    // from seed to seed the difference has a deviation of 0.6 % with HYBRID: that of the mean is a quarter of the bound
    assert_near(compared(1..=6, make, digits, |builder| builder.limit_train_batches(60)), 0.01, 0.05);
}

#[test]
fn lenet_learns_as_with_bf16_mixed() {
    let _alone = alone();
    // from seed to seed the difference has a deviation of 0.8 % with HYBRID and of 2.3 % by the default recipe: three of them
    assert_near(lenet(7..=7), 0.025, 0.09);
}

#[test]
#[ignore = "a long form, which make stress runs"]
fn lenet_learns_as_with_bf16_mixed_in_the_mean() {
    let _alone = alone();
    assert_near(lenet(1..=7), 0.01, 0.05);
}

#[test]
#[ignore = "a long form, which make stress runs"]
fn gpt_learns_as_with_bf16_mixed() {
    let _alone = alone();
    assert_near(compared(1..=1, tiny_gpt, short_text, |builder| builder), 0.01, 0.05);
}

/// 60 batches of 8.
pub fn short_text() -> ShakespeareData {
    ShakespeareData::new(ShakespeareDataConfig {
        batch_size: 8,
        samples_per_epoch: Some(8 * 60),
        ..ShakespeareDataConfig::default()
    })
}

/// A model of the characters of `data`.
pub fn tiny_gpt(data: &mut ShakespeareData) -> Gpt {
    let vocab_size = data.vocabulary().unwrap().len() as i64;
    Gpt::new(GptConfig { vocab_size, ..GptConfig::tiny() }).unwrap()
}
