//! DeepSpeed's checkpoints are read and written: the folders in fixtures/deepspeed/checkpoints were made by DeepSpeed itself
//! (make_checkpoints.py there).

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

use serde::Deserialize;
use serde_json::Value as Json;
use tempfile::TempDir;
use voltaic::checkpoint::pickle::Value;
use voltaic::checkpoint::{
    Checkpoint, DeepSpeedRead, DeepSpeedWrite, read_deepspeed, read_torch, read_weights, write_deepspeed,
    write_folder, write_torch,
};
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::functional::cross_entropy;
use voltaic::nn::{Buffer, Embedding, Forward, Linear, ModuleExt};
use voltaic::optim::{AdamW, LrSchedulerSpec, Optimizers, ParamGroupSpec, Sgd, WarmupLr, WarmupType};
use voltaic::{Kind, Module, Tensor};

use crate::checkpoints::resumed;
use crate::probe::silent;

const CPU: tch::Device = tch::Device::Cpu;
const ZERO: [&str; 8] = [
    "stage1",
    "stage2",
    "stage3",
    "stage1_aligned",
    "bf16_optimizer",
    "stage2_bf16",
    "stage3_bf16",
    "stage2_fp16",
];
/// The optimizer's parameters, which stage 0 does not name.
const ORDER: [&str; 6] =
    ["embed.weight", "hidden.weight", "back.weight", "hidden.bias", "back.bias", "head.bias"];

/// What make_checkpoints.py found in a run.
#[derive(Deserialize)]
struct Expected {
    weights: BTreeMap<String, Vec<f32>>,
    states: BTreeMap<String, Vec<f32>>,
    shapes: BTreeMap<String, Vec<i64>>,
    frozen: Vec<String>,
    losses: Vec<f64>,
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/deepspeed/checkpoints")
}

fn expected(run: &str) -> Expected {
    let text = fs::read_to_string(fixtures().join("expected.json")).unwrap();
    let all: Json = serde_json::from_str(&text).unwrap();
    serde_json::from_value(all[run].clone()).unwrap()
}

fn how() -> DeepSpeedRead {
    DeepSpeedRead::default()
}

fn how_to_write() -> DeepSpeedWrite {
    DeepSpeedWrite { stage: 2, partitions: 2, tag: None, is_universal: false }
}

fn read(path: &Path) -> Checkpoint {
    read_deepspeed(path, &how()).unwrap().value
}

fn values(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.to_kind(Kind::Float).flatten(0, -1)).unwrap()
}

fn named<'a>(list: &'a [(String, Tensor)], name: &str) -> &'a Tensor {
    &list.iter().find(|(own, _)| own == name).unwrap_or_else(|| panic!("no {name}")).1
}

/// That all numbers of a checkpoint are those of DeepSpeed, bit by bit.
fn assert_is(checkpoint: &Checkpoint, expected: &Expected, run: &str) {
    let training = checkpoint.training.as_ref().unwrap();
    let states = &training.optimizers[0];
    for (name, numbers) in &expected.weights {
        let weight = named(&checkpoint.weights, name);
        assert_eq!(weight.size(), expected.shapes[name], "{run}: {name}");
        let master = states.iter().find(|(own, _)| *own == format!("master_param.{name}"));
        let is_half = weight.kind() != Kind::Float;
        assert_eq!(master.is_some(), is_half && !expected.frozen.contains(name), "{run}: {name}");
        assert_eq!(values(master.map_or(weight, |(_, master)| master)), *numbers, "{run}: {name}");
        if let Some((_, master)) = master {
            assert_eq!(*weight, master.to_kind(weight.kind()), "{run}: {name} is its master weight rounded");
        }
    }
    for (name, numbers) in &expected.states {
        let (_, fqn) = name.split_once('.').unwrap();
        assert_eq!(named(states, name).size(), expected.shapes[fqn], "{run}: {name}");
        assert_eq!(values(named(states, name)), *numbers, "{run}: {name}");
    }
    let others = states.iter().filter(|(name, _)| !expected.states.contains_key(name));
    for (name, tensor) in others {
        match name.split_once('.').unwrap() {
            // its wrapper makes a step of zeros when it is built
            ("step", _) if run == "stage0_bf16" => assert_eq!(tensor.double_value(&[]), 4.0, "{run}: {name}"),
            ("step", _) => assert_eq!(tensor.double_value(&[]), 3.0, "{run}: {name}"),
            ("master_param", _) => {}
            _ => panic!("{run}: {name}"),
        }
    }
}

