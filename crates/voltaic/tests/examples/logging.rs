//! What loggers write, and metrics of an epoch.

use crate::run;

const PROGRAM: &str = "logging";

#[test]
fn csv_tensorboard_and_json_lines() {
    let ran = run(PROGRAM, "csv_tensorboard_and_json_lines");
    let losses = ran.column(0, "train_loss");
    ran.assert_fell(0, "train_loss", 0.9);
    assert_eq!(ran.column(0, "lr-Adam"), [0.02; 61], "for the epoch and for each step");

    let folder = ran.folder.path().join("lightning_logs/version_0");
    let rows = std::fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    let rows: Vec<serde_json::Value> = rows.lines().map(|row| serde_json::from_str(row).unwrap()).collect();
    let in_rows: Vec<f64> = rows.iter().filter_map(|row| row["train_loss"].as_f64()).collect();
    assert_eq!(in_rows, losses);

    let mut events = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
    let is_event = |path: &std::path::PathBuf| path.to_string_lossy().contains("events.out.tfevents");
    let bytes = std::fs::read(events.find(is_event).unwrap()).unwrap();
    let records = bytes.windows(10).filter(|window| *window == b"train_loss").count();
    assert_eq!(records, 60, "one for each step");
}

#[test]
fn f1_and_auroc_of_an_epoch() {
    let ran = run(PROGRAM, "f1_and_auroc_of_an_epoch");
    let values: Vec<&str> =
        ran.out.lines().filter_map(|line| line.split_once(": ")).map(|(_, v)| v).collect();
    assert!(values.len() == 3 && values.iter().all(|value| *value == values[0]), "{}", ran.out);
    let [f1, auroc] = ["val_f1", "val_auroc"].map(|name| ran.column(0, name)[0]);
    assert!(f1 > 0.8 && f1 < 0.95 && auroc > 0.95 && auroc < 1.0, "{f1} {auroc}");
}
