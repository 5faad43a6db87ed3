//! Schedules in which operations overlap, one by one: what each of them must not break. The random
//! ones are in [`crate::crash`].

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::time::Duration;

use gpunvme_abi::Segment;
use gpunvme_blockdev::{BlockDevice, Region};
use gpunvme_blockdev_testing::{Faulty, MemoryDevice, On, Recorder, Rule};
use gpunvme_engine::data::direct::DirectWrite;
use gpunvme_engine::data::resize::Allocate;
use gpunvme_engine::data::{Filesystem, Settling};
use gpunvme_engine::error::{Attempt, Fail, FsError, Stall};
use gpunvme_engine::volume::{Context, NewNode, RenameMode};
use gpunvme_layout::Timestamp;

use crate::common::{ROOT, assert_sound, make, open, stepped_by};

const NOW: Timestamp = Timestamp { seconds: 1, nanoseconds: 0 };
const WHO: Context = Context { uid: 0, gid: 0, now: NOW };

/// Opens a volume whose writes complete only when a thread waits for them, the youngest first;
/// `meanwhile` runs before each.
fn stepped(device: &Arc<dyn BlockDevice>, meanwhile: impl Fn() + Send + Sync + 'static) -> Arc<Filesystem> {
    stepped_by(device, move |count| {
        meanwhile();
        count - 1
    })
}

/// A device that holds a fresh volume and records what is written to it.
fn recorder() -> Arc<Recorder> {
    let memory = MemoryDevice::new(32 << 20);
    let device: Arc<dyn BlockDevice> = memory.clone();
    make(&device);
    Recorder::new(memory.snapshot())
}

fn file(fs: &Arc<Filesystem>, name: &[u8]) -> u64 {
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    fs.wait(|| fs.create(&WHO, ROOT, name, &new)).expect("there is room").ino
}

#[test]
fn a_batch_that_overtakes_the_one_with_the_old_end_exposes_nothing_that_was_cut_off() {
    let recorder = recorder();
    let device: Arc<dyn BlockDevice> = recorder.clone();
    let fs = stepped(&device, || {});
    let ino = file(&fs, b"a");
    fs.hold_file(ino);
    fs.wait(|| fs.write(ino, 0, &[0xaa; 4096], NOW)).unwrap();
    fs.sync_file(ino).unwrap();
    fs.wait(|| fs.set_size(&WHO, ino, 100)).unwrap();
    fs.commit().unwrap();

    // One write is on its way, of the block with the end, and then one that goes on behind it.
    fs.wait(|| fs.write(ino, 100, &[1; 50], NOW)).unwrap();
    fs.write_back().unwrap();
    fs.wait(|| fs.write(ino, 150, &[2; 9000], NOW)).unwrap();
    fs.write_back().unwrap();
    // The second lands, if it can, and is committed; the first is lost.
    fs.volume().io().step();
    fs.commit().unwrap();
    let image = recorder.log().power_cuts().image(recorder.position(), |_, _| false);
    let fs = open(&(MemoryDevice::from_image(image) as Arc<dyn BlockDevice>)).unwrap();
    assert_sound(&fs, "after the cut");
    let found = fs.read(ino, 0, 10_000).unwrap();
    assert!(found[..100] == [0xaa; 100]);
    let stale = found[100..].iter().position(|byte| *byte == 0xaa);
    assert_eq!(stale, None, "of {} bytes, what was cut off is in the file again", found.len());
}

