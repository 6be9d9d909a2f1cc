//! `voltaic convert`: Lightning's checkpoints, PyTorch's state dicts, Hugging Face's names. The files are made by Lightning
//! itself (fixtures/lightning/make_fixtures.py).

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value as Json, json};
use tempfile::TempDir;
use voltaic::callback::{ModelCheckpoint, ModelCheckpointConfig};
use voltaic::checkpoint::pickle::Value;
use voltaic::checkpoint::{
    Checkpoint, TrainingState, from_hugging_face, read_torch, to_hugging_face, write_torch,
};
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::models::{Gpt, GptConfig, ResNet18, ResNet18Config};
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::{BatchNorm1d, Forward, Linear, ModuleExt};
use voltaic::optim::{AdamW, LrSchedulerSpec, Optimizers, StepLr};
use voltaic::trainer::{TrainerBuilder, from_lightning, to_lightning};
use voltaic::{Kind, Module, Tensor};

use crate::checkpoints::resumed;
use crate::probe::{has_hpu, names, silent};

const CPU: tch::Device = tch::Device::Cpu;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/lightning").join(name)
}

fn expected() -> Json {
    serde_json::from_str(&std::fs::read_to_string(fixture("expected.json")).unwrap()).unwrap()
}

/// The module of make_fixtures.py.
#[derive(Module)]
struct Net {
    fc1: Linear,
    bn: BatchNorm1d,
    fc2: Linear,
    #[module(skip)]
    losses: std::sync::Arc<std::sync::Mutex<Vec<f64>>>,
}

impl Net {
    fn new() -> Self {
        Self {
            fc1: Linear::new(4, 8).unwrap(),
            bn: BatchNorm1d::new(8).unwrap(),
            fc2: Linear::new(8, 2).unwrap(),
            losses: Default::default(),
        }
    }
}

impl LightningModule for Net {
    type Batch = (Tensor, Tensor);

    fn training_step(&self, (x, y): &Self::Batch, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let hidden = self.bn.forward(&self.fc1.forward(x)?)?.relu();
        let loss = self.fc2.forward(&hidden)?.mse_loss(y, tch::Reduction::Mean);
        self.losses.lock().unwrap().push(loss.double_value(&[]));
        Ok(loss)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(Optimizers::new(AdamW::new(0.05)).scheduler(LrSchedulerSpec::new(StepLr::new(1, 0.5))))
    }

    fn hyper_parameters(&self) -> Json {
        serde_json::json!({"width": 8, "lr": 0.05})
    }
}

fn data() -> Loaders<(Tensor, Tensor)> {
    let x = Tensor::arange(24 * 4, (Kind::Float, CPU)).reshape([24, 4]).sin();
    let y = Tensor::arange(24 * 2, (Kind::Float, CPU)).reshape([24, 2]).cos();
    let loader = DataLoader::new(TensorDataset::new((x, y)).unwrap()).batch_size(4).build().unwrap();
    Loaders::new().train(loader)
}

fn voltaic(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_voltaic")).args(arguments).output().unwrap()
}

fn convert(input: &Path, output: &Path, options: &[&str]) -> String {
    let mut arguments = vec!["convert", input.to_str().unwrap(), output.to_str().unwrap()];
    arguments.extend(options);
    let ended = voltaic(&arguments);
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    String::from_utf8(ended.stdout).unwrap()
}

/// A trainer that saves to a folder.
fn saver(folder: &Path) -> TrainerBuilder {
    let saver = ModelCheckpoint::new(ModelCheckpointConfig {
        dirpath: Some(folder.to_path_buf()),
        filename: Some("{step}".to_owned()),
        ..Default::default()
    });
    silent().enable_checkpointing(true).callback(saver.unwrap())
}

fn fit(net: &mut Net, max_epochs: i64, ckpt: Option<&Path>, folder: &Path) -> u64 {
    let mut trainer = resumed(saver(folder).max_epochs(max_epochs), ckpt);
    trainer.fit(net, &mut data()).unwrap();
    trainer.global_step()
}

