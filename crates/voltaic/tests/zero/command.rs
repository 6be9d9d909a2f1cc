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
    let held = text.lines().find(|line| line.contains("zero1: rank 0 of 2 held at most parameters"));
    assert!(held.is_some_and(|line| line.contains("optimizer states")), "{text}");
    let (is_done, text) = run("zero3", &["--trainer.max_epochs=2", "--ckpt_path=last"]);
    assert!(is_done && text.contains("zero3: rank 0 of 2 holds parameters"), "{text}");
}

/// From the command line: train on two ranks, test and convert the folder.
#[test]
fn the_command_line_tests_and_converts_folders() {
    let folder = tempfile::tempdir().unwrap();
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_voltaic"));
        let output =
            command.args(arguments).env("OMP_NUM_THREADS", "1").current_dir(folder.path()).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.success(), text(&output.stdout) + &text(&output.stderr))
    };
    const MODEL: [&str; 4] =
        ["--model=Mlp", "--data=MnistData", "--data.batch_size=2", "--trainer.accelerator=cpu"];
    const LIMITS: [&str; 4] = [
        "--trainer.limit_train_batches=2",
        "--trainer.limit_val_batches=1",
        "--trainer.limit_test_batches=2",
        "--trainer.max_epochs=1",
    ];
    let trainer = |verb: &str, more: &[&str]| run(&[&[verb], &MODEL[..], &LIMITS, more].concat());
    let (is_done, text) = trainer("fit", &["--trainer.devices=2", "--trainer.strategy=zero3"]);
    assert!(is_done, "{text}");
    let saved = std::fs::read_dir(folder.path().join("lightning_logs/version_0/checkpoints")).unwrap();
    let saved: Vec<_> = saved.map(|entry| entry.unwrap().path()).collect();
    let [saved] = &saved[..] else { panic!("{saved:?}") };
    assert!(saved.join("index.json").exists() && saved.join("rank-1.safetensors").exists());
    let from = saved.to_str().unwrap();
    let ckpt_path = |path: &str| format!("--ckpt_path={path}");
    let (is_done, of_folder) = trainer("test", &[&ckpt_path(from)]);
    assert!(is_done, "{of_folder}");
    for (output, expected) in [
        ("out.safetensors", "note: the training state is left out"),
        ("out.pt", "note: the training state is left out"),
        ("out.ckpt", "and the training state, epoch 0, global_step 2"),
    ] {
        let (is_done, text) = run(&["convert", from, output]);
        assert!(is_done && text.contains(expected), "{output}: {text}");
    }
    let read = |path: &str| voltaic::checkpoint::read_weights(&folder.path().join(path)).unwrap();
    let weights = voltaic::checkpoint::read_weights(saved).unwrap();
    for exported in [read("out.safetensors"), read("out.ckpt")] {
        assert_eq!(exported.len(), weights.len());
        for (name, weight) in &weights {
            let (_, other) = exported.iter().find(|(other, _)| other == name).unwrap();
            assert!(weight.numel() > 0 && weight.equal(other), "{name}");
        }
    }
    let (is_done, of_file) = trainer("test", &[&ckpt_path("out.ckpt")]);
    let line = |text: &str| text.lines().find(|line| line.contains("test_loss")).map(str::to_owned);
    assert!(is_done && line(&of_file).is_some(), "{of_file}");
    assert_eq!(line(&of_folder), line(&of_file));
    let (is_done, text) = run(&["convert", from, &format!("{from}/out.safetensors")]);
    assert!(!is_done && text.contains("is in the folder that is converted"), "{text}");
    std::fs::remove_file(saved.join("rank-1.safetensors")).unwrap();
    let (is_done, text) = run(&["convert", from, "again.safetensors"]);
    assert!(
        !is_done && text.contains("rank-1.safetensors") && text.contains("copy the whole folder"),
        "{text}"
    );
    assert!(!folder.path().join("again.safetensors").exists());
}
