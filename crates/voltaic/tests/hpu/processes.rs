//! Several processes on one machine, each with an emulated HPU of its own.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

fn start_fit(folder: &Path) -> Child {
    let recipe = format!("{}/../../recipes/mlp.yaml", env!("CARGO_MANIFEST_DIR"));
    Command::new(env!("CARGO_BIN_EXE_voltaic"))
        .args(["fit", "--config", &recipe, "--trainer.accelerator=hpu", "--trainer.max_epochs=1"])
        .args(["--trainer.limit_train_batches=20", "--trainer.limit_val_batches=2"])
        .args(["--trainer.log_every_n_steps=5", "--trainer.enable_progress_bar=false"])
        .args(["--trainer.callbacks+=DeviceStatsMonitor"])
        .arg(format!("--trainer.default_root_dir={}", folder.display()))
        .envs([("VOLTAIC_HPU", "emulator"), ("VOLTAIC_HPU_MEMORY", "64MiB"), ("OMP_NUM_THREADS", "1")])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn eight_processes_train_side_by_side() {
    let folders: Vec<_> = (0..8).map(|_| tempfile::tempdir().unwrap()).collect();
    let children: Vec<Child> = folders.iter().map(|folder| start_fit(folder.path())).collect();
    let outputs: Vec<_> = children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    let metrics = |folder: &tempfile::TempDir| {
        fs::read_to_string(folder.path().join("lightning_logs/version_0/metrics.csv")).unwrap()
    };
    for (output, folder) in outputs.iter().zip(&folders) {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(metrics(folder), metrics(&folders[0]), "a process is not disturbed by its neighbours");
    }
    let metrics = metrics(&folders[0]);
    assert!(metrics.contains("DeviceStatsMonitor.on_train_batch_end/InUse"), "{metrics}");
    assert!(metrics.contains("67108864"), "the limit of each: {metrics}");
}
