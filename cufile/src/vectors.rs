//! One range of a file, and many ranges of memory: `cuFileReadv` and `cuFileWritev`.
//!
//! On a gpunvme mount all of memory that CUDA knows is one request, or one for what is registered
//! and one for what is not, and all are in flight at once; meanwhile this thread moves what goes to
//! ordinary memory. Files elsewhere are read and written one range after the other.
#![allow(unsafe_code)]

use crate::driver::Open;
use crate::failure::{Code, Failure, Result};
use crate::files::{Direction, MountFile, Registered, Server};
use crate::memory;
use crate::statistics::{self, Done};
use crate::transfer::{self, Outcome, Range};
use gpunvme::gpu::{Segment, Transfers};
use std::sync::mpsc;
use std::time::Instant;

/// Moves the bytes of ranges that follow each other in the file, and returns how many of its
/// beginning on: fewer than asked for where the file ends, or where something failed later.
///
/// # Safety
/// As [`transfer::perform`], of each range. Those of a read do not overlap.
pub unsafe fn perform(open: &Open, file: &Registered, direction: Direction, ranges: &[Range]) -> Result<usize> {
    let Some(&first) = ranges.first() else { return file.check(direction).map(|()| 0) };
    let started = Instant::now();
    let all = Range { len: len_of(ranges), ..first };
    let mut parts = match (file.check(direction), &file.server) {
        (Err(failure), _) => vec![Part { len: all.len, done: Err(failure) }],
        // SAFETY: as the caller says.
        (Ok(()), Server::Mount(on)) => unsafe { on_mount(open, on, direction, ranges) },
        (Ok(()), Server::Real(_) | Server::Plain(_)) => in_turn(ranges, |range| {
            // SAFETY: as the caller says.
            unsafe { transfer::done(open, file, direction, range) }
        }),
    };
    // As readv(2): what was moved before is told first.
    let mut failure = None;
    let whole = parts.iter().position(|part| match &part.done {
        Ok(done) => done.bytes < part.len,
        Err(error) => {
            failure = Some(error.clone());
            true
        }
    });
    if let Some(at) = whole {
        parts.truncate(at + usize::from(failure.is_none()));
    }
    let done: Vec<Done> = parts.iter().filter_map(|part| part.done.as_ref().ok().copied()).collect();
    let bytes = done.iter().map(|done| done.bytes).sum();
    let result = match failure {
        Some(failure) if bytes == 0 => Err(failure),
        _ => Ok(bytes),
    };
    statistics::record_vectored(direction, all, started, result.as_ref().map(|_| done.as_slice()));
    result
}

/// What became of ranges that follow each other, of so many bytes together.
struct Part {
    len: usize,
    done: Result<Done>,
}

/// One range after the other, until one is not done whole.
fn in_turn(ranges: &[Range], mut perform: impl FnMut(Range) -> Result<Done>) -> Vec<Part> {
    let mut parts = Vec::with_capacity(ranges.len());
    for &range in ranges {
        let done = perform(range);
        let is_whole = done.as_ref().is_ok_and(|done| done.bytes == range.len);
        parts.push(Part { len: range.len, done });
        if !is_whole {
            break;
        }
    }
    parts
}

/// What has to be known of a range's memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// System calls move it: CUDA does not know it, or it is the host's and nothing else can.
    ByCalls,
    /// CUDA knows it; the application registered it, or did not.
    Known { registered: bool },
}

/// # Safety
/// As [`perform`].
unsafe fn on_mount(open: &Open, on: &MountFile, direction: Direction, ranges: &[Range]) -> Vec<Part> {
    let is_registered = |range: &Range| open.buffers.cover(range.address, range.len as u64);
    let registered = is_registered(&ranges[0]);
    let transfers = on.mount.transfers(registered);
    // Mostly all are of one kind, which is seen by trying.
    if let Ok(Some(transfers)) = transfers
        && ranges.iter().all(|range| is_registered(range) == registered)
        // SAFETY: as the caller says.
        && let Outcome::Done(done) = unsafe { wait(transfers, on, direction, ranges) }
    {
        return vec![Part { len: len_of(ranges), done }];
    }
    let kind = |range: &Range| match memory::at(range.address) {
        Ok(None) => Kind::ByCalls,
        Ok(found) if transfers.is_err() && memory::is_on_host(found) => Kind::ByCalls,
        Ok(Some(_)) | Err(_) => Kind::Known { registered: is_registered(range) },
    };
    let kinds: Vec<Kind> = ranges.iter().map(kind).collect();
    // SAFETY: as the caller says.
    unsafe { by_kind(on, direction, ranges, &kinds) }
}

