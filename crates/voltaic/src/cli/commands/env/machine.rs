//! The system, the processor, and the memory.

use std::fs;
use std::path::Path;

use serde::Serialize;

use crate::config::format_size;
use crate::ffi::memory_limits;
use crate::kernels;

/// Features of an x86-64 that kernels ask for, as Linux names them.
const FEATURES: [&str; 12] = [
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512dq",
    "avx512vl",
    "avx512_bf16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
];

/// What runs the program.
#[derive(Serialize)]
pub(super) struct Machine {
    system: String,
    kernel: String,
    processor: String,
    features: Vec<&'static str>,
    amx: &'static str,
    cores: usize,
    usable_cores: usize,
    /// CPUs that the cgroup allows.
    #[serde(skip_serializing_if = "Option::is_none")]
    cgroup_cpus: Option<f64>,
    memory: Vec<Limit>,
}

/// A limit on memory, in bytes.
#[derive(Serialize)]
struct Limit {
    by: String,
    limit: usize,
    used: usize,
}

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// The value of a line `name<separator>value`.
fn value<'t>(text: &'t str, name: &str, separator: char) -> Option<&'t str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(separator)?;
        (key.trim() == name).then(|| value.trim().trim_matches('"'))
    })
}

impl Machine {
    pub fn here() -> Self {
        let (cpus, release) = (read("/proc/cpuinfo"), read("/etc/os-release"));
        let flags: Vec<&str> = value(&cpus, "flags", ':').unwrap_or_default().split_whitespace().collect();
        let amx = match (kernels::has_amx(), kernels::has_described_amx()) {
            (false, _) => "none",
            (true, true) => "usable, also by oneDNN",
            (true, false) => "usable, not described: kept from oneDNN",
        };
        let limits = memory_limits().into_iter();
        Self {
            system: value(&release, "PRETTY_NAME", '=').unwrap_or("unknown system").to_owned(),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            processor: value(&cpus, "model name", ':').unwrap_or("unknown processor").to_owned(),
            features: FEATURES.into_iter().filter(|feature| flags.contains(feature)).collect(),
            amx,
            cores: cpus.lines().filter(|line| line.starts_with("processor")).count(),
            usable_cores: std::thread::available_parallelism().map_or(1, |cores| cores.get()),
            cgroup_cpus: cgroup_cpus(&read("/proc/self/cgroup"), Path::new("/sys/fs/cgroup")),
            memory: limits.map(|(by, limit, used)| Limit { by, limit, used }).collect(),
        }
    }

    pub fn lines(&self) -> Vec<(String, String)> {
        let quota = self.cgroup_cpus.map_or_else(String::new, |cpus| format!(", {cpus} by the cgroup"));
        let mut lines = vec![
            ("system", format!("{}, Linux {}", self.system, self.kernel)),
            ("processor", self.processor.clone()),
            ("features", self.features.join(" ")),
            ("AMX", self.amx.to_owned()),
            ("cores", format!("{}, {} usable{quota}", self.cores, self.usable_cores)),
        ];
        for Limit { by, limit, used } in &self.memory {
            let (limit, used) = (format_size(*limit), format_size(*used));
            lines.push(("memory", format!("{limit}, {used} used ({by})")));
        }
        lines.into_iter().map(|(label, value)| (label.to_owned(), value)).collect()
    }
}

/// The least `cpu.max` (version 2) or quota (version 1) of the process's cgroup and those above it, in CPUs.
fn cgroup_cpus(groups: &str, root: &Path) -> Option<f64> {
    let mut least: Option<f64> = None;
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let is_old = controllers.split(',').any(|controller| controller == "cpu");
        if !(controllers.is_empty() || is_old) {
            continue;
        }
        let home = if is_old { root.join("cpu") } else { root.to_path_buf() };
        let own = home.join(path.trim_start_matches('/'));
        for folder in own.ancestors().take_while(|folder| folder.starts_with(&home)) {
            let (quota, period) = match is_old {
                true => (read(folder.join("cpu.cfs_quota_us")), read(folder.join("cpu.cfs_period_us"))),
                false => {
                    let text = read(folder.join("cpu.max"));
                    let (quota, period) = text.split_once(' ').unwrap_or_default();
                    (quota.to_owned(), period.to_owned())
                }
            };
            if let (Ok(quota), Ok(period)) = (quota.trim().parse::<f64>(), period.trim().parse::<f64>())
                && quota > 0.0
                && period > 0.0
            {
                least = Some(least.map_or(quota / period, |least| least.min(quota / period)));
            }
        }
    }
    least
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_quota_of_the_cgroups_counts() {
        let root = tempfile::tempdir().unwrap();
        let group = root.path().join("a/b");
        fs::create_dir_all(&group).unwrap();
        assert_eq!(cgroup_cpus("0::/a/b\n", root.path()), None);
        fs::write(group.join("cpu.max"), "max 100000\n").unwrap();
        fs::write(root.path().join("a/cpu.max"), "150000 100000\n").unwrap();
        assert_eq!(cgroup_cpus("0::/a/b\n", root.path()), Some(1.5));
        let old = root.path().join("cpu/x");
        fs::create_dir_all(&old).unwrap();
        fs::write(old.join("cpu.cfs_quota_us"), "50000\n").unwrap();
        fs::write(old.join("cpu.cfs_period_us"), "100000\n").unwrap();
        assert_eq!(cgroup_cpus("4:cpu,cpuacct:/x\n0::/a/b\n", root.path()), Some(0.5));
        assert_eq!(cgroup_cpus("no line of that file", root.path()), None);
    }
}