#[test]
fn a_lost_block_with_the_old_end_takes_what_waits_for_it_along_and_exposes_nothing() {
    let faulty = Faulty::new(MemoryDevice::new(32 << 20));
    let device: Arc<dyn BlockDevice> = faulty.clone();
    make(&device);
    let fs = stepped(&device, || {});
    let ino = file(&fs, b"a");
    fs.hold_file(ino);
    fs.wait(|| fs.write(ino, 0, &[0xaa; 4096], NOW)).unwrap();
    fs.sync_file(ino).unwrap();
    fs.wait(|| fs.set_size(&WHO, ino, 100)).unwrap();
    fs.commit().unwrap();

    let geometry = fs.volume().superblock().geometry();
    faulty.add(Rule::fail(On::Write, libc::EIO).within(geometry.data * 4096..geometry.data_end() * 4096).once());
    fs.wait(|| fs.write(ino, 100, &[1; 50], NOW)).unwrap();
    fs.write_back().unwrap();
    fs.wait(|| fs.write(ino, 150, &[2; 9000], NOW)).unwrap();
    // A newer content of the block with the end is there: it goes with the rest.
    assert_eq!(fs.sync_file(ino).unwrap_err().errno(), libc::EIO);
    assert!(fs.read(ino, 100, 50).unwrap() == [1; 50] && fs.read(ino, 150, 9000).unwrap() == [2; 9000]);
    fs.let_go_of_file(ino);

    fs.hold_file(ino);
    fs.wait(|| fs.set_size(&WHO, ino, 0)).unwrap();
    fs.wait(|| fs.write(ino, 0, &[0xaa; 4096], NOW)).unwrap();
    fs.sync_file(ino).unwrap();
    fs.wait(|| fs.set_size(&WHO, ino, 100)).unwrap();
    fs.commit().unwrap();
    faulty.add(Rule::fail(On::Write, libc::EIO).within(geometry.data * 4096..geometry.data_end() * 4096).once());
    fs.wait(|| fs.write(ino, 100, &[1; 3996], NOW)).unwrap();
    fs.write_back().unwrap();
    fs.wait(|| fs.write(ino, 4096, &[2; 9000], NOW)).unwrap();
    assert_eq!(fs.sync_file(ino).unwrap_err().errno(), libc::EIO);
    assert!(fs.read(ino, 0, 10_000).unwrap() == [0xaa; 100], "what was cut off is in the file again");
    fs.wait(|| fs.write(ino, 8192, &[3; 10], NOW)).unwrap();
    let _ = fs.sync_file(ino);
    fs.close().unwrap();
    let fs = open(&device).unwrap();
    let found = fs.read(ino, 0, 10_000).unwrap();
    assert!(found.len() == 8202 && found[..100] == [0xaa; 100] && found[100..8192].iter().all(|byte| *byte == 0));
    assert_sound(&fs, "after a lost end");
}

#[test]
fn a_flush_ends_however_much_others_write() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(32 << 20);
    make(&device);
    let fs: Arc<OnceLock<(Arc<Filesystem>, u64)>> = Arc::default();
    let waits = Arc::new(AtomicU32::new(0));
    let writer = {
        let (fs, waits) = (fs.clone(), waits.clone());
        move || {
            if let Some((fs, ino)) = fs.get() {
                let wait = waits.fetch_add(1, Ordering::Relaxed);
                assert!(wait < 100, "the flush goes on for as long as a caller writes");
                // The page that is being flushed, and another.
                let _ = fs.write(*ino, 0, &[wait as u8; 5000], NOW);
            }
        }
    };
    let opened = stepped(&device, writer);
    let ino = file(&opened, b"a");
    opened.hold_file(ino);
    opened.wait(|| opened.write(ino, 0, &[0xaa; 5000], NOW)).unwrap();
    assert!(fs.set((opened.clone(), ino)).is_ok());
    opened.sync_file(ino).unwrap();
    assert!(waits.load(Ordering::Relaxed) > 0, "a caller wrote meanwhile");
}

