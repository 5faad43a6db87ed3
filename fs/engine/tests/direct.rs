//! Direct transfers mixed with ordinary writes, truncates and fallocate, compared byte by byte with
//! a model.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use gpunvme_abi::Segment;
use gpunvme_blockdev::{BlockDevice, Region, Request};
use gpunvme_blockdev_testing::MemoryDevice;
use gpunvme_engine::Filesystem;
use gpunvme_engine::data::Snapshot;
use gpunvme_engine::data::resize::Allocate;
use gpunvme_engine::error::FsError;
use gpunvme_engine::volume::{Context, NewNode, SetAttributes};
use gpunvme_gpupath::planner::{Bounds, Position};
use gpunvme_layout::Timestamp;

use crate::common::{ROOT, Random, assert_sound, difference, make, open};

const NOW: Timestamp = Timestamp { seconds: 9, nanoseconds: 0 };
const WHO: Context = Context { uid: 0, gid: 0, now: NOW };
const REACH: u64 = 400_000;

/// Segments that do not overlap, in the file or in the buffer; some aligned, some not.
fn segments(random: &mut Random) -> Vec<Segment> {
    let (mut file, mut buffer, mut found) = (random.below(REACH), 0, Vec::new());
    for _ in 0..=random.below(4) {
        let len = [random.below(30_000), 4096 * random.below(20), random.below(600)][random.below(3) as usize];
        if random.below(2) == 0 {
            file = file.next_multiple_of(4096);
            buffer = u64::next_multiple_of(buffer, 4096);
        }
        found.push(Segment { file_offset: file, buffer_offset: buffer, len });
        file += len + random.below(3) * random.below(20_000);
        buffer += len + random.below(2) * random.below(5000);
    }
    found
}

fn write(fs: &Arc<Filesystem>, ino: u64, segments: &[Segment], region: &Arc<Region>) -> Result<(), FsError> {
    fs.write_edges(ino, segments, region, NOW)?;
    let write = fs.wait(|| fs.plan_direct_write(ino, segments, region, NOW))?;
    let (sender, receiver) = channel();
    fs.submit_direct_write(write, move |result| sender.send(result).expect("the receiver waits"));
    receiver.recv().expect("a write is answered").expect("the device works");
    Ok(())
}

/// What was found out about the block with the end is not forgotten from one attempt to the next.
#[test]
fn a_direct_write_behind_an_end_within_a_block_ends_where_nobody_holds_the_file() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(32 << 20);
    make(&device);
    let fs = open(&device).expect("it can be opened");
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    let ino = fs.wait(|| fs.create(&WHO, ROOT, b"file", &new)).expect("there is room").ino;
    fs.wait(|| fs.write(ino, 0, &[7; 1000], NOW)).expect("there is room");
    fs.close().expect("nothing fails");
    drop(fs);
    let fs = open(&device).expect("it was closed");
    let region = Region::allocate(4096).expect("there is memory");
    let segments = [Segment { file_offset: 9 * 4096, buffer_offset: 0, len: 4096 }];
    let mut attempts = 0;
    let planned = fs.wait(|| {
        attempts += 1;
        assert!(attempts < 10, "it goes on for ever");
        fs.plan_direct_write(ino, &segments, &region, NOW)
    });
    drop(planned.expect("there is room"));
}

/// Snapshots of a file, which may be of any age, say where its bytes are, or that they are out of
/// date. Returns how many ranges were found.
fn check_snapshots(fs: &Arc<Filesystem>, snapshots: &[Snapshot], model: &[u8], random: &mut Random, when: &str) -> usize {
    let mut found = 0;
    let current: Vec<_> = snapshots.iter().filter(|snapshot| fs.is_current(snapshot)).collect();
    for snapshot in current {
        for _ in 0..4 {
            let (offset, len) = (random.below(REACH / 4096) * 4096, (random.below(8) + 1) * 4096);
            let _guard = fs.guard();
            let Some(place) = snapshot.find(offset..offset + len) else { continue };
            let region = Region::allocate(len as usize).expect("there is memory");
            fs.volume().io().run([Request::read(place, [region.span(0..len as usize)])]).expect("the device works");
            let mut bytes = vec![0; len as usize];
            region.read_at(0, &mut bytes).expect("it is ours");
            assert!(bytes == model[offset as usize..(offset + len) as usize], "{when}: {len} bytes at {offset}");
            found += 1;
        }
    }
    found
}

