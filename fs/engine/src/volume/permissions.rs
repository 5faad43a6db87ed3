//! Permissions of inodes: keeps an access ACL in step with the permission bits, and passes a
//! directory's default ACL on.

use gpunvme_layout::FileType;

use super::acl::{ACCESS, Acl, DEFAULT};
use super::op::Op;
use super::xattr;
use crate::error::Attempt;

/// Makes an access ACL follow a change of the permission bits.
pub(crate) fn follow_mode(op: &mut Op, ino: u64, mode: u32) -> Attempt<()> {
    if let Some(value) = xattr::get(op, ino, ACCESS)? {
        let mut acl = Acl::parse(&value)?;
        acl.set_mode(mode);
        xattr::set(op, ino, ACCESS, acl.bytes())?;
    }
    Ok(())
}

/// Gives a new inode what its directory's default ACL says, or else applies the umask. Returns the
/// mode that results.
pub(crate) fn inherit(op: &mut Op, parent: u64, ino: u64, mode: u32, umask: u32) -> Attempt<u32> {
    let file_type = FileType::from_mode(mode);
    if file_type == Some(FileType::Symlink) {
        return Ok(mode);
    }
    let Some(value) = xattr::get(op, parent, DEFAULT)? else { return Ok(mode & !(umask & 0o777)) };
    let mut acl = Acl::parse(&value)?;
    acl.set_mode(acl.mode() & mode);
    if !acl.is_minimal() {
        xattr::set(op, ino, ACCESS, acl.bytes())?;
    }
    if file_type == Some(FileType::Directory) {
        xattr::set(op, ino, DEFAULT, &value)?;
    }
    Ok(mode & !0o777 | acl.mode())
}
