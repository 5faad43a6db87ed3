//! A pool of buffers of one owner. A reply to a read needs memory that the device fills and that
//! is then borrowed as bytes without another copy; this module guards the borrow: it exists only
//! while no request is in flight on the buffer.
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::region::HUGE_PAGE;
use crate::{BlockDevice, Region, Result, Span};

const SMALLEST: usize = 4 << 10;
const LARGEST: usize = 4 << 20;
/// Buffers from this size on share huge pages with others of their size. A command to the device
/// names fewer pieces of memory then, of which it takes a limited number; and a burst of buffers
/// leaves at most a few times as much memory behind as is kept of it.
const SHARING: usize = 256 << 10;
const CLASSES: usize = (LARGEST / SMALLEST).ilog2() as usize + 1;

/// Hands out [`Buffer`]s in sizes that are powers of two from 4 KiB to 4 MiB, mapped for a
/// device's DMA, and keeps returned ones for later callers up to a limit.
///
/// Locks: `cache`, for moments; never while memory is allocated or mapped.
pub struct BufferPool {
    device: Arc<dyn BlockDevice>,
    /// The most bytes kept for later.
    limit: usize,
    cache: Mutex<Cache>,
}

#[derive(Default)]
struct Cache {
    classes: [Vec<Arc<Region>>; CLASSES],
    bytes: usize,
    /// Returned while a request still held a span: not to be reused, nor unmapped, before that
    /// request is over.
    busy: Vec<Arc<Region>>,
}

impl BufferPool {
    /// A pool for a device. At most `limit` bytes of returned buffers are kept.
    pub fn new(device: Arc<dyn BlockDevice>, limit: usize) -> Arc<Self> {
        Arc::new(Self { device, limit, cache: Mutex::default() })
    }

    /// A buffer of at least `len` bytes, aligned to a page. It holds what its last user left
    /// there. A buffer beyond 4 MiB is allocated for this one use.
    ///
    /// # Errors
    /// [`crate::Error::Memory`] when the kernel has no memory; those of [`BlockDevice::map`].
    pub fn get(self: &Arc<Self>, len: usize) -> Result<Buffer> {
        let size = len.checked_next_power_of_two().unwrap_or(len).max(SMALLEST);
        let recycled = class(size).and_then(|class| {
            let mut cache = self.cache.lock();
            let region = cache.classes[class].pop()?;
            cache.bytes -= size;
            Some(region)
        });
        let region = match recycled {
            Some(region) => region,
            None => self.allocate(size)?,
        };
        Ok(Buffer { pool: self.clone(), len: region.len(), region: Mutex::new(Some(region)) })
    }

    /// A new region. Others that come with it are kept; where the pool has no room for them, it
    /// comes alone.
    fn allocate(&self, size: usize) -> Result<Arc<Region>> {
        let has_room = || self.cache.lock().bytes + HUGE_PAGE - size <= self.limit;
        if !(SHARING..HUGE_PAGE).contains(&size) || !has_room() {
            let region = Region::allocate(size)?;
            self.device.map(&region)?;
            return Ok(region);
        }
        let mut parts = Region::allocate_parts(HUGE_PAGE, size)?;
        let first = parts.swap_remove(0);
        self.device.map(&first)?;
        for part in parts {
            // One that cannot be mapped is not needed yet.
            if self.device.map(&part).is_ok() {
                self.put(part);
            }
        }
        Ok(first)
    }

    fn put(&self, region: Arc<Region>) {
        let mut beyond = Vec::new();
        let mut cache = self.cache.lock();
        cache.busy.push(region);
        let mut at = 0;
        while let Some(region) = cache.busy.get_mut(at) {
            if Arc::get_mut(region).is_none() {
                at += 1;
                continue;
            }
            let region = cache.busy.swap_remove(at);
            match class(region.len()) {
                Some(class) if cache.bytes + region.len() <= self.limit => {
                    cache.bytes += region.len();
                    cache.classes[class].push(region);
                }
                _ => beyond.push(region),
            }
        }
        drop(cache);
        beyond.iter().for_each(|region| self.device.unmap(region));
    }
}

fn class(size: usize) -> Option<usize> {
    (size <= LARGEST).then(|| (size / SMALLEST).ilog2() as usize)
}

impl Drop for BufferPool {
    fn drop(&mut self) {
        let cache = self.cache.get_mut();
        let idle: Vec<_> = cache.busy.extract_if(.., |region| Arc::get_mut(region).is_some()).collect();
        if !cache.busy.is_empty() {
            tracing::warn!(regions = cache.busy.len(), "requests outlive their buffer pool; their memory stays mapped");
        }
        for region in cache.classes.iter().flatten().chain(&idle) {
            self.device.unmap(region);
        }
    }
}

/// Memory of one owner: spans for requests, and plain bytes between them. It goes back to its pool
/// when dropped.
pub struct Buffer {
    pool: Arc<BufferPool>,
    len: usize,
    /// `None` only while being dropped. Locked for moments, to look whether the region is held by
    /// spans as well.
    region: Mutex<Option<Arc<Region>>>,
}

/// Why the region is there.
const UNTIL_DROPPED: &str = "a buffer has its region until it is dropped";
/// Why the bytes are not to be had.
const IN_FLIGHT: &str = "a buffer's bytes were asked for while a request was in flight on it";

impl Buffer {
    /// Length in bytes: at least what was asked for.
    #[allow(clippy::len_without_is_empty)] // a buffer is never empty
    pub fn len(&self) -> usize {
        self.len
    }

    /// The bytes in `range`, for a request. The borrow is exclusive, so that no slice of
    /// [`Buffer::bytes`] is alive while a request may change the memory.
    ///
    /// # Panics
    /// If the range reaches beyond the buffer's end.
    pub fn span(&mut self, range: Range<usize>) -> Span {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of a buffer of {}", self.len);
        self.region.get_mut().as_ref().expect(UNTIL_DROPPED).span(range)
    }

    /// The contents.
    ///
    /// # Panics
    /// While a span of it is alive, since a request may be in flight on it.
    #[allow(unsafe_code)]
    pub fn bytes(&self) -> &[u8] {
        let mut region = self.region.lock();
        let region: *const Region = Arc::get_mut(region.as_mut().expect(UNTIL_DROPPED)).expect(IN_FLIGHT);
        // SAFETY: the region stays where it is until the buffer is dropped. No other thread had a
        // handle on it, weak or strong, a moment ago, and none can be made while the slice lives,
        // because that takes `&mut self`: no request and no writer.
        unsafe { (*region).bytes() }
    }

    /// The contents, to be changed.
    ///
    /// # Panics
    /// As [`Buffer::bytes`].
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let region = self.region.get_mut().as_mut().expect(UNTIL_DROPPED);
        Arc::get_mut(region).expect(IN_FLIGHT).bytes_mut()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(region) = self.region.get_mut().take() {
            self.pool.put(region);
        }
    }
}
