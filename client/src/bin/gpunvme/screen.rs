//! Text that follows text on standard output: on a terminal each takes the place of the one before,
//! in a pipe they follow each other.

use std::io::{self, ErrorKind, IsTerminal, Stdout, Write};

/// Takes the cursor to the upper left corner, and what is behind it away (ECMA-48: CUP, ED).
const HOME: &str = "\x1b[H\x1b[J";

/// Standard output.
pub struct Screen {
    out: Stdout,
    is_terminal: bool,
}

impl Screen {
    pub fn new() -> Screen {
        let out = io::stdout();
        Screen { is_terminal: out.is_terminal(), out }
    }

    /// Shows a table. False where the reader has closed the pipe: it has what it wanted.
    pub fn show(&mut self, table: &str) -> io::Result<bool> {
        self.print(&format!("{}{table}", if self.is_terminal { HOME } else { "" }))
    }

    /// Prints a line, which replaces nothing. False as for [`Screen::show`].
    pub fn line(&mut self, line: &str) -> io::Result<bool> {
        self.print(&format!("{line}\n"))
    }

    fn print(&mut self, text: &str) -> io::Result<bool> {
        match self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush()) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
            printed => printed.map(|()| true),
        }
    }
}

/// A text of another user's without what would control the terminal: such characters are escaped.
pub fn printable(text: &str) -> String {
    text.chars().map(|char| if char.is_control() { char.escape_default().to_string() } else { char.to_string() }).collect()
}