/// Writes a few blocks in place by a snapshot, which may be of any age, if it can be used. Returns
/// whether it was.
fn write_by_snapshot(fs: &Arc<Filesystem>, snapshot: &Snapshot, model: &mut [u8], random: &mut Random) -> bool {
    let (offset, len) = (random.below(REACH / 4096) * 4096, (random.below(8) + 1) * 4096);
    let _guard = fs.guard();
    let was_current = fs.is_current(snapshot);
    let Some(write) = fs.begin_in_place(snapshot, offset..offset + len, NOW) else { return false };
    assert!(was_current, "an old snapshot was used");
    let bytes = random.bytes(len as usize);
    let region = Region::allocate(bytes.len()).expect("there is memory");
    region.write_at(0, &bytes).expect("it is ours");
    let request = Request::write(write.device_offset, [region.span(0..bytes.len())], false);
    fs.volume().io().run([request]).expect("the device works");
    fs.end_in_place(write);
    model[offset as usize..(offset + len) as usize].copy_from_slice(&bytes);
    true
}

/// The bytes of each segment, as far as the file goes.
fn read(fs: &Arc<Filesystem>, ino: u64, segments: &[Segment], region: &Arc<Region>) {
    region.zero_at(0, region.len()).expect("it is ours");
    let read = fs
        .wait(|| fs.plan_direct_read(ino, segments, (Position::default(), Bounds::NONE), region))
        .expect("the file can be read");
    // Edges are whole blocks of the device here, of which a part counts.
    for edge in &read.plan.edges {
        let bytes = fs.read(ino, edge.file_offset, edge.len as usize).expect("the file can be read");
        region.write_at(edge.buffer_offset as usize, &bytes).expect("it is ours");
    }
    fs.volume().io().run(read.plan.requests).expect("the device works");
}

#[test]
fn an_append_begins_with_what_the_last_block_holds_by_then() {
    let set_size = |fs: &Arc<Filesystem>, ino, size| fs.wait(|| fs.set_size(&WHO, ino, size)).map(drop).expect("it is a file");
    let allocate = |fs: &Arc<Filesystem>, ino, what| fs.allocate(&WHO, ino, 0, 4096, what).expect("there is room");
    type Change<'a> = (&'a dyn Fn(&Arc<Filesystem>, u64), Vec<u8>);
    let shortened = [vec![1; 500], vec![0; 700]].concat();
    let changes: [Change; 6] = [
        (&|fs, ino| set_size(fs, ino, 500), vec![1; 500]),
        (&|fs, ino| [500, 1200].map(|size| set_size(fs, ino, size)).into_iter().collect(), shortened),
        (&|fs, ino| allocate(fs, ino, Allocate::Punch), vec![0; 1000]),
        (&|fs, ino| allocate(fs, ino, Allocate::Zero { grow: false }), vec![0; 1000]),
        (&|fs, ino| fs.wait(|| fs.write(ino, 0, &[3; 600], NOW)).expect("there is room"), [vec![3; 600], vec![1; 400]].concat()),
        (
            &|fs, ino| {
                let region = Region::allocate(4096).expect("memory");
                region.write_at(0, &[2; 4096]).expect("inside");
                write(fs, ino, &[Segment { file_offset: 0, buffer_offset: 0, len: 4096 }], &region).expect("there is room");
                set_size(fs, ino, 2000);
            },
            vec![2; 2000],
        ),
    ];
    for (number, (change, mut expected)) in changes.into_iter().enumerate() {
        let device: Arc<dyn BlockDevice> = MemoryDevice::new(24 << 20);
        make(&device);
        let fs = open(&device).expect("it was just made");
        let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
        let ino = fs.wait(|| fs.create(&WHO, ROOT, b"log", &new)).expect("there is room").ino;
        fs.hold_file(ino);
        fs.wait(|| fs.write(ino, 0, &[1; 1000], NOW)).expect("there is room");
        fs.sync_file(ino).expect("the device works");
        change(&fs, ino);
        fs.sync_file(ino).expect("the device works");
        fs.wait(|| fs.write(ino, expected.len() as u64, &[9; 300], NOW)).expect("there is room");
        fs.sync_file(ino).expect("the device works");
        expected.extend([9; 300]);
        assert!(fs.read(ino, 0, 10_000).expect("the file can be read") == expected, "change {number}");
        assert_sound(&fs, "after an append");
    }
}

