//! Configuration as text: YAML that reads back, lists of keys.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail the test")]

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use voltaic::config::{Layers, PrintConfig, faults, keys, schema_of, to_yaml};

use crate::config::{Run, layers};

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
        let read = layers.resolve().unwrap_or_else(|error| panic!("{text:?}: {error}\n{yaml}")).tree;
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
