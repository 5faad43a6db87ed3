//! Callers: operations chosen and aimed at random, and what each of them may leave and answer.

use std::ops::Range;
use std::sync::Arc;

use gpunvme_abi::Segment;
use gpunvme_blockdev::{Region, Request};
use gpunvme_engine::data::{Asker, Settling, resize::Allocate};
use gpunvme_engine::error::{Attempt, Fail, FsError};
use gpunvme_engine::volume::{NewNode, RenameMode};
use gpunvme_gpupath::planner::{Bounds, Position};
use parking_lot::Mutex;

use super::expected::{Id, Size, fill};
use super::world::World;
use crate::common::ROOT;

const BLOCK: u64 = 4096;
/// Bytes that the kernel sends at once: the write buffer has room for more.
const WRITE_MAX: u64 = 128 << 10;
/// Files that a caller has open at once.
const OPEN_MAX: usize = 3;

/// Kinds of operations, each a bit of [`super::Case::kinds`].
pub const KINDS: [(&str, u64); 16] = [
    ("read", 10),
    ("direct read", 8),
    ("write", 16),
    ("direct write", 14),
    ("direct writes at once", 5),
    ("truncate", 5),
    ("punch", 4),
    ("zero", 3),
    ("preallocate", 4),
    ("fsync", 8),
    ("commit", 2),
    ("checkpoint", 2),
    ("write back", 3),
    ("rename", 5),
    ("link", 3),
    ("open", 6),
];

/// A file that a caller has open.
#[derive(Clone, Copy)]
struct Opened {
    ino: u64,
    /// Which process it stands for: one of its own.
    process: u64,
    /// Writes before this turn need not be there after an fsync through this descriptor: an error
    /// of theirs was told, to it or to another one.
    since: u64,
    /// Number of the device's failures when it, or before it was opened any descriptor of the file,
    /// was last told of one.
    seen: u64,
}

/// Result of a direct write, once it is over.
type Answer = Arc<Mutex<Option<Result<(), FsError>>>>;

/// A caller.
pub struct Caller<'w> {
    world: &'w Arc<World>,
    open: Vec<Opened>,
}

impl<'w> Caller<'w> {
    /// Does its operations, and closes what it has open.
    pub fn run(world: &'w Arc<World>) {
        let mut caller = Caller { world, open: Vec::new() };
        while caller.takes_a_turn() {
            caller.step();
            world.pause();
        }
        while !caller.open.is_empty() {
            caller.close();
        }
    }

    fn takes_a_turn(&self) -> bool {
        let mut state = self.world.state.lock();
        let left = state.left > 0;
        state.left = state.left.saturating_sub(1);
        left
    }

    fn step(&mut self) {
        let kinds = KINDS.iter().enumerate().filter(|(number, _)| self.world.case.kinds & (1 << number) != 0);
        let all: u64 = kinds.clone().map(|(_, (_, weight))| weight).sum();
        let mut drawn = if all > 0 { self.below(all) } else { 0 };
        let chosen = kinds.map(|(_, kind)| kind).find(|(_, weight)| {
            let is_it = drawn < *weight;
            drawn = drawn.saturating_sub(*weight);
            is_it
        });
        if self.open.is_empty() {
            return self.open();
        }
        let at = self.below(self.open.len() as u64) as usize;
        match chosen.map_or("open", |(name, _)| name) {
            "read" => self.read(at),
            "direct read" => self.direct_read(at),
            "write" => self.write(at),
            "direct write" => self.direct_write(at),
            "direct writes at once" => self.direct_writes(at),
            "truncate" => self.truncate(at),
            "punch" => self.allocate(at, Allocate::Punch),
            "zero" => self.allocate(at, Allocate::Zero { grow: self.below(2) == 0 }),
            "preallocate" => self.allocate(at, Allocate::Reserve { grow: self.below(2) == 0 }),
            "fsync" => self.sync(at),
            "commit" => self.commit(),
            "checkpoint" => {
                self.world.doing("checkpoint", || self.world.fs().volume().checkpoint()).expect("metadata can be written")
            }
            "write back" => {
                self.world.doing("write back", || self.world.fs().write_back()).expect("no error of data is an error of this")
            }
            "rename" => self.rename(),
            "link" => self.link(at),
            _ if self.open.len() == OPEN_MAX || self.below(3) == 0 => self.close(),
            _ => self.open(),
        }
    }