#[test]
fn direct_transfers_ordinary_ones_and_snapshots_see_each_others_bytes() {
    let (mut found_by_snapshots, mut written_by_snapshots) = (0, 0);
    for seed in 0..20 {
        let device: Arc<dyn BlockDevice> = MemoryDevice::new(24 << 20);
        make(&device);
        let fs = open(&device).expect("a new volume can be opened");
        let mut random = Random(seed);
        let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
        let ino = fs.wait(|| fs.create(&WHO, ROOT, b"file", &new)).expect("there is room").ino;
        fs.hold_file(ino);
        let mut model: Vec<u8> = Vec::new();
        let region = Region::allocate(1 << 20).expect("there is memory");
        let mut snapshots = Vec::new();
        for step in 0..300 {
            match random.below(8) {
                0..3 => {
                    let segments = segments(&mut random);
                    let content = random.bytes(region.len());
                    region.write_at(0, &content).expect("it is ours");
                    write(&fs, ino, &segments, &region).expect("there is room");
                    for s in segments.iter().filter(|s| s.len > 0) {
                        let (from, end) = (s.file_offset as usize, (s.file_offset + s.len) as usize);
                        model.resize(model.len().max(end), 0);
                        model[from..end].copy_from_slice(&content[s.buffer_offset as usize..][..s.len as usize]);
                    }
                }
                3 => {
                    let (offset, len) = (random.below(REACH), random.below(20_000) as usize + 1);
                    let data = random.bytes(len);
                    fs.wait(|| fs.write(ino, offset, &data, NOW)).expect("there is room");
                    model.resize(model.len().max(offset as usize + len), 0);
                    model[offset as usize..][..len].copy_from_slice(&data);
                }
                4 => {
                    let size = random.below(REACH);
                    fs.wait(|| fs.set_size(&WHO, ino, size)).expect("there is room");
                    model.resize(size as usize, 0);
                }
                5 => {
                    let (offset, len) = (random.below(REACH), random.below(60_000) + 1);
                    let end = ((offset + len) as usize).min(model.len());
                    if random.below(2) == 0 {
                        fs.allocate(&WHO, ino, offset, len, Allocate::Punch).expect("it makes room");
                        model[(offset as usize).min(end)..end].fill(0);
                    } else {
                        fs.allocate(&WHO, ino, offset, len, Allocate::Reserve { grow: false }).expect("there is room");
                    }
                }
                6 => fs.sync_file(ino).expect("nothing fails"),
                _ => {
                    let segments = segments(&mut random);
                    read(&fs, ino, &segments, &region);
                    let mut found = vec![0; region.len()];
                    region.read_at(0, &mut found).expect("it is ours");
                    for s in &segments {
                        let end = ((s.file_offset + s.len) as usize).min(model.len());
                        let expected = &model[(s.file_offset as usize).min(end)..end];
                        let got = &found[s.buffer_offset as usize..][..expected.len()];
                        assert_eq!(
                            difference(got, expected),
                            None,
                            "seed {seed} step {step}: {s:?} of a file of {} bytes",
                            model.len()
                        );
                        if expected.len() < s.len as usize {
                            break;
                        }
                    }
                }
            }
            for snapshot in snapshots.iter().flat_map(|snapshot| [snapshot; 4]) {
                written_by_snapshots += usize::from(write_by_snapshot(&fs, snapshot, &mut model, &mut random));
            }
            let size = fs.wait(|| fs.attributes(ino)).expect("it is there").inode.size;
            assert_eq!(size, model.len() as u64, "seed {seed} step {step}");
            if random.below(3) == 0 {
                snapshots.extend(fs.wait(|| fs.snapshot(ino, 4096)).expect("it is a file"));
            }
            found_by_snapshots += check_snapshots(&fs, &snapshots, &model, &mut random, &format!("seed {seed} step {step}"));
        }
        drop(snapshots);
        assert!(fs.read(ino, 0, model.len() + 1).expect("it can be read") == model, "seed {seed}");
        fs.let_go_of_file(ino);
        fs.close().expect("nothing fails");
        let fs = open(&device).expect("it was closed cleanly");
        assert!(fs.read(ino, 0, model.len() + 1).expect("it can be read") == model, "seed {seed}, opened again");
        assert_sound(&fs, &format!("seed {seed}"));
    }
    assert!(found_by_snapshots > 500, "only {found_by_snapshots} ranges were found");
    assert!(written_by_snapshots > 100, "only {written_by_snapshots} ranges were written");
}

