//! Makes descriptors of all kinds that a user can have; the daemon takes few of them.

use std::fs::File;
use std::net::TcpListener;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use gpunvme_tests::direct::memfd;
use gpunvme_tests::random::Random;
use rustix::event::{EventfdFlags, epoll};
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::process::PidfdFlags;

use super::{number, one};

/// One of any kind. `root` is the mount's root; `file` is one of its files.
pub fn any(random: &mut Random, root: &Path, file: &File) -> OwnedFd {
    match random.below(20) {
        0..8 => memory(random),
        8..10 => eventfd(random),
        10 => rustix::pipe::pipe().unwrap().0,
        11 => UnixStream::pair().unwrap().0.into(),
        12 => TcpListener::bind("127.0.0.1:0").unwrap().into(),
        13 => rustix::fs::open(root, *one(random, &[OFlags::PATH, OFlags::DIRECTORY]) | OFlags::CLOEXEC, Mode::empty()).unwrap(),
        14 => file.as_fd().try_clone_to_owned().unwrap(),
        15 => rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).unwrap(),
        16 => epoll::create(epoll::CreateFlags::CLOEXEC).unwrap(),
        17 => io_uring::IoUring::new(2).map_or_else(|_| memory(random), |ring| ring_fd(&ring)),
        18 => carrying(memory(random)),
        _ => File::open(one(random, &["/dev/null", "/dev/zero", "/proc/self/mem", "/proc/self/maps", "/", "/proc/self/ns/user"]))
            .unwrap()
            .into(),
    }
}

/// A memfd, which may be sealed in any way, have holes, be for reading only, and be of any length.
pub fn memory(random: &mut Random) -> OwnedFd {
    if random.below(3) == 0 {
        return memfd(64 << 10).into();
    }
    let fd = rustix::fs::memfd_create("any", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    let len = number(random);
    // Most lengths are impossible, or of nothing.
    let _ = rustix::fs::ftruncate(&fd, len);
    if random.below(2) == 0 {
        let _ = rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, len.clamp(1, 1 << 20));
    }
    let seals = [SealFlags::SHRINK, SealFlags::GROW, SealFlags::WRITE, SealFlags::FUTURE_WRITE, SealFlags::SEAL];
    for seal in seals {
        if random.below(3) == 0 {
            let _ = rustix::fs::fcntl_add_seals(&fd, seal);
        }
    }
    if random.below(8) == 0 {
        return File::open(format!("/proc/self/fd/{}", fd.as_raw_fd())).map_or(fd, OwnedFd::from);
    }
    fd
}

/// One that may block, be full, or be a semaphore.
pub fn eventfd(random: &mut Random) -> OwnedFd {
    let mut flags = EventfdFlags::CLOEXEC;
    flags.set(EventfdFlags::NONBLOCK, random.below(2) == 0);
    flags.set(EventfdFlags::SEMAPHORE, random.below(4) == 0);
    let fd = rustix::event::eventfd(0, flags).unwrap();
    if random.below(4) == 0 {
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    }
    fd
}

/// A copy of an io_uring's descriptor, which keeps the ring.
fn ring_fd(ring: &io_uring::IoUring) -> OwnedFd {
    let this = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).unwrap();
    rustix::process::pidfd_getfd(&this, ring.as_raw_fd(), rustix::process::PidfdGetfdFlags::empty()).unwrap()
}

/// A socket in which another descriptor is on its way.
fn carrying(fd: OwnedFd) -> OwnedFd {
    let (one, other) = UnixStream::pair().unwrap();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = rustix::net::SendAncillaryBuffer::new(&mut space);
    let fds = [fd.as_fd()];
    assert!(ancillary.push(rustix::net::SendAncillaryMessage::ScmRights(&fds)));
    let bytes = [std::io::IoSlice::new(b"x")];
    rustix::net::sendmsg(&one, &bytes, &mut ancillary, rustix::net::SendFlags::NOSIGNAL).unwrap();
    other.into()
}