    fn below(&self, limit: u64) -> u64 {
        self.world.below(limit)
    }

    fn name(&self) -> Vec<u8> {
        format!("file {}", self.below(self.world.case.names)).into_bytes()
    }

    /// A range of a file: anywhere, or where others are busy; of some length.
    fn range(&self, aligned: bool) -> Range<u64> {
        let reach = self.world.case.reach;
        let (mut start, mut len) = match self.below(8) {
            0 => (0, 1 + self.below(reach)),
            1 => (self.below(reach), 1 + self.below(reach / 2)),
            2..5 => (self.below(reach), 1 + self.below(3 * BLOCK)),
            _ => (self.below(1 + reach / 8), 1 + self.below(2 * BLOCK)),
        };
        if aligned {
            (start, len) = (start / BLOCK * BLOCK, len.next_multiple_of(BLOCK));
        }
        start..start + len
    }

    /// Opens a file, and makes it if it is not there.
    fn open(&mut self) {
        let (world, name) = (self.world, self.name());
        let known = world.state.lock().names.get(&name).copied();
        let ino = match known {
            Some(ino) => ino,
            None => {
                let (fs, context) = (world.fs(), world.context());
                let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
                let created = world.doing(format!("create {name:?}"), || {
                    fs.wait(|| {
                        let result = fs.create(&context, ROOT, &name, &new);
                        match &result {
                            Ok(made) => {
                                world.state.lock().expected.created(made.ino);
                                world.renamed(|names| assert!(names.insert(name.clone(), made.ino).is_none(), "created twice"));
                            }
                            Err(Fail::Error(FsError::Exists)) => assert!(world.state.lock().names.contains_key(&name)),
                            _ => {}
                        }
                        result
                    })
                });
                match created {
                    Ok(made) => made.ino,
                    Err(FsError::Exists) => return,
                    Err(error) => panic!("create: {error}"),
                }
            }
        };
        // Not if it has lost its name, and went, meanwhile.
        let is_there = world.state.lock().names.values().any(|other| *other == ino);
        if is_there {
            world.fs().hold_file(ino);
            let (process, since) = (world.now(), world.now());
            let mut state = world.state.lock();
            *state.opens.entry(ino).or_default() += 1;
            let seen = state.told.get(&ino).copied().unwrap_or(0);
            self.open.push(Opened { ino, process, since, seen });
        }
    }

    fn close(&mut self) {
        let at = self.below(self.open.len() as u64) as usize;
        let Opened { ino, .. } = self.open.remove(at);
        self.world.fs().let_go_of_file(ino);
        {
            let mut state = self.world.state.lock();
            let opens = state.opens.get_mut(&ino).expect("it is open");
            *opens -= 1;
            if *opens == 0 {
                self.world.fs().closed_by_all(ino);
            }
        }
        self.reap(ino);
    }

    /// Removes a file that has no name and is not open.
    fn reap(&self, ino: u64) {
        let state = self.world.state.lock();
        let is_had = state.opens.get(&ino).is_some_and(|opens| *opens > 0) || state.names.values().any(|named| *named == ino);
        drop(state);
        if !is_had {
            let fs = self.world.fs();
            self.world.doing(format!("removal of {ino}"), || while fs.wait(|| fs.reap_step(ino)).expect("nothing fails") {});
        }
    }

    /// Whether the device has failed something since this descriptor was told of the last.
    fn explains(&self, at: usize, error: &FsError) -> bool {
        matches!(error, FsError::Device(_)) && self.world.device.failures() > self.open[at].seen
    }

