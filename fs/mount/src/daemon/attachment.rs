//! Attachment of a mount to the directory tree: how it is made, and how it is taken away.
//!
//! A path does not say what is mounted there now: an administrator may have unmounted the volume,
//! and mounted another one in its place or over it. So a mount is known by its identity, and
//! nothing is unmounted before its place was seen to show this mount. The kernel unmounts what a
//! place shows: a mount made there between this check and the call is not protected.

use std::fs::File;
use std::io::{self, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType, recvmsg, socketpair,
};
use rustix::process::{getegid, geteuid};

use super::fusectl::Control;
use super::place::{Identity, MountPoint, Place};
use super::unmount;
use gpunvme_programs::mounts::Mount;

/// The device that connects FUSE servers with the kernel.
const DEV_FUSE: &str = "/dev/fuse";
/// Its number (linux/major.h: `MISC_MAJOR`; linux/miscdevice.h: `FUSE_MINOR`).
const FUSE_NUMBER: (u32, u32) = (10, 229);
/// How long it may take until a superblock that has gone has let go of its device.
const RECLAIM_LIMIT: Duration = Duration::from_millis(200);

/// A request to mount.
pub struct Request<'a> {
    /// The mount point.
    pub point: &'a MountPoint,
    /// Source of the mount, as the mount table shows it.
    pub source: &'a str,
    /// `ro`, `nodev`, `nosuid` and the like.
    pub flags: MountFlags,
    /// Whether users other than the one who mounts get access.
    pub allow_other: bool,
}

/// A mount of ours, attached to a directory.
#[derive(Debug)]
pub struct Attachment {
    dir: PathBuf,
    dev: u64,
    /// `None` where something else covered it before it could be looked at.
    identity: Option<Identity>,
    /// Ends the connection. Opened in time: the kernel binds it to this connection and no later
    /// one.
    control: Option<Control>,
    /// The block device that the mount itself claims.
    claims: Option<PathBuf>,
}

/// Why FUSE did not mount, with the way out.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// There is no `/dev/fuse`, or no driver behind it.
    #[error("/dev/fuse is missing: load the kernel module with `modprobe fuse`; a container needs `--device /dev/fuse`")]
    NoDevice,
    /// `/dev/fuse` is another file.
    #[error("/dev/fuse is not the device of FUSE; `rm /dev/fuse` and `mknod -m 666 /dev/fuse c 10 229` make it so")]
    AnotherDevice,
    /// Its access rights refuse.
    #[error("/dev/fuse may not be opened by this user; `chmod 666 /dev/fuse` is its usual mode")]
    DeviceMode,
    /// A device cgroup refuses, whatever the user.
    #[error("/dev/fuse is not among the devices that this container may use; start it with `--device /dev/fuse`")]
    DeviceCgroup,
    /// Neither mount(2) nor fusermount3 may.
    #[error(
        "mounting needs the capability SYS_ADMIN (root has it, a container with `--cap-add SYS_ADMIN`), or else the program \
         fusermount3, of the package fuse3, which is not installed"
    )]
    NotPermitted,
    /// AppArmor or SELinux refuses.
    #[error("a security module forbids mount(2); docker allows it with `--security-opt apparmor=unconfined`")]
    SecurityModule,
    /// fusermount3 refused.
    #[error("{0}")]
    Helper(String),
    /// It was mounted, and is not where it should be.
    #[error("{0}")]
    NotThere(io::Error),
    /// Anything else.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<Errno> for AttachError {
    fn from(errno: Errno) -> Self {
        AttachError::Io(errno.into())
    }
}

/// Mounts: by itself where the caller may, else by fusermount3. Returns the connection to the
/// kernel, on which requests wait from now on, and where the mount is.
///
/// # Errors
/// Those of mount(2), and what fusermount3 says.
pub fn attach(request: &Request) -> Result<(OwnedFd, Attachment), AttachError> {
    let connection = open_connection()?;
    let connection = match mount(request, &connection) {
        Ok(()) => connection,
        Err(Errno::PERM) => mount_by_helper(request)?,
        Err(Errno::ACCESS) => return Err(AttachError::SecurityModule),
        Err(errno) => return Err(errno.into()),
    };
    let attachment = Attachment::find(request.point, request.source, None).map_err(AttachError::NotThere)?;
    Ok((connection, attachment))
}

