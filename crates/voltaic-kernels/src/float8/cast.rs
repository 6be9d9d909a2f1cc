//! Casts of whole tensors, each in one pass over memory, by all threads.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::element::Element;
use crate::float8::format::{E4m3, E5m2, Float8, decode, encode, encode_stochastic};
#[cfg(target_arch = "x86_64")]
use crate::float8::halves::decode_block;
use crate::kernel::Kernel;
use crate::processor::run_vectorized;
use crate::threads::GRAIN;
use crate::views::{Floats, FloatsMut, for_units};

/// A format of 8 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Float8Format {
    /// [`E4m3`], up to 240.
    E4m3,
    /// [`E5m2`], up to 57344.
    E5m2,
}

impl Float8Format {
    /// The largest number that casts make.
    pub fn max(self) -> f32 {
        match self {
            Self::E4m3 => E4m3::MAX,
            Self::E5m2 => E5m2::MAX,
        }
    }
}

/// Numbers that are cast while they are in the cache of the processor's core.
const BLOCK: usize = 1024;

/// Casts `input * scale`, and gives the bits of the largest magnitude of `input`; those of a NaN are larger than all others.
struct Encode<'a, F, T> {
    format: PhantomData<F>,
    input: &'a [T],
    output: &'a mut [u8],
    scale: f32,
    /// For stochastic rounding: the seed, and the number of the first element.
    random: Option<(u64, u64)>,
}

/// A random number of an element, the same on whatever thread: the mixing step of a hash ("lowbias32" of C. Wellons) twice.
#[inline(always)]
fn mix(number: u32) -> u32 {
    let number = (number ^ (number >> 16)).wrapping_mul(0x7feb_352d);
    let number = (number ^ (number >> 15)).wrapping_mul(0x846c_a68b);
    number ^ (number >> 16)
}

impl<F: Float8, T: Element> Kernel for Encode<'_, F, T> {
    type Output = u32;

    #[inline(always)]
    fn run(self) -> u32 {
        let Self { format: _, input, output, scale, random } = self;
        let mut largest = 0;
        let Some((seed, first)) = random else {
            for (out, number) in output.iter_mut().zip(input) {
                let number = number.to_f32();
                largest = largest.max(number.to_bits() & 0x7fff_ffff);
                *out = encode::<F>(number * scale);
            }
            return largest;
        };
        let (low, high) = (seed as u32, (seed >> 32) as u32 ^ (first >> 32) as u32);
        for ((out, number), index) in output.iter_mut().zip(input).zip(first as u32..) {
            let number = number.to_f32();
            largest = largest.max(number.to_bits() & 0x7fff_ffff);
            *out = encode_stochastic::<F>(number * scale, mix(mix(index ^ low) ^ high));
        }
        largest
    }
}

/// Casts `input * scale`, rounded to the nearest with ties to even; with a seed stochastically. Gives the largest magnitude of `input`
/// without the scale: NaN if one number is, 0 if there are none.
///
/// # Panics
/// If the lengths differ.
pub fn to_float8(
    input: Floats,
    output: &mut [u8],
    format: Float8Format,
    scale: f32,
    seed: Option<u64>,
) -> f32 {
    fn run<F: Float8, T: Element>(
        _: F,
        input: &[T],
        output: &mut [u8],
        scale: f32,
        seed: Option<u64>,
    ) -> f32 {
        assert_eq!(input.len(), output.len());
        let largest = AtomicU32::new(0);
        for_units(output, 1, GRAIN, |part, output| {
            let (start, input) = (part.start, &input[part]);
            let mut own = 0;
            let blocks =
                input.chunks(BLOCK).zip(output.chunks_mut(BLOCK)).zip((start as u64..).step_by(BLOCK));
            for ((input, output), first) in blocks {
                let random = seed.map(|seed| (seed, first));
                own = own.max(run_vectorized(Encode::<F, T> {
                    format: PhantomData,
                    input,
                    output,
                    scale,
                    random,
                }));
            }
            largest.fetch_max(own, Ordering::Relaxed);
        });
        f32::from_bits(largest.into_inner())
    }
    match (input, format) {
        (Floats::Float32(input), Float8Format::E4m3) => run(E4m3, input, output, scale, seed),
        (Floats::Float32(input), Float8Format::E5m2) => run(E5m2, input, output, scale, seed),
        (Floats::Bfloat16(input), Float8Format::E4m3) => run(E4m3, input, output, scale, seed),
        (Floats::Bfloat16(input), Float8Format::E5m2) => run(E5m2, input, output, scale, seed),
    }
}

