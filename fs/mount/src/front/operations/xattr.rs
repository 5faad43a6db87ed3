//! Operations on extended attributes, and which of them a caller may see. The kernel has decided
//! before it asks whether an attribute may be read, set or removed, by its name and the file
//! (`xattr_permission`), except for names that filesystems of Linux do not have.
//!
//! Volumes that earlier versions wrote may have attributes of such names, which any user could
//! store. Root sees them, reads them and removes them; for all others they are not there, and they
//! cannot be set.

use std::sync::Arc;

use rustix::thread::CapabilitySet;

use crate::front::caller::Caller;
use crate::front::shared::Front;
use gpunvme_engine::data::Filesystem;
use gpunvme_engine::error::{Attempt, FsError};
use gpunvme_engine::volume::{ACL_ACCESS, SetAttributes, check_xattr_name};

impl Front {
    /// The value of an extended attribute.
    pub fn get_xattr(
        self: &Arc<Self>,
        caller: Caller,
        ino: u64,
        name: &[u8],
        done: impl FnOnce(Result<Vec<u8>, FsError>) + Send + 'static,
    ) {
        let missing = match missing(&caller, name) {
            Ok(missing) => missing,
            Err(error) => return done(Err(error)),
        };
        let name = name.to_vec();
        self.attempt(caller.owner(), move |fs| fs.get_xattr(ino, &name), move |_, found| done(or_missing(found, missing)));
    }

    /// The names of the extended attributes that the caller may see, each with a zero byte after
    /// it.
    pub fn list_xattrs(self: &Arc<Self>, caller: Caller, ino: u64, done: impl FnOnce(Result<Vec<u8>, FsError>) + Send + 'static) {
        self.attempt(
            caller.owner(),
            move |fs| fs.list_xattrs(ino),
            move |_, names| done(names.map(|names| visible(&caller, names))),
        );
    }

    /// Sets an extended attribute. `drop_sgid`: whether the set-group-id bit goes with a new ACL,
    /// as the kernel says; an older one does not say.
    pub fn set_xattr(
        self: &Arc<Self>,
        caller: Caller,
        ino: u64,
        (name, value): (&[u8], &[u8]),
        flags: i32,
        drop_sgid: Option<bool>,
        done: impl FnOnce(Result<(), FsError>) + Send + 'static,
    ) {
        let (name, value) = (name.to_vec(), value.to_vec());
        let (create, replace) = (flags & libc::XATTR_CREATE != 0, flags & libc::XATTR_REPLACE != 0);
        let mut is_set = false;
        self.attempt(
            caller.owner(),
            move |fs| {
                // Once: what is set is there when this is attempted again.
                if !is_set {
                    fs.set_xattr(&caller.context, ino, &name, &value, create, replace)?;
                    is_set = true;
                }
                if name == ACL_ACCESS { drop_set_group_id(fs, &caller, ino, drop_sgid) } else { Ok(()) }
            },
            |_, set| done(set),
        );
    }

    /// Removes an extended attribute.
    pub fn remove_xattr(
        self: &Arc<Self>,
        caller: Caller,
        ino: u64,
        name: &[u8],
        done: impl FnOnce(Result<(), FsError>) + Send + 'static,
    ) {
        let missing = match missing(&caller, name) {
            Ok(missing) => missing,
            Err(error) => return done(Err(error)),
        };
        let name = name.to_vec();
        self.attempt(
            caller.owner(),
            move |fs| fs.remove_xattr(&caller.context, ino, &name),
            move |_, removed| done(or_missing(removed, missing)),
        );
    }
}

/// The error where there is no attribute of this name. Fails where the caller must not learn
/// whether there is one.
fn missing(caller: &Caller, name: &[u8]) -> Result<FsError, FsError> {
    match check_xattr_name(name) {
        Ok(()) => Ok(FsError::NoData),
        Err(error) if caller.context.uid == 0 => Ok(error),
        Err(error) => Err(error),
    }
}

fn or_missing<T>(found: Result<T, FsError>, missing: FsError) -> Result<T, FsError> {
    found.map_err(|error| if matches!(error, FsError::NoData) { missing } else { error })
}

/// The names that the caller may see. The kernel shows all that it is given.
fn visible(caller: &Caller, names: Vec<u8>) -> Vec<u8> {
    let is_for_root = |name: &[u8]| name.starts_with(b"trusted.") || check_xattr_name(name).is_err();
    let each = || names.split_inclusive(|byte| *byte == 0).map(|name| (name, is_for_root(&name[..name.len() - 1])));
    if !each().any(|(_, is_for_root)| is_for_root) || caller.has(CapabilitySet::SYS_ADMIN) {
        return names;
    }
    each().filter(|(_, is_for_root)| !is_for_root).flat_map(|(name, _)| name).copied().collect()
}

/// Clears the set-group-id bit of a file when its permissions are set through its ACL and the
/// caller is not in its group, nor may keep the bit (`posix_acl_update_mode`). Where the kernel
/// does not say whether that is so, the caller's groups are looked up.
fn drop_set_group_id(fs: &Filesystem, caller: &Caller, ino: u64, said: Option<bool>) -> Attempt<()> {
    let inode = fs.attributes(ino)?.inode;
    if inode.mode & libc::S_ISGID != 0 && said.unwrap_or_else(|| !caller.is_in_group(inode.gid)) {
        let bits_gone = libc::S_ISGID;
        fs.set_attributes(&caller.context, ino, &SetAttributes { bits_gone, ..SetAttributes::default() })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_nobody_can_set_any_more_are_there_for_root_only() {
        let root = Caller::now(0, 0, 0);
        let user = Caller::now(4711, 4711, 0);
        let names = b"user.a\0bogus.x\0trusted.t\0system.foo\0user.\0security.s\0system.posix_acl_access\0";
        assert_eq!(visible(&root, names.to_vec()), names);
        assert_eq!(visible(&user, names.to_vec()), b"user.a\0security.s\0system.posix_acl_access\0");
        assert!(matches!(missing(&root, b"bogus.x"), Ok(FsError::NotSupported)));
        assert!(matches!(missing(&root, b"user."), Ok(FsError::Invalid(_))));
        assert!(matches!(missing(&user, b"bogus.x"), Err(FsError::NotSupported)));
        assert!(matches!(missing(&user, b"user.a"), Ok(FsError::NoData)));
    }
}
