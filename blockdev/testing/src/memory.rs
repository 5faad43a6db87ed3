//! A namespace in memory. It is sparse, so that a terabyte costs nothing, and its pages are shared
//! copy-on-write, so that a snapshot costs a few pointers.
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use gpunvme_blockdev::{BlockDevice, Completion, Geometry, Length, Op, Queue, Region, Request, Result, Wait};
use parking_lot::Mutex;

use crate::completions::Completions;

const PAGE: usize = 4096;
/// Pages a chunk: clones of an image share whole chunks until one of them is written to.
const PAGES: usize = 128;
const CHUNK: u64 = (PAGE * PAGES) as u64;

type Page = [u8; PAGE];

/// What discarded bytes become in [`Image::garble`].
const PATTERN: &[u8; 16] = b"*was discarded!*";
static GARBAGE: OnceLock<Arc<Page>> = OnceLock::new();

/// The contents of a namespace. Bytes never written are zero. Clones are cheap and independent of
/// each other.
#[derive(Clone)]
pub struct Image {
    len: u64,
    chunks: BTreeMap<u64, Arc<Chunk>>,
}

#[derive(Clone)]
struct Chunk([Option<Arc<Page>>; PAGES]);

impl Image {
    /// `len` bytes of zeroes.
    pub fn new(len: u64) -> Self {
        Self { len, chunks: BTreeMap::new() }
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty)] // no caller asks whether it is empty
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Copies bytes out. Panics beyond the end.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) {
        self.check(offset, out.len() as u64);
        for_each_page(offset, out.len(), |page, within, range| {
            let out = &mut out[range];
            match self.page(page) {
                Some(data) => out.copy_from_slice(&data[within..within + out.len()]),
                None => out.fill(0),
            }
        });
    }

    /// Copies bytes in. Panics beyond the end.
    pub fn write_at(&mut self, offset: u64, data: &[u8]) {
        self.check(offset, data.len() as u64);
        for_each_page(offset, data.len(), |page, within, range| {
            let data = &data[range];
            self.page_mut(page)[within..within + data.len()].copy_from_slice(data);
        });
    }

    /// Makes bytes zero and gives their pages back. Panics beyond the end.
    pub fn zero(&mut self, offset: u64, len: u64) {
        self.check(offset, len);
        let end = offset + len;
        let first = offset / CHUNK;
        let touched: Vec<u64> = self.chunks.range(first..end.div_ceil(CHUNK)).map(|(chunk, _)| *chunk).collect();
        for chunk in touched {
            let (start, stop) = (offset.max(chunk * CHUNK), end.min((chunk + 1) * CHUNK));
            if stop - start == CHUNK {
                self.chunks.remove(&chunk);
                continue;
            }
            for_each_page(start, (stop - start) as usize, |page, within, range| {
                if range.len() == PAGE {
                    self.chunk_mut(page).0[page as usize % PAGES] = None;
                } else if self.page(page).is_some() {
                    self.page_mut(page)[within..within + range.len()].fill(0);
                }
            });
        }
    }

    /// Makes bytes what a device may return that was told to discard them: neither zeros nor what
    /// was there. Panics beyond the end.
    pub fn garble(&mut self, offset: u64, len: u64) {
        self.check(offset, len);
        let garbage = GARBAGE.get_or_init(|| Arc::new(std::array::from_fn(|at| PATTERN[at % PATTERN.len()])));
        for_each_page(offset, len as usize, |page, within, range| {
            if range.len() == PAGE {
                self.chunk_mut(page).0[page as usize % PAGES] = Some(garbage.clone());
            } else {
                self.page_mut(page)[within..][..range.len()].copy_from_slice(&garbage[within..][..range.len()]);
            }
        });
    }

    fn check(&self, offset: u64, len: u64) {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(inside, "{len} bytes at {offset} of an image of {}", self.len);
    }

    fn page(&self, page: u64) -> Option<&Page> {
        self.chunks.get(&(page / PAGES as u64))?.0[page as usize % PAGES].as_deref()
    }

    fn page_mut(&mut self, page: u64) -> &mut Page {
        let slot = &mut self.chunk_mut(page).0[page as usize % PAGES];
        Arc::make_mut(slot.get_or_insert_with(|| Arc::new([0; PAGE])))
    }

    fn chunk_mut(&mut self, page: u64) -> &mut Chunk {
        let chunk = self.chunks.entry(page / PAGES as u64);
        Arc::make_mut(chunk.or_insert_with(|| Arc::new(Chunk([const { None }; PAGES]))))
    }
}

/// Cuts a range at page boundaries:
/// `each(page number, offset in that page, range in the caller's buffer)`.
fn for_each_page(offset: u64, len: usize, mut each: impl FnMut(u64, usize, std::ops::Range<usize>)) {
    let mut done = 0;
    while done < len {
        let at = offset + done as u64;
        let within = (at % PAGE as u64) as usize;
        let part = (PAGE - within).min(len - done);
        each(at / PAGE as u64, within, done..done + part);
        done += part;
    }
}

/// A namespace in RAM. Requests run when they are submitted, so that completions wait for nothing.
pub struct MemoryDevice {
    memory: Arc<Memory>,
}

impl MemoryDevice {
    /// `len` bytes of zeroes, with logical blocks of 512 bytes and everything supported. `len`
    /// must be a multiple of 512.
    pub fn new(len: u64) -> Arc<Self> {
        Self::from_image(Image::new(len))
    }

