//! Predictions written by batch and by epoch, by each rank.

use std::path::Path;
use std::sync::{Arc, Mutex};

use serde_json::json;
use tempfile::TempDir;
use voltaic::callback::{
    Callback, PredictedBatch, PredictionWriter, PredictionWriterConfig, WriteInterval, WritePredictions,
};
use voltaic::checkpoint::read_weights;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::nn::Parameter;
use voltaic::optim::{Optimizers, Sgd};
use voltaic::trainer::TrainerBuilder;
use voltaic::{Kind, Module, Tensor};

use crate::ddp::{FOLDER, folder_of_parent};
use crate::probe::{names, own_process, plays, silent, text_of};

/// Predicts the sum of each sample, or of the whole batch.
#[derive(Module)]
struct Sums {
    weight: Parameter,
    #[module(skip)]
    of_batches: bool,
}

impl Sums {
    fn new() -> Self {
        let weight = Parameter::new(Tensor::ones([2], (Kind::Float, tch::Device::Cpu)));
        Self { weight, of_batches: false }
    }
}

impl LightningModule for Sums {
    type Batch = Tensor;

    fn training_step(&self, _batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        Ok(ctx.no_loss())
    }

    fn predict_step(&self, batch: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let sums = batch.f_mul(&self.weight)?.f_sum_dim_intlist(1, false, Kind::Float)?;
        Ok(if self.of_batches { sums.f_sum(Kind::Float)? } else { sums })
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Sgd::new(0.1).into()
    }
}

/// Sample i is `[i, 2 i]`.
fn loader(samples: i64) -> DataLoader<Tensor> {
    let i = Tensor::arange(samples, (Kind::Float, tch::Device::Cpu));
    let x = Tensor::stack(&[&i, &(&i * 2)], 1);
    DataLoader::new(TensorDataset::new(x).unwrap()).batch_size(2).shuffle(true).seed(1).build().unwrap()
}

fn read(path: &Path) -> Vec<(String, Vec<f64>)> {
    let mut tensors: Vec<(String, Vec<f64>)> = read_weights(path)
        .unwrap()
        .into_iter()
        .map(|(name, t)| (name, Vec::try_from(t.to_kind(Kind::Double).flatten(0, -1)).unwrap()))
        .collect();
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    tensors
}

/// Each prediction is three times its index.
fn check(indices: &[f64], predictions: &[f64]) {
    assert_eq!(indices.iter().map(|index| 3.0 * index).collect::<Vec<_>>(), predictions);
}

#[test]
fn batches_and_epochs_are_written_with_their_samples() {
    let folder = TempDir::new().unwrap();
    let config = json!({
        "callbacks": [{"class_path": "PredictionWriter", "init_args": {"write_interval": "batch_and_epoch"}}],
        "default_root_dir": folder.path(), "logger": false, "enable_progress_bar": false,
        "enable_checkpointing": false, "enable_model_summary": false,
    });
    let builder = voltaic::trainer::Trainer::builder().config(serde_json::from_value(config).unwrap());
    let mut trainer = builder.build().unwrap();
    let data = || Loaders::new().predict(loader(5)).predict(loader(3));
    let returned = trainer.predict(&mut Sums::new(), &mut data()).unwrap();
    let root = folder.path().join("predictions");
    assert_eq!(names(&root), ["0", "1", "predictions.safetensors"]);
    assert_eq!(names(&root.join("0")), ["0.safetensors", "1.safetensors", "2.safetensors"]);
    assert_eq!(names(&root.join("1")), ["0.safetensors", "1.safetensors"]);
    let mut all = [Vec::new(), Vec::new()];
    for (dataloader_idx, batches) in returned.iter().enumerate() {
        for (batch_idx, prediction) in batches.iter().enumerate() {
            let path = root.join(format!("{dataloader_idx}/{batch_idx}.safetensors"));
            let [(_, indices), (_, predicted)] = &read(&path)[..] else { panic!("two tensors") };
            check(indices, predicted);
            assert_eq!(*predicted, Vec::<f64>::try_from(prediction.to_kind(Kind::Double)).unwrap());
            all[dataloader_idx].extend(indices.iter().copied());
        }
    }
    let epoch = read(&root.join("predictions.safetensors"));
    let names: Vec<&str> = epoch.iter().map(|(name, _)| name.as_str()).collect();
    let expected =
        ["batch_indices", "prediction"].map(|what| [0, 1].map(|i| format!("dataloader_{i}.{what}")));
    let mut expected = expected.concat();
    expected.sort();
    assert_eq!(names, expected);
    for loader in 0..2 {
        assert_eq!(epoch[2 * loader].1, all[loader]);
        check(&epoch[2 * loader].1, &epoch[2 * loader + 1].1);
    }

    // nothing is kept if nothing is to be returned, and only for that call
    let none = trainer.return_predictions(false).predict(&mut Sums::new(), &mut data()).unwrap();
    assert!(none.iter().all(Vec::is_empty));
    assert_eq!(trainer.predict(&mut Sums::new(), &mut data()).unwrap().iter().flatten().count(), 5);
}