/// Takes away what was mounted and is not where it should be ([`AttachError::NotThere`]), if that
/// is on the directory after all. Its connection is closed, so that it is dead; another one of this
/// name may live.
pub fn take_back(point: &MountPoint, source: &str) {
    if let Ok(Some((place, mount))) = newest(point, source)
        && mount.user == Some(geteuid().as_raw())
        && mount.is_dead()
        && place.shows(&mount)
    {
        let _ = unmount::release(&place, UnmountFlags::DETACH, true);
    }
}

/// The newest mount of ours on this directory that has this source, and its place.
fn newest(point: &MountPoint, source: &str) -> io::Result<Option<(Place, Mount)>> {
    let dir = point.dir_now()?;
    let place = Place::of(&dir)?;
    let is_it = |mount: &Mount| mount.dir == dir && mount.is_ours() && mount.source.as_bytes() == source.as_bytes();
    Ok(Mount::all()?.into_iter().rfind(is_it).map(|mount| (place, mount)))
}

/// Opens `/dev/fuse`.
///
/// # Errors
/// Why it cannot be opened.
pub fn open_connection() -> Result<OwnedFd, AttachError> {
    let opened = rustix::fs::open(DEV_FUSE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    let connection = opened.map_err(|errno| match errno {
        Errno::NOENT | Errno::NODEV | Errno::NXIO => AttachError::NoDevice,
        Errno::ISDIR => AttachError::AnotherDevice,
        Errno::ACCESS => AttachError::DeviceMode,
        Errno::PERM => AttachError::DeviceCgroup,
        errno => errno.into(),
    })?;
    let stat = rustix::fs::fstat(&connection)?;
    let number = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
    let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice && number == FUSE_NUMBER;
    if is_device { Ok(connection) } else { Err(AttachError::AnotherDevice) }
}

fn mount(request: &Request, connection: &OwnedFd) -> rustix::io::Result<()> {
    // What the root has besides its type, the kernel asks for.
    let options = format!(
        "fd={},rootmode=40000,user_id={},group_id={},subtype=gpunvme,default_permissions{}",
        connection.as_raw_fd(),
        geteuid().as_raw(),
        getegid().as_raw(),
        if request.allow_other { ",allow_other" } else { "" }
    );
    let options = std::ffi::CString::new(options).map_err(|_| Errno::INVAL)?;
    rustix::mount::mount(request.source, request.point.path(), "fuse", request.flags, options.as_c_str())
}

/// The setuid program fusermount3 mounts, and sends the connection over the socket that
/// `_FUSE_COMMFD` names.
fn mount_by_helper(request: &Request) -> Result<OwnedFd, AttachError> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let mut helper = Command::new("fusermount3");
    helper.arg("-o").arg(helper_options(request)).arg("--").arg(request.point.dir());
    helper.env("_FUSE_COMMFD", "0").stdin(theirs).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = helper.spawn().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => AttachError::NotPermitted,
        _ => error.into(),
    })?;
    // It has the other end of the socket still, which would hide that the program is gone.
    drop(helper);
    let connection = receive_descriptor(&ours);
    let mut message = String::new();
    child.stderr.take().map(|mut stderr| stderr.read_to_string(&mut message)).transpose()?;
    // What came over the socket tells how it ended.
    let _ = child.wait();
    connection?.ok_or_else(|| AttachError::Helper(message.trim().to_owned()))
}

fn helper_options(request: &Request) -> std::ffi::OsString {
    let mut options = vec![
        // libfuse, util/fusermount.c: a backslash guards what would separate options.
        format!("fsname={}", request.source.replace('\\', "\\\\").replace(',', "\\,")),
        "subtype=gpunvme,default_permissions".to_owned(),
    ];
    for (set, option) in [
        (request.allow_other, "allow_other"),
        (request.flags.contains(MountFlags::RDONLY), "ro"),
        (request.flags.contains(MountFlags::NOEXEC), "noexec"),
        (request.flags.contains(MountFlags::NOATIME), "noatime"),
        (request.flags.contains(MountFlags::SYNCHRONOUS), "sync"),
        (request.flags.contains(MountFlags::DIRSYNC), "dirsync"),
    ] {
        if set {
            options.push(option.to_owned());
        }
    }
    options.join(",").into()
}

/// The descriptor that comes over a socket; `None` where it is closed instead.
fn receive_descriptor(socket: &OwnedFd) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    rustix::io::retry_on_intr(|| recvmsg(socket, &mut [IoSliceMut::new(&mut [0])], &mut ancillary, RecvFlags::CMSG_CLOEXEC))?;
    let mut messages = ancillary.drain();
    Ok(messages.find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    }))
}

