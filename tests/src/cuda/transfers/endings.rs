//! Tests of ends while requests are in flight: memory that is freed, daemons and applications that
//! die.

use super::super::application::allocated;
use super::{MIB, Site, read, segment};
use crate::programs;
use gpunvme::gpu::Segment;
use gpunvme::{Error, File, Require, Route, Wait};
use rustix::process::{Signal, kill_process};
use std::fs;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

pub(super) fn freed_too_early(site: &Site) {
    let transfers = site.transfers();
    let sample = site.sample(10, MIB);
    let mut queue = transfers.queue().unwrap();
    for small in [true, false] {
        let (kept, freed) = (allocated(site.gpu, MIB as usize), allocated(site.gpu, MIB as usize));
        let segments = |address: u64| -> Vec<Segment> {
            let (count, len) = if small { (200, 4096) } else { (1, MIB) };
            (0..count).map(|at| segment(at * len, address + at * len, len)).collect()
        };
        // The copy stream is there, and nothing is in it, for which freeing would wait.
        // SAFETY: the memory is this check's.
        unsafe { queue.read(&sample.file, &segments(kept.address()), 0) }.unwrap();
        queue.complete(Wait::Forever, &mut Vec::new()).unwrap();
        site.put(kept.address(), &vec![0; MIB as usize]);
        kill_process(site.volume.daemon(), Signal::STOP).unwrap();
        // SAFETY: the memory is freed before it is used, which is what is checked.
        unsafe { queue.read(&sample.file, &segments(freed.address()), 0) }.unwrap();
        // SAFETY: this memory stays.
        unsafe { queue.read(&sample.file, &segments(kept.address()), 1) }.unwrap();
        drop(freed);
        kill_process(site.volume.daemon(), Signal::CONT).unwrap();
        let mut done = Vec::new();
        while queue.in_flight() > 0 {
            assert!(queue.complete(Wait::Timeout(Duration::from_secs(20)), &mut done).unwrap() > 0, "a request is lost");
        }
        done.sort_by_key(|finished| finished.user_data);
        let error = done[0].result.as_ref().unwrap_err();
        assert!(matches!(error, Error::Copy { error: None, .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(&sample.path.display().to_string()) && text.contains("was freed"), "{text}");
        let len = if small { 200 * 4096 } else { MIB };
        assert_eq!(done[1].result.as_ref().unwrap().bytes(), len);
        assert!(site.look(kept.address(), len) == sample.bytes[..len as usize]);
    }
}

/// Until the thread that sends its number sleeps.
fn wait_until_asleep(thread: &mpsc::Receiver<i32>) {
    let thread = thread.recv().unwrap();
    let mut asleep = 0;
    while asleep < 5 {
        thread::sleep(Duration::from_millis(10));
        let stat = fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
        let sleeps = stat.rsplit(") ").next().unwrap().starts_with('S');
        asleep = if sleeps { asleep + 1 } else { 0 };
    }
}

pub(super) fn freed_before_its_caller_copies(site: &Site) {
    let transfers = site.transfers();
    let sample = site.sample(25, MIB);
    let kept = allocated(site.gpu, MIB as usize);
    for (count, len) in [(8, 4096), (1, MIB)] {
        let freed = allocated(site.gpu, MIB as usize);
        let segments =
            |address: u64| -> Vec<Segment> { (0..count).map(|at| segment(at * len, address + at * len, len)).collect() };
        // The ring and the copy stream are there, and the file is known to the ring.
        read(&transfers, &sample.file, &segments(kept.address())).unwrap();
        kill_process(site.volume.daemon(), Signal::STOP).unwrap();
        let error = thread::scope(|scope| {
            let (sender, asleep) = mpsc::channel();
            let (transfers, file, segments) = (&transfers, &sample.file, segments(freed.address()));
            let caller = scope.spawn(move || {
                sender.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
                read(transfers, file, &segments).unwrap_err()
            });
            wait_until_asleep(&asleep);
            drop(freed);
            kill_process(site.volume.daemon(), Signal::CONT).unwrap();
            caller.join().unwrap()
        });
        assert!(matches!(error, Error::Copy { error: None, .. }) && error.to_string().contains("was freed"), "{error}");
        assert_eq!(read(&transfers, &sample.file, &segments(kept.address())).unwrap().bytes(), count * len);
        for Segment { file_offset, address, len } in segments(kept.address()) {
            assert!(site.look(address, len) == sample.bytes[file_offset as usize..][..len as usize]);
        }
    }
}

pub(super) fn a_daemon_dies_in_a_first_read(site: &Site) {
    let dying = Site::new(site.gpu);
    let sample = dying.sample(27, MIB);
    let memory = allocated(site.gpu, MIB as usize);
    // Memory that the device reaches has no first read.
    let by_bounce = Require { route: Some(Route::Bounce), ..Require::default() };
    let (transfers, others) = (dying.transfers().requiring(by_bounce), site.transfers().requiring(by_bounce));
    let part = [segment(0, memory.address(), 4096)];
    assert_eq!(read(&transfers, &sample.file, &part).unwrap().bytes(), 4096);
    // In the ring now.
    assert_eq!(read(&transfers, &sample.file, &part).unwrap().bytes(), 4096);
    let [fresh, elsewhere] = [0, 1].map(|_| File::open(&sample.path).unwrap());
    kill_process(dying.volume.daemon(), Signal::STOP).unwrap();
    let Site { volume, .. } = dying;
    let error = thread::scope(|scope| {
        let (sender, asleep) = mpsc::channel();
        let (transfers, fresh) = (&transfers, &fresh);
        let caller = scope.spawn(move || {
            sender.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
            read(transfers, fresh, &part).unwrap_err()
        });
        wait_until_asleep(&asleep);
        drop(volume.signal(Signal::KILL));
        caller.join().unwrap()
    });
    assert!(matches!(error, Error::RingClosed { .. }), "{error}");
    // No later call uses memory that this call may have left to the device.
    let error = read(&transfers, &sample.file, &part).unwrap_err();
    assert!(matches!(error, Error::RingClosed { .. }), "{error}");
    // A file of a mount that is gone is refused by another mount, which goes on.
    assert!(read(&others, &elsewhere, &part).is_err());
    let living = site.sample(28, MIB);
    for _ in 0..2 {
        assert_eq!(read(&others, &living.file, &part).unwrap().bytes(), 4096);
    }
    assert!(site.look(memory.address(), 4096) == living.bytes[..4096]);
}

pub(super) fn a_dying_daemon(site: &Site) {
    let dying = Site::new(site.gpu);
    let (sample, dying_sample) = (site.sample(14, 4 * MIB), dying.sample(15, 64 * MIB));
    let memory = allocated(site.gpu, 64 * MIB as usize);
    // The page cache would answer also without a daemon.
    let by_bounce = Require { route: Some(Route::Bounce), ..Require::default() };
    let (transfers, dying_transfers) = (site.transfers(), dying.transfers().requiring(by_bounce));
    let mut queue = dying_transfers.queue().unwrap();
    let whole = [segment(0, memory.address(), 64 * MIB)];
    // The file is known to the ring, and the GPU to the mount: neither has to be asked for again.
    assert_eq!(read(&dying_transfers, &dying_sample.file, &whole).unwrap().bytes(), 64 * MIB);
    let short = [segment(0, memory.address(), MIB)];
    read(&dying_transfers, &dying_sample.file, &short).unwrap();
    kill_process(dying.volume.daemon(), Signal::STOP).unwrap();
    for number in 0..100 {
        // SAFETY: what is in the memory does not matter.
        unsafe { queue.read(&dying_sample.file, &whole, number) }.unwrap();
    }
    let Site { volume, .. } = dying;
    let error = thread::scope(|scope| {
        let (sender, asleep) = mpsc::channel();
        let (transfers, file) = (&dying_transfers, &dying_sample.file);
        let caller = scope.spawn(move || {
            sender.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
            read(transfers, file, &short).unwrap_err()
        });
        wait_until_asleep(&asleep);
        drop(volume.signal(Signal::KILL));
        caller.join().unwrap()
    });
    assert!(matches!(error, Error::RingClosed { .. }), "{error}");
    let mut done = Vec::new();
    while queue.in_flight() > 0 {
        assert!(queue.complete(Wait::Timeout(Duration::from_secs(20)), &mut done).unwrap() > 0, "requests wait for the dead");
    }
    assert!(done.iter().all(|finished| matches!(finished.result, Err(Error::RingClosed { .. }))), "{:?}", done[0]);
    assert!(read(&dying_transfers, &dying_sample.file, &whole).is_err());
    assert_eq!(read(&transfers, &sample.file, &[segment(0, memory.address(), 4 * MIB)]).unwrap().bytes(), 4 * MIB);
    assert!(site.look(memory.address(), 4 * MIB) == sample.bytes);
}

pub(super) fn an_ending_daemon(site: &Site) {
    const LEN: u64 = 8 * MIB;
    let ending = Site::new(site.gpu);
    let sample = ending.sample(17, 4 * LEN);
    let (out, _) = ending.empty("out");
    let memory = allocated(site.gpu, 8 * LEN as usize);
    let mut queue = ending.transfers().queue().unwrap();
    let begin = |queue: &mut gpunvme::gpu::Queue, number: u64| {
        let part = [segment(number % 4 * LEN, memory.address() + number * LEN, LEN)];
        // SAFETY: what is in the memory does not matter.
        unsafe { if number < 4 { queue.read(&sample.file, &part, number) } else { queue.write(&out, &part, number) } }
    };
    for number in 0..8 {
        begin(&mut queue, number).unwrap();
    }
    let Site { volume, .. } = ending;
    // The files are in use: after a while it cuts its users off.
    let ended = thread::spawn(move || drop(volume.signal(Signal::TERM)));
    let (mut done, mut closed) = (Vec::new(), false);
    while queue.in_flight() > 0 {
        assert!(
            queue.complete(Wait::Timeout(Duration::from_secs(20)), &mut done).unwrap() > 0,
            "requests wait for a daemon that ended"
        );
        for finished in done.drain(..) {
            match finished.result {
                Ok(moved) => assert_eq!(moved.bytes(), LEN),
                Err(Error::RingClosed { .. }) => closed = true,
                Err(error) => panic!("{error}"),
            }
            closed = closed || begin(&mut queue, finished.user_data).is_err();
        }
    }
    ended.join().unwrap();
}

pub(super) fn a_dying_application(site: &Site) {
    let sample = site.sample(16, 64 * MIB);
    let mount = site.mount();
    let before = mount.stats().unwrap();
    for write in [false, true] {
        let mut program = programs::command("gpu-mover");
        program.args(["--size=4096", "--pattern=random", "--depth=256", "--seconds=60", "--file"]).arg(&sample.path);
        program.args(write.then_some("--write"));
        let mut application = program.spawn().unwrap();
        let begun = Instant::now();
        let bytes = |stats: &gpunvme::Stats| stats.read.total() + stats.write.total();
        while bytes(&mount.stats().unwrap()) < bytes(&before) + MIB {
            assert!(begun.elapsed() < Duration::from_secs(20), "it does nothing");
            thread::sleep(Duration::from_millis(5));
        }
        application.kill().unwrap();
        application.wait().unwrap();
        while mount.stats().unwrap().buffers > before.buffers {
            assert!(begun.elapsed() < Duration::from_secs(40), "its buffers stay");
            thread::sleep(Duration::from_millis(5));
        }
    }
    let memory = allocated(site.gpu, MIB as usize);
    let other = site.sample(17, MIB);
    assert_eq!(read(&site.transfers(), &other.file, &[segment(0, memory.address(), MIB)]).unwrap().bytes(), MIB);
    assert!(site.look(memory.address(), MIB) == other.bytes);
}
