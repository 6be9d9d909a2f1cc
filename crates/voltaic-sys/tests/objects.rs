//! The build script compiles a unit of the shim again when what it is made from has changed, and only then.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]

#[path = "../objects.rs"]
mod objects;

use std::fs;
use std::path::Path;
use std::time::SystemTime;

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
    let made_from = || objects::made_from(&source, &own, &libtorch, "c++ 14 -O2").unwrap();

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
    let other_compiler = objects::made_from(&source, &own, &libtorch, "c++ 15 -O2").unwrap();
    assert!(!seen.contains(&other_compiler));
}

#[test]
fn a_folder_is_a_unit() {
    let own = Path::new(env!("CARGO_TARGET_TMPDIR")).join("folders");
    let _ = fs::remove_dir_all(&own);
    for name in
        ["tensor/rng.cpp", "device/rng.cpp", "device/a.cpp", "rng.cpp", "device/rng.h", "device/x/b.cpp"]
    {
        write(&own.join(name), "");
    }
    let units: Vec<_> = objects::units(&own).unwrap().into_iter().collect();
    let expected = [
        ("csrc", "#include \"rng.cpp\"\n"),
        ("csrc-device", "#include \"device/a.cpp\"\n#include \"device/rng.cpp\"\n"),
        ("csrc-device-x", "#include \"device/x/b.cpp\"\n"),
        ("csrc-tensor", "#include \"tensor/rng.cpp\"\n"),
    ];
    assert_eq!(units, expected.map(|(name, text)| (name.to_owned(), text.to_owned())));
}

#[test]
fn objects_are_kept_while_they_are_used() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache");
    let _ = fs::remove_dir_all(&folder);
    let made = folder.join("out/a.o");
    write(&made, "object");
    let cache = objects::Cache::new(&folder.join("shim"));
    assert_eq!(cache.put("a-1.o", made.clone()), made, "a cache that cannot be written to is left alone");
    fs::create_dir_all(folder.join("shim")).unwrap();
    assert_eq!(cache.get("a-1.o"), None);
    let long_ago = SystemTime::now() - objects::Cache::KEPT * 2;
    for name in ["a-1.o", "a-2.o"] {
        let kept = cache.put(name, made.clone());
        assert_eq!(fs::read_to_string(&kept).unwrap(), "object");
        fs::File::open(kept).unwrap().set_modified(long_ago).unwrap();
    }
    assert!(cache.get("a-2.o").is_some());
    let _ = cache.put("a-3.o", made);
    let kept = ["a-1.o", "a-2.o", "a-3.o"].map(|name| cache.get(name).is_some());
    assert_eq!(kept, [false, true, true]);
    assert_eq!(fs::read_dir(folder.join("shim")).unwrap().count(), 2, "nothing half written is left");
}
