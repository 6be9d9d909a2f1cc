//! `--version`.

/// Versions of this library and of libtorch.
pub(in crate::cli) fn version(program: &str) -> String {
    let own = env!("CARGO_PKG_VERSION");
    let name = if program == "voltaic" { String::new() } else { format!("{program}, made with ") };
    format!("{name}voltaic {own} (libtorch {})\n", crate::ffi::libtorch_version())
}
