//! Memory that kernels take at a replay.

use std::fs;
use std::path::Path;

use libloading::{Library, Symbol};
use tch::{Device, Kind, Tensor};
use voltaic::graph::{HpuGraph, graph};

use crate::compile::compile;
use crate::process::{own_process, plays, text_of};

/// The library of `graph_blocks.cpp`.
fn library() -> Library {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("graph_blocks");
    fs::create_dir_all(&folder).unwrap();
    let library = folder.join("libgraph_blocks.so");
    let include = Path::new(env!("VOLTAIC_LIBTORCH_LIB")).with_file_name("include");
    let include = format!("-isystem{}", include.display());
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/graph_blocks.cpp");
    compile("c++", &["-std=c++20", &include], &source, &library);
    // SAFETY: it registers an operator, and does nothing else when it is loaded.
    unsafe { Library::new(library) }.unwrap()
}

fn replay_with_more_raw_memory() {
    assert!(voltaic::ffi::install_host_pool().unwrap());
    let library = library();
    // SAFETY: the library declares it so.
    let set_raw_blocks: Symbol<unsafe extern "C" fn(i32)> =
        unsafe { library.get(b"set_raw_blocks") }.unwrap();
    let mut input = Tensor::ones([1000], (Kind::Float, Device::Cpu));
    let twice = HpuGraph::new();
    let capture = graph(&twice).unwrap();
    let kept = input.trace();
    capture.end().unwrap();
    for blocks in [1, 2, 0, 1] {
        // SAFETY: as above.
        unsafe { set_raw_blocks(blocks) };
        input.copy_(&(&input + 1.0));
        twice.replay().unwrap();
        assert_eq!(kept, &input * 2.0);
        let others = [0; 8].map(|_| Tensor::zeros([1000], (Kind::Float, Device::Cpu)));
        assert!(others.iter().all(|other| other.data_ptr() != kept.data_ptr()), "its memory was given away");
        assert_eq!(kept, &input * 2.0);
    }
    // without the graph its memory goes where it came from
    let address = kept.data_ptr();
    drop((twice, kept));
    let others = [0; 64].map(|_| Tensor::zeros([1000], (Kind::Float, Device::Cpu)));
    assert!(others.iter().any(|other| other.data_ptr() == address));
    std::mem::forget(library);
}

#[test]
fn what_a_graph_keeps_is_not_freed_as_raw_memory_of_a_kernel() {
    if plays("replay") {
        return replay_with_more_raw_memory();
    }
    text_of(&own_process("replay").output().unwrap());
}
