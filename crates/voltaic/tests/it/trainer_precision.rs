//! `trainer.precision` and precision plugins, on the command line too; what emulated HPUs make of devices and flags.

use serde_json::json;
use tempfile::TempDir;
use voltaic::trainer::{Trainer, TrainerConfig};

use crate::probe::{short_fit, silent};

#[test]
fn precision_and_a_precision_plugin_exclude_each_other() {
    let config: TrainerConfig = serde_json::from_value(json!({
        "accelerator": "hpu",
        "precision": "bf16-mixed",
        "plugins": [{"class_path": "HpuPrecisionPlugin", "init_args": {"precision": "bf16-mixed"}}],
    }))
    .unwrap();
    let error = Trainer::builder().config(config).build().err().unwrap().to_string();
    assert!(error.contains("trainer.precision: is given twice; give trainer.precision or one"), "{error}");
    let plugin = voltaic::trainer::PluginConfig::HpuPrecisionPlugin(Default::default());
    let builder = silent().accelerator("hpu").precision("bf16-mixed").plugins(vec![plugin]);
    assert_eq!(builder.build().err().unwrap().to_string(), error, "by the builder's keys");
    // and in a file
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("precision.yaml");
    let text =
        "trainer: {accelerator: hpu, precision: bf16-mixed, plugins: [{class_path: HpuPrecisionPlugin}]}";
    std::fs::write(&file, text).unwrap();
    let error = losses_on_hpu("bf16-mixed", &[], &["--config", file.to_str().unwrap()]).unwrap_err();
    let expected = "trainer.precision (from command line): is given twice; give trainer.precision or one";
    assert!(error.contains(expected), "{error}");
}

/// Losses of a short fit of the command line on an HPU with these variables.
fn losses_on_hpu(
    precision: &str,
    variables: &[(&str, &std::path::Path)],
    arguments: &[&str],
) -> Result<(Vec<String>, String), String> {
    let recipe = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/mlp.yaml");
    let root = TempDir::new().unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_voltaic"));
    command.current_dir(root.path()).env("OMP_NUM_THREADS", "1").envs(variables.iter().copied());
    let fit = "fit --trainer.accelerator=hpu --trainer.max_steps=3 --trainer.limit_val_batches=0 \
        --trainer.log_every_n_steps=1 --trainer.enable_checkpointing=false";
    command.args(fit.split_whitespace());
    command.arg(format!("--trainer.precision={precision}")).arg("--config").arg(recipe).args(arguments);
    let output = command.output().unwrap();
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    if !output.status.success() {
        return Err(printed);
    }
    let csv = std::fs::read_to_string(root.path().join("lightning_logs/version_0/metrics.csv")).unwrap();
    let header: Vec<&str> = csv.lines().next().unwrap().split(',').collect();
    let column = header.iter().position(|name| *name == "train_loss_step" || *name == "train_loss").unwrap();
    let losses = csv.lines().skip(1).map(|line| line.split(',').nth(column).unwrap().to_owned());
    Ok((losses.collect(), printed))
}

/// A configuration with `HpuPrecisionPlugin`.
fn plugin_file(folder: &TempDir, arguments: &str) -> std::path::PathBuf {
    let file = folder.path().join("plugin.yaml");
    let plugin = format!("{{class_path: HpuPrecisionPlugin, init_args: {{{arguments}}}}}");
    std::fs::write(&file, format!("trainer: {{plugins: [{plugin}]}}")).unwrap();
    file
}

#[test]
fn lists_come_from_the_plugin_then_from_the_environment() {
    let folder = TempDir::new().unwrap();
    let [lower, missing] = ["lower.txt", "missing.txt"].map(|name| folder.path().join(name));
    std::fs::write(&lower, "linear\n").unwrap();
    let run = |arguments: &str, variables: &[(&str, &std::path::Path)]| {
        let file = plugin_file(&folder, arguments);
        losses_on_hpu("null", variables, &["--config", file.to_str().unwrap()])
    };
    let own = format!("precision: bf16-mixed, verbose: true, bf16_file_path: {}", lower.display());
    let fp32 = "PT_HPU_AUTOCAST_FP32_OPS_LIST";
    let (_, printed) =
        run(&own, &[("LOWER_LIST", &missing), ("FP32_LIST", std::path::Path::new(""))]).unwrap();
    assert!(
        printed.contains("lower precision: linear") && printed.contains("linear casts Float to BFloat16")
    );
    for name in [fp32, "FP32_LIST", "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST", "LOWER_LIST"] {
        let error = run("precision: bf16-mixed", &[(name, std::path::Path::new("/dev/zero"))]).unwrap_err();
        let expected = "cannot read the list of operators /dev/zero: it is a device, pipe or socket";
        assert!(error.contains(&format!("{name}: {expected}")), "{error}");
    }
    assert_error!(run(&own, &[(fp32, &missing)]), &format!("{fp32}: cannot read the list of operators"));
    let (_, printed) = run(&format!("{own}, ignore_unreadable_files: true"), &[(fp32, &missing)]).unwrap();
    assert!(printed.contains("missing.txt cannot be read") && printed.contains("default list"), "{printed}");
}

