//! Real Gaudi cards, as far as they can be tested without one: stand-ins for Habana's libraries are compiled here, and
//! the program is run with them, as it would be with the real ones. What a process loads it keeps, so that each case is
//! a process of its own.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail the test")]

#[path = "../support/compile.rs"]
mod compile;
#[path = "../support/stand_ins.rs"]
mod stand_ins;

use std::fs;
use std::process::{Command, Output};

use serde_json::Value;
use stand_ins::stand_ins;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::graph::{HpuGraph, StaticTensor, make_graphed_callables};
use voltaic::lightning::{LightningModule, StepContext};
use voltaic::nn::{Forward, Linear};
use voltaic::optim::{Optimizers, Sgd};
use voltaic::trainer::{Trainer, seed_everything};
use voltaic::{Device, Kind, Module, Tensor};

/// `voltaic` with the stand-ins, and with nothing of this process's environment that describes devices.
fn voltaic(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_voltaic"));
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if ["VOLTAIC_", "HABANA_", "PT_", "HLS_"].iter().any(|prefix| name.starts_with(prefix)) {
            command.env_remove(name);
        }
    }
    command.args(arguments).env("VOLTAIC_HLML", &stand_ins().hlml).env("OMP_NUM_THREADS", "1");
    command
}

fn with_plugin(arguments: &[&str]) -> Command {
    let mut command = voltaic(arguments);
    command.env("VOLTAIC_HPU_PLUGIN", &stand_ins().plugin);
    command
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// The `hpu` of `voltaic devices --json`.
fn hpu(mut command: Command) -> Value {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    json["accelerators"].as_array().unwrap().iter().find(|one| one["name"] == "hpu").unwrap().clone()
}

#[test]
fn cards_are_listed_as_their_driver_describes_them() {
    let hpu = hpu(with_plugin(&["devices", "--json"]));
    assert_eq!((hpu["available"].as_bool(), hpu["emulated"].as_bool()), (Some(true), Some(false)));
    assert_eq!(hpu["description"], "2 gaudi2 cards, driver 1.24.0-stub");
    let card = &hpu["cards"][1];
    for (key, value) in [
        ("name", Value::from("gaudi2 HL-225")),
        ("uuid", "01P0-STUB-1".into()),
        ("module_id", 5.into()),
        ("memory", "96 GiB".into()),
        ("memory_used", "2 GiB".into()),
        ("utilization", 20.into()),
        ("temperature", 31.into()),
        ("driver", "1.24.0-stub".into()),
    ] {
        assert_eq!(card[key], value, "{key}");
    }
}

#[test]
fn visible_modules_choose_among_the_cards() {
    let mut command = with_plugin(&["devices", "--json"]);
    command.env("HABANA_VISIBLE_MODULES", "5");
    let hpu = hpu(command);
    assert_eq!(hpu["cards"].as_array().unwrap().len(), 1);
    assert_eq!(hpu["cards"][0]["uuid"], "01P0-STUB-1");
}

#[test]
fn what_is_missing_is_named() {
    let broken = stand_ins().plugin.join("libbroken.so");
    let broken = broken.to_str().unwrap();
    let cases: [(&[(&str, &str)], &str); 7] = [
        (&[("VOLTAIC_HPU_PLUGIN", "/nowhere")], "VOLTAIC_HPU_PLUGIN names /nowhere"),
        (&[("STUB_CARDS", "0"), ("VOLTAIC_HPU", "gaudi")], "the driver lists none"),
        (&[("STUB_INIT", "9"), ("VOLTAIC_HPU", "gaudi")], "hlml_init gave 9, the driver is not loaded"),
        (&[("VOLTAIC_HLML", broken), ("VOLTAIC_HPU", "gaudi")], "libbroken.so"),
        (&[("HABANA_VISIBLE_MODULES", "1")], "leaves none of the 2 Gaudi cards"),
        (&[("PT_HPU_LAZY_MODE", "1")], "PT_HPU_LAZY_MODE=`1`"),
        (&[("VOLTAIC_HPU_PLUGIN", broken)], "libbroken.so cannot be loaded"),
    ];
    for (variables, expected) in cases {
        let folder = tempfile::tempdir().unwrap();
        let mut command = with_plugin(&["fit", "--config", &recipe(), "--trainer.accelerator=hpu"]);
        command.arg("--trainer.devices=1");
        command.arg(format!("--trainer.default_root_dir={}", folder.path().display()));
        command.envs(variables.iter().copied()).env("VOLTAIC_TRAINER__MAX_STEPS", "1");
        let is_fallback = variables.iter().any(|(name, _)| *name == "HABANA_VISIBLE_MODULES");
        if is_fallback {
            command.env("VOLTAIC_HPU", "gaudi");
        }
        let output = command.output().unwrap();
        let text = text(&output);
        assert!(!output.status.success(), "{variables:?}: {text}");
        assert!(text.contains(expected), "{variables:?}: {text}");
    }
}

#[test]
fn a_plugin_for_another_libtorch_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let lib = folder.path().join("habana_frameworks/torch/lib");
    fs::create_dir_all(&lib).unwrap();
    let name = "libhabana_pytorch2_plugin.upstream.so";
    fs::copy(stand_ins().plugin.join(name), lib.join(name)).unwrap();
    fs::write(lib.with_file_name("required_version.txt"), "2.7.1\n").unwrap();
    // found by itself, as in a Python path
    let mut command = voltaic(&["devices", "--json"]);
    command.env("PYTHONPATH", folder.path());
    let hpu = hpu(command);
    assert_eq!(hpu["available"], false);
    let why = hpu["description"].as_str().unwrap();
    assert!(why.contains("needs libtorch 2.7.1") && why.contains("this program has 2.11.0"), "{why}");
}

