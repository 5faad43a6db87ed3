//! The command line of mount.gpunvme, with the options that mount(8) passes on.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Parser;
use gpunvme_blockdev::path_of;
use gpunvme_programs::completions::{Completions, Printed};
use gpunvme_programs::mounts::{BLOCK_FS_TYPE, FS_TYPE};
use gpunvme_programs::tag;
use rustix::mount::MountFlags;

use super::error::MountError;
use super::settings::{Partial, Settings};

/// Mounts a gpunvme volume. Usually called by mount(8): mount -t gpunvme DEVICE DIR
#[derive(Debug, Parser)]
#[command(name = "mount.gpunvme", bin_name = "mount.gpunvme", version)]
#[allow(clippy::struct_excessive_bools, reason = "they are mount(8)'s flags")]
struct Arguments {
    /// A block device, image file or NVMe controller (vfio:0000:01:00.0) that mkfs.gpunvme has
    /// formatted; or LABEL=... or UUID=... of a volume on block devices
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    device: String,
    /// The directory to mount it on
    dir: PathBuf,
    /// Mount options, separated by commas; mount.gpunvme(8) lists them
    #[arg(short = 'o', value_name = "OPTIONS")]
    options: Vec<String>,
    /// Mount read-only, as -o ro
    #[arg(short = 'r', conflicts_with = "writable")]
    read_only: bool,
    /// Mount writable, as -o rw
    #[arg(short = 'w')]
    writable: bool,
    /// Stay in the foreground and log to stderr
    #[arg(long)]
    foreground: bool,
    /// Ignore unknown options
    #[arg(short = 's')]
    sloppy: bool,
    /// Check everything, but mount nothing
    #[arg(short = 'f')]
    fake: bool,
    /// Accepted for mount(8): there is no mtab to leave alone
    #[arg(short = 'n')]
    _no_mtab: bool,
    /// Say what was mounted
    #[arg(short = 'v')]
    verbose: bool,
    /// The mount namespace to work in: a process id or the path of a namespace
    #[arg(short = 'N', value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// The filesystem type: gpunvme, or what Linux lists: fuse.gpunvme, fuseblk.gpunvme
    #[arg(short = 't', value_name = "TYPE")]
    fs_type: Option<String>,
    /// Print what a shell needs to complete this command line
    #[arg(long, value_name = "SHELL", value_parser = Completions)]
    completions: Option<Printed>,
}

/// Complete options of one mount.
#[derive(Clone, Debug)]
pub struct Options {
    /// The device as the caller named it, or the file's real path: the kernel shows it as the
    /// mount's source, so that `umount DEVICE` and `mount -a` find it again.
    pub device: String,
    /// The other devices of the volume, where the caller named them.
    pub others: Vec<String>,
    /// The directory to mount on, as the caller named it.
    pub dir: PathBuf,
    /// Settings of the daemon.
    pub settings: Settings,
    /// Those of them that the command line has.
    pub asked: Partial,
    /// The kernel's flags of the mount (`nodev`, `nosuid`, ...), without `ro`.
    pub flags: MountFlags,
    /// Stay in the foreground and log to stderr.
    pub foreground: bool,
    /// Change the flags of an existing mount; settings of the daemon stay what they are.
    pub remount: bool,
    /// Check everything, but mount nothing.
    pub fake: bool,
    /// Say what was mounted.
    pub verbose: bool,
    /// The mount namespace to work in: a process id or the path of a namespace.
    pub namespace: Option<String>,
}

/// Request of a command line: a mount, or a text on stdout (`--help`, `--version`).
#[derive(Debug)]
pub enum Command {
    /// Mount.
    Mount(Box<Options>),
    /// Print this and be done.
    Print(String),
}

/// A command line that is wrong.
#[derive(Debug)]
pub struct UsageError {
    /// The device, as far as it was understood.
    pub device: Option<String>,
    /// The error.
    pub error: MountError,
}

impl Command {
    /// Parses a command line, `args[0]` being the program's name, and reads the configuration file
    /// that it names.
    ///
    /// # Errors
    /// An argument or option that does not exist or has a value that it cannot have, by its name.
    pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Self, UsageError> {
        let arguments = match Arguments::try_parse_from(args) {
            Ok(arguments) => arguments,
            Err(error) if !error.use_stderr() => return Ok(Self::Print(error.to_string())),
            Err(error) => {
                let text = error.to_string();
                let text = text.strip_prefix("error: ").unwrap_or(&text).trim_end().to_owned();
                return Err(UsageError { device: None, error: MountError::Usage(text) });
            }
        };
        let device = arguments.device.clone();
        Options::from_arguments(arguments)
            .map(|options| Self::Mount(Box::new(options)))
            .map_err(|error| UsageError { device: Some(device), error })
    }
}

