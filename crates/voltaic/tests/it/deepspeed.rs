//! DeepSpeed's strategies by name, class and file; what is wrong with them, and how they go with the trainer's keys.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail the test")]

use serde_json::json;
use voltaic::precision::DeepSpeedPrecisionPlugin;
use voltaic::strategy::{DeepSpeedStrategy, HpuDeepSpeedStrategy};
use voltaic::trainer::Trainer;

use crate::class_paths::problem;
use crate::probe::{short_fit, voltaic};

/// What is said of a configuration that is right.
const NOTHING: &str = "";

const TWO: &str = "trainer: {accelerator: cpu, devices: 2, logger: false}";

fn on_cpu(options: &[&str]) -> String {
    problem(TWO, options)
}

#[test]
fn strategies_are_named_as_lightning_names_them() {
    for name in [
        "deepspeed",
        "deepspeed_stage_1",
        "deepspeed_stage_2",
        "deepspeed_stage_2_offload",
        "deepspeed_stage_3",
        "deepspeed_stage_3_offload",
        "deepspeed_stage_3_offload_nvme",
    ] {
        let found = on_cpu(&[&format!("trainer.strategy={name}")]);
        assert_eq!(found, NOTHING);
        let hpu = format!("trainer.strategy=hpu_{name}");
        let found = problem("trainer: {accelerator: hpu, devices: 1}", &[&hpu]);
        assert_eq!(found, NOTHING);
        let found = on_cpu(&[&hpu]);
        let expected = format!(
            "HPUDeepSpeedStrategy requires HPUAccelerator: hpu_{name} with accelerator=cpu; set trainer.accelerator=hpu, or use {name}"
        );
        assert!(found.contains(&expected), "{found}");
    }
    let found = on_cpu(&["trainer.strategy=deepspeed_stage_4"]);
    assert!(found.contains("`deepspeed_stage_4` is not a strategy"), "{found}");
}

