//! The FUSE operations on the store. The kernel answers by itself all operations that are not here.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation, INodeNo, KernelConfig, LockOwner, OpenFlags,
    RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use parking_lot::RwLock;

use crate::disk::Disk;
use crate::settings;
use crate::store::{Body, Folder, Inode, Store};

/// The filesystem.
pub struct MemFs {
    store: Store,
    /// Where what files hold is, if not in memory.
    disk: Option<Disk>,
}

/// Longest name in bytes. The kernel lets longer ones through.
const NAME_MAX: usize = 255;

/// What a new inode is to be.
struct New {
    kind: FileType,
    mode: u32,
    device: u32,
    body: Body,
}

/// Inode numbers are not reused.
const GENERATION: Generation = Generation(0);

fn answer_entry(result: Result<FileAttr, Errno>, reply: ReplyEntry) {
    match result {
        Ok(attributes) => reply.entry(&settings::LIFETIME, &attributes, GENERATION),
        Err(error) => reply.error(error),
    }
}

fn answer(result: Result<(), Errno>, reply: ReplyEmpty) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error),
    }
}

impl MemFs {
    pub fn new(disk: Option<Disk>) -> Self {
        Self { store: Store::new(), disk }
    }

    /// The inode of a folder in which `name` is to be found or made.
    fn parent(&self, number: INodeNo, name: &OsStr) -> Result<Arc<Inode>, Errno> {
        if name.len() > NAME_MAX { Err(Errno::ENAMETOOLONG) } else { self.inode(number) }
    }

    fn inode(&self, number: INodeNo) -> Result<Arc<Inode>, Errno> {
        self.store.get(number.0).ok_or(Errno::ESTALE)
    }

    /// Makes an inode and an entry for it.
    fn add(&self, req: &Request, parent: INodeNo, name: &OsStr, new: New) -> Result<FileAttr, Errno> {
        let parent = self.parent(parent, name)?;
        let mut entries = parent.folder().ok_or(Errno::ENOTDIR)?.write();
        if entries.get(name).is_some() {
            return Err(Errno::EEXIST);
        }
        let folder = new.kind == FileType::Directory;
        let (mut mode, mut group) = (new.mode, req.gid());
        {
            let state = parent.state.lock();
            if state.mode & 0o2000 != 0 {
                group = state.gid;
                mode |= if folder { 0o2000 } else { 0 };
            }
        }
        let inode = self.store.make(new.kind, mode, (req.uid(), group), new.device, new.body);
        entries.set(name, inode.number);
        parent.entries_changed(i32::from(folder));
        Ok(inode.looked_up())
    }

    /// Removes an entry, of a folder or of anything else.
    fn remove(&self, parent: INodeNo, name: &OsStr, folder: bool) -> Result<(), Errno> {
        let parent = self.parent(parent, name)?;
        let mut entries = parent.folder().ok_or(Errno::ENOTDIR)?.write();
        let inode = entries.get(name).and_then(|number| self.store.get(number)).ok_or(Errno::ENOENT)?;
        match (inode.folder(), folder) {
            (Some(inner), true) if !inner.read().is_empty() => return Err(Errno::ENOTEMPTY),
            (Some(_), false) => return Err(Errno::EISDIR),
            (None, true) => return Err(Errno::ENOTDIR),
            (Some(_), true) | (None, false) => {}
        }
        entries.remove(name);
        parent.entries_changed(-i32::from(folder));
        self.store.release(&inode, if folder { 2 } else { 1 }, 0);
        Ok(())
    }

