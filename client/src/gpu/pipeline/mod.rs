//! Requests in no order of a stream: an executor cuts them into pieces, and moves each between a
//! ring of the mount, a slot of a pool and a GPU. It runs on the thread that waits for a short
//! request (`inline`), or on one of the library's (`worker`).

mod active_request;
#[allow(unsafe_code)]
pub mod copy_stream;
pub mod executor;
pub mod inline;
pub mod mailbox;
pub mod piece_ring;
pub mod worker;
