//! Opens files that a user names: what never ends or never begins is not read as a file.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, IsTerminal, Read, Result};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

/// How often a pipe without data is looked at.
const GLANCE: Duration = Duration::from_millis(10);

/// How long a pipe may have nothing to read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PipeLimits {
    /// A named pipe, without a process that writes to it.
    pub no_writer: Duration,
    /// Any pipe, with one.
    pub silence: Duration,
}

/// Opens a file for reading.
///
/// # Errors
/// Those of the system, and [`ErrorKind::InvalidInput`] if the path leads to a folder, a device, a pipe or a socket. Opening a
/// pipe does not wait for its writer.
pub(crate) fn open_file(path: &Path) -> Result<File> {
    let file = open_at_once(path)?;
    let kind = file.metadata()?.file_type();
    if kind.is_file() {
        return Ok(file);
    }
    let what = if kind.is_dir() { "it is a folder" } else { "it is a device, pipe or socket, not a file" };
    Err(Error::new(ErrorKind::InvalidInput, what))
}

fn open_at_once(path: &Path) -> Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)
}

/// The whole content of a file, a pipe (`<(command)`, `/dev/stdin`) or a terminal, of at most `limit` bytes.
///
/// # Errors
/// As [`read_file`], but for pipes and terminals; [`ErrorKind::TimedOut`] if one has nothing to read for longer than `patience`.
pub(crate) fn read_file_or_pipe(path: &Path, limit: u64, patience: PipeLimits) -> Result<Vec<u8>> {
    let file = open_at_once(path)?;
    let kind = file.metadata()?.file_type();
    if kind.is_file() {
        return read_into(Vec::new(), file, limit);
    }
    if !kind.is_fifo() && !file.is_terminal() {
        let what = if kind.is_dir() { "it is a folder" } else { "it is a device or socket, not a file" };
        return Err(Error::new(ErrorKind::InvalidInput, what));
    }
    // a pipe without a name had its writer from the beginning
    let awaits_writer = kind.is_fifo() && path.canonicalize().is_ok();
    read_into(Vec::new(), Pipe { file, awaits_writer, patience, last: Instant::now() }, limit)
}

/// A pipe that was opened without waiting.
struct Pipe {
    file: File,
    /// No writer has opened the pipe, or has written to it, yet.
    awaits_writer: bool,
    patience: PipeLimits,
    /// When there was something to read last.
    last: Instant,
}

impl Read for Pipe {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        loop {
            let (limit, what) = match self.file.read(buffer) {
                Ok(0) if self.awaits_writer => {
                    (self.patience.no_writer, "no process has opened it for writing")
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    (self.patience.silence, "its writer has written nothing")
                }
                done => {
                    (self.awaits_writer, self.last) = (false, Instant::now());
                    return done;
                }
            };
            if self.last.elapsed() > limit {
                let what = format!("it is a pipe, and {what} for {} s", limit.as_secs_f32());
                return Err(Error::new(ErrorKind::TimedOut, what));
            }
            std::thread::sleep(GLANCE);
        }
    }
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
        let patience =
            PipeLimits { no_writer: Duration::from_millis(50), silence: Duration::from_millis(50) };
        let read = |path: &Path| read_file_or_pipe(path, 1 << 20, patience);
        assert_eq!(read(&file).unwrap(), b"text");
        assert!(
            read(&pipe).unwrap_err().to_string().contains("no process has opened it for writing for 0.05 s")
        );
        for path in [Path::new("/dev/zero"), Path::new("/dev/null"), folder.path()] {
            assert_eq!(read(path).unwrap_err().kind(), ErrorKind::InvalidInput, "{}", path.display());
        }
        assert_eq!(read_file(&file, 4).unwrap(), b"text");
        assert_eq!(read_file(&file, 3).unwrap_err().kind(), ErrorKind::InvalidData);
        assert_eq!(read_text_file(&file, 4).unwrap(), "text");
        std::fs::write(&file, b"t\xff").unwrap();
        let error = read_text_file(&file, 4).unwrap_err();
        assert_eq!(error.to_string(), "it is not UTF-8 text at byte 1");
    }

    #[test]
    fn pipes_are_read_to_their_end_and_waited_for_as_long_as_is_allowed() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let patience = PipeLimits { no_writer: Duration::from_secs(20), silence: Duration::from_millis(300) };
        for (script, expected) in [
            // the writer comes late, and writes in two parts
            ("sleep 0.1; (printf ab; sleep 0.1; printf c) > pipe", Ok("abc")),
            ("sleep 5 > pipe", Err("its writer has written nothing for 0.3 s")),
        ] {
            let mut writer = std::process::Command::new("sh");
            let mut writer = writer.args(["-c", script]).current_dir(folder.path()).spawn().unwrap();
            let read = read_file_or_pipe(&pipe, 1 << 20, patience);
            match (read, expected) {
                (Ok(bytes), Ok(text)) => assert_eq!(bytes, text.as_bytes()),
                (Err(error), Err(text)) => assert!(error.to_string().contains(text), "{error}"),
                (read, expected) => panic!("{script}: {read:?}, not {expected:?}"),
            }
            let _ = writer.kill();
            writer.wait().unwrap();
        }
        // a pipe without a name ends with its writer
        let (reader, writer) = std::io::pipe().unwrap();
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&reader));
        drop(writer);
        assert_eq!(read_file_or_pipe(Path::new(&path), 1, patience).unwrap(), b"");
    }
}