#[test]
fn a_long_truncation_stands_in_nobodys_way_and_is_over_before_the_file_grows() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(64 << 20);
    make(&device);
    let fs = open(&device).unwrap();
    let ino = file(&fs, b"a");
    for i in 0..3000 {
        fs.wait(|| fs.write(ino, i * 8192, &[0xaa; 4096], NOW)).unwrap();
    }
    fs.close().unwrap();

    // Opened anew, so that the truncation has to wait for the device.
    let shared: Arc<OnceLock<Arc<Filesystem>>> = Arc::default();
    let (looks, over) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
    let looker = {
        let (shared, looks, over) = (shared.clone(), looks.clone(), over.clone());
        move || {
            let Some(fs) = shared.get().cloned().filter(|_| !over.load(Ordering::Relaxed)) else { return };
            let looks = looks.clone();
            let (sender, receiver) = mpsc::channel();
            std::thread::spawn(move || {
                let size = fs.volume().wait(|| fs.attributes(ino)).unwrap().inode.size;
                let grew = fs.write(ino, 4096, &[1; 4096], NOW).is_ok();
                looks.fetch_add(u32::from(size == 0), Ordering::Relaxed);
                sender.send((size, grew)).unwrap();
            });
            let (size, grew) = receiver.recv_timeout(Duration::from_secs(20)).expect("no caller waits for a truncation");
            assert!(!(size == 0 && grew), "it grew over what was not freed yet");
        }
    };
    let fs = stepped(&device, looker);
    assert!(shared.set(fs.clone()).is_ok());
    fs.wait(|| fs.set_size(&WHO, ino, 0)).unwrap();
    over.store(true, Ordering::Relaxed);
    assert!(looks.load(Ordering::Relaxed) > 0, "a caller looked in between");
    fs.wait(|| fs.write(ino, 3000 * 8192, &[1; 100], NOW)).unwrap();
    fs.sync_file(ino).unwrap();
    assert!(fs.read(ino, 0, 3000 * 8192).unwrap().iter().all(|byte| *byte == 0), "it is a hole");
}

#[test]
fn what_a_long_punch_takes_away_does_not_come_back_around_a_few_bytes_that_are_written_meanwhile() {
    const EXTENTS: u64 = 3000;
    for what in [Allocate::Punch, Allocate::Zero { grow: false }] {
        let device: Arc<dyn BlockDevice> = MemoryDevice::new(64 << 20);
        make(&device);
        let fs = open(&device).unwrap();
        let ino = file(&fs, b"a");
        for i in 0..EXTENTS {
            fs.wait(|| fs.write(ino, i * 8192, &[0xaa; 4096], NOW)).unwrap();
        }
        fs.close().unwrap();

        // Opened anew, so that it has to wait for the device in between.
        let shared: Arc<OnceLock<Arc<Filesystem>>> = Arc::default();
        let (looks, written) = (AtomicBool::new(false), Arc::new(AtomicBool::new(false)));
        let last = (EXTENTS - 1) * 8192;
        let writer = {
            let (shared, written) = (shared.clone(), written.clone());
            move || {
                let Some(fs) = shared.get().filter(|_| !written.load(Ordering::Relaxed)) else { return };
                // The calls below may wait, and then run this closure again.
                if looks.swap(true, Ordering::Relaxed) {
                    return;
                }
                let is_cleared = |at| fs.read(ino, at, 1).unwrap() == [0];
                if is_cleared(0) && !is_cleared(last) {
                    let region = Region::allocate(4096).unwrap();
                    region.write_at(0, &[1; 100]).unwrap();
                    let edge = Segment { file_offset: last + 200, buffer_offset: 0, len: 100 };
                    fs.write_edges(ino, &[edge], &region, NOW).unwrap();
                    written.store(true, Ordering::Relaxed);
                }
                looks.store(false, Ordering::Relaxed);
            }
        };
        let fs = stepped(&device, writer);
        assert!(shared.set(fs.clone()).is_ok());
        fs.allocate(&WHO, ino, 0, EXTENTS * 8192, what).unwrap();
        assert!(written.load(Ordering::Relaxed), "{what:?}: a caller wrote in between");
        fs.sync_file(ino).unwrap();
        let found = fs.read(ino, 0, 1 << 30).unwrap();
        let stale = found.iter().position(|byte| *byte == 0xaa);
        assert_eq!(stale, None, "{what:?}: of {} bytes, this one came back", found.len());
        fs.close().unwrap();
        assert_sound(&fs, "after a punch");
    }
}

