//! The daemon's log: goes to stderr in the foreground, to the system's log in the background.

use std::io::{self, Write};
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;

use parking_lot::Mutex;
use tracing::level_filters::LevelFilter;
use tracing::{Level, Metadata};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::reload::Handle;

use super::error::MountError;
use crate::front;
use gpunvme_programs::terminal::has_colours;

/// The socket of syslog daemons and of systemd's journal.
const SYSLOG_SOCKET: &str = "/dev/log";
/// The facility `daemon` of syslog(3).
const FACILITY_DAEMON: u8 = 3;

/// The variable whose filter replaces that of the option.
const VARIABLE: &str = "RUST_LOG";

/// Starts logging the events that pass `filter`; `RUST_LOG`, if set, replaces it.
///
/// # Errors
/// If the filter is not in the syntax of `RUST_LOG`.
pub fn start(filter: &str, foreground: bool) -> Result<Arc<dyn front::Log>, MountError> {
    let Chosen { text, filter, ignored } = Chosen::of(filter, std::env::var(VARIABLE).ok())?;
    // An event that cannot be logged is lost. To say so on stderr would end the daemon where stderr
    // is full or closed.
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_target(false).log_internal_errors(false);
    let (started, log) = if foreground {
        let log = log.with_ansi(has_colours()).with_writer(io::stderr).with_filter_reloading();
        let handle = log.reload_handle();
        (log.try_init(), Log::started(text, handle))
    } else {
        let log = log.with_ansi(false).without_time().with_level(false).with_writer(Syslog::new()).with_filter_reloading();
        let handle = log.reload_handle();
        (log.try_init(), Log::started(text, handle))
    };
    started.map_err(|error| MountError::Internal(format!("logging: {error}")))?;
    if let Some(why) = ignored {
        tracing::warn!("the variable {VARIABLE} is ignored: {why}");
    }
    Ok(log)
}

/// What is logged in the beginning.
struct Chosen {
    text: String,
    filter: EnvFilter,
    /// Why the variable is ignored.
    ignored: Option<String>,
}

impl Chosen {
    /// The variable's filter, or else the option's. A variable may be meant for other programs: a
    /// wrong one is no reason not to mount.
    fn of(option: &str, variable: Option<String>) -> Result<Chosen, MountError> {
        let mut ignored = None;
        if let Some(text) = variable.filter(|text| !text.trim().is_empty()) {
            match parse(&text) {
                Ok(filter) => return Ok(Chosen { text, filter, ignored }),
                Err(why) => ignored = Some(why),
            }
        }
        let wrong = |why| MountError::Usage(format!("option \"log\": {why}"));
        Ok(Chosen { text: option.to_owned(), filter: parse(option).map_err(wrong)?, ignored })
    }
}

/// The log that was started.
struct Log<S> {
    /// The filter that holds.
    filter: Mutex<String>,
    handle: Handle<EnvFilter, S>,
}

impl<S: 'static> Log<S> {
    fn started(filter: String, handle: Handle<EnvFilter, S>) -> Arc<dyn front::Log> {
        Arc::new(Log { filter: Mutex::new(filter), handle })
    }
}

impl<S> std::fmt::Debug for Log<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Log").field("filter", &self.filter).finish_non_exhaustive()
    }
}

impl<S: 'static> front::Log for Log<S> {
    fn set(&self, filter: Option<&str>) -> Option<String> {
        let mut current = self.filter.lock();
        let Some(filter) = filter else { return Some(current.clone()) };
        let parsed = parse(filter).ok()?;
        // By the old filter: the new one may let nothing through.
        tracing::info!("the log's filter becomes {filter:?}");
        self.handle.reload(parsed).ok()?;
        Some(std::mem::replace(&mut *current, filter.to_owned()))
    }
}

/// A filter in the syntax of `RUST_LOG`. Errors pass any but `off`.
///
/// # Errors
/// Why it is none.
fn parse(filter: &str) -> Result<EnvFilter, String> {
    let wrong = |why: &dyn std::fmt::Display| format!("{filter:?}: {why}");
    // The syntax takes any word for the name of a program part.
    let is_level = |word: &str| word.parse::<LevelFilter>().is_ok();
    let is_known = |word: &str| word.contains(['=', '[']) || word.starts_with("gpunvme") || is_level(word);
    let words: Vec<&str> = filter.split(',').map(str::trim).filter(|word| !word.is_empty()).collect();
    if let Some(word) = words.iter().find(|word| !is_known(word)) {
        let levels = "off, error, warn, info, debug, trace";
        return Err(wrong(&format!("{word:?} is no level ({levels}), and no part of gpunvme (gpunvme_fuse=debug)")));
    }
    let level = if words.iter().any(|word| is_level(word)) { None } else { Some("error") };
    let words: Vec<&str> = level.into_iter().chain(words).collect();
    EnvFilter::try_new(words.join(",")).map_err(|error| wrong(&error))
}

