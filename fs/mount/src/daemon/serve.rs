//! The one place where the mount program, the engine and the FUSE front end meet.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use gpunvme_blockdev::{BlockDevice, Io, OpenMode};
use gpunvme_engine::Corrupt;
use parking_lot::Mutex;
use rustix::mount::{MountFlags, UnmountFlags};

use super::attachment::{self, AttachError, attach};
use super::error::MountError;
use super::last_word::LastWord;
use super::lifecycle::Lifecycle;
use super::options::Options;
use super::place::MountPoint;
use super::question::{self, Found};
use super::settings::Transport;
use super::superblock::{self, Superblock, Unclaimed};
use super::{filter, privileges, readahead, release_dead_mounts};
use crate::front::{self, Session, Workers};
use gpunvme_engine::data::{self, Filesystem};
use gpunvme_engine::error::FsError;
use gpunvme_engine::volume::VolumeOptions;
use gpunvme_programs::claim::reason;
use gpunvme_programs::members::{self, ClaimedBy, GrowError};

/// How long the daemon of a mount that lives may take to say so.
const ASKED_LIMIT: Duration = Duration::from_secs(1);
/// Threads that end what I/O began.
const COMPLETION_THREADS: usize = 8;

/// The devices of a mount's volume, as one. Who looks at them takes turns with others: members are
/// told in writing how large they are.
struct Devices(Mutex<Arc<dyn BlockDevice>>);

impl front::Devices for Devices {
    fn look_again(&self, may_have: &dyn Fn(u64) -> Result<(), String>) -> Result<Option<String>, GrowError> {
        members::grow(&self.0.lock(), may_have)
    }

    fn may_add(&self, names: &[String]) -> Result<(), String> {
        let device = self.0.lock();
        members::may_add(&device, &claim_all(names)?)
    }

    fn add(&self, names: &[String]) -> Result<(), GrowError> {
        let device = self.0.lock();
        members::add(&device, &claim_all(names)?)?;
        tracing::info!("{} is part of the volume now", names.join(", "));
        Ok(())
    }
}

fn claim_all(names: &[String]) -> Result<Vec<Arc<dyn BlockDevice>>, String> {
    let claim = |name: &String| members::claim(name, OpenMode::ReadWrite).map_err(|error| format!("{name}: {error}"));
    names.iter().map(claim).collect()
}

impl std::fmt::Debug for Devices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0.lock().name())
    }
}

/// Serves one mount from the opening of the device until the volume is written down again.
///
/// # Errors
/// Why there is no mount; or, after the mount was live, why the volume could not be written down.
pub fn serve(options: &Options, lifecycle: &Lifecycle, log: Arc<dyn front::Log>) -> Result<(), MountError> {
    let settings = &options.settings;
    let (device, superblock) = claim(options)?;
    device
        .member_names()
        .into_iter()
        .for_each(|name| release_dead_mounts(name, |mount| question::is_dead(mount, ASKED_LIMIT) == Some(Found::Yes)));
    // What applications are told: the members, by their numbers, are those of this name.
    let name = if device.stripe().is_some() { device.name().to_owned() } else { options.device.clone() };
    let point = MountPoint::of(&options.dir)?;
    let dir = point.dir();

    let completions = Workers::new("completion", COMPLETION_THREADS)
        .map_err(|error| MountError::System(format!("starting a thread: {error}")))?;
    let devices = Arc::new(Devices(Mutex::new(device.clone())));
    let fs = open_filesystem(device, options, completions).map_err(|error| failed(options, &error))?;
    let mut flags = options.flags;
    flags.set(MountFlags::RDONLY, settings.read_only);
    let request = attachment::Request { point: &point, source: &options.device, flags, allow_other: settings.allow_other };
    // One that is not attached has its device claimed until the volume is closed.
    let mut superblock = Some(superblock);
    let mut attach = || match superblock.take().expect("it is attached once") {
        Ok(superblock) => superblock.attach(request.point, request.source),
        Err(unclaimed) => {
            let attached = attach(&request)?;
            if let Unclaimed::Refused(why) = unclaimed {
                let device = &options.device;
                tracing::warn!("{device}: mounted as fuse, not fuseblk, so that sync(2) does not reach it: {why}");
            }
            Ok(attached)
        }
    };
    let front = front::Settings {
        device: name,
        loops: settings.threads,
        io_uring: settings.transport == Transport::IoUring,
        commit: settings.commit,
        cache: settings.cache,
        write_buffer: settings.write_buffer,
        discard: settings.discard,
        devices,
        log,
    };
    let session = lifecycle.go_live(|| {
        let (connection, mount) = attach().map_err(|error: AttachError| {
            if let AttachError::NotThere(_) = error {
                attachment::take_back(&point, &options.device);
            }
            cannot_mount(dir, &error)
        })?;
        let session = Session::start(Arc::clone(&fs), connection, &front).map_err(|error| {
            // The connection is closed, so a mount that stays behind would only answer with
            // errors.
            let _ = mount.release(UnmountFlags::DETACH);
            cannot_mount(dir, &error)
        })?;
        session.is_device(mount.dev());
        readahead::raise(mount.dev());
        let last_word = LastWord::of(mount.dev(), &options.device);
        if !privileges::is_unprivileged()
            && let Err(error) = filter::apply()
        {
            tracing::warn!("the daemon's system calls are not filtered: {error}");
        }
        Ok(((session, last_word), mount))
    });
    let (session, last_word) = session.inspect_err(|_| {
        // Nothing has come of it: the next mount need not recover from that. Why there is no mount
        // matters more than this.
        let _ = fs.close();
    })?;
    tracing::info!("{} mounted on {}", options.device, dir.display());
    drop(point);

    let ended = session.join();
    let claim = lifecycle.ended(ended.is_awaited());
    if let Err(error) = &claim {
        // At once: threads of the engine could still write.
        tracing::error!("{}: {error}", options.device);
        last_word.say(false);
        std::process::exit(error.exit_code().into());
    }
    let closed = session.end();
    // Closed in any case: there may be data that only memory has.
    let written = fs.close();
    last_word.say(fs.is_written_down());
    let closed = closed.and(written);
    // Now umount(2) may return.
    let served = ended.finish();
    closed.map_err(|error| failed(options, &error))?;
    served.map_err(|error| MountError::System(format!("the kernel's requests could not be had any more: {error}")))?;
    tracing::info!("{} unmounted", options.device);
    Ok(())
}

