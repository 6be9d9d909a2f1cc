//! Weights in 16 bits: steps that overflow are left out on all ranks alike, and all stages are one process.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};
use voltaic::callback::Callback;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::nn::{ModuleExt, Parameter};
use voltaic::optim::{AdamW, ExponentialLr, Interval, LrSchedulerSpec, Optimizers, clip_grad_value};
use voltaic::strategy::DeepSpeedStrategy;
use voltaic::trainer::TrainerBuilder;
use voltaic::{Kind, Module, Tensor};

use crate::models::{Batch, Small, numbers};
use crate::ranks::{assert_same, on_ranks, silent, weights};
use crate::values::host;

/// The loss of a small network, a large part of it on some rank at some batch.
#[derive(Module)]
struct Bursts {
    net: Small,
    /// The rank, the batch, and the factor there.
    #[module(skip)]
    burst: (usize, u64, f64),
    #[module(skip)]
    batch: AtomicU64,
}

impl Bursts {
    fn new(burst: (usize, u64, f64)) -> Self {
        Self { net: Small::new(), burst, batch: AtomicU64::new(0) }
    }
}

impl LightningModule for Bursts {
    type Batch = Batch;

    fn training_step(&self, (x, y): &Batch, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let (rank, batch, factor) = self.burst;
        let loss = self.net.loss(x, y)?;
        let is_it = self.batch.fetch_add(1, Ordering::Relaxed) == batch && own_rank() == rank;
        Ok(if is_it { loss * factor } else { loss })
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        let schedule = LrSchedulerSpec::new(ExponentialLr::new(0.5)).interval(Interval::Step);
        Ok(Optimizers::new(AdamW::new(0.01)).scheduler(schedule))
    }
}

pub fn own_rank() -> usize {
    std::env::var("LOCAL_RANK").ok().and_then(|rank| rank.parse().ok()).unwrap_or(0)
}

/// Samples in order, one for each batch.
fn one_by_one(samples: i64) -> Loaders<Batch> {
    let data = TensorDataset::new((numbers(&[samples, 5], 3.0), numbers(&[samples, 3], 4.0))).unwrap();
    Loaders::new().train(DataLoader::new(data).batch_size(1).build().unwrap())
}

fn deepspeed(ranks: usize, folder: &Path, stage: u64, more: Value) -> TrainerBuilder {
    let mut all = json!({
        "zero_allow_untested_optimizer": true,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    });
    all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    silent(ranks, "auto", folder).strategy(DeepSpeedStrategy::settings(all)).max_epochs(1)
}

/// An overflow on one rank leaves the step out on all, and the schedule waits.
fn skip(ranks: usize, folder: &Path) {
    for stage in 1..=3 {
        let fp16 = json!({"fp16": {"enabled": true, "initial_scale_power": 8, "hysteresis": 1}});
        let run = |burst, limit: u64| {
            let mut trainer =
                deepspeed(ranks, folder, stage, fp16.clone()).limit_train_batches(limit).build().unwrap();
            let mut net = Bursts::new(burst);
            trainer.fit(&mut net, &mut one_by_one(12)).unwrap();
            (weights(&net), trainer)
        };
        let never = (9, 0, 1.0);
        let (before, _) = run(never, 2);
        let (after, trainer) = run((1, 2, 1e6), 3);
        assert_same(&format!("stage {stage}"), &after, &before);
        let scaler = trainer.loss_scaler().unwrap();
        assert_eq!((scaler.get_scale(), scaler.skipped_steps()), (128.0, 1), "stage {stage}");
        assert_eq!(trainer.global_step(), 3, "a step that is left out counts");
        // the next one has the learning rate that this one should have had
        let (with, _) = run((1, 2, 1e6), 4);
        let (without, _) = run(never, 4);
        assert!(with.iter().zip(&without).any(|((_, a), (_, b))| a != b), "a step is missing");
        let rest = trainer.world().group().unwrap();
        for (name, weight) in with {
            let first = weight.copy();
            rest.broadcast(&first, 0).unwrap();
            assert_eq!(first, weight, "{name} on all ranks");
        }
    }
}