#[test]
fn predictions_that_cannot_be_joined_are_written_apart() {
    let folder = TempDir::new().unwrap();
    let config = PredictionWriterConfig {
        output_dir: Some(folder.path().into()),
        write_interval: WriteInterval::Epoch,
        ..Default::default()
    };
    let mut trainer = silent().callback(PredictionWriter::from(config)).build().unwrap();
    let mut net = Sums { of_batches: true, ..Sums::new() };
    trainer.predict(&mut net, &mut Loaders::new().predict(loader(4))).unwrap();
    assert_eq!(names(folder.path()), ["predictions.safetensors"]);
    let names: Vec<String> =
        read(&folder.path().join("predictions.safetensors")).into_iter().map(|(name, _)| name).collect();
    assert_eq!(
        names,
        ["dataloader_0.0.prediction", "dataloader_0.1.prediction", "dataloader_0.batch_indices"]
    );
}

/// Notes what it is given; knows no epochs.
struct Notes(Arc<Mutex<Vec<String>>>);

impl WritePredictions for Notes {
    fn write_on_batch_end(&mut self, ctx: &HookContext, batch: &PredictedBatch) -> anyhow::Result<()> {
        let sum = batch.prediction.sum(Kind::Float).double_value(&[]);
        let indices: usize = batch.batch_indices.iter().sum();
        let note =
            format!("{} {} {}", batch.batch_idx, ctx.batch_size().unwrap_or(0), sum == 3.0 * indices as f64);
        self.0.lock().unwrap().push(note);
        Ok(())
    }
}

#[test]
fn a_writer_of_ones_own_gets_what_its_interval_says() {
    let notes = Arc::new(Mutex::new(Vec::new()));
    let run = |interval| {
        let writer = PredictionWriter::new(interval, Notes(notes.clone()));
        let mut trainer = silent().callback(writer).build().unwrap();
        trainer.predict(&mut Sums::new(), &mut Loaders::new().predict(loader(3)))
    };
    run(WriteInterval::Batch).unwrap();
    assert_eq!(*notes.lock().unwrap(), ["0 2 true", "1 1 true"]);
    assert_error!(run(WriteInterval::Epoch), "on_predict_epoch_end failed", "use write_interval=batch");
}

