//! What is known of the machine's GPUs: their BARs, and where they and NVMe controllers sit.

use crate::failure::{Code, Result};
use crate::memory;
use std::ffi::{CStr, OsStr};
use std::fmt::Write;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The size of the BAR that shows a GPU's memory, in KiB.
///
/// # Errors
/// [`Code::DeviceNotFound`] where there is no such GPU, or the kernel does not tell.
pub fn bar_kib(gpu: usize) -> Result<usize> {
    let gpu = memory::cuda().and_then(|cuda| cuda.gpus().nth(gpu)).ok_or(Code::DeviceNotFound)?;
    let resources = fs::read_to_string(device(gpu.pci_address()).join("resource"));
    let largest = resources.ok().and_then(|text| text.lines().take(6).filter_map(bar_len).max());
    // Where the kernel does not show the device, all of its memory is the best that is known.
    Ok((largest.unwrap_or(gpu.memory()) >> 10) as usize)
}

/// The length of a BAR, from its line in sysfs: first and last address, and flags.
fn bar_len(line: &str) -> Option<u64> {
    let mut words = line.split_whitespace().map(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16));
    let (first, last) = (words.next()?.ok()?, words.next()?.ok()?);
    (last > first).then(|| last - first + 1)
}

fn device(address: &str) -> PathBuf {
    Path::new("/sys/bus/pci/devices").join(address.to_lowercase())
}

/// Writes the paths of GPUs and NVMe controllers through the PCI bus to a file, a line each.
///
/// # Errors
/// What the filesystem says.
pub fn export(path: &CStr) -> Result<()> {
    let mut text = String::new();
    for gpu in memory::cuda().into_iter().flat_map(|cuda| cuda.gpus()) {
        line(&mut text, "gpu", gpu.pci_address());
    }
    let controllers = fs::read_dir("/sys/class/nvme").into_iter().flatten().flatten();
    for controller in controllers {
        if let Ok(address) = fs::read_to_string(controller.path().join("address")) {
            line(&mut text, "nvme", address.trim());
        }
    }
    let path = Path::new(OsStr::from_bytes(path.to_bytes()));
    fs::write(path, text).map_err(|error| rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::IO).into())
}

fn line(text: &mut String, kind: &str, address: &str) {
    let path = device(address).canonicalize().unwrap_or_default();
    let _ = writeln!(text, "{kind} {address} {}", path.display()); // writing to a String cannot fail
}