on_ranks_tests! {
    an_overflow_of_one_rank_leaves_the_step_out_on_all: 2, skip;
}

/// At the least scale the run ends.
#[test]
fn an_overflow_at_the_least_scale_ends_the_run() {
    on_ranks("half::an_overflow_at_the_least_scale_ends_the_run", 2, |ranks, folder| {
        let fp16 = json!({"fp16": {"enabled": true, "initial_scale_power": 4, "hysteresis": 1, "min_loss_scale": 16}});
        let mut trainer = deepspeed(ranks, folder, 2, fp16).build().unwrap();
        let error = trainer.fit(&mut Bursts::new((1, 1, f64::INFINITY)), &mut one_by_one(12)).unwrap_err();
        let error = error.to_string();
        let expected = "fp16.min_loss_scale: the gradients of step 1 overflow at the least loss scale, 16";
        assert!(error.contains(expected), "{error}");
    });
}

/// With bfloat16 a step whose gradients are not finite is left out, unless `check_grad_overflow` is false.
#[test]
fn bfloat16_leaves_out_steps_that_are_not_finite() {
    on_ranks("half::bfloat16_leaves_out_steps_that_are_not_finite", 2, |ranks, folder| {
        let run = |checks: bool| {
            let bf16 = json!({"bf16": {"enabled": true, "check_grad_overflow": checks}});
            let mut trainer = deepspeed(ranks, folder, 1, bf16).build().unwrap();
            let mut net = Bursts::new((1, 1, f64::INFINITY));
            trainer.fit(&mut net, &mut one_by_one(12)).unwrap();
            let finite =
                weights(&net).iter().all(|(_, weight)| weight.isfinite().all().int64_value(&[]) == 1);
            (finite, trainer.loss_scaler().map(|scaler| (scaler.get_scale(), scaler.skipped_steps())))
        };
        assert_eq!(run(true), (true, Some((1.0, 1))));
        assert_eq!(run(false), (false, None));
    });
}

/// Two ranks with one sample each are one process with two samples in a window: the bits of the weights, as text.
fn digests(ranks: usize, folder: &Path) {
    for precision in ["bf16", "fp16"] {
        for stage in if ranks == 1 { 1..=1 } else { 1..=3 } {
            let mut section = json!({"enabled": true});
            if precision == "fp16" {
                section["initial_scale_power"] = json!(8); // no gradient overflows
            }
            let builder = deepspeed(ranks, folder, stage, json!({ precision: section }));
            let mut trainer = builder.accumulate_grad_batches(2 / ranks as u64).build().unwrap();
            let mut net = Bursts::new((9, 0, 1.0));
            trainer.fit(&mut net, &mut one_by_one(24)).unwrap();
            let bits: Vec<String> = weights(&net)
                .iter()
                .map(|(_, weight)| {
                    let bits = weight.view_dtype(tch::Kind::Int16).to_kind(tch::Kind::Int64).flatten(0, -1);
                    let place = Tensor::arange(bits.numel() as i64, (tch::Kind::Int64, tch::Device::Cpu)) + 1;
                    (bits * place).sum(tch::Kind::Int64).int64_value(&[]).to_string()
                })
                .collect();
            if trainer.world().rank == 0 {
                println!("\ndigest {precision} {}", bits.join(" "));
            }
        }
    }
}

#[test]
fn all_stages_are_one_process() {
    const NAME: &str = "half::all_stages_are_one_process";
    let (one, two) = (on_ranks(NAME, 1, digests), on_ranks(NAME, 2, digests));
    let (Some(one), Some(two)) = (one, two) else { return };
    let lines = |text: &str| -> Vec<String> {
        text.lines().filter(|line| line.starts_with("digest")).map(str::to_owned).collect()
    };
    let (one, two) = (lines(&one), lines(&two));
    assert_eq!((one.len(), two.len()), (2, 6), "{one:?} {two:?}");
    assert_ne!(one[0], one[1]);
    for line in two {
        assert!(one.contains(&line), "{line}, not of {one:?}");
    }
}

