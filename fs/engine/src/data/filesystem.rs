//! The filesystem as a front end sees it: the volume's names and attributes, overlaid with the
//! newer values that memory has of files being written.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gpunvme_blockdev::{BufferPool, Io};
use gpunvme_layout::Timestamp;
use parking_lot::Mutex;

use super::errors::Asker;
use super::file::{File, FileState, Files, Truncation};
use super::pages::PagePool;
use crate::error::{Attempt, Fail, FsError, Stall};
use crate::volume::inode::content_changed;
use crate::volume::{
    Attributes, Context, DirEntry, NewNode, Preloaded, RenameMode, Renamed, SetAttributes, Usage, Volume, VolumeOptions,
};

/// Runs tasks on threads that may wait: for operations that cannot go on where they are.
pub trait Spawn: Send + Sync {
    /// Runs a task on a thread that may wait for the device.
    fn spawn(&self, task: Box<dyn FnOnce() + Send>);

    /// Runs one piece of pending work, a task or the completion of a write, on the calling thread,
    /// which waits for such work. Returns whether it ran one; always false where other threads do
    /// all of it. The caller holds no lock.
    fn help(&self) -> bool {
        false
    }
}

/// Runs tasks where they are: for tests, whose device answers at once.
pub struct Inline;

impl Spawn for Inline {
    fn spawn(&self, task: Box<dyn FnOnce() + Send>) {
        task();
    }
}

/// How a filesystem is opened.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// How its volume is opened.
    pub volume: VolumeOptions,
    /// Size of the write buffer in bytes.
    pub write_buffer: usize,
}

/// An open filesystem.
pub struct Filesystem {
    pub(super) volume: Volume,
    pub(super) files: Files,
    pub(super) pages: Arc<PagePool>,
    pub(super) buffers: Arc<BufferPool>,
    /// The pool for work that a completion's callback hands on because it may wait for the
    /// journal, such as mapping what was written. Its threads never wait for a file.
    pub(super) completions: Arc<dyn Spawn>,
    /// Whether data of any file was ever lost.
    pub(super) has_lost_data: AtomicBool,
    /// What lost data since [`Filesystem::sync_all`] told of it.
    pub(super) untold: Mutex<Option<FsError>>,
    /// Files that lost data since [`Filesystem::take_lossy`].
    pub(super) lossy: Mutex<BTreeSet<u64>>,
    /// Held by the thread that finishes what earlier mounts left.
    pub(super) finishing: Mutex<()>,
    /// It was closed, and all of it is on the device.
    written_down: AtomicBool,
}

/// State of a rename from one attempt to the next: the file whose write-back it waits for, and how
/// many flushes of it had begun; a later one has to end.
#[derive(Default)]
pub struct Settling(Option<(Arc<File>, u64)>);

/// How long the end of a mount goes on with orphans. The rest is left to the next mount: umount(8)
/// waits, and what ends the system kills a program that takes long.
const LAST_ORPHANS: Duration = Duration::from_secs(1);
/// Bytes of read buffers kept for reuse.
const READ_BUFFERS: usize = 64 << 20;

impl Filesystem {
    /// Opens the filesystem on a device.
    ///
    /// # Errors
    /// Says what is wrong with the volume or the device.
    pub fn open(io: Arc<Io>, options: Options, completions: Arc<dyn Spawn>) -> Result<Arc<Filesystem>, FsError> {
        let device = io.device().clone();
        let pages = PagePool::new(&device, options.write_buffer)?;
        let volume = Volume::open(io, options.volume)?;
        Ok(Arc::new(Filesystem {
            volume,
            files: Files::default(),
            finishing: Mutex::default(),
            pages,
            buffers: BufferPool::new(device, READ_BUFFERS),
            completions,
            has_lost_data: AtomicBool::new(false),
            untold: Mutex::default(),
            lossy: Mutex::default(),
            written_down: AtomicBool::new(false),
        }))
    }

