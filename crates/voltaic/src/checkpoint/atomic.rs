//! Files that are either the old one or the new one, whatever happens in between.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};

/// Writes a file through `write` so that `path` never holds a partial one: a temporary file beside it, flushed to
/// disk, then renamed, then the folder flushed. Creates the folder.
///
/// # Errors
/// [`Error::Io`]; the temporary file is removed and `path` is as before.
pub fn write_atomically(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<()>,
) -> Result<()> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(|e| Error::io("create folder", folder, e))?;
    let temporary = temporary_path(path);
    let result = write_and_rename(path, folder, &temporary, write);
    if result.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    result
}

fn write_and_rename(
    path: &Path,
    folder: &Path,
    temporary: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<()>,
) -> Result<()> {
    let file = File::create(temporary).map_err(|e| Error::io("create", temporary, e))?;
    // tells `remove_leftovers` that the writer lives; a file system without locks leaves it nothing to remove
    let _ = file.try_lock();
    let mut writer = BufWriter::with_capacity(1 << 20, file);
    write(&mut writer).and_then(|()| writer.flush()).map_err(|e| Error::io("write", temporary, e))?;
    writer.get_ref().sync_all().map_err(|e| Error::io("flush to disk", temporary, e))?;
    drop(writer);
    fs::rename(temporary, path).map_err(|e| Error::io("rename to", path, e))?;
    // the rename itself is on disk only once the folder is
    File::open(folder).and_then(|f| f.sync_all()).map_err(|e| Error::io("flush to disk", folder, e))
}

/// `.name.<pid>-<n>.tmp` beside the file, so that a leftover of a killed process is never taken for a checkpoint.
fn temporary_path(path: &Path) -> PathBuf {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let unique = COUNTER.fetch_add(1, Ordering::Relaxed);
    path.with_file_name(format!(".{name}.{}-{unique}.tmp", std::process::id()))
}

/// Removes temporary files of checkpoints in `folder` whose writers were killed.
///
/// A file whose writer lives, in this process or another, is locked and stays.
pub fn remove_leftovers(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_temporary = name.starts_with('.') && name.contains(".ckpt.") && name.ends_with(".tmp");
        if is_temporary && File::open(entry.path()).is_ok_and(|file| file.try_lock().is_ok()) {
            tracing::info!("removing {}, left by a run that was killed", entry.path().display());
            let _ = fs::remove_file(entry.path()); // it only takes space
        }
    }
}

/// Removes a file; that it is gone already is not an error.
///
/// # Errors
/// [`Error::Io`] if it is there and cannot be removed.
pub fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", path, error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftovers_go_unless_their_writer_lives() {
        let folder = tempfile::tempdir().expect("temp folder");
        let path = folder.path().join("a.ckpt");
        for name in [".a.ckpt.1-0.tmp", ".b.ckpt.77-3.tmp", "b.ckpt", ".other.tmp"] {
            File::create(folder.path().join(name)).expect("writable");
        }
        write_atomically(&path, |_| {
            remove_leftovers(folder.path());
            Ok(())
        })
        .expect("its own temporary file was left alone");
        let mut left: Vec<_> = fs::read_dir(folder.path())
            .expect("listable")
            .map(|entry| entry.expect("readable").file_name().into_string().expect("text"))
            .collect();
        left.sort();
        assert_eq!(left, [".other.tmp", "a.ckpt", "b.ckpt"]);
    }

    #[test]
    fn a_failed_write_leaves_the_old_file_and_no_other() {
        let folder = tempfile::tempdir().expect("temp folder");
        let path = folder.path().join("sub/a.ckpt");
        write_atomically(&path, |w| w.write_all(b"old")).expect("first write");
        let error = write_atomically(&path, |w| {
            w.write_all(b"new")?;
            Err(std::io::Error::from(std::io::ErrorKind::StorageFull))
        })
        .expect_err("the writer failed");
        assert!(error.to_string().contains("free some disk space"), "{error}");
        assert_eq!(fs::read(&path).expect("readable"), b"old");
        assert_eq!(fs::read_dir(path.parent().expect("has a parent")).expect("listable").count(), 1);
    }
}
