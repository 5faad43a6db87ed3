//! Opens the DEVICE that a user named: the one place where a name becomes a backend, and where the
//! NVMe driver is given its transport.
use std::sync::Arc;

use crate::device_name::{Backend, DeviceName};
use crate::file::{Claim, FileDevice};
use crate::nvme::{Controller, NvmeDevice, Options};
use crate::sim::SimController;
use crate::transport::Transport;
use crate::vfio::VfioTransport;
use crate::{BlockDevice, Error, OpenMode, Result};

/// Opens DEVICE: an NVMe controller's namespace as `vfio:0000:01:00.0`, with options after commas;
/// or the path of a block device or of an image file.
///
/// The device is locked against other users for as long as it or one of its queues lives: a
/// controller and a block device (`O_EXCL`) exclusively whatever the mode; an image file
/// (fcntl(2), `F_OFD_SETLK`) exclusively for [`OpenMode::ReadWrite`] and shared for
/// [`OpenMode::ReadOnly`]. A block device has this lock as well: see [`open_claimed`].
///
/// # Errors
/// - [`Error::Busy`] when the device is locked by another user, after 300 ms of attempts.
/// - [`Error::NotFound`], [`Error::Permission`], [`Error::VfioPermission`], [`Error::ReadOnly`]
///   and [`Error::NotABlockDevice`] say why there is nothing that can be opened in this mode.
/// - [`Error::Unsupported`] for a device without direct I/O, a namespace that the driver cannot
///   run, or an option that does not exist.
/// - [`Error::Gone`], [`Error::Controller`], [`Error::Admin`] and [`Error::System`] when the
///   device, or the kernel, failed while it was set up.
pub fn open(device: &str, mode: OpenMode) -> Result<Arc<dyn BlockDevice>> {
    let Some(mut name) = DeviceName::parse(device) else {
        return Ok(Arc::new(FileDevice::open(device, mode, Claim::Ours)?));
    };
    let options = Options::take(&mut name)?;
    let transport = connect(&mut name, mode)?;
    Ok(Arc::new(NvmeDevice::open(name.device(), transport, options, mode)?))
}

/// Opens the block device DEVICE (a path) for a caller that has claimed it by other means than
/// `O_EXCL`: the superblock of its mount. The lock (fcntl(2), `F_OFD_SETLK`) keeps [`open`] and
/// this away from the same file of a device, and shows others that this process lives.
///
/// # Errors
/// As [`open`]; [`Error::Busy`] speaks of the lock only.
pub fn open_claimed(device: &str, mode: OpenMode) -> Result<Arc<dyn BlockDevice>> {
    Ok(Arc::new(FileDevice::open(device, mode, Claim::Callers)?))
}

/// Claims the NVMe controller of DEVICE (`vfio:0000:01:00.0`) for maintenance, without touching
/// it. It is locked as [`open`] locks it, for as long as the [`Controller`] lives.
///
/// # Errors
/// [`Error::Unsupported`] for a DEVICE that is a path, since the kernel drives that one; otherwise
/// those of [`open`].
pub fn open_controller(device: &str) -> Result<Controller> {
    let Some(mut name) = DeviceName::parse(device) else {
        let reason = "is not driven by gpunvme; name an NVMe controller as vfio:0000:01:00.0".into();
        return Err(Error::Unsupported { device: device.into(), reason });
    };
    let options = Options::take(&mut name)?;
    let transport = connect(&mut name, OpenMode::ReadWrite)?;
    Controller::new(name.device(), transport, options)
}

/// Reaches the controller that a DEVICE string names, and claims it.
fn connect(name: &mut DeviceName<'_>, mode: OpenMode) -> Result<Arc<dyn Transport>> {
    match name.backend {
        Backend::Sim => Ok(Arc::new(SimController::connect(name, mode)?)),
        Backend::Vfio => {
            name.finish()?;
            Ok(Arc::new(VfioTransport::open(name.device(), name.target)?))
        }
    }
}

impl SimController {
    /// Runs the driver on this controller, with the driver's options after commas, such as
    /// `depth=8,timeout=250ms`, or none. Only one driver can be attached at a time: the device and
    /// its queues have to be dropped before the next.
    ///
    /// # Errors
    /// Those of [`open`] for what the driver finds; [`Error::Unsupported`] for an option that it
    /// does not have.
    pub fn attach(self: &Arc<Self>, options: &str) -> Result<Arc<dyn BlockDevice>> {
        let device = if options.is_empty() { "sim:".into() } else { format!("sim:,{options}") };
        let mut name = DeviceName::parse(&device).expect("it begins with a backend's name");
        let options = Options::take(&mut name)?;
        name.finish()?;
        self.forget_bus_errors();
        Ok(Arc::new(NvmeDevice::open(self.name().into(), self.clone(), options, self.mode())?))
    }
}
