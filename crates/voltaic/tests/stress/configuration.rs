//! YAML, and keys of the command line and the environment.

use std::collections::BTreeMap;

use rand::RngExt;
use serde::{Deserialize, Serialize};
use voltaic::config::{Assignment, Layers, schema_of};

use crate::mutate::{mutated, of_words};
use crate::{forget_peak, number, status, stress};

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

const ASSIGNMENTS: [&[u8]; 8] = [
    b"max_epochs=3",
    b"enabled",
    b"part.by_name.x=1.5",
    b"part.names+=[a, b]",
    b"part={width: 4, names: [c]}",
    b"parts+={width: 1}",
    b"parts.0.width=7",
    b"extra.a.b=[1, {c: ~}]",
];

fn load(layers: &Layers) -> bool {
    layers.load::<Run>().is_ok()
}

#[test]
fn yaml() {
    let empty = Layers::new(schema_of::<Run>());
    stress("YAML", |rng| {
        let bytes = match rng.random_range(0..4) {
            0 => of_words(&WORDS, 80, rng),
            _ => mutated(TEXT.as_bytes(), &WORDS, rng),
        };
        let mut layers = empty.clone();
        layers.text("run.yaml", &String::from_utf8_lossy(&bytes));
        load(&layers)
    });
}

/// What this thread has computed, in seconds; other work of the machine does not count.
fn computed_secs() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    // user and system time in hundredths of a second, after the name in brackets
    let fields = text.rsplit(')').next().unwrap().split_whitespace();
    fields.skip(11).take(2).map(|ticks| ticks.parse::<f64>().unwrap() / 100.0).sum()
}

/// Loads a file with so many unknown keys; returns how long it computes for each, in microseconds.
fn micros_of_an_unknown_key(count: u32) -> f64 {
    let text: String = (0..count).map(|i| format!("max_epoch{i}: {i}\n")).collect();
    forget_peak();
    let started = computed_secs();
    let mut layers = Layers::of::<Run>();
    layers.text("run.yaml", &text);
    let problems = layers.load::<Run>().unwrap_err().problems;
    let took = computed_secs() - started;
    println!(
        "{count} unknown keys, {} bytes: {took:.2} s of computing, {} MiB at most",
        text.len(),
        status("VmHWM") >> 20
    );
    assert_eq!(problems.len(), 11, "ten and the number of the others");
    took * 1e6 / f64::from(count)
}

/// 600,000 in `make stress`: nearly as long as a file may be. Ten times the keys take no more than ten times as long, with
/// room for memory that is further away.
#[test]
fn many_unknown_keys_take_linear_time() {
    let count = number("VOLTAIC_STRESS_INPUTS").map_or(20_000, |_| 600_000);
    let (few, many) = (micros_of_an_unknown_key(count / 10), micros_of_an_unknown_key(count));
    assert!(many < 2.5 * few, "{few:.0} us for a key of {}, {many:.0} us for one of {count}", count / 10);
}

#[test]
fn dotted_keys() {
    let empty = Layers::new(schema_of::<Run>());
    stress("dotted keys", |rng| {
        let mut layers = empty.clone();
        for _ in 0..rng.random_range(1..4) {
            let valid = ASSIGNMENTS[rng.random_range(0..ASSIGNMENTS.len())];
            let bytes = match rng.random_range(0..4) {
                0 => of_words(&KEY_WORDS, 12, rng),
                1 => mutated(valid, &KEY_WORDS, rng),
                _ => valid.to_vec(),
            };
            let text = String::from_utf8_lossy(&bytes);
            if rng.random_range(0..4) > 0 {
                layers.assign(&Assignment::parse(&text));
            } else {
                let (key, value) = text.split_once('=').unwrap_or((&text, "true"));
                layers.env([(format!("VOLTAIC_{}", key.replace('.', "__")), value.to_owned())]);
            }
        }
        load(&layers)
    });
}
