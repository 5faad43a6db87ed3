//! The controller by itself, driven by hand: what the specification says, without our driver's
//! view of it.
#[allow(unsafe_code)]
mod host;

mod admin;
mod faults;
mod io;
