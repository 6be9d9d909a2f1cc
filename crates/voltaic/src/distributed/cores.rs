//! The cores of the ranks of a node: with `VOLTAIC_BIND_CORES=1` each rank has its own, as with DeepSpeed's `--bind_cores_to_rank`.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::config::read_switch;
use crate::error::{Error, Result};

const SWITCH: &str = "VOLTAIC_BIND_CORES";

/// A share of the cores for each rank, if ranks are to be bound. Memory that a rank touches first is near its cores then.
///
/// # Errors
/// [`SwitchError`](crate::error::SwitchError) if the variable is neither `0` nor `1`.
pub(super) fn shares(num_ranks: usize) -> Result<Option<Vec<CpuSet>>> {
    if !read_switch(SWITCH, "cores")?.unwrap_or(false) {
        return Ok(None);
    }
    let all = sched_getaffinity(None)
        .map_err(|error| Error::io("list", "the cores of this process", error.into()))?;
    let shares = divide(&all, num_ranks);
    if shares.is_none() {
        tracing::warn!("{SWITCH}=1 has no effect: {num_ranks} ranks share {} cores", all.count());
    }
    Ok(shares)
}

/// Parts of as many cores each, in their order; nothing if there are more ranks than cores.
fn divide(all: &CpuSet, num_ranks: usize) -> Option<Vec<CpuSet>> {
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|core| all.is_set(*core)).collect();
    let share = cores.len().checked_div(num_ranks).filter(|share| *share > 0)?;
    let set = |cores: &[usize]| {
        let mut set = CpuSet::new();
        cores.iter().for_each(|core| set.set(*core));
        set
    };
    Some(cores.chunks(share).take(num_ranks).map(set).collect())
}

/// Runs `body` on these cores: processes that it starts stay on them.
///
/// # Errors
/// Of `body`; the system's, if the cores cannot be chosen.
pub(super) fn on<R>(cores: &CpuSet, body: impl FnOnce() -> std::io::Result<R>) -> std::io::Result<R> {
    let before = sched_getaffinity(None)?;
    sched_setaffinity(None, cores)?;
    let result = body();
    sched_setaffinity(None, &before)?;
    result
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn cores(list: &[usize]) -> CpuSet {
        let mut set = CpuSet::new();
        list.iter().for_each(|core| set.set(*core));
        set
    }

    #[test]
    fn ranks_have_as_many_cores_each() {
        let all = cores(&[1, 2, 5, 6, 7]);
        assert_eq!(divide(&all, 2), Some(vec![cores(&[1, 2]), cores(&[5, 6])]));
        assert_eq!(divide(&all, 5).map(|shares| shares.len()), Some(5));
        assert_eq!(divide(&all, 6), None);
    }

    #[test]
    fn a_process_is_on_the_cores_that_it_was_started_on() {
        let all = sched_getaffinity(None).expect("this process has cores");
        let last = (0..CpuSet::MAX_CPU).rfind(|core| all.is_set(*core)).expect("at least one");
        let list = || Command::new("grep").args(["Cpus_allowed_list", "/proc/self/status"]).output();
        let output = on(&cores(&[last]), list).expect("grep is there");
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), format!("Cpus_allowed_list:\t{last}"));
        assert_eq!(sched_getaffinity(None).ok(), Some(all));
    }
}
