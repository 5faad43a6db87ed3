//! The executor and the faulty device: batches end exactly once, whatever the device does.
use std::fs::File;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use gpunvme_blockdev::{BlockDevice, Error, Io, Op, OpenMode, Region, Request, Wait, open};
use gpunvme_blockdev_testing::{Faulty, MemoryDevice, On, Rule};
use gpunvme_metrics::Ended;

const LEN: u64 = 1 << 20;
const SOON: Duration = Duration::from_secs(20);

fn faulty() -> Arc<Faulty> {
    Faulty::new(MemoryDevice::new(LEN))
}

fn write(offset: u64, byte: u8) -> Request {
    let region = Region::allocate(512).expect("memory");
    region.write_at(0, &[byte; 512]).expect("inside");
    Request::write(offset, vec![region.span(0..512)], false)
}

fn read(io: &Io, offset: u64) -> Result<u8, Error> {
    let region = Region::allocate(512).expect("memory");
    io.run(vec![Request::read(offset, vec![region.span(0..512)])])?;
    let mut byte = [0];
    region.read_at(0, &mut byte)?;
    Ok(byte[0])
}

/// The same over an image file, and so over the kernel.
fn faulty_file() -> Arc<Faulty> {
    let directory = tempfile::tempdir_in("/dev/shm").expect("a temporary directory");
    let path = directory.path().join("image");
    File::create(&path).expect("an image").set_len(LEN).expect("its length");
    Faulty::new(open(path.to_str().expect("an UTF-8 path"), OpenMode::ReadWrite).expect("the image opens"))
}

/// Both kinds of executor, on memory and on the kernel.
fn each_kind(test: impl Fn(&Faulty, &Arc<Io>)) {
    for device in [faulty, faulty_file] {
        let faulty = device();
        test(&faulty, &Io::inline(faulty.clone()).expect("io"));
        let faulty = device();
        test(&faulty, &Io::threaded(faulty.clone(), 3).expect("io"));
    }
}

#[test]
fn a_batch_tells_the_failure_of_one_of_its_requests_after_all_are_over() {
    each_kind(|faulty, io| {
        faulty.add(Rule::fail(On::Write, libc::EIO).within(1024..1536));
        let result = io.run(vec![write(0, 1), write(1024, 2), write(2048, 3)]);
        assert!(matches!(result, Err(Error::Io { op: Op::Write { .. }, offset: 1024, errno: libc::EIO, .. })), "{result:?}");
        assert_eq!([0, 1024, 2048].map(|offset| read(io, offset)), [Ok(1), Ok(0), Ok(3)]);
        assert_eq!(io.in_flight(), 0);
    });
}

#[test]
fn rules_count_match_and_end() {
    each_kind(|faulty, io| {
        faulty.add(Rule::fail(On::Flush, libc::ENOSPC).after(2).once());
        let flush = || io.run(vec![Request::flush()]).map_err(|error| error.errno());
        assert_eq!([flush(), flush(), flush(), flush()], [Ok(()), Ok(()), Err(libc::ENOSPC), Ok(())]);
        assert_eq!(faulty.hits(), 1);
        faulty.add(Rule::fail(On::Any, libc::EIO));
        assert!(read(io, 0).is_err() && flush().is_err() && io.run(vec![Request::discard(0, 512)]).is_err());
        faulty.clear();
        assert_eq!((read(io, 0), flush()), (Ok(0), Ok(())));
        faulty.add(Rule::fail(On::Read, libc::EIO).within(512..1024));
        assert!(read(io, 512).is_err());
        assert_eq!((read(io, 0), read(io, 1024), flush()), (Ok(0), Ok(0), Ok(())), "next to the range, and of no range");
    });
}

