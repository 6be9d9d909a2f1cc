//! The strategies by name, from the command line.

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};

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
    let (is_done, text) = run("zero2", &["--trainer.max_epochs=3", "--ckpt_path=last", "--model=LeNet"]);
    for part in [".ckpt is of a Mlp: ", "; use it with a Mlp, or give a checkpoint of a LeNet"] {
        assert!(!is_done && text.contains(part), "{text}");
    }
}

/// An optimizer of DeepSpeed's settings counts before the model's own, and `--optimizer` before both.
#[test]
fn the_command_line_takes_the_optimizer_of_the_settings() {
    let folder = tempfile::tempdir().unwrap();
    let settings = r#"{
        "optimizer": {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 1e-3}},
        "zero_optimization": {"stage": 2}
    }"#;
    std::fs::write(folder.path().join("ds.json"), settings).unwrap();
    let run = |more: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_voltaic"))
            .args([
                "fit",
                "--model=Mlp",
                "--data=MnistData",
                "--data.batch_size=2",
                "--trainer.accelerator=cpu",
            ])
            .args(["--trainer.devices=2", "--trainer.max_epochs=1", "--trainer.limit_train_batches=2"])
            .args(["--trainer.limit_val_batches=1", "--trainer.strategy=DeepSpeedStrategy"])
            .args(["--trainer.strategy.config=ds.json"])
            .args(more)
            .env("OMP_NUM_THREADS", "1")
            .current_dir(folder.path())
            .output()
            .unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (is_done, text) = run(&[]);
    assert!(is_done && text.contains("MuonWithAuxAdam: this rank holds optimizer states"), "{text}");
    let (is_done, text) = run(&["--optimizer=SGD", "--optimizer.lr=0.1", "--optimizer.momentum=0.9"]);
    assert!(is_done && text.contains("SGD: this rank holds optimizer states"), "{text}");
    let (is_done, text) = run(&["--optimizer=Muon", "--optimizer.lr=0.02"]);
    assert!(
        !is_done && text.contains("has shape [10], and Muon is for matrices; give it to another optimizer"),
        "{text}"
    );
    let (is_done, text) = run(&["--optimizer=Muon", "--optimizer.momentum=1.5"]);
    assert!(
        !is_done
            && text.contains("optimizer.momentum (from command line): 1.5 is not at least 0")
            && !text.contains("shape"),
        "{text}"
    );
}

/// Whether the command succeeds in a folder, and what it prints.
fn command_in(folder: &Path, arguments: &[&str]) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_voltaic"));
    let output = command.args(arguments).env("OMP_NUM_THREADS", "1").current_dir(folder).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.success(), text(&output.stdout) + &text(&output.stderr))
}

