//! Requests in the order of an application's streams.

use super::super::application::{Pinned, allocated, begin_capture, end_capture, own_stream};
use super::{MIB, Sample, Site, read, segment};
use gpunvme::Error;
use gpunvme::gpu::{Settings, Transfers};
use gpunvme_gpupath::cuda::{Cuda, Gpu, Stream};
use rustix::process::{Signal, kill_process};
use std::fs;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

/// A stream of the application that waits until it is let go.
struct Blocked {
    stream: usize,
    handle: Stream,
    word: Pinned,
}

impl Blocked {
    fn new(gpu: Gpu) -> Blocked {
        let stream = own_stream(gpu);
        // SAFETY: the stream is never destroyed.
        let handle = unsafe { Cuda::load().unwrap().application_stream(stream) }.unwrap();
        let word = Pinned::new(gpu, 4096);
        // SAFETY: the word stays until the stream was waited for.
        unsafe { handle.wait_value(word.address(), 1) }.unwrap();
        Blocked { stream, handle, word }
    }

    fn let_go(&self) {
        self.word.word(0).store(1, Ordering::Release);
    }
}

pub(super) fn streams_are_ordered(site: &Site) {
    let transfers = site.transfers();
    let sample = site.sample(8, 8 * MIB);
    let memory = allocated(site.gpu, 8 * MIB as usize);
    // What is set up at the first use of a GPU may wait for all that it is doing.
    read(&transfers, &sample.file, &[segment(0, memory.address(), MIB)]).unwrap();
    let (file, path) = site.empty("out");
    let (mut before, after) = (Pinned::new(site.gpu, 8 * MIB as usize), Pinned::new(site.gpu, 8 * MIB as usize));
    before.bytes().fill(0x11);
    let whole = [segment(0, memory.address(), 8 * MIB)];
    let blocked = Blocked::new(site.gpu);
    let (written, read) = {
        let copy = |to, from| {
            // SAFETY: all of it stays until the stream was waited for.
            unsafe { blocked.handle.copy(to, from, 8 * MIB as usize) }.unwrap();
        };
        // The file gets what the stream put into memory; then memory gets the sample, and the stream copies that out.
        copy(memory.address(), before.address());
        // SAFETY: the stream orders what uses the memory.
        let written = unsafe { transfers.write_on_stream(&file, &whole, blocked.stream) }.unwrap();
        // SAFETY: as above.
        let read = unsafe { transfers.read_on_stream(&sample.file, &whole, blocked.stream) }.unwrap();
        copy(after.address(), memory.address());
        (written, read)
    };
    thread::sleep(Duration::from_millis(50));
    assert!(!written.is_done() && !read.is_done(), "the stream has not come to them");
    assert_eq!(fs::metadata(&path).unwrap().len(), 0);
    blocked.let_go();
    blocked.handle.synchronize().unwrap();
    let mut after = after;
    assert!(after.bytes() == &sample.bytes[..], "what comes after a read in a stream sees it");
    assert_eq!((written.wait().unwrap().bytes(), read.wait().unwrap().bytes()), (8 * MIB, 8 * MIB));
    assert!(fs::read(path).unwrap().iter().all(|byte| *byte == 0x11), "a write in a stream writes what was before it");
}

pub(super) fn many_in_streams(site: &Site) {
    let mut settings = Settings::default();
    settings.staging = 1;
    let transfers = Transfers::with(&site.mount(), settings).unwrap();
    let sample = site.sample(9, 8 * MIB);
    let memory = allocated(site.gpu, 8 * MIB as usize);
    read(&transfers, &sample.file, &[segment(0, memory.address(), MIB)]).unwrap();
    let streams: Vec<Blocked> = (0..3).map(|_| Blocked::new(site.gpu)).collect();
    let mut pending = Vec::new();
    for at in 0..60u64 {
        let part = segment(at % 8 * MIB, memory.address() + at % 8 * MIB, MIB);
        // SAFETY: requests that meet write the same bytes.
        pending.push(unsafe { transfers.read_on_stream(&sample.file, &[part], streams[at as usize % 3].stream) }.unwrap());
    }
    // Others pass meanwhile.
    assert_eq!(read(&transfers, &sample.file, &[segment(0, memory.address(), 8 * MIB)]).unwrap().bytes(), 8 * MIB);
    streams.iter().rev().for_each(Blocked::let_go);
    for pending in pending {
        assert_eq!(pending.wait().unwrap().bytes(), MIB);
    }
    streams.iter().for_each(|stream| stream.handle.synchronize().unwrap());
    assert!(site.look(memory.address(), 8 * MIB) == sample.bytes);
}

pub(super) fn streams_go_on(site: &Site) {
    let dying = Site::new(site.gpu);
    let (sample, dying_sample) = (site.sample(18, MIB), dying.sample(19, MIB));
    let (transfers, dying_transfers) = (site.transfers(), dying.transfers());
    let memory = allocated(site.gpu, MIB as usize);
    let whole = [segment(0, memory.address(), MIB)];
    read(&transfers, &sample.file, &whole).unwrap();
    read(&dying_transfers, &dying_sample.file, &whole).unwrap();

    let blocked = Blocked::new(site.gpu);
    // SAFETY: what is in the memory does not matter.
    let begin =
        |transfers: &Transfers, sample: &Sample| unsafe { transfers.read_on_stream(&sample.file, &whole, blocked.stream) };
    let mut pending = Vec::new();
    let error = loop {
        match begin(&transfers, &sample) {
            Ok(more) => pending.push(more),
            Err(error) => break error,
        }
        assert!(pending.len() < 10_000, "there is no limit");
    };
    assert!(matches!(error, Error::StreamsFull { requests, .. } if requests == pending.len()), "{error}");
    assert!(error.to_string().contains(&sample.path.display().to_string()), "{error}");
    kill_process(dying.volume.daemon(), Signal::STOP).unwrap();
    let lost = begin(&dying_transfers, &dying_sample).unwrap();
    blocked.let_go();
    thread::sleep(Duration::from_millis(50));
    let Site { volume, .. } = dying;
    drop(volume.signal(Signal::KILL));
    blocked.handle.synchronize().unwrap();
    assert!(pending.into_iter().all(|pending| pending.wait().is_ok_and(|done| done.bytes() == MIB)));
    assert!(matches!(lost.wait(), Err(Error::RingClosed { .. })));
    // All gates are free again.
    begin(&transfers, &sample).unwrap().wait().unwrap();
}

pub(super) fn captured_streams(site: &Site) {
    let transfers = site.transfers();
    let sample = site.sample(21, MIB);
    let memory = allocated(site.gpu, MIB as usize);
    let whole = [segment(0, memory.address(), MIB)];
    read(&transfers, &sample.file, &whole).unwrap();
    let stream = own_stream(site.gpu);
    begin_capture(site.gpu, stream);
    // SAFETY: nobody uses the memory.
    let refused = unsafe {
        [transfers.read_on_stream(&sample.file, &whole, stream), transfers.write_on_stream(&sample.file, &whole, stream)]
    };
    let nodes = end_capture(site.gpu, stream);
    for refused in refused {
        let error = refused.unwrap_err();
        assert!(matches!(error, Error::StreamCaptured { stream: captured, .. } if captured == stream), "{error}");
        assert!(error.to_string().contains(&sample.path.display().to_string()), "{error}");
    }
    assert_eq!(nodes, 0, "nothing was put into the stream");
    // SAFETY: nobody uses the memory until the read was waited for.
    let pending = unsafe { transfers.read_on_stream(&sample.file, &whole, stream) }.unwrap();
    assert_eq!(pending.wait().unwrap().bytes(), MIB);
}
