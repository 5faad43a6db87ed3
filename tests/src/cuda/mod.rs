//! Checks that what the library takes for granted about CUDA is true, through the module that it
//! uses (`gpunvme_cuda`): on the software driver by `cargo test`, on a GPU by the program
//! `cuda-checks`.

mod application;
mod checks;
mod kernels;
mod measure;
mod transfers;

pub use application::{Pinned, mapped, own_stream, take_access};
pub use checks::{CHECKS, HARDWARE_CHECKS};
pub use kernels::{KERNEL_CHECKS, measure_kernels, read_endlessly};
pub use measure::{facts, measure, measure_page_cache};
pub use transfers::{CRASH_CHECK, PAGE_CACHE_CHECKS, Site, TRANSFER_CHECKS, from_the_device};