/// From the command line: train on two ranks, test and convert the folder.
#[test]
fn the_command_line_tests_and_converts_folders() {
    let folder = tempfile::tempdir().unwrap();
    let run = |arguments: &[&str]| command_in(folder.path(), arguments);
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

/// A run in 16 bits keeps float32 weights beside them, and what is exported are these.
#[test]
fn the_command_line_exports_master_weights() {
    let folder = tempfile::tempdir().unwrap();
    let run = |arguments: &[&str]| {
        let (is_done, text) = command_in(folder.path(), arguments);
        assert!(is_done, "{text}");
        text
    };
    run(&[
        "fit",
        "--model=Mlp",
        "--data=MnistData",
        "--data.batch_size=2",
        "--trainer.accelerator=cpu",
        "--trainer.devices=2",
        "--trainer.strategy=zero2",
        "--trainer.precision=bf16-true",
        "--trainer.limit_train_batches=2",
        "--trainer.limit_val_batches=0",
        "--trainer.max_epochs=1",
    ]);
    let saved = std::fs::read_dir(folder.path().join("lightning_logs/version_0/checkpoints")).unwrap();
    let saved = saved.map(|entry| entry.unwrap().path()).next().unwrap();
    let of_run = voltaic::checkpoint::Checkpoint::load(&saved).unwrap();
    let masters = of_run.training.unwrap().optimizers.remove(0);
    for (output, more) in [("a.safetensors", None), ("b.pt", None), ("c.pt", Some("--no_master_weights"))] {
        let arguments = ["convert", saved.to_str().unwrap(), output].into_iter().chain(more);
        let text = run(&arguments.collect::<Vec<_>>());
        assert_eq!(text.contains("are the float32 master weights"), more.is_none(), "{text}");
        let exported = voltaic::checkpoint::read_weights(&folder.path().join(output)).unwrap();
        for (name, weight) in exported {
            let of_run = of_run.weights.iter().find(|(own, _)| *own == name);
            let master = masters.iter().find(|(own, _)| *own == format!("master_param.{name}"));
            let expected = if more.is_none() { master } else { of_run };
            assert!(weight == expected.unwrap().1, "{output}: {name}");
        }
    }
}

/// Two nodes of two ranks, which meet over Gloo alone: DDP's losses within 5e-5, and one folder on the first node, from which one node
/// of four ranks goes on.
#[test]
fn two_nodes_train_with_divided_states() {
    let fit = |folder: &Path, nodes: usize, arguments: &[&str]| {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let start = |node: usize| {
            let folder = folder.join(format!("node-{node}"));
            std::fs::create_dir_all(&folder).unwrap();
            let mut command = Command::new(env!("CARGO_BIN_EXE_voltaic"));
            command.args([
                "fit",
                "--seed_everything=7",
                "--model=Gpt",
                "--model.n_layer=2",
                "--model.n_embd=16",
            ]);
            command.args(["--model.n_head=2", "--model.block_size=8", "--data=ShakespeareData"]);
            command.args(["--data.context_length=8", "--data.batch_size=2", "--optimizer=AdamW"]);
            command.args(["--trainer.accelerator=cpu", "--trainer.limit_val_batches=0"]);
            command.args(["--trainer.accumulate_grad_batches=2", "--trainer.gradient_clip_val=0.3"]);
            command.args(["--trainer.log_every_n_steps=1", "--trainer.enable_progress_bar=false"]);
            command
                .arg(format!("--trainer.num_nodes={nodes}"))
                .arg(format!("--trainer.devices={}", 4 / nodes));
            command.args(arguments).env("OMP_NUM_THREADS", "1").current_dir(folder);
            if nodes > 1 {
                command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
                command.env("NODE_RANK", node.to_string()).env("VOLTAIC_JOB_SECRET", "of two nodes");
            }
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        for node in (0..nodes).map(start).collect::<Vec<_>>() {
            let output = node.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
    };
    let losses = |folder: &Path, version: usize| -> Vec<f64> {
        let path = folder.join(format!("node-0/lightning_logs/version_{version}/metrics.csv"));
        let text = std::fs::read_to_string(path).unwrap();
        assert!(text.starts_with("epoch,step,train_loss\n"), "{text}");
        text.lines().skip(1).map(|line| line.rsplit(',').next().unwrap().parse().unwrap()).collect()
    };
    let near = |name: &str, own: &[f64], expected: &[f64]| {
        assert!(own.len() == expected.len() && !own.is_empty(), "{name}: {own:?} {expected:?}");
        for (own, expected) in own.iter().zip(expected) {
            assert!((own - expected).abs() <= 5e-5, "{name}: {own}, not {expected}");
        }
    };
    let of_ddp = tempfile::tempdir().unwrap();
    fit(of_ddp.path(), 2, &["--trainer.strategy=ddp", "--trainer.max_steps=6"]);
    let expected = losses(of_ddp.path(), 0);
    for stage in ["zero2", "zero3"] {
        let folder = tempfile::tempdir().unwrap();
        let strategy = format!("--trainer.strategy={stage}");
        fit(folder.path(), 2, &[&strategy, "--trainer.max_steps=3"]);
        let saved = "lightning_logs/version_0/checkpoints/epoch=0-step=3.ckpt";
        let files: BTreeSet<_> = std::fs::read_dir(folder.path().join("node-0").join(saved))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        let parts = (0..4).map(|rank| format!("rank-{rank}.safetensors"));
        assert_eq!(files, parts.chain(["index.json".to_owned()]).collect(), "{stage}");
        fit(folder.path(), 1, &[&strategy, "--trainer.max_steps=6", &format!("--ckpt_path={saved}")]);
        let own = [losses(folder.path(), 0), losses(folder.path(), 1)].concat();
        near(stage, &own, &expected);
    }
}

/// The rows of training and validation from the second epoch on.
fn rows(folder: &std::path::Path) -> Vec<String> {
    let text = std::fs::read_to_string(folder.join("metrics.csv")).unwrap();
    let mut lines = text.lines();
    let header: Vec<&str> = lines.next().unwrap().split(',').collect();
    let epoch = header.iter().position(|name| *name == "epoch").unwrap();
    let is_late = |line: &&str| line.split(',').nth(epoch) == Some("1");
    let late: Vec<String> = lines.filter(is_late).map(str::to_owned).collect();
    assert!(!late.is_empty() && header.contains(&"train_loss"), "{text}");
    [vec![header.join(",")], late].concat()
}

/// From the command line: a run that goes on from one file is the one that was not interrupted.
#[test]
fn the_command_line_goes_on_from_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_voltaic"));
        let output =
            command.args(arguments).env("OMP_NUM_THREADS", "1").current_dir(folder.path()).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    };
    let fit = |name: &str, epochs: &str, more: &[&str]| {
        let name = format!("--trainer.logger.name={name}");
        let arguments = [
            "fit",
            "--seed_everything=5",
            "--model=Mlp",
            "--data=MnistData",
            "--data.batch_size=2",
            "--optimizer=AdamW",
            "--trainer.accelerator=cpu",
            "--trainer.devices=2",
            "--trainer.strategy=zero3",
            "--trainer.limit_train_batches=3",
            "--trainer.limit_val_batches=1",
            "--trainer.log_every_n_steps=1",
            "--trainer.logger=CSVLogger",
            "--trainer.logger.save_dir=.",
            &name,
            epochs,
        ];
        run(&[&arguments[..], more].concat());
    };
    fit("whole", "--trainer.max_epochs=2", &[]);
    fit("first", "--trainer.max_epochs=1", &[]);
    let of = |name: &str| folder.path().join(name).join("version_0");
    let checkpoint = |name: &str| {
        let saved = std::fs::read_dir(of(name).join("checkpoints")).unwrap();
        let saved: Vec<_> = saved.map(|entry| entry.unwrap().path()).collect();
        let [saved] = &saved[..] else { panic!("{saved:?}") };
        saved.clone()
    };
    run(&["convert", checkpoint("first").to_str().unwrap(), "single.ckpt"]);
    assert!(folder.path().join("single.ckpt").is_file());
    fit("second", "--trainer.max_epochs=2", &["--ckpt_path=single.ckpt"]);
    assert_eq!(rows(&of("second")), rows(&of("whole")));
    let read = |name: &str| voltaic::checkpoint::Checkpoint::load(&checkpoint(name)).unwrap();
    let (own, expected) = (read("second"), read("whole"));
    crate::ranks::assert_same("weights", &own.weights, &expected.weights);
    let states =
        |checkpoint: voltaic::checkpoint::Checkpoint| checkpoint.training.unwrap().optimizers.remove(0);
    crate::ranks::assert_same("states", &states(own), &states(expected));
}