fn assert_close(found: &[f64], expected: &Json, what: &str) {
    let expected: Vec<f64> = serde_json::from_value(expected.clone()).unwrap();
    assert_eq!(found.len(), expected.len(), "{what}");
    for (a, b) in found.iter().zip(expected) {
        // two builds of one libtorch, up to the order of sums
        assert!((a - b).abs() <= 1e-5 * b.abs().max(0.1), "{what}: {a} for {b}");
    }
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.to_kind(Kind::Double).flatten(0, -1)).unwrap()
}

#[test]
fn a_run_of_lightning_goes_on_in_voltaic() {
    let folder = TempDir::new().unwrap();
    let own = folder.path().join("own.ckpt");
    let text = convert(&fixture("lightning.ckpt"), &own, &[]);
    assert!(
        text.contains("voltaic's format, 9 tensors and the training state, epoch 1, global_step 12"),
        "{text}"
    );
    assert!(text.contains("note: the state of callback ModelCheckpoint"), "{text}");
    let mut net = Net::new();
    assert_eq!(fit(&mut net, 4, Some(&own), folder.path()), 24);
    let expected = expected();
    assert_close(&net.losses.lock().unwrap(), &expected["losses"], "losses");
    // the norm takes a bias before it out again: its gradient is rounding noise, which AdamW makes large
    let is_noise = |name: &str| matches!(name, "fc1.bias" | "bn.running_mean");
    for (name, tensor) in net.state_dict().into_iter().filter(|(name, _)| !is_noise(name)) {
        assert_close(&numbers(&tensor), &expected["resumed"][&name], &name);
    }
    let meta = Checkpoint::load(&own).unwrap().meta;
    assert_eq!(meta.hyper_parameters, serde_json::json!({"width": 8, "lr": 0.05}));
}

#[test]
fn a_position_within_an_epoch_is_kept() {
    let file = read_torch(&fixture("mid_epoch.ckpt")).unwrap();
    let converted = from_lightning(&file, None, false).unwrap();
    let progress = &converted.value.training.unwrap().json["progress"];
    let found =
        ["current_epoch", "global_step", "batch_idx", "total_batches"].map(|key| progress[key].as_u64());
    assert_eq!(found, [Some(0), Some(4), Some(4), Some(4)]);
    assert_eq!(progress["epoch_ended"], false);
    assert!(converted.notes.iter().any(|note| note.contains("order of samples")), "{:?}", converted.notes);
    let folder = TempDir::new().unwrap();
    let own = folder.path().join("own.ckpt");
    convert(&fixture("mid_epoch.ckpt"), &own, &[]);
    let mut net = Net::new();
    assert_eq!(fit(&mut net, 1, Some(&own), folder.path()), 6, "two batches are left");
}

#[test]
fn what_voltaic_writes_has_lightnings_layout() {
    let folder = TempDir::new().unwrap();
    let mut net = Net::new();
    fit(&mut net, 2, None, folder.path());
    let own = folder.path().join("step=12.ckpt");
    let path = folder.path().join("lightning.ckpt");
    convert(&own, &path, &[]);
    let (written, real) = (read_torch(&path).unwrap(), read_torch(&fixture("lightning.ckpt")).unwrap());
    let mut differences = Vec::new();
    compare("", &written, &real, &mut differences);
    assert_eq!(differences, Vec::<String>::new());
    // and back: the same run goes on
    let again = folder.path().join("again.ckpt");
    convert(&path, &again, &["--to", "voltaic"]);
    let losses = |ckpt: &Path| {
        let mut net = Net::new();
        let copy = TempDir::new().unwrap(); // its own checkpoint is replaced by the next
        let path = copy.path().join("resumed.ckpt");
        std::fs::copy(ckpt, &path).unwrap();
        fit(&mut net, 4, Some(&path), &copy.path().join("new"));
        net.losses.lock().unwrap().clone()
    };
    assert_eq!(losses(&own), losses(&again));
    // for make_fixtures.py FILE, which resumes it in Lightning itself
    if let Some(keep) = std::env::var_os("VOLTAIC_KEEP_CKPT") {
        std::fs::copy(&path, &keep).unwrap();
        println!("losses {:?}", losses(&own));
    }
}