    /// An error of the device was told.
    fn told(&mut self, at: usize, what: &str, error: &FsError) {
        assert!(self.explains(at, error), "{what}: {error}, and the device has failed nothing since it was told of the last");
        let (now, failures) = (self.world.now(), self.world.device.failures());
        let open = &mut self.open[at];
        (open.since, open.seen) = (now, failures);
        self.world.state.lock().told.insert(open.ino, failures);
    }

    /// Changes a file under the lock that the kernel has for that. Returns whether it did, and did
    /// not lose what had to be written back first.
    fn change(
        &self,
        ino: u64,
        (ranges, zero, size): (Vec<Range<u64>>, bool, Option<Size>),
        what: &str,
        work: impl FnOnce(Id) -> Result<(), FsError>,
    ) -> bool {
        let world = self.world;
        world.wait_until(|| world.state.lock().locked.insert(ino));
        let id = self.begin(ino, ranges, zero, size, what);
        let before = world.device.failures();
        let done = world.doing(what, || work(id));
        self.end(id, done.is_ok(), false);
        world.state.lock().locked.remove(&ino);
        self.may_fail(before, what, done).is_some()
    }

    /// The result of an operation; none if it failed because the device failed meanwhile.
    fn may_fail<T>(&self, before: u64, what: &str, result: Result<T, FsError>) -> Option<T> {
        match result {
            Ok(done) => Some(done),
            Err(FsError::Device(_)) if self.world.device.failures() > before => None,
            Err(error) => panic!("{what}: {error}"),
        }
    }

    fn begin(&self, ino: u64, ranges: Vec<Range<u64>>, zero: bool, size: Option<Size>, what: &str) -> Id {
        let now = self.world.now();
        self.world.state.lock().expected.begin(now, ino, ranges, zero, size, what.into())
    }

    fn end(&self, id: Id, ok: bool, sure: bool) {
        let now = self.world.now();
        self.world.state.lock().expected.end(now, id, ok, sure);
    }

    fn read(&mut self, at: usize) {
        let (world, ino, range) = (self.world, self.open[at].ino, self.range(false));
        if self.below(4) == 0 {
            let began = world.now();
            let fs = world.fs();
            let size = world.doing(format!("stat {ino}"), || fs.wait(|| fs.attributes(ino))).expect("it is there").inode.size;
            return world.state.lock().expected.judge_size(ino, began, size).unwrap_or_else(|wrong| panic!("stat: {wrong}"));
        }
        let now = world.now();
        let read = world.state.lock().expected.begin_read(now, ino, range.clone());
        let len = (range.end - range.start) as usize;
        let found =
            world.doing(format!("read {ino} {range:?}"), || world.fs().read(ino, range.start, len)).expect("it can be read");
        world.state.lock().expected.end_read(read, &found).unwrap_or_else(|wrong| panic!("read: {wrong}"));
    }

