//! Variables of the environment. It guards that a program that runs with rights that its caller
//! has not (set-user-id) believes none of them.
#![allow(unsafe_code)]

use std::ffi::OsString;

/// The value of a variable, if it is set and may be believed.
pub fn variable(name: &str) -> Option<OsString> {
    // SAFETY: it reads what the kernel told this process when it began.
    let secure = unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
    if secure { None } else { std::env::var_os(name) }
}

/// The same, as text.
pub fn text(name: &str) -> Option<String> {
    variable(name)?.into_string().ok()
}