fn recipe() -> String {
    format!("{}/../../recipes/mlp.yaml", env!("CARGO_MANIFEST_DIR"))
}

/// Validation loss after a short run on an accelerator, and what was printed.
fn fit(mut command: Command) -> (String, String) {
    let folder = tempfile::tempdir().unwrap();
    command.args([
        "fit",
        "--config",
        &recipe(),
        "--trainer.max_epochs=1",
        "--trainer.limit_train_batches=12",
    ]);
    command.args([
        "--trainer.limit_val_batches=2",
        "--trainer.devices=1",
        "--trainer.enable_progress_bar=false",
    ]);
    command.arg(format!("--trainer.default_root_dir={}", folder.path().display()));
    let output = command.output().unwrap();
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    let metrics = folder.path().join("lightning_logs/version_0/metrics.csv");
    let metrics = fs::read_to_string(&metrics).unwrap();
    (metrics, text)
}

#[test]
fn the_plugin_trains_as_the_cpu_does() {
    let on = |accelerator: &str| {
        let mut command = with_plugin(&[]);
        command.env("VOLTAIC_TRAINER__ACCELERATOR", accelerator);
        fit(command)
    };
    let (cpu, text) = on("cpu");
    assert!(!text.contains("stub plugin"), "{text}");
    let (hpu, text) = on("hpu");
    assert_eq!(hpu, cpu, "the stand-in computes with the CPU's kernels");
    assert!(text.contains("stub plugin: module=none, lazy=0"), "{text}");
    assert!(text.contains("hpu: 2 gaudi2 cards"), "{text}");
    let (auto, text) = on("auto");
    assert_eq!(auto, cpu);
    assert!(
        text.contains("stub plugin") && text.contains("accelerator=auto: hpu"),
        "auto takes a card: {text}"
    );
}

#[test]
fn graphs_on_a_card_replay_its_operators() {
    let with = |graph: &str| {
        let mut command = with_plugin(&[]);
        command.env("VOLTAIC_TRAINER__ACCELERATOR", "hpu").env("VOLTAIC_TRAINER__GRAPH", graph);
        fit(command)
    };
    let (plain, _) = with("off");
    for graph in ["step", "modules"] {
        let (metrics, text) = with(graph);
        assert_eq!(metrics, plain, "{graph}");
        let told = "graphs on a Gaudi card run the recorded operators one after the other, in eager mode";
        assert_eq!(text.matches(told).count(), 1, "{graph}: {text}");
        assert!(!text.contains("cannot be part of a graph"), "{graph}: {text}");
    }
}

/// A step that captures by hand.
#[derive(Module)]
struct ByHand {
    layer: Linear,
    graph: HpuGraph,
    input: StaticTensor,
    loss: StaticTensor,
}

impl LightningModule for ByHand {
    type Batch = Tensor;

    fn automatic_optimization(&self) -> bool {
        false
    }

    fn training_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        self.input.copy_(batch)?;
        if self.graph.is_captured() {
            self.graph.replay()?;
        } else {
            ctx.optimizer(0)?.zero_grad()?;
            self.graph.capture(|| {
                let loss = self.layer.forward(&self.input.get())?.f_square()?.f_mean(Kind::Float)?;
                loss.f_backward()?;
                ctx.optimizer(0)?.step()?;
                Ok(self.loss.set(&loss)?)
            })?;
        }
        Ok(self.loss.get())
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(Sgd::new(0.1).into())
    }
}

