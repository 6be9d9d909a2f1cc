//! What DeepSpeed's tests assert that the other files do not, with their numbers: `TestZeroToFP32`, `test_zero_user_backward`,
//! `test_zero_coalesce_grad_reduction`, `test_coalesced_collectives`, and lightning-habana's precision of 1e-2 and final loss.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use serde_json::json;
use voltaic::Module;
use voltaic::callback::LambdaCallback;
use voltaic::checkpoint::read_weights;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::nn::{Callable, Parameter};
use voltaic::optim::{AdamW, Interval, LambdaLr, LrSchedulerSpec, Optimizers, Sgd};
use voltaic::strategy::DeepSpeedStrategy;
use voltaic::{Kind, Tensor};

use crate::checkpoints::{full_checkpoint, resumed};
use crate::models::{Batch, Odd, Small, all_loaders, loaders};
use crate::partitioning::Times;
use crate::ranks::{STAGES, assert_same, assert_within, on_ranks, silent, weights};
use crate::shards::{SaveAfter, sorted, staged};

const CPU: (Kind, tch::Device) = (Kind::Float, tch::Device::Cpu);

/// `TestZeroToFP32`: what is exported of a folder is what the module has; frozen parameters, two groups, odd sizes.
fn export(ranks: usize, folder: &Path) {
    for stage in STAGES {
        let path = folder.join(format!("{stage}.ckpt"));
        let mut net = Odd::new();
        let mut trainer =
            staged(ranks, stage, folder).max_epochs(1).callback(SaveAfter(5, path.clone())).build().unwrap();
        trainer.fit(&mut net, &mut loaders(12 * ranks as i64)).unwrap(); // six batches, saved after the last
        let whole = sorted(weights(&net));
        assert_same(stage, &sorted(read_weights(&path).unwrap()), &whole);
        assert!(whole.iter().any(|(name, weight)| name.contains("frozen") && weight.numel() > 0));
        let alone = folder.join(format!("{stage}-weights.ckpt"));
        trainer.save_weights(&net, &alone, None).unwrap();
        assert_same(stage, &sorted(read_weights(&alone).unwrap()), &whole);
    }
}

/// Several backward passes for one step, by hand.
#[derive(Module)]
struct Backwards {
    net: Small,
}

lightning_module!(Backwards, Batch, manual(|net| net.net.configure_optimizers()), |net, (x, y), ctx| {
    ctx.optimizer(0)?.zero_grad()?;
    for scale in [0.5, 0.25, 0.25] {
        ctx.manual_backward(&(net.net.loss(&(x * scale), y)? * scale))?;
    }
    let loss = net.net.loss(x, y)?;
    ctx.manual_backward(&loss)?;
    ctx.optimizer(0)?.step()?;
    Ok(loss)
});

/// `test_zero_user_backward` and `test_zero_coalesce_grad_reduction`: four backward passes before a step are DDP's, within 1e-6.
fn backwards(ranks: usize, folder: &Path) {
    let run = |strategy: &str| {
        let builder = staged(ranks, strategy, folder);
        let mut net = Backwards { net: Small::new() };
        builder.max_epochs(2).build().unwrap().fit(&mut net, &mut loaders(6 * 2 * ranks as i64)).unwrap();
        weights(&net)
    };
    let expected = run("ddp");
    for stage in STAGES {
        // AdamW's first steps make differences in the last bit larger
        assert_within(stage, &run(stage), &expected, 1e-5);
    }
}

/// Weights of 6, 3 and 1 elements whose gradients are `rank * 0, 1, 2, ..`.
#[derive(Module)]
struct Counted {
    six: Parameter,
    three: Parameter,
    one: Parameter,
}

lightning_module!(Counted, Tensor, Sgd::new(1.0), |net, _, ctx| {
    let rank = ctx.process_group().map_or(0, |group| group.rank()) as f64;
    let of = |weight: &Parameter, from: i64, to: i64| {
        (weight.tensor() * Tensor::arange_start(from, to, CPU)).sum(Kind::Float)
    };
    Ok((of(&net.six, 0, 6) + of(&net.three, 6, 9) + of(&net.one, 9, 10)) * rank)
});

