//! Tells dependent crates where libtorch is, and links this crate's own binaries to it.

use std::env;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let lib_dir =
        env::var("DEP_VOLTAIC_SYS_LIBTORCH_LIB").expect("voltaic-sys reports libtorch's lib folder");
    println!("cargo:libtorch_lib={lib_dir}");
    println!("cargo:rustc-env=VOLTAIC_LIBTORCH_LIB={lib_dir}");
    for argument in voltaic_build::link_arguments(&lib_dir) {
        println!("cargo:rustc-link-arg={argument}");
    }
}
