//! Buffers of one owner, recycled. A reply to a read needs memory that the device fills and that is then borrowed as bytes
//! without another copy; this module guards the borrow: it exists only while no request is in flight on the buffer.
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use parking_lot::Mutex;

use crate::{BlockDevice, Region, Result, Span};

const SMALLEST: usize = 4 << 10;
const LARGEST: usize = 4 << 20;
const CLASSES: usize = (LARGEST / SMALLEST).ilog2() as usize + 1;

/// Hands out [`Buffer`]s in sizes that are powers of two from 4 KiB to 4 MiB, mapped for a device's DMA, and keeps returned
/// ones for the next caller up to a limit.
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
    /// Returned while a request still held a span: not to be reused, nor unmapped, before that request is over.
    busy: Vec<Arc<Region>>,
}

impl BufferPool {
    /// A pool for a device. At most `limit` bytes of returned buffers are kept.
    pub fn new(device: Arc<dyn BlockDevice>, limit: usize) -> Arc<Self> {
        Arc::new(Self { device, limit, cache: Mutex::default() })
    }

    /// A buffer of at least `len` bytes. Its contents are whatever its last user left. Beyond 4 MiB it is allocated for this
    /// one use.
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
            None => {
                let region = Region::allocate(size)?;
                self.device.map(&region)?;
                region
            }
        };
        Ok(Buffer { pool: self.clone(), region: Some(region) })
    }

    fn put(&self, region: Arc<Region>) {
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
                _ => self.device.unmap(&region),
            }
        }
    }
}

fn class(size: usize) -> Option<usize> {
    (size <= LARGEST).then(|| (size / SMALLEST).ilog2() as usize)
}

impl Drop for BufferPool {
    fn drop(&mut self) {
        let cache = self.cache.get_mut();
        cache.busy.retain_mut(|region| Arc::get_mut(region).is_none());
        if !cache.busy.is_empty() {
            tracing::warn!(regions = cache.busy.len(), "requests outlive their buffer pool; their memory stays mapped");
        }
        for region in cache.classes.iter().flatten() {
            self.device.unmap(region);
        }
    }
}

/// Memory of one owner: for requests as spans, and between them as plain bytes. Goes back to its pool when dropped.
pub struct Buffer {
    pool: Arc<BufferPool>,
    /// `None` only while being dropped.
    region: Option<Arc<Region>>,
}

impl Buffer {
    fn region(&self) -> &Arc<Region> {
        self.region.as_ref().expect("a buffer has its region until it is dropped")
    }

    /// Bytes it holds: at least what was asked for.
    #[allow(clippy::len_without_is_empty)] // a buffer is never empty
    pub fn len(&self) -> usize {
        self.region().len()
    }

    /// A range of it for a request. Exclusive, so that no borrowed [`Buffer::bytes`] can be alive while a request may change
    /// them.
    ///
    /// # Panics
    ///
    /// If the range reaches beyond the buffer's end.
    pub fn span(&mut self, range: Range<usize>) -> Span {
        assert!(range.start <= range.end && range.end <= self.len(), "{range:?} of a buffer of {}", self.len());
        self.region().span(range)
    }

    /// Its bytes.
    ///
    /// # Panics
    ///
    /// While a span of it is still alive, which is to say, a request may be in flight.
    #[allow(unsafe_code)]
    pub fn bytes(&self) -> &[u8] {
        let region = self.region();
        assert_eq!(Arc::strong_count(region), 1, "a buffer's bytes were asked for while a request was in flight on it");
        // Pairs with the release of the span dropped last: what its holder wrote is seen below.
        fence(Ordering::Acquire);
        // SAFETY: the only other handles on the region are spans. None is alive (the count is 1), and none can be made while
        // the slice lives, because that takes `&mut self`. Without a span there is neither request nor writer.
        unsafe { region.bytes() }
    }

    /// Its bytes, to be changed.
    ///
    /// # Panics
    ///
    /// As [`Buffer::bytes`].
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let region = self.region.as_mut().expect("a buffer has its region until it is dropped");
        let region = Arc::get_mut(region).expect("a buffer's bytes were asked for while a request was in flight on it");
        region.bytes_mut()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(region) = self.region.take() {
            self.pool.put(region);
        }
    }
}
