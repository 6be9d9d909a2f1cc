//! Checkpoints that someone else has written: what a run may do because of them, and what it must not.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;
use voltaic::callback::{ModelCheckpoint, ModelCheckpointConfig, SaveLast};
use voltaic::checkpoint::{Checkpoint, TrainingState};
use voltaic::trainer::TrainerBuilder;

use crate::probe::{Probe, loaders, names, silent};
use crate::rng::seeded;

/// Each epoch is better than the one before, so that each replaces a checkpoint.
const VAL_LOSSES: &[f64] = &[0.5, 0.25, 0.125, 0.0625];

fn saver(folder: &Path) -> TrainerBuilder {
    let config = ModelCheckpointConfig {
        dirpath: Some(folder.to_path_buf()),
        monitor: Some("val_loss".to_owned()),
        save_last: SaveLast::Copy(true),
        ..ModelCheckpointConfig::default()
    };
    silent().enable_checkpointing(true).callback(ModelCheckpoint::new(config).unwrap())
}

/// Lets `change` edit the state of the ModelCheckpoint in a checkpoint.
fn tamper(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut checkpoint = Checkpoint::load(path).unwrap();
    let callbacks = &mut checkpoint.training.as_mut().unwrap().json["callbacks"];
    let mut saved = callbacks.as_array_mut().unwrap().iter_mut();
    let state = saved.find(|saved| saved[0].as_str().unwrap().starts_with("ModelCheckpoint")).unwrap();
    change(&mut state[1]);
    checkpoint.save(path).unwrap();
}

#[test]
fn what_a_checkpoint_names_outside_its_folder_is_left_alone() {
    let _rng = seeded(1);
    let root = TempDir::new().unwrap();
    let outside = root.path().join("outside");
    let victims: [(&str, PathBuf); 5] = [
        ("own/../outside/a.ckpt", outside.join("a.ckpt")),
        ("outside/b.ckpt", outside.join("b.ckpt")),
        ("own/link/c.ckpt", outside.join("c.ckpt")),
        ("own/sub/../../outside/d.ckpt", outside.join("d.ckpt")),
        ("own/notes.txt", root.path().join("own/notes.txt")),
    ];
    for (named, victim) in victims {
        let folder = root.path().join("own");
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&outside).unwrap();
        saver(&folder)
            .max_epochs(1)
            .build()
            .unwrap()
            .fit(&mut Probe::logging(VAL_LOSSES), &mut loaders())
            .unwrap();
        std::fs::create_dir_all(folder.join("sub")).unwrap();
        std::os::unix::fs::symlink(&outside, folder.join("link")).unwrap();
        std::fs::write(&victim, "mine").unwrap();
        let last = folder.join("last.ckpt");
        tamper(&last, |state| {
            state["best_k_models"] = json!([{"path": root.path().join(named), "score": 9.0}]);
        });
        let mut trainer = saver(&folder).max_epochs(3).build().unwrap();
        trainer.ckpt_path(&last).fit(&mut Probe::logging(VAL_LOSSES), &mut loaders()).unwrap();
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "mine", "{named}");
        // the run keeps its own best, and removes what that replaces
        let kept: Vec<String> = names(&folder).into_iter().filter(|name| name.ends_with(".ckpt")).collect();
        assert_eq!(kept, ["epoch=0-step=6.ckpt", "epoch=2-step=18.ckpt", "last.ckpt"], "{named}");
    }
}

/// Fits again from a checkpoint of one epoch that was changed; what the error says.
fn refusal(change: impl FnOnce(&mut TrainingState)) -> String {
    let root = TempDir::new().unwrap();
    let fit = |epochs: i64, from: Option<&Path>| {
        let mut trainer = saver(root.path()).max_epochs(epochs).build().unwrap();
        if let Some(path) = from {
            trainer.ckpt_path(path);
        }
        trainer.fit(&mut Probe::logging(VAL_LOSSES), &mut loaders())
    };
    fit(1, None).unwrap();
    let last = root.path().join("last.ckpt");
    let mut checkpoint = Checkpoint::load(&last).unwrap();
    change(checkpoint.training.as_mut().unwrap());
    checkpoint.save(&last).unwrap();
    fit(2, Some(&last)).unwrap_err().to_string()
}

/// Ranks that read their own parts ask for the states by name.
#[test]
fn a_checkpoint_without_the_optimizers_that_it_lists_is_refused() {
    let _rng = seeded(1);
    let error = refusal(|training| training.optimizers.clear());
    assert!(error.contains("it has states of 0 optimizers, and lists 1"), "{error}");
}

/// Names and numbers of names are those of the file.
#[test]
fn an_error_of_many_or_long_names_is_short() {
    let _rng = seeded(1);
    let value = || tch::Tensor::from(1.0_f32);
    let many = (0..2000).map(|index| (format!("exp_avg.layer{index}"), value()));
    let long = [(format!("exp_avg.{}", "n".repeat(1 << 20)), value())];
    for more in [many.collect::<Vec<_>>(), long.into()] {
        let error = refusal(|training| training.optimizers[0].extend(more));
        assert!(error.contains("last.ckpt: unexpected exp_avg.") && error.len() < 5000, "{error:.500}");
    }
}

