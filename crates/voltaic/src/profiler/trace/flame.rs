//! Stacks of ranges and operators with their own time, as flame graphs are drawn from.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::nest::Nest;
use crate::ffi::{ActivityRow, EventScope, Profile};

/// Whose time a flame graph shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::profiler) enum Metric {
    /// The host's.
    #[default]
    Host,
    /// That of the HPUs, below the operators that asked for it.
    Device,
}

/// Ranges of steps.
const STEP: &str = "ProfilerStep#";

/// torch's names.
pub(in crate::profiler) const METRICS: [(&str, Metric); 2] =
    [("self_cpu_time_total", Metric::Host), ("self_hpu_time_total", Metric::Device)];

/// Nanoseconds by stack, from the outermost name to the innermost; steps are added up.
pub(super) fn stacks(profile: &Profile, metric: Metric) -> BTreeMap<Vec<&str>, i64> {
    let nest = Nest::new(&profile.events);
    let mut stacks: BTreeMap<Vec<&str>, i64> = BTreeMap::new();
    match metric {
        Metric::Host => {
            let mut own_ns = nest.own_ns();
            let kernels = profile.activities.iter().filter(|activity| activity.row == ActivityRow::Kernels);
            for kernel in kernels {
                let Some(at) = nest.innermost(kernel.thread, kernel.start_ns) else { continue };
                let mut names = stack(&nest, at);
                names.push(&kernel.name);
                *stacks.entry(names).or_default() += kernel.duration_ns;
                own_ns[at] = (own_ns[at] - kernel.duration_ns).max(0);
            }
            for (at, own) in own_ns.into_iter().enumerate() {
                *stacks.entry(stack(&nest, at)).or_default() += own;
            }
        }
        Metric::Device => {
            let is_work =
                |row| matches!(row, ActivityRow::Operators | ActivityRow::Copies | ActivityRow::Collectives);
            for activity in profile
                .activities
                .iter()
                .filter(|activity| activity.device.is_some() && is_work(activity.row))
            {
                let around = nest.innermost(activity.thread, activity.start_ns);
                let operator = around.filter(|&at| nest.nodes[at].event.scope != EventScope::Range);
                let mut names: Vec<&str> = Vec::new();
                if operator.is_none_or(|at| nest.nodes[at].event.name != activity.name) {
                    names.push(&activity.name);
                }
                names.extend(
                    around
                        .into_iter()
                        .flat_map(|at| nest.ancestors(at))
                        .map(|at| nest.nodes[at].event.name.as_str()),
                );
                names.reverse();
                names.retain(|name| !name.starts_with(STEP));
                *stacks.entry(names).or_default() += activity.duration_ns;
            }
        }
    }
    stacks.remove(&Vec::new()); // between the actions of a step
    stacks
}

/// The names from the outermost to a node, without steps.
fn stack<'a>(nest: &Nest<'a>, at: usize) -> Vec<&'a str> {
    let mut names: Vec<&str> = nest.ancestors(at).map(|at| nest.nodes[at].event.name.as_str()).collect();
    names.reverse();
    names.retain(|name| !name.starts_with(STEP));
    names
}

/// Lines such as `step;linear;addmm 12`, in microseconds, which `flamegraph.pl`, inferno and speedscope read.
pub(super) fn folded(profile: &Profile, metric: Metric) -> String {
    let mut text = String::new();
    for (stack, ns) in stacks(profile, metric) {
        let micros = (ns + 500) / 1000;
        if micros > 0 {
            let names: Vec<String> =
                stack.iter().map(|name| name.replace(';', ",").replace('\n', " ")).collect();
            let _ = writeln!(text, "{} {micros}", names.join(";"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::Activity;
    use crate::profiler::trace::nest::event;

    #[test]
    fn stacks_have_the_time_that_is_not_within_others() {
        let events = vec![
            event("ProfilerStep#2", 0, 11_000_000, 1),
            event("step", 0, 10_000_000, 1),
            event("linear", 1_000_000, 4_000_000, 1),
            event("addmm", 2_000_000, 1_000_000, 1),
            event("linear", 6_000_000, 1_000_000, 1),
        ];
        let profile = Profile { events, ..Profile::default() };
        assert_eq!(folded(&profile, Metric::Host), "step 5000\nstep;linear 4000\nstep;linear;addmm 1000\n");
        assert_eq!(folded(&profile, Metric::Device), "");
    }

    #[test]
    fn kernels_have_their_time_below_the_operator_that_they_serve() {
        let kernel = Activity {
            name: "voltaic::product (Gemm)".to_owned(),
            details: String::new(),
            launch_ns: 0,
            start_ns: 1_000_000,
            duration_ns: 3_000_000,
            row: ActivityRow::Kernels,
            device: None,
            thread: 1,
            system_thread: 1,
        };
        let events = vec![event("addmm", 0, 5_000_000, 1)];
        let profile = Profile { events, activities: vec![kernel], ..Profile::default() };
        assert_eq!(folded(&profile, Metric::Host), "addmm 2000\naddmm;voltaic::product (Gemm) 3000\n");
    }
}
