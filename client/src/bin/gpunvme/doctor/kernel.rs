//! Facts about the kernel and NVIDIA's modules: what ways to GPU memory other than ours depend on.

use super::sysfs::Tree;
use flate2::read::GzDecoder;
use std::io::Read;

/// The kernel's own copy of its configuration, where it was built with one (CONFIG_IKCONFIG_PROC).
const OWN_CONFIG: &str = "proc/config.gz";
/// More than any configuration has: what is in a tree of another machine may be anything.
const CONFIG_MAX: u64 = 4 << 20;

pub struct Kernel {
    /// Major and minor number of the release.
    pub version: (u32, u32),
    /// The configuration that it was built with, where the machine shows it.
    config: Option<String>,
    /// The sysctl of that name: 0 allows io_uring to all.
    pub io_uring_disabled: Option<u64>,
    /// nvme_core makes one disk of the several paths to a namespace.
    pub multipath: Option<bool>,
    /// The module nvidia_fs is loaded.
    pub nvidia_fs: bool,
    /// There is /dev/udmabuf, which makes dma-bufs of host memory.
    pub udmabuf: bool,
    /// The registry keys that NVIDIA's driver was loaded with.
    pub nvidia_registry: Option<String>,
}

impl Kernel {
    pub fn read(tree: &Tree, release: &str) -> Kernel {
        let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
        let multipath = tree.text("sys/module/nvme_core/parameters/multipath");
        let parameters = tree.text("proc/driver/nvidia/params");
        Kernel {
            version: (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)),
            config: own_config(tree).or_else(|| {
                [format!("boot/config-{release}"), format!("lib/modules/{release}/config")]
                    .iter()
                    .find_map(|path| tree.text(path))
            }),
            io_uring_disabled: tree.number("proc/sys/kernel/io_uring_disabled"),
            multipath: multipath.map(|value| value == "Y"),
            nvidia_fs: tree.has("sys/module/nvidia_fs"),
            udmabuf: tree.has("dev/udmabuf"),
            nvidia_registry: parameters.and_then(|text| {
                let line = text.lines().find_map(|line| line.strip_prefix("RegistryDwords:"))?;
                Some(line.trim().trim_matches('"').to_owned())
            }),
        }
    }

    /// Whether it was built with an option, as `CONFIG_PCI_P2PDMA`. None where its configuration is
    /// not shown.
    pub fn has(&self, option: &str) -> Option<bool> {
        let config = self.config.as_ref()?;
        let is_set = |line: &str| line.strip_prefix(option).is_some_and(|rest| matches!(rest, "=y" | "=m"));
        Some(config.lines().any(is_set))
    }
}

fn own_config(tree: &Tree) -> Option<String> {
    let mut config = String::new();
    GzDecoder::new(&tree.bytes(OWN_CONFIG)?[..]).take(CONFIG_MAX).read_to_string(&mut config).ok()?;
    Some(config)
}

#[cfg(test)]
mod tests {
    use super::super::fixture::expand;
    use super::*;
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use std::io::Write;

    fn packed(config: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(config).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn the_kernels_own_copy_counts_before_files() {
        let machine = expand("proc/config.gz = \nboot/config-6.12.1-x = CONFIG_PCI_P2PDMA=y");
        let p2pdma = |own: &[u8]| {
            std::fs::write(machine.tree.path(std::path::Path::new("/proc/config.gz")), own).unwrap();
            Kernel::read(&machine.tree, "6.12.1-x").has("CONFIG_PCI_P2PDMA")
        };
        assert_eq!(p2pdma(&packed(b"# CONFIG_PCI_P2PDMA is not set\n")), Some(false));
        // What cannot be unpacked is as if it were not there.
        let cut = &packed(b"CONFIG_FUSE_FS=y\n")[..20];
        for broken in [b"".as_slice(), b"CONFIG_FUSE_FS=y", cut, &packed(&[0xff; 100])] {
            assert_eq!(p2pdma(broken), Some(true));
        }
        // One that would never end does, and says what it had said by then.
        let endless = [b"CONFIG_FUSE_FS=y\n".to_vec(), vec![b'\n'; 64 << 20]].concat();
        assert_eq!(p2pdma(&packed(&endless)), Some(false));
    }

    #[test]
    fn the_configuration_is_that_of_the_running_kernel() {
        let read = |text: &str, release: &str| Kernel::read(&expand(text).tree, release);
        let text = "boot/config-6.12.1-x = CONFIG_PCI_P2PDMA=y\\n# CONFIG_DMABUF_TOKEN is not set\\nCONFIG_PCI_P2PDMA_X=y";
        let kernel = read(text, "6.12.1-x");
        assert_eq!(kernel.version, (6, 12));
        assert_eq!([kernel.has("CONFIG_PCI_P2PDMA"), kernel.has("CONFIG_DMABUF_TOKEN")], [Some(true), Some(false)]);
        assert_eq!(read(text, "6.13.0").has("CONFIG_PCI_P2PDMA"), None);
        assert_eq!(read(text, "").version, (0, 0));
    }

    #[test]
    fn nvidias_registry_keys_are_read() {
        let text = "proc/driver/nvidia/params = ModifyDeviceFiles: 1\\nRegistryDwords: \"RMForceStaticBar1=1;X=2\"\\nOther: \"\"";
        let kernel = Kernel::read(&expand(text).tree, "6.8.0");
        assert_eq!(kernel.nvidia_registry.as_deref(), Some("RMForceStaticBar1=1;X=2"));
    }
}
