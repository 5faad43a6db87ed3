//! The ioctls of the direct path (`docs/reference/ioctl.md`) on open files and directories.
//! [`super::transfers`] carries out `READ` and `WRITE`, [`super::administration`] what is for
//! administrators.

use std::sync::Arc;

use gpunvme_abi::{self as abi, Claim, Command, Direction, Request, Resolve, ResolveFlags, TransferRequest};
use gpunvme_blockdev::{Place, StripeMap};
use gpunvme_engine::volume::Mapping;
use gpunvme_engine::{BLOCK_SIZE, FILE_SIZE_MAX};
use gpunvme_gpupath::access::Access;
use gpunvme_gpupath::admission::{Admitted, OpenFile};
use gpunvme_gpupath::registry;
use gpunvme_gpupath::server::Reply;

use super::administration::FITRIM;
use super::transfers::Transfer;
use crate::front::caller::Caller;
use crate::front::shared::Front;

const BLOCK: u64 = BLOCK_SIZE as u64;

impl Caller {
    /// The caller, as the direct path knows it.
    fn of_direct(&self) -> registry::Caller {
        registry::Caller { thread: self.thread, user: self.context.uid }
    }
}

/// The file that an ioctl was called on, as its caller has it open.
struct Opened {
    front: Arc<Front>,
    caller: Caller,
    ino: u64,
    access: Access,
}

impl OpenFile for Opened {
    fn ino(&self) -> u64 {
        self.ino
    }

    fn transfer(&self, admitted: Admitted) {
        let Opened { ref front, caller, ino, access } = *self;
        front.transfer(Transfer { admitted, caller, ino, access, unseen: None });
    }
}

impl Front {
    /// An ioctl with this request number and argument, called by `thread` on an open file or
    /// directory.
    pub fn ioctl(
        self: &Arc<Self>,
        caller: Caller,
        ino: u64,
        request: u32,
        argument: &[u8],
        done: impl FnOnce(Reply) + Send + 'static,
    ) {
        let front = self.clone();
        if let (FITRIM, ([start, len, minimum], [])) = (request, argument.as_chunks()) {
            let range = [start, len, minimum].map(|bytes| u64::from_ne_bytes(*bytes));
            return self.general.run_for(caller.owner(), move || done(front.fstrim(caller, range)));
        }
        let server = &self.direct.server;
        match abi::decode(request, argument) {
            Err(error) => done(error.into()),
            Ok(Request::Info) => {
                server.stats.call(Command::Info, false);
                done(Reply::new(0, &self.direct.info(&self.fs)));
            }
            Ok(Request::Stats) => done(server.stats()),
            Ok(Request::Register(register)) => {
                server.register_soon(caller.of_direct(), register, done);
            }
            Ok(Request::Unregister(unregister)) => {
                self.general.run_for(caller.owner(), move || done(front.direct.server.unregister(caller.thread, &unregister)));
            }
            Ok(Request::Resolve(resolve)) => self.resolve(caller, ino, resolve, done),
            Ok(Request::Read(request, claim)) => {
                self.transfer_by_ioctl(caller, ino, (Direction::Read, request, claim), done);
            }
            Ok(Request::Write(request, claim)) => {
                self.transfer_by_ioctl(caller, ino, (Direction::Write, request, claim), done);
            }
            Ok(Request::Ring(ring)) => {
                server.take_in(caller.context.uid, move |may| {
                    done(match may {
                        Ok(()) => front.direct.rings.open(caller.of_direct(), &ring),
                        Err(refusal) => Reply::new(refusal.errno(), &ring),
                    });
                });
            }
            Ok(Request::Attach(attach)) => self.attach(caller, ino, attach, done),
            Ok(Request::Detach(detach)) => {
                // Detaching may drop the last reference to a file, which may have to be removed
                // then.
                self.general.run_for(caller.owner(), move || done(front.direct.rings.detach(caller.thread, &detach)));
            }
            Ok(Request::Metrics(asked)) => {
                server.stats.call(Command::Metrics, false);
                done(self.direct.metrics(&self.fs, &asked));
            }
            Ok(Request::Top(asked)) => {
                server.stats.call(Command::Top, false);
                // Whether the caller administers the mount is looked up in /proc.
                self.general.run_for(caller.owner(), move || {
                    let sees_all = caller.administers();
                    done(front.direct.top(&asked, |user| sees_all || user == caller.context.uid));
                });
            }
            Ok(Request::Sync(sync)) => self.sync_all(move |synced| {
                front.direct.server.stats.call(Command::Sync, synced.is_err());
                done(Reply::new(synced.map_or_else(|error| error.errno(), |()| 0), &sync));
            }),
            // Whether the caller administers the mount is looked up in /proc.
            Ok(Request::Log(log)) => self.general.run_for(caller.owner(), move || done(front.log(caller, &log))),
            Ok(Request::Trim(trim)) => self.general.run_for(caller.owner(), move || done(front.trim(caller, &trim))),
            Ok(Request::Grow(grow, devices)) => {
                self.general.run_for(caller.owner(), move || done(front.grow(caller, &grow, &devices)))
            }
            // An ioctl carries no descriptor.
            Ok(Request::Grant(_)) => done(Reply::error(libc::ENOTTY)),
        }
    }

