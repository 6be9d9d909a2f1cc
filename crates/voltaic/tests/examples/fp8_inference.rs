//! fp8 inference.

use crate::{run, run_with};

const PROGRAM: &str = "fp8_inference";
const FILES: [&str; 3] =
    ["measure_hooks_maxabs.json", "measure_hooks_maxabs.npz", "measure_hooks_maxabs_mod_list.json"];

#[test]
fn hqt() {
    assert!(run(PROGRAM, "hqt").out.contains("MaxabsHw"));
}

#[test]
fn measurement() {
    let ran = run(PROGRAM, "measurement");
    let mut wrote: Vec<&str> = ran.out.lines().filter_map(|line| line.strip_prefix("wrote ")).collect();
    wrote.sort_unstable();
    assert_eq!(wrote, FILES);
}

#[test]
fn quantization() {
    let ran = run(PROGRAM, "quantization");
    let line = ran.out.lines().find(|line| line.contains("layers in float8 agree")).unwrap();
    let alike: f64 = line.split(' ').find_map(|word| word.parse().ok().filter(|n| *n <= 1.0)).unwrap();
    assert!(line.starts_with("5 layers") && alike > 0.95, "{line}");
}

#[test]
fn two_processes() {
    let ran = run(PROGRAM, "two_processes");
    assert!(
        ran.out.contains("quant=false: 0 layers") && ran.out.contains("quant=true: 5 layers"),
        "{}",
        ran.out
    );
    assert!(ran.out.contains("a quantized file gives the same: true"), "{}", ran.out);
    assert!(ran.err.contains("limit_test_batches does not limit predict"), "{}", ran.err);
}

#[test]
fn quant_config() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("measure.json");
    std::fs::write(&file, r#"{"mode": "MEASURE", "observer": "maxabs"}"#).unwrap();
    let logs = folder.path().join("logs");
    let variables = [("QUANT_CONFIG", file.to_str().unwrap()), ("HABANA_LOGS", logs.to_str().unwrap())];
    let ran = run_with(PROGRAM, "quant_config", &variables);
    for file in FILES {
        assert!(logs.join("inc_output").join(file).is_file(), "{file}");
    }
    assert!(ran.out.contains("conv1") && !ran.out.contains("fc3 "), "{}", ran.out);
}

#[test]
fn deepspeed() {
    let ran = run(PROGRAM, "deepspeed");
    assert!(ran.out.contains("5 layers in float8"), "{}", ran.out);
}
