//! Muon over parts of matrices is Muon over whole ones.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use voltaic::callback::{ModelCheckpoint, ModelCheckpointConfig};
use voltaic::data::Loaders;
use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::nn::{Callable, Conv2d, Linear, ModuleExt, Parameter};
use voltaic::optim::{
    AdamW, AdjustLr, Muon, MuonWithAuxAdam, NsMethod, Optimizer, OptimizerConfig, Optimizers, ParamGroupSpec,
};
use voltaic::strategy::DeepSpeedStrategy;
use voltaic::trainer::TrainerBuilder;
use voltaic::{Kind, Module, Tensor};

use crate::ladder::trained;
use crate::models::{Batch, Small, loaders, numbered};
use crate::ranks::{Body, STAGES, assert_same, assert_within, on_ranks, on_ranks_in_turn, silent, weights};
use crate::resume::Saver;
use crate::shards::staged;

/// A kernel with the channels last, tied, frozen, empty and unused matrices, vectors and a scalar, in two groups.
#[derive(Module)]
pub struct Mixed {
    conv: Conv2d,
    frozen: Linear,
    unused: Linear,
    sometimes: Linear,
    tied: Linear,
    again: Parameter,
    empty: Parameter,
    scale: Parameter,
    out: Linear,
    #[module(skip)]
    optimizer: OptimizerConfig,
    #[module(skip)]
    step: AtomicU64,
}

impl Mixed {
    pub fn new(optimizer: impl Into<OptimizerConfig>) -> Self {
        let tied = Linear::new(7, 7).unwrap();
        let cpu = tch::Device::Cpu;
        let net = numbered(Self {
            conv: Conv2d::new(4, 6, 2).unwrap(),
            frozen: Linear::new(24, 7).unwrap(),
            unused: Linear::new(3, 5).unwrap(),
            sometimes: Linear::new(3, 5).unwrap(),
            again: tied.weight.clone(),
            tied,
            empty: Parameter::new(Tensor::zeros([0, 4], (Kind::Float, cpu))),
            scale: Parameter::new(Tensor::from(1.0_f32)),
            out: Linear::new(7, 3).unwrap(),
            optimizer: optimizer.into(),
            step: AtomicU64::new(0),
        });
        net.frozen.set_requires_grad(false);
        net.to_channels_last().unwrap();
        net
    }
}

impl LightningModule for Mixed {
    type Batch = Batch;

    fn training_step(&self, (x, y): &Batch, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let kind = self.conv.weight.kind();
        let x = x.to_kind(kind).repeat([1, 8]).narrow(1, 0, 36).view([-1, 4, 3, 3]);
        let hidden = self.frozen.call(&self.conv.call(&x)?.relu().flatten(1, -1))?;
        let hidden = self.tied.call(&hidden)?.relu().matmul(&self.again);
        let out = self.out.call(&hidden)? * self.scale.tensor() + self.empty.sum(kind);
        let mut loss = (&out.to_kind(Kind::Float) - y).square().mean(Kind::Float);
        if self.step.fetch_add(1, Ordering::Relaxed) % 4 == 2 {
            loss += self.sometimes.call(&out)?.to_kind(Kind::Float).square().mean(Kind::Float);
        }
        Ok(loss)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        let trained = self.named_parameters().into_iter().filter(|(_, parameter)| parameter.requires_grad());
        let takes_all = !matches!(self.optimizer, OptimizerConfig::Muon(_));
        let trained = trained.filter(|(_, parameter)| takes_all || parameter.dim() == 2);
        let (first, second): (Vec<_>, Vec<_>) = trained.partition(|(fqn, _)| !fqn.starts_with("out"));
        let groups = [ParamGroupSpec::new(first), ParamGroupSpec::new(second).lr(0.03).weight_decay(0.0)];
        Ok(Optimizers::new(self.optimizer.clone()).groups(groups))
    }
}

pub fn aux() -> MuonWithAuxAdam {
    MuonWithAuxAdam::new(0.02, 0.01).weight_decay(0.1)
}

