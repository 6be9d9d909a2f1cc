//! Compiles the libraries that tests load.

use std::path::Path;
use std::process::Command;

/// A shared library from a file in C or C++, with the compiler `cc` or `c++`.
pub fn compile(compiler: &str, options: &[&str], source: &Path, library: &Path) {
    let output = Command::new(compiler)
        .args(["-shared", "-fPIC", "-O1", "-w"])
        .args(options)
        .arg(source)
        .arg("-o")
        .arg(library)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
