//! Layered configuration: precedence, origins, short forms, errors, round trips.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail the test")]

use std::collections::BTreeMap;
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use voltaic::config::{Assignment, Layers, keys, schema_of};
use voltaic::error::ConfigError;

/// A whole run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Run {
    /// Seed of all random numbers.
    seed_everything: u64,
    /// The trainer.
    trainer: Trainer,
    /// Updates the parameters.
    optimizer: Option<Optimizer>,
    /// Where to go on from.
    ckpt_path: Option<PathBuf>,
    /// A name.
    name: String,
}

impl Default for Run {
    fn default() -> Self {
        Self {
            seed_everything: 0,
            trainer: Trainer::default(),
            optimizer: None,
            ckpt_path: None,
            name: "run".to_owned(),
        }
    }
}

/// Trainer's keys.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Trainer {
    /// Number of epochs.
    max_epochs: Option<u32>,
    /// Batches per epoch, as a count or a fraction.
    limit_train_batches: Limit,
    /// How gradients are clipped.
    gradient_clip_algorithm: ClipAlgorithm,
    /// Stops after one batch.
    fast_dev_run: bool,
    /// What watches the run.
    callbacks: Option<Vec<Callback>>,
    /// Sizes of something.
    sizes: Vec<usize>,
    /// Named weights.
    weights: BTreeMap<String, f64>,
    /// Both betas.
    betas: (f64, f64),
}

