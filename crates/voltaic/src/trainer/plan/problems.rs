//! What is wrong with a configuration, collected so that all is reported together.

use std::borrow::Cow;
use std::time::Duration;

use crate::callback::TimeSpan;
use crate::error::{ConfigProblem, DeviceError, Error};
use crate::trainer::config::values::Limit;

/// Problems of keys of the trainer.
pub(crate) struct Problems(pub Vec<ConfigProblem>);

impl Problems {
    pub(crate) fn add(&mut self, key: &str, what: String, remedy: impl Into<Cow<'static, str>>) {
        self.0.push(ConfigProblem::new(format!("trainer.{key}"), what, remedy));
    }

    /// The accelerator that the configuration names is not there.
    pub(crate) fn accelerator(&mut self, error: &DeviceError) {
        let problem = Error::from(error.clone()).into_problem("use cpu");
        self.0.push(ConfigProblem::at("trainer.accelerator", problem));
    }

    pub(crate) fn limit(&mut self, key: &str, limit: Option<Limit>) -> Limit {
        match limit {
            Some(Limit::Fraction(f)) if !(0.0..=1.0).contains(&f) => {
                let remedy = "use a fraction from 0.0 to 1.0, or a whole number of batches";
                self.add(key, format!("{f} is neither a fraction nor a number of batches"), remedy);
                Limit::Fraction(1.0)
            }
            Some(limit) => limit,
            None => Limit::Fraction(1.0),
        }
    }

    pub(crate) fn time(&mut self, key: &str, span: &TimeSpan) -> Option<Duration> {
        span.duration(&format!("trainer.{key}")).map_err(|error| self.0.extend(error.problems)).ok()
    }

    /// -1 means no limit.
    pub(crate) fn count(&mut self, key: &str, value: i64) -> Option<u64> {
        if value < -1 {
            self.add(key, format!("{value} is below -1"), "use -1 for no limit, or a number from 0");
        }
        u64::try_from(value).ok()
    }
}
