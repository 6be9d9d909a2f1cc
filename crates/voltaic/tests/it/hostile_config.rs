//! Configurations that nest without end or have no end of keys.

use serde::{Deserialize, Serialize};
use voltaic::config::{Assignment, Layers};

#[derive(Debug, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct Run {
    max_epochs: usize,
    /// Numbers.
    sizes: Vec<usize>,
    /// Anything.
    extra: serde_json::Value,
}

impl Default for Run {
    fn default() -> Self {
        Self { max_epochs: 1, sizes: Vec::new(), extra: serde_json::Value::Null }
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
fn of_many_wrong_elements_the_first_are_named_and_the_rest_counted() {
    let found = problems(&format!("sizes: [{}]", "x,".repeat(100_000)));
    assert_eq!(found.len(), 51);
    assert!(found[0].starts_with("sizes.0 (from run.yaml:1): `x` is text"), "{}", found[0]);
    assert!(found[50].starts_with("sizes.50: 99950 more problems"), "{}", found[50]);
    let classes = format!("trainer: {{callbacks: [{}]}}", "x,".repeat(100_000));
    let found = crate::config::error(&crate::config::layers(&[&classes], &[], &[])).problems;
    assert!(found.len() < 60, "{}", found.len());
    let expected =
        "trainer.callbacks (from a.yaml:1): it has 100000 elements, more than 1000; give fewer classes";
    assert_eq!(found[0].to_string(), expected);
}

#[test]
fn long_keys_and_control_characters_are_shown_harmlessly() {
    let long = "k".repeat(1 << 20);
    for text in [format!("{long}: 1"), format!("? {long}\n: 1"), format!("max_epochs: {long}")] {
        let found = problems(&text);
        assert!(found.len() == 1 && found[0].len() < 600, "{:.600}", found[0]);
    }
    let mut layers = Layers::of::<Run>();
    layers.assign(&Assignment::parse(&format!("{long}=1")));
    layers.assign(&Assignment::parse(&long));
    let text = layers.load::<Run>().unwrap_err().to_string();
    assert!(text.len() < 1500 && text.contains("kkk... (1048576 bytes) (from command line)"), "{text:.600}");
    let found = problems("\"max\\e]0;owned\\a\": 1\nmax_epochs: \"\\e[2J\"");
    assert!(found[1].starts_with(r"max\u{1b}]0;owned\u{7} (from run.yaml:1): unknown key"), "{found:?}");
    assert!(found[0].contains(r"`\u{1b}[2J` is text"), "{found:?}");
}

#[test]
fn a_file_without_end_is_refused() {
    let mut layers = Layers::of::<Run>();
    layers.file("/dev/zero");
    assert_error!(layers.load::<Run>(), "cannot read /dev/zero: it is a device or socket, not a file");
}