#[test]
fn sixteen_bits_on_an_hpu() {
    let (_, printed) = losses_on_hpu("16", &[], &[]).unwrap();
    assert!(printed.contains("HMP (opt_level, or precision=16 on an HPU) is deprecated"), "{printed}");
    let first = [("VOLTAIC_HPU_GENERATION", std::path::Path::new("gaudi"))];
    for precision in ["16-mixed", "16-true"] {
        let error = losses_on_hpu(precision, &first, &[]).unwrap_err();
        let expected = format!(
            "trainer.precision (from command line): {precision}: fp16 not supported: FP16 not supported on Gaudi, \
             Gaudi2 or higher required"
        );
        assert!(error.contains(&expected) && error.contains("use bf16-mixed"), "{error}");
    }
    losses_on_hpu("16", &first, &[]).unwrap();
    let error = losses_on_hpu("fp8", &first, &[]).unwrap_err();
    assert!(error.contains("fp8 not supported: FP8 not supported on Gaudi, Gaudi2 or higher"), "{error}");
    let deepspeed = ["--trainer.strategy=hpu_deepspeed"];
    let plugin = ["--trainer.plugins=HPUDeepSpeedPrecisionPlugin", "--trainer.plugins.precision=fp8"];
    for (precision, expected) in [
        ("fp8", "trainer.precision (from command line): fp8 not supported: FP8 not supported on Gaudi"),
        ("16-mixed", "trainer.precision (from command line): 16-mixed: fp16 not supported"),
    ] {
        assert_error!(losses_on_hpu(precision, &first, &deepspeed), expected);
    }
    let by_plugin = [&deepspeed[..], &plugin, &["--trainer.precision=null"]].concat();
    assert_error!(losses_on_hpu("32", &first, &by_plugin), "fp8 not supported: FP8 not supported on Gaudi");
    let (_, printed) = losses_on_hpu("fp8", &[], &[]).unwrap();
    assert_contains!(&printed, "precision=fp8, but no layer of", "te::Linear");
    let plugin = [
        "--trainer.plugins=HPUPrecisionPlugin",
        "--trainer.plugins.precision=fp8",
        "--trainer.plugins.replace_layers=true",
        "--trainer.plugins.recipe=DelayedScaling",
        "--trainer.plugins.recipe.fp8_format=HYBRID",
    ];
    let (_, printed) = losses_on_hpu("null", &[], &plugin).unwrap();
    assert!(!printed.contains("no layer of"), "{printed}");
}

#[test]
fn what_leaves_no_layer_to_fp8_is_named_and_so_are_keys_of_a_recipe() {
    let folder = TempDir::new().unwrap();
    let run = |arguments: &str| {
        let file = plugin_file(&folder, &format!("precision: fp8, replace_layers: true, {arguments}"));
        losses_on_hpu("null", &[], &["--config", file.to_str().unwrap()])
    };
    let (_, printed) = run("exclude_layers: [fc1], min_weights: 1000000").unwrap();
    let expected = "of which exclude_layers leaves out 1, and min_weights=1000000 a further ";
    assert!(printed.contains("no layer of") && printed.contains(expected), "{printed}");
    assert!(!printed.contains("replace_layers: true"), "it was given: {printed}");
    assert_error!(
        run("exclude_layers: [none]"),
        "trainer.plugins.exclude_layers: `none` is no module of this"
    );
    let recipe =
        "recipe: {class_path: DelayedScaling, init_args: {override_linear_precision: [true, false, false]}}";
    assert_error!(run(recipe), "trainer.plugins.0.recipe.override_linear_precision");
    let deepspeed = format!(
        "trainer: {{strategy: hpu_deepspeed, plugins: [{{class_path: HPUDeepSpeedPrecisionPlugin, init_args: {{precision: fp8, {recipe}}}}}]}}"
    );
    let file = folder.path().join("deepspeed.yaml");
    std::fs::write(&file, deepspeed).unwrap();
    let error = losses_on_hpu("null", &[], &["--config", file.to_str().unwrap()]);
    assert_error!(error, "trainer.plugins.0.recipe.override_linear_precision");
}

