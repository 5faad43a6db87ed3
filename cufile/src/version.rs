//! The version of cuFile that is reported.

use crate::environment;
use std::sync::OnceLock;

/// cuFile 1.15, of CUDA 13.0: the oldest that has the functions most programs ask for.
const USUAL: i32 = 1150;

/// The version, as cuFile counts: 1000 for the major and 10 for each minor one.
pub fn reported() -> i32 {
    static VERSION: OnceLock<i32> = OnceLock::new();
    *VERSION.get_or_init(|| match environment::text("GPUNVME_CUFILE_VERSION") {
        Some(text) => text.parse().unwrap_or_else(|_| {
            tracing::warn!("GPUNVME_CUFILE_VERSION is no number such as 1150: {text:?}");
            USUAL
        }),
        None => USUAL,
    })
}

/// Whether statistics have the fields of readv and writev.
pub fn counts_vectors() -> bool {
    reported() >= 1190
}
