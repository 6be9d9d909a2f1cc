//! How busy the host is: its cores, its memory, its swap space.

use sysinfo::System;

/// Counters of the system; the load of the cores is measured between two readings.
#[derive(Debug)]
pub(super) struct CpuStats(System);

impl CpuStats {
    /// Starts to measure the load of the cores.
    pub(super) fn new() -> Self {
        let mut system = System::new();
        system.refresh_cpu_usage();
        Self(system)
    }

    /// `cpu_percent`, the load of all cores since it was last read, but at least 200 ms before; `cpu_vm_percent`, the
    /// part of the memory that is not available; `cpu_swap_percent`, the part of the swap space in use, 0 without
    /// swap. Of the whole machine, from 0 to 100.
    pub(super) fn read(&mut self) -> [(&'static str, f64); 3] {
        self.0.refresh_cpu_usage();
        self.0.refresh_memory();
        [
            ("cpu_percent", f64::from(self.0.global_cpu_usage())),
            ("cpu_vm_percent", percent(self.0.used_memory(), self.0.total_memory())),
            ("cpu_swap_percent", percent(self.0.used_swap(), self.0.total_swap())),
        ]
    }
}

fn percent(used: u64, total: u64) -> f64 {
    if total == 0 { 0.0 } else { 100.0 * used as f64 / total as f64 }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn work_shows_in_the_load_of_the_cores() {
        let mut stats = CpuStats::new();
        let started = Instant::now();
        while started.elapsed() < Duration::from_millis(250) {
            std::hint::spin_loop();
        }
        let [(_, cpu), (_, memory), (_, swap)] = stats.read();
        let cores = stats.0.cpus().len() as f64;
        assert!((50.0 / cores..=100.0).contains(&cpu), "{cpu} % of {cores} cores, one of which was busy");
        assert!(memory > 0.0 && memory < 100.0, "{memory}");
        assert!((0.0..=100.0).contains(&swap), "{swap}");
    }

    #[test]
    fn a_machine_without_swap_uses_none() {
        assert_eq!([percent(0, 0), percent(1, 4)], [0.0, 25.0]);
    }
}