impl Options {
    fn from_arguments(arguments: Arguments) -> Result<Self, MountError> {
        if let Some(fs_type) = &arguments.fs_type
            && !["gpunvme", FS_TYPE, BLOCK_FS_TYPE].contains(&fs_type.as_str())
        {
            return Err(MountError::Usage(format!("this mounts type gpunvme, not {fs_type}")));
        }
        let mut list = OptionList::default();
        for options in &arguments.options {
            list.add(options, arguments.sloppy)?;
        }
        if arguments.read_only || arguments.writable {
            list.partial.ro = Some(arguments.read_only);
        }
        let config = Partial::from_config(list.config.as_deref())?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let settings = list.partial.clone().over(config).complete(rustix::process::geteuid().is_root(), cores)?;
        // A remount is one of what is on the directory, whatever its device is called.
        let device = match list.remount {
            true => arguments.device,
            false => tag::device_of(&arguments.device).map_err(MountError::Failed)?.into_owned(),
        };
        Ok(Self {
            device: source_name(device),
            others: list.others,
            dir: arguments.dir,
            settings,
            asked: list.partial,
            flags: list.flags,
            foreground: arguments.foreground || list.foreground,
            remount: list.remount,
            fake: arguments.fake,
            verbose: arguments.verbose,
            namespace: arguments.namespace,
        })
    }
}

/// A path is made absolute and free of links, as mount(8) does it, also the one that a software
/// controller keeps its data in.
fn source_name(device: String) -> String {
    let real = path_of(&device).and_then(|path| {
        let real = std::fs::canonicalize(path).ok()?;
        // The path is UTF-8 and so lies in the text once, between what says how to use it.
        Some(device.replacen(path.to_str()?, real.to_str()?, 1))
    });
    real.unwrap_or(device)
}

/// Collected `-o` options; of several values for one option the last counts.
#[derive(Debug)]
struct OptionList {
    partial: Partial,
    flags: MountFlags,
    config: Option<PathBuf>,
    others: Vec<String>,
    foreground: bool,
    remount: bool,
}

impl Default for OptionList {
    fn default() -> Self {
        Self {
            partial: Partial::default(),
            flags: MountFlags::empty(),
            config: None,
            others: Vec::new(),
            foreground: false,
            remount: false,
        }
    }
}

/// Options that are flags of the mount in the kernel: name, bits that it sets, bits that it
/// clears.
///
/// The kernel keeps no access times for a FUSE mount, so those flags only show; they are taken
/// because fstab has them.
const FLAGS: &[(&str, MountFlags, MountFlags)] = {
    const NONE: MountFlags = MountFlags::empty();
    &[
        ("dev", NONE, MountFlags::NODEV),
        ("nodev", MountFlags::NODEV, NONE),
        ("suid", NONE, MountFlags::NOSUID),
        ("nosuid", MountFlags::NOSUID, NONE),
        ("exec", NONE, MountFlags::NOEXEC),
        ("noexec", MountFlags::NOEXEC, NONE),
        ("sync", MountFlags::SYNCHRONOUS, NONE),
        ("async", NONE, MountFlags::SYNCHRONOUS),
        ("dirsync", MountFlags::DIRSYNC, NONE),
        ("atime", NONE, MountFlags::NOATIME),
        ("noatime", MountFlags::NOATIME, MountFlags::RELATIME.union(MountFlags::STRICTATIME)),
        ("relatime", MountFlags::RELATIME, MountFlags::NOATIME.union(MountFlags::STRICTATIME)),
        ("norelatime", NONE, MountFlags::RELATIME),
        ("strictatime", MountFlags::STRICTATIME, MountFlags::NOATIME.union(MountFlags::RELATIME)),
        ("nostrictatime", NONE, MountFlags::STRICTATIME),
        ("diratime", NONE, MountFlags::NODIRATIME),
        ("nodiratime", MountFlags::NODIRATIME, NONE),
        ("lazytime", MountFlags::LAZYTIME, NONE),
        ("nolazytime", NONE, MountFlags::LAZYTIME),
        ("symfollow", NONE, MountFlags::NOSYMFOLLOW),
        ("nosymfollow", MountFlags::NOSYMFOLLOW, NONE),
        ("silent", MountFlags::SILENT, NONE),
        ("loud", NONE, MountFlags::SILENT),
    ]
};