#[test]
fn sixteen_bits_on_a_cpu_are_bfloat16_with_a_warning() {
    let (code, log) = short_fit(&["--trainer.precision=16-mixed"], &[]);
    assert_eq!(code, Some(0), "{log}");
    let warning = "AMP with fp16 is not supported on CPU: using precision='bf16-mixed' instead";
    assert_eq!(log.matches(warning).count(), 1, "{log}");
    let trainer = silent().precision("16-mixed").build().unwrap();
    assert!(trainer.grad_scaler().is_none(), "bfloat16 needs no scaler");
    assert!(!short_fit(&["--trainer.precision=bf16-mixed"], &[]).1.contains(warning));
}

#[test]
fn the_devices_of_an_emulated_node_are_one_or_as_many_as_the_variable_names() {
    let on_hpu =
        ["--trainer.accelerator=hpu", "--trainer.limit_val_batches=0", "--trainer.num_sanity_val_steps=0"];
    let (code, log) = short_fit(&on_hpu, &[]);
    assert_eq!(code, Some(0), "{log}");
    let one = "devices=auto: 1 of 8 emulated cards, since all of them share this processor; VOLTAIC_HPU_DEVICES names";
    assert_eq!(log.matches(one).count(), 1, "{log}");
    let (code, log) = short_fit(&on_hpu, &[("VOLTAIC_HPU_DEVICES", "2")]);
    assert_eq!(code, Some(0), "{log}");
    assert_eq!(
        log.matches("devices=auto: 2 emulated cards, as VOLTAIC_HPU_DEVICES names").count(),
        1,
        "{log}"
    );
    assert!(log.contains("hpu_parallel: 2 ranks on 1 node(s)"), "{log}");
    let asked = [&on_hpu[..], &["--trainer.devices=3"]].concat();
    let (code, log) = short_fit(&asked, &[("HABANA_VISIBLE_MODULES", "0,1")]);
    assert_eq!(code, Some(2), "{log}");
    let error = "trainer.devices (from command line): asks for 3, but there are 2 hpu devices (HABANA_VISIBLE_MODULES=0,1)";
    assert!(log.contains(error), "{log}");
}

#[test]
fn flags_without_effect_on_emulated_cards_are_named_once() {
    let on_hpu =
        ["--trainer.accelerator=hpu", "--trainer.limit_val_batches=0", "--trainer.num_sanity_val_steps=0"];
    let set = [("PT_HPU_LAZY_MODE", "1"), ("HABANA_PROFILE", "profile_api"), ("VOLTAIC_HPU_MEMORY", "1GiB")];
    let (code, log) = short_fit(&on_hpu, &set);
    assert_eq!(code, Some(0), "{log}");
    let line = "hpu: without effect on emulated cards: PT_HPU_LAZY_MODE=1, HABANA_PROFILE=profile_api\n";
    assert_eq!(log.matches(line).count(), 1, "{log}");
    assert!(!short_fit(&on_hpu, &[("PT_HPU_LAZY_MODE", "0")]).1.contains("without effect"));
}

#[test]
fn lists_of_operators_take_effect_from_the_command_line() {
    let folder = TempDir::new().unwrap();
    let [lower, fp32, missing, misspelt] =
        ["lower.txt", "fp32.txt", "missing.txt", "misspelt.txt"].map(|name| folder.path().join(name));
    std::fs::write(&lower, "tan\n").unwrap();
    std::fs::write(&fp32, "linear\naddmm\nmm\ncross_entropy_loss\n").unwrap();
    std::fs::write(&misspelt, "linear\n\nadmm\n").unwrap();
    let losses = |precision, variables: &[_]| losses_on_hpu(precision, variables, &[]);
    let (full, _) = losses("32-true", &[]).unwrap();
    let (mixed, printed) = losses("bf16-mixed", &[]).unwrap();
    assert_eq!(full.len(), 3);
    assert!(!printed.contains("libtorch has no operator"), "{printed}");
    assert_ne!(full, mixed, "by default products are computed in bfloat16");
    let lists = [("LOWER_LIST", lower.as_path()), ("FP32_LIST", fp32.as_path())];
    assert_eq!(losses("bf16-mixed", &lists).unwrap().0, full, "nothing of this model is cast");
    for variable in ["LOWER_LIST", "FP32_LIST"] {
        let error = losses("bf16-mixed", &[(variable, &missing)]).unwrap_err();
        assert!(error.contains("missing.txt") && error.contains("check that the path is right"), "{error}");
        let (_, printed) = losses("bf16-mixed", &[(variable, &misspelt)]).unwrap();
        let warning = "misspelt.txt:3: libtorch has no operator `admm`; did you mean addmm";
        assert!(printed.contains(warning), "{printed}");
    }
}
