//! The folder of a checkpoint: what may be in it, how it takes the place of another, and how it is removed.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use rustix::fs::CWD;

use crate::error::{Error, Result};

/// The file that makes a folder a checkpoint.
pub(in crate::checkpoint) const INDEX: &str = "index.json";

/// The file of a rank.
pub(in crate::checkpoint) fn file_name(rank: usize) -> String {
    format!("rank-{rank}.safetensors")
}

fn is_own_name(name: &OsStr) -> bool {
    let rank = name.to_str().and_then(|name| name.strip_prefix("rank-")?.strip_suffix(".safetensors"));
    name == INDEX || rank.is_some_and(|rank| !rank.is_empty() && rank.bytes().all(|b| b.is_ascii_digit()))
}

/// Whether a checkpoint is a folder, or a link to one.
pub(crate) fn is_folder(path: &Path) -> bool {
    path.is_dir()
}

/// Whether `path` is a folder, not a link to one, that has an index and nothing but files of a checkpoint: it may be replaced
/// and removed.
pub(in crate::checkpoint) fn is_own_folder(path: &Path) -> bool {
    let is_folder = path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir());
    let Some(entries) = is_folder.then(|| fs::read_dir(path).ok()).flatten() else { return false };
    let mut has_index = false;
    for entry in entries {
        let Ok(entry) = entry else { return false };
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        if !is_file || !is_own_name(&entry.file_name()) {
            return false;
        }
        has_index |= entry.file_name() == INDEX;
    }
    has_index
}

/// Removes the files of a checkpoint in a folder, and the folder if nothing else is in it. The index goes first, so that what
/// is left of an interrupted removal is not a checkpoint.
///
/// # Errors
/// [`Error::Io`] if a file cannot be removed; that the folder is gone already is not an error.
pub(in crate::checkpoint) fn remove_folder(path: &Path) -> Result<()> {
    let gone = |action, path: &Path, done: io::Result<()>| match done {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(Error::io(action, path, error)),
        _ => Ok(()),
    };
    let index = path.join(INDEX);
    gone("remove", &index, fs::remove_file(&index))?;
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        if is_file && is_own_name(&entry.file_name()) {
            gone("remove", &entry.path(), fs::remove_file(entry.path()))?;
        }
    }
    gone("remove", path, fs::remove_dir(path))
}

/// # Errors
/// [`Error::Io`] if a folder is not a checkpoint.
pub(in crate::checkpoint) fn check_own_folder(path: &Path) -> Result<()> {
    if is_own_folder(path) {
        return Ok(());
    }
    let what = "it is a folder with other things than a checkpoint in it, or without index.json: not a checkpoint; move it away";
    Err(Error::io("remove", path, io::Error::new(ErrorKind::InvalidInput, what)))
}

/// Puts a finished file or folder, called `temporary`, in the place of `path`, which is a folder of ours, or a file or link: it is
/// there at each moment. The old one is removed.
///
/// # Errors
/// [`Error::Io`]; `path` is as before, but for file systems that cannot exchange two names: there it may be gone for the moment
/// between two calls, under a name beside it.
pub(in crate::checkpoint) fn exchange(temporary: &Path, path: &Path) -> Result<()> {
    exchange_by(temporary, path, |a, b| {
        rustix::fs::renameat_with(CWD, a, CWD, b, rustix::fs::RenameFlags::EXCHANGE)
    })
}

/// The same with a way to exchange two names, which a file system may not have.
fn exchange_by(
    temporary: &Path,
    path: &Path,
    swap: impl FnOnce(&Path, &Path) -> rustix::io::Result<()>,
) -> Result<()> {
    let fail = |error: io::Error| Error::io("rename to", path, error);
    let old = match swap(temporary, path) {
        Ok(()) => temporary.to_path_buf(),
        // NFS and others
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS | rustix::io::Errno::NOTSUP) => {
            let mut aside = temporary.as_os_str().to_owned();
            aside.push(".old");
            let aside = PathBuf::from(aside);
            fs::rename(path, &aside).map_err(fail)?;
            if let Err(error) = fs::rename(temporary, path) {
                let _ = fs::rename(&aside, path); // the error above is the cause
                return Err(fail(error));
            }
            // the free name is one that `remove_leftovers` removes; under the other it would get its name back
            match fs::rename(&aside, temporary) {
                Ok(()) => temporary.to_path_buf(),
                Err(_) => aside,
            }
        }
        Err(error) => return Err(fail(error.into())),
    };
    match old.symlink_metadata() {
        Ok(metadata) if metadata.is_dir() => remove_folder(&old),
        _ => fs::remove_file(&old).or_else(|error| match error.kind() {
            ErrorKind::NotFound => Ok(()),
            _ => Err(Error::io("remove", &old, error)),
        }),
    }
}

