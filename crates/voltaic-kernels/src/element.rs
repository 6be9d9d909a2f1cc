//! Numbers as they lie in tensors.

/// A number of a tensor, computed with in float32.
pub trait Element: Copy + Default + Send + Sync + 'static {
    /// The number.
    fn to_f32(self) -> f32;
    /// The nearest number, ties to even. What is not a number is the NaN that libtorch's vectors write.
    fn from_f32(value: f32) -> Self;
}

impl Element for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}

/// Nothing, which is read as 0 and takes no memory.
impl Element for () {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        0.0
    }

    #[inline(always)]
    fn from_f32(_: f32) -> Self {}
}

/// A bfloat16: the upper half of a float32.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(pub u16);

impl Bf16 {
    /// The NaN that libtorch's vectors make of any, so that its bits are the same.
    pub const NAN: Self = Self(0xffff);
}

impl Element for Bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        Self(if value.is_nan() { Self::NAN.0 } else { rounded as u16 })
    }
}

/// A float16, as IEEE 754 has it: a sign, 5 bits of the exponent, 10 of the fraction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct F16(pub u16);

/// Exponents of float32 and float16 differ by as much.
const EXPONENTS: u32 = 127 - 15;
/// Bits of a fraction that float32 has and float16 has not.
const MORE_BITS: u32 = 23 - 10;

impl Element for F16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        let bits = u32::from(self.0);
        let (sign, magnitude) = ((bits & 0x8000) << 16, (bits & 0x7fff) << MORE_BITS);
        // what is below the normal numbers of float16 is too, as bits of a float32: the product makes it normal
        let scaled = f32::from_bits(magnitude) * f32::from_bits((127 + EXPONENTS) << 23);
        let is_finite = bits & 0x7c00 != 0x7c00;
        f32::from_bits(sign | if is_finite { scaled.to_bits() } else { magnitude | 0x7f80_0000 })
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let (sign, magnitude) = ((bits >> 16) & 0x8000, bits & 0x7fff_ffff);
        let odd = (magnitude >> MORE_BITS) & 1;
        let rounded = magnitude.wrapping_sub(EXPONENTS << 23).wrapping_add(0xfff + odd) >> MORE_BITS;
        // below the normal numbers the sum with a number whose last bit is the smallest of float16 rounds
        let smallest = (EXPONENTS + MORE_BITS + 1) << 23;
        let small = (f32::from_bits(magnitude) + f32::from_bits(smallest)).to_bits().wrapping_sub(smallest);
        let number = match magnitude {
            0x7f80_0001.. => 0x7e00,
            0x477f_f000.. => 0x7c00, // from 65520 on
            0x3880_0000.. => rounded,
            _ => small,
        };
        Self((sign | number) as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn float16_is_exact_and_rounds_to_the_nearest_even() {
        for bits in 0..=u16::MAX {
            let (exponent, fraction) = (i32::from(bits >> 10 & 0x1f), f64::from(bits & 0x3ff));
            let sign = if bits >> 15 == 0 { 1.0 } else { -1.0 };
            let expected = match exponent {
                0 => sign * fraction * 2.0_f64.powi(-24),
                0x1f if fraction == 0.0 => sign * f64::INFINITY,
                0x1f => f64::NAN,
                _ => sign * (1024.0 + fraction) * 2.0_f64.powi(exponent - 25),
            };
            let value = F16(bits).to_f32();
            if expected.is_nan() {
                assert!(value.is_nan() && F16::from_f32(value).0 & 0x7fff > 0x7c00, "{bits:#x}");
                continue;
            }
            assert_eq!(f64::from(value).to_bits(), expected.to_bits(), "{bits:#x}");
            assert_eq!(F16::from_f32(value), F16(bits));
            if exponent < 0x1f {
                // half way to the next one, and on both sides of it
                let next = if exponent == 0x1e && fraction == 1023.0 {
                    sign * 65536.0
                } else {
                    f64::from(F16(bits + 1).to_f32())
                };
                let half = ((expected + next) / 2.0) as f32;
                let even = if bits & 1 == 0 { bits } else { bits + 1 };
                assert_eq!(F16::from_f32(half), F16(even), "{half}");
                assert_eq!(F16::from_f32(f32::from_bits(half.to_bits() - 1)), F16(bits), "below {half}");
                assert_eq!(F16::from_f32(f32::from_bits(half.to_bits() + 1)), F16(bits + 1), "above {half}");
            }
        }
        assert_eq!(F16::from_f32(f32::MAX), F16(0x7c00));
        assert_eq!(F16::from_f32(-f32::MIN_POSITIVE), F16(0x8000));
    }

    #[test]
    fn bfloat16_rounds_to_the_nearest_even() {
        for (value, bits) in [
            (1.0, 0x3f80),
            (-2.5, 0xc020),
            (1.0 + 1.0 / 256.0, 0x3f80), // a tie
            (1.0 + 3.0 / 256.0, 0x3f82), // a tie
            (1.0 + 1.1 / 256.0, 0x3f81),
            (f32::INFINITY, 0x7f80),
            (f32::MAX, 0x7f80),
            (f32::NAN, 0xffff), // as libtorch's vectors convert any NaN
            (f32::from_bits(0xff80_0001), 0xffff),
        ] {
            assert_eq!(Bf16::from_f32(value), Bf16(bits), "{value}");
        }
        assert_eq!(Bf16(0xc020).to_f32(), -2.5);
    }
}
