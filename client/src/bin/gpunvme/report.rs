//! The report at the end of a command: the same facts for people and for programs.

use gpunvme::{Moved, Reason, Route};
use serde_json::{Value, json};
use std::fmt::{Display, Write};

/// A sentence that ends the command.
#[derive(Debug)]
pub struct Failure(pub String);

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        Failure(error.to_string())
    }
}

/// Facts, in both forms.
pub struct Report {
    pub text: String,
    pub json: Value,
    /// The report goes to standard error, because the command writes data to standard output.
    pub to_stderr: bool,
    /// The exit status.
    pub code: u8,
}

impl Report {
    pub fn new(json: Value) -> Report {
        Report { text: String::new(), json, to_stderr: false, code: 0 }
    }

    /// Of a command that has printed all there is to say.
    pub fn silent() -> Report {
        Report::new(Value::Null)
    }

    /// Adds the GPU that it is about.
    pub fn on(mut self, gpu: &str) -> Report {
        self.line("gpu", gpu);
        self.json["gpu"] = json!(gpu);
        self
    }

    /// Adds a line for people.
    pub fn line(&mut self, name: &str, value: impl Display) {
        let _ = writeln!(self.text, "{name:<12}{value}"); // writing to a String cannot fail
    }
}

/// Bytes by route, for people: only what there is.
pub fn routes(moved: &Moved) -> String {
    let parts: Vec<String> =
        named(moved).into_iter().filter(|(_, bytes)| *bytes > 0).map(|(name, bytes)| format!("{name} {bytes}")).collect();
    if parts.is_empty() { "none".to_owned() } else { parts.join(", ") }
}

/// Bytes by route, for programs: always all.
pub fn routes_json(moved: &Moved) -> Value {
    named(moved).into_iter().map(|(name, bytes)| (name.to_owned(), json!(bytes))).collect::<serde_json::Map<_, _>>().into()
}

/// Bytes, by the name of their route.
pub fn named(moved: &Moved) -> [(&'static str, u64); 6] {
    let Moved { p2p, bounce, cache, host, hole, edge } = *moved;
    [("p2p", p2p), ("bounce", bounce), ("cache", cache), ("host", host), ("hole", hole), ("edge", edge)]
}

/// The one route of a transfer: that of the bytes which the device moved, if it moved any.
pub fn route(moved: &Moved) -> Route {
    let Moved { p2p, bounce, cache, host, .. } = *moved;
    let moved_by = [(Route::P2p, p2p), (Route::Bounce, bounce), (Route::Host, host), (Route::Cache, cache)];
    moved_by.into_iter().find(|(_, bytes)| *bytes > 0).map_or(Route::None, |(route, _)| route)
}

/// A reason with its sentence.
pub fn reason(reason: Reason) -> String {
    format!("{reason}: {}", reason.explain())
}

/// A number of bytes, as people read it.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes as f64;
    let mut unit = "bytes";
    for next in UNITS {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    if unit == "bytes" { format!("{bytes} bytes") } else { format!("{value:.1} {unit}") }
}

/// 16 bytes in the usual groups.
pub fn uuid(bytes: &[u8; 16]) -> String {
    let mut text = String::with_capacity(36);
    for (at, byte) in bytes.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        let _ = write!(text, "{byte:02x}"); // writing to a String cannot fail
    }
    text
}
