//! What limits the memory of this process: the machine, its cgroups (both versions, with those above them), and `ulimit`.

#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};

const PAGE: usize = 4 << 10;

/// A limit, and how far it is used up. All in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Level {
    /// The limit's name for the user: a file, or a command.
    pub what: String,
    pub limit: usize,
    /// Without what the kernel can take back, such as cached files.
    pub used: usize,
    /// What may be swapped out.
    pub swap: usize,
    /// Whether the kernel ends processes that go beyond it. If not it slows them down.
    pub is_hard: bool,
}

impl Level {
    pub fn hard(what: String, limit: usize, used: usize) -> Self {
        Self { what, limit, used, swap: 0, is_hard: true }
    }

    /// Bytes that may be taken.
    pub fn left(&self) -> usize {
        self.limit.saturating_sub(self.used).saturating_add(self.swap)
    }
}

/// Where the limits are read.
pub(super) struct Limits {
    /// The process's memory cgroup and those above it.
    groups: Vec<Group>,
    proc: PathBuf,
}

#[derive(Debug, PartialEq, Eq)]
enum Group {
    V1(PathBuf),
    V2(PathBuf),
}

impl Limits {
    /// Those of this process; `cgroup` is the folder of a cgroup that counts in place of its own.
    pub fn of_process(cgroup: Option<PathBuf>) -> Self {
        let proc = PathBuf::from("/proc");
        let groups = match cgroup {
            Some(folder) => vec![group_in(folder)],
            None => {
                let read = |name: &str| fs::read_to_string(proc.join(name)).unwrap_or_default();
                groups_of(&read("self/cgroup"), &read("self/mountinfo"))
            }
        };
        Self { groups, proc }
    }

    /// All limits, and how far they are used up; at least by `taken` bytes, which this process has but may not have written
    /// to yet.
    pub fn levels(&self, taken: usize) -> Vec<Level> {
        let machine = fs::read_to_string(self.proc.join("meminfo")).unwrap_or_default();
        let kibibytes = |name| field(&machine, name)?.checked_mul(1 << 10);
        let swap = kibibytes("SwapFree:").unwrap_or(0);
        let mut levels = Vec::new();
        if let (Some(limit), Some(available)) = (kibibytes("MemTotal:"), kibibytes("MemAvailable:")) {
            let used = limit.saturating_sub(available);
            levels.push(Level { swap, ..Level::hard("the machine's memory".to_owned(), limit, used) });
        }
        levels.extend(self.groups.iter().flat_map(|group| group.levels(taken, swap)));
        levels.extend(self.address_space());
        levels
    }

    fn address_space(&self) -> Option<Level> {
        let limits = fs::read_to_string(self.proc.join("self/limits")).ok()?;
        let limit = field(&limits, "Max address space")?;
        let pages = fs::read_to_string(self.proc.join("self/statm")).ok()?;
        let used = pages.split_whitespace().next()?.parse::<usize>().ok()? * PAGE;
        Some(Level::hard("the address space (ulimit -v)".to_owned(), limit, used))
    }
}

impl Group {
    fn levels(&self, taken: usize, machine_swap: usize) -> Vec<Level> {
        match self {
            Self::V1(folder) => v1_level(folder, taken, machine_swap).into_iter().collect(),
            Self::V2(folder) => v2_levels(folder, taken, machine_swap),
        }
    }
}

fn v2_levels(folder: &Path, taken: usize, machine_swap: usize) -> Vec<Level> {
    let [max, high] = ["memory.max", "memory.high"].map(|name| number_in(&folder.join(name)));
    if max.is_none() && high.is_none() {
        return Vec::new();
    }
    let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let files = ["inactive_file ", "active_file "].iter().filter_map(|name| field(&stat, name)).sum();
    let used = number_in(&folder.join("memory.current")).unwrap_or(0).saturating_sub(files).max(taken);
    let swap_used = number_in(&folder.join("memory.swap.current")).unwrap_or(0);
    let swap = number_in(&folder.join("memory.swap.max"))
        .map_or(machine_swap, |limit| limit.saturating_sub(swap_used).min(machine_swap));
    let level = |name: &str, limit, is_hard| {
        let what = folder.join(name).display().to_string();
        Level { what, limit, used, swap: if is_hard { swap } else { 0 }, is_hard }
    };
    let hard = max.map(|limit| level("memory.max", limit, true));
    hard.into_iter().chain(high.map(|limit| level("memory.high", limit, false))).collect()
}

