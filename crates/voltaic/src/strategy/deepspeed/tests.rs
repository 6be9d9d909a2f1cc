//! Files of DeepSpeed, good and bad.

use serde_json::json;
use tch::Kind;

use super::config::{DeepSpeedStrategy, Read};
use super::inference::{InferenceSettings, TensorParallel};
use super::settings::DeepSpeedSettings;
use crate::config::{faults, schema_of};
use crate::error::ConfigError;
use crate::optim::{
    LrSchedulerConfig, MuonWithAuxAdam, NsMethod, OptimizerConfig, WarmupDecayLr, WarmupType,
};
use crate::strategy::OffloadDevice;

fn read(text: &str) -> DeepSpeedSettings {
    DeepSpeedSettings::of_text("ds.json", text).expect("a valid file")
}

fn training(strategy: &DeepSpeedStrategy) -> Result<DeepSpeedSettings, ConfigError> {
    match strategy.read()? {
        Read::Training(settings) => Ok(*settings),
        Read::Inference(settings) => panic!("{} selects inference", settings.key),
    }
}

fn inference(strategy: &DeepSpeedStrategy) -> Result<InferenceSettings, ConfigError> {
    match strategy.read()? {
        Read::Training(_) => panic!("{strategy:?} is for training"),
        Read::Inference(settings) => Ok(settings),
    }
}

/// The problems of a file, as text.
fn errors(text: &str) -> Vec<String> {
    let error = DeepSpeedSettings::of_text("ds.json", text).expect_err("an invalid file");
    error.problems.iter().map(ToString::to_string).collect()
}

fn only_error(text: &str) -> String {
    let errors = errors(text);
    assert_eq!(errors.len(), 1, "{errors:?}");
    errors.into_iter().next().unwrap_or_default()
}

#[test]
fn the_printed_configuration_is_read_as_it_stands() {
    let config = r#"{
        "train_batch_size": 8,
        "bf16": {"enabled": true},
        "fp16": {"enabled": false},
        "train_micro_batch_size_per_gpu": 2,
        "scheduler": {"type": "WarmupDecayLR", "params": {
            "warmup_min_lr": 0.02, "warmup_max_lr": 0.05, "warmup_num_steps": 4, "total_num_steps" : 8,
            "warmup_type": "linear"}},
        "zero_allow_untested_optimizer": true,
        "zero_optimization": {"stage" : 2}
    }"#;
    let settings = read(config);
    assert!(settings.bf16.enabled && !settings.fp16.enabled && settings.zero_allow_untested_optimizer);
    assert_eq!((settings.zero.stage, settings.zero.reduce_bucket_size), (2, 500_000_000));
    let schedule = WarmupDecayLr::new(4, 8).warmup_min_lr(0.02).warmup_max_lr(0.05);
    let schedule = LrSchedulerConfig::from(schedule.warmup_type(WarmupType::Linear));
    assert_eq!(settings.scheduler, Some(schedule));
    assert!(settings.notes.is_empty(), "{:?}", settings.notes);
    assert!(settings.batch().resolve(2, 2, None).is_ok(), "on two ranks");
    assert!(settings.batch().resolve(2, 8, None).is_err(), "on eight");
}

