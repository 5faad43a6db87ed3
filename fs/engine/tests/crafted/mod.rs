//! Images that an attacker made field by field: every invariant of docs/reference/layout.md broken
//! one by one, and any field of any structure given any value, with checksums that are right again.
//! Each image is mounted, walked, written to and mounted again; and checked, repaired and checked
//! once more, as it came and as the mount left it.
//!
//! Nothing may end the process, run for ever, or write what the program itself refuses later. A
//! repair mends everything, except where the superblock says that this program is not to touch the
//! volume.
//!
//! `HOSTILE_SECONDS` sets the time budget for single fields (8 by default), `HOSTILE_SEED` replays
//! one round, `CRAFTED_CASE` runs one invariant by its name.

mod fields;
mod invariants;

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use gpunvme_blockdev::{BlockDevice, Io};
use gpunvme_blockdev_testing::{Image, MemoryDevice};
use gpunvme_engine::VolumeOptions;
use gpunvme_engine::check::{CheckOptions, Fsck, Stop};
use gpunvme_engine::data::{Filesystem, Inline, Options};
use gpunvme_engine::error::FsError;
use gpunvme_engine::volume::{Context, NewNode};
use gpunvme_layout::geometry::CHUNK_BLOCKS;
use gpunvme_layout::group::{self, ChunkKind};
use gpunvme_layout::key::INO_NONE;
use gpunvme_layout::{Block, BlockKind, Corrupt, Key, Kind, Timestamp, node};
use gpunvme_programs::dump::{Names, dump};

use crate::attack::use_it;
use crate::common::{ROOT, Random, assert_sound, make, open};
use crate::surgeon::Surgeon;
use fields::Fields;
use invariants::INVARIANTS;

const NOW: Timestamp = Timestamp { seconds: 9, nanoseconds: 0 };
const WHO: Context = Context { uid: 0, gid: 0, now: NOW };
/// An image that takes longer than this has found something that does not end.
const HANGS: Duration = Duration::from_secs(120);

/// A small volume with every structure that there is.
struct Victim {
    /// Closed: everything is at home.
    closed: Image,
    /// The power went: a part of it is only in the journal.
    cut: Image,
}

fn victim() -> &'static Victim {
    static VICTIM: OnceLock<Victim> = OnceLock::new();
    VICTIM.get_or_init(|| {
        let memory = MemoryDevice::new(20 << 20);
        let device: Arc<dyn BlockDevice> = memory.clone();
        make(&device);
        let fs = open(&device).expect("a new volume can be opened");
        let create = |dir: u64, name: &str, mode: u32, target: &[u8]| {
            let new = NewNode { mode, umask: 0, rdev: 0, target };
            fs.wait(|| fs.create(&WHO, dir, name.as_bytes(), &new)).expect("there is room").ino
        };
        let write = |ino: u64, offset: u64, len: usize| {
            fs.wait(|| fs.write(ino, offset, &vec![7; len], NOW)).expect("there is room");
            fs.sync_file(ino).expect("nothing fails");
        };
        let dir = create(ROOT, "dir", 0o040755, &[]);
        let below = create(dir, "below", 0o040755, &[]);
        for name in ["one", "two"] {
            write(create(dir, name, 0o100644, &[]), 0, 30_000);
        }
        let pieces = create(dir, "pieces", 0o100644, &[]);
        (0..4).for_each(|at| write(pieces, at * 50_000, 9000));
        fs.allocate(&WHO, pieces, 300_000, 50_000, gpunvme_engine::data::resize::Allocate::Reserve { grow: true })
            .expect("there is room");
        create(dir, "short", 0o120777, b"somewhere");
        create(dir, "long", 0o120777, &[b'x'; 3000]);
        create(below, "pipe", 0o010644, &[]);
        create(below, "disk", 0o060644, &[]);
        for (name, len) in [("user.short", 20), ("user.long", 4000)] {
            fs.wait(|| fs.set_xattr(&WHO, pieces, name.as_bytes(), &vec![1; len], false, false)).expect("there is room");
        }
        // Enough of them for more than one leaf.
        for n in 0..40 {
            create(below, &format!("{n:0>100}"), 0o100644, &[]);
        }
        fs.wait(|| fs.link(&WHO, pieces, below, b"again")).expect("there is room");
        // A name that was removed while the file was open.
        let gone = create(dir, "gone", 0o100644, &[]);
        write(gone, 0, 9000);
        fs.wait(|| fs.unlink(&WHO, dir, b"gone")).expect("it is there");
        fs.commit().expect("nothing fails");
        fs.volume().checkpoint().expect("nothing fails");
        create(dir, "late", 0o100644, &[]);
        fs.commit().expect("nothing fails");
        write(create(dir, "latest", 0o100644, &[]), 0, 9000);
        let cut = memory.snapshot();
        fs.close().expect("nothing fails");
        Victim { closed: memory.snapshot(), cut }
    })
}

