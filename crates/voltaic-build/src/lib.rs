//! Link flags for binaries, tests and examples that contain voltaic.
//!
//! Cargo does not pass a dependency's link arguments on to the crate that depends on it, so that crate asks for
//! them in its own `build.rs`:
//!
//! ```no_run
//! // build.rs, inside main():
//! voltaic_build::link();
//! ```

use std::env;

/// Prints the `cargo:` lines that make the crate's binaries find libtorch when they run.
///
/// # Panics
/// If the crate does not depend on `voltaic` directly: then Cargo does not tell where libtorch is.
pub fn link() {
    println!("cargo:rerun-if-env-changed=DEP_VOLTAIC_LIBTORCH_LIB");
    let lib_dir = env::var("DEP_VOLTAIC_LIBTORCH_LIB")
        .expect("voltaic_build::link() needs `voltaic` among the [dependencies] of the crate that calls it");
    for argument in link_arguments(&lib_dir) {
        println!("cargo:rustc-link-arg={argument}");
    }
}

/// The linker arguments themselves, for build systems other than Cargo. `libtorch_lib` is libtorch's `lib` folder.
///
/// Besides libtorch's place they put four functions of voltaic's shim in place of tch's own, so that tch can name
/// an HPU: its `Device::Cuda(64 + i)` means `hpu:i`, and so that a graph knows of data that come from the host or go
/// there. Without them everything but `hpu` works, and graphs do not notice such data.
pub fn link_arguments(libtorch_lib: &str) -> Vec<String> {
    // lazy: another libtorch may lack a function; then the loader's "undefined symbol" would come before voltaic can say
    // which libtorch was loaded
    // beside the program first: `voltaic bundle` puts the libraries there
    let rpath = format!("-Wl,-rpath,$ORIGIN/lib:{libtorch_lib}");
    let mut arguments = vec![rpath, "-Wl,-z,lazy".to_owned()];
    arguments.extend(TCH_FUNCTIONS.map(|symbol| format!("-Wl,--wrap={symbol}")));
    arguments
}

/// How tch turns a device number into a device, and back; how it moves data between slices and tensors.
const TCH_FUNCTIONS: [&str; 4] = ["_Z13device_of_inti", "at_device", "at_tensor_of_data", "at_copy_data"];
