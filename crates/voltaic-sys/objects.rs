//! Which objects of the shim must be compiled again: part of the build script, and of its test.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::{fs, io};

/// Files that differ from one build of libtorch to the next, in its folder: versions, build options, and the class that
/// the list of operators is generated into.
const IDENTITY: [&str; 6] = [
    "build-version",
    "version.py",
    "include/torch/headeronly/version.h",
    "include/torch/csrc/api/include/torch/version.h",
    "include/c10/macros/cmake_macros.h",
    "include/ATen/core/TensorBody.h",
];

/// Those of the files that tell one libtorch from another that the one in `libtorch` has.
pub fn identity_files(libtorch: &Path) -> Vec<PathBuf> {
    IDENTITY.iter().map(|name| libtorch.join(name)).filter(|path| path.exists()).collect()
}

/// The C++ files of the folder `own` and of those in it, in order.
pub fn sources(own: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(own)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(sources(&path)?);
        } else if path.extension().is_some_and(|ext| ext == "cpp") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// The name of the object of `source`: its path below `own`, so that files of two folders may have the same name.
pub fn name(source: &Path, own: &Path) -> String {
    let below = source.strip_prefix(own).unwrap_or(source).with_extension("o");
    below.iter().map(|part| part.to_string_lossy()).collect::<Vec<_>>().join("-")
}

/// What an object is made from: `source` and what it includes of the folder `own`, and the headers of the libtorch in
/// the folder `libtorch`.
pub fn made_from(source: &Path, own: &Path, libtorch: &Path) -> io::Result<String> {
    let mut hasher = DefaultHasher::new();
    hash_with_headers(source, own, &mut BTreeSet::new(), &mut hasher)?;
    for path in identity_files(libtorch) {
        fs::read(path)?.hash(&mut hasher);
    }
    Ok(format!("{:016x}", hasher.finish()))
}

/// Hashes a file and those of the folder `own` that it includes.
fn hash_with_headers(
    path: &Path,
    own: &Path,
    seen: &mut BTreeSet<PathBuf>,
    hasher: &mut DefaultHasher,
) -> io::Result<()> {
    if !seen.insert(path.to_owned()) {
        return Ok(());
    }
    let text = fs::read_to_string(path)?;
    text.hash(hasher);
    for line in text.lines() {
        let name = line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"'));
        if let Some(header) = name.map(|name| own.join(name)).filter(|header| header.exists()) {
            hash_with_headers(&header, own, seen, hasher)?;
        }
    }
    Ok(())
}
