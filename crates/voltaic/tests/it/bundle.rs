//! Programs in a folder with their libraries.

use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

fn bundle(folder: &Path, more: &[&str]) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_voltaic"));
    let output = command.arg("bundle").arg(folder).args(more).output().unwrap();
    let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    (output.status.success(), text.concat())
}

#[test]
fn it_runs_with_the_libraries_beside_it() {
    let root = TempDir::new().unwrap();
    let folder = root.path().join("bundle");
    let (is_done, text) = bundle(&folder, &[]);
    assert!(is_done && text.contains("libraries"), "{text}");
    let program = folder.join("voltaic");
    let loaded = Command::new("ldd").arg(&program).env_clear().env("PATH", "/usr/bin:/bin").output().unwrap();
    let loaded = String::from_utf8_lossy(&loaded.stdout).into_owned();
    let beside = folder.canonicalize().unwrap().join("lib");
    for library in ["libtorch_cpu.so", "libc10.so", "libstdc++.so"] {
        let line = loaded.lines().find(|line| line.contains(library)).unwrap();
        assert!(line.contains(&beside.display().to_string()), "{loaded}");
    }
    let version = Command::new(&program).arg("--version").env_clear().output().unwrap();
    assert!(version.status.success() && version.stdout.starts_with(b"voltaic "), "{version:?}");
    let (is_done, text) = bundle(&folder, &[]);
    assert!(!is_done && text.contains("is not empty"), "{text}");
}

#[test]
fn what_would_not_run_elsewhere_is_refused() {
    let root = TempDir::new().unwrap();
    let folder = root.path().join("bundle");
    let (is_done, text) = bundle(&folder, &["--program=target/none"]);
    assert!(!is_done && text.contains("there is no program target/none"), "{text}");
    // it looks for its libraries in the system alone
    let (is_done, text) = bundle(&folder, &["--program=/bin/ls"]);
    assert!(
        !is_done && text.contains("/bin/ls looks for") && text.contains("voltaic_build::link()"),
        "{text}"
    );
    assert!(!folder.exists());
}