fn device(image: &Image) -> Arc<MemoryDevice> {
    MemoryDevice::from_image(image.clone())
}

/// Everything that a mount and a check do with an image. Returns whether it was mounted, and
/// whether it was mended.
fn ordeal(image: &Image, random: &mut Random) -> (bool, bool) {
    let used = device(image);
    let mounted = mount_and_use(&(used.clone() as Arc<dyn BlockDevice>), random);
    let mended = check_and_mend(&(device(image) as Arc<dyn BlockDevice>));
    // What it says of the image is not judged here.
    let _ = dump(&(device(image) as Arc<dyn BlockDevice>), Names::Replaced, &mut |_, _, _| {}, |_, _| Ok(()));
    if mounted {
        check_and_mend(&(device(&used.snapshot()) as Arc<dyn BlockDevice>));
    }
    (mounted, mended)
}

/// Mounts, walks and changes what is there. What was closed without an error can be mounted again.
fn mount_and_use(device: &Arc<dyn BlockDevice>, random: &mut Random) -> bool {
    let Ok(fs) = open(device) else { return false };
    walk(&fs);
    let closed = use_it(&fs, random);
    if closed.is_ok() && !fs.volume().is_read_only() {
        drop(fs);
        match open(device) {
            // Counts that were put where they end are at their end now.
            Ok(_) | Err(FsError::Corrupt(Corrupt::Field { what: "anchor counts more than there can have been", .. })) => {}
            Err(error) => panic!("it was mounted and closed, and is refused now: {error}"),
        }
    }
    true
}

/// Lists all directories that can be found, as `ls -l` does.
fn walk(fs: &Arc<Filesystem>) {
    let (mut dirs, mut seen) = (vec![ROOT], BTreeSet::from([ROOT]));
    while let Some(dir) = dirs.pop() {
        let mut cookie = 0;
        while let Ok(entries) = fs.wait(|| fs.read_dir(dir, cookie, 100))
            && let Some(last) = entries.last()
        {
            assert!(last.cookie > cookie, "directory {dir} does not end");
            cookie = last.cookie;
            let inos: Vec<u64> = entries.iter().map(|entry| entry.ino).collect();
            let _ = fs.all_attributes(&inos);
            dirs.extend(inos.into_iter().filter(|ino| seen.insert(*ino)));
        }
    }
}

/// Checks and repairs. Returns whether there is a volume that this program may touch.
fn check_and_mend(device: &Arc<dyn BlockDevice>) -> bool {
    let fsck = |read_only| {
        let options = CheckOptions { read_only, memory: 64 << 20, now: NOW, stop: Stop::default() };
        Fsck::open(Io::inline(device.clone()).expect("a queue"), options)
    };
    let mut first = match fsck(false) {
        Ok(fsck) => fsck,
        Err(FsError::Corrupt(Corrupt::Superblock(_))) => return false,
        Err(error) => panic!("a check says: {error}"),
    };
    let repaired = first.repair(&mut |_| true, &mut |_, _, _| ()).expect("the device works");
    assert_eq!(repaired.left.total(), 0, "not mended: {:#?}", repaired.left.list);
    first.close(true).expect("a mended volume can be closed");
    let second = fsck(true).expect("a mended volume can be opened");
    let left = second.check(&mut |_, _, _| ()).expect("the device works");
    assert_eq!(left.total(), 0, "found after the repair: {:#?}", left.list);
    second.close(false).expect("nothing is written");
    let fs = open(device).unwrap_or_else(|error| panic!("a mended volume can be mounted: {error}"));
    write_a_little(&fs);
    assert_sound(&fs, "mended");
    fs.close().expect("nothing fails");
    drop(open(device).expect("it was closed"));
    true
}

