//! The strategies by name, from the command line.

use std::process::Command;

#[test]
fn the_command_line_trains_and_resumes_with_divided_states() {
    let folder = tempfile::tempdir().unwrap();
    let run = |strategy: &str, more: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_voltaic"))
            .args([
                "fit",
                "--model=Mlp",
                "--data=MnistData",
                "--data.batch_size=2",
                "--trainer.accelerator=cpu",
            ])
            .args(["--trainer.devices=2", "--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"])
            .arg(format!("--trainer.strategy={strategy}"))
            .args(more)
            .env("OMP_NUM_THREADS", "1")
            .current_dir(folder.path())
            .output()
            .unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (is_done, text) = run("zero1", &["--trainer.max_epochs=1"]);
    assert!(is_done && text.contains("zero1: rank 0 of 2 holds parameters"), "{text}");
    let (is_done, text) = run("zero3", &["--trainer.max_epochs=2", "--ckpt_path=last"]);
    assert!(is_done && text.contains("zero3: rank 0 of 2 holds parameters"), "{text}");
}