impl Default for Trainer {
    fn default() -> Self {
        Self {
            max_epochs: Some(10),
            limit_train_batches: Limit::Fraction(1.0),
            gradient_clip_algorithm: ClipAlgorithm::Norm,
            fast_dev_run: false,
            callbacks: None,
            sizes: vec![8, 16],
            weights: BTreeMap::new(),
            betas: (0.9, 0.999),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub(super) enum Limit {
    Count(u64),
    Fraction(f64),
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum ClipAlgorithm {
    Norm,
    Value,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "class_path", content = "init_args", deny_unknown_fields)]
pub(super) enum Optimizer {
    /// Adam with decoupled weight decay.
    AdamW(AdamW),
    /// Plain descent.
    #[serde(rename = "SGD")]
    Sgd(Sgd),
    /// Does nothing.
    Frozen,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct AdamW {
    /// Learning rate.
    lr: f64,
    /// Weight decay.
    weight_decay: f64,
}

impl Default for AdamW {
    fn default() -> Self {
        Self { lr: 1e-3, weight_decay: 1e-2 }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Sgd {
    /// Learning rate.
    lr: f64,
    /// Momentum.
    #[serde(default)]
    momentum: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "class_path", content = "init_args")]
pub(super) enum Callback {
    EarlyStopping(EarlyStopping),
    ModelCheckpoint(ModelCheckpoint),
}

// No `deny_unknown_fields`: a user will forget it, and must not lose a misspelt key for that.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub(super) struct EarlyStopping {
    /// Metric to watch.
    monitor: String,
    /// Checks without improvement before stopping.
    patience: usize,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub(super) struct ModelCheckpoint {
    /// How many checkpoints to keep.
    save_top_k: i64,
}

/// Layers of one case: YAML files `a.yaml`, `b.yaml`, ..., then variables, then options.
pub(super) fn layers(files: &[&str], env: &[(&str, &str)], options: &[&str]) -> Layers {
    let mut layers = Layers::of::<Run>();
    for (name, text) in ["a.yaml", "b.yaml", "c.yaml"].into_iter().zip(files) {
        layers.text(name, text);
    }
    layers.env(env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
    for option in options {
        layers.assign(&Assignment::parse(option));
    }
    layers
}

pub(super) fn tree(layers: &Layers) -> Value {
    layers.load::<Run>().unwrap_or_else(|error| panic!("{error}")).tree
}

pub(super) fn error(layers: &Layers) -> ConfigError {
    layers.load::<Run>().unwrap_err()
}

/// (reason, files, environment, command line, pointer, value there)
type Case<'a> = (&'a str, &'a [&'a str], &'a [(&'a str, &'a str)], &'a [&'a str], &'a str, Value);

fn check_cases(cases: &[Case<'_>]) {
    for (reason, files, env, options, pointer, expected) in cases {
        let tree = tree(&layers(files, env, options));
        assert_eq!(tree.pointer(pointer), Some(expected), "{reason}: {pointer} of {tree}");
    }
}

#[test]
fn later_layers_outrank_earlier_ones() {
    let epochs = "/trainer/max_epochs";
    check_cases(&[
        ("nothing set", &[], &[], &[], epochs, json!(10)),
        ("file over default", &["trainer: {max_epochs: 1}"], &[], &[], epochs, json!(1)),
        (
            "later file wins",
            &["trainer: {max_epochs: 1}", "trainer: {max_epochs: 2}"],
            &[],
            &[],
            epochs,
            json!(2),
        ),
        (
            "environment over files",
            &["trainer: {max_epochs: 1}"],
            &[("VOLTAIC_TRAINER__MAX_EPOCHS", "3")],
            &[],
            epochs,
            json!(3),
        ),
        (
            "command line over environment",
            &["trainer: {max_epochs: 1}"],
            &[("VOLTAIC_TRAINER__MAX_EPOCHS", "3")],
            &["trainer.max_epochs=4"],
            epochs,
            json!(4),
        ),
        ("last option wins", &[], &[], &["trainer.max_epochs=4", "trainer.max_epochs=5"], epochs, json!(5)),
        ("null outranks a default", &["trainer: {max_epochs: null}"], &[], &[], epochs, json!(null)),
        ("an empty section says nothing", &["trainer:"], &[], &[], epochs, json!(10)),
        ("an empty file says nothing", &["# only a comment\n"], &[], &[], epochs, json!(10)),
        (
            "a sibling stays",
            &["trainer: {max_epochs: 1}", "trainer: {fast_dev_run: true}"],
            &[],
            &[],
            epochs,
            json!(1),
        ),
        ("other variables are not keys", &[], &[("VOLTAIC_HPU_DEVICES", "4")], &[], epochs, json!(10)),
        ("a top-level variable", &[], &[("VOLTAIC_NAME", "x")], &[], "/name", json!("x")),
        ("a list is replaced", &["trainer: {sizes: [1]}"], &[], &[], "/trainer/sizes", json!([1])),
        (
            "a free mapping is merged by key",
            &["trainer: {weights: {a: 1, b: 2}}", "trainer: {weights: {b: 3}}"],
            &[],
            &["trainer.weights.c=4"],
            "/trainer/weights",
            json!({"a": 1, "b": 3, "c": 4}),
        ),
    ]);
}

#[test]
fn values_of_the_command_line_are_yaml() {
    check_cases(&[
        (
            "a fraction",
            &[],
            &[],
            &["trainer.limit_train_batches=0.5"],
            "/trainer/limit_train_batches",
            json!(0.5),
        ),
        ("a count", &[], &[], &["trainer.limit_train_batches=5"], "/trainer/limit_train_batches", json!(5)),
        ("a list", &[], &[], &["trainer.sizes=[1,2]"], "/trainer/sizes", json!([1, 2])),
        ("null", &[], &[], &["trainer.max_epochs=null"], "/trainer/max_epochs", json!(null)),
        ("true", &[], &[], &["trainer.fast_dev_run=true"], "/trainer/fast_dev_run", json!(true)),
        ("a switch alone", &[], &[], &["trainer.fast_dev_run"], "/trainer/fast_dev_run", json!(true)),
        ("text without quotes", &[], &[], &["ckpt_path=a/b c.ckpt"], "/ckpt_path", json!("a/b c.ckpt")),
        ("text with a colon", &[], &[], &["name=a: b"], "/name", json!("a: b")),
        ("text with equals", &[], &[], &["name=epoch=1"], "/name", json!("epoch=1")),
        ("quoted text", &[], &[], &["name='null'"], "/name", json!("null")),
        ("empty text", &[], &[], &["name="], "/name", json!("")),
        ("text in braces", &[], &[], &["name={epoch}-{loss:.2f}"], "/name", json!("{epoch}-{loss:.2f}")),
        ("text in brackets", &[], &[("VOLTAIC_NAME", "[a, b")], &[], "/name", json!("[a, b")),
        ("a path in brackets", &[], &[], &["ckpt_path=[1]/a.ckpt"], "/ckpt_path", json!("[1]/a.ckpt")),
        (
            "text in braces for an element of a list",
            &[],
            &[],
            &["trainer.callbacks=EarlyStopping", "trainer.callbacks.monitor={epoch}"],
            "/trainer/callbacks/0/init_args/monitor",
            json!("{epoch}"),
        ),
        ("a number where only text may stand", &[], &[], &["name=1.10"], "/name", json!("1.10")),
        ("the same in a file", &["name: 1.10"], &[], &[], "/name", json!("1.10")),
        (
            "all 64 bits",
            &["seed_everything: 18446744073709551615"],
            &[],
            &[],
            "/seed_everything",
            json!(u64::MAX),
        ),
        ("a section", &[], &[], &["trainer={max_epochs: 2}"], "/trainer/max_epochs", json!(2)),
    ]);
}

#[test]
fn a_leading_tilde_is_the_home_folder() {
    let home = std::env::var("HOME").unwrap();
    let at = |rest: &str| json!(format!("{home}/{rest}"));
    check_cases(&[
        ("an option", &[], &[], &["ckpt_path=~/a.ckpt"], "/ckpt_path", at("a.ckpt")),
        ("a file", &["ckpt_path: ~/a b.ckpt"], &[], &[], "/ckpt_path", at("a b.ckpt")),
        ("a variable", &[], &[("VOLTAIC_CKPT_PATH", "~/a.ckpt")], &[], "/ckpt_path", at("a.ckpt")),
        (
            "an argument in a list",
            &["trainer: {callbacks: [{class_path: EarlyStopping, monitor: ~/x}]}"],
            &[],
            &[],
            "/trainer/callbacks/0/init_args/monitor",
            at("x"),
        ),
        ("null in YAML", &["ckpt_path: ~"], &[], &[], "/ckpt_path", json!(null)),
        ("another user's folder", &[], &[], &["ckpt_path=~root/a"], "/ckpt_path", json!("~root/a")),
        ("within a path", &[], &[], &["ckpt_path=a/~/b"], "/ckpt_path", json!("a/~/b")),
    ]);
    let mut layers = Layers::of::<Run>();
    layers.file("~/no such file.yaml");
    assert_error!(layers.resolve(), &format!("cannot read {home}/no such"));
}

#[test]
fn classes_have_short_forms() {
    let adamw = |lr: f64, weight_decay: f64| json!({"class_path": "AdamW", "init_args": {"lr": lr, "weight_decay": weight_decay}});
    check_cases(&[
        ("a name alone", &["optimizer: AdamW"], &[], &[], "/optimizer", adamw(1e-3, 1e-2)),
        (
            "name, then argument",
            &[],
            &[],
            &["optimizer=AdamW", "optimizer.lr=0.01"],
            "/optimizer",
            adamw(0.01, 1e-2),
        ),
        (
            "argument with init_args",
            &["optimizer: AdamW"],
            &[],
            &["optimizer.init_args.lr=1"],
            "/optimizer/init_args/lr",
            json!(1),
        ),
        (
            "argument by variable",
            &["optimizer: AdamW"],
            &[("VOLTAIC_OPTIMIZER__LR", "0.5")],
            &[],
            "/optimizer",
            adamw(0.5, 1e-2),
        ),
        (
            "short form in a file",
            &["optimizer: {class_path: AdamW, lr: 0.2}"],
            &[],
            &[],
            "/optimizer",
            adamw(0.2, 1e-2),
        ),
        (
            "a Python path",
            &["optimizer: {class_path: torch.optim.AdamW}"],
            &[],
            &[],
            "/optimizer",
            adamw(1e-3, 1e-2),
        ),
    ]);
}

#[test]
fn another_class_starts_from_its_own_defaults() {
    let adamw = |lr: f64, weight_decay: f64| json!({"class_path": "AdamW", "init_args": {"lr": lr, "weight_decay": weight_decay}});
    check_cases(&[
        (
            "same class again keeps its arguments",
            &["optimizer: {class_path: AdamW, init_args: {lr: 0.2}}"],
            &[],
            &["optimizer=AdamW"],
            "/optimizer",
            adamw(0.2, 1e-2),
        ),
        (
            "another class starts from its defaults",
            &["optimizer: {class_path: SGD, init_args: {lr: 0.2, momentum: 0.9}}"],
            &[],
            &["optimizer=AdamW"],
            "/optimizer",
            adamw(1e-3, 1e-2),
        ),
        (
            "a class without arguments",
            &["optimizer: Frozen"],
            &[],
            &[],
            "/optimizer",
            json!({"class_path": "Frozen"}),
        ),
        (
            "empty arguments of such a class",
            &["optimizer: {class_path: Frozen, init_args: {}}"],
            &[],
            &[],
            "/optimizer",
            json!({"class_path": "Frozen"}),
        ),
        (
            "no optimizer after all",
            &["optimizer: AdamW"],
            &[],
            &["optimizer=null"],
            "/optimizer",
            json!(null),
        ),
    ]);
}

#[test]
fn lists_grow_and_their_last_element_takes_sub_keys() {
    let stopping = |monitor: &str| json!({"class_path": "EarlyStopping", "init_args": {"monitor": monitor, "patience": 0}});
    let keeping = |k: i64| json!({"class_path": "ModelCheckpoint", "init_args": {"save_top_k": k}});
    let file = "trainer: {callbacks: [{class_path: ModelCheckpoint, init_args: {save_top_k: 2}}]}";
    let callbacks = "/trainer/callbacks";
    check_cases(&[
        (
            "append to nothing",
            &[],
            &[],
            &["trainer.callbacks+={class_path: EarlyStopping}"],
            callbacks,
            json!([stopping("")]),
        ),
        (
            "append to a file's list",
            &[file],
            &[],
            &["trainer.callbacks+=EarlyStopping", "trainer.callbacks.monitor=val_loss"],
            callbacks,
            json!([keeping(2), stopping("val_loss")]),
        ),
        (
            "one name is a list of one",
            &[],
            &[],
            &["trainer.callbacks=EarlyStopping", "trainer.callbacks.monitor=x"],
            callbacks,
            json!([stopping("x")]),
        ),
        (
            "one mapping replaces the list",
            &[file],
            &[],
            &["trainer.callbacks={class_path: EarlyStopping}"],
            callbacks,
            json!([stopping("")]),
        ),
        (
            "an element by number",
            &[file],
            &[],
            &["trainer.callbacks.0.save_top_k=7"],
            callbacks,
            json!([keeping(7)]),
        ),
        (
            "append in a file",
            &[file, "trainer: {callbacks+: [EarlyStopping]}"],
            &[],
            &[],
            callbacks,
            json!([keeping(2), stopping("")]),
        ),
        ("append to a default", &[], &[], &["trainer.sizes+=32"], "/trainer/sizes", json!([8, 16, 32])),
        ("append a list", &[], &[], &["trainer.sizes+=[32,64]"], "/trainer/sizes", json!([8, 16, 32, 64])),
    ]);
}

#[test]
fn each_leaf_knows_where_it_was_set() {
    let layers = layers(
        &[
            "seed_everything: 1\ntrainer:\n  max_epochs: 2\n  weights:\n    a: 1.5\n",
            "\n\noptimizer: AdamW\n",
        ],
        &[("VOLTAIC_TRAINER__FAST_DEV_RUN", "true")],
        &["trainer.sizes=[1, 2]"],
    );
    let origins = layers.load::<Run>().unwrap().origins;
    for (key, expected) in [
        ("seed_everything", "a.yaml:1"),
        ("trainer.max_epochs", "a.yaml:3"),
        ("trainer.weights.a", "a.yaml:5"),
        ("optimizer.class_path", "b.yaml:3"),
        ("optimizer.init_args.lr", "default"),
        ("trainer.fast_dev_run", "VOLTAIC_TRAINER__FAST_DEV_RUN"),
        ("trainer.sizes.1", "command line"),
        ("ckpt_path", "default"),
    ] {
        assert_eq!(origins.get(key).map(ToString::to_string).as_deref(), Some(expected), "{key}");
    }
    assert_eq!(origins.get("trainer"), None, "a section has no origin");
}

#[test]
fn a_change_of_class_says_which_arguments_it_drops() {
    let file = "optimizer: {class_path: SGD, init_args: {lr: 0.2, momentum: 0.9}}";
    let notes = layers(&[file], &[], &["optimizer=AdamW"]).resolve().unwrap().notes;
    assert_eq!(notes.len(), 1, "{notes:?}");
    for part in ["optimizer is now AdamW", "SGD", "lr (from a.yaml:1)", "momentum (from a.yaml:1)"] {
        assert!(notes[0].contains(part), "{part} in {}", notes[0]);
    }
    let kept = layers(&[], &[], &["optimizer=SGD", "optimizer.lr=0.5", "optimizer=AdamW"]);
    assert_eq!(
        tree(&kept)["optimizer"]["init_args"]["lr"],
        json!(0.5),
        "options of one command line stay together"
    );
}

/// A class and keys beside it, as a schedule with its interval.
#[derive(Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
struct Schedule {
    #[serde(flatten)]
    optimizer: Optimizer,
    /// When it is stepped.
    #[serde(default)]
    interval: Interval,
}

#[derive(Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Interval {
    #[default]
    Epoch,
    Step,
}

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct WithSchedule {
    /// The schedule.
    schedule: Option<Schedule>,
}

#[test]
fn keys_may_stand_beside_a_class() {
    let layers = |file: &str, options: &[&str]| {
        let mut layers = Layers::of::<WithSchedule>();
        layers.text("a.yaml", file);
        for option in options {
            layers.assign(&Assignment::parse(option));
        }
        layers
    };
    let expected = json!({
        "class_path": "SGD",
        "init_args": {"lr": 0.5, "momentum": 0.0},
        "interval": "step",
    });
    let file = "schedule: {class_path: SGD, init_args: {lr: 0.5}, interval: step}";
    // (reason, file, options)
    for (reason, file, options) in [
        ("all in a file", file, vec![]),
        ("all as options", "", vec!["schedule=SGD", "schedule.interval=step", "schedule.lr=0.5"]),
        ("short in a file", "schedule: {class_path: SGD, interval: step, lr: 0.5}", vec![]),
        ("mixed", "schedule: {class_path: SGD, lr: 1}", vec!["schedule.lr=0.5", "schedule.interval=step"]),
    ] {
        let loaded =
            layers(file, &options).load::<WithSchedule>().unwrap_or_else(|error| panic!("{reason}: {error}"));
        assert_eq!(loaded.tree["schedule"], expected, "{reason}");
        assert_eq!(loaded.value.schedule.map(|schedule| schedule.interval), Some(Interval::Step), "{reason}");
    }
    let error = layers(file, &["schedule.interval=stp"]).resolve().unwrap_err().to_string();
    assert_eq!(
        error,
        "schedule.interval (from command line): `stp` is not one of the values; did you mean `step`"
    );
    let keys: Vec<String> = keys(&schema_of::<WithSchedule>()).into_iter().map(|key| key.key).collect();
    assert!(keys.contains(&"schedule.interval".to_owned()), "{keys:?}");
}
