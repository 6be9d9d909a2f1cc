//! The host.

use std::fs;

use super::accelerator::Accelerator;
use super::cards::Card;
use super::devices::Devices;
use crate::config::format_size;
use crate::device::Device;
use crate::error::{Problem, Result};
use crate::ffi;

/// Host memory and host cores.
#[derive(Debug, Clone, Copy)]
pub struct CpuAccelerator;

const ACCEPTED: &str = "the number of processes, from 1, or auto";
/// As many processes may be started on any machine, and as many for each core of a larger one.
const MIN_PROCESSES: usize = 64;
const PROCESSES_PER_CORE: usize = 8;

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn max_processes() -> usize {
    (cores() * PROCESSES_PER_CORE).max(MIN_PROCESSES)
}

impl Accelerator for CpuAccelerator {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn description(&self) -> String {
        format!("{} cores, {} threads per operator", cores(), tch::get_num_threads())
    }

    fn availability(&self) -> Result<(), Problem> {
        Ok(())
    }

    fn device_count(&self) -> usize {
        1
    }

    /// A number of processes that share the cores; they are numbered from 0.
    fn parse_devices(&self, devices: &Devices) -> Result<Vec<usize>, Problem> {
        use super::devices::Wanted;
        match devices.wanted(ACCEPTED)? {
            Wanted::Auto => Ok((0..self.auto_device_count()).collect()),
            Wanted::Count(count) if count > max_processes() => {
                let (cores, max) = (cores(), max_processes());
                let what = format!("{count} processes are too many for the {cores} cores of this machine");
                Err(Problem::new(what, format!("use at most {max}")))
            }
            Wanted::Count(count) => Ok((0..count).collect()),
            Wanted::All | Wanted::Indices(_) => {
                Err(Problem::new("the cpu has no devices to choose from", format!("use {ACCEPTED}")))
            }
        }
    }

    fn device(&self, _index: usize) -> Device {
        Device::Cpu
    }

    fn cards(&self) -> Vec<Card> {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let value = |text: &str, key: &str| {
            let line = text.lines().find(|line| line.starts_with(key))?.to_owned();
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        let kibibytes = |key| {
            let text = value(&read("/proc/meminfo"), key)?;
            text.trim_end_matches("kB").trim().parse::<usize>().ok()
        };
        let total = kibibytes("MemTotal");
        let used = total.zip(kibibytes("MemAvailable")).map(|(total, free)| total.saturating_sub(free));
        vec![Card {
            device: Device::Cpu.to_string(),
            name: value(&read("/proc/cpuinfo"), "model name")
                .unwrap_or_else(|| "unknown processor".to_owned()),
            memory: total.map(|kib| format_size(kib << 10)),
            memory_used: used.map(|kib| format_size(kib << 10)),
            ..Card::default()
        }]
    }

    fn setup(&self) -> Result<()> {
        ffi::install_host_pool()?;
        ffi::install_kernels()?;
        Ok(())
    }

    fn synchronize(&self, _device: Device) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_of_the_cpu_are_processes() {
        assert_eq!(CpuAccelerator.parse_devices(&Devices::from(3)), Ok(vec![0, 1, 2]));
        assert_eq!(CpuAccelerator.parse_devices(&Devices::from("auto")), Ok(vec![0]));
        for refused in [Devices::from(-1), Devices::from(vec![0]), Devices::from(0)] {
            let message = CpuAccelerator.parse_devices(&refused).unwrap_err();
            assert!(message.remedy.ends_with(ACCEPTED), "{message}");
        }
    }
}
