//! How checkpoints reach storage: the trait, the asynchronous wrapper, the one for HPUs.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crossbeam_channel::{Receiver, Sender, unbounded};
use serde_json::{Value, json};
use tempfile::TempDir;
use voltaic::callback::{LinkText, ModelCheckpoint, ModelCheckpointConfig, SaveLast};
use voltaic::checkpoint::{
    AsyncCheckpointIo, Checkpoint, CheckpointIo, CheckpointMeta, FileCheckpointIo, HpuCheckpointIo,
};
use voltaic::error::Result;
use voltaic::nn::{Linear, ModuleExt};
use voltaic::trainer::PluginConfig;
use voltaic::{Error, Kind, Tensor};

use crate::probe::{Probe, loaders, names, silent};
use crate::rng::seeded;

fn checkpoint(value: f64) -> Checkpoint {
    Checkpoint {
        weights: vec![("w".to_owned(), Tensor::full([1000], value, (Kind::Float, tch::Device::Cpu)))],
        meta: CheckpointMeta { global_step: value as u64, ..CheckpointMeta::default() },
        ..Checkpoint::default()
    }
}

fn value_in(path: &Path) -> f64 {
    Checkpoint::load(path).unwrap().weights[0].1.double_value(&[0])
}

/// Does what it does only when the test lets it, or fails.
struct Gated {
    gate: Receiver<bool>,
    calls: Arc<Mutex<Vec<String>>>,
}

fn gated() -> (Sender<bool>, Arc<Mutex<Vec<String>>>, AsyncCheckpointIo) {
    let (open, gate) = unbounded();
    let calls = Arc::new(Mutex::new(Vec::new()));
    let io = AsyncCheckpointIo::around(Gated { gate, calls: Arc::clone(&calls) });
    (open, calls, io)
}

impl Gated {
    fn note(&self, what: &str, path: &Path) {
        let name = path.file_name().unwrap().to_string_lossy();
        self.calls.lock().unwrap().push(format!("{what} {name}"));
    }
}

impl CheckpointIo for Gated {
    fn save_checkpoint(&mut self, checkpoint: &Checkpoint, path: &Path, _: Option<&Value>) -> Result<()> {
        if !self.gate.recv().unwrap() {
            let full = std::io::Error::from(std::io::ErrorKind::StorageFull);
            return Err(Error::io("write", path, full));
        }
        self.note("save", path);
        checkpoint.save(path)
    }

    fn remove_checkpoint(&mut self, path: &Path) -> Result<()> {
        self.note("remove", path);
        FileCheckpointIo.remove_checkpoint(path)
    }

    fn link_checkpoint(&mut self, target: &Path, path: &Path) -> Result<()> {
        self.note("link", path);
        FileCheckpointIo.link_checkpoint(target, path)
    }
}

#[test]
fn training_goes_on_while_a_snapshot_is_written() {
    let folder = TempDir::new().unwrap();
    let (old, new) = (folder.path().join("old.ckpt"), folder.path().join("new.ckpt"));
    checkpoint(1.0).save(&old).unwrap();
    let (open, calls, mut io) = gated();
    let mut live = checkpoint(2.0);
    io.save_checkpoint(&live, &new, None).unwrap();
    io.link_checkpoint(&new, &folder.path().join("last.ckpt")).unwrap();
    io.remove_checkpoint(&old).unwrap();
    // the next step changes the weights in place, and nothing is written yet
    live.weights[0].1 = live.weights[0].1.fill_(3.0);
    assert_eq!(names(folder.path()), ["old.ckpt"]);
    open.send(true).unwrap();
    io.teardown().unwrap();
    assert_eq!(*calls.lock().unwrap(), ["save new.ckpt", "link last.ckpt", "remove old.ckpt"]);
    assert_eq!(names(folder.path()), ["last.ckpt@", "new.ckpt"]);
    assert_eq!((value_in(&new), value_in(&folder.path().join("last.ckpt"))), (2.0, 2.0));
}