/// Trains by hand, then with a graphed module, on HPUs; prints the weights.
fn train_by_hand() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    seed_everything(1)?;
    let mut trainer = Trainer::builder()
        .accelerator("hpu")
        .devices(1)
        .default_root_dir(folder.path())
        .logger(false)
        .enable_checkpointing(false)
        .enable_progress_bar(false)
        .max_epochs(2)
        .build()?;
    seed_everything(1)?; // now with a card, whose generator libtorch cannot reach
    let data = Tensor::f_randn([16, 4], (Kind::Float, tch::Device::Cpu))?;
    let loader = DataLoader::new(TensorDataset::new(data)?).batch_size(4).build()?;
    let mut module = ByHand {
        layer: Linear::new(4, 2)?,
        graph: HpuGraph::new(),
        input: StaticTensor::rand([4, 4], Device::Hpu(0))?,
        loss: StaticTensor::default(),
    };
    trainer.fit(&mut module, &mut Loaders::new().train(loader))?;
    println!(
        "\nby hand: {:?}",
        Vec::<f32>::try_from(
            module.layer.weight.leaf().f_detach()?.f_to(tch::Device::Cpu)?.f_reshape([-1])?
        )?
    );
    println!(
        "captured: {}, replays: {:?}",
        module.graph.is_captured(),
        module.graph.replay_stats().map(|stats| stats.replays).collect::<Vec<_>>()
    );
    let input = Tensor::f_ones([3, 4], (Kind::Float, Device::Hpu(0).into()))?;
    let graphed = make_graphed_callables(module.layer, &input, 1)?;
    println!(
        "graphed: {:?}",
        Vec::<f32>::try_from(graphed.forward(&input)?.f_detach()?.f_to(tch::Device::Cpu)?.f_reshape([-1])?)?
    );
    Ok(())
}

#[test]
fn graphs_by_hand_replay_on_a_card() {
    const PART: &str = "GAUDI_TEST_PART";
    if std::env::var_os(PART).is_some() {
        return train_by_hand().unwrap();
    }
    let run = |hpu: &str| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "graphs_by_hand_replay_on_a_card", "--nocapture"]);
        command.env(PART, "1").env("VOLTAIC_HPU", hpu).env("VOLTAIC_HLML", &stand_ins().hlml);
        command.env("VOLTAIC_HPU_PLUGIN", &stand_ins().plugin).env("OMP_NUM_THREADS", "1");
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        text(&output)
    };
    let (card, emulated) = (run("gaudi"), run("emulator"));
    let line = |text: &str, begin: &str| {
        text.lines().find(|line| line.starts_with(begin)).unwrap_or_else(|| panic!("{text}")).to_owned()
    };
    for begin in ["by hand: ", "captured: true, replays: [7]", "graphed: "] {
        assert_eq!(line(&card, begin), line(&emulated, begin), "{card}{emulated}");
    }
}

#[test]
fn the_emulator_can_be_asked_for_beside_cards() {
    let mut command = with_plugin(&[]);
    command.env("VOLTAIC_TRAINER__ACCELERATOR", "hpu").env("VOLTAIC_HPU", "emulator");
    let (_, text) = fit(command);
    assert!(text.contains("8 emulated gaudi2") && !text.contains("stub plugin"), "{text}");
}

