//! Modules that stay sharded after a call, until somebody asks for them.

use std::path::Path;

use voltaic::callback::{ModelCheckpoint, ModelCheckpointConfig};
use voltaic::checkpoint::{Checkpoint, read_weights, write_weights};
use voltaic::models::{Gpt, GptConfig};
use voltaic::nn::{Forward, ModuleExt, init};
use voltaic::strategy::{Strategy, Zero, ZeroConfig, ZeroStage};
use voltaic::trainer::TrainerBuilder;
use voltaic::{Module, Tensor};

use crate::deferred::{large, peak};
use crate::ladder::gpt;
use crate::models::{Kernels, Odd, Small, all_loaders, loaders, numbers, tokens};
use crate::ranks::{assert_same, folder_of_rank, output, silent, weights};
use crate::shards::{sorted, staged};
use crate::stage3::bare;

/// Stage 3 that lets no parameter stay, and gives none back.
fn resting(ranks: usize, folder: &Path) -> TrainerBuilder {
    silent(ranks, "zero3", folder).strategy(|world| {
        let config = ZeroConfig {
            param_persistence_threshold: 0,
            gather_after_fit: false,
            ..ZeroConfig::of_stage(ZeroStage::Three)
        };
        Ok(Box::new(Zero::new(world, config)) as Box<dyn Strategy>)
    })
}

fn num_sharded(module: &impl Module) -> usize {
    module.parameters().iter().filter(|parameter| parameter.is_sharded()).count()
}

/// Two fits and the calls between them, of one trainer.
fn run(builder: TrainerBuilder, folder: &Path, name: &str) -> (Vec<(String, Tensor)>, Vec<Option<f64>>) {
    let stays = name == "zero3";
    let path = |what: &str| folder.join(format!("{name}-{what}.ckpt"));
    let mut net = Small::new();
    let mut trainer = builder.max_epochs(1).build().unwrap();
    let mut data = all_loaders(24);
    trainer.fit(&mut net, &mut data).unwrap();
    let mut seen = Vec::new();
    let mut note = |metric: Option<f64>, net: &Small| {
        assert_eq!(num_sharded(net), if stays { 4 } else { 0 });
        seen.push(metric);
    };
    trainer.save_weights(&net, path("weights"), None).unwrap();
    trainer.validate(&mut net, &mut data).unwrap();
    note(trainer.metric("val_loss"), &net);
    trainer.save_checkpoint(&mut net, &mut data, path("full"), None).unwrap();
    trainer.test(&mut net, &mut data).unwrap();
    note(trainer.metric("test_loss"), &net);
    let predictions: Vec<Tensor> =
        trainer.predict(&mut net, &mut data).unwrap().into_iter().flatten().collect();
    note(Some(predictions.iter().map(|it| it.double_value(&[0, 0])).sum()), &net);
    let _ = net.first.weight.set_requires_grad(false);
    trainer.fit(&mut net, &mut data).unwrap();
    note(trainer.metric("train_loss_epoch"), &net);
    trainer.test(&mut net, &mut data).unwrap();
    note(trainer.metric("test_loss"), &net);
    trainer.gather_weights(&net).unwrap();
    assert_eq!(num_sharded(&net), 0);
    assert!(net.parameters().iter().all(|parameter| !parameter.is_kept()));
    trainer.gather_weights(&net).unwrap(); // which changes nothing
    (weights(&net), seen)
}

fn calls(accelerator: &str, ranks: usize, folder: &Path) {
    let ddp = silent(ranks, "ddp", folder).accelerator(accelerator);
    let (expected, expected_seen) = run(ddp, folder, "ddp");
    let (own, seen) = run(resting(ranks, folder).accelerator(accelerator), folder, "zero3");
    assert_same("weights", &own, &expected);
    assert_eq!(seen, expected_seen);
    let read = |name: &str| sorted(read_weights(&folder.join(name)).unwrap());
    assert!(folder.join("zero3-weights.ckpt").is_file() && folder.join("zero3-full.ckpt").is_dir());
    assert_same("file", &read("zero3-weights.ckpt"), &read("ddp-weights.ckpt"));
    assert_same("folder", &read("zero3-full.ckpt"), &read("ddp-full.ckpt"));
}

