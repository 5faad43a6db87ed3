//! Sequences of calls that a seed decides.

use super::call::{Access, Call, Engine, Limit, OpenFlags, SLOTS, Step, Sync, Target, Time, Transfer, Value};
use super::process::{IDENTITIES, LARGEST};
use crate::random::Random;

/// A kind of call: how often it comes beside the others, and how it is made.
type Kind = (u64, fn(&mut Generator) -> Call);

/// All that can come.
const KINDS: &[Kind] = &[
    (5, |g| g.allocate()),
    (2, |g| g.map()),
    (4, |g| Call::SetTimes { target: g.target(), accessed: g.time(), modified: g.time() }),
    (12, |g| g.open()),
    (3, |g| Call::Close { slot: g.slot() }),
    (1, |g| Call::Duplicate { slot: g.slot(), to: g.slot() }),
    (6, |g| Call::Read { slot: g.slot(), at: g.maybe_place(), len: g.len(), flags: 0 }),
    (10, |g| Call::Write { slot: g.slot(), at: g.maybe_place(), len: g.len(), flags: 0, seed: g.seed() }),
    (4, |g| g.write_with_flags()),
    (3, |g| g.seek()),
    (4, |g| Call::Truncate { target: g.target(), len: g.place() }),
    (2, |g| Call::CopyRange { from: g.slot(), to: g.slot(), from_at: g.maybe_place(), to_at: g.maybe_place(), len: g.len() }),
    (1, |g| Call::SendFile { from: g.slot(), to: g.slot(), at: g.maybe_place(), len: g.len() }),
    (2, |g| Call::Sync { slot: g.slot(), how: g.one(&[Sync::Data, Sync::All, Sync::All, Sync::Filesystem]) }),
    (5, |g| g.use_mapping()),
    (1, |_| Call::Unmap),
    (5, |g| Call::Rename { from: g.path(), to: g.path(), flags: g.one(&[0, 0, 0, 0, 1, 1, 2, 2, 3, 8]) }),
    (3, |g| Call::Link { from: g.path(), to: g.path(), follow: g.chance(3) }),
    (2, |g| g.symlink()),
    (1, |g| Call::ReadLink { path: g.path() }),
    (3, |g| Call::Unlink { path: g.path() }),
    (1, |g| Call::Rmdir { path: g.path() }),
    (2, |g| Call::Mkdir { path: g.path(), mode: g.mode() }),
    (1, |g| g.mknod()),
    (2, |g| Call::List { path: g.dir() }),
    (4, |g| Call::Chmod { target: g.target(), mode: g.mode() }),
    (5, |g| Call::Chown { target: g.target(), uid: g.owner(), gid: g.owner() }),
    (3, |g| Call::Stat { target: g.target() }),
    (2, |g| Call::MayAccess { path: g.path(), mode: g.below(8) as u32, effective: g.chance(2) }),
    (6, |g| g.set_attribute()),
    (3, |g| Call::GetAttribute { target: g.target(), name: g.attribute(), room: g.one(&[0, 1, 20, 28, 100, 65_536]) }),
    (3, |g| Call::ListAttributes { target: g.target(), room: g.one(&[0, 5, 300, 65_536]) }),
    (2, |g| Call::RemoveAttribute { target: g.target(), name: g.attribute() }),
    (1, |g| g.limit()),
    (1, |g| Call::Umask { mask: g.one(&[0, 0, 0o022, 0o077, 0o777]) }),
    (2, |g| g.set_flags()),
    (1, |g| Call::GetFlags { slot: g.slot() }),
    (1, |g| Call::Flock { slot: g.slot(), how: g.one(&[libc::LOCK_SH, libc::LOCK_EX, libc::LOCK_UN]) }),
    (3, |g| g.lock()),
    (4, |g| g.batch()),
    (5, |g| Call::DirectWrite { slot: g.slot(), seed: g.seed(), segments: g.segments() }),
    (3, |g| Call::DirectRead { slot: g.slot(), segments: g.segments() }),
];