#[test]
fn batches_of_each_rank_are_in_files_and_an_epoch_is_in_the_order_of_the_samples() {
    if plays("rank") {
        let folder = folder_of_parent();
        let config = PredictionWriterConfig {
            output_dir: Some(folder.join("out")),
            write_interval: WriteInterval::BatchAndEpoch,
            ..Default::default()
        };
        let builder = silent().default_root_dir(folder).accelerator("cpu").devices(2).strategy("ddp");
        let mut trainer = builder.callback(PredictionWriter::from(config)).build().unwrap();
        let mut net = Sums { of_batches: std::env::var(OF_BATCHES).is_ok(), ..Sums::new() };
        trainer.predict(&mut net, &mut Loaders::new().predict(loader(5))).unwrap();
        let files = trainer.files().into_iter().map(|file| file.file_name().unwrap().to_owned());
        println!("\nfiles: {:?}", files.collect::<Vec<_>>());
        return;
    }
    let folder = TempDir::new().unwrap();
    let text = text_of(&own_process("rank").env(FOLDER, folder.path()).output().unwrap());
    assert!(text.contains(r#"files: ["0", "predictions.safetensors"]"#), "{text}");
    let out = folder.path().join("out");
    assert_eq!(names(&out), ["0", "predictions.safetensors"]);
    assert_eq!(names(&out.join("0")), ["0-0.safetensors", "0-1.safetensors", "1-0.safetensors"]);
    let all = read(&out.join("predictions.safetensors"));
    assert_eq!(all[0].1, [0.0, 1.0, 2.0, 3.0, 4.0], "each sample once, in the order of the data set");
    check(&all[0].1, &all[1].1);

    // what has no row for each sample stays in the files of the ranks
    let folder = TempDir::new().unwrap();
    text_of(&own_process("rank").env(FOLDER, folder.path()).env(OF_BATCHES, "1").output().unwrap());
    let parts = ["0", "predictions-0.safetensors", "predictions-1.safetensors"];
    assert_eq!(names(&folder.path().join("out")), parts);
}

/// Set if a prediction is one of a batch.
const OF_BATCHES: &str = "VOLTAIC_TEST_OF_BATCHES";

/// Fails at this batch.
struct FailAt(usize);

impl Callback for FailAt {
    fn on_predict_batch_start(&mut self, ctx: &mut HookContext, _: &mut dyn Module) -> anyhow::Result<()> {
        anyhow::ensure!(ctx.batch_idx() != self.0, "fails on purpose");
        Ok(())
    }
}

/// Predicts five samples in three batches; returns how many batches were predicted.
fn resume(builder: TrainerBuilder, config: PredictionWriterConfig, net: &mut Sums) -> voltaic::Result<usize> {
    let mut trainer = builder.callback(PredictionWriter::from(config)).build().unwrap();
    Ok(trainer.predict(net, &mut Loaders::new().predict(loader(5)))?[0].len())
}

#[test]
fn a_run_that_was_interrupted_goes_on_behind_its_files() {
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("out");
    let config =
        |resume| PredictionWriterConfig { output_dir: Some(out.clone()), resume, ..Default::default() };
    assert_error!(resume(silent().callback(FailAt(2)), config(true), &mut Sums::new()), "fails on purpose");
    assert_eq!(names(&out.join("0")), ["0.safetensors", "1.safetensors"]);
    let before = std::fs::read(out.join("0/0.safetensors")).unwrap();

    let mut other = Sums::new();
    let _ = tch::no_grad(|| other.weight.tensor().shallow_clone().fill_(2.0));
    let error = resume(silent(), config(true), &mut other).unwrap_err().to_string();
    assert!(error.contains("are of {\"ranks\":1,\"weights\":") && error.contains("output_dir"), "{error}");

    assert_eq!(resume(silent(), config(true), &mut Sums::new()).unwrap(), 1, "the last of three batches");
    assert_eq!(names(&out), ["0", "predictions.json"]);
    assert_eq!(std::fs::read(out.join("0/0.safetensors")).unwrap(), before);
    let mut seen: Vec<f64> = Vec::new();
    for batch in 0..3 {
        let part = read(&out.join(format!("0/{batch}.safetensors")));
        check(&part[0].1, &part[1].1);
        seen.extend(&part[0].1);
    }
    seen.sort_by(f64::total_cmp);
    assert_eq!(seen, [0.0, 1.0, 2.0, 3.0, 4.0]);
    assert_eq!(resume(silent(), config(true), &mut Sums::new()).unwrap(), 0, "all is there");
    assert_eq!(resume(silent(), config(false), &mut Sums::new()).unwrap(), 3);

    let refused = [
        (PredictionWriterConfig { resume: true, ..Default::default() }, "set output_dir"),
        (
            PredictionWriterConfig { write_interval: WriteInterval::Epoch, ..config(true) },
            "set write_interval=batch",
        ),
    ];
    for (config, expected) in refused {
        assert_error!(resume(silent(), config, &mut Sums::new()), expected);
    }
}

#[test]
fn ranks_go_on_behind_the_fewest_batches_of_one() {
    if plays("begin") || plays("end") {
        let out = folder_of_parent().join("out");
        let config = PredictionWriterConfig { output_dir: Some(out), resume: true, ..Default::default() };
        let mut builder = silent().default_root_dir(folder_of_parent()).accelerator("cpu").devices(2);
        builder = builder.strategy("ddp");
        if plays("begin") {
            builder = builder.limit_predict_batches(2);
        }
        let mut trainer = builder.callback(PredictionWriter::from(config)).build().unwrap();
        let all = trainer.predict(&mut Sums::new(), &mut Loaders::new().predict(loader(12))).unwrap();
        println!("\nrank {}: {}", trainer.world().rank, all[0].len());
        return;
    }
    let folder = TempDir::new().unwrap();
    let run = |part| text_of(&own_process(part).env(FOLDER, folder.path()).output().unwrap());
    run("begin");
    std::fs::remove_file(folder.path().join("out/0/1-1.safetensors")).unwrap();
    assert_contains!(run("end"), "rank 0: 2"); // the second and the last of three
    let mut seen: Vec<f64> = Vec::new();
    for (batch, rank) in [0, 1, 2].into_iter().flat_map(|batch| [(batch, 0), (batch, 1)]) {
        let part = read(&folder.path().join(format!("out/0/{batch}-{rank}.safetensors")));
        check(&part[0].1, &part[1].1);
        seen.extend(&part[0].1);
    }
    seen.sort_by(f64::total_cmp);
    assert_eq!(seen, (0..12).map(f64::from).collect::<Vec<_>>());
}

/// Predicts nothing by itself; gives the sums and the batch by name, and a text for those who ask.
#[derive(Module)]
struct Named {
    weight: Parameter,
    #[module(skip)]
    gives: &'static str,
}

impl LightningModule for Named {
    type Batch = Tensor;

    fn training_step(&self, _batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        Ok(ctx.no_loss())
    }

    fn predict_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        match self.gives {
            "pair" => {
                ctx.output("sums", &batch.f_sum_dim_intlist(1, false, Kind::Float)?);
                ctx.output(format!("batch of {}", batch.size()[1]), batch);
            }
            "text" => ctx.output_value("caption", "seven".to_owned()),
            "indices" => ctx.output("batch_indices", batch),
            _ => {}
        }
        Ok(ctx.no_prediction())
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Sgd::new(0.1).into()
    }
}

fn named(gives: &'static str) -> Named {
    Named { weight: Sums::new().weight, gives }
}

#[test]
fn tensors_given_by_name_are_written_by_name() {
    let folder = TempDir::new().unwrap();
    let config = PredictionWriterConfig {
        output_dir: Some(folder.path().into()),
        write_interval: WriteInterval::BatchAndEpoch,
        ..Default::default()
    };
    let mut trainer = silent().callback(PredictionWriter::from(config)).build().unwrap();
    let mut data = Loaders::new().predict(loader(5));
    let outputs = trainer.predict_outputs(&mut named("pair"), &mut data).unwrap();
    assert_eq!(trainer.files(), [folder.path().join("0"), folder.path().join("predictions.safetensors")]);
    let first = read(&folder.path().join("0/0.safetensors"));
    let names: Vec<&str> = first.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["batch of 2", "batch_indices", "sums"]);
    check(&first[1].1, &first[2].1);
    let epoch = read(&folder.path().join("predictions.safetensors"));
    let names: Vec<&str> = epoch.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["batch of 2", "batch_indices", "sums"].map(|name| format!("dataloader_0.{name}")));
    check(&epoch[1].1, &epoch[2].1);
    let returned: Vec<f64> = outputs[0]
        .iter()
        .flat_map(|output| {
            Vec::<f64>::try_from(output.tensor("sums").unwrap().to_kind(Kind::Double)).unwrap()
        })
        .collect();
    assert_eq!(returned, epoch[2].1);
    let error = trainer.predict(&mut named("pair"), &mut data).unwrap_err().to_string();
    assert!(error.contains("returned no prediction") && error.contains("predict_outputs"), "{error}");
}