/// Sends each event as one datagram in the form of RFC 3164, as syslog(3) does. Where no daemon
/// listens, events are lost.
struct Syslog {
    socket: Option<UnixDatagram>,
    tag: String,
}

impl Syslog {
    fn new() -> Self {
        // A full socket must not hold up the mount.
        let socket = UnixDatagram::unbound().and_then(|socket| socket.set_nonblocking(true).map(|()| socket));
        Self { socket: socket.ok(), tag: format!("mount.gpunvme[{}]", std::process::id()) }
    }
}

impl<'a> MakeWriter<'a> for Syslog {
    type Writer = Event<'a>;

    fn make_writer(&'a self) -> Event<'a> {
        Event { syslog: self, severity: severity(Level::INFO) }
    }

    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> Event<'a> {
        Event { syslog: self, severity: severity(*metadata.level()) }
    }
}

/// syslog(3)'s number for a level.
fn severity(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        Level::DEBUG | Level::TRACE => 7,
    }
}

/// One event on its way out.
struct Event<'a> {
    syslog: &'a Syslog,
    severity: u8,
}

impl Event<'_> {
    fn datagram(&self, text: &[u8]) -> Vec<u8> {
        let mut datagram = format!("<{}>{}: ", FACILITY_DAEMON << 3 | self.severity, self.syslog.tag).into_bytes();
        datagram.extend_from_slice(text.trim_ascii());
        datagram
    }
}

impl Write for Event<'_> {
    /// tracing-subscriber hands over each event whole.
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        if let Some(socket) = &self.syslog.socket {
            // Sent by name each time, so that a log daemon that was restarted is found again.
            let _ = socket.send_to(&self.datagram(event), SYSLOG_SOCKET);
        }
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_syslog_datagrams() {
        let syslog = Syslog { socket: None, tag: "mount.gpunvme[7]".to_owned() };
        let event = Event { syslog: &syslog, severity: severity(Level::WARN) };
        assert_eq!(event.datagram(b"  the journal was replayed\n"), b"<28>mount.gpunvme[7]: the journal was replayed");
    }

    #[test]
    fn a_wrong_filter_is_refused() {
        let refused = |filter: &str| Chosen::of(filter, None).err().unwrap();
        let error = refused("info,gpunvme_fuse=loud");
        assert!(error.to_string().starts_with("option \"log\": "), "{error}");
        assert_eq!(error.exit_code(), 1);
        for wrong in ["verbose", "warning", "info,loud", "banana,gpunvme_fuse=debug"] {
            let error = refused(wrong).to_string();
            assert!(error.contains("is no level (off, error, warn, info, debug, trace)"), "{error}");
        }
        for right in ["", "off", "INFO", "2", "gpunvme_fuse", "gpunvme_fuse=debug", "info, gpunvme_engine=trace", "hyper=info"] {
            parse(right).unwrap_or_else(|error| panic!("{error}"));
        }
    }

    #[test]
    fn a_variable_that_is_meant_for_other_programs_is_ignored() {
        for (variable, chosen, is_ignored) in [("debug", "debug", false), ("", "warn", false), ("myapp", "warn", true)] {
            let Chosen { text, ignored, .. } = Chosen::of("warn", Some(variable.to_owned())).unwrap();
            assert_eq!((text.as_str(), ignored.is_some()), (chosen, is_ignored), "{variable:?}: {ignored:?}");
        }
        let ignored = Chosen::of("warn", Some("myapp".to_owned())).unwrap().ignored.unwrap();
        assert!(ignored.starts_with("\"myapp\": \"myapp\" is no level"), "{ignored}");
    }

    #[test]
    fn errors_pass_a_filter_of_a_part() {
        for (filter, passes) in [("gpunvme_fuse=debug", LevelFilter::DEBUG), ("", LevelFilter::ERROR), ("off", LevelFilter::OFF)]
        {
            assert_eq!(parse(filter).unwrap().max_level_hint(), Some(passes), "{filter}");
        }
        assert!(parse("gpunvme_fuse=debug").unwrap().to_string().contains("error"));
        assert_eq!(parse("info").unwrap().to_string(), "info");
    }
}
