//! A run with sharded states is the data-parallel run: bit for bit where sums are the same, else within their rounding.

use std::path::Path;

use voltaic::data::Loaders;
use voltaic::models::{Gpt, GptConfig};
use voltaic::module::LightningModule;
use voltaic::nn::ModuleExt;
use voltaic::trainer::{GradientClipAlgorithm, TrainerBuilder};
use voltaic::{Module, Tensor};

use crate::models::{Batch, Cnn, Kernels, Odd, Small, loaders, numbered, tokens};
use crate::ranks::{STAGES, assert_same, assert_within, on_ranks, silent, weights};
use crate::shards::staged;

/// The weights after a fit.
pub fn trained<M: LightningModule<Batch = Batch> + Module>(
    builder: TrainerBuilder,
    mut net: M,
    mut loaders: Loaders<Batch>,
) -> Vec<(String, Tensor)> {
    let mut trainer = builder.build().unwrap();
    trainer.fit(&mut net, &mut loaders).unwrap();
    weights(&net)
}

pub fn gpt() -> Gpt {
    let config =
        GptConfig { vocab_size: 61, block_size: 16, n_layer: 2, n_head: 2, n_embd: 24, ..GptConfig::tiny() };
    numbered(Gpt::new(config).unwrap())
}

/// All steps of the ladder on this rank: `ddp` with unused parameters, and each stage beside it.
fn climb(ranks: usize, folder: &Path) {
    for stage in STAGES {
        let ddp = || silent(ranks, "ddp_find_unused_parameters_true", folder).max_epochs(2);
        let zero = || silent(ranks, stage, folder).max_epochs(2);
        let what = format!("{stage} on {ranks} ranks");
        let same = |name: &str, run: &dyn Fn(TrainerBuilder) -> Vec<(String, Tensor)>| {
            assert_same(&format!("{what}: {name}"), &run(zero()), &run(ddp()));
        };
        same("mlp", &|builder| trained(builder, Small::new(), loaders(24)));
        same("odd", &|builder| trained(builder, Odd::new(), loaders(24)));
        same("cnn", &|builder| trained(builder, Cnn::new(), loaders(24)));
        same("kernels", &|builder| trained(builder, Kernels::new(), loaders(24)));
        same("gpt", &|builder| trained(builder, gpt(), tokens(16)));
        let near = |name: &str, run: &dyn Fn(TrainerBuilder) -> Vec<(String, Tensor)>| {
            assert_within(&format!("{what}: {name}"), &run(zero()), &run(ddp()), 1e-4);
        };
        near("norm", &|builder| trained(builder.gradient_clip_val(0.05), Odd::new(), loaders(24)));
        let wide = |builder: TrainerBuilder| {
            trained(builder.precision("64-true").gradient_clip_val(0.05), Small::new(), loaders(24))
        };
        assert_within(&format!("{what}: norm in 64 bits"), &wide(zero()), &wide(ddp()), 1e-12);
        // master weights, whoever keeps them
        let low = |builder: TrainerBuilder, has_masters| {
            trained(builder.precision("bf16-true"), Small { has_masters, ..Small::new() }, loaders(24))
        };
        assert_same(&format!("{what}: bf16"), &low(zero(), false), &low(ddp(), true));
        same("value", &|builder| {
            let builder =
                builder.gradient_clip_val(0.01).gradient_clip_algorithm(GradientClipAlgorithm::Value);
            trained(builder, Small::new(), loaders(24))
        });
        let window = |builder: TrainerBuilder| {
            trained(builder.accumulate_grad_batches(2_u64), Cnn::new(), loaders(20))
        };
        // with gradients sharded after each batch, sums are rounded in another order
        if stage == "zero1" { same("window", &window) } else { near("window", &window) }
    }
}

#[test]
fn kernels_stay_in_their_order_in_memory() {
    on_ranks("ladder::kernels_stay_in_their_order_in_memory", 2, |ranks, folder| {
        for stage in STAGES {
            let mut net = Kernels::new();
            let mut trainer = staged(ranks, stage, folder).max_epochs(1).build().unwrap();
            trainer.fit(&mut net, &mut loaders(24)).unwrap();
            assert!(net.are_kept(), "{stage}");
        }
    });
}

on_ranks_tests! {
    two_ranks_are_ddp: 2, climb;
    #[ignore = "a long form, which make stress runs"]
    three_ranks_are_ddp: 3, climb;
    #[ignore = "a long form, which make stress runs"]
    four_ranks_are_ddp: 4, climb;
}

/// What travels for a step: each gradient once, and each weight.
#[test]
fn a_step_moves_each_gradient_and_each_weight_once() {
    on_ranks("ladder::a_step_moves_each_gradient_and_each_weight_once", 2, |ranks, folder| {
        for (stage, windows) in [("zero1", 1), ("zero1", 2), ("zero2", 1), ("zero2", 2)] {
            let traffic = |epochs: i64| {
                let builder = silent(ranks, stage, folder).max_epochs(epochs);
                let mut trainer = builder.accumulate_grad_batches(windows).build().unwrap();
                trainer.fit(&mut Small::new(), &mut loaders(24)).unwrap();
                let traffic = trainer.world().group().unwrap().traffic();
                ["reduce_scatter", "all_gather"].map(|op| traffic.get(op).copied().unwrap_or_default().1)
            };
            // what an epoch adds
            let ([reduced, gathered], [reduced_before, gathered_before]) = (traffic(2), traffic(1));
            let (reduced, gathered) = (reduced - reduced_before, (gathered - gathered_before) * ranks as u64);
            let batches = 24 / 2 / ranks as u64;
            let steps = batches / windows;
            let bytes = 4 * Small::new().num_parameters(true) as u64;
            let padded = bytes + 4 * 16 * 5; // four parameters, and the last part
            let reductions = if stage == "zero1" { steps } else { batches };
            assert!((reductions * bytes..=reductions * padded).contains(&reduced), "{stage} {reduced}");
            let told = 2048; // what ranks tell each other at the end of an epoch
            assert!((steps * bytes..=steps * padded + told).contains(&gathered), "{stage} {gathered}");
        }
    });
}

#[test]
fn emulated_hpus_are_ddp() {
    on_ranks("ladder::emulated_hpus_are_ddp", 2, |ranks, folder| {
        for stage in STAGES {
            let run = |strategy: &str| {
                let builder = silent(ranks, strategy, folder).accelerator("hpu").max_epochs(2);
                trained(builder, Cnn::new(), loaders(24))
            };
            assert_same(stage, &run(stage), &run("ddp"));
        }
    });
}
