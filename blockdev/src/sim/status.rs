//! The statuses that the software controller fails commands with. All say "do not retry" where the
//! same command would fail again.
use crate::spec::Status;

const fn generic(code: u8) -> Status {
    Status::new(0, code).with_do_not_retry()
}

const fn specific(code: u8) -> Status {
    Status::new(1, code).with_do_not_retry()
}

pub(super) const INVALID_OPCODE: Status = generic(0x01);
pub(super) const INVALID_FIELD: Status = generic(0x02);
pub(super) const ID_CONFLICT: Status = generic(0x03);
/// The memory may be there next time.
pub(super) const DATA_TRANSFER_ERROR: Status = Status::new(0, 0x04);
pub(super) const SQ_DELETED: Status = Status::new(0, 0x08);
pub(super) const ABORT_REQUESTED: Status = Status::new(0, 0x07);
pub(super) const INVALID_NAMESPACE: Status = generic(0x0b);
pub(super) const SEQUENCE_ERROR: Status = generic(0x0c);
pub(super) const INVALID_SGL_SEGMENT: Status = generic(0x0d);
pub(super) const INVALID_SGL_COUNT: Status = generic(0x0e);
pub(super) const SGL_LENGTH_INVALID: Status = generic(0x0f);
pub(super) const SGL_TYPE_INVALID: Status = generic(0x11);
pub(super) const PRP_OFFSET_INVALID: Status = generic(0x13);
pub(super) const SGL_GRANULARITY_INVALID: Status = generic(0x1e);
pub(super) const WRITE_PROTECTED: Status = generic(0x20);
pub(super) const LBA_OUT_OF_RANGE: Status = generic(0x80);

pub(super) const CQ_INVALID: Status = specific(0x00);
pub(super) const INVALID_QUEUE_ID: Status = specific(0x01);
pub(super) const INVALID_QUEUE_SIZE: Status = specific(0x02);
pub(super) const EVENT_LIMIT: Status = specific(0x05);
pub(super) const INVALID_VECTOR: Status = specific(0x08);
pub(super) const INVALID_LOG_PAGE: Status = specific(0x09);
pub(super) const INVALID_FORMAT: Status = specific(0x0a);
pub(super) const INVALID_QUEUE_DELETION: Status = specific(0x0c);
pub(super) const NOT_SAVEABLE: Status = specific(0x0d);
pub(super) const SIZE_LIMIT: Status = specific(0x83);

pub(super) const WRITE_FAULT: Status = Status::new(2, 0x80);
pub(super) const UNRECOVERED_READ: Status = Status::new(2, 0x81);
