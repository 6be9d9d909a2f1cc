//! Memory statistics of a device, under the names and with the meanings of the HPU's.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::hpu::emulator::HpuEmulator;
use super::hpu::gaudi::card_memory;
use crate::device::Device;
use crate::error::{DeviceError, Problem, Result};
use crate::ffi::{self, PeakReset, Pool};

/// What the memory of a device is used for. Sizes count whole blocks, which are a little larger than what was asked
/// for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryStats {
    /// Most bytes the device may have in use; 0 if there is no limit.
    pub limit: u64,
    /// Bytes in use.
    pub in_use: u64,
    /// Highest value of `in_use` since the last reset.
    pub max_in_use: u64,
    /// Allocations since the last [`reset_accumulated_memory_stats`].
    pub num_allocs: u64,
    /// Frees since the last [`reset_accumulated_memory_stats`].
    pub num_frees: u64,
    /// Allocations that live, also those from before the reset.
    pub active_allocs: u64,
    /// Bytes of the largest allocation since the last [`reset_accumulated_memory_stats`].
    pub max_alloc_size: u64,
    /// Allocations since the start; never reset.
    pub total_system_allocs: u64,
    /// Frees since the start; never reset.
    pub total_system_frees: u64,
    /// `total_system_allocs - total_system_frees`: allocations that live.
    pub total_active_allocs: u64,
}

