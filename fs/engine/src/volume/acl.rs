//! POSIX ACLs in their stored form, that of linux/posix_acl_xattr.h, version 2. The kernel checks
//! access; a filesystem keeps ACLs in step with the permission bits, and passes a directory's
//! default ACL on ([`super::permissions`]).

use crate::error::FsError;

/// The attribute that holds the ACL of a file.
pub const ACCESS: &[u8] = b"system.posix_acl_access";
/// The attribute that holds the ACL that new files of a directory get.
pub(super) const DEFAULT: &[u8] = b"system.posix_acl_default";
const VERSION: [u8; 4] = [2, 0, 0, 0];
const ENTRY: usize = 8;

const USER_OBJ: u16 = 0x01;
const GROUP_OBJ: u16 = 0x04;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;
const TAGS: [u16; 6] = [USER_OBJ, 0x02, GROUP_OBJ, 0x08, MASK, OTHER];

/// An ACL in its stored form, checked.
pub(super) struct Acl(Vec<u8>);

impl Acl {
    /// Checks an ACL.
    pub fn parse(value: &[u8]) -> Result<Acl, FsError> {
        let invalid = FsError::Invalid("malformed ACL");
        let Some(entries) = value.strip_prefix(&VERSION).filter(|e| e.len() % ENTRY == 0) else { return Err(invalid) };
        let acl = Acl(value.to_vec());
        let known = entries.chunks(ENTRY).all(|e| TAGS.contains(&u16::from_le_bytes([e[0], e[1]])) && e[2] <= 7 && e[3] == 0);
        let complete = [USER_OBJ, GROUP_OBJ, OTHER].iter().all(|tag| acl.permissions(*tag).is_some());
        if known && complete { Ok(acl) } else { Err(invalid) }
    }

    /// Its stored form.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn permissions(&self, tag: u16) -> Option<u32> {
        self.0[4..].chunks(ENTRY).find(|e| e[..2] == tag.to_le_bytes()).map(|e| u32::from(e[2]))
    }

    fn set_permissions(&mut self, tag: u16, permissions: u32) {
        if let Some(entry) = self.0[4..].chunks_mut(ENTRY).find(|e| e[..2] == tag.to_le_bytes()) {
            entry[2] = permissions as u8;
        }
    }

    /// The entry that the group bits of a mode stand for.
    fn group_class(&self) -> u16 {
        if self.permissions(MASK).is_some() { MASK } else { GROUP_OBJ }
    }

    /// The permission bits that the ACL amounts to.
    pub fn mode(&self) -> u32 {
        let bits = |tag| self.permissions(tag).unwrap_or(0);
        bits(USER_OBJ) << 6 | bits(self.group_class()) << 3 | bits(OTHER)
    }

    /// Makes the ACL amount to these permission bits.
    pub fn set_mode(&mut self, mode: u32) {
        self.set_permissions(USER_OBJ, mode >> 6 & 7);
        self.set_permissions(self.group_class(), mode >> 3 & 7);
        self.set_permissions(OTHER, mode & 7);
    }

    /// Whether it says nothing that permission bits cannot say.
    pub fn is_minimal(&self) -> bool {
        self.0.len() == 4 + 3 * ENTRY
    }
}

/// Whether an attribute of this name is an ACL.
pub(crate) fn is_acl(name: &[u8]) -> bool {
    name == ACCESS || name == DEFAULT
}

/// Effect of setting an attribute besides storing it.
pub(crate) enum Effect {
    /// Nothing: it is no ACL that the permission bits follow.
    None,
    /// It changes the mode; it is stored only when it says more than the mode can.
    Mode {
        /// The new mode.
        mode: u32,
        /// Whether the attribute itself is stored.
        store: bool,
    },
}

/// Effect of setting this attribute on the mode of its inode.
pub(crate) fn mode_of(name: &[u8], value: &[u8], mode: u32, is_dir: bool) -> Result<Effect, FsError> {
    if name == DEFAULT {
        Acl::parse(value)?;
        return if is_dir { Ok(Effect::None) } else { Err(FsError::NotPermitted("only directories have a default ACL")) };
    }
    if name != ACCESS {
        return Ok(Effect::None);
    }
    let acl = Acl::parse(value)?;
    Ok(Effect::Mode { mode: mode & !0o777 | acl.mode(), store: !acl.is_minimal() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn acl(entries: &[(u16, u8)]) -> Vec<u8> {
        let mut value = VERSION.to_vec();
        for (tag, permissions) in entries {
            value.extend(tag.to_le_bytes());
            value.extend([*permissions, 0, 0xff, 0xff, 0xff, 0xff]);
        }
        value
    }

    #[test]
    fn the_mode_follows_the_acl_and_the_group_bits_stand_for_the_mask() {
        let minimal = acl(&[(USER_OBJ, 6), (GROUP_OBJ, 4), (OTHER, 0)]);
        let Ok(Effect::Mode { mode, store: false }) = mode_of(ACCESS, &minimal, 0o100777, false) else { panic!() };
        assert_eq!(mode, 0o100640);
        let extended = acl(&[(USER_OBJ, 6), (2, 7), (GROUP_OBJ, 4), (MASK, 5), (OTHER, 1)]);
        let Ok(Effect::Mode { mode, store: true }) = mode_of(ACCESS, &extended, 0o104000, false) else { panic!() };
        assert_eq!(mode, 0o104651);
    }

    #[test]
    fn malformed_acls_are_refused() {
        for bad in
            [vec![], vec![2, 0, 0, 0], acl(&[(USER_OBJ, 6)]), acl(&[(USER_OBJ, 9), (GROUP_OBJ, 4), (OTHER, 0)]), vec![9; 28]]
        {
            assert!(mode_of(ACCESS, &bad, 0, false).is_err(), "{bad:?}");
        }
    }
}
