//! The direct path on open files. `ioctl` and `rings` are its two ways in: each decodes requests.
//! `transfers` carries them out: it admits, plans, moves and answers, part by part.

mod administration;
mod ioctl;
mod rings;
mod transfers;
