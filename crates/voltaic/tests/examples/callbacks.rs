//! What each callback did to the run.

use voltaic::data::{EpochRange, MnistData, MnistDataConfig, MnistSet};
use voltaic::prelude::*;

use crate::{run, run_with};

const PROGRAM: &str = "callbacks";

#[test]
fn early_stopping() {
    let ran = run(PROGRAM, "early_stopping");
    let losses = ran.column(0, "val_loss");
    assert_eq!(losses.len() as f64, ran.number("stopped after"));
    assert!(losses.len() < 50, "{losses:?}");
    // three in a row are no better than what came before
    let best = losses[..losses.len() - 3].iter().copied().fold(f64::INFINITY, f64::min);
    assert!(losses[losses.len() - 3..].iter().all(|loss| *loss >= best), "{losses:?}");
}

#[test]
fn weight_averaging() {
    let ran = run(PROGRAM, "weight_averaging");
    assert_eq!(ran.column(0, "train_loss"), ran.column(1, "train_loss"), "an average trains nothing");
    let [plain, averaged] = [0, 1].map(|version| ran.column(version, "val_loss")[0]);
    assert!(averaged < plain, "{averaged} {plain}");
    assert!(!ran.checkpoint(0).weights[0].1.equal(&ran.checkpoint(1).weights[0].1));
}

#[test]
fn learning_rate_finder() {
    let ran = run(PROGRAM, "learning_rate_finder");
    let lr = ran.number("lr");
    assert!(lr > 1e-5 && lr < 1.0 && lr != 0.02, "{lr}: configure_optimizers has 0.02");
    let picture = std::fs::read(ran.folder.path().join("lightning_logs/version_0/lr_find.png")).unwrap();
    assert!(picture.starts_with(b"\x89PNG"));
    ran.assert_fell(0, "train_loss", 0.9);
}

#[test]
fn batch_size_finder() {
    let ran = run(PROGRAM, "batch_size_finder");
    assert_eq!(ran.number("batch_size"), 4096.0, "the largest that it may try");
    assert_eq!(ran.column(0, "train_loss").len(), 3, "10,800 digits in batches of 4096");

    let small = run_with(PROGRAM, "batch_size_finder", &[("VOLTAIC_HPU_MEMORY", "4MiB")]);
    let size = small.number("batch_size");
    assert!((64.0..=1024.0).contains(&size), "{size} digits of 3 KiB in 4 MiB");
    assert_eq!(small.column(0, "train_loss").len() as f64, (10_800.0 / size).ceil().min(60.0));
}

#[test]
fn predictions_in_files() {
    let ran = run(PROGRAM, "predictions_in_files");
    assert!(ran.out.contains("dataloader_0.prediction [256]"), "{}", ran.out);
    let path = ran.folder.path().join("predictions/predictions.safetensors");
    let tensors = Tensor::read_safetensors(path).unwrap();
    let of = |name: &str| &tensors.iter().find(|(found, _)| found == name).unwrap().1;
    let indices = Vec::<i64>::try_from(of("dataloader_0.batch_indices")).unwrap();
    assert_eq!(indices, (0..256).collect::<Vec<i64>>());

    let mut data = MnistData::new(MnistDataConfig { set: MnistSet::Subset, ..MnistDataConfig::default() });
    data.setup(Stage::Predict).unwrap();
    let loader = data.predict_dataloader().unwrap().remove(0);
    let batches = loader.iter(EpochRange::epoch(0).take(4)).unwrap();
    let labels = Tensor::cat(&batches.map(|batch| batch.unwrap().1).collect::<Vec<_>>(), 0);
    let right = of("dataloader_0.prediction").eq_tensor(&labels).sum(Kind::Int64).int64_value(&[]);
    assert!(right > 180, "{right} of 256");
}
