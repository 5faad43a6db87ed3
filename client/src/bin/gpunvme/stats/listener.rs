//! Answers Prometheus over HTTP: `GET /metrics`, one request a connection. Each client has a
//! thread, so that one that is slow holds up no other. It listens on this machine only, because it
//! asks nobody who they are.

use super::clients::{Admitted, Client, Clients};
use super::prometheus;
use super::readers::{self, Reader};
use crate::report::{Failure, Report};
use gpunvme_programs::terminal::complain;
use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

/// The longest request, in bytes.
const REQUEST: usize = 8192;
/// How long a client may take to send its request.
const REQUEST_PATIENCE: Duration = Duration::from_secs(1);
/// How long a client may take to receive the answer.
const ANSWER_PATIENCE: Duration = Duration::from_secs(5);

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A port of a loopback address.
    Tcp(SocketAddr),
    /// A socket in the file system, open to who may write to it.
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            return Ok(Address::Unix(path.into()));
        }
        let address: SocketAddr =
            text.parse().map_err(|_| "must be an address with a port, such as 127.0.0.1:9108, or unix:PATH".to_owned())?;
        if address.ip().is_loopback() {
            Ok(Address::Tcp(address))
        } else {
            Err("must be of this machine (127.0.0.1, [::1], unix:PATH): put a proxy with passwords before it".into())
        }
    }
}

/// Answers until it is interrupted.
pub fn serve(address: &Address, mounts: &[PathBuf]) -> Result<Report, Failure> {
    super::exist(mounts)?;
    let readers = Reader::start(mounts)?;
    match address {
        Address::Tcp(address) => {
            let listener = TcpListener::bind(address).map_err(|error| Failure(format!("{address}: {error}")))?;
            listening(&listener.local_addr()?.to_string());
            answer_all(|| listener.accept().map(|(client, _)| client.into()), &readers)
        }
        Address::Unix(path) => {
            let listener = bind(path).map_err(|error| Failure(format!("{}: {error}", path.display())))?;
            listening(&format!("unix:{}", path.display()));
            answer_all(|| listener.accept().map(|(client, _)| client.into()), &readers)
        }
    }
}

fn listening(address: &str) {
    complain(format_args!("gpunvme: listening at {address}"));
}

/// Answers what `accept` brings, as long as the process lives.
fn answer_all(accept: impl Fn() -> io::Result<OwnedFd>, readers: &[Reader]) -> ! {
    let clients = Clients::default();
    std::thread::scope(|scope| {
        loop {
            let served = accept().and_then(|socket| {
                let client = clients.admit(socket);
                // A client that goes away has no one to be told.
                std::thread::Builder::new().spawn_scoped(scope, move || drop(answer(&client, readers)))
            });
            if served.is_err_and(|error| is_short(&error)) {
                std::thread::sleep(Duration::from_secs(1)); // and the next one waits
            }
        }
    })
}

/// Whether the system has no descriptor, no thread or no memory to give.
fn is_short(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::EAGAIN))
}

/// A socket of this name, in place of one that no process listens at any more.
fn bind(path: &Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            let is_socket = fs::symlink_metadata(path)?.file_type().is_socket();
            let is_dead = matches!(UnixStream::connect(path), Err(error) if error.kind() == io::ErrorKind::ConnectionRefused);
            if !is_socket || !is_dead {
                return Err(error);
            }
            fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        bound => bound,
    }
}

fn answer(client: &Admitted<'_>, readers: &[Reader]) -> io::Result<()> {
    let begun = Instant::now();
    let mut request = Vec::new();
    let mut part = [0; 1024];
    // To the end of the header.
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        let count = client.receive(&mut part, left(REQUEST_PATIENCE, begun)?)?;
        if count == 0 || request.len() + count > REQUEST {
            return reply(client, "400 Bad Request", "text/plain", "the request is not complete, or too long\n");
        }
        request.extend_from_slice(&part[..count]);
    }
    client.has_asked();
    let line = request.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let mut words = line.split(|byte| *byte == b' ');
    match (words.next(), words.next()) {
        (Some(b"GET"), Some(b"/metrics")) => {
            // A mount that is gone may come back, and hides no other.
            let read = readers::read(readers);
            match read.iter().find_map(|(_, reading)| reading.as_ref().err()) {
                Some(error) if read.iter().all(|(_, reading)| reading.is_err()) => {
                    reply(client, "503 Service Unavailable", "text/plain", &format!("{error}\n"))
                }
                _ => reply(client, "200 OK", prometheus::CONTENT_TYPE, &prometheus::text(&read)),
            }
        }
        (Some(b"GET"), _) => reply(client, "404 Not Found", "text/plain", "there is only /metrics\n"),
        _ => reply(client, "405 Method Not Allowed", "text/plain", "there is only GET\n"),
    }
}

fn reply(client: &Client, status: &str, content_type: &str, body: &str) -> io::Result<()> {
    let len = body.len();
    let head = format!("HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len}\r\nConnection: close\r\n\r\n");
    let (begun, answer) = (Instant::now(), head + body);
    let mut rest = answer.as_bytes();
    while !rest.is_empty() {
        match client.send(rest, left(ANSWER_PATIENCE, begun)?)? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            written => rest = &rest[written..],
        }
    }
    Ok(())
}

/// What is left of the patience with a client.
fn left(patience: Duration, begun: Instant) -> io::Result<Duration> {
    let left = patience.checked_sub(begun.elapsed()).filter(|left| !left.is_zero());
    left.ok_or_else(|| io::ErrorKind::TimedOut.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_of_this_machine() {
        assert_eq!("127.0.0.1:9108".parse(), Ok(Address::Tcp("127.0.0.1:9108".parse().unwrap())));
        assert_eq!("[::1]:0".parse(), Ok(Address::Tcp("[::1]:0".parse().unwrap())));
        assert_eq!("unix:/run/x".parse(), Ok(Address::Unix("/run/x".into())));
        for wrong in ["0.0.0.0:9108", "[::]:9108", "192.0.2.1:80", "localhost:1", "9108", "unix:", ""] {
            assert!(wrong.parse::<Address>().is_err(), "{wrong}");
        }
    }
}
