//! Checks that what the library takes for granted about CUDA is true, through the module that it
//! uses (`gpunvme_cuda`): on the software driver by `cargo test`, on a GPU by the program
//! `cuda-checks`.

mod application;
mod arrays;
mod checks;
mod kernels;
mod launch;
mod measure;
mod model;
mod others;
mod transfers;

pub use application::{Memory, Pinned, every_kind, mapped, own_stream, take_access};
pub use arrays::{ARRAY_CHECKS, ARRAYS, Report, Reports, good, word_at};
pub use checks::{CHECKS, HARDWARE_CHECKS};
pub use kernels::{KERNEL_CHECKS, KernelReads, read_and_crash, read_endlessly};
pub use launch::{Module, get, holding, put};
pub use measure::{facts, measure, measure_page_cache};
pub use model::{LAYER_CHECK, Model, ModelSite, Shape};
pub use others::{MappedFile, managed_words, move_to};
pub use transfers::{CRASH_CHECK, PAGE_CACHE_CHECKS, Site, TRANSFER_CHECKS, from_the_device};
