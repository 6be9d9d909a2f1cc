//! The two formats of 8 bits, number by number.

/// Codes of a step of loops.
pub(crate) const STEP: usize = 32;

/// A format: a sign, bits of the exponent, bits of the fraction.
pub trait Float8: Copy + Send + Sync + 'static {
    /// Bits of the fraction.
    const FRACTION: u32;
    /// What is added to exponents.
    const BIAS: u32;
    /// The largest number that casts make.
    const MAX: f32;
    /// The smallest magnitude, as bits, that is no number: infinity if the format has it, else NaN.
    const NO_NUMBER: u8;
}

/// 4 bits of the exponent, 3 of the fraction. Numbers are those of `torch.float8_e4m3fn` up to 240: Gaudi keeps the upper
/// codes for infinities and NaN, and casts make none of them.
///
/// Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022 (<https://arxiv.org/abs/2209.05433>).
#[derive(Debug, Clone, Copy)]
pub struct E4m3;

/// 5 bits of the exponent, 2 of the fraction: the upper half of a float16. Numbers are those of `torch.float8_e5m2`.
///
/// Source: as [`E4m3`].
#[derive(Debug, Clone, Copy)]
pub struct E5m2;

impl Float8 for E4m3 {
    const FRACTION: u32 = 3;
    const BIAS: u32 = 7;
    const MAX: f32 = 240.0;
    const NO_NUMBER: u8 = 0x7f;
}

impl Float8 for E5m2 {
    const FRACTION: u32 = 2;
    const BIAS: u32 = 15;
    const MAX: f32 = 57344.0;
    const NO_NUMBER: u8 = 0x7c;
}

/// The code of all that is not a number, without its sign.
const NAN: u32 = 0x7f;

/// Constants of a format, as bits of a float32.
struct Bits<F>(F);

impl<F: Float8> Bits<F> {
    /// Bits of a fraction that float32 has and the format has not.
    const MORE: u32 = 23 - F::FRACTION;
    /// Exponents differ by as much.
    const EXPONENTS: u32 = 127 - F::BIAS;
    /// The smallest normal number.
    const NORMAL: u32 = (Self::EXPONENTS + 1) << 23;
    /// A number whose last bit is the smallest number of the format.
    const SMALLEST_IS_LAST: u32 = (Self::EXPONENTS + 1 + Self::MORE) << 23;
}

/// The nearest number, ties to even; the largest one for what is larger, infinity too.
#[inline(always)]
pub fn encode<F: Float8>(value: f32) -> u8 {
    let bits = value.to_bits();
    let (sign, whole) = ((bits >> 24) & 0x80, bits & 0x7fff_ffff);
    let magnitude = whole.min(F::MAX.to_bits());
    let odd = (magnitude >> Bits::<F>::MORE) & 1;
    let half = (1 << (Bits::<F>::MORE - 1)) - 1;
    let normal =
        magnitude.wrapping_sub(Bits::<F>::EXPONENTS << 23).wrapping_add(half + odd) >> Bits::<F>::MORE;
    let smallest = Bits::<F>::SMALLEST_IS_LAST;
    let small = (f32::from_bits(magnitude) + f32::from_bits(smallest)).to_bits().wrapping_sub(smallest);
    let number = if magnitude < Bits::<F>::NORMAL { small } else { normal };
    (sign | if whole > 0x7f80_0000 { NAN } else { number }) as u8
}

/// One of the two numbers around a value, the nearer one with the higher probability, so that the mean over all `random` is the value.
/// Larger ones as [`encode`].
#[inline(always)]
pub fn encode_stochastic<F: Float8>(value: f32, random: u32) -> u8 {
    let bits = value.to_bits();
    let (sign, whole) = ((bits >> 24) & 0x80, bits & 0x7fff_ffff);
    let magnitude = whole.min(F::MAX.to_bits());
    let below = random & ((1 << Bits::<F>::MORE) - 1);
    let normal = magnitude.wrapping_sub(Bits::<F>::EXPONENTS << 23).wrapping_add(below) >> Bits::<F>::MORE;
    // in units of the smallest number, of which there are 8 at most below the normal numbers
    let unit = f32::from_bits((127 + F::BIAS - 1 + F::FRACTION) << 23);
    let part = (random >> 8) as f32 * f32::from_bits((127 - 24) << 23);
    let units = (f32::from_bits(magnitude.min(Bits::<F>::NORMAL)) * unit).clamp(0.0, 8.0);
    let floor = units as i32;
    let small = (floor + i32::from(part < units - floor as f32)) as u32;
    let number = if magnitude < Bits::<F>::NORMAL { small } else { normal };
    (sign | if whole > 0x7f80_0000 { NAN } else { number }) as u8
}

