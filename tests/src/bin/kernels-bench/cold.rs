//! Rows of a table that no memory has yet: the array beside managed memory that the file is read
//! into, and a mapping of the file that is registered. Both files lie on loop devices, the array's
//! on a gpunvme volume and the others' on ext4, or on btrfs where there are several.

use crate::gather::Gather;
use crate::reads::write_words;
use crate::row::{head, ms, row};
use gpunvme::gpu::{GpuArraySettings, GpuRing, GpuRingSettings};
use gpunvme::{File, Mount};
use gpunvme_cuda::Gpu;
use gpunvme_tests::cuda::{ARRAYS, MappedFile, Module, managed_words};
use gpunvme_tests::mounted::{Image, Mounted};
use gpunvme_tests::peers::{Kind, LoopMounted, Striped, write_whole};
use std::error::Error;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use zerocopy::IntoBytes;

/// Words of a row.
const ROW: u32 = 1024;
/// For what a filesystem keeps for itself.
const SPARE: u64 = 512 << 20;

pub fn measure(gpu: Gpu, quick: bool, devices: usize) {
    let (len, count, blocks) = if quick { (16 << 20, 500, 16) } else { (8u64 << 30, 100_000, 264) };
    let Some((volume, peer)) = volume_and_peer(len, devices) else { return };
    let (ours, theirs) = (volume.path("rows"), peer.root().join("rows"));
    for path in [&ours, &theirs] {
        write_words(path, len);
        fs::File::open(path).unwrap().sync_all().unwrap();
    }
    let module = Module::new(gpu, ARRAYS);
    let gather = Gather::new(&module, len, (count, ROW), blocks);
    let bytes = u64::from(ROW) * 4;
    head(
        &format!("{count} random rows of {bytes} bytes of {} MiB that no memory has, gathered once; ms", len >> 20),
        &["by", "until it can begin", "the kernel", "together"],
    );
    let show = |name: &str, before: Duration, took: Duration| row(name, &[ms(before), ms(took), ms(before + took)]);
    let mount = Mount::open(volume.root()).unwrap();
    for (name, cache) in [("array, all have room", len), ("array, a sixteenth has room", len / 16)] {
        forget(&ours);
        let begun = Instant::now();
        let ring = GpuRing::on_gpu(&mount, gpu.index(), GpuRingSettings::default()).unwrap();
        let settings = GpuArraySettings { cache: cache as usize, ..GpuArraySettings::default() };
        let array = ring.array(&File::open(&ours).unwrap(), settings).unwrap();
        show(name, begun.elapsed(), gather.run("gather_array", array.for_kernels().as_bytes()));
    }
    forget(&theirs);
    let begun = Instant::now();
    let managed = managed_words(gpu, &theirs);
    show("managed memory, the file read into it", begun.elapsed(), gather.run("gather_pointer", managed.address().as_bytes()));
    drop(managed);
    forget(&theirs);
    let begun = Instant::now();
    match MappedFile::new(gpu, &theirs) {
        Ok(mapped) => {
            show("the file, mapped and registered", begun.elapsed(), gather.run("gather_pointer", mapped.address().as_bytes()));
        }
        Err(error) => println!("| the file, mapped and registered | {error} | - | - |"),
    }
}

/// What the others' files lie on.
pub struct Peer {
    mounted: PeerMounted,
    _scratch: TempDir,
}

enum PeerMounted {
    One(LoopMounted),
    Several(Striped),
}

impl Peer {
    fn set_up(len: u64, devices: usize) -> Result<Peer, Box<dyn Error>> {
        let scratch = tempfile::tempdir()?;
        let mounted = if devices == 1 {
            let below = scratch.path().join("ext4");
            write_whole(&below, len + SPARE)?;
            PeerMounted::One(LoopMounted::set_up(&below, Kind::Ext4)?)
        } else {
            // btrfs keeps more for itself than ext4 does.
            PeerMounted::Several(Striped::set_up(scratch.path(), devices, (len + 5 * SPARE) / devices as u64)?)
        };
        Ok(Peer { mounted, _scratch: scratch })
    }

    /// Where it is mounted.
    pub fn root(&self) -> &Path {
        match &self.mounted {
            PeerMounted::One(mounted) => &mounted.root,
            PeerMounted::Several(mounted) => &mounted.root,
        }
    }
}

/// A gpunvme volume, and ext4 or btrfs, each on so many loop devices with room for a file of `len`
/// bytes. None, said aloud, where the machine has no loop devices, or one of them cannot be made.
pub fn volume_and_peer(len: u64, devices: usize) -> Option<(Mounted, Peer)> {
    let volume = Image::on_block_devices("kernels-bench", devices, (len + SPARE) / devices as u64)?.mount();
    match Peer::set_up(len, devices) {
        Ok(peer) => Some((volume, peer)),
        Err(error) => {
            println!("\nnothing to compare with: {error}");
            None
        }
    }
}

/// Takes a file out of the page cache.
pub fn forget(path: &Path) {
    let file = fs::File::open(path).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}
