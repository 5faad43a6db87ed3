//! Images that somebody made on purpose: metadata is changed at random and its checksums are put right, so that everything
//! behind them is reached. Whatever is in an image, opening, walking, reading, changing and checking it ends, with an error or
//! without one, and takes neither the process down nor its memory up.
//!
//! `HOSTILE_SECONDS` sets the time budget (15 by default), `HOSTILE_SEED` replays one seed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpunvme_blockdev::{BlockDevice, Image, MemoryDevice};
use gpunvme_fs::Filesystem;
use gpunvme_fs::check::check;
use gpunvme_fs::data::resize::Allocate;
use gpunvme_fs::error::FsError;
use gpunvme_fs::volume::{Context, NewNode, RenameMode, SetAttributes};
use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::{Block, Timestamp};

use crate::common::{Pair, ROOT, Random, make, open};

const NOW: Timestamp = Timestamp { seconds: 9, nanoseconds: 0 };
const WHO: Context = Context { uid: 0, gid: 0, now: NOW };

/// A volume with a bit of everything, some of it only in the journal.
fn victim(seed: u64) -> (Image, Vec<u64>) {
    let memory = MemoryDevice::new(24 << 20);
    let device: Arc<dyn BlockDevice> = memory.clone();
    make(&device);
    let mut random = Random(seed);
    let fs = open(&device).expect("a new volume can be opened");
    let mut pair = Pair::new(fs.clone());
    pair.reach = 300_000;
    for _ in 0..300 {
        pair.step(&mut random);
    }
    fs.flush_all().expect("nothing fails");
    if random.below(2) == 0 {
        fs.close().expect("nothing fails");
    } else {
        fs.commit().expect("nothing fails");
    }
    let image = memory.snapshot();
    let uuid = fs.volume().superblock().uuid;
    let blocks = 0..image.len() / BLOCK_SIZE as u64;
    let metadata = blocks.filter(|address| read(&image, *address).verify_any_kind(*address, &uuid).is_ok());
    let metadata = metadata.collect();
    (image, metadata)
}

fn read(image: &Image, address: u64) -> Block {
    let mut bytes = [0; BLOCK_SIZE];
    image.read_at(address * BLOCK_SIZE as u64, &mut bytes);
    Block::from_bytes(&bytes)
}

/// Changes a few bytes of one block and seals it again.
fn mutate(image: &mut Image, address: u64, random: &mut Random) {
    let mut block = read(image, address);
    let sequence = block.sequence();
    for _ in 0..=random.below(4) {
        // The head of a node matters most, and so do whole numbers.
        let at = 48 + if random.below(2) == 0 { random.below(200) } else { random.below(4040) } as usize;
        let value = match random.below(4) {
            0 => 0,
            1 => 0xff,
            2 => block.bytes()[at].wrapping_add(1),
            _ => random.below(256) as u8,
        };
        let len = [1, 2, 8][random.below(3) as usize].min(BLOCK_SIZE - at);
        block.bytes_mut()[at..at + len].fill(value);
    }
    if random.below(20) != 0 {
        block.seal(sequence);
    }
    image.write_at(address * BLOCK_SIZE as u64, block.bytes());
}

/// Does a bit of everything with whatever is there. Errors are fine.
fn use_it(fs: &Arc<Filesystem>, random: &mut Random) -> Result<(), FsError> {
    let mut dirs = vec![ROOT];
    let mut seen = Vec::new();
    while let Some(dir) = dirs.pop()
        && seen.len() < 500
    {
        let mut cookie = 0;
        for _ in 0..20 {
            let Ok(entries) = fs.wait(|| fs.read_dir(dir, cookie, 50)) else { break };
            let Some(last) = entries.last() else { break };
            cookie = last.cookie;
            for entry in entries {
                let _ = fs.wait(|| fs.lookup(dir, &entry.name));
                seen.push((dir, entry.ino, entry.name));
                if entry.cookie > 2 && random.below(3) == 0 {
                    dirs.push(entry.ino);
                }
            }
        }
    }
    for (dir, ino, name) in seen {
        let ino = if random.below(10) == 0 { random.below(400) } else { ino };
        let _ = fs.wait(|| fs.attributes(ino));
        let _ = fs.wait(|| fs.read_link(ino));
        let _ = fs.wait(|| fs.list_xattrs(ino));
        let _ = fs.wait(|| fs.get_xattr(ino, b"user.1"));
        let _ = fs.read(ino, random.below(200_000), 70_000);
        let _ = fs.wait(|| fs.resolve(ino, 0, u64::MAX, 100));
        let (offset, len) = (random.below(300_000), random.below(60_000));
        let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
        match random.below(10) {
            0 => drop(fs.wait(|| fs.write(ino, offset, &vec![3; len as usize], NOW))),
            1 => drop(fs.wait(|| fs.set_size(&WHO, ino, offset))),
            2 => drop(fs.allocate(&WHO, ino, offset, len + 1, Allocate::Punch)),
            3 => drop(fs.allocate(&WHO, ino, offset, len + 1, Allocate::Zero { grow: true })),
            4 => drop(fs.wait(|| fs.unlink(&WHO, dir, &name)).map(|gone| gone.map(|ino| reap(fs, ino)))),
            5 => drop(fs.wait(|| fs.rename(&WHO, (dir, &name), (ROOT, b"moved"), RenameMode::Exchange))),
            6 => drop(fs.wait(|| fs.create(&WHO, ino, b"new", &new))),
            7 => drop(fs.wait(|| fs.set_xattr(&WHO, ino, b"user.1", &vec![1; len as usize], false, false))),
            8 => drop(fs.wait(|| fs.set_attributes(&WHO, ino, &SetAttributes { mode: Some(0o600), ..Default::default() }))),
            _ => drop(fs.sync_file(ino)),
        }
    }
    let _ = fs.flush_all();
    let _ = fs.commit();
    let _ = fs.volume().checkpoint();
    let _ = check(fs.volume())?;
    fs.close()
}

fn reap(fs: &Arc<Filesystem>, ino: u64) {
    for _ in 0..100 {
        if !matches!(fs.wait(|| fs.reap_step(ino)), Ok(true)) {
            return;
        }
    }
}

#[test]
fn no_image_takes_the_process_down() {
    let number = |name: &str| std::env::var(name).ok().map(|v| v.parse::<u64>().expect("a number"));
    let deadline = Instant::now() + Duration::from_secs(number("HOSTILE_SECONDS").unwrap_or(15));
    let mut images = 0;
    let mut opened = 0;
    let victims: Vec<_> = (0..4).map(victim).collect();
    for seed in number("HOSTILE_SEED").unwrap_or(0).. {
        let mut random = Random(seed);
        let (image, metadata) = &victims[random.below(4) as usize];
        let mut image = image.clone();
        for _ in 0..=random.below(3) {
            mutate(&mut image, metadata[random.below(metadata.len() as u64) as usize], &mut random);
        }
        // Printed by the harness when it fails, and only then.
        println!("HOSTILE_SEED={seed}");
        let device: Arc<dyn BlockDevice> = MemoryDevice::from_image(image);
        if let Ok(fs) = open(&device) {
            opened += 1;
            let _ = use_it(&fs, &mut random);
        }
        images += 1;
        if Instant::now() > deadline || number("HOSTILE_SEED").is_some() {
            break;
        }
    }
    println!("{images} images, {opened} of them opened");
    assert!(number("HOSTILE_SEED").is_some() || (opened > 0 && opened < images));
}
