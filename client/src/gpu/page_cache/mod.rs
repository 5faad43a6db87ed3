//! The route `cache`: the GPU's copy engine reads a file's bytes out of the kernel's page cache.
//!
//! A [`cached_range::CachedRange`] is a range of a file whose pages are registered with CUDA, so
//! that copies from it run as fast as from pinned memory. The kernel still owns the pages: what is
//! written through the mount is written into them, and a GPU that reads them sees it.
//!
//! It guards that no byte is delivered that read(2) could not have delivered. A page that the
//! kernel has taken out of the page cache (a truncate, a punched hole, a direct write, an
//! invalidation) stays registered and keeps its old bytes. So each cached range has a second
//! mapping, the *sentinel*, which nothing ever touches: the kernel unmaps a page from every mapping
//! before it takes it out of the page cache (mm/truncate.c, mm/filemap.c), and a page that has
//! never left the sentinel has never left the page cache. A copy counts only if, after it, all of
//! its pages are still in the sentinel. Otherwise the bytes are read again, the ordinary way.
//!
//! And it guards the process: no processor reads those mappings, since one that meets a page behind
//! the end of a file that has become shorter gets a SIGBUS. See [`gpu_reads`].

pub mod cached_file;
#[allow(unsafe_code)]
pub mod cached_range;
#[allow(unsafe_code)]
pub mod gpu_reads;
mod host_reads;
#[cfg(test)]
mod model;
#[allow(unsafe_code)]
pub mod readers;
mod room;
mod service;
#[allow(unsafe_code)]
mod view;

pub use service::PageCache;