    /// A device that begins with these contents.
    pub fn from_image(image: Image) -> Arc<Self> {
        let geometry = geometry(image.len());
        Self::with_geometry(image, geometry)
    }

    /// A device of any geometry, for tests of what depends on it. Panics unless `geometry.len` is
    /// the image's length and a multiple of the logical block.
    pub fn with_geometry(image: Image, geometry: Geometry) -> Arc<Self> {
        assert_eq!(geometry.len.get(), image.len());
        assert_eq!(geometry.len.get() % u64::from(geometry.logical_block), 0);
        Arc::new(Self { memory: Memory::new("memory", image, geometry) })
    }

    /// The contents now.
    pub fn snapshot(&self) -> Image {
        self.memory.snapshot()
    }

    /// Makes the device longer, in zeros. It is known once the device was looked at again.
    pub fn extend(&self, len: u64) {
        let mut image = self.memory.image.lock();
        image.len = image.len.max(len);
    }

    /// Number of reads so far.
    pub fn reads(&self) -> u64 {
        self.memory.reads.load(Ordering::Relaxed)
    }
}

/// Everything supported, in blocks of 512 bytes.
pub(crate) fn geometry(len: u64) -> Geometry {
    Geometry {
        len: Length::new(len),
        logical_block: 512,
        memory_alignment: 512,
        max_transfer: u32::MAX,
        queue_depth: u32::MAX,
        max_queues: u32::MAX,
        volatile_cache: true,
        discard: true,
        write_zeroes: true,
        read_only: false,
    }
}

impl BlockDevice for MemoryDevice {
    fn name(&self) -> &str {
        &self.memory.name
    }

    fn geometry(&self) -> &Geometry {
        &self.memory.geometry
    }

    fn open_queue(&self) -> Result<Box<dyn Queue>> {
        Ok(Box::new(MemoryQueue { memory: self.memory.clone(), completions: Completions::default() }))
    }

    fn map(&self, _region: &Arc<Region>) -> Result<()> {
        Ok(())
    }

    fn unmap(&self, _region: &Region) {}

    fn look_again(&self) -> Result<u64> {
        let len = self.memory.image.lock().len;
        self.memory.geometry.len.grow(len);
        Ok(len)
    }
}

/// What a device in RAM and its queues share.
pub(crate) struct Memory {
    pub(crate) name: Arc<str>,
    pub(crate) geometry: Geometry,
    image: Mutex<Image>,
    reads: AtomicU64,
    /// What is discarded becomes garbage, not zeros.
    garbles: bool,
}

impl Memory {
    pub(crate) fn new(name: &str, image: Image, geometry: Geometry) -> Arc<Self> {
        Arc::new(Self { name: name.into(), geometry, image: Mutex::new(image), reads: AtomicU64::new(0), garbles: false })
    }

    /// As [`Memory::new`]; what is discarded becomes garbage.
    pub(crate) fn garbling(name: &str, image: Image, geometry: Geometry) -> Arc<Self> {
        Arc::new(Self { name: name.into(), geometry, image: Mutex::new(image), reads: AtomicU64::new(0), garbles: true })
    }

    pub(crate) fn snapshot(&self) -> Image {
        self.image.lock().clone()
    }

    pub(crate) fn run(&self, request: &Request) -> Result<()> {
        request.check(&self.name, &self.geometry)?;
        match request.op {
            Op::Read => {
                self.reads.fetch_add(1, Ordering::Relaxed);
                let mut data = vec![0; request.len as usize];
                self.image.lock().read_at(request.offset, &mut data);
                scatter(request, &data)
            }
            Op::Write { .. } => {
                let data = gather(request)?;
                self.image.lock().write_at(request.offset, &data);
                Ok(())
            }
            Op::Flush => Ok(()),
            Op::Discard if self.garbles => {
                self.image.lock().garble(request.offset, request.len);
                Ok(())
            }
            Op::Discard | Op::WriteZeroes => {
                self.image.lock().zero(request.offset, request.len);
                Ok(())
            }
        }
    }
}

/// What a write's spans hold.
pub(crate) fn gather(request: &Request) -> Result<Vec<u8>> {
    let mut data = vec![0; request.len as usize];
    let mut rest = &mut data[..];
    for span in &request.spans {
        let (part, behind) = rest.split_at_mut(span.len);
        span.region.read_at(span.offset, part)?;
        rest = behind;
    }
    Ok(data)
}

/// Fills a read's spans.
fn scatter(request: &Request, mut data: &[u8]) -> Result<()> {
    for span in &request.spans {
        let (part, rest) = data.split_at(span.len);
        span.region.write_at(span.offset, part)?;
        data = rest;
    }
    Ok(())
}

struct MemoryQueue {
    memory: Arc<Memory>,
    completions: Completions<Completion>,
}

impl Queue for MemoryQueue {
    fn submit(&self, requests: &mut Vec<Request>) {
        let run = |request: Request| Completion { tag: request.tag, result: self.memory.run(&request) };
        let finished: Vec<Completion> = requests.drain(..).map(run).collect();
        self.completions.extend(finished);
    }

    fn complete(&self, wait: Wait, out: &mut Vec<Completion>) -> Result<usize> {
        let finished = self.completions.take(wait);
        let count = finished.len();
        out.extend(finished);
        Ok(count)
    }

    fn wake(&self) {
        self.completions.wake();
    }

    fn sleep_on(&self, _since: Instant) -> Result<Option<BorrowedFd<'_>>> {
        Ok(self.completions.sleep_on())
    }
}
