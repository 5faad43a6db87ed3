//! The superblock of a mount of one block device, of the type `fuseblk` (`fs/fuse/inode.c`).
//!
//! The kernel then has the device claimed for as long as the superblock is there, waits in
//! umount(2) until the daemon has answered DESTROY, and tells it of sync(2) and syncfs(2) (Linux
//! 6.18). The superblock is made before the volume is opened, and attached to the directory tree
//! after that: so the device is claimed from the first look at it. There can be no other superblock
//! of the same device, and no second daemon at this one (`FSCONFIG_CMD_CREATE_EXCL`, Linux 6.6).

use std::cell::Cell;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use gpunvme_blockdev::{Error, OpenMode, path_of, split_names};
use gpunvme_programs::claim::{ClaimError, has_users};
use gpunvme_programs::members::{self, ClaimedBy};
use rustix::fs::{AtFlags, StatxFlags, statx};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MoveMountFlags, fsconfig_create_exclusive, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen, move_mount,
};
use rustix::process::{getegid, geteuid};

use super::attachment::{AttachError, Attachment, open_connection};
use super::options::Options;
use super::place::MountPoint;
use super::{privileges, release_dead_mounts};

/// Bytes of a block of the volume, which the kernel is to count in.
const BLOCK: &str = "4096";

/// A superblock that is attached to no directory yet. Dropped, it ends, and its claim with it.
#[derive(Debug)]
pub struct Superblock {
    /// Dropped first: unmounting waits for no answer then.
    connection: OwnedFd,
    mount: OwnedFd,
    device: PathBuf,
}

/// A volume on a block device that a superblock claims.
type Claimed = ClaimedBy<Superblock>;

/// Why no superblock claims a volume.
#[derive(Debug)]
pub enum Unclaimed {
    /// It is none of those that one can claim.
    Other,
    /// The kernel refused, for this reason.
    Refused(String),
}

/// Claims and opens the volume that these options name, where that can be done by a superblock:
/// the daemon is root, and the volume lies on one block device, named by its path.
///
/// # Errors
/// The device is mounted, in use, or cannot be opened.
pub fn claim(options: &Options) -> Result<Result<Claimed, Unclaimed>, ClaimError> {
    let device = &options.device;
    let is_one = options.others.is_empty() && split_names(device).len() == 1;
    let path = path_of(device).filter(|path| path.to_str() == Some(device) && is_block_device(path));
    let Some(path) = path.filter(|_| is_one && !privileges::is_unprivileged()) else { return Ok(Err(Unclaimed::Other)) };
    let mode = if options.settings.read_only { OpenMode::ReadOnly } else { OpenMode::ReadWrite };
    let refusal = Cell::new(None);
    let claimed = members::open_alone(device, mode, || {
        take(path, options, mode).map_err(|error| match error {
            Refusal::Device(error) => error,
            Refusal::Superblock(why) => {
                refusal.set(Some(why));
                Error::Unsupported { device: device.as_str().into(), reason: "no superblock".into() }
            }
        })
    });
    match refusal.take() {
        Some(why) => Ok(Err(Unclaimed::Refused(why))),
        None => Ok(claimed?.ok_or(Unclaimed::Other)),
    }
}

/// Why there is no claim.
enum Refusal {
    /// Of the device.
    Device(Error),
    /// The kernel does not make such superblocks, or not for this process.
    Superblock(String),
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Refusal::Device(error)
    }
}

fn take(path: &Path, options: &Options, mode: OpenMode) -> Result<Claimed, Refusal> {
    let busy = || Refusal::Device(Error::Busy { device: options.device.as_str().into() });
    let superblock = Superblock::make(path, options).map_err(|errno| match errno {
        Errno::BUSY => {
            // By a mount that a daemon left behind, perhaps. The caller tries again.
            release_dead_mounts(&options.device, |mount| mount.is_left_behind(path));
            busy()
        }
        errno => Refusal::Superblock(errno.to_string()),
    })?;
    let open = || gpunvme_blockdev::open_claimed(&options.device, mode);
    let device = match open() {
        // A daemon has just let go of it.
        Err(Error::Busy { .. }) if !has_users(path) => match open() {
            // `bdev_allow_write_mounted=0`, of the kernel's command line.
            Err(Error::Busy { .. }) if !has_users(path) => {
                return Err(Refusal::Superblock("the kernel lets no program write to a mounted device".to_owned()));
            }
            opened => opened?,
        },
        opened => opened?,
    };
    // The kernel and this process have each looked the path up.
    let is_same = std::fs::metadata(path).is_ok_and(|status| superblock.dev() == Some(status.rdev()));
    if is_same { Ok((device, superblock)) } else { Err(busy()) }
}

