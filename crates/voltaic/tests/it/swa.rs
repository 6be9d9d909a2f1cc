//! Stochastic weight averaging against Lightning's; see fixtures/swa/make_fixtures.py.

use std::path::Path;
use std::sync::{Arc, Mutex};

use serde_json::Value;
use tempfile::TempDir;
use voltaic::callback::{
    LambdaCallback, ModelCheckpoint, ModelCheckpointConfig, StochasticWeightAveraging,
    StochasticWeightAveragingConfig,
};
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::{BatchNorm1d, Forward, Linear, ModuleExt};
use voltaic::optim::{Interval, LrSchedulerSpec, Optimizers, Sgd, StepLr};
use voltaic::{Kind, Module, Tensor};

use crate::checkpoints::resumed;
use crate::probe::{LearningRates, Probe, files, loaders, silent};
use crate::rng::seeded;

#[derive(Module)]
struct Net {
    fc1: Linear,
    bn: Option<BatchNorm1d>,
    fc2: Linear,
}

impl Net {
    fn new(first: &Value) -> Self {
        let net = Self {
            fc1: Linear::new(4, 3).unwrap(),
            bn: first.get("bn.weight").is_some().then(|| BatchNorm1d::new(3).unwrap()),
            fc2: Linear::new(3, 1).unwrap(),
        };
        let state: Vec<(String, Tensor)> = net.state_dict();
        let _no_grad = tch::no_grad_guard();
        for (name, mut tensor) in state {
            let numbers: Vec<f64> = serde_json::from_value(first[&name].clone()).unwrap();
            tensor.copy_(&Tensor::from_slice(&numbers).reshape_as(&tensor));
        }
        net
    }

    fn numbers(&self) -> Vec<(String, Vec<f64>)> {
        let state = self.state_dict().into_iter();
        state
            .map(|(name, t)| (name, Vec::try_from(t.flatten(0, -1).to_kind(Kind::Double)).unwrap()))
            .collect()
    }
}

impl LightningModule for Net {
    type Batch = (Tensor, Tensor);

    fn training_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let hidden = self.fc1.forward(x)?;
        let hidden = match &self.bn {
            Some(bn) => bn.forward(&hidden)?,
            None => hidden,
        };
        let loss = self.fc2.forward(&hidden.tanh())?.f_mse_loss(y, tch::Reduction::Mean)?;
        ctx.log("train_loss", &loss).on_epoch(true);
        Ok(loss)
    }

    fn validation_step(&self, (x, _): &Self::Batch, _ctx: &mut StepContext) -> anyhow::Result<()> {
        self.bn.as_ref().map_or(Ok(()), |bn| bn.forward(&self.fc1.forward(x)?).map(drop))
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(Optimizers::new(Sgd::new(0.1).momentum(0.9)).scheduler(StepLr::new(2, 0.5)))
    }
}

fn data() -> Loaders<(Tensor, Tensor)> {
    let x = Tensor::arange(48, (Kind::Float, tch::Device::Cpu)).sin().reshape([12, 4]);
    let y = x.sum_dim_intlist(1, true, Kind::Float);
    let loader = DataLoader::new(TensorDataset::new((x, y)).unwrap()).batch_size(4);
    Loaders::new().train(loader.build().unwrap())
}

fn cases() -> Vec<Value> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/swa/swa.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Learning rates of the batches, and the module after fit.
fn fit(case: &Value, saver: Option<ModelCheckpoint>, ckpt: Option<&Path>) -> (Vec<f64>, Net) {
    let config: StochasticWeightAveragingConfig = serde_json::from_value(case["swa"].clone()).unwrap();
    let rates = LearningRates::default();
    let mut builder = silent()
        .max_epochs(6)
        .callback(StochasticWeightAveraging::from_config(config).unwrap())
        .callback(rates.clone());
    if let Some(saver) = saver {
        builder = builder.enable_checkpointing(true).callback(saver);
    }
    let mut trainer = resumed(builder, ckpt);
    let mut net = Net::new(&case["first"]);
    trainer.fit(&mut net, &mut data()).unwrap();
    let rates = std::mem::take(&mut *rates.0.lock().unwrap());
    (rates, net)
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-5 * (1.0 + b.abs())
}

#[test]
fn rates_weights_and_running_statistics_are_lightnings() {
    let _rng = seeded(1);
    for case in cases() {
        let (rates, net) = fit(&case, None, None);
        let expected: Vec<f64> = serde_json::from_value(case["rates"].clone()).unwrap();
        let by_epoch: Vec<f64> = rates.iter().copied().step_by(3).collect();
        assert!(by_epoch.iter().zip(&expected).all(|(a, b)| close(*a, *b)), "{by_epoch:?} {expected:?}");
        assert_eq!(by_epoch.len(), expected.len());
        for (name, numbers) in net.numbers() {
            let expected: Vec<f64> = serde_json::from_value(case["last"][&name].clone()).unwrap();
            let is_close = numbers.iter().zip(&expected).all(|(a, b)| close(*a, *b));
            assert!(is_close && numbers.len() == expected.len(), "{name}: {numbers:?} {expected:?}");
        }
    }
}

