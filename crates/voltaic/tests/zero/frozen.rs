//! Checkpoints without frozen parameters: files and folders, of one process and of ranks with whole and with sharded states.

use std::path::{Path, PathBuf};

use voltaic::callback::{
    BackboneFinetuning, BackboneFinetuningConfig, Callback, LambdaCallback, ModelCheckpoint,
    ModelCheckpointConfig,
};
use voltaic::checkpoint::Checkpoint;
use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::nn::{Linear, ModuleExt};
use voltaic::optim::{AdamW, Lion, Optimizers};
use voltaic::strategy::{DdpConfig, DeepSpeedStrategy, Strategy, Zero, ZeroConfig, ZeroStage};
use voltaic::trainer::TrainerBuilder;
use voltaic::{Kind, Module, Tensor};

use crate::checkpoints::{full_checkpoint, resumed};
use crate::models::{Batch, Small, all_loaders, loaders, numbered};
use crate::ranks::{STAGES, assert_same, on_ranks_in_turn, silent, weights};
use crate::shards::{SaveAfter, sorted};

/// A net whose first layer is frozen, with values that are this much above the usual ones.
fn net(more: f64) -> Small {
    let net = Small::new();
    for parameter in net.first.parameters() {
        parameter.set_data(&(parameter.detach() + more)).unwrap();
    }
    net.first.set_requires_grad(false);
    net
}

const STRATEGIES: [&str; 4] = ["ddp", "zero1", "zero3", "deepspeed"];

/// A trainer that leaves frozen parameters out.
fn builder(ranks: usize, strategy: &str, folder: &Path) -> TrainerBuilder {
    let builder = silent(ranks, "auto", folder);
    let zero = |stage| {
        move |world| {
            let config = ZeroConfig {
                exclude_frozen_parameters: true,
                param_persistence_threshold: 0,
                ..ZeroConfig::of_stage(stage)
            };
            Ok(Box::new(Zero::new(world, config)) as Box<dyn Strategy>)
        }
    };
    match strategy {
        "ddp" => builder.strategy(DdpConfig { exclude_frozen_parameters: true, ..Default::default() }),
        "zero1" => builder.strategy(zero(ZeroStage::One)),
        "zero3" => builder.strategy(zero(ZeroStage::Three)),
        _ => builder
            .strategy(DeepSpeedStrategy { exclude_frozen_parameters: true, ..DeepSpeedStrategy::stage(2) }),
    }
}

fn path(ranks: usize, strategy: &str, folder: &Path) -> PathBuf {
    folder.join(format!("{strategy}-{ranks}.ckpt"))
}

/// Leaves checkpoints of three steps, without frozen parameters; a resumed run equals one that went on.
fn leave(ranks: usize, folder: &Path) {
    for strategy in STRATEGIES {
        let path = path(ranks, strategy, folder);
        let config = ModelCheckpointConfig {
            dirpath: Some(folder.to_path_buf()),
            filename: Some(format!("{strategy}-{ranks}-weights")),
            save_weights_only: true,
            ..Default::default()
        };
        let saver = ModelCheckpoint::new(config).unwrap();
        let saves = builder(ranks, strategy, folder).callback(SaveAfter(2, path.clone()));
        let mut trainer = saves.enable_checkpointing(true).callback(saver).max_epochs(1).build().unwrap();
        let mut whole = net(0.0);
        trainer.fit(&mut whole, &mut all_loaders(12 * ranks as i64)).unwrap();
        trainer.save_weights(&whole, folder.join("whole.ckpt"), None).unwrap();
        if trainer.is_global_zero() {
            let is_folder = ranks > 1 && strategy != "ddp";
            assert_eq!(path.is_dir(), is_folder, "{strategy}");
            let of_weights = folder.join(format!("{strategy}-{ranks}-weights.ckpt"));
            for path in [&path, &of_weights] {
                let saved = Checkpoint::load(path).unwrap();
                let mut names: Vec<&str> = saved.weights.iter().map(|(name, _)| name.as_str()).collect();
                names.sort_unstable();
                assert_eq!(names, ["second.bias", "second.weight"], "{}", path.display());
                assert_eq!(saved.meta.frozen, ["first.weight", "first.bias"], "{}", path.display());
            }
            let all = Checkpoint::load(folder.join("whole.ckpt")).unwrap();
            assert_same("weights are saved whole", &sorted(all.weights), &sorted(weights(&whole)));
            assert!(all.meta.frozen.is_empty());
        }
        let mut resumed = net(0.0);
        let mut trainer = builder(ranks, strategy, folder).max_epochs(1).build().unwrap();
        trainer.ckpt_path(&path).fit(&mut resumed, &mut all_loaders(12 * ranks as i64)).unwrap();
        assert_same(strategy, &weights(&resumed), &weights(&whole));
    }
}

