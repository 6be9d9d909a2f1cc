//! Tells dependent crates where libtorch is, and links this crate's own binaries to it.

use std::env;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let lib_dir =
        env::var("DEP_VOLTAIC_SYS_LIBTORCH_LIB").expect("voltaic-sys reports libtorch's lib folder");
    println!("cargo:libtorch_lib={lib_dir}");
    println!("cargo:rustc-env=VOLTAIC_LIBTORCH_LIB={lib_dir}");
    describe_build();
    for argument in voltaic_build::link_arguments(&lib_dir) {
        println!("cargo:rustc-link-arg={argument}");
    }
}

/// What `voltaic env` says of how the library was built.
fn describe_build() {
    let variable = |name: &str| env::var(name).unwrap_or_else(|_| "unknown".to_owned());
    let rustc = Command::new(variable("RUSTC")).arg("--version").output();
    let rustc = rustc.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    for (name, value) in [
        ("RUSTC", rustc.unwrap_or_else(|_| "unknown".to_owned())),
        ("CXX", variable("DEP_VOLTAIC_SYS_CXX")),
        ("PROFILE", variable("PROFILE")),
        ("OPT_LEVEL", variable("OPT_LEVEL")),
        ("TARGET", variable("TARGET")),
    ] {
        println!("cargo:rustc-env=VOLTAIC_BUILD_{name}={value}");
    }
}
