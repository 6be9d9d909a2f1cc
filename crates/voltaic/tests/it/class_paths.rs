//! Names of the originals as class paths: accelerators, strategies, plugins, loggers, callbacks.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail the test")]

use std::sync::LazyLock;

use serde_json::{Value, json};
use voltaic::cli::Registry;
use voltaic::config::{Assignment, Layers, PrintConfig, deserialize_at};
use voltaic::trainer::{PluginConfig, Trainer, TrainerConfig};

use crate::probe::{short_fit, text_of, voltaic};

static SCHEMA: LazyLock<Value> = LazyLock::new(|| Registry::builtin().schema());

/// A recipe and options on it.
fn layers(recipe: &str, options: &[&str]) -> Layers {
    let mut layers = Layers::new(SCHEMA.clone());
    layers.text("run.yaml", recipe);
    for option in options {
        layers.assign(&Assignment::parse(option));
    }
    layers
}

/// The trainer's section, as it is and as it is read again after it was printed.
fn trainer(recipe: &str, options: &[&str]) -> Result<TrainerConfig, String> {
    let read = |layers: &Layers| {
        let settings = layers.resolve().map_err(|error| error.to_string())?;
        deserialize_at::<TrainerConfig>("trainer", &settings.tree, &settings.origins)
            .map_err(|error| error.to_string())
    };
    let given = layers(recipe, options);
    let config = read(&given)?;
    for words in ["", "skip_default"] {
        let printed = given.print_config(PrintConfig::parse(words).unwrap()).unwrap();
        assert_eq!(read(&layers(&printed, &[])), Ok(config.clone()), "{words}:\n{printed}");
    }
    let section = serde_json::to_value(&config).unwrap();
    assert_eq!(serde_json::from_value::<TrainerConfig>(section).unwrap(), config);
    Ok(config)
}

/// What a whole check says, or nothing.
pub fn problem(recipe: &str, options: &[&str]) -> String {
    match trainer(recipe, options) {
        Ok(config) => match Trainer::builder().config(config).check() {
            Ok(()) => String::new(),
            Err(error) => error.to_string(),
        },
        Err(error) => error,
    }
}

#[test]
fn accelerators_are_named_as_classes() {
    const PATHS: [&str; 7] = [
        "HPUAccelerator",
        "HpuAccelerator",
        "lightning_habana.HPUAccelerator",
        "lightning_habana.pytorch.accelerator.HPUAccelerator",
        "lightning.pytorch.accelerators.HPUAccelerator",
        "pytorch_lightning.accelerators.hpu.HPUAccelerator",
        "mylib.HPUAccelerator",
    ];
    for path in PATHS {
        let option = |text: String| vec![format!("trainer.accelerator{text}")];
        for (recipe, options) in [
            (format!("trainer: {{accelerator: {path}}}"), vec![]),
            (format!("trainer: {{accelerator: {{class_path: {path}}}}}"), vec![]),
            (format!("trainer: {{accelerator: {{class_path: {path}, init_args: {{}}}}}}"), vec![]),
            (String::new(), option(format!("={path}"))),
            (String::new(), option(format!(".class_path={path}"))),
            (String::new(), option(format!("={{class_path: {path}}}"))),
            ("trainer: {accelerator: cpu}".to_owned(), option(format!(".class_path={path}"))),
        ] {
            let options: Vec<&str> = options.iter().map(String::as_str).collect();
            let config = trainer(&recipe, &options);
            assert_eq!(config.map(|config| config.accelerator).as_deref(), Ok("hpu"), "{recipe} {options:?}");
        }
    }
    for (class, name) in [
        ("CPUAccelerator", "cpu"),
        ("CUDAAccelerator", "cuda"),
        ("lightning.pytorch.accelerators.CUDAAccelerator", "cuda"),
        ("hpu", "hpu"),
        ("auto", "auto"),
        ("GPU", "GPU"),
    ] {
        let config = trainer("", &[&format!("trainer.accelerator={class}")]).unwrap();
        assert_eq!(config.accelerator, name);
    }
    // a later layer replaces a class by a name
    let recipe = "trainer: {accelerator: {class_path: HPUAccelerator}}";
    assert_eq!(trainer(recipe, &["trainer.accelerator=cpu"]).unwrap().accelerator, "cpu");
    for (options, expected) in [
        (
            "trainer.accelerator.class_path=HPUAcelerator",
            "trainer.accelerator (from command line): `HPUAcelerator` is not a known class; did you mean HPUAccelerator",
        ),
        (
            "trainer.accelerator={class_path: TPU}",
            "trainer.accelerator (from command line): `TPU` is not a known class; the classes are CPUAccelerator, CUDAAccelerator, HPUAccelerator",
        ),
        (
            "trainer.accelerator=MPSAccelerator",
            "there is no accelerator of this name; use auto, cpu, cuda, hpu",
        ),
        (
            "trainer.accelerator={class_path: HPUAccelerator, init_args: {device: 3}}",
            "trainer.accelerator (from command line): this class takes no arguments; remove them",
        ),
        (
            "trainer.accelerator=true",
            "`true` is a true-or-false value; give a class (CPUAccelerator, CUDAAccelerator, HPUAccelerator) or text",
        ),
        (
            "trainer.accelerator.device=hpu",
            "trainer.accelerator.device (from command line): no class is chosen for trainer.accelerator, which is `auto`; write --trainer.accelerator=NAME before it; the classes are CPUAccelerator, CUDAAccelerator, HPUAccelerator",
        ),
    ] {
        let found = problem("", &[options]);
        assert!(found.contains(expected), "{options}: {found}");
    }
}

