//! `voltaic devices`.

use std::process::Command;

use serde_json::Value;
use voltaic::Device;
use voltaic::graph::StaticTensor;
use voltaic::nn::{Linear, ModuleExt};

use crate::probe::{own_process, plays, silent, text_of};

fn devices(arguments: &[&str], variables: &[(&str, &str)]) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_voltaic"));
    command.arg("devices").args(arguments).env("VOLTAIC_HPU", "emulator").envs(variables.iter().copied());
    let output = command.output().unwrap();
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output.status.success(), text)
}

#[test]
fn emulated_cards_are_listed_and_told_apart_from_real_ones() {
    let (is_ok, text) = devices(&[], &[("VOLTAIC_HPU_GENERATION", "gaudi3"), ("VOLTAIC_HPU_DEVICES", "2")]);
    assert!(is_ok, "{text}");
    for line in ["hpu   2 emulated gaudi3 with 128 GiB each", "hpu:1: emulated gaudi3, 128 GiB", "cpu   "] {
        assert!(text.contains(line), "{text}");
    }
    let (_, text) = devices(&["--json"], &[("VOLTAIC_HPU_DEVICES", "3")]);
    let json: Value = serde_json::from_str(&text).unwrap();
    let hpu = &json["accelerators"][2];
    assert_eq!((hpu["name"].as_str(), hpu["emulated"].as_bool()), (Some("hpu"), Some(true)));
    assert_eq!(hpu["cards"].as_array().unwrap().len(), 3);
    assert_ne!(json["auto"], "hpu", "nobody gets emulated cards unasked");
    assert!(json.get("env").is_none());
}

#[test]
fn variables_are_listed_with_value_and_effect() {
    let (is_ok, text) = devices(&["--env"], &[("PT_HPU_RECIPE_CACHE_CONFIG", "recipes/,true,1024")]);
    assert!(is_ok, "{text}");
    for part in [
        "PT_HPU_RECIPE_CACHE_CONFIG=recipes/,true,1024",
        "PT_HPU_LAZY_MODE (not set: 0)",
        "HABANA_VISIBLE_MODULES",
        "VOLTAIC_HPU_MEMORY",
        "PT_HPUGRAPH_DISABLE_TENSOR_CACHE (not set: 0)",
    ] {
        assert!(text.contains(part), "{text}");
    }
    let (_, text) = devices(&["--env", "--json"], &[("HABANA_LOGS", "here")]);
    let json: Value = serde_json::from_str(&text).unwrap();
    let flag = json["env"].as_array().unwrap().iter().find(|flag| flag["name"] == "HABANA_LOGS").unwrap();
    assert_eq!(flag["value"], "here");
}

#[test]
fn a_variable_that_makes_no_sense_is_an_error() {
    for (name, value) in
        [("PT_HPU_LAZY_MODE", "maybe"), ("HABANA_VISIBLE_MODULES", "0,9"), ("VOLTAIC_HPU", "no")]
    {
        let (is_ok, text) = devices(&[], &[(name, value)]);
        assert!(!is_ok && text.contains(&format!("{name}=`{value}`")) && text.contains("use "), "{text}");
    }
}

#[test]
fn an_hpu_before_there_is_a_trainer_is_an_error_that_names_it() {
    if !plays("too_early") {
        text_of(&own_process("too_early").env("VOLTAIC_HPU", "emulator").output().unwrap());
        return;
    }
    let hpu = Device::Hpu(0);
    let net = Linear::new(3, 2).unwrap();
    let moved = net.to_device(hpu).unwrap_err();
    let made = StaticTensor::rand([2, 3], hpu).unwrap_err();
    let errors = [moved.to_string(), made.to_string()];
    for error in errors {
        assert!(error.contains("no HPU is set up") && error.contains("build a trainer"), "{error}");
    }
    silent().accelerator("hpu").devices(1).build().unwrap();
    net.to_device(hpu).unwrap();
    StaticTensor::rand([2, 3], hpu).unwrap();
}
