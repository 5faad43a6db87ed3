//! Standard output and standard error of a program, which may be full or closed.

use std::fmt;
use std::io::{self, IsTerminal, Write};

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
    let _ = writeln!(io::stderr(), "{}", in_words(&line.to_string()));
}

/// Whether standard error shows colours: it is a terminal, and nobody has set `NO_COLOR`.
pub fn has_colours() -> bool {
    io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// A message with errors of the system in the kernel's words alone: Rust puts "(os error 2)" behind
/// them.
fn in_words(message: &str) -> String {
    let mut parts = message.split(" (os error ");
    let mut words = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.split_once(')') {
            Some((number, rest)) if number.bytes().all(|byte| byte.is_ascii_digit()) => words += rest,
            _ => words = words + " (os error " + part,
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_system_are_told_in_words() {
        let missing = io::Error::from_raw_os_error(2);
        assert_eq!(in_words(&format!("x: {missing}")), "x: No such file or directory");
        assert_eq!(
            in_words(&format!("x: {missing}, and {missing}; try y")),
            in_words("x: No such file or directory, and No such file or directory; try y")
        );
        assert_eq!(in_words("a (os error b) c"), "a (os error b) c");
    }
}