/// Lists keys and types that differ. Values of loops must be equal, except what the validation and callbacks add.
fn compare(path: &str, own: &Value, real: &Value, differences: &mut Vec<String>) {
    let key = |value: &Value| match value {
        Value::Text(text) => text.clone(),
        other => format!("{other:?}"),
    };
    if path == "/callbacks" {
        return;
    }
    match (own, real) {
        (Value::Dict(own), Value::Dict(real)) => {
            let names = |entries: &[(Value, Value)]| {
                let mut names: Vec<String> = entries.iter().map(|(k, _)| key(k)).collect();
                names.sort();
                names
            };
            // what a schedule is made with stays the user's
            let made_with = ["step_size", "gamma", "_is_initial", "_get_lr_called_within_step"];
            let expected: Vec<String> =
                names(real).into_iter().filter(|name| !made_with.contains(&name.as_str())).collect();
            let own_names: Vec<String> =
                names(own).into_iter().filter(|name| name != "_class_name").collect();
            if own_names != expected {
                differences.push(format!("{path}: {own_names:?} for {expected:?}"));
            }
            for (name, value) in own {
                if let Some((_, other)) = real.iter().find(|(other, _)| key(other) == key(name)) {
                    compare(&format!("{path}/{}", key(name)), value, other, differences);
                }
            }
        }
        (Value::List(own), Value::List(real)) | (Value::Tuple(own), Value::Tuple(real)) => {
            if own.len() != real.len() {
                differences.push(format!("{path}: {} items for {}", own.len(), real.len()));
            }
            own.iter().zip(real).for_each(|(a, b)| compare(&format!("{path}/."), a, b, differences));
        }
        (Value::Tensor(own), Value::Tensor(real)) => {
            if (own.size(), own.kind()) != (real.size(), real.kind()) {
                differences.push(format!("{path}: {own:?} for {real:?}"));
            }
        }
        (Value::Int(a), Value::Int(b)) if path.starts_with("/loops") => {
            // the last epoch's hooks
            if a != b && !path.contains("optim_progress") && !path.contains("scheduler_progress") {
                differences.push(format!("{path}: {a} for {b}"));
            }
        }
        (Value::Float(_), Value::Int(_)) | (Value::Int(_), Value::Float(_)) => {}
        (a, b) => {
            if std::mem::discriminant(a) != std::mem::discriminant(b) {
                differences.push(format!("{path}: {a:?} for {b:?}"));
            }
        }
    }
}

#[test]
fn the_gradient_scaler_goes_both_ways() {
    if !has_hpu() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let saver = saver(folder.path()).accelerator("hpu").precision("16-mixed").max_epochs(2);
    saver.build().unwrap().fit(&mut Net::new(), &mut data()).unwrap();
    let own = Checkpoint::load(folder.path().join("step=12.ckpt")).unwrap();
    let file = to_lightning(&own).unwrap().value;
    let Value::Dict(entries) = file.get("MixedPrecision").unwrap() else { panic!("is a dict") };
    // what Lightning 2.6.6 writes
    let keys: Vec<&str> = entries.iter().filter_map(|(key, _)| key.as_str()).collect();
    assert_eq!(keys, ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]);
    let scaler = |checkpoint: &Checkpoint| checkpoint.training.as_ref().unwrap().json["grad_scaler"].clone();
    let back = from_lightning(&file, None, false).unwrap().value;
    assert!(scaler(&back)["growth_tracker"].as_u64() > Some(0));
    for key in ["scale", "growth_factor", "backoff_factor", "growth_interval", "growth_tracker"] {
        assert_eq!(scaler(&back)[key], scaler(&own)[key], "{key}");
    }
}

