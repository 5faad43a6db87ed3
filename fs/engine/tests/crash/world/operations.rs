//! Operations of the workload: each is chosen and aimed at random, and records what it means for
//! the expected content.

use gpunvme_abi::Segment;
use gpunvme_blockdev::Region;
use gpunvme_engine::data::Settling;
use gpunvme_engine::data::resize::Allocate;
use gpunvme_engine::error::FsError;
use gpunvme_engine::volume::{NewNode, RenameMode, SetAttributes};
use gpunvme_layout::{FileType, Timestamp};
use parking_lot::Mutex;

use super::super::history::judge_content;
use super::super::view::View;
use super::{World, tolerate};

/// Largest offset of a write.
const REACH: u64 = 300_000;

type Change = Box<dyn FnOnce(&mut Vec<u8>)>;

impl World {
    /// An operation that is one attempt.
    pub(super) fn something(&self) {
        let fs = self.fs();
        let context = self.context();
        match self.below(100) {
            0..18 => self.create(),
            18..45 => self.write(),
            45..53 => {
                let (dir, name) = self.pick_place();
                let is_dir = |view: &View| view.names.get(&dir).and_then(|e| e.get(&name)).map(|i| view.names.contains_key(i));
                let is_dir = is_dir(self.state.lock().history.now());
                match is_dir {
                    Some(true) => {
                        let gone = self.change(|| fs.rmdir(&context, dir, &name));
                        self.orphaned(gone);
                    }
                    Some(false) => {
                        let gone = self.change(|| fs.unlink(&context, dir, &name));
                        self.orphaned(gone.flatten());
                    }
                    None => {}
                }
            }
            53..64 => {
                let ((dir, name), (to, new)) = (self.pick_place(), self.pick_place());
                let mode = [RenameMode::Replace, RenameMode::Replace, RenameMode::NoReplace, RenameMode::Exchange];
                let mode = mode[self.below(4) as usize];
                let had = |view: &View, dir: u64, name: &[u8]| view.names.get(&dir).and_then(|e| e.get(name)).copied();
                let replaces = Mutex::new(false);
                let gone = self.change(|| {
                    let state = self.state.lock();
                    let now = state.history.now();
                    // A file that is renamed to another of its own names is as it was.
                    *replaces.lock() = had(now, to, &new).is_some_and(|old| had(now, dir, &name) != Some(old));
                    drop(state);
                    fs.rename(&context, (dir, &name), (to, &new), mode, &mut Settling::default())
                });
                if gone.is_some() && mode == RenameMode::Replace && *replaces.lock() {
                    let mut state = self.state.lock();
                    if let Some(ino) = had(state.history.now(), to, &new) {
                        state.history.replaced(ino);
                    }
                }
                self.orphaned(gone.flatten());
            }
            64..69 => {
                let Some(ino) = self.pick(|v| v.nodes.keys().filter(|i| !v.names.contains_key(i)).copied().collect()) else {
                    return;
                };
                let (dir, name) = self.pick_place();
                self.change(|| fs.link(&context, ino, dir, &name));
            }
            69..77 => {
                let Some(ino) = self.pick(|view| view.nodes.keys().copied().collect()) else { return };
                let name = format!("user.{}", self.below(5)).into_bytes();
                let len = if self.below(5) == 0 { self.below(30_000) } else { self.below(300) };
                let value = self.bytes(len);
                if self.below(4) == 0 {
                    self.change(|| fs.remove_xattr(&context, ino, &name));
                } else {
                    self.change(|| fs.set_xattr(&context, ino, &name, &value, false, false));
                }
            }
            77..80 => self.set_acl(),
            80..87 => self.set_attributes(),
            87..93 => self.direct_write(),
            _ => self.open_or_close(),
        }
    }

