//! What an application sets: how much of the machine the library may use.

use std::num::NonZero;

/// More threads than this have no more use of a device that is shared by all.
const CALLERS: usize = 16;
/// The least of a pool whose length is not set: so that [`super::page_cache::readers`] copy into
/// one part of it while the GPU copies another.
const FOR_PAGES: usize = 16 << 20;

/// A staging pool, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pool {
    pub len: usize,
    /// How many of them transfers of devices may use.
    pub of_devices: usize,
}

/// How much of the machine [`super::Transfers`] may use.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Settings {
    /// Bytes of the staging pool of each GPU that is used: whole MiB, at least one. It is host
    /// memory, pinned, on the GPU's NUMA node. By default 16 MiB, or what its devices' part has
    /// where that is more.
    ///
    /// The devices' part is what transfers of devices may use of it: all of a pool whose length is
    /// set, and otherwise 8 MiB, or 4 MiB for each device of the volume where that is more, and at
    /// most 64. That is enough to keep the devices busy, and little enough to stay in the
    /// processor's cache between the device and the copy engine. Beside an H200 reads of 16 MiB
    /// from one loop device went at 7.2 GB/s through 8 MiB, at 6.1 through 16, and at 4.4 through
    /// 64; from eight at 18.9 through 8 MiB, and at 23.8 through 32. All of the pool is for what
    /// processors copy out of the page cache ([`Caching`]): several at once, each into a part of
    /// its own.
    pub staging: Option<usize>,
    /// Threads that may at once do their own requests, by calls that wait
    /// ([`super::Transfers::read`], [`super::Transfers::write`]) for at most 256 KiB, two of them
    /// for at most 1 MiB, and one of those for at most 16 MiB where the volume has one device, in
    /// at most 8 parts: by default as many as the machine has processors, and at most 16; never
    /// more than 32. For each the library makes a ring, and a staging pool of 2 MiB for each GPU
    /// that it uses, beside the other one. A thread of the library does what others ask for, and
    /// what the mount or a GPU has no room for.
    pub callers: usize,
    /// Bytes of each GPU's memory that may be registered with the mount at once, where its SSD
    /// reaches them: by default as much as the GPU's BAR shows.
    pub registered: Option<u64>,
    /// What reads take of the kernel's page cache: by default what it has anyway.
    pub caching: Caching,
    /// Bytes of the page cache that may be registered with CUDA at once: by default a quarter of
    /// the machine's memory, or of what its control group may have. The kernel cannot reclaim them
    /// meanwhile; when memory runs short, half of them is given back.
    pub cached: Option<u64>,
}

/// What reads take of the kernel's page cache ([`crate::Route::Cache`]). Bytes that are not in
/// there, or have changed place, always come from the device.
///
/// A range of a file, 16 MiB long, of which more was read than it has is registered with CUDA:
/// GPUs then read it out of the page cache themselves. Until then threads of the library copy it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Caching {
    /// What [`super::Transfers::prepare`] registered, and nothing else.
    Never,
    /// What it has: what ordinary reads and writes brought in. The kernel tells that only to a
    /// file's owner, and to users who may write to it, and from Linux 6.5 on; reads of others come
    /// from the device.
    #[default]
    Resident,
    /// The same; and the kernel reads in a range that is read again.
    ReadAgain,
}

impl Default for Settings {
    fn default() -> Settings {
        let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
        Settings { staging: None, callers: processors.min(CALLERS), registered: None, caching: Caching::default(), cached: None }
    }
}

impl Settings {
    /// A staging pool, on a volume of so many devices.
    pub(super) fn pool(&self, devices: u32) -> Pool {
        const OF_A_DEVICE: usize = 4 << 20;
        const LEAST_OF_DEVICES: usize = 8 << 20;
        const MOST_OF_DEVICES: usize = 64 << 20;
        let of_devices = (devices as usize).saturating_mul(OF_A_DEVICE).clamp(LEAST_OF_DEVICES, MOST_OF_DEVICES);
        match self.staging {
            Some(len) => Pool { len, of_devices: len },
            None => Pool { len: of_devices.max(FOR_PAGES), of_devices },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_a_part_of_the_pool() {
        const MIB: usize = 1 << 20;
        let pool = |staging: Option<usize>, devices| {
            let Pool { len, of_devices } = Settings { staging, ..Settings::default() }.pool(devices);
            (len, of_devices)
        };
        for (devices, expected) in [(0, (16, 8)), (1, (16, 8)), (3, (16, 12)), (4, (16, 16)), (8, (32, 32)), (u32::MAX, (64, 64))]
        {
            assert_eq!(pool(None, devices), (expected.0 * MIB, expected.1 * MIB), "{devices} devices");
        }
        for (staging, devices) in [(1, 1), (4 * MIB, 8), (64 * MIB, 1)] {
            assert_eq!(pool(Some(staging), devices), (staging, staging), "{devices} devices");
        }
    }
}
