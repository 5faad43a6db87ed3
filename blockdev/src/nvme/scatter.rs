//! PRP lists (Base 4.1.1) and SGLs (Base 4.1.2): how the memory of a request is cut into commands,
//! and described to the controller. It guards the limits of both. A PRP entry is a page: only the
//! first may begin inside one and only the last may end inside one, so that two spans meet in a
//! PRP list only at page boundaries. SGLs have no such rule.
use std::ops::Range;

use zerocopy::little_endian::{U32, U64};

use super::dma::DmaMemory;
use crate::spec::{SglDescriptor, sgl};
use crate::{Region, Result, Span};

/// Bytes of a PRP entry.
const PRP: usize = 8;
/// Bytes of an SGL descriptor.
const DESCRIPTOR: usize = size_of::<SglDescriptor>();
/// The most memory that one command names. It bounds the lists that are kept for each command, and
/// stays within the 1024 PRP entries that QEMU's controller takes.
const MAX_TRANSFER: u64 = 4 << 20;
const MAX_PAGES: usize = 1024;
/// The most SGL descriptors of a command.
const MAX_DESCRIPTORS: usize = 256;
/// The smallest list kept for a command: 16 SGL descriptors.
const SMALLEST_LIST: usize = 256;

/// What the controller and the namespace allow. All in bytes, all powers of two but
/// `max_transfer`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// The logical block: every command is a multiple of it.
    pub(super) block: u64,
    /// The controller's memory page.
    pub(super) page: u64,
    /// The most that a command carries, a multiple of `page`.
    pub(super) max_transfer: u64,
    /// The most that a command fills with zeroes, a multiple of `page`.
    pub(super) max_zeroes: u64,
    /// Whether the controller takes SGLs.
    pub(super) sgl: bool,
    /// The most that a command carries through a bounce buffer; a multiple of `block`.
    pub(super) bounce: u64,
}

impl Limits {
    /// For a controller that allows `mdts` bytes a command (`None`: any number).
    pub(super) fn new(block: u64, page: u64, mdts: Option<u64>, sgl: bool, bounce: u64) -> Self {
        let max_zeroes = mdts.unwrap_or(u64::MAX - u64::MAX % page);
        let max_transfer = max_zeroes.min(MAX_TRANSFER);
        Self { block, page, max_transfer, max_zeroes, sgl, bounce: bounce.min(max_transfer) }
    }

    /// The most PRP entries of a command: the memory may begin and end inside a page.
    fn max_pages(&self) -> usize {
        ((self.max_transfer / self.page) as usize + 1).min(MAX_PAGES)
    }

    /// Bytes of memory that a command needs for its list. Either whole pages, or a part of a page
    /// that divides it.
    pub(super) fn list_len(&self) -> usize {
        let page = self.page as usize;
        let entries = self.max_pages() - 1; // the first is in the command
        if entries * PRP <= page {
            return (entries * PRP).next_power_of_two().max(SMALLEST_LIST);
        }
        // All pages but the last spend an entry to point to the next.
        (entries - 1).div_ceil(page / PRP - 1) * page
    }

    /// The most bytes of a command whose memory begins at `iova`. In a PRP list all that follows
    /// begins on a page boundary.
    fn room(&self, iova: u64) -> u64 {
        if self.sgl { self.max_transfer } else { self.max_transfer.min(self.max_pages() as u64 * self.page - iova % self.page) }
    }

    fn max_descriptors(&self) -> usize {
        (self.list_len() / DESCRIPTOR).min(MAX_DESCRIPTORS)
    }
}

/// Contiguous memory as the controller sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct IovaRange {
    pub(super) iova: u64,
    pub(super) len: u64,
}

impl IovaRange {
    fn end(&self) -> u64 {
        self.iova + self.len
    }
}

/// How far into a request's spans commands were cut.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cursor {
    span: usize,
    offset: usize,
    /// Bytes before it.
    pub(super) done: u64,
}

impl Cursor {
    /// Calls `each` with the memory of the next `len` bytes: span, offset in its region, and the
    /// range of the `len` bytes.
    pub(super) fn walk(
        &self,
        spans: &[Span],
        len: usize,
        mut each: impl FnMut(&Span, usize, Range<usize>) -> Result<()>,
    ) -> Result<()> {
        let (mut done, mut offset) = (0, self.offset);
        for span in &spans[self.span..] {
            let step = (span.len - offset).min(len - done);
            if step > 0 {
                each(span, span.offset + offset, done..done + step)?;
            }
            (done, offset) = (done + step, 0);
        }
        Ok(())
    }

    /// Moves on by `len` bytes.
    pub(super) fn advance(&mut self, spans: &[Span], len: u64) {
        self.done += len;
        let mut left = len as usize;
        while left > 0 {
            let step = left.min(spans[self.span].len - self.offset);
            self.offset += step;
            left -= step;
            if self.offset == spans[self.span].len {
                (self.span, self.offset) = (self.span + 1, 0);
            }
        }
    }
}

/// The memory of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cut {
    /// So many bytes, named by the ranges.
    Direct(u64),
    /// So many bytes, by way of a bounce buffer: memory that is not mapped, or spans that meet
    /// inside a logical block where PRPs cannot follow.
    Bounce(u64),
}

