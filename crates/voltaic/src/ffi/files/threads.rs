//! Transfers by threads that block.

use std::os::unix::fs::FileExt;
use std::slice;

use crossbeam_channel::Receiver;

use crate::ffi::files::transfer::{Direction, Piece};

/// Carries out pieces until there can be none any more.
pub(super) fn run(pieces: &Receiver<Piece>) {
    for mut piece in pieces {
        while step(&mut piece) {}
    }
}

/// One system call. Returns whether there is more to do.
fn step(piece: &mut Piece) -> bool {
    let (first, len, offset) = (piece.address() as *mut u8, piece.len, piece.offset());
    // SAFETY: the memory is a part of the buffer that the transfer of this piece owns, as long as the piece lives; no other piece
    // has it, and the users of the buffer leave it alone meanwhile, as its documentation asks. Bytes have no invalid values.
    let memory = unsafe { slice::from_raw_parts_mut(first, len) };
    let file = &piece.moved.file.file;
    let result = match piece.moved.direction {
        Direction::Read => file.read_at(memory, offset),
        Direction::Write => file.write_at(memory, offset),
    };
    piece.progress(result)
}