/// fallocate(2), mmap(2) and utimensat(2) among them.
const ALLOCATE: usize = 0;
const MAP: usize = 1;
const SET_TIMES: usize = 2;

/// A sequence of calls: a few files and folders first, so that the others find something.
pub fn sequence(seed: u64, len: usize) -> Vec<Step> {
    let mut generator = Generator::new(seed);
    let mut steps = generator.beginning();
    for _ in 0..len {
        let call = generator.call();
        let process = generator.process();
        let look = generator.look > 0 && generator.chance(generator.look);
        steps.push(Step { process, call, look });
    }
    steps.retain(is_asked);
    steps
}

/// Whether a step is none of those that named differences leave out.
fn is_asked(step: &Step) -> bool {
    match &step.call {
        // `unchanged-owner`
        Call::Chown { uid: None, gid: None, .. } => false,
        // `some-capabilities`: the process that has them, and root without.
        _ => step.process <= 2,
    }
}

struct Generator {
    random: Random,
    /// Each kind with its weight in this sequence.
    weights: Vec<u64>,
    /// One in how many calls is looked at; none where it is 0.
    look: u64,
    /// Whether space is allocated in this sequence.
    allocates: bool,
    /// Whether processes take turns at random, or one does nearly all.
    crowd: u64,
}

