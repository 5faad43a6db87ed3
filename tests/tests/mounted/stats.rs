//! `gpunvme stats`: what the daemon counts is what happened, for people, programs and Prometheus.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use gpunvme_tests::direct::{Buffer, info};
use gpunvme_tests::mounted::{Mounted, text};
use gpunvme_tests::{needs_mount, programs, tree};
use rustix::process::Signal;
use serde_json::Value;

fn stats(arguments: &[&str], mount: &Path) -> Command {
    let mut command = programs::command("gpunvme");
    command.arg("stats").args(arguments).arg(mount);
    command
}

fn told(arguments: &[&str], mount: &Path) -> String {
    let output = stats(arguments, mount).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    String::from_utf8(output.stdout).unwrap()
}

fn json(mount: &Path) -> Value {
    serde_json::from_str(&told(&["--json"], mount)).unwrap()
}

fn number(of: &Value, path: &str) -> u64 {
    of.pointer(path).and_then(Value::as_u64).unwrap_or(0)
}

#[test]
fn what_is_counted_is_what_happened() {
    needs_mount!();
    let volume = Mounted::new();
    let before = json(&volume.root());
    for name in 0..20 {
        fs::create_dir(volume.path(format!("{name}"))).unwrap();
    }
    fs::write(volume.path("3/full"), "").unwrap();
    assert!(fs::remove_dir(volume.path("3")).is_err());
    fs::write(volume.path("file"), tree::pattern(1, 3 << 20)).unwrap();
    let file = File::open(volume.path("file")).unwrap();
    file.sync_all().unwrap();
    let buffer = Buffer::new(&file, 1 << 20);
    for part in 0..3 {
        assert_eq!(buffer.read(&file, part << 20, 1 << 20).unwrap().bytes, 1 << 20);
    }
    assert!(buffer.read(&file, 0, 2 << 20).is_err(), "it reaches past the end of the buffer");

    let after = json(&volume.root());
    let more = |path: &str| number(&after, path) - number(&before, path);
    assert_eq!(more("/requests/mkdir/count"), 20, "{after:#}");
    assert!(more("/requests/lookup/count") >= 20, "each name was looked for: {after:#}");
    assert_eq!((more("/requests/rmdir/count"), more("/requests/rmdir/failed")), (1, 1), "{after:#}");
    assert_eq!(more("/requests/write/bytes"), 3 << 20, "{after:#}");
    assert_eq!((more("/requests/fsync/count"), more("/requests/fsync/failed")), (1, 0));
    assert_eq!((more("/transfers/read-host/count"), more("/transfers/read-host/bytes")), (3, 3 << 20), "{after:#}");
    assert!(more("/device_requests/write/bytes") >= 3 << 20 && more("/device_requests/read/bytes") >= 3 << 20, "{after:#}");
    assert!(more("/device_requests/flush/count") >= 1 && number(&after, "/device_requests/read/failed") == 0);
    assert!(number(&after, "/cache/lookups") > number(&after, "/cache/misses"));
    let of_mkdir = &after["requests"]["mkdir"];
    let buckets: u64 = of_mkdir["buckets"].as_array().unwrap().iter().map(|count| count.as_u64().unwrap()).sum();
    assert_eq!((buckets, number(of_mkdir, "/in_flight")), (number(of_mkdir, "/count"), 0));
    let seconds = |of: &Value| of.as_f64().unwrap();
    assert!(seconds(&of_mkdir["seconds"]) > 0.0 && seconds(&of_mkdir["p50"]) <= seconds(&of_mkdir["p99"]));
    assert!(seconds(&after["uptime"]) > seconds(&before["uptime"]));
    info(&file);
}

#[test]
fn people_read_units_or_exact_numbers() {
    needs_mount!();
    let volume = Mounted::new();
    fs::write(volume.path("file"), tree::pattern(2, 5 << 20)).unwrap();
    let (human, exact) = (told(&[], &volume.root()), told(&["--exact"], &volume.root()));
    let line = |text: &str| text.lines().find(|line| line.starts_with("write ")).unwrap_or_else(|| panic!("{text}")).to_owned();
    assert!(line(&human).contains("5.0 MiB") && !human.contains("5242880"), "{human}");
    assert!(line(&exact).contains(" 5242880 ") && !exact.contains("MiB"), "{exact}");
    for title in ["requests of the kernel", "device"] {
        assert!(human.contains(title), "{human}");
    }
    assert!(human.lines().all(|line| line.len() <= 110 || line.starts_with("calls") || line.starts_with("reason")), "{human}");
}

