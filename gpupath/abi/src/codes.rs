//! Routes and reasons: the two small numbers with which every transfer says how its bytes moved
//! and why not faster.
//!
//! Numbers are part of the ABI: they are never changed or used again, and programs must expect
//! ones they do not know.

macro_rules! codes {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $value:literal, $text:literal;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u32)]
        pub enum $name { $($(#[$variant_doc])* $variant = $value,)* }

        impl $name {
            /// Every code, in order of its number.
            pub const ALL: &[$name] = &[$($name::$variant,)*];

            /// The code with this number, if this version knows it.
            pub fn from_code(code: u32) -> Option<$name> {
                match code { $($value => Some($name::$variant),)* _ => None }
            }

            /// Its number in the ABI.
            pub const fn code(self) -> u32 { self as u32 }

            /// Its name in reports and JSON.
            pub const fn name(self) -> &'static str {
                match self { $($name::$variant => $text,)* }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { f.pad(self.name()) }
        }
    };
}

codes! {
    /// How bytes move between the device and memory.
    Route {
        /// Nothing moved.
        None = 0, "none";
        /// The device's DMA engine reaches GPU memory; host memory is not touched.
        P2p = 1, "p2p";
        /// Through a staging pool in host memory, from which the application's process copies on.
        Bounce = 2, "bounce";
        /// The registered buffer is host memory.
        Host = 3, "host";
        /// From the kernel's page cache, which the GPU's copy engine or a processor reads. The
        /// library's: the daemon never gives it.
        Cache = 4, "cache";
    }
}

codes! {
    /// Why a faster route was not taken, or a buffer or transfer was refused.
    Reason {
        /// Nothing faster exists.
        None = 0, "none";
        /// The buffer is host memory.
        NotGpuMemory = 1, "not-gpu-memory";
        /// The device is not driven by the userspace NVMe driver.
        NoVfio = 2, "no-vfio";
        /// The GPU's driver refused to let its dma-buf be mapped.
        MmapRefused = 3, "mmap-refused";
        /// The VFIO container is iommufd's imitation.
        IommufdCompat = 4, "iommufd-compat";
        /// The IOMMU did not accept the mapping.
        MapDmaRefused = 5, "map-dma-refused";
        /// Bytes or their memory are not aligned.
        Unaligned = 6, "unaligned";
        /// CUDA does not hand the memory out. The library's: the daemon never gives it.
        ExportRefused = 7, "export-refused";
        /// There is no room for another registration of GPU memory. The library's, as above.
        NoRoom = 8, "no-room";
        /// Not all of what was asked for can be read out of the page cache. The library's, as
        /// above.
        NotCached = 9, "not-cached";
        /// The memory is not registered. The library's, as above.
        NotRegistered = 10, "not-registered";
        /// Not from the page cache: that has not got all of it. The library's, as above.
        NotResident = 11, "not-resident";
        /// Not from the page cache: it is not to be looked at. The library's, as above.
        CachingOff = 12, "caching-off";
        /// Not from the page cache: the kernel does not tell this user what that has. The
        /// library's, as above.
        ResidencyHidden = 13, "residency-hidden";
        /// Not from the page cache: the kernel tells no program what that has. The library's, as
        /// above.
        OldKernel = 14, "old-kernel";
        /// Refused: the fd is no memory.
        NotABuffer = 32, "not-a-buffer";
        /// Refused: the memory could vanish under a transfer.
        NotSealed = 33, "not-sealed";
        /// Refused: there is less memory than was said.
        TooSmall = 34, "too-small";
        /// Refused: the fd does not allow both reading and writing.
        NotWritable = 35, "not-writable";
        /// Refused: the process holds as many as one may.
        ProcessLimit = 36, "process-limit";
        /// Refused: all processes together have what there is.
        TotalLimit = 37, "total-limit";
        /// Refused: the daemon may not take an fd from this process.
        FdNotReachable = 38, "fd-not-reachable";
        /// Refused: no such buffer belongs to this process.
        NoSuchBuffer = 39, "no-such-buffer";
        /// Refused: a segment reaches past the end of the buffer.
        OutsideBuffer = 40, "outside-buffer";
        /// Refused: the route that the caller required is not the buffer's.
        RouteNotAvailable = 41, "route-not-available";
        /// Refused: the daemon may not lock that much memory for the device.
        MemlockLimit = 42, "memlock-limit";
        /// Refused: the memory has pages that do not exist, and would come out of the daemon's
        /// memory.
        NotAllocated = 43, "not-allocated";
        /// Refused: the user's quota is used up, or the user keeps the daemon busy with descriptors
        /// that it cannot close.
        UserLimit = 44, "user-limit";
        /// Refused: the daemon may not look at the descriptors of this process.
        DescriptorHidden = 45, "descriptor-hidden";
        /// Refused: the process has no such descriptor of this file.
        WrongDescriptor = 46, "wrong-descriptor";
        /// A reason of a later version than this program's.
        Unknown = 63, "unknown";
    }
}

impl Reason {
    /// One sentence that says what is the matter and what would change it.
    pub const fn explain(self) -> &'static str {
        match self {
            Reason::None => "Nothing faster exists for this transfer.",
            Reason::NotGpuMemory => "The buffer is host memory; peer to peer needs GPU memory, exported as a dma-buf.",
            Reason::NoVfio => {
                "The device is driven by the kernel; peer to peer needs it bound to vfio-pci and mounted as vfio:ADDRESS."
            }
            Reason::MmapRefused => {
                "The memory's driver does not let it be mapped: NVIDIA's does from CUDA 13.3 on, and a PCI resource's while no driver uses it."
            }
            Reason::IommufdCompat => {
                "/dev/vfio/vfio is iommufd's imitation, which refuses device memory; a kernel with the type1 container accepts it."
            }
            Reason::MapDmaRefused => "The IOMMU refused to map the GPU's memory for the device; the daemon's log has the error.",
            Reason::Unaligned => {
                "Some bytes were copied by the CPU, because file offset, length or memory is not aligned; INFO (gpunvme info) tells the alignments."
            }
            Reason::ExportRefused => {
                "CUDA does not export this memory as a dma-buf, or does not end copies to it before they return: managed memory, memory mapped by cuMemMap, memory of another context than the GPU's primary one, a driver with closed kernel modules."
            }
            Reason::NoRoom => {
                "The GPU's BAR has no room to show more of its memory at once, and what it shows is in use: fewer or smaller buffers, or a larger BAR, would do."
            }
            Reason::NotCached => {
                "Not all of the range is in the kernel's page cache and registered with CUDA: it has to be read first, and more than once, or to be prepared."
            }
            Reason::NotRegistered => "The memory is not registered: the CPU copied between it and a buffer of the library's.",
            Reason::NotResident => {
                "The kernel's page cache has not got all of it, or lost it meanwhile: ordinary reads bring a file in, and gpunvme warm does."
            }
            Reason::CachingOff => {
                "The page cache was left alone: the file or the settings say so, or the request demands another route."
            }
            Reason::ResidencyHidden => {
                "The kernel tells only a file's owner, and users who may write to it, what of it is in the page cache."
            }
            Reason::OldKernel => "The kernel does not tell what of a file is in the page cache: Linux does from 6.5 on.",
            Reason::NotABuffer => {
                "The fd is neither a memfd of ordinary pages nor a dma-buf (nor, for root, a PCI device's resource file)."
            }
            Reason::NotSealed => "The memfd could be shortened under a transfer; add F_SEAL_SHRINK before registering it.",
            Reason::TooSmall => "The memory is shorter than the length that was to be registered.",
            Reason::NotWritable => "The fd must be open for reading and writing, and a memfd must not be sealed against writes.",
            Reason::ProcessLimit => {
                "The process has as many buffers, or bytes in them, as one may have; unregister some, or raise the mount's limits."
            }
            Reason::TotalLimit => {
                "All processes together have as many buffers, or bytes in them, as the mount allows; raise its limits."
            }
            Reason::UserLimit => {
                "The processes of this user have as much as one user may have while others want some too; unregister some, or close what keeps the daemon from closing it."
            }
            Reason::FdNotReachable => {
                "The daemon may not take an fd from this process; register over the socket that INFO names."
            }
            Reason::DescriptorHidden => {
                "The daemon may not look at this process's descriptors; send one over the socket that INFO names, for a grant."
            }
            Reason::WrongDescriptor => {
                "The request names no descriptor of this file that its process has; name the one that the ioctl is called on."
            }
            Reason::NoSuchBuffer => {
                "This process has registered no such buffer with this mount; a child process must register its own."
            }
            Reason::OutsideBuffer => "A segment reaches past the end of the buffer.",
            Reason::MemlockLimit => {
                "The daemon may not lock that much memory for the device: raise its RLIMIT_MEMLOCK (ulimit -l, LimitMEMLOCK=), or run it as root."
            }
            Reason::NotAllocated => {
                "Some pages of the memory do not exist yet, or no longer: fallocate(2) all of the memfd before registering it, and punch no holes."
            }
            Reason::Unknown => "This program is older than the daemon and does not know the reason.",
            Reason::RouteNotAvailable => {
                "The memory does not take the route that was required; a transfer that requires none takes its own, and tells why."
            }
        }
    }
}