impl Generator {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d);
        // A sequence in which a few kinds are frequent and others missing goes deeper than one of
        // everything.
        let mut weights: Vec<_> = KINDS.iter().map(|(weight, _)| weight * [0, 1, 1, 4][random.below(4) as usize]).collect();
        let allocates = random.below(2) == 0;
        if !allocates {
            weights[ALLOCATE] = 0;
        }
        let mut look = random.below(4);
        // When a write to a mapping moves mtime is a difference (`mapped-times`): times are looked
        // at in other sequences.
        if random.below(3) == 0 {
            (look, weights[SET_TIMES]) = (0, 0);
        } else {
            weights[MAP] = 0;
        }
        let crowd = 2 + random.below(6);
        Self { random, weights, look, allocates, crowd }
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random.below(limit)
    }

    fn chance(&mut self, of: u64) -> bool {
        self.below(of) == 0
    }

    fn one<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize].clone()
    }

    fn call(&mut self) -> Call {
        let sum: u64 = self.weights.iter().sum();
        let mut at = self.below(sum);
        for (number, &weight) in self.weights.iter().enumerate() {
            if at < weight {
                return KINDS[number].1(self);
            }
            at -= weight;
        }
        Call::Unmap
    }

    fn process(&mut self) -> usize {
        if self.below(self.crowd) > 1 { 0 } else { self.below(IDENTITIES.len() as u64) as usize }
    }

    fn beginning(&mut self) -> Vec<Step> {
        let mut calls = vec![(0, Call::Chmod { target: Target::Path("/".to_owned()), mode: 0o777 })];
        for (path, mode) in [("d", 0o777), ("d/e", 0o755), ("t", 0o1777), ("g", 0o2777)] {
            calls.push((0, Call::Mkdir { path: path.to_owned(), mode }));
        }
        calls.push((0, Call::Chown { target: Target::Path("g".to_owned()), uid: None, gid: Some(2000) }));
        for slot in 0..SLOTS {
            let process = self.process();
            let flags = OpenFlags((libc::O_CREAT | libc::O_RDWR | if self.chance(3) { libc::O_DIRECT } else { 0 }) as u32);
            let mode = self.one(&[0o666, 0o777, 0o4777, 0o6777, 0o600]);
            calls.push((process, Call::Open { slot, path: self.path(), flags, mode }));
            if self.chance(2) {
                calls.push((process, Call::Write { slot, at: None, len: self.len(), flags: 0, seed: slot }));
            }
        }
        calls.into_iter().map(|(process, call)| Step { process, call, look: false }).collect()
    }

    fn slot(&mut self) -> u8 {
        self.below(SLOTS.into()) as u8
    }

    fn seed(&mut self) -> u8 {
        self.below(250) as u8
    }

    fn path(&mut self) -> String {
        match self.below(60) {
            0 => self.one(&["", ".", "..", "/", "d/..", "d/.", "a/", "d/e/", "a/b", "no/a", "d/e/../a", "t/../../a"]).to_owned(),
            1 => "n".repeat(self.one(&[254, 255, 256])),
            2 => format!("d/{}", self.one(&["\u{e9}\u{ff}", "with space", "\u{1}", "-", "..."])),
            3 => self.one(&["d/a/", "d/nothing/", "l/a", "l"]).to_owned(),
            4..=7 => self.dir().trim_end_matches('/').to_owned(),
            _ => {
                let folder = self.one(&["", "", "d/", "d/e/", "t/", "g/"]);
                format!("{folder}{}", self.one(&["a", "b", "c", "l"]))
            }
        }
    }

    fn dir(&mut self) -> String {
        self.one(&["/", "d", "d/e", "t", "g", "d/c", "g/c"]).to_owned()
    }

    fn target(&mut self) -> Target {
        match self.below(5) {
            0 | 1 => Target::Slot(self.slot()),
            2 => Target::Link(self.path()),
            _ => Target::Path(self.path()),
        }
    }

    fn place(&mut self) -> u64 {
        let limit = self.one(&[4096, 20_000, 1 << 17, 1 << 20, 1 << 20, 1 << 24]);
        match self.below(60) {
            0 => self.one(&[1 << 31, (1 << 32) - 1, 1 << 40, 1 << 43, 1 << 63, u64::MAX]),
            _ => self.random.place(limit),
        }
    }

    fn maybe_place(&mut self) -> Option<u64> {
        if self.chance(3) { None } else { Some(self.place()) }
    }

    fn len(&mut self) -> usize {
        match self.below(8) {
            0 => self.one(&[0, 1, 2, 7, 511, 512, 513]),
            1 | 2 => self.one(&[4095, 4096, 4097, 8192, 12_288, 65_536]),
            3 => self.one(&[131_072, 262_144, 1 << 20]),
            4 => self.below(300_000) as usize,
            _ => self.below(20_000) as usize,
        }
    }

    fn mode(&mut self) -> u32 {
        let special = self.one(&[0, 0, 0, 0o4000, 0o2000, 0o6000, 0o1000]);
        special | self.one(&[0o777, 0o666, 0o755, 0o644, 0o640, 0o600, 0o711, 0o000, 0o070])
    }

    fn owner(&mut self) -> Option<u32> {
        self.one(&[None, None, Some(0), Some(1000), Some(1001), Some(1002), Some(2000)])
    }

    fn time(&mut self) -> Time {
        match self.below(10) {
            0 | 1 => Time::Omit,
            2 | 3 => Time::Now,
            4 | 5 => Time::FromStart(864_000),
            6 => Time::FromStart(-864_000),
            7 => Time::At(
                self.one(&[
                    0,
                    1,
                    -1,
                    1 << 31,
                    (1 << 32) - 1,
                    1 << 32,
                    1 << 33,
                    -(1 << 31),
                    (1 << 34) - (1 << 31) - 1,
                    1 << 35,
                    -(1 << 40),
                ]),
                self.one(&[0, 1, 999_999_999]),
            ),
            8 => Time::At(self.below(1 << 31) as i64, self.below(1_000_000_000) as i64),
            _ => Time::At(1_000_000_000, self.one(&[1_000_000_000, -1])),
        }
    }

    fn open(&mut self) -> Call {
        let mut flags = self.one(&[libc::O_RDWR, libc::O_RDWR, libc::O_RDWR, libc::O_RDONLY, libc::O_WRONLY, 3]);
        for (flag, of) in [
            (libc::O_CREAT, 2),
            (libc::O_EXCL, 8),
            (libc::O_TRUNC, 5),
            (libc::O_APPEND, 5),
            (libc::O_DIRECT, 4),
            (libc::O_SYNC, 12),
            (libc::O_DSYNC, 12),
            (libc::O_NOFOLLOW, 12),
            (libc::O_DIRECTORY, 20),
            (libc::O_NOATIME, 20),
            (libc::O_PATH, 25),
        ] {
            if self.chance(of) {
                flags |= flag;
            }
        }
        Call::Open { slot: self.slot(), path: self.path(), flags: OpenFlags(flags as u32), mode: self.mode() }
    }

    fn write_with_flags(&mut self) -> Call {
        let flags = self.one(&[libc::RWF_DSYNC, libc::RWF_SYNC, libc::RWF_APPEND, libc::RWF_APPEND, 0x4000_0000]);
        Call::Write { slot: self.slot(), at: self.maybe_place(), len: self.len(), flags: flags as u32, seed: self.seed() }
    }

    fn seek(&mut self) -> Call {
        // What was allocated but not written is data for ext4 while it is in memory
        // (`unwritten-data`).
        let choices = if self.allocates { 3 } else { 5 };
        let whence = self.one(&[libc::SEEK_SET, libc::SEEK_CUR, libc::SEEK_END, libc::SEEK_DATA, libc::SEEK_HOLE][..choices]);
        let offset = self.place() as i64;
        let offset = if whence != libc::SEEK_SET && self.chance(3) { offset.wrapping_neg() } else { offset };
        Call::Seek { slot: self.slot(), whence, offset }
    }

    fn allocate(&mut self) -> Call {
        let mode = self.one(&[0, 0, 1, 1, 3, 3, 16, 16, 17, 2, 18, 19]);
        let len = self.len() as u64 + self.one(&[0, 0, 0, 4096, 1 << 20]);
        Call::Allocate { slot: self.slot(), mode, offset: self.place(), len }
    }

    fn map(&mut self) -> Call {
        let offset = self.below(64) * 4096;
        let len = (1 + self.below(40) as usize) * 4096;
        Call::Map { slot: self.slot(), shared: !self.chance(4), writable: !self.chance(4), offset, len }
    }

    fn use_mapping(&mut self) -> Call {
        let access = self.one(&[Access::Write, Access::Write, Access::Read, Access::Sync, Access::Forget]);
        Call::Use { access, offset: self.below(1 << 17) as usize, len: self.below(20_000) as usize, seed: self.seed() }
    }

    fn symlink(&mut self) -> Call {
        let target = match self.below(8) {
            0 => "x".repeat(self.one(&[59, 60, 61, 200, 4095])),
            1 => self.one(&["", "l", ".", "..", "/", "/d", "d/e/l"]).to_owned(),
            _ => self.path(),
        };
        let mut path = self.path();
        if self.chance(2) {
            path = path.rsplit_once('/').map_or("l".to_owned(), |(dir, _)| format!("{dir}/l"));
        }
        Call::Symlink { target, path }
    }

    fn mknod(&mut self) -> Call {
        let kind = self.one(&[libc::S_IFIFO, libc::S_IFSOCK, libc::S_IFCHR, libc::S_IFBLK, libc::S_IFREG, libc::S_IFDIR]);
        Call::Mknod { path: self.path(), mode: kind | self.mode(), device: self.one(&[0, 0x103, 0x700, 0x0012_3456]) }
    }

    fn attribute(&mut self) -> String {
        match self.below(12) {
            0..=3 => self.one(&["user.a", "user.b", "user.colour"]).to_owned(),
            4 => self.one(&["trusted.a", "trusted.overlay.opaque"]).to_owned(),
            5 => self.one(&["security.a", "security.capability", "security.selinux"]).to_owned(),
            6 | 7 => self.one(&["system.posix_acl_access", "system.posix_acl_default"]).to_owned(),
            8 => "security.capability".to_owned(),
            9 => self
                .one(&["system.foo", "bogus.x", "btrfs.y", "plain", "user.", "trusted.", "security.", "system.", ""])
                .to_owned(),
            10 => format!("user.{}", "n".repeat(self.one(&[249, 250, 251, 252]))),
            _ => self.one(&["User.a", "user", ".a", "user.a/b", "user.\u{e9}", "system.posix_acl_accessx", "trusted"]).to_owned(),
        }
    }

    fn set_attribute(&mut self) -> Call {
        let name = self.attribute();
        let value = match name.as_str() {
            "security.capability" if !self.chance(8) => Value::Capability(self.one(&[7, 13, 21, 36])),
            name if name.starts_with("system.posix_acl") && !self.chance(8) => Value::Acl(self.acl()),
            _ => Value::Pattern(self.seed(), self.one(&[0, 1, 10, 100, 100, 1000, 3000])),
        };
        Call::SetAttribute { target: self.target(), name, value, flags: self.one(&[0, 0, 0, 0, 1, 2, 3, 4]) }
    }

    fn acl(&mut self) -> Vec<(u16, u16, u32)> {
        const NONE: u32 = u32::MAX;
        let mut permissions = || self.below(8) as u16;
        let all = [(1, permissions(), NONE), (4, permissions(), NONE), (32, permissions(), NONE)];
        let named = [(2, permissions(), 1000), (8, permissions(), 2000), (16, permissions(), NONE)];
        match self.below(8) {
            0 => Vec::new(),
            // In the wrong order, without a mask, and what is no tag.
            1 => vec![all[2], all[0], all[1]],
            2 => vec![all[0], named[0], all[1], all[2]],
            3 => vec![all[0], (3, 7, NONE), all[2]],
            4 | 5 => all.to_vec(),
            _ => vec![all[0], named[0], all[1], named[1], named[2], all[2]],
        }
    }

    fn limit(&mut self) -> Call {
        if self.chance(4) {
            Call::Limit { which: Limit::Descriptors, value: self.one(&[None, None, Some(6), Some(9), Some(11)]) }
        } else {
            Call::Limit {
                which: Limit::FileSize,
                value: self.one(&[None, None, Some(0), Some(4096), Some(10_000), Some(65_536)]),
            }
        }
    }

    fn set_flags(&mut self) -> Call {
        let flags =
            self.one(&[0, 0, libc::O_APPEND, libc::O_DIRECT, libc::O_DIRECT, libc::O_APPEND | libc::O_DIRECT, libc::O_NOATIME]);
        Call::SetFlags { slot: self.slot(), flags: OpenFlags(flags as u32) }
    }

    fn lock(&mut self) -> Call {
        let kind = self.one(&[libc::F_RDLCK, libc::F_WRLCK, libc::F_UNLCK]) as i16;
        let (start, len) = (self.one(&[0, 0, 10, 100, -1, i64::MAX]), self.one(&[0, 1, 10, 100, -5, i64::MAX]));
        Call::Lock { slot: self.slot(), open_file: self.chance(2), test: self.chance(3), kind, start, len }
    }

    /// Several transfers in flight at once. Writes may overlap: they write the same there. Reads
    /// never overlap with writes.
    fn batch(&mut self) -> Call {
        let (start, room) = (self.below(64) * 4096, self.one(&[65_536, 262_144, 1 << 20]));
        let mut transfers = Vec::new();
        if self.chance(2) {
            transfers.push(Transfer { write: true, at: start, len: room as usize });
        }
        let (small, unit) = (1 + self.below(64), self.one(&[512, 4096, 4096, 4096]));
        for _ in 0..small {
            let at = start + self.below(room / unit) * unit;
            let len = ((1 + self.below(4)) * unit) as usize;
            transfers.push(Transfer { write: true, at, len });
        }
        for _ in 0..self.below(3) {
            let at = start + 2 * room + self.below(64) * unit;
            transfers.push(Transfer { write: false, at, len: unit as usize });
        }
        let engine = self.one(&[Engine::Aio, Engine::Uring]);
        Call::Batch { slot: self.slot(), engine, seed: self.seed(), fresh: self.chance(2), transfers }
    }

    fn segments(&mut self) -> Vec<(u64, u64)> {
        let count = 1 + self.below(3);
        let mut room = LARGEST as u64;
        let mut segments = Vec::new();
        for _ in 0..count {
            let len = (self.len() as u64).min(room);
            room -= len;
            segments.push((self.place().min(1 << 40), len));
        }
        segments
    }
}
