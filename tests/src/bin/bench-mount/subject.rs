//! The filesystems that are measured: set up together, each on a loop device with direct I/O, and
//! taken down together.

use std::convert::Infallible;
use std::error::Error;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

use gpunvme_tests::mounted::is_mounted;
use gpunvme_tests::peers::{Kind, LoopMounted, run, write_whole};
use gpunvme_tests::programs;
use tempfile::TempDir;

/// A gpunvme as `--also` says it: `NAME[=FOLDER][:OPTIONS]`.
#[derive(Clone)]
pub struct Other {
    name: String,
    /// The folder of its programs, where it is another build.
    folder: Option<PathBuf>,
    /// Mount options.
    options: String,
}

impl FromStr for Other {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        let (rest, options) = text.split_once(':').unwrap_or((text, ""));
        let (name, folder) = rest.split_once('=').map_or((rest, None), |(name, folder)| (name, Some(folder.into())));
        Ok(Self { name: name.into(), folder, options: options.into() })
    }
}

/// All subjects, ready. ext4 is the first. Dropping it unmounts and removes everything.
pub struct Subjects {
    gpunvme: Vec<(String, Volume)>,
    ext4: LoopMounted,
    scratch: TempDir,
}

impl Subjects {
    /// Makes images of so many bytes, formats and mounts them.
    pub fn set_up(others: Vec<Other>, len: u64) -> Result<Self, Box<dyn Error>> {
        let scratch = gpunvme_tests::scratch_dir();
        // The database has a user of its own.
        fs::set_permissions(scratch.path(), Permissions::from_mode(0o755))?;
        let image = |name: &str| {
            let image = scratch.path().join(name);
            write_whole(&image, len).map(|()| image)
        };
        let ext4 = LoopMounted::set_up(&image("ext4")?, Kind::Ext4)?;
        let mut gpunvme = Vec::new();
        let this = Other { name: "gpunvme".into(), folder: None, options: String::new() };
        for other in std::iter::once(this).chain(others) {
            let volume = Volume::set_up(&image(&other.name)?, &other).map_err(|error| format!("{}: {error}", other.name))?;
            gpunvme.push((other.name, volume));
        }
        Ok(Self { gpunvme, ext4, scratch })
    }

    /// Each subject's name and root.
    pub fn all(&self) -> impl Iterator<Item = (&str, &Path)> {
        let ours = self.gpunvme.iter().map(|(name, volume)| (name.as_str(), volume.root.as_path()));
        std::iter::once(("ext4", self.ext4.root.as_path())).chain(ours)
    }

    /// The folder that holds the images.
    pub fn scratch(&self) -> &Path {
        self.scratch.path()
    }
}

/// A mounted volume on a loop device.
struct Volume {
    root: PathBuf,
    device: String,
}

impl Volume {
    fn set_up(image: &Path, other: &Other) -> Result<Self, Box<dyn Error>> {
        let program = |name: &str| other.folder.as_ref().map_or_else(|| programs::path(name), |folder| folder.join(name));
        let device = run(Command::new("losetup").args(["--find", "--show", "--direct-io=on"]).arg(image))?.trim().to_owned();
        let volume = Self { root: image.with_extension("mnt"), device };
        fs::create_dir(&volume.root)?;
        run(Command::new(program("mkfs.gpunvme")).arg(&volume.device))?;
        let mut mount = Command::new(program("mount.gpunvme"));
        mount.arg(&volume.device).arg(&volume.root);
        if !other.options.is_empty() {
            mount.args(["-o", &other.options]);
        }
        run(&mut mount)?;
        Ok(volume)
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        if is_mounted(&self.root) {
            let _ = Command::new("umount").arg(&self.root).status();
        }
        // The device goes when the daemon, which may still write, has closed it.
        let _ = Command::new("losetup").args(["--detach", &self.device]).status();
    }
}