/// The number of a code, exactly.
#[inline(always)]
pub fn decode<F: Float8>(code: u8) -> f32 {
    let (sign, magnitude) = (u32::from(code & 0x80) << 24, u32::from(code & 0x7f));
    let shifted = magnitude << Bits::<F>::MORE;
    let normal = shifted + (Bits::<F>::EXPONENTS << 23);
    // with the exponent of the smallest normal number, which is taken away again
    let small = f32::from_bits(shifted | Bits::<F>::NORMAL) - f32::from_bits(Bits::<F>::NORMAL);
    let number = if magnitude >> F::FRACTION == 0 { small.to_bits() } else { normal };
    let is_infinite = magnitude == u32::from(F::NO_NUMBER) && F::NO_NUMBER != 0x7f;
    let other = if is_infinite { 0x7f80_0000 } else { 0x7fc0_0000 };
    f32::from_bits(sign | if magnitude >= u32::from(F::NO_NUMBER) { other } else { number })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of a format by the definition in the paper, in float64.
    fn table(fraction: i32, bias: i32, max: f64) -> Vec<(u8, f64)> {
        let value = |code: u8| {
            let (exponent, rest) = (i32::from(code >> fraction), f64::from(code & ((1 << fraction) - 1)));
            let steps = 2.0_f64.powi(fraction);
            match exponent {
                0 => rest / steps * 2.0_f64.powi(1 - bias),
                _ => (1.0 + rest / steps) * 2.0_f64.powi(exponent - bias),
            }
        };
        (0..0x80).map(|code| (code, value(code))).filter(|(_, value)| *value <= max).collect()
    }

    /// The nearest entry of the table, even codes at ties, the last one beyond it.
    fn nearest(table: &[(u8, f64)], value: f32) -> u8 {
        let sign = u8::from(value.is_sign_negative()) << 7;
        if value.is_nan() {
            return sign | 0x7f;
        }
        let magnitude = f64::from(value.abs());
        let above = table.partition_point(|(_, known)| *known < magnitude).min(table.len() - 1);
        let below = above.saturating_sub(1);
        let (to_below, to_above) = (magnitude - table[below].1, table[above].1 - magnitude);
        let is_below = to_below < to_above || (to_below == to_above && table[below].0 & 1 == 0);
        sign | if is_below { table[below].0 } else { table[above].0 }
    }

    fn check<F: Float8>(table: &[(u8, f64)]) {
        assert_eq!(table.last().map(|(_, value)| *value), Some(f64::from(F::MAX)));
        let check = |value: f32| {
            let (code, expected) = (encode::<F>(value), nearest(table, value));
            assert_eq!(code, expected, "{value} ({:#x})", value.to_bits());
        };
        (0..=u16::MAX).for_each(|bits| check(f32::from_bits(u32::from(bits) << 16)));
        for (code, value) in table {
            assert_eq!(f64::from(decode::<F>(*code)).to_bits(), value.to_bits(), "{code:#x}");
            assert_eq!(f64::from(decode::<F>(code | 0x80)).to_bits(), (-value).to_bits(), "{code:#x}");
        }
        // ties and both sides of them, then any bits; the numbers of a linear congruential generator
        for pair in table.windows(2) {
            let tie = ((pair[0].1 + pair[1].1) / 2.0) as f32;
            (tie.to_bits() - 1..=tie.to_bits() + 1).for_each(|bits| check(f32::from_bits(bits)));
        }
        let mut state = 1_u64;
        for _ in 0..10_000_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let bits = (state >> 32) as u32;
            check(f32::from_bits(bits));
        }
        // and as many exponents near the format's own
        for _ in 0..1_000_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let exponent = 127 - F::BIAS - 6 + (state >> 59) as u32;
            check(f32::from_bits((state >> 32) as u32 & 0x807f_ffff | exponent << 23));
        }
    }

    #[test]
    fn casts_are_those_of_the_tables() {
        check::<E4m3>(&table(3, 7, 240.0));
        check::<E5m2>(&table(2, 15, 57344.0));
    }

    #[test]
    fn examples_of_rounding() {
        assert_eq!(
            (decode::<E5m2>(encode::<E5m2>(18.5)), decode::<E4m3>(encode::<E4m3>(18.5))),
            (20.0, 18.0)
        );
        assert_eq!((encode::<E4m3>(f32::INFINITY), encode::<E5m2>(f32::NEG_INFINITY)), (0x77, 0xfb));
        assert!(decode::<E4m3>(0x7f).is_nan() && decode::<E5m2>(0x7d).is_nan());
        assert_eq!((decode::<E5m2>(0x7c), decode::<E5m2>(0xfc)), (f32::INFINITY, f32::NEG_INFINITY));
    }

    #[test]
    fn stochastic_rounding_has_the_value_as_its_mean() {
        fn check<F: Float8>() {
            // below the normal numbers, between two of them, exact ones, and beyond the largest
            let smallest = decode::<F>(1);
            for value in [0.3 * smallest, 2.75 * smallest, 1.03, 18.5, -3.3, 0.0, smallest, 200.0] {
                const DRAWS: u32 = 1 << 16;
                let mut sum = 0.0;
                let (mut least, mut most) = (f32::MAX, f32::MIN);
                for i in 0..DRAWS {
                    // each pattern of the upper and of the lower 16 bits once
                    let number = decode::<F>(encode_stochastic::<F>(value, i * 0x1_0001));
                    (least, most, sum) = (least.min(number), most.max(number), sum + f64::from(number));
                }
                let mean = sum / f64::from(DRAWS);
                let step = f64::from(most - least);
                assert!(
                    (mean - f64::from(value)).abs() <= step * 0.01,
                    "{value}: {mean} between {least} and {most}"
                );
                assert!(
                    least <= value
                        && value <= most
                        && (least == most) == (decode::<F>(encode::<F>(value)) == value)
                );
            }
            assert_eq!(encode_stochastic::<F>(1e9, u32::MAX), encode::<F>(F::MAX));
            assert_eq!(encode_stochastic::<F>(-f32::INFINITY, 7), encode::<F>(-F::MAX));
            assert_eq!(encode_stochastic::<F>(f32::NAN, 7) & 0x7f, 0x7f);
        }
        check::<E4m3>();
        check::<E5m2>();
    }
}
