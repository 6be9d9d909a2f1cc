//! libtorch's random numbers on the CPU: the Mersenne twister MT19937 (Matsumoto and Nishimura, 1998), many at a time.

use crate::element::Element;
use crate::kernel::Kernel;
use crate::processor::run_vectorized;
use crate::views::FloatsMut;

const LEN: usize = 624;
const MIDDLE: usize = 397;

/// The state of a generator, where it lies.
pub struct Mt19937<'a> {
    /// 624 words.
    pub words: &'a mut [u32; LEN],
    /// The word that is next.
    pub next: &'a mut u32,
    /// Words left, and one more.
    pub left: &'a mut i32,
}

impl Mt19937<'_> {
    /// Draws as many 32-bit numbers as `out` holds.
    #[inline(always)]
    fn fill(&mut self, mut out: &mut [u32]) {
        while !out.is_empty() {
            if *self.left <= 1 {
                refill(self.words);
                *self.left = LEN as i32 + 1;
                *self.next = 0;
            }
            let next = (*self.next as usize).min(LEN);
            let count = out.len().min(*self.left as usize - 1).min(LEN - next);
            let (now, later) = out.split_at_mut(count);
            for (number, word) in now.iter_mut().zip(&self.words[next..next + count]) {
                *number = temper(*word);
            }
            *self.next += count as u32;
            *self.left = if count == 0 { 1 } else { *self.left - count as i32 };
            out = later;
        }
    }
}

#[inline(always)]
fn temper(mut y: u32) -> u32 {
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c_5680;
    y ^= (y << 15) & 0xefc6_0000;
    y ^ (y >> 18)
}

/// The next 624 words.
#[inline(always)]
fn refill(words: &mut [u32; LEN]) {
    #[inline(always)]
    fn twist(upper: u32, lower: u32) -> u32 {
        let mixed = (upper & 0x8000_0000) | (lower & 0x7fff_ffff);
        (mixed >> 1) ^ ((lower & 1).wrapping_neg() & 0x9908_b0df)
    }
    const TURN: usize = LEN - MIDDLE;
    // a word depends on one that is 227 behind, so that vectors of a few words may be made at once
    let old = *words;
    for i in 0..TURN {
        words[i] = old[i + MIDDLE] ^ twist(old[i], old[i + 1]);
    }
    let (mut done, mut rest) = words.split_at_mut(TURN);
    let mut at = TURN;
    while at < LEN {
        let count = TURN.min(LEN - at);
        let (now, later) = rest.split_at_mut(count);
        for (i, word) in now.iter_mut().enumerate() {
            let following = if at + i + 1 < LEN { old[at + i + 1] } else { 0 };
            *word = done[i] ^ twist(old[at + i], following);
        }
        (done, rest) = (now, later);
        at += count;
    }
    // the last one looks at the first of the new ones
    let last = words[MIDDLE - 1] ^ twist(old[LEN - 1], words[0]);
    words[LEN - 1] = last;
}

/// 1 where a number of 53 random bits, as a fraction, is below `p`, else 0: what libtorch draws for `bernoulli_(p)`.
pub struct Bernoulli<'a, 'g, T> {
    /// Where the bits come from.
    pub generator: &'a mut Mt19937<'g>,
    /// From 0 to 1.
    pub p: f64,
    /// What is drawn.
    pub output: &'a mut [T],
}

impl<T: Element> Kernel for Bernoulli<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let limit = (self.p * (1u64 << 53) as f64).ceil() as u64;
        let (zero, one) = (T::from_f32(0.0), T::from_f32(1.0));
        let mut numbers = [0; 2 * LEN];
        for part in self.output.chunks_mut(LEN) {
            let numbers = &mut numbers[..2 * part.len()];
            self.generator.fill(numbers);
            for (out, pair) in part.iter_mut().zip(numbers.chunks_exact(2)) {
                let number = u64::from(pair[0] & 0x1f_ffff) << 32 | u64::from(pair[1]);
                *out = if number < limit { one } else { zero };
            }
        }
    }
}

/// Writes a random mask: 1 with probability `p`, else 0.
pub fn bernoulli(generator: &mut Mt19937, p: f64, output: FloatsMut) {
    match output {
        FloatsMut::Float32(output) => run_vectorized(Bernoulli { generator, p, output }),
        FloatsMut::Bfloat16(output) => run_vectorized(Bernoulli { generator, p, output }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_paper() {
        // the reference implementation's first numbers for seed 5489, and the 10000th, which C++ names in its standard
        let mut words = [0u32; LEN];
        words[0] = 5489;
        for i in 1..LEN {
            let before = words[i - 1];
            words[i] = 1_812_433_253u32.wrapping_mul(before ^ (before >> 30)).wrapping_add(i as u32);
        }
        let (mut next, mut left) = (0, 1);
        let mut generator = Mt19937 { words: &mut words, next: &mut next, left: &mut left };
        let mut numbers = vec![0; 10_000];
        let (first, rest) = numbers.split_at_mut(1000);
        generator.fill(first);
        for part in rest.chunks_mut(7) {
            generator.fill(part);
        }
        assert_eq!(numbers[..2], [3_499_211_612, 581_869_302]);
        assert_eq!(numbers[9_999], 4_123_659_995);
        assert_eq!((next, left), ((10_000 % LEN) as u32, (LEN + 1 - 10_000 % LEN) as i32));
    }
}