#[test]
fn strategies_are_classes_with_their_arguments() {
    let modules = ["", "lightning.pytorch.strategies.", "lightning_habana.pytorch.strategies.deepspeed."];
    for path in modules.map(|module| format!("{module}DeepSpeedStrategy")) {
        let recipe = format!(
            "trainer:\n  accelerator: cpu\n  devices: 2\n  strategy:\n    class_path: {path}\n    init_args: {{stage: 3, \
             zero_optimization: true, reduce_bucket_size: 1000, parallel_devices: [0, 1], sub_group_size: 5}}\n"
        );
        let found = problem(&recipe, &[]);
        assert_eq!(found, NOTHING, "{path}");
    }
    let class = "trainer.strategy=HPUDeepSpeedStrategy";
    let found = problem("trainer: {accelerator: hpu, devices: 1}", &[class, "trainer.strategy.stage=1"]);
    assert_eq!(found, NOTHING);
    for (options, expected) in [
        (&["trainer.strategy.stage=7"][..], "strategy.stage: 7 is not a stage; use 0, 1, 2 or 3"),
        (&["trainer.strategy.stge=1"], "unknown key; did you mean trainer.strategy.stage"),
        (
            &["trainer.strategy.parallel_devices=8"],
            "parallel_devices: 8 devices, but trainer.devices means 2; set trainer.devices, or leave it out",
        ),
        (
            &["trainer.strategy.parallel_devices=[banana, cpu]"],
            r#"parallel_devices: "banana" is not a device of accelerator=cpu; leave it out"#,
        ),
        (&["trainer.strategy.parallel_devices=[cpu, cuda:1]"], r#""cuda:1" is not a device of"#),
        (&["trainer.strategy.allgather_bucket_size=1001"], "allgather_bucket_size: 1001 is odd"),
        (&["trainer.strategy.remote_device=gpu"], "`gpu` is not a place off the device; set cpu or nvme"),
        (
            &["trainer.strategy.contiguous_memory_optimization=true"],
            "contiguous_memory_optimization: true without partition_activations",
        ),
        (&["trainer.strategy.process_group_backend=nccl"], "process_group_backend is nccl"),
        (&["trainer.strategy.hysteresis=0"], "hysteresis: 0 is too small; set a whole number from 1 on"),
        (&["trainer.strategy.initial_scale_power=200"], "2 to the power of 200 is infinite in float32"),
        (&["trainer.strategy.loss_scale=-1"], "loss_scale: -1 is not a scale"),
        (&["trainer.strategy.timeout_secs=0"], "timeout_secs: 0 is not a time to wait"),
        (&["trainer.strategy.dtype=int4"], "trainer.strategy.dtype"),
        (
            &["trainer.strategy.enable_cuda_graph=true", "trainer.strategy.tensor_parallel.tp_size=2"],
            "enable_cuda_graph: true with tensor_parallel.tp_size=2",
        ),
        (&["trainer.strategy.tensor_parallel.tp_size=3"], "tp_size is 3, but there are 2 rank(s)"),
        (
            &["trainer.strategy.cluster_environment=slurm"],
            "the launcher is known by the variables that it sets",
        ),
    ] {
        let all: Vec<&str> = [&["trainer.strategy=DeepSpeedStrategy"], options].concat();
        let found = on_cpu(&all);
        assert!(found.contains(expected), "{options:?}: {found}");
    }
}

#[test]
fn an_unknown_argument_and_a_wrong_one_are_reported_together() {
    let run = |options: &[&str]| {
        let all = ["fit", "--model=lenet", "--data=digits", "--trainer.strategy=DeepSpeedStrategy"];
        voltaic(&[&all, options].concat(), &[]).1
    };
    let arguments = ["stge=1", "stage=7", "hysteresis=0"].map(|text| format!("--trainer.strategy.{text}"));
    let config = "--trainer.strategy.config={zero_optimization: {stag: 2, stage: 7}, fp16: {enabled: 3}}";
    for (found, expected) in [
        (
            run(&arguments.each_ref().map(String::as_str)),
            ["unknown key; did you mean trainer.strategy.stage", "7 is not a stage", "0 is too small"],
        ),
        (
            run(&[config]),
            ["unknown key; did you mean zero_optimization.stage", "7 is not a stage", "`3` is an integer"],
        ),
    ] {
        for expected in expected {
            assert!(found.contains(expected), "{expected}: {found}");
        }
    }
}

#[test]
fn the_precision_is_of_the_trainer_its_plugin_or_the_settings() {
    let deepspeed = "trainer.strategy=deepspeed";
    for (options, expected) in [
        (
            &[deepspeed, "trainer.plugins=DeepSpeedPrecisionPlugin", "trainer.plugins.precision=bf16-mixed"]
                [..],
            NOTHING,
        ),
        (&[deepspeed, "trainer.precision=bf16-true"], NOTHING),
        (&[deepspeed, "trainer.precision=16-true"], NOTHING),
        (&[deepspeed, "trainer.precision=16-mixed"], NOTHING),
        (
            &[deepspeed, "trainer.precision=64-true"],
            "64-true with a DeepSpeed strategy; use bf16-mixed, 16-true or 32-true",
        ),
        (
            &[deepspeed, "trainer.plugins=HPUDeepSpeedPrecisionPlugin"],
            "HPUDeepSpeedPrecisionPlugin with accelerator=cpu",
        ),
        (&[deepspeed, "trainer.plugins=HPUPrecisionPlugin"], "use DeepSpeedPrecisionPlugin"),
        (
            &[deepspeed, "trainer.plugins=DeepSpeedPrecisionPlugin", "trainer.precision=32"],
            "trainer.precision: the precision is given twice",
        ),
        (
            &["trainer.plugins=DeepSpeedPrecisionPlugin"],
            "DeepSpeedPrecisionPlugin without a DeepSpeed strategy",
        ),
        (
            &[
                "trainer.strategy={class_path: DeepSpeedStrategy, init_args: {config: {bf16: {enabled: true}, zero_optimization: {stage: 1}}}}",
                "trainer.precision=32-true",
            ],
            "32-true, but DeepSpeed's settings say bf16-true; remove one of the two",
        ),
        (
            &[
                "trainer.strategy={class_path: DeepSpeedStrategy, init_args: {config: {bf16: {enabled: true}, zero_optimization: {stage: 1}}}}",
                "trainer.precision=32",
            ],
            "trainer.precision: 32, but DeepSpeed's settings say bf16-true",
        ),
    ] {
        let found = on_cpu(options);
        assert!(found.contains(expected), "{options:?}: {found}");
        assert!(!expected.is_empty() || found.is_empty(), "{options:?}: {found}");
    }
}

#[test]
fn settings_are_a_file_or_inline_and_the_rules_of_lightning_hold() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ds.json");
    std::fs::write(
        &path,
        "{\n  // sizes\n  \"train_batch_size\": 8,\n  \"train_micro_batch_size_per_gpu\": 3,\n  \"zero_optimization\": {\n    \"stage\": 2,\n    \"overlap_com\": true,\n  },\n}\n",
    )
    .unwrap();
    let shown = path.display();
    let class = "trainer.strategy=DeepSpeedStrategy";
    let found = on_cpu(&[class, &format!("trainer.strategy.config={shown}")]);
    let expected = format!(
        "zero_optimization.overlap_com (from {shown}:7): unknown key; did you mean zero_optimization.overlap_comm"
    );
    assert!(found.contains(&expected), "{found}");
    let fixed = std::fs::read_to_string(&path).unwrap().replace("overlap_com\"", "overlap_comm\"");
    std::fs::write(&path, fixed).unwrap();
    let found =
        on_cpu(&[class, &format!("trainer.strategy.config={shown}"), "trainer.accumulate_grad_batches=2"]);
    let expected = "train_batch_size 8 is not train_micro_batch_size_per_gpu 3 * accumulate_grad_batches 2 * ranks 2 = 12; \
                    set train_batch_size to 12, or leave it out";
    assert!(found.contains(expected), "{found}");
    let inline = |settings: &str, options: &[&str]| {
        let recipe = format!(
            "trainer:\n  accelerator: cpu\n  devices: 2\n  strategy:\n    class_path: DeepSpeedStrategy\n    init_args:\n      \
             config: {settings}\n"
        );
        problem(&recipe, options)
    };
    for (settings, options, expected) in [
        ("{zero_optimization: {stage: 2}}", &[][..], NOTHING),
        (
            "{zero_optimization: {stag: 2}}",
            &[],
            "strategy.config.zero_optimization.stag: unknown key; did you mean zero_optimization.stage",
        ),
        (
            "{gradient_accumulation_steps: 2}",
            &[],
            "2 is set, but the trainer accumulates; set trainer.accumulate_grad_batches",
        ),
        ("{autotuning: {enabled: true}}", &[], "autotuning is not supported"),
        (
            "{zero_optimization: {stage: 2}}",
            &["trainer.gradient_clip_val=1.0", "trainer.gradient_clip_algorithm=value"],
            "DeepSpeed does not support clipping gradients by value",
        ),
        ("{zero_optimization: {stage: 0, max_group_size: 1310822400}, bf16: {enabled: true}}", &[], NOTHING),
        ("{gradient_clipping: 1.0, per_device_train_batch_size: 64}", &[], NOTHING),
        ("{fp16: {enabled: true}, zero_optimization: {stage: 1}}", &[], NOTHING),
        ("{fp16: {enabled: true}, zero_optimization: {stage: 1}}", &["trainer.precision=16-mixed"], NOTHING),
        (
            "{fp16: {enabled: true, loss_scale: 1e300}}",
            &[],
            "00 is infinite in float32; set a smaller number",
        ),
        (
            "/nowhere.json",
            &[],
            "you passed in a path to a DeepSpeed config but the path does not exist: /nowhere.json",
        ),
    ] {
        let found = inline(settings, options);
        assert!(found.contains(expected), "{settings}: {found}");
        assert!(!expected.is_empty() || found.is_empty(), "{settings}: {found}");
    }
}