fn open_filesystem(
    device: Arc<dyn BlockDevice>,
    options: &Options,
    completions: Arc<Workers>,
) -> Result<Arc<Filesystem>, FsError> {
    let settings = &options.settings;
    // The threads that serve rings will have queues of their own.
    let geometry = device.geometry();
    let others = geometry.max_queues as usize - front::serving_threads(settings.threads, geometry);
    let io = Io::threaded(device.clone(), settings.threads.min(others))?;
    let options = data::Options {
        volume: VolumeOptions { read_only: settings.read_only, cache: settings.cache as usize, discard: settings.discard },
        write_buffer: settings.write_buffer as usize,
    };
    Filesystem::open(io, options, completions)
}

/// Checks what a mount would need, without mounting.
///
/// # Errors
/// Why the mount would fail.
pub fn check(options: &Options) -> Result<(), MountError> {
    let device = open(options, OpenMode::ReadOnly)?;
    MountPoint::of(&options.dir)?;
    gpunvme_engine::is_clean(&device).map(drop).map_err(|error| failed(options, &error))
}

/// Claims and opens the volume: by the superblock of its mount, where that can be.
fn claim(options: &Options) -> Result<ClaimedBy<Result<Superblock, Unclaimed>>, MountError> {
    let mode = if options.settings.read_only { OpenMode::ReadOnly } else { OpenMode::ReadWrite };
    match superblock::claim(options).map_err(|error| MountError::Failed(error.to_string()))? {
        Ok((device, superblock)) => Ok((device, Ok(superblock))),
        Err(unclaimed) => Ok((open(options, mode)?, Err(unclaimed))),
    }
}

fn open(options: &Options, mode: OpenMode) -> Result<Arc<dyn BlockDevice>, MountError> {
    members::open(&options.device, &options.others, mode).map_err(|error| MountError::Failed(error.to_string()))
}

/// Translates an error of the engine into a message for the user who mounts.
fn failed(options: &Options, error: &FsError) -> MountError {
    MountError::Failed(match error {
        FsError::Corrupt(Corrupt::Superblock(why)) => why.clone(),
        FsError::Corrupt(why) => format!("damaged volume: {why}; run fsck.gpunvme"),
        error => reason(&options.device, error),
    })
}

fn cannot_mount(dir: &Path, error: &impl std::fmt::Display) -> MountError {
    MountError::Failed(format!("mount point {}: {error}", dir.display()))
}
