//! The entry of a mount in `/run/mount/utab`, by which umount(8) finds its helper.
//!
//! Where a mount has no entry, umount(8) that root calls with a whole path asks statfs(2) for the
//! type, which is the same for all mounts of FUSE, and looks for `umount.fuse` (util-linux 2.38,
//! `lookup_umount_fs`). With one it asks the mount table, and looks for the helper of that type.

use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::geteuid;

use gpunvme_programs::mounts::Mount;

/// What the entry says: options of this kind are for programs that look at them, and for no other.
const OPTION: &str = "x-gpunvme";

/// Has mount(8) make an entry for the mount on `dir`, a real path, in place of one that an earlier
/// mount left there. umount(8) removes it. There is none where these programs are missing, or may
/// not: the mount is no worse for it.
pub fn note(dir: &Path) {
    let Some(mount) = Mount::on(dir).ok().filter(|mount| mount.is_ours() && geteuid().is_root()) else { return };
    // With this neither mounts or unmounts anything.
    let fake = |program: &str| {
        let mut command = Command::new(program);
        command.args(["--internal-only", "--fake"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    let _ = fake("umount").arg(dir).status();
    let noted = fake("mount").args(["-t", &mount.fs_type, "-o", OPTION]).arg(&mount.source).arg(dir).status();
    if !noted.is_ok_and(|status| status.success()) {
        tracing::debug!("mount(8) made no entry for umount(8)");
    }
}
