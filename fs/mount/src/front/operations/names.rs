//! Operations on names and attributes of inodes.

use std::sync::Arc;

use gpunvme_engine::Inode;

use super::listing::{Listing, Reading};
use crate::front::caller::Caller;
use crate::front::kernel::PAGE;
use crate::front::resources::turns::Owner;
use crate::front::shared::Front;
use gpunvme_engine::data::{Filesystem, Settling};
use gpunvme_engine::error::{Attempt, Fail, FsError};
use gpunvme_engine::volume::{Attributes, NewNode, RenameMode, SetAttributes};

/// Permissions of a program that runs with the privileges of its group.
pub(super) const SET_GROUP_ID_PROGRAM: u32 = libc::S_ISGID | libc::S_IXGRP;

impl Front {
    /// The node behind a name; none if it does not exist. The kernel asks for `.` and `..` when it
    /// only has a number from a file handle, which need not be the number of a directory, or of
    /// any inode.
    pub fn lookup(
        self: &Arc<Self>,
        owner: Owner,
        parent: u64,
        name: &[u8],
        done: impl FnOnce(Result<Option<Attributes>, FsError>) + Send + 'static,
    ) {
        let name = name.to_vec();
        self.attempt(
            owner,
            move |fs| {
                let found = match &name[..] {
                    b"." => fs.attributes(parent),
                    b".." => fs.attributes(parent).and_then(|dir| fs.attributes(dir.inode.parent)),
                    name => fs.lookup(parent, name),
                };
                match found {
                    Err(Fail::Error(FsError::NotFound)) => Ok(None),
                    // Without a name and unknown to the kernel: a crash left it, no process has it
                    // open, and it is about to be removed.
                    Ok(found) if found.inode.nlink == 0 => Ok(None),
                    found => found.map(Some),
                }
            },
            move |front, found| done(found.map(|found| found.filter(|found| front.lookups.look_up(found.ino)))),
        );
    }

    /// Notes that the kernel has forgotten answers that gave it inodes, so many of each.
    pub fn forget(self: &Arc<Self>, forgets: impl Iterator<Item = (u64, u64)>) {
        let orphans: Vec<u64> = forgets
            .filter_map(|(ino, lookups)| {
                let is_orphan = self.lookups.forget(ino, lookups);
                if !is_orphan && self.fs.has_lost_data() && !self.lookups.knows(ino) {
                    self.fs.closed_by_all(ino);
                }
                is_orphan.then_some(ino)
            })
            .collect();
        if !orphans.is_empty() {
            self.remove(orphans);
        }
    }

    /// Creates a node; it is given to the kernel.
    pub fn create(
        self: &Arc<Self>,
        caller: Caller,
        parent: u64,
        name: &[u8],
        new: NewNode<'_>,
        done: impl FnOnce(Result<Attributes, FsError>) + Send + 'static,
    ) {
        let (name, target) = (name.to_vec(), new.target.to_vec());
        let (mode, umask, rdev) = (new.mode, new.umask, new.rdev);
        self.attempt(
            caller.owner(),
            move |fs| {
                let mode = new_mode(fs, &caller, parent, mode)?;
                fs.create(&caller.context, parent, &name, &NewNode { mode, umask, rdev, target: &target })
            },
            move |front, created| done(front.given(created)),
        );
    }

    /// Creates a file without a name; it is given to the kernel, and goes when the kernel forgets
    /// it.
    pub fn create_unnamed(
        self: &Arc<Self>,
        caller: Caller,
        parent: u64,
        (mode, umask): (u32, u32),
        done: impl FnOnce(Result<Attributes, FsError>) + Send + 'static,
    ) {
        self.attempt(
            caller.owner(),
            move |fs| {
                let mode = new_mode(fs, &caller, parent, mode)?;
                fs.create_unnamed(&caller.context, parent, &NewNode { mode, umask, rdev: 0, target: &[] })
            },
            move |front, created| {
                let given = front.given(created);
                // It is counted, so it is not to be removed yet.
                let noted = given.and_then(|file| front.orphaned(Ok(Some(file.ino))).map(|()| file));
                done(noted);
            },
        );
    }

    /// Gives an inode another name; it is given to the kernel again.
    pub fn link(
        self: &Arc<Self>,
        caller: Caller,
        ino: u64,
        parent: u64,
        name: &[u8],
        done: impl FnOnce(Result<Attributes, FsError>) + Send + 'static,
    ) {
        let name = name.to_vec();
        self.attempt(
            caller.owner(),
            move |fs| fs.link(&caller.context, ino, parent, &name),
            move |front, linked| {
                if linked.is_ok() {
                    front.lookups.named(ino);
                }
                done(front.given(linked));
            },
        );
    }

    /// Counts a node that is about to be given to the kernel.
    fn given(&self, node: Result<Attributes, FsError>) -> Result<Attributes, FsError> {
        node.and_then(|node| if self.lookups.look_up(node.ino) { Ok(node) } else { Err(FsError::NotFound) })
    }