/// Any number of ranks, with any strategy, takes what is there; the module's own values stand for the rest.
fn go_on(ranks: usize, folder: &Path) {
    for own in STRATEGIES {
        for (saved_by, strategy) in [(1, "zero3"), (2, "ddp"), (2, "zero1"), (2, "zero3")] {
            let path = path(saved_by, strategy, folder);
            let what = format!("{own} from {}", path.display());
            let (mut own_net, saved) = (net(0.5), Checkpoint::load(&path).unwrap());
            let mut expected: Vec<(String, Tensor)> = saved.weights;
            expected.extend(weights(&own_net).into_iter().filter(|(name, _)| name.starts_with("first.")));
            let mut trainer = builder(ranks, own, folder).max_epochs(2).build().unwrap();
            trainer.ckpt_path(&path).test(&mut own_net, &mut all_loaders(8)).unwrap();
            assert_same(&what, &sorted(weights(&own_net)), &sorted(expected));
            // and training goes on from it
            let mut trainer = builder(ranks, own, folder).max_epochs(2).build().unwrap();
            trainer.ckpt_path(&path).fit(&mut own_net, &mut all_loaders(12 * ranks as i64)).unwrap();
            assert!(trainer.global_step() > 3, "{what}");
        }
    }
}

#[test]
fn any_number_of_ranks_takes_checkpoints_without_frozen_parameters() {
    let test = "frozen::any_number_of_ranks_takes_checkpoints_without_frozen_parameters";
    on_ranks_in_turn(test, &[(1, leave), (2, leave), (1, go_on), (2, go_on), (3, go_on)]);
}

/// What is not frozen now cannot be left as it is.
fn refuses(ranks: usize, folder: &Path) {
    for strategy in ["ddp", "zero3"] {
        let path = path(ranks, strategy, folder);
        let mut trainer = builder(ranks, strategy, folder)
            .callback(SaveAfter(2, path.clone()))
            .max_epochs(1)
            .build()
            .unwrap();
        trainer.fit(&mut net(0.0), &mut all_loaders(12 * ranks as i64)).unwrap();
        for stage in ["fit", "test"] {
            let mut trainer = builder(ranks, strategy, folder).max_epochs(1).build().unwrap();
            let (mut own, mut data) = (net(0.0), all_loaders(12 * ranks as i64));
            let _ = own.first.weight.set_requires_grad(true);
            trainer.ckpt_path(&path);
            let error = match stage {
                "fit" => trainer.fit(&mut own, &mut data).unwrap_err(),
                _ => trainer.test(&mut own, &mut data).unwrap_err(),
            };
            let error = error.to_string();
            for named in
                ["leaves out 2 parameters", "1 of them are not frozen", "first.weight", "freeze them before"]
            {
                assert!(error.contains(named), "{strategy}, {stage}: `{named}` is missing: {error}");
            }
        }
    }
}

/// A layer that is unfrozen in the fit has one master weight, whoever is asked for it: the run is saved, and goes on as before.
fn unfreezes(ranks: usize, folder: &Path) {
    struct Unfreeze;
    impl Callback for Unfreeze {
        fn on_train_batch_start(
            &mut self,
            ctx: &mut HookContext,
            module: &mut dyn Module,
        ) -> anyhow::Result<()> {
            if ctx.global_step() >= 2 {
                module.set_requires_grad(true);
            }
            Ok(())
        }
    }
    for stage in STAGES {
        let path = folder.join(format!("unfrozen-{stage}.ckpt"));
        let run = |has_masters: bool, from: Option<&Path>| {
            let builder = silent(ranks, stage, folder).precision("bf16-true").max_epochs(1);
            let builder = builder.callback(Unfreeze).callback(SaveAfter(3, path.clone()));
            let mut trainer = resumed(builder, from);
            let mut net = Small { has_masters, ..net(0.0) };
            trainer.fit(&mut net, &mut all_loaders(24 * ranks as i64)).unwrap();
            weights(&net)
        };
        let expected = run(false, None);
        assert_same(stage, &run(true, None), &expected);
        assert_same(&format!("{stage}, resumed"), &run(true, Some(&path)), &expected);
    }
}