/// A stream of direct writes to the first two blocks of a file: another begins with each call,
/// until it is over.
struct DirectWrites {
    file: OnceLock<(Arc<Filesystem>, u64)>,
    memory: Arc<Region>,
    begun: AtomicU32,
    over: AtomicBool,
}

impl DirectWrites {
    fn new() -> Arc<DirectWrites> {
        let memory = Region::allocate(8192).unwrap();
        Arc::new(DirectWrites { file: OnceLock::new(), memory, begun: AtomicU32::new(0), over: AtomicBool::new(false) })
    }

    fn plan(&self) -> Attempt<DirectWrite> {
        let (fs, ino) = self.file.get().expect("it was said");
        fs.plan_direct_write(*ino, &[Segment { file_offset: 0, buffer_offset: 0, len: 8192 }], &self.memory, NOW)
    }

    /// Begins one, if it may. `what` waits for them meanwhile.
    fn begin(&self, what: &str) {
        let Some((fs, _)) = self.file.get().filter(|_| !self.over.load(Ordering::Relaxed)) else { return };
        assert!(self.begun.fetch_add(1, Ordering::Relaxed) < 100, "{what}: it waits for as long as others write");
        if let Ok(write) = self.plan() {
            fs.submit_direct_write(write, |result| _ = result.expect("the device works"));
        }
    }

    /// It is over, and so are its writes.
    fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
        let (fs, _) = self.file.get().expect("it was said");
        while fs.volume().io().step() {}
    }
}

#[test]
fn who_waits_for_direct_writes_to_end_is_not_kept_waiting_by_those_that_begin() {
    type Operation = fn(&Arc<Filesystem>, u64) -> Result<(), FsError>;
    let operations: [(&str, Operation); 4] = [
        ("truncation", |fs, ino| fs.wait(|| fs.set_size(&WHO, ino, 0)).map(drop)),
        ("rename", |fs, _| {
            let mut settling = Settling::default();
            fs.wait(|| fs.rename(&WHO, (ROOT, b"a"), (ROOT, b"b"), RenameMode::Replace, &mut settling)).map(drop)
        }),
        ("removal", |fs, ino| {
            fs.wait(|| fs.unlink(&WHO, ROOT, b"a"))?;
            while fs.wait(|| fs.reap_step(ino))? {}
            Ok(())
        }),
        ("write", |fs, ino| fs.wait(|| fs.write(ino, 100, &[3; 10], NOW))),
    ];
    for (what, operation) in operations {
        let device: Arc<dyn BlockDevice> = MemoryDevice::new(32 << 20);
        make(&device);
        let direct = DirectWrites::new();
        let writer = direct.clone();
        let fs = stepped_by(&device, move |_| {
            writer.begin(what);
            0
        });
        let ino = file(&fs, b"a");
        file(&fs, b"b");
        fs.hold_file(ino);
        fs.wait(|| fs.write(ino, 0, &[0xaa; 8192], NOW)).unwrap();
        fs.sync_file(ino).unwrap();
        assert!(direct.file.set((fs.clone(), ino)).is_ok());
        direct.begin(what);
        operation(&fs, ino).unwrap();
        assert!(direct.begun.load(Ordering::Relaxed) > 1, "{what}: others wrote meanwhile");
        direct.end();
        if what != "removal" {
            let held = direct.plan().err();
            assert!(!matches!(held, Some(Fail::Stall(Stall::Quiesced { .. }))), "{what}: they are let in again");
        }
    }
}

