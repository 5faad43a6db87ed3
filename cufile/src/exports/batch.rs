//! Batches.

use super::{as_pointer, list, status, store};
use crate::abi::{BatchEvent, BatchRequest, Status, Timespec};
use crate::batch::Batches;
use crate::driver;
use crate::failure::{Code, Result};
use crate::statistics::{self, Event};
use std::ffi::{c_uint, c_void};
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

/// Makes a batch of at most so many requests. Opens the driver.
///
/// # Safety
/// `batch` is NULL or has room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileBatchIOSetUp(batch: *mut *mut c_void, capacity: c_uint) -> Status {
    let set_up = || {
        let made = driver::open_if_needed().and_then(|open| open.batches.add(capacity as usize));
        statistics::event(Event::BatchSetup, &made);
        made.map(as_pointer)
    };
    // SAFETY: as the caller says.
    unsafe { store(batch, set_up) }
}

/// Begins requests.
///
/// # Safety
/// `requests` is NULL or of `len` values, whose memory is the application's until they have ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileBatchIOSubmit(
    batch: *mut c_void,
    len: c_uint,
    requests: *const BatchRequest,
    flags: c_uint,
) -> Status {
    let started = Instant::now();
    let submit = || -> Result<()> {
        if flags != 0 || len == 0 {
            return Err(Code::InvalidValue.into());
        }
        let open = driver::opened()?;
        // SAFETY: as the caller says.
        unsafe { open.batches.get(batch as usize)?.submit(&open, list(requests, len as usize)?) }
    };
    let submitted = submit();
    statistics::batch_submitted(started, len as usize, &submitted);
    status(submitted)
}

/// Takes requests that have ended: at most `count`, which is how many there were afterwards. Waits
/// for `least` of them, for at most so long.
///
/// # Safety
/// `count` and `timeout` are NULL or point to what they are declared to; `events` is NULL or has
/// room for `count`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileBatchIOGetStatus(
    batch: *mut c_void,
    least: c_uint,
    count: *mut c_uint,
    events: *mut BatchEvent,
    timeout: *const Timespec,
) -> Status {
    let take = || -> Result<()> {
        // SAFETY: as the caller says.
        let room = unsafe { count.as_ref() }.copied().ok_or(Code::InvalidValue)?;
        if events.is_null() || room == 0 || least > room {
            return Err(Code::InvalidValue.into());
        }
        // SAFETY: as the caller says.
        let limit = unsafe { timeout.as_ref() }.map(duration).transpose()?;
        let open = driver::opened()?;
        let batch = open.batches.get(batch as usize)?;
        drop(open); // a driver that closes need not wait for this
        // SAFETY: the caller vouches for the room. Nothing is asked of what is in it.
        let events = unsafe { std::slice::from_raw_parts_mut(events.cast::<MaybeUninit<BatchEvent>>(), room as usize) };
        let taken = batch.take(least as usize, limit, events) as c_uint;
        // SAFETY: it is not NULL, as was seen above.
        unsafe { count.write(taken) };
        Ok(())
    };
    status(take())
}

fn duration(time: &Timespec) -> Result<Duration> {
    let seconds = u64::try_from(time.tv_sec).map_err(|_| Code::InvalidValue)?;
    let nanoseconds = u32::try_from(time.tv_nsec).ok().filter(|&n| n < 1_000_000_000).ok_or(Code::InvalidValue)?;
    Ok(Duration::new(seconds, nanoseconds))
}

/// Calls off the requests that are not done.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileBatchIOCancel(batch: *mut c_void) -> Status {
    let cancelled = ending(|batches| batches.get(batch as usize)).map(|batch| batch.cancel());
    statistics::event(Event::BatchCancel, &cancelled);
    status(cancelled)
}

/// Ends a batch, whose memory nothing uses afterwards. What is unknown is left alone.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileBatchIODestroy(batch: *mut c_void) {
    let removed = ending(|batches| batches.remove(batch as usize));
    statistics::event(Event::BatchDestroy, &removed);
}

/// Does something to a batch that may be one of a driver that another thread is closing.
fn ending<T>(act: impl Fn(&Batches) -> Result<T>) -> Result<T> {
    let mut done = Err(Code::InvalidValue.into());
    for open in driver::opened_or_closing()? {
        done = act(&open.batches);
        if done.is_ok() {
            break;
        }
    }
    done
}
