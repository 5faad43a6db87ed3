//! Standard output and standard error of a program, which may be full or closed.

use std::fmt;
use std::io::{self, Write};

/// Writes to standard output. A reader that has gone, as `head` does, has what it wanted.
///
/// # Errors
/// Anything else that keeps the text from arriving.
pub fn print(text: fmt::Arguments) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_fmt(text).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}

/// Writes a line to standard error. If that fails, the exit code is the only report.
pub fn complain(line: fmt::Arguments) {
    let _ = writeln!(io::stderr(), "{line}");
}
