//! A read or a write, and the pieces that it is carried out in.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::ffi::files::buffer::{AlignedBuffer, DIRECT_ALIGN};

/// A file that is open for reading and writing, and what it is called in errors.
#[derive(Debug)]
pub struct NamedFile {
    /// Its handle; opened with `O_DIRECT` if the file system takes that.
    pub file: File,
    /// Where it is, or was.
    pub path: PathBuf,
}

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Read,
    Write,
}

/// What a transfer moves. Its pieces hold it, so that the memory lives as long as the kernel may use it.
#[derive(Debug)]
pub(super) struct Moved {
    pub direction: Direction,
    pub file: Arc<NamedFile>,
    /// First byte in the file.
    offset: u64,
    len: usize,
    /// First byte in memory.
    address: usize,
    state: Mutex<State>,
    is_done: Condvar,
    clock: Arc<Clock>,
}

#[derive(Debug)]
struct State {
    /// Pieces that are not done.
    num_left: usize,
    failure: Option<io::Error>,
    buffer: Option<AlignedBuffer>,
}

impl Moved {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// For how long something was under way.
#[derive(Debug, Default)]
pub(super) struct Clock(Mutex<(usize, Option<Instant>, Duration)>);

impl Clock {
    fn of(&self) -> MutexGuard<'_, (usize, Option<Instant>, Duration)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self) {
        let (num_transfers, since, _) = &mut *self.of();
        *num_transfers += 1;
        since.get_or_insert_with(Instant::now);
    }

    fn end(&self) {
        let (num_transfers, since, total) = &mut *self.of();
        *num_transfers = num_transfers.saturating_sub(1);
        if *num_transfers == 0 {
            *total += since.take().map_or(Duration::ZERO, |since| since.elapsed());
        }
    }

    /// All time in which at least one transfer was under way.
    pub fn busy(&self) -> Duration {
        let (_, since, total) = *self.of();
        total + since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

/// A read or write under way, which has the buffer until it is done. It goes on if this is dropped.
#[derive(Debug)]
#[must_use = "a transfer that is not waited for may fail unseen"]
pub struct Transfer {
    moved: Arc<Moved>,
    timeout: Duration,
}

impl Transfer {
    /// Of the first `len` bytes of the buffer, as pieces of at most `block` bytes.
    pub(super) fn new(
        direction: Direction,
        (file, offset): (&Arc<NamedFile>, u64),
        (buffer, len): (AlignedBuffer, usize),
        (block, clock): (usize, &Arc<Clock>),
        timeout: Duration,
    ) -> (Self, Vec<Piece>) {
        let (file, address) = (file.clone(), buffer.address());
        let state = Mutex::new(State { num_left: len.div_ceil(block), failure: None, buffer: Some(buffer) });
        let (is_done, clock) = (Condvar::new(), clock.clone());
        if len > 0 {
            clock.begin();
        }
        let moved = Arc::new(Moved { direction, file, offset, len, address, state, is_done, clock });
        let piece = |at: usize| Piece { moved: moved.clone(), at, len: block.min(len - at), is_done: false };
        let pieces = (0..len).step_by(block).map(piece).collect();
        (Self { moved, timeout }, pieces)
    }

    /// Whether [`Transfer::wait`] will not wait.
    pub fn is_done(&self) -> bool {
        self.moved.state().num_left == 0
    }

    /// Waits for the end, and returns the buffer.
    ///
    /// # Errors
    /// If a piece failed, or the file system did not answer in time; names the file, the offset and the bytes. The buffer is lost then.
    pub fn wait(self) -> Result<AlignedBuffer> {
        let until = Instant::now() + self.timeout;
        let mut state = self.moved.state();
        while state.num_left > 0 {
            let Some(left) = until.checked_duration_since(Instant::now()) else {
                let Moved { offset, len, .. } = *self.moved;
                let (missing, secs) = (state.num_left, self.timeout.as_secs_f64());
                let what =
                    format!("{len} bytes at offset {offset}: {missing} pieces are not done after {secs} s");
                return Err(self.moved.error(io::Error::new(ErrorKind::TimedOut, what)));
            };
            state = self.moved.is_done.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        if let Some(failure) = state.failure.take() {
            return Err(self.moved.error(failure));
        }
        let buffer = state.buffer.take();
        buffer.ok_or_else(|| self.moved.error(io::Error::other("the buffer is gone")))
    }
}

impl Moved {
    fn error(&self, source: io::Error) -> Error {
        let action = match self.direction {
            Direction::Read => "read",
            Direction::Write => "write",
        };
        let remedy = match source.kind() {
            ErrorKind::TimedOut => "check the disk (dmesg), or raise the time-out of the strategy",
            ErrorKind::UnexpectedEof => "do not change swap files while a run uses them",
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
                return Error::io(action, &self.file.path, source);
            }
            _ => "check the disk (dmesg), or name another one in nvme_path",
        };
        Error::Io { action, path: self.file.path.clone(), source, remedy: remedy.into() }
    }
}

/// A part of a transfer that one system call carries out, or what is left of it.
#[derive(Debug)]
pub(super) struct Piece {
    pub moved: Arc<Moved>,
    /// Where it begins within the transfer.
    at: usize,
    pub len: usize,
    is_done: bool,
}

impl Piece {
    /// First byte in the file.
    pub fn offset(&self) -> u64 {
        self.moved.offset + self.at as u64
    }

    /// First byte in memory. Nothing else uses the memory while the piece is there.
    pub fn address(&self) -> usize {
        self.moved.address + self.at
    }

    /// Takes what a system call has said. Returns whether there is more to do, which begins at a whole block: what is left of one is
    /// moved again.
    pub fn progress(&mut self, result: io::Result<usize>) -> bool {
        let moved = match result {
            Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {
                return true;
            }
            Err(error) => {
                self.fail(error);
                return false;
            }
            Ok(moved) => moved,
        };
        if moved >= self.len {
            self.finish(None);
            return false;
        }
        let whole = moved - moved % DIRECT_ALIGN;
        if whole == 0 {
            let text = format!("only {moved} bytes were moved");
            self.fail(match self.moved.direction {
                Direction::Read => {
                    io::Error::new(ErrorKind::UnexpectedEof, format!("{text}: the file has been cut"))
                }
                Direction::Write => io::Error::new(ErrorKind::WriteZero, text),
            });
            return false;
        }
        self.at += whole;
        self.len -= whole;
        true
    }

    /// The piece has failed.
    pub fn fail(&mut self, error: io::Error) {
        let what = format!("{} bytes at offset {}: {error}", self.len, self.offset());
        self.finish(Some(io::Error::new(error.kind(), what)));
    }

    fn finish(&mut self, failure: Option<io::Error>) {
        if std::mem::replace(&mut self.is_done, true) {
            return;
        }
        let mut state = self.moved.state();
        state.num_left -= 1;
        state.failure = state.failure.take().or(failure);
        if state.num_left == 0 {
            self.moved.clock.end();
            self.moved.is_done.notify_all();
        }
    }
}

impl Drop for Piece {
    /// Of a piece that is not carried out: its thread is gone.
    fn drop(&mut self) {
        if !self.is_done {
            self.fail(io::Error::other("the threads that read and write files have ended"));
        }
    }
}