#[test]
fn weights_go_through_all_formats() {
    let folder = TempDir::new().unwrap();
    let expected = expected();
    let mut last = fixture("state_dict.pt");
    for name in ["a.safetensors", "b.pt", "c.ckpt", "d.safetensors"] {
        let path = folder.path().join(name);
        let options: &[&str] = if name == "c.ckpt" { &["--to=voltaic"] } else { &[] };
        convert(&last, &path, options);
        last = path;
    }
    let net = Net::new();
    net.load_state_dict(&Checkpoint::load(&last).unwrap().weights, true).unwrap();
    for (name, tensor) in net.state_dict() {
        assert_close(&numbers(&tensor), &expected["state_dict"][&name], &name);
    }
    let weights = from_lightning(&read_torch(&fixture("lightning.ckpt")).unwrap(), None, true).unwrap().value;
    assert!(weights.training.is_none() && weights.weights.len() == 9);
}

#[test]
fn names_begin_as_they_are_renamed() {
    let folder = TempDir::new().unwrap();
    let [from, to, again] =
        ["a.safetensors", "b.safetensors", "c.safetensors"].map(|name| folder.path().join(name));
    let tensor = Tensor::arange(3, (Kind::Float, CPU));
    let named = |name: &str| (name.to_owned(), tensor.shallow_clone());
    let old = ["model.backbone.0.weight", "model.head.weight", "scale"];
    voltaic::checkpoint::write_weights(&old.map(named), &from).unwrap();
    let written = |path: &Path| {
        let names = Checkpoint::load(path).unwrap().weights.into_iter().map(|(name, _)| name);
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    };
    convert(&from, &to, &["--rename", "model.backbone.=features.", "--rename", "model.="]);
    assert_eq!(written(&to), ["features.0.weight", "head.weight", "scale"]);
    convert(&to, &again, &["--rename", "=net."]);
    assert_eq!(written(&again), ["net.features.0.weight", "net.head.weight", "net.scale"]);
    for (rules, named) in [
        (["--rename=none.=a.", "--rename=model.="], "none.=a. begins with none."),
        (["--rename=model.backbone.0=x", "--rename=model.head=x"], "two weights would be x.weight"),
        (["--rename=model", "--rename=model.="], "give FROM=TO"),
    ] {
        let output =
            voltaic(&[&["convert", from.to_str().unwrap(), to.to_str().unwrap()], &rules[..]].concat());
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(named), "{rules:?}: {text}");
    }
    let lightning =
        voltaic(&["convert", fixture("lightning.ckpt").to_str().unwrap(), "x.ckpt", "--rename=fc1.=a."]);
    assert!(String::from_utf8_lossy(&lightning.stderr).contains("add --weights_only"), "{lightning:?}");
}

#[test]
fn weights_are_written_from_their_master_weights() {
    let folder = TempDir::new().unwrap();
    let (own, output) = (folder.path().join("own.ckpt"), |name: &str| folder.path().join(name));
    let exact = Tensor::from_slice(&[0.1_f32, 0.2]);
    let half = exact.to_kind(Kind::BFloat16);
    let states = vec![("master_param.w".to_owned(), exact.shallow_clone())];
    let training = TrainingState { optimizers: vec![states], json: json!({}), ..TrainingState::default() };
    let weights = ["w", "tied"].map(|name| (name.to_owned(), half.shallow_clone())).into();
    Checkpoint { weights, training: Some(training), ..Checkpoint::default() }.save(&own).unwrap();
    for (name, options, expected) in [
        ("a.safetensors", &[][..], &exact),
        ("b.pt", &[], &exact),
        ("c.ckpt", &["--to=voltaic", "--weights_only"], &exact),
        ("d.ckpt", &["--weights_only"], &exact),
        ("e.safetensors", &["--no_master_weights"], &half),
        ("f.ckpt", &["--to=voltaic"], &half),
    ] {
        let text = convert(&own, &output(name), options);
        let weights = voltaic::checkpoint::read_weights(&output(name)).unwrap();
        assert!(weights.len() == 2 && weights.iter().all(|(_, weight)| *weight == *expected), "{name}");
        let note = "note: 2 of 2 weights are the float32 master weights; --no_master_weights";
        assert_eq!(text.contains(note), expected.kind() == Kind::Float, "{text}");
    }
    let kept = Checkpoint::load(output("f.ckpt")).unwrap().training.unwrap();
    assert_eq!(kept.optimizers[0][0].1, exact);
}

