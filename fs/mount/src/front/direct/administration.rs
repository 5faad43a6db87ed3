//! The ioctls for administrators: what the daemon logs (`LOG`), blocks that no file has (`TRIM`,
//! and `FITRIM` of other filesystems), and a volume that becomes larger (`GROW`).

use std::time::{Duration, Instant};

use gpunvme_abi::{self as abi, Command};
use gpunvme_engine::BLOCK_SIZE;
use gpunvme_engine::error::FsError;
use gpunvme_gpupath::server::Reply;
use gpunvme_programs::members::GrowError;

use crate::front::caller::Caller;
use crate::front::shared::Front;

const BLOCK: u64 = BLOCK_SIZE as u64;
/// `FITRIM` (linux/fs.h), which fstrim(8) calls: `_IOWR('X', 121, struct fstrim_range)`.
pub(super) const FITRIM: u32 = 0xc018_5879;
/// How long a `TRIM` goes on: so long a caller may have to wait that was told to stop.
const MOMENT: Duration = Duration::from_millis(300);

/// Why it is not done: the errno, and the words.
type Refusal = (i32, String);

fn refusal(error: &FsError) -> Refusal {
    (error.errno(), error.to_string())
}

impl Front {
    /// `LOG`.
    pub(super) fn log(&self, caller: Caller, request: &abi::Log) -> Reply {
        let filter = abi::get_text(&request.filter);
        let set = || self.log.set(Some(&*filter).filter(|filter| !filter.is_empty())).ok_or(libc::EINVAL);
        let done = if caller.administers() { set() } else { Err(libc::EPERM) };
        self.direct.server.stats.call(Command::Log, done.is_err());
        match done {
            Ok(before) => {
                let mut answer = abi::Log::default();
                abi::put_text(&mut answer.filter, &before);
                Reply::new(0, &answer)
            }
            Err(errno) => Reply::new(errno, request),
        }
    }

    /// `TRIM`.
    pub(super) fn trim(&self, caller: Caller, request: &abi::Trim) -> Reply {
        let mut answer = abi::Trim { next: request.start, trimmed: 0, why: [0; 192], ..request.clone() };
        let done = self.may_administer(caller).and_then(|()| self.trim_for_a_moment(request, &mut answer));
        self.direct.server.stats.call(Command::Trim, done.is_err());
        let errno = done.err().map_or(0, |(errno, why)| {
            abi::put_text(&mut answer.why, &why);
            errno
        });
        Reply::new(errno, &answer)
    }

    /// `FITRIM`, with a `struct fstrim_range`: where to begin, how much to look at, and what has to
    /// lie side by side to be told of, all in bytes. To the end in one call, as the kernel's own
    /// filesystems do it. The length that comes back is that of what the devices were told of.
    pub(super) fn fstrim(&self, caller: Caller, [start, len, minimum]: [u64; 3]) -> Reply {
        let end = start.saturating_add(len) / BLOCK * BLOCK;
        let mut answer = abi::Trim { next: start, ..abi::Trim::default() };
        let done = self.may_administer(caller).and_then(|()| {
            while answer.next < end && !self.general.is_ending() {
                let part = abi::Trim { start: answer.next, len: end - answer.next, minimum, ..abi::Trim::default() };
                self.trim_for_a_moment(&part, &mut answer)?;
            }
            Ok(())
        });
        self.direct.server.stats.call(Command::Trim, done.is_err());
        Reply::new(done.map_or_else(|(errno, _)| errno, |()| 0), &[start, answer.trimmed, minimum])
    }

    fn trim_for_a_moment(&self, request: &abi::Trim, answer: &mut abi::Trim) -> Result<(), Refusal> {
        // Blocks that lie in the range as a whole, and of a minimum as many as hold it.
        let end = request.start.saturating_add(request.len) / BLOCK;
        let (mut at, minimum) = (Some(request.start.div_ceil(BLOCK)), request.minimum.div_ceil(BLOCK));
        let begun = Instant::now();
        while let Some(from) = at.filter(|_| begun.elapsed() < MOMENT) {
            let trimmed = self.fs.volume().trim(from, end, minimum).map_err(|error| refusal(&error))?;
            answer.trimmed += trimmed.blocks * BLOCK;
            at = trimmed.next;
        }
        answer.next = at.map_or(u64::MAX, |block| block * BLOCK);
        Ok(())
    }