#[test]
fn the_environment_names_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ds.json");
    std::fs::write(&path, "{\"zero_optimization\": {\"stage\": 9}}").unwrap();
    let run = |path: &str| {
        let options = [
            "fit",
            "--model=lenet",
            "--data=digits",
            "--trainer.strategy=deepspeed",
            "--trainer.accelerator=cpu",
        ];
        voltaic(&options, &[("PL_DEEPSPEED_CONFIG_PATH", path)]).1
    };
    assert_contains!(run(&path.display().to_string()), "ds.json:1): 9 is not a stage");
    let pipe = folder.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for path in ["/dev/zero", pipe.to_str().unwrap(), folder.path().to_str().unwrap()] {
        let found = run(path);
        let expected = format!("PL_DEEPSPEED_CONFIG_PATH: {path} cannot be read: it is a ");
        assert!(found.contains(&expected), "{found}");
        let found =
            on_cpu(&["trainer.strategy=DeepSpeedStrategy", &format!("trainer.strategy.config={path}")]);
        assert!(
            found.contains(&format!("trainer.strategy.config: {path} cannot be read: it is a ")),
            "{found}"
        );
    }
    assert_contains!(
        run("/nowhere.json"),
        "PL_DEEPSPEED_CONFIG_PATH: you passed in a path to a DeepSpeed config but"
    );
}

