//! Who reads and writes files beside the caller.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};
use schemars::JsonSchema;
use serde::Deserialize;
use voltaic_macros::Defaults;

use crate::error::{ConfigError, Error, Result};
use crate::ffi::files::buffer::{AlignedBuffer, DIRECT_ALIGN};
use crate::ffi::files::ring::Ring;
use crate::ffi::files::threads;
use crate::ffi::files::transfer::{Clock, Direction, NamedFile, Piece, Transfer};

/// The most bytes of one system call.
const MAX_BLOCK: usize = 1 << 30;
/// The most threads that block, and pieces of a ring.
const MAX_THREADS: usize = 64;
const MAX_DEPTH: usize = 4096;

/// By which system calls files are read and written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileBackend {
    /// io_uring if the kernel allows it, else threads.
    #[default]
    Auto,
    /// io_uring: the kernel carries out many reads and writes of one thread at a time.
    IoUring,
    /// Threads, each of which reads or writes one piece at a time.
    Threads,
}

impl fmt::Display for FileBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::IoUring => "io_uring",
            Self::Threads => "threads",
        })
    }
}

/// How files are read and written: DeepSpeed's section `aio`, with its defaults.
#[derive(Defaults, Debug, Clone, PartialEq, Eq)]
pub struct FileOptions {
    /// The system calls.
    pub backend: FileBackend,
    /// Bytes of one piece of a read or write, rounded up to a multiple of [`DIRECT_ALIGN`]; at most 1 GiB.
    #[default(1 << 20)]
    pub block_size: usize,
    /// Pieces under way at a time, for each of `intra_op_parallelism`.
    #[default(8)]
    pub queue_depth: usize,
    /// Rings of io_uring; with threads there are `queue_depth` for each, at most 64.
    #[default(1)]
    pub intra_op_parallelism: usize,
    /// Hands pieces to io_uring one by one, not as many as there are.
    pub single_submit: bool,
    /// Hands further pieces to io_uring as soon as one is done, not when all are.
    #[default(true)]
    pub overlap_events: bool,
    /// How long a read or write may take.
    #[default(Duration::from_secs(600))]
    pub timeout: Duration,
}

/// Threads that read and write files. Transfers are begun in order, and may end in any.
///
/// The threads end when the engine is dropped and all transfers are done.
#[derive(Debug)]
pub struct FileEngine {
    pieces: Sender<Piece>,
    backend: FileBackend,
    block_size: usize,
    timeout: Duration,
    clock: Arc<Clock>,
}

impl FileEngine {
    /// Starts the threads.
    ///
    /// # Errors
    /// If the kernel forbids io_uring and it was asked for, or threads cannot be started.
    pub fn new(options: &FileOptions) -> Result<Self> {
        let (sender, receiver) = crossbeam_channel::unbounded();
        let backend = match options.backend {
            FileBackend::Threads => FileBackend::Threads,
            asked => match rings(options) {
                Ok(rings) => {
                    for ring in rings {
                        let pieces = receiver.clone();
                        spawn(move || ring.run(&pieces))?;
                    }
                    FileBackend::IoUring
                }
                Err(error) if asked == FileBackend::Auto => {
                    tracing::info!(
                        "files are read and written by threads: the kernel has no io_uring for us ({error})"
                    );
                    FileBackend::Threads
                }
                Err(error) => {
                    let what = format!("io_uring, which the kernel does not give us: {error}");
                    let remedy = "use auto or threads, or allow it (sysctl kernel.io_uring_disabled=0, seccomp of the container)";
                    return Err(ConfigError::new("aio.backend", what, remedy).into());
                }
            },
        };
        if backend == FileBackend::Threads {
            start_threads(options, &receiver)?;
        }
        let block_size = options.block_size.clamp(1, MAX_BLOCK).next_multiple_of(DIRECT_ALIGN);
        Ok(Self { pieces: sender, backend, block_size, timeout: options.timeout, clock: Arc::default() })
    }

    /// The system calls in use, never [`FileBackend::Auto`].
    pub fn backend(&self) -> FileBackend {
        self.backend
    }

    /// Bytes of one piece.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// How long files were read or written so far: the time in which at least one transfer was under way.
    pub fn busy(&self) -> Duration {
        self.clock.busy()
    }

    /// Starts to read `len` bytes of a file, from `offset` on, into the beginning of a buffer. Both are multiples of [`DIRECT_ALIGN`].
    ///
    /// # Errors
    /// If they are not, or the buffer is shorter.
    pub fn start_read(
        &self,
        file: &Arc<NamedFile>,
        offset: u64,
        buffer: AlignedBuffer,
        len: usize,
    ) -> Result<Transfer> {
        self.start(Direction::Read, (file, offset), (buffer, len))
    }

    /// Starts to write the first `len` bytes of a buffer to a file, from `offset` on. Both are multiples of [`DIRECT_ALIGN`].
    ///
    /// # Errors
    /// As [`FileEngine::start_read`].
    pub fn start_write(
        &self,
        file: &Arc<NamedFile>,
        offset: u64,
        buffer: AlignedBuffer,
        len: usize,
    ) -> Result<Transfer> {
        self.start(Direction::Write, (file, offset), (buffer, len))
    }

    fn start(
        &self,
        direction: Direction,
        (file, offset): (&Arc<NamedFile>, u64),
        (buffer, len): (AlignedBuffer, usize),
    ) -> Result<Transfer> {
        let is_aligned = len.is_multiple_of(DIRECT_ALIGN) && offset.is_multiple_of(DIRECT_ALIGN as u64);
        if !is_aligned || len > buffer.len() {
            let have = buffer.len();
            let what = format!("{len} bytes at offset {offset} with a buffer of {have}");
            let source = io::Error::new(io::ErrorKind::InvalidInput, what);
            let remedy = "move whole blocks of 4096 bytes, no more than the buffer has".into();
            return Err(Error::Io { action: "read or write", path: file.path.clone(), source, remedy });
        }
        let block = (self.block_size, &self.clock);
        let (transfer, pieces) = Transfer::new(direction, (file, offset), (buffer, len), block, self.timeout);
        // a piece that cannot be sent fails as it is dropped
        pieces.into_iter().for_each(|piece| drop(self.pieces.send(piece)));
        Ok(transfer)
    }
}

fn rings(options: &FileOptions) -> io::Result<Vec<Ring>> {
    let FileOptions { queue_depth, single_submit, overlap_events, .. } = *options;
    let depth = queue_depth.clamp(1, MAX_DEPTH);
    let num_rings = options.intra_op_parallelism.clamp(1, MAX_THREADS);
    (0..num_rings).map(|_| Ring::new(depth, single_submit, overlap_events)).collect()
}

fn start_threads(options: &FileOptions, pieces: &Receiver<Piece>) -> Result<()> {
    let wanted = options.intra_op_parallelism.saturating_mul(options.queue_depth);
    (0..wanted.clamp(1, MAX_THREADS)).try_for_each(|_| {
        let pieces = pieces.clone();
        spawn(move || threads::run(&pieces))
    })
}

fn spawn(body: impl FnOnce() + Send + 'static) -> Result<()> {
    let started = thread::Builder::new().name("voltaic-files".to_owned()).spawn(body);
    started.map(drop).map_err(|source| Error::Io {
        action: "start a thread for files in",
        path: std::env::current_exe().unwrap_or_default(),
        source,
        remedy: "raise the limit on threads (ulimit -u), or lower queue_depth".into(),
    })
}
