//! Requests in the order of a stream.

use std::fs::{self, OpenOptions};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{ptr, thread};

use cudarc::driver::sys;
use gpunvme_tests::cuda::{Pinned, every_kind, mapped, own_stream};
use gpunvme_tests::mounted::Mounted;
use gpunvme_tests::random::Random;
use gpunvme_tests::software_cuda::with_software_cuda;
use gpunvme_tests::{needs_mount, tree};

use crate::files::open;
use crate::library::{Device, OK, gpu, in_use, library, refused};

const LEN: usize = (2 << 20) + 4321;

/// What a request points to, for as long as the stream needs it.
pub struct Numbers {
    size: usize,
    pub file_offset: i64,
    memory_offset: i64,
    pub done: isize,
}

impl Numbers {
    pub fn new(size: usize, file_offset: i64, memory_offset: i64) -> Box<Numbers> {
        Box::new(Numbers { size, file_offset, memory_offset, done: -77 })
    }
}

pub fn read(handle: usize, memory: u64, numbers: &mut Numbers, stream: usize) -> crate::library::Status {
    let Numbers { size, file_offset, memory_offset, done } = numbers;
    // SAFETY: the tests keep all of it until the stream has passed.
    unsafe { (library().cuFileReadAsync)(handle, memory, size, file_offset, memory_offset, done, stream) }
}

pub fn write(handle: usize, memory: u64, numbers: &mut Numbers, stream: usize) -> crate::library::Status {
    let Numbers { size, file_offset, memory_offset, done } = numbers;
    // SAFETY: as above.
    unsafe { (library().cuFileWriteAsync)(handle, memory, size, file_offset, memory_offset, done, stream) }
}

pub fn wait(stream: usize) {
    let _entered = gpu().enter().unwrap();
    // SAFETY: it is a stream of the test's.
    assert_eq!(unsafe { sys::cuStreamSynchronize(stream as sys::CUstream) } as u32, 0);
}

/// A word that holds a stream up until it is set.
pub struct Gate {
    word: Pinned,
}

impl Gate {
    pub fn before(stream: usize) -> Gate {
        let word = Pinned::new(gpu(), 4096);
        word.word(0).store(0, std::sync::atomic::Ordering::SeqCst);
        let _entered = gpu().enter().unwrap();
        let mut address = 0;
        // SAFETY: the word stays until the stream has passed it.
        unsafe {
            sys::cuMemHostGetDevicePointer_v2(&mut address, word.address() as *mut _, 0).result().unwrap();
            sys::cuStreamWaitValue32_v2(stream as sys::CUstream, address, 1, 0).result().unwrap();
        }
        Gate { word }
    }

    pub fn open(&self) {
        self.word.word(0).store(1, std::sync::atomic::Ordering::SeqCst);
    }
}

#[test]
fn results_are_there_when_the_stream_has_passed() {
    needs_mount!();
    with_software_cuda("", || {
        let (volume, cufile) = (Mounted::new(), in_use());
        let data = tree::pattern(1, LEN);
        fs::write(volume.path("from"), &data).unwrap();
        let (from, to) = (open(&volume.path("from")), open(&volume.path("to")));
        let (from, to) = (cufile.register(&from).unwrap(), cufile.register(&to).unwrap());
        let device = Device::zeroed(LEN + 100);
        let stream = own_stream(gpu());
        for flags in [0, 1, 2, 4, 7, 8, 15] {
            // SAFETY: it is a stream of the test's.
            assert_eq!(unsafe { (cufile.cuFileStreamRegister)(stream, flags) }, OK);
            let mut reads = Numbers::new(LEN, 0, 13);
            let mut writes = Numbers::new(LEN - 5, 5, 18);
            let mut past = Numbers::new(100, LEN as i64 - 10, 0);
            assert_eq!(read(from, device.address(), &mut reads, stream), OK);
            assert_eq!(write(to, device.address(), &mut writes, stream), OK);
            assert_eq!(read(from, device.address(), &mut past, stream), OK);
            wait(stream);
            assert_eq!((reads.done, writes.done, past.done), (LEN as isize, LEN as isize - 5, 10));
            assert!(device.get(13, LEN) == data);
            assert!(fs::read(volume.path("to")).unwrap()[5..] == data[5..]);
            // SAFETY: as above.
            assert_eq!(unsafe { (cufile.cuFileStreamDeregister)(stream) }, OK);
        }
        // SAFETY: as above.
        assert_eq!(unsafe { (cufile.cuFileStreamRegister)(stream, 16) }, refused(5022));
    });
}

