//! The addresses at which PCI functions answer, which no IOVA may use. Behind a switch without ACS
//! a packet to an address in a neighbour's BAR goes to the neighbour and never reaches the IOMMU.
//! The kernel leaves these addresses out for its own DMA (`iova_reserve_pci_windows` in
//! drivers/iommu/dma-iommu.c); VFIO leaves it to its user.
use std::ops::RangeInclusive;
use std::path::Path;

/// IORESOURCE_MEM (include/linux/ioport.h).
const MEMORY: u64 = 0x200;

/// What is left of `ranges` without the memory of any PCI function, and without the windows of
/// bridges.
pub(super) fn without_pci(ranges: Vec<RangeInclusive<u64>>) -> Vec<RangeInclusive<u64>> {
    let functions = std::fs::read_dir(Path::new("/sys/bus/pci/devices")).into_iter().flatten().flatten();
    let resources = functions.filter_map(|function| std::fs::read_to_string(function.path().join("resource")).ok());
    resources.fold(ranges, |ranges, text| memory(&text).fold(ranges, |ranges, window| without(ranges, &window)))
}

/// The memory in a function's `resource` file: a line of start, end (inclusive) and flags for each
/// BAR and window.
fn memory(text: &str) -> impl Iterator<Item = RangeInclusive<u64>> {
    text.lines().filter_map(|line| {
        let mut fields = line.split_whitespace().map(|field| u64::from_str_radix(field.trim_start_matches("0x"), 16).ok());
        let (start, end, flags) = (fields.next()??, fields.next()??, fields.next()??);
        (flags & MEMORY != 0 && start < end).then_some(start..=end)
    })
}

fn without(ranges: Vec<RangeInclusive<u64>>, hole: &RangeInclusive<u64>) -> Vec<RangeInclusive<u64>> {
    let parts = |range: RangeInclusive<u64>| {
        let (start, end) = range.into_inner();
        let below = hole.start().checked_sub(1).map(|last| start..=last.min(end));
        let above = hole.end().checked_add(1).map(|first| first.max(start)..=end);
        [below, above].into_iter().flatten().filter(|part| !part.is_empty())
    };
    ranges.into_iter().flat_map(parts).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_functions_answer_to_is_left_out() {
        let text = "0x00000000fe800000 0x00000000fe803fff 0x0000000000140204\n\
                    0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                    0x000000000000c000 0x000000000000c03f 0x0000000000040101\n\
                    0x0000380000000000 0x0000380003ffffff 0x000000000014220c\n";
        let windows: Vec<_> = memory(text).collect();
        assert_eq!(windows, [0xfe80_0000..=0xfe80_3fff, 0x3800_0000_0000..=0x3800_03ff_ffff], "ports are no memory");
        let left = windows.iter().fold(vec![0..=0xfedf_ffff, 0xfef0_0000..=u64::MAX], without);
        assert_eq!(
            left,
            [0..=0xfe7f_ffff, 0xfe80_4000..=0xfedf_ffff, 0xfef0_0000..=0x37ff_ffff_ffff, 0x3800_0400_0000..=u64::MAX]
        );
    }

    #[test]
    fn holes_may_lie_across_ends() {
        assert_eq!(without(vec![10..=20], &(0..=9)), [10..=20]);
        assert_eq!(without(vec![10..=20], &(5..=12)), [13..=20]);
        assert_eq!(without(vec![10..=20], &(18..=u64::MAX)), [10..=17]);
        assert!(without(vec![10..=20], &(0..=u64::MAX)).is_empty());
    }
}
