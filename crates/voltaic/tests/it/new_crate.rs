//! `voltaic new`: the files it writes and what it refuses. `scripts/test_new.sh` builds and trains such a crate.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

fn new(folder: &Path, name: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_voltaic")).args(["new", name]).current_dir(folder).output().unwrap()
}

#[test]
fn a_new_crate_has_all_files_and_no_placeholder() {
    let folder = tempfile::tempdir().unwrap();
    let output = new(folder.path(), "my-net");
    assert!(output.status.success(), "{output:?}");
    assert_contains!(String::from_utf8(output.stdout).unwrap(), "src/points.rs  the data\n", "cd my-net\n");
    for file in [
        "Cargo.toml",
        "build.rs",
        ".cargo/config.toml",
        ".gitignore",
        "recipe.yaml",
        "src/main.rs",
        "src/net.rs",
        "src/points.rs",
    ] {
        let text = fs::read_to_string(folder.path().join("my-net").join(file)).unwrap();
        assert!(!text.contains("{{"), "{file}: {text}");
    }
    let manifest = fs::read_to_string(folder.path().join("my-net/Cargo.toml")).unwrap();
    assert_contains!(&manifest, "name = \"my-net\"", &format!("path = \"{}\"", env!("CARGO_MANIFEST_DIR")));
    let ignored = fs::read_to_string(folder.path().join("my-net/.gitignore")).unwrap();
    assert!(ignored.lines().any(|line| line == "/lightning_logs"), "{ignored}");
    let config = fs::read_to_string(folder.path().join("my-net/.cargo/config.toml")).unwrap();
    let libtorch = config.split('"').nth(1).unwrap();
    assert!(Path::new(libtorch).join("include/ATen").exists(), "{config}");
}

#[test]
fn bad_names_and_folders_that_exist_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("taken")).unwrap();
    for (name, complaint) in [
        ("taken", "taken is there already; choose another name"),
        ("1net", "`1net` is not a name for a crate; use letters"),
        ("my net", "`my net` is not a name for a crate; use letters"),
        ("std", "`std` cannot be the name of a crate: it is a part of Rust's standard library; choose"),
        ("test", "`test` cannot be the name of a crate: it is Rust's library for tests"),
        (
            "voltaic",
            "`voltaic` cannot be the name of a crate: the crate would depend on another of its own name",
        ),
        ("proc-macro", "`proc-macro` cannot be"),
        ("match", "`match` cannot be the name of a crate: it is a keyword of Rust"),
        ("build", "`build` cannot be the name of a crate: cargo has a folder"),
        ("..", "`` is not a name for a crate; use letters"),
    ] {
        let output = new(folder.path(), name);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{name}: {text}");
        assert!(text.contains(complaint), "{name}: {text}");
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing was written");
}
