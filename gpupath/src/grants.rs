//! Grants: numbers that show what a process has a file open for, so that its descriptor need not be
//! looked at for each transfer, and can be shown over the socket where it cannot be looked at.
//!
//! It guards what [`crate::access`] guards, with no table: a grant is a keyed hash of the process,
//! the file and the access, of which the access is the lowest bits. The number of an inode and the
//! identity of a process are never used again, so a grant can never mean another file or process.

use crate::access::Access;
use crate::process::Identity;
use rustix::io::Errno;
use rustix::rand::GetRandomFlags;
use siphasher::sip::SipHasher24;
use std::hash::{Hash, Hasher};

/// The grants of one mount.
#[derive(Debug)]
pub(crate) struct Grants {
    key: [u8; 16],
}

impl Grants {
    /// Grants that none given before is one of.
    ///
    /// # Errors
    /// When the kernel gives no random numbers.
    pub fn new() -> Result<Grants, Errno> {
        let mut key = [0; 16];
        // So few are never given in parts (getrandom(2)).
        rustix::rand::getrandom(&mut key[..], GetRandomFlags::empty())?;
        Ok(Grants { key })
    }

    /// The grant of this access to a file; 0, which is none, where the access is none.
    pub fn give(&self, process: Identity, ino: u64, access: Access) -> u64 {
        if access.is_empty() {
            return 0;
        }
        let mut hasher = SipHasher24::new_with_key(&self.key);
        (process, ino, access).hash(&mut hasher);
        hasher.finish() & !Access::all().bits() | access.bits()
    }

    /// The access that a process shows with a grant to a file; none where it is not its grant.
    pub fn check(&self, grant: u64, process: Identity, ino: u64) -> Option<Access> {
        let access = Access::from_bits_truncate(grant);
        (grant != 0 && grant == self.give(process, ino, access)).then_some(access)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::Process;

    #[test]
    fn a_grant_is_good_for_its_process_file_and_access_alone() {
        let (grants, others) = (Grants::new().unwrap(), Grants::new().unwrap());
        let own = Process::open(std::process::id()).unwrap().identity();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let other = Process::open(child.id()).unwrap().identity();
        child.kill().unwrap();
        child.wait().unwrap();
        for access in [Access::READ, Access::WRITE, Access::READ | Access::WRITE, Access::all()] {
            let grant = grants.give(own, 5, access);
            assert_eq!(grants.check(grant, own, 5), Some(access));
            let wrong = [grants.check(grant, other, 5), grants.check(grant, own, 6), others.check(grant, own, 5)];
            assert_eq!(wrong, [None; 3]);
            for bit in 0..64 {
                assert_eq!(grants.check(grant ^ 1 << bit, own, 5), None, "bit {bit}");
            }
        }
        assert_eq!((grants.give(own, 5, Access::empty()), grants.check(0, own, 5)), (0, None));
    }
}
