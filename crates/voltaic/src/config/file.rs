//! Opens files that a user names: what never ends or never begins is not read as a file.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Opens a file for reading.
///
/// # Errors
/// Those of the system, and [`ErrorKind::InvalidInput`] if the path leads to a folder, a device, a pipe or a socket. Opening a
/// pipe does not wait for its writer.
pub(crate) fn open_file(path: &Path) -> Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let kind = file.metadata()?.file_type();
    if kind.is_file() {
        return Ok(file);
    }
    let what = if kind.is_dir() { "it is a folder" } else { "it is a device, pipe or socket, not a file" };
    Err(Error::new(ErrorKind::InvalidInput, what))
}

/// The whole content of a file of at most `limit` bytes.
///
/// # Errors
/// As [`open_file`], and [`ErrorKind::InvalidData`] if it has more.
pub(crate) fn read_file(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let file = open_file(path)?;
    let length = usize::try_from(file.metadata()?.len().min(limit)).unwrap_or(usize::MAX);
    let mut bytes = Vec::new();
    // a large file is not copied while it grows, and one that is too large for memory is an error
    bytes.try_reserve_exact(length.saturating_add(1)).map_err(|_| Error::from(ErrorKind::OutOfMemory))?;
    read_into(bytes, file, limit)
}

/// The whole text of a file of at most `limit` bytes.
///
/// # Errors
/// As [`read_file`], and [`ErrorKind::InvalidData`] if it is not UTF-8.
pub(crate) fn read_text_file(path: &Path, limit: u64) -> Result<String> {
    String::from_utf8(read_file(path, limit)?).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Error::new(ErrorKind::InvalidData, format!("it is not UTF-8 text at byte {at}"))
    })
}

/// What is left of `reader`, at most `limit` bytes.
///
/// # Errors
/// [`ErrorKind::InvalidData`] if there is more.
pub(crate) fn read_at_most(reader: impl Read, limit: u64) -> Result<Vec<u8>> {
    read_into(Vec::new(), reader, limit)
}

fn read_into(mut bytes: Vec<u8>, reader: impl Read, limit: u64) -> Result<Vec<u8>> {
    reader.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(Error::new(ErrorKind::InvalidData, format!("it has more than {limit} bytes")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_pipes_and_folders_are_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let (pipe, file) = (folder.path().join("pipe"), folder.path().join("file"));
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        std::fs::write(&file, "text").unwrap();
        for (path, expected) in [
            (pipe.as_path(), "a device, pipe"),
            (Path::new("/dev/zero"), "a device, pipe"),
            (folder.path(), "a folder"),
        ] {
            let error = read_file(path, 1 << 20).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
        assert_eq!(read_file(&file, 4).unwrap(), b"text");
        assert_eq!(read_file(&file, 3).unwrap_err().kind(), ErrorKind::InvalidData);
        assert_eq!(read_text_file(&file, 4).unwrap(), "text");
        std::fs::write(&file, b"t\xff").unwrap();
        let error = read_text_file(&file, 4).unwrap_err();
        assert_eq!(error.to_string(), "it is not UTF-8 text at byte 1");
    }
}