#[test]
fn a_snapshot_of_a_file_that_does_not_change_stays_current_and_has_no_more_extents_than_allowed() {
    let (fs, ino) = with_an_open_file();
    fs.wait(|| fs.write(ino, 0, &[7; 100_000], NOW)).expect("there is room");
    assert!(fs.wait(|| fs.snapshot(ino, 64)).expect("it is a file").is_none(), "the device does not have it yet");
    fs.sync_file(ino).expect("the device works");
    let snapshot = fs.wait(|| fs.snapshot(ino, 64)).expect("it is a file").expect("the device has all of it");
    for number in 0..100 {
        let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
        fs.wait(|| fs.create(&WHO, ROOT, format!("other{number}").as_bytes(), &new)).expect("there is room");
    }
    fs.commit().expect("the device works");
    fs.read(ino, 0, 50_000).expect("the file can be read");
    assert!(fs.is_current(&snapshot));
    assert!(snapshot.find(0..4096).is_some() && snapshot.find(90_112..94_208).is_some());
    assert_eq!((snapshot.find(98_304..102_400), snapshot.find(1 << 30..(1 << 30) + 4096)), (None, None), "beyond the end");
    assert!(fs.wait(|| fs.snapshot(ino, 0)).expect("it is a file").is_none());
    fs.wait(|| fs.set_size(&WHO, ino, 99_999)).expect("it is a file");
    assert!(!fs.is_current(&snapshot));
}

/// It waits for a write that a snapshot began as for any other: what would free its blocks, and
/// what makes its bytes durable. One that began while the file is quiesced, or while pages of its
/// blocks are in memory, would not be seen, so none begins.
#[test]
fn what_waits_for_writes_in_flight_waits_for_those_in_place() {
    let (fs, ino) = with_an_open_file();
    let snapshot = || fs.wait(|| fs.snapshot(ino, 64)).expect("it is a file").expect("the device has all of it");
    type Waiting = fn(&Arc<Filesystem>, u64);
    let waiting: [Waiting; 4] = [
        |fs, ino| fs.sync_file(ino).expect("the device works"),
        |fs, ino| fs.allocate(&WHO, ino, 4096, 8192, Allocate::Punch).expect("it makes room"),
        |fs, ino| _ = fs.wait(|| fs.set_size(&WHO, ino, 4096)).expect("it is a file"),
        |fs, ino| while fs.wait(|| fs.reap_step(ino)).expect("it is a file") {},
    ];
    for (number, waits) in waiting.into_iter().enumerate() {
        fs.wait(|| fs.write(ino, 0, &[7; 65_536], NOW)).expect("there is room");
        fs.sync_file(ino).expect("the device works");
        let of = snapshot();
        let guard = fs.guard();
        let write = fs.begin_in_place(&of, 4096..8192, NOW).expect("nothing is in its way");
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                waits(&fs, ino);
                is_over.store(true, Ordering::SeqCst);
            });
            std::thread::sleep(Duration::from_millis(50));
            assert!(!is_over.load(Ordering::SeqCst), "{number} did not wait");
            if number == 2 {
                assert!(fs.begin_in_place(&of, 0..4096, NOW).is_none(), "the wait would not end");
            }
            drop((write, guard));
        });
        assert!(is_over.load(Ordering::SeqCst));
        if number == 1 {
            assert!(fs.begin_in_place(&of, 4096..8192, NOW).is_none(), "its blocks are another's now");
            fs.wait(|| fs.write(ino, 4096, &[8; 4096], NOW)).expect("there is room");
            assert!(fs.begin_in_place(&of, 0..4096, NOW).is_none(), "an old snapshot");
        }
    }
}

