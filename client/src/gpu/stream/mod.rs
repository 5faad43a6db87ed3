//! Requests in the order of an application's streams. All that a GPU has to do for one is in its
//! stream when the call returns (`submission`); a thread of the library moves the bytes between
//! the file and the window of the stream (`service`).

mod health;
mod job;
mod late;
pub mod observer;
mod plan;
mod service;
#[allow(unsafe_code)]
pub mod submission;
#[allow(unsafe_code)]
mod window;
