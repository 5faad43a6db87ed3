//! `libcufile.so.0` on gpunvme, as programs use it: loaded, linked and preloaded, with the software
//! CUDA driver.

mod batches;
mod elsewhere;
mod endings;
mod files;
mod interface;
mod library;
mod memory;
mod parameters;
mod programs;
mod shortage;
mod statistics;
mod streams;
mod vectors;