#[test]
fn what_is_appended_beside_direct_writes_that_make_the_file_longer_goes_behind_them() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(32 << 20);
    make(&device);
    let fs = stepped(&device, || {});
    let ino = file(&fs, b"a");
    fs.hold_file(ino);
    let region = Region::allocate(8192).unwrap();
    region.write_at(0, &[0xdd; 8192]).unwrap();
    let direct = |offset: u64, len: u64| {
        let segment = Segment { file_offset: offset, buffer_offset: 0, len };
        fs.write_edges(ino, &[segment], &region, NOW).unwrap();
        let write = fs.wait(|| fs.plan_direct_write(ino, &[segment], &region, NOW)).unwrap();
        fs.submit_direct_write(write, |result| _ = result.expect("the device works"));
    };
    let append = |offset, byte| fs.wait(|| fs.append(ino, offset, &[byte; 10], NOW)).unwrap();
    assert_eq!(append(0, 1), 0);
    fs.wait(|| fs.set_size(&WHO, ino, 4096)).unwrap();
    direct(4096, 8192);
    // Sent before the direct write was over, and then again with what the kernel believes since.
    assert_eq!([append(4096, 2), append(4106, 3)], [12_288, 12_298]);
    // As one that is not direct at all, because it is not aligned.
    direct(12_308, 100);
    assert_eq!(append(12_308, 4), 12_408);
    assert_eq!(append(12_418, 5), 12_418, "the kernel knows the end again");
    assert_eq!(append(4096, 6), 4096, "a place that no direct write made the file longer from is what it is");
    fs.sync_file(ino).unwrap();
    let mut expected = vec![0xdd; 12_428];
    expected[..4096].fill(0);
    for (offset, byte) in [(0, 1), (12_288, 2), (12_298, 3), (12_408, 4), (12_418, 5), (4096, 6)] {
        expected[offset..offset + 10].fill(byte);
    }
    assert!(fs.read(ino, 0, 20_000).unwrap() == expected);
}

#[test]
fn small_writes_read_their_block_once_whatever_is_written_to_others() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(32 << 20);
    make(&device);
    let direct = DirectWrites::new();
    let writer = direct.clone();
    // How many requests were on their way at each step.
    let steps: Arc<Mutex<Vec<usize>>> = Arc::default();
    let noted = steps.clone();
    let fs = stepped_by(&device, move |count| {
        noted.lock().unwrap().push(count);
        writer.begin("small write");
        0
    });
    let ino = file(&fs, b"a");
    fs.hold_file(ino);
    fs.wait(|| fs.write(ino, 0, &[0xaa; 65_536], NOW)).unwrap();
    fs.sync_file(ino).unwrap();
    assert!(direct.file.set((fs.clone(), ino)).is_ok());
    for block in 2..8 {
        direct.begin("small write");
        steps.lock().unwrap().clear();
        fs.wait(|| fs.write(ino, block * 4096 + 100, &[3; 10], NOW)).unwrap();
        let steps = steps.lock().unwrap();
        assert_eq!(steps.len(), steps[0], "block {block}: it was read more than once");
    }
    direct.end();
    let found = fs.read(ino, 0, 65_536).unwrap();
    assert!((2..8).all(|block| found[block * 4096 + 100..][..10] == [3; 10] && found[block * 4096 + 110] == 0xaa));
}

#[test]
fn a_small_write_is_not_kept_waiting_by_direct_writes_to_other_blocks() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(32 << 20);
    make(&device);
    let direct = DirectWrites::new();
    let writer = direct.clone();
    let fs = stepped_by(&device, move |_| {
        writer.begin("small write");
        0
    });
    let ino = file(&fs, b"a");
    fs.hold_file(ino);
    fs.wait(|| fs.write(ino, 0, &[0xaa; 16_384], NOW)).unwrap();
    fs.sync_file(ino).unwrap();
    assert!(direct.file.set((fs.clone(), ino)).is_ok());
    direct.begin("small write");
    fs.wait(|| fs.write(ino, 12_388, &[3; 10], NOW)).unwrap();
    direct.end();
    let found = fs.read(ino, 12_288, 4096).unwrap();
    assert!(found[..100] == [0xaa; 100] && found[100..110] == [3; 10] && found[110..] == [0xaa; 3986]);
}