#[test]
fn numbers_may_change_until_the_stream_comes_to_them() {
    needs_mount!();
    with_software_cuda("", || {
        let (volume, cufile) = (Mounted::new(), in_use());
        let data = tree::pattern(2, LEN);
        fs::write(volume.path("file"), &data).unwrap();
        let file = open(&volume.path("file"));
        let handle = cufile.register(&file).unwrap();
        let device = Device::zeroed(1 << 20);
        let stream = own_stream(gpu());
        // A file offset is followed by whole blocks. By less it is refused in the result, as are
        // other numbers.
        type Change = (fn(&mut Numbers), isize);
        let changes: [Change; 5] = [
            (|numbers| numbers.file_offset = 3 * 4096 + 17, 1 << 20),
            (|numbers| numbers.file_offset = 4097 + 17, -5038),
            (|numbers| numbers.file_offset = -4096, -5022),
            (|numbers| numbers.size = 4096, -5038),
            (|numbers| numbers.memory_offset = 8, -5038),
        ];
        for (change, expected) in changes {
            device.put(&vec![0x11; 1 << 20]);
            let gate = Gate::before(stream);
            let mut numbers = Numbers::new(1 << 20, 17, 0);
            assert_eq!(read(handle, device.address(), &mut numbers, stream), OK);
            change(&mut numbers);
            assert_eq!(numbers.done, -77, "nothing is done before the stream comes to it");
            gate.open();
            wait(stream);
            assert_eq!(numbers.done, expected);
            // Nothing of what was read before.
            let bytes = if expected > 0 { data[3 * 4096 + 17..][..1 << 20].to_vec() } else { vec![0; 1 << 20] };
            assert!(device.get(0, 1 << 20) == bytes, "the memory of a request that ended with {expected}");
        }
        // A stream that was registered as one whose numbers are fixed is not asked again.
        // SAFETY: it is a stream of the test's.
        assert_eq!(unsafe { (cufile.cuFileStreamRegister)(stream, 7) }, OK);
        let gate = Gate::before(stream);
        let mut numbers = Numbers::new(4096, 17, 0);
        assert_eq!(read(handle, device.address(), &mut numbers, stream), OK);
        (numbers.size, numbers.file_offset, numbers.memory_offset) = (1, -1, -1);
        gate.open();
        wait(stream);
        assert_eq!(numbers.done, 4096);
        assert!(device.get(0, 4096) == data[17..][..4096]);
    });
}

/// The application sets them later: at the call they are whatever its variables had.
#[test]
fn offsets_of_a_registered_stream_need_be_no_places_before_it_comes_to_them() {
    needs_mount!();
    with_software_cuda("", || {
        const ROOM: usize = 4 << 20;
        const SIZE: usize = 100_000;
        let (volume, cufile) = (Mounted::new(), in_use());
        let data = tree::pattern(7, LEN);
        fs::write(volume.path("file"), &data).unwrap();
        let file = open(&volume.path("file"));
        let handle = cufile.register(&file).unwrap();
        let device = Device::zeroed(ROOM);
        let nowhere = [(-1, 0), (0, -1), (0, ROOM as i64 - 1), (0, ROOM as i64), (0, 1 << 40), (i64::MIN, i64::MAX)];
        for (at_call, flags) in nowhere.into_iter().flat_map(|at_call| [0, 4].map(|flags| (at_call, flags))) {
            let stream = own_stream(gpu());
            // SAFETY: it is a stream of the test's.
            assert_eq!(unsafe { (cufile.cuFileStreamRegister)(stream, flags) }, OK);
            for (file_offset, memory_offset) in [(17, 4321), (4096, (ROOM - SIZE) as i64)] {
                device.put(&vec![0; ROOM]);
                let gate = Gate::before(stream);
                let mut numbers = Numbers::new(SIZE, at_call.0, at_call.1);
                // Were it to wait for the stream, this call would not return.
                assert_eq!(read(handle, device.address(), &mut numbers, stream), OK, "{at_call:?}");
                (numbers.file_offset, numbers.memory_offset) = (file_offset, memory_offset);
                gate.open();
                wait(stream);
                assert_eq!(result_of(&numbers), SIZE as isize, "{at_call:?}, flags {flags}");
                assert!(device.get(memory_offset as usize, SIZE) == data[file_offset as usize..][..SIZE], "{at_call:?}");
            }
            // Offsets that are no places then either are refused, in the result.
            let mut numbers = Numbers::new(SIZE, at_call.0, at_call.1);
            assert_eq!(read(handle, device.address(), &mut numbers, stream), OK);
            wait(stream);
            let expected = if at_call.0.min(at_call.1) < 0 { -5022 } else { -5014 };
            assert_eq!(result_of(&numbers), expected, "{at_call:?}");
        }
        // What is fixed is no place ever; and a stream that was not registered is not asked again.
        let past = (0, ROOM as i64);
        for (flags, at_call, status) in
            [(Some(2), (-1, 0), 5022), (Some(1), (0, -1), 5022), (Some(1), past, 5014), (None, (-1, 0), 5022), (None, past, 5014)]
        {
            let stream = own_stream(gpu());
            if let Some(flags) = flags {
                // SAFETY: it is a stream of the test's.
                assert_eq!(unsafe { (cufile.cuFileStreamRegister)(stream, flags) }, OK);
            }
            let mut numbers = Numbers::new(SIZE, at_call.0, at_call.1);
            assert_eq!(read(handle, device.address(), &mut numbers, stream), refused(status), "{flags:?} {at_call:?}");
        }
    });
}

