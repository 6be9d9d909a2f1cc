//! Which libtorch this process has loaded, and whether it is the one that voltaic was compiled with.

use std::ffi::{CStr, OsStr};
use std::fs;
use std::mem;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use voltaic_sys as sys;

use crate::error::LibtorchError;
use crate::kernels::loaded_symbol;

/// The function of libtorch's stable C interface that returns its version.
const VERSION_FUNCTION: &CStr = c"aoti_torch_abi_version";

/// Version of the libtorch that voltaic was compiled with, such as `2.11.0`.
pub fn libtorch_version() -> String {
    // SAFETY: the shim returns a NUL-terminated string in static storage.
    unsafe { CStr::from_ptr(sys::vt_libtorch_version()) }.to_string_lossy().into_owned()
}

/// The `libtorch_cpu.so` that this process has loaded, links resolved.
pub fn libtorch_library() -> Option<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let path = maps.lines().find(|line| line.ends_with("/libtorch_cpu.so"))?.split_once('/')?.1;
    Some(Path::new("/").join(path))
}

/// Checks that the libtorch that is loaded has the version that voltaic was compiled with. The first call looks; later
/// ones repeat what it found.
///
/// The folders of LD_LIBRARY_PATH come before the one that a program was linked with, so it may be any other.
///
/// # Errors
/// [`LibtorchError`] with both versions and the path of the library.
pub fn check_libtorch() -> Result<(), LibtorchError> {
    static FOUND: OnceLock<Result<(), LibtorchError>> = OnceLock::new();
    FOUND
        .get_or_init(|| {
            let (loaded, path) = loaded_version().unzip();
            let path = path.flatten().or_else(libtorch_library).unwrap_or_else(|| "libtorch_cpu.so".into());
            compare(libtorch_version(), loaded, path)
        })
        .clone()
}

fn compare(compiled: String, loaded: Option<String>, path: PathBuf) -> Result<(), LibtorchError> {
    if loaded.as_ref() == Some(&compiled) {
        return Ok(());
    }
    Err(LibtorchError { compiled, loaded, path })
}

/// The version of the loaded libtorch, and the library's path.
fn loaded_version() -> Option<(String, Option<PathBuf>)> {
    let symbol = loaded_symbol(VERSION_FUNCTION)?;
    // SAFETY: libtorch's stable C interface (torch/csrc/inductor/aoti_torch/c/shim.h) declares the function so, in each
    // version that has it.
    let version = unsafe { mem::transmute::<*mut _, unsafe extern "C" fn() -> u64>(symbol)() };
    Some((version_of(version), library_of(symbol)))
}

/// What TORCH_ABI_VERSION says: major, minor and patch are its first three bytes.
fn version_of(abi: u64) -> String {
    let [major, minor, patch, ..] = abi.to_be_bytes();
    format!("{major}.{minor}.{patch}")
}

/// The library that a function of a library lies in.
fn library_of(symbol: *mut std::ffi::c_void) -> Option<PathBuf> {
    // SAFETY: Dl_info is made of pointers, which may be null.
    let mut info: libc::Dl_info = unsafe { mem::zeroed() };
    // SAFETY: dladdr only looks the address up; the out-pointer is valid.
    let is_found = unsafe { libc::dladdr(symbol, &mut info) } != 0;
    if !is_found || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's NUL-terminated name of a library that stays loaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    let path = Path::new(OsStr::from_bytes(name.to_bytes()));
    Some(fs::canonicalize(path).unwrap_or_else(|_| path.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_libtorch_of_the_tests_is_the_one_they_were_compiled_with() {
        check_libtorch().unwrap();
        let (version, path) = loaded_version().unwrap();
        assert_eq!(version, libtorch_version());
        assert_eq!(path, libtorch_library());
    }

    #[test]
    fn another_version_is_an_error_that_names_both_and_the_library() {
        assert_eq!(version_of(0x020b_0100_0000_0000), "2.11.1");
        let path = PathBuf::from("/opt/torch/lib/libtorch_cpu.so");
        let error = |loaded| compare("2.11.0".to_owned(), loaded, path.clone()).unwrap_err().to_string();
        for (loaded, expected) in [
            (Some("2.10.0".to_owned()), "/opt/torch/lib/libtorch_cpu.so is libtorch 2.10.0, but this"),
            (None, "/opt/torch/lib/libtorch_cpu.so is a libtorch too old to tell its version, but this"),
        ] {
            let message = error(loaded);
            assert!(message.starts_with(expected), "{message}");
            assert!(message.contains("compiled with libtorch 2.11.0"), "{message}");
            assert!(message.contains("LD_LIBRARY_PATH"), "{message}");
        }
    }
}