#[test]
fn a_rename_waits_for_what_was_written_before_it_and_ends_however_much_others_write() {
    let recorder = recorder();
    let device: Arc<dyn BlockDevice> = recorder.clone();
    let shared: Arc<OnceLock<(Arc<Filesystem>, u64)>> = Arc::default();
    let waits = Arc::new(AtomicU32::new(0));
    let writer = {
        let (shared, waits) = (shared.clone(), waits.clone());
        move || {
            if let Some((fs, ino)) = shared.get() {
                let wait = waits.fetch_add(1, Ordering::Relaxed);
                assert!(wait < 100, "the rename waits for as long as others write");
                fs.wait(|| fs.write(*ino, 4096, &[1 + wait as u8; 4096], NOW)).unwrap();
            }
        }
    };
    let fs = stepped(&device, writer);
    let [new, old] = [b"new".as_slice(), b"old"].map(|name| file(&fs, name));
    fs.hold_file(new);
    for (ino, byte) in [(old, 0xbb), (new, 0xaa)] {
        fs.wait(|| fs.write(ino, 0, &[byte; 8192], NOW)).unwrap();
        if ino == old {
            fs.sync_file(old).unwrap();
        }
    }
    assert!(shared.set((fs.clone(), new)).is_ok());
    let mut settling = Settling::default();
    fs.wait(|| fs.rename(&WHO, (ROOT, b"new"), (ROOT, b"old"), RenameMode::Replace, &mut settling)).unwrap();
    assert!(waits.load(Ordering::Relaxed) > 0, "others wrote meanwhile");
    fs.commit().unwrap();
    let image = recorder.log().power_cuts().image(recorder.position(), |_, _| false);
    let fs = open(&(MemoryDevice::from_image(image) as Arc<dyn BlockDevice>)).unwrap();
    let found = fs.wait(|| fs.lookup(ROOT, b"old")).unwrap();
    assert_eq!(found.ino, new);
    assert!(fs.read(new, 0, 4096).unwrap() == [0xaa; 4096], "what was written before the rename is not there after a crash");
}

#[test]
fn a_rename_waits_for_the_writes_of_the_file_that_the_name_stands_for_now() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(32 << 20);
    make(&device);
    let shared: Arc<OnceLock<Arc<Filesystem>>> = Arc::default();
    let (swapped, looks) = (AtomicBool::new(false), AtomicU32::new(0));
    let swap = {
        let shared = shared.clone();
        move || {
            let Some(fs) = shared.get().filter(|_| !swapped.swap(true, Ordering::Relaxed)) else { return };
            // While the rename waits for the writes of one file, its name goes to another.
            fs.rename(&WHO, (ROOT, b"new"), (ROOT, b"third"), RenameMode::NoReplace, &mut Settling::default()).unwrap();
            fs.rename(&WHO, (ROOT, b"other"), (ROOT, b"new"), RenameMode::NoReplace, &mut Settling::default()).unwrap();
        }
    };
    // The writes of the file that the name stood for first come first.
    let fs = stepped_by(&device, move |_| {
        swap();
        0
    });
    let region = Region::allocate(4096).unwrap();
    let [new, other, _old] = [b"new".as_slice(), b"other", b"old"].map(|name| file(&fs, name));
    for ino in [new, other] {
        let segment = Segment { file_offset: 0, buffer_offset: 0, len: 4096 };
        let write = fs.wait(|| fs.plan_direct_write(ino, &[segment], &region, NOW)).unwrap();
        fs.submit_direct_write(write, |result| _ = result.expect("the device works"));
    }
    assert!(shared.set(fs.clone()).is_ok());
    fs.wait(|| {
        assert!(looks.fetch_add(1, Ordering::Relaxed) < 100, "it looks again and again, and waits for the wrong file");
        fs.rename(&WHO, (ROOT, b"new"), (ROOT, b"old"), RenameMode::Replace, &mut Settling::default())
    })
    .unwrap();
    assert_eq!(fs.wait(|| fs.lookup(ROOT, b"old")).unwrap().ino, other);
    assert_eq!(fs.wait(|| fs.lookup(ROOT, b"third")).unwrap().ino, new);
}