/// Begins a request for each run of ranges of one kind, moves the bytes of ordinary memory, and
/// waits for all.
///
/// # Safety
/// As [`perform`]. There are as many kinds as ranges.
unsafe fn by_kind(on: &MountFile, direction: Direction, ranges: &[Range], kinds: &[Kind]) -> Vec<Part> {
    let (tell, told) = mpsc::channel();
    let mut runs: Vec<(Kind, &[Range], Vec<Part>)> = Vec::new();
    let mut rest = ranges;
    for run in kinds.chunk_by(|one, next| one == next) {
        let (these, others) = rest.split_at(run.len());
        rest = others;
        let (kind, at) = (run[0], runs.len());
        let mut parts = Vec::new();
        if let Kind::Known { registered } = kind {
            // SAFETY: as the caller says.
            let refused = unsafe { begin(on, direction, these, registered, at, tell.clone()) }.err();
            parts.extend(refused.map(|failure| Part { len: len_of(these), done: Err(failure) }));
        }
        runs.push((kind, these, parts));
    }
    drop(tell);
    for (_, these, parts) in runs.iter_mut().filter(|(kind, ..)| *kind == Kind::ByCalls) {
        *parts = in_turn(these, |range| {
            // SAFETY: as the caller says.
            unsafe { transfer::by_calls(on, direction, range) }
        });
    }
    // It ends when no request can tell any more.
    for (at, result) in told {
        let these = runs[at].1;
        runs[at].2 = vec![Part { len: len_of(these), done: known(transfer::outcome_of_all(these, result)) }];
    }
    runs.into_iter().flat_map(|(_, _, parts)| parts).collect()
}

fn len_of(ranges: &[Range]) -> usize {
    ranges.iter().map(|range| range.len).sum()
}

/// The outcome, for memory whose beginning CUDA knows.
fn known(outcome: Outcome) -> Result<Done> {
    match outcome {
        Outcome::Done(done) => done,
        Outcome::Ordinary => Err(Code::PointerRange.into()),
    }
}

fn segments(ranges: &[Range]) -> Vec<Segment> {
    ranges.iter().map(Range::segment).collect()
}

/// # Safety
/// As [`perform`].
unsafe fn wait(transfers: &Transfers, on: &MountFile, direction: Direction, ranges: &[Range]) -> Outcome {
    let segments = segments(ranges);
    // SAFETY: as the caller says.
    let result = unsafe {
        match direction {
            Direction::Read => transfers.read(&on.file, &segments),
            Direction::Write => transfers.write(&on.file, &segments),
        }
    };
    transfer::outcome_of_all(ranges, result)
}

/// Begins a request, which tells its outcome with this number.
///
/// # Safety
/// As [`perform`], until it has told.
unsafe fn begin(
    on: &MountFile,
    direction: Direction,
    ranges: &[Range],
    registered: bool,
    number: usize,
    tell: mpsc::Sender<(usize, gpunvme::Result<gpunvme::Transfer>)>,
) -> Result<()> {
    let transfers = on.mount.transfers(registered)?.ok_or(Code::DeviceNotFound)?;
    let segments = segments(ranges);
    let done = move |result| {
        let _ = tell.send((number, result)); // the caller waits for it
    };
    // SAFETY: as the caller says.
    let begun = unsafe {
        match direction {
            Direction::Read => transfers.read_then(&on.file, &segments, done),
            Direction::Write => transfers.write_then(&on.file, &segments, done),
        }
    };
    begun.map_err(|error| known(transfer::outcome_of_all(ranges, Err(error))).err().unwrap_or(Failure::from(Code::Internal)))
}
