//! How much of the page cache may be registered: the kernel cannot reclaim registered pages.
//!
//! It guards the rest of the machine: what is registered is given back before memory runs short,
//! for the machine and for the control groups of this process.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The part of all memory that must stay available: cached ranges are made only while twice as much
/// is, and given back from there on.
const RESERVE: u64 = 16;
/// The part of all memory that cached ranges may take where no other limit was set.
const SHARE: u64 = 4;

/// Memory of the machine or of a control group, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    pub total: u64,
    /// What could be had without taking it from a process: free memory, and the page cache, also
    /// what of it is registered.
    pub available: u64,
}

impl Memory {
    /// Of the machine, and of each control group that has a limit.
    pub fn all() -> Vec<Memory> {
        let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| Memory::of_machine(&text));
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let of_version = |version: &'static Version| {
            let folder = version.folder(&groups);
            let folders: Vec<PathBuf> = folder.iter().flat_map(|folder| folder.ancestors()).map(Path::to_owned).collect();
            let folders = folders.into_iter().take_while(|folder| folder.starts_with(version.root));
            folders.filter_map(|folder| Memory::of_group(&folder, version)).collect::<Vec<_>>()
        };
        machine.into_iter().chain(VERSIONS.iter().flat_map(of_version)).collect()
    }

    fn of_machine(text: &str) -> Option<Memory> {
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
        };
        Some(Memory { total: field("MemTotal:")?, available: field("MemAvailable:")? })
    }

    /// None where the group has no limit.
    fn of_group(folder: &Path, version: &Version) -> Option<Memory> {
        let number = |name: &str| fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
        let (total, current) = (number(version.limit)?, number(version.current)?);
        if total >= UNLIMITED {
            return None;
        }
        let stat = fs::read_to_string(folder.join("memory.stat")).ok()?;
        let field = |name: &str| stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok()).unwrap_or(0);
        let file: u64 = version.file.iter().map(|name| field(name)).sum();
        Some(Memory { total, available: total.saturating_sub(current) + file.min(current) })
    }

    /// Whether `more` bytes may be registered beside `registered` ones.
    fn allows(self, registered: u64, more: u64) -> bool {
        self.available.saturating_sub(registered + more) >= self.total / RESERVE * 2
    }

    /// How much may be allocated before some of what is registered is to be given back.
    fn slack(self, registered: u64) -> u64 {
        self.available.saturating_sub(registered).saturating_sub(self.total / RESERVE)
    }
}

/// How much may be registered.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Bytes at most.
    limit: u64,
}

impl Room {
    /// By the application's setting, or a quarter of what there is.
    pub fn new(limit: Option<u64>) -> Room {
        let share = || Memory::all().iter().map(|memory| memory.total / SHARE).min().unwrap_or(0);
        Room { limit: limit.unwrap_or_else(share) }
    }

    /// Whether `more` bytes fit beside `registered` ones if nothing else is given up.
    pub fn fits(self, registered: u64, more: u64) -> bool {
        registered + more <= self.limit
    }

    /// Whether `more` bytes could be registered at all.
    pub fn takes(self, more: u64) -> bool {
        more <= self.limit
    }

    /// Whether memory allows `more` bytes beside `registered` ones.
    pub fn is_there(registered: u64, more: u64) -> bool {
        Memory::all().into_iter().all(|memory| memory.allows(registered, more))
    }

    /// When to look again whether memory runs short, with so much registered; none where it does.
    pub fn look_after(registered: u64) -> Option<Duration> {
        /// Bytes that processes allocate in a nanosecond, at most.
        const FASTEST: u64 = 8;
        const SOONEST: Duration = Duration::from_millis(2);
        const LATEST: Duration = Duration::from_millis(200);
        let slack = Memory::all().into_iter().map(|memory| memory.slack(registered)).min().unwrap_or(u64::MAX);
        (slack > 0).then(|| Duration::from_nanos(slack / FASTEST).clamp(SOONEST, LATEST))
    }
}

/// Limits from here on are none.
const UNLIMITED: u64 = 1 << 60;

/// Where a version of control groups is shown, and what its files are called.
struct Version {
    root: &'static str,
    /// What is before a group's path in /proc/self/cgroup, behind the hierarchy's number.
    controller: &'static str,
    limit: &'static str,
    current: &'static str,
    /// Of memory.stat: the page cache.
    file: [&'static str; 2],
}

const VERSIONS: [Version; 2] = [
    Version {
        root: "/sys/fs/cgroup",
        controller: "",
        limit: "memory.max",
        current: "memory.current",
        file: ["active_file ", "inactive_file "],
    },
    Version {
        root: "/sys/fs/cgroup/memory",
        controller: "memory",
        limit: "memory.limit_in_bytes",
        current: "memory.usage_in_bytes",
        file: ["total_active_file ", "total_inactive_file "],
    },
];

impl Version {
    /// The folder of this process's group, of which /proc/self/cgroup tells.
    fn folder(&self, groups: &str) -> Option<PathBuf> {
        let path = groups.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            controllers.split(',').any(|controller| controller == self.controller).then_some(path)
        })?;
        Some(Path::new(self.root).join(path.strip_prefix('/')?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_and_the_groups_are_asked() {
        let machine = Memory::of_machine("MemTotal:       24617280 kB\nMemFree: 1 kB\nMemAvailable:   20000000 kB\n").unwrap();
        assert_eq!(machine, Memory { total: 24617280 << 10, available: 20000000 << 10 });
        assert_eq!(Memory::of_machine("MemTotal: many kB"), None);
        let groups = "4:cpu,memory:/a/b\n0::/user.slice/a b\n";
        let [second, first] = VERSIONS;
        assert_eq!(second.folder(groups), Some("/sys/fs/cgroup/user.slice/a b".into()));
        assert_eq!(first.folder(groups), Some("/sys/fs/cgroup/memory/a/b".into()));
        assert_eq!(first.folder("0::/x"), None);
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        write("memory.current", "700\n");
        write("memory.stat", "anon 100\nactive_file 300\ninactive_file 200\nworkingset_refault_file 5\n");
        write("memory.max", "max\n");
        assert_eq!(Memory::of_group(dir.path(), &second), None, "without a limit");
        write("memory.max", "1000\n");
        assert_eq!(Memory::of_group(dir.path(), &second), Some(Memory { total: 1000, available: 800 }));
    }

    #[test]
    fn memory_that_runs_short_is_given_back() {
        let memory = Memory { total: 1600, available: 1000 };
        assert!(memory.allows(0, 800) && !memory.allows(0, 801) && !memory.allows(400, 401));
        assert_eq!((memory.slack(899), memory.slack(900), memory.slack(2000)), (1, 0, 0));
    }
}