#[test]
fn nothing_is_written_in_place_over_a_page_in_memory_or_an_end() {
    let (fs, ino) = with_an_open_file();
    fs.wait(|| fs.write(ino, 0, &[7; 10_000], NOW)).expect("there is room");
    fs.sync_file(ino).expect("the device works");
    let snapshot = fs.wait(|| fs.snapshot(ino, 64)).expect("it is a file").expect("the device has all of it");
    let _guard = fs.guard();
    assert!(fs.begin_in_place(&snapshot, 8192..12_288, NOW).is_none(), "it would make the file longer");
    assert!(fs.begin_in_place(&snapshot, 0..4096, NOW).is_some());
    fs.wait(|| fs.write(ino, 100, &[8; 100], NOW)).expect("there is room");
    assert!(fs.begin_in_place(&snapshot, 4096..8192, NOW).is_none(), "something is newer in memory");
}

/// A new volume, and a file on it that is open.
fn with_an_open_file() -> (Arc<Filesystem>, u64) {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(24 << 20);
    make(&device);
    let fs = open(&device).expect("a new volume can be opened");
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    let ino = fs.wait(|| fs.create(&WHO, ROOT, b"file", &new)).expect("there is room").ino;
    fs.hold_file(ino);
    (fs, ino)
}

#[test]
fn the_time_of_an_overwrite_shows_at_once_and_is_stored_while_the_file_is_open() {
    const LATER: Timestamp = Timestamp { seconds: 77, nanoseconds: 5 };
    let (fs, ino) = with_an_open_file();
    let region = Region::allocate(8192).expect("there is memory");
    let segment = Segment { file_offset: 0, buffer_offset: 0, len: 8192 };
    let write = |now| {
        let write = fs.wait(|| fs.plan_direct_write(ino, &[segment], &region, now)).expect("there is room");
        fs.submit_direct_write(write, |result| _ = result.expect("the device works"));
        fs.wait(|| fs.attributes(ino)).expect("it is there").inode.mtime
    };
    assert_eq!((write(NOW), write(LATER)), (NOW, LATER));
    fs.write_back().expect("the device works");
    fs.commit().expect("the device works");
    // As after a crash: what was closed properly would be stored in any case.
    let copy: Arc<dyn BlockDevice> = MemoryDevice::new(24 << 20);
    let bytes = Region::allocate(24 << 20).expect("there is memory");
    let whole = || vec![bytes.span(0..bytes.len())];
    fs.volume().io().run(vec![Request::read(0, whole())]).expect("the device works");
    gpunvme_blockdev::Io::inline(copy.clone()).and_then(|io| io.run(vec![Request::write(0, whole(), false)])).expect("it works");
    let recovered = open(&copy).expect("it recovers");
    assert_eq!(recovered.wait(|| recovered.attributes(ino)).expect("it is there").inode.mtime, LATER);
}

