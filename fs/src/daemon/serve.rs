//! The one place where the mount program, the engine and the FUSE front end meet.

use std::sync::Arc;
use std::thread;

use gpunvme_blockdev::{BlockDevice, OpenMode};

use super::claim::{claim, reason};
use super::error::MountError;
use super::lifecycle::{End, Lifecycle};
use super::options::Options;
use super::{mount_point, readahead, release_dead_mounts};
use crate::front::Session;
use crate::volume::Volume;

/// Serves one mount from the opening of the device until the volume is written down again.
///
/// # Errors
/// Why there is no mount; or, after the mount was live, why the volume could not be written down.
pub fn serve(options: &Options, lifecycle: &Arc<Lifecycle>) -> Result<(), MountError> {
    let failed = |error: &dyn ToString| MountError::Failed(reason(&options.device, &error.to_string()));
    let device = open(options, !options.settings.read_only)?;
    release_dead_mounts(&options.device);
    let dir = mount_point(&options.dir)?;

    let volume = Volume::mount(device, options).map_err(|error| failed(&error))?;
    let session = lifecycle.go_live(&dir, || {
        let session = Session::mount(Arc::clone(&volume), &dir, options).map_err(|error| failed(&error))?;
        readahead::raise(&dir);
        Ok(session)
    })?;
    tracing::info!("{} mounted on {}", options.device, dir.display());

    let ended = Arc::clone(lifecycle);
    thread::spawn(move || {
        if let Err(error) = session.join() {
            tracing::error!("FUSE session: {error}");
        }
        ended.ended();
    });
    if lifecycle.wait() == End::CutOff {
        tracing::warn!("{}: files that were open are cut off", dir.display());
    }
    volume.unmount().map_err(|error| failed(&error))?;
    tracing::info!("{} is clean", options.device);
    Ok(())
}

/// Checks what a mount would need, without mounting.
///
/// # Errors
/// Why the mount would fail.
pub fn check(options: &Options) -> Result<(), MountError> {
    let device = open(options, false)?;
    mount_point(&options.dir)?;
    match crate::probe(&device) {
        Ok(Some(_)) => Ok(()),
        Ok(None) => Err(MountError::Failed("no gpunvme volume: format it with mkfs.gpunvme".to_owned())),
        Err(error) => Err(MountError::Failed(reason(&options.device, &error))),
    }
}

fn open(options: &Options, write: bool) -> Result<Arc<dyn BlockDevice>, MountError> {
    let mode = if write { OpenMode::ReadWrite } else { OpenMode::ReadOnly };
    claim(&options.device, mode).map_err(|error| MountError::Failed(error.to_string()))
}
