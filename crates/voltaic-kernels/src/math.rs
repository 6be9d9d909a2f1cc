//! Functions of one float32 without branches, so that a loop over them becomes vector instructions. The polynomials
//! are fitted by `scripts/fit_kernels.py`.

/// Here the power of two in `exp` is 2^-127, whose bits are those of 0.
const EXP_MIN: f32 = -88.0;
/// Here it is 2^128, whose bits are those of infinity.
const EXP_MAX: f32 = 88.5;
/// Added to a number and taken away again, this rounds to an integer, which is in the lowest bits between.
const ROUNDER: f32 = 12_582_912.0;
/// Where [`exp`] of `-a * a / 2` is 0.
const TAIL_END: f32 = 13.25;
/// `1 / sqrt(2 pi)`.
const DENSITY_AT_0: f32 = 0.398_942_3;

/// `e` to the power of `x`, to 1e-7 of its value, for `x` from -87.33 to 88.37; 0 below -87.68, and infinite above. NaN stays
/// NaN.
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

/// The upper tail `Q` of the normal distribution at `a`, and its density there; `a` from 0. Both are 0 from 13.25 on.
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

/// `1 / (1 + exp(-x))`, and 1 less that. Both are 0 below -88.37.
#[inline(always)]
pub fn sigmoid(x: f32) -> (f32, f32) {
    let e = exp(-x);
    let s = 1.0 / (1.0 + e);
    // infinity times 0 is not a number
    let finite = if e > f32::MAX { f32::MAX } else { e };
    (s, finite * s)
}

/// Here [`tanh`] goes from its polynomial to `exp`.
const TANH_SMALL: f32 = 0.625;

/// The hyperbolic tangent, to 3e-7 of its value. The polynomial is that of Cephes (`tanhf`).
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let z = x * x;
    let mut sum = -5.704_988_7e-3;
    for coefficient in [2.063_908_8e-2, -5.373_971_6e-2, 0.133_314_42, -0.333_332_8] {
        sum = z.mul_add(sum, coefficient);
    }
    let small = (sum * z).mul_add(x, x);
    let a = x.abs();
    let large = (1.0 - 2.0 / (exp(2.0 * a) + 1.0)).copysign(x);
    if a < TANH_SMALL { small } else { large }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tanh_is_exact_to_3e_7() {
        for i in -20_000..20_000 {
            let x = i as f32 * 0.001;
            let exact = f64::from(x).tanh();
            assert!((f64::from(tanh(x)) - exact).abs() <= 3e-7 * exact.abs(), "tanh({x}) = {}", tanh(x));
        }
        assert_eq!([0.0, -0.0, 100.0, f32::INFINITY, -1e38].map(tanh), [0.0, -0.0, 1.0, 1.0, -1.0]);
        assert_eq!(tanh(1e-20), 1e-20);
        assert!(tanh(f32::NAN).is_nan());
    }

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
        for far in [-87.7, -88.0, -89.0, -1e4, -1e38, f32::NEG_INFINITY] {
            assert_eq!(exp(far).to_bits(), 0, "{far}");
        }
        for far in [88.4, 88.5, 89.0, 1e4, 1e38, f32::INFINITY] {
            assert_eq!(exp(far), f32::INFINITY, "{far}");
        }
        assert!(exp(f32::NAN).is_nan());
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
        assert_eq!([13.25, 14.0, 1e38, f32::INFINITY].map(normal_tail), [(0.0, 0.0); 4]);
        assert!(normal_tail(f32::NAN).0.is_nan());
    }

    #[test]
    fn the_logistic_function_ends_at_0_and_1() {
        for x in [-1e3, -90.0, -20.0, -1.0, 0.0, 1.0, 20.0, 90.0, 1e3, f32::INFINITY, f32::NEG_INFINITY] {
            let (s, rest) = sigmoid(x);
            let exact = 1.0 / (1.0 + (-f64::from(x)).exp());
            assert!((f64::from(s) - exact).abs() <= 2e-7 * exact + 1e-38, "sigmoid({x}) = {s}");
            let exact = if x < -88.37 { 0.0 } else { 1.0 / (1.0 + f64::from(x).exp()) };
            assert!((f64::from(rest) - exact).abs() <= 2e-7 * exact + 1e-38, "1 - sigmoid({x}) = {rest}");
        }
        assert_eq!((sigmoid(-1e3), sigmoid(1e3)), ((0.0, 0.0), (1.0, 0.0)));
        assert!(sigmoid(f32::NAN).0.is_nan() && sigmoid(f32::NAN).1.is_nan());
    }
}
