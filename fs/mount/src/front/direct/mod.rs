//! The direct path on open files. `ioctl` and `rings` are its two ways in, and each admits transfers; `transfers` carries out what was
//! admitted, part by part, and answers.

mod ioctl;
mod rings;
mod transfers;