#[test]
fn what_cannot_be_done_is_refused_and_no_stream_hangs() {
    needs_mount!();
    with_software_cuda("", || {
        let (volume, cufile) = (Mounted::new(), in_use());
        fs::write(volume.path("file"), tree::pattern(3, LEN)).unwrap();
        let only = OpenOptions::new().write(true).open(volume.path("file")).unwrap();
        let write_only = cufile.register(&only).unwrap();
        let device = Device::zeroed(4096);
        let stream = own_stream(gpu());
        let mut numbers = Numbers::new(4096, 0, 0);
        assert_eq!(read(write_only, device.address(), &mut numbers, stream), refused(5019));
        assert_eq!(read(0x99, device.address(), &mut numbers, stream), refused(5027));
        let Numbers { size, file_offset, memory_offset, .. } = &mut *numbers;
        // SAFETY: what is NULL is refused.
        let null = unsafe {
            (cufile.cuFileReadAsync)(write_only, device.address(), size, file_offset, memory_offset, ptr::null_mut(), stream)
        };
        assert_eq!(null, refused(5022));
        // Ordinary memory: the call waits for the stream.
        let file = open(&volume.path("file"));
        let handle = cufile.register(&file).unwrap();
        let host = vec![0u8; 4096];
        assert_eq!(read(handle, host.as_ptr() as u64, &mut numbers, stream), OK);
        assert_eq!(numbers.done, 4096);
        assert!(host == tree::pattern(3, LEN)[..4096]);
        wait(stream);
    });
}

/// As with other requests: none is begun and forgotten, and no memory is written to afterwards.
#[test]
fn closing_waits_for_requests_that_streams_have_not_come_to() {
    needs_mount!();
    with_software_cuda("", || {
        let (volume, cufile) = (Mounted::new(), in_use());
        let data = tree::pattern(4, LEN);
        fs::write(volume.path("from"), &data).unwrap();
        let (from_file, to_file) = (open(&volume.path("from")), open(&volume.path("to")));
        let device = Device::zeroed(LEN);
        for round in 0..3 {
            let (from, to) = (cufile.register(&from_file).unwrap(), cufile.register(&to_file).unwrap());
            let stream = own_stream(gpu());
            // SAFETY: it is a stream of the test's.
            assert_eq!(unsafe { (cufile.cuFileStreamRegister)(stream, 7 * (round % 2)) }, OK);
            let gate = Gate::before(stream);
            let (mut reads, mut writes) = (Numbers::new(LEN, 0, 0), Numbers::new(LEN, 0, 0));
            assert_eq!(read(from, device.address(), &mut reads, stream), OK);
            assert_eq!(write(to, device.address(), &mut writes, stream), OK);
            // A handle that is given up serves what was begun with it.
            cufile.deregister(from);
            let closed = AtomicBool::new(false);
            thread::scope(|scope| {
                let closer = scope.spawn(|| {
                    let status = cufile.close();
                    closed.store(true, Ordering::SeqCst);
                    status
                });
                // No request is begun any more while it closes. Before, one of no bytes is done at
                // once.
                let late = || read(to, device.address(), &mut Numbers::new(0, 0, 0), stream);
                while late() != refused(5001) {
                    thread::yield_now();
                }
                thread::sleep(Duration::from_millis(50));
                assert!(
                    !closed.load(Ordering::SeqCst) && result_of(&reads) == -77,
                    "round {round}: it closed before the stream came"
                );
                gate.open();
                assert_eq!(closer.join().unwrap(), OK);
            });
            // All has its result when the driver is closed, though no thread waited for the stream.
            assert_eq!((result_of(&reads), result_of(&writes)), (LEN as isize, LEN as isize), "round {round}");
            wait(stream);
            assert!(device.get(0, LEN) == data && fs::read(volume.path("to")).unwrap() == data, "round {round}");
            device.put(&vec![0; LEN]);
            to_file.set_len(0).unwrap();
        }
    });
}

