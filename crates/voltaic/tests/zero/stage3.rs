//! Weights that are in memory only while their modules run.

use std::path::Path;
use std::sync::{Arc, Mutex};

use voltaic::callback::{Callback, EmaWeightAveragingConfig, WeightAveraging};
use voltaic::module::HookContext;
use voltaic::nn::ModuleExt;
use voltaic::strategy::{Strategy, Zero, ZeroConfig, ZeroStage};
use voltaic::trainer::TrainerBuilder;
use voltaic::{Module, Tensor};

use crate::ladder::{gpt, trained};
use crate::models::{Batch, Cnn, Odd, Small, all_loaders, loaders, tokens};
use crate::ranks::{assert_same, assert_within, on_ranks, silent, weights};

/// Stage 3 that lets no parameter stay.
pub fn sharded(ranks: usize, folder: &Path) -> TrainerBuilder {
    silent(ranks, "zero3", folder).strategy(|world| {
        let config = ZeroConfig { param_persistence_threshold: 0, ..ZeroConfig::of_stage(ZeroStage::Three) };
        Ok(Box::new(Zero::new(world, config)) as Box<dyn Strategy>)
    })
}

/// The same, gathering nothing ahead and keeping nothing for later.
pub fn bare(ranks: usize, folder: &Path) -> TrainerBuilder {
    silent(ranks, "zero3", folder).strategy(|world| {
        let config = ZeroConfig {
            param_persistence_threshold: 0,
            prefetch_bucket_size: 0,
            max_reuse_distance: 0,
            ..ZeroConfig::of_stage(ZeroStage::Three)
        };
        Ok(Box::new(Zero::new(world, config)) as Box<dyn Strategy>)
    })
}

/// Notes how many parameters are sharded at the end of each batch.
struct Sharded(Arc<Mutex<Vec<usize>>>);

impl Callback for Sharded {
    fn on_train_batch_end(&mut self, _ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        let sharded = module.parameters().iter().filter(|parameter| parameter.is_sharded()).count();
        self.0.lock().unwrap().push(sharded);
        Ok(())
    }
}

fn climb(ranks: usize, folder: &Path) {
    let ddp = || silent(ranks, "ddp_find_unused_parameters_true", folder).max_epochs(2);
    let zero = || sharded(ranks, folder).max_epochs(2);
    let same = |name: &str, run: &dyn Fn(TrainerBuilder) -> Vec<(String, Tensor)>| {
        assert_same(&format!("{name} on {ranks} ranks"), &run(zero()), &run(ddp()));
    };
    same("mlp", &|builder| trained(builder, Small::new(), loaders(24)));
    same("odd", &|builder| trained(builder, Odd::new(), loaders(24)));
    same("cnn", &|builder| trained(builder, Cnn::new(), loaders(24)));
    same("gpt", &|builder| trained(builder, gpt(), tokens(16)));
    let ema =
        || WeightAveraging::ema(EmaWeightAveragingConfig { decay: 0.75, ..Default::default() }).unwrap();
    same("ema", &|builder| trained(builder.callback(ema()), Small::new(), all_loaders(24)));
    let low = |builder: TrainerBuilder, has_masters| {
        trained(builder.precision("bf16-true"), Small { has_masters, ..Small::new() }, loaders(24))
    };
    assert_same("bf16", &low(zero(), false), &low(ddp(), true));
    let window = |builder: TrainerBuilder| {
        let builder = builder.accumulate_grad_batches(2_u64).gradient_clip_val(0.1);
        trained(builder, Cnn::new(), loaders(20))
    };
    assert_within("window", &window(zero()), &window(ddp()), 1e-4);

    // between batches nothing is whole, and after the fit all is
    let counts = Arc::new(Mutex::new(Vec::new()));
    let mut net = gpt();
    let mut trainer = sharded(ranks, folder).max_epochs(1).callback(Sharded(counts.clone())).build().unwrap();
    trainer.fit(&mut net, &mut tokens(16)).unwrap();
    let count = net.parameters().len();
    let counts = counts.lock().unwrap();
    assert!(!counts.is_empty() && counts.iter().all(|num| *num == count), "{counts:?} of {count}");
    assert!(net.parameters().iter().all(|parameter| !parameter.is_sharded() && !parameter.is_kept()));
    let of_rank_zero = trainer.world().group().unwrap();
    for (name, weight) in weights(&net) {
        let first = weight.copy();
        of_rank_zero.broadcast(&first, 0).unwrap();
        assert_eq!(first, weight, "{name}");
    }
}

/// Evaluation and prediction take weights as they are needed.
fn evaluate(ranks: usize, folder: &Path) {
    let mut found: Vec<(Option<f64>, Vec<Tensor>)> = Vec::new();
    for builder in [silent(ranks, "ddp", folder), sharded(ranks, folder)] {
        let mut trainer = builder.build().unwrap();
        let mut net = Small::new();
        trainer.test(&mut net, &mut all_loaders(8)).unwrap();
        let loss = trainer.metric("test_loss");
        let predictions: Vec<Vec<Tensor>> = trainer.predict(&mut net, &mut all_loaders(8)).unwrap();
        found.push((loss, predictions.into_iter().flatten().collect()));
    }
    assert_eq!(found[0], found[1]);
    let _: Option<Batch> = None;
}

on_ranks_tests! {
    two_ranks_are_ddp: 2, climb;
    three_ranks_are_ddp: 3, climb;
    two_ranks_evaluate_and_predict: 2, evaluate;
}

/// What travels for a step: each gradient once, and each weight for forward and for backward.
#[test]
fn a_step_moves_each_gradient_once_and_each_weight_twice() {
    on_ranks("stage3::a_step_moves_each_gradient_once_and_each_weight_twice", 2, |ranks, folder| {
        let traffic = |epochs: i64| {
            let mut trainer = bare(ranks, folder).max_epochs(epochs).build().unwrap();
            trainer.fit(&mut Small::new(), &mut loaders(24)).unwrap();
            let traffic = trainer.world().group().unwrap().traffic();
            ["reduce_scatter", "all_gather"].map(|op| traffic.get(op).copied().unwrap_or_default().1)
        };
        // what an epoch adds
        let ([reduced, gathered], [reduced_before, gathered_before]) = (traffic(2), traffic(1));
        let (reduced, gathered) = (reduced - reduced_before, (gathered - gathered_before) * ranks as u64);
        let steps = 24 / 2 / ranks as u64;
        let bytes = 4 * Small::new().num_parameters(true) as u64;
        let padded = bytes + 4 * 16 * 6; // four parameters in two units, and their last parts
        assert!((steps * bytes..=steps * padded).contains(&reduced), "{reduced} of {bytes}");
        let told = 2048; // what ranks tell each other at the end of an epoch
        assert!((2 * steps * bytes..=2 * steps * padded + told).contains(&gathered), "{gathered} of {bytes}");
    });
}
