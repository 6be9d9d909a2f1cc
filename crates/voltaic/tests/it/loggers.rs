//! Where metrics go: loggers by class name, event files that TensorBoard reads, JSON lines.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};
use tempfile::TempDir;
use voltaic::callback::{Callback, LambdaCallback, ModelCheckpoint, ModelCheckpointConfig};
use voltaic::checkpoint::{Checkpoint, CheckpointIo};
use voltaic::logger::tfevents::{Event, hparams, read_record, write_record};
use voltaic::logger::{CsvLogger, CsvLoggerConfig, Logger, LoggerConfig, TensorBoardLoggerConfig, Version};
use voltaic::trainer::{Trainer, TrainerBuilder};

use crate::checkpoints::{full_checkpoint, resumed};
use crate::probe::{Probe, files, loaders, names};

const VAL_LOSSES: &[f64] = &[0.5, 0.25];

fn logging_to(root: &Path) -> TrainerBuilder {
    Trainer::builder()
        .default_root_dir(root)
        .max_epochs(2)
        .log_every_n_steps(2_u64)
        .enable_progress_bar(false)
        .enable_model_summary(false)
}

fn loggers(list: Value) -> Vec<LoggerConfig> {
    serde_json::from_value(list).unwrap()
}

/// The parts of a protocol buffer message: number, and an integer's or float's bits or the bytes.
fn fields(mut bytes: &[u8]) -> Vec<(u64, u64, Vec<u8>)> {
    fn varint(bytes: &mut &[u8]) -> u64 {
        let (mut value, mut shift) = (0, 0);
        loop {
            let byte = bytes[0];
            *bytes = &bytes[1..];
            value |= u64::from(byte & 0x7f) << shift;
            shift += 7;
            if byte < 0x80 {
                return value;
            }
        }
    }
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let length = match key & 7 {
            0 => {
                fields.push((key >> 3, varint(&mut bytes), Vec::new()));
                continue;
            }
            1 => 8,
            5 => 4,
            _ => varint(&mut bytes) as usize,
        };
        let (head, rest) = bytes.split_at(length);
        bytes = rest;
        let mut number = [0; 8];
        number[..length.min(8)].copy_from_slice(&head[..length.min(8)]);
        fields.push((key >> 3, u64::from_le_bytes(number), head.to_vec()));
    }
    fields
}

/// Scalars of an event file by tag: steps and values.
fn scalars(path: &Path) -> BTreeMap<String, Vec<(u64, f32)>> {
    let mut found = BTreeMap::new();
    add_scalars(path, &mut found);
    found
}

/// The same of a further file: a start of a session drops what has its step or a later one, as in TensorBoard.
fn add_scalars(path: &Path, found: &mut BTreeMap<String, Vec<(u64, f32)>>) {
    let mut reader = File::open(path).unwrap();
    while let Some(record) = read_record(&mut reader).unwrap() {
        let event = fields(&record);
        let step = event.iter().find(|f| f.0 == 2).map_or(0, |f| f.1);
        if event.iter().any(|(number, _, session)| *number == 7 && fields(session)[0].1 == 1) {
            found.values_mut().for_each(|values| values.retain(|(own, _)| *own < step));
        }
        for (_, _, summary) in event.iter().filter(|f| f.0 == 5) {
            for (_, _, value) in fields(summary) {
                let value = fields(&value);
                let Some(number) = value.iter().find(|f| f.0 == 2) else { continue };
                let tag = String::from_utf8(value.iter().find(|f| f.0 == 1).unwrap().2.clone()).unwrap();
                found.entry(tag).or_default().push((step, f32::from_bits(number.1 as u32)));
            }
        }
    }
}

fn event_file(folder: &Path) -> PathBuf {
    let name = names(folder).into_iter().find(|name| name.starts_with("events.out.tfevents.")).unwrap();
    folder.join(name)
}

