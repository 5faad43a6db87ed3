//! The IOVAs of a region, one for each device that it is mapped for. Looking one up costs an I/O
//! two loads and no lock.
use std::sync::atomic::{AtomicU64, Ordering};

/// The most devices that a region can be mapped for at once.
pub(crate) const MAX_DEVICES: usize = 16;
/// A free slot.
const FREE: u64 = 0;
/// A slot that is being filled.
const TAKEN: u64 = u64::MAX;

/// Identifies an IOMMU address space. Never 0 nor `u64::MAX`, never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Domain(u64);

impl Domain {
    /// One that was never there before.
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// The IOVAs of one region, by domain.
#[derive(Debug, Default)]
pub(crate) struct Mappings([Mapping; MAX_DEVICES]);

#[derive(Debug, Default)]
struct Mapping {
    domain: AtomicU64,
    iova: AtomicU64,
}

impl Mappings {
    /// The IOVA of the region's first byte.
    #[inline]
    pub(crate) fn get(&self, domain: Domain) -> Option<u64> {
        let slot = self.0.iter().find(|slot| slot.domain.load(Ordering::Acquire) == domain.0)?;
        Some(slot.iova.load(Ordering::Relaxed))
    }

    /// Notes one. False where there is no room for another device.
    pub(crate) fn insert(&self, domain: Domain, iova: u64) -> bool {
        let take = |slot: &&Mapping| slot.domain.compare_exchange(FREE, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        let Some(slot) = self.0.iter().find(take) else { return false };
        slot.iova.store(iova, Ordering::Relaxed);
        slot.domain.store(domain.0, Ordering::Release);
        true
    }

    /// Forgets one.
    pub(crate) fn remove(&self, domain: Domain) -> Option<u64> {
        let slot = self.0.iter().find(|slot| slot.domain.load(Ordering::Acquire) == domain.0)?;
        let iova = slot.iova.load(Ordering::Relaxed);
        slot.domain.store(FREE, Ordering::Release);
        Some(iova)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_is_known_to_each_device_by_its_own_address() {
        let mappings = Mappings::default();
        let domains: Vec<Domain> = (0..=MAX_DEVICES).map(|_| Domain::new()).collect();
        for (n, domain) in domains.iter().enumerate() {
            assert_eq!(mappings.insert(*domain, n as u64 * 4096), n < MAX_DEVICES, "room for {MAX_DEVICES}");
        }
        assert_eq!(mappings.get(domains[2]), Some(2 * 4096));
        assert_eq!(mappings.get(domains[MAX_DEVICES]), None);
        assert_eq!(mappings.remove(domains[2]), Some(2 * 4096));
        assert_eq!((mappings.get(domains[2]), mappings.remove(domains[2])), (None, None));
        assert!(mappings.insert(domains[MAX_DEVICES], 7 * 4096), "its slot can be had again");
        assert_eq!((mappings.get(domains[3]), mappings.get(domains[MAX_DEVICES])), (Some(3 * 4096), Some(7 * 4096)));
    }
}
