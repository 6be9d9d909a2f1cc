//! CUDA graphs without a GPU: a stand-in for libtorch's CUDA library is compiled and loaded here. A binary of its own,
//! since a library stays loaded.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail the test")]

#[path = "../support/compile.rs"]
mod compile;

use std::path::Path;

use compile::compile;
use libloading::{Library, Symbol};
use voltaic::Device;
use voltaic::graph::{HpuGraph, graph};
use voltaic::nn::Forward;
use voltaic::optim::{AdamW, Optimizers};

fn stand_in() -> Library {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda_graph");
    std::fs::create_dir_all(&folder).unwrap();
    let library = folder.join("libtorch_cuda.so");
    let include = Path::new(env!("VOLTAIC_LIBTORCH_LIB")).with_file_name("include");
    let include = format!("-isystem{}", include.display());
    let options = ["-std=c++20", "-DNDEBUG", "-Wl,-soname,libtorch_cuda.so", &include];
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda_graph/library.cpp");
    compile("c++", &options, &source, &library);
    // SAFETY: it registers its streams with c10, and does nothing else when it is loaded.
    unsafe { Library::new(library) }.unwrap()
}

/// Captures, replays, graphs that are alive, the current stream.
fn counts(library: &Library) -> [i32; 4] {
    let mut counts = [0; 4];
    // SAFETY: the stand-in declares it so.
    let read: Symbol<unsafe extern "C" fn(*mut i32)> = unsafe { library.get(b"stand_in_counts") }.unwrap();
    // SAFETY: there is room for four numbers.
    unsafe { read(counts.as_mut_ptr()) };
    counts
}

#[test]
fn a_capture_runs_on_a_stream_of_its_own_and_is_replayed() {
    let early = HpuGraph::on(Device::Cuda(0));
    let error = early.capture_begin().unwrap_err().to_string();
    assert!(error.contains("libtorch_cuda.so is not loaded; set up accelerator=cuda first"), "{error}");
    assert!(early.replay().unwrap_err().to_string().contains("holds nothing"));

    let library = stand_in();
    let captured = HpuGraph::on(Device::Cuda(0));
    let capture = graph(&captured).unwrap();
    assert_eq!(counts(&library), [0, 0, 1, 3], "on another stream");
    capture.end().unwrap();
    assert_eq!(counts(&library), [1, 0, 1, 0]);
    captured.replay().unwrap();
    captured.replay().unwrap();
    assert_eq!(counts(&library), [1, 2, 1, 0]);

    // in a capture an optimizer does not make its state, which each replay would make again
    let net = voltaic::nn::Linear::new(2, 2).unwrap();
    let optimizers: Optimizers = AdamW::new(0.1).into();
    let mut optimizer = optimizers.build(&net).unwrap().remove(0).optimizer;
    let backward = || {
        let ones = voltaic::Tensor::ones([1, 2], (voltaic::Kind::Float, tch::Device::Cpu));
        net.forward(&ones).unwrap().sum(voltaic::Kind::Float).backward();
    };
    backward();
    let capture = graph(&early).unwrap();
    let error = optimizer.step().unwrap_err().to_string();
    assert!(
        error.contains("AdamW: its first step") && error.contains("one step before the capture"),
        "{error}"
    );
    drop(capture);
    optimizer.step().unwrap();
    let capture = graph(&early).unwrap();
    optimizer.step().unwrap();
    drop(capture);
    assert_eq!(counts(&library), [3, 2, 1, 0]);

    // one that is abandoned leaves its stream, and one that is captured again replaces what it held
    drop(graph(&early).unwrap());
    assert_eq!(counts(&library), [4, 2, 1, 0]);
    assert!(early.replay().unwrap_err().to_string().contains("holds nothing"));
    captured.capture_begin().unwrap();
    assert!(captured.replay().unwrap_err().to_string().contains("capture"));
    captured.capture_end().unwrap();
    captured.reset();
    assert_eq!(counts(&library), [5, 2, 0, 0]);
}
