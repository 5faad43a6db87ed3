//! The daemon's end of the direct path: how an application's `ioctl` on an open file becomes
//! device commands on memory that it registered.
//!
//! It knows files only as extents, and memory only as file descriptors. What it shares with
//! applications is in [`gpunvme_abi`]. A FUSE front end uses it like this:
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

pub mod calling_thread;
mod foreign;
mod intake;
pub mod planner;
mod process;
pub mod quota;
pub mod rate_limit;
pub mod registry;
pub mod ring;
pub mod server;
pub mod socket;
#[allow(unsafe_code)]
mod socket_peer;
pub mod stats;
pub mod transfer;