/// Room may be short on what came of a repair; nothing else may be wrong.
fn write_a_little(fs: &Arc<Filesystem>) {
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    let made = fs.wait(|| fs.create(&WHO, ROOT, b"made after the repair", &new)).and_then(|made| {
        fs.wait(|| fs.write(made.ino, 0, &[1; 20_000], NOW))?;
        fs.sync_file(made.ino)
    });
    assert!(matches!(made, Ok(()) | Err(FsError::NoSpace | FsError::Exists)), "{made:?}");
    fs.commit().expect("nothing fails");
}

/// Ends the process when the next image does not come in time: the process cannot end a single
/// thread that hangs.
struct Watchdog(Sender<String>);

impl Watchdog {
    fn new() -> Watchdog {
        let (sender, receiver) = channel::<String>();
        std::thread::spawn(move || {
            let mut what = String::new();
            loop {
                match receiver.recv_timeout(HANGS) {
                    Ok(next) => what = next,
                    Err(RecvTimeoutError::Disconnected) => return,
                    Err(RecvTimeoutError::Timeout) => {
                        eprintln!("does not end: {what}");
                        std::process::abort();
                    }
                }
            }
        });
        Watchdog(sender)
    }

    /// Begins with an image.
    fn next(&self, what: &str) {
        self.0.send(what.to_owned()).expect("it waits for more");
    }
}