struct Largest<'a, T>(&'a [T]);

impl<T: Element> Kernel for Largest<'_, T> {
    type Output = u32;

    #[inline(always)]
    fn run(self) -> u32 {
        self.0.iter().fold(0, |largest, number| largest.max(number.to_f32().to_bits() & 0x7fff_ffff))
    }
}

/// The largest magnitude: NaN if one number is, 0 if there are none.
pub fn largest_magnitude(input: Floats) -> f32 {
    fn run<T: Element>(input: &[T]) -> f32 {
        let largest = AtomicU32::new(0);
        crate::threads::parallel_for(input.len(), GRAIN, |part| {
            largest.fetch_max(run_vectorized(Largest(&input[part])), Ordering::Relaxed);
        });
        f32::from_bits(largest.into_inner())
    }
    match input {
        Floats::Float32(input) => run(input),
        Floats::Bfloat16(input) => run(input),
    }
}

struct Decode<'a, F, T> {
    format: PhantomData<F>,
    input: &'a [u8],
    output: &'a mut [T],
    scale: f32,
}

impl<F: Float8, T: Element> Kernel for Decode<'_, F, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { format: _, input, output, scale } = self;
        for (out, code) in output.iter_mut().zip(input) {
            *out = T::from_f32(decode::<F>(*code) * scale);
        }
    }
}