/// Cuts the next command off a request's spans, as large as it may be. `address` gives the IOVA of
/// a region that is mapped. The cursor must not be at the end.
pub(super) fn cut(
    limits: &Limits,
    spans: &[Span],
    cursor: &Cursor,
    address: impl Fn(&Region) -> Option<u64>,
    ranges: &mut Vec<IovaRange>,
) -> Cut {
    ranges.clear();
    let (mut total, mut room, mut unmapped) = (0u64, limits.max_transfer, 0u64);
    let mut offset = cursor.offset;
    for span in &spans[cursor.span..] {
        let (start, len) = (span.offset + offset, (span.len - offset) as u64);
        offset = 0;
        if len == 0 {
            continue;
        }
        let Some(base) = address(&span.region) else {
            if total > 0 {
                break;
            }
            unmapped += len;
            if unmapped >= limits.bounce {
                break;
            }
            continue;
        };
        if unmapped > 0 {
            break;
        }
        let iova = base + start as u64;
        if ranges.last().is_none_or(|last| last.end() != iova) {
            let joins = match ranges.last() {
                None => {
                    room = limits.room(iova);
                    true
                }
                Some(_) if limits.sgl => ranges.len() < limits.max_descriptors(),
                Some(last) => last.end() % limits.page == 0 && iova.is_multiple_of(limits.page),
            };
            if !joins {
                break;
            }
            ranges.push(IovaRange { iova, len: 0 });
        }
        let taken = len.min(room - total);
        let last = ranges.last_mut().expect("pushed above, if there was none");
        last.len += taken;
        total += taken;
        if total == room {
            break;
        }
    }
    let whole = |len: u64| len - len % limits.block;
    if unmapped > 0 {
        return Cut::Bounce(whole(unmapped.min(limits.bounce)).max(limits.block));
    }
    let keep = whole(total);
    if keep == 0 {
        return Cut::Bounce(limits.block);
    }
    let mut beyond = total - keep;
    while beyond > 0 {
        let last = ranges.last_mut().expect("they hold more than `keep`");
        let drop = beyond.min(last.len);
        last.len -= drop;
        beyond -= drop;
        if last.len == 0 {
            ranges.pop();
        }
    }
    Cut::Direct(keep)
}

/// A command's data pointer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DataPointer {
    pub(super) dptr: [u64; 2],
    /// Whether it is an SGL descriptor and not two PRPs.
    pub(super) sgl: bool,
}

/// The memory of one command's list.
pub(super) struct List<'a> {
    pub(super) memory: &'a DmaMemory,
    pub(super) offset: usize,
}

/// Writes the list of a command, where one is needed, and gives its data pointer. `entries` is
/// scratch space.
pub(super) fn describe(limits: &Limits, ranges: &[IovaRange], list: &List<'_>, entries: &mut Vec<U64>) -> DataPointer {
    // Two PRPs are inside the command; anything longer an SGL says in fewer words, where the
    // controller takes one.
    let short = ranges.iter().map(|range| pages_of(range, limits.page)).sum::<u64>() <= 2;
    let joins = || ranges.windows(2).all(|two| two[0].end() % limits.page == 0 && two[1].iova % limits.page == 0);
    if limits.sgl && !(short && joins()) { sgl(ranges, list, entries) } else { prp(limits, ranges, list, entries) }
}

/// Pages that a range touches.
fn pages_of(range: &IovaRange, page: u64) -> u64 {
    (range.iova % page + range.len).div_ceil(page)
}

fn prp(limits: &Limits, ranges: &[IovaRange], list: &List<'_>, entries: &mut Vec<U64>) -> DataPointer {
    let page = limits.page;
    let mut pages = ranges.iter().flat_map(|range| {
        let first = range.iova - range.iova % page;
        (0..pages_of(range, page)).map(move |n| if n == 0 { range.iova } else { first + n * page })
    });
    let prp1 = pages.next().expect("a command has memory");
    let Some(second) = pages.next() else { return DataPointer { dptr: [prp1, 0], sgl: false } };
    let Some(third) = pages.next() else { return DataPointer { dptr: [prp1, second], sgl: false } };
    entries.clear();
    entries.extend([second, third].into_iter().chain(pages).map(U64::new));
    let per_page = page as usize / PRP;
    // Where more follow than a page of the list holds, its last entry points to the next page.
    let mut at = per_page;
    while entries.len() > at {
        entries.insert(at - 1, U64::new(list.memory.iova(list.offset + at * PRP)));
        at += per_page;
    }
    list.memory.write(list.offset, &entries[..]);
    DataPointer { dptr: [prp1, list.memory.iova(list.offset)], sgl: false }
}

fn sgl(ranges: &[IovaRange], list: &List<'_>, entries: &mut Vec<U64>) -> DataPointer {
    let words = |address, len, kind| {
        let descriptor = SglDescriptor { address: U64::new(address), len: U32::new(len), reserved: [0; 3], kind };
        let words: [U64; 2] = zerocopy::transmute!(descriptor);
        words
    };
    let descriptor = match ranges {
        [one] => words(one.iova, one.len as u32, sgl::DATA_BLOCK),
        many => {
            entries.clear();
            entries.extend(many.iter().flat_map(|range| words(range.iova, range.len as u32, sgl::DATA_BLOCK)));
            list.memory.write(list.offset, &entries[..]);
            words(list.memory.iova(list.offset), (many.len() * DESCRIPTOR) as u32, sgl::LAST_SEGMENT)
        }
    };
    DataPointer { dptr: descriptor.map(U64::get), sgl: true }
}

#[cfg(test)]
mod tests;
