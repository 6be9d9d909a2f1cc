//! Functions of one float32 without branches, so that a loop over them becomes vector instructions. The polynomials
//! are fitted by `scripts/fit_kernels.py`.

/// Below this `exp` is not a normal number any more.
const EXP_MIN: f32 = -87.33;
/// Above this the power of two in `exp` is out of range.
const EXP_MAX: f32 = 88.02;
/// Added to a number and taken away again, this rounds to an integer, which is in the lowest bits between.
const ROUNDER: f32 = 12_582_912.0;
/// Where `exp(-a * a / 2)` meets [`EXP_MIN`].
const TAIL_END: f32 = 13.2;
/// `1 / sqrt(2 pi)`.
const DENSITY_AT_0: f32 = 0.398_942_3;

/// `e` to the power of `x`, to 1e-7 of its value, for `x` from -87.33 to 88.02; beyond, the value at that end. NaN
/// stays NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let x = if x < EXP_MIN { EXP_MIN } else { x };
    let x = if x > EXP_MAX { EXP_MAX } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUNDER);
    let power = shifted - ROUNDER;
    // ln 2 in two parts, so that the rest is exact
    let rest = power.mul_add(-0.693_359_4, x);
    let rest = power.mul_add(2.121_944_4e-4, rest);
    let mut sum = 1.383_684_6e-3;
    for coefficient in [8.374_816e-3, 4.166_822_6e-2, 0.166_664_2, 0.499_999_9, 1.0, 1.0] {
        sum = rest.mul_add(sum, coefficient);
    }
    let scale = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    sum * scale
}

/// The upper tail `Q` of the normal distribution at `a`, and its density there; `a` from 0.
#[inline(always)]
pub fn normal_tail(a: f32) -> (f32, f32) {
    let a = if a > TAIL_END { TAIL_END } else { a };
    let bell = exp(-0.5 * a * a);
    let t = 1.0 / 0.3f32.mul_add(a, 1.0);
    let mut ratio = 3.833_428e-2;
    for coefficient in [
        -0.168_952,
        0.228_217_41,
        -7.599_97e-2,
        0.142_185_12,
        9.483_295e-2,
        0.121_882_06,
        0.119_493_06,
        6.852_951_7e-6,
    ] {
        ratio = t.mul_add(ratio, coefficient);
    }
    (bell * ratio, bell * DENSITY_AT_0)
}

/// `1 / (1 + exp(-x))`, and 1 less that.
#[inline(always)]
pub fn sigmoid(x: f32) -> (f32, f32) {
    let e = exp(-x);
    let s = 1.0 / (1.0 + e);
    (s, e * s)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `Q(a)` in float64, by the continued fraction that converges for large `a`, or the series for small ones.
    fn tail(a: f64) -> f64 {
        let density = (-a * a / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
        if a < 2.0 {
            let (mut term, mut sum) = (a, a);
            for n in 1..60 {
                term *= a * a / f64::from(2 * n + 1);
                sum += term;
            }
            return 0.5 - density * sum;
        }
        let mut fraction = a;
        for n in (1..200).rev() {
            fraction = a + f64::from(n) / fraction;
        }
        density / fraction
    }

    #[test]
    fn exp_is_exact_to_1e_7() {
        for i in -8700..8800 {
            let x = i as f32 * 0.01;
            let expected = f64::from(x).exp();
            assert!(
                (f64::from(exp(x)) / expected - 1.0).abs() < 2e-7,
                "exp({x}) = {}, not {expected}",
                exp(x)
            );
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NEG_INFINITY) < 1.3e-38 && exp(f32::INFINITY) > 1e38 && exp(f32::NAN).is_nan());
    }

    #[test]
    fn tails_of_the_normal_distribution_are_exact_to_1e_6() {
        for i in 0..1300 {
            let a = i as f32 * 0.01;
            let (q, density) = normal_tail(a);
            // the exponent of the bell is rounded: its error grows with its size
            let tolerance = 4e-7 + 1e-7 * f64::from(a * a);
            assert!((f64::from(q) / tail(f64::from(a)) - 1.0).abs() < tolerance, "a = {a}: {q}");
            let expected = (-f64::from(a).powi(2) / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
            assert!((f64::from(density) / expected - 1.0).abs() < tolerance, "a = {a}: {density}");
        }
        assert_eq!(normal_tail(0.0).0, 0.5);
    }
}
