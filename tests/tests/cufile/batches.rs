//! Batches, of files and memory of any kind.

use std::collections::BTreeMap;
use std::fs;
use std::ptr;
use std::time::{Duration, Instant};

use gpunvme_tests::mounted::Mounted;
use gpunvme_tests::software_cuda::with_software_cuda;
use gpunvme_tests::{needs_mount, scratch_dir, tree};

use crate::files::open;
use crate::library::{BatchEvent, BatchRequest, CANCELED, COMPLETE, Device, OK, in_use, library, refused};

pub const LEN: usize = 5000;

pub struct Batch(usize);

impl Batch {
    pub fn new(capacity: u32) -> Batch {
        let mut number = 0;
        // SAFETY: there is room for the number.
        assert_eq!(unsafe { (library().cuFileBatchIOSetUp)(&mut number, capacity) }, OK);
        Batch(number)
    }

    pub fn submit(&self, requests: &[BatchRequest]) -> crate::library::Status {
        // SAFETY: the tests keep the memory.
        unsafe { (library().cuFileBatchIOSubmit)(self.0, requests.len() as u32, requests.as_ptr(), 0) }
    }

    /// Takes at most `most` that ended.
    pub fn take(&self, least: u32, most: u32, limit: Option<Duration>) -> Vec<BatchEvent> {
        let (mut events, mut count) = (vec![BatchEvent::default(); most as usize], most);
        let limit = limit.map(|limit| libc::timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() });
        let limit = limit.as_ref().map_or(ptr::null(), ptr::from_ref);
        // SAFETY: there is room for as many.
        let status = unsafe { (library().cuFileBatchIOGetStatus)(self.0, least, &mut count, events.as_mut_ptr(), limit) };
        assert_eq!(status, OK);
        events.truncate(count as usize);
        events
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        // SAFETY: it is a number to be looked up.
        unsafe { (library().cuFileBatchIODestroy)(self.0) }
    }
}

pub fn read(file: usize, memory: u64, file_offset: i64, memory_offset: i64, cookie: usize) -> BatchRequest {
    BatchRequest { mode: 1, memory, file_offset, memory_offset, size: LEN, file, opcode: 0, cookie }
}

#[test]
fn one_batch_reads_two_mounts_and_another_filesystem_into_both_kinds_of_memory() {
    needs_mount!();
    with_software_cuda("", || {
        let (one, two, elsewhere, cufile) = (Mounted::new(), Mounted::new(), scratch_dir(), in_use());
        let places = [one.path("file"), two.path("file"), elsewhere.path().join("file")];
        let data: Vec<_> = (0..3).map(|seed| tree::pattern(seed, 64 * LEN)).collect();
        let files: Vec<_> = places
            .iter()
            .zip(&data)
            .map(|(path, data)| {
                fs::write(path, data).unwrap();
                open(path)
            })
            .collect();
        let handles: Vec<_> = files.iter().map(|file| cufile.register(file).unwrap()).collect();
        let (device, host) = (Device::zeroed(60 * LEN), vec![0u8; 60 * LEN]);
        let batch = Batch::new(64);
        let requests: Vec<_> = (0..60)
            .map(|at| {
                let memory = if at % 2 == 0 { device.address() } else { host.as_ptr() as u64 };
                read(handles[at % 3], memory, (at * 1001) as i64, (at * LEN) as i64, at)
            })
            .collect();
        assert_eq!(batch.submit(&requests), OK);
        let mut ended = BTreeMap::new();
        while ended.len() < 60 {
            let events = batch.take(10, 16, None);
            assert!((1..=16).contains(&events.len()));
            ended.extend(events.into_iter().map(|event| (event.cookie, event)));
        }
        let memory = device.get(0, 60 * LEN);
        for at in 0..60 {
            assert_eq!(ended[&at], BatchEvent { cookie: at, status: COMPLETE, result: LEN as isize });
            let found = if at % 2 == 0 { &memory } else { &host };
            assert!(found[at * LEN..][..LEN] == data[at % 3][at * 1001..][..LEN], "request {at}");
        }
        // None is left: asking again waits for nothing.
        assert_eq!(batch.take(1, 16, None), []);
    });
}

#[test]
fn a_batch_writes_and_tells_errors_request_by_request() {
    needs_mount!();
    with_software_cuda("", || {
        let (volume, cufile) = (Mounted::new(), in_use());
        let file = open(&volume.path("file"));
        let handle = cufile.register(&file).unwrap();
        let data = tree::pattern(9, LEN);
        let device = Device::with(&data);
        let batch = Batch::new(4);
        let write = |memory, cookie| BatchRequest { opcode: 1, ..read(handle, memory, 0, 0, cookie) };
        // The second reaches beyond its memory.
        let beyond = BatchRequest { size: 1 << 20, ..write(device.address(), 2) };
        assert_eq!(batch.submit(&[write(device.address(), 1), beyond]), OK);
        let mut events = batch.take(2, 4, None);
        events.sort_by_key(|event| event.cookie);
        assert_eq!(
            events,
            [
                BatchEvent { cookie: 1, status: COMPLETE, result: LEN as isize },
                BatchEvent { cookie: 2, status: 0x40, result: -5014 },
            ]
        );
        assert!(fs::read(volume.path("file")).unwrap() == data);

        assert_eq!(batch.submit(&[read(0x123, device.address(), 0, 0, 1)]), refused(5027));
        assert_eq!(batch.submit(&[BatchRequest { opcode: 7, ..write(device.address(), 1) }]), refused(5022));
        assert_eq!(batch.submit(&[write(device.address(), 1); 5]), refused(5037));
        assert_eq!(batch.submit(&[]), refused(5022));
        // What was refused has left nothing behind.
        assert_eq!(batch.submit(&[write(device.address(), 1); 4]), OK);
        assert_eq!(batch.take(4, 4, None).len(), 4);
        // SAFETY: numbers that are no batch are refused.
        assert_eq!(unsafe { (cufile.cuFileBatchIOCancel)(77) }, refused(5022));
    });
}

