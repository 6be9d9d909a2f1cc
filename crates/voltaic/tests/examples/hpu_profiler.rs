//! Traces and reports of `HPUProfiler`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::{Ran, run};

const PROGRAM: &str = "hpu_profiler";

/// The files of a folder whose names begin and end so, in order.
fn files(folder: &Path, begin: &str, end: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<PathBuf> = entries
        .filter(|path| {
            let name = path.file_name().unwrap().to_str().unwrap();
            name.starts_with(begin) && name.ends_with(end)
        })
        .collect();
    found.sort();
    found
}

/// The complete events of a trace, of three steps of training.
fn events(trace: &Path) -> Vec<Value> {
    let trace: Value = serde_json::from_slice(&std::fs::read(trace).unwrap()).unwrap();
    let all = trace["traceEvents"].as_array().unwrap();
    all.iter().filter(|event| event["ph"] == "X").cloned().collect()
}

fn count(events: &[Value], category: &str, name: &str) -> usize {
    events.iter().filter(|event| event["cat"] == category && event["name"] == name).count()
}

fn log_dir(ran: &Ran) -> PathBuf {
    ran.folder.path().join("lightning_logs/version_0")
}

#[test]
fn default_profiling() {
    let ran = run(PROGRAM, "default_profiling");
    let traces = files(&log_dir(&ran), "fit-run_training_batch.", ".pt.trace.json");
    assert_eq!(traces.len(), 1);
    let events = events(&traces[0]);
    assert_eq!(count(&events, "cpu_op", "aten::linear"), 3);
    // the same product, by the host's operator and by the device
    assert_eq!((count(&events, "cpu_op", "aten::addmm"), count(&events, "Kernel", "aten::addmm")), (3, 3));
    assert!(count(&events, "Memcpy", "Memcpy HtoD") >= 4); // the batches of two steps, and those fetched for the third
    assert!(count(&events, "Runtime", "launch") > 0);
    assert!(ran.err.contains("FIT Profiler Report") && ran.err.contains("HPU total"), "{}", ran.err);
}

#[test]
fn distributed_profiling() {
    let ran = run(PROGRAM, "distributed_profiling");
    let mut collectives = Vec::new();
    for rank in 0..2 {
        let report =
            std::fs::read_to_string(log_dir(&ran).join(format!("fit-perf-logs-{rank}.txt"))).unwrap();
        assert!(report.starts_with("FIT Profiler Report") && report.contains("aten::linear"), "{report}");
        let begin = format!("fit-perf-logs-{rank}-run_training_batch.");
        let traces = files(&log_dir(&ran), &begin, ".pt.trace.json");
        assert_eq!(traces.len(), 1);
        let events = events(&traces[0]);
        assert_eq!(count(&events, "cpu_op", "aten::linear"), 3);
        collectives.push(collectives_of(&events));
    }
    // both ranks have the same operations, of the same size
    assert!(collectives[0].len() >= 3, "{collectives:?}");
    assert_eq!(collectives[0], collectives[1]);
}

/// Number, name and bytes of each operation of all ranks, which began within the three steps.
fn collectives_of(events: &[Value]) -> BTreeMap<u64, (String, u64)> {
    let collectives = events.iter().filter(|event| event["args"]["seq"].is_u64());
    collectives
        .map(|event| {
            let number = |key: &str| event["args"][key].as_u64().unwrap();
            assert_eq!((&event["cat"], &event["args"]["group"]), (&"Runtime".into(), &"all ranks".into()));
            (number("seq"), (event["name"].as_str().unwrap().to_owned(), number("bytes")))
        })
        .collect()
}

#[test]
fn custom_profiling() {
    let ran = run(PROGRAM, "custom_profiling");
    assert!(ran.out.starts_with("do something\ndo something\n"), "{}", ran.out);
    let traces = files(&log_dir(&ran), "fit-run_training_batch.", ".pt.trace.json");
    // in both methods, in each of three steps
    assert_eq!(count(&events(&traces[0]), "user_annotation", "[pl][profile]my_custom_action"), 6);
}

#[test]
fn tensorboard() {
    let ran = run(PROGRAM, "tensorboard");
    let folder = ran.folder.path().join("tensorboard");
    assert_eq!(files(&folder, "fit-run_training_batch.", ".pt.trace.json").len(), 1);
    assert_eq!(files(&folder, "validate", "").len(), 0);
}