#[test]
fn strategies_are_named_as_classes() {
    let strategy = |recipe: &str, options: &[&str]| {
        serde_json::to_value(trainer(recipe, options).unwrap().strategy).unwrap()
    };
    let bucket = |value: &Value| value["init_args"]["bucket_cap_mb"].clone();
    for path in [
        "HPUParallelStrategy",
        "lightning_habana.pytorch.strategies.HPUParallelStrategy",
        "pytorch_lightning.strategies.hpu_parallel.HPUParallelStrategy",
    ] {
        let found = strategy("", &[&format!("trainer.strategy={path}"), "trainer.strategy.bucket_cap_mb=50"]);
        assert_eq!((&found["class_path"], bucket(&found)), (&json!("HPUParallelStrategy"), json!(50)));
        assert_eq!(bucket(&strategy(&format!("trainer: {{strategy: {path}}}"), &[])), json!(25), "{path}");
        let recipe =
            format!("trainer: {{strategy: {{class_path: {path}, init_args: {{bucket_cap_mb: 7}}}}}}");
        assert_eq!(bucket(&strategy(&recipe, &[])), json!(7));
        assert_eq!(strategy(&recipe, &["trainer.strategy=auto"]), json!("auto"), "a name replaces a class");
        assert_eq!(bucket(&strategy(&recipe, &["trainer.strategy.bucket_cap_mb=9"])), json!(9));
    }
    for (options, expected) in [
        (&["accelerator=hpu", "strategy=SingleHPUStrategy"][..], ""),
        (
            &[
                "accelerator=HPUAccelerator",
                "strategy={class_path: lightning_habana.SingleHPUStrategy, init_args: {device: hpu}}",
            ],
            "",
        ),
        (&["accelerator=cpu", "strategy=SingleDeviceStrategy", "strategy.device=cpu"], ""),
        (&["accelerator=hpu", "strategy=hpu_single"], ""),
        (
            &[
                "accelerator=hpu",
                "devices=2",
                "strategy=HPUDDPStrategy",
                "strategy.process_group_backend=hccl",
            ],
            "",
        ),
        (
            &["accelerator=cpu", "devices=2", "strategy=DDPStrategy", "strategy.process_group_backend=gloo"],
            "",
        ),
        (
            &["accelerator=cpu", "strategy=SingleHPUStrategy"],
            "SingleHPUStrategy needs accelerator=hpu, not cpu",
        ),
        (
            &["accelerator=hpu", "devices=2", "strategy=SingleHPUStrategy"],
            "trainer.strategy: `SingleHPUStrategy` with 2 ranks; use ddp or auto",
        ),
        (
            &["accelerator=hpu", "strategy=SingleHPUStrategy", "strategy.device=cpu"],
            "SingleHPUStrategy.device is cpu, but the run is on hpu:0; set trainer.accelerator, or leave it out",
        ),
        (
            &["accelerator=cpu", "devices=2", "strategy=DDPStrategy", "strategy.process_group_backend=nccl"],
            "DDPStrategy.process_group_backend is nccl, but the collectives of cpu are gloo's; leave it out",
        ),
        (
            &["accelerator=hpu", "strategy=fsdp"],
            "`fsdp` is not a strategy; use auto, single_device, hpu_single, ddp, ddp_find_unused_parameters_true, \
             hpu_ddp, hpu_parallel, zero1, zero2, zero3, deepspeed or hpu_deepspeed (with _stage_1, _stage_2, \
             _stage_3, _stage_2_offload, _stage_3_offload or _stage_3_offload_nvme), or a class: \
             DDPStrategy, HPUDDPStrategy, HPUParallelStrategy, DeepSpeedStrategy, HPUDeepSpeedStrategy, \
             ModelParallelStrategy, SingleDeviceStrategy or SingleHPUStrategy",
        ),
    ] {
        let options: Vec<String> = options.iter().map(|option| format!("trainer.{option}")).collect();
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        let found = problem("", &options);
        assert!(
            found.contains(expected) && (found.is_empty() == expected.is_empty()),
            "{options:?}: {found}"
        );
    }
}

