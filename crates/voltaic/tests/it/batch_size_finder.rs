//! The search for a batch size, on an emulated HPU whose memory is small.

use std::sync::{Arc, Mutex};

use serde_json::json;
use voltaic::callback::LambdaCallback;
use voltaic::data::{DataLoader, Loaders, Stage, TensorDataset};
use voltaic::metrics::{MeanMetric, Metric};
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::{Forward, Linear, ModuleExt};
use voltaic::optim::{AdamW, Optimizers};
use voltaic::trainer::{BatchSizeFinderConfig, BatchSizeSearch, Trainer, TrainerBuilder};
use voltaic::{Kind, Module, Tensor};

use crate::probe::{loaders, own_process, plays, silent, text_of};
use crate::rng::seeded;

const WIDTH: i64 = 128;
const SAMPLES: i64 = 8192;

/// Layers whose activations backward needs.
#[derive(Module)]
struct Deep {
    layers: Vec<Linear>,
    seen: MeanMetric,
}

impl Deep {
    fn new() -> Self {
        let layers = (0..6).map(|_| Linear::new(WIDTH, WIDTH).unwrap()).collect();
        Self { layers, seen: MeanMetric::new() }
    }

    fn output(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        let mut hidden = x.shallow_clone();
        for layer in &self.layers {
            hidden = layer.forward(&hidden)?.f_relu()?;
        }
        Ok(hidden)
    }

    fn weights(&self) -> Vec<f32> {
        let flat: Vec<Tensor> = self.parameters().iter().map(|p| p.detach().flatten(0, -1)).collect();
        Vec::try_from(Tensor::cat(&flat, 0).to_device(tch::Device::Cpu)).unwrap()
    }
}

impl LightningModule for Deep {
    type Batch = Tensor;

    fn training_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let loss = self.output(batch)?.f_mean(Kind::Float)?;
        self.seen.update(&loss, 1.0)?;
        ctx.log("seen", &self.seen);
        Ok(loss)
    }

    fn validation_step(&self, batch: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<()> {
        let _ = self.output(batch)?;
        Ok(())
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        AdamW::new(0.01).into()
    }
}

fn loader(batch_size: usize) -> DataLoader<Tensor> {
    let x = Tensor::randn([SAMPLES, WIDTH], (Kind::Float, tch::Device::Cpu));
    DataLoader::new(TensorDataset::new(x).unwrap()).batch_size(batch_size).shuffle(true).build().unwrap()
}

fn on_hpu() -> TrainerBuilder {
    silent().accelerator("hpu").devices(1)
}

/// How a few steps with batches of this size end.
fn fit_with(batch_size: usize) -> voltaic::Result<()> {
    let builder = on_hpu().max_steps(3).limit_val_batches(0);
    builder.build()?.fit(&mut Deep::new(), &mut Loaders::new().train(loader(batch_size)))
}