fn v1_level(folder: &Path, taken: usize, machine_swap: usize) -> Option<Level> {
    let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    // groups above that this one cannot see limit it, too
    let inherited = field(&stat, "hierarchical_memory_limit ");
    let limit = number_in(&folder.join("memory.limit_in_bytes")).into_iter().chain(inherited).min()?;
    if limit > 1 << 60 {
        return None; // how that version says that there is no limit
    }
    let files =
        ["total_inactive_file ", "total_active_file "].iter().filter_map(|name| field(&stat, name)).sum();
    let used = number_in(&folder.join("memory.usage_in_bytes")).unwrap_or(0).saturating_sub(files).max(taken);
    let [both_limit, both_used] = ["memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"]
        .map(|name| number_in(&folder.join(name)));
    let left = limit.saturating_sub(used);
    let swap = match (both_limit, both_used) {
        (Some(limit), Some(used)) => limit.saturating_sub(used).saturating_sub(left).min(machine_swap),
        _ => machine_swap,
    };
    let what = folder.join("memory.limit_in_bytes").display().to_string();
    Some(Level { swap, ..Level::hard(what, limit, used) })
}

/// The number that a file holds; none if there is no file, or it says that there is no limit (`max`).
fn number_in(path: &Path) -> Option<usize> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The first number behind `name` at the start of a line.
fn field(text: &str, name: &str) -> Option<usize> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// A folder's version, by the files in it.
fn group_in(folder: PathBuf) -> Group {
    if folder.join("memory.limit_in_bytes").exists() { Group::V1(folder) } else { Group::V2(folder) }
}

/// The memory cgroup of a process and those above it that can be seen, from what `/proc/self/cgroup` and
/// `/proc/self/mountinfo` say.
fn groups_of(cgroup: &str, mountinfo: &str) -> Vec<Group> {
    let mounts = mountinfo.lines().filter_map(Mount::read).collect::<Vec<_>>();
    let mut groups = Vec::new();
    for line in cgroup.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let is_v2 = controllers.is_empty();
        if !is_v2 && !controllers.split(',').any(|name| name == "memory") {
            continue;
        }
        let Some(mount) = mounts.iter().find(|mount| mount.is_v2 == is_v2) else { continue };
        let make = if is_v2 { Group::V2 } else { Group::V1 };
        groups.extend(mount.folders(path).map(make));
    }
    groups
}

/// A mount of a hierarchy of cgroups that counts memory.
struct Mount {
    is_v2: bool,
    /// The cgroup that is at the top of what is mounted.
    root: PathBuf,
    point: PathBuf,
}

impl Mount {
    /// From a line such as `35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory`.
    fn read(line: &str) -> Option<Self> {
        let (place, kind) = line.split_once(" - ")?;
        let mut place = place.split(' ').skip(3);
        let (root, point) = (place.next()?.into(), place.next()?.into());
        let mut kind = kind.split(' ');
        let is_v2 = match kind.next()? {
            "cgroup2" => true,
            "cgroup" if kind.nth(1)?.split(',').any(|option| option == "memory") => false,
            _ => return None,
        };
        Some(Self { is_v2, root, point })
    }

    /// Folders of the cgroup `path` and of those above it, in a container also if the path is the host's.
    fn folders(&self, path: &str) -> impl Iterator<Item = PathBuf> {
        let below = Path::new(path).strip_prefix(&self.root).unwrap_or(Path::new("")).to_owned();
        let below =
            if below.components().any(|part| part.as_os_str() == "..") { PathBuf::new() } else { below };
        let point = self.point.clone();
        let folders: Vec<PathBuf> = below.ancestors().map(|part| point.join(part)).collect();
        folders.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, files: &[(&str, &str)]) {
        fs::create_dir_all(folder).expect("a folder");
        for (name, text) in files {
            fs::write(folder.join(name), text).expect("a file");
        }
    }

