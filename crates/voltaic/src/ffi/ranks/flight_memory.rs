//! Memory for the record of a rank's last operations, which ranks of the same host can read: also when the rank is stopped
//! or has been killed.

use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::ffi::ranks::shared_memory::lock;

/// Operations that are remembered.
pub const ENTRIES: usize = 256;
/// Numbers that an operation is described by.
pub const WORDS: usize = 32;
/// Numbers that describe the rank.
const HEADER: usize = 64;

/// All atomic: another process may read while this one writes.
#[repr(C)]
struct Layout {
    /// The first is the token.
    header: [AtomicU64; HEADER],
    entries: [[AtomicU64; WORDS]; ENTRIES],
}

/// The memory of this process, or of another one.
#[derive(Debug)]
pub struct FlightMemory {
    memory: NonNull<u8>,
    /// Locked by the owning process as long as it lives; `None` if no other process can open it.
    file: Option<File>,
}

// SAFETY: the memory belongs to no thread, and all in it is atomic.
unsafe impl Send for FlightMemory {}
// SAFETY: as above.
unsafe impl Sync for FlightMemory {}

impl FlightMemory {
    /// Memory of this process, shared if the system allows it. Otherwise no other process can read it.
    ///
    /// # Errors
    /// The system's, if it has no memory at all.
    pub fn create() -> io::Result<Self> {
        match Self::create_shared() {
            Ok(memory) => Ok(memory),
            Err(_) => Ok(Self { memory: map(None)?, file: None }),
        }
    }

    fn create_shared() -> io::Result<Self> {
        // SAFETY: the name is a C string; the new descriptor has no other owner.
        let file = unsafe {
            let descriptor = libc::memfd_create(c"voltaic-flight".as_ptr(), libc::MFD_CLOEXEC);
            if descriptor < 0 {
                return Err(io::Error::last_os_error());
            }
            File::from_raw_fd(descriptor)
        };
        file.set_len(size_of::<Layout>() as u64)?;
        lock(&file, libc::F_OFD_SETLK)?;
        let memory = Self { memory: map(Some(&file))?, file: Some(file) };
        memory.layout().header[0].store(RandomState::new().build_hasher().finish(), Ordering::Release);
        Ok(memory)
    }

    /// Where others find it, if they can.
    pub fn address(&self) -> Option<String> {
        let (process, descriptor) = (std::process::id(), self.file.as_ref()?.as_raw_fd());
        let token = self.layout().header[0].load(Ordering::Acquire);
        Some(format!("/proc/{process}/fd/{descriptor}:{token:x}"))
    }

    /// The memory with this address, if it is on this host and this process may read it.
    ///
    /// # Errors
    /// The system's, or that something else is there.
    pub fn open(address: &str) -> io::Result<Self> {
        let other = || io::Error::new(io::ErrorKind::NotFound, "not the memory of that rank");
        let (path, token) = address.rsplit_once(':').ok_or_else(other)?;
        // a process of another host may have anything open under that number
        if !fs::read_link(path)?.as_os_str().as_bytes().starts_with(b"/memfd:voltaic-flight") {
            return Err(other());
        }
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        if file.metadata()?.len() != size_of::<Layout>() as u64 {
            return Err(other());
        }
        let memory = Self { memory: map(Some(&file))?, file: Some(file) };
        let is_it = format!("{:x}", memory.layout().header[0].load(Ordering::Acquire)) == token;
        if is_it { Ok(memory) } else { Err(other()) }
    }

    fn layout(&self) -> &Layout {
        // SAFETY: the memory is there as long as this, is as long, and starts a page; zeros are a layout, and all in it is
        // atomic.
        unsafe { self.memory.cast::<Layout>().as_ref() }
    }

    /// A number that describes the rank, from 0 to 15.
    pub fn header(&self, at: usize) -> &AtomicU64 {
        &self.layout().header[1 + at % 16]
    }

    /// The numbers that describe an operation, which replaces the one [`ENTRIES`] before it.
    pub fn entry(&self, number: u64) -> &[AtomicU64; WORDS] {
        &self.layout().entries[(number % ENTRIES as u64) as usize]
    }

    /// Whether the process whose memory this is still runs, or is stopped.
    pub fn has_owner(&self) -> bool {
        let is_locked =
            |file| lock(file, libc::F_OFD_GETLK).is_ok_and(|found| i32::from(found.l_type) != libc::F_UNLCK);
        self.file.as_ref().is_none_or(is_locked)
    }
}

impl Drop for FlightMemory {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, and nothing refers to it any more.
        unsafe { libc::munmap(self.memory.as_ptr().cast(), size_of::<Layout>()) };
    }
}

fn map(file: Option<&File>) -> io::Result<NonNull<u8>> {
    let (flags, descriptor) = match file {
        Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
        None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
    };
    // SAFETY: a new mapping, of a file that is as long or of no file.
    let memory = unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(ptr::null_mut(), size_of::<Layout>(), protection, flags, descriptor, 0)
    };
    if memory == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(memory.cast()).ok_or_else(io::Error::last_os_error)
}

/// Nanoseconds of the monotonic clock, which all processes of a host share.
pub fn monotonic_nanos() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the time is valid for the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