#[test]
fn slow_commands_hold_up_no_other_command() {
    for faulty in [faulty(), faulty_file()] {
        let io = Io::threaded(faulty.clone(), 1).expect("io");
        faulty.add(Rule::hold(On::Read).within(0..512).once());
        let (sender, receiver) = mpsc::channel();
        let region = Region::allocate(512).expect("memory");
        io.submit(vec![Request::read(0, vec![region.span(0..512)])], move |result| sender.send(result).expect("the test waits"));
        for _ in 0..100 {
            io.run(vec![write(0, 9), Request::flush()]).expect("others go on");
        }
        let meanwhile = (io.in_flight(), receiver.try_recv());
        faulty.release(); // before anything that may fail: dropping `io` waits for it
        assert_eq!(meanwhile, (1, Err(mpsc::TryRecvError::Empty)));
        assert_eq!(receiver.recv_timeout(SOON), Ok(Ok(())));
        let mut byte = [0];
        region.read_at(0, &mut byte).expect("inside");
        assert_eq!(byte, [9], "it ran when it was released");
    }
}

#[test]
fn delays_pass() {
    each_kind(|faulty, io| {
        faulty.add(Rule::delay(On::Write, Duration::from_millis(30)));
        let before = Instant::now();
        io.run(vec![write(0, 4), write(512, 4)]).expect("written");
        assert!(before.elapsed() >= Duration::from_millis(30));
        assert_eq!(read(io, 512), Ok(4));
    });
}

#[test]
fn an_empty_batch_ends_too() {
    each_kind(|_, io| assert_eq!(io.run(vec![]), Ok(())));
}

#[test]
fn memory_is_free_when_done_is_called() {
    each_kind(|_, io| {
        let region = Region::allocate(4096).expect("memory");
        let (sender, receiver) = mpsc::channel();
        let watched = region.clone();
        let batch = (0..8).map(|n| Request::read(0, vec![region.span(n * 512..(n + 1) * 512)]));
        io.submit(batch, move |_| sender.send(Arc::strong_count(&watched)).expect("the test waits"));
        assert_eq!(receiver.recv_timeout(SOON), Ok(2), "this test's two");
    });
}

#[test]
fn completions_may_submit() {
    fn chain(io: Arc<Io>, left: usize, end: mpsc::Sender<usize>) {
        let next = io.clone();
        io.submit(vec![write(0, left as u8)], move |result| {
            result.expect("written");
            match left {
                0 => end.send(0).expect("the test waits"),
                _ => chain(next, left - 1, end),
            }
        });
    }
    each_kind(|_, io| {
        let (sender, receiver) = mpsc::channel();
        chain(io.clone(), 100, sender);
        assert_eq!(receiver.recv_timeout(SOON), Ok(0));
    });
}

