//! Files in memory: the state of a file that is open, or whose data is not on the device yet.

mod buffer;
mod in_flight;
mod kernel_view;
mod newer;
mod state;
mod table;

pub(crate) use buffer::NodesPromised;
pub(crate) use state::{File, FileState, Truncation};
pub(crate) use table::Files;