    fn direct_read(&mut self, at: usize) {
        let (world, fs, ino, range) = (self.world, self.world.fs(), self.open[at].ino, self.range(self.below(2) == 0));
        let len = range.end - range.start;
        let region = Region::allocate(len.next_multiple_of(BLOCK) as usize).expect("there is memory");
        let segments = [Segment { file_offset: range.start, buffer_offset: 0, len }];
        let now = world.now();
        let read = world.state.lock().expected.begin_read(now, ino, range.clone());
        let before = world.device.failures();
        let what = format!("direct read {ino} {range:?}");
        let bytes = world.doing(what.clone(), || {
            let planned = fs.wait(|| fs.plan_direct_read(ino, &segments, (Position::default(), Bounds::NONE), &region))?;
            let mut plan = planned.plan;
            let bytes = plan.bytes();
            for zeroes in &plan.zeroes {
                region.zero_at(zeroes.buffer_offset as usize, zeroes.len as usize).expect("it is ours");
            }
            let block = planned.alignment.block;
            let mut requests = std::mem::take(&mut plan.requests).into_vec();
            let mut edges = Vec::new();
            for edge in &plan.edges {
                let place = edge.device_offset.expect("a plan to read has a place");
                let from = place - place % block;
                let len = ((place + edge.len).next_multiple_of(block) - from) as usize;
                let blocks = Region::allocate(len).expect("there is memory");
                requests.push(Request::read(from, vec![blocks.span(0..len)]));
                edges.push((blocks, (place - from) as usize, *edge));
            }
            fs.volume().io().run(requests).expect("no read fails");
            for (blocks, skip, edge) in edges {
                let mut bytes = vec![0; edge.len as usize];
                blocks.read_at(skip, &mut bytes).expect("it is ours");
                region.write_at(edge.buffer_offset as usize, &bytes).expect("it is ours");
            }
            drop(planned.guard);
            Ok(bytes)
        });
        let Some(bytes) = self.may_fail(before, &what, bytes) else { return world.state.lock().expected.forget_read(read) };
        let mut found = vec![0; bytes as usize];
        region.read_at(0, &mut found).expect("it is ours");
        world.state.lock().expected.end_read(read, &found).unwrap_or_else(|wrong| panic!("direct read: {wrong}"));
    }

    fn write(&mut self, at: usize) {
        let (world, fs, ino) = (self.world, self.world.fs(), self.open[at].ino);
        let mut range = self.range(self.below(4) == 0);
        range.end = range.end.min(range.start + WRITE_MAX);
        let what = format!("write {ino} {range:?}");
        self.change(ino, (vec![range.clone()], false, Some(Size::Grows(range.end))), &what, |id| {
            let mut bytes = vec![0; (range.end - range.start) as usize];
            fill(id, range.start, &mut bytes);
            fs.wait(|| fs.write(ino, range.start, &bytes, world.context().now))
        });
        fs.write_behind(ino);
    }

    /// Ranges of a direct write that do not overlap.
    fn segments(&self) -> Vec<Range<u64>> {
        let aligned = self.below(3) > 0;
        let mut all: Vec<Range<u64>> = Vec::new();
        for _ in 0..1 + self.below(3) * self.below(2) {
            let range = self.range(aligned);
            if all.iter().all(|other| other.end <= range.start || range.end <= other.start) {
                all.push(range);
            }
        }
        all
    }

    /// Begins a direct write. What came of it is in what is returned, in the end.
    fn begin_direct(&mut self, ino: u64, ranges: &[Range<u64>], what: &str) -> Answer {
        let (world, fs) = (self.world, self.world.fs());
        let end = ranges.iter().map(|range| range.end).max().expect("there is one");
        let id = self.begin(ino, ranges.to_vec(), false, Some(Size::Grows(end)), what);
        let (mut segments, mut len) = (Vec::new(), 0);
        for range in ranges {
            // In step with the file, so that what is aligned there is aligned in memory.
            let segment =
                Segment { file_offset: range.start, buffer_offset: len + range.start % BLOCK, len: range.end - range.start };
            segments.push(segment);
            len = (segment.buffer_offset + segment.len).next_multiple_of(BLOCK);
        }
        let region = Region::allocate(len as usize).expect("there is memory");
        for segment in &segments {
            let mut bytes = vec![0; segment.len as usize];
            fill(id, segment.file_offset, &mut bytes);
            region.write_at(segment.buffer_offset as usize, &bytes).expect("it is ours");
        }
        let answer = Arc::new(Mutex::new(None));
        let planned = fs
            .write_edges(ino, &segments, &region, world.context().now)
            .and_then(|()| fs.wait(|| fs.plan_direct_write(ino, &segments, &region, world.context().now)));
        match planned {
            Ok(write) => {
                let sure = write.plan.edges.is_empty();
                let (answer, world) = (answer.clone(), world.clone());
                fs.submit_direct_write(write, move |written| {
                    let now = world.now();
                    world.state.lock().expected.end(now, id, written.is_ok(), sure);
                    *answer.lock() = Some(written.map(drop).map_err(FsError::from));
                });
            }
            Err(error) => {
                self.end(id, false, false);
                *answer.lock() = Some(Err(error));
            }
        }
        answer
    }