#[test]
fn a_resumed_run_has_the_same_average() {
    let _rng = seeded(1);
    for case in cases() {
        // at each step, and at the end of each epoch, after the last of which no batch is left
        for (every_n_train_steps, num_saved) in [(Some(1), 18), (None, 6)] {
            let folder = TempDir::new().unwrap();
            let config = ModelCheckpointConfig {
                dirpath: Some(folder.path().into()),
                save_top_k: -1,
                every_n_train_steps,
                ..Default::default()
            };
            let (rates, whole) = fit(&case, Some(ModelCheckpoint::new(config).unwrap()), None);
            let checkpoints = files(folder.path());
            assert_eq!(checkpoints.len(), num_saved);
            for path in checkpoints {
                let (tail, resumed) = fit(&case, None, Some(&path));
                assert_eq!(tail, rates[18 - tail.len()..], "{}", path.display());
                assert_eq!(resumed.numbers(), whole.numbers(), "{}", path.display());
            }
        }
    }
}

#[test]
fn averages_are_written_and_taken_by_a_function() {
    let root = TempDir::new().unwrap();
    let config: StochasticWeightAveragingConfig =
        serde_json::from_str(r#"{"swa_lrs": 0.5, "swa_epoch_start": 2, "save": true, "device": null}"#)
            .unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let note = seen.clone();
    let swa = StochasticWeightAveraging::from_config(config).unwrap().average_fn(move |average, now, num| {
        note.lock().unwrap().push(num);
        Ok(average.f_maximum(now)?)
    });
    let mut trainer = silent().default_root_dir(root.path()).max_epochs(4).callback(swa).build().unwrap();
    let mut net = Probe::default();
    trainer.fit(&mut net, &mut loaders()).unwrap();
    assert_eq!(*seen.lock().unwrap(), [1, 2]);
    let saved = voltaic::checkpoint::Checkpoint::load(root.path().join("checkpoints/swa.ckpt")).unwrap();
    assert_eq!(Vec::<f32>::try_from(&saved.weights[0].1).unwrap(), net.weights());
}

#[test]
fn what_it_cannot_average_is_named() {
    let fit = |optimizers: fn() -> Optimizers, max_epochs: i64| {
        let swa = StochasticWeightAveraging::new(0.1).unwrap();
        // ends at once if it is not refused
        let stop = LambdaCallback::new().on_train_start(|ctx, _| {
            ctx.request_stop("enough");
            Ok(())
        });
        let mut trainer = silent().max_epochs(max_epochs).callback(swa).callback(stop).build().unwrap();
        let mut net = Probe { optimizers: Box::new(optimizers), ..Probe::default() };
        trainer.fit(&mut net, &mut loaders()).map_err(|error| error.to_string())
    };
    assert_error!(fit(Optimizers::none, 1), "with 0 optimizers and 0 schedules; configure one");
    let one = || Sgd::new(0.1).into();
    assert_error!(fit(one, -1), "swa_epoch_start=0.8 is a part of trainer.max_epochs, which is not limited");
    let by_step = || {
        Optimizers::new(Sgd::new(0.1))
            .scheduler(LrSchedulerSpec::new(StepLr::new(1, 0.5)).interval(Interval::Step))
    };
    assert_eq!(fit(by_step, 1), Ok(()));
}

#[test]
fn layers_that_a_hook_has_frozen_stay_so_after_validation() {
    let _rng = seeded(1);
    let case = &cases()[2];
    let run = |freezes: bool| {
        let freeze = LambdaCallback::new().on_fit_start(move |_, module| {
            module.children_mut(&mut |name, child| child.set_training(name != "bn" || !freezes));
            Ok(())
        });
        let mut net = Net::new(&case["first"]);
        let mut both = data();
        let x = Tensor::ones([4, 4], (Kind::Float, tch::Device::Cpu));
        let y = Tensor::ones([4, 1], (Kind::Float, tch::Device::Cpu));
        both = both.val(DataLoader::new(TensorDataset::new((x, y)).unwrap()).batch_size(4).build().unwrap());
        silent()
            .max_epochs(2)
            .val_check_interval(1)
            .callback(freeze)
            .build()
            .unwrap()
            .fit(&mut net, &mut both)
            .unwrap();
        net.numbers().into_iter().find(|(name, _)| name == "bn.num_batches_tracked").unwrap().1
    };
    assert_eq!((run(false), run(true)), (vec![6.0], vec![0.0]));
}