#[test]
fn gpt2_of_hugging_face_gives_its_logits() {
    let folder = TempDir::new().unwrap();
    let own = folder.path().join("gpt.safetensors");
    convert(&fixture("gpt2.safetensors"), &own, &["--names=from_huggingface"]);
    let config = GptConfig {
        vocab_size: 11,
        block_size: 8,
        n_layer: 2,
        n_head: 2,
        n_embd: 8,
        dropout: 0.0,
        bias: true,
    };
    let gpt = Gpt::new(config).unwrap();
    gpt.load_state_dict(&Checkpoint::load(&own).unwrap().weights, true).unwrap();
    let logits = tch::no_grad(|| gpt.forward(&Tensor::from_slice2(&[[1_i64, 5, 3, 10, 0]])).unwrap());
    assert_close(&numbers(&logits), &expected()["gpt2_logits"], "logits");
    let back = folder.path().join("back.safetensors");
    convert(&own, &back, &["--names=to_huggingface"]);
    same(
        &Checkpoint::load(&back).unwrap().weights,
        &Checkpoint::load(fixture("gpt2.safetensors")).unwrap().weights,
    );
}

fn same(a: &[(String, Tensor)], b: &[(String, Tensor)]) {
    assert_eq!(a.len(), b.len());
    for (name, tensor) in a {
        let (_, other) = b.iter().find(|(other, _)| other == name).expect(name);
        assert_eq!(tensor, other, "{name}");
    }
}

#[test]
fn resnets_of_hugging_face_get_the_names_of_torchvision() {
    let weights = Checkpoint::load(fixture("resnet.safetensors")).unwrap().weights;
    let own = from_hugging_face(&weights).unwrap();
    let net = ResNet18::new(ResNet18Config { num_classes: 3, in_channels: 1, width: 2 }).unwrap();
    let shapes = |weights: &[(String, Tensor)]| {
        let mut shapes: Vec<_> = weights.iter().map(|(name, tensor)| (name.clone(), tensor.size())).collect();
        shapes.retain(|(name, _)| name != "conv1.weight"); // 7 x 7 there, 3 x 3 for small pictures
        shapes.sort();
        shapes
    };
    assert_eq!(shapes(&own), shapes(&net.state_dict()));
    same(&to_hugging_face(&own).unwrap(), &weights);
    let error = from_hugging_face(&net.state_dict()).expect_err("its names are torchvision's").to_string();
    assert!(error.contains("conv1.weight is not a weight of it"), "{error}");
}

/// A file of Lightning goes to fit as what it is converted to.
#[test]
fn lightning_files_are_read_directly() {
    let folder = TempDir::new().unwrap();
    let converted = from_lightning(&read_torch(&fixture("mid_epoch.ckpt")).unwrap(), None, false).unwrap();
    assert_eq!(print(&Checkpoint::load(fixture("mid_epoch.ckpt")).unwrap()), print(&converted.value));
    let own = folder.path().join("own.ckpt");
    converted.value.save(&own).unwrap();
    let [direct, by_way] = [fixture("mid_epoch.ckpt"), own].map(|path| {
        let mut net = Net::new();
        let mut trainer = silent().max_epochs(4).build().unwrap();
        trainer.ckpt_path(path).fit(&mut net, &mut data()).unwrap();
        net.state_dict()
    });
    same(&direct, &by_way);
    let weights = voltaic::checkpoint::read_weights(&fixture("state_dict.pt")).unwrap();
    assert_eq!(weights.len(), Net::new().state_dict().len());
}

