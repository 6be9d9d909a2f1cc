//! What a setting may be; each reports a value that is out of range.

use super::problems::Problems;

pub(super) fn not_negative(problems: &mut Problems, key: &str, value: &f64) {
    problems.require_not_negative(key, *value);
}

pub(super) fn finite(problems: &mut Problems, key: &str, value: &f64) {
    problems.require(value.is_finite(), key, value, "a finite number");
}

/// A decay rate.
pub(super) fn rate(problems: &mut Problems, key: &str, value: &f64) {
    problems.require((0.0..1.0).contains(value), key, value, "at least 0 and below 1");
}

/// Two decay rates.
pub(super) fn rates(problems: &mut Problems, key: &str, value: &(f64, f64)) {
    rate(problems, &format!("{key}[0]"), &value.0);
    rate(problems, &format!("{key}[1]"), &value.1);
}

pub(super) fn at_least_one(problems: &mut Problems, key: &str, value: &u64) {
    problems.require(*value > 0, key, value, "at least 1");
}

pub(super) fn from_0_to_1(problems: &mut Problems, key: &str, value: &f64) {
    problems.require((0.0..=1.0).contains(value), key, value, "from 0 to 1");
}

/// A factor that lowers a learning rate.
pub(super) fn above_0_to_1(problems: &mut Problems, key: &str, value: &f64) {
    problems.require(*value > 0.0 && *value <= 1.0, key, value, "above 0 and at most 1");
}