#[test]
fn only_what_ended_is_written_to_the_callers_array() {
    needs_mount!();
    with_software_cuda("", || {
        let (volume, cufile) = (Mounted::new(), in_use());
        fs::write(volume.path("file"), tree::pattern(4, LEN)).unwrap();
        let file = open(&volume.path("file"));
        let handle = cufile.register(&file).unwrap();
        let (device, batch) = (Device::zeroed(LEN), Batch::new(8));
        assert_eq!(batch.submit(&[read(handle, device.address(), 0, 0, 1)]), OK);
        let untouched = BatchEvent { cookie: 99, status: 99, result: 99 };
        let (mut events, mut count) = ([untouched; 2], 8);
        // SAFETY: there is room for what can have ended.
        let status = unsafe { (cufile.cuFileBatchIOGetStatus)(batch.0, 1, &mut count, events.as_mut_ptr(), ptr::null()) };
        assert_eq!((status, count, events[0].cookie), (OK, 1, 1));
        assert_eq!(events[1], untouched);
    });
}

#[test]
fn waiting_ends_with_its_time_and_cancelled_requests_end() {
    needs_mount!();
    with_software_cuda("", || {
        const LONG: usize = 64 << 20;
        let (volume, cufile) = (Mounted::new(), in_use());
        let file = open(&volume.path("file"));
        file.set_len(LONG as u64).unwrap();
        fs::write(volume.path("file"), tree::pattern(3, LONG)).unwrap();
        let handle = cufile.register(&file).unwrap();
        let device = Device::zeroed(LONG);
        let batch = Batch::new(64);
        let requests: Vec<_> =
            (0..64).map(|at| BatchRequest { size: LONG, ..read(handle, device.address(), 0, 0, at) }).collect();
        let started = Instant::now();
        assert_eq!(batch.submit(&requests), OK);
        let early = batch.take(64, 64, Some(Duration::from_millis(30)));
        assert!(started.elapsed() < Duration::from_secs(5) && early.len() < 64, "{} in {:?}", early.len(), started.elapsed());
        // SAFETY: it is a batch.
        assert_eq!(unsafe { (cufile.cuFileBatchIOCancel)(batch.0) }, OK);
        let mut ends = early;
        while ends.len() < 64 {
            ends.extend(batch.take(1, 64, None));
        }
        let of = |status| ends.iter().filter(|event| event.status == status).count();
        assert_eq!(of(COMPLETE) + of(CANCELED), 64);
        assert!(of(CANCELED) > 0, "none of 4 GiB was called off");
    });
}

#[test]
fn a_thread_that_waits_for_fewer_is_not_kept_by_one_that_waits_for_more() {
    needs_mount!();
    // Each copy takes so many microseconds: the first request ends when both threads sleep.
    with_software_cuda("copy-takes=20000", || {
        const LONG: usize = 16 << 20;
        let (volume, cufile) = (Mounted::new(), in_use());
        fs::write(volume.path("file"), tree::pattern(4, LONG)).unwrap();
        let file = open(&volume.path("file"));
        let handle = cufile.register(&file).unwrap();
        let device = Device::zeroed(LONG);
        let batch = Batch::new(8);
        let requests: Vec<_> = (0..8).map(|at| BatchRequest { size: LONG, ..read(handle, device.address(), 0, 0, at) }).collect();
        assert_eq!(batch.submit(&requests), OK);
        std::thread::scope(|scope| {
            let waits = |least| {
                scope.spawn({
                    let batch = &batch;
                    move || (batch.take(least, least, None).len(), Instant::now())
                })
            };
            let fewer = waits(1);
            std::thread::sleep(Duration::from_millis(5));
            let more = waits(8);
            let [(one, first), (others, last)] = [fewer, more].map(|thread| thread.join().unwrap());
            assert_eq!((one, others), (1, 7));
            assert!(last - first > Duration::from_millis(20), "it waited for all: {:?}", last - first);
        });
    });
}

/// The memory of a batch that was destroyed is the application's again, also while another thread
/// closes the driver.
#[test]
fn a_batch_that_is_destroyed_while_the_driver_closes_writes_no_more() {
    needs_mount!();
    with_software_cuda("", || {
        let (volume, cufile) = (Mounted::new(), in_use());
        const SIZE: usize = 65536;
        fs::write(volume.path("file"), vec![7; 256 * SIZE]).unwrap();
        let file = open(&volume.path("file"));
        let (device, zeros) = (Device::zeroed(256 * SIZE), vec![0; 256 * SIZE]);
        for round in 0..20 {
            let handle = cufile.register(&file).unwrap();
            let batch = Batch::new(256);
            let requests: Vec<_> = (0..256)
                .map(|at| BatchRequest {
                    size: SIZE,
                    ..read(handle, device.address(), (at * SIZE) as i64, (at * SIZE) as i64, at)
                })
                .collect();
            assert_eq!(batch.submit(&requests), OK);
            std::thread::scope(|scope| {
                let closer = scope.spawn(|| cufile.close());
                std::thread::sleep(Duration::from_micros(50));
                drop(batch);
                device.put(&zeros);
                assert_eq!(closer.join().unwrap(), OK);
            });
            std::thread::sleep(Duration::from_millis(2));
            assert!(device.get(0, 256 * SIZE) == zeros, "round {round}: memory was written to after the end");
        }
        let _again = cufile.register(&file).unwrap();
    });
}