#[test]
fn parts_of_an_append_that_come_in_any_order_lie_over_nothing_that_a_direct_write_put_there() {
    const PART: u64 = 8192;
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        // A direct write begins where the kernel believes the end to be, before, among or after the
        // parts; or there is none.
        for (len, before) in
            [4096, PART, 2 * PART].into_iter().flat_map(|len| (0..3).map(move |at| (len, Some(at)))).chain([(0, None)])
        {
            let device: Arc<dyn BlockDevice> = MemoryDevice::new(32 << 20);
            make(&device);
            let fs = open(&device).unwrap();
            let ino = file(&fs, b"a");
            fs.hold_file(ino);
            fs.wait(|| fs.write(ino, 0, &[9; 4096], NOW)).unwrap();
            let region = Region::allocate(2 * PART as usize).unwrap();
            region.write_at(0, &[0xdd; 2 * PART as usize]).unwrap();
            let mut direct = None;
            let mut left: Vec<u64> = order.to_vec();
            let mut judged = 0;
            // Those that come early go to the end of the queue.
            while !left.is_empty() {
                if Some(judged) == before && direct.is_none() {
                    let at = fs.wait(|| fs.attributes(ino)).unwrap().inode.size;
                    let segment = Segment { file_offset: at, buffer_offset: 0, len };
                    let write = fs.wait(|| fs.plan_direct_write(ino, &[segment], &region, NOW)).unwrap();
                    fs.submit_direct_write(write, |result| _ = result.expect("the device works"));
                    direct = Some(at);
                }
                let part = left.remove(0);
                let bytes = [part as u8 + 1; PART as usize];
                if fs.wait(|| fs.attributes(ino)).unwrap().inode.size < 4096 + part * PART {
                    left.push(part);
                    continue;
                }
                match fs.append_part(ino, 4096 + part * PART, &bytes, NOW) {
                    Ok(_) => judged += 1,
                    Err(Fail::Stall(Stall::File { .. })) => {
                        fs.flush_file(ino).unwrap();
                        left.insert(0, part);
                    }
                    Err(fail) => panic!("{fail:?}"),
                }
            }
            fs.sync_file(ino).unwrap();
            let found = fs.read(ino, 0, 1 << 20).unwrap();
            let what = format!("{order:?}, a direct write of {len} at {direct:?} before part {before:?}");
            let count = |byte: u8| found.iter().filter(|b| **b == byte).count() as u64;
            assert_eq!([count(9), count(1), count(2), count(3), count(0xdd)], [4096, PART, PART, PART, len], "{what}");
            assert_eq!(found.len() as u64, 4096 + 3 * PART + len, "{what}");
            if direct.is_none() {
                assert!(
                    found[4096..].chunks(PART as usize).zip(1..).all(|(part, byte)| part.iter().all(|b| *b == byte)),
                    "{what}"
                );
            }
        }
    }
}

#[test]
fn only_where_a_direct_write_made_a_file_longer_a_part_of_an_append_goes_elsewhere() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(32 << 20);
    make(&device);
    let fs = open(&device).unwrap();
    let ino = file(&fs, b"a");
    fs.hold_file(ino);
    let region = Region::allocate(8192).unwrap();
    let segment = Segment { file_offset: 0, buffer_offset: 0, len: 8192 };
    let write = fs.wait(|| fs.plan_direct_write(ino, &[segment], &region, NOW)).unwrap();
    fs.submit_direct_write(write, |result| _ = result.expect("the device works"));
    let part = |offset: u64| {
        let place = fs.wait(|| fs.append_part(ino, offset, &[offset as u8; 4096], NOW)).unwrap();
        fs.flush_file(ino).unwrap();
        place
    };
    assert_eq!(part(8192), 8192, "the kernel knows of the direct write");
    assert_eq!(part(8192), 8192, "what is no append at all is written over what was appended (RWF_NOAPPEND)");
    assert_eq!(part(4096), 12288, "where the direct write's bytes are, the kernel may have been late");
    assert_eq!(part(8192), 16384, "and what it sent behind that goes behind it");
    assert_eq!(part(20480), 20480);
}
