//! `voltaic env`.

use std::process::Command;

use serde_json::Value;

fn env(arguments: &[&str], variables: &[(&str, &str)]) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_voltaic"));
    command.arg("env").args(arguments).envs(variables.iter().copied());
    let output = command.output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn the_build_the_machine_and_the_environment_are_described() {
    let variables = [
        ("VOLTAIC_JOB_SECRET", "do-not-show"),
        ("VOLTAIC_HPU_DEVICE", "2"),
        ("VOLTAIC_TRAINER__MAX_EPOCHS", "3"),
        ("PL_FIT__MODEL__NUM_CLASSES", "3"),
        ("VOLTAIC_HPU", "emulator"),
        ("OMP_NUM_THREADS", "1"),
    ];
    let (is_ok, text) = env(&[], &variables);
    assert!(is_ok, "{text}");
    for part in [
        concat!("voltaic       ", env!("CARGO_PKG_VERSION"), " ("),
        "rustc         rustc 1.",
        "libtorch      2.",
        "cpu           ",
        "hpu           ",
        "gloo          part of libtorch",
        "  VOLTAIC_JOB_SECRET=(hidden)\n",
        "  VOLTAIC_HPU_DEVICE=2  <- voltaic does not read it; did you mean VOLTAIC_HPU_DEVICES\n",
        "  VOLTAIC_TRAINER__MAX_EPOCHS=3\n",
        "  PL_FIT__MODEL__NUM_CLASSES=3  <- sets model.num_classes of fit\n",
        "  OMP_NUM_THREADS=1\n",
    ] {
        assert!(text.contains(part), "`{part}` is not in:\n{text}");
    }
    assert!(!text.contains("do-not-show"), "{text}");
    let (described, _) = text.split_once("\nvariables\n").unwrap();
    let long: Vec<&str> = described.lines().filter(|line| line.len() > 80 && line.contains(' ')).collect();
    assert!(long.iter().all(|line| line.trim().split(' ').count() == 1), "{long:#?}");
    let (_, json) = env(&["--json"], &variables);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["build"]["voltaic"], env!("CARGO_PKG_VERSION"));
    let manifest = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../Cargo.toml")).unwrap();
    let tch = json["build"]["tch"].as_str().unwrap();
    assert!(manifest.contains(&format!("tch = \"{tch}")), "{tch}");
    assert!(json["machine"]["usable_cores"].as_u64().unwrap() > 0);
    let secret = json["variables"].as_array().unwrap().iter().find(|one| one["name"] == "VOLTAIC_JOB_SECRET");
    assert_eq!(secret.unwrap()["value"], Value::Null);
}

#[test]
fn what_is_wrong_is_said_and_is_no_failure() {
    let wrong = [("VOLTAIC_HPU", "no"), ("VOLTAIC_CPU_KERNELS", "perhaps"), ("VOLTAIC_HOST_MEMORY", "much")];
    let (is_ok, text) = env(&[], &wrong);
    assert!(is_ok, "{text}");
    assert!(text.contains("VOLTAIC_HPU=`no`") && text.contains("VOLTAIC_CPU_KERNELS=`perhaps`"), "{text}");
    let (is_ok, json) = env(&["--json"], &wrong);
    assert!(
        is_ok && serde_json::from_str::<Value>(&json).unwrap()["accelerators_error"].is_string(),
        "{json}"
    );
}