#[test]
fn runs_of_all_stages_are_read_bit_by_bit() {
    for run in ZERO {
        let checkpoint = read(&fixtures().join(run));
        assert_is(&checkpoint, &expected(run), run);
        let weights = &checkpoint.weights;
        let (embedding, head) = (named(weights, "embed.weight"), named(weights, "head.weight"));
        assert_eq!(embedding.data_ptr(), head.data_ptr(), "{run}: tied");
        assert_eq!(values(named(weights, "scale")), [0.5, 1.5, 1.0], "{run}");
        assert_eq!(named(weights, "count").int64_value(&[]), 7, "{run}");
        assert_eq!((checkpoint.meta.epoch, checkpoint.meta.global_step), (1, 3), "{run}");
        let json = checkpoint.training.unwrap().json;
        let groups = &json["optimizers"][0][1];
        assert_eq!(json["optimizers"][0][0], "AdamW", "{run}");
        let mut names: Vec<&str> = groups
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|group| group["params"].as_array().unwrap())
            .map(|name| name.as_str().unwrap())
            .collect();
        let mut order = ORDER;
        if run == "stage1_aligned" {
            names.sort_unstable();
            order.sort_unstable(); // round robin has another order within a group
        }
        assert_eq!(names, order, "{run}");
        let settings = |key: &str| [groups[0][key].as_f64(), groups[1][key].as_f64()];
        assert_eq!(settings("lr"), [Some(0.05), Some(0.02)], "{run}");
        assert_eq!(settings("weight_decay"), [Some(0.1), Some(0.0)], "{run}");
        assert_eq!(
            json["loss_scaler"]["dynamic"]["cur_scale"].as_f64(),
            (run == "stage2_fp16").then_some(256.0)
        );
    }
    // the order within the groups is not in the files
    for run in ["stage0", "stage0_bf16"] {
        let names = Some(ORDER.map(str::to_owned).to_vec());
        let how = DeepSpeedRead { param_names: names, ..how() };
        assert_is(&read_deepspeed(&fixtures().join(run), &how).unwrap().value, &expected(run), run);
    }
    for run in ["stage2_sgd", "stage2_scheduler"] {
        assert_is(&read(&fixtures().join(run)), &expected(run), run);
    }
    for run in ["stage1", "stage3"] {
        assert_is(&read(&fixtures().join(format!("{run}_universal"))), &expected(run), run);
    }
}

#[test]
fn the_folder_of_a_tag_and_another_tag_are_read() {
    let root = TempDir::new().unwrap();
    copy(&fixtures().join("stage2"), root.path());
    fs::rename(root.path().join("global_step3"), root.path().join("best")).unwrap();
    assert_is(&read(&root.path().join("best")), &expected("stage2"), "the folder of the tag");
    let best = DeepSpeedRead { tag: Some("best".to_owned()), ..how() };
    assert_is(&read_deepspeed(root.path(), &best).unwrap().value, &expected("stage2"), "--tag");
    assert_error!(
        read_deepspeed(root.path(), &how()),
        "global_step3: not a readable checkpoint: there is no such folder; give the tag"
    );
}

#[test]
fn what_lightnings_strategy_saves_is_read_with_its_state() {
    // Lightning's own keys are those of a file of Lightning, and stand beside DeepSpeed's
    let root = TempDir::new().unwrap();
    let folder = root.path().join("run.ckpt");
    copy(&fixtures().join("stage2_scheduler"), &folder);
    fs::rename(folder.join("global_step3"), folder.join("checkpoint")).unwrap();
    fs::write(folder.join("latest"), "checkpoint").unwrap();
    let file = fixtures().join("../../lightning/lightning.ckpt");
    edit(&folder.join("checkpoint/mp_rank_00_model_states.pt"), |entries| {
        let Value::Dict(own) = read_torch(&file).unwrap() else { panic!("is a dictionary") };
        let is_left_out = |key: &Value| ["state_dict", "optimizer_states"].contains(&key.as_str().unwrap());
        entries.retain(|(key, _)| key.as_str() != Some("epoch"));
        entries.extend(own.into_iter().filter(|(key, _)| !is_left_out(key)));
        prefix(entries, "module");
        let shapes = entries.iter_mut().find(|(key, _)| key.as_str() == Some("param_shapes")).unwrap();
        let Value::List(groups) = &mut shapes.1 else { panic!("is a list") };
        let Value::Dict(group) = &mut groups[0] else { panic!("is a dictionary") };
        group.iter_mut().for_each(|(name, _)| wrap(name));
    });
    let converted = read_deepspeed(&folder, &how()).unwrap();
    assert_is(&converted.value, &expected("stage2_scheduler"), "lightning");
    assert!(converted.notes.iter().any(|note| note.contains("callback ModelCheckpoint")));
    assert_eq!(converted.value.meta.hyper_parameters, serde_json::json!({"width": 8, "lr": 0.05}));
    let json = converted.value.training.unwrap().json;
    assert_eq!(
        (json["progress"]["global_step"].as_u64(), json["progress"]["current_epoch"].as_u64()),
        (Some(12), Some(1))
    );
    assert_eq!(json["progress"]["epoch_ended"], true);
    assert_eq!(json["schedulers"][0]["name"], "StepLR");
}