/// A result that another thread stores.
fn result_of(numbers: &Numbers) -> isize {
    // SAFETY: it is a number of the test's.
    unsafe { (&raw const numbers.done).read_volatile() }
}

/// The numbers of a request, by value: size, place in the file, place in memory.
type Values = (usize, i64, i64);

/// Whatever changes between the call and the stream, and whatever the stream's flags say is fixed:
/// what is done is what the numbers say then, and nothing else is touched.
#[test]
fn a_stream_that_was_registered_reads_all_numbers_when_it_comes_to_them() {
    needs_mount!();
    with_software_cuda("", || {
        const ROOM: usize = 4 << 20;
        const FILE: usize = 3 << 20;
        let (volume, cufile) = (Mounted::new(), in_use());
        let path = volume.path("file");
        let mut model = tree::pattern(5, FILE);
        fs::write(&path, &model).unwrap();
        let file = open(&path);
        let handle = cufile.register(&file).unwrap();
        let (mut random, copies) = (Random(16), gpu().stream().unwrap());
        let mut pinned = Pinned::new(gpu(), ROOM);
        let mut refused = 0;
        // Reads and writes take turns, and so each with all flags.
        let mut rounds = [0, 1, 2, 4, 3, 5, 6, 8, 7].into_iter().cycle().enumerate();
        for memory in every_kind(gpu(), ROOM) {
            for (round, flags) in rounds.by_ref().take(6) {
                let stream = own_stream(gpu());
                // SAFETY: it is a stream of the test's.
                assert_eq!(unsafe { (cufile.cuFileStreamRegister)(stream, flags) }, OK);
                let values = |random: &mut Random, most: usize| -> Values {
                    // Often few bytes, and often whole blocks.
                    let unit = [1, 512, 4096][random.below(3) as usize];
                    let size = random.below((most / unit) as u64 + 1) as usize * unit;
                    let inside = random.below(((ROOM - size) / unit) as u64 + 1) as usize * unit;
                    (size, (random.below((FILE / unit) as u64) as usize * unit) as i64, inside as i64)
                };
                let most = values(&mut random, [5000, 700_000, 3 << 20][round % 3]);
                let (size, offset, inside) = values(&mut random, most.0);
                let fixed = |flag| flags & flag != 0;
                let inside = if fixed(1) { most.2 } else { inside.min((ROOM - most.0) as i64) };
                let now = (if fixed(4) { most.0 } else { size }, if fixed(2) { most.1 } else { offset }, inside);
                let what = format!("{}, flags {flags}, of {most:?} {now:?}", memory.kind);

                let before = tree::pattern(round as u64, ROOM);
                pinned.put(&copies, memory.address(), &before);
                let gate = Gate::before(stream);
                let mut numbers = Numbers::new(most.0, most.1, most.2);
                let writes = round % 2 == 1;
                let begin = if writes { write } else { read };
                assert_eq!(begin(handle, memory.address(), &mut numbers, stream), OK, "{what}");
                // What is fixed is not looked at again.
                (numbers.size, numbers.file_offset, numbers.memory_offset) =
                    (if fixed(4) { 1 } else { now.0 }, if fixed(2) { -1 } else { now.1 }, if fixed(1) { -1 } else { now.2 });
                gate.open();
                wait(stream);
                let done = result_of(&numbers);

                // Only allocations that the most of it lay in.
                let pieces = |(len, _, at): Values| {
                    let range = memory.address() + at as u64..memory.address() + at as u64 + len as u64;
                    let overlaps = move |(base, len): &(u64, u64)| *base < range.end && base + len > range.start;
                    memory.pieces.iter().copied().filter(overlaps).collect::<Vec<_>>()
                };
                let (len, at, inside) = (now.0, now.1 as usize, now.2 as usize);
                let is_outside = most.0 > 0 && pieces(now).iter().any(|piece| !pieces(most).contains(piece));
                let mut expected = before;
                // Kernels do not copy it: pages would follow them.
                let is_shift = (now.0, now.2) == (most.0, most.2) && (now.1 - most.1) % 4096 == 0;
                if memory.kind == "cuMemAllocManaged" && most.0 > 0 && !is_shift {
                    assert_eq!(done, -5038, "{what}");
                    assert!(fs::read(&path).unwrap() == model, "file: {what}");
                    continue;
                }
                if is_outside {
                    refused += 1;
                    assert_eq!(done, -5014, "{what}");
                } else if most.0 == 0 {
                    assert_eq!(done, 0, "{what}");
                } else if writes {
                    assert_eq!(done, len as isize, "{what}");
                    model.resize(model.len().max(at + len), 0);
                    model[at..at + len].copy_from_slice(&expected[inside..inside + len]);
                } else {
                    let there = len.min(model.len() - at.min(model.len()));
                    assert_eq!(done, there as isize, "{what}");
                    expected[inside..inside + there].copy_from_slice(&model[at..at + there]);
                }
                assert!(pinned.get(&copies, memory.address(), ROOM) == expected, "memory: {what}");
                assert!(!writes || fs::read(&path).unwrap() == model, "file: {what}");
                // SAFETY: as above.
                assert_eq!(unsafe { (cufile.cuFileStreamDeregister)(stream) }, OK);
            }
        }
        assert!(refused < 6, "{refused} were refused");

        // More than was said at the call, and what is no place.
        let (device, stream) = (Device::zeroed(ROOM), own_stream(gpu()));
        // SAFETY: it is a stream of the test's.
        assert_eq!(unsafe { (cufile.cuFileStreamRegister)(stream, 0) }, OK);
        for (now, expected) in [((8193, 0, 0), -5022), ((1, -1, 0), -5022), ((1, 0, -1), -5022), ((1, 0, ROOM as i64), -5014)] {
            let gate = Gate::before(stream);
            let mut numbers = Numbers::new(8192, 0, 0);
            assert_eq!(read(handle, device.address(), &mut numbers, stream), OK);
            (numbers.size, numbers.file_offset, numbers.memory_offset) = now;
            gate.open();
            wait(stream);
            assert_eq!(result_of(&numbers), expected, "{now:?}");
        }
        assert!(device.get(0, ROOM) == vec![0; ROOM]);

        // A write of nothing after a read in the same frames: no move of the read is made again.
        let mut reads = Numbers::new(3 << 19, 0, 0);
        assert_eq!(read(handle, device.address(), &mut reads, stream), OK);
        wait(stream);
        assert_eq!(result_of(&reads), 3 << 19);
        device.put(&vec![0x5a; ROOM]);
        let gate = Gate::before(stream);
        let mut writes = Numbers::new(3 << 19, 0, 0);
        assert_eq!(write(handle, device.address(), &mut writes, stream), OK);
        writes.size = 0;
        gate.open();
        wait(stream);
        assert_eq!(result_of(&writes), 0);
        assert!(device.get(0, ROOM) == vec![0x5a; ROOM], "memory that a write of nothing was from");

        // Two allocations, each with ends within blocks: cut into as many frames as there can be.
        let several = mapped(gpu(), &[2 << 20, 2 << 20]);
        let bytes = tree::pattern(6, ROOM);
        pinned.put(&copies, several.address(), &bytes);
        let gate = Gate::before(stream);
        const SIZE: usize = (1 << 20) - 4096;
        let mut numbers = Numbers::new(SIZE, 0, (2 << 20) - 1000);
        assert_eq!(write(handle, several.address(), &mut numbers, stream), OK);
        (numbers.file_offset, numbers.memory_offset) = (4095, (2 << 20) - 520_194);
        gate.open();
        wait(stream);
        assert_eq!(result_of(&numbers), SIZE as isize);
        assert!(fs::read(&path).unwrap()[4095..4095 + SIZE] == bytes[(2 << 20) - 520_194..][..SIZE]);
    });
}
