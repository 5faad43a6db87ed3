//! `gpunvme nvme`: maintenance of a controller that gpunvme drives, and that no daemon uses at the
//! moment.
//!
//! It guards data: what loses any asks first, and a format looks at what it would destroy, as
//! mkfs.gpunvme does.

mod render;

use crate::report::{Failure, Report};
use clap::{Subcommand, ValueEnum};
use gpunvme_blockdev::nvme::{Controller, Erase, NamespaceInfo};
use gpunvme_blockdev::open_controller;
use indicatif::ProgressBar;
use serde_json::json;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

#[derive(clap::Args)]
pub struct Nvme {
    /// The controller: vfio:ADDRESS, or sim:PATH. It must not be mounted
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    device: String,
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Tell what the controller is, and its namespaces
    Identify,
    /// Tell its health (the SMART log)
    Smart,
    /// Show its error log, the latest first
    Errors,
    /// Show its registers
    Regs,
    /// Reset it; no data is lost
    Reset,
    /// Reset its whole NVM subsystem, as if power had been cut: what was not flushed is lost
    SubsystemReset {
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
    /// Ask it for its namespaces anew, and list them
    Rescan,
    /// Format a namespace: all its data is lost
    Format(Format),
}

#[derive(clap::Args)]
struct Format {
    /// The namespace
    #[arg(short, long, value_name = "NUMBER", default_value = "1")]
    namespace: u32,
    /// Bytes of a logical block; otherwise as it is now
    #[arg(short, long, value_name = "BYTES")]
    block_size: Option<u32>,
    /// How to erase what was there
    #[arg(short, long, value_name = "HOW", default_value = "none")]
    erase: Erasure,
    /// Do not ask
    #[arg(long)]
    yes: bool,
    /// Format even if it carries a filesystem, or that cannot be told
    #[arg(short, long)]
    force: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Erasure {
    /// Not securely
    None,
    /// Overwriting or otherwise removing it
    UserData,
    /// Throwing away the key that it is encrypted with
    Crypto,
}

pub fn run(args: &Nvme) -> Result<Report, Failure> {
    let device = &args.device;
    if let Action::Format(format) = &args.action {
        return run_format(device, format);
    }
    let controller = open(device)?;
    match &args.action {
        Action::Identify => Ok(render::identify(&controller.identify()?, &controller.namespaces()?)),
        Action::Smart => Ok(render::smart(&controller.smart()?)),
        Action::Errors => Ok(render::errors(&controller.errors()?)),
        Action::Regs => Ok(render::registers(&controller.registers()?)),
        Action::Reset => {
            controller.reset()?;
            Ok(done(device, "reset"))
        }
        Action::SubsystemReset { yes } => {
            confirm(*yes, &format!("{device}: every controller of its subsystem is reset, and loses what was not flushed."))?;
            controller.subsystem_reset()?;
            Ok(done(device, "subsystem reset"))
        }
        Action::Rescan => Ok(render::namespaces(&controller.namespaces()?)),
        Action::Format(_) => unreachable!("it was handled above"),
    }
}

fn open(device: &str) -> Result<Controller, Failure> {
    let name = Path::new(device).file_name().unwrap_or_default().as_encoded_bytes();
    if device.starts_with("/dev/") && (name.starts_with(b"nvme") || name.starts_with(b"ng")) {
        let advice = "nvme(1) of nvme-cli looks after those; `gpunvme-vfio bind` hands a controller over to vfio-pci";
        return Err(Failure(format!("{device}: is driven by the kernel; {advice}, and this takes it as vfio:ADDRESS")));
    }
    Ok(open_controller(device)?)
}

fn run_format(device: &str, format: &Format) -> Result<Report, Failure> {
    let number = format.namespace;
    if !format.force {
        look(device, number)?;
    }
    let controller = open(device)?;
    let info = controller.identify()?;
    let namespaces = controller.namespaces()?;
    let find = |namespaces: &[NamespaceInfo]| namespaces.iter().find(|namespace| namespace.id == number).cloned();
    let namespace = find(&namespaces).ok_or_else(|| Failure(format!("{device}: has no namespace {number}")))?;
    let block_size = format.block_size.unwrap_or(namespace.logical_block);
    let whose = if info.format_all && namespaces.len() > 1 { "all namespaces" } else { "the namespace" };
    let what = format!(
        "{device}: {whose} of {} ({}) will be formatted to blocks of {block_size} bytes, and all data on it will be lost.",
        info.model, info.serial
    );
    confirm(format.yes, &what)?;
    let erase = match format.erase {
        Erasure::None => Erase::No,
        Erasure::UserData => Erase::UserData,
        Erasure::Crypto => Erase::Cryptographic,
    };
    let spinner = ProgressBar::new_spinner().with_message("formatting"); // hidden without a terminal
    spinner.enable_steady_tick(Duration::from_millis(200));
    let formatted = controller.format(number, block_size, erase);
    spinner.finish_and_clear();
    formatted?;
    let namespaces = controller.namespaces()?;
    let namespace = find(&namespaces).ok_or_else(|| Failure(format!("{device}: namespace {number} is gone")))?;
    let mut report = render::namespaces(&[namespace]);
    report.text = format!("{device}: formatted\n{}", report.text);
    Ok(report)
}

/// Has mkfs.gpunvme look whether the namespace carries anything, before the controller is claimed.
fn look(device: &str, namespace: u32) -> Result<(), Failure> {
    let beside = std::env::current_exe().ok().and_then(|path| Some(path.parent()?.join("mkfs.gpunvme")));
    let mkfs = beside.filter(|path| path.exists()).unwrap_or_else(|| PathBuf::from("mkfs.gpunvme"));
    let name = format!("{},ns={namespace}", device.split(',').next().unwrap_or(device));
    let output = Command::new(mkfs).args(["--dry-run", "--quiet", &name]).output();
    let output =
        output.map_err(|error| Failure(format!("{name}: cannot run mkfs.gpunvme to look at it ({error}); see --force")))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Failure(said.trim().trim_start_matches("mkfs.gpunvme: ").to_owned()))
}

/// Asks the user for a yes, unless the command line gave it.
fn confirm(yes: bool, what: &str) -> Result<(), Failure> {
    if yes {
        return Ok(());
    }
    if !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        return Err(Failure(format!("{what} Give --yes if that is meant")));
    }
    let _ = write!(std::io::stderr(), "{what}\nType yes to go on: "); // without a terminal nothing is answered
    std::io::stderr().flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    if answer.trim() == "yes" { Ok(()) } else { Err(Failure("nothing was done".into())) }
}

fn done(device: &str, what: &str) -> Report {
    let mut report = Report::new(json!({ "device": device, "done": what }));
    report.text = format!("{device}: {what}: done\n");
    report
}
