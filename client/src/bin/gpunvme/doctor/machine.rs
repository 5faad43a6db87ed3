//! Facts about the whole machine: IOMMU, VFIO, limits, the CPU, NVIDIA's driver.

use super::container::Container;
use super::kernel::Kernel;
use super::sysfs::Tree;

pub struct Machine {
    /// The kernel's release.
    pub kernel: String,
    pub kernel_facts: Kernel,
    pub cpu: Cpu,
    /// A hypervisor runs below; the topology that it shows need not be the real one.
    pub is_virtual: bool,
    pub root: bool,
    pub iommu: Iommu,
    pub vfio: Vfio,
    /// Bytes that this process may lock; `None` where nothing limits it.
    pub memlock: Option<u64>,
    pub huge_pages: Vec<HugePages>,
    pub nvidia: Option<Nvidia>,
    /// The CUDA driver's library, where the dynamic linker looks for it.
    pub libcuda: Option<String>,
}

pub struct Cpu {
    pub vendor: String,
    pub family: u64,
}

impl Cpu {
    pub fn is_zen(&self) -> bool {
        self.vendor == "AuthenticAMD" && self.family >= 0x17
    }

    pub fn is_intel(&self) -> bool {
        self.vendor == "GenuineIntel"
    }
}

pub struct Iommu {
    /// The units that the kernel drives: `dmar0`, `ivhd0`, `smmu3.0x...`.
    pub units: Vec<String>,
    /// The firmware describes one (an ACPI table DMAR, IVRS, IORT or VIOT).
    pub in_firmware: Option<&'static str>,
    /// A kernel parameter that turns it off.
    pub turned_off: Option<String>,
}

pub struct Vfio {
    /// The driver vfio-pci is there.
    pub loaded: bool,
    /// It is there, or a module of this kernel.
    pub available: bool,
    /// There is a folder of modules for this kernel.
    pub modules_here: bool,
    pub container: Container,
    /// The kernel was built so that /dev/vfio/vfio is iommufd's.
    pub built_compat: bool,
}

pub struct HugePages {
    pub size: u64,
    pub total: u64,
    pub free: u64,
}

pub struct Nvidia {
    pub version: String,
    pub open: bool,
}

impl Nvidia {
    /// The first driver branch whose dma-bufs of GPU memory can be mapped: that of CUDA 13.3.
    pub const MAPS_DMA_BUFS: u32 = 610;

    pub fn branch(&self) -> u32 {
        self.version.split('.').next().and_then(|major| major.parse().ok()).unwrap_or(0)
    }

    /// The newest CUDA that the driver supports (CUDA Toolkit release notes, table of driver
    /// versions).
    pub fn cuda(&self) -> Option<&'static str> {
        const BRANCHES: [(u32, &str); 14] = [
            (525, "12.0"),
            (530, "12.1"),
            (535, "12.2"),
            (545, "12.3"),
            (550, "12.4"),
            (555, "12.5"),
            (560, "12.6"),
            (565, "12.7"),
            (570, "12.8"),
            (575, "12.9"),
            (580, "13.0"),
            (590, "13.1"),
            (595, "13.2"),
            (610, "13.3"),
        ];
        BRANCHES.iter().rev().find(|(branch, _)| *branch <= self.branch()).map(|(_, cuda)| *cuda)
    }

    pub fn read(tree: &Tree) -> Option<Nvidia> {
        Nvidia::parse(&tree.text("proc/driver/nvidia/version")?)
    }

    /// From /proc/driver/nvidia/version: `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64
    /// 580.159.04  Release Build ...`
    fn parse(text: &str) -> Option<Nvidia> {
        let line = text.lines().find(|line| line.starts_with("NVRM version"))?;
        let is_version = |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
        Some(Nvidia { version: line.split_whitespace().find(is_version)?.to_owned(), open: line.contains("Open Kernel Module") })
    }
}