#[test]
fn every_batch_of_many_threads_ends_exactly_once() {
    each_kind(|_, io| {
        let ended = Arc::new(AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let (io, ended) = (io.clone(), ended.clone());
                scope.spawn(move || {
                    for n in 0..500u64 {
                        let ended = ended.clone();
                        let batch: Vec<Request> = (0..n % 5).map(|part| write((thread * 8 + part) * 512, n as u8)).collect();
                        io.submit(batch, move |result| {
                            result.expect("written");
                            ended.fetch_add(1, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        let deadline = Instant::now() + SOON;
        while ended.load(Ordering::Relaxed) < 2000 && Instant::now() < deadline {
            std::thread::yield_now();
        }
        assert_eq!(io.in_flight(), 0);
        assert_eq!(ended.load(Ordering::Relaxed), 2000);
    });
}

#[test]
fn dropping_it_waits_for_what_is_in_flight() {
    let faulty = faulty();
    faulty.add(Rule::delay(On::Write, Duration::from_millis(50)));
    let io = Io::threaded(faulty.clone(), 2).expect("io");
    let (sender, receiver) = mpsc::channel();
    io.submit(vec![write(0, 1)], move |result| sender.send(result).expect("the test waits"));
    drop(io);
    assert_eq!(receiver.try_recv(), Ok(Ok(())));
}

#[test]
fn the_last_handle_may_be_dropped_by_a_completion() {
    let io = Io::threaded(faulty(), 1).expect("io");
    let (sender, receiver) = mpsc::channel();
    let (handle, device) = (io.clone(), Arc::downgrade(io.device()));
    let (go, wait) = mpsc::channel::<()>();
    io.submit(vec![Request::flush()], move |_| {
        wait.recv().expect("the other handle is dropped first");
        drop(handle);
        sender.send(()).expect("the test waits");
    });
    drop(io);
    go.send(()).expect("the completion waits");
    receiver.recv_timeout(SOON).expect("it did not wait for itself");
    let deadline = Instant::now() + SOON;
    while device.strong_count() > 0 && Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert_eq!(device.strong_count(), 0, "the thread ended and let go of the device");
}

/// Runs the test of this name again, in a process of its own, and gives what it wrote to its
/// standard error if it aborted.
fn aborts(test: &str) -> Option<String> {
    use std::os::unix::process::ExitStatusExt;
    let program = std::env::current_exe().expect("this program");
    let output =
        std::process::Command::new(program).args(["--exact", test, "--nocapture"]).env("GPUNVME_TEST_ABORT", "1").output();
    let output = output.expect("it runs");
    (output.status.signal() == Some(libc::SIGABRT)).then(|| String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn a_completion_that_panics_aborts_with_its_message() {
    if std::env::var_os("GPUNVME_TEST_ABORT").is_some() {
        let io = Io::threaded(faulty(), 1).expect("io");
        io.submit(vec![Request::flush()], |_| panic!("the completion failed"));
        std::thread::sleep(SOON);
        return;
    }
    let message = aborts("a_completion_that_panics_aborts_with_its_message").expect("it aborts");
    assert!(message.contains("the completion failed"), "{message}");
}

#[test]
fn waiting_inside_a_completion_aborts_instead_of_hanging() {
    if std::env::var_os("GPUNVME_TEST_ABORT").is_some() {
        let io = Io::threaded(faulty(), 1).expect("io");
        let inner = io.clone();
        io.submit(vec![Request::flush()], move |_| inner.run(vec![]).expect("never"));
        std::thread::sleep(SOON);
        return;
    }
    let message = aborts("waiting_inside_a_completion_aborts_instead_of_hanging").expect("it aborts");
    assert!(message.contains("Io::run called from the completion of a batch"), "{message}");
}

#[test]
fn a_thread_with_a_queue_of_its_own_ends_its_batches_itself() {
    for faulty in [faulty(), faulty_file()] {
        let io = Io::threaded(faulty.clone(), 2).expect("io");
        let own = io.own_queue().expect("a queue");
        let (sender, ended) = mpsc::channel();
        let submit = |batch| {
            let sender = sender.clone();
            io.submit(batch, move |result| sender.send((std::thread::current().id(), result)).expect("the test waits"));
        };
        faulty.add(Rule::fail(On::Write, libc::EIO).within(512..1024));
        submit(vec![write(0, 7), write(1024, 7)]);
        submit(vec![write(512, 7)]);
        submit(vec![]);
        assert_eq!((ended.try_recv(), faulty.hits()), (Err(mpsc::TryRecvError::Empty), 0), "nothing is submitted yet");
        let mut results = Vec::new();
        while results.len() < 3 {
            own.run(&mut Vec::new(), Wait::Forever, &mut Vec::new());
            results.extend(ended.try_iter());
        }
        assert!(results.iter().all(|(thread, _)| *thread == std::thread::current().id()));
        assert_eq!(results.iter().filter(|(_, result)| result.is_err()).count(), 1);

        let waker = own.waker();
        let waking = std::thread::spawn(move || waker.wake());
        assert_eq!(own.run(&mut Vec::new(), Wait::Forever, &mut Vec::new()), 0, "woken");
        waking.join().expect("it woke");

        // Requests that are no batch's, beside a batch.
        assert!(own.takes_requests());
        let (mut requests, mut done, mut batches) = (vec![write(512, 8), write(2048, 9)], Vec::new(), 0);
        requests.iter_mut().zip([5, 6]).for_each(|(request, tag)| request.tag = tag);
        let begun = own.begin(requests[0].op, 2);
        submit(vec![write(3072, 7)]);
        while done.len() < 2 || batches == 0 {
            own.run(&mut requests, Wait::Forever, &mut done);
            assert!(requests.is_empty(), "all of them are taken");
            batches += ended.try_iter().count();
        }
        own.end(begun, Ended { count: 2, bytes: 1024, failed: true });
        done.sort_by_key(|completion| completion.tag);
        let ends: Vec<_> = done.iter().map(|completion| (completion.tag, completion.result.is_ok())).collect();
        assert_eq!((&ends[..], batches), (&[(5, false), (6, true)][..], 1));

        submit(vec![Request::flush()]);
        drop(own);
        assert_eq!(ended.try_recv().map(|(_, result)| result), Ok(Ok(())), "it waited");
        assert_eq!((read(&io, 0), read(&io, 512)), (Ok(7), Ok(0)), "as any other thread from then on");
    }
}

#[test]
fn a_thread_that_waits_ends_its_batch_itself_where_the_device_has_queues_for_that() {
    let few = open("sim:,memory=1M,io-queues=2", OpenMode::ReadWrite).expect("a device with two queues");
    for (device, is_own) in [(faulty() as Arc<dyn BlockDevice>, true), (faulty_file(), true), (few, false)] {
        let io = Io::threaded(device, 1).expect("io");
        let (sender, ended) = mpsc::channel();
        io.run_then(vec![write(512, 7)], move |result| {
            sender.send((std::thread::current().id(), result)).expect("the test waits")
        });
        let (thread, result) = ended.try_recv().expect("it is over");
        assert_eq!((thread == std::thread::current().id(), result), (is_own, Ok(())));
        assert_eq!(read(&io, 512), Ok(7));
        // More than there are queues, and flushes.
        std::thread::scope(|scope| {
            for number in 0..40 {
                let io = &io;
                scope.spawn(move || {
                    io.run([write(1024 + 512 * number, number as u8)]).expect("a write");
                    io.run([Request::flush()]).expect("a flush");
                    assert_eq!(read(io, 1024 + 512 * number), Ok(number as u8));
                });
            }
        });
        let requests: u64 = (0..Op::KINDS).map(|kind| io.meter().read(kind).begun).sum();
        assert_eq!((requests, io.in_flight()), (2 + 3 * 40, 0), "each is counted");
    }
}

#[test]
fn a_thread_that_waits_is_told_what_failed() {
    let faulty = faulty_file();
    let io = Io::threaded(faulty.clone(), 1).expect("io");
    faulty.add(Rule::fail(On::Write, libc::EIO).within(512..1024));
    let (sender, ended) = mpsc::channel();
    io.run_then(vec![write(0, 7), write(512, 7)], move |result| sender.send(result).expect("the test waits"));
    assert!(matches!(ended.try_recv(), Ok(Err(Error::Io { offset: 512, .. }))));
    assert_eq!((read(&io, 0), read(&io, 512)), (Ok(7), Ok(0)), "and its queue serves the next");
}

#[test]
fn a_thread_that_may_wait_does_only_where_nothing_else_is_in_flight() {
    for device in [faulty, faulty_file] {
        let faulty = device();
        faulty.add(Rule::hold(On::Write).within(0..512));
        let io = Io::threaded(faulty.clone(), 1).expect("io");
        let run = || {
            let (sender, ended) = mpsc::channel();
            io.submit_or_run(vec![write(512, 7)], move |result| {
                sender.send((std::thread::current().id(), result)).expect("the test waits");
            });
            ended
        };
        let here = std::thread::current().id();
        assert_eq!(run().try_recv(), Ok((here, Ok(()))), "alone");
        let (sender, held) = mpsc::channel();
        io.submit(vec![write(0, 1)], move |result| sender.send(result).expect("the test waits"));
        let (thread, result) = run().recv_timeout(SOON).expect("the reaper ends it");
        assert_eq!((thread != here, result), (true, Ok(())), "beside another");
        faulty.release();
        assert_eq!(held.recv_timeout(SOON), Ok(Ok(())));
        while io.in_flight() > 0 {
            std::thread::yield_now();
        }
        assert_eq!(run().try_recv(), Ok((here, Ok(()))), "alone again");
    }
}
