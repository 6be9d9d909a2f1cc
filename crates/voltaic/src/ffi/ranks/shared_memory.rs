//! Memory that processes of one host share: a ring of bytes that one of them writes and all read, and counters of its progress.

use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};
use std::{hint, io, thread};

use tch::Kind;

/// Bytes of the ring.
pub(in crate::ffi) const RING: usize = 32 << 20;
/// Pieces that are remembered.
pub(in crate::ffi) const SLOTS: u64 = 64;
/// Bytes before the ring: whole pages.
const HEAD: usize = 4096;
/// More than there are dtypes.
const KINDS: u64 = 256;
/// How long a rank looks for a count before it sleeps, and after how many looks it lets others run.
const LOOKING: Duration = Duration::from_micros(200);
const LOOKS: u32 = 100;
/// How long it sleeps before it looks whether the owner is still there.
const NAP: Duration = Duration::from_millis(20);

/// How far a rank is with a piece.
#[derive(Debug, Clone, Copy)]
pub(in crate::ffi) enum Stage {
    /// What others add up is in the ring.
    Filled,
    /// The sum of its part is.
    Summed,
    /// It has read what it needs.
    Taken,
}

/// What ranks do with a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::ffi) enum Exchanged {
    /// All have the sum.
    Sums,
    /// Each has its part of the sum.
    ReduceScatters,
    /// All have the parts of all.
    AllGathers,
}

impl Exchanged {
    const ALL: [Self; 3] = [Self::Sums, Self::ReduceScatters, Self::AllGathers];
}

/// What a rank has put into its ring of a piece.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::ffi) struct Filled {
    /// Its bytes in the ring, others' parts of the piece written.
    pub place: Range<usize>,
    /// Float32 or bfloat16; of what is gathered it does not matter, and is float32.
    pub kind: Kind,
    pub what: Exchanged,
}

/// Why a rank does not get on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::ffi) enum Stop {
    /// The owner of the region has ended, or left.
    Gone,
    TimedOut,
}

/// A number in a line of the cache of its own.
#[repr(C, align(64))]
struct Count(AtomicU64);

/// What the owner writes, and at the end what others do.
#[repr(C)]
struct Header {
    token: AtomicU64,
    /// The last piece of each stage.
    counts: [Count; 3],
    /// Where pieces start in the ring, their bytes, and the type of their numbers with what is done with them, by number of the piece.
    pieces: [[AtomicU64; 3]; SLOTS as usize],
    /// Changes when a count does while others sleep.
    bell: AtomicU32,
    sleepers: AtomicU32,
}

const _: () = assert!(size_of::<Header>() <= HEAD);

/// A region of this process or of another one.
#[derive(Debug)]
pub(in crate::ffi) struct Region {
    memory: NonNull<u8>,
    /// Locked by the owner as long as it is there: the system unlocks it, however the process ends.
    file: File,
}

// SAFETY: the memory belongs to no thread; its header is atomic, and of the ring only addresses are given out.
unsafe impl Send for Region {}

impl Region {
    /// A region of this process.
    ///
    /// # Errors
    /// The system's.
    pub fn create() -> io::Result<Self> {
        // SAFETY: the name is a C string; the new descriptor has no other owner.
        let file = unsafe {
            let descriptor = libc::memfd_create(c"voltaic".as_ptr(), libc::MFD_CLOEXEC);
            if descriptor < 0 {
                return Err(io::Error::last_os_error());
            }
            File::from_raw_fd(descriptor)
        };
        file.set_len((HEAD + RING) as u64)?;
        lock(&file, libc::F_OFD_SETLK)?;
        let region = Self { memory: map(&file)?, file };
        // every process has keys of its own, drawn from the system
        region.header().token.store(RandomState::new().build_hasher().finish(), Ordering::Release);
        Ok(region)
    }

    /// Where others find it.
    pub fn address(&self) -> String {
        let (process, descriptor) = (std::process::id(), self.file.as_raw_fd());
        format!("/proc/{process}/fd/{descriptor}:{:x}", self.header().token.load(Ordering::Acquire))
    }

