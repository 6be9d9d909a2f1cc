//! The folder of a rank's swap files.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FallocateFlags, fallocate, statvfs};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tch::{Kind, Tensor};

use crate::config::format_size;
use crate::error::{Error, Result};
use crate::ffi::{AlignedBuffer, DIRECT_ALIGN, FileEngine, NamedFile};

/// How often a name is freed of what others leave there.
const MAX_TRIES: usize = 16;

/// Makes the swap files of one rank. A file loses its name as soon as it is open, so that it vanishes with the process.
#[derive(Debug)]
pub struct SwapFolder {
    path: PathBuf,
    is_direct: bool,
}

impl SwapFolder {
    /// The folder `<nvme_path>/zero_stage_3/<kind>/rank<rank>`, as DeepSpeed names it; `kind` is `optimizer`, or `float32params`
    /// with the dtype of the parameters. Missing folders are made, for this user only. The `engine` will read and write the files.
    ///
    /// # Errors
    /// If it cannot be made or written to.
    pub fn create(nvme_path: &Path, kind: &str, rank: usize, engine: &FileEngine) -> Result<Self> {
        raise_open_files();
        let path = nvme_path.join("zero_stage_3").join(kind).join(format!("rank{rank}"));
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&path);
        made.map_err(|source| {
            let remedy = "name a folder in nvme_path that can be made and written to".into();
            Error::Io { action: "create", path: path.clone(), source, remedy }
        })?;
        let mut folder = Self { path, is_direct: true };
        folder.is_direct = folder.takes_direct(engine)?;
        if !folder.is_direct {
            tracing::info!(
                "{} does not take O_DIRECT: what is swapped also takes memory, as cached pages of files",
                folder.path.display()
            );
        }
        Ok(folder)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether files bypass the cache of the system (`O_DIRECT`).
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// Whether a block can be written and read past the cache: some file systems refuse at once, others when it comes to it.
    fn takes_direct(&self, engine: &FileEngine) -> Result<bool> {
        let name = format!("probe{}", std::process::id());
        let file = match self.open(&name) {
            Ok(file) => Arc::new(NamedFile { file, path: self.path.join(name) }),
            Err(error) if refuses_direct(&error) => return Ok(false),
            Err(error) => return Err(Error::io("write to", &self.path, error)),
        };
        match agrees_with_cache(&file, engine) {
            Ok(agrees) => Ok(agrees),
            Err(Error::Io { source, .. }) if refuses_direct(&source) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// A file without a name.
    fn open(&self, name: &str) -> io::Result<File> {
        let path = self.path.join(name);
        let flags = if self.is_direct { libc::O_DIRECT } else { 0 };
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600).custom_flags(flags);
        let mut opened = options.open(&path);
        for _ in 0..MAX_TRIES {
            // of a run that was killed before it removed the name, or of one that is about to, and needs it no more
            if !opened.as_ref().is_err_and(|error| error.kind() == ErrorKind::AlreadyExists) {
                break;
            }
            remove(&path)?;
            opened = options.open(&path);
        }
        remove(&path)?; // where O_DIRECT is refused the file may be there all the same
        opened
    }

    /// Makes a file of so many bytes, for which the disk has room from then on.
    ///
    /// # Errors
    /// If the disk is full, or a limit of the process is met.
    pub fn file(&self, name: &str, bytes: u64) -> Result<Arc<NamedFile>> {
        let path = self.path.join(name);
        let failed = |error: io::Error| match error.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE) => Error::Io {
                action: "create",
                path: path.clone(),
                source: error,
                remedy: "raise the limit on open files (ulimit -n)".into(),
            },
            _ => Error::io("create", &path, error),
        };
        let file = self.open(name).map_err(failed)?;
        // a signal ends the process that writes beyond this limit
        if let Some(limit) = getrlimit(Resource::Fsize).current.filter(|limit| *limit < bytes) {
            let what = format!("{bytes} bytes, with a limit of {limit} bytes for a file");
            return Err(failed(io::Error::new(ErrorKind::FileTooLarge, what)));
        }
        match fallocate(&file, FallocateFlags::empty(), 0, bytes.max(1)) {
            Ok(()) => {}
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => file.set_len(bytes).map_err(failed)?,
            Err(error) => {
                let error = io::Error::from(error);
                return Err(failed(io::Error::new(error.kind(), format!("{bytes} bytes: {error}"))));
            }
        }
        Ok(Arc::new(NamedFile { file, path }))
    }

    /// An error if the disk does not have room for so many bytes more.
    ///
    /// # Errors
    /// That one.
    pub fn check_room(&self, bytes: u64) -> Result<()> {
        let room = statvfs(&self.path)
            .map_err(|error| Error::io("look at the disk of", &self.path, error.into()))?;
        let free = room.f_bavail.saturating_mul(room.f_frsize);
        if bytes <= free {
            return Ok(());
        }
        let what = format!("it takes {}, and the disk has {} left", size(bytes), size(free));
        let source = io::Error::new(ErrorKind::StorageFull, what);
        let remedy = "free some disk space, or name another disk in nvme_path".into();
        Err(Error::Io { action: "swap to", path: self.path.clone(), source, remedy })
    }
}

fn size(bytes: u64) -> String {
    format_size(usize::try_from(bytes).unwrap_or(usize::MAX))
}

/// The first bytes of a file as memory: read when they are used, and what is written gets into the file.
pub(super) fn mapped(file: &NamedFile, bytes: usize) -> Result<Tensor> {
    let handle = format!("/proc/self/fd/{}", file.file.as_raw_fd()); // it has no name any more
    Ok(Tensor::f_from_file(&handle, true, bytes as i64, (Kind::Uint8, tch::Device::Cpu))?)
}

/// Whether what passes by the cache and what is mapped are the same bytes, both ways: not all network file systems say so.
fn agrees_with_cache(file: &Arc<NamedFile>, engine: &FileEngine) -> Result<bool> {
    let mut block = AlignedBuffer::new(DIRECT_ALIGN, None)?;
    file.file.set_len(DIRECT_ALIGN as u64).map_err(|error| Error::io("write", &file.path, error))?;
    let mut memory = mapped(file, DIRECT_ALIGN)?;
    let mut agrees = true;
    for value in 1..=2 {
        let _ = block.bytes(DIRECT_ALIGN)?.f_fill_(value)?;
        block = engine.start_write(file, 0, block, DIRECT_ALIGN)?.wait()?;
        agrees &= memory.f_equal(&block.bytes(DIRECT_ALIGN)?)?;
        let _ = memory.f_fill_(value + 2)?;
        block = engine.start_read(file, 0, block, DIRECT_ALIGN)?.wait()?;
        agrees &= memory.f_equal(&block.bytes(DIRECT_ALIGN)?)?;
    }
    Ok(agrees)
}

fn refuses_direct(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported)
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

impl Drop for SwapFolder {
    /// Removes the folders that no run uses, up to that of DeepSpeed's name.
    fn drop(&mut self) {
        let mut path = self.path.as_path();
        for _ in 0..3 {
            if fs::remove_dir(path).is_err() {
                return; // another rank or run has it
            }
            let Some(parent) = path.parent() else { return };
            path = parent;
        }
    }
}

/// Lets this process have as many open files as the system allows, of which each swapped tensor is one; how many that is, if there is a
/// limit.
pub(crate) fn raise_open_files() -> Option<u64> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum && setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).is_err() {
        tracing::debug!("the limit on open files stays at {current:?}");
        return current;
    }
    maximum
}
