//! Transfers by io_uring: one thread hands many to the kernel, and waits for those that are done.

use std::io::{self, ErrorKind};
use std::mem;
use std::os::fd::AsRawFd;

use crossbeam_channel::Receiver;
use io_uring::{IoUring, Probe, opcode, types};

use crate::ffi::files::transfer::{Direction, Piece};

/// A ring and what the kernel has of it.
pub(super) struct Ring {
    ring: IoUring,
    /// Pieces that the kernel has, by their number.
    slots: Vec<Option<Piece>>,
    free: Vec<usize>,
    single_submit: bool,
    overlap_events: bool,
}

impl Ring {
    /// For `depth` pieces under way at a time.
    ///
    /// # Errors
    /// The system's, if the kernel does not have io_uring or forbids it.
    pub fn new(depth: usize, single_submit: bool, overlap_events: bool) -> io::Result<Self> {
        let entries = u32::try_from(depth).map_err(|_| io::Error::from(ErrorKind::InvalidInput))?;
        let ring = IoUring::new(entries)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Read::CODE) || !probe.is_supported(opcode::Write::CODE) {
            return Err(io::Error::new(
                ErrorKind::Unsupported,
                "the kernel's io_uring has no read and write",
            ));
        }
        let slots = (0..depth).map(|_| None).collect();
        Ok(Self { ring, slots, free: (0..depth).rev().collect(), single_submit, overlap_events })
    }

    /// Carries out pieces until there can be none any more.
    pub fn run(mut self, pieces: &Receiver<Piece>) {
        loop {
            match self
                .fill(pieces)
                .and_then(|goes_on| if goes_on { self.collect().map(|()| true) } else { Ok(false) })
            {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => return self.abandon(&error),
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Takes pieces as long as there are some and the ring is not full. Returns whether the kernel has any.
    fn fill(&mut self, pieces: &Receiver<Piece>) -> io::Result<bool> {
        while !self.free.is_empty() {
            let next = if self.in_flight() == 0 { pieces.recv().ok() } else { pieces.try_recv().ok() };
            let Some(piece) = next else { break };
            let Some(slot) = self.free.pop() else { break };
            self.slots[slot] = Some(piece);
            self.push(slot)?;
        }
        Ok(self.in_flight() > 0)
    }

    fn push(&mut self, slot: usize) -> io::Result<()> {
        let Some(piece) = &self.slots[slot] else { return Ok(()) };
        let (file, memory) = (types::Fd(piece.moved.file.file.as_raw_fd()), piece.address() as *mut u8);
        let (len, offset) = (piece.len as u32, piece.offset());
        let entry = match piece.moved.direction {
            Direction::Read => opcode::Read::new(file, memory, len).offset(offset).build(),
            Direction::Write => opcode::Write::new(file, memory, len).offset(offset).build(),
        };
        let entry = entry.user_data(slot as u64);
        // SAFETY: the piece stays in its slot until the kernel says that it is done, or is leaked (`abandon`). It holds the file, and the
        // buffer with the memory, which no other code uses meanwhile, as the buffer's documentation asks.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.map_err(|full| io::Error::other(full.to_string()))?;
        if self.single_submit { self.submit(0) } else { Ok(()) }
    }

    /// Hands over what was pushed, and waits for so many that are done.
    fn submit(&mut self, wanted: usize) -> io::Result<()> {
        loop {
            match self.ring.submit_and_wait(wanted) {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // the kernel is short of memory for it, or wants to be rid of results first
                Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => {
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits for a piece that is done, or for all if nothing is submitted meanwhile.
    fn collect(&mut self) -> io::Result<()> {
        let wanted = if self.overlap_events { 1 } else { self.in_flight() };
        self.submit(wanted)?;
        let results = self.ring.completion().map(|entry| (entry.user_data() as usize, entry.result()));
        for (slot, result) in results.collect::<Vec<_>>() {
            let Some(piece) = self.slots.get_mut(slot).and_then(Option::as_mut) else { continue };
            let result = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
            if piece.progress(result) {
                self.push(slot)?;
            } else {
                self.slots[slot] = None;
                self.free.push(slot);
            }
        }
        Ok(())
    }

    /// The ring cannot be used any more. What the kernel has of it may still change memory, which must not be freed.
    fn abandon(&mut self, error: &io::Error) {
        for mut piece in self.slots.iter_mut().filter_map(Option::take) {
            piece.fail(io::Error::new(error.kind(), format!("io_uring: {error}")));
            mem::forget(piece);
        }
    }
}