/// `test_coalesced_collectives`: the means of what ranks bring, also of a tensor with fewer elements than ranks.
fn means(ranks: usize, folder: &Path) {
    let mean = (0..ranks).sum::<usize>() as f64 / ranks as f64;
    for stage in STAGES {
        let zeros = |len: i64| Parameter::new(Tensor::zeros([len], CPU));
        let mut net = Counted { six: zeros(6), three: zeros(3), one: zeros(1) };
        let data = TensorDataset::new(Tensor::zeros([ranks as i64], CPU)).unwrap();
        let mut data = Loaders::new().train(DataLoader::new(data).build().unwrap());
        staged(ranks, stage, folder).max_epochs(1).build().unwrap().fit(&mut net, &mut data).unwrap();
        for (weight, from, to) in [(&net.six, 0, 6), (&net.three, 6, 9), (&net.one, 9, 10)] {
            let expected = Tensor::arange_start(from, to, CPU) * -mean;
            assert!(weight.tensor().equal(&expected), "{stage}: {:?}, not {expected:?}", weight.tensor());
        }
    }
}

on_ranks_tests! {
    two_ranks_take_means: 2, means;
    four_ranks_take_means: 4, means;
}

/// lightning-habana's `test_hpu_deepspeed_training_accuracy`: the loss in bfloat16 is that of float32 within 1e-2.
fn low_precision(ranks: usize, folder: &Path) {
    for stage in 1..=3 {
        let loss = |precision: &str| {
            // from 2^16 on, float16 would leave out the first steps
            let strategy = DeepSpeedStrategy { initial_scale_power: 8, ..DeepSpeedStrategy::stage(stage) };
            let builder = silent(ranks, "auto", folder).strategy(strategy).precision(precision);
            let mut trainer = builder.max_epochs(2).build().unwrap();
            trainer.fit(&mut Small::new(), &mut all_loaders(24)).unwrap();
            trainer.metric("train_loss_epoch").unwrap()
        };
        let full = loss("32-true");
        for precision in ["bf16-mixed", "16-true"] {
            let low = loss(precision);
            assert!((low - full).abs() < 1e-2, "stage {stage} {precision}: {low}, not {full}");
        }
    }
}

/// Four multiplications of ones by ones, which should become zeros.
#[derive(Module)]
struct Factors {
    layers: Vec<Times>,
    /// The rates of a DeepSpeed whose schedule begins after the first step.
    #[module(skip)]
    older: bool,
    #[module(skip)]
    losses: Mutex<Vec<f64>>,
}

impl LightningModule for Factors {
    type Batch = Batch;

    fn training_step(&self, (x, y): &Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let mut out = x.shallow_clone();
        for layer in &self.layers {
            out = layer.call(&out)?;
        }
        let loss = (y - out).to_kind(Kind::Float).abs().sum(Kind::Float) / 1000.0;
        self.losses.lock().unwrap().push(loss.double_value(&[]));
        ctx.log("train_loss", &loss);
        Ok(loss)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        let optimizers = Optimizers::new(AdamW::new(0.001));
        if !self.older {
            return Ok(optimizers);
        }
        let factors = [1.0, 20.0, 27.5, 35.0, 42.5];
        let schedule = LrSchedulerSpec::new(LambdaLr::new(move |step| factors[step as usize]));
        Ok(optimizers.scheduler(schedule.interval(Interval::Step)))
    }
}

