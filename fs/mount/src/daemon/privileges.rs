//! The privileges that the daemon keeps, out of all that root has.

use std::io;

use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set, remove_capability_from_bounding_set,
    set_capabilities, set_no_new_privs,
};

/// Capabilities that the daemon needs, each for a reason:
/// - `SYS_ADMIN`: mount, and unmount at a signal;
/// - `SYS_PTRACE`: take the descriptor of a buffer out of the client that registers it
///   (pidfd_getfd(2));
/// - `IPC_LOCK`: memory that devices write to is pinned, beyond what RLIMIT_MEMLOCK allows;
/// - `DAC_OVERRIDE`, `DAC_READ_SEARCH`: open a device or mount point below directories of other
///   users.
const NEEDED: CapabilitySet = CapabilitySet::SYS_ADMIN
    .union(CapabilitySet::SYS_PTRACE)
    .union(CapabilitySet::IPC_LOCK)
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH);

/// Gives up what is not needed, for good: no program that it could start would have more either.
/// Must be called before the process starts threads: each has privileges of its own, and inherits
/// those of its maker.
///
/// A daemon that is not root's has nothing to give up, and needs the set-user-id program
/// fusermount3 to unmount.
///
/// # Errors
/// If the kernel does not know capabilities.
pub fn drop_unneeded() -> io::Result<()> {
    if is_unprivileged() {
        return Ok(());
    }
    let held = capabilities(None)?;
    // Those that programs get, all of them: the daemon starts none.
    for number in 0..u64::BITS {
        match remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << number)) {
            Ok(()) => {}
            // Beyond the last that the kernel knows.
            Err(Errno::INVAL) => break,
            // Of a root that has little, in a container.
            Err(Errno::PERM) => break,
            Err(error) => return Err(error.into()),
        }
    }
    clear_ambient_capability_set()?;
    set_capabilities(
        None,
        CapabilitySets {
            effective: held.effective & NEEDED,
            permitted: held.permitted & NEEDED,
            inheritable: CapabilitySet::empty(),
        },
    )?;
    Ok(set_no_new_privs(true)?)
}

/// Whether this is a user's daemon, which can do no more than the user.
pub fn is_unprivileged() -> bool {
    !rustix::process::geteuid().is_root()
}

#[cfg(test)]
mod tests {
    use rustix::thread::{capability_is_in_bounding_set, no_new_privs};

    use super::*;

    #[test]
    fn what_was_dropped_cannot_be_had_again() {
        // In a thread of its own: the privileges are the thread's, and other tests keep theirs.
        let (before, after, again) = std::thread::spawn(|| {
            let before = capabilities(None).unwrap();
            drop_unneeded().unwrap();
            if !is_unprivileged() {
                assert!(no_new_privs().unwrap());
                let setpcap = before.effective.contains(CapabilitySet::SETPCAP);
                assert!(!setpcap || !capability_is_in_bounding_set(CapabilitySet::SYS_ADMIN).unwrap());
            }
            (before, capabilities(None).unwrap(), set_capabilities(None, before))
        })
        .join()
        .unwrap();
        assert!(NEEDED.contains(after.permitted) && NEEDED.contains(after.effective));
        assert_eq!(after.permitted, before.permitted & NEEDED);
        assert_eq!(again.is_err(), before.permitted != after.permitted);
    }
}