#[test]
fn a_generator_that_cannot_be_set_is_refused_with_its_file() {
    let _rng = seeded(1);
    let error = refusal(|training| {
        training.rng.iter_mut().for_each(|(_, state)| *state = state.narrow(0, 0, 3).copy());
    });
    let expected = ["last.ckpt", "its random states cannot be set", "use another checkpoint"];
    assert!(expected.iter().all(|part| error.contains(part)), "{error}");
}

#[test]
fn the_last_checkpoint_overwrites_no_file_of_another_name() {
    let _rng = seeded(1);
    let root = TempDir::new().unwrap();
    let folder = root.path().join("own");
    saver(&folder)
        .max_epochs(1)
        .build()
        .unwrap()
        .fit(&mut Probe::logging(VAL_LOSSES), &mut loaders())
        .unwrap();
    let (last, notes) = (folder.join("last.ckpt"), folder.join("last-notes.txt"));
    std::fs::write(&notes, "mine").unwrap();
    tamper(&last, |state| state["last_model_path"] = json!(notes));
    let mut trainer = saver(&folder).max_epochs(2).build().unwrap();
    trainer.ckpt_path(&last).fit(&mut Probe::logging(VAL_LOSSES), &mut loaders()).unwrap();
    assert_eq!(std::fs::read_to_string(&notes).unwrap(), "mine");
    assert_eq!(Checkpoint::load(folder.join("last-v1.ckpt")).unwrap().meta.global_step, 12);
}

/// A file of version 1, which has no checksum, with one tensor of three floats.
fn crafted(path: &Path, own: &Value, shape: &str) {
    let header = json!({"__metadata__": {"voltaic": own.to_string()}}).to_string();
    let tensor = format!(r#","w":{{"dtype":"F32","shape":{shape},"data_offsets":[0,12]}}}}"#);
    let header = format!("{}{tensor}", &header[..header.len() - 1]);
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 12]].concat();
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn numbers_of_a_header_are_bounded() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("a.ckpt");
    let header = |num_optimizers: Value, training: Value| {
        let meta = json!({
            "format_version": 1, "voltaic_version": "0", "epoch": 0, "global_step": 0, "module": "", "hyper_parameters": null,
        });
        json!({"meta": meta, "training": training, "num_optimizers": num_optimizers})
    };
    crafted(&path, &header(json!(2), json!({})), "[3]");
    assert_eq!(Checkpoint::load(&path).unwrap().training.unwrap().optimizers.len(), 2);
    for number in [u64::MAX, 1 << 62, 1 << 40, 65_537] {
        crafted(&path, &header(json!(number), json!({})), "[3]");
        assert_error!(Checkpoint::load(&path), &format!("it lists {number} optimizers, at most 65536"));
    }
    let shape = format!("[3{}]", ",1".repeat(100));
    crafted(&path, &header(json!(0), Value::Null), &shape);
    assert!(Checkpoint::load(&path).unwrap_err().to_string().contains("too large"));
    // two bytes of text are a value of many
    let values = Value::Array(vec![Value::from(1); 3_000_000]);
    crafted(&path, &header(json!(0), values), "[3]");
    assert_error!(Checkpoint::load(&path), "training state is too large", "16 times its size");
}

#[test]
fn a_gradient_of_another_shape_is_refused() {
    let _rng = seeded(1);
    let folder = TempDir::new().unwrap();
    let build = || {
        let config = ModelCheckpointConfig {
            dirpath: Some(folder.path().to_path_buf()),
            every_n_train_steps: Some(1),
            ..ModelCheckpointConfig::default()
        };
        let builder = silent().enable_checkpointing(true).max_epochs(1).accumulate_grad_batches(4_u64);
        builder.callback(ModelCheckpoint::new(config).unwrap()).build().unwrap()
    };
    build().fit(&mut Probe::default(), &mut loaders()).unwrap();
    let path = voltaic_files(folder.path());
    for shape in [vec![7], vec![0], vec![1, 1, 1]] {
        let mut checkpoint = Checkpoint::load(&path).unwrap();
        let fqn = checkpoint.weights[0].0.clone();
        let grad = voltaic::Tensor::zeros(&shape, (voltaic::Kind::Float, tch::Device::Cpu));
        checkpoint.training.as_mut().unwrap().grads = vec![(fqn.clone(), grad)];
        checkpoint.save(&path).unwrap();
        let mut trainer = build();
        let error =
            trainer.ckpt_path(&path).fit(&mut Probe::default(), &mut loaders()).unwrap_err().to_string();
        assert!(error.contains(&format!("its gradient of {fqn} has shape {shape:?}")), "{error}");
    }
}

fn voltaic_files(folder: &Path) -> PathBuf {
    folder.join(&names(folder)[0])
}