on_ranks_tests! {
    two_ranks_go_on_with_a_divided_module: 2, |ranks, folder| calls("cpu", ranks, folder);
    three_ranks_go_on_with_a_divided_module: 3, |ranks, folder| calls("cpu", ranks, folder);
    hpus_go_on_with_a_divided_module: 2, |ranks, folder| calls("hpu", ranks, folder);
}

/// A touch from outside names the way, on the rank that touches, and waits for nobody.
fn touched(ranks: usize, folder: &Path) {
    let mut net = Small::new();
    let mut trainer = resting(ranks, folder).max_epochs(1).build().unwrap();
    trainer.fit(&mut net, &mut loaders(8)).unwrap();
    let refused = |error: String, expected: &str| {
        let names = error.contains("is sharded over the ranks") && error.contains("t.weight");
        assert!((names || error.contains(".bias")) && error.contains(expected), "{error}");
    };
    let way = "trainer.gather_weights";
    if trainer.is_global_zero() {
        refused(net.first.forward(&numbers(&[2, 5], 1.0)).unwrap_err().to_string(), way);
        refused(net.try_state_dict().unwrap_err().to_string(), way);
        refused(net.first.weight.try_tensor().unwrap_err().to_string(), way);
        // without an error of its own: undefined tensors, which nobody saves, and no error of another call
        let error =
            write_weights(&net.state_dict(), &folder.join("none.safetensors")).unwrap_err().to_string();
        assert!(error.contains("is undefined") && error.contains("try_state_dict"), "{error}");
        assert_eq!((net.first.weight.size(), net.num_parameters(true)), (vec![33, 5], 300));
    }
    silent(ranks, "ddp", folder).build().unwrap().fit(&mut Small::new(), &mut loaders(8)).unwrap();
    // another one cannot take it, nor can this one take another one meanwhile
    let mut other = resting(ranks, folder).max_epochs(1).build().unwrap();
    refused(other.fit(&mut net, &mut loaders(8)).unwrap_err().to_string(), way);
    assert_error!(trainer.fit(&mut Small::new(), &mut loaders(8)), "has left its weights sharded", way);
    trainer.gather_weights(&net).unwrap();
    trainer.fit(&mut Small::new(), &mut loaders(8)).unwrap();
    // nobody misses the last one
    trainer.fit(&mut net, &mut loaders(8)).unwrap();
    drop(trainer);
    refused(net.try_state_dict().unwrap_err().to_string(), "is gone");
}

/// With DeepSpeed's class, and for modules that were made without memory.
fn ways(ranks: usize, folder: &Path) {
    let settings = voltaic::strategy::DeepSpeedStrategy {
        stage: 3,
        gather_after_fit: false,
        ..voltaic::strategy::DeepSpeedStrategy::default()
    };
    for (builder, is_divided) in [
        (silent(ranks, "zero3", folder).strategy(settings), false), // small ones stay
        (bare(ranks, folder), true),
    ] {
        let config = GptConfig { vocab_size: 61, n_layer: 2, n_head: 2, n_embd: 128, ..GptConfig::tiny() };
        let mut net = init::deferred(|| Gpt::new(GptConfig { block_size: 16, ..config })).unwrap();
        let mut trainer = builder.max_epochs(1).build().unwrap();
        trainer.fit(&mut net, &mut tokens(8)).unwrap();
        assert_eq!(
            num_sharded(&net) > 0,
            is_divided || net.parameters().iter().any(|it| it.numel() > 100_000)
        );
        trainer.gather_weights(&net).unwrap();
        assert_eq!(num_sharded(&net), 0);
        let sums: Vec<f64> =
            weights(&net).iter().map(|(_, it)| it.sum(voltaic::Kind::Double).double_value(&[])).collect();
        let of_all = trainer.world().group().unwrap().all_gather_object(&sums).unwrap();
        assert!(of_all.iter().all(|of_rank| *of_rank == sums));
    }
}

