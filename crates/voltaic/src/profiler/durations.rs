//! How long an action takes, over many calls, in memory that does not grow with them.

use std::collections::BTreeMap;
use std::time::Duration;

/// Bits of a duration in nanoseconds that are kept: percentiles are right within 1 part in 128.
const BITS: u32 = 6;

/// Number, sum, smallest and largest of durations, exactly; percentiles by a histogram whose steps grow with the value.
/// Source: the buckets of [HdrHistogram](http://hdrhistogram.org).
#[derive(Debug, Clone, Default)]
pub(super) struct Durations {
    pub calls: u64,
    pub total: Duration,
    pub min: Duration,
    pub max: Duration,
    buckets: BTreeMap<u32, u64>,
}

impl Durations {
    pub fn add(&mut self, duration: Duration) {
        self.min = if self.calls == 0 { duration } else { self.min.min(duration) };
        self.max = self.max.max(duration);
        self.calls += 1;
        self.total += duration;
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        *self.buckets.entry(bucket_of(nanos)).or_default() += 1;
    }

    pub fn mean(&self) -> Duration {
        self.total.checked_div(u32::try_from(self.calls).unwrap_or(u32::MAX)).unwrap_or_default()
    }

    /// The duration that so many percent of the calls do not exceed.
    pub fn percentile(&self, percent: f64) -> Duration {
        let rank = ((percent / 100.0 * self.calls as f64).ceil() as u64).clamp(1, self.calls.max(1));
        let mut seen = 0;
        for (&bucket, &count) in &self.buckets {
            seen += count;
            if seen >= rank {
                return Duration::from_nanos(middle_of(bucket)).clamp(self.min, self.max);
            }
        }
        self.max
    }
}

fn bucket_of(nanos: u64) -> u32 {
    let magnitude = u64::BITS - nanos.leading_zeros();
    if magnitude <= BITS {
        return nanos as u32;
    }
    let shift = magnitude - BITS - 1;
    // the leading bit is 1, and the bits behind it count within the magnitude
    (shift << BITS) + (nanos >> shift) as u32
}

fn middle_of(bucket: u32) -> u64 {
    if bucket < (2 << BITS) {
        return u64::from(bucket);
    }
    let shift = (bucket >> BITS) - 1;
    let low = u64::from(bucket - (shift << BITS)) << shift;
    low + (1 << shift) / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_follow_each_other_and_are_narrow() {
        let mut last = 0;
        for nanos in 0..5000 {
            let bucket = bucket_of(nanos);
            assert!((last..=last + 1).contains(&bucket), "{nanos}");
            last = bucket;
        }
        for nanos in (0..63).flat_map(|power| [0, 1, 2].map(|more| (1_u64 << power) + more)) {
            let shown = middle_of(bucket_of(nanos));
            assert!(shown.abs_diff(nanos) as f64 <= nanos as f64 / 128.0, "{nanos} shows as {shown}");
        }
    }

    #[test]
    fn percentiles_of_many_calls() {
        let mut durations = Durations::default();
        (1..=1000).for_each(|micros| durations.add(Duration::from_micros(micros)));
        assert_eq!((durations.calls, durations.total), (1000, Duration::from_micros(500_500)));
        assert_eq!((durations.min, durations.max), (Duration::from_micros(1), Duration::from_millis(1)));
        assert_eq!(durations.mean(), Duration::from_nanos(500_500));
        for (percent, micros) in [(50.0, 500.0), (90.0, 900.0), (99.0, 990.0)] {
            let found = durations.percentile(percent).as_secs_f64() * 1e6;
            assert!((found / micros - 1.0).abs() < 0.01, "{percent} %: {found}");
        }
        assert_eq!(durations.percentile(100.0), Duration::from_millis(1));
    }
}