    /// Writes everything back and closes the volume. No process uses it any more.
    ///
    /// # Errors
    /// The device failed; the volume is recovered when it is opened again. [`FsError::Lost`] when
    /// the volume is well, but data was lost and no caller has been told. Or an orphan cannot be
    /// finished, and all else is as it should be ([`Filesystem::is_written_down`]).
    pub fn close(self: &Arc<Self>) -> Result<(), FsError> {
        self.close_within(LAST_ORPHANS)
    }

    /// As [`Filesystem::close`], with so much time for orphans.
    ///
    /// # Errors
    /// As for [`Filesystem::close`].
    pub fn close_within(self: &Arc<Self>, time: Duration) -> Result<(), FsError> {
        let written = self.flush_all();
        let mut files = 0;
        for file in self.files.all() {
            let mut state = file.state.lock();
            self.release_ahead(&mut state);
            if let Some(error) = state.errors.unknown() {
                tracing::error!(ino = file.ino, %error, "data of this file is lost, and no caller was told of it before");
                files += 1;
            }
        }
        let told = if files == 0 { Ok(()) } else { Err(FsError::Lost { files }) };
        let finished = self.finish_last_orphans(time);
        let closed = self.volume.close();
        self.written_down.store(written.is_ok() && told.is_ok() && closed.is_ok(), Ordering::Release);
        written.and(closed).and(finished).and(told)
    }

    /// Whether [`Filesystem::close`] left everything on the device. It may have failed nonetheless,
    /// of an orphan that cannot be finished.
    pub fn is_written_down(&self) -> bool {
        self.written_down.load(Ordering::Acquire)
    }

    /// The volume.
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    /// Buffers that the device can reach.
    pub fn buffers(&self) -> &Arc<BufferPool> {
        &self.buffers
    }

    /// Counters of the volume.
    pub fn usage(&self) -> Usage {
        self.volume.usage()
    }

    /// Inode behind a name.
    pub fn lookup(&self, dir: u64, name: &[u8]) -> Attempt<Attributes> {
        self.attributes(self.volume.lookup(dir, name)?)
    }

    /// Attributes of an inode.
    pub fn attributes(&self, ino: u64) -> Attempt<Attributes> {
        let Some(file) = self.files.find(ino) else { return self.volume.stored_attributes(ino) };
        let mut state = file.state.lock();
        self.attributes_with(&mut state, ino)
    }

    fn attributes_with(&self, state: &mut FileState, ino: u64) -> Attempt<Attributes> {
        state.kernel.attributes.give();
        let mut attributes = self.volume.stored_attributes(ino)?;
        overlay(state, &mut attributes);
        Ok(attributes)
    }

    /// Whether the kernel may keep attributes of a file.
    pub fn are_attributes_kept(&self, ino: u64) -> bool {
        self.files.find(ino).is_none_or(|file| file.state.lock().kernel.attributes.are_kept())
    }

    /// Notes that the kernel was told that its attributes of a file are out of date, after `since`
    /// ([`super::direct::Written::shown`]).
    pub fn take_attributes_back(&self, ino: u64, since: Instant) {
        if let Some(file) = self.files.find(ino) {
            file.state.lock().kernel.attributes.take_back(since);
        }
    }

    /// Attributes of several inodes that directory entries name; it takes less time than one by
    /// one.
    pub fn all_attributes(&self, inos: &[u64]) -> Vec<Attempt<Attributes>> {
        // A file that is in memory now may have been written back, and be gone from there, when
        // its inode was looked up.
        let were_in_memory = self.files.are_in_memory(inos);
        let mut found = self.volume.all_stored_attributes(inos);
        let are_in_memory = self.files.are_in_memory(inos);
        for (place, ino) in inos.iter().enumerate() {
            if were_in_memory[place] || are_in_memory[place] {
                found[place] = self.attributes(*ino);
            }
        }
        found
    }