/// A rename, or a new file, is on disk only once its folder is.
pub(in crate::checkpoint) fn flush_folder(folder: &Path) -> Result<()> {
    File::open(folder).and_then(|f| f.sync_all()).map_err(|e| Error::io("flush to disk", folder, e))
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    fn folder_with(root: &Path, name: &str, files: &[&str]) -> PathBuf {
        let path = root.join(name);
        fs::create_dir(&path).unwrap();
        files.iter().for_each(|file| fs::write(path.join(file), *file).unwrap());
        path
    }

    #[test]
    fn only_folders_of_ours_may_be_removed() {
        let root = tempfile::tempdir().unwrap();
        let own = folder_with(root.path(), "a.ckpt", &[INDEX, "rank-0.safetensors", "rank-12.safetensors"]);
        let without_index = folder_with(root.path(), "b.ckpt", &["rank-0.safetensors"]);
        let with_more = folder_with(root.path(), "c.ckpt", &[INDEX, "rank-0.safetensors", "notes.txt"]);
        let with_folder = folder_with(root.path(), "d.ckpt", &[INDEX]);
        fs::create_dir(with_folder.join("rank-1.safetensors")).unwrap();
        let link = root.path().join("link.ckpt");
        std::os::unix::fs::symlink(&own, &link).unwrap();
        for foreign in [&without_index, &with_more, &with_folder] {
            let error = check_own_folder(foreign).unwrap_err().to_string();
            assert!(error.contains("other things than a checkpoint"), "{error}");
        }
        assert!(check_own_folder(&link).is_err(), "the link itself is a file to remove");
        check_own_folder(&own).unwrap();
        remove_folder(&own).unwrap();
        assert!(!own.exists());
    }

    #[test]
    fn a_folder_takes_the_place_of_a_folder_a_file_or_a_link() {
        let root = tempfile::tempdir().unwrap();
        for old in ["folder", "file", "link"] {
            let path = root.path().join(format!("{old}.ckpt"));
            let kept = folder_with(root.path(), &format!("kept-{old}"), &[INDEX]);
            match old {
                "folder" => drop(folder_with(root.path(), "folder.ckpt", &[INDEX, "rank-0.safetensors"])),
                "file" => fs::write(&path, "old").unwrap(),
                _ => std::os::unix::fs::symlink(&kept, &path).unwrap(),
            }
            let new = folder_with(root.path(), &format!(".{old}.new"), &[INDEX, "rank-7.safetensors"]);
            exchange(&new, &path).unwrap();
            assert!(path.join("rank-7.safetensors").exists() && !path.join("rank-0.safetensors").exists());
            assert!(path.symlink_metadata().unwrap().is_dir() && !new.exists());
            assert!(kept.join(INDEX).exists(), "what a link leads to stays");
            // where the file system cannot exchange names
            for (again, error) in [Errno::INVAL, Errno::NOSYS, Errno::NOTSUP].into_iter().enumerate() {
                let rank = format!("rank-{again}.safetensors");
                let new = folder_with(root.path(), &format!(".{old}.new"), &[INDEX, &rank]);
                exchange_by(&new, &path, |_, _| Err(error)).unwrap();
                assert!(path.join(rank).exists() && !path.join("rank-7.safetensors").exists());
                let left: Vec<_> = fs::read_dir(root.path()).unwrap().flatten().collect();
                let left = left.iter().filter(|entry| entry.file_name().to_string_lossy().contains(".new"));
                assert_eq!(left.count(), 0, "nothing is left beside it");
            }
            let new = folder_with(root.path(), &format!(".{old}.new"), &[INDEX, "rank-7.safetensors"]);
            exchange_by(&new, &path, |_, _| Err(Errno::ACCESS)).unwrap_err();
            assert!(path.join("rank-2.safetensors").exists() && new.exists(), "all is as before");
            remove_folder(&new).unwrap();
        }
    }

    #[test]
    fn a_rename_that_fails_after_the_first_puts_the_old_one_back() {
        let root = tempfile::tempdir().unwrap();
        let path = folder_with(root.path(), "a.ckpt", &[INDEX, "rank-0.safetensors"]);
        let gone = root.path().join(".a.ckpt.abc.tmp"); // as if another process had removed it
        exchange_by(&gone, &path, |_, _| Err(Errno::NOSYS)).unwrap_err();
        assert!(path.join("rank-0.safetensors").exists());
    }
}