#[test]
fn comments_commas_auto_and_numbers_of_hjson_are_read() {
    let settings = read(
        "{ // stage 3\n # hash, with a \" in it\n /* and * this */\n zero_optimization: {'stage': 3,\n \
         \"reduce_bucket_size\": 5e7, \"stage3_max_live_parameters\": \"auto\", \"prefetch_bucket_size\": 0x10,},\n \
         \"gradient_clipping\": \"auto\", \"communication_data_type\": \"BF16\", \"data_types\": {\"grad_accum_dtype\": \
         \"fp32\"},}",
    );
    let zero = &settings.zero;
    assert_eq!((zero.stage, zero.reduce_bucket_size, zero.prefetch_bucket_size), (3, 50_000_000, 16));
    assert_eq!((zero.max_live_parameters, settings.gradient_clipping), (1_000_000_000, None));
    assert_eq!(settings.communication_data_type, Some(Kind::BFloat16));
    assert_eq!(settings.data_types.grad_accum_dtype, Some(Kind::Float));
    assert_eq!(read(r#"{"zero_optimization": true, "bfloat16": {"enabled": true}}"#).zero.stage, 1);
}

#[test]
fn unknown_keys_are_noted_and_reported_beside_mistakes() {
    let text =
        |stage| format!("{{\n\"gradient_cliping\": 1.0,\n\"zero_optimization\": {{\"stage\": {stage}}}}}");
    assert_eq!(
        read(&text(2)).notes,
        ["gradient_cliping has no effect: DeepSpeed has no such key; did you mean gradient_clipping"]
    );
    let found = errors(&text(7));
    assert_eq!(
        found,
        [
            "zero_optimization.stage (from ds.json:3): 7 is not a stage; use 0, 1, 2 or 3",
            "gradient_cliping (from ds.json:2): DeepSpeed has no such key; did you mean gradient_clipping"
        ]
    );
}

#[test]
fn a_loss_scale_without_float16_is_noted() {
    let notes = |is_on: bool, more: &str| {
        let fp16 = format!(r#""fp16": {{"enabled": {is_on}, "loss_scale": 128{more}}}"#);
        read(&format!(r#"{{"zero_optimization": {{"stage": 1}}, {fp16}}}"#)).notes
    };
    let why = "the loss is scaled with fp16.enabled=true only";
    let expected = ["loss_scale", "hysteresis"].map(|key| format!("fp16.{key} has no effect: {why}"));
    assert_eq!(notes(false, r#", "hysteresis": 3"#), expected);
    assert!(notes(true, "").is_empty());
}

#[test]
fn all_problems_of_a_file_are_reported_with_line_and_remedy() {
    let found = errors(
        "{\n\"zero_optimization\": {\n  \"stage\": 5,\n  \"reduce_buket_size\": 3,\n  \"overlap_comm\": 1,\n  \
         \"allgather_bucket_size\": 1001,\n  \"zero_quantized_weights\": true\n},\n\"gradient_accumulation_steps\": 2,\n\
         \"amp\": {},\n\"fp16\": {\"enabled\": true, \"loss_scale\": -1},\n\"bf16\": {\"enabled\": true},\n\
         \"train_batch_size\": 2.5,\n\"optimizer\": {\"type\": \"adamw\", \"params\": {\"max_grad_norm\": 1}},\n\
         \"scheduler\": {\"type\": \"WarmupRL\"}\n}",
    );
    for expected in [
        "zero_optimization.stage (from ds.json:3): 5 is not a stage; use 0, 1, 2 or 3",
        "zero_optimization.reduce_buket_size (from ds.json:4): unknown key; did you mean zero_optimization.reduce_bucket_size",
        "zero_optimization.overlap_comm (from ds.json:5): `1` is an integer; give true or false",
        "zero_optimization.allgather_bucket_size (from ds.json:6): 1001 is odd; use a multiple of 2",
        "zero_optimization.zero_quantized_weights (from ds.json:7): what travels is not quantized; set false",
        "gradient_accumulation_steps (from ds.json:9): 2 is set, but the trainer accumulates; set trainer.accumulate_grad_batches",
        "amp (from ds.json:10): DeepSpeed has had it in older versions only; remove it",
        "fp16 (from ds.json:11): fp16 and bf16 are both enabled; enable one of the two",
        "fp16.loss_scale (from ds.json:11): `-1` is outside the range; give a number of at least 0",
        "train_batch_size (from ds.json:13): `2.5` is a number with a fraction; give an integer of at least 1",
        "optimizer.params.max_grad_norm (from ds.json:14): 1 is not a setting of an optimizer; set gradient_clipping",
        "scheduler (from ds.json:15): class_path: WarmupRL is not a learning rate schedule; did you mean WarmupLR?",
    ] {
        assert!(found.iter().any(|problem| problem.contains(expected)), "no `{expected}` in {found:#?}");
    }
    assert_eq!(found.len(), 12, "{found:#?}");
}

#[test]
fn combinations_that_deepspeed_refuses_are_refused() {
    for (text, expected) in [
        (
            r#"{"zero_optimization": {"stage": 2}, "prescale_gradients": true}"#,
            "true does not go with stage 2",
        ),
        (
            r#"{"zero_optimization": {"stage": 3}, "gradient_predivide_factor": 2}"#,
            "gradient_predivide_factor (from ds.json:1): 2 does not go with stage 3",
        ),
        (
            r#"{"zero_optimization": {"stage": 3}, "gradient_allreduce_op": "sum"}"#,
            "sum does not go with stage 3",
        ),
        (
            r#"{"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}"#,
            "zero_optimization.offload_optimizer (from ds.json:1): offloads optimizer states with stage 0",
        ),
        (
            r#"{"zero_optimization": {"stage": 2, "cpu_offload_param": true}}"#,
            "zero_optimization.cpu_offload_param (from ds.json:1): offloads parameters with stage 2",
        ),
        (
            r#"{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}"#,
            "zero_optimization.offload_optimizer.ratio (from ds.json:1): 0.5 with stage 2; set 1, or use stage 3",
        ),
        (
            r#"{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1.5}}}"#,
            "1.5 is not a share; set a number from 0 to 1",
        ),
        (
            r#"{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}"#,
            "offloads parameters with stage 2; use stage 3",
        ),
        (
            r#"{"zero_optimization": {"stage": 3, "max_live_parameters": 1, "stage3_max_live_parameters": 1}}"#,
            "is given beside stage3_max_live_parameters, which is the same",
        ),
        (
            r#"{"activation_checkpointing": {"contiguous_memory_optimization": true}}"#,
            "contiguous_memory_optimization (from ds.json:1): true without partition_activations; set",
        ),
        (
            r#"{"activation_checkpointing": {"contiguous_memory_optimization": true, "partition_activations": true}}"#,
            "true without number_checkpoints; set number_checkpoints to how many segments",
        ),
        (
            r#"{"activation_checkpointing": {"cpu_checkpointing": 3}}"#,
            "activation_checkpointing.cpu_checkpointing (from ds.json:1): `3` is",
        ),
        (r#"{"autotuning": {"enabled": true}}"#, "autotuning is not supported; remove it"),
        (r#"{"hybrid_engine": {"enabled": true}}"#, "voltaic does not have it"),
        (r#"{"tensor_parallel": {"tp_size": 4}}"#, "tensor_parallel.tp_size (from ds.json:1): unknown key"),
        (
            r#"{"checkpoint": {"tag_validation": "Sometimes"}}"#,
            "`Sometimes` is not one of the values; give one of `Ignore`, `Warn`, `Fail`",
        ),
        (
            r#"{"fp16": {"hysteresis": 0}}"#,
            "fp16.hysteresis (from ds.json:1): `0` is outside the range; give an integer of at least 1",
        ),
        (r#"{"optimizer": {"type": "AdamW", "params": {"lrr": 1}}}"#, "unknown field `lrr`"),
        (r#"{"optimizer": {"params": {}}}"#, "optimizer.type (from ds.json:1): is missing; name the class"),
        (r#"{"zero_optimization": 3}"#, "`3` is an integer; give a mapping"),
        (r#"{"optimizer": {"type": 3}}"#, "optimizer.type (from ds.json:1): `3` is an integer; give text"),
        (r#"[1]"#, "a list of 1 is not a section"),
    ] {
        let found = only_error(text);
        assert!(found.contains(expected), "{text}: {found}");
    }
}

#[test]
fn keys_are_described() {
    assert_eq!(faults(&schema_of::<DeepSpeedSettings>()), Vec::<String>::new());
}

#[test]
fn keys_under_older_names_are_named_as_they_were_written() {
    let found = errors(
        "{\"bfloat16\": {\n\"bf16_optimizer_states\": true, \"enabeld\": true},\n\"zero_optimization\": {\n\
         \"max_live_parameters\": -1, \"contiguous_gradient\": true, \"stage\": 3, \"offload_param\": {\"device\": \"nvme\"}}}",
    );
    for expected in [
        "bfloat16.bf16_optimizer_states (from ds.json:2): true without bf16_master_weights_and_grads",
        "bfloat16.enabeld (from ds.json:2): unknown key; did you mean ",
        "zero_optimization.max_live_parameters (from ds.json:4): `-1` is outside the range",
        "zero_optimization.contiguous_gradient (from ds.json:4): unknown key; did you mean zero_optimization.contiguous_gradients",
        "zero_optimization.offload_param.nvme_path (from ds.json:4): is missing with device nvme; name a folder",
    ] {
        assert!(found.iter().any(|problem| problem.contains(expected)), "no `{expected}` in {found:#?}");
    }
    assert_eq!(found.len(), 5, "{found:#?}");
}

#[test]
fn keys_without_effect_are_named() {
    let settings = read(
        r#"{"steps_per_print": 10, "wall_clock_breakdown": false, "zero_optimisation": {"stage": 2},
            "zero_optimization": {"stage": 1, "contiguous_gradients": true, "round_robin_gradients": true},
            "aio": {"thread_count": 2}, "autotuning": {"enabled": false}, "checkpoint": {"load_universal": true}}"#,
    );
    for expected in [
        "steps_per_print has no effect: ",
        "wall_clock_breakdown has no effect: ",
        "zero_optimisation has no effect: DeepSpeed has no such key; did you mean zero_optimization",
        "zero_optimization.contiguous_gradients has no effect: ",
        "zero_optimization.round_robin_gradients has no effect: ",
        "aio has no effect: ",
        "checkpoint.load_universal has no effect: ",
    ] {
        assert!(
            settings.notes.iter().any(|note| note.starts_with(expected)),
            "{expected}: {:#?}",
            settings.notes
        );
    }
    assert_eq!(settings.notes.len(), 7, "{:#?}", settings.notes);
}

#[test]
fn hostile_files_are_errors() {
    let deep = format!("{}1{}", "{\"a\":".repeat(100_000), "}".repeat(100_000));
    let brackets = "[".repeat(500_000);
    let keys: String = (0..70_000).map(|index| format!("\"key{index}\":{index},")).collect();
    let long = format!("{{\"train_batch_size\": {}}}", "9".repeat(400));
    let sections = format!("{{\"a\": {}1{}}}", "[".repeat(30), "]".repeat(30));
    for (text, expected) in [
        (deep.as_str(), "sections deeper than 16; nest less"),
        (&brackets, "sections deeper than 16; nest less"),
        (&sections, "sections deeper than 16"),
        (&format!("{{{keys}}}"), "bytes, more than 1048576"),
        (
            &format!(
                "{{{}}}",
                &keys[..200_001 - keys[..200_001].chars().rev().position(|c| c == ',').unwrap_or(0)]
            ),
            "more than 4096 values",
        ),
        (&long, "is not a number that float64 can hold"),
        ("{\"train_batch_size\": NaN}", "NaN is not a number that float64 can hold"),
        ("{\"train_batch_size\": 1e300}", "`1e+300` is outside the range; give an integer of at least 1"),
        (
            "{\"a\": 1,\n\"b\": 2,\n\"a\": 3}",
            "a (from ds.json:3): is given twice, first in line 1; remove one of the two",
        ),
        ("{\"a\": 1", "DeepSpeed file (from ds.json:1)"),
        ("{\"a\": \"\\ud800\"}", "DeepSpeed file (from ds.json:1)"),
        ("", "it is empty"),
        ("\u{feff}{\"zero_optimization\": {\"stage\": 9}}", "9 is not a stage"),
        ("{\"fp16\": {\"initial_scale_power\": 4000000000}}", "is infinite in float32"),
    ] {
        let found = errors(text).join("\n");
        assert!(found.contains(expected), "{:.60}: {found:.300}", text);
        assert!(found.len() < 2000, "{found:.300}");
    }
}

#[test]
fn deepspeeds_adam_is_adamw_unless_its_mode_is_off() {
    let adam = |text: &str| match read(&format!(r#"{{"optimizer": {text}}}"#)).optimizer {
        Some(OptimizerConfig::Adam(adam)) => ("Adam", adam.lr, adam.weight_decay),
        Some(OptimizerConfig::AdamW(adam)) => ("AdamW", adam.lr, adam.weight_decay),
        other => panic!("{other:?}"),
    };
    assert_eq!(adam(r#"{"type": "Adam", "params": {"lr": 0.1, "torch_adam": true}}"#), ("AdamW", 0.1, 0.01));
    assert_eq!(adam(r#"{"type": "adam", "params": {"lr": "auto"}}"#), ("AdamW", 1e-3, 0.0));
    assert_eq!(adam(r#"{"type": "adam", "params": {"bias_correction": true}}"#), ("AdamW", 1e-3, 0.0));
    let uncorrected =
        read(r#"{"optimizer": {"type": "Adam", "params": {"bias_correction": false}}}"#).optimizer;
    assert!(matches!(uncorrected, Some(OptimizerConfig::AdamW(adam)) if !adam.bias_correction));
    let lion = read(r#"{"optimizer": {"type": "lion", "params": {"lr": 0.5}}}"#).optimizer;
    assert!(matches!(lion, Some(OptimizerConfig::Lion(lion)) if lion.lr == 0.5));
    assert_eq!(adam(r#"{"type": "Adam", "params": {"adam_w_mode": false}}"#), ("Adam", 1e-3, 0.0));
    assert_eq!(adam(r#"{"type": "AdamW", "params": {"adam_w_mode": false}}"#), ("AdamW", 1e-3, 0.0));
    let sgd = read(r#"{"optimizer": {"type": "SGD", "params": {"lr": 0.5}}}"#).optimizer;
    assert!(matches!(sgd, Some(OptimizerConfig::Sgd(sgd)) if sgd.lr == 0.5));
}

#[test]
fn deepspeeds_muon_has_adamw_beside_it() {
    let muon =
        |params: &str| read(&format!(r#"{{"optimizer": {{"type": "Muon", "params": {params}}}}}"#)).optimizer;
    let standard = MuonWithAuxAdam::default();
    assert_eq!(muon("{}"), Some(standard.clone().into()));
    assert_eq!(muon(r#"{"lr": "auto", "torch_adam": true, "per_head_muon": false}"#), Some(standard.into()));
    let set = muon(
        r#"{"muon_lr": 0.1, "adam_lr": 0.2, "lr": 0.3, "momentum": 0.9, "betas": [0.8, 0.9], "eps": 1e-8, "weight_decay": 0.5,
            "ns_method": "standard", "adam_w_mode": false}"#,
    );
    let expected = MuonWithAuxAdam { lr: Some(0.3), ..MuonWithAuxAdam::new(0.1, 0.2) }
        .momentum(0.9)
        .betas((0.8, 0.9))
        .eps(1e-8)
        .weight_decay(0.5)
        .ns_method(NsMethod::Standard)
        .adam_w_mode(false);
    assert_eq!(set, Some(expected.into()));
    for (params, expected) in [
        (
            r#"{"per_head_muon": true}"#,
            "optimizer.params.per_head_muon (from ds.json:1): true: heads are not updated",
        ),
        (r#"{"nesterov": false}"#, "unknown field `nesterov`, expected one of"),
        (r#"{"ns_method": "svd"}"#, "unknown variant `svd`, expected `gram` or `standard`"),
    ] {
        let found = errors(&format!(r#"{{"optimizer": {{"type": "muon", "params": {params}}}}}"#)).join("; ");
        assert!(found.contains(expected), "{found}");
    }
}

/// Each with its line.
#[test]
fn settings_of_an_optimizer_that_are_out_of_range_are_reported_with_the_rest() {
    let text = r#"{"optimizer": {"type": "Muon", "params": {
        "momentum": 1.5,
        "betas": [0.9, 2],
        "per_head_muon": true
    }}, "gradient_clipping": -1}"#;
    let found = errors(text).join("; ");
    for expected in [
        "optimizer.params.momentum (from ds.json:2): 1.5 is not at least 0 and below 1",
        "optimizer.params.betas[1] (from ds.json:3): 2 is not at least 0 and below 1",
        "optimizer.params.per_head_muon (from ds.json:4): true",
        "gradient_clipping (from ds.json:5): `-1` is outside the range",
    ] {
        assert!(found.contains(expected), "{expected}: {found}");
    }
    let found = only_error(r#"{"optimizer": {"type": "AdamW", "params": {"lr": -1}}}"#);
    assert!(
        found.contains("optimizer.params.lr (from ds.json:1): -1 is not a finite number >= 0"),
        "{found}"
    );
}

#[test]
fn arguments_mean_what_lightning_makes_of_them() {
    let settings = training(&DeepSpeedStrategy::stage(3).reduce_bucket_size(7)).expect("valid");
    assert_eq!(
        (settings.zero.stage, settings.zero.reduce_bucket_size, settings.zero.sub_group_size),
        (3, 7, 1_000_000_000_000)
    );
    assert!(settings.zero_allow_untested_optimizer, "Lightning's default");
    assert_eq!(settings.zero.overlap_comm, Some(true));
    assert!(settings.notes.is_empty(), "Lightning's defaults are not worth a line: {:?}", settings.notes);
    let set = DeepSpeedStrategy {
        sub_group_size: 5,
        nvme_path: "/fast".to_owned(),
        ..DeepSpeedStrategy::default()
    };
    let notes = training(&set).expect("valid").notes;
    assert_eq!(
        notes,
        [
            "trainer.strategy.sub_group_size has no effect: nothing is offloaded",
            "trainer.strategy.nvme_path has no effect: nothing is offloaded"
        ]
    );
    let off = DeepSpeedStrategy { zero_optimization: false, ..DeepSpeedStrategy::default() };
    assert_eq!(training(&off).map(|settings| settings.zero.stage), Ok(0));
    let offload = DeepSpeedStrategy { offload_optimizer: true, ..DeepSpeedStrategy::default() };
    let settings = training(&offload).expect("valid");
    assert_eq!(settings.zero.offload_optimizer.device, OffloadDevice::Cpu);
    let files = DeepSpeedStrategy {
        offload_optimizer_device: "nvme".to_owned(),
        max_in_cpu: 5,
        offload_optimizer: true,
        ..DeepSpeedStrategy::default()
    };
    let settings = training(&files).expect("valid");
    assert_eq!(settings.zero.offload_optimizer.device, OffloadDevice::Cpu, "stage 2");
    assert_eq!(
        settings.notes,
        [
            "trainer.strategy.offload_optimizer_device has no effect: stage 2 keeps optimizer states in memory of the host, as with cpu",
            "trainer.strategy.max_in_cpu has no effect: nothing of this is offloaded"
        ]
    );
    let own = DeepSpeedStrategy {
        stage: 1,
        ..DeepSpeedStrategy::settings(json!({"zero_optimization": {"stage": 2}}))
    };
    let settings = training(&own).expect("valid");
    assert_eq!(settings.zero.stage, 2, "config decides");
    assert!(
        settings.notes.iter().any(|note| note.starts_with("trainer.strategy.stage has no effect")),
        "{:?}",
        settings.notes
    );
    let error = training(&DeepSpeedStrategy::settings(json!({"zero_optimization": {"stag": 2}})))
        .expect_err("a typo");
    assert_eq!(
        error.to_string(),
        "trainer.strategy.config.zero_optimization.stag: unknown key; did you mean zero_optimization.stage"
    );
    let error = training(&DeepSpeedStrategy::file("/nowhere/ds.json")).expect_err("no such file").to_string();
    assert!(error.contains("trainer.strategy.config: you passed in a path to a DeepSpeed config but the path does not exist: /nowhere/ds.json"), "{error}");
}

/// The three printed forms, and a file: arguments, keyword arguments, a dictionary.
#[test]
fn settings_of_inference_are_read_in_all_forms() {
    let arguments = DeepSpeedStrategy {
        tensor_parallel: Some(TensorParallel::size(8)),
        dtype: Some("torch.float".to_owned()),
        replace_with_kernel_inject: Some(true),
        ..DeepSpeedStrategy::default()
    };
    let policy = DeepSpeedStrategy {
        tensor_parallel: Some(TensorParallel::size(4)),
        dtype: Some("float".to_owned()),
        enable_cuda_graph: Some(false),
        replace_method: Some("auto".to_owned()),
        replace_with_kernel_inject: Some(false),
        injection_policy: Some(json!({"InferenceSample": "l1", "Block": ["attn.out", "mlp.out"]})),
        ..DeepSpeedStrategy::default()
    };
    let dictionary = DeepSpeedStrategy::settings(json!({
        "replace_with_kernel_inject": true, "tp": {"tp_size": 8}, "dtype": "FP32", "enable_cuda_graph": false,
    }));
    let [arguments, policy, dictionary] =
        [arguments, policy, dictionary].map(|strategy| inference(&strategy).expect("valid"));
    assert_eq!((arguments.config.tp_size(), arguments.config.dtype), (8, Some(Kind::Float)));
    assert_eq!(arguments.config, dictionary.config);
    assert_eq!(policy.config.injection_policy["InferenceSample"], ["l1"]);
    assert_eq!(policy.config.injection_policy["Block"], ["attn.out", "mlp.out"]);
    assert_eq!(policy.notes, ["trainer.strategy.replace_method has no effect: DeepSpeed ignores it, too"]);
    assert_eq!(arguments.key, "tensor_parallel");

    // the path of a checkpoint selects inference, the section does not
    let checkpoint = DeepSpeedStrategy::settings(json!({"checkpoint": "w.ckpt", "base_dir": "/weights"}));
    let path = inference(&checkpoint).expect("valid").config.checkpoint_path();
    assert_eq!(path.as_deref(), Some(std::path::Path::new("/weights/w.ckpt")));
    let section = DeepSpeedStrategy::settings(json!({"checkpoint": {"tag_validation": "Warn"}}));
    assert!(training(&section).is_ok());
    let both = DeepSpeedStrategy { stage: 3, ..checkpoint };
    let notes = inference(&both).expect("valid").notes;
    assert_eq!(notes, ["trainer.strategy.stage has no effect: checkpoint selects inference"]);
}

#[test]
fn settings_of_inference_that_do_not_go_together_are_refused() {
    let with = |config| DeepSpeedStrategy::settings(config);
    let dtype =
        |config| DeepSpeedStrategy { dtype: Some("bf16".to_owned()), ..DeepSpeedStrategy::settings(config) };
    for (strategy, expected) in [
        (
            with(json!({"enable_cuda_graph": true, "tensor_parallel": {"tp_size": 2}})),
            "config.enable_cuda_graph: true with tensor_parallel.tp_size=2",
        ),
        (
            with(json!({"replace_with_kernel_inject": true, "injection_policy": {"Net": "l1"}})),
            "replace_with_kernel_inject: true beside injection_policy",
        ),
        (with(json!({"dtype": "int8"})), "config.dtype"),
        (with(json!({"dtype": "bf16", "dtpe": 1})), "config.dtpe: unknown key; did you mean dtype"),
        (with(json!({"tensor_parallel": {"tp_size": 0}})), "tensor_parallel.tp_size"),
        (
            with(json!({"tensor_parallel": {"tp_sise": 2}})),
            "unknown key; did you mean tensor_parallel.tp_size",
        ),
        (with(json!({"mp_size": 2})), "mp_size: DeepSpeed has replaced it; set tensor_parallel.tp_size"),
        (with(json!({"base_dir": "/weights"})), "base_dir: without checkpoint"),
        (dtype(json!({"dtype": "fp16"})), "dtype: is \"fp16\" in the settings, and \"bf16\" as an argument"),
        (dtype(json!({"train_batch_size": 8})), "train_batch_size: is a setting of training"),
    ] {
        let error = inference(&strategy).expect_err("a mistake").to_string();
        assert!(error.contains(expected), "{error}");
    }
}