#[test]
fn a_failed_write_keeps_the_old_checkpoint_and_shows_at_the_next_save() {
    let folder = TempDir::new().unwrap();
    let [a, b, c] = ["a.ckpt", "b.ckpt", "c.ckpt"].map(|name| folder.path().join(name));
    checkpoint(1.0).save(&a).unwrap();
    let (open, calls, mut io) = gated();
    io.save_checkpoint(&checkpoint(2.0), &b, None).unwrap();
    io.remove_checkpoint(&a).unwrap();
    open.send(false).unwrap();
    // at the latest when a third snapshot would be made, or at the end
    let error = io.teardown().expect_err("the disk was full").to_string();
    assert!(error.contains("b.ckpt") && error.contains("free some disk space"), "{error}");
    assert_eq!(names(folder.path()), ["a.ckpt"], "what it would have replaced is there");
    // it can be used further
    io.save_checkpoint(&checkpoint(3.0), &c, None).unwrap();
    io.remove_checkpoint(&a).unwrap();
    open.send(true).unwrap();
    assert_eq!(io.load_checkpoint(&c).unwrap().meta.global_step, 3, "loading waits for the write");
    io.teardown().unwrap();
    assert_eq!(*calls.lock().unwrap(), ["save c.ckpt", "remove a.ckpt"]);

    let (open, _, mut io) = gated();
    for result in [false, true, true] {
        open.send(result).unwrap();
    }
    io.save_checkpoint(&checkpoint(4.0), &b, None).unwrap();
    let mut saves = (0..2).map(|_| io.save_checkpoint(&checkpoint(5.0), &c, None));
    assert!(saves.any(|result| result.is_err()), "two snapshots are the most");
}

/// Counts saves.
struct Counting(Arc<AtomicUsize>);

impl CheckpointIo for Counting {
    fn save_checkpoint(&mut self, checkpoint: &Checkpoint, path: &Path, _: Option<&Value>) -> Result<()> {
        self.0.fetch_add(1, Ordering::Relaxed);
        checkpoint.save(path)
    }
}

fn saver(folder: &Path) -> ModelCheckpoint {
    let config = ModelCheckpointConfig {
        dirpath: Some(folder.to_path_buf()),
        every_n_train_steps: Some(2),
        save_last: SaveLast::Link(LinkText::Link),
        ..Default::default()
    };
    ModelCheckpoint::new(config).unwrap()
}

#[test]
fn a_run_saves_and_resumes_through_what_the_builder_was_given() {
    let folder = TempDir::new().unwrap();
    let count = Arc::new(AtomicUsize::new(0));
    let builder = silent().enable_checkpointing(true).max_epochs(1).callback(saver(folder.path()));
    let mut trainer =
        builder.checkpoint_io(AsyncCheckpointIo::around(Counting(count.clone()))).build().unwrap();
    trainer.fit(&mut Probe::default(), &mut loaders()).unwrap();
    assert_eq!(count.load(Ordering::Relaxed), 3);
    assert_eq!(names(folder.path()), ["epoch=0-step=6.ckpt", "last.ckpt@"]);

    // the same by class name, and the file is the same as without
    let bytes = |plugins: Vec<PluginConfig>| {
        let folder = TempDir::new().unwrap();
        let builder = silent().enable_checkpointing(true).max_epochs(1).callback(saver(folder.path()));
        let mut trainer = builder.plugins(plugins).build().unwrap();
        voltaic::trainer::seed_everything(3).unwrap();
        trainer.fit(&mut Probe::default(), &mut loaders()).unwrap();
        let last = Checkpoint::load(folder.path().join("last.ckpt")).unwrap();
        last.weights
            .iter()
            .map(|(name, tensor)| format!("{name} {tensor:?} {}", tensor.sum(Kind::Double)))
            .collect::<Vec<_>>()
    };
    let plain = bytes(Vec::new());
    assert_eq!(bytes(vec![PluginConfig::AsyncCheckpointIo]), plain);
    assert_eq!(bytes(vec![PluginConfig::AsyncCheckpointIo, PluginConfig::HpuCheckpointIo]), plain);
}

