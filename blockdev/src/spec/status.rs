//! The status of a completed command, by its name in the specification (Base figures 94 to 99, NVM
//! figures 12 to 15).
use std::fmt;

/// The status field of a completion queue entry, bits 15:1.
///
/// Shown by its name in the specification, then as the number that other tools print: status code
/// type and code.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(u16);

impl Status {
    /// Done.
    pub(crate) const SUCCESS: Self = Self(0);
    /// It was aborted by an Abort command.
    pub(crate) const ABORT_REQUESTED: Self = Self::new(0, 0x07);
    /// Its queue was deleted first.
    pub(crate) const SQ_DELETED: Self = Self::new(0, 0x08);
    /// It was interrupted, and may be sent again.
    pub(crate) const COMMAND_INTERRUPTED: Self = Self::new(0, 0x21);
    /// The transport failed for a moment.
    pub(crate) const TRANSIENT_TRANSPORT_ERROR: Self = Self::new(0, 0x22);
    /// The namespace is not ready yet.
    pub(crate) const NAMESPACE_NOT_READY: Self = Self::new(0, 0x82);
    /// The status in a completion's last 16 bits, of which bit 0 is the phase tag.
    pub(crate) fn from_completion(field: u16) -> Self {
        Self(field >> 1)
    }

    /// A status of this code type and code, without further bits.
    pub(crate) const fn new(kind: u8, code: u8) -> Self {
        Self((kind as u16) << 8 | code as u16)
    }

    /// The same, and the same command would fail again.
    pub(crate) const fn with_do_not_retry(self) -> Self {
        Self(self.0 | 1 << 14)
    }

    /// The last 16 bits of a completion, without the phase tag.
    pub(crate) fn in_completion(self) -> u16 {
        self.0 << 1
    }

    /// Status Code Type: 0 generic, 1 command specific, 2 media and data integrity, 3 path
    /// related, 7 vendor specific.
    pub fn kind(self) -> u8 {
        (self.0 >> 8 & 7) as u8
    }

    /// Status Code.
    pub fn code(self) -> u8 {
        self.0 as u8
    }

    /// Whether the same command would fail again (DNR).
    pub fn do_not_retry(self) -> bool {
        self.0 >> 14 & 1 == 1
    }

    /// Whether the command was done.
    pub(crate) fn is_success(self) -> bool {
        self.is(Self::SUCCESS)
    }

    /// Whether type and code are the same: the other bits say nothing about what happened.
    pub(crate) fn is(self, other: Self) -> bool {
        (self.0 ^ other.0) & 0x7ff == 0
    }

    /// The name in the specification.
    pub fn name(self) -> &'static str {
        name(self.kind(), self.code())
    }

    /// The errno that says the same to a caller who knows no NVMe.
    pub fn errno(self) -> i32 {
        match (self.kind(), self.code()) {
            (0, 0x01) => libc::EOPNOTSUPP,
            (0, 0x80) => libc::ENXIO,
            (0, 0x81) | (1, 0x15 | 0x26) => libc::ENOSPC,
            (0, 0x20) | (1, 0x82) => libc::EROFS,
            (0, 0x15 | 0x83) | (2, 0x86) => libc::EACCES,
            _ => libc::EIO,
        }
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:x}h/{:02x}h)", self.name(), self.kind(), self.code())
    }
}