#[test]
fn rust_builds_the_strategies() {
    let error = |builder: voltaic::trainer::TrainerBuilder| builder.check().unwrap_err().to_string();
    let builder = || Trainer::builder().accelerator("cpu").devices(2);
    builder().strategy(DeepSpeedStrategy::stage(1).reduce_bucket_size(100)).check().unwrap();
    let found =
        error(builder().strategy(DeepSpeedStrategy::settings(json!({"zero_optimization": {"stage": 5}}))));
    assert!(found.contains("trainer.strategy.config.zero_optimization.stage: 5 is not a stage"), "{found}");
    let found = error(builder().strategy(HpuDeepSpeedStrategy(DeepSpeedStrategy::stage(1))));
    assert!(found.contains("HPUDeepSpeedStrategy requires HPUAccelerator"), "{found}");
    assert_eq!(DeepSpeedPrecisionPlugin::new("bf16-mixed").precision, "bf16-mixed");
}

/// A fit of one batch by the command with DeepSpeed's settings.
fn fit(settings: &serde_json::Value, more: &[&str]) -> (Option<i32>, String) {
    let config = format!("--trainer.strategy.config={settings}");
    short_fit(&[&["--trainer.strategy=DeepSpeedStrategy", &config], more].concat(), &[])
}

#[test]
fn the_micro_batch_is_that_of_the_loader() {
    let settings = |batch: u64| json!({"train_batch_size": batch, "zero_optimization": {"stage": 1}});
    let (code, text) = fit(&settings(4), &["--trainer.accumulate_grad_batches=2"]);
    assert_eq!(code, Some(0), "{text}");
    let (code, text) = fit(&settings(6), &["--trainer.accumulate_grad_batches=2"]);
    let expected = "train_batch_size 6 is not train_micro_batch_size_per_gpu 2 * accumulate_grad_batches 2 * ranks 1 = 4";
    assert!(code == Some(2) && text.contains(expected), "{code:?} {text}");
    let given = json!({"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 1}});
    let (code, text) = fit(&given, &[]);
    let expected = "train_micro_batch_size_per_gpu is 3, but the training loader gives batches of 2";
    assert!(code == Some(0) && text.contains(expected), "{code:?} {text}");
}

#[test]
fn arguments_without_effect_are_named() {
    let class = "--trainer.strategy=DeepSpeedStrategy";
    let idle = ["--trainer.strategy.loss_scale=5", "--trainer.strategy.initial_scale_power=20"];
    let kept = "--trainer.strategy.gather_after_fit=false";
    let (code, text) = short_fit(&[class, idle[0], idle[1], kept], &[]);
    for expected in [
        "trainer.strategy.loss_scale=5.0 has no effect: the precision is 32-true",
        "trainer.strategy.initial_scale_power=20 has no effect",
        "gather_after_fit=false has no effect: stage 2 leaves the weights unsharded",
    ] {
        assert!(code == Some(0) && text.contains(expected), "{expected}: {code:?} {text}");
    }
    let elsewhere = ["stage=3", "offload_parameters=true", "remote_device=nvme"]
        .map(|own| format!("--trainer.strategy.{own}"));
    let (code, text) = short_fit(&[class, &elsewhere[0], &elsewhere[1], &elsewhere[2]], &[]);
    let expected =
        "trainer.strategy.remote_device has no effect: weights are where offload_params_device says";
    assert!(code == Some(0) && text.contains(expected), "{code:?} {text}");
    let own = [class, idle[0], idle[1], kept, "--trainer.strategy.stage=3", "--trainer.precision=16-true"];
    let (code, text) = short_fit(&own, &[]);
    assert!(code == Some(0) && !text.contains("has no effect"), "{code:?} {text}");
}

#[test]
fn optimizers_and_schedules_have_their_names_on_the_command_line() {
    let schedules: [&[&str]; 5] = [
        &["WarmupLR", "warmup_num_steps=4", "warmup_max_lr=0.1"],
        &["WarmupDecayLR", "total_num_steps=9", "warmup_num_steps=4"],
        &["WarmupCosineLR", "total_num_steps=9", "warmup_num_steps=4"],
        &["OneCycle", "cycle_min_lr=0.01", "cycle_max_lr=0.1"],
        &["LRRangeTest", "lr_range_test_min_lr=0.01"],
    ];
    let optimizers =
        ["SGD", "Adam", "AdamW", "Adagrad", "Lion", "Lamb", "RMSprop", "Adadelta"].into_iter().enumerate();
    for (number, optimizer) in optimizers {
        let stage = format!("--trainer.strategy=zero{}", number % 3 + 1);
        let mut words = vec![format!("--optimizer={optimizer}"), "--optimizer.lr=0.01".to_owned(), stage];
        if optimizer == "Lamb" {
            words[2] = "--trainer.strategy=auto".to_owned(); // ZeRO refuses it
        }
        let schedule = schedules[number % schedules.len()];
        words.push(format!("--lr_scheduler={}", schedule[0]));
        words.extend(schedule[1..].iter().map(|word| format!("--lr_scheduler.{word}")));
        words.push("--lr_scheduler.interval=step".to_owned());
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let (code, text) = short_fit(&words, &[]);
        assert_eq!(code, Some(0), "{optimizer}, {}: {text}", schedule[0]);
    }
}

#[test]
fn float16_is_asked_for_in_three_ways() {
    let stage = json!({"zero_optimization": {"stage": 2}});
    let (code, text) = fit(&stage, &["--trainer.precision=16-true"]);
    assert_eq!(code, Some(0), "{text}");
    let named = json!({"zero_optimization": {"stage": 2}, "fp16": {"enabled": true}});
    let (code, text) = fit(&named, &[]);
    assert_eq!(code, Some(0), "{text}");
    let (code, text) = short_fit(&["--trainer.strategy=zero1", "--trainer.precision=16-true"], &[]);
    assert_eq!(code, Some(0), "{text}");
}