/// lightning-habana's `test_lightning_model` with and without offload and checkpointing, which change no bit, beside what DeepSpeed 0.19.8
/// does: see fixtures/deepspeed/make_factors.py. 16 samples that all ranks see, two batches of two a step, in bfloat16, with a schedule whose
/// warm-up is longer than all of it.
fn final_loss(ranks: usize, folder: &Path) {
    let peer: BTreeMap<String, Vec<f64>> =
        serde_json::from_str(include_str!("../fixtures/deepspeed/factors.json")).unwrap();
    let cases = (1..=3).flat_map(|stage| {
        [("none", false), ("cpu", false), ("none", true), ("cpu", true)].map(|with| (stage, with))
    });
    for (stage, (offload, checkpoints)) in cases {
        for (older, schedule) in [(false, "own"), (true, "older")] {
            let params = if stage == 3 { offload } else { "none" };
            let settings = json!({
                "train_batch_size": 4 * ranks, "train_micro_batch_size_per_gpu": 2,
                "bf16": {"enabled": true}, "fp16": {"enabled": false},
                "scheduler": {"type": "WarmupDecayLR", "params": {
                    "warmup_min_lr": 0.02, "warmup_max_lr": 0.05, "warmup_num_steps": 4, "total_num_steps": 2,
                    "warmup_type": "linear",
                }},
                "zero_allow_untested_optimizer": true, "zero_force_ds_cpu_optimizer": false,
                "zero_optimization": {
                    "stage": stage, "stage3_param_persistence_threshold": 0,
                    "offload_optimizer": {"device": offload}, "offload_param": {"device": params},
                },
                "activation_checkpointing": {"cpu_checkpointing": checkpoints},
            });
            let ones = |_| Times { weight: Parameter::new(Tensor::ones([10], CPU)) };
            let mut net = Factors { layers: (0..4).map(ones).collect(), older, losses: Mutex::default() };
            let data = (Tensor::ones([16, 10], CPU), Tensor::zeros([16, 10], CPU));
            let train = DataLoader::new(TensorDataset::new(data).unwrap()).batch_size(2).build().unwrap();
            let builder = silent(ranks, "auto", folder).accelerator("hpu").precision("bf16-mixed");
            let builder = builder.strategy(DeepSpeedStrategy::settings(settings)).fast_dev_run(10_u64);
            let mut builder = builder.use_distributed_sampler(false).accumulate_grad_batches(2_u64);
            if checkpoints {
                builder = builder.activation_checkpointing(["Times"]);
            }
            let mut trainer = builder.build().unwrap();
            trainer.fit(&mut net, &mut Loaders::new().train(train)).unwrap();
            let name = format!("stage {stage} {schedule}");
            let case = format!("{name}, {ranks} ranks, offload {offload}, checkpoints {checkpoints}");
            assert_eq!(net.losses.into_inner().unwrap(), peer[&name], "{case}");
            let last = trainer.metric("train_loss").unwrap();
            assert!(!older || (last - 0.0164).abs() <= 4e-4, "{case}: {last}");
        }
    }
}

on_ranks_tests! {
    one_rank_ends_with_the_loss_of_lightning_habana: 1, final_loss;
    two_ranks_end_with_the_loss_of_lightning_habana: 2, final_loss;
    two_ranks_export_what_the_module_has: 2, export;
    two_ranks_add_up_backward_passes: 2, backwards;
    two_ranks_lose_little_in_16_bits: 2, low_precision;
}

/// Gives so many optimizers.
#[derive(Module)]
struct Gives {
    net: Small,
    #[module(skip)]
    count: usize,
    /// Name and rate of the optimizer of a run, and when its schedule is stepped.
    #[module(skip)]
    seen: Mutex<Vec<(String, f64, Option<Interval>)>>,
}

impl LightningModule for Gives {
    type Batch = Batch;

    fn training_step(&self, (x, y): &Batch, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        self.net.loss(x, y)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        let one = || Optimizers::new(Sgd::new(0.5));
        Ok(match self.count {
            0 => Optimizers::none(),
            1 => one(),
            _ => one().and(Sgd::new(0.5)),
        })
    }