#[test]
fn a_writer_that_fails_ends_the_run_with_its_error() {
    let folder = TempDir::new().unwrap();
    let (open, _, io) = gated();
    (0..9).for_each(|_| open.send(false).unwrap());
    let builder = silent().enable_checkpointing(true).max_epochs(1).callback(saver(folder.path()));
    let mut trainer = builder.checkpoint_io(io).build().unwrap();
    let error = trainer.fit(&mut Probe::default(), &mut loaders()).expect_err("the disk is full");
    assert!(error.to_string().contains("free some disk space"), "{error}");
}

#[test]
fn storage_options_are_refused_by_name() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("sub/a.ckpt");
    let options = json!({"bucket": "b", "key": "k"});
    for (class, io) in [
        ("FileCheckpointIo", &mut FileCheckpointIo as &mut dyn CheckpointIo),
        ("HpuCheckpointIo", &mut HpuCheckpointIo),
    ] {
        let error =
            io.save_checkpoint(&checkpoint(1.0), &path, Some(&options)).expect_err("unknown").to_string();
        assert!(error.contains("Trainer.save_checkpoint") && error.contains(class), "{error}");
        assert!(error.contains("bucket, key") && !path.exists(), "{error}");
        io.save_checkpoint(&checkpoint(2.0), &path, None).unwrap();
        assert_eq!(value_in(&path), 2.0, "the folder is made");
        io.remove_checkpoint(&path).unwrap();
    }
    let mut trainer = silent().build().unwrap();
    let error = trainer.save_weights(&Probe::default(), &path, Some(&options)).expect_err("unknown");
    assert!(error.to_string().contains("bucket"), "{error}");
    trainer.save_weights(&Probe::default(), &path, None).unwrap();
    assert!(!Checkpoint::load(&path).unwrap().weights.is_empty());
}

#[test]
fn a_class_given_twice_is_refused() {
    let plugins = vec![PluginConfig::AsyncCheckpointIo, PluginConfig::AsyncCheckpointIo];
    assert_contains!(silent().plugins(plugins).build().err().expect("twice").to_string(), "trainer.plugins");
    let builder = silent().plugins(vec![PluginConfig::HpuCheckpointIo]).checkpoint_io(FileCheckpointIo);
    assert!(builder.build().err().expect("twice").to_string().contains("give one of the two"));
}

#[test]
fn names_that_do_not_fit_are_told() {
    let _rng = seeded(1);
    let (from, to) = (Linear::new(3, 2).unwrap(), Linear::new(3, 2).unwrap());
    let before = Vec::<f32>::try_from(to.weight.detach().flatten(0, -1)).unwrap();
    let prefixed: Vec<(String, Tensor)> =
        from.state_dict().into_iter().map(|(name, tensor)| (format!("model.{name}"), tensor)).collect();
    assert_error!(
        to.load_state_dict(&prefixed, false),
        "none of the names fits: 2 missing (weight, bias), 2 unexpected (model.bias, model.weight); take the prefix `model.` off"
    );
    assert_eq!(before, Vec::<f32>::try_from(to.weight.detach().flatten(0, -1)).unwrap());
    let mut partly = prefixed;
    partly[0].0 = "weight".to_owned();
    let keys = to.load_state_dict(&partly, false).unwrap();
    assert_eq!(
        (keys.missing_keys, keys.unexpected_keys),
        (vec!["bias".to_owned()], vec!["model.bias".to_owned()])
    );
    assert!(to.weight.detach().equal(&from.weight.detach()));
    assert!(to.load_state_dict(&from.state_dict(), true).unwrap().is_empty());
    assert!(to.load_state_dict(&[], false).is_ok(), "nothing was to be loaded");
    assert_error!(
        to.load_state_dict(&partly, true),
        "missing bias, unexpected model.bias",
        "take the prefix `model.` off",
    );
}