#[test]
fn every_invariant_of_the_format_can_be_broken() {
    let only = std::env::var("CRAFTED_CASE").ok();
    let watchdog = Watchdog::new();
    let mut failed = Vec::new();
    for invariant in INVARIANTS.iter().filter(|invariant| only.as_ref().is_none_or(|only| invariant.name == only)) {
        watchdog.next(invariant.name);
        let run = || {
            let image = invariant.broken();
            let (_, mended) = ordeal(&image, &mut Random(1));
            assert_eq!(mended, !invariant.is_refused, "{}", invariant.name);
        };
        if catch_unwind(AssertUnwindSafe(run)).is_err() {
            failed.push(invariant.name);
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn a_volume_with_an_unknown_read_only_feature_can_be_read_and_is_neither_written_nor_checked() {
    let mut surgeon = Surgeon::new(victim().cut.clone());
    let copies = surgeon.geometry.superblocks();
    copies.into_iter().for_each(|address| surgeon.edit(address, |block| block.bytes_mut()[96] = 1 << 5));
    let device: Arc<dyn BlockDevice> = device(&surgeon.image);
    let refusal = |error: FsError| {
        let message = error.to_string();
        assert!(matches!(error, FsError::Corrupt(Corrupt::Superblock(_))) && message.contains("bit 5"), "{message}");
        message
    };
    assert!(refusal(open(&device).err().expect("it must not be written")).contains("-o ro"));
    let io = || Io::inline(device.clone()).expect("a device in memory");
    refusal(
        Fsck::open(io(), CheckOptions { read_only: true, memory: 64 << 20, now: NOW, stop: Stop::default() })
            .err()
            .expect("it cannot be checked"),
    );

    let options = Options { volume: VolumeOptions { read_only: true, cache: 1 << 20, discard: false }, write_buffer: 4 << 20 };
    let fs = Filesystem::open(io(), options, Arc::new(Inline)).expect("it can be read");
    let file = fs.wait(|| fs.lookup(ROOT, b"dir")).and_then(|dir| fs.wait(|| fs.lookup(dir.ino, b"one")));
    assert_eq!(file.expect("it is there").inode.size, 30_000);
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    assert!(matches!(fs.wait(|| fs.create(&WHO, ROOT, b"new", &new)), Err(FsError::ReadOnly)));
}

/// A search for orphans that begins anew after each node that it had to wait for would pass the
/// leaf millions of times.
#[test]
fn an_empty_leaf_that_many_nodes_share_is_damage_and_keeps_no_mount_busy() {
    let mut surgeon = Surgeon::new(victim().closed.clone());
    let (old, geometry) = (surgeon.state(), surgeon.geometry);
    assert_eq!(old.level, 1);
    let bitmap = surgeon.block(geometry.bitmap(0));
    let free = (0..geometry.group_chunks(0)).rfind(|chunk| group::kind(&bitmap, *chunk) == ChunkKind::Free).expect("it is small");
    let mut addresses = geometry.group_start(0) + free * CHUNK_BLOCKS..;
    let mut put = |level: u8, children: &mut dyn Iterator<Item = (Key, u64)>| {
        let address = addresses.next().expect("it has no end");
        let mut block = Block::new(BlockKind::Node, address, &surgeon.superblock.uuid);
        node::init(&mut block, level);
        children.zip(0..).for_each(|((key, child), slot)| node::inner_insert(&mut block, slot, key, child));
        block.seal(surgeon.block(old.root).sequence());
        surgeon.put(address, &block);
        address
    };
    let orphan = |number: usize| Key::new(INO_NONE, Kind::Orphan, number as u64);
    let leaf = put(0, &mut std::iter::empty());
    let inner: Vec<(Key, u64)> = (1..node::INNER_MAX)
        .map(|n| n * node::INNER_MAX)
        .map(|first| (orphan(first), put(1, &mut (first..first + node::INNER_MAX).map(|n| (orphan(n), leaf)))))
        .collect();
    let root = put(2, &mut inner.into_iter().chain([(Key::inode(ROOT), old.root)]));
    surgeon.edit_state(|state| (state.root, state.level) = (root, 2));
    let memory = device(&surgeon.image);
    let refused = open(&(memory.clone() as Arc<dyn BlockDevice>)).err().expect("it looks for orphans");
    assert!(refused.to_string().contains("node is empty"), "{refused}");
    assert!(memory.reads() < 50, "{} reads", memory.reads());
    assert!(check_and_mend(&(device(&surgeon.image) as Arc<dyn BlockDevice>)));
}

#[test]
fn any_field_may_have_any_value() {
    let number = |name: &str| std::env::var(name).ok().map(|v| v.parse::<u64>().expect("a number"));
    let (budget, seed) = (number("HOSTILE_SECONDS").unwrap_or(8), number("HOSTILE_SEED"));
    let deadline = Instant::now() + Duration::from_secs(budget);
    let images = [&victim().closed, &victim().cut].map(|image| (image, Fields::of(image)));
    let watchdog = Watchdog::new();
    let (mut tried, mut mounted, mut mended) = (0, 0, 0);
    for round in seed.unwrap_or(0).. {
        let mut random = Random(round);
        let (image, fields) = &images[random.below(2) as usize];
        let mut image = (*image).clone();
        let what: Vec<String> = (0..1 + random.below(4) / 3).map(|_| fields.change(&mut image, &mut random)).collect();
        let what = format!("HOSTILE_SEED={round}: {}", what.join("; "));
        // Printed by the harness when it fails, and only then.
        println!("{what}");
        watchdog.next(&what);
        let (was_mounted, was_mended) = ordeal(&image, &mut random);
        tried += 1;
        mounted += u32::from(was_mounted);
        mended += u32::from(was_mended);
        // However slow the machine is, some are tried.
        if seed.is_some() || (Instant::now() > deadline && tried >= 30) {
            break;
        }
    }
    println!("{tried} images, {mounted} of them mounted, {mended} of them mended");
    assert!(seed.is_some() || (mounted > 0 && mended > 0));
}