    fn on_train_start(&mut self, ctx: &mut HookContext) -> anyhow::Result<()> {
        let schedule = ctx.lr_schedulers().first().map(|schedule| schedule.configured.interval);
        let optimizer = &ctx.optimizers()[0];
        let found = (optimizer.name().to_owned(), optimizer.param_groups()[0].lr, schedule);
        self.seen.lock().unwrap().push(found);
        Ok(())
    }
}

/// Lightning's rules: one optimizer, the module's before that of the settings, whose schedule is stepped after each step.
#[test]
fn the_module_gives_one_optimizer_or_the_settings_do() {
    on_ranks("deepspeed::the_module_gives_one_optimizer_or_the_settings_do", 1, |ranks, folder| {
        let of_settings = json!({
            "optimizer": {"type": "Adam", "params": {"lr": 0.25}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.125, "warmup_num_steps": 9}},
            "zero_optimization": {"stage": 2},
        });
        let fit = |count: usize, settings: &serde_json::Value| {
            let strategy = DeepSpeedStrategy::settings(settings.clone());
            let builder = silent(ranks, "auto", folder).strategy(strategy).max_epochs(1);
            let mut net = Gives { net: Small::new(), count, seen: Default::default() };
            let done = builder.build().unwrap().fit(&mut net, &mut loaders(8));
            let seen = net.seen.into_inner().unwrap().pop();
            done.map(|()| seen.unwrap()).map_err(|error| error.to_string())
        };
        let step = Some(Interval::Step);
        assert_eq!(fit(1, &of_settings), Ok(("SGD".to_owned(), 0.125, step)));
        assert_eq!(fit(0, &of_settings), Ok(("AdamW".to_owned(), 0.125, step)));
        let plain = json!({"zero_optimization": {"stage": 2}});
        assert_eq!(fit(1, &plain), Ok(("SGD".to_owned(), 0.5, None)));
        assert_error!(fit(2, &of_settings), "only supports single optimizer, single optional scheduler");
        assert_error!(fit(0, &plain), "it gave no optimizer, and DeepSpeed's settings name none");
    });
}

/// DeepSpeed counts micro batches over epochs: 12 in windows of 4 are 3 steps. Our own strategies end a window with the epoch.
#[test]
fn windows_go_on_over_the_end_of_an_epoch() {
    on_ranks("deepspeed::windows_go_on_over_the_end_of_an_epoch", 2, |ranks, folder| {
        for (index, (strategy, expected)) in [
            ("deepspeed_stage_1", 3),
            ("deepspeed_stage_2", 3),
            ("deepspeed_stage_3", 3),
            ("zero2", 4),
            ("ddp", 4),
        ]
        .into_iter()
        .enumerate()
        {
            let saved = folder.join(format!("{index}.ckpt"));
            let fit = |ckpt: Option<&Path>| {
                let steps = Arc::new(Mutex::new(0));
                let (note, path) = (steps.clone(), saved.clone());
                let watch = LambdaCallback::new()
                    .on_train_epoch_end(move |ctx, _| {
                        if ctx.current_epoch() == 0 {
                            ctx.request_checkpoint(full_checkpoint(path.clone()));
                        }
                        Ok(())
                    })
                    .on_train_end(move |ctx, _| {
                        *note.lock().unwrap() = ctx.global_step();
                        Ok(())
                    });
                let builder = silent(ranks, strategy, folder).max_epochs(2).accumulate_grad_batches(4_u64);
                let mut trainer = resumed(builder.callback(watch), ckpt);
                let mut net = Small::new();
                trainer.fit(&mut net, &mut all_loaders(24)).unwrap();
                let steps = *steps.lock().unwrap();
                (steps, weights(&net))
            };
            let (steps, whole) = fit(None);
            assert_eq!(steps, expected, "{strategy}");
            let (steps, resumed) = fit(Some(&saved));
            assert_eq!(steps, expected, "{strategy}, resumed");
            assert_same(&format!("{strategy}, resumed"), &resumed, &whole);
        }
    });
}
