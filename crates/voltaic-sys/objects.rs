//! What the shim is compiled in, and where the objects are kept: part of the build script, and of its test.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use std::{fs, io, process};

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

/// The units that the C++ files below the folder `own` are compiled in: name and text. Those of one folder are one unit,
/// because most of the time goes to libtorch's headers.
pub fn units(own: &Path) -> io::Result<BTreeMap<String, String>> {
    let mut units = BTreeMap::new();
    add_units(own, own, &mut units)?;
    Ok(units)
}

fn add_units(folder: &Path, own: &Path, units: &mut BTreeMap<String, String>) -> io::Result<()> {
    let mut paths: Vec<_> =
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?;
    paths.sort();
    for path in paths {
        let below = path.strip_prefix(own).unwrap_or(&path);
        if path.is_dir() {
            add_units(&path, own, units)?;
        } else if path.extension().is_some_and(|ext| ext == "cpp") {
            let parts: Vec<_> = below.iter().map(|part| part.to_string_lossy()).collect();
            let name = ["csrc"].into_iter().chain(parts[..parts.len() - 1].iter().map(AsRef::as_ref));
            let unit: &mut String = units.entry(name.collect::<Vec<_>>().join("-")).or_default();
            unit.push_str(&format!("#include \"{}\"\n", parts.join("/")));
        }
    }
    Ok(())
}

/// What an object is made from: the file `unit` and what it includes of the folder `own`, the headers of the libtorch in
/// the folder `libtorch`, and the `command` of the compiler.
pub fn made_from(unit: &Path, own: &Path, libtorch: &Path, command: &str) -> io::Result<String> {
    let mut hasher = DefaultHasher::new();
    command.hash(&mut hasher);
    hash_with_headers(unit, own, &mut BTreeSet::new(), &mut hasher)?;
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

/// A folder of objects by names that are never used for others.
pub struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// An object that no build has used for so long is removed.
    pub const KEPT: Duration = Duration::from_secs(30 * 24 * 3600);

    pub fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned() }
    }

    /// The object `name`, noted as used.
    pub fn get(&self, name: &str) -> Option<PathBuf> {
        let path = self.folder.join(name);
        let file = fs::File::open(&path).ok()?;
        let _ = file.set_modified(SystemTime::now()); // another user's cache may be read only
        Some(path)
    }

    /// Keeps the object `made` as `name`; where it is then. It stays where it is if it cannot be kept.
    pub fn put(&self, name: &str, made: PathBuf) -> PathBuf {
        let path = self.folder.join(name);
        let part = self.folder.join(format!("{name}.{}", process::id()));
        let kept = fs::copy(&made, &part)
            .and_then(|_| fs::File::open(&part)?.sync_all())
            .and_then(|()| fs::rename(&part, &path));
        if kept.is_err() {
            let _ = fs::remove_file(part);
            return made;
        }
        self.remove_old();
        path
    }

    fn remove_old(&self) {
        for path in fs::read_dir(&self.folder).into_iter().flatten().flatten().map(|entry| entry.path()) {
            let used = fs::metadata(&path).and_then(|data| data.modified());
            if used.is_ok_and(|used| used.elapsed().is_ok_and(|since| since > Self::KEPT)) {
                let _ = fs::remove_file(path);
            }
        }
    }
}
