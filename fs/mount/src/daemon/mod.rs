//! The program mount.gpunvme: from a command line to a live mount, and from the end of a mount to
//! a clean volume. Called as umount.fuse.gpunvme it is umount(8)'s helper instead (`unmount`).
//!
//! 1. [`options`] and [`settings`] parse the command line and the configuration file.
//! 2. [`background`] splits the process: the caller waits for a verdict, the daemon works towards
//!    one.
//! 3. [`gpunvme_programs::claim`] claims the device, waiting for a daemon that is just releasing
//!    it; `superblock` claims a single block device, by the mount itself.
//! 4. `serve` starts the engine and the FUSE session, and closes the volume when the mount has
//!    ended.
//! 5. [`lifecycle`] knows which stage the mount is in and what a signal means there.

mod attachment;
pub mod background;
pub mod error;
mod filter;
mod fusectl;
mod last_word;
pub mod lifecycle;
mod limits;
pub mod log;
pub mod options;
mod place;
mod privileges;
mod question;
mod readahead;
mod remount;
mod serve;
pub mod settings;
mod superblock;
mod unmount;
mod utab;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Parser;
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use background::{Report, Side};
use error::MountError;
use gpunvme_programs::claim::may_have;
use gpunvme_programs::mounts::Mount;
use gpunvme_programs::terminal::{self, complain};
use lifecycle::Lifecycle;
use options::{Command, Options};
use place::Place;

/// How long mounts of a device may be asked whether their daemons have gone.
const RELEASE_LIMIT: Duration = Duration::from_secs(2);

/// Runs the program with `args`, the first being its name, and returns its exit code in mount(8)'s
/// terms.
///
/// Must be called from a process that has one thread and has opened nothing: see [`background`].
pub fn run(args: impl IntoIterator<Item = OsString>) -> u8 {
    background::close_inherited();
    background::reset_signals();
    let args: Vec<OsString> = args.into_iter().collect();
    let name = args.first().and_then(|name| Path::new(name).file_name()).unwrap_or_default().to_string_lossy().into_owned();
    if name.starts_with("umount") { run_unmount(&name, args) } else { run_mount(args) }
}

fn run_unmount(name: &str, args: Vec<OsString>) -> u8 {
    let arguments = match unmount::Arguments::try_parse_from(args) {
        Ok(arguments) => arguments,
        Err(error) => {
            // If the terminal is gone, there is nowhere to report that.
            let _ = error.print();
            return u8::from(error.use_stderr());
        }
    };
    let result = enter_namespace(arguments.namespace.as_deref()).and_then(|()| arguments.unmount());
    if let Err(error) = result {
        complain(format_args!("{name}: {error}"));
        return error.exit_code();
    }
    0
}

fn run_mount(args: Vec<OsString>) -> u8 {
    let options = match Command::parse(args) {
        Ok(Command::Mount(options)) => options,
        Ok(Command::Print(text)) => {
            return match terminal::print(format_args!("{text}")) {
                Ok(()) => 0,
                Err(error) => refuse(None, &MountError::System(format!("standard output: {error}"))),
            };
        }
        Err(refusal) => return refuse(refusal.device.as_deref(), &refusal.error),
    };
    if let Err(error) = enter_namespace(options.namespace.as_deref()) {
        return refuse(Some(&options.device), &error);
    }
    if options.fake {
        return match serve::check(&options) {
            Ok(()) => 0,
            Err(error) => refuse(Some(&options.device), &error),
        };
    }
    if options.remount {
        return match remount::remount(&options) {
            Ok(()) => 0,
            Err(error) => refuse(Some(&options.device), &error),
        };
    }
    if options.foreground {
        return daemon(&options, Report::InForeground);
    }
    match background::split() {
        Ok(Side::Caller(caller)) => {
            let (code, text) = caller.wait();
            if code == 0
                && options.namespace.is_none()
                && let Ok(dir) = options.dir.canonicalize()
            {
                utab::note_behind_caller(&dir);
            }
            if code != 0 {
                complain(format_args!("mount.gpunvme: {}: {text}", options.device));
            } else if options.verbose {
                // The mount is live whether or not this can be said.
                let _ =
                    terminal::print(format_args!("mount.gpunvme: {} mounted on {}.\n", options.device, options.dir.display()));
            }
            code
        }
        Ok(Side::Daemon(report)) => daemon(&options, report),
        Err(error) => refuse(Some(&options.device), &MountError::System(format!("going to the background: {error}"))),
    }
}