#[test]
fn arguments_of_the_originals_that_mean_nothing_here_are_refused_with_the_reason() {
    let all = "accelerator parallel_devices cluster_environment checkpoint_io precision_plugin ddp_comm_state \
               ddp_comm_hook ddp_comm_wrapper model_averaging_period timeout start_method gradient_as_bucket_view";
    for class in
        ["DDPStrategy", "HPUDDPStrategy", "HPUParallelStrategy", "SingleDeviceStrategy", "SingleHPUStrategy"]
    {
        let is_single = class.starts_with("Single");
        let known: Vec<&str> = all
            .split_whitespace()
            .filter(|name| {
                !is_single || name.contains("accelerator") || name.contains("io") && !name.contains("period")
            })
            .collect();
        let nulls: Vec<String> = known.iter().map(|name| format!("{name}: null")).collect();
        let recipe = format!(
            "trainer: {{accelerator: hpu, strategy: {{class_path: {class}, init_args: {{{}}}}}}}",
            nulls.join(", ")
        );
        assert_eq!(problem(&recipe, &[]), "", "null is how Lightning writes an argument that is not given");
        for name in known {
            let found =
                problem("", &[&format!("trainer.strategy={class}"), &format!("trainer.strategy.{name}=hpu")]);
            let start = format!("trainer.strategy.{name} (from command line): ");
            assert!(
                found.starts_with(&start) && !found.contains("unknown key") && found.contains("; "),
                "{found}"
            );
        }
        let found = problem("", &[&format!("trainer.strategy={class}"), "trainer.strategy.bucket=3"]);
        assert!(found.contains("unknown key"), "{found}");
    }
    let found = problem(
        "trainer:\n  strategy:\n    class_path: HPUParallelStrategy\n    init_args:\n      parallel_devices: [hpu, hpu]",
        &[],
    );
    assert_eq!(
        found,
        "trainer.strategy.init_args.parallel_devices (from run.yaml:5): the trainer counts its devices; set \
         trainer.devices to their number"
    );
}

