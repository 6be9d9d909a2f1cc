//! YAML, and keys of the command line and the environment.

use std::collections::BTreeMap;

use rand::RngExt;
use serde::{Deserialize, Serialize};
use voltaic::config::{Assignment, Layers, schema_of};

use crate::mutate::{mutated, of_words};
use crate::stress;

#[derive(Debug, Default, Clone, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct Part {
    width: Option<u32>,
    names: Vec<String>,
    by_name: BTreeMap<String, f64>,
}

#[derive(Debug, Default, Clone, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct Run {
    max_epochs: i64,
    enabled: bool,
    part: Part,
    parts: Vec<Part>,
    extra: serde_json::Value,
}

const TEXT: &str = "# a run\nmax_epochs: 3\nenabled: true\npart:\n  width: 4\n  names: [a, \"b\\n\", 'c']\n  by_name: {x: 1.5, y: 2e3}\n\
    parts:\n- width: 1\n- names:\n  - &n d\n  - *n\nextra: |\n  text\n  ende \u{e4}\u{4e2d}\n";

const WORDS: [&[u8]; 40] = [
    b"- ",
    b"? ",
    b": ",
    b"\n",
    b"\n  ",
    b"[",
    b"]",
    b"{",
    b"}",
    b",",
    b"&a ",
    b"*a",
    b"!!int ",
    b"!x ",
    b"|\n",
    b">-\n",
    b"\"",
    b"'",
    b"#",
    b"---\n",
    b"...\n",
    b"%YAML 1.2\n",
    b"<<: ",
    b"~",
    b"null",
    b".inf",
    b"-.nan",
    b"0x",
    b"1e999",
    b"18446744073709551615",
    b"\t",
    b"\r",
    b"\xef\xbb\xbf",
    b"\xc3\xa4",
    b"max_epochs",
    b"part",
    b"parts+",
    b"width",
    b"extra",
    b"\x00",
];

const KEY_WORDS: [&[u8]; 14] = [
    b"max_epochs",
    b"part",
    b"parts",
    b".",
    b"..",
    b"=",
    b"+=",
    b"0",
    b"99999999999999999999",
    b"width",
    b"[1, {a: 2}]",
    b"extra",
    b"{",
    b"\"",
];

fn load(layers: &Layers) -> bool {
    layers.load::<Run>().is_ok()
}

#[test]
fn yaml() {
    let schema = schema_of::<Run>();
    stress("YAML", |rng| {
        let bytes = match rng.random_range(0..4) {
            0 => of_words(&WORDS, 80, rng),
            _ => mutated(TEXT.as_bytes(), &WORDS, rng),
        };
        let mut layers = Layers::new(schema.clone());
        layers.text("run.yaml", &String::from_utf8_lossy(&bytes));
        load(&layers)
    });
}

#[test]
fn dotted_keys() {
    let schema = schema_of::<Run>();
    stress("dotted keys", |rng| {
        let mut layers = Layers::new(schema.clone());
        for _ in 0..rng.random_range(1..4) {
            let bytes = match rng.random() {
                true => of_words(&KEY_WORDS, 12, rng),
                false => mutated(b"part.by_name.x=1.5", &KEY_WORDS, rng),
            };
            let text = String::from_utf8_lossy(&bytes);
            layers.assign(&Assignment::parse(&text));
            layers.env([(format!("VOLTAIC_{}", text.replace('.', "__")), "1".to_owned())]);
        }
        load(&layers)
    });
}
