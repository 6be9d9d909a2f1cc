//! The scales of fp8 training.

/// The scale that brings a largest magnitude to the largest power of two times it that `max` has room for, less `margin` powers of two:
/// `2^(floor(log2(max / amax)) - margin)`. The one before stays where there is no magnitude to go by: 0, infinity or NaN. Exponents
/// are kept from -126 to 126, so that the scale and its inverse are normal numbers.
///
/// Source: `DelayedScaling` of Habana's transformer engine.
pub fn new_scale(amax: f32, before: f32, max: f32, margin: i32) -> f32 {
    if !(amax > 0.0 && amax.is_finite()) {
        return before;
    }
    let exponent = (max / amax).log2().floor() - margin as f32;
    f32::from_bits(((exponent.clamp(-126.0, 126.0) as i32 + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_powers_of_two() {
        for (amax, max, margin, expected) in [
            (1.0, 240.0, 0, 128.0),
            (240.0, 240.0, 0, 1.0),
            (241.0, 240.0, 0, 0.5),
            (3.0, 57344.0, 0, 16384.0),
            (3.0, 57344.0, 2, 4096.0),
            (3.0, 57344.0, -1, 32768.0),
            (1e-38, 57344.0, 0, 2.0_f32.powi(126)),
            (f32::MAX, 240.0, 0, 2.0_f32.powi(-121)),
            (f32::MAX, 240.0, 9, 2.0_f32.powi(-126)),
        ] {
            assert_eq!(new_scale(amax, 3.0, max, margin), expected, "{amax} {max} {margin}");
        }
        for amax in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            assert_eq!(new_scale(amax, 3.0, 240.0, 0), 3.0, "{amax}");
        }
    }
}