fn is_block_device(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|status| status.file_type().is_block_device())
}

impl Superblock {
    /// Makes the superblock of `device`, with the flags of these options.
    ///
    /// # Errors
    /// [`Errno::BUSY`] if the device is in use; else the kernel has none for this process.
    fn make(device: &Path, options: &Options) -> rustix::io::Result<Superblock> {
        let connection = open_connection().map_err(|error| match error {
            AttachError::Io(error) => Errno::from_io_error(&error).unwrap_or(Errno::IO),
            _ => Errno::NODEV,
        })?;
        let context = fsopen("fuseblk", FsOpenFlags::FSOPEN_CLOEXEC)?;
        let set = |key: &str, value: &str| fsconfig_set_string(&context, key, value);
        fsconfig_set_string(&context, "source", device)?;
        set("subtype", "gpunvme")?;
        set("fd", &connection.as_raw_fd().to_string())?;
        // What the root has besides its type, the kernel asks for.
        set("rootmode", "40000")?;
        set("user_id", &geteuid().as_raw().to_string())?;
        set("group_id", &getegid().as_raw().to_string())?;
        set("blksize", BLOCK)?;
        let flags = options.flags;
        for (key, is_set) in [
            ("default_permissions", true),
            ("allow_other", options.settings.allow_other),
            ("ro", options.settings.read_only),
            ("sync", flags.contains(MountFlags::SYNCHRONOUS)),
            ("dirsync", flags.contains(MountFlags::DIRSYNC)),
            ("lazytime", flags.contains(MountFlags::LAZYTIME)),
        ] {
            if is_set {
                fsconfig_set_flag(&context, key)?;
            }
        }
        fsconfig_create_exclusive(&context)?;
        let mut attributes = attributes(flags);
        attributes.set(MountAttrFlags::MOUNT_ATTR_RDONLY, options.settings.read_only);
        let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
        Ok(Superblock { connection, mount, device: device.to_owned() })
    }

    /// The device that it is of: also the number that files on it show in `st_dev`.
    fn dev(&self) -> Option<u64> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let found = statx(&self.mount, "", flags, StatxFlags::empty()).ok()?;
        Some(rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor))
    }

    /// Attaches it to a directory. Returns the connection to the kernel, and where the mount is.
    ///
    /// # Errors
    /// Those of move_mount(2), and of [`Attachment::find`].
    pub fn attach(self, point: &MountPoint, source: &str) -> Result<(OwnedFd, Attachment), AttachError> {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        move_mount(&self.mount, "", point, "", flags)?;
        let attachment = Attachment::find(point, source, Some(self.device)).map_err(AttachError::NotThere)?;
        Ok((self.connection, attachment))
    }
}

/// The flags of the mount, which are not the superblock's.
fn attributes(flags: MountFlags) -> MountAttrFlags {
    let attributes = [
        (MountFlags::NODEV, MountAttrFlags::MOUNT_ATTR_NODEV),
        (MountFlags::NOSUID, MountAttrFlags::MOUNT_ATTR_NOSUID),
        (MountFlags::NOEXEC, MountAttrFlags::MOUNT_ATTR_NOEXEC),
        (MountFlags::NOATIME, MountAttrFlags::MOUNT_ATTR_NOATIME),
        (MountFlags::STRICTATIME, MountAttrFlags::MOUNT_ATTR_STRICTATIME),
        (MountFlags::NODIRATIME, MountAttrFlags::MOUNT_ATTR_NODIRATIME),
    ];
    attributes.into_iter().filter(|(flag, _)| flags.contains(*flag)).map(|(_, attribute)| attribute).collect()
}