    /// Removes a name of anything but a directory.
    pub fn unlink(
        self: &Arc<Self>,
        caller: Caller,
        parent: u64,
        name: &[u8],
        done: impl FnOnce(Result<(), FsError>) + Send + 'static,
    ) {
        let name = name.to_vec();
        self.attempt(
            caller.owner(),
            move |fs| fs.unlink(&caller.context, parent, &name),
            move |front, orphan| done(front.orphaned(orphan)),
        );
    }

    /// Removes an empty directory.
    pub fn rmdir(
        self: &Arc<Self>,
        caller: Caller,
        parent: u64,
        name: &[u8],
        done: impl FnOnce(Result<(), FsError>) + Send + 'static,
    ) {
        let name = name.to_vec();
        self.attempt(
            caller.owner(),
            move |fs| fs.rmdir(&caller.context, parent, &name).map(Some),
            move |front, orphan| done(front.orphaned(orphan)),
        );
    }

    /// Renames.
    pub fn rename(
        self: &Arc<Self>,
        caller: Caller,
        from: (u64, &[u8]),
        to: (u64, &[u8]),
        mode: RenameMode,
        done: impl FnOnce(Result<(), FsError>) + Send + 'static,
    ) {
        let (from, to) = ((from.0, from.1.to_vec()), (to.0, to.1.to_vec()));
        // Where a directory may be after it that was in another one before.
        let moved = if from.0 == to.0 { Vec::new() } else { vec![to.clone(), from.clone()] };
        let mut settling = Settling::default();
        self.attempt(
            caller.owner(),
            move |fs| fs.rename(&caller.context, (from.0, &from.1), (to.0, &to.1), mode, &mut settling),
            move |front, orphan| {
                let renamed = front.orphaned(orphan);
                let moved = if renamed.is_ok() { moved } else { Vec::new() };
                done(renamed);
                moved.into_iter().for_each(|(dir, name)| front.forget_listing(caller.owner(), dir, &name));
            },
        );
    }

    /// Makes the kernel forget its listing of a directory, if this is one: its `..` is another.
    fn forget_listing(self: &Arc<Self>, owner: Owner, dir: u64, name: &[u8]) {
        let name = name.to_vec();
        let forget = move |front: &Arc<Front>, found: Result<Attributes, FsError>| {
            let Some(Attributes { ino, .. }) = found.ok().filter(|found| found.inode.is_dir()) else { return };
            let after = front.clone();
            front.invalidations.run_for(owner, move || {
                if let Some(kernel) = after.kernel.get() {
                    kernel.invalidate(ino, 0..PAGE);
                }
            });
        };
        self.attempt(owner, move |fs| fs.lookup(dir, &name), forget);
    }

    /// Notes the inode that lost its last name.
    fn orphaned(self: &Arc<Self>, orphan: Result<Option<u64>, FsError>) -> Result<(), FsError> {
        if let Some(ino) = orphan?
            && self.lookups.orphaned(ino)
        {
            self.remove([ino]);
        }
        Ok(())
    }

    /// Attributes of an inode.
    pub fn attributes(self: &Arc<Self>, owner: Owner, ino: u64, done: impl FnOnce(Result<Attributes, FsError>) + Send + 'static) {
        self.attempt(owner, move |fs| fs.attributes(ino), |_, found| done(found));
    }

    /// Changes attributes, the size first.
    ///
    /// `strip`: the set-user-id bits go with a new owner or size, as the kernel says
    /// (`FATTR_KILL_SUIDGID`: a new owner always strips them, a new size does unless the caller
    /// has the privilege to keep them). A request that changes nothing has two meanings: it may be
    /// chown(2) without a change, which any user may call, or precede an operation that strips the
    /// bits by itself ([`Front::strip`]). So it strips them at the request of the file's owner
    /// only.
    pub fn set_attributes(
        self: &Arc<Self>,
        caller: Caller,
        ino: u64,
        size: Option<u64>,
        set: SetAttributes,
        strip: bool,
        done: impl FnOnce(Result<Attributes, FsError>) + Send + 'static,
    ) {
        let others = move |fs: &Arc<Filesystem>| {
            let now = fs.attributes(ino)?;
            let uid = caller.context.uid;
            let bits = if set.mode.is_none() { set_id_bits(&now.inode, &caller) } else { 0 };
            let changes_owner = set.uid.or(set.gid).is_some();
            let takes = if changes_owner || size.is_some() { strip } else { set.is_empty() && uid != 0 && uid == now.inode.uid };
            let set = SetAttributes { bits_gone: if takes { bits } else { 0 }, ..set };
            // A request without changes sets the time of change, except where it would have to
            // strip bits of a file that the caller does not own.
            let nothing = set.is_empty() && (size.is_some() || uid != 0 && bits != 0);
            if nothing { Ok(now) } else { fs.set_attributes(&caller.context, ino, &set) }
        };
        match size {
            // Freeing the blocks beyond the new size can take long.
            Some(size) => {
                let front = self.clone();
                let end = move |changed: Result<Attributes, FsError>| {
                    let has_failed = changed.is_err();
                    done(changed);
                    if has_failed && front.fs.attributes(ino).is_ok_and(|now| now.inode.size == size) {
                        // The kernel keeps length and pages where it is told of an error.
                        let behind = size..i64::MAX as u64;
                        front.invalidate_later(caller.owner(), ino, vec![behind]);
                    }
                };
                self.wait(
                    caller.owner(),
                    move |fs| {
                        fs.wait(|| fs.set_size(&caller.context, ino, size))?;
                        fs.wait(|| others(fs))
                    },
                    end,
                );
            }
            None => self.attempt(caller.owner(), others, |_, changed| done(changed)),
        }
    }

