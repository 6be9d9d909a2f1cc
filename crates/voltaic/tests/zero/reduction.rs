//! How gradients of ranks and batches are put together: DeepSpeed's `TestGradientAllreduceOp`, `TestGradientAllreduceOpTraining` and
//! `TestBF16OptimizerGradReduction`, with their numbers.

use std::path::Path;
use std::sync::Mutex;

use serde_json::{Value, json};
use voltaic::checkpoint::Checkpoint;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::nn::Parameter;
use voltaic::optim::{AdamW, Optimizers, Sgd};
use voltaic::strategy::DeepSpeedStrategy;
use voltaic::trainer::TrainerBuilder;
use voltaic::{Kind, Module, Tensor};

use crate::models::{Batch, Small, numbers};
use crate::ranks::{assert_within, on_ranks, silent, weights};
use crate::resume::Saver;
use crate::shards::SaveAfter;

/// A weight whose gradient is the batch.
#[derive(Module)]
struct Weighted {
    weight: Parameter,
}

impl Weighted {
    fn new() -> Self {
        Self { weight: Parameter::new(Tensor::zeros([2], (Kind::Float, tch::Device::Cpu))) }
    }

    fn values(&self) -> Vec<f64> {
        Vec::<f64>::try_from(self.weight.tensor().to_kind(Kind::Double)).unwrap()
    }
}

lightning_module!(Weighted, Batch, Sgd::new(1.0), |net, (x, _), _| Ok(
    (net.weight.tensor() * x).sum(Kind::Float)
));

/// These rows, one for each batch, which ranks take in turn.
fn rows(rows: &[[f32; 2]]) -> Loaders<Batch> {
    let x = Tensor::from_slice2(rows);
    let data = TensorDataset::new((x.copy(), x)).unwrap();
    Loaders::new().train(DataLoader::new(data).batch_size(1).build().unwrap())
}

fn settings(stage: u64, more: &Value) -> DeepSpeedStrategy {
    let mut all = json!({"zero_allow_untested_optimizer": true, "gradient_clipping": 0, "zero_optimization": {"stage": stage}});
    for (key, value) in more.as_object().unwrap() {
        match (&mut all[key], value) {
            (Value::Object(own), Value::Object(more)) => own.extend(more.clone()),
            (own, more) => *own = more.clone(),
        }
    }
    DeepSpeedStrategy::settings(all)
}

fn builder(ranks: usize, folder: &Path, stage: u64, more: &Value) -> TrainerBuilder {
    silent(ranks, "auto", folder).strategy(settings(stage, more)).max_epochs(1)
}

#[test]
fn gradients_are_averaged_or_summed_however_they_are_scaled() {
    const NAME: &str = "reduction::gradients_are_averaged_or_summed_however_they_are_scaled";
    on_ranks(NAME, 2, |ranks, folder| {
        for stage in [1, 2] {
            for (op, scale) in [("mean", 1.0), ("sum", 2.0)] {
                for (prescales, factor) in [(false, 1.0), (false, 2.0), (true, 1.0)] {
                    let more = json!({
                        "gradient_allreduce_op": op,
                        "prescale_gradients": prescales,
                        "gradient_predivide_factor": factor,
                        "zero_optimization": {"reduce_scatter": false},
                    });
                    let mut net = Weighted::new();
                    let mut trainer = builder(ranks, folder, stage, &more).build().unwrap();
                    trainer.fit(&mut net, &mut rows(&[[1.0, 2.0], [1.0, 2.0]])).unwrap();
                    assert_eq!(net.values(), [-scale, -2.0 * scale], "stage {stage} {more}");
                }
            }
        }
    });
}

/// A small network with losses divided by a number.
#[derive(Module)]
struct Divided {
    net: Small,
    #[module(skip)]
    by: f64,
    #[module(skip)]
    losses: Mutex<Vec<f64>>,
}

lightning_module!(Divided, Batch, AdamW::new(0.01), |net, (x, y), _| {
    let loss = net.net.loss(x, y)?;
    net.losses.lock().unwrap().push(loss.double_value(&[]));
    Ok(loss / net.by)
});

