//! Ioctls: numbers, sizes and addresses at random, and commands that are nearly right.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use gpunvme_abi::ring::{Attach, Detach};
use gpunvme_abi::{self as abi, Command, Metrics, Register, Resolve, Segment, TopList, Transfer, Unregister};
use gpunvme_tests::attack::Attacker;
use gpunvme_tests::direct::{Buffer, call_plain, memfd};
use gpunvme_tests::random::Random;
use gpunvme_tests::sys::{self, Arena};
use rustix::fs::{FallocateFlags, OFlags};
use zerocopy::IntoBytes;

use super::{MIB, any, carry_on, descriptors, noise, number, one};

/// Buffers that are kept at a time.
const BUFFERS: usize = 24;

pub fn fuzz_ioctls(attacker: &mut Attacker) {
    let theirs = attacker.hear().parse().unwrap();
    let mut ioctls = Ioctls::new(attacker, theirs);
    // What waits in the kernel is interrupted, and the daemon told of it.
    sys::interrupt_every(700).unwrap();
    carry_on(attacker, |random| ioctls.step(random));
}

struct Ioctls {
    root: PathBuf,
    /// One that can be written, and truncated when it has become large.
    own: File,
    files: Vec<File>,
    arena: Arena,
    buffers: Vec<Buffer>,
    /// A victim's buffer.
    theirs: u64,
    steps: u64,
}

impl Ioctls {
    fn new(attacker: &Attacker, theirs: u64) -> Ioctls {
        let path = attacker.path(format!("own-{}", std::process::id()));
        let own = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        let with = |flags: OFlags| OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(&path).unwrap();
        let files = vec![
            own.try_clone().unwrap(),
            File::open(attacker.path(crate::victim::FILE)).unwrap(),
            OpenOptions::new().append(true).open(&path).unwrap(),
            with(OFlags::DIRECT),
            with(OFlags::PATH),
            with(OFlags::SYNC),
            attacker.root(),
            File::open("/dev/null").unwrap(),
        ];
        let buffers = vec![Buffer::of(memfd(MIB), &own, MIB).expect("a user has a share")];
        Ioctls { root: attacker.path(""), own, files, arena: Arena::new(64 << 10).unwrap(), buffers, theirs, steps: 0 }
    }

    fn step(&mut self, random: &mut Random) {
        self.steps += 1;
        if self.buffers.is_empty() {
            self.buffers.extend(Buffer::of(memfd(MIB), &self.own, MIB));
        }
        if self.steps.is_multiple_of(64) {
            self.own.set_len(random.below(2) * MIB).unwrap();
        }
        match random.below(21) {
            0..4 => self.anything(random),
            4 => self.elsewhere(random),
            5..8 => self.register(random),
            8 => {
                let buffer = self.name(random);
                let _ = call_plain(self.file(random), Command::Unregister, &mut Unregister { buffer, ..Unregister::default() });
                self.buffers.retain(|own| own.id != buffer);
            }
            9..16 => self.transfer(random),
            16 => self.resolve(random),
            17 => self.files_of_rings(random),
            18 => self.punch(random),
            19 => self.whole_volume(random),
            _ => {
                let bytes = vec![1; random.below(9000) as usize];
                let _ = rustix::io::pwrite(self.file(random), &bytes, random.below(MIB));
            }
        }
    }

    fn file(&self, random: &mut Random) -> &File {
        // The file that all of it can be done with half of the time.
        if random.below(2) == 0 { &self.own } else { one(random, &self.files) }
    }

    /// The name of a buffer: one of its own, a victim's, their neighbours, or one that never was.
    fn name(&self, random: &mut Random) -> u64 {
        let own = self.buffers.get(random.below(BUFFERS as u64) as usize % self.buffers.len().max(1)).map_or(0, |own| own.id);
        match random.below(10) {
            0 => self.theirs,
            1 => self.theirs.wrapping_add(random.below(4)).wrapping_sub(2),
            2 => number(random),
            3 => own.wrapping_add(random.below(4)).wrapping_sub(2),
            _ => own,
        }
    }