    /// `READ` or `WRITE`.
    fn transfer_by_ioctl(
        self: &Arc<Self>,
        caller: Caller,
        ino: u64,
        transfer: (Direction, TransferRequest, Claim),
        done: impl FnOnce(Reply) + Send + 'static,
    ) {
        let work = self.direct.rings.begin_beside(caller.context.uid);
        let done = move |reply| {
            drop(work);
            done(reply);
        };
        let front = self.clone();
        let file = move |access| Opened { front, caller, ino, access };
        let general = self.general.clone();
        let go_on = move |task| general.run_for(caller.owner(), task);
        self.direct.server.transfer(caller.of_direct(), transfer, ino, file, go_on, done);
    }

    fn resolve(self: &Arc<Self>, caller: Caller, ino: u64, request: Resolve, done: impl FnOnce(Reply) + Send + 'static) {
        let front = self.clone();
        let end = request.offset.saturating_add(request.len).min(FILE_SIZE_MAX);
        let start = request.offset.min(end);
        let is_written_back = ResolveFlags::from_bits_retain(request.flags).contains(ResolveFlags::WRITTEN_BACK);
        self.written_back(caller.owner(), ino, std::iter::once(start..end), is_written_back, move || {
            let (from, file_end) = (start / BLOCK, FILE_SIZE_MAX.div_ceil(BLOCK));
            front.attempt(
                caller.owner(),
                // One more than there is room for says whether there is more.
                move |fs| fs.resolve(ino, from, file_end, request.capacity as usize + 1),
                move |front, resolved| {
                    front.direct.server.stats.call(Command::Resolve, resolved.is_err());
                    let stripe = front.fs.volume().device().stripe();
                    done(match resolved {
                        Ok((mappings, size)) => resolved_reply(&request, end, &mappings, size, stripe),
                        Err(error) => Reply::new(error.errno(), &request),
                    });
                },
            );
        });
    }
}

/// The answer to `RESOLVE`: the mappings of a file from the offset on that lie before `end` and
/// fit; on a stripe, each in as many extents as there are units.
fn resolved_reply(request: &Resolve, end: u64, mappings: &[Mapping], file_size: u64, stripe: Option<&StripeMap>) -> Reply {
    let capacity = request.capacity as usize;
    let mut all = mappings.iter().flat_map(|mapping| pieces(extent(mapping), stripe));
    let mut extents: Vec<abi::Extent> = all.by_ref().take(capacity).collect();
    let is_all = all.next().is_none();
    if is_all && let Some(last) = extents.last_mut() {
        last.flags |= abi::ExtentFlags::LAST.bits();
    }
    extents.retain(|extent| extent.file_offset < end);
    let next = match extents.last() {
        Some(last) if !is_all && extents.len() == capacity => last.file_offset + last.len,
        _ => end,
    };
    let count = extents.len() as u32;
    Reply::with_entries(&Resolve { next, file_size, count, ..request.clone() }, &extents)
}

/// An extent of the volume, cut where the device changes, with the places on the devices.
fn pieces(extent: abi::Extent, stripe: Option<&StripeMap>) -> impl Iterator<Item = abi::Extent> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let (at, left) = (extent.device_offset + done, extent.len - done);
        let Place { member, offset, left: of_unit } = match stripe {
            Some(stripe) => stripe.place(at),
            None => Place { member: 0, offset: at, left },
        };
        let len = left.min(of_unit);
        let file_offset = extent.file_offset + done;
        done += len;
        (len > 0).then_some(abi::Extent { file_offset, device_offset: offset, len, device: member as u32, ..extent })
    })
}

fn extent(mapping: &Mapping) -> abi::Extent {
    let flags = if mapping.extent.unwritten { abi::ExtentFlags::UNWRITTEN } else { abi::ExtentFlags::empty() };
    abi::Extent {
        file_offset: mapping.offset * BLOCK,
        device_offset: mapping.device_offset(),
        len: u64::from(mapping.extent.len) * BLOCK,
        device: 0,
        flags: flags.bits(),
    }
}
