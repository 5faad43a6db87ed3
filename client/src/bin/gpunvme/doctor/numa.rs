//! On which NUMA nodes the cached pages of a file lie, by what this process has mapped of it.

use rustix::fs::{fstat, major, minor};
use std::collections::BTreeMap;
use std::fs;
use std::fs::File;

/// What lies where in a mapping: bytes by NUMA node.
pub type ByNode = BTreeMap<u32, u64>;

/// The ranges of a file that are mapped here, by where they begin, with what lies where. None where
/// the kernel does not tell, as one without NUMA.
pub fn mapped(file: &File) -> BTreeMap<u64, ByNode> {
    let read = || Some((fs::read_to_string("/proc/self/maps").ok()?, fs::read_to_string("/proc/self/numa_maps").ok()?));
    let (Some((maps, numa_maps)), Ok(stat)) = (read(), fstat(file)) else { return BTreeMap::new() };
    let device = format!("{:02x}:{:02x}", major(stat.st_dev), minor(stat.st_dev));
    ranges(&maps, &numa_maps, &device, stat.st_ino, rustix::param::page_size() as u64)
}

/// Of the texts of /proc/PID/maps and numa_maps, what is about the file with this number.
fn ranges(maps: &str, numa_maps: &str, device: &str, ino: u64, page: u64) -> BTreeMap<u64, ByNode> {
    // ADDRESS-ADDRESS ACCESS OFFSET DEVICE INODE PATH
    let offset = |line: &str| {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let &[range, _, offset, of, number, ..] = words.as_slice() else { return None };
        let is_of_it = of == device && number.parse() == Ok(ino);
        Some((range.split('-').next()?.to_owned(), u64::from_str_radix(offset, 16).ok()?)).filter(|_| is_of_it)
    };
    let places: BTreeMap<String, u64> = maps.lines().filter_map(offset).collect();
    let mut found: BTreeMap<u64, ByNode> = BTreeMap::new();
    for line in numa_maps.lines() {
        // ADDRESS POLICY WORD..., and those of the form N0=PAGES are what is looked for.
        let mut words = line.split_ascii_whitespace();
        let Some(offset) = words.next().and_then(|address| places.get(address)) else { continue };
        let pages = |word: &str| {
            let (node, pages) = word.strip_prefix('N')?.split_once('=')?;
            Some((node.parse().ok()?, pages.parse::<u64>().ok()? * page))
        };
        let nodes: ByNode = words.filter_map(pages).collect();
        // A range is mapped twice, and not always whole: what is registered, and its sentinel.
        let known = found.entry(*offset).or_default();
        if nodes.values().sum::<u64>() > known.values().sum() {
            *known = nodes;
        }
    }
    found
}

/// The node that most of it lies on.
pub fn most(nodes: &ByNode) -> Option<u32> {
    nodes.iter().max_by_key(|(_, bytes)| **bytes).map(|(node, _)| *node)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_mapped_of_a_file_is_found_by_its_nodes() {
        let maps = "7f0000000000-7f0001000000 r--s 01000000 00:3d 77   /data/#77 (deleted)\n\
                    7f0002000000-7f0003000000 r--s 01000000 00:3d 77   /data/#77 (deleted)\n\
                    7f0004000000-7f0005000000 r--s 00000000 00:3d 77   /data/#77 (deleted)\n\
                    7f0006000000-7f0007000000 r--s 00000000 00:3d 78   /data/other\n\
                    7f0008000000-7f0009000000 rw-p 00000000 00:00 0\n";
        let numa_maps = "7f0000000000 default file=/data/#77\\040(deleted) mapped=4096 N0=1000 N1=3096 kernelpagesize_kB=4\n\
                         7f0002000000 default file=/data/#77\\040(deleted)\n\
                         7f0004000000 prefer:1 file=/data/#77\\040(deleted) mapped=4096 N0=4096 kernelpagesize_kB=4\n\
                         7f0006000000 default file=/data/other mapped=1 N1=1 kernelpagesize_kB=4\n\
                         7f0008000000 default anon=3 dirty=3 N0=3 kernelpagesize_kB=4\n";
        let found = ranges(maps, numa_maps, "00:3d", 77, 4096);
        let expected = BTreeMap::from([
            (0, BTreeMap::from([(0, 16 << 20)])),
            (16 << 20, BTreeMap::from([(0, 1000 * 4096), (1, 3096 * 4096)])),
        ]);
        assert_eq!(found, expected);
        assert_eq!(found.values().map(most).collect::<Vec<_>>(), [Some(0), Some(1)]);
        assert!(ranges(maps, "", "00:3d", 77, 4096).is_empty());
    }
}