    /// An operation that waits for the device, and lets others go on meanwhile.
    pub(super) fn something_long(&self) {
        let fs = self.fs();
        let context = self.context();
        match self.below(100) {
            0..22 => {
                let Some(ino) = self.pick_file() else { return };
                let claim = self.state.lock().history.claim([ino]);
                fs.sync_file(ino).expect("nothing fails");
                self.promised(claim);
            }
            22..30 => {
                // The promise of an fsync of a directory covers names only.
                let claim = self.state.lock().history.claim([]);
                fs.commit().expect("nothing fails");
                self.promised(claim);
            }
            30..36 => {
                // Unmount and sync(1) as far as it reaches us: everything.
                let claim = {
                    let state = self.state.lock();
                    let files = state.history.now().files();
                    state.history.claim(files)
                };
                fs.flush_all().expect("nothing fails");
                fs.commit().expect("nothing fails");
                self.promised(claim);
            }
            36..44 => {
                // The write-back that happens by itself every few seconds.
                let claim = self.state.lock().history.claim([]);
                fs.write_back().expect("nothing fails");
                fs.commit().expect("nothing fails");
                self.promised(claim);
            }
            44..52 => fs.volume().checkpoint().expect("nothing fails"),
            52..64 => self.on_file(|ino| {
                let size = self.state.lock().history.content(ino).len() as u64;
                let new = [self.below(REACH), 0, self.below(size + 1), self.below(size + 1)][self.below(4) as usize];
                fs.wait(|| fs.set_size(&context, ino, new))?;
                Ok((format!("truncate {new}"), Box::new(move |content: &mut Vec<u8>| content.resize(new as usize, 0))))
            }),
            64..78 => self.on_file(|ino| {
                let (offset, len) = (self.below(REACH), self.below(100_000) + 1);
                let grow = self.below(2) == 0;
                let what = [Allocate::Reserve { grow }, Allocate::Punch, Allocate::Zero { grow }][self.below(3) as usize];
                fs.allocate(&context, ino, offset, len, what)?;
                let change = move |content: &mut Vec<u8>| {
                    let end = (offset + len) as usize;
                    if grow && what != Allocate::Punch {
                        content.resize(content.len().max(end), 0);
                    }
                    if !matches!(what, Allocate::Reserve { .. }) {
                        let (from, to) = ((offset as usize).min(content.len()), end.min(content.len()));
                        content[from..to].fill(0);
                    }
                };
                Ok((format!("{what:?} {offset} {len}"), Box::new(change)))
            }),
            78..84 => {
                // A copy may see half of a write that is in flight past the buffer.
                let Some(from) = self.pick_file().filter(|from| !self.direct.lock().contains(from)) else { return };
                self.on_file(|to| {
                    if from == to {
                        return Ok(("nothing".into(), Box::new(|_: &mut Vec<u8>| {})));
                    }
                    self.state.lock().held.insert(from);
                    let source = self.state.lock().history.content(from).clone();
                    let (start, at, len) = (self.below(source.len() as u64 + 1), self.below(REACH), self.below(50_000));
                    let copied = fs.copy_range((from, start), (to, at), len, context.now);
                    self.state.lock().held.remove(&from);
                    let copied = copied? as usize;
                    let change = move |content: &mut Vec<u8>| {
                        if copied > 0 {
                            put(content, at as usize, &source[start as usize..][..copied]);
                        }
                    };
                    Ok((format!("copy {at} {copied}"), Box::new(change)))
                });
            }
            84..90 => self.read(),
            // Blocks that are free or were: no cut may find a file in them.
            90..93 => {
                let minimum = self.below(40);
                fs.volume().trim(0, u64::MAX, minimum).expect("nothing fails");
            }
            93..95 => fs.volume().discard_freed(|| true),
            _ => {
                let orphan = self.state.lock().orphans.pop();
                if let Some(ino) = orphan
                    && fs.wait(|| fs.reap_step(ino)).expect("nothing fails")
                {
                    self.state.lock().orphans.push(ino);
                }
            }
        }
    }