#[test]
fn a_write_in_place_tells_whether_somebody_may_keep_attributes_of_before() {
    let (fs, ino) = with_an_open_file();
    let region = Region::allocate(8192).expect("there is memory");
    let write = |blocks: u64| {
        let segment = Segment { file_offset: 0, buffer_offset: 0, len: blocks * 4096 };
        let write = fs.wait(|| fs.plan_direct_write(ino, &[segment], &region, NOW)).expect("there is room");
        let (sender, receiver) = channel();
        fs.submit_direct_write(write, move |result| sender.send(result).expect("the receiver waits"));
        let written = receiver.recv().expect("a write is answered").expect("the device works");
        (written.in_place, written.shown)
    };
    let on_the_way = Duration::from_millis(100);
    assert_eq!((write(1), write(1)), ((false, true), (true, true)), "a reader may have looked before it was in memory");
    let before = Instant::now() + on_the_way;
    fs.wait(|| fs.attributes(ino)).expect("it is there");
    fs.take_attributes_back(ino, before);
    assert_eq!(write(1), (true, true), "what was given just before may not have arrived");
    fs.take_attributes_back(ino, Instant::now() + on_the_way);
    assert_eq!((write(1), write(2)), ((true, false), (false, false)));
    fs.wait(|| fs.attributes(ino)).expect("it is there");
    assert_eq!(write(2), (true, true));
    fs.take_attributes_back(ino, Instant::now() + on_the_way);
    fs.wait(|| fs.set_attributes(&WHO, ino, &SetAttributes::default())).expect("it is there");
    assert_eq!(write(2), (true, true), "the answer to a change has them, too");
}

#[test]
fn times_do_not_step_back_when_writes_are_over_in_another_order_than_they_began() {
    const EARLIER: Timestamp = Timestamp { seconds: 50, nanoseconds: 0 };
    const LATER: Timestamp = Timestamp { seconds: 51, nanoseconds: 0 };
    let (fs, ino) = with_an_open_file();
    let region = Region::allocate(4096).expect("there is memory");
    let plan = |block: u64, now| {
        let segment = Segment { file_offset: block * 4096, buffer_offset: 0, len: 4096 };
        fs.wait(|| fs.plan_direct_write(ino, &[segment], &region, now)).expect("there is room")
    };
    let submit = |write| fs.submit_direct_write(write, |result| _ = result.expect("the device works"));
    let times = || {
        let inode = fs.wait(|| fs.attributes(ino)).expect("it is there").inode;
        (inode.mtime, inode.ctime)
    };
    // Blocks that are new, then such that are written over, then the write buffer.
    let (first, second) = (plan(0, EARLIER), plan(1, LATER));
    submit(second);
    submit(first);
    assert_eq!(times(), (LATER, LATER), "new blocks");
    submit(plan(0, EARLIER));
    assert_eq!(times(), (LATER, LATER), "in place");
    fs.sync_file(ino).expect("the device works");
    assert_eq!(times(), (LATER, LATER), "in place, stored");
    fs.wait(|| fs.write(ino, 0, b"a", LATER)).expect("there is room");
    fs.wait(|| fs.write(ino, 0, b"b", EARLIER)).expect("there is room");
    fs.wait(|| fs.set_size(&Context { now: EARLIER, ..WHO }, ino, 100)).expect("it makes room");
    assert_eq!(times(), (LATER, LATER), "the write buffer");
    let mode = SetAttributes { mode: Some(0o600), ..SetAttributes::default() };
    fs.wait(|| fs.set_attributes(&Context { now: EARLIER, ..WHO }, ino, &mode)).expect("it can be changed");
    assert_eq!(times(), (LATER, LATER), "a change of attributes");
    // A time that a program set ahead is replaced by the next write.
    let ahead = SetAttributes { mtime: Some(Timestamp { seconds: 1000, nanoseconds: 0 }), ..SetAttributes::default() };
    fs.wait(|| fs.set_attributes(&Context { now: LATER, ..WHO }, ino, &ahead)).expect("it can be changed");
    let last = Timestamp { seconds: 52, nanoseconds: 0 };
    fs.wait(|| fs.write(ino, 0, b"c", last)).expect("there is room");
    assert_eq!(times(), (last, last));
    // A clock that was wrong for a while does not keep the file's time where it was.
    for now in [Timestamp { seconds: 100_000, nanoseconds: 0 }, Timestamp { seconds: 60, nanoseconds: 0 }] {
        fs.wait(|| fs.write(ino, 0, b"d", now)).expect("there is room");
        fs.sync_file(ino).expect("the device works");
        assert_eq!(times().0, now);
    }
}
