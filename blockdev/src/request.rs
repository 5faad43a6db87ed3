//! Requests and their completions. Every backend takes a request only after [`Request::check`], so
//! that no backend has to trust its caller with ranges or alignment.
use std::sync::Arc;

use smallvec::SmallVec;

use crate::{Error, Geometry, Op, Result, Span};

/// The memory of a request: often one span, and then nothing is allocated for it.
pub type Spans = SmallVec<[Span; 1]>;

/// A request. `offset` and `len` are bytes on the namespace and multiples of
/// [`Geometry::logical_block`]; both are 0 for a flush.
#[derive(Debug)]
pub struct Request {
    /// What to do.
    pub op: Op,
    /// First byte on the namespace.
    pub offset: u64,
    /// Bytes on the namespace. It may exceed [`Geometry::max_transfer`].
    pub len: u64,
    /// Memory of a read or write, in order; adds up to `len`. The start and length of each span
    /// are multiples of [`Geometry::memory_alignment`]. Empty for the other operations.
    pub spans: Spans,
    /// Given back in the completion. [`crate::Io`] sets it; a caller of [`crate::Queue`] chooses
    /// it.
    pub tag: u64,
}

/// The end of one request.
#[derive(Debug)]
pub struct Completion {
    /// The request's tag.
    pub tag: u64,
    /// Whether all of it was done. After an error, any part of a write may have reached the
    /// device.
    pub result: Result<()>,
}

impl Request {
    /// A read of as many bytes as the spans hold, from byte `offset` of the namespace.
    pub fn read(offset: u64, spans: impl Into<Spans>) -> Self {
        Self::with_spans(Op::Read, offset, spans.into())
    }

    /// A write of all that the spans hold, to byte `offset` of the namespace. With `fua` it is
    /// durable when it completes (NVM Command Set specification, Write, Force Unit Access).
    pub fn write(offset: u64, spans: impl Into<Spans>, fua: bool) -> Self {
        Self::with_spans(Op::Write { fua }, offset, spans.into())
    }

    /// A flush of the device's volatile cache (NVM Command Set specification, Flush).
    pub fn flush() -> Self {
        Self::without_spans(Op::Flush, 0, 0)
    }

    /// A discard of `len` bytes (NVM Command Set specification, Dataset Management, Deallocate).
    /// Only where [`Geometry::discard`] says so.
    pub fn discard(offset: u64, len: u64) -> Self {
        Self::without_spans(Op::Discard, offset, len)
    }

    /// A fill of `len` bytes with zeroes (NVM Command Set specification, Write Zeroes). Only where
    /// [`Geometry::write_zeroes`] says so.
    pub fn write_zeroes(offset: u64, len: u64) -> Self {
        Self::without_spans(Op::WriteZeroes, offset, len)
    }

    fn with_spans(op: Op, offset: u64, spans: Spans) -> Self {
        let len = spans.iter().map(|span| span.len as u64).sum();
        Self { op, offset, len, spans, tag: 0 }
    }

    fn without_spans(op: Op, offset: u64, len: u64) -> Self {
        Self { op, offset, len, spans: Spans::new(), tag: 0 }
    }

    /// Checks that a device of this geometry can take the request. Every backend calls it before
    /// it does anything; `device` is its DEVICE string, for the error.
    ///
    /// # Errors
    /// - [`Error::ReadOnly`] for a change to a device that is read-only.
    /// - [`Error::Unsupported`] for a command that the device does not have.
    /// - [`Error::Alignment`] unless offset and length are multiples of the logical block, and
    ///   each span's start and length are multiples of [`Geometry::memory_alignment`].
    /// - [`Error::OutOfRange`] beyond the device's end, [`Error::RegionRange`] beyond a region's.
    /// - [`Error::RegionReadOnly`] for a read into memory that may not be written.
    /// - [`Error::SpanLength`] unless the spans add up to the length of a read or write.
    pub fn check(&self, device: &Arc<str>, geometry: &Geometry) -> Result<()> {
        let (op, offset, len) = (self.op, self.offset, self.len);
        let device = || device.clone();
        if geometry.read_only && op != Op::Read && op != Op::Flush {
            return Err(Error::ReadOnly { device: device() });
        }
        if op == Op::Discard && !geometry.discard || op == Op::WriteZeroes && !geometry.write_zeroes {
            return Err(Error::Unsupported { device: device(), reason: format!("has no {op} command") });
        }
        let misaligned = |what, required| Error::Alignment { device: device(), op, offset, len, what, required };
        let block = u64::from(geometry.logical_block);
        if offset % block != 0 || len % block != 0 {
            return Err(misaligned("offset and length", geometry.logical_block));
        }
        if offset.checked_add(len).is_none_or(|end| end > geometry.len.get()) {
            return Err(Error::OutOfRange { device: device(), op, offset, len, size: geometry.len.get() });
        }
        let mut spanned = 0u64;
        for span in &self.spans {
            span.region.check(span.offset, span.len)?;
            if op == Op::Read && !span.region.writable() {
                return Err(Error::RegionReadOnly);
            }
            if (span.offset | span.len) % geometry.memory_alignment as usize != 0 {
                return Err(misaligned("the memory's addresses and lengths", geometry.memory_alignment));
            }
            spanned += span.len as u64;
        }
        let expected = if matches!(op, Op::Read | Op::Write { .. }) { len } else { 0 };
        if spanned != expected {
            return Err(Error::SpanLength { device: device(), op, offset, len, spanned });
        }
        Ok(())
    }
}
