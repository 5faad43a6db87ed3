//! Operations on the content of files.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use gpunvme_abi::Segment;
use gpunvme_engine::{BLOCK_SIZE, Inode};
use rustix::thread::CapabilitySet;

use super::names::{SET_GROUP_ID_PROGRAM, set_id_bits};
use crate::front::caller::{Caller, asker};
use crate::front::resources::turns::Owner;
use crate::front::shared::Front;
use crate::front::write_request::WriteRequest;
use gpunvme_engine::data::direct::{WriteFailed, Written};
use gpunvme_engine::data::resize::Allocate;
use gpunvme_engine::data::{Filesystem, Read, system_time};
use gpunvme_engine::error::{Attempt, Fail, FsError};
use gpunvme_engine::volume::SetAttributes;
use gpunvme_fuse::may_wait;

/// The most bytes that one call copies between files: the caller cannot be interrupted meanwhile,
/// and calls again.
const COPY_MAX: u64 = 64 << 20;
/// The capabilities that a program has when it is executed.
const CAPABILITY: &[u8] = b"security.capability";

impl Front {
    /// Reads; `cached`: into the kernel's page cache.
    pub fn read(
        self: &Arc<Self>,
        owner: Owner,
        ino: u64,
        (offset, len): (u64, usize),
        cached: bool,
        done: impl FnOnce(Result<Read, FsError>) + Send + 'static,
    ) {
        if cached {
            self.lookups.reads(ino, offset..offset.saturating_add(len as u64));
        }
        let permit = self.request_budget.take(len);
        self.attempt(
            owner,
            move |fs| fs.plan_read(ino, offset, len),
            move |front, plan| match plan {
                Ok(plan) => {
                    let end = move |read| {
                        done(read);
                        drop(permit);
                    };
                    match may_wait() {
                        Some(_may_wait) => front.fs.run_read(plan, end),
                        None => front.fs.submit_read(plan, end),
                    }
                }
                Err(error) => done(Err(error)),
            },
        );
    }

    /// Writes.
    pub fn write(
        self: &Arc<Self>,
        caller: Caller,
        ino: u64,
        data: &[u8],
        how: WriteRequest,
        done: impl FnOnce(Result<(), FsError>) + Send + 'static,
    ) {
        if how.cached {
            self.lookups.writes(ino, how.offset..how.offset.saturating_add(data.len() as u64));
        }
        // An append may go elsewhere, where it is not aligned.
        if how.direct && !how.append && is_aligned(how.offset) && is_aligned(data.len() as u64) {
            return self.write_direct(caller, ino, data, how, done);
        }
        let attempt = move |front: &Front, data: &[u8]| {
            if how.strip {
                front.strip(&caller, ino)?;
            }
            if how.append {
                return front.fs.append(ino, how.offset, data, caller.context.now);
            }
            front.fs.write(ino, how.offset, data, caller.context.now)?;
            Ok(how.offset)
        };
        let (owner, len, last) = (caller.owner(), data.len() as u64, data.last().copied());
        let front = self.clone();
        let end = move |front: &Arc<Front>, written: Result<u64, FsError>| {
            let place = *written.as_ref().unwrap_or(&how.offset);
            let after = front.clone();
            let answer = move |written: Result<(), FsError>| {
                let is_refused = written.is_err() && how.cached && !how.mapped;
                done(written);
                if is_refused {
                    // The kernel has the bytes in its pages: they are no file's, but mappings show
                    // them. It keeps the pages locked until the answer.
                    let range = how.offset..how.offset.saturating_add(len);
                    after.invalidate_later(owner, ino, vec![range]);
                }
                if let Some(last) = last.filter(|_| place != how.offset) {
                    // Answered first: until then the kernel may keep a page locked that it has to
                    // forget.
                    after.moved(owner, ino, how.offset..how.offset + len, place..place + len, last);
                }
            };
            let written = written.map(drop);
            if how.direct { front.answer_direct(owner, ino, place..place + len, written, answer) } else { answer(written) }
        };
        let done = move |written: Result<u64, FsError>| {
            let range = how.offset..how.offset.saturating_add(len);
            if how.cached && !how.mapped && written.is_ok() && front.lookups.is_overtaken(ino, range.clone()) {
                let after = front.clone();
                return front.answer_overtaken(owner, ino, range, move || {
                    end(&after, written);
                    // Elsewhere: this thread will wait in the kernel again, and cannot complete
                    // what it has submitted meanwhile.
                    let general = after.general.clone();
                    general.run_for(owner, move || after.fs.write_behind(ino));
                });
            }
            end(&front, written);
            // After the answer: the caller sends its next bytes while these go to the device.
            front.fs.write_behind(ino);
        };
        if how.append && how.direct {
            return self.append_fragment(caller, ino, data, how, done);
        }
        match attempt(self, data) {
            Ok(place) if how.direct => self.wait(owner, move |fs| land(fs, ino, &caller).map(|()| place), done),
            Ok(place) => done(Ok(place)),
            Err(Fail::Error(error)) => done(Err(error)),
            Err(Fail::Stall(_)) => {
                if !how.direct
                    && let Some(may_wait) = may_wait()
                {
                    let written = self.fs.wait(|| attempt(self, data));
                    drop(may_wait);
                    return done(written);
                }
                // The bytes lie in the transport's buffer, which its next request overwrites.
                let (permit, data) = (self.request_budget.take(data.len()), data.to_vec());
                let front = self.clone();
                self.wait(
                    owner,
                    move |fs| {
                        let _permit = permit;
                        let place = fs.wait(|| attempt(&front, &data))?;
                        if how.direct {
                            land(fs, ino, &caller)?;
                        }
                        Ok(place)
                    },
                    done,
                );
            }
        }
    }