    fn direct_write(&mut self, at: usize) {
        let (world, ino, ranges) = (self.world, self.open[at].ino, self.segments());
        let what = format!("direct write {ino} {ranges:?}");
        let before = world.device.failures();
        let result = world.doing(what.clone(), || {
            let answer = self.begin_direct(ino, &ranges, &what);
            world.wait_until(|| answer.lock().is_some());
            answer.lock().take().expect("waited for")
        });
        self.may_fail(before, &what, result);
    }

    /// A long direct write and short ones inside its range, all in flight together, as of libaio.
    fn direct_writes(&mut self, at: usize) {
        let (world, ino) = (self.world, self.open[at].ino);
        let first = self.below(world.case.reach / BLOCK);
        let count = 20 + self.below(world.case.reach / BLOCK + 20).min(100);
        let what = format!("direct writes {ino} at once, of {count} blocks from {first} on");
        let before = world.device.failures();
        let results = world.doing(what.clone(), || {
            let long = first * BLOCK..(first + count) * BLOCK;
            let mut begun = Vec::new();
            let mut blocks: Vec<u64> = (first..first + count).collect();
            for _ in 0..self.below(count) {
                let block = blocks.swap_remove(self.below(blocks.len() as u64) as usize);
                begun.push((block * BLOCK..(block + 1) * BLOCK, "short"));
            }
            let place = self.below(1 + begun.len() as u64 / 4) as usize;
            begun.insert(place, (long, "long"));
            let begun: Vec<_> = begun
                .into_iter()
                .map(|(range, kind)| {
                    self.begin_direct(ino, std::slice::from_ref(&range), &format!("{kind} of {what}: {range:?}"))
                })
                .collect();
            world.wait_until(|| begun.iter().all(|answer| answer.lock().is_some()));
            begun.into_iter().map(|answer| answer.lock().take().expect("waited for")).collect::<Vec<_>>()
        });
        results.into_iter().for_each(|result| _ = self.may_fail(before, &what, result));
    }

    fn truncate(&mut self, at: usize) {
        let (world, fs, ino) = (self.world, self.world.fs(), self.open[at].ino);
        let size = [self.range(false).start, self.below(self.world.case.reach), 0][self.below(3) as usize];
        let what = format!("truncate {ino} {size}");
        let change = (vec![size..u64::MAX; 1], true, Some(Size::Set(size)));
        self.change(ino, change, &what, |_| fs.wait(|| fs.set_size(&world.context(), ino, size)).map(drop));
    }

    fn allocate(&mut self, at: usize, how: Allocate) {
        let (world, fs, ino, range) = (self.world, self.world.fs(), self.open[at].ino, self.range(false));
        let what = format!("{how:?} {ino} {range:?}");
        let grows = matches!(how, Allocate::Reserve { grow: true } | Allocate::Zero { grow: true });
        let zeroes = if matches!(how, Allocate::Reserve { .. }) { vec![] } else { vec![range.clone()] };
        let change = (zeroes, true, Some(Size::Grows(range.end)).filter(|_| grows));
        self.change(ino, change, &what, |_| fs.allocate(&world.context(), ino, range.start, range.end - range.start, how));
    }

    fn sync(&mut self, at: usize) {
        let (world, Opened { ino, process, since, .. }) = (self.world, self.open[at]);
        let (began, moment) = (world.now(), world.moment());
        let asker = Asker::Process { id: process, began: since, now: began };
        match world.doing(format!("fsync {ino}"), || world.fs().sync_for(ino, || asker)) {
            Ok(()) => {
                let now = world.now();
                world.state.lock().expected.synced(now, ino, began, since);
                world.names_are_durable(moment);
            }
            Err(error) => self.told(at, "fsync", &error),
        }
    }

