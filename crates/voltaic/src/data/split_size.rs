//! How large a part of a dataset is.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::error::ConfigError;

/// Size of a part of a dataset: a number of samples (5000), or a fraction of all (0.1).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum SplitSize {
    /// So many samples.
    Count(usize),
    /// This fraction of the samples, rounded down.
    Fraction(f64),
}

impl SplitSize {
    /// Whether it can be the size of any part.
    pub(in crate::data) fn is_possible(self) -> bool {
        match self {
            Self::Count(_) => true,
            Self::Fraction(fraction) => (0.0..1.0).contains(&fraction),
        }
    }

    /// Number of samples out of `len`; something must be left over.
    ///
    /// # Errors
    /// [`ConfigError`] on `key` if the fraction is not within 0 to 1 (1 excluded) or the count leaves nothing.
    pub(in crate::data) fn of(self, len: usize, key: &str) -> Result<usize> {
        let count = match self {
            Self::Count(count) => Some(count),
            Self::Fraction(fraction) if (0.0..1.0).contains(&fraction) => {
                Some((len as f64 * fraction) as usize)
            }
            Self::Fraction(_) => None,
        };
        count.filter(|&count| count < len).ok_or_else(|| {
            let given = match self {
                Self::Count(count) => count.to_string(),
                Self::Fraction(fraction) => fraction.to_string(),
            };
            let remedy =
                "give a number of samples below that, or a fraction from 0 up to but not including 1";
            ConfigError::new(key, format!("{given} of {len} samples"), remedy).into()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_fractions() {
        for (json, len, expected) in [
            ("5000", 60_000, Some(5000)),
            ("0.1", 60_000, Some(6000)),
            ("0.1", 9, Some(0)),
            ("0", 5, Some(0)),
            ("0.0", 5, Some(0)),
            ("5", 5, None),
            ("1.0", 5, None),
            ("-0.1", 5, None),
        ] {
            let size: SplitSize = serde_json::from_str(json).unwrap();
            assert_eq!(size.of(len, "k").ok(), expected, "{json} of {len}");
        }
        let error = SplitSize::Count(7).of(5, "MnistData.val_size").unwrap_err().to_string();
        assert!(error.starts_with("MnistData.val_size: 7 of 5 samples; give"), "{error}");
    }
}
