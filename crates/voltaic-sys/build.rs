//! Compiles the shim against the libtorch that torch-sys found and hands its folder on.

use std::path::PathBuf;
use std::{env, fs};

fn main() {
    println!("cargo:rerun-if-changed=csrc");
    let lib_dir = env::var("DEP_TCH_LIBTORCH_LIB").expect(
        "torch-sys did not report its libtorch folder (DEP_TCH_LIBTORCH_LIB); run scripts/setup.sh, or set LIBTORCH",
    );
    let include = PathBuf::from(&lib_dir).join("../include");
    let mut sources: Vec<PathBuf> = fs::read_dir("csrc")
        .expect("csrc/ lies beside build.rs")
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|ext| ext == "cpp"))
        .collect();
    sources.sort();
    cc::Build::new()
        .cpp(true)
        .std("c++20")
        .opt_level(2)
        .include("csrc")
        .flag(format!("-isystem{}", include.display()))
        .flag(format!("-isystem{}", include.join("torch/csrc/api/include").display()))
        .flag("-Wall")
        .flag("-Wextra")
        .files(sources)
        .compile("voltaic_shim");
    println!("cargo:rustc-link-search=native={lib_dir}");
    println!("cargo:rustc-link-lib=torch_cpu");
    println!("cargo:rustc-link-lib=c10");
    println!("cargo:rustc-link-arg-tests=-Wl,-rpath,{lib_dir}");
    println!("cargo:libtorch_lib={lib_dir}");
}
