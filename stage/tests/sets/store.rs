//! An object store that speaks as much of S3 as `gpunvme hydrate` and `gpunvme publish` ask for,
//! and answers with faults where a test wants them.

use md5::{Digest as _, Md5};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use sha2::Digest as _;
use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// What is wrong with an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// 503 Service Unavailable.
    Busy,
    /// The body ends after so many bytes, and the connection with it.
    Cut(usize),
    /// No answer: the connection is closed.
    Closed,
    /// It takes so many milliseconds.
    Slow(u64),
    /// A byte in the middle is another one.
    Damaged,
    /// The bytes come twice, and their number says so.
    Twice,
}

/// The header that says the checksum of bytes.
pub type Checksum = fn(&[u8]) -> (&'static str, String);

/// The ETag of bytes, if they have one.
pub type Tag = fn(&[u8]) -> Option<String>;

/// What the store is doing.
#[derive(Default)]
pub struct State {
    /// The objects of its bucket.
    pub objects: BTreeMap<String, Vec<u8>>,
    /// How often each was read, in whole or in parts that begin with its first byte.
    pub reads: HashMap<String, u32>,
    /// The changes, in their order: `PUT NAME` and `DELETE NAME`.
    pub changes: Vec<String>,
    /// The faults of the next reads.
    pub faults: Vec<Fault>,
    /// Whether ETags are MD5.
    pub tags: bool,
    /// How ETags are made that reads come with, where it is otherwise.
    pub tag: Option<Tag>,
    /// Seconds of the time at which all objects were changed.
    pub seconds: u32,
    /// Whether it refuses to say what it does not have.
    pub refuses_absent: bool,
    /// The header that says the checksum of a whole object, where it is asked for.
    pub checksum: Option<Checksum>,
    /// After so many reads, all are refused.
    pub refuse_reads_after: Option<u32>,
    /// The sizes of objects that the listing lies about.
    pub lies: HashMap<String, u64>,
    /// Whether a listing names each object twice.
    pub lists_twice: bool,
    /// When listings say that objects were changed.
    pub modified: Option<&'static str>,
    /// Most objects of one answer to a listing, which names where the next goes on.
    pub page: Option<usize>,
    /// Where reads are sent to instead.
    pub redirect: Option<String>,
    /// An object that becomes another one after so many reads.
    pub change: Option<(String, u32, Vec<u8>)>,
    /// Changes that are refused, by their number.
    pub refuse_change: Option<usize>,
    /// Parts of uploads that came.
    pub parts: usize,
    /// How long each takes, and each object that comes whole.
    pub part_takes: Duration,
    /// By their names; the object and the parts.
    pub uploads: BTreeMap<String, (String, BTreeMap<u32, Vec<u8>>)>,
    begun: u32,
    /// How the last request was signed.
    pub signed: Option<String>,
    /// The session that its key belongs to.
    pub session: Option<String>,
}

/// The store. It serves until the test ends.
#[derive(Clone)]
pub struct Store {
    state: Arc<Mutex<State>>,
    address: SocketAddr,
    scheme: &'static str,
}

impl Store {
    /// An empty one.
    pub fn new() -> Store {
        Store::listening("http", |stream| stream)
    }

    /// An empty one by HTTPS, which shows the certificates of this setting.
    pub fn secure(setting: Arc<ServerConfig>) -> Store {
        Store::listening("https", move |stream| StreamOwned::new(ServerConnection::new(setting.clone()).unwrap(), stream))
    }

    fn listening<S: Read + Write + Send + 'static>(
        scheme: &'static str,
        wrap: impl Fn(TcpStream) -> S + Send + 'static,
    ) -> Store {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let store = Store { state: Arc::default(), address: listener.local_addr().unwrap(), scheme };
        let serving = store.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (store, mut stream) = (serving.clone(), BufReader::new(wrap(stream)));
                // A client that is killed leaves in the middle.
                std::thread::spawn(move || while store.serve(&mut stream).is_some() {});
            }
        });
        store
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// The address of what lies there.
    pub fn url(&self, path: &str) -> String {
        format!("{}://{}{path}", self.scheme, self.address)
    }

    /// What a command needs to find it.
    pub fn found_by<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command
            .env("AWS_ENDPOINT", self.url(""))
            .env("AWS_CONFIG_FILE", "/dev/null")
            .env("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
            .env_remove("AWS_PROFILE")
            .env("AWS_REGION", "here")
            .env("AWS_ACCESS_KEY_ID", "KEYOFTHETEST")
            .env("AWS_SECRET_ACCESS_KEY", "SECRETOFTHETEST")
    }

    fn serve(&self, reader: &mut BufReader<impl Read + Write>) -> Option<()> {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let mut words = line.split_whitespace();
        let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
        let mut headers = HashMap::new();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).ok()?;
            let Some((name, value)) = line.trim_end().split_once(": ") else { break };
            headers.insert(name.to_ascii_lowercase(), value.to_owned());
        }
        let len = headers.get("content-length").map_or(0, |len| len.parse().unwrap());
        let mut body = vec![0; len];
        reader.read_exact(&mut body).ok()?;
        let (path, query) = target.split_once('?').unwrap_or((&target, ""));
        let query: HashMap<_, _> = query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, ""))).collect();
        let key = decoded(path.strip_prefix("/bucket")?.trim_start_matches('/'));
        let (status, headers, mut body, fault) = self.answer(&method, &key, &query, &headers, body);
        match fault {
            Some(Fault::Twice) => body.extend_from_within(..),
            Some(Fault::Closed) => return None,
            Some(Fault::Slow(time)) => std::thread::sleep(Duration::from_millis(time)),
            _ => {}
        }
        let mut head = format!("HTTP/1.1 {status}\r\n");
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        if method != "HEAD" {
            head += &format!("content-length: {}\r\n", body.len());
        }
        let stream = reader.get_mut();
        stream.write_all((head + "\r\n").as_bytes()).ok()?;
        let sent = match fault {
            Some(Fault::Cut(len)) => &body[..len.min(body.len())],
            _ => &body[..],
        };
        if method != "HEAD" {
            stream.write_all(sent).ok()?;
        }
        stream.flush().ok()?;
        (sent.len() == body.len()).then_some(())
    }

    #[allow(clippy::type_complexity)] // status, headers, body, fault: an answer
    fn answer(
        &self,
        method: &str,
        key: &str,
        query: &HashMap<&str, &str>,
        headers: &HashMap<String, String>,
        body: Vec<u8>,
    ) -> (&'static str, Vec<(&'static str, String)>, Vec<u8>, Option<Fault>) {
        let mut state = self.state();
        let plain = |status, body: String| (status, Vec::new(), body.into_bytes(), None);
        // As S3 has it.
        let signed = headers.get("authorization").and_then(|text| text.split("SignedHeaders=").nth(1)?.split(',').next());
        state.signed = headers.get("authorization").cloned();
        state.session = headers.get("x-amz-security-token").cloned();
        let is_signed = |name: &str| signed.is_some_and(|signed| signed.split(';').any(|one| one == name));
        if let Some(name) = headers.keys().find(|name| name.starts_with("x-amz-") && !is_signed(name)) {
            return plain(
                "403 Forbidden",
                format!("<Error><Code>AccessDenied</Code><Message>{name} is not signed</Message></Error>"),
            );
        }
        match method {
            "GET" if query.contains_key("list-type") => return plain("200 OK", state.listing(query)),
            "PUT" | "POST" | "DELETE" => {
                if method != "POST" && state.refuse_change.is_some_and(|at| at <= state.changes.len()) {
                    return plain("403 Forbidden", String::new());
                }
                let head = vec![("ETag", state.etag(&body))];
                let upload = query.get("uploadId").copied();
                if upload.is_some_and(|id| state.uploads.get(id).is_none_or(|(of, _)| of != key)) {
                    return plain("404 Not Found", "<Error><Code>NoSuchUpload</Code></Error>".into());
                }
                match (method, upload) {
                    ("POST", None) if query.contains_key("uploads") => {
                        state.begun += 1;
                        let id = format!("upload{}", state.begun);
                        state.uploads.insert(id.clone(), (key.into(), BTreeMap::new()));
                        let answer =
                            format!("<InitiateMultipartUploadResult><UploadId>{id}</UploadId></InitiateMultipartUploadResult>");
                        return plain("200 OK", answer);
                    }
                    ("POST", Some(id)) => {
                        let parts = state.uploads.remove(id).unwrap().1;
                        // The parts that are named, by what they were called.
                        let text = String::from_utf8(body).unwrap().replace("&quot;", "\"");
                        let named = text.matches("<PartNumber>").count();
                        let short = parts.values().rev().skip(1).any(|part| part.len() < 5 << 20);
                        if short {
                            return plain("400 Bad Request", "<Error><Code>EntityTooSmall</Code></Error>".into());
                        }
                        if named != parts.len() || !parts.values().all(|part| text.contains(&state.etag(part))) {
                            return plain("400 Bad Request", "<Error><Code>InvalidPart</Code></Error>".into());
                        }
                        let whole = parts.into_values().flatten().collect::<Vec<_>>();
                        let etag = state.etag(&whole);
                        state.changes.push(format!("PUT {key}"));
                        state.objects.insert(key.into(), whole);
                        let answer =
                            format!("<CompleteMultipartUploadResult><ETag>{etag}</ETag></CompleteMultipartUploadResult>");
                        return plain("200 OK", answer);
                    }
                    ("POST", None) => {
                        // Objects that are deleted together.
                        let text = String::from_utf8(body).unwrap();
                        let mut answer = String::new();
                        for part in text.split("<Key>").skip(1) {
                            let key = part.split('<').next().unwrap();
                            state.objects.remove(key);
                            state.changes.push(format!("DELETE {key}"));
                            answer += &format!("<Deleted><Key>{key}</Key></Deleted>");
                        }
                        return plain("200 OK", format!("<DeleteResult>{answer}</DeleteResult>"));
                    }
                    ("PUT", Some(id)) => {
                        let part = query["partNumber"].parse().unwrap();
                        state.uploads.get_mut(id).unwrap().1.insert(part, body);
                        state.parts += 1;
                        return ("200 OK", head, Vec::new(), Some(Fault::Slow(state.part_takes.as_millis() as u64)));
                    }
                    ("DELETE", Some(id)) => drop(state.uploads.remove(id)),
                    ("PUT", None) if headers.contains_key("x-amz-copy-source") => {
                        let from = decoded(headers["x-amz-copy-source"].trim_start_matches('/').strip_prefix("bucket/").unwrap());
                        let copy = state.objects[&from].clone();
                        state.changes.push(format!("PUT {key}"));
                        let answer = format!("<CopyObjectResult><ETag>{}</ETag></CopyObjectResult>", state.etag(&copy));
                        state.objects.insert(key.into(), copy);
                        return plain("200 OK", answer);
                    }
                    ("PUT", None) => {
                        state.changes.push(format!("PUT {key}"));
                        state.objects.insert(key.into(), body);
                        return ("200 OK", head, Vec::new(), Some(Fault::Slow(state.part_takes.as_millis() as u64)));
                    }
                    _ => {
                        state.changes.push(format!("DELETE {key}"));
                        state.objects.remove(key);
                    }
                }
                return ("200 OK", head, Vec::new(), None);
            }
            _ => {}
        }
        if !state.objects.contains_key(key) {
            return plain(if state.refuses_absent { "403 Forbidden" } else { "404 Not Found" }, String::new());
        }
        let range = headers.get("range").and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
        let mut fault = None;
        if method == "GET" {
            if range.is_none_or(|(start, _)| start == "0") {
                *state.reads.entry(key.into()).or_default() += 1;
            }
            if let Some(place) = &state.redirect {
                return ("307 Temporary Redirect", vec![("Location", place.clone())], Vec::new(), None);
            }
            match &mut state.refuse_reads_after {
                Some(0) => return plain("403 Forbidden", String::new()),
                Some(more) => *more -= 1,
                None => {}
            }
            fault = state.faults.pop();
            if fault == Some(Fault::Busy) {
                return plain("503 Service Unavailable", String::new());
            }
            if let Some((name, after, new)) = state.change.take() {
                match after {
                    _ if name != key => state.change = Some((name, after, new)),
                    0 => {
                        state.objects.insert(name, new);
                        state.seconds += 1;
                    }
                    _ => state.change = Some((name, after - 1, new)),
                }
            }
        }
        let object = &state.objects[key];
        let etag = state.tag.map_or_else(|| Some(state.etag(object)), |of| of(object));
        let sum = state.checksum.filter(|_| range.is_none() && headers.contains_key("x-amz-checksum-mode")).map(|of| of(object));
        if headers.get("if-match").is_some_and(|asked| Some(asked) != etag.as_ref() || asked.starts_with("W/")) {
            return plain("412 Precondition Failed", String::new());
        }
        let mut answer = vec![("Last-Modified", format!("Mon, 23 Nov 2026 08:00:{:02} GMT", state.seconds))];
        answer.extend(etag.map(|etag| ("ETag", etag)));
        let damaged = |mut bytes: Vec<u8>| {
            if let (Some(Fault::Damaged), middle) = (fault, bytes.len() / 2) {
                bytes[middle] ^= 1;
            }
            bytes
        };
        if let Some((start, end)) = range {
            let (start, end): (usize, usize) = (start.parse().unwrap(), end.parse::<usize>().unwrap().min(object.len() - 1));
            answer.push(("Content-Range", format!("bytes {start}-{end}/{}", object.len())));
            return ("206 Partial Content", answer, damaged(object[start..=end].to_vec()), fault);
        }
        answer.extend(sum);
        if method == "HEAD" {
            answer.push(("Content-Length", object.len().to_string()));
            return ("200 OK", answer, Vec::new(), fault);
        }
        ("200 OK", answer, damaged(object.clone()), fault)
    }
}

