//! The volume: metadata, its journal, and the operations on names and attributes. Data goes through
//! [`crate::data`].
//!
//! Every operation is an attempt: it runs on what is in memory, and ends with a [`Stall`] when it
//! needs something else. [`Volume::wait`] resolves stalls and tries again; it is for threads that
//! may wait for the device. A front end tries once where it must not wait, and hands the operation
//! to such a thread when the attempt stalls.
//!
//! The volume has no threads: its owner calls [`Volume::commit`] and [`Volume::checkpoint`], and
//! passes the time in a [`Context`].
//!
//! Locks, in the order in which they are taken: a file's lock ([`crate::data`]), the anchors' lock,
//! which a checkpoint holds, the journal lock, which a commit holds, the metadata lock, the epochs'
//! lock. The metadata lock is never held across I/O, and a checkpoint holds the journal lock for
//! moments only: commits go on beside it.
//!
//! [`Stall`]: crate::error::Stall

mod acl;
mod alloc;
mod attr;
mod busy;
mod cache;
pub(crate) mod dir;
mod directories;
mod discard;
pub(crate) mod epoch;
pub(crate) mod extents;
mod format;
mod growth;
pub(crate) mod inode;
pub(crate) mod io;
pub(crate) mod journal;
pub(crate) mod known_orphans;
mod lock;
mod mapping;
pub(crate) mod meta;
mod namespace;
pub(crate) mod op;
mod open;
pub(crate) mod orphan;
mod permissions;
mod place;
mod preload;
mod promised;
mod reservations;
mod reserved;
mod run;
pub(crate) mod space_waits;
pub(crate) mod tree;
mod undo;
mod unflushed;
mod versions;
pub(crate) mod xattr;

pub use acl::ACCESS as ACL_ACCESS;
pub use attr::{Attributes, SetAttributes};
pub use cache::CacheUse;
pub use dir::DirEntry;
pub use discard::Trimmed;
pub use extents::Mapping;
pub use format::{FormatOptions, FormatReport, format, is_clean, probe};
pub(crate) use mapping::{PlacedRun, Stamp};
pub(crate) use namespace::Renamed;
pub use namespace::{NewNode, RenameMode};
pub(crate) use open::Waiter;
pub use open::{Context, Usage, Volume, VolumeOptions};
pub use preload::Preloaded;
pub(crate) use promised::{Promised, Splits};
pub use run::Run;
pub use xattr::check_name as check_xattr_name;