#[test]
fn what_cannot_be_converted_is_named() {
    let folder = TempDir::new().unwrap();
    let mut file = read_torch(&fixture("lightning.ckpt")).unwrap();
    let names = ["fc1.weight", "fc1.bias"].map(str::to_owned);
    let error = from_lightning(&file, Some(&names), false).expect_err("too few").to_string();
    assert!(error.contains("6 parameters, 2 names") && error.contains("--param_names"), "{error}");
    let Value::Dict(entries) = &mut file else { panic!("{file:?}") };
    entries.retain(|(key, _)| key.as_str() != Some("state_dict"));
    entries.push((Value::Text("state_dict".into()), Value::dict([("x", Value::Int(1))])));
    assert!(
        from_lightning(&file, None, false).expect_err("no tensor").to_string().contains("is not a tensor")
    );
    // a Lightning file that is read without the command
    let path = folder.path().join("unnamed.ckpt");
    write_torch(&file, &path).unwrap();
    let error = Checkpoint::load(&path).expect_err("no tensor").to_string();
    assert!(error.contains("is not a tensor") && error.contains("voltaic convert"), "{error}");
    let ended = voltaic(&["convert", "no/such.ckpt", folder.path().join("x.ckpt").to_str().unwrap()]);
    let text = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(ended.status.code() == Some(1) && text.contains("no/such.ckpt"), "{text}");
}

/// What is in a checkpoint, to be compared.
fn print(checkpoint: &Checkpoint) -> String {
    let list = |tensors: &[(String, Tensor)]| {
        let mut lines: Vec<String> =
            tensors.iter().map(|(n, t)| format!("{n} {:?} {:?}", t.kind(), numbers(t))).collect();
        lines.sort();
        lines.join("\n")
    };
    let training = checkpoint.training.as_ref().map(|training| {
        let optimizers: Vec<String> = training.optimizers.iter().map(|o| list(o)).collect();
        format!("{optimizers:?} {} {} {}", list(&training.grads), list(&training.rng), training.json)
    });
    format!("{} {training:?} {:?}", list(&checkpoint.weights), checkpoint.meta)
}

/// A copy with some bytes changed, removed, repeated or cut off.
fn mutate(whole: &[u8], rng: &mut StdRng) -> Vec<u8> {
    let mut bytes = whole.to_vec();
    let at = rng.random_range(0..bytes.len());
    match rng.random_range(0..6) {
        0 | 1 => bytes[at] ^= 1 << rng.random_range(0..8_u32),
        2 => bytes[at] = rng.random(),
        3 => bytes.truncate(at),
        4 => {
            let end = (at + rng.random_range(1..64)).min(bytes.len());
            bytes[at..end].iter_mut().for_each(|byte| *byte = rng.random());
        }
        _ => {
            let end = (at + rng.random_range(1..16)).min(bytes.len());
            let part: Vec<u8> = bytes[at..end].to_vec();
            if rng.random() {
                bytes.splice(at..at, part);
            } else {
                bytes.drain(at..end);
            }
        }
    }
    bytes
}

/// No mutation may panic or load as something else; returns how many loaded as what was written.
fn fuzz(path: &Path, read: impl Fn(&Path) -> voltaic::Result<Checkpoint>) -> usize {
    const MUTATIONS: u64 = 5_000;
    let whole = std::fs::read(path).unwrap();
    let expected = print(&read(path).unwrap());
    let folder = TempDir::new().unwrap();
    let target = folder.path().join("mutated.ckpt");
    let mut harmless = 0;
    for seed in 0..MUTATIONS {
        let bytes = mutate(&whole, &mut StdRng::seed_from_u64(seed));
        std::fs::write(&target, &bytes).unwrap();
        match read(&target) {
            Ok(checkpoint) => {
                assert!(print(&checkpoint) == expected, "mutation {seed} loads as something else");
                harmless += 1;
            }
            Err(error) => {
                let text = error.to_string();
                assert!(
                    text.contains("mutated.ckpt") || text.contains("state dict does not fit"),
                    "{seed}: {text}"
                );
                assert!(text.contains("; "), "{seed}: {text}");
            }
        }
    }
    harmless
}

// with the next one ten thousand mutations
#[test]
fn damaged_checkpoints_of_voltaic_are_refused_with_what_is_wrong() {
    let folder = TempDir::new().unwrap();
    let own = folder.path().join("own.ckpt");
    convert(&fixture("lightning.ckpt"), &own, &[]);
    let harmless = fuzz(&own, |path| Checkpoint::load(path));
    assert!(harmless < 100, "{harmless}: only a byte replaced by itself is harmless");
}