    fn commit(&self) {
        let moment = self.world.moment();
        self.world.doing("commit", || self.world.fs().commit()).expect("metadata can be written");
        self.world.names_are_durable(moment);
    }

    /// Renames or unlinks.
    fn rename(&mut self) {
        let (world, fs, from, to) = (self.world, self.world.fs(), self.name(), self.name());
        let context = world.context();
        if self.below(4) == 0 {
            let unlink = || -> Attempt<Option<u64>> {
                let result = fs.unlink(&context, ROOT, &from);
                let is_there = world.state.lock().names.contains_key(&from);
                match &result {
                    Ok(_) => world.renamed(|names| assert!(names.remove(&from).is_some(), "unlinked, and was not there")),
                    Err(Fail::Error(error)) => assert!(matches!(error, FsError::NotFound) && !is_there, "unlink: {error}"),
                    _ => {}
                }
                result
            };
            let gone = world.doing(format!("unlink {from:?}"), || fs.wait(unlink));
            gone.ok().flatten().into_iter().for_each(|ino| self.reap(ino));
            return;
        }
        let mode =
            [RenameMode::Replace, RenameMode::Replace, RenameMode::NoReplace, RenameMode::Exchange][self.below(4) as usize];
        let began = world.now();
        let mut settling = Settling::default();
        let attempt = || -> Attempt<Option<u64>> {
            let result = fs.rename(&context, (ROOT, &from), (ROOT, &to), mode, &mut settling);
            let (source, target) = {
                let state = world.state.lock();
                (state.names.get(&from).copied(), state.names.get(&to).copied())
            };
            match &result {
                Ok(_) => {
                    let source = source.expect("renamed, and was not there");
                    if target != Some(source) {
                        world.renamed(|names| {
                            match target.filter(|_| mode == RenameMode::Exchange) {
                                Some(target) => names.insert(from.clone(), target),
                                None => names.remove(&from),
                            };
                            names.insert(to.clone(), source);
                        });
                        if target.is_some() && mode == RenameMode::Replace {
                            world.replaced(source, began);
                        }
                    }
                }
                Err(Fail::Error(FsError::NotFound)) => {
                    assert!(source.is_none() || (mode == RenameMode::Exchange && target.is_none()));
                }
                Err(Fail::Error(FsError::Exists)) => assert!(mode == RenameMode::NoReplace && target.is_some()),
                Err(Fail::Error(FsError::Device(_))) => assert!(world.device.failures() > 0 && target.is_some()),
                Err(Fail::Error(error)) => panic!("rename: {error}"),
                Err(Fail::Stall(_)) => {}
            }
            result
        };
        let gone = world.doing(format!("rename {from:?} {to:?} {mode:?}"), || fs.wait(attempt));
        gone.ok().flatten().into_iter().for_each(|ino| self.reap(ino));
    }

    fn link(&mut self, at: usize) {
        let (world, fs, ino, name) = (self.world, self.world.fs(), self.open[at].ino, self.name());
        let context = world.context();
        let attempt = || {
            let result = fs.link(&context, ino, ROOT, &name);
            let (has_name, is_taken) = {
                let state = world.state.lock();
                (state.names.values().any(|other| *other == ino), state.names.contains_key(&name))
            };
            match &result {
                Ok(_) => world.renamed(|names| assert!(names.insert(name.clone(), ino).is_none())),
                Err(Fail::Error(FsError::Exists)) => assert!(is_taken),
                Err(Fail::Error(FsError::NotFound)) => assert!(!has_name),
                Err(Fail::Error(error)) => panic!("link: {error}"),
                Err(Fail::Stall(_)) => {}
            }
            result
        };
        let _ = world.doing(format!("link {ino} {name:?}"), || fs.wait(attempt));
    }
}