/// A head that is trained alone for an epoch: the same bits with each strategy, and after a resume in each epoch.
fn trains_the_head_first(ranks: usize, folder: &Path) {
    let mut expected: Option<Vec<(String, Tensor)>> = None;
    let bf16 = |(name, weight): (String, Tensor)| (name, weight.to_kind(Kind::BFloat16));
    let untouched: Vec<_> = sorted(weights(&Small::new())).into_iter().map(bf16).collect();
    for strategy in ["ddp"].into_iter().chain(STAGES) {
        let of_strategy = folder.join(strategy);
        let path = move |epoch: u64| of_strategy.join(format!("{epoch}.ckpt"));
        let run = |max_epochs, from: Option<&Path>| {
            let config = BackboneFinetuningConfig {
                backbone: "first".into(),
                unfreeze_backbone_at_epoch: 1,
                ..Default::default()
            };
            let to = path.clone();
            let save = LambdaCallback::new().on_train_batch_end(move |ctx, _| {
                if ctx.batch_idx() == 1 {
                    ctx.request_checkpoint(full_checkpoint(to(ctx.current_epoch())));
                }
                Ok(())
            });
            let builder = silent(ranks, strategy, folder).precision("bf16-true").max_epochs(max_epochs);
            let builder = builder.callback(BackboneFinetuning::new(config)).callback(save);
            let mut net = Small { has_masters: strategy == "ddp", ..Small::new() };
            resumed(builder, from).fit(&mut net, &mut all_loaders(24 * ranks as i64)).unwrap();
            sorted(weights(&net))
        };
        let alone = run(1, None);
        assert_same(strategy, &alone[..2], &untouched[..2]); // `first.bias` and `first.weight`
        let all = run(3, None);
        assert_ne!(all[1], untouched[1], "{strategy}");
        for epoch in 0..3 {
            let path = path(epoch);
            assert_same(&format!("{strategy}, resumed in epoch {epoch}"), &run(3, Some(&path)), &all);
        }
        match &expected {
            Some(expected) => assert_same(strategy, &all, expected),
            None => expected = Some(all),
        }
    }
}

on_ranks_tests! {
    a_head_is_trained_alone_at_first: 2, trains_the_head_first;
    parameters_that_are_left_out_must_be_frozen: 2, refuses;
    an_unfrozen_layer_has_one_master_weight: 2, unfreezes;
}

/// Two layers, of which the first is frozen and the last is trained without ever being used.
#[derive(Module)]
struct Unused {
    net: Small,
    unused: Linear,
    #[module(skip)]
    is_lion: bool,
}

impl Unused {
    fn new(is_lion: bool) -> Self {
        Self { net: net(0.0), unused: numbered(Linear::new(4, 6).unwrap()), is_lion }
    }
}

impl LightningModule for Unused {
    type Batch = Batch;

    fn training_step(&self, (x, y): &Batch, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        self.net.loss(x, y)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(match self.is_lion {
            true => Lion::new(0.01).master_weights(true).into(),
            false => AdamW::new(0.01).master_weights(true).into(),
        })
    }
}

fn of_unused(is_lion: bool, saved_by: &str, folder: &Path) -> PathBuf {
    folder.join(format!("unused-{is_lion}-{saved_by}.ckpt"))
}

const READERS: [&str; 4] = ["zero1", "zero2", "zero3", "ddp_find_unused_parameters_true"];

fn save_unused(ranks: usize, folder: &Path) {
    for (is_lion, strategy) in [false, true].into_iter().flat_map(|lion| READERS.map(|own| (lion, own))) {
        let saves = SaveAfter(2, of_unused(is_lion, strategy, folder));
        let builder = silent(ranks, strategy, folder).precision("bf16-true").max_epochs(1).callback(saves);
        builder.build().unwrap().fit(&mut Unused::new(is_lion), &mut loaders(12 * ranks as i64)).unwrap();
    }
}

/// Every strategy reads what the others have saved; it gives the weights of the run that has saved it.
fn read_unused(ranks: usize, folder: &Path) {
    for (is_lion, saved_by) in [false, true].into_iter().flat_map(|lion| READERS.map(|own| (lion, own))) {
        let path = of_unused(is_lion, saved_by, folder);
        let run = |strategy: &str| {
            let strategy = if ranks == 1 { "auto" } else { strategy };
            let builder = silent(ranks, strategy, folder).precision("bf16-true").max_epochs(2);
            let mut trainer = builder.build().unwrap();
            let mut net = Unused::new(is_lion);
            trainer.ckpt_path(&path).fit(&mut net, &mut loaders(12 * 2)).unwrap();
            weights(&net)
        };
        let expected = run(saved_by);
        for strategy in READERS.into_iter().take(if ranks == 1 { 1 } else { 4 }) {
            assert_same(&format!("{strategy} from {saved_by}, Lion: {is_lion}"), &run(strategy), &expected);
        }
    }
}

#[test]
fn frozen_and_unused_parameters_with_master_weights_are_read_by_all_strategies() {
    let test = "frozen::frozen_and_unused_parameters_with_master_weights_are_read_by_all_strategies";
    on_ranks_in_turn(test, &[(2, save_unused), (1, read_unused), (2, read_unused)]);
}
