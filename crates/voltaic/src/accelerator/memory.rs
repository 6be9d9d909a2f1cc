//! Memory statistics of a device, under the names and with the meanings of the HPU's.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use crate::device::Device;
use crate::error::{DeviceError, Result};
use crate::ffi::{self, MAX_HPUS, PeakReset, Pool};

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
    /// `num_allocs - num_frees`; negative if memory from before the reset was freed.
    pub active_allocs: i64,
    /// Bytes of the largest allocation since the last [`reset_accumulated_memory_stats`].
    pub max_alloc_size: u64,
    /// Allocations since the start; never reset.
    pub total_system_allocs: u64,
    /// Frees since the start; never reset.
    pub total_system_frees: u64,
    /// `total_system_allocs - total_system_frees`: allocations that live.
    pub total_active_allocs: i64,
}

impl MemoryStats {
    /// The ten metrics by the names that loggers show, in their usual order.
    pub fn metrics(&self) -> [(&'static str, i64); 10] {
        [
            ("Limit", self.limit as i64),
            ("InUse", self.in_use as i64),
            ("MaxInUse", self.max_in_use as i64),
            ("NumAllocs", self.num_allocs as i64),
            ("NumFrees", self.num_frees as i64),
            ("ActiveAllocs", self.active_allocs),
            ("MaxAllocSize", self.max_alloc_size as i64),
            ("TotalSystemAllocs", self.total_system_allocs as i64),
            ("TotalSystemFrees", self.total_system_frees as i64),
            ("TotalActiveAllocs", self.total_active_allocs),
        ]
    }
}

/// Allocations and frees of each pool at the last reset; the host's pool comes first.
static RESETS: Mutex<[(u64, u64); 1 + MAX_HPUS]> = Mutex::new([(0, 0); 1 + MAX_HPUS]);

fn pool(device: Device) -> Result<(&'static Pool, usize)> {
    let unavailable = |reason: &str| DeviceError::Unavailable {
        device: format!("memory statistics of {device}"),
        reason: reason.to_owned(),
    };
    match device {
        Device::Cpu => Ok((ffi::host_pool(), 0)),
        Device::Hpu(index) => match ffi::hpu_pool(index) {
            Some(pool) => Ok((pool, 1 + index)),
            None => {
                Err(unavailable("there is no such device; `voltaic devices` lists those that are there")
                    .into())
            }
        },
        Device::Cuda(_) => {
            Err(unavailable("libtorch's CUDA allocator is not read; use nvidia-smi to see the memory").into())
        }
    }
}

/// What the memory of a device is used for: measured, of all tensors and of the temporary memory of kernels. On the
/// CPU it counts what was allocated since [`ffi::install_host_pool`].
///
/// # Errors
/// [`DeviceError::Unavailable`] for a device whose memory is not measured.
pub fn memory_stats(device: Device) -> Result<MemoryStats> {
    let (pool, number) = pool(device)?;
    let resets = RESETS.lock().unwrap_or_else(PoisonError::into_inner);
    let (reset_allocs, reset_frees) = resets[number];
    let stats = pool.stats();
    let (num_allocs, num_frees) = (stats.num_allocs - reset_allocs, stats.num_frees - reset_frees);
    Ok(MemoryStats {
        limit: stats.limit.unwrap_or(0) as u64,
        in_use: stats.in_use as u64,
        max_in_use: stats.max_in_use as u64,
        num_allocs,
        num_frees,
        active_allocs: num_allocs as i64 - num_frees as i64,
        max_alloc_size: stats.max_alloc_size as u64,
        total_system_allocs: stats.num_allocs,
        total_system_frees: stats.num_frees,
        total_active_allocs: stats.num_allocs as i64 - stats.num_frees as i64,
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
/// As on a Gaudi; `torch.cuda` sets it to the bytes in use.
///
/// # Errors
/// As [`memory_stats`].
pub fn reset_peak_memory_stats(device: Device) -> Result<()> {
    pool(device)?.0.reset_peaks(PeakReset::Zero);
    Ok(())
}

/// Starts `NumAllocs`, `NumFrees` and `MaxAllocSize` again from 0 and `MaxInUse` from `InUse`. The totals go on.
///
/// # Errors
/// As [`memory_stats`].
pub fn reset_accumulated_memory_stats(device: Device) -> Result<()> {
    let (pool, number) = pool(device)?;
    let mut resets = RESETS.lock().unwrap_or_else(PoisonError::into_inner);
    let stats = pool.stats();
    resets[number] = (stats.num_allocs, stats.num_frees);
    pool.reset_peaks(PeakReset::Current);
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
        assert_eq!((stats.num_allocs, stats.num_frees, stats.active_allocs), (0, 2, -2));
        assert_eq!((stats.total_active_allocs, stats.max_in_use, stats.max_alloc_size), (0, 1088, 0));
        let summary = memory_summary(device).unwrap();
        assert!(summary.contains("memory summary of hpu:7"), "{summary}");
        assert!(summary.contains("Limit:                       1073741824 (1.00 GB)"), "{summary}");
    }
}