impl State {
    fn etag(&self, object: &[u8]) -> String {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let tag = if self.tags { hex(&Md5::digest(object)) } else { hex(&sha2::Sha256::digest(object)) };
        format!("\"{tag}\"")
    }

    /// A listing, with a delimiter where one is asked for, and from where the last answer ended.
    fn listing(&self, query: &HashMap<&str, &str>) -> String {
        let prefix = decoded(query.get("prefix").copied().unwrap_or_default());
        let is_shallow = query.contains_key("delimiter");
        let (mut contents, mut folders) = (String::new(), std::collections::BTreeSet::new());
        let times = if self.lists_twice { 2 } else { 1 };
        let token = query.get("continuation-token").map(|token| decoded(token)).unwrap_or_default();
        let rest = self.objects.range(token..).filter(|(key, _)| key.starts_with(&prefix));
        let next = self.page.and_then(|page| rest.clone().nth(page)).map(|(key, _)| key);
        let objects = rest.take_while(|(key, _)| next.is_none_or(|next| *key < next));
        for (key, object) in objects.flat_map(|object| std::iter::repeat_n(object, times)) {
            if let (true, Some((folder, _))) = (is_shallow, key[prefix.len()..].split_once('/')) {
                folders.insert(format!("{prefix}{folder}/"));
                continue;
            }
            contents += &format!(
                "<Contents><Key>{}</Key><LastModified>{}</LastModified><ETag>{}</ETag><Size>{}</Size></Contents>",
                key.replace('&', "&amp;").replace('<', "&lt;"),
                self.modified.unwrap_or("2026-11-23T08:00:00.000Z"),
                self.etag(object).replace('"', "&quot;"),
                self.lies.get(key).copied().unwrap_or(object.len() as u64)
            );
        }
        for folder in folders {
            contents += &format!("<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>");
        }
        let is_cut = next.is_some();
        let next = next.map(|key| format!("<NextContinuationToken>{key}</NextContinuationToken>")).unwrap_or_default();
        format!("<ListBucketResult><IsTruncated>{is_cut}</IsTruncated>{next}{contents}</ListBucketResult>")
    }
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first == b'%' {
            bytes.push(u8::from_str_radix(std::str::from_utf8(&tail[..2]).unwrap(), 16).unwrap());
            rest = &tail[2..];
        } else {
            bytes.push(*first);
        }
    }
    String::from_utf8(bytes).unwrap()
}