    /// The region with this address, if it is on this host and this process may reach it.
    ///
    /// # Errors
    /// The system's, or that something else is there.
    pub fn open(address: &str) -> io::Result<Self> {
        let other = || io::Error::new(io::ErrorKind::NotFound, "not the memory of that rank");
        let (path, token) = address.rsplit_once(':').ok_or_else(other)?;
        // a process of another host may have anything open under that number
        if !fs::read_link(path)?.as_os_str().as_bytes().starts_with(b"/memfd:voltaic") {
            return Err(other());
        }
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        if file.metadata()?.len() != (HEAD + RING) as u64 {
            return Err(other());
        }
        let region = Self { memory: map(&file)?, file };
        let is_it = format!("{:x}", region.header().token.load(Ordering::Acquire)) == token;
        if is_it { Ok(region) } else { Err(other()) }
    }

    fn header(&self) -> &Header {
        // SAFETY: the memory is there as long as this, is longer, and starts a page; zeros are a header, and all in it is
        // atomic.
        unsafe { self.memory.cast::<Header>().as_ref() }
    }

    /// The address of bytes of the ring.
    ///
    /// # Panics
    /// If it does not have them.
    pub fn ring(&self, range: Range<usize>) -> *mut u8 {
        assert!(range.start <= range.end && range.end <= RING, "{range:?} of {RING}");
        self.memory.as_ptr().wrapping_add(HEAD + range.start)
    }

    /// The last piece that has reached a stage.
    pub fn count(&self, stage: Stage) -> u64 {
        self.header().counts[stage as usize].0.load(Ordering::Acquire)
    }

    /// Says that this process, whose region it is, has brought a piece to a stage.
    pub fn advance(&self, stage: Stage, piece: u64) {
        let header = self.header();
        header.counts[stage as usize].0.store(piece, Ordering::Release);
        fence(Ordering::SeqCst); // either this sees the sleeper, or the sleeper the count
        if header.sleepers.load(Ordering::SeqCst) > 0 {
            header.bell.fetch_add(1, Ordering::SeqCst);
            futex(&header.bell, libc::FUTEX_WAKE, i32::MAX as u32, ptr::null());
        }
    }

    /// Notes what the ring holds of a piece.
    pub fn set_filled(&self, piece: u64, filled: &Filled) {
        let [start, len, kind] = &self.header().pieces[(piece % SLOTS) as usize];
        start.store(filled.place.start as u64, Ordering::Release);
        len.store(filled.place.len() as u64, Ordering::Release);
        kind.store(filled.kind as u64 + KINDS * filled.what as u64, Ordering::Release);
    }

    /// What the ring holds of a filled piece.
    pub fn filled(&self, piece: u64) -> Filled {
        let piece = &self.header().pieces[(piece % SLOTS) as usize];
        let [start, len, kind] = piece.each_ref().map(|number| number.load(Ordering::Acquire) as usize);
        let (what, kind) = (kind / KINDS as usize, kind % KINDS as usize);
        let what = Exchanged::ALL.get(what).copied().unwrap_or(Exchanged::Sums);
        let kind = if kind == Kind::Float as usize { Kind::Float } else { Kind::BFloat16 };
        Filled { place: start..start + len, kind, what }
    }

    /// Waits until a piece has reached a stage.
    ///
    /// # Errors
    /// If the owner is gone, or this takes longer than `timeout`.
    pub fn wait(&self, stage: Stage, piece: u64, timeout: Duration) -> Result<(), Stop> {
        let start = Instant::now();
        while start.elapsed() < LOOKING {
            for _ in 0..LOOKS {
                if self.count(stage) >= piece {
                    return Ok(());
                }
                hint::spin_loop();
            }
            thread::yield_now();
        }
        let header = self.header();
        header.sleepers.fetch_add(1, Ordering::SeqCst);
        let result = self.sleep(stage, piece, Instant::now() + timeout);
        header.sleepers.fetch_sub(1, Ordering::SeqCst);
        result
    }