    fn create(&self) {
        let (fs, context) = (self.fs(), self.context());
        let (dir, name) = self.pick_place();
        let mut target = Vec::new();
        let mode = match self.below(8) {
            0 | 1 => 0o040755,
            2 => {
                target = self.bytes(self.below(3000) + 1);
                0o120777
            }
            3 => [0o020640, 0o060640, 0o010600, 0o140755][self.below(4) as usize],
            _ => 0o100644,
        };
        let new = NewNode { mode, umask: 0o022, rdev: if mode & 0o020000 != 0 { 0x103 } else { 0 }, target: &target };
        let began = self.recorder.position();
        if let Some(made) = self.change(|| fs.create(&context, dir, &name, &new))
            && made.inode.file_type() == FileType::Regular
        {
            self.state.lock().history.created(made.ino, began);
        }
    }

    fn write(&self) {
        let Some(ino) = self.pick_file() else { return };
        let size = self.state.lock().history.content(ino).len() as u64;
        let offset = [size, size, self.below(REACH), self.below(size + 5000)][self.below(4) as usize];
        let len = if self.below(6) == 0 { self.below(100_000) } else { self.below(6000) } + 1;
        let (data, now) = (self.bytes(len), self.context().now);
        let began = self.recorder.position();
        let fs = self.fs();
        match self.attempt(|| fs.write(ino, offset, &data, now)) {
            Some(Ok(())) => self.state.lock().history.changed(ino, began, format!("write {offset} {len}"), |content| {
                put(content, offset as usize, &data);
            }),
            Some(Err(error)) => tolerate(&error),
            None => {}
        }
    }

    /// As the ioctl: past the write buffer, and answered later.
    fn direct_write(&self) {
        let Some(ino) = self.pick_file() else { return };
        if self.direct.lock().contains(&ino) {
            // Of two at once on the same blocks either may be the last.
            return;
        }
        let fs = self.fs();
        let aligned = self.state.lock().depth > 1 || self.below(2) == 0;
        let (mut offset, mut len) = (self.below(REACH), self.below(60_000) + 1);
        if aligned {
            (offset, len) = (offset / 4096 * 4096, len.div_ceil(4096) * 4096);
        }
        let (data, now) = (self.bytes(len), self.context().now);
        let region = Region::allocate(data.len().next_multiple_of(4096)).expect("there is memory");
        region.write_at(0, &data).expect("it is ours");
        let segments = [Segment { file_offset: offset, buffer_offset: 0, len }];
        let began = self.recorder.position();
        // The edges need more than one attempt, and no other operation may come in between.
        self.state.lock().held.insert(ino);
        fs.hold_file(ino);
        let edges = if aligned { Ok(()) } else { fs.write_edges(ino, &segments, &region, now) };
        let planned = match edges {
            Ok(()) => self.attempt(|| fs.plan_direct_write(ino, &segments, &region, now)),
            Err(error) => Some(Err(error)),
        };
        self.state.lock().held.remove(&ino);
        match planned {
            Some(Ok(write)) => {
                self.state.lock().history.changed(ino, began, format!("direct {offset} {len}"), |content| {
                    put(content, offset as usize, &data);
                });
                let direct = self.direct.clone();
                direct.lock().push(ino);
                let open = fs.clone();
                fs.submit_direct_write(write, move |written| {
                    written.expect("nothing fails");
                    open.let_go_of_file(ino);
                    let mut direct = direct.lock();
                    let at = direct.iter().position(|i| *i == ino).expect("added when it began");
                    direct.swap_remove(at);
                });
            }
            other => {
                fs.let_go_of_file(ino);
                if let Some(Err(error)) = other {
                    tolerate(&error);
                    self.state.lock().history.forget(ino);
                }
            }
        }
    }

    fn set_attributes(&self) {
        let Some(ino) = self.pick(|view| view.nodes.keys().copied().collect()) else { return };
        let (fs, context) = (self.fs(), self.context());
        let is_file = self.state.lock().history.files.contains_key(&ino);
        let mut set = SetAttributes::default();
        match self.below(3) {
            0 => set.mode = Some(self.below(0o1000) as u32),
            1 => (set.uid, set.gid) = (Some(self.below(9) as u32), Some(self.below(9) as u32)),
            _ => set.mtime = Some(Timestamp { seconds: self.below(1 << 40) as i64 - (1 << 39), nanoseconds: 5 }),
        }
        if self.change(|| fs.set_attributes(&context, ino, &set)).is_some() && is_file && set.mtime.is_some() {
            // A write past the buffer that lands later sets its own.
            let lasts = !self.direct.lock().contains(&ino);
            self.state.lock().history.time(ino, set.mtime.filter(|_| lasts));
        }
    }