    /// Changes attributes other than the size.
    pub fn set_attributes(&self, context: &Context, ino: u64, set: &SetAttributes) -> Attempt<Attributes> {
        let Some(file) = self.files.find(ino) else { return Ok(self.volume.set_attributes(context, ino, set)?.0) };
        let mut state = file.state.lock();
        // The time of a write before this change must not come back when that write lands.
        let written = self.attributes_with(&mut state, ino)?.inode.mtime;
        let set = SetAttributes { mtime: set.mtime.or(state.newer.changed.map(|_| written)), ..*set };
        let (mut attributes, _) = self.volume.set_attributes(context, ino, &set)?;
        state.newer.changed = None;
        overlay(&state, &mut attributes);
        Ok(attributes)
    }

    /// Creates a node.
    pub fn create(&self, context: &Context, parent: u64, name: &[u8], new: &NewNode) -> Attempt<Attributes> {
        Ok(self.volume.create(context, parent, name, new)?.0)
    }

    /// Creates a file without a name (`O_TMPFILE`), with the group and the ACL that the directory
    /// `parent` gives. It is an orphan: the caller removes it with [`Filesystem::reap_step`] where
    /// no name is given to it, and the next mount does where a crash comes first.
    pub fn create_unnamed(&self, context: &Context, parent: u64, new: &NewNode) -> Attempt<Attributes> {
        self.volume.create_unnamed(context, parent, new)
    }

    /// Gives an inode another name.
    pub fn link(&self, context: &Context, ino: u64, parent: u64, name: &[u8]) -> Attempt<Attributes> {
        let Some(file) = self.files.find(ino) else { return Ok(self.volume.link(context, ino, false, parent, name)?.0) };
        let mut state = file.state.lock();
        state.kernel.attributes.give();
        let is_cut_short = matches!(state.truncation, Truncation::Pending | Truncation::InFlight);
        let (mut attributes, _) = self.volume.link(context, ino, is_cut_short, parent, name)?;
        overlay(&state, &mut attributes);
        Ok(attributes)
    }

    /// Removes a name of anything but a directory. Returns the inode when it was its last name.
    pub fn unlink(&self, context: &Context, parent: u64, name: &[u8]) -> Attempt<Option<u64>> {
        let (ino, left) = self.volume.unlink(context, parent, name)?;
        Ok((left == 0).then_some(ino))
    }

    /// Removes an empty directory. Returns its inode.
    pub fn rmdir(&self, context: &Context, parent: u64, name: &[u8]) -> Attempt<u64> {
        self.volume.rmdir(context, parent, name)
    }

    /// Renames. Returns the inode that lost its last name, if one did.
    ///
    /// A file that takes another's name is written back first: a program that replaces a file by a
    /// new one without fsync shall not find it empty after a crash. The rename does not wait for
    /// what is written to the file after the first attempt.
    pub fn rename(
        &self,
        context: &Context,
        from: (u64, &[u8]),
        to: (u64, &[u8]),
        mode: RenameMode,
        settling: &mut Settling,
    ) -> Attempt<Option<u64>> {
        let mut settled = None;
        loop {
            match self.volume.rename(context, from, to, mode, settled)? {
                Renamed::Done(orphaned) => return Ok(orphaned),
                // Asked here, without the metadata lock: a file's lock is taken before that.
                Renamed::Replaces(ino) => {
                    self.settle(ino, settling)?;
                    settled = Some(ino);
                }
            }
        }
    }

    /// Passes when what of a file was in memory, or on its way, at the first attempt is on the
    /// device.
    fn settle(&self, ino: u64, settling: &mut Settling) -> Attempt<()> {
        self.unknown_error(ino)?;
        let Some(file) = self.files.find(ino) else { return Ok(()) };
        let state = file.state.lock();
        let waited_for = settling.0.as_ref().filter(|(waited_for, _)| Arc::ptr_eq(waited_for, &file));
        if state.is_clean() || waited_for.is_some_and(|(_, before)| state.in_flight.flushes.done > *before) {
            return Ok(());
        }
        if waited_for.is_none() {
            settling.0 = Some((file.clone(), state.in_flight.flushes.begun));
        }
        Err(Fail::Stall(Stall::File { ino }))
    }