    #[test]
    fn nested_groups_of_both_versions_are_found() {
        let v2 = "25 20 0:22 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw";
        let at = |paths: &[&str], make: fn(PathBuf) -> Group| {
            paths.iter().map(|path| make(PathBuf::from(path))).collect::<Vec<_>>()
        };
        assert_eq!(
            groups_of("0::/user.slice/run.scope\n", v2),
            at(
                &["/sys/fs/cgroup/user.slice/run.scope", "/sys/fs/cgroup/user.slice", "/sys/fs/cgroup/"],
                Group::V2
            )
        );
        let v1 = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                  32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu";
        assert_eq!(
            groups_of("9:name=systemd:/\n4:cpu,memory:/jobs/7\n1:cpu:/x\n", v1),
            at(
                &["/sys/fs/cgroup/memory/jobs/7", "/sys/fs/cgroup/memory/jobs", "/sys/fs/cgroup/memory/"],
                Group::V1
            )
        );
        let container = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup ro,memory";
        for path in ["/docker/abc", "/elsewhere", "/../x"] {
            let found = groups_of(&format!("4:memory:{path}\n"), container);
            assert_eq!(found, at(&["/sys/fs/cgroup/memory/"], Group::V1), "{path}");
        }
        assert_eq!(groups_of("", v1), []);
    }

    #[test]
    fn the_files_of_version_2_are_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        write(folder, &[("memory.max", "max\n"), ("memory.high", "max\n"), ("memory.current", "5000\n")]);
        assert_eq!(v2_levels(folder, 0, 0), []);
        write(
            folder,
            &[
                ("memory.max", "10000\n"),
                ("memory.high", "8000\n"),
                ("memory.stat", "anon 3000\nfile 1500\ninactive_file 700\nactive_file 300\n"),
                ("memory.swap.max", "600\n"),
                ("memory.swap.current", "100\n"),
            ],
        );
        let levels = v2_levels(folder, 0, 1 << 30);
        let left: Vec<_> = levels.iter().map(|level| (level.used, level.left(), level.is_hard)).collect();
        assert_eq!(
            left,
            [(4000, 6500, true), (4000, 4000, false)],
            "cached files do not count; 500 may be swapped"
        );
        assert!(levels[0].what.ends_with("/memory.max"), "{}", levels[0].what);
        assert_eq!(v2_levels(folder, 9000, 0)[0].left(), 1000, "memory that was not written to yet counts");
    }

    #[test]
    fn the_files_of_version_1_are_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        write(
            folder,
            &[("memory.limit_in_bytes", "9223372036854771712\n"), ("memory.usage_in_bytes", "5000\n")],
        );
        assert_eq!(v1_level(folder, 0, 0), None);
        let stat =
            "cache 9\nhierarchical_memory_limit 7000\ntotal_inactive_file 600\ntotal_active_file 400\n";
        write(folder, &[("memory.stat", stat)]);
        let level = v1_level(folder, 0, 0).expect("a limit from above");
        assert_eq!((level.limit, level.used, level.left()), (7000, 4000, 3000));
        write(folder, &[("memory.limit_in_bytes", "6000\n")]);
        assert_eq!(v1_level(folder, 0, 800).expect("a limit").left(), 2800, "the machine's swap");
        write(
            folder,
            &[("memory.memsw.limit_in_bytes", "6000\n"), ("memory.memsw.usage_in_bytes", "4000\n")],
        );
        assert_eq!(v1_level(folder, 0, 800).expect("a limit").left(), 2000, "no swap is left");
    }

    #[test]
    fn this_machine_has_memory() {
        let levels = Limits::of_process(None).levels(0);
        let machine =
            levels.iter().find(|level| level.what == "the machine's memory").expect("/proc/meminfo");
        assert!(machine.limit > 1 << 20 && machine.used > 0 && machine.used < machine.limit);
    }
}