/// Weights alone are written tensor by tensor, and are those of a data-parallel run.
fn weights_only(ranks: usize, folder: &Path) {
    type Fit<'a> = &'a dyn Fn(TrainerBuilder);
    let same = |name: &str, fit: Fit<'_>| {
        let file = |kind: &str| {
            let config = ModelCheckpointConfig {
                dirpath: Some(folder.to_path_buf()),
                filename: Some(format!("{name}-{kind}")),
                save_weights_only: true,
                ..ModelCheckpointConfig::default()
            };
            let builder = match kind {
                "ddp" => silent(ranks, "ddp_find_unused_parameters_true", folder),
                _ => staged(ranks, kind, folder),
            };
            fit(builder.enable_checkpointing(true).callback(ModelCheckpoint::new(config).unwrap()));
            let checkpoint = Checkpoint::load(folder.join(format!("{name}-{kind}.ckpt"))).unwrap();
            assert!(checkpoint.training.is_none() && checkpoint.meta.global_step > 0);
            sorted(checkpoint.weights)
        };
        let expected = file("ddp");
        for stage in ["zero1", "zero3"] {
            assert_same(&format!("{name} {stage}"), &file(stage), &expected);
        }
    };
    macro_rules! fits {
        ($net:expr, $data:expr) => {
            &|builder: TrainerBuilder| {
                let mut trainer = builder.max_epochs(1).build().unwrap();
                trainer.fit(&mut $net, &mut $data).unwrap();
                trainer.world().barrier().unwrap();
            }
        };
    }
    same("mlp", fits!(Small::new(), loaders(24)));
    same("odd", fits!(Odd::new(), loaders(24)));
    same("kernels", fits!(Kernels::new(), loaders(24)));
    same("gpt", fits!(gpt(), tokens(16)));
}

on_ranks_tests! {
    two_ranks_write_weights: 2, weights_only;
    three_ranks_write_weights: 3, weights_only;
    a_touch_names_the_way: 2, touched;
    deferred_modules_stay_sharded: 2, ways;
    a_file_that_cannot_be_written_ends_all_ranks: 2, not_written;
}

/// If rank 0 cannot write, all ranks know, and the old file stays.
fn not_written(ranks: usize, folder: &Path) {
    let mut net = Small::new();
    let mut trainer = resting(ranks, folder).max_epochs(1).build().unwrap();
    trainer.fit(&mut net, &mut loaders(8)).unwrap();
    std::fs::create_dir_all(folder.join("taken.ckpt")).unwrap();
    std::fs::write(folder.join("taken.ckpt/other"), "x").unwrap();
    let error = trainer.save_weights(&net, folder.join("taken.ckpt"), None).unwrap_err().to_string();
    let group = trainer.world().group().unwrap().clone();
    for other in group.all_gather_object(&error).unwrap() {
        assert_eq!(other, error);
    }
    assert!(error.contains("taken.ckpt") && error.contains("rank 0"), "{error}");
    trainer.save_weights(&net, folder.join("free.ckpt"), None).unwrap();
}

/// Rank 0 has one tensor at a time while it writes.
#[test]
fn no_rank_holds_what_is_written() {
    const GATHERS: &str = "VOLTAIC_TEST_GATHERS";
    const TEST: &str = "rest::no_rank_holds_what_is_written";
    if let Some(folder) = folder_of_rank() {
        let mut net = init::deferred(large);
        let mut trainer = bare(2, &folder).max_steps(1).build().unwrap();
        trainer.fit(&mut net, &mut tokens(8)).unwrap();
        let before = peak();
        trainer.save_weights(&net, folder.join("large.ckpt"), None).unwrap();
        if std::env::var(GATHERS).is_ok() {
            trainer.gather_weights(&net).unwrap();
        }
        return println!("held {}", peak() - before);
    }
    let held = |variables: &[(&str, &str)]| -> usize {
        let folder = tempfile::tempdir().unwrap();
        let output = output(TEST, 2, folder.path(), variables);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        let size = folder.path().join("large.ckpt").metadata().unwrap().len();
        assert!(size > 45 << 20, "{size}");
        let (_, held) = text.split_once("held ").unwrap();
        held.lines().next().unwrap().trim().parse().unwrap()
    };
    let (written, gathered) = (held(&[]), held(&[(GATHERS, "1")]));
    assert!(written < 20 << 20, "{written}");
    println!("writing took {written} bytes, gathering {gathered}");
    assert!(gathered > written + (10 << 20), "{gathered} and {written}");
}