/// Each stage beside `ddp` on this rank.
fn climb(ranks: usize, folder: &Path) {
    let optimizers: [(&str, OptimizerConfig); 4] = [
        ("gram", aux().into()),
        ("standard", aux().ns_method(NsMethod::Standard).momentum(0.8).into()),
        ("muon", Muon::new(0.02).into()),
        ("plain muon", Muon::new(0.02).nesterov(false).adjust_lr_fn(AdjustLr::MatchRmsAdamw).into()),
    ];
    let same = |what: &str,
                stage: &str,
                net: &dyn Fn() -> Mixed,
                with: &dyn Fn(TrainerBuilder) -> TrainerBuilder| {
        let run = |builder: TrainerBuilder| trained(with(builder.max_epochs(2)), net(), loaders(24));
        let ddp = run(silent(ranks, "ddp_find_unused_parameters_true", folder));
        assert_same(&format!("{what} {stage} on {ranks} ranks"), &run(staged(ranks, stage, folder)), &ddp);
    };
    for stage in STAGES {
        for (what, optimizer) in &optimizers {
            same(what, stage, &|| Mixed::new(optimizer.clone()), &|builder| builder);
        }
    }
    let run = |builder: TrainerBuilder| {
        let net = With { net: Small::new(), optimizer: aux().into(), leaves_out: None };
        trained(builder.accumulate_grad_batches(2_u64).max_epochs(2), net, loaders(24))
    };
    assert_same("window", &run(staged(ranks, "zero1", folder)), &run(silent(ranks, "ddp", folder)));
    let run = |stage: &str, limit: f64| {
        let builder = if stage.starts_with("zero") {
            staged(ranks, stage, folder)
        } else {
            silent(ranks, stage, folder)
        };
        trained(builder.gradient_clip_val(limit).max_epochs(2), Mixed::new(aux()), loaders(24))
    };
    let expected = run("ddp_find_unused_parameters_true", 0.5);
    for stage in STAGES {
        // the norm of parts is rounded in another order
        assert_within(&format!("clipped {stage} on {ranks} ranks"), &run(stage, 0.5), &expected, 1e-4);
    }
}

on_ranks_tests! {
    two_ranks_are_ddp: 2, climb;
    #[ignore = "a long form, which make stress runs"]
    three_ranks_are_ddp: 3, climb;
    #[ignore = "a long form, which make stress runs"]
    four_ranks_are_ddp: 4, climb;
}

/// In 16 bits the optimizer works on float32 copies, whoever keeps them; with a window, clipping and a scaled loss all stages
/// that add up alike are one.
#[test]
fn masters_are_ddps() {
    on_ranks("muon::masters_are_ddps", 2, |ranks, folder| {
        let run = |stage: &str, precision: &str, has_masters: bool, window: u64| {
            let builder = if stage.starts_with("zero") {
                staged(ranks, stage, folder)
            } else {
                silent(ranks, stage, folder)
            };
            let builder = builder.precision(precision).accumulate_grad_batches(window).max_epochs(2);
            let builder = if window > 1 { builder.gradient_clip_val(0.5) } else { builder };
            trained(builder, Mixed::new(aux().master_weights(has_masters)), loaders(24))
        };
        let expected = run("ddp_find_unused_parameters_true", "bf16-true", true, 1);
        for stage in STAGES {
            assert_same(stage, &run(stage, "bf16-true", false, 1), &expected);
        }
        for precision in ["bf16-true", "16-true"] {
            let expected = run("zero2", precision, false, 2);
            assert_within(precision, &run("zero3", precision, false, 2), &expected, 1e-3);
        }
    });
}

#[test]
fn emulated_hpus_are_ddp() {
    on_ranks("muon::emulated_hpus_are_ddp", 2, |ranks, folder| {
        for optimizer in [aux().into(), OptimizerConfig::from(Muon::new(0.02))] {
            let run = |builder: TrainerBuilder| {
                trained(builder.accelerator("hpu").max_epochs(1), Mixed::new(optimizer.clone()), loaders(24))
            };
            let expected = run(silent(ranks, "ddp_find_unused_parameters_true", folder));
            for stage in STAGES {
                assert_same(stage, &run(staged(ranks, stage, folder)), &expected);
            }
        }
    });
}

/// A run goes on bit for bit from within an epoch and a window.
#[test]
fn a_run_goes_on_from_its_checkpoints() {
    on_ranks("muon::a_run_goes_on_from_its_checkpoints", 3, |ranks, folder| {
        for (stage, precision) in
            [("zero1", "bf16-true"), ("zero2", "32-true"), ("zero3", "32-true"), ("zero3", "16-true")]
        {
            let saved = folder.join(stage).join(precision);
            let builder = || {
                let builder = staged(ranks, stage, folder).max_epochs(3).accumulate_grad_batches(2_u64);
                builder.gradient_clip_val(0.5).precision(precision).callback(Saver(saved.clone()))
            };
            let samples = 5 * 2 * ranks as i64;
            let fit = |from: Option<u64>| {
                let mut trainer = builder().build().unwrap();
                let mut net = Mixed::new(aux());
                if let Some(batch) = from {
                    trainer.ckpt_path(saved.join(format!("{batch}.ckpt")));
                    // what counts batches is no part of the state: those of the first epoch, and of the second one so far
                    net.step = AtomicU64::new(5 + batch + 1);
                    let _ = tch::no_grad(|| net.out.weight.tensor().shallow_clone().fill_(7.0));
                }
                trainer.fit(&mut net, &mut loaders(samples)).unwrap();
                weights(&net)
            };
            let end = fit(None);
            for batch in [0, 1, 2, 4] {
                assert_same(&format!("{stage} {precision} from batch {batch}"), &fit(Some(batch)), &end);
            }
        }
    });
}

