//! `mount -o remount`: the kernel's flags of a live mount change, `ro` and `rw` above all. The
//! daemon goes on as it was started, and writes down what it has. Where it was started with other
//! settings than the command line has, that is said.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use gpunvme_abi::{Command, Features, INFO_MAGIC, Info, Sync};
use rustix::fs::removexattr;
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount_remount};

use super::error::MountError;
use super::options::Options;
use super::place::MountPoint;
use super::settings::{Partial, Size};
use gpunvme_programs::mounts::Mount;
use gpunvme_programs::terminal::complain;

/// An attribute that no file has.
const NONE: &str = "user.gpunvme.none";

/// Changes the flags of the mount that these options name.
///
/// # Errors
/// There is no such mount, or the volume is to become writable under a daemon that was started
/// read-only.
pub(super) fn remount(options: &Options) -> Result<(), MountError> {
    let point = MountPoint::of(&options.dir)?;
    let (dir, path) = (point.dir(), point.path());
    let failed = |why: &dyn std::fmt::Display| MountError::Failed(format!("{}: {why}", dir.display()));
    if !Mount::on(dir).map_err(|error| failed(&error))?.is_ours() {
        return Err(failed(&"not the mount of a gpunvme volume"));
    }
    let read_only = options.settings.read_only;
    let mut flags = options.flags;
    flags.set(MountFlags::RDONLY, read_only);
    mount_remount(&path, flags, "").map_err(|error| failed(&error))?;
    if !read_only && removexattr(&path, NONE) == Err(Errno::ROFS) {
        // The mount's flags and the daemon's behaviour have to agree.
        mount_remount(&path, flags | MountFlags::RDONLY, "").map_err(|error| failed(&error))?;
        return Err(failed(
            &"is read-only: it was mounted so, or its device failed (journalctl -t mount.gpunvme says why); unmount it first",
        ));
    }
    if read_only {
        // The daemon refuses writes that begin from now on; writes that a ring had in flight are
        // over when it answers this, and what it had in memory is on the device.
        let lost = |error| failed(&format_args!("is read-only now, but not all that was written before is durable: {error}"));
        sync(&path).map_err(lost)?;
    }
    let kept = info(&path).map(|info| kept(&options.asked, &info)).unwrap_or_default();
    if !kept.is_empty() {
        let kept = kept.join(", ");
        complain(format_args!("mount.gpunvme: {}: still {kept}: unmount it, and mount it so, to change that", dir.display()));
    }
    Ok(())
}

/// The settings of a daemon that are not as the command line has them.
fn kept(asked: &Partial, has: &Info) -> Vec<String> {
    let is_other = |name: &str, asked: Option<u64>, has: u64, shown: String| {
        asked.is_some_and(|asked| asked != has).then(|| format!("{name}={shown}"))
    };
    let size = |name, asked: Option<Size>, has| is_other(name, asked.map(|size| size.0), has, Size(has).to_string());
    let number = |name, asked, has| is_other(name, asked, has, has.to_string());
    let discard = Features::from_bits_truncate(has.features).contains(Features::DISCARD);
    let discard = asked.discard.filter(|asked| *asked != discard).map(|_| if discard { "discard" } else { "nodiscard" });
    [
        size("cache", asked.cache, has.cache),
        size("write_buffer", asked.write_buffer, has.write_buffer),
        number("threads", asked.threads.map(|threads| threads as u64), has.threads.into()),
        number("commit", asked.commit, has.commit.into()),
        discard.map(str::to_owned),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Has the daemon of a mount write down all that it has.
fn sync(dir: &Path) -> io::Result<()> {
    let (dir, mut sync) = (File::open(dir)?, Sync::default());
    // SAFETY: as in `info`.
    #[allow(unsafe_code)]
    let result = unsafe { libc::ioctl(dir.as_raw_fd(), Command::Sync.request(0).into(), &mut sync) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// What the daemon of a mount says of itself, if it says its settings.
fn info(dir: &Path) -> Option<Info> {
    let (dir, mut info) = (File::open(dir).ok()?, Info::default());
    // SAFETY: the descriptor is open, and the kernel writes as many bytes as the number of the
    // ioctl says, which are those of the structure; all of its values are valid.
    #[allow(unsafe_code)]
    let result = unsafe { libc::ioctl(dir.as_raw_fd(), Command::Info.request(0).into(), &mut info) };
    (result == 0 && info.magic == INFO_MAGIC && info.cache > 0).then_some(info)
}