    /// Target of a symbolic link.
    pub fn read_link(&self, ino: u64) -> Attempt<Vec<u8>> {
        self.volume.read_link(ino)
    }

    /// Entries of a directory after `cookie`.
    pub fn read_dir(&self, dir: u64, cookie: u64, limit: usize) -> Attempt<Vec<DirEntry>> {
        self.volume.read_dir(dir, cookie, limit)
    }

    /// Brings into memory what the next `limit` entries of a directory after `cookie` are and, if
    /// `with_inodes`, name, and keeps it there as long as the result lives. Waits for the device,
    /// for inodes once for each level of the tree and not for each of them. Inodes that are damaged
    /// are left out.
    ///
    /// # Errors
    /// The device failed, or the directory is damaged.
    pub fn preload_dir(&self, dir: u64, cookie: u64, limit: usize, with_inodes: bool) -> Result<Preloaded, FsError> {
        self.volume.preload_dir(dir, cookie, limit, with_inodes)
    }

    /// The value of an extended attribute.
    pub fn get_xattr(&self, ino: u64, name: &[u8]) -> Attempt<Vec<u8>> {
        self.volume.get_xattr(ino, name)
    }

    /// The names of the extended attributes, each with a zero byte after it.
    pub fn list_xattrs(&self, ino: u64) -> Attempt<Vec<u8>> {
        self.volume.list_xattrs(ino)
    }

    /// Sets an extended attribute. `create`: it must not exist; `replace`: it must.
    pub fn set_xattr(&self, context: &Context, ino: u64, name: &[u8], value: &[u8], create: bool, replace: bool) -> Attempt<()> {
        self.volume.set_xattr(context, ino, name, value, create, replace)
    }

    /// Removes an extended attribute.
    pub fn remove_xattr(&self, context: &Context, ino: u64, name: &[u8]) -> Attempt<()> {
        self.volume.remove_xattr(context, ino, name)
    }

    /// Keeps what is known of a file in memory until [`Filesystem::let_go_of_file`]: for a user who
    /// comes back to it often.
    pub fn hold_file(&self, ino: u64) {
        self.files.get(ino).state.lock().holders += 1;
    }

    /// Ends one [`Filesystem::hold_file`].
    pub fn let_go_of_file(&self, ino: u64) {
        let Some(file) = self.files.find(ino) else { return };
        let mut state = file.state.lock();
        state.holders -= 1;
        if state.holders == 0 {
            state.is_active = false;
            self.release_ahead(&mut state);
        }
        drop(state);
        self.release(&file);
    }

    /// Whether data of any file was lost since the volume was opened.
    pub fn has_lost_data(&self) -> bool {
        self.has_lost_data.load(Ordering::Relaxed)
    }

    /// The files that lost data since the last call: who keeps their length or content has what the
    /// volume has not.
    pub fn take_lossy(&self) -> BTreeSet<u64> {
        std::mem::take(&mut *self.lossy.lock())
    }

    /// Notes that no process has a file open: an error of it that a caller knows of is forgotten.
    pub fn closed_by_all(&self, ino: u64) {
        let Some(file) = self.files.find(ino) else { return };
        file.state.lock().errors.closed();
        self.release(&file);
    }

    /// Removes a part of an inode that has no name and that no process uses any more. Returns
    /// whether there is more to remove.
    pub fn reap_step(&self, ino: u64) -> Attempt<bool> {
        self.drop_content(ino)?;
        self.volume.reap_step(ino)
    }

    /// As [`Filesystem::reap_step`], of several inodes, each of them whole, in one operation.
    /// Returns false, and has removed none, where one of them takes more than that.
    pub fn reap_together(&self, inos: &[u64]) -> Attempt<bool> {
        inos.iter().try_for_each(|ino| self.drop_content(*ino))?;
        self.volume.reap_together(inos)
    }

