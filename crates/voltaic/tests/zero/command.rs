//! The strategies by name, from the command line.

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// The command in a folder, with these words as its arguments.
fn command(folder: &Path, line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_voltaic"));
    command.args(line.split_whitespace()).env("OMP_NUM_THREADS", "1").current_dir(folder);
    command
}

/// Whether the command succeeds in a folder, and what it prints.
fn command_in(folder: &Path, line: &str) -> (bool, String) {
    let output = command(folder, line).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.success(), text(&output.stdout) + &text(&output.stderr))
}

/// What it prints; it must succeed.
fn succeeds_in(folder: &Path, line: &str) -> String {
    let (is_done, text) = command_in(folder, line);
    assert!(is_done, "{text}");
    text
}

/// A small network.
const MLP: &str = "--model=Mlp --data=MnistData --data.batch_size=2 --trainer.accelerator=cpu";
/// Its fits of two batches.
const FIT: &str = "fit --model=Mlp --data=MnistData --data.batch_size=2 --trainer.accelerator=cpu --trainer.devices=2 \
    --trainer.limit_train_batches=2 --trainer.limit_val_batches=1";

#[test]
fn the_command_line_trains_and_resumes_with_sharded_states() {
    let folder = tempfile::tempdir().unwrap();
    let run = |strategy: &str, more: &str| {
        command_in(folder.path(), &format!("{FIT} --trainer.strategy={strategy} {more}"))
    };
    let (is_done, text) = run("zero1", "--trainer.max_epochs=1");
    assert!(is_done && text.contains("zero1: rank 0 of 2 holds parameters"), "{text}");
    let held = text.lines().find(|line| line.contains("zero1: rank 0 of 2 held at most parameters"));
    assert!(held.is_some_and(|line| line.contains("optimizer states")), "{text}");
    let (is_done, text) = run("zero3", "--trainer.max_epochs=2 --ckpt_path=last");
    assert!(is_done && text.contains("zero3: rank 0 of 2 holds parameters"), "{text}");
    let (is_done, text) = run("zero2", "--trainer.max_epochs=3 --ckpt_path=last --model=LeNet");
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
    let settings = "--trainer.strategy=DeepSpeedStrategy --trainer.strategy.config=ds.json";
    let run =
        |more: &str| command_in(folder.path(), &format!("{FIT} --trainer.max_epochs=1 {settings} {more}"));
    let (is_done, text) = run("");
    assert!(is_done && text.contains("MuonWithAuxAdam: this rank holds optimizer states"), "{text}");
    let (is_done, text) = run("--optimizer=SGD --optimizer.lr=0.1 --optimizer.momentum=0.9");
    assert!(is_done && text.contains("SGD: this rank holds optimizer states"), "{text}");
    let (is_done, text) = run("--optimizer=Muon --optimizer.lr=0.02");
    assert!(
        !is_done && text.contains("has shape [10], and Muon is for matrices; give it to another optimizer"),
        "{text}"
    );
    let (is_done, text) = run("--optimizer=Muon --optimizer.momentum=1.5");
    assert!(
        !is_done
            && text.contains("optimizer.momentum (from command line): 1.5 is not at least 0")
            && !text.contains("shape"),
        "{text}"
    );
}

