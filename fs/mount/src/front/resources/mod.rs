//! Resources that the operations of one mount share: threads, memory, and the daemon's end of the
//! direct path.

pub(super) mod device_shares;
pub(super) mod endpoint;
pub(super) mod listing_budget;
pub(super) mod plan_budget;
pub(super) mod removals;
pub(super) mod request_budget;
pub(super) mod snapshot_budget;
mod sockets;
pub(super) mod syncs;
pub(super) mod turns;
pub(super) mod workers;