#[test]
fn what_cannot_be_written_is_refused_at_its_first_batch() {
    for (gives, expected) in [
        ("text", "predict_step gave `caption`, a alloc::string::String"),
        ("indices", "predict_step gave `batch_indices`, but"),
        ("nothing", "predict_step gave nothing for batch 0"),
    ] {
        for interval in [WriteInterval::Batch, WriteInterval::Epoch] {
            let folder = TempDir::new().unwrap();
            let config = PredictionWriterConfig {
                output_dir: Some(folder.path().join("out")),
                write_interval: interval,
                ..Default::default()
            };
            let mut trainer = silent().callback(PredictionWriter::from(config)).build().unwrap();
            let mut data = Loaders::new().predict(loader(5));
            let error = trainer.predict_outputs(&mut named(gives), &mut data).unwrap_err().to_string();
            assert!(error.contains("on_predict_batch_end") && error.contains(expected), "{error}");
            assert!(!folder.path().join("out").exists(), "nothing was written");
        }
    }
}

#[test]
fn the_command_line_names_what_was_written() {
    let folder = TempDir::new().unwrap();
    let predict = "predict --model=Mlp --data=MnistData --data.batch_size=4 --trainer.accelerator=cpu \
        --trainer.limit_predict_batches=2 --trainer.callbacks+=PredictionWriter";
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_voltaic"))
        .args(predict.split_whitespace())
        .arg(format!("--trainer.callbacks.output_dir={}", folder.path().join("out").display()))
        .current_dir(folder.path())
        .output()
        .unwrap();
    let text = text_of(&output);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 3, "{text}");
    assert_eq!(lines[0].split(' ').count(), 4);
    assert_eq!(lines[2], format!("predictions  {}", folder.path().join("out/0").display()));
    assert_eq!(names(&folder.path().join("out/0")), ["0.safetensors", "1.safetensors"]);
}