    fn move_entry(&self, from: INodeNo, name: &OsStr, to: INodeNo, new_name: &OsStr, flags: RenameFlags) -> Result<(), Errno> {
        if !(flags & !RenameFlags::RENAME_NOREPLACE).is_empty() {
            return Err(Errno::EINVAL);
        }
        let source = self.parent(from, name)?;
        let target = self.parent(to, new_name)?;
        let source_folder = source.folder().ok_or(Errno::ENOTDIR)?;
        let target_folder = target.folder().ok_or(Errno::ENOTDIR)?;
        // The kernel holds its rename lock: folders do not move around meanwhile, and never below
        // themselves.
        let (mut first, mut second) = match from.0.cmp(&to.0) {
            std::cmp::Ordering::Less => (source_folder.write(), Some(target_folder.write())),
            std::cmp::Ordering::Equal => (source_folder.write(), None),
            std::cmp::Ordering::Greater => {
                let target = target_folder.write();
                (source_folder.write(), Some(target))
            }
        };
        let number = first.get(name).ok_or(Errno::ENOENT)?;
        let inode = self.store.get(number).ok_or(Errno::ENOENT)?;
        let is_folder = i32::from(inode.kind == FileType::Directory);
        let old = second.as_ref().unwrap_or(&first).get(new_name);
        if old == Some(number) {
            return Ok(());
        }
        let mut replaced_folder = 0;
        if let Some(old) = old.and_then(|number| self.store.get(number)) {
            if flags.contains(RenameFlags::RENAME_NOREPLACE) {
                return Err(Errno::EEXIST);
            }
            match old.folder() {
                Some(folder) if !folder.read().is_empty() => return Err(Errno::ENOTEMPTY),
                Some(_) => replaced_folder = 1,
                None => {}
            }
            self.store.release(&old, 1 + replaced_folder as u32, 0);
        }
        first.remove(name);
        second.as_mut().unwrap_or(&mut first).set(new_name, number);
        source.entries_changed(-is_folder);
        target.entries_changed(is_folder - replaced_folder);
        if let Some(folder) = inode.folder() {
            folder.write().parent = to.0;
        }
        inode.state.lock().changed = SystemTime::now();
        Ok(())
    }

    fn set_attributes(
        &self,
        number: INodeNo,
        mode: Option<u32>,
        owner: (Option<u32>, Option<u32>),
        len: Option<u64>,
        times: (Option<TimeOrNow>, Option<TimeOrNow>),
    ) -> Result<FileAttr, Errno> {
        let inode = self.inode(number)?;
        if let (Some(len), Body::File(chunks)) = (len, &inode.body) {
            self.store.set_len(&inode, chunks, len);
        }
        let now = SystemTime::now();
        let time = |time| match time {
            TimeOrNow::SpecificTime(time) => time,
            TimeOrNow::Now => now,
        };
        {
            let mut state = inode.state.lock();
            state.mode = mode.map_or(state.mode, |mode| (mode & 0o7777) as u16);
            state.uid = owner.0.unwrap_or(state.uid);
            state.gid = owner.1.unwrap_or(state.gid);
            state.accessed = times.0.map_or(state.accessed, time);
            state.modified = times.1.map_or(state.modified, time);
            state.changed = now;
        }
        Ok(inode.attributes())
    }

    /// Calls `entry` with each entry of a folder behind `position` until it returns true: the
    /// answer is full.
    fn list(&self, number: INodeNo, position: u64, mut entry: impl FnMut(&Arc<Inode>, u64, &OsStr) -> bool) -> Result<(), Errno> {
        let inode = self.inode(number)?;
        let entries = inode.folder().ok_or(Errno::ENOTDIR)?.read();
        if position < 1 && entry(&inode, 1, OsStr::new(".")) {
            return Ok(());
        }
        if position < 2 && entry(&self.inode(INodeNo(entries.parent))?, 2, OsStr::new("..")) {
            return Ok(());
        }
        for (position, name, number) in entries.after(position.max(2)) {
            if let Some(inode) = self.store.get(number)
                && entry(&inode, position, name)
            {
                break;
            }
        }
        Ok(())
    }
}

