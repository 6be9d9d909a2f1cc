//! Checks of the settings of models, so that a mistake names its key, and none asks for more memory than there can be.

use crate::error::{ConfigError, ConfigProblem};

/// Of one layer; more are a slip of the pen.
const MAX_SIZE: i64 = 1 << 24;
/// Of a whole model, 4 TiB in float32.
const MAX_PARAMETERS: f64 = (1_u64 << 40) as f64;

/// What is wrong with the settings of a model.
#[derive(Debug, Default)]
pub(super) struct Sizes {
    problems: Vec<ConfigProblem>,
    largest: Option<(&'static str, i64)>,
}

impl Sizes {
    fn refuse(&mut self, key: &str, what: String, remedy: String) {
        self.problems.push(ConfigProblem::new(key, what, remedy));
    }

    /// A size from 1.
    pub fn size(&mut self, key: &'static str, value: i64) {
        if !(1..=MAX_SIZE).contains(&value) {
            self.refuse(key, value.to_string(), format!("give a number from 1 to {MAX_SIZE}"));
        }
        if self.largest.is_none_or(|(_, largest)| value > largest) {
            self.largest = Some((key, value));
        }
    }

    /// A probability below 1.
    pub fn dropout(&mut self, key: &str, value: f64) {
        if !(0.0..=1.0).contains(&value) {
            self.refuse(key, value.to_string(), "give a probability from 0 to 1".to_owned());
        }
    }

    pub fn require(&mut self, holds: bool, key: &str, what: String, remedy: &str) {
        if !holds {
            self.refuse(key, what, remedy.to_owned());
        }
    }

    /// The problems; without any, of the number of parameters, for which the largest size is to blame.
    pub fn finish(mut self, num_parameters: f64) -> Result<(), ConfigError> {
        if let Some((key, value)) = self.largest.filter(|_| self.problems.is_empty())
            && num_parameters > MAX_PARAMETERS
        {
            let what = format!("with {value} the model has {num_parameters:.1e} parameters");
            self.refuse(key, what, format!("give sizes that make at most {MAX_PARAMETERS:.1e}"));
        }
        if self.problems.is_empty() { Ok(()) } else { Err(ConfigError { problems: self.problems }) }
    }
}