/// Names as they are within Lightning's wrapper.
fn prefix(entries: &mut [(Value, Value)], key: &str) {
    let (_, dict) = entries.iter_mut().find(|(own, _)| own.as_str() == Some(key)).unwrap();
    let Value::Dict(named) = dict else { panic!("is a dictionary") };
    named.iter_mut().for_each(|(name, _)| wrap(name));
}

fn wrap(name: &mut Value) {
    *name = Value::Text(format!("_forward_module.{}", name.as_str().unwrap()));
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let (entry, target) = (entry.as_ref().unwrap(), to.join(entry.as_ref().unwrap().file_name()));
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// Changes a file of torch.save.
fn edit(path: &Path, change: impl FnOnce(&mut Vec<(Value, Value)>)) {
    let Value::Dict(mut entries) = read_torch(path).unwrap() else { panic!("is a dictionary") };
    change(&mut entries);
    write_torch(&Value::Dict(entries), path).unwrap();
}

type Batch = (Tensor, Tensor);

/// The module of make_checkpoints.py.
#[derive(Module)]
struct Net {
    embed: Embedding,
    frozen: Linear,
    hidden: Linear,
    back: Linear,
    head: Linear,
    scale: Buffer,
    count: Buffer,
    #[module(skip)]
    losses: Arc<Mutex<Vec<f64>>>,
}

impl Net {
    fn new() -> Self {
        let (embed, mut head) = (Embedding::new(7, 5).unwrap(), Linear::new(5, 7).unwrap());
        head.weight = embed.weight.clone();
        let frozen = Linear::new(5, 5).unwrap();
        frozen.named_parameters().into_iter().for_each(|(_, p)| drop(p.set_requires_grad(false)));
        let (hidden, back) = (Linear::new(5, 3).unwrap(), Linear::new(3, 5).unwrap());
        let scale = Buffer::new(Tensor::zeros([3], (Kind::Float, CPU)));
        let count = Buffer::new(Tensor::from(0_i64));
        Self { embed, frozen, hidden, back, head, scale, count, losses: Default::default() }
    }
}

impl LightningModule for Net {
    type Batch = Batch;

    fn training_step(&self, (tokens, targets): &Batch, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let hidden = self.embed.forward(tokens)?;
        let hidden = &hidden + self.frozen.forward(&hidden)?;
        let inner = self.hidden.forward(&hidden)?.tanh() * self.scale.to_kind(hidden.kind());
        let hidden = &hidden + self.back.forward(&inner)?;
        let loss = cross_entropy(&self.head.forward(&hidden)?.to_kind(Kind::Float), targets)?;
        self.losses.lock().unwrap().push(loss.double_value(&[]));
        Ok(loss)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        let trained = self.named_parameters().into_iter().filter(|(_, p)| p.requires_grad());
        let (decay, rest): (Vec<_>, Vec<_>) = trained.partition(|(_, p)| p.size().len() > 1);
        let groups = [
            ParamGroupSpec::new(decay).weight_decay(0.1),
            ParamGroupSpec::new(rest).weight_decay(0.0).lr(0.02),
        ];
        Ok(Optimizers::new(AdamW::new(0.05)).groups(groups))
    }
}

#[derive(Module)]
struct Plain {
    first: Linear,
    second: Linear,
    #[module(skip)]
    is_sgd: bool,
    #[module(skip)]
    losses: Arc<Mutex<Vec<f64>>>,
}

impl LightningModule for Plain {
    type Batch = Batch;

    fn training_step(&self, (tokens, targets): &Batch, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let x = tokens.remainder(5).one_hot(5).to_kind(Kind::Float);
        let out = self.second.forward(&self.first.forward(&x)?.tanh())?.squeeze_dim(1);
        let loss = (out - targets.to_kind(Kind::Float) / 7.0).square().mean(Kind::Float);
        self.losses.lock().unwrap().push(loss.double_value(&[]));
        Ok(loss)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        if self.is_sgd {
            return Sgd::new(0.05).momentum(0.9).nesterov(true).into();
        }
        let warmup =
            WarmupLr::new(5).warmup_min_lr(0.001).warmup_max_lr(0.05).warmup_type(WarmupType::Linear);
        Ok(Optimizers::new(AdamW::new(0.05))
            .scheduler(LrSchedulerSpec::new(warmup).interval(voltaic::optim::Interval::Step)))
    }
}

/// What the ranks have together in the steps after the checkpoint.
fn later() -> Loaders<Batch> {
    let of_step = |step: i64| {
        let count = Tensor::arange(8, (Kind::Double, CPU));
        let numbers: Tensor = (count * 12.9898 + step as f64).sin().to_kind(Kind::Float);
        (numbers * 1000.0).to_kind(Kind::Int64).remainder(7).reshape([2, 4])
    };
    let all = Tensor::cat(&[of_step(3), of_step(4), of_step(5)], 1);
    let data = TensorDataset::new((all.get(0), all.get(1))).unwrap();
    Loaders::new().train(DataLoader::new(data).batch_size(4).build().unwrap())
}

fn voltaic(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_voltaic")).args(arguments).output().unwrap()
}

fn convert(input: &Path, output: &Path, options: &[&str]) -> String {
    let ended = voltaic(&[&["convert", input.to_str().unwrap(), output.to_str().unwrap()], options].concat());
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    String::from_utf8(ended.stdout).unwrap()
}

/// Losses of a run that goes on with a checkpoint.
fn losses_from(ckpt: &Path, run: &str) -> Vec<f64> {
    let mut trainer = resumed(silent().max_epochs(2), Some(ckpt));
    let losses = Arc::new(Mutex::new(Vec::new()));
    if ["stage2_sgd", "stage2_scheduler"].contains(&run) {
        let (first, second) = (Linear::new(5, 3).unwrap(), Linear::new(3, 1).unwrap());
        let mut net = Plain { first, second, is_sgd: run == "stage2_sgd", losses: losses.clone() };
        trainer.fit(&mut net, &mut later()).unwrap();
    } else {
        let mut net = Net { losses: losses.clone(), ..Net::new() };
        trainer.fit(&mut net, &mut later()).unwrap();
    }
    assert_eq!(trainer.global_step(), 6, "{run}");
    losses.lock().unwrap().clone()
}

fn assert_goes_on(ckpt: &Path, run: &str, what: &str) {
    // a run in float32 from the master weights is near that in 16 bits
    let tolerance = if run.contains("16") { 2e-2 } else { 1e-6 };
    let (own, expected) = (losses_from(ckpt, run), expected(run).losses);
    assert_eq!(own.len(), expected.len(), "{run} {what}");
    for (a, b) in own.iter().zip(&expected) {
        assert!((a - b).abs() <= tolerance * b.abs().max(0.1), "{run} {what}: {own:?}, not {expected:?}");
    }
}

#[test]
fn runs_of_deepspeed_go_on_in_voltaic() {
    let root = TempDir::new().unwrap();
    let names = root.path().join("names.txt");
    fs::write(&names, ORDER.join("\n")).unwrap();
    for run in ["stage0", "stage1", "stage1_aligned", "stage2_sgd", "stage2_scheduler", "stage3_bf16"] {
        let own = root.path().join(format!("{run}.ckpt"));
        let options = match run {
            "stage0" => vec!["--param_names", names.to_str().unwrap()],
            _ => Vec::new(),
        };
        let text = convert(&fixtures().join(run), &own, &options);
        assert_contains!(&text, "voltaic's format", "the training state, epoch 1, global_step 3");
        assert_goes_on(&own, run, "from a file");
    }
    for (run, options) in
        [("stage3", ["--to=folder", "--partitions=3"]), ("stage2", ["--to=folder", "--partitions=1"])]
    {
        let own = root.path().join(format!("{run}.folder"));
        let text = convert(&fixtures().join(run), &own, &options);
        assert!(text.contains("voltaic's folder, 11 tensors and the training state"), "{text}");
        assert_is(&Checkpoint::load(&own).unwrap(), &expected(run), "from a folder");
        assert_goes_on(&own, run, "from a folder");
    }
    assert_goes_on(&fixtures().join("stage2"), "stage2", "from DeepSpeed's folder itself");
    assert_eq!(read_weights(&fixtures().join("stage3")).unwrap().len(), 11);
}

#[test]
fn weights_are_written_in_float32_unless_16_bits_are_asked_for() {
    let root = TempDir::new().unwrap();
    for run in ["stage2_bf16", "stage3_bf16", "stage2_fp16"] {
        let (full, half, lightning) = (
            root.path().join("a.safetensors"),
            root.path().join("b.safetensors"),
            root.path().join("c.ckpt"),
        );
        let text = convert(&fixtures().join(run), &full, &[]);
        assert!(text.contains("6 of 6 weights are the optimizer's in float32"), "{text}");
        convert(&fixtures().join(run), &half, &["--no_master_weights"]);
        convert(&fixtures().join(run), &lightning, &["--to=lightning"]);
        let expected = expected(run);
        let file = read_torch(&lightning).unwrap();
        let lightning = voltaic::checkpoint::from_lightning(&file, None, true).unwrap().value;
        for weights in [read_weights(&full).unwrap(), lightning.weights] {
            for (name, numbers) in &expected.weights {
                assert_eq!(values(named(&weights, name)), *numbers, "{run}: {name}");
            }
        }
        let kinds: Vec<Kind> = ORDER.map(|name| named(&read_weights(&half).unwrap(), name).kind()).to_vec();
        assert!(kinds.iter().all(|kind| [Kind::BFloat16, Kind::Half].contains(kind)), "{run}: {kinds:?}");
    }
}

#[test]
fn what_is_written_comes_back_in_any_stage_and_number_of_partitions() {
    let root = TempDir::new().unwrap();
    for run in ["stage2", "stage3_bf16", "stage2_fp16", "stage2_sgd", "stage2_scheduler"] {
        let own = read(&fixtures().join(run));
        for stage in 1..=3 {
            for partitions in [1, 2, 3, 7] {
                let path = root.path().join(format!("{run}_{stage}_{partitions}"));
                let notes =
                    write_deepspeed(&own, &path, &DeepSpeedWrite { stage, partitions, ..how_to_write() })
                        .unwrap();
                let is_frozen =
                    notes.iter().any(|note| note.ends_with("has them: frozen.weight, frozen.bias"));
                assert_eq!(is_frozen, !run.starts_with("stage2_s"), "{notes:?}");
                let back = read(&path);
                assert_is(&back, &expected(run), &format!("{run} as stage {stage} on {partitions}"));
                let json = |of: &Checkpoint, key: &str| of.training.as_ref().unwrap().json[key].clone();
                assert_eq!(json(&back, "schedulers"), json(&own, "schedulers"));
                assert_eq!(json(&back, "optimizers"), json(&own, "optimizers"));
                assert_eq!(json(&back, "progress"), json(&own, "progress"));
                assert_eq!(json(&back, "loss_scaler"), json(&own, "loss_scaler"));
            }
        }
    }
    let again = DeepSpeedWrite { partitions: 1, ..how_to_write() };
    let own = read(&fixtures().join("stage2"));
    let error = write_deepspeed(&own, &root.path().join("stage2_1_1"), &again).unwrap_err().to_string();
    assert!(error.contains("global_step3 is there already"), "{error}");
    let folder = root.path().join("folder");
    write_folder(&own, &folder, 5).unwrap();
    assert_is(&Checkpoint::load(&folder).unwrap(), &expected("stage2"), "a folder of 5");
}

/// As `ds_to_universal.py` makes it, with the files of any optimizer.
#[test]
fn universal_checkpoints_are_written() {
    let root = TempDir::new().unwrap();
    for run in ["stage2", "stage3_bf16", "stage2_fp16", "stage2_sgd", "stage2_scheduler"] {
        let own = read(&fixtures().join(run));
        let path = root.path().join(run);
        write_deepspeed(&own, &path, &DeepSpeedWrite { is_universal: true, ..how_to_write() }).unwrap();
        assert_eq!(fs::read_to_string(path.join("latest_universal")).unwrap(), "global_step3_universal");
        let back = read(&path);
        assert_is(&back, &expected(run), &format!("{run} as a universal checkpoint"));
        let json = |of: &Checkpoint, key: &str| of.training.as_ref().unwrap().json[key].clone();
        for key in ["schedulers", "optimizers", "progress", "loss_scaler"] {
            assert_eq!(json(&back, key), json(&own, key), "{run}: {key}");
        }
    }
    let by_command = root.path().join("by_command");
    let text = convert(&fixtures().join("stage2"), &by_command, &["--to=universal"]);
    assert!(text.contains("DeepSpeed's universal checkpoint, 11 tensors and the training state"), "{text}");
    assert_goes_on(&by_command, "stage2", "from a universal checkpoint");
    let own = read(&fixtures().join("stage2"));
    let how = DeepSpeedWrite { stage: 3, is_universal: true, ..how_to_write() };
    let error = write_deepspeed(&own, &root.path().join("three"), &how).unwrap_err().to_string();
    assert!(error.contains("write a universal checkpoint of stage 1 or 2"), "{error}");
}

/// Numbers and shapes of a file, by their path; classes count as their data.
fn leaves(path: &str, value: &Value, found: &mut BTreeMap<String, String>) {
    match value {
        Value::Dict(entries) => {
            for (key, value) in entries {
                let key = key.as_str().map_or_else(|| format!("{key:?}"), str::to_owned);
                leaves(&format!("{path}/{key}"), value, found);
            }
        }
        Value::List(items) | Value::Tuple(items) => {
            for (index, item) in items.iter().enumerate() {
                leaves(&format!("{path}/{index}"), item, found);
            }
        }
        Value::Tensor(tensor) => {
            let numbers = values(tensor);
            found.insert(path.to_owned(), format!("{:?} {:?} {numbers:?}", tensor.kind(), tensor.size()));
        }
        other => drop(found.insert(path.to_owned(), format!("{other:?}"))),
    }
}

#[test]
fn the_files_are_those_of_deepspeed() {
    let root = TempDir::new().unwrap();
    for (run, stage) in [("stage1", 1), ("stage2", 2), ("stage2_bf16", 2), ("stage2_scheduler", 2)] {
        let own = root.path().join(run);
        write_deepspeed(&read(&fixtures().join(run)), &own, &DeepSpeedWrite { stage, ..how_to_write() })
            .unwrap();
        let theirs = fixtures().join(run);
        for entry in fs::read_dir(theirs.join("global_step3")).unwrap() {
            let name = entry.unwrap().file_name();
            let all = |root: &Path| {
                let mut found = BTreeMap::new();
                leaves("", &read_torch(&root.join("global_step3").join(&name)).unwrap(), &mut found);
                found
            };
            let (own, theirs) = (all(&own), all(&theirs));
            // what is DeepSpeed's configuration, the number of samples, which is not known, and what changes nothing
            let is_other = |path: &str| {
                path.starts_with("/ds_config")
                    || path.contains("param_alignment_paddings")
                    || path == "/note"
                    || ["/global_samples", "/frozen_param_shapes", "/frozen_param_fragments"].contains(&path)
            };
            for (path, value) in theirs.iter().filter(|(path, _)| !is_other(path)) {
                assert_eq!(own.get(path), Some(value), "{run}: {path} of {name:?}");
            }
        }
        assert_eq!(fs::read(own.join("latest")).unwrap(), b"global_step3");
    }
}

#[test]
fn deepspeeds_own_scripts_read_what_is_written() {
    let python = std::env::var("VOLTAIC_TEST_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let script = fixtures().join("read_checkpoint.py");
    let has_deepspeed = Command::new(&python).arg(&script).output();
    if !has_deepspeed.is_ok_and(|output| output.status.success()) {
        println!("{python} has no deepspeed: `pip install deepspeed==0.19.8 torch`; nothing was read");
        return;
    }
    let root = TempDir::new().unwrap();
    for (run, stage, partitions) in
        [("stage2", 1, 3), ("stage2_bf16", 2, 2), ("stage3", 2, 1), ("stage2_fp16", 3, 3)]
    {
        let (own, universal) = (root.path().join(run), root.path().join(format!("{run}_universal")));
        let stage_option = format!("--stage={stage}");
        let partitions_option = format!("--partitions={partitions}");
        let text =
            convert(&fixtures().join(run), &own, &["--to=deepspeed", &stage_option, &partitions_option]);
        assert!(text.contains("DeepSpeed's folder"), "{text}");
        let output = Command::new(&python).arg(&script).args([&own, &universal]).output().unwrap();
        assert!(output.status.success(), "{run}: {}", String::from_utf8_lossy(&output.stderr));
        let weights: BTreeMap<String, Vec<f32>> = serde_json::from_slice(&output.stdout).unwrap();
        let expected = expected(run);
        for (name, numbers) in &expected.weights {
            assert_eq!(weights[name], *numbers, "{run}: {name}");
        }
        assert_eq!(weights["head.weight"], weights["embed.weight"], "{run}");
        assert_eq!(weights["count"], [7.0], "{run}");
        assert_is(&read(&universal), &expected, &format!("{run} made universal"));
    }
}

/// The error that a changed copy of a run leads to.
fn refused(run: &str, change: impl FnOnce(&Path)) -> String {
    let root = TempDir::new().unwrap();
    copy(&fixtures().join(run), root.path());
    change(&root.path().join("global_step3"));
    read_deepspeed(root.path(), &how()).unwrap_err().to_string()
}

fn entry<'a>(entries: &'a mut [(Value, Value)], path: &[&str]) -> &'a mut Value {
    let [first, rest @ ..] = path else { panic!("no path") };
    let (_, value) = entries.iter_mut().find(|(key, _)| key.as_str() == Some(first)).unwrap();
    match (rest, value) {
        ([], value) => value,
        (rest, Value::Dict(inner)) => entry(inner, rest),
        _ => panic!("{first} is no dictionary"),
    }
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of what can be wrong with a folder")]
fn what_is_missing_or_does_not_fit_is_named() {
    const FIRST: &str = "zero_pp_rank_0_mp_rank_00_optim_states.pt";
    const SECOND: &str = "zero_pp_rank_1_mp_rank_00_optim_states.pt";
    const MODEL: &str = "mp_rank_00_model_states.pt";
    let of_optimizer = |run: &str, file: &str, path: &[&str], value: Value| {
        let path = [&["optimizer_state_dict"], path].concat();
        refused(run, |tag| edit(&tag.join(file), |entries| *entry(entries, &path) = value))
    };
    let weights = |numel| Value::Tensor(Tensor::zeros([numel], (Kind::Float, CPU)));
    let shape = |sizes: &[i64]| Value::Tuple(sizes.iter().map(|size| Value::Int(*size)).collect());
    let of_model = |run: &str, name: &str, sizes: Value| {
        let file =
            if run.starts_with("stage3") { "zero_pp_rank_0_mp_rank_00_model_states.pt" } else { MODEL };
        refused(run, |tag| {
            edit(&tag.join(file), |entries| {
                let Value::List(groups) = entry(entries, &["param_shapes"]) else { panic!("is a list") };
                let Value::Dict(group) = &mut groups[0] else { panic!("is a dictionary") };
                group[0] = (Value::Text(name.to_owned()), sizes);
            });
        })
    };
    let truncated = |tag: &Path| {
        let path = tag.join(SECOND);
        let bytes = fs::read(&path).unwrap();
        fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
    };
    for (error, expected) in [
        (
            refused("stage2", |tag| fs::remove_file(tag.join(FIRST)).unwrap()),
            vec![FIRST, "is missing", "of all ranks"],
        ),
        (
            refused("stage2", |tag| fs::remove_file(tag.join(SECOND)).unwrap()),
            vec!["divided among 2 ranks, 1 files *_optim_states.pt are there", FIRST],
        ),
        (
            refused("stage2", |tag| {
                fs::copy(tag.join(SECOND), tag.join(SECOND.replace('1', "2"))).unwrap();
            }),
            vec!["divided among 2 ranks, 3 files", "remove those of an older run"],
        ),
        (refused("stage2", truncated), vec![SECOND, "damaged"]),
        (
            refused("stage2", |tag| fs::write(tag.join(MODEL), "").unwrap()),
            vec![MODEL, "not a file of PyTorch"],
        ),
        (
            refused("stage2", |tag| {
                [FIRST, SECOND].iter().for_each(|name| fs::remove_file(tag.join(name)).unwrap());
            }),
            vec!["no files *_optim_states.pt"],
        ),
        (
            of_optimizer("stage2", FIRST, &["zero_stage"], Value::Int(4)),
            vec![FIRST, "zero_stage is Some(Int(4)), not 1, 2 or 3"],
        ),
        (
            of_optimizer("stage2", FIRST, &["zero_stage"], Value::Int(3)),
            vec!["it is of stage 3, the model states are not"],
        ),
        (
            of_optimizer("stage2", SECOND, &["zero_stage"], Value::Int(1)),
            vec![SECOND, "that of rank 0 of stage 2"],
        ),
        (
            of_optimizer(
                "stage2",
                FIRST,
                &["partition_count"],
                Value::List(vec![Value::Int(2), Value::Int(4)]),
            ),
            vec!["divided among 4 ranks, 2 files"],
        ),
        (of_optimizer("stage2", FIRST, &["partition_count"], Value::None), vec!["no partition_count"]),
        (
            of_optimizer("stage3", FIRST, &["partition_count"], Value::Int(3)),
            vec!["divided among 3 ranks, 2 files"],
        ),
        (
            of_optimizer(
                "stage2",
                SECOND,
                &["single_partition_of_fp32_groups"],
                Value::List(vec![weights(30), weights(7)]),
            ),
            vec![SECOND, "with partitions of [33, 8] elements, that of rank 0"],
        ),
        (
            of_optimizer(
                "stage2",
                SECOND,
                &["single_partition_of_fp32_groups"],
                Value::List(vec![weights(31)]),
            ),
            vec!["has 1 groups, param_shapes of the model states 2"],
        ),
        (
            of_optimizer(
                "stage2",
                SECOND,
                &["group_paddings"],
                Value::List(vec![Value::Int(i64::MAX), Value::Int(1)]),
            ),
            vec![SECOND, "do not hold"],
        ),
        (
            of_optimizer("stage2", SECOND, &["base_optimizer_state", "state"], Value::Dict(Vec::new())),
            vec![
                "the ranks have 34 of 35 elements of exp_avg of embed.weight",
                "copy the files of all ranks",
            ],
        ),
        (
            of_optimizer("stage3", SECOND, &["fp32_flat_groups"], Value::List([1, 1, 1].map(weights).into())),
            vec![SECOND, "its parameters need"],
        ),
        (
            of_model("stage2", "embed.weight", shape(&[7, -5])),
            vec!["embed.weight has no shape that a tensor may have"],
        ),
        (of_model("stage2", "embed.weight", shape(&[7, 7])), vec!["do not hold"]),
        (
            of_model("stage2", "embed.weight", shape(&[5, 7])),
            vec!["embed.weight has shape [7, 5] in the module, [5, 7] in"],
        ),
        (of_model("stage3", "embed.weight", shape(&[1 << 40, 1 << 20])), vec![FIRST, "its parameters need"]),
        (of_model("stage2", "hidden.weight", shape(&[7, 5])), vec!["hidden.weight is twice in param_shapes"]),
    ] {
        for part in &expected {
            assert!(error.contains(part), "{error}\nwithout {part}");
        }
    }
    let universal = |name: &str, change: &dyn Fn(&Path)| refused(name, |tag| change(&tag.join("zero")));
    let gone =
        universal("stage1_universal", &|zero| fs::remove_file(zero.join("back.bias/fp32.pt")).unwrap());
    assert!(gone.contains("back.bias/fp32.pt"), "{gone}");
    let empty = universal("stage1_universal", &|zero| {
        write_torch(&Value::dict([("cat_dim", Value::Int(0))]), &zero.join("back.bias/fp32.pt")).unwrap();
    });
    assert!(empty.contains("it has no tensor `param`; convert to a universal checkpoint again"), "{empty}");
    let short = universal("stage3_universal", &|zero| {
        write_torch(&weights(4), &zero.join("back.bias/exp_avg.pt")).unwrap();
    });
    assert!(short.contains("its tensor has shape [4], the parameter [5]"), "{short}");
    let unnamed = read_deepspeed(&fixtures().join("stage0"), &how()).unwrap_err().to_string();
    assert!(unnamed.contains("2 groups of unnamed parameters; give their names"), "{unnamed}");
    let named = DeepSpeedRead { param_names: Some(vec!["a".to_owned()]), ..how() };
    assert_error!(read_deepspeed(&fixtures().join("stage2"), &named), "its files have the names");
}

#[test]
fn options_without_effect_and_checkpoints_without_a_place_are_refused() {
    let root = TempDir::new().unwrap();
    let (own, output) = (root.path().join("own.ckpt"), root.path().join("out"));
    convert(&fixtures().join("stage2"), &own, &[]);
    let input = fixtures().join("stage2");
    for (input, options, expected) in [
        (&own, &["--to=state_dict", "--tag=a"][..], "convert --tag: it has no effect here"),
        (&own, &["--to=lightning", "--stage=2"], "convert --stage: it has no effect here"),
        (&own, &["--to=voltaic", "--partitions=2"], "convert --partitions: it has no effect here"),
        (&own, &["--to=deepspeed", "--stage=4"], "4 is not in 1..=3"),
        (&own, &["--to=deepspeed", "--tag=a/b"], "is not the name of a folder"),
        (&own, &["--to=deepspeed", "--weights_only"], "weights only"),
        (&own, &["--to=folder", "--weights_only"], "no training state that ranks would shard"),
        (&input, &["--tag=best"], "there is no such folder"),
    ] {
        let arguments = [&["convert", input.to_str().unwrap(), output.to_str().unwrap()], options].concat();
        let ended = voltaic(&arguments);
        let text = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(!ended.status.success() && text.contains(expected), "{options:?}: {text}");
        assert!(!output.exists(), "{options:?}");
    }
}
