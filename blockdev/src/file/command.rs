//! Commands of io_uring: what one asks of the kernel, and how a request's memory is cut into them.

use io_uring::types::{Fixed, FsyncFlags};
use io_uring::{opcode, squeue};
use smallvec::SmallVec;

use super::target::Kind;
use crate::{Op, Span};

/// The device, among the files registered with a ring.
const FILE: Fixed = Fixed(0);
/// The kernel's UIO_MAXIOV.
const MAX_IOVECS: usize = 1024;

/// What is still to do of a command, which is a request or a part of one.
pub(super) struct Command {
    /// Key of its request.
    pub request: usize,
    pub offset: u64,
    pub len: u64,
    pub memory: Iovecs,
    /// Whether the kernel has given it back with EFAULT before.
    pub faulted: bool,
}

/// Addresses in the regions of the command's request. The kernel may read the list until the
/// command is submitted.
pub(super) struct Iovecs(pub SmallVec<[libc::iovec; 1]>);

// SAFETY: the addresses lie in regions, which may be used from any thread, and are kept alive by
// the request.
unsafe impl Send for Iovecs {}

impl Command {
    /// The entry of a submission queue for it, of a request of that kind.
    pub fn entry(&self, op: Op, kind: Kind) -> squeue::Entry {
        let iovecs = &self.memory.0;
        let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let fallocate = |mode| opcode::Fallocate::new(FILE, self.len).offset(self.offset).mode(mode).build();
        match (op, &iovecs[..]) {
            (Op::Read, [one]) => opcode::Read::new(FILE, one.iov_base.cast(), one.iov_len as u32).offset(self.offset).build(),
            (Op::Read, many) => opcode::Readv::new(FILE, many.as_ptr(), many.len() as u32).offset(self.offset).build(),
            (Op::Write { fua }, memory) => {
                let flags = if fua { libc::RWF_DSYNC } else { 0 };
                match memory {
                    [one] => opcode::Write::new(FILE, one.iov_base.cast(), one.iov_len as u32)
                        .offset(self.offset)
                        .rw_flags(flags)
                        .build(),
                    many => {
                        opcode::Writev::new(FILE, many.as_ptr(), many.len() as u32).offset(self.offset).rw_flags(flags).build()
                    }
                }
            }
            (Op::Flush, _) => opcode::Fsync::new(FILE).flags(FsyncFlags::DATASYNC).build(),
            (Op::Discard, _) => fallocate(punch),
            (Op::WriteZeroes, _) => fallocate(match kind {
                Kind::Block => libc::FALLOC_FL_ZERO_RANGE,
                Kind::File => punch,
            }),
        }
    }

    /// Drops the first `done` bytes, which the kernel did.
    pub fn advance(&mut self, done: u64) {
        self.offset += done;
        self.len -= done;
        let mut done = done as usize;
        let whole = self.memory.0.iter().take_while(|iovec| {
            let whole = iovec.iov_len <= done;
            if whole {
                done -= iovec.iov_len;
            }
            whole
        });
        let whole = whole.count();
        self.memory.0.drain(..whole);
        if let Some(first) = self.memory.0.first_mut() {
            first.iov_base = first.iov_base.cast::<u8>().wrapping_add(done).cast();
            first.iov_len -= done;
        }
    }
}

/// Cuts memory into commands of at most `max_transfer` bytes and [`MAX_IOVECS`] addresses.
/// Adjacent spans become one. Every span is a multiple of the logical block, so that every cut is.
pub(super) fn cut(spans: &[Span], max_transfer: usize) -> SmallVec<[(usize, SmallVec<[libc::iovec; 1]>); 1]> {
    let mut commands: SmallVec<[(usize, SmallVec<[libc::iovec; 1]>); 1]> = SmallVec::new();
    for span in spans {
        let mut at = span.region.as_ptr().wrapping_add(span.offset);
        let mut left = span.len;
        while left > 0 {
            let room = match commands.last() {
                Some((len, memory)) if *len < max_transfer => {
                    let adjacent = memory.last().is_some_and(|last| ends_at(last, at));
                    if adjacent || memory.len() < MAX_IOVECS { max_transfer - len } else { 0 }
                }
                _ => 0,
            };
            if room == 0 {
                commands.push((0, SmallVec::new()));
                continue;
            }
            let Some((len, memory)) = commands.last_mut() else { continue };
            let taken = left.min(room);
            match memory.last_mut() {
                Some(last) if ends_at(last, at) => last.iov_len += taken,
                _ => memory.push(libc::iovec { iov_base: at.cast(), iov_len: taken }),
            }
            *len += taken;
            at = at.wrapping_add(taken);
            left -= taken;
        }
    }
    commands
}

fn ends_at(iovec: &libc::iovec, address: *mut u8) -> bool {
    iovec.iov_base.cast::<u8>().wrapping_add(iovec.iov_len) == address
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Region;

    proptest! {
        #[test]
        fn commands_cover_the_memory_in_order_within_their_limits(
            ranges in proptest::collection::vec((0..64usize, 1..9usize), 1..3000),
            max_transfer in 1..64usize,
            done in 0..64u64,
        ) {
            let region = Region::allocate(72 * 512).expect("memory");
            let spans: Vec<Span> = ranges.iter().map(|(start, len)| region.span(start * 512..(start + len) * 512)).collect();
            let base = region.as_ptr() as usize;
            let blocks = |iovecs: &[libc::iovec]| -> Vec<usize> {
                let blocks = |iovec: &libc::iovec| {
                    let start = iovec.iov_base as usize - base;
                    (start..start + iovec.iov_len).step_by(512)
                };
                iovecs.iter().flat_map(blocks).collect()
            };
            let wanted: Vec<usize> = spans.iter().flat_map(|span| (0..span.len / 512).map(|n| span.offset + n * 512)).collect();
            let commands = cut(&spans, max_transfer * 512);
            let covered: Vec<usize> = commands.iter().flat_map(|(_, memory)| blocks(memory)).collect();
            prop_assert_eq!(&covered, &wanted);
            for (number, (len, memory)) in commands.iter().enumerate() {
                prop_assert_eq!(*len, blocks(memory).len() * 512);
                prop_assert!(*len <= max_transfer * 512 && memory.len() <= MAX_IOVECS);
                let full = *len == max_transfer * 512 || memory.len() == MAX_IOVECS;
                prop_assert!(full || number + 1 == commands.len(), "no command is smaller than it has to be");
            }
            // Continuing one of them leaves the rest of it.
            let (len, memory) = commands.into_iter().next().expect("there is one");
            let all = blocks(&memory);
            let mut command = Command { request: 0, offset: 4096, len: len as u64, memory: Iovecs(memory), faulted: false };
            let done = done.min(len as u64 / 512);
            command.advance(done * 512);
            prop_assert_eq!((command.offset, command.len), (4096 + done * 512, len as u64 - done * 512));
            prop_assert_eq!(blocks(&command.memory.0), &all[done as usize..]);
        }
    }
}
