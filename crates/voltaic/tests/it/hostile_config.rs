//! Configurations that nest without end or have no end of keys.

use serde::{Deserialize, Serialize};
use voltaic::config::{Assignment, Layers};

#[derive(Debug, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct Run {
    max_epochs: usize,
    /// Anything.
    extra: serde_json::Value,
}

impl Default for Run {
    fn default() -> Self {
        Self { max_epochs: 1, extra: serde_json::Value::Null }
    }
}

fn problems(yaml: &str) -> Vec<String> {
    let mut layers = Layers::of::<Run>();
    layers.text("run.yaml", yaml);
    match layers.load::<Run>() {
        Ok(_) => Vec::new(),
        Err(error) => error.problems.iter().map(ToString::to_string).collect(),
    }
}

#[test]
fn what_nests_too_deep_is_refused() {
    let chain = |count: usize| {
        let links: String = (1..count).map(|i| format!("- &a{i} [*a{}]\n", i - 1)).collect();
        format!("extra:\n- &a0 [1]\n{links}")
    };
    let nested: Vec<String> = (0..20_000).map(|depth| format!("{}k:\n", " ".repeat(depth % 200))).collect();
    for text in [
        format!("extra: {}", "- ".repeat(20_000)),
        format!("extra:\n  {}", "- ".repeat(20_000)),
        "? ".repeat(20_000),
        format!("extra:\n  {}", "? ".repeat(20_000)),
        format!("extra: {}1{}", "[".repeat(20_000), "]".repeat(20_000)),
        format!("extra: {}1{}", "{a: ".repeat(20_000), "}".repeat(20_000)),
        chain(20_000),
        nested.concat(),
    ] {
        let found = problems(&text);
        assert!(found.len() == 1 && found[0].contains("run.yaml:"), "{found:?}");
    }
    assert_eq!(problems(&format!("extra:\n  {}1", "- ".repeat(60))), [""; 0]);
    assert_eq!(problems(&chain(50)), [""; 0]);
    assert!(problems(&chain(70))[0].contains("nested deeper than 64"));
}

#[test]
fn a_key_of_many_parts_is_refused() {
    for key in [vec!["extra"; 10_000].join("."), vec!["0"; 10_000].join("."), ".".repeat(10_000)] {
        let mut layers = Layers::of::<Run>();
        layers.assign(&Assignment::parse(&format!("{key}=1")));
        let error = layers.load::<Run>().unwrap_err().to_string();
        assert!(error.contains("no key has more than 64") || error.contains("is not a key"), "{error:.200}");
        let mut layers = Layers::of::<Run>();
        layers.env([(format!("VOLTAIC_{}", key.replace('.', "__")), "1".to_owned())]);
        assert!(layers.load::<Run>().is_err());
    }
}

#[test]
fn of_many_unknown_keys_the_first_are_named_and_the_rest_counted() {
    let text: String = (0..50_000).map(|i| format!("max_epoch{i}: {i} # ä\n")).collect();
    let found = problems(&text);
    assert_eq!(found.len(), 11);
    assert!(
        found[0].contains("run.yaml:1") && found[0].contains("unknown key; did you mean max_epochs"),
        "{}",
        found[0]
    );
    assert!(found[9].contains("max_epoch9 "), "{}", found[9]);
    assert!(found[10].contains("max_epoch10: 49990 more unknown keys"), "{}", found[10]);
    // keys that may stand there
    let text: String = (0..50_000).map(|i| format!("  k{i}: {i}\n")).collect();
    assert_eq!(problems(&format!("extra:\n{text}")), [""; 0]);
    let twice = format!("extra:\n{text}  k7: 1\n");
    assert!(problems(&twice)[0].contains("run.yaml:"), "given twice");
}

#[test]
fn a_file_without_end_is_refused() {
    let mut layers = Layers::of::<Run>();
    layers.file("/dev/zero");
    let error = layers.load::<Run>().unwrap_err().to_string();
    assert!(error.contains("it has more than 16777216 bytes"), "{error}");
}
