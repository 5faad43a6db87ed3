//! Descriptors, which loading a library and exporting memory take: CUDA has no word for their lack.

use std::fs::File;

/// `ENFILE` and `EMFILE` (asm-generic/errno-base.h).
const NONE_LEFT: [i32; 2] = [23, 24];

/// Whether this process, or the system, has no descriptor left: what failed for that may be had
/// later.
pub fn is_short_of_descriptors() -> bool {
    let error = File::open("/dev/null").err().and_then(|error| error.raw_os_error());
    error.is_some_and(|errno| NONE_LEFT.contains(&errno))
}
