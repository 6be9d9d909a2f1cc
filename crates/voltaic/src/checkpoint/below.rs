//! Which paths that a checkpoint names may be acted on.

use std::path::{Component, Path};

/// Whether `path` is a checkpoint below `folder`, with `..` and symbolic links resolved.
///
/// Paths that were read from a file are removed or overwritten only if this holds. A symbolic link at `path` itself does not
/// matter: removing or renaming over it leaves what it leads to.
pub fn is_checkpoint_below(folder: &Path, path: &Path) -> bool {
    let Ok(rest) = path.strip_prefix(folder) else { return false };
    let is_plain = rest.components().all(|part| matches!(part, Component::Normal(_)));
    if !is_plain || rest.extension().is_none_or(|extension| extension != "ckpt") {
        return false;
    }
    let resolved = |path: &Path| match path.as_os_str().is_empty() {
        true => Path::new(".").canonicalize(),
        false => path.canonicalize(),
    };
    match (resolved(folder), path.parent().map(resolved)) {
        (Ok(folder), Some(Ok(parent))) => parent.starts_with(folder),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn only_checkpoints_below_the_folder_count() {
        let root = tempfile::tempdir().expect("temp folder");
        let folder = root.path().join("own");
        fs::create_dir_all(folder.join("sub")).expect("writable");
        fs::create_dir_all(root.path().join("own-other")).expect("writable");
        symlink(root.path(), folder.join("out")).expect("writable");
        symlink(folder.join("sub"), folder.join("in")).expect("writable");
        for (path, expected) in [
            ("own/a.ckpt", true),
            ("own/./a.ckpt", true),
            ("own/sub/a.ckpt", true),
            ("own/in/a.ckpt", true),
            ("own/out/a.ckpt", false),
            ("own/out/own/a.ckpt", true),
            ("own/../a.ckpt", false),
            ("own/sub/../a.ckpt", false),
            ("own/gone/a.ckpt", false),
            ("own-other/a.ckpt", false),
            ("own/a.txt", false),
            ("own/.ckpt", false),
            ("own", false),
        ] {
            assert_eq!(is_checkpoint_below(&folder, &root.path().join(path)), expected, "{path}");
        }
        assert!(!is_checkpoint_below(&folder, Path::new("/etc/a.ckpt")));
        assert!(is_checkpoint_below(Path::new(""), Path::new("a.ckpt")));
        assert!(!is_checkpoint_below(Path::new(""), Path::new("/tmp/a.ckpt")));
    }
}
