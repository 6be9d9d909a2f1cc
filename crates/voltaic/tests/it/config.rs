//! Layered configuration: precedence, origins, short forms, errors, round trips.

use std::collections::BTreeMap;
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use voltaic::config::{Assignment, Layers, PrintConfig, faults, keys, schema_of, to_yaml};
use voltaic::error::ConfigError;

/// A whole run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct Run {
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
struct Trainer {
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
enum Limit {
    Count(u64),
    Fraction(f64),
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum ClipAlgorithm {
    Norm,
    Value,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "class_path", content = "init_args", deny_unknown_fields)]
enum Optimizer {
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
struct AdamW {
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
struct Sgd {
    /// Learning rate.
    lr: f64,
    /// Momentum.
    #[serde(default)]
    momentum: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "class_path", content = "init_args")]
enum Callback {
    EarlyStopping(EarlyStopping),
    ModelCheckpoint(ModelCheckpoint),
}

// No `deny_unknown_fields`: a user will forget it, and must not lose a misspelt key for that.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct EarlyStopping {
    /// Metric to watch.
    monitor: String,
    /// Checks without improvement before stopping.
    patience: usize,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct ModelCheckpoint {
    /// How many checkpoints to keep.
    save_top_k: i64,
}

/// Layers of one case: YAML files `a.yaml`, `b.yaml`, ..., then variables, then options.
fn layers(files: &[&str], env: &[(&str, &str)], options: &[&str]) -> Layers {
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

fn tree(layers: &Layers) -> Value {
    layers.load::<Run>().unwrap_or_else(|error| panic!("{error}")).tree
}

fn error(layers: &Layers) -> ConfigError {
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
    let notes = layers(&[file], &[], &["optimizer=AdamW"]).settle().unwrap().notes;
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

#[test]
fn problems_name_key_origin_value_and_way_out() {
    // (reason, files, options, the problem as printed)
    let cases: &[(&str, &[&str], &[&str], &str)] = &[
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
        (
            "null where it may not be",
            &[],
            &["name=null"],
            "name (from command line): `null` is null; give text",
        ),
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
            "YAML (from a.yaml:2:1): duplicated key in mapping; mend the YAML there",
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
            "YAML (from a.yaml:1): the top level is no mapping; write `key: value` lines",
        ),
        ("syntax", &["trainer:\n  max_epochs: [1, 2\nname: x"], &[], "YAML (from a.yaml:3:"),
        (
            "a tag",
            &["name: !Foo bar"],
            &[],
            "YAML (from a.yaml:1): tag `!Foo` has no meaning here; remove it",
        ),
    ];
    for (reason, files, options, expected) in cases {
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
fn unreadable_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("mnist.yaml"), "name: x\n").unwrap();
    std::fs::write(folder.path().join("latin.yaml"), b"name: \xe9\n").unwrap();
    let mut layers = Layers::of::<Run>();
    layers.file(folder.path().join("mnits.yaml"));
    layers.file(folder.path().join("latin.yaml"));
    let error = layers.settle().unwrap_err();
    assert_eq!(error.problems.len(), 2, "{error}");
    assert!(error.problems[0].what.contains("cannot read") && error.problems[0].what.contains("mnits.yaml"));
    assert!(error.problems[0].remedy.ends_with("mnist.yaml"), "{error}");
    assert!(error.problems[1].what.contains("not UTF-8 text at byte 6"), "{error}");
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

#[test]
fn printed_configurations_read_back_the_same() {
    let rich = layers(
        &[
            "name: 'yes'\ntrainer: {weights: {'1e3': 1e-8, b: 1e300, c: 2.5}, callbacks: [EarlyStopping, ModelCheckpoint]}",
        ],
        &[],
        &["optimizer=SGD", "optimizer.lr=1e-3", "ckpt_path=null", "trainer.callbacks.0.monitor=a: b # c"],
    );
    let before = rich.load::<Run>().unwrap();
    for words in ["", "skip_default", "comments", "skip_default,comments"] {
        let text = rich.print_config(PrintConfig::parse(words).unwrap()).unwrap();
        let mut again = Layers::of::<Run>();
        again.text("printed.yaml", &text);
        let after = again.load::<Run>().unwrap_or_else(|error| panic!("{words}: {error}\n{text}"));
        assert_eq!(after.value, before.value, "{words}:\n{text}");
        assert_eq!(after.tree, before.tree, "{words}:\n{text}");
    }
}

#[test]
fn strings_that_look_like_something_else_are_quoted() {
    for text in [
        "",
        " ",
        "1",
        "1.0",
        "1e-3",
        "-1",
        "+1",
        "0x10",
        "0b1",
        "1_000",
        "true",
        "Null",
        "~",
        "yes",
        "off",
        ".inf",
        "nan",
        "a: b",
        "a #b",
        "- a",
        "[a]",
        "{a}",
        "&a",
        "*a",
        "!a",
        "%a",
        "@a",
        "`a`",
        "a\nb",
        "a\tb",
        "\"",
        "'",
        "\\",
        "a ",
        " a",
        "12:30:00",
        "é",
        "\u{1F600}",
        "\u{7}",
        "?",
        ":",
        "---",
        "...",
        "a: ",
        "2001-01-01",
        "inf",
        "infinity",
        "=",
        "<<",
    ] {
        let value = json!({"name": text, "list": [text], text: {"deep": [[text], {"k": text}]}});
        let yaml = to_yaml(&value);
        let mut layers = Layers::new(json!(true));
        layers.text("x.yaml", &yaml);
        let read = layers.settle().unwrap_or_else(|error| panic!("{text:?}: {error}\n{yaml}")).tree;
        assert_eq!(read, value, "{text:?}:\n{yaml}");
    }
}

#[test]
fn what_yaml_1_1_would_read_otherwise_is_quoted() {
    // (text, its form): most other YAML readers still follow version 1.1.
    for (text, expected) in [
        (
            "2001-01-01",
            "\"2001-01-01\"
",
        ),
        (
            "yes", "\"yes\"
",
        ),
        (
            "1_000",
            "\"1_000\"
",
        ),
        (
            "12:30:00",
            "\"12:30:00\"
",
        ),
        (
            "32-true", "32-true
",
        ),
        (
            "bf16-mixed",
            "bf16-mixed
",
        ),
        (
            "recipes/mnist.yaml",
            "recipes/mnist.yaml
",
        ),
    ] {
        assert_eq!(to_yaml(&json!(text)), expected);
    }
    assert_eq!(
        to_yaml(&json!(1e-8)),
        "1.0e-8
"
    );
    assert_eq!(
        to_yaml(&json!(1.5e300)),
        "1.5e+300
"
    );
}

#[test]
fn a_short_print_holds_only_what_was_changed() {
    let print = PrintConfig::parse("skip_default").unwrap();
    assert_eq!(layers(&[], &[], &[]).print_config(print).unwrap(), "{}\n");
    let changed =
        layers(&[], &[], &["trainer.max_epochs=3", "optimizer=AdamW", "trainer.fast_dev_run=false"]);
    assert_eq!(
        changed.print_config(print).unwrap(),
        "trainer:\n  max_epochs: 3\noptimizer:\n  class_path: AdamW\n"
    );
}

#[test]
fn comments_are_the_descriptions() {
    let print = PrintConfig::parse("comments,skip_default").unwrap();
    let text = layers(&[], &[], &["trainer.max_epochs=3", "optimizer=SGD", "optimizer.lr=1"])
        .print_config(print)
        .unwrap();
    assert_eq!(
        text,
        "# The trainer.\ntrainer:\n  # Number of epochs.\n  max_epochs: 3\n# Updates the parameters.\noptimizer:\n  \
         class_path: SGD\n  init_args:\n    # Learning rate.\n    lr: 1\n"
    );
    assert!(PrintConfig::parse("skip_defaults").unwrap_err().to_string().contains("skip_default"));
}

#[test]
fn keys_of_a_schema_are_listed_with_their_defaults() {
    let keys = keys(&schema_of::<Run>());
    let found: Vec<String> = keys
        .iter()
        .map(|key| {
            let class = key.class.as_ref().map(|class| format!(" of {class}")).unwrap_or_default();
            let default = key.default.as_ref().map_or_else(|| "required".to_owned(), ToString::to_string);
            format!("{}{class} = {default}", key.key)
        })
        .collect();
    assert_eq!(
        found,
        [
            "seed_everything = 0",
            "trainer.max_epochs = 10",
            "trainer.limit_train_batches = 1.0",
            "trainer.gradient_clip_algorithm = \"norm\"",
            "trainer.fast_dev_run = false",
            "trainer.callbacks = null",
            "trainer.callbacks.monitor of EarlyStopping = \"\"",
            "trainer.callbacks.patience of EarlyStopping = 0",
            "trainer.callbacks.save_top_k of ModelCheckpoint = 0",
            "trainer.sizes = [8,16]",
            "trainer.weights = {}",
            "trainer.betas = [0.9,0.999]",
            "optimizer = null",
            "optimizer.lr of AdamW = 0.001",
            "optimizer.weight_decay of AdamW = 0.01",
            "optimizer.lr of SGD = required",
            "optimizer.momentum of SGD = 0.0",
            "ckpt_path = null",
            "name = \"run\"",
        ]
    );
}

#[test]
fn faults_are_missing_descriptions_and_invalid_defaults() {
    assert_eq!(faults(&schema_of::<Run>()), Vec::<String>::new());

    #[derive(Default, Serialize, Deserialize, JsonSchema)]
    #[serde(default)]
    struct Faulty {
        undescribed: u32,
        /// Its default lies outside its range.
        #[schemars(range(min = 1))]
        count: u32,
    }
    let found = faults(&schema_of::<Faulty>());
    assert_eq!(found.len(), 2, "{found:?}");
    assert_eq!(found[0], "undescribed has no description");
    assert!(found[1].starts_with("default of count: `0` is outside the range"), "{found:?}");
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
    let error = layers(file, &["schedule.interval=stp"]).settle().unwrap_err().to_string();
    assert_eq!(
        error,
        "schedule.interval (from command line): `stp` is not one of the values; did you mean `step`"
    );
    let keys: Vec<String> = keys(&schema_of::<WithSchedule>()).into_iter().map(|key| key.key).collect();
    assert!(keys.contains(&"schedule.interval".to_owned()), "{keys:?}");
}

#[test]
fn the_library_describes_each_key_and_its_defaults_are_valid() {
    use voltaic::optim::{LrSchedulerConfig, OptimizerConfig};
    use voltaic::trainer::TrainerConfig;

    for schema in
        [schema_of::<TrainerConfig>(), schema_of::<OptimizerConfig>(), schema_of::<LrSchedulerConfig>()]
    {
        assert_eq!(faults(&schema), Vec::<String>::new());
        assert!(!keys(&schema).is_empty());
    }
}