/// Writes the numbers of codes times `scale`, a power of two, exactly in both formats of the output.
///
/// # Panics
/// If the lengths differ.
pub fn from_float8(input: &[u8], output: FloatsMut, format: Float8Format, scale: f32) {
    fn run<F: Float8, T: Element>(_: F, input: &[u8], output: &mut [T], scale: f32) {
        assert_eq!(input.len(), output.len());
        for_units(output, 1, GRAIN, |part, output| {
            for (input, output) in input[part].chunks(BLOCK).zip(output.chunks_mut(BLOCK)) {
                #[cfg(target_arch = "x86_64")]
                if decode_block::<F, T>(input, output, scale) {
                    continue;
                }
                run_vectorized(Decode::<F, T> { format: PhantomData, input, output, scale });
            }
        });
    }
    match (output, format) {
        (FloatsMut::Float32(output), Float8Format::E4m3) => run(E4m3, input, output, scale),
        (FloatsMut::Float32(output), Float8Format::E5m2) => run(E5m2, input, output, scale),
        (FloatsMut::Bfloat16(output), Float8Format::E4m3) => run(E4m3, input, output, scale),
        (FloatsMut::Bfloat16(output), Float8Format::E5m2) => run(E5m2, input, output, scale),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::Bf16;

    #[test]
    fn whole_tensors_are_cast_as_their_numbers_are() {
        let numbers: Vec<f32> = (0..100_003_u32).map(|i| (mix(i) as f32 / 1e8 - 20.0) * 17.0).collect();
        let narrow: Vec<Bf16> = numbers.iter().map(|number| Bf16::from_f32(*number)).collect();
        for format in [Float8Format::E4m3, Float8Format::E5m2] {
            let mut codes = vec![0; numbers.len()];
            let largest = to_float8(Floats::Float32(&numbers), &mut codes, format, 0.5, None);
            assert_eq!(largest, numbers.iter().fold(0.0_f32, |most, number| most.max(number.abs())));
            assert_eq!(largest, largest_magnitude(Floats::Float32(&numbers)));
            let one = |number: f32| match format {
                Float8Format::E4m3 => (encode::<E4m3>(number), decode::<E4m3>(encode::<E4m3>(number))),
                Float8Format::E5m2 => (encode::<E5m2>(number), decode::<E5m2>(encode::<E5m2>(number))),
            };
            assert!(numbers.iter().zip(&codes).all(|(number, code)| one(number * 0.5).0 == *code));
            let mut wide = vec![0.0; codes.len()];
            from_float8(&codes, FloatsMut::Float32(&mut wide), format, 1.0);
            assert!(numbers.iter().zip(&wide).all(|(number, known)| one(number * 0.5).1 == *known));
            let mut half = vec![Bf16(0); codes.len()];
            from_float8(&codes, FloatsMut::Bfloat16(&mut half), format, 1.0);
            assert!(wide.iter().zip(&half).all(|(wide, half)| *wide == half.to_f32()), "exact in bfloat16");
            let largest = to_float8(Floats::Bfloat16(&narrow), &mut codes, format, 2.0, None);
            assert_eq!(largest, largest_magnitude(Floats::Bfloat16(&narrow)));
            assert!(narrow.iter().zip(&codes).all(|(number, code)| one(number.to_f32() * 2.0).0 == *code));
        }
    }

    #[test]
    fn all_codes_are_widened_as_one_by_one() {
        // each code at each place of a step, and a rest
        for first in 0..33_usize {
            let codes: Vec<u8> = (0..1090).map(|at| ((at + first) % 256) as u8).collect();
            for (format, scale) in [Float8Format::E4m3, Float8Format::E5m2].into_iter().zip([0.25, 1024.0]) {
                let (mut wide, mut half) = (vec![0.0; codes.len()], vec![Bf16(0); codes.len()]);
                from_float8(&codes, FloatsMut::Float32(&mut wide), format, scale);
                from_float8(&codes, FloatsMut::Bfloat16(&mut half), format, scale);
                for (code, (wide, half)) in codes.iter().zip(wide.iter().zip(half)) {
                    let number = match format {
                        Float8Format::E4m3 => decode::<E4m3>(*code),
                        Float8Format::E5m2 => decode::<E5m2>(*code),
                    };
                    let same = |found: f32| found.to_bits() == (number * scale).to_bits();
                    assert!(number.is_nan() && wide.is_nan() && half.to_f32().is_nan() || same(*wide));
                    assert!(number.is_nan() || same(half.to_f32()), "{format:?} {code:#x}: {half:?}");
                }
            }
        }
    }

    #[test]
    fn a_seed_gives_the_same_numbers_on_any_threads_and_the_mean_is_the_value() {
        const LEN: usize = 200_000;
        let numbers = vec![1.03_f32; LEN];
        let cast = |seed| {
            let mut codes = vec![0; LEN];
            to_float8(Floats::Float32(&numbers), &mut codes, Float8Format::E5m2, 1.0, Some(seed));
            codes
        };
        let codes = cast(7);
        assert!(codes == cast(7) && codes != cast(8) && codes != cast(7 << 32));
        // 1.03 lies between 1 and 1.25: a share of 0.12 is rounded up, with a deviation of 0.0007
        let up = codes.iter().filter(|code| **code == encode::<E5m2>(1.25)).count();
        assert!(up + codes.iter().filter(|code| **code == encode::<E5m2>(1.0)).count() == LEN);
        assert!((up as f64 / LEN as f64 - 0.12).abs() < 0.004, "{up} of {LEN}");
        // of neighbours one says nothing of the other
        let pairs = codes.windows(2).filter(|pair| pair[0] == pair[1]).count();
        assert!((pairs as f64 / LEN as f64 - (0.12 * 0.12 + 0.88 * 0.88)).abs() < 0.006, "{pairs} of {LEN}");
    }

    #[test]
    fn what_is_not_a_number_is_seen() {
        for place in [0, 50, 99] {
            let mut numbers = vec![f32::INFINITY; 100];
            numbers[place] = f32::NAN;
            let mut codes = vec![0; 100];
            assert!(to_float8(Floats::Float32(&numbers), &mut codes, Float8Format::E4m3, 1.0, None).is_nan());
            assert_eq!((codes[place], codes[(place + 1) % 100]), (0x7f, 0x77));
        }
        assert_eq!(to_float8(Floats::Float32(&[]), &mut [], Float8Format::E4m3, 1.0, None), 0.0);
    }
}