    /// Fills a listing with the entries of a directory after `cookie`. Those that come with
    /// attributes are given to the kernel, but for `.` and `..`.
    pub fn read_dir<L: Listing>(
        self: &Arc<Self>,
        owner: Owner,
        (dir, cookie): (u64, u64),
        listing: L,
        done: impl FnOnce(L, Result<(), FsError>) + Send + 'static,
    ) {
        let mut reading = Reading::new(self.clone(), dir, cookie, listing);
        match reading.fill() {
            Ok(()) => done(reading.listing, Ok(())),
            Err(Fail::Error(error)) => done(reading.listing, Err(error)),
            Err(Fail::Stall(_)) => self.general.run_for(owner, move || {
                let filled = reading.fill_waiting();
                done(reading.listing, filled);
            }),
        }
    }
}

/// The bits that a file loses when the caller changes it: its set-user-id bit, and its
/// set-group-id bit where its group can execute it or the caller is not in that group
/// (`setattr_should_drop_sgid` of `fs/attr.c`).
pub(crate) fn set_id_bits(inode: &Inode, caller: &Caller) -> u32 {
    let goes = |bit| bit == libc::S_ISUID || inode.mode & libc::S_IXGRP != 0 || !caller.is_in_group(inode.gid);
    let bits = [libc::S_ISUID, libc::S_ISGID].into_iter().filter(|bit| !inode.is_dir() && inode.mode & bit != 0 && goes(*bit));
    bits.fold(0, |all, bit| all | bit)
}

/// The mode of a node that the caller makes in a directory: a file that gets the directory's group
/// is not a program with the privileges of that group unless the caller has them (`mode_strip_sgid`
/// of `fs/inode.c`). Since Linux 6.0 the kernel has seen to it before it asks.
fn new_mode(fs: &Filesystem, caller: &Caller, directory: u64, mode: u32) -> Attempt<u32> {
    let is_privileged = mode & libc::S_IFMT != libc::S_IFDIR && mode & SET_GROUP_ID_PROGRAM == SET_GROUP_ID_PROGRAM;
    if !is_privileged {
        return Ok(mode);
    }
    let directory = fs.attributes(directory)?.inode;
    let gets_its_group = directory.mode & libc::S_ISGID != 0;
    Ok(if gets_its_group && !caller.is_in_group(directory.gid) { mode & !libc::S_ISGID } else { mode })
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpunvme_blockdev::{BlockDevice, Io};
    use gpunvme_blockdev_testing::MemoryDevice;
    use gpunvme_engine::data::{Inline, Options, system_time};
    use gpunvme_engine::volume::VolumeOptions;
    use gpunvme_engine::{FormatOptions, format};

    const ROOT: u64 = 1;

    /// Not through a mount: the kernel of the machine may have looked at it before.
    #[test]
    fn a_new_file_has_the_privileges_of_its_folders_group_only_from_a_member() {
        let device: Arc<dyn BlockDevice> = MemoryDevice::new(24 << 20);
        let options = FormatOptions { label: String::new(), uuid: [7; 16], hash_key: [9; 16], now: system_time(), owner: (0, 0) };
        format(&device, &options).unwrap();
        let volume = VolumeOptions { read_only: false, cache: 16 << 20, discard: false };
        let io = Io::inline(device).unwrap();
        let fs = Filesystem::open(io, Options { volume, write_buffer: 4 << 20 }, Arc::new(Inline)).unwrap();
        let (root, member, stranger) = (Caller::now(0, 0, 0), Caller::now(7, 99, 0), Caller::now(7, 7, 0));
        let folder = |name: &[u8], mode: u32| {
            let new = NewNode { mode: libc::S_IFDIR | mode, umask: 0, rdev: 0, target: &[] };
            fs.create(&gpunvme_engine::volume::Context { gid: 99, ..root.context }, ROOT, name, &new).unwrap().ino
        };
        let (shared, plain) = (folder(b"shared", 0o2777), folder(b"plain", 0o777));
        let (file, dir) = (libc::S_IFREG, libc::S_IFDIR);
        for (caller, directory, mode, made) in [
            (&stranger, shared, file | 0o6755, file | 0o4755),
            (&member, shared, file | 0o6755, file | 0o6755),
            (&root, shared, file | 0o2755, file | 0o2755),
            // Its own group's, no program, and a folder.
            (&stranger, plain, file | 0o2755, file | 0o2755),
            (&stranger, shared, file | 0o2745, file | 0o2745),
            (&stranger, shared, dir | 0o2755, dir | 0o2755),
        ] {
            assert_eq!(new_mode(&fs, caller, directory, mode).unwrap(), made, "{mode:o} in {directory}");
        }
        fs.close().unwrap();
    }
}