#[test]
fn sums_of_divided_losses_train_as_means() {
    on_ranks("reduction::sums_of_divided_losses_train_as_means", 2, |ranks, folder| {
        for stage in [1, 2] {
            let run = |op: &str, by: f64| {
                let mut net = Divided { net: Small::new(), by, losses: Mutex::default() };
                let data = TensorDataset::new((numbers(&[40, 5], 3.0), numbers(&[40, 3], 4.0))).unwrap();
                let train = DataLoader::new(data).batch_size(4).build().unwrap();
                let more = json!({ "gradient_allreduce_op": op });
                let mut trainer = builder(ranks, folder, stage, &more).build().unwrap();
                trainer.fit(&mut net, &mut Loaders::new().train(train)).unwrap();
                assert_eq!(trainer.global_step(), 5);
                (weights(&net), net.losses.into_inner().unwrap())
            };
            let ((own, losses), (expected, expected_losses)) = (run("sum", 2.0), run("mean", 1.0));
            assert_within(&format!("stage {stage}"), &own, &expected, 1e-5);
            for (own, expected) in losses.iter().zip(&expected_losses) {
                assert!((own - expected).abs() <= 1e-6 + 1e-5 * expected, "{losses:?} {expected_losses:?}");
            }
        }
    });
}

#[test]
fn bfloat16_gradients_are_added_up_in_float32() {
    on_ranks("reduction::bfloat16_gradients_are_added_up_in_float32", 2, |ranks, folder| {
        let run = |stage: u64, more: Value, window: u64, data: &[[f32; 2]]| {
            let mut net = Weighted::new();
            let builder = builder(ranks, folder, stage, &more).accumulate_grad_batches(window);
            builder.build().unwrap().fit(&mut net, &mut rows(data)).unwrap();
            net.values()
        };
        let bf16 = || json!({"bf16": {"enabled": true}});
        let in_float32 = || json!({"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}});
        // small whole numbers: the mean over ranks and batches is exact
        let small = [[1.0, 2.0], [3.0, 4.0], [5.0, -6.0], [7.0, 8.0]];
        assert_eq!(run(1, in_float32(), 2, &small), [-4.0, -2.0]);
        // 256 + 1 is not a bfloat16, but the sum of all is
        let both = |value: f32| [[value, 0.0], [value, 0.0]];
        let large: Vec<[f32; 2]> =
            [256.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0].into_iter().flat_map(both).collect();
        for (stage, more, expected) in [
            (1, bf16(), -32.0),
            (1, in_float32(), -32.5),
            (2, bf16(), -32.0),
            (2, in_float32(), -32.5),
            (3, in_float32(), -32.5),
        ] {
            assert_eq!(run(stage, more.clone(), 8, &large), [expected, 0.0], "stage {stage} {more}");
        }
    });
}

#[test]
fn float32_sums_of_an_open_window_are_in_checkpoints() {
    on_ranks("reduction::float32_sums_of_an_open_window_are_in_checkpoints", 2, |ranks, folder| {
        let more = json!({"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}});
        let builder = || {
            let builder = builder(ranks, folder, 1, &more).accumulate_grad_batches(3_u64).max_epochs(2);
            builder.callback(Saver(folder.to_path_buf()))
        };
        let data = || {
            let data = TensorDataset::new((numbers(&[24, 5], 3.0), numbers(&[24, 3], 4.0))).unwrap();
            Loaders::new().train(DataLoader::new(data).batch_size(2).build().unwrap())
        };
        let mut expected = Small::new();
        builder().build().unwrap().fit(&mut expected, &mut data()).unwrap();
        for batch in [0, 1, 2] {
            let mut net = Small::new();
            let mut resumed = builder().build().unwrap();
            resumed.ckpt_path(folder.join(format!("{batch}.ckpt")));
            resumed.fit(&mut net, &mut data()).unwrap();
            assert_within(&format!("from batch {batch}"), &weights(&net), &weights(&expected), 0.0);
        }
    });
}

#[test]
fn weights_and_states_may_be_bfloat16_alone() {
    on_ranks("reduction::weights_and_states_may_be_bfloat16_alone", 2, |ranks, folder| {
        let data = || {
            let data = TensorDataset::new((numbers(&[24, 5], 3.0), numbers(&[24, 3], 4.0))).unwrap();
            Loaders::new().train(DataLoader::new(data).batch_size(2).build().unwrap())
        };
        // as the same optimizer over weights that nobody keeps in float32
        let mut expected = Small::new();
        let mut ddp = silent(ranks, "ddp", folder).precision("bf16-true").max_epochs(1).build().unwrap();
        ddp.fit(&mut expected, &mut data()).unwrap();
        for stage in 1..=3 {
            let low = json!({"bf16": {"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true},
                             "zero_optimization": {"stage3_param_persistence_threshold": 0}});
            let mut net = Small::new();
            builder(ranks, folder, stage, &low).build().unwrap().fit(&mut net, &mut data()).unwrap();
            assert_within(&format!("stage {stage}"), &weights(&net), &weights(&expected), 0.0);
        }
    });
}

/// AdamW whose states are float32 in any case.
#[derive(Module)]
struct FloatStates {
    net: Small,
}

lightning_module!(
    FloatStates,
    Batch,
    Optimizers::new(AdamW::new(0.01)).with_float32_states(),
    |net, (x, y), _| net.net.loss(x, y)
);

/// DeepSpeed's `bf16_master_weights_and_grads` and `fp16_master_weights_and_grads`: weights and gradients of 16 bits alone, moments in
/// float32; in folders, too.
#[test]
fn master_weights_may_be_of_16_bits_beside_states_in_float32() {
    on_ranks("reduction::master_weights_may_be_of_16_bits_beside_states_in_float32", 2, |ranks, folder| {
        let data = || {
            let data = TensorDataset::new((numbers(&[24, 5], 3.0), numbers(&[24, 3], 4.0))).unwrap();
            Loaders::new().train(DataLoader::new(data).batch_size(2).build().unwrap())
        };
        let bf16 = json!({"enabled": true, "bf16_master_weights_and_grads": true});
        let fp16 = json!({"enabled": true, "fp16_master_weights_and_grads": true, "loss_scale": 1.0});
        for (section, keys, precision, kind) in
            [("bf16", bf16, "bf16-true", Kind::BFloat16), ("fp16", fp16, "16-true", Kind::Half)]
        {
            let mut expected = FloatStates { net: Small::new() };
            let ddp = silent(ranks, "ddp", folder).precision(precision).max_epochs(1);
            ddp.build().unwrap().fit(&mut expected, &mut data()).unwrap();
            let expected = weights(&expected.net);
            for stage in 1..=3 {
                let low =
                    json!({section: keys, "zero_optimization": {"stage3_param_persistence_threshold": 0}});
                let path = folder.join(format!("{section}-{stage}.ckpt"));
                let (what, mut net) = (format!("{section}, stage {stage}"), Small::new());
                let saves = builder(ranks, folder, stage, &low).callback(SaveAfter(2, path.clone()));
                let mut trainer = saves.build().unwrap();
                trainer.fit(&mut net, &mut data()).unwrap();
                assert_within(&what, &weights(&net), &expected, 0.0);
                trainer.world().barrier().unwrap();
                let saved = Checkpoint::load(&path).unwrap();
                assert!(saved.weights.iter().all(|(_, weight)| weight.kind() == kind), "{what}");
                let states = &saved.training.unwrap().optimizers[0];
                let is_float = |(name, state): &(String, Tensor)| {
                    state.kind() == Kind::Float && !name.starts_with("master_param")
                };
                assert!(states.len() == 12 && states.iter().all(is_float), "{what}");
                let mut net = Small::new();
                let mut resumed = builder(ranks, folder, stage, &low).build().unwrap();
                resumed.ckpt_path(&path).fit(&mut net, &mut data()).unwrap();
                assert_within(&format!("{what}, resumed"), &weights(&net), &expected, 0.0);
            }
        }
    });
}