#[test]
fn plugins_loggers_and_callbacks_have_the_names_of_the_originals() {
    for path in ["HPUPrecisionPlugin", "lightning_habana.pytorch.plugins.precision.HPUPrecisionPlugin"] {
        let options = [
            "trainer.accelerator=HPUAccelerator",
            &format!("trainer.plugins={path}"),
            "trainer.plugins.precision=bf16-mixed",
            "trainer.plugins+=lightning_habana.pytorch.plugins.io_plugin.HPUCheckpointIO",
            "trainer.plugins+={class_path: lightning.pytorch.plugins.io.AsyncCheckpointIO}",
            "trainer.plugins+=lightning.pytorch.plugins.environments.SLURMEnvironment",
            "trainer.plugins.requeue_signal=SIGUSR2",
            "trainer.logger=lightning.pytorch.loggers.TensorBoardLogger",
            "trainer.callbacks+=pytorch_lightning.callbacks.EarlyStopping",
            "trainer.callbacks.monitor=val_loss",
            "trainer.profiler=lightning.pytorch.profilers.SimpleProfiler",
        ];
        let config = trainer("", &options).unwrap();
        assert!(
            matches!(&config.plugins[..], [PluginConfig::HpuPrecisionPlugin(plugin), PluginConfig::HpuCheckpointIo, PluginConfig::AsyncCheckpointIo, PluginConfig::SlurmEnvironment(slurm)] if slurm.requeue_signal.is_some() && plugin.precision == "bf16-mixed")
        );
        assert_eq!(problem("", &options), "");
    }
    for class in ["AsyncCheckpointIO", "HPUCheckpointIO"] {
        let plugins = json!({"plugins": [{"class_path": class}]});
        assert_eq!(serde_json::from_value::<TrainerConfig>(plugins).unwrap().plugins.len(), 1, "{class}");
    }
    let found = problem("", &["trainer.plugins=DeepSpeedPrecisionPlugin2"]);
    assert!(found.contains("`DeepSpeedPrecisionPlugin2` is not a known class"), "{found}");
}

/// Each key of a class as jsonargparse prints it.
#[test]
fn classes_are_given_key_by_key() {
    let options = [
        "trainer.logger.class_path=lightning.pytorch.loggers.CSVLogger",
        "trainer.logger.init_args.name=runs",
        "trainer.callbacks.class_path=EarlyStopping",
        "trainer.callbacks.init_args.monitor=val_loss",
        "optimizer=AdamW",
        "lr_scheduler.class_path=ReduceLROnPlateau",
        "lr_scheduler.init_args.patience=3",
        "lr_scheduler.init_args.monitor=val_loss",
    ];
    let tree = layers("", &options).resolve().unwrap().tree;
    assert_eq!(tree["trainer"]["logger"][0]["init_args"]["name"], "runs");
    assert_eq!(tree["trainer"]["callbacks"][0]["init_args"]["monitor"], "val_loss");
    let (schedule, patience) = (&tree["lr_scheduler"], &tree["lr_scheduler"]["init_args"]["patience"]);
    assert_eq!((&schedule["monitor"], patience), (&json!("val_loss"), &json!(3)));
}