    /// Drops what is in memory of an inode that has no name and that no process uses any more.
    pub fn drop_content(&self, ino: u64) -> Attempt<()> {
        let Some(file) = self.files.find(ino) else { return Ok(()) };
        let mut state = file.state.lock();
        self.drop_pages(&mut state, 0);
        if !state.in_flight.writes.is_empty() {
            return Err(Fail::Stall(Stall::InFlight { ino }));
        }
        (state.newer.size, state.newer.changed) = (None, None);
        state.errors.clear();
        if state.truncation == Truncation::Pending {
            // What is beyond the end goes with the rest.
            state.truncation = Truncation::Over;
        }
        Ok(())
    }

    /// Writes back what is in memory of a file and makes it, and everything done before, durable,
    /// for a process.
    ///
    /// # Errors
    /// Also [`Filesystem::write_error`].
    pub fn sync_for(self: &Arc<Self>, ino: u64, asker: impl FnOnce() -> Asker) -> Result<(), FsError> {
        self.flush_file(ino)?;
        self.write_error(ino, asker)?;
        self.volume.commit()
    }

    /// As [`Filesystem::sync_for`], for a caller that is no process.
    ///
    /// # Errors
    /// Also that of data that was lost, if no caller was told.
    pub fn sync_file(self: &Arc<Self>, ino: u64) -> Result<(), FsError> {
        self.flush_file(ino)?;
        self.unknown_error(ino)?;
        self.volume.commit()
    }

    /// Writes back what is in memory of all files and makes it, and everything done before,
    /// durable.
    ///
    /// # Errors
    /// Also the one by which data of any file was lost since the last call, even if another caller
    /// has learned of it.
    pub fn sync_all(self: &Arc<Self>) -> Result<(), FsError> {
        let flushed = self.flush_all();
        let committed = self.volume.commit();
        let lost = self.untold.lock().take().map_or(Ok(()), Err);
        committed.and(flushed).and(lost)
    }

    /// Makes everything done so far durable, but for data that is still in the write buffer.
    ///
    /// # Errors
    /// The device failed.
    pub fn commit(&self) -> Result<(), FsError> {
        self.volume.commit()
    }

    /// Reports, once to each process that was there then, that data of the file was lost; to later
    /// ones only if no caller was told. `asker` is called only where there is something to tell.
    ///
    /// # Errors
    /// The error that lost the data.
    pub fn write_error(&self, ino: u64, asker: impl FnOnce() -> Asker) -> Result<(), FsError> {
        self.files.find(ino).map_or(Ok(()), |file| file.state.lock().errors.tell(asker))
    }

    /// As [`Filesystem::write_error`], to a caller that is no process.
    fn unknown_error(&self, ino: u64) -> Result<(), FsError> {
        self.files.find(ino).map_or(Ok(()), |file| file.state.lock().errors.tell_anyone())
    }

    pub(super) fn release(&self, file: &Arc<File>) {
        if let Some(ahead) = self.files.release(file) {
            self.volume.unreserve_ahead(ahead);
        }
    }
}

/// Overlays the newer values that memory has over those of the inode.
fn overlay(state: &FileState, attributes: &mut Attributes) {
    let inode = &mut attributes.inode;
    if let Some(size) = state.newer.size {
        inode.size = inode.size.max(size);
    }
    if let Some(changed) = state.newer.changed {
        content_changed(inode, changed);
    }
    // Pages without a block will get one: du(1) shows what a file costs, not when it is paid.
    inode.blocks += state.buffer.promised;
}

/// Now, by the system's clock.
pub fn system_time() -> Timestamp {
    let now = std::time::SystemTime::now();
    match now.duration_since(std::time::UNIX_EPOCH) {
        Ok(since) => Timestamp { seconds: since.as_secs() as i64, nanoseconds: since.subsec_nanos() },
        Err(before) => Timestamp { seconds: -(before.duration().as_secs() as i64) - 1, nanoseconds: 0 },
    }
}
