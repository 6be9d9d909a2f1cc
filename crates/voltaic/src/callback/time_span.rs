//! Lengths of time as they are written in configurations: `00:12:00:00`, `{hours: 12}`, or seconds.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::config::conversions;
use crate::error::ConfigError;

/// A length of time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum TimeSpan {
    /// `DD:HH:MM:SS`: days, hours, minutes, seconds.
    Text(String),
    /// The same with names.
    Parts(TimeParts),
}

/// A length of time as the sum of its parts.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TimeParts {
    /// Weeks.
    pub weeks: f64,
    /// Days.
    pub days: f64,
    /// Hours.
    pub hours: f64,
    /// Minutes.
    pub minutes: f64,
    /// Seconds.
    pub seconds: f64,
}

conversions! { TimeSpan:
    &str => |text| Self::Text(text.to_owned()),
    String => |text| Self::Text(text),
    Duration => |duration| Self::Parts(TimeParts { seconds: duration.as_secs_f64(), ..TimeParts::default() }),
}

impl TimeSpan {
    /// The time; `key` is what an error names.
    ///
    /// # Errors
    /// [`ConfigError`] if the text is not `DD:HH:MM:SS`, or the time is negative or not finite.
    pub fn duration(&self, key: &str) -> Result<Duration, ConfigError> {
        let refuse = |what: String| {
            ConfigError::new(key, what, "write DD:HH:MM:SS, such as 00:12:00:00, or {hours: 12}")
        };
        let seconds = match self {
            Self::Text(text) => {
                let parts: Result<Vec<u32>, _> = text.trim().split(':').map(str::parse::<u32>).collect();
                match parts.as_deref() {
                    Ok(&[days, hours, minutes, seconds]) => {
                        [(days, 86_400.0), (hours, 3600.0), (minutes, 60.0), (seconds, 1.0)]
                            .iter()
                            .map(|(count, unit)| f64::from(*count) * unit)
                            .sum()
                    }
                    _ => return Err(refuse(format!("`{text}` is not a length of time"))),
                }
            }
            Self::Parts(parts) => {
                parts.weeks * 604_800.0
                    + parts.days * 86_400.0
                    + parts.hours * 3600.0
                    + parts.minutes * 60.0
                    + parts.seconds
            }
        };
        Duration::try_from_secs_f64(seconds).map_err(|_| refuse(format!("{seconds} seconds")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_spellings_mean_the_same() {
        let expected = Duration::from_secs(86_400 + 2 * 3600 + 3 * 60 + 4);
        for text in [r#""01:02:03:04""#, r#"{"days": 1, "hours": 2, "minutes": 3, "seconds": 4}"#] {
            let span: TimeSpan = serde_json::from_str(text).unwrap();
            assert_eq!(span.duration("trainer.max_time").unwrap(), expected, "{text}");
        }
        assert_eq!(TimeSpan::from(expected).duration("x").unwrap(), expected);
    }

    #[test]
    fn other_texts_are_refused_with_their_key() {
        for text in ["", "12", "1:2:3", "a:b:c:d", "-1:0:0:0"] {
            let error = TimeSpan::from(text).duration("trainer.max_time").unwrap_err().to_string();
            assert!(error.contains("trainer.max_time") && error.contains("DD:HH:MM:SS"), "{error}");
        }
    }
}
