//! `libcufile.so.0` on gpunvme: programs that speak cuFile (KvikIO, PyTorch's GdsFile,
//! fastsafetensors, NIXL and others) read and write files of a gpunvme mount unchanged.
//!
//! A file decides who serves it when it is registered ([`files`]): one on a gpunvme mount is served
//! by the library `gpunvme` ([`mounts`]); any other by NVIDIA's library, if there is one on the
//! machine ([`real`]), or else by pread(2) and pwrite(2) ([`plain`]). A process may mix them, also
//! in one batch.
//!
//! `exports` is the C ABI and nothing else: it checks pointers, calls what is behind it, and turns
//! the answer into cuFile's. A panic there ends the process instead of unwinding into C.
//!
//! Environment:
//!
//! - `GPUNVME_CUFILE_VERSION`: the version that is reported, as cuFile counts (1150 is 1.15), and
//!   with it the layout of the statistics
//! - `GPUNVME_CUFILE_REAL`: the path of NVIDIA's library, or `off`
//! - `GPUNVME_CUFILE_REPORT`: a line at exit says how many bytes went which way; `1` is for
//!   standard error, all else is the path of a file that it is appended to
//! - `GPUNVME_CUFILE_LOG`: what to log on standard error, such as `debug`
// The modules that touch CUDA, the kernel or C's pointers allow it for themselves.
#![deny(unsafe_code)]

mod abi;
mod batch;
mod buffers;
mod driver;
mod environment;
mod exports;
mod failure;
mod files;
mod fork;
mod memory;
mod mounts;
mod parameters;
mod plain;
mod real;
mod report;
mod statistics;
mod streams;
mod topology;
mod transfer;
mod vectors;
mod version;
mod workers;
