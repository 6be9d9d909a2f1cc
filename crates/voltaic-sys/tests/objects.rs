//! The build script compiles objects of the shim again when what they are made from has changed.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]

#[path = "../objects.rs"]
mod objects;

use std::fs;
use std::path::Path;

/// Writes a file and the folders that it is in.
fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

#[test]
fn another_libtorch_in_the_same_folder_makes_objects_stale() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("objects");
    let _ = fs::remove_dir_all(&folder);
    let (own, libtorch) = (folder.join("csrc"), folder.join("libtorch"));
    let source = own.join("a.cpp");
    write(&source, "#include \"a.h\"\n#include <ATen/ATen.h>\n");
    write(&own.join("a.h"), "int a;\n");
    let version = libtorch.join("include/torch/headeronly/version.h");
    write(&version, "#define TORCH_VERSION \"2.11.0\"\n");
    write(&libtorch.join("build-version"), "2.11.0+cpu\n");
    let made_from = || objects::made_from(&source, &own, &libtorch).unwrap();

    let mut seen = vec![made_from()];
    assert_eq!(made_from(), seen[0], "nothing changed");
    assert_eq!(objects::identity_files(&libtorch).len(), 2, "cargo is told to look at both");
    for (path, text) in [
        (&version, "#define TORCH_VERSION \"2.11.1\"\n"),
        (&libtorch.join("build-version"), "2.11.0+cu130\n"),
        (&libtorch.join("include/ATen/core/TensorBody.h"), "class Tensor {};\n"),
        (&own.join("a.h"), "long a;\n"),
        (&source, "#include \"a.h\"\n"),
    ] {
        write(path, text);
        let now = made_from();
        assert!(!seen.contains(&now), "{} has changed", path.display());
        seen.push(now);
    }
}

#[test]
fn files_of_two_folders_may_have_the_same_name() {
    let own = Path::new(env!("CARGO_TARGET_TMPDIR")).join("folders");
    let _ = fs::remove_dir_all(&own);
    for name in ["tensor/rng.cpp", "device/rng.cpp", "rng.cpp", "device/rng.h"] {
        write(&own.join(name), "");
    }
    let sources = objects::sources(&own).unwrap();
    let names: Vec<_> = sources.iter().map(|source| objects::name(source, &own)).collect();
    assert_eq!(names, ["device-rng.o", "rng.o", "tensor-rng.o"]);
}