impl Machine {
    pub fn read(tree: &Tree, container: Container) -> Machine {
        let kernel = tree.text("proc/sys/kernel/osrelease").unwrap_or_default();
        let cpuinfo = tree.text("proc/cpuinfo").unwrap_or_default();
        let of_cpu = |name: &str| {
            let line = cpuinfo.lines().find(|line| line.split(':').next().is_some_and(|key| key.trim() == name))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        let status = tree.text("proc/self/status").unwrap_or_default();
        let of_status =
            |name: &str| Some(status.lines().find(|line| line.starts_with(name))?.split_whitespace().nth(1)?.to_owned());
        let capabilities = of_status("CapEff:").and_then(|mask| u64::from_str_radix(&mask, 16).ok()).unwrap_or(0);
        const CAP_IPC_LOCK: u64 = 1 << 14;
        let kernel_facts = Kernel::read(tree, &kernel);
        Machine {
            cpu: Cpu {
                vendor: of_cpu("vendor_id").unwrap_or_default(),
                family: of_cpu("cpu family").and_then(|family| family.parse().ok()).unwrap_or(0),
            },
            is_virtual: of_cpu("flags").is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor")),
            root: of_status("Uid:").is_some_and(|uid| uid == "0"),
            iommu: Iommu::read(tree),
            vfio: Vfio::read(tree, &kernel, &kernel_facts, container),
            memlock: if capabilities & CAP_IPC_LOCK != 0 { None } else { memlock(tree) },
            huge_pages: huge_pages(tree),
            nvidia: Nvidia::read(tree),
            libcuda: libcuda(tree),
            kernel_facts,
            kernel,
        }
    }
}

impl Iommu {
    fn read(tree: &Tree) -> Iommu {
        let parameters = tree.text("proc/cmdline").unwrap_or_default();
        const OFF: [&str; 4] = ["iommu=off", "intel_iommu=off", "amd_iommu=off", "arm-smmu.disable=1"];
        const TABLES: [&str; 4] = ["DMAR", "IVRS", "IORT", "VIOT"];
        Iommu {
            units: tree.names("sys/class/iommu"),
            in_firmware: TABLES.into_iter().find(|table| tree.has(&format!("sys/firmware/acpi/tables/{table}"))),
            turned_off: parameters.split_whitespace().find(|parameter| OFF.contains(parameter)).map(str::to_owned),
        }
    }
}

impl Vfio {
    fn read(tree: &Tree, kernel: &str, facts: &Kernel, container: Container) -> Vfio {
        let loaded = tree.has("sys/bus/pci/drivers/vfio-pci");
        let listed =
            |file: &str| tree.text(&format!("lib/modules/{kernel}/{file}")).is_some_and(|list| list.contains("/vfio-pci.ko"));
        Vfio {
            loaded,
            modules_here: tree.has(&format!("lib/modules/{kernel}")),
            available: loaded || listed("modules.dep") || listed("modules.builtin"),
            container,
            built_compat: facts.has("CONFIG_IOMMUFD_VFIO_CONTAINER") == Some(true),
        }
    }
}

/// The soft limit (proc_pid_limits(5)).
fn memlock(tree: &Tree) -> Option<u64> {
    let limits = tree.text("proc/self/limits")?;
    limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?.split_whitespace().next()?.parse().ok()
}

fn huge_pages(tree: &Tree) -> Vec<HugePages> {
    let folder = "sys/kernel/mm/hugepages";
    let mut all: Vec<HugePages> = Vec::new();
    for name in tree.names(folder) {
        let kilobytes = name.strip_prefix("hugepages-").and_then(|rest| rest.strip_suffix("kB")?.parse::<u64>().ok());
        let count = |file: &str| tree.number(&format!("{folder}/{name}/{file}"));
        if let (Some(kilobytes), Some(total), Some(free)) = (kilobytes, count("nr_hugepages"), count("free_hugepages")) {
            all.push(HugePages { size: kilobytes << 10, total, free });
        }
    }
    all.sort_by_key(|pages| pages.size);
    all
}

/// Only looked for, never loaded: a broken CUDA must not prevent the diagnosis.
fn libcuda(tree: &Tree) -> Option<String> {
    let mut folders: Vec<String> =
        ["usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib", "lib64", "lib"]
            .map(str::to_owned)
            .into();
    for file in tree.names("etc/ld.so.conf.d") {
        let text = tree.text(&format!("etc/ld.so.conf.d/{file}")).unwrap_or_default();
        folders.extend(text.lines().filter_map(|line| Some(line.trim().strip_prefix('/')?.to_owned())));
    }
    folders.into_iter().map(|folder| format!("{folder}/libcuda.so.1")).find(|path| tree.has(path)).map(|path| format!("/{path}"))
}
