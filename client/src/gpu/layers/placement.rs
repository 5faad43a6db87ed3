//! Where the layers of a model go: the tier of each, and where its tensors are in its memory.

use crate::error::{Error, Result};
use crate::gpu::request::Segment;
use rustix::io::Errno;
use std::ops::Range;
use std::path::Path;

/// What tensors in a layer's memory are aligned to, in bytes.
const ALIGNMENT: u64 = 256;

/// Where a layer is when it is not in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// In memory of the GPU.
    Resident,
    /// In pinned host memory.
    Pinned,
    /// In the file.
    Ssd,
}

/// A layer, and where it is.
#[derive(Clone, Debug)]
pub(super) struct Placed {
    pub number: usize,
    pub tier: Tier,
    /// Where its tensors are in the file.
    pub ranges: Vec<Range<u64>>,
    /// Where they are in its memory, and its length.
    pub offsets: Vec<u64>,
    pub len: u64,
    /// Its memory, for the first two tiers.
    pub address: u64,
}

impl Placed {
    /// Those of its tensors.
    pub fn bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.end - range.start).sum()
    }

    pub fn segments(&self, address: u64) -> Vec<Segment> {
        let segment = |(range, offset): (&Range<u64>, &u64)| Segment {
            file_offset: range.start,
            address: address + offset,
            len: range.end - range.start,
        };
        self.ranges.iter().zip(&self.offsets).filter(|(range, _)| !range.is_empty()).map(segment).collect()
    }
}

/// What each layer's memory is like, and its tier: of each an even part of the model, of so many
/// bytes at most.
pub(super) fn place(path: &Path, layers: &[Vec<Range<u64>>], resident: u64, pinned: u64) -> Result<Vec<Placed>> {
    let wrong = |action| Error::Path { path: path.to_owned(), action, errno: Errno::INVAL };
    if layers.is_empty() {
        return Err(wrong("load a model of no layers from it"));
    }
    let mut placed = Vec::with_capacity(layers.len());
    for (number, ranges) in layers.iter().enumerate() {
        let (mut offsets, mut len) = (Vec::with_capacity(ranges.len()), 0u64);
        for range in ranges {
            if range.start > range.end || range.end > gpunvme_abi::MAX_OFFSET {
                return Err(wrong("load a tensor that ends before it begins, or past the end of all files, from it"));
            }
            offsets.push(len);
            let end = len.checked_add((range.end - range.start).next_multiple_of(ALIGNMENT));
            len = end.ok_or_else(|| wrong("load a layer of more bytes than any memory has from it"))?;
        }
        if len == 0 {
            return Err(wrong("load a layer of no bytes from it"));
        }
        placed.push(Placed { number, tier: Tier::Ssd, ranges: ranges.clone(), offsets, len, address: 0 });
    }
    for (tier, budget) in [(Tier::Resident, resident), (Tier::Pinned, pinned)] {
        let total: u128 = placed.iter().filter(|layer| layer.tier == Tier::Ssd).map(|layer| u128::from(layer.len)).sum();
        let (mut seen, mut taken) = (0u128, 0u128);
        for layer in placed.iter_mut().filter(|layer| layer.tier == Tier::Ssd) {
            seen += u128::from(layer.len);
            // As much as is due of the budget up to here.
            if taken + u128::from(layer.len) <= u128::from(budget) * seen / total.max(1) {
                taken += u128::from(layer.len);
                layer.tier = tier;
            }
        }
    }
    Ok(placed)
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // a layer of one tensor
mod tests {
    use super::*;

    #[test]
    fn tiers_are_spread_evenly_and_stay_within_their_budgets() {
        let layers: Vec<_> = (0..12u64).map(|n| vec![n * 1024..(n + 1) * 1024]).collect();
        let placed = place(Path::new("file"), &layers, 4 * 1024 + 100, 4 * 1024).unwrap();
        let count = |tier| placed.iter().filter(|layer| layer.tier == tier).count();
        assert_eq!((count(Tier::Resident), count(Tier::Pinned), count(Tier::Ssd)), (4, 4, 4));
        let on_ssd: Vec<_> = (0..12).filter(|n| placed[*n].tier == Tier::Ssd).collect();
        assert!(on_ssd.windows(2).all(|pair| pair[1] - pair[0] <= 4), "{on_ssd:?}");
        assert!(place(Path::new("file"), &layers, u64::MAX, 0).unwrap().iter().all(|layer| layer.tier == Tier::Resident));
    }

    #[test]
    fn layers_that_are_none_are_refused() {
        let refused = |layers: &[Vec<Range<u64>>]| place(Path::new("file"), layers, 0, 0).unwrap_err().errno();
        assert_eq!(refused(&[]), Errno::INVAL);
        assert_eq!(refused(&[vec![]]), Errno::INVAL);
        assert_eq!(refused(&[vec![5..5]]), Errno::INVAL);
        #[allow(clippy::reversed_empty_ranges)]
        let backwards = vec![9..5];
        assert_eq!(refused(&[backwards]), Errno::INVAL);
        assert_eq!(refused(&[vec![0..u64::MAX]]), Errno::INVAL);
        // Together they are longer than a number can say.
        let longest = 0..gpunvme_abi::MAX_OFFSET;
        assert_eq!(refused(&[vec![longest.clone(), longest.clone(), longest]]), Errno::INVAL);
    }
}