#[test]
fn each_local_rank_takes_a_module_of_its_own() {
    for (variables, module) in [
        (&[("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")][..], "module=1"),
        (&[("LOCAL_RANK", "1"), ("WORLD_SIZE", "2"), ("HABANA_VISIBLE_MODULES", "4,5")], "module=5"),
        (&[("HLS_MODULE_ID", "4"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")], "module=4"),
    ] {
        // the device is taken by a tensor of its own, without a trainer that would look for its peers
        let mut command = with_plugin(&[]);
        command.envs(variables.iter().copied()).env("VOLTAIC_TRAINER__ACCELERATOR", "hpu");
        command.env("VOLTAIC_TRAINER__STRATEGY", "single_device");
        let (_, text) = fit(command);
        assert!(text.contains(module), "{variables:?}: {text}");
    }
}

const HPU: &str = "--trainer.accelerator=hpu";

/// Metrics of a short run with two ranks, and what was printed.
fn fit_together(mut command: Command, options: &[&str]) -> (bool, String, String) {
    let folder = tempfile::tempdir().unwrap();
    command.args(["fit", "--config", &recipe(), "--trainer.devices=2"]);
    command.args(["--trainer.max_epochs=1", "--trainer.limit_train_batches=12"]);
    command.args(["--trainer.limit_val_batches=2", "--trainer.enable_progress_bar=false"]);
    command.args(options);
    command.arg(format!("--trainer.default_root_dir={}", folder.path().display()));
    let output = command.output().unwrap();
    let metrics = fs::read_to_string(folder.path().join("lightning_logs/version_0/metrics.csv"));
    let log = fs::read_to_string(folder.path().join("rank_logs/rank_1.log")).unwrap_or_default();
    (output.status.success(), metrics.unwrap_or_default(), text(&output) + &log)
}

#[test]
fn two_cards_train_over_hccl_as_two_processes_over_gloo() {
    let hccl = stand_ins().hccl.as_os_str();
    let mut command = with_plugin(&[]);
    command.env("VOLTAIC_HCCL", hccl).env("VOLTAIC_SYNAPSE", hccl);
    let (succeeded, hpu, text) = fit_together(command, &[HPU]);
    assert!(succeeded, "{text}");
    for module in ["module=0", "module=1"] {
        assert!(text.contains(module), "each rank has its card: {text}");
    }
    let (succeeded, cpu, cpu_text) = fit_together(with_plugin(&[]), &["--trainer.accelerator=cpu"]);
    assert!(succeeded && !cpu_text.contains("stub plugin"), "{cpu_text}");
    // the stand-ins compute with the CPU's kernels and add in the same order, but a device sums an epoch in float32
    let (hpu, cpu) = (numbers(&hpu), numbers(&cpu));
    assert_eq!(hpu.len(), cpu.len(), "{hpu:?} {cpu:?}");
    for ((name, on_hpu), (_, on_cpu)) in hpu.iter().zip(&cpu) {
        let tolerance = if name.starts_with("val") { 2.0 * f64::from(f32::EPSILON) } else { 0.0 };
        assert!((on_hpu - on_cpu).abs() <= tolerance * on_cpu.abs(), "{name}: {on_hpu} {on_cpu}");
    }
}

#[test]
fn what_ranks_agree_on_does_not_pass_through_the_cards() {
    let hccl = stand_ins().hccl.as_os_str();
    // fewer bytes than the gradients of any bucket; the votes of two ranks, or a length, are less
    for strategy in ["ddp", "zero2"] {
        let mut command = with_plugin(&[]);
        command.env("VOLTAIC_HCCL", hccl).env("VOLTAIC_SYNAPSE", hccl).env("STUB_LEAST_BYTES", "200");
        let strategy = format!("--trainer.strategy={strategy}");
        let (succeeded, _, text) =
            fit_together(command, &[HPU, &strategy, "--trainer.num_sanity_val_steps=0"]);
        assert!(succeeded, "{text}");
    }
}

/// The values of a metrics file, each with its column's name.
fn numbers(csv: &str) -> Vec<(String, f64)> {
    let mut lines = csv.lines();
    let names: Vec<&str> = lines.next().expect("a line of names").split(',').collect();
    let row = |line: &str| -> Vec<(String, f64)> {
        let named = line.split(',').zip(&names).filter(|(value, _)| !value.is_empty());
        named.map(|(value, name)| ((*name).to_owned(), value.parse().unwrap())).collect()
    };
    lines.flat_map(row).collect()
}

#[test]
fn hccl_that_hangs_ends_within_the_time_out() {
    let hccl = stand_ins().hccl.as_os_str();
    for (fault, value, expected) in [
        ("STUB_INIT_HANGS", "1", "hccl has not connected the ranks within 3 s; see what the library logs"),
        ("STUB_STUCK_AFTER", "8", "failed on rank 0 of 2: timed out after 3000 ms; "),
    ] {
        let mut command = with_plugin(&[]);
        command.env("VOLTAIC_HCCL", hccl).env("VOLTAIC_SYNAPSE", hccl).env(fault, value);
        let strategy = [HPU, "--trainer.strategy=HPUParallelStrategy", "--trainer.strategy.timeout_secs=3"];
        let (succeeded, _, text) = fit_together(command, &strategy);
        assert!(!succeeded && text.contains(expected), "{fault}: {text}");
    }
}

#[test]
fn several_cards_without_hccl_are_refused_with_a_way_out() {
    let mut command = with_plugin(&[]);
    command.env("VOLTAIC_HCCL", "/nowhere/libhcl.so");
    let (succeeded, _, text) = fit_together(command, &[HPU]);
    assert!(!succeeded, "{text}");
    assert!(
        text.contains("several ranks on hpu:0 need a library that cannot be loaded: /nowhere/libhcl.so"),
        "{text}"
    );
    assert!(
        text.contains("name the libraries in VOLTAIC_HCCL and VOLTAIC_SYNAPSE, or use one card"),
        "{text}"
    );
}