#[test]
fn a_watch_tells_of_each_interval() {
    needs_mount!();
    let volume = Mounted::new();
    fs::write(volume.path("before"), tree::pattern(3, 7 << 20)).unwrap();
    let mut watch = stats(&["--json", "--watch=1", "--count", "2"], &volume.root()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    let mut made = 0;
    let first = loop {
        // Until it has seen what goes on.
        if let Some(line) = (made > 0).then(|| lines.next().unwrap().unwrap()) {
            break line;
        }
        for _ in 0..50 {
            fs::create_dir(volume.path(format!("{made}"))).unwrap();
            made += 1;
        }
    };
    let all: Vec<Value> =
        std::iter::once(first).chain(lines.map(Result::unwrap)).map(|line| serde_json::from_str(&line).unwrap()).collect();
    assert!(watch.wait().unwrap().success());
    assert_eq!(all.len(), 2);
    let seen: u64 = all.iter().map(|line| number(line, "/requests/mkdir/count")).sum();
    assert!(seen <= made && all.iter().all(|line| number(line, "/requests/write/count") == 0), "{all:?}");
    let text = told(&["--watch", "--count", "1"], &volume.root());
    assert!(!text.contains('\x1b') && text.contains("up "), "{text}");
}

/// The listener, until the test ends.
struct Listening(Child, String);

impl Drop for Listening {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Listening {
    /// At an address, as a user without rights.
    fn at(address: &str, mount: &Path) -> Listening {
        Listening::of(&mut stats(&["--listen", address], mount))
    }

    fn of(command: &mut Command) -> Listening {
        let mut child = command.uid(65534).gid(65534).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().rsplit(' ').next().unwrap().to_owned();
        Listening(child, address)
    }

    fn ask(&self, request: &[u8]) -> String {
        let mut answer = Vec::new();
        if let Some(path) = self.1.strip_prefix("unix:") {
            let mut client = UnixStream::connect(path).unwrap();
            // What it did not read of ours makes the end a reset.
            let _ = client.write_all(request).and_then(|()| client.read_to_end(&mut answer));
        } else {
            let mut client = TcpStream::connect(&self.1).unwrap();
            let _ = client.write_all(request).and_then(|()| client.read_to_end(&mut answer));
        }
        String::from_utf8(answer).unwrap()
    }
}

#[test]
fn prometheus_is_answered() {
    needs_mount!();
    let volume = Mounted::new();
    let folder = gpunvme_tests::scratch_dir();
    Command::new("chmod").arg("777").arg(folder.path()).status().unwrap();
    let socket = format!("unix:{}/metrics", folder.path().display());
    for address in ["127.0.0.1:0", &socket] {
        let listening = Listening::at(address, &volume.root());
        let answer = listening.ask(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("text/plain; version=0.0.4"), "{head}");
        assert!(head.contains(&format!("Content-Length: {}", body.len())));
        assert!(body.contains("gpunvme_request_duration_seconds_bucket{"), "{body}");
        let same = |text: &str| text.lines().filter(|line| line.starts_with('#')).map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(same(body), same(&told(&["--prometheus"], &volume.root())));
        // What is no such request is told so, and the next is answered.
        for (wrong, status) in [
            (&b"GET / HTTP/1.1\r\n\r\n"[..], "404"),
            (b"POST /metrics HTTP/1.1\r\n\r\n", "405"),
            (b"\r\n\r\n", "405"),
            (&[b'x'; 20_000], "400"),
            (b"\xff\x00\r\n\r\n", "405"),
        ] {
            let answer = listening.ask(wrong);
            assert!(answer.is_empty() || answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
        }
        assert!(listening.ask(b"GET /metrics HTTP/1.0\n\r\n\r\n").contains("200 OK"));
        // Those that are slow hold up no other: they are being waited for when it is answered.
        if !listening.1.starts_with("unix:") {
            let slow: Vec<_> = (0..4).map(|_| TcpStream::connect(&listening.1).unwrap()).collect();
            slow.iter().for_each(|mut client| client.write_all(b"GET /met").unwrap());
            assert!(listening.ask(b"GET /metrics HTTP/1.1\r\n\r\n").contains("200 OK"));
            for mut client in slow {
                client.set_nonblocking(true).unwrap();
                let waits = client.read(&mut [0]).map_err(|error| error.kind());
                assert_eq!(waits, Err(std::io::ErrorKind::WouldBlock));
            }
        }
    }
    // The socket is left behind by the one that was killed, and taken by the next.
    let listening = Listening::at(&socket, &volume.root());
    let second = stats(&["--listen", &socket], &volume.root()).output().unwrap();
    assert!(!second.status.success() && text(&second).contains("in use"), "{}", text(&second));
    // A mount that is gone is no success, and hides no other.
    let other = Mounted::new();
    let both = {
        let mut command = stats(&["--listen", "127.0.0.1:0", other.root().to_str().unwrap()], &volume.root());
        Listening::of(&mut command)
    };
    let (gone, up) = (volume.root(), other.root());
    let (_, dead) = volume.signal(Signal::KILL);
    let answer = both.ask(b"GET /metrics HTTP/1.1\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    for (mount, value) in [(gone, 0), (up, 1)] {
        assert!(answer.contains(&format!("gpunvme_up{{mount=\"{}\"}} {value}\n", mount.display())), "{answer}");
    }
    assert_eq!(answer.matches("\ngpunvme_uptime_seconds{").count(), 1);
    drop((both, other));
    let answer = listening.ask(b"GET /metrics HTTP/1.1\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
    // One that begins before its mounts are there has them when they are.
    let early = Listening::at("127.0.0.1:0", &dead.mount_point());
    let answer = early.ask(b"GET /metrics HTTP/1.1\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
    let away = told(&["--prometheus"], &dead.mount_point());
    assert!(away.contains("} 0\n") && away.matches("gpunvme_up{").count() == 1, "{away}");
    let volume = dead.mount();
    for listening in [&listening, &early] {
        assert!(listening.ask(b"GET /metrics HTTP/1.1\r\n\r\n").contains("200 OK"));
    }
    drop((listening, early));
    let refused = stats(&["--listen", "127.0.0.1:0"], &volume.path("missing")).output().unwrap();
    assert_eq!(refused.status.code(), Some(1), "{}", text(&refused));
    let refused = stats(&["--listen", "0.0.0.0:9108"], &volume.root()).output().unwrap();
    assert_eq!(refused.status.code(), Some(2), "{}", text(&refused));
}

#[test]
fn neither_idle_clients_nor_a_stopped_daemon_hold_up_a_scrape() {
    needs_mount!();
    let (stopped, up) = (Mounted::new(), Mounted::new());
    let listening = Listening::of(&mut stats(&["--listen", "127.0.0.1:0", stopped.root().to_str().unwrap()], &up.root()));
    let scrape = || {
        let begun = Instant::now();
        let answer = listening.ask(b"GET /metrics HTTP/1.1\r\n\r\n");
        (answer, begun.elapsed())
    };
    let idle: Vec<_> = (0..200).map(|_| TcpStream::connect(&listening.1).unwrap()).collect();
    let (answer, took) = scrape();
    assert!(answer.contains("200 OK") && took < Duration::from_secs(5), "{took:?}: {answer}");
    drop(idle);
    rustix::process::kill_process(stopped.daemon(), Signal::STOP).unwrap();
    let scraped = [scrape(), scrape()];
    let once = Command::new("timeout")
        .args(["-s", "KILL", "60"])
        .arg(programs::path("gpunvme"))
        .args(["stats", "--prometheus"])
        .args([stopped.root(), up.root()])
        .output();
    rustix::process::kill_process(stopped.daemon(), Signal::CONT).unwrap();
    let once = String::from_utf8(once.unwrap().stdout).unwrap();
    for (answer, took) in scraped.into_iter().chain([(once, Duration::ZERO)]) {
        assert!(took < Duration::from_secs(10), "{took:?}");
        for (mount, value) in [(stopped.root(), 0), (up.root(), 1)] {
            assert!(answer.contains(&format!("gpunvme_up{{mount=\"{}\"}} {value}\n", mount.display())), "{answer}");
        }
    }
    assert!(scrape().0.matches("} 1\n").count() >= 2, "who goes on is up again");
}

/// Each metric that the dashboard asks for is one that there is.
#[test]
fn the_dashboard_shows_what_there_is() {
    needs_mount!();
    let volume = Mounted::new();
    fs::write(volume.path("file"), tree::pattern(4, 1 << 20)).unwrap();
    let file = File::open(volume.path("file")).unwrap();
    Buffer::new(&file, 1 << 20).read(&file, 0, 1 << 20).unwrap();
    let there = told(&["--prometheus"], &volume.root());
    let there: Vec<&str> = there.lines().filter_map(|line| line.split('{').next()).collect();
    let dashboard: Value = serde_json::from_str(include_str!("../../../contrib/grafana/gpunvme.json")).unwrap();
    let mut asked = 0;
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().unwrap() {
            let expression = target["expr"].as_str().unwrap();
            let words = expression.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
            for name in words.filter(|word| word.starts_with("gpunvme_")) {
                assert!(there.contains(&name), "{}: there is no {name}", panel["title"]);
                asked += 1;
            }
        }
    }
    assert!(asked > 15, "{asked}");
}