/// Looks at the gradients that the optimizer has: of 16 bits, until they are clipped or written.
struct Narrow {
    /// Nothing rounds the weights when they are gathered.
    are_whole: bool,
}

fn shown(ctx: &HookContext) -> Vec<Parameter> {
    let groups = ctx.optimizers()[0].param_groups().iter();
    let slices = groups.flat_map(|group| group.params()).map(|(_, slice)| slice.clone());
    slices.filter(|slice| slice.grad().defined() && slice.numel() > 0).collect()
}

impl Callback for Narrow {
    fn on_before_optimizer_step(
        &mut self,
        ctx: &mut HookContext,
        _module: &dyn Module,
    ) -> anyhow::Result<()> {
        let slices = shown(ctx);
        let kinds = |slices: &[Parameter]| slices.iter().map(|slice| slice.grad().kind()).collect::<Vec<_>>();
        assert!(slices.iter().all(|slice| slice.kind() == Kind::Float));
        assert_eq!(kinds(&slices), vec![Kind::BFloat16; slices.len()]);
        let fqn = "net.second.weight";
        let before = host(&ctx.full_grad(fqn)?.unwrap());
        match ctx.global_step() {
            1 => {
                clip_grad_value(&slices, 1e-4)?;
                let limited = before.clamp(-1e-4, 1e-4);
                assert_ne!(limited, limited.to_kind(Kind::BFloat16).to_kind(Kind::Float));
                assert_eq!(host(&ctx.full_grad(fqn)?.unwrap()), limited, "what was clipped is what there is");
                assert_eq!(kinds(&slices), vec![Kind::Float; slices.len()]);
            }
            2 => {
                let third = &before / 3.0;
                ctx.set_full_grad(fqn, &third)?;
                assert_eq!(host(&ctx.full_grad(fqn)?.unwrap()), third, "what is written is not rounded");
            }
            _ => {}
        }
        Ok(())
    }

    fn on_train_batch_end(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        for (fqn, weight) in module.named_parameters().into_iter().filter(|_| self.are_whole) {
            let rounded = host(&ctx.full_fp32_param(&fqn)?).to_kind(Kind::BFloat16);
            assert_eq!(host(&weight.try_tensor()?.detach()), rounded, "{fqn}");
        }
        Ok(())
    }
}

/// The weights at the end are those without an offload, on the host and on devices.
fn narrow(ranks: usize, folder: &Path, accelerator: &str) {
    for stage in 1..=3 {
        let run = |device: &str| {
            let more = json!({"bf16": {"enabled": true}, "zero_optimization": {
                "stage": stage, "stage3_param_persistence_threshold": 0, "offload_optimizer": {"device": device},
            }});
            let builder = deepspeed(ranks, folder, stage, more).accelerator(accelerator);
            let builder = builder.callback(Narrow { are_whole: stage < 3 });
            let mut net = Bursts::new((9, 0, 1.0));
            builder.build().unwrap().fit(&mut net, &mut one_by_one(12)).unwrap();
            weights(&net)
        };
        assert_same(&format!("stage {stage}"), &run("cpu"), &run("none"));
    }
}

#[test]
fn gradients_stay_in_16_bits_until_they_are_changed() {
    on_ranks("half::gradients_stay_in_16_bits_until_they_are_changed", 2, |ranks, folder| {
        narrow(ranks, folder, "cpu");
    });
}

#[test]
fn offloaded_gradients_stay_in_16_bits_until_they_are_changed() {
    on_ranks("half::offloaded_gradients_stay_in_16_bits_until_they_are_changed", 2, |ranks, folder| {
        narrow(ranks, folder, "hpu");
    });
}