#[test]
fn damaged_checkpoints_of_lightning_are_refused_with_what_is_wrong() {
    let harmless =
        fuzz(&fixture("lightning.ckpt"), |path| Ok(from_lightning(&read_torch(path)?, None, false)?.value));
    assert!(harmless < 2_500, "{harmless}: padding, dates and attributes of the archive are harmless");
}

#[test]
fn a_checkpoint_of_weights_becomes_one_of_lightning_too() {
    let checkpoint = Checkpoint { weights: Net::new().state_dict(), ..Checkpoint::default() };
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("weights.ckpt");
    write_torch(&to_lightning(&checkpoint).unwrap().value, &path).unwrap();
    let file = read_torch(&path).unwrap();
    assert!(file.get("optimizer_states").is_none());
    same(&from_lightning(&file, None, false).unwrap().value.weights, &checkpoint.weights);
}

#[test]
fn an_input_is_not_overwritten_and_what_is_not_a_file_is_not_replaced() {
    let folder = TempDir::new().unwrap();
    let (own, link) = (folder.path().join("own.ckpt"), folder.path().join("link.ckpt"));
    convert(&fixture("lightning.ckpt"), &own, &[]);
    let before = std::fs::read(&own).unwrap();
    std::fs::hard_link(&own, folder.path().join("hard.ckpt")).unwrap();
    std::os::unix::fs::symlink("own.ckpt", &link).unwrap();
    let refused = |input: &Path, output: &Path, text: &str| {
        let ended = voltaic(&["convert", input.to_str().unwrap(), output.to_str().unwrap()]);
        let error = String::from_utf8(ended.stderr).unwrap();
        assert!(!ended.status.success() && error.contains(text), "{error}");
        assert_eq!(std::fs::read(&own).unwrap(), before);
    };
    for output in ["own.ckpt", "hard.ckpt", "link.ckpt", "./own.ckpt"] {
        refused(&own, &folder.path().join(output), "is the file that is converted");
    }
    let socket = folder.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    refused(&own, &socket, "a device, pipe or socket");
    for input in ["/dev/zero", folder.path().to_str().unwrap(), socket.to_str().unwrap()] {
        let ended = voltaic(&["convert", input, folder.path().join("new.ckpt").to_str().unwrap()]);
        let error = String::from_utf8(ended.stderr).unwrap();
        assert!(!ended.status.success() && error.contains(input), "{error}");
    }
}

#[test]
fn a_conversion_that_is_ended_leaves_no_temporary_file() {
    let folder = TempDir::new().unwrap();
    let (input, output) = (folder.path().join("a.safetensors"), folder.path().join("a.pt"));
    const BYTES: u64 = 160 << 20;
    let header = format!(r#"{{"w":{{"dtype":"F32","shape":[{}],"data_offsets":[0,{BYTES}]}}}}"#, BYTES / 4);
    let header = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    std::fs::write(&input, &header).unwrap();
    std::fs::File::options().write(true).open(&input).unwrap().set_len(header.len() as u64 + BYTES).unwrap();
    let temporary = || names(folder.path()).into_iter().find(|name| name.starts_with(".a.pt."));
    let start = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_voltaic"));
        let mut child =
            command.args(["convert".as_ref(), input.as_os_str(), output.as_os_str()]).spawn().unwrap();
        while temporary().is_none() {
            assert!(child.try_wait().unwrap().is_none(), "it was too fast");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        child
    };
    for (signal, number) in [("INT", 2), ("TERM", 15)] {
        let mut child = start();
        Command::new("kill").args(["-s", signal, &child.id().to_string()]).status().unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(number), "{signal}");
        assert_eq!(names(folder.path()), ["a.safetensors"], "{signal}");
    }
    let mut child = start();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(temporary().is_some());
    convert(&fixture("state_dict.pt"), &folder.path().join("b.safetensors"), &[]);
    assert_eq!(names(folder.path()), ["a.safetensors", "b.safetensors"], "the next conversion removes it");
}

