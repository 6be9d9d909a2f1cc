//! What swapping costs beside the disk itself: `cargo bench --bench swap`.
//!
//! A tensor goes to its file and back by a `SwapStore`, and the same bytes by a plain loop of `pwrite` and `pread` past the
//! cache (`O_DIRECT`), with pieces of the same size, on a file beside it. The two take turns in one process. `VOLTAIC_BENCH_FOLDER`
//! names a folder on the disk to measure; it is that of temporary files otherwise.

use std::error;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use measure::micro::{Row, Target, quartiles};
use voltaic::ffi::{DIRECT_ALIGN, FileBackend, FileEngine, FileOptions};
use voltaic::swap::{SwapFolder, SwapOptions, SwapStore};
use voltaic::{Kind, Tensor};

type Result<T> = std::result::Result<T, Box<dyn error::Error>>;

const FOLDER: &str = "VOLTAIC_BENCH_FOLDER";
const ROUNDS: usize = 11;
/// Bytes of the tensor, and of a piece.
const LEN: usize = 256 << 20;
const BLOCK: usize = 1 << 20;
/// The speed of the store, of that of the loop.
const RATIO: f64 = 0.85;

fn main() -> Result<()> {
    let parent = std::env::var_os(FOLDER).map_or_else(std::env::temp_dir, PathBuf::from);
    let folder = tempfile::tempdir_in(parent)?;
    for backend in [FileBackend::IoUring, FileBackend::Threads] {
        if let Err(error) = compare(folder.path(), backend) {
            println!("{backend}: skipped: {error}");
        }
    }
    Ok(())
}

fn compare(path: &Path, backend: FileBackend) -> Result<()> {
    let engine =
        Arc::new(FileEngine::new(&FileOptions { backend, block_size: BLOCK, ..FileOptions::default() })?);
    let folder = SwapFolder::create(path, "optimizer", 0, &engine)?;
    if !folder.is_direct() {
        return Err(format!("{} does not take O_DIRECT", path.display()).into());
    }
    let options = SwapOptions {
        section: "offload_optimizer",
        buffer_count: 1,
        buffer_bytes: Some(LEN),
        min_bytes: None,
        pinned_for: None,
    };
    let mut store = SwapStore::new(folder, engine, options);
    store.put("tensor", &Tensor::ones([LEN as i64 / 4], (Kind::Float, tch::Device::Cpu)))?;
    let mut plain = Plain::new(&path.join("plain"))?;
    let (mut reads, mut writes) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let own = gib_per_s(|| Ok(store.take("tensor")?))?;
        let beside = gib_per_s(|| plain.read())?;
        let (buffer, speed) = own;
        reads.push([speed, beside.1]);
        let own = gib_per_s(|| {
            store.start_write("tensor", buffer)?;
            Ok(store.flush()?)
        })?;
        let beside = gib_per_s(|| plain.write())?;
        writes.push([own.1, beside.1]);
    }
    for (what, speeds) in [("reads", reads), ("writes", writes)] {
        let of = |which: usize| quartiles(speeds.iter().map(|pair| pair[which]).collect())[1];
        println!("{backend}: {what} {:.2} GiB/s, the plain loop {:.2}", of(0), of(1));
        let ratios = speeds.iter().map(|[own, plain]| own / plain).collect();
        let name = format!("{what} of a tensor by {backend}, of a plain loop");
        Row::of("swap", name, "", ratios, Target::AtLeast(RATIO)).record()?;
    }
    Ok(())
}

fn gib_per_s<T>(body: impl FnOnce() -> Result<T>) -> Result<(T, f64)> {
    let start = Instant::now();
    let done = body()?;
    Ok((done, LEN as f64 / (1_u64 << 30) as f64 / start.elapsed().as_secs_f64()))
}

/// A file that is read and written piece by piece.
struct Plain {
    file: File,
    memory: Vec<u8>,
    first: usize,
}

impl Plain {
    fn new(path: &Path) -> Result<Self> {
        let mut options = OpenOptions::new();
        let file = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .custom_flags(libc::O_DIRECT)
            .open(path)?;
        std::fs::remove_file(path)?;
        let memory = vec![1; LEN + DIRECT_ALIGN];
        let address = memory.as_ptr().addr();
        let first = address.next_multiple_of(DIRECT_ALIGN) - address;
        let mut plain = Self { file, memory, first };
        plain.write()?;
        Ok(plain)
    }

    fn read(&mut self) -> Result<()> {
        let memory = &mut self.memory[self.first..self.first + LEN];
        for (at, piece) in memory.chunks_exact_mut(BLOCK).enumerate() {
            self.file.read_exact_at(piece, (at * BLOCK) as u64)?;
        }
        Ok(())
    }

    fn write(&mut self) -> Result<()> {
        let memory = &self.memory[self.first..self.first + LEN];
        for (at, piece) in memory.chunks_exact(BLOCK).enumerate() {
            self.file.write_all_at(piece, (at * BLOCK) as u64)?;
        }
        Ok(())
    }
}