#[test]
fn a_run_may_have_several_loggers_in_one_folder() {
    let root = TempDir::new().unwrap();
    let list = loggers(json!([
        {"class_path": "TensorBoardLogger", "init_args": {}},
        {"class_path": "CSVLogger", "init_args": {"plots": false}},
        {"class_path": "JsonLinesLogger", "init_args": {}},
    ]));
    let mut trainer = logging_to(root.path()).logger(list).build().unwrap();
    trainer.fit(&mut Probe::logging(VAL_LOSSES), &mut loaders()).unwrap();
    let folder = root.path().join("lightning_logs/version_0");
    let events = event_file(&folder);
    let expected =
        ["checkpoints", events.file_name().unwrap().to_str().unwrap(), "metrics.csv", "metrics.jsonl"];
    assert_eq!(names(&folder), expected);
    assert_eq!(trainer.files().len(), 3);

    let found = scalars(&events);
    let tags: Vec<&str> = found.keys().map(String::as_str).collect();
    assert_eq!(tags, ["epoch", "lr_x", "train_loss_epoch", "train_loss_step", "val_loss"]);
    assert_eq!(found["val_loss"], [(5, 0.5), (11, 0.25)]);
    let steps: Vec<u64> = found["train_loss_step"].iter().map(|(step, _)| *step).collect();
    assert_eq!(steps, [1, 3, 5, 7, 9, 11]);
    // the same numbers in all three
    let mut csv = csv_column(&folder.join("metrics.csv"), "train_loss_step");
    let jsonl = std::fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    let rows: Vec<Value> = jsonl.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let json: Vec<f64> = rows.iter().filter_map(|row| row["train_loss_step"].as_f64()).collect();
    assert_eq!(csv, json);
    for ((_, value), other) in found["train_loss_step"].iter().zip(csv.drain(..)) {
        assert_eq!(*value, other as f32);
    }
    assert_eq!(rows[0]["step"], 1);
}

fn csv_column(path: &Path, name: &str) -> Vec<f64> {
    let text = std::fs::read_to_string(path).unwrap();
    let mut lines = text.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let at = lines.next().unwrap().iter().position(|column| *column == name).unwrap();
    lines.filter_map(|cells| cells[at].parse().ok()).collect()
}

const FILES: [&str; 2] = ["metrics.csv", "metrics.jsonl"];

/// Keeps the loggers' files as they are when a checkpoint is written, beside it.
struct KeepsRows(PathBuf);

impl CheckpointIo for KeepsRows {
    fn save_checkpoint(
        &mut self,
        checkpoint: &Checkpoint,
        path: &Path,
        _: Option<&Value>,
    ) -> voltaic::Result<()> {
        checkpoint.save(path)?;
        for name in FILES {
            std::fs::copy(self.0.join(name), path.with_extension(name)).unwrap();
        }
        Ok(())
    }
}