impl MemoryStats {
    /// The ten metrics by the names that loggers show, in their usual order.
    pub fn metrics(&self) -> [(&'static str, u64); 10] {
        [
            ("Limit", self.limit),
            ("InUse", self.in_use),
            ("MaxInUse", self.max_in_use),
            ("NumAllocs", self.num_allocs),
            ("NumFrees", self.num_frees),
            ("ActiveAllocs", self.active_allocs),
            ("MaxAllocSize", self.max_alloc_size),
            ("TotalSystemAllocs", self.total_system_allocs),
            ("TotalSystemFrees", self.total_system_frees),
            ("TotalActiveAllocs", self.total_active_allocs),
        ]
    }
}

/// Allocations and frees of each device at its last reset.
static RESETS: Mutex<BTreeMap<(i32, i32), (u64, u64)>> = Mutex::new(BTreeMap::new());

/// Who measures the memory of a device.
enum Source {
    /// A pool of voltaic's.
    Pool(&'static Pool),
    /// The allocator of a back end of libtorch.
    Backend,
    /// The driver of a Gaudi card, where the back end does not report memory.
    Driver,
}

fn source(device: Device) -> Result<Source> {
    let unavailable = |what: &str, remedy| DeviceError::Unavailable {
        device: format!("memory statistics of {device}"),
        problem: Problem::new(what, remedy),
    };
    match device {
        Device::Cpu => Ok(Source::Pool(ffi::host_pool())),
        Device::Hpu(_) if ffi::backend_is_loaded(device) && HpuEmulator::get().is_none() => {
            Ok(if ffi::backend_memory(device)?.is_some() { Source::Backend } else { Source::Driver })
        }
        Device::Hpu(index) => match ffi::hpu_pool(index) {
            Some(pool) => Ok(Source::Pool(pool)),
            None => {
                let remedy = "`voltaic devices` lists those that are there";
                Err(unavailable("there is no such device", remedy).into())
            }
        },
        Device::Cuda(_) if ffi::backend_is_loaded(device) => Ok(Source::Backend),
        Device::Cuda(_) => Err(unavailable("CUDA is not set up", "use accelerator=cuda").into()),
    }
}

/// What a source reports, before resets are taken into account.
#[derive(Default)]
struct Reading {
    limit: u64,
    in_use: u64,
    max_in_use: u64,
    num_allocs: u64,
    num_frees: u64,
    max_alloc_size: u64,
}

fn read(device: Device) -> Result<Reading> {
    let unavailable = |what: &str, remedy| DeviceError::Unavailable {
        device: format!("memory statistics of {device}"),
        problem: Problem::new(what, remedy),
    };
    match source(device)? {
        Source::Pool(pool) => {
            let stats = pool.stats();
            Ok(Reading {
                limit: stats.limit.unwrap_or(0) as u64,
                in_use: stats.in_use as u64,
                max_in_use: stats.max_in_use as u64,
                num_allocs: stats.num_allocs,
                num_frees: stats.num_frees,
                max_alloc_size: stats.max_alloc_size as u64,
            })
        }
        Source::Backend => {
            let memory = ffi::backend_memory(device)?
                .ok_or_else(|| unavailable("nothing was allocated on it yet", "put a tensor on it first"))?;
            let ffi::BackendMemory { total, in_use, max_in_use, num_allocs, num_frees, .. } = memory;
            Ok(Reading { limit: total, in_use, max_in_use, num_allocs, num_frees, max_alloc_size: 0 })
        }
        Source::Driver => {
            static MAX_IN_USE: AtomicU64 = AtomicU64::new(0);
            let (limit, in_use) =
                card_memory().ok_or_else(|| unavailable("HLML does not tell", "see what hl-smi says"))?;
            let max_in_use = MAX_IN_USE.fetch_max(in_use, Ordering::Relaxed).max(in_use);
            Ok(Reading { limit, in_use, max_in_use, ..Reading::default() })
        }
    }
}

/// What the memory of a device is used for: measured, of all tensors and of the temporary memory of kernels.
///
/// On the CPU it counts what was allocated since [`ffi::install_host_pool`]; buffers that threads keep between calls of a
/// kernel are not in it, but in [`kernels::scratch_bytes`](crate::kernels::scratch_bytes). On CUDA it is what libtorch's allocator
/// counts, without `MaxAllocSize` (0 here). On a Gaudi card whose plugin does not report memory, only `Limit` and
/// `InUse` (of all processes) are known, from the driver, and `MaxInUse` is the highest value that was read.
///
/// # Errors
/// [`DeviceError::Unavailable`] for a device whose memory is not measured.
pub fn memory_stats(device: Device) -> Result<MemoryStats> {
    let resets = RESETS.lock().unwrap_or_else(PoisonError::into_inner);
    let (reset_allocs, reset_frees) = resets.get(&device.numbers()).copied().unwrap_or_default();
    let reading = read(device)?;
    let num_allocs = reading.num_allocs.saturating_sub(reset_allocs);
    let num_frees = reading.num_frees.saturating_sub(reset_frees);
    let active_allocs = reading.num_allocs.saturating_sub(reading.num_frees);
    Ok(MemoryStats {
        limit: reading.limit,
        in_use: reading.in_use,
        max_in_use: reading.max_in_use,
        num_allocs,
        num_frees,
        active_allocs,
        max_alloc_size: reading.max_alloc_size,
        total_system_allocs: reading.num_allocs,
        total_system_frees: reading.num_frees,
        total_active_allocs: active_allocs,
    })
}

/// Bytes in use on a device.
///
/// # Errors
/// As [`memory_stats`].
pub fn memory_allocated(device: Device) -> Result<u64> {
    Ok(memory_stats(device)?.in_use)
}

/// Highest number of bytes in use on a device since the last reset.
///
/// # Errors
/// As [`memory_stats`].
pub fn max_memory_allocated(device: Device) -> Result<u64> {
    Ok(memory_stats(device)?.max_in_use)
}

/// Free and total bytes of a device. Both are 0 on a device without a limit.
///
/// # Errors
/// As [`memory_stats`].
pub fn mem_get_info(device: Device) -> Result<(u64, u64)> {
    let stats = memory_stats(device)?;
    Ok((stats.limit.saturating_sub(stats.in_use), stats.limit))
}

/// Sets `MaxInUse` to 0, where it stays until the next allocation.
///
/// As on a Gaudi. On CUDA it is set to the bytes in use, as `torch.cuda` does.
///
/// # Errors
/// As [`memory_stats`].
pub fn reset_peak_memory_stats(device: Device) -> Result<()> {
    match source(device)? {
        Source::Pool(pool) => pool.reset_peaks(PeakReset::Zero),
        Source::Backend => ffi::reset_backend_peak(device)?,
        Source::Driver => {}
    }
    Ok(())
}

/// Starts `NumAllocs`, `NumFrees` and `MaxAllocSize` again from 0 and `MaxInUse` from `InUse`. The totals are not reset.
///
/// # Errors
/// As [`memory_stats`].
pub fn reset_accumulated_memory_stats(device: Device) -> Result<()> {
    let mut resets = RESETS.lock().unwrap_or_else(PoisonError::into_inner);
    let reading = read(device)?;
    resets.insert(device.numbers(), (reading.num_allocs, reading.num_frees));
    match source(device)? {
        Source::Pool(pool) => pool.reset_peaks(PeakReset::Current),
        Source::Backend => ffi::reset_backend_peak(device)?,
        Source::Driver => {}
    }
    Ok(())
}

/// The statistics as a table to print.
///
/// # Errors
/// As [`memory_stats`].
pub fn memory_summary(device: Device) -> Result<String> {
    Ok(Summary { device, stats: memory_stats(device)? }.to_string())
}

struct Summary {
    device: Device,
    stats: MemoryStats,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const WIDTH: usize = 52;
        let title = format!("memory summary of {}", self.device);
        writeln!(f, "|{}|\n|{title:^WIDTH$}|\n|{}|", "=".repeat(WIDTH), "-".repeat(WIDTH))?;
        for (name, value) in self.stats.metrics() {
            let unit = match name {
                "Limit" => format!(" ({:.2} GB)", value as f64 / f64::from(1 << 30)),
                "InUse" | "MaxInUse" | "MaxAllocSize" => {
                    format!(" ({:.2} MB)", value as f64 / f64::from(1 << 20))
                }
                _ => String::new(),
            };
            writeln!(f, "  {:<19}{value:>20}{unit}", format!("{name}:"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::MAX_HPUS;

    #[test]
    fn statistics_follow_allocations_and_resets() {
        // the last device's pool, which no other test of this binary uses
        let device = Device::Hpu(MAX_HPUS - 1);
        let pool = ffi::hpu_pool(MAX_HPUS - 1).unwrap();
        pool.set_limit(Some(1 << 30));
        let first = pool.block(1000).unwrap();
        let stats = memory_stats(device).unwrap();
        assert_eq!(stats.metrics().map(|(_, value)| value), [1 << 30, 1024, 1024, 1, 0, 1, 1024, 1, 0, 1]);
        assert_eq!(mem_get_info(device).unwrap(), ((1 << 30) - 1024, 1 << 30));

        reset_peak_memory_stats(device).unwrap();
        assert_eq!(max_memory_allocated(device).unwrap(), 0, "as on a Gaudi");
        let second = pool.block(64).unwrap();
        assert_eq!(max_memory_allocated(device).unwrap(), 1088);

        reset_accumulated_memory_stats(device).unwrap();
        drop((first, second));
        let stats = memory_stats(device).unwrap();
        assert_eq!((stats.num_allocs, stats.num_frees, stats.active_allocs), (0, 2, 0), "never negative");
        assert_eq!((stats.total_active_allocs, stats.max_in_use, stats.max_alloc_size), (0, 1088, 0));
        let summary = memory_summary(device).unwrap();
        assert!(summary.contains("memory summary of hpu:7"), "{summary}");
        assert!(summary.contains("Limit:                       1073741824 (1.00 GB)"), "{summary}");
    }
}