/// From the command line: train on two ranks, test and convert the folder.
#[test]
fn the_command_line_tests_and_converts_folders() {
    let folder = tempfile::tempdir().unwrap();
    let run = |line: &str| command_in(folder.path(), line);
    let limits = ["train", "val", "test"].map(|of| format!("--trainer.limit_{of}_batches=2")).join(" ");
    let trainer =
        |verb: &str, more: &str| run(&format!("{verb} {MLP} {limits} --trainer.max_epochs=1 {more}"));
    let (is_done, text) = trainer("fit", "--trainer.devices=2 --trainer.strategy=zero3");
    assert!(is_done, "{text}");
    let saved = std::fs::read_dir(folder.path().join("lightning_logs/version_0/checkpoints")).unwrap();
    let saved: Vec<_> = saved.map(|entry| entry.unwrap().path()).collect();
    let [saved] = &saved[..] else { panic!("{saved:?}") };
    assert!(saved.join("index.json").exists() && saved.join("rank-1.safetensors").exists());
    let from = saved.to_str().unwrap();
    let ckpt_path = |path: &str| format!("--ckpt_path={path}");
    let (is_done, of_folder) = trainer("test", &ckpt_path(from));
    assert!(is_done, "{of_folder}");
    for (output, expected) in [
        ("out.safetensors", "note: the training state is left out"),
        ("out.pt", "note: the training state is left out"),
        ("out.ckpt", "and the training state, epoch 0, global_step 2"),
    ] {
        let (is_done, text) = run(&format!("convert {from} {output}"));
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
    let (is_done, of_file) = trainer("test", &ckpt_path("out.ckpt"));
    let line = |text: &str| text.lines().find(|line| line.contains("test_loss")).map(str::to_owned);
    assert!(is_done && line(&of_file).is_some(), "{of_file}");
    assert_eq!(line(&of_folder), line(&of_file));
    let (is_done, text) = run(&format!("convert {from} {from}/out.safetensors"));
    assert!(!is_done && text.contains("is in the folder that is converted"), "{text}");
    std::fs::remove_file(saved.join("rank-1.safetensors")).unwrap();
    let (is_done, text) = run(&format!("convert {from} again.safetensors"));
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
    let run = |line: &str| succeeds_in(folder.path(), line);
    run(&format!("{FIT} --trainer.strategy=zero2 --trainer.precision=bf16-true --trainer.max_epochs=1"));
    let saved = std::fs::read_dir(folder.path().join("lightning_logs/version_0/checkpoints")).unwrap();
    let saved = saved.map(|entry| entry.unwrap().path()).next().unwrap();
    let of_run = voltaic::checkpoint::Checkpoint::load(&saved).unwrap();
    let masters = of_run.training.unwrap().optimizers.remove(0);
    for (output, more) in [("a.safetensors", ""), ("b.pt", ""), ("c.pt", "--no_master_weights")] {
        let text = run(&format!("convert {} {output} {more}", saved.display()));
        assert_eq!(text.contains("are the float32 master weights"), more.is_empty(), "{text}");
        let exported = voltaic::checkpoint::read_weights(&folder.path().join(output)).unwrap();
        for (name, weight) in exported {
            let of_run = of_run.weights.iter().find(|(own, _)| *own == name);
            let master = masters.iter().find(|(own, _)| *own == format!("master_param.{name}"));
            let expected = if more.is_empty() { master } else { of_run };
            assert!(weight == expected.unwrap().1, "{output}: {name}");
        }
    }
}

/// Two nodes of two ranks, which meet over Gloo alone: DDP's losses within 5e-5, and one folder on the first node, from which one node
/// of four ranks goes on.
#[test]
fn two_nodes_train_with_sharded_states() {
    let gpt = "fit --seed_everything=7 --model=Gpt --model.n_layer=2 --model.n_embd=16 --model.n_head=2 --model.block_size=8 \
        --data=ShakespeareData --data.context_length=8 --data.batch_size=2 --optimizer=AdamW --trainer.accelerator=cpu \
        --trainer.limit_val_batches=0 --trainer.accumulate_grad_batches=2 --trainer.gradient_clip_val=0.3 \
        --trainer.log_every_n_steps=1 --trainer.enable_progress_bar=false";
    let fit = |folder: &Path, nodes: usize, more: &str| {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let ranks = format!("--trainer.num_nodes={nodes} --trainer.devices={}", 4 / nodes);
        let start = |node: usize| {
            let folder = folder.join(format!("node-{node}"));
            std::fs::create_dir_all(&folder).unwrap();
            let mut command = command(&folder, &format!("{gpt} {ranks} {more}"));
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
    fit(of_ddp.path(), 2, "--trainer.strategy=ddp --trainer.max_steps=6");
    let expected = losses(of_ddp.path(), 0);
    for stage in ["zero2", "zero3"] {
        let folder = tempfile::tempdir().unwrap();
        fit(folder.path(), 2, &format!("--trainer.strategy={stage} --trainer.max_steps=3"));
        let saved = "lightning_logs/version_0/checkpoints/epoch=0-step=3.ckpt";
        let files: BTreeSet<_> = std::fs::read_dir(folder.path().join("node-0").join(saved))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        let shards = (0..4).map(|rank| format!("rank-{rank}.safetensors"));
        assert_eq!(files, shards.chain(["index.json".to_owned()]).collect(), "{stage}");
        let more = format!("--trainer.strategy={stage} --trainer.max_steps=6 --ckpt_path={saved}");
        fit(folder.path(), 1, &more);
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

/// A fit of three batches of which all is written to a folder of this name.
fn logged(folder: &Path, name: &str, more: &str) -> (bool, String) {
    let logger =
        format!("--trainer.logger=CSVLogger --trainer.logger.save_dir=. --trainer.logger.name={name}");
    let own =
        "--seed_everything=5 --optimizer=AdamW --trainer.log_every_n_steps=1 --trainer.limit_train_batches=3";
    command_in(folder, &format!("{FIT} {own} {logger} {more}"))
}

/// From the command line: a run that goes on from one file is the one that was not interrupted.
#[test]
fn the_command_line_goes_on_from_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let fit = |name: &str, more: &str| {
        let (is_done, text) = logged(folder.path(), name, &format!("--trainer.strategy=zero3 {more}"));
        assert!(is_done, "{text}");
    };
    fit("whole", "--trainer.max_epochs=2");
    fit("first", "--trainer.max_epochs=1");
    let of = |name: &str| folder.path().join(name).join("version_0");
    let checkpoint = |name: &str| {
        let saved = std::fs::read_dir(of(name).join("checkpoints")).unwrap();
        let saved: Vec<_> = saved.map(|entry| entry.unwrap().path()).collect();
        let [saved] = &saved[..] else { panic!("{saved:?}") };
        saved.clone()
    };
    succeeds_in(folder.path(), &format!("convert {} single.ckpt", checkpoint("first").display()));
    assert!(folder.path().join("single.ckpt").is_file());
    fit("second", "--trainer.max_epochs=2 --ckpt_path=single.ckpt");
    assert_eq!(rows(&of("second")), rows(&of("whole")));
    let read = |name: &str| voltaic::checkpoint::Checkpoint::load(checkpoint(name)).unwrap();
    let (own, expected) = (read("second"), read("whole"));
    crate::ranks::assert_same("weights", &own.weights, &expected.weights);
    let states =
        |checkpoint: voltaic::checkpoint::Checkpoint| checkpoint.training.unwrap().optimizers.remove(0);
    crate::ranks::assert_same("states", &states(own), &states(expected));
}

/// From the command line: with optimizer and weights in files, as a file of DeepSpeed's, YAML and a name say it, losses are those of stage 3, and
/// a run resumes.
#[test]
fn the_command_line_trains_with_files() {
    let folder = tempfile::tempdir().unwrap();
    let settings = r#"{
        "zero_optimization": {
            "stage": 3, "sub_group_size": 500000,
            "offload_optimizer": {"device": "nvme", "nvme_path": "fast", "buffer_count": 8, "pipeline_read": true, "pipeline_write": true},
            "offload_param": {"device": "nvme", "nvme_path": "fast", "buffer_count": 2, "buffer_size": 1000000, "max_in_cpu": 0}
        },
        "aio": {"block_size": 262144, "queue_depth": 4, "thread_count": 2, "single_submit": true, "backend": "threads"}
    }"#;
    std::fs::write(folder.path().join("ds.json"), settings).unwrap();
    let recipe = "trainer:
  strategy:
    class_path: DeepSpeedStrategy
    init_args:
      config:
        zero_optimization:
          stage: 3
          offload_optimizer: {device: nvme, nvme_path: fast}
          offload_param: {device: nvme, nvme_path: fast, buffer_count: 1, buffer_size: 1000000, max_in_cpu: 0}
        aio: {block_size: 524288, queue_depth: 2}
";
    std::fs::write(folder.path().join("files.yaml"), recipe).unwrap();
    let fit = |name: &str, epochs: u32, strategy: &str| {
        let more = format!("--model.hidden_features=1024 --trainer.max_epochs={epochs} {strategy}");
        logged(folder.path(), name, &more)
    };
    let done = |(is_done, text): (bool, String)| {
        assert!(is_done, "{text}");
        text
    };
    let of = |name: &str| folder.path().join(name).join("version_0");
    done(fit("whole", 2, "--trainer.strategy=zero3"));
    let by_json = "--trainer.strategy=DeepSpeedStrategy --trainer.strategy.config=ds.json";
    let by_yaml = "--config=files.yaml";
    assert_contains!(done(fit("json", 2, by_json)), "are moved by threads", " in files with buffers of ");
    assert_eq!(rows(&of("json")), rows(&of("whole")));
    let text = done(fit("yaml", 1, by_yaml));
    assert!(text.contains(" in files with buffers of "), "{text}");
    let saved = std::fs::read_dir(of("yaml").join("checkpoints")).unwrap();
    let saved = saved.map(|entry| entry.unwrap().path()).next().unwrap();
    for (name, strategy) in [("yaml-yaml", by_yaml), ("yaml-json", by_json)] {
        done(fit(name, 2, &format!("{strategy} --ckpt_path={}", saved.display())));
        assert_eq!(rows(&of(name)), rows(&of("whole")), "{name}");
    }
    // the name has DeepSpeed's folder, which not everybody can make
    let path = Path::new("/local_nvme");
    let was_there = path.exists();
    let can_write = std::fs::create_dir_all(path).is_ok() && tempfile::tempfile_in(path).is_ok();
    let (is_done, text) = fit("name", 2, "--trainer.strategy=deepspeed_stage_3_offload_nvme");
    if can_write {
        assert!(is_done && text.contains(" in files with buffers of "), "{text}");
        assert_eq!(rows(&of("name")), rows(&of("whole")));
    } else {
        assert!(!is_done && text.contains("/local_nvme") && text.contains("nvme_path"), "{text}");
    }
    if !was_there {
        let _ = std::fs::remove_dir(path);
    }
    assert!(!folder.path().join("fast/zero_stage_3").exists(), "nothing is left after a run");
}

/// The most memory that a run has had before its end, in bytes: with weights and optimizer in files, and so many blocks.
fn most_memory(folder: &Path, num_blocks: usize) -> usize {
    let settings = r#"{"zero_optimization": {
        "stage": 3, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 1000000,
        "offload_optimizer": {"device": "nvme", "nvme_path": "fast"},
        "offload_param": {"device": "nvme", "nvme_path": "fast", "max_in_cpu": 0}
    }}"#;
    std::fs::write(folder.join("ds.json"), settings).unwrap();
    let log = folder.join("log");
    let fit = format!(
        "fit --model=Gpt --model.n_layer={num_blocks} --model.n_embd=512 --model.n_head=2 --model.block_size=8 \
         --data=ShakespeareData --data.context_length=8 --data.batch_size=1 --optimizer=AdamW --trainer.accelerator=cpu \
         --trainer.max_steps=1 --trainer.limit_val_batches=0 --trainer.enable_checkpointing=false --trainer.logger=false \
         --trainer.strategy=DeepSpeedStrategy --trainer.strategy.config=ds.json"
    );
    let mut run = command(folder, &fit)
        .stderr(std::fs::File::create(&log).unwrap())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let status = format!("/proc/{}/status", run.id());
    let mut most = 0;
    while run.try_wait().unwrap().is_none() {
        let status = std::fs::read_to_string(&status).unwrap_or_default();
        // the module is unsharded when the fit is over
        if !std::fs::read_to_string(&log).unwrap().contains("held at most") {
            let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap_or_default();
            most = most.max(line.trim().trim_end_matches(" kB").parse::<usize>().unwrap_or(0) << 10);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let text = std::fs::read_to_string(&log).unwrap();
    assert!(run.wait().unwrap().success() && text.contains(" in files with buffers of "), "{text}");
    most
}

/// The host has buffers for a block of the model, and no memory that grows with their number: neither before the fit nor in a step.
#[test]
fn the_command_trains_a_model_that_the_host_never_holds() {
    let folder = tempfile::tempdir().unwrap();
    let [one, many] = [1, 9].map(|num_blocks| most_memory(folder.path(), num_blocks));
    let weights = 8 * 12 * 512 * 512 * 4; // of eight blocks, in float32
    println!("{one} bytes with a block, {many} with nine");
    assert!(many < one + weights / 2, "{one} bytes with a block, {many} with nine");
}