/// Options of fstab(5) that speak to mount(8), systemd and the like, not to us. Permissions are
/// always checked by the kernel.
const USERSPACE: &str =
    "defaults auto noauto nofail _netdev owner noowner group nogroup user nouser users nousers default_permissions";

impl OptionList {
    fn add(&mut self, options: &str, sloppy: bool) -> Result<(), MountError> {
        for option in split(options) {
            let (name, value) = match option.split_once('=') {
                Some((name, value)) => (name, Some(unquote(value))),
                None => (option, None),
            };
            if !self.set(name, value)? && !sloppy {
                let why = format!("unknown option {name:?} (mount.gpunvme(8) lists them; -s ignores unknown ones)");
                return Err(MountError::Usage(why));
            }
        }
        Ok(())
    }

    /// Takes one option; false if there is none of this name.
    fn set(&mut self, name: &str, value: Option<&str>) -> Result<bool, MountError> {
        let needed = || value.ok_or_else(|| MountError::Usage(format!("option {name:?} needs a value: {name}=...")));
        let invalid = |why: String| MountError::Usage(format!("option {name:?}: {why}"));
        let number = |text: &str| text.parse().map_err(|_| invalid(format!("{text:?} is not a number")));
        match name {
            "cache" => self.partial.cache = Some(needed()?.parse().map_err(invalid)?),
            "write_buffer" => self.partial.write_buffer = Some(needed()?.parse().map_err(invalid)?),
            "threads" => self.partial.threads = Some(number(needed()?)? as usize),
            "transport" => self.partial.transport = Some(needed()?.parse().map_err(invalid)?),
            "commit" => self.partial.commit = Some(number(needed()?)?),
            "log" => self.partial.log = Some(needed()?.to_owned()),
            // The mount table has these, and mount(8) hands them on when it remounts.
            "user_id" | "group_id" | "blksize" if value.is_some() => {}
            "device" => self.others.push(needed()?.to_owned()),
            "config" => self.config = Some(PathBuf::from(needed()?)),
            _ if name.starts_with("x-") || name.starts_with("X-") || name == "comment" || name == "uhelper" => {}
            _ if value.is_some() => return Ok(false),
            "ro" => self.partial.ro = Some(true),
            "rw" => self.partial.ro = Some(false),
            "allow_other" => self.partial.allow_other = Some(true),
            "noallow_other" => self.partial.allow_other = Some(false),
            "discard" => self.partial.discard = Some(true),
            "nodiscard" => self.partial.discard = Some(false),
            "foreground" => self.foreground = true,
            "remount" => self.remount = true,
            "" => {}
            _ if USERSPACE.split(' ').any(|word| word == name) => {}
            _ => match FLAGS.iter().find(|flag| flag.0 == name) {
                Some(&(_, set, clear)) => self.flags = self.flags.difference(clear).union(set),
                None => return Ok(false),
            },
        }
        Ok(true)
    }
}

/// Splits at commas, but for those between double quotes: `log="info,gpunvme_fuse=debug",ro`.
fn split(options: &str) -> impl Iterator<Item = &str> {
    let mut quoted = false;
    options.split(move |c| {
        quoted ^= c == '"';
        c == ',' && !quoted
    })
}