/// Everything from the device to the end of the mount. Returns the exit code.
fn daemon(options: &Options, report: Report) -> u8 {
    let foreground = matches!(report, Report::InForeground);
    end_at_a_panic();
    limits::protect_from_oom();
    if let Err(error) = limits::raise_descriptors(options.settings.threads) {
        report.failed(&options.device, &error);
        return error.exit_code();
    }
    if let Err(error) = privileges::drop_unneeded() {
        let error = MountError::System(format!("giving up privileges: {error}"));
        report.failed(&options.device, &error);
        return error.exit_code();
    }
    let result = Lifecycle::start(&options.device, report).and_then(|lifecycle| {
        let result = log::start(&options.settings.log, foreground).and_then(|log| serve::serve(options, &lifecycle, log));
        if let Err(error) = &result {
            lifecycle.failed(error);
        }
        result
    });
    result.map_or_else(|error| error.exit_code(), |()| 0)
}

/// Makes a panic of any thread the end of the daemon. What that thread was doing is unknown, so
/// nothing more may reach the device; the next mount recovers from this like from a crash.
fn end_at_a_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tracing::error!("{panic}");
        report(panic);
        std::process::abort();
    }));
}

fn refuse(device: Option<&str>, error: &MountError) -> u8 {
    match device {
        Some(device) => complain(format_args!("mount.gpunvme: {device}: {error}")),
        None => complain(format_args!("mount.gpunvme: {error}")),
    }
    error.exit_code()
}

/// Enters the mount namespace that `-N` names; device, directory and configuration are then looked
/// up there.
fn enter_namespace(name: Option<&str>) -> Result<(), MountError> {
    let Some(name) = name else { return Ok(()) };
    let path = match name.parse::<u32>() {
        Ok(pid) => PathBuf::from(format!("/proc/{pid}/ns/mnt")),
        Err(_) => PathBuf::from(name),
    };
    let failed = |error: std::io::Error| MountError::Usage(format!("namespace {}: {error}", path.display()));
    let namespace = std::fs::File::open(&path).map_err(failed)?;
    move_into_link_name_space(std::os::fd::AsFd::as_fd(&namespace), Some(LinkNameSpaceType::Mount))
        .map_err(|error| failed(error.into()))
}

/// Releases those mounts that may have `device` ([`may_have`]), and of which `is_dead` says that no
/// daemon will come back to them: they answer every access with an error. That they name it is not
/// enough: it may be another file by now, with a daemon that lives. After [`RELEASE_LIMIT`] no
/// further one is looked at: other users, whose come last, may have made any number that do not
/// answer.
fn release_dead_mounts(device: &str, is_dead: impl Fn(&Mount) -> bool) {
    let until = Instant::now() + RELEASE_LIMIT;
    let is_dead = |mount: &Mount| mount.is_ours() && may_have(mount, device) && Instant::now() < until && is_dead(mount);
    let mut mounts = Mount::all_of(device).unwrap_or_default();
    mounts.reverse();
    mounts.sort_by_key(|mount| mount.user != Some(rustix::process::geteuid().as_raw()));
    for mount in mounts.into_iter().filter(is_dead) {
        // Another mount may have taken its place meanwhile.
        let Some(place) = Place::of(&mount.dir).ok().filter(|place| place.shows(&mount)) else { continue };
        match place.unmount(UnmountFlags::DETACH) {
            Ok(()) => tracing::warn!("{}: released the mount of a daemon that was killed", mount.dir.display()),
            Err(Errno::PERM) => {}
            Err(error) => tracing::warn!("{}: a dead mount cannot be released: {error}", mount.dir.display()),
        }
    }
}
