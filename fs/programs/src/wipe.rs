//! Clears the signatures of other formats, so that a formatted device is recognised as one thing.

use std::sync::Arc;

use gpunvme_blockdev::{BlockDevice, Io, Region, Request, Result};

/// Bytes at either end of a device in which formats put their signatures: ext4 at 1 KiB, btrfs at
/// 64 KiB, GPT in the first and last sectors, ZFS and MD in the last 512 KiB.
pub(crate) const ENDS_LEN: u64 = 1 << 20;

/// Writes zeros over the first and last MiB and waits until they are durable.
///
/// # Errors
/// If the device fails a command.
pub fn wipe(device: &Arc<dyn BlockDevice>) -> Result<()> {
    let geometry = device.geometry();
    let len = ENDS_LEN.min(geometry.len.get());
    let io = Io::inline(Arc::clone(device))?;
    let zeros = Region::allocate(len as usize)?;
    let ends = [0, geometry.len.get() - len].map(|offset| {
        if geometry.write_zeroes {
            Request::write_zeroes(offset, len)
        } else {
            Request::write(offset, vec![zeros.span(0..len as usize)], false)
        }
    });
    io.run(ends)?;
    io.run(vec![Request::flush()])
}

/// Whether the first and last MiB of a device, which has as much, are zero.
///
/// # Errors
/// If the device fails a command.
pub fn is_wiped(device: &Arc<dyn BlockDevice>) -> Result<bool> {
    let io = Io::inline(Arc::clone(device))?;
    let region = Region::allocate(ENDS_LEN as usize)?;
    let mut bytes = vec![0; ENDS_LEN as usize];
    for offset in [0, device.geometry().len.get() - ENDS_LEN] {
        io.run([Request::read(offset, [region.span(0..ENDS_LEN as usize)])])?;
        region.read_at(0, &mut bytes)?;
        if bytes.iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use gpunvme_blockdev_testing::{Image, MemoryDevice};

    use super::*;

    #[test]
    fn both_ends_are_cleared_and_the_middle_is_not() {
        const MIB: usize = 1 << 20;
        let mut image = Image::new(4 << 20);
        image.write_at(0, &vec![0xa5; 4 * MIB]);
        let memory = MemoryDevice::from_image(image);

        let device = memory.clone() as Arc<dyn BlockDevice>;
        assert!(!is_wiped(&device).unwrap());
        wipe(&device).unwrap();
        assert!(is_wiped(&device).unwrap());

        let mut bytes = vec![0; 4 * MIB];
        memory.snapshot().read_at(0, &mut bytes);
        let left = |range: std::ops::Range<usize>| bytes[range].iter().filter(|byte| **byte == 0xa5).count();
        assert_eq!([left(0..MIB), left(MIB..3 * MIB), left(3 * MIB..4 * MIB)], [0, 2 * MIB, 0]);
    }
}