/// A run that fails at a batch in a step, hook or validation; its files of rows.
fn fit_with_rows(
    root: &Path,
    ckpt: Option<&Path>,
    (fails_at, fails_in): (u64, &'static str),
) -> [PathBuf; 2] {
    let _rng = crate::rng::seeded(1);
    let list = json!([
        {"class_path": "CSVLogger", "init_args": {"version": "v", "plots": false, "flush_logs_every_n_steps": 1}},
        {"class_path": "JsonLinesLogger", "init_args": {"version": "v"}},
        {"class_path": "TensorBoardLogger", "init_args": {"version": "v"}},
    ]);
    let saver = ModelCheckpointConfig {
        dirpath: Some(root.join("saved")),
        save_top_k: -1,
        every_n_epochs: Some(1),
        save_on_exception: true,
        ..Default::default()
    };
    let saved = root.join("saved");
    let hooks = LambdaCallback::new()
        .on_train_batch_start(|ctx, _| {
            let batch = ctx.progress().total_batches;
            ctx.log_metrics(vec![("own".to_owned(), batch as f64)], 1000 - batch);
            Ok(())
        })
        .on_train_batch_end(move |ctx, _| {
            let batch = ctx.progress().total_batches;
            anyhow::ensure!(batch != fails_at || fails_in != "hook", "the run ends here");
            ctx.request_checkpoint(full_checkpoint(saved.join(format!("batch={batch}.ckpt"))));
            Ok(())
        });
    let batch = Arc::new(AtomicU64::new(0));
    let counted = batch.clone();
    let counts = LambdaCallback::new().on_train_batch_start(move |ctx, _| {
        counted.store(ctx.progress().total_batches + 1, Ordering::Relaxed);
        Ok(())
    });
    let fails = move |place| batch.load(Ordering::Relaxed) == fails_at && fails_in == place;
    let fails_in_validation = fails.clone();
    let mut net = Probe {
        train: Box::new(move |_, loss, ctx| {
            ctx.log("train_loss", &loss).on_epoch(true);
            ctx.log("step", 500.0 - ctx.global_step() as f64);
            anyhow::ensure!(!fails("step"), "the run ends here");
            Ok(loss)
        }),
        validate: Some(Box::new(move |_, loss, ctx| {
            ctx.log("val_loss", &loss).on_step(true).on_epoch(true);
            anyhow::ensure!(!fails_in_validation("validation") || ctx.batch_idx() == 0, "the run ends here");
            Ok(loss)
        })),
        ..Probe::default()
    };
    let folder = root.join("lightning_logs/v");
    let builder = logging_to(root).logger(loggers(list)).callback(hooks).callback(counts);
    let builder = builder.val_check_interval(3).accumulate_grad_batches(2_u64).log_every_n_steps(1_u64);
    let builder = builder.num_sanity_val_steps(0).checkpoint_io(KeepsRows(folder.clone()));
    let mut trainer = resumed(builder.callback(ModelCheckpoint::new(saver).unwrap()), ckpt);
    let _ = trainer.fit(&mut net, &mut loaders());
    FILES.map(|name| folder.join(name))
}

/// Rows of a resumed run, in the folder that the user chose, are those of an uninterrupted one: also with steps that are not those of
/// the optimizer, within an accumulation window, after a failure, and if the run was killed as soon as it had written the checkpoint.
#[test]
fn a_resumed_run_keeps_the_rows_before_its_checkpoint() {
    let whole = TempDir::new().unwrap();
    let expected =
        fit_with_rows(whole.path(), None, (0, "")).map(|path| std::fs::read_to_string(path).unwrap());
    assert!(expected.iter().all(|text| text.lines().count() > 20), "{expected:?}");
    for end in [(4, "step"), (6, "validation"), (8, "hook"), (9, "validation"), (0, "")] {
        let folder = TempDir::new().unwrap();
        let left = fit_with_rows(folder.path(), None, end);
        let saved = files(&folder.path().join("saved"));
        for saved in saved.iter().filter(|path| path.extension().is_some_and(|extension| extension == "ckpt"))
        {
            for left in [left.clone(), FILES.map(|name| saved.with_extension(name))] {
                let other = TempDir::new().unwrap();
                let logs = other.path().join("lightning_logs/v");
                std::fs::create_dir_all(&logs).unwrap();
                for (name, left) in FILES.iter().zip(&left) {
                    // killed while it wrote another row
                    let half = if name.ends_with("csv") { "0,0" } else { r#"{"step":9"# };
                    let text = std::fs::read_to_string(left).unwrap();
                    std::fs::write(logs.join(name), format!("{text}{half}")).unwrap();
                }
                let found = fit_with_rows(other.path(), Some(saved), (0, ""))
                    .map(|path| std::fs::read_to_string(path).unwrap());
                assert_eq!(
                    found,
                    expected,
                    "{end:?}, from {}, rows of {}",
                    saved.display(),
                    left[0].display()
                );
            }
        }
    }
}

#[test]
fn tensorboard_shows_the_steps_after_a_checkpoint_once() {
    let root = TempDir::new().unwrap();
    let saver = ModelCheckpointConfig { every_n_train_steps: Some(4), save_top_k: -1, ..Default::default() };
    let fit = |ckpt: Option<&Path>| {
        let list = loggers(json!([{"class_path": "TensorBoardLogger", "init_args": {"version": "v"}}]));
        let saver = ModelCheckpoint::new(saver.clone()).unwrap();
        let mut trainer = resumed(logging_to(root.path()).logger(list).callback(saver), ckpt);
        trainer.fit(&mut Probe::logging(VAL_LOSSES), &mut loaders()).unwrap();
        trainer.files().into_iter().find(|path| path.to_str().unwrap().contains("tfevents")).unwrap()
    };
    let mut found = scalars(&fit(None));
    let expected = found.clone();
    add_scalars(
        &fit(Some(&root.path().join("lightning_logs/v/checkpoints/epoch=0-step=4.ckpt"))),
        &mut found,
    );
    assert_eq!(found, expected);
}

/// All that TensorBoard shows of a folder.
fn shown(folder: &Path) -> BTreeMap<String, Vec<(u64, f32)>> {
    let mut found = BTreeMap::new();
    files(folder)
        .iter()
        .filter(|path| path.to_str().unwrap().contains("tfevents"))
        .for_each(|path| add_scalars(path, &mut found));
    found.values_mut().for_each(|values| values.sort_by(|a, b| a.partial_cmp(b).unwrap()));
    found
}

/// Also rows of the checkpoint's own step, of steps after it that were written before it, and of steps that go backwards.
#[test]
fn tensorboard_shows_all_rows_before_a_checkpoint() {
    let root = TempDir::new().unwrap();
    fit_with_rows(root.path(), None, (0, ""));
    let folder = root.path().join("lightning_logs/v");
    let expected = shown(&folder);
    assert_eq!(
        expected.keys().collect::<Vec<_>>(),
        ["epoch", "own", "train_loss_epoch", "train_loss_step", "val_loss_epoch", "val_loss_step"]
    );
    // each run writes the later checkpoints again
    for batch in [12, 7, 3, 9, 4, 5, 6] {
        let saved = root.path().join(format!("saved/batch={batch}.ckpt"));
        fit_with_rows(root.path(), Some(&saved), (0, ""));
        assert_eq!(shown(&folder), expected, "from batch {batch}");
    }
    assert_eq!(names(&folder).len(), 8 + FILES.len());
}

#[test]
fn names_versions_and_prefixes_are_lightnings() {
    let root = TempDir::new().unwrap();
    let config = TensorBoardLoggerConfig {
        save_dir: Some(root.path().join("tb")),
        name: "digits".to_owned(),
        version: Some(Version::Number(7)),
        prefix: "a".to_owned(),
        sub_dir: Some("events".into()),
        ..Default::default()
    };
    let mut trainer = logging_to(root.path()).logger(LoggerConfig::TensorBoard(config)).build().unwrap();
    trainer.fit(&mut Probe::logging(VAL_LOSSES), &mut loaders()).unwrap();
    let folder = root.path().join("tb/digits/version_7");
    assert_eq!(trainer.log_dir(), folder);
    assert_eq!(names(&folder), ["checkpoints", "events"]);
    let tags: Vec<String> = scalars(&event_file(&folder.join("events"))).into_keys().collect();
    assert_eq!(tags, ["a-lr_x", "a-train_loss_epoch", "a-train_loss_step", "a-val_loss", "epoch"]);

    let config = CsvLoggerConfig { version: Some(Version::Name("mine".to_owned())), ..Default::default() };
    let trainer = logging_to(root.path()).logger(LoggerConfig::Csv(config)).build().unwrap();
    assert_eq!(trainer.log_dir(), root.path().join("lightning_logs/mine"));
}

#[test]
fn loggers_are_chosen_on_the_command_line() {
    let folder = TempDir::new().unwrap();
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_voltaic"))
        .args(["fit", "--model=LeNet", "--data=MnistData", "--data.batch_size=8", "--trainer.max_steps=2"])
        .args(["--trainer.limit_val_batches=0", "--trainer.plugins=AsyncCheckpointIo"])
        .args(["--trainer.logger=lightning.pytorch.loggers.TensorBoardLogger", "--trainer.logger.name=tb"])
        .args(["--trainer.logger+=JsonLinesLogger", "--trainer.log_every_n_steps=1"])
        .args(["--trainer.callbacks=ThroughputMonitor", "--trainer.callbacks.window_size=2"])
        .current_dir(folder.path())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let run = folder.path().join("tb/version_0");
    let tags: Vec<String> = scalars(&event_file(&run)).into_keys().collect();
    assert!(tags.contains(&"train_loss".to_owned()) && tags.contains(&"hp_metric".to_owned()), "{tags:?}");
    assert!(run.join("hparams.yaml").exists() && run.join("config.yaml").exists());
    assert_eq!(names(&run.join("checkpoints")).len(), 1);
    let text = std::fs::read_to_string(folder.path().join("lightning_logs/version_0/metrics.jsonl")).unwrap();
    let rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let values = |name: &str| rows.iter().filter_map(|row| row[name].as_f64()).collect::<Vec<_>>();
    assert_eq!((values("train/batches"), values("train/samples")), (vec![1.0, 2.0], vec![8.0, 16.0]));
    let (batches, samples) = (values("train/device/batches_per_sec"), values("train/device/samples_per_sec"));
    assert!(batches.len() == 1 && batches[0] > 0.0 && (samples[0] / batches[0] - 8.0).abs() < 1e-9, "{text}");
}

/// What `events.json` was made from.
fn fixture() -> Vec<u8> {
    let mut events = vec![Event::version(1000.0)];
    events.push(Event::scalars(1000.5, 0, &[("hp_metric".into(), -1.0)]));
    let values = [
        ("lr".to_owned(), json!(0.1)),
        ("model/width".to_owned(), json!(2)),
        ("name".to_owned(), json!("net")),
        ("bias".to_owned(), json!(true)),
        ("sizes".to_owned(), json!([1, 2])),
    ];
    events.extend(hparams(1000.5, &values, &[("hp_metric".to_owned(), -1.0)]));
    for step in [1_u64, 300, 70_000] {
        let loss = 1.0 / step as f64;
        events.push(Event::scalars(1001.25, step, &[("loss".into(), loss), ("epoch".into(), 0.0)]));
    }
    events.push(Event::scalars(1002.0, 70_001, &[("loss".into(), f64::NAN)]));
    let mut bytes = Vec::new();
    events.iter().for_each(|event| write_record(&mut bytes, event.encode()).unwrap());
    bytes
}

#[test]
fn the_event_file_is_the_one_that_tensorboard_read() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/loggers");
    let path = folder.join("run/events.out.tfevents.1000.fixture.1.0");
    if std::env::var_os("VOLTAIC_WRITE_FIXTURES").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, fixture()).unwrap();
    }
    assert!(
        std::fs::read(&path).unwrap() == fixture(),
        "run read_events.py on the new file, then replace it"
    );
    let read: Value =
        serde_json::from_str(&std::fs::read_to_string(folder.join("events.json")).unwrap()).unwrap();
    for (tag, own) in scalars(&path) {
        let theirs = read["scalars"][&tag].as_array().unwrap();
        assert_eq!(own.len(), theirs.len(), "{tag}");
        for ((step, value), event) in own.iter().zip(theirs) {
            let number: f32 = event[2].as_str().unwrap().parse().unwrap();
            assert!(
                event[0] == *step && (number == *value || (number.is_nan() && value.is_nan())),
                "{event}"
            );
        }
    }
    let expected = json!({"bias": true, "lr": 0.1, "model/width": 2.0, "name": "net", "sizes": "[1,2]"});
    assert_eq!(read["hparams"], expected);
    assert_eq!(read["metrics"], json!(["hp_metric"]));
}

