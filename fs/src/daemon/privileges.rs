//! The privileges that the daemon keeps, out of all that root has.

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

/// What the daemon needs, each for a reason:
/// - `SYS_ADMIN`: mount, and unmount at a signal;
/// - `SYS_PTRACE`: take the descriptor of a buffer out of the client that registers it (pidfd_getfd(2));
/// - `IPC_LOCK`: memory that devices write to is pinned, beyond what RLIMIT_MEMLOCK allows;
/// - `DAC_OVERRIDE`, `DAC_READ_SEARCH`: open a device or mount point below directories of other users.
const NEEDED: CapabilitySet = CapabilitySet::SYS_ADMIN
    .union(CapabilitySet::SYS_PTRACE)
    .union(CapabilitySet::IPC_LOCK)
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH);

/// Gives up what is not needed, for good. Must be called before the process starts threads: each has privileges of its own,
/// and inherits those of its maker.
///
/// # Errors
/// If the kernel does not know capabilities.
pub fn drop_unneeded() -> std::io::Result<()> {
    let held = capabilities(None)?;
    set_capabilities(
        None,
        CapabilitySets {
            effective: held.effective & NEEDED,
            permitted: held.permitted & NEEDED,
            inheritable: CapabilitySet::empty(),
        },
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_dropped_cannot_be_had_again() {
        // In a thread of its own: the privileges are the thread's, and other tests keep theirs.
        let (before, after, again) = std::thread::spawn(|| {
            let before = capabilities(None).unwrap();
            drop_unneeded().unwrap();
            (before, capabilities(None).unwrap(), set_capabilities(None, before))
        })
        .join()
        .unwrap();
        assert!(NEEDED.contains(after.permitted) && NEEDED.contains(after.effective));
        assert_eq!(after.permitted, before.permitted & NEEDED);
        assert_eq!(again.is_err(), before.permitted != after.permitted);
    }
}