    fn sleep(&self, stage: Stage, piece: u64, deadline: Instant) -> Result<(), Stop> {
        let header = self.header();
        let nap = libc::timespec { tv_sec: 0, tv_nsec: NAP.as_nanos() as libc::c_long };
        loop {
            let bell = header.bell.load(Ordering::SeqCst);
            let is_there = self.has_owner(); // before the count: it may have been the owner's last
            if self.count(stage) >= piece {
                return Ok(());
            }
            if !is_there {
                return Err(Stop::Gone);
            }
            if Instant::now() >= deadline {
                return Err(Stop::TimedOut);
            }
            futex(&header.bell, libc::FUTEX_WAIT, bell, &raw const nap);
        }
    }

    fn has_owner(&self) -> bool {
        lock(&self.file, libc::F_OFD_GETLK).is_ok_and(|found| i32::from(found.l_type) != libc::F_UNLCK)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, and nothing refers to it any more.
        unsafe { libc::munmap(self.memory.as_ptr().cast(), HEAD + RING) };
    }
}

fn map(file: &File) -> io::Result<NonNull<u8>> {
    // SAFETY: a new mapping of a file that is as long.
    let memory = unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(ptr::null_mut(), HEAD + RING, protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
    };
    if memory == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(memory.cast()).ok_or_else(io::Error::last_os_error)
}

/// Locks a whole file for writing, or queries the holder of the lock; the lock belongs to the open file, not to the process.
pub(super) fn lock(file: &File, command: i32) -> io::Result<libc::flock> {
    let mut lock = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open, and the lock lives during the call.
    if unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(lock)
}

/// `FUTEX_WAIT` while the word is `value`, or `FUTEX_WAKE` of as many; whatever comes of it, callers look again.
fn futex(word: &AtomicU32, operation: i32, value: u32, timeout: *const libc::timespec) {
    // SAFETY: the word and the time live during the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, value, timeout) };
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_millis(50);

    #[test]
    fn what_one_writes_another_reads() {
        let mine = Region::create().unwrap();
        let yours = Region::open(&mine.address()).unwrap();
        // SAFETY: both rings have that byte.
        unsafe {
            mine.ring(RING - 1..RING).write(7);
            assert_eq!(yours.ring(RING - 1..RING).read(), 7);
        }
        assert_eq!(yours.wait(Stage::Summed, 1, SOON), Err(Stop::TimedOut));
        let filled = Filled { place: 64..76, kind: Kind::BFloat16, what: Exchanged::AllGathers };
        mine.set_filled(65, &filled);
        assert_eq!(yours.filled(65), filled);
        let waiting = thread::spawn(move || yours.wait(Stage::Summed, 1, Duration::from_secs(60)));
        thread::sleep(SOON);
        mine.advance(Stage::Summed, 1);
        assert_eq!(waiting.join().unwrap(), Ok(()));
    }

    #[test]
    fn an_owner_that_leaves_is_missed() {
        let mine = Region::create().unwrap();
        let yours = Region::open(&mine.address()).unwrap();
        mine.advance(Stage::Filled, 3);
        drop(mine);
        assert_eq!(yours.wait(Stage::Filled, 3, SOON), Ok(()));
        assert_eq!(yours.wait(Stage::Filled, 4, Duration::from_secs(60)), Err(Stop::Gone));
    }

    #[test]
    fn memory_of_others_is_not_taken_for_a_rank() {
        let mine = Region::create().unwrap();
        let (path, _) =
            mine.address().rsplit_once(':').map(|(path, token)| (path.to_owned(), token.len())).unwrap();
        assert!(Region::open(&format!("{path}:0")).is_err());
        assert!(Region::open("/proc/self/fd/1000000:0").is_err());
        assert!(Region::open("/dev/null:0").is_err());
        assert!(Region::open("").is_err());
    }
}
