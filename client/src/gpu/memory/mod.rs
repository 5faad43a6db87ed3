//! The memory that transfers use: what of a GPU's is registered with the mount, and how what goes by way of a staging pool is cut
//! into pieces and given slots of it. It knows neither CUDA nor the daemon.

pub(super) mod cache;
pub(super) mod pieces;
pub(super) mod slots;