fn save(ranks: usize, folder: &Path) {
    for stage in STAGES {
        let config = ModelCheckpointConfig {
            dirpath: Some(folder.to_path_buf()),
            filename: Some(stage.to_owned()),
            ..ModelCheckpointConfig::default()
        };
        let builder = staged(ranks, stage, folder).max_epochs(1).enable_checkpointing(true);
        let builder = builder.callback(ModelCheckpoint::new(config).unwrap());
        trained(builder, Mixed::new(aux()), loaders(24));
    }
}

fn load(ranks: usize, folder: &Path) {
    for saved in STAGES {
        let run = |builder: TrainerBuilder| {
            let mut trainer = builder.max_epochs(3).build().unwrap();
            trainer.ckpt_path(folder.join(format!("{saved}.ckpt")));
            let mut net = Mixed::new(aux());
            trainer.fit(&mut net, &mut loaders(24)).unwrap();
            weights(&net)
        };
        let expected = run(silent(ranks, "ddp_find_unused_parameters_true", folder));
        for stage in STAGES {
            assert_same(&format!("{stage} from {saved}"), &run(staged(ranks, stage, folder)), &expected);
        }
    }
}

#[test]
#[ignore = "a long form, which make stress runs"]
fn other_numbers_of_ranks_go_on() {
    let turns: [(usize, Body); 3] = [(2, save), (3, load), (4, load)];
    on_ranks_in_turn("muon::other_numbers_of_ranks_go_on", &turns);
}

/// A small network with an optimizer, which one rank does not step if told so.
#[derive(Module)]
struct With {
    net: Small,
    #[module(skip)]
    optimizer: OptimizerConfig,
    #[module(skip)]
    leaves_out: Option<usize>,
}

impl LightningModule for With {
    type Batch = Batch;

    fn training_step(&self, (x, y): &Batch, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        self.net.loss(x, y)
    }

    fn optimizer_step(&self, optimizer: &mut dyn Optimizer, ctx: &mut HookContext) -> anyhow::Result<()> {
        let rank = ctx.process_group().map(|group| group.rank());
        if rank.is_some() && rank == self.leaves_out {
            std::thread::sleep(std::time::Duration::from_secs(8));
            anyhow::bail!("left out");
        }
        Ok(optimizer.step()?)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        self.optimizer.clone().into()
    }
}

/// What travels for a step: nothing for a matrix that one rank has, else the longest part of it.
#[test]
fn updates_of_divided_matrices_travel_alone() {
    on_ranks("muon::updates_of_divided_matrices_travel_alone", 2, |ranks, folder| {
        for (stage, expected) in [("zero1", 0), ("zero3", 4 * (101 + 51))] {
            let gathered = |optimizer: OptimizerConfig| {
                let mut trainer = staged(ranks, stage, folder).max_epochs(1).build().unwrap();
                let mut net = With { net: Small::new(), optimizer, leaves_out: None };
                let mut loaders: Loaders<Batch> = loaders(24);
                trainer.fit(&mut net, &mut loaders).unwrap();
                let traffic = trainer.world().group().unwrap().traffic();
                traffic.get("all_gather").copied().unwrap_or_default().1
            };
            let steps = 24 / 2 / ranks as u64;
            let (own, others) = (gathered(aux().into()), gathered(AdamW::new(0.01).into()));
            assert_eq!(own - others, steps * expected, "{stage}");
        }
    });
}

/// A rank that does not come is an error that names the matrix.
#[test]
fn ranks_do_not_wait_for_ever() {
    let text = on_ranks("muon::ranks_do_not_wait_for_ever", 2, |ranks, folder| {
        let zero =
            serde_json::json!({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}});
        let strategy = DeepSpeedStrategy { timeout_secs: 3.0, ..DeepSpeedStrategy::settings(zero) };
        let mut trainer = silent(ranks, "auto", folder).strategy(strategy).max_epochs(1).build().unwrap();
        let mut net = With { net: Small::new(), optimizer: aux().into(), leaves_out: Some(1) };
        let rank = trainer.world().rank;
        let error = trainer.fit(&mut net, &mut loaders(24)).unwrap_err().to_string();
        if rank == 0 {
            assert!(error.contains("update of net.second.weight"), "{error}");
        }
    });
    drop(text);
}
