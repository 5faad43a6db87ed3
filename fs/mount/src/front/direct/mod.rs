//! The direct path on open files. `ioctl` and `rings` are its two ways in: each says what is asked
//! for. `transfers` does all else with it: it admits, plans, moves and answers, part by part.

mod ioctl;
mod rings;
mod transfers;
