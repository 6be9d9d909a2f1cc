//! Changes to bytes and texts.

use rand::RngExt;
use rand::rngs::StdRng;

/// A copy with some places changed, removed, repeated, cut off, or overwritten by one of `words`.
pub fn mutated(whole: &[u8], words: &[&[u8]], rng: &mut StdRng) -> Vec<u8> {
    let mut bytes = whole.to_vec();
    for _ in 0..rng.random_range(1..5) {
        if bytes.is_empty() {
            return bytes;
        }
        let at = rng.random_range(0..bytes.len());
        let end = (at + rng.random_range(1..32)).min(bytes.len());
        match rng.random_range(0..9) {
            0 => bytes[at] ^= 1 << rng.random_range(0..8_u32),
            1 => bytes[at] = rng.random(),
            2 => bytes[at] = [0, 0xff, 0x7f, 0x80][rng.random_range(0..4)],
            3 => bytes.truncate(at),
            4 => drop(bytes.drain(at..end)),
            5 => {
                let part = bytes[at..end].repeat(rng.random_range(1..4));
                drop(bytes.splice(at..at, part));
            }
            6 => bytes[at..end].iter_mut().for_each(|byte| *byte = rng.random()),
            _ if words.is_empty() => bytes[at] = b'9',
            7 => drop(bytes.splice(at..at, words[rng.random_range(0..words.len())].iter().copied())),
            _ => {
                let word = words[rng.random_range(0..words.len())];
                drop(bytes.splice(at..(at + word.len()).min(bytes.len()), word.iter().copied()));
            }
        }
    }
    bytes
}

/// Nothing but `words`, in any order.
pub fn of_words(words: &[&[u8]], most: usize, rng: &mut StdRng) -> Vec<u8> {
    let count = rng.random_range(0..most);
    (0..count).flat_map(|_| words[rng.random_range(0..words.len())].iter().copied()).collect()
}