    /// Corrects the kernel's view of an append that went elsewhere than the kernel believes: it
    /// forgets the bytes there, and learns the new end by the last byte.
    fn moved(self: &Arc<Self>, owner: Owner, ino: u64, from: Range<u64>, to: Range<u64>, last: u8) {
        self.invalidate_with_size(owner, ino, move |front, size| {
            // Another process may have shortened it since.
            let end = (size == Some(to.end)).then_some((to.end - 1, last));
            front.invalidate(ino, vec![from, to], end);
        });
    }

    /// Writes whole blocks past the write buffer, and answers when the device has them.
    fn write_direct(
        self: &Arc<Self>,
        caller: Caller,
        ino: u64,
        data: &[u8],
        how: WriteRequest,
        done: impl FnOnce(Result<(), FsError>) + Send + 'static,
    ) {
        let (owner, permit) = (caller.owner(), self.request_budget.take(data.len()));
        // The bytes lie in the transport's buffer, which its next request overwrites.
        let mut buffer = match self.fs.buffers().get(data.len()) {
            Ok(buffer) => buffer,
            Err(error) => return done(Err(error.into())),
        };
        buffer.bytes_mut()[..data.len()].copy_from_slice(data);
        let memory = buffer.span(0..data.len());
        let segment = Segment { file_offset: how.offset, buffer_offset: memory.offset as u64, len: memory.len as u64 };
        let range = how.offset..how.offset + memory.len as u64;
        let stripper = how.strip.then(|| self.clone());
        self.attempt(
            owner,
            move |fs| {
                if let Some(front) = &stripper {
                    front.strip(&caller, ino)?;
                }
                fs.plan_direct_write(ino, &[segment], &memory.region, caller.context.now)
            },
            move |front, planned| match planned {
                Ok(planned) => {
                    // A device needs no more of memory than a block does.
                    assert!(planned.plan.edges.is_empty(), "whole blocks have no edges");
                    let front_then = front.clone();
                    let end = move |written: Result<Written, WriteFailed>| {
                        drop((buffer, permit));
                        let written = written.map(drop).map_err(FsError::from);
                        front_then.answer_direct(owner, ino, range, written, done);
                    };
                    match may_wait() {
                        Some(_may_wait) => front.fs.run_direct_write(planned, end),
                        None => front.fs.submit_direct_write(planned, end),
                    }
                }
                Err(error) => done(Err(error)),
            },
        );
    }

    /// Answers an O_DIRECT write when the kernel has forgotten what is out of date with it: pages
    /// of the range, and attributes. It forgets them itself when it sends the write; but where the
    /// writer does not wait (io_submit(2), io_uring) it does not do so again when the write ends,
    /// and may have asked in between. Pages it may have to wait for are locked for reads, which do
    /// not wait for this write.
    fn answer_direct(
        self: &Arc<Self>,
        owner: Owner,
        ino: u64,
        range: Range<u64>,
        written: Result<(), FsError>,
        done: impl FnOnce(Result<(), FsError>) + Send + 'static,
    ) {
        // What failed may have been done in part.
        let has_pages = self.lookups.may_have(ino, std::iter::once(range.clone()));
        let has_attributes = written.is_ok() && self.fs.are_attributes_kept(ino);
        if !has_pages && !has_attributes {
            return done(written);
        }
        let front = self.clone();
        self.invalidations.run_for(owner, move || {
            if has_pages {
                front.invalidate(ino, vec![range], None);
            }
            front.take_attributes_back(ino);
            done(written);
        });
    }