#[test]
fn how_much_is_made_of_a_file_is_an_option() {
    let folder = TempDir::new().unwrap();
    let (input, output) = (folder.path().join("a.pt"), folder.path().join("a.safetensors"));
    let weight = Tensor::zeros([512, 512], (Kind::Float, CPU));
    let tied = (0..90).map(|i| (i.to_string(), Value::Tensor(weight.shallow_clone())));
    write_torch(&Value::dict(tied), &input).unwrap();
    let ended = voltaic(&["convert", input.to_str().unwrap(), output.to_str().unwrap()]);
    let error = String::from_utf8(ended.stderr).unwrap();
    let size = std::fs::metadata(&input).unwrap().len();
    assert!(
        error.contains(&format!("its {size} bytes make more than 64 MiB and 16 times its size")),
        "{error}"
    );
    assert!(!output.exists() && error.contains("--max_growth of convert"), "{error}");
    convert(&input, &output, &["--max_growth=100"]);
}

#[test]
fn names_that_a_file_cannot_hold_are_refused() {
    let folder = TempDir::new().unwrap();
    let (input, output) = (folder.path().join("a.pt"), folder.path().join("a.safetensors"));
    let tensor = || Value::Tensor(Tensor::ones([2], (Kind::Float, CPU)));
    for (names, text) in [
        (vec!["__metadata__"], "safetensors keeps for itself"),
        (vec!["w", "w"], "two tensors are called w"),
        (vec!["voltaic:grad.w"], "begins the names of training states"),
    ] {
        write_torch(&Value::dict(names.into_iter().map(|name| (name, tensor()))), &input).unwrap();
        for to in ["--to=voltaic", "--to=safetensors"] {
            let ended = voltaic(&["convert", input.to_str().unwrap(), output.to_str().unwrap(), to]);
            let error = String::from_utf8(ended.stderr).unwrap();
            assert!(!ended.status.success() && error.contains(text), "{error}");
            assert!(!output.exists());
        }
    }
}

#[test]
fn names_lose_what_wrappers_of_pytorch_put_before_them() {
    let file = |names: &[&str], is_lightning: bool| {
        let weights = names.iter().map(|name| (*name, Value::Tensor(Tensor::zeros([1], (Kind::Float, CPU)))));
        let version = ("pytorch-lightning_version", Value::Text("2.6.6".to_owned()));
        let entries = [("state_dict", Value::dict(weights))];
        Value::dict(entries.into_iter().chain(is_lightning.then_some(version)))
    };
    for (names, is_lightning, expected) in [
        (["_orig_mod.fc.weight", "_orig_mod.fc.bias"], true, ["fc.weight", "fc.bias"]),
        (["net._orig_mod.fc.weight", "loss.scale"], true, ["net.fc.weight", "loss.scale"]),
        (["module._orig_mod.weight", "module._orig_mod.bias"], false, ["weight", "bias"]),
        (["module.weight", "module.bias"], true, ["module.weight", "module.bias"]),
        (["module.weight", "head.bias"], false, ["module.weight", "head.bias"]),
    ] {
        let read = from_lightning(&file(&names, is_lightning), None, true).unwrap();
        let found: Vec<&str> = read.value.weights.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(found, expected, "{:?}", read.notes);
        assert_eq!(read.notes.is_empty(), names == expected, "{:?}", read.notes);
    }
}

#[test]
fn a_folder_of_deepspeed_is_told_from_one_of_voltaic() {
    let root = TempDir::new().unwrap();
    let folder = root.path().join("epoch=0.ckpt");
    std::fs::create_dir_all(folder.join("checkpoint")).unwrap();
    std::fs::write(folder.join("latest"), "checkpoint").unwrap();
    std::fs::write(folder.join("checkpoint/mp_rank_00_model_states.pt"), "").unwrap();
    for folder in [folder.clone(), folder.join("checkpoint")] {
        let error = Checkpoint::load(&folder).unwrap_err().to_string();
        assert!(
            error.contains("mp_rank_00_model_states.pt: not a readable checkpoint: it is not a file"),
            "{error}"
        );
        let out = root.path().join("out.safetensors");
        let arguments = ["convert", folder.to_str().unwrap(), out.to_str().unwrap()];
        let (code, error) = crate::probe::voltaic(&arguments, &[]);
        assert!(code == Some(1) && error.contains("it is not a file of PyTorch"), "{code:?} {error}");
    }
}