/// A whole dump, sections of callbacks that a program forces, and what Lightning 1 wrote.
#[test]
fn files_that_people_have_are_read_as_they_are() {
    let recipe = "\
trainer:
  gpus: null
  resume_from_checkpoint: null
  auto_select_gpus: false
  model_registry: null
  log_every_n_steps: 1e1
  max_steps: 10_000
  enable_progress_bar: yes
  callbacks:
  - {class_path: lightning.pytorch.callbacks.RichProgressBar, init_args: {leave: false, theme: {description: white}}}
  - {class_path: lightning.pytorch.callbacks.RichModelSummary, init_args: {max_depth: 2}}
model_checkpoint: {monitor: val_loss, save_top_k: 1}
EarlyStopping: {monitor: val_loss}
optimizer:
  class_path: torch.optim.AdamW
  init_args: {lr: 0.01, foreach: null, fused: true, capturable: false, differentiable: false}
lr_scheduler:
  class_path: lightning.pytorch.cli.ReduceLROnPlateau
  init_args: {monitor: val_loss, patience: 3, verbose: false}
";
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.yaml");
    std::fs::write(&path, recipe).unwrap();
    let options = ["--config", path.to_str().unwrap(), "--trainer.enable_checkpointing=true"];
    let (code, text) = short_fit(&options, &[]);
    assert_eq!(code, Some(0), "{text}");
    for part in [
        "RichProgressBar is TQDMProgressBar here",
        "RichModelSummary is ModelSummary here",
        "optimizer.init_args.fused has no effect: ",
        "theme has no effect: ",
    ] {
        assert_eq!(text.matches(part).count(), 1, "{part}: {text}");
    }
    let (code, text) = short_fit(&[&options[..2], &["--print_config=skip_default"]].concat(), &[]);
    assert_eq!(code, Some(0), "{text}");
    let logger = |text: &str| problem(&format!("trainer: {{logger: {text}}}"), &[]);
    let tensorboard =
        |args: &str| logger(&format!("{{class_path: TensorBoardLogger, init_args: {{{args}}}}}"));
    assert_eq!(tensorboard("name: null, version: null, log_graph: false"), "");
    for (found, expected) in [
        (tensorboard("log_graph: true"), "there is no graph of Python's to log; set false"),
        (logger("lightning.pytorch.loggers.WandbLogger"), "WandbLogger writes to a service"),
        (
            logger("[{class_path: MLFlowLogger, init_args: {experiment_name: x}}]"),
            "use TensorBoardLogger or CSV",
        ),
        (problem("trainer: {gpus: 2}", &[]), "set trainer.accelerator and trainer.devices"),
        (problem("optimizer: {class_path: Adam, init_args: {capturable: true}}", &[]), "graphs capture each"),
        (problem("trainer: {log_every_n_steps: 1.5e0}", &[]), "`1.5` is a number with a fraction"),
    ] {
        assert!(found.contains(expected), "{expected}: {found}");
    }
}

#[test]
fn the_command_runs_with_instances_of_accelerator_and_strategy() {
    for options in [
        &["--trainer.accelerator=HPUAccelerator", "--trainer.strategy=SingleHPUStrategy"][..],
        &[
            "--trainer.accelerator=lightning_habana.pytorch.accelerator.HPUAccelerator",
            "--trainer.strategy=lightning_habana.pytorch.strategies.HPUParallelStrategy",
            "--trainer.strategy.bucket_cap_mb=50",
            "--trainer.devices=2",
            "--trainer.plugins=HPUPrecisionPlugin",
            "--trainer.plugins.precision=bf16-mixed",
        ],
    ] {
        let (code, text) = short_fit(options, &[("VOLTAIC_HPU", "emulator"), ("OMP_NUM_THREADS", "1")]);
        assert_eq!(code, Some(0), "{text}");
        assert!(text.contains("emulated"), "on HPUs: {text}");
        assert_eq!(text.contains("2 ranks"), options.len() > 2, "{text}");
    }
    let (code, text) =
        voltaic(&["fit", "--model=Mlp", "--data=MnistData", "--trainer.accelerator=HPUAcc"], &[]);
    assert!(code == Some(2) && text.contains("use auto, cpu, cuda, hpu"), "{code:?} {text}");
    let help =
        std::process::Command::new(env!("CARGO_BIN_EXE_voltaic")).args(["fit", "--help"]).output().unwrap();
    let help = text_of(&help).split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "Takes a class (CPUAccelerator, CUDAAccelerator, HPUAccelerator) or text.",
        "Takes a class (DDPStrategy, HPUDDPStrategy, HPUParallelStrategy, DeepSpeedStrategy, HPUDeepSpeedStrategy, \
         ModelParallelStrategy, SingleDeviceStrategy, SingleHPUStrategy) or text.",
        "Takes one of `step`, `epoch`.", // a key that many classes have
    ] {
        assert!(help.contains(part), "{part} in {help}");
    }
}