    /// A number, a size and bytes that mean nothing, across the end of memory too.
    fn anything(&mut self, random: &mut Random) {
        let size = match random.below(3) {
            0 => random.below(1 << 14),
            1 => one(random, &Command::ALL).header_size() as u64,
            _ => [0, 1, 88, 112, 16_383][random.below(5) as usize],
        };
        let command = random.below(14) | u64::from(b'G') << 8 | size << 16 | random.below(4) << 30;
        let command = if random.below(8) == 0 { any(random) } else { command } as u32;
        let end = self.arena.len();
        let at = if random.below(2) == 0 { 0 } else { end.saturating_sub(random.below(20_000) as usize) };
        self.arena.put(at, &noise(random, 256));
        self.arena.put(at, &gpunvme_abi::VERSION.to_le_bytes());
        let file = self.file(random).try_clone().unwrap();
        let _ = self.arena.ioctl(file.as_fd(), command, at);
    }

    /// A command whose argument is nowhere.
    fn elsewhere(&mut self, random: &mut Random) {
        let address = match random.below(3) {
            0 => random.below(4096) as usize,
            1 => usize::MAX - random.below(20_000) as usize,
            _ => (1 << 63) | any(random) as usize,
        };
        let command = one(random, &Command::ALL).request(0);
        let _ = sys::ioctl_nowhere(self.file(random).as_fd(), command, address);
    }

    fn register(&mut self, random: &mut Random) {
        let fd: OwnedFd = descriptors::any(random, &self.root, &self.own);
        let len = if random.below(2) == 0 { 4096 << random.below(5) } else { number(random) };
        let fd_number = match random.below(8) {
            0 => number(random) as i32,
            _ => fd.as_raw_fd(),
        };
        let mut register = Register { fd: fd_number, len, flags: random.below(3) as u32, ..Register::default() };
        if call_plain(self.file(random), Command::Register, &mut register).is_ok() {
            self.buffers.push(Buffer { memory: fd.into(), id: register.buffer });
        }
        if self.buffers.len() > BUFFERS {
            let buffer = self.buffers.swap_remove(1);
            // It may be unregistered while a transfer of another thread is in flight.
            let _ = buffer.unregister(&self.own);
        }
    }

    fn transfer(&mut self, random: &mut Random) {
        let command = *one(random, &[Command::Read, Command::Read, Command::Write]);
        let count = [1, 1, 2, 7, 678][random.below(5) as usize];
        let mut room = 4 * MIB;
        let segments: Vec<Segment> = (0..count)
            .map(|_| {
                let wild = random.below(3 * count) == 0;
                let len = if wild { number(random) } else { random.below(MIB.min(room + 1)) };
                room = room.saturating_sub(len);
                let file_offset = if wild { number(random) } else { random.place(4 * MIB) };
                let buffer_offset =
                    if random.below(3 * count) == 0 { number(random) } else { random.place(MIB - len.min(MIB - 1)) };
                Segment { file_offset, buffer_offset, len }
            })
            .collect();
        let file = self.file(random).try_clone().unwrap();
        let (descriptor, grant) = self.claim(random, &file);
        let mut transfer = Transfer {
            buffer: self.name(random),
            descriptor,
            grant,
            segments: if random.below(16) == 0 { number(random) as u32 } else { count as u32 },
            flags: if random.below(4) == 0 { random.below(32) as u32 } else { 0 },
            ..Transfer::default()
        };
        if random.below(32) == 0 {
            transfer.version = number(random) as u32;
        }
        let mut bytes = [transfer.as_bytes(), segments.as_bytes()].concat();
        let _ = sys::ioctl(file.as_fd(), command.request(segments.len()), &mut bytes);
    }

    fn resolve(&mut self, random: &mut Random) {
        let capacity = 1 + random.below(510);
        let resolve = Resolve {
            offset: number(random),
            len: number(random),
            capacity: if random.below(4) == 0 { number(random) as u32 } else { capacity as u32 },
            ..Resolve::default()
        };
        let mut bytes = resolve.as_bytes().to_vec();
        bytes.resize(bytes.len() + capacity as usize * Command::Resolve.entry_size(), 0);
        let file = self.file(random).try_clone().unwrap();
        let _ = sys::ioctl(file.as_fd(), Command::Resolve.request(capacity as usize), &mut bytes);
    }

