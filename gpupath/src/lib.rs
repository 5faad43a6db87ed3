//! The direct path of gpunvme: how an application's `ioctl` on an open file becomes device commands on memory that it registered.
//!
//! It knows files only as extents, and memory only as file descriptors. [`abi`] is what both ends share, and of [`ring`]
//! the memory. `cuda` is the application's (feature `application`). The rest is the daemon's end (feature `daemon`), which a FUSE front end uses like this:
//!
//! ```text
//! let request = abi::decode(cmd, bytes)?;                                // DecodeError becomes a Reply
//! match request {
//!     Register(r)   => server.register(caller, &r),                      // Unregister and Stats alike
//!     Read(t)       => {
//!         let buffer = server.admit(caller, Direction::Read, &t)?;       // owner, bounds, required route; Err is the Answer
//!         let plan = planner::plan(Direction::Read, &t.segments, size, &buffer.region, alignment, extents)?;
//!         server.admit_plan(Direction::Read, &t, &plan)?;
//!         let done = Outcome::done(&buffer, &plan);
//!         transfer::read(&io, &pool, alignment, plan, buffer.clone(), move |result| {
//!             let outcome = result.map_or_else(Outcome::from, |()| done);
//!             reply(server.finish(Direction::Read, &t, &buffer, &outcome))
//!         })
//!     }
//!     Write(t)      => // admit; then for each group of planner::disjoint: allocate planner::aligned_middle of each segment; plan;
//!                      // copy plan.edges as ordinary writes; Io::submit(plan.requests). finish with the sum.
//!     Info, Resolve => // the filesystem's: fill abi::Info, or abi::Resolve and its extents, into a Reply
//! }
//! ```
#![deny(unsafe_code)]

pub mod abi;
#[cfg(feature = "application")]
pub mod cache;
#[cfg(feature = "application")]
#[allow(unsafe_code)]
pub mod cuda;
#[cfg(feature = "daemon")]
mod foreign;
#[cfg(feature = "daemon")]
mod intake;
#[cfg(feature = "daemon")]
pub mod limits;
#[cfg(feature = "daemon")]
#[allow(unsafe_code)]
mod peer;
#[cfg(feature = "application")]
pub mod pieces;
#[cfg(feature = "daemon")]
pub mod planner;
#[cfg(feature = "daemon")]
mod process;
#[cfg(feature = "daemon")]
pub mod registry;
#[cfg(any(feature = "daemon", feature = "application"))]
pub mod ring;
#[cfg(feature = "daemon")]
pub mod seldom;
#[cfg(feature = "daemon")]
pub mod server;
#[cfg(feature = "daemon")]
mod shares;
#[cfg(feature = "daemon")]
pub mod socket;
#[cfg(feature = "application")]
pub mod staging;
#[cfg(feature = "daemon")]
pub mod stats;
#[cfg(feature = "daemon")]
pub mod transfer;