    /// Makes the kernel forget attributes that are out of date with a direct write.
    fn take_attributes_back(&self, ino: u64) {
        let since = Instant::now();
        if self.fs.are_attributes_kept(ino)
            && let Some(kernel) = self.kernel.get()
            && kernel.invalidate_attributes(ino)
        {
            self.fs.take_attributes_back(ino, since);
        }
    }

    /// Makes a file durable for the owner's process.
    pub fn sync(self: &Arc<Self>, owner: Owner, ino: u64, done: impl FnOnce(Result<(), FsError>) + Send + 'static) {
        let front = self.clone();
        let synced = move |synced: Result<(), FsError>| {
            if synced.is_err() {
                front.forget_lost();
            }
            done(synced);
        };
        self.wait_briefly(owner, move |fs| fs.sync_for(ino, || asker(owner.process)), synced);
    }

    /// Makes all operations on names durable. On a mount that has become read-only nothing changes
    /// after it.
    pub fn sync_names(self: &Arc<Self>, owner: Owner, done: impl FnOnce(Result<(), FsError>) + Send + 'static) {
        let front = self.clone();
        let commit = move || front.wait_briefly(owner, |fs| fs.commit(), done);
        if self.mount_state.is_read_only() { self.mount_state.after_unseen_writes(commit) } else { commit() }
    }

    /// Makes everything durable that was done before, of all files: sync(2), of this volume alone.
    pub fn sync_all(self: &Arc<Self>, done: impl FnOnce(Result<(), FsError>) + Send + 'static) {
        let front = self.clone();
        let sync = move || {
            if front.syncs.add(Box::new(done)) {
                let general = front.general.clone();
                general.run(move || front.run_syncs());
            }
        };
        if self.mount_state.is_read_only() { self.mount_state.after_unseen_writes(sync) } else { sync() }
    }

    fn run_syncs(&self) {
        loop {
            let callers = self.syncs.next();
            if callers.is_empty() {
                return;
            }
            let synced = self.fs.sync_all();
            callers.into_iter().for_each(|done| done(synced.clone()));
        }
    }

    /// fallocate(2) with this mode.
    pub fn allocate(
        self: &Arc<Self>,
        caller: Caller,
        ino: u64,
        (offset, len): (u64, u64),
        mode: i32,
        done: impl FnOnce(Result<(), FsError>) + Send + 'static,
    ) {
        const KEEP: i32 = libc::FALLOC_FL_KEEP_SIZE;
        const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | KEEP;
        const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE;
        let what = match mode {
            0 | KEEP => Ok(Allocate::Reserve { grow: mode == 0 }),
            PUNCH => Ok(Allocate::Punch),
            ZERO => Ok(Allocate::Zero { grow: true }),
            _ if mode == ZERO | KEEP => Ok(Allocate::Zero { grow: false }),
            _ => Err(FsError::NotSupported),
        };
        match what {
            Ok(what) => {
                let (front, after) = (self.clone(), self.clone());
                let end = move |allocated: Result<(), FsError>| {
                    let is_cleared_in_part = allocated.is_err() && !matches!(what, Allocate::Reserve { .. });
                    done(allocated);
                    if is_cleared_in_part {
                        // The kernel forgets pages only of what succeeds.
                        let range = offset..offset.saturating_add(len);
                        after.invalidate_later(caller.owner(), ino, vec![range]);
                    }
                };
                self.wait(
                    caller.owner(),
                    move |fs| {
                        fs.wait(|| front.strip_unless_privileged(&caller, ino))?;
                        fs.allocate(&caller.context, ino, offset, len, what)
                    },
                    end,
                );
            }
            Err(error) => done(Err(error)),
        }
    }

    /// The next data, or the next hole.
    pub fn seek(
        self: &Arc<Self>,
        owner: Owner,
        (ino, offset): (u64, u64),
        hole: bool,
        done: impl FnOnce(Result<u64, FsError>) + Send + 'static,
    ) {
        self.wait(owner, move |fs| fs.seek(ino, offset, hole), done);
    }

    /// Copies between files. Each place is an inode and an offset. Returns the bytes copied. The
    /// kernel has written back its dirty pages of both before it asks (from Linux 5.8 on).
    pub fn copy(
        self: &Arc<Self>,
        caller: Caller,
        from: (u64, u64),
        to: (u64, u64),
        len: u64,
        done: impl FnOnce(Result<u64, FsError>) + Send + 'static,
    ) {
        let len = len.min(COPY_MAX);
        let stripper = self.clone();
        self.wait(
            caller.owner(),
            move |fs| {
                fs.wait(|| stripper.strip_unless_privileged(&caller, to.0))?;
                fs.copy_range(from, to, len, system_time())
            },
            done,
        );
    }