impl Attachment {
    /// The mount that was just made. Its device is held, so there is no other with the same source.
    /// `claims`: the block device that the mount claims.
    ///
    /// # Errors
    /// It has gone again, or its directory was moved meanwhile.
    pub fn find(point: &MountPoint, source: &str, claims: Option<PathBuf>) -> io::Result<Attachment> {
        let missing = || io::Error::new(io::ErrorKind::NotFound, "the mount has gone again, or its directory was moved");
        let (place, listed) = newest(point, source)?.ok_or_else(missing)?;
        let identity = place.identity().filter(|identity| {
            // Twice, so that the look between them was at the same mount.
            place.shows(&listed) && place.identity() == Some(*identity)
        });
        let control = Control::of(listed.dev).inspect_err(|error| tracing::debug!("fusectl: {error}")).ok();
        Ok(Attachment { dir: listed.dir, dev: listed.dev, identity, control, claims })
    }

    /// The mount point.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The device number that files on it show in `st_dev`.
    pub fn dev(&self) -> u64 {
        self.dev
    }

    /// Whether it can be reached, and nothing was mounted over it.
    pub fn is_in_place(&self) -> bool {
        self.place().is_some()
    }

    /// Where it is, if it can be reached: where it was mounted, or where it is now that it was
    /// moved, or a directory above it renamed.
    fn place(&self) -> Option<Place> {
        let here = |dir: &Path| Place::of(dir).ok().filter(|place| self.identity.is_some() && place.identity() == self.identity);
        here(&self.dir).or_else(|| {
            let all = Mount::all().ok()?;
            all.iter().filter(|mount| mount.dev == self.dev).find_map(|mount| here(&mount.dir))
        })
    }

    /// Unmounts it.
    ///
    /// # Errors
    /// [`Errno::BUSY`] while it is in use. [`Errno::INVAL`] if it cannot be reached.
    pub fn release(&self, flags: UnmountFlags) -> rustix::io::Result<()> {
        let place = self.place().ok_or(Errno::INVAL)?;
        unmount::release(&place, flags, true).map_err(|error| error.errno())
    }

    /// Writes down what is dirty in shared mappings. The kernel does not wait for all of it (Linux
    /// 6.16 and later); this does, as long as `patience` lasts and no other requests come.
    ///
    /// # Errors
    /// Those of syncfs(2). [`Errno::INVAL`] if it cannot be reached.
    pub fn sync(&self, patience: Duration) -> rustix::io::Result<()> {
        rustix::fs::syncfs(self.place().ok_or(Errno::INVAL)?.open()?)?;
        let since = Instant::now();
        while since.elapsed() < patience && self.control.as_ref().is_some_and(|control| control.waiting() > 0) {
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Ends the connection, wherever it is mounted: its requests and all that is open on it fail
    /// from now on.
    ///
    /// # Errors
    /// If the daemon is not root's.
    pub fn abort(&self) -> io::Result<()> {
        match &self.control {
            Some(control) => control.abort(),
            None => Err(io::ErrorKind::PermissionDenied.into()),
        }
    }

    /// Claims the block device again, if the mount had it claimed and its superblock has gone: what
    /// the daemon has still to write may be written only while no other program has the device. To
    /// be called when the connection was cut off; the claim lasts as long as the file.
    ///
    /// # Errors
    /// Another program has it.
    pub fn claim_again(&self) -> io::Result<Option<File>> {
        let (Some(device), Some(control)) = (&self.claims, &self.control) else { return Ok(None) };
        let until = Instant::now() + RECLAIM_LIMIT;
        loop {
            let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
            match rustix::fs::open(device, flags, Mode::empty()) {
                Ok(file) => return Ok(Some(file.into())),
                Err(Errno::BUSY) if control.has_superblock() => return Ok(None),
                // It may have gone between these two.
                Err(Errno::BUSY) if Instant::now() < until => thread::sleep(RECLAIM_LIMIT / 20),
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_helper_gets_a_list_that_it_can_split() {
        let point = MountPoint::of(Path::new("/")).unwrap();
        let flags = MountFlags::RDONLY | MountFlags::NOEXEC;
        let request = Request { point: &point, source: r"/img/a,b\c", flags, allow_other: false };
        let expected = r"fsname=/img/a\,b\\c,subtype=gpunvme,default_permissions,ro,noexec";
        assert_eq!(helper_options(&request), expected);
    }
}