    /// What is to show how a file is open: true, or not.
    fn claim(&mut self, random: &mut Random, file: &File) -> (i32, u64) {
        let other = self.file(random).as_raw_fd();
        let descriptor = match random.below(8) {
            0 => number(random) as i32,
            1 => other,
            _ => file.as_raw_fd(),
        };
        (descriptor, if random.below(8) == 0 { number(random) } else { 0 })
    }

    /// Rings of others, and none.
    fn files_of_rings(&mut self, random: &mut Random) {
        let (ring, file) = (self.name(random), number(random));
        let of = self.file(random).try_clone().unwrap();
        let (descriptor, grant) = self.claim(random, &of);
        let _ = call_plain(&of, Command::Attach, &mut Attach { ring, descriptor, grant, ..Attach::default() });
        let _ = call_plain(self.file(random), Command::Detach, &mut Detach { ring, file, ..Detach::default() });
    }

    /// What is asked about, or of, the volume as a whole.
    fn whole_volume(&mut self, random: &mut Random) {
        let entries = random.below(64);
        let capacity = if random.below(4) == 0 { number(random) as u32 } else { entries as u32 };
        let mut bytes = Metrics { capacity, ..Metrics::default() }.as_bytes().to_vec();
        bytes.resize(bytes.len() + entries as usize * Command::Metrics.entry_size(), 0);
        let file = self.file(random).try_clone().unwrap();
        let _ = sys::ioctl(file.as_fd(), Command::Metrics.request(entries as usize), &mut bytes);
        let mut bytes = TopList { capacity, ..TopList::default() }.as_bytes().to_vec();
        bytes.resize(bytes.len() + entries as usize * Command::Top.entry_size(), 0);
        let _ = sys::ioctl(file.as_fd(), Command::Top.request(entries as usize), &mut bytes);
        let reserved = if random.below(4) == 0 { number(random) } else { 0 };
        let _ = call_plain(self.file(random), Command::Sync, &mut abi::Sync { reserved, ..abi::Sync::default() });
        let mut trim = abi::Trim { start: number(random), len: number(random), minimum: number(random), ..abi::Trim::default() };
        assert!(call_plain(self.file(random), Command::Trim, &mut trim).is_err(), "discards are for administrators");
        assert!(call_plain(self.file(random), Command::Grow, &mut abi::Grow::default()).is_err(), "growth is for administrators");
        let devices = random.below(20) as usize;
        let mut grow = abi::Grow { flags: number(random) as u32 & 3, ..abi::Grow::default() }.as_bytes().to_vec();
        for _ in 0..devices {
            let mut device = abi::NewDevice { name: [0; 256] };
            match random.below(3) {
                0 => device.name.copy_from_slice(&noise(random, 256)),
                1 => abi::put_text(&mut device.name, "/dev/null"),
                _ => abi::put_text(&mut device.name, "/etc/passwd"),
            }
            grow.extend_from_slice(device.as_bytes());
        }
        let file = self.file(random).try_clone().unwrap();
        let grown = sys::ioctl(file.as_fd(), Command::Grow.request(devices), &mut grow);
        assert!(grown.is_err(), "growth is for administrators");
        let mut log = abi::Log { reserved, ..abi::Log::default() };
        let filter = noise(random, log.filter.len());
        log.filter.copy_from_slice(&filter);
        assert!(call_plain(self.file(random), Command::Log, &mut log).is_err(), "the log is for administrators");
    }

    /// Takes pages out of registered memory, or out of the file.
    fn punch(&mut self, random: &mut Random) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let memory = self.buffers.get(random.below(BUFFERS as u64) as usize).map(|buffer| &buffer.memory);
        let target = memory.unwrap_or(&self.own);
        let _ = rustix::fs::fallocate(target, flags, random.place(MIB), 1 + random.below(MIB));
    }
}
