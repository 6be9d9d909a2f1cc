//! `bundle`: a program in a folder with the libraries that it needs, for machines that have neither Rust nor libtorch.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cli::args::BundleArgs;
use crate::cli::outcome::Failure;
use crate::error::{ConfigError, Error};

/// Libraries of glibc, which belong to the machine.
const OF_GLIBC: [&str; 8] =
    ["ld-linux", "libc.so", "libm.so", "libdl.so", "librt.so", "libpthread.so", "libutil.so", "libresolv.so"];
/// Where libraries are in the folder. `voltaic_build::link` makes programs look there first.
const LIB: &str = "lib";

/// Fills the folder; returns the message for the user.
pub(in crate::cli) fn bundle(arguments: &BundleArgs) -> Result<String, Failure> {
    let BundleArgs { folder, program } = arguments;
    let program = match program {
        Some(program) => program.clone(),
        None => std::env::current_exe().map_err(|error| failed("find", "the program that runs", error))?,
    };
    let name = program.file_name().filter(|_| program.is_file());
    let Some(name) = name else {
        let what = format!("there is no program {}", program.display());
        return Err(refuse(what, "give --program=target/release/NAME, after cargo build --release"));
    };
    if fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some()) {
        let what = format!("{} is not empty", folder.display());
        return Err(refuse(what, "name a folder that is not there yet"));
    }
    let libraries = libraries(Command::new("ldd").arg(&program))?;
    let filled = fill(folder, &program, name, &libraries);
    if filled.is_err() {
        let _ = fs::remove_dir_all(folder); // else the next attempt finds it not empty
    }
    let bytes = filled?;
    Ok(format!(
        "{}  {} libraries, {} MB; runs where glibc is not older than here\n",
        folder.join(name).display(),
        libraries.len(),
        bytes / 1_000_000
    ))
}

/// Copies all, and makes sure that the copy loads the copies. Returns the bytes.
fn fill(
    folder: &Path,
    program: &Path,
    name: &OsStr,
    libraries: &[(String, PathBuf)],
) -> Result<u64, Failure> {
    let (lib, to) = (folder.join(LIB), folder.join(name));
    fs::create_dir_all(&lib).map_err(|error| failed("create", &lib, error))?;
    let mut bytes = fs::copy(program, &to).map_err(|error| failed("write", &to, error))?;
    for (name, from) in libraries {
        let to = lib.join(name);
        bytes += copy(from, &to).map_err(|error| failed("write", &to, error))?;
    }
    let lib = lib.canonicalize().map_err(|error| failed("find", &lib, error))?;
    let loaded = self::libraries(Command::new("ldd").arg(&to).env_remove("LD_LIBRARY_PATH"))?;
    let Some((library, path)) = loaded.iter().find(|(_, path)| !path.starts_with(&lib)) else {
        return Ok(bytes);
    };
    let what = format!("{} looks for {library} in {}", program.display(), path.display());
    let remedy = "call voltaic_build::link() in its build.rs, which makes it look beside itself";
    Err(refuse(what, remedy))
}

/// Names and paths of the libraries that a program loads, but those of glibc.
fn libraries(ldd: &mut Command) -> Result<Vec<(String, PathBuf)>, Failure> {
    let shown = ldd.output().map_err(|error| failed("run", "ldd", error))?;
    let text = String::from_utf8_lossy(&shown.stdout);
    if !shown.status.success() {
        let said = String::from_utf8_lossy(&shown.stderr);
        return Err(refuse(format!("ldd says: {}", said.trim()), "give a program of this machine's kind"));
    }
    let mut found = Vec::new();
    for line in text.lines() {
        let Some((name, place)) = line.trim().split_once(" => ") else { continue };
        if OF_GLIBC.iter().any(|own| name.starts_with(own)) {
            continue;
        }
        // `libc10.so => /place/of/libc10.so (0x00007f01fedb1000)`
        let path = place.rsplit_once(" (").map(|(path, _)| PathBuf::from(path)).filter(|path| path.is_file());
        let Some(path) = path else {
            return Err(refuse(format!("{name} is not found"), "set LD_LIBRARY_PATH to its folder"));
        };
        found.push((name.to_owned(), path));
    }
    Ok(found)
}

/// Copies a file, or makes another name of it where that can be. Returns its bytes.
fn copy(from: &Path, to: &Path) -> io::Result<u64> {
    let from = from.canonicalize()?;
    if fs::hard_link(&from, to).is_err() {
        fs::copy(&from, to)?;
    }
    Ok(fs::metadata(to)?.len())
}

fn refuse(what: String, remedy: &'static str) -> Failure {
    ConfigError::new("bundle", what, remedy).into()
}

fn failed(action: &'static str, path: impl AsRef<Path>, error: io::Error) -> Failure {
    Failure::run(Error::io(action, path, error).into())
}
