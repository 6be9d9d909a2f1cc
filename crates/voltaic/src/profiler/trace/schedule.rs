//! Which steps are recorded.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::ConfigError;

/// Which steps are recorded: after `skip_first` steps, cycles of `wait` steps that are not, `warmup` steps that are thrown
/// away, and `active` steps that make one trace. Source: `torch.profiler.schedule`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ProfilerSchedule {
    /// Steps before the first cycle.
    pub skip_first: u64,
    /// Steps of a cycle that are not recorded.
    pub wait: u64,
    /// Steps of a cycle that are recorded and thrown away, since the first ones under a profiler are slow.
    pub warmup: u64,
    /// Steps of a cycle that make its trace; at least 1.
    pub active: u64,
    /// Number of cycles, each with its own trace; 0 repeats until the end of the run.
    pub repeat: u64,
}

impl Default for ProfilerSchedule {
    fn default() -> Self {
        Self { skip_first: 0, wait: 1, warmup: 1, active: 3, repeat: 1 }
    }
}

/// What happens to one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// It is not recorded.
    Off,
    /// It is recorded and thrown away.
    Warmup,
    /// It is recorded.
    Record,
    /// It is recorded, and the trace is written after it.
    RecordAndSave,
}

impl Phase {
    pub fn is_kept(self) -> bool {
        matches!(self, Self::Record | Self::RecordAndSave)
    }
}

impl ProfilerSchedule {
    /// The phase of a step, counted from 0.
    pub(super) fn phase(self, step: u64) -> Phase {
        let Some(step) = step.checked_sub(self.skip_first) else { return Phase::Off };
        let cycle = self.cycle();
        if self.repeat > 0 && step / cycle >= self.repeat {
            return Phase::Off;
        }
        match step % cycle {
            at if at < self.wait => Phase::Off,
            at if at < self.wait + self.warmup => Phase::Warmup,
            at if at + 1 < cycle => Phase::Record,
            _ => Phase::RecordAndSave,
        }
    }

    /// Steps of a cycle.
    fn cycle(self) -> u64 {
        self.wait + self.warmup + self.active
    }

    /// Steps until the first trace is written.
    pub(super) fn steps_to_trace(self) -> u64 {
        self.skip_first + self.cycle()
    }

    pub(in crate::profiler) fn check(self) -> Result<Self, ConfigError> {
        let largest = [self.skip_first, self.wait, self.warmup, self.active].into_iter().max();
        if self.active == 0 {
            let fix = "set it to the number of steps that a trace is to hold, such as 3";
            return Err(ConfigError::new("trainer.profiler.schedule.active", "0 records nothing", fix));
        }
        if largest > Some(u64::from(u32::MAX)) {
            let what = format!("{} steps are too many", largest.unwrap_or_default());
            return Err(ConfigError::new("trainer.profiler.schedule", what, "use numbers below 4294967296"));
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_are_those_of_torch() {
        use Phase::{Off, Record, RecordAndSave, Warmup};
        let schedule = ProfilerSchedule { skip_first: 1, wait: 1, warmup: 1, active: 2, repeat: 2 };
        let phases: Vec<Phase> = (0..11).map(|step| schedule.phase(step)).collect();
        let cycle = [Off, Warmup, Record, RecordAndSave];
        assert_eq!(phases, [&[Off][..], &cycle, &cycle, &[Off, Off]].concat());
        let always = ProfilerSchedule { skip_first: 0, wait: 0, warmup: 0, active: 1, repeat: 0 };
        assert!((0..100).all(|step| always.phase(step) == RecordAndSave));
        assert_eq!(ProfilerSchedule::default().steps_to_trace(), 5);
        assert!(ProfilerSchedule { active: 0, ..always }.check().is_err());
        assert!(ProfilerSchedule { wait: u64::MAX, ..always }.check().is_err());
    }
}