    /// Strips the set-user-id bits from a file whose content changes, and makes the kernel forget
    /// the mode that it knows: it executes programs by that mode.
    pub(crate) fn strip(&self, caller: &Caller, ino: u64) -> Attempt<()> {
        self.stripped(ino, strip(&self.fs, caller, ino)?);
        Ok(())
    }

    /// As [`Front::strip`], where the kernel does not say whether the caller may keep the bits.
    fn strip_unless_privileged(&self, caller: &Caller, ino: u64) -> Attempt<()> {
        if may_keep(&self.fs.volume().stored_attributes(ino)?.inode, caller) { Ok(()) } else { self.strip(caller, ino) }
    }

    /// Strips from a file what a write strips that the kernel does not see: its capabilities, which
    /// the kernel removes ahead of every write(2), and the set-user-id bits.
    ///
    /// # Errors
    /// [`FsError::NotPermitted`], and nothing is stripped, where the caller may not keep the bits
    /// and programs have privileges by them. The kernel learns of a new mode when it next asks for
    /// it, and a program that is being started has its mode by then. write(2) can strip the bits
    /// because no program is started from a file that is open for writing (`ETXTBSY`); what writes
    /// here need not have it open any more.
    pub(crate) fn strip_unseen(&self, caller: &Caller, ino: u64) -> Attempt<()> {
        let inode = self.fs.volume().stored_attributes(ino)?.inode;
        let is_program = |mode| mode & libc::S_ISUID != 0 || mode & SET_GROUP_ID_PROGRAM == SET_GROUP_ID_PROGRAM;
        if is_program(inode.mode) && !may_keep(&inode, caller) {
            return Err(FsError::NotPermitted("a direct write to a file with set-user-id bits").into());
        }
        match self.fs.get_xattr(ino, CAPABILITY) {
            // An empty value gives nothing, and the kernel leaves it (`cap_inode_need_killpriv`).
            Ok(value) if value.is_empty() => {}
            Ok(_) => match self.fs.remove_xattr(&caller.context, ino, CAPABILITY) {
                Ok(()) | Err(Fail::Error(FsError::NoData)) => {}
                Err(fail) => return Err(fail),
            },
            Err(Fail::Error(FsError::NoData)) => {}
            Err(fail) => return Err(fail),
        }
        self.strip_unless_privileged(caller, ino)
    }

    fn stripped(&self, ino: u64, is_stripped: bool) {
        if is_stripped && let Some(kernel) = self.kernel.get() {
            kernel.invalidate_attributes(ino);
        }
    }
}

/// Whether a file has nothing that a write could strip from it ([`Front::strip_unseen`]).
pub(crate) fn has_no_privileges(fs: &Filesystem, ino: u64) -> Attempt<bool> {
    let has_capabilities = match fs.get_xattr(ino, CAPABILITY) {
        Ok(_) => true,
        Err(Fail::Error(FsError::NoData)) => false,
        Err(fail) => return Err(fail),
    };
    let mode = fs.volume().stored_attributes(ino)?.inode.mode;
    Ok(!has_capabilities && mode & (libc::S_ISUID | libc::S_ISGID) == 0)
}

/// Strips the set-user-id bits from a file. Returns whether it had any.
fn strip(fs: &Filesystem, caller: &Caller, ino: u64) -> Attempt<bool> {
    let bits_gone = set_id_bits(&fs.volume().stored_attributes(ino)?.inode, caller);
    if bits_gone != 0 {
        fs.set_attributes(&caller.context, ino, &SetAttributes { bits_gone, ..SetAttributes::default() })?;
    }
    Ok(bits_gone != 0)
}

/// Whether a file keeps the bits that it has when the caller changes it (`CAP_FSETID`).
fn may_keep(inode: &Inode, caller: &Caller) -> bool {
    set_id_bits(inode, caller) == 0 || caller.has(CapabilitySet::FSETID)
}

fn is_aligned(bytes: u64) -> bool {
    bytes.is_multiple_of(BLOCK_SIZE as u64)
}

/// Waits until the device has the data that a caller wrote to a file.
pub(crate) fn land(fs: &Arc<Filesystem>, ino: u64, caller: &Caller) -> Result<(), FsError> {
    fs.flush_file(ino)?;
    fs.write_error(ino, || asker(caller.thread))
}