fn unquote(value: &str) -> &str {
    value.strip_prefix('"').and_then(|inner| inner.strip_suffix('"')).unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::settings::Transport;
    use super::*;

    fn parse(args: &[&str]) -> Result<Options, UsageError> {
        let args = ["mount.gpunvme"].iter().chain(args).map(OsString::from);
        match Command::parse(args)? {
            Command::Mount(options) => Ok(*options),
            Command::Print(text) => panic!("printed {text}"),
        }
    }

    fn refused(args: &[&str]) -> String {
        let refusal = parse(args).unwrap_err();
        assert_eq!(refusal.error.exit_code(), 1);
        refusal.error.to_string()
    }

    #[test]
    fn takes_what_mount_passes() {
        assert!(parse(&["disk.img", "/data", "-r"]).unwrap().settings.read_only);
        assert!(!parse(&["disk.img", "/data", "-o", "ro", "-w"]).unwrap().settings.read_only);
        assert!(parse(&["disk.img", "/data", "-r", "-w"]).is_err());
        let options = parse(&["vfio:0000:01:00.0", "/data", "-n", "-s", "-f", "-v", "-o", "rw", "-t", "gpunvme"]).unwrap();
        assert_eq!(options.device, "vfio:0000:01:00.0");
        assert_eq!(options.dir, PathBuf::from("/data"));
        assert!(options.fake && options.verbose && !options.foreground);
        assert!(!options.settings.read_only);
        let options = parse(&["dev", "/data", "-sfnv", "-N", "/proc/1/ns/mnt"]).unwrap();
        assert_eq!(options.namespace.as_deref(), Some("/proc/1/ns/mnt"));
    }

    #[test]
    fn own_options_reach_the_settings() {
        let list = "ro,noallow_other,cache=1G,write_buffer=32M,threads=3,transport=classic,commit=7,discard,log=\"info,gpunvme_fuse=debug\",foreground";
        let options = parse(&["dev", "/data", "-o", list]).unwrap();
        assert_eq!(
            options.settings,
            Settings {
                read_only: true,
                allow_other: false,
                cache: 1 << 30,
                write_buffer: 32 << 20,
                threads: 3,
                transport: Transport::Classic,
                commit: Duration::from_secs(7),
                discard: true,
                log: "info,gpunvme_fuse=debug".to_owned(),
            }
        );
        assert!(options.foreground);
    }

    #[test]
    fn a_remount_takes_what_the_mount_table_says() {
        let list = "rw,nosuid,nodev,relatime,user_id=0,group_id=0,default_permissions,allow_other,blksize=4096,remount,ro";
        let options = parse(&["dev", "/data", "-o", list]).unwrap();
        assert!(options.remount && options.settings.read_only);
        assert!(options.flags.contains(MountFlags::NOSUID | MountFlags::NODEV));
    }

    #[test]
    fn the_last_word_wins() {
        let options = parse(&["dev", "/data", "-o", "ro,noexec,commit=3", "-o", "rw,exec,commit=4"]).unwrap();
        assert!(!options.settings.read_only);
        assert!(options.flags.is_empty());
        assert_eq!(options.settings.commit, Duration::from_secs(4));
        let options = parse(&["dev", "/data", "-o", "noatime,relatime"]).unwrap();
        assert_eq!(options.flags, MountFlags::RELATIME);
    }

    #[test]
    fn kernel_flags_are_collected_and_userspace_options_ignored() {
        let list = "defaults,noauto,nofail,_netdev,user,x-systemd.requires=network.target,comment=mine,nodev,nosuid,noexec,noatime,nosymfollow";
        let options = parse(&["dev", "/data", "-o", list]).unwrap();
        let flags = MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC | MountFlags::NOATIME;
        let expected = flags | MountFlags::NOSYMFOLLOW;
        assert_eq!(options.flags, expected);
    }

    #[test]
    fn the_command_line_wins_over_the_configuration_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "commit = 30\nthreads = 9\nro = true\n").unwrap();
        let list = format!("config={},threads=2,rw", file.path().display());
        let options = parse(&["dev", "/data", "-o", &list]).unwrap();
        assert_eq!(options.settings.threads, 2);
        assert!(!options.settings.read_only);
        assert_eq!(options.settings.commit, Duration::from_secs(30));
    }

    #[test]
    fn unknown_options_are_refused_by_name_unless_sloppy() {
        assert!(refused(&["dev", "/data", "-o", "ro,journal=off"]).starts_with("unknown option \"journal\""));
        assert!(refused(&["dev", "/data", "-o", "ro=yes"]).starts_with("unknown option \"ro\""));
        assert!(parse(&["dev", "/data", "-s", "-o", "ro,journal=off"]).unwrap().settings.read_only);
    }

    #[test]
    fn wrong_values_are_refused_even_if_sloppy() {
        assert_eq!(refused(&["dev", "/data", "-s", "-o", "cache"]), "option \"cache\" needs a value: cache=...");
        assert!(refused(&["dev", "/data", "-s", "-o", "cache=big"]).starts_with("option \"cache\": \"big\" is not a size"));
        assert_eq!(refused(&["dev", "/data", "-o", "commit=x"]), "option \"commit\": \"x\" is not a number");
        assert!(refused(&["dev", "/data", "-o", "threads=0"]).starts_with("threads=0 is out of range"));
        assert!(refused(&["dev", "/data", "-t", "ext4"]).contains("not ext4"));
        assert!(refused(&["dev"]).contains("<DIR>"));
    }

    #[test]
    fn paths_become_real_paths() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().canonicalize().unwrap().join("image");
        std::fs::write(&image, "").unwrap();
        std::os::unix::fs::symlink("image", dir.path().join("link")).unwrap();
        let options = parse(&[dir.path().join("link").to_str().unwrap(), "/data"]).unwrap();
        assert_eq!(options.device, image.to_str().unwrap());
        let options = parse(&[&format!("sim:{}/link,ns=2", dir.path().display()), "/data"]).unwrap();
        assert_eq!(options.device, format!("sim:{},ns=2", image.display()));
    }
}
