//! Loop devices: two names for one device, which the locks of either do not show.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The loop device that has the image file `path` attached.
pub fn attached_to(path: &Path) -> Option<PathBuf> {
    let path = fs::canonicalize(path).ok()?;
    fs::read_dir("/sys/block").ok()?.flatten().find_map(|entry| {
        let backing = read_path(&entry.path().join("loop/backing_file"))?;
        (backing == path).then(|| Path::new("/dev").join(entry.file_name()))
    })
}

/// The image file behind the loop device `path`.
pub fn backing_file(path: &Path) -> Option<PathBuf> {
    let device = fs::metadata(path).ok().filter(|status| status.file_type().is_block_device())?.rdev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    read_path(Path::new(&format!("/sys/dev/block/{major}:{minor}/loop/backing_file")))
}

fn read_path(attribute: &Path) -> Option<PathBuf> {
    let text = fs::read_to_string(attribute).ok()?;
    Some(PathBuf::from(text.trim_end_matches('\n')))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_file_and_its_loop_device_are_found_from_each_other() {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(1 << 20).unwrap();
        let path = image.path().canonicalize().unwrap();
        assert_eq!(attached_to(&path), None);
        assert_eq!(backing_file(&path), None);
        let attached = Command::new("losetup").args(["--find", "--show"]).arg(&path).output();
        let Some(attached) = attached.ok().filter(|output| output.status.success()) else {
            eprintln!("no loop device can be had here");
            return;
        };
        let device = PathBuf::from(String::from_utf8(attached.stdout).unwrap().trim());
        let found = (attached_to(&path), backing_file(&device));
        assert!(Command::new("losetup").arg("--detach").arg(&device).status().unwrap().success());
        assert_eq!(found, (Some(device), Some(path)));
    }
}