fn name(kind: u8, code: u8) -> &'static str {
    match (kind, code) {
        // Generic command status.
        (0x0, 0x00) => "Successful Completion",
        (0x0, 0x01) => "Invalid Command Opcode",
        (0x0, 0x02) => "Invalid Field in Command",
        (0x0, 0x03) => "Command ID Conflict",
        (0x0, 0x04) => "Data Transfer Error",
        (0x0, 0x05) => "Commands Aborted due to Power Loss Notification",
        (0x0, 0x06) => "Internal Error",
        (0x0, 0x07) => "Command Abort Requested",
        (0x0, 0x08) => "Command Aborted due to SQ Deletion",
        (0x0, 0x09) => "Command Aborted due to Failed Fused Command",
        (0x0, 0x0a) => "Command Aborted due to Missing Fused Command",
        (0x0, 0x0b) => "Invalid Namespace or Format",
        (0x0, 0x0c) => "Command Sequence Error",
        (0x0, 0x0d) => "Invalid SGL Segment Descriptor",
        (0x0, 0x0e) => "Invalid Number of SGL Descriptors",
        (0x0, 0x0f) => "Data SGL Length Invalid",
        (0x0, 0x10) => "Metadata SGL Length Invalid",
        (0x0, 0x11) => "SGL Descriptor Type Invalid",
        (0x0, 0x12) => "Invalid Use of Controller Memory Buffer",
        (0x0, 0x13) => "PRP Offset Invalid",
        (0x0, 0x14) => "Atomic Write Unit Exceeded",
        (0x0, 0x15) => "Operation Denied",
        (0x0, 0x16) => "SGL Offset Invalid",
        (0x0, 0x18) => "Host Identifier Inconsistent Format",
        (0x0, 0x19) => "Keep Alive Timer Expired",
        (0x0, 0x1a) => "Keep Alive Timeout Invalid",
        (0x0, 0x1b) => "Command Aborted due to Preempt and Abort",
        (0x0, 0x1c) => "Sanitize Failed",
        (0x0, 0x1d) => "Sanitize In Progress",
        (0x0, 0x1e) => "SGL Data Block Granularity Invalid",
        (0x0, 0x1f) => "Command Not Supported for Queue in CMB",
        (0x0, 0x20) => "Namespace is Write Protected",
        (0x0, 0x21) => "Command Interrupted",
        (0x0, 0x22) => "Transient Transport Error",
        (0x0, 0x23) => "Command Prohibited by Command and Feature Lockdown",
        (0x0, 0x24) => "Admin Command Media Not Ready",
        (0x0, 0x80) => "LBA Out of Range",
        (0x0, 0x81) => "Capacity Exceeded",
        (0x0, 0x82) => "Namespace Not Ready",
        (0x0, 0x83) => "Reservation Conflict",
        (0x0, 0x84) => "Format In Progress",
        (0x0, 0x85) => "Invalid Value Size",
        (0x0, 0x86) => "Invalid Key Size",
        (0x0, 0x87) => "KV Key Does Not Exist",
        (0x0, 0x88) => "Unrecovered Error",
        (0x0, 0x89) => "Key Exists",
        // Command specific status.
        (0x1, 0x00) => "Completion Queue Invalid",
        (0x1, 0x01) => "Invalid Queue Identifier",
        (0x1, 0x02) => "Invalid Queue Size",
        (0x1, 0x03) => "Abort Command Limit Exceeded",
        (0x1, 0x05) => "Asynchronous Event Request Limit Exceeded",
        (0x1, 0x06) => "Invalid Firmware Slot",
        (0x1, 0x07) => "Invalid Firmware Image",
        (0x1, 0x08) => "Invalid Interrupt Vector",
        (0x1, 0x09) => "Invalid Log Page",
        (0x1, 0x0a) => "Invalid Format",
        (0x1, 0x0b) => "Firmware Activation Requires Conventional Reset",
        (0x1, 0x0c) => "Invalid Queue Deletion",
        (0x1, 0x0d) => "Feature Identifier Not Saveable",
        (0x1, 0x0e) => "Feature Not Changeable",
        (0x1, 0x0f) => "Feature Not Namespace Specific",
        (0x1, 0x10) => "Firmware Activation Requires NVM Subsystem Reset",
        (0x1, 0x11) => "Firmware Activation Requires Controller Level Reset",
        (0x1, 0x12) => "Firmware Activation Requires Maximum Time Violation",
        (0x1, 0x13) => "Firmware Activation Prohibited",
        (0x1, 0x14) => "Overlapping Range",
        (0x1, 0x15) => "Namespace Insufficient Capacity",
        (0x1, 0x16) => "Namespace Identifier Unavailable",
        (0x1, 0x18) => "Namespace Already Attached",
        (0x1, 0x19) => "Namespace Is Private",
        (0x1, 0x1a) => "Namespace Not Attached",
        (0x1, 0x1b) => "Thin Provisioning Not Supported",
        (0x1, 0x1c) => "Controller List Invalid",
        (0x1, 0x1d) => "Device Self-test In Progress",
        (0x1, 0x1e) => "Boot Partition Write Prohibited",
        (0x1, 0x1f) => "Invalid Controller Identifier",
        (0x1, 0x20) => "Invalid Secondary Controller State",
        (0x1, 0x21) => "Invalid Number of Controller Resources",
        (0x1, 0x22) => "Invalid Resource Identifier",
        (0x1, 0x23) => "Sanitize Prohibited While Persistent Memory Region is Enabled",
        (0x1, 0x24) => "ANA Group Identifier Invalid",
        (0x1, 0x25) => "ANA Attach Failed",
        (0x1, 0x26) => "Insufficient Capacity",
        (0x1, 0x27) => "Namespace Attachment Limit Exceeded",
        (0x1, 0x28) => "Prohibition of Command Execution Not Supported",
        (0x1, 0x29) => "I/O Command Set Not Supported",
        (0x1, 0x2a) => "I/O Command Set Not Enabled",
        (0x1, 0x2b) => "I/O Command Set Combination Rejected",
        (0x1, 0x2c) => "Invalid I/O Command Set",
        (0x1, 0x2d) => "Identifier Unavailable",
        (0x1, 0x80) => "Conflicting Attributes",
        (0x1, 0x81) => "Invalid Protection Information",
        (0x1, 0x82) => "Attempted Write to Read Only Range",
        (0x1, 0x83) => "Command Size Limit Exceeded",
        (0x1, 0xb8) => "Zoned Boundary Error",
        (0x1, 0xb9) => "Zone Is Full",
        (0x1, 0xba) => "Zone Is Read Only",
        (0x1, 0xbb) => "Zone Is Offline",
        (0x1, 0xbc) => "Zone Invalid Write",
        (0x1, 0xbd) => "Too Many Active Zones",
        (0x1, 0xbe) => "Too Many Open Zones",
        (0x1, 0xbf) => "Invalid Zone State Transition",
        // Media and data integrity errors.
        (0x2, 0x80) => "Write Fault",
        (0x2, 0x81) => "Unrecovered Read Error",
        (0x2, 0x82) => "End-to-end Guard Check Error",
        (0x2, 0x83) => "End-to-end Application Tag Check Error",
        (0x2, 0x84) => "End-to-end Reference Tag Check Error",
        (0x2, 0x85) => "Compare Failure",
        (0x2, 0x86) => "Access Denied",
        (0x2, 0x87) => "Deallocated or Unwritten Logical Block",
        (0x2, 0x88) => "End-to-end Storage Tag Check Error",
        // Path related status.
        (0x3, 0x00) => "Internal Path Error",
        (0x3, 0x01) => "Asymmetric Access Persistent Loss",
        (0x3, 0x02) => "Asymmetric Access Inaccessible",
        (0x3, 0x03) => "Asymmetric Access Transition",
        (0x3, 0x60) => "Controller Pathing Error",
        (0x3, 0x70) => "Host Pathing Error",
        (0x3, 0x71) => "Command Aborted By Host",
        (0x7, _) | (_, 0xc0..) => "vendor specific status",
        _ => "reserved status",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_told_by_its_name_and_numbers() {
        // As in a completion: do not retry, more, type 2, code 81h, phase 1.
        let status = Status::from_completion(0x6281 << 1 | 1);
        assert_eq!(status.to_string(), "Unrecovered Read Error (2h/81h)");
        assert!(status.do_not_retry() && status.is(Status::new(2, 0x81)) && !status.is_success());
        assert!(Status::from_completion(1).is_success());
        assert_eq!(Status::new(7, 3).name(), "vendor specific status");
        assert_eq!(Status::new(0, 0xc1).name(), "vendor specific status");
        assert_eq!(Status::new(0, 0x17).name(), "reserved status");
    }

    #[test]
    fn a_filesystem_can_tell_the_causes_apart() {
        for (kind, code, errno) in [
            (2, 0x81, libc::EIO),
            (2, 0x80, libc::EIO),
            (0, 0x80, libc::ENXIO),
            (0, 0x20, libc::EROFS),
            (0, 0x81, libc::ENOSPC),
            (0, 0x06, libc::EIO),
        ] {
            assert_eq!(Status::new(kind, code).errno(), errno, "{}", Status::new(kind, code));
        }
    }
}
