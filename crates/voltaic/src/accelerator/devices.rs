//! The `devices` key: a number, a list of indices, or a text.

use std::collections::HashSet;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::config::conversions;
use crate::error::Problem;

/// How many devices, or which: a number, a list of indices, or a text such as `auto`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Devices {
    /// So many; -1 for all.
    Count(i64),
    /// These.
    Indices(Vec<i64>),
    /// `auto`, a number as text, or indices with commas between them.
    Text(String),
}

conversions! { Devices:
    i64 => |count| Self::Count(count),
    Vec<i64> => |indices| Self::Indices(indices),
    &str => |text| Self::Text(text.to_owned()),
}

/// What is left of [`Devices`] once its spelling is understood.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    Auto,
    All,
    Count(usize),
    Indices(Vec<usize>),
}

impl Devices {
    /// `accepted` names the values that the accelerator takes, for messages.
    pub(super) fn wanted(&self, accepted: &str) -> Result<Wanted, Problem> {
        let refuse = |given: String| {
            Problem::new(format!("{given} is not a choice of devices"), format!("use {accepted}"))
        };
        match self {
            Self::Count(-1) => Ok(Wanted::All),
            Self::Count(count) => match usize::try_from(*count) {
                Ok(count) if count > 0 => Ok(Wanted::Count(count)),
                _ => Err(refuse(count.to_string())),
            },
            Self::Indices(indices) => {
                indices_of(indices).map(Wanted::Indices).ok_or_else(|| refuse(format!("{indices:?}")))
            }
            Self::Text(text) => {
                let trimmed = text.trim();
                if trimmed == "auto" {
                    return Ok(Wanted::Auto);
                }
                let numbers: Result<Vec<i64>, _> =
                    trimmed.trim_end_matches(',').split(',').map(|part| part.trim().parse()).collect();
                match numbers.as_deref() {
                    Ok([count]) if !trimmed.contains(',') => Self::Count(*count).wanted(accepted),
                    Ok(indices) => {
                        indices_of(indices).map(Wanted::Indices).ok_or_else(|| refuse(format!("`{text}`")))
                    }
                    Err(_) => Err(refuse(format!("`{text}`"))),
                }
            }
        }
    }
}

/// Indices that are not negative and differ; none if they do not, or if there are none.
fn indices_of(given: &[i64]) -> Option<Vec<usize>> {
    let indices: Option<Vec<usize>> = given.iter().map(|&index| usize::try_from(index).ok()).collect();
    let indices = indices?;
    let differ = indices.iter().collect::<HashSet<_>>().len() == indices.len();
    (differ && !indices.is_empty()).then_some(indices)
}

impl Wanted {
    /// The indices meant, or what is wrong, on a machine with `available` devices named `name`, of which `auto` takes `auto`.
    pub(super) fn resolve(self, name: &str, available: usize, auto: usize) -> Result<Vec<usize>, String> {
        if let Self::Count(count) = self
            && count > available
        {
            return Err(format!("asks for {count}, but there are {available} {name} devices"));
        }
        let indices: Vec<usize> = match self {
            Self::Auto => (0..auto).collect(),
            Self::All => (0..available).collect(),
            Self::Count(count) => (0..count).collect(),
            Self::Indices(indices) => indices,
        };
        match indices.iter().max() {
            Some(&highest) if highest >= available => {
                Err(format!("asks for {name}:{highest}, but there are {available} {name} devices"))
            }
            _ => Ok(indices),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_are_understood_or_refused() {
        for (devices, expected, why) in [
            (Devices::from(2), Ok(Wanted::Count(2)), "number"),
            (Devices::from("2"), Ok(Wanted::Count(2)), "number as text"),
            (Devices::from(-1), Ok(Wanted::All), "all"),
            (Devices::from("-1"), Ok(Wanted::All), "all as text"),
            (Devices::from("auto"), Ok(Wanted::Auto), "auto"),
            (Devices::from("0, 2"), Ok(Wanted::Indices(vec![0, 2])), "indices as text"),
            (Devices::from("1,"), Ok(Wanted::Indices(vec![1])), "one index as text"),
            (Devices::from(vec![1, 0]), Ok(Wanted::Indices(vec![1, 0])), "indices"),
            (Devices::from(0), Err(()), "none"),
            (Devices::from(-2), Err(()), "below -1"),
            (Devices::from(vec![]), Err(()), "no index"),
            (Devices::from(vec![0, 0]), Err(()), "twice the same"),
            (Devices::from(vec![-1]), Err(()), "negative index"),
            (Devices::from("two"), Err(()), "a word"),
            (Devices::from(""), Err(()), "nothing"),
        ] {
            let wanted = devices.wanted("a number");
            if let Err(message) = &wanted {
                assert!(message.remedy == "use a number", "{message}");
            }
            assert_eq!(wanted.map_err(|_| ()), expected, "{why}");
        }
    }

    #[test]
    fn indices_must_exist() {
        assert_eq!(Wanted::Auto.resolve("hpu", 8, 1), Ok(vec![0]));
        assert_eq!(Wanted::All.resolve("hpu", 2, 1), Ok(vec![0, 1]));
        let error = Wanted::Count(9).resolve("hpu", 8, 1).unwrap_err();
        assert_eq!(error, "asks for 9, but there are 8 hpu devices");
        assert!(Wanted::Count(usize::MAX).resolve("hpu", 8, 1).is_err());
        let error = Wanted::Indices(vec![0, 8]).resolve("hpu", 8, 1).unwrap_err();
        assert_eq!(error, "asks for hpu:8, but there are 8 hpu devices");
    }
}
