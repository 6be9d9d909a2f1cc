//! Lines for the user on standard error. A line that cannot be written, since the disk below is full or the terminal is
//! closed, must not end training: it is counted, and the count is written as soon as something can be written again.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};

/// Lines lost since the last that could be written.
static LOST: AtomicU64 = AtomicU64::new(0);

/// Writes text of whole lines to standard error.
pub(crate) fn write_stderr(text: &str) {
    write_lines(&mut io::stderr().lock(), text.as_bytes(), &LOST);
}

/// Writes how many lines were lost, if some were. To be called before the process ends.
pub(crate) fn report_lost_lines() {
    write_lines(&mut io::stderr().lock(), b"", &LOST);
}

fn write_lines(out: &mut impl Write, text: &[u8], lost: &AtomicU64) {
    let before = lost.load(Ordering::Relaxed);
    let written = match before {
        0 => Ok(()),
        1 => writeln!(out, "warning: 1 line of output before this one was lost: it could not be written"),
        _ => writeln!(
            out,
            "warning: {before} lines of output before this one were lost: they could not be written"
        ),
    };
    if written.is_ok() {
        lost.fetch_sub(before, Ordering::Relaxed);
    }
    if written.and_then(|()| out.write_all(text)).and_then(|()| out.flush()).is_err() {
        let lines = text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()).count();
        lost.fetch_add(lines as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk with room for so many bytes.
    struct Disk {
        room: usize,
        text: Vec<u8>,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let taken = bytes.len().min(self.room);
            if taken == 0 && !bytes.is_empty() {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.room -= taken;
            self.text.extend_from_slice(&bytes[..taken]);
            Ok(taken)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lost_lines_are_counted_and_said_when_there_is_room_again() {
        let (lost, mut disk) = (AtomicU64::new(0), Disk { room: 4, text: Vec::new() });
        write_lines(&mut disk, b"one\n", &lost);
        write_lines(&mut disk, b"two\nthree\n", &lost);
        write_lines(&mut disk, b"four\n", &lost);
        assert_eq!(lost.load(Ordering::Relaxed), 3);
        disk.room = 1000;
        write_lines(&mut disk, b"five\n", &lost);
        write_lines(&mut disk, b"six\n", &lost);
        let text = String::from_utf8(disk.text).unwrap();
        let expected = "one\nwarning: 3 lines of output before this one were lost: they could not be written\nfive\nsix\n";
        assert_eq!(text, expected);
        assert_eq!(lost.load(Ordering::Relaxed), 0);
    }
}