fn search_on_hpu() {
    let trainer = on_hpu().max_epochs(1).build().unwrap();
    let mut net = Deep::new();
    let mut data = Loaders::new().train(loader(1)).val(loader(1));
    let before = net.weights();
    let find = |net: &mut Deep, data: &mut Loaders<Tensor>, stage, mode| {
        let config = BatchSizeFinderConfig { mode, margin: 0.0, ..BatchSizeFinderConfig::default() };
        trainer.scale_batch_size(net, data, stage, &config).unwrap()
    };
    let power = find(&mut net, &mut data, Stage::Fit, BatchSizeSearch::Power);
    let exact = find(&mut net, &mut data, Stage::Fit, BatchSizeSearch::Binsearch);
    println!("found {power} and {exact}");
    assert!(power.is_power_of_two() && (16..SAMPLES as usize / 2).contains(&power), "{power}");
    assert!(power <= exact && exact < 2 * power, "{power} {exact}");
    assert_eq!(net.weights(), before, "the search leaves the weights alone");
    assert!(
        net.seen.state().named().unwrap().is_empty() && net.parameters().iter().all(|p| !p.grad().defined())
    );
    fit_with(power).unwrap();
    let error = fit_with(2 * power).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    assert!(error.to_string().contains("raise the limit of the emulated device"), "{error}");
    // validation keeps no activations
    let validated = find(&mut net, &mut data, Stage::Validate, BatchSizeSearch::Power);
    assert!(validated > power, "{validated}");

    // the callback: the fit that follows uses what was found, and only its training loader
    let sizes = Arc::new(Mutex::new(Vec::new()));
    let (of_train, of_val) = (sizes.clone(), sizes.clone());
    let note = LambdaCallback::new()
        .on_train_batch_end(move |ctx, _| {
            of_train.lock().unwrap().push(("train", ctx.batch_size().unwrap()));
            Ok(())
        })
        .on_validation_batch_end(move |ctx, _| {
            of_val.lock().unwrap().push(("val", ctx.batch_size().unwrap()));
            Ok(())
        });
    let config = json!({
        "accelerator": "hpu", "devices": 1, "max_steps": 2, "limit_val_batches": 1, "logger": false,
        "num_sanity_val_steps": 0, "enable_checkpointing": false, "enable_progress_bar": false,
        "enable_model_summary": false, "val_check_interval": 2, "check_val_every_n_epoch": null,
        "callbacks": [{"class_path": "BatchSizeFinder", "init_args": {"mode": "power"}}],
    });
    let builder = Trainer::builder().config(serde_json::from_value(config).unwrap()).callback(note);
    let mut trainer = builder.build().unwrap();
    trainer.fit(&mut net, &mut data).unwrap();
    assert_eq!(trainer.found_batch_size(), Some(power));
    assert_eq!(*sizes.lock().unwrap(), [("train", power), ("train", power), ("val", 1)]);
}

#[test]
fn memory_decides_and_everything_is_as_before() {
    if plays("search") {
        return search_on_hpu();
    }
    let output = own_process("search").env("VOLTAIC_HPU_MEMORY", "16MiB").output().unwrap();
    assert!(text_of(&output).contains("found "));
}

#[test]
fn other_errors_and_batches_made_elsewhere_are_reported() {
    let _rng = seeded(1);
    let trainer = silent().build().unwrap();
    let config = BatchSizeFinderConfig { max_trials: 3, ..BatchSizeFinderConfig::default() };
    let mut net = crate::probe::Probe {
        train: Box::new(|_, _, _| anyhow::bail!("no luck")),
        ..crate::probe::Probe::default()
    };
    assert_error!(trainer.scale_batch_size(&mut net, &mut loaders(), Stage::Fit, &config), "no luck");
    let x = Tensor::ones([4, 2], (Kind::Float, tch::Device::Cpu));
    let ready = DataLoader::new(TensorDataset::new(x).unwrap()).unbatched().build().unwrap();
    let mut net = crate::probe::Probe::default();
    let mut data = Loaders::new().train(ready);
    let error = trainer.scale_batch_size(&mut net, &mut data, Stage::Fit, &config).unwrap_err();
    assert!(error.to_string().contains("DataLoader.batch_size: cannot be changed"), "{error}");
    // no more than all samples
    let found = trainer.scale_batch_size(&mut net, &mut loaders(), Stage::Fit, &config).unwrap();
    assert_eq!(found, 8, "three trials of 12 samples");
    let many = BatchSizeFinderConfig::default();
    assert_eq!(trainer.scale_batch_size(&mut net, &mut loaders(), Stage::Fit, &many).unwrap(), 12);
    let error = silent().config(
        serde_json::from_value(json!({"callbacks": [
            {"class_path": "BatchSizeFinder", "init_args": {"max_trials": 0}}
        ]}))
        .unwrap(),
    );
    assert_error!(error.build(), "trainer.callbacks.0.max_trials: 0; use a number from 1");
}