    /// `GROW`.
    pub(super) fn grow(&self, caller: Caller, request: &abi::Grow, devices: &[String]) -> Reply {
        let mut answer = abi::Grow { before: 0, capacity: 0, why: [0; 192], ..request.clone() };
        let is_check = request.flags & abi::GrowFlags::CHECK.bits() != 0;
        let grown = self.may_administer(caller).and_then(|()| {
            // What devices have come is the growth of the call that brought them.
            let _one_at_a_time = self.growth.lock();
            let grown = match devices {
                _ if is_check => self.may_grow(devices).map(|()| [self.fs.volume().geometry().data_blocks(); 2]),
                [] => self.grow_with_devices(),
                devices => self.grow_by(devices),
            };
            // The answer has not got room for all words.
            grown.inspect_err(|(_, why)| tracing::warn!("the volume has not grown: {why}"))
        });
        self.direct.server.stats.call(Command::Grow, grown.is_err());
        match grown {
            Ok([before, capacity]) => {
                (answer.before, answer.capacity) = (before * BLOCK, capacity * BLOCK);
                Reply::new(0, &answer)
            }
            Err((errno, why)) => {
                abi::put_text(&mut answer.why, &why);
                Reply::new(errno, &answer)
            }
        }
    }

    /// Has all that the devices have become larger by.
    fn grow_with_devices(&self) -> Result<[u64; 2], Refusal> {
        let volume = self.fs.volume();
        volume.is_ours().map_err(|error| refusal(&error))?;
        let may_have = |bytes| volume.may_grow_to(bytes).map_err(|error| error.to_string());
        let why = self.devices.look_again(&may_have).map_err(|error| self.not_grown(libc::EIO, error))?;
        match (volume.grow(), why) {
            (Ok([before, capacity]), Some(why)) if before == capacity => Err((libc::EINVAL, why)),
            (Err(FsError::CannotGrow { .. }), Some(why)) => Err((libc::EINVAL, why)),
            (grown, _) => grown.map_err(|error| refusal(&error)),
        }
    }

    /// Has further devices.
    fn grow_by(&self, devices: &[String]) -> Result<[u64; 2], Refusal> {
        self.may_grow(&[])?;
        self.devices.add(devices).map_err(|error| self.not_grown(libc::EINVAL, error))?;
        self.fs.volume().grow().map_err(|error| {
            let (errno, why) = refusal(&error);
            (errno, format!("the devices are the volume's now, and needed to mount it, but it uses nothing of them: {why}"))
        })
    }

    /// Why the devices did not give more. Where it is not known any more what is durable, the
    /// volume stops.
    fn not_grown(&self, errno: i32, error: GrowError) -> Refusal {
        let why = error.to_string();
        if let GrowError::NotDurable(error) = error {
            self.fs.volume().stop(error.into());
        }
        (errno, why)
    }

    fn may_grow(&self, devices: &[String]) -> Result<(), Refusal> {
        self.fs.volume().may_grow().map_err(|error| refusal(&error))?;
        if devices.is_empty() { Ok(()) } else { self.devices.may_add(devices).map_err(|why| (libc::EINVAL, why)) }
    }

    fn may_administer(&self, caller: Caller) -> Result<(), Refusal> {
        if !caller.administers() {
            let why = "only those who may mount the volume, and the user as whom its daemon runs, do this";
            return Err((libc::EPERM, why.to_owned()));
        }
        if self.mount_state.is_read_only() || self.fs.volume().is_read_only() {
            return Err((libc::EROFS, "the volume is read-only".to_owned()));
        }
        Ok(())
    }
}