    fn set_acl(&self) {
        let Some(ino) = self.pick(|view| view.nodes.keys().copied().collect()) else { return };
        let (fs, context) = (self.fs(), self.context());
        // The form of linux/posix_acl_xattr.h: a user more than the mode can name.
        let mut acl = 2u32.to_le_bytes().to_vec();
        for (tag, permissions, id) in
            [(1u16, 7u16, u32::MAX), (2, self.below(8) as u16, 7), (4, 5, u32::MAX), (0x10, 7, u32::MAX), (0x20, 0, u32::MAX)]
        {
            acl.extend(tag.to_le_bytes());
            acl.extend(permissions.to_le_bytes());
            acl.extend(id.to_le_bytes());
        }
        let is_dir = self.state.lock().history.now().names.contains_key(&ino);
        let default = is_dir && self.below(2) == 0;
        let name: &[u8] = if default { b"system.posix_acl_default" } else { b"system.posix_acl_access" };
        self.change(|| fs.set_xattr(&context, ino, name, &acl, false, false));
    }

    fn open_or_close(&self) {
        let fs = self.fs();
        let count = self.state.lock().open.len() as u64;
        if count < 3 || self.below(2) == 0 {
            if let Some(ino) = self.pick(View::files) {
                fs.hold_file(ino);
                self.state.lock().open.push(ino);
            }
            return;
        }
        let at = self.below(count) as usize;
        let ino = self.state.lock().open[at];
        if self.state.lock().held.contains(&ino) {
            return;
        }
        self.state.lock().open.remove(at);
        fs.let_go_of_file(ino);
        let mut state = self.state.lock();
        let named = state.history.now().nodes.contains_key(&ino);
        if !named && !state.open.contains(&ino) {
            state.orphans.push(ino);
        }
    }

    /// Notes an inode that lost its last name.
    fn orphaned(&self, ino: Option<u64>) {
        let mut state = self.state.lock();
        if let Some(ino) = ino.filter(|ino| !state.open.contains(ino) && !state.held.contains(ino)) {
            state.orphans.push(ino);
        }
    }

    /// An operation of several steps on a file, during which no other changes its content.
    fn on_file(&self, operation: impl FnOnce(u64) -> Result<(String, Change), FsError>) {
        let Some(ino) = self.pick_file() else { return };
        let began = self.recorder.position();
        {
            let mut state = self.state.lock();
            state.held.insert(ino);
            // It may change the time long before it is done.
            state.history.time(ino, None);
        }
        match operation(ino) {
            Ok((what, change)) => self.state.lock().history.changed(ino, began, what, change),
            Err(error) => {
                tolerate(&error);
                self.state.lock().history.forget(ino);
            }
        }
        self.state.lock().held.remove(&ino);
        let mut state = self.state.lock();
        let gone = !state.history.now().nodes.contains_key(&ino) && !state.open.contains(&ino) && !state.orphans.contains(&ino);
        if gone {
            // It lost its name meanwhile, and the operation was its last user.
            state.orphans.push(ino);
        }
    }

    fn read(&self) {
        let Some(ino) = self.pick_file() else { return };
        if self.direct.lock().contains(&ino) {
            // It would see a part of what is being written, rightly.
            return;
        }
        let first = self.state.lock().history.files[&ino].len() - 1;
        let found = self.fs().read(ino, 0, 2 * REACH as usize).expect("it can be read");
        let state = self.state.lock();
        let possible: Vec<&[u8]> = state.history.files[&ino][first..].iter().map(|v| &v.content[..]).collect();
        judge_content(&found, &possible).unwrap_or_else(|wrong| panic!("inode {ino}: {wrong}: {}", state.history.story(ino)));
    }
}

fn put(content: &mut Vec<u8>, at: usize, data: &[u8]) {
    content.resize(content.len().max(at + data.len()), 0);
    content[at..at + data.len()].copy_from_slice(data);
}