impl Filesystem for MemFs {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        settings::negotiate(config);
        Ok(())
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self.parent(parent, name).and_then(|parent| {
            let number = parent.folder().ok_or(Errno::ENOTDIR)?.read().get(name);
            number.and_then(|number| self.store.get(number)).ok_or(Errno::ENOENT)
        });
        match found {
            Ok(inode) => reply.entry(&settings::LIFETIME, &inode.looked_up(), GENERATION),
            // Inode 0: the kernel may remember that there is nothing of this name.
            Err(Errno::ENOENT) => reply.entry(&settings::LIFETIME, &settings::NOTHING, GENERATION),
            Err(error) => reply.error(error),
        }
    }

    fn forget(&self, _req: &Request, ino: INodeNo, nlookup: u64) {
        if let Some(inode) = self.store.get(ino.0) {
            self.store.release(&inode, 0, nlookup);
        }
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        match self.inode(ino) {
            Ok(inode) => reply.attr(&settings::LIFETIME, &inode.attributes()),
            Err(error) => reply.error(error),
        }
    }

    fn setattr(
        &self,
        _req: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        match self.set_attributes(ino, mode, (uid, gid), size, (atime, mtime)) {
            Ok(attributes) => reply.attr(&settings::LIFETIME, &attributes),
            Err(error) => reply.error(error),
        }
    }

    fn readlink(&self, _req: &Request, ino: INodeNo, reply: ReplyData) {
        match self.inode(ino) {
            Ok(inode) => match &inode.body {
                Body::Symlink(target) => reply.data(target.as_encoded_bytes()),
                _ => reply.error(Errno::EINVAL),
            },
            Err(error) => reply.error(error),
        }
    }

    fn mknod(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, rdev: u32, reply: ReplyEntry) {
        let (kind, body) = match mode & libc::S_IFMT {
            libc::S_IFREG => (FileType::RegularFile, Body::File(RwLock::default())),
            libc::S_IFIFO => (FileType::NamedPipe, Body::Special),
            libc::S_IFSOCK => (FileType::Socket, Body::Special),
            libc::S_IFBLK => (FileType::BlockDevice, Body::Special),
            libc::S_IFCHR => (FileType::CharDevice, Body::Special),
            _ => return reply.error(Errno::EINVAL),
        };
        answer_entry(self.add(req, parent, name, New { kind, mode: mode & !umask, device: rdev, body }), reply);
    }

    fn mkdir(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        let body = Body::Folder(RwLock::new(Folder::new(parent.0)));
        let new = New { kind: FileType::Directory, mode: mode & !umask, device: 0, body };
        answer_entry(self.add(req, parent, name, new), reply);
    }

    fn unlink(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        answer(self.remove(parent, name, false), reply);
    }

    fn rmdir(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        answer(self.remove(parent, name, true), reply);
    }

    fn symlink(&self, req: &Request, parent: INodeNo, link_name: &OsStr, target: &Path, reply: ReplyEntry) {
        let body = Body::Symlink(target.as_os_str().to_owned());
        let new = New { kind: FileType::Symlink, mode: 0o777, device: 0, body };
        answer_entry(self.add(req, parent, link_name, new), reply);
    }

    fn rename(
        &self,
        _req: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        answer(self.move_entry(parent, name, newparent, newname, flags), reply);
    }

    fn link(&self, _req: &Request, ino: INodeNo, newparent: INodeNo, newname: &OsStr, reply: ReplyEntry) {
        let linked = self.inode(ino).and_then(|inode| {
            let parent = self.parent(newparent, newname)?;
            let mut entries = parent.folder().ok_or(Errno::ENOTDIR)?.write();
            if entries.get(newname).is_some() {
                return Err(Errno::EEXIST);
            }
            {
                let mut state = inode.state.lock();
                state.links += 1;
                state.changed = SystemTime::now();
            }
            entries.set(newname, inode.number);
            parent.entries_changed(0);
            Ok(inode.looked_up())
        });
        answer_entry(linked, reply);
    }

    fn open(&self, _req: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if flags.0 & libc::O_TRUNC != 0
            && let Ok(inode) = self.inode(ino)
            && let Body::File(chunks) = &inode.body
        {
            self.store.set_len(&inode, chunks, 0);
        }
        reply.opened(FileHandle(0), settings::opened(flags.0));
    }

    fn create(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, flags: i32, reply: ReplyCreate) {
        let body = Body::File(RwLock::default());
        let new = New { kind: FileType::RegularFile, mode: mode & !umask, device: 0, body };
        match self.add(req, parent, name, new) {
            Ok(attributes) => reply.created(&settings::LIFETIME, &attributes, GENERATION, FileHandle(0), settings::opened(flags)),
            Err(error) => reply.error(error),
        }
    }

    fn read(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.inode(ino) {
            Ok(inode) => match &inode.body {
                Body::File(chunks) => match &self.disk {
                    Some(disk) => disk.read(inode.number, offset, inode.below_end(offset, size as usize), reply),
                    None => self.store.read(&inode, chunks, offset, size as usize, |bytes| reply.data(bytes)),
                },
                _ => reply.error(Errno::EINVAL),
            },
            Err(error) => reply.error(error),
        }
    }

    fn write(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.inode(ino) {
            Ok(inode) => match &inode.body {
                Body::File(chunks) => match &self.disk {
                    Some(disk) => {
                        inode.written(offset + data.len() as u64);
                        disk.write(inode.number, offset, data, flags.0 & libc::O_DIRECT != 0, reply);
                    }
                    None => {
                        self.store.write(&inode, chunks, offset, data);
                        reply.written(data.len() as u32);
                    }
                },
                _ => reply.error(Errno::EINVAL),
            },
            Err(error) => reply.error(error),
        }
    }

    fn fsync(&self, _req: &Request, ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        match &self.disk {
            Some(disk) => disk.sync(ino.0, reply),
            None => reply.ok(),
        }
    }

    fn fsyncdir(&self, _req: &Request, _ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn opendir(&self, _req: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        // A folder needs no handle: the kernel stops asking.
        reply.error(Errno::ENOSYS);
    }

    fn flush(&self, _req: &Request, _ino: INodeNo, _fh: FileHandle, _lock_owner: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn readdir(&self, _req: &Request, ino: INodeNo, _fh: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let listed = self.list(ino, offset, |inode, position, name| reply.add(INodeNo(inode.number), position, inode.kind, name));
        match listed {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    fn readdirplus(&self, _req: &Request, ino: INodeNo, _fh: FileHandle, offset: u64, mut reply: ReplyDirectoryPlus) {
        let listed = self.list(ino, offset, |inode, position, name| {
            let full = reply.add(INodeNo(inode.number), position, name, &settings::LIFETIME, &inode.attributes(), GENERATION);
            // The kernel takes a reference to each inode listed, but for "." and "..".
            if !full && position > 2 {
                inode.state.lock().lookups += 1;
            }
            full
        });
        match listed {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    fn statfs(&self, _req: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        reply.statfs(1 << 30, 1 << 30, 1 << 30, 1 << 40, 1 << 40, 4096, NAME_MAX as u32, 4096);
    }

    fn getxattr(&self, _req: &Request, _ino: INodeNo, _name: &OsStr, _size: u32, reply: ReplyXattr) {
        // Not ENOSYS, which would make the kernel stop asking: a filesystem that has attributes is
        // asked.
        reply.error(Errno::ENODATA);
    }

    fn fallocate(&self, _req: &Request, ino: INodeNo, _fh: FileHandle, offset: u64, length: u64, mode: i32, reply: ReplyEmpty) {
        if mode != 0 {
            return reply.error(Errno::EOPNOTSUPP);
        }
        match self.inode(ino) {
            Ok(inode) => {
                let mut state = inode.state.lock();
                state.len = state.len.max(offset + length);
                state.changed = SystemTime::now();
                reply.ok();
            }
            Err(error) => reply.error(error),
        }
    }
}
