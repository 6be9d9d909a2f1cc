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

#[cfg(test)]
mod tests {
    use super::*;

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