#[test]
fn a_leading_tilde_is_the_home_folder_in_code_too() {
    let home = PathBuf::from(std::env::var_os("HOME").unwrap());
    let logger = CsvLogger::new("~/runs");
    assert!(logger.log_dir().is_some_and(|folder| folder.starts_with(home.join("runs/lightning_logs"))));
    let config = ModelCheckpointConfig { dirpath: Some("~/kept".into()), ..ModelCheckpointConfig::default() };
    let folder = ModelCheckpoint::new(config).unwrap().checkpoint_paths().and_then(|paths| paths.folder);
    assert_eq!(folder, Some(home.join("kept")));
    let builder = Trainer::builder().accelerator("cpu").logger(false).default_root_dir("~/root");
    let mut trainer = builder.build().unwrap();
    assert!(trainer.log_dir().starts_with(home.join("root")), "{}", trainer.log_dir().display());
    let error = trainer.ckpt_path("~/none.ckpt").validate(&mut Probe::default(), &mut loaders()).unwrap_err();
    assert!(error.to_string().contains(&home.join("none.ckpt").display().to_string()), "{error}");
}

/// `voltaic plot` takes folders of runs and CSV files, and says what it cannot draw.
#[test]
fn several_runs_are_drawn_in_one_picture() {
    let folder = TempDir::new().unwrap();
    for (run, text) in
        [("a", "step,loss\n0,2.0\n1,1.0\n"), ("b", "step,loss\n0,4.0\n"), ("c", "step,loss\n0,\n")]
    {
        std::fs::create_dir(folder.path().join(run)).unwrap();
        std::fs::write(folder.path().join(run).join("metrics.csv"), text).unwrap();
    }
    let plot = |arguments: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_voltaic"));
        let output = command.arg("plot").args(arguments).current_dir(folder.path()).output().unwrap();
        let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        (output.status.code(), text.concat())
    };
    assert_eq!(plot(&["a", "b/metrics.csv"]), (Some(0), "picture  runs.png\n".to_owned()));
    assert_eq!(plot(&["a", "--output=own.png"]), (Some(0), "picture  own.png\n".to_owned()));
    for (picture, height) in [("runs.png", 380), ("own.png", 380)] {
        let bytes = std::fs::read(folder.path().join(picture)).unwrap();
        assert_eq!(
            (&bytes[1..4], bytes[20..24].to_vec()),
            (&b"PNG"[..], i32::to_be_bytes(height).to_vec()),
            "{picture}"
        );
    }
    for (arguments, expected) in [
        (&["a", "none"][..], "there is no none"),
        (&["c"], "no metric has a value in c/metrics.csv"),
        (&[], "RUN"),
    ] {
        let (code, text) = plot(arguments);
        assert!(code != Some(0) && text.contains(expected), "{arguments:?}: {text}");
    }
}
