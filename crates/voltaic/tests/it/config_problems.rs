//! What configuration says of mistakes.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail the test")]

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use voltaic::config::Layers;

use crate::config::{Run, error, layers};
use crate::probe::voltaic;

/// (reason, files, options, the problem as printed)
type Problem = (&'static str, &'static [&'static str], &'static [&'static str], &'static str);

const PROBLEMS: &[Problem] = &[
    ("top level", &["nmae: x"], &[], "nmae (from a.yaml:1): unknown key; did you mean name"),
    (
        "second level",
        &["\ntrainer:\n  max_epoch: 3"],
        &[],
        "trainer.max_epoch (from a.yaml:3): unknown key; did you mean trainer.max_epochs",
    ),
    (
        "part of a name",
        &[],
        &["trainer.epochs=3"],
        "trainer.epochs (from command line): unknown key; did you mean trainer.max_epochs",
    ),
    (
        "dashes",
        &[],
        &["trainer.max-epochs=3"],
        "trainer.max-epochs (from command line): unknown key; did you mean trainer.max_epochs",
    ),
    (
        "wrong section",
        &[],
        &["max_epochs=3"],
        "max_epochs (from command line): unknown key; did you mean trainer.max_epochs",
    ),
    (
        "argument in a file",
        &["optimizer:\n  class_path: AdamW\n  init_args:\n    lrr: 1"],
        &[],
        "optimizer.init_args.lrr (from a.yaml:4): unknown key; did you mean optimizer.init_args.lr",
    ),
    (
        "argument as option",
        &[],
        &["optimizer=AdamW", "optimizer.weight_deca=1"],
        "optimizer.weight_deca (from command line): unknown key; did you mean optimizer.weight_decay",
    ),
    (
        "in a list",
        &["trainer:\n  callbacks:\n  - class_path: EarlyStopping\n    init_args:\n      monitr: x"],
        &[],
        "trainer.callbacks.0.init_args.monitr (from a.yaml:5): unknown key; did you mean trainer.callbacks.0.init_args.monitor",
    ),
    (
        "nothing alike",
        &[],
        &["zzz=3"],
        "zzz (from command line): unknown key; the keys here are seed_everything, trainer, optimizer, ckpt_path, name",
    ),
    (
        "misspelt variable",
        &[],
        &[],
        "tranier (from VOLTAIC_TRANIER__MAX_EPOCHS): unknown key; did you mean trainer",
    ),
    (
        "text for a number",
        &["trainer: {max_epochs: abc}"],
        &[],
        "trainer.max_epochs (from a.yaml:1): `abc` is text; give an integer of at least 0 or null",
    ),
    (
        "quoted number",
        &["trainer: {max_epochs: '3'}"],
        &[],
        "trainer.max_epochs (from a.yaml:1): `3` is text; remove the quotes to give an integer of at least 0 or null",
    ),
    (
        "fraction for a count",
        &[],
        &["trainer.max_epochs=2.5"],
        "trainer.max_epochs (from command line): `2.5` is a number with a fraction; give an integer of at least 0 or null",
    ),
    (
        "below the range",
        &[],
        &["trainer.max_epochs=-1"],
        "trainer.max_epochs (from command line): `-1` is outside the range; give an integer of at least 0 or null",
    ),
    (
        "not among the choices",
        &[],
        &["trainer.gradient_clip_algorithm=nrm"],
        "trainer.gradient_clip_algorithm (from command line): `nrm` is not one of the values; did you mean `norm`",
    ),
    (
        "number among choices",
        &[],
        &["trainer.gradient_clip_algorithm=3"],
        "trainer.gradient_clip_algorithm (from command line): `3` is an integer; give one of `norm`, `value`",
    ),
    (
        "list for a scalar",
        &[],
        &["trainer.fast_dev_run=[1]"],
        "trainer.fast_dev_run (from command line): `[1]` is a list; give true or false",
    ),
    (
        "scalar for a section",
        &["trainer: 3"],
        &[],
        "trainer (from a.yaml:1): `3` is an integer; give a mapping",
    ),
    (
        "element of a list",
        &[],
        &["trainer.sizes=[1,x]"],
        "trainer.sizes.1 (from command line): `x` is text; give an integer of at least 0",
    ),
    (
        "length of a pair",
        &[],
        &["trainer.betas=[0.9]"],
        "trainer.betas (from command line): `[0.9]` has 1 elements; give a list of 2 elements, each a number",
    ),
    (
        "value of a free mapping",
        &[],
        &["trainer.weights.a=x"],
        "trainer.weights.a (from command line): `x` is text; give a number",
    ),
    ("null where it may not be", &[], &["name=null"], "name (from command line): `null` is null; give text"),
    (
        "unknown class",
        &["optimizer: Adamw2"],
        &[],
        "optimizer (from a.yaml:1): `Adamw2` is not a known class; did you mean AdamW",
    ),
    (
        "argument without a class",
        &[],
        &["optimizer.lr=1"],
        "optimizer.lr (from command line): no class is chosen for optimizer; write --optimizer=NAME before it; the classes are AdamW, SGD, Frozen",
    ),
    (
        "missing argument",
        &["optimizer: SGD"],
        &[],
        "optimizer.init_args.lr: this key is missing and has no default; give a number, in a file or with --optimizer.lr=VALUE",
    ),
    (
        "argument of a class without any",
        &["optimizer: {class_path: Frozen, init_args: {lr: 1}}"],
        &[],
        "optimizer.init_args (from a.yaml:1): this class takes no arguments; remove them",
    ),
    (
        "key of another class",
        &["optimizer: {class_path: AdamW, init_args: {momentum: 1}}"],
        &[],
        "optimizer.init_args.momentum (from a.yaml:1): unknown key; the keys here are lr, weight_decay",
    ),
    (
        "no value",
        &[],
        &["trainer.max_epochs"],
        "trainer.max_epochs (from command line): no value is given; write --trainer.max_epochs=VALUE",
    ),
    (
        "no element",
        &[],
        &["trainer.callbacks.monitor=x"],
        "trainer.callbacks.monitor (from command line): trainer.callbacks has no element yet; write --trainer.callbacks+=VALUE before it",
    ),
    (
        "element out of range",
        &[],
        &["trainer.sizes.5=1"],
        "trainer.sizes.5 (from command line): trainer.sizes has no element 5: it has 2; count from 0, or add one with --trainer.sizes+=VALUE",
    ),
    ("broken flow", &[], &["trainer.sizes=[1,"], "trainer.sizes"),
    (
        "infinity",
        &["trainer: {limit_train_batches: .inf}"],
        &[],
        "YAML (from a.yaml:1): `.inf` is not a finite number; give a finite number, or null for no limit",
    ),
    (
        "twice",
        &["name: a\nname: b"],
        &[],
        "YAML (from a.yaml:2:1): duplicated key in mapping; fix the YAML there",
    ),
    (
        "second document",
        &["name: a\n---\nname: b"],
        &[],
        "YAML (from a.yaml:3): a second document begins; keep one document per file",
    ),
    (
        "a list on top",
        &["- name"],
        &[],
        "YAML (from a.yaml:1): the top level is not a mapping; write `key: value` lines",
    ),
    ("syntax", &["trainer:\n  max_epochs: [1, 2\nname: x"], &[], "YAML (from a.yaml:3:"),
    ("a tag", &["name: !Foo bar"], &[], "YAML (from a.yaml:1): tag `!Foo` has no meaning here; remove it"),
];

#[test]
fn problems_name_key_origin_value_and_way_out() {
    for (reason, files, options, expected) in PROBLEMS {
        let env: &[(&str, &str)] =
            if *reason == "misspelt variable" { &[("VOLTAIC_TRANIER__MAX_EPOCHS", "3")] } else { &[] };
        let text = error(&layers(files, env, options)).to_string();
        assert!(text.starts_with(expected), "{reason}:\n  expected {expected}\n  found    {text}");
        assert!(text.contains("; "), "{reason}: no remedy in {text}");
    }
}

#[test]
fn all_problems_are_reported_together() {
    let layers = layers(
        &["trainer:\n  max_epoch: 3\n  fast_dev_run: perhaps\nnmae: x\n"],
        &[("VOLTAIC_TRAINER__SIZES", "many")],
        &["optimizer=Adam", "ckpt=1"],
    );
    let found: Vec<String> = error(&layers).problems.iter().map(|problem| problem.key.clone()).collect();
    let mut sorted = found.clone();
    sorted.sort();
    assert_eq!(
        sorted,
        ["ckpt", "nmae", "optimizer", "trainer.fast_dev_run", "trainer.max_epoch", "trainer.sizes"],
        "{found:?}"
    );
}

#[test]
fn an_unknown_class_does_not_hide_what_is_wrong_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.yaml");
    let text = "trainer:
  accelerator: cpu
  callbacks:
  - class_path: EarlyStoping
    init_args: {monitor: x}
  - class_path: ModelCheckpoint
    init_args:
      save_top_k: -3
  - {class_path: Timer, init_args: {duration: an hour}}
  max_epochs: -5
model: Mlp
data: MnistData
";
    std::fs::write(&file, text).unwrap();
    let shown = file.display();
    let (code, printed) = voltaic(&["fit", "--config", file.to_str().unwrap()], &[]);
    assert_eq!(code, Some(2), "{printed}");
    for expected in [
        format!("error: trainer.callbacks.0 (from {shown}:4): `EarlyStoping` is not a known class"),
        format!("error: trainer.callbacks.1.init_args.save_top_k (from {shown}:8): -3 is below -1"),
        format!("error: trainer.callbacks.2.init_args.duration (from {shown}:9): "),
        format!("error: trainer.max_epochs (from {shown}:10): -5 is below -1"),
    ] {
        assert!(printed.contains(&expected), "{expected}\n{printed}");
    }
    assert_eq!(printed.lines().count(), 4, "{printed}");
}

#[test]
fn a_class_without_a_key_that_it_needs_does_not_hide_what_is_wrong_beside_it() {
    let sequence = r#"--lr_scheduler.schedulers=[{"class_path": "StepLR"}, {"class_path": "StepLR"}]"#;
    for (schedule, expected) in [
        (&["--lr_scheduler=StepLR"][..], "lr_scheduler.init_args.step_size: this key is missing"),
        (
            &["--lr_scheduler=CosineAnnealingLR", "--lr_scheduler.T_max=x"],
            "lr_scheduler.T_max (from command line): `x` is text",
        ),
        (
            &["--lr_scheduler=SequentialLR", "--lr_scheduler.milestones=[1]", sequence],
            "lr_scheduler.init_args.schedulers.1.init_args.step_size: this key is missing",
        ),
    ] {
        let wrong =
            ["--optimizer=SGD", "--optimizer.lr=-1", "--trainer.max_epochs=-5", "--trainer.accelerator=cpu"];
        let callbacks = [
            "--trainer.callbacks+=Timer",
            "--trainer.callbacks.duration=an hour",
            "--trainer.callbacks+=ModelCheckpoint",
            "--trainer.callbacks.save_top_k=-3",
        ];
        let (code, printed) = voltaic(
            &[&["fit", "--model=Mlp", "--data=MnistData"], schedule, &wrong, &callbacks].concat(),
            &[],
        );
        assert_eq!(code, Some(2), "{printed}");
        for expected in [
            expected,
            "trainer.callbacks.1.save_top_k (from command line): -3 is below -1",
            "trainer.max_epochs (from command line): -5 is below -1",
            "optimizer.lr (from command line): -1 is not a finite number",
        ] {
            assert!(printed.contains(&format!("error: {expected}")), "{expected}\n{printed}");
        }
    }
}

#[test]
fn unreadable_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("mnist.yaml"), "name: x\n").unwrap();
    std::fs::write(folder.path().join("latin.yaml"), b"name: \xe9\n").unwrap();
    let mut layers = Layers::of::<Run>();
    layers.file(folder.path().join("mnits.yaml"));
    layers.file(folder.path().join("latin.yaml"));
    let error = layers.resolve().unwrap_err();
    assert_eq!(error.problems.len(), 2, "{error}");
    assert!(
        error.problems[0].problem.what.contains("cannot read")
            && error.problems[0].problem.what.contains("mnits.yaml")
    );
    assert!(error.problems[0].problem.remedy.ends_with("mnist.yaml"), "{error}");
    assert!(error.problems[1].problem.what.contains("not UTF-8 text at byte 6"), "{error}");
}

#[test]
fn what_serde_alone_refuses_names_its_key() {
    /// A key whose type has rules of its own.
    #[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
    #[serde(default)]
    struct Even {
        /// An even number.
        #[serde(deserialize_with = "even")]
        count: u64,
    }
    fn even<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        let number = u64::deserialize(deserializer)?;
        let error = || serde::de::Error::custom(format!("{number} is odd"));
        if number % 2 == 0 { Ok(number) } else { Err(error()) }
    }
    let mut layers = Layers::of::<Even>();
    layers.text("a.yaml", "\ncount: 3");
    let error = layers.load::<Even>().unwrap_err().to_string();
    assert_eq!(error, "count (from a.yaml:2): 3 is odd; give a value that it accepts");
}
