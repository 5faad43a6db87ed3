//! Converts the numbers in the daemon's answers to errnos, reasons and routes.

use gpunvme_abi::{Reason, Route};
use rustix::io::Errno;

/// An errno that the daemon gives as a number; 0 is none.
pub(crate) fn status(number: i32) -> Option<Errno> {
    match number {
        0 => None,
        1..4096 => Some(Errno::from_raw_os_error(number)),
        _ => Some(Errno::IO),
    }
}

/// The reason of a code.
pub(crate) fn reason(code: u32) -> Reason {
    Reason::from_code(code).unwrap_or(Reason::Unknown)
}

/// The route of a code.
pub(crate) fn route(code: u32) -> Route {
    Route::from_code(code).unwrap_or(Route::None)
}
