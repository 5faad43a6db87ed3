//! How much of the page cache may be registered: the kernel cannot reclaim registered pages.
//!
//! It guards the rest of the machine: what is registered is given back before memory runs short,
//! for the machine and for the control groups of this process (cgroup v2).

use std::fs;
use std::path::{Path, PathBuf};

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
        let group = fs::read_to_string("/proc/self/cgroup").ok().and_then(|text| group(&text));
        let groups = group.into_iter().flat_map(|group| {
            let folders: Vec<PathBuf> =
                group.ancestors().take_while(|folder| *folder != Path::new(CGROUPS)).map(Path::to_owned).collect();
            folders.into_iter().filter_map(|folder| Memory::of_group(&folder))
        });
        machine.into_iter().chain(groups).collect()
    }

    fn of_machine(text: &str) -> Option<Memory> {
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
        };
        Some(Memory { total: field("MemTotal:")?, available: field("MemAvailable:")? })
    }

    /// None where the group has no limit.
    fn of_group(folder: &Path) -> Option<Memory> {
        let number = |name: &str| fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
        let (total, current) = (number("memory.max")?, number("memory.current")?);
        let stat = fs::read_to_string(folder.join("memory.stat")).ok()?;
        let field = |name: &str| stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok()).unwrap_or(0);
        let file = field("active_file ") + field("inactive_file ");
        Some(Memory { total, available: total.saturating_sub(current) + file.min(current) })
    }

    /// Whether `more` bytes may be registered beside `registered` ones.
    fn allows(self, registered: u64, more: u64) -> bool {
        self.available.saturating_sub(registered + more) >= self.total / RESERVE * 2
    }

    /// Whether some of what is registered is to be given back.
    fn is_short(self, registered: u64) -> bool {
        self.available.saturating_sub(registered) < self.total / RESERVE
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

    /// Whether memory runs short with so much registered.
    pub fn is_short(registered: u64) -> bool {
        Memory::all().into_iter().any(|memory| memory.is_short(registered))
    }
}

/// Where control groups are shown.
const CGROUPS: &str = "/sys/fs/cgroup";

/// The folder of the group of cgroup v2 that /proc/self/cgroup names.
fn group(text: &str) -> Option<PathBuf> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(Path::new(CGROUPS).join(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_and_the_groups_are_asked() {
        let machine = Memory::of_machine("MemTotal:       24617280 kB\nMemFree: 1 kB\nMemAvailable:   20000000 kB\n").unwrap();
        assert_eq!(machine, Memory { total: 24617280 << 10, available: 20000000 << 10 });
        assert_eq!(Memory::of_machine("MemTotal: many kB"), None);
        assert_eq!(group("1:cpu:/x\n0::/user.slice/a b\n"), Some("/sys/fs/cgroup/user.slice/a b".into()));
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        write("memory.current", "700\n");
        write("memory.stat", "anon 100\nactive_file 300\ninactive_file 200\nworkingset_refault_file 5\n");
        write("memory.max", "max\n");
        assert_eq!(Memory::of_group(dir.path()), None, "without a limit");
        write("memory.max", "1000\n");
        assert_eq!(Memory::of_group(dir.path()), Some(Memory { total: 1000, available: 800 }));
    }

    #[test]
    fn memory_that_runs_short_is_given_back() {
        let memory = Memory { total: 1600, available: 1000 };
        assert!(memory.allows(0, 800) && !memory.allows(0, 801) && !memory.allows(400, 401));
        assert!(!memory.is_short(900) && memory.is_short(901));
    }
}
