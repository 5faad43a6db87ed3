//! What can go wrong, said so that a person knows what to do.

use rustix::io::Errno;
use std::path::PathBuf;

/// The result of this program's own operations.
pub type Result<T> = std::result::Result<T, Error>;

/// A message for a terminal. Stores and names may have put anything into it.
pub fn printable(error: &Error) -> String {
    let printable = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    error.to_string().chars().map(printable).collect()
}

/// Why a set was not brought in or out.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}: neither a folder nor a URL such as s3://BUCKET/PREFIX, gs://, az://, https:// or file:///PATH")]
    NoUrl(String),
    #[error(
        "{0}: a URL with a user, a password, a query or a fragment would be kept in the manifest: give credentials as the store's own tools take them, and write ? and # of a name as %3F and %23"
    )]
    Credentials(String),
    #[error("{0}: there is no object of that name, and no folder with something in it")]
    Nothing(String),
    #[error("{name:?} cannot be both an object of a store and a file: {why}")]
    Name { name: String, why: &'static str },
    #[error("the set has more than {0} objects: bring in what lies below some of its folders, each into one here")]
    TooMany(usize),
    #[error("the manifest of {0} is none of ours, or larger than {1} bytes")]
    SetManifest(String, u64),
    #[error("{name}: it changed in the store time and again while it was fetched")]
    Changing { name: String },
    #[error("{name}: its {kind} is {found}, and {by} says {expected}; it was not kept")]
    Checksum { name: String, kind: &'static str, found: String, by: &'static str, expected: String },
    #[error("{name}: the store sent something else than the bytes that were asked for: {why}")]
    Answer { name: String, why: String },
    #[error("there is no profile {name} in {}: see AWS_PROFILE", shown(paths))]
    NoProfile { name: String, paths: Vec<PathBuf> },
    #[error(
        "the profile {name} in {} has its credentials from {what}, which gpunvme does not ask: put them into the environment (eval \"$(aws configure export-credentials --profile {name} --format env)\")",
        path.display()
    )]
    Profile { name: String, path: PathBuf, what: &'static str },
    #[error("{}, line {line}: this is no file of the AWS tools, which has sections and settings", path.display())]
    ProfileLine { path: PathBuf, line: usize },
    #[error("{} has no certificates that can be read (AWS_CA_BUNDLE, or ca_bundle of the profile)", .0.display())]
    Authorities(PathBuf),
    #[error("{name}: {}", in_words(source))]
    Store { name: String, source: object_store::Error },
    #[error("{0}")]
    Direct(#[from] gpunvme::Error),
    #[error("{}: cannot {action}: {errno}", path.display())]
    Path { path: PathBuf, action: &'static str, errno: Errno },
    #[error("{} bytes are missing and {free} are free: evict something, or bring in less (--include)", needed)]
    Space { needed: u64, free: u64 },
    #[error("{}: a file has that name, or that of a folder above, perhaps one of another set: take another folder, or that set with --include", .0.display())]
    FileThere(PathBuf),
    #[error(
        "{}: a folder has that name, with files that are not of this set, or were changed here: move them away, or take another folder", .0.display()
    )]
    FolderThere(PathBuf),
    #[error("{} holds the set of {there}: take another folder for {asked}", folder.display())]
    OtherSet { folder: PathBuf, there: String, asked: String },
    #[error("{} is no manifest of a set; remove it, and the files are fetched anew", .0.display())]
    Manifest(PathBuf),
    #[error("{} is none of this program's files: see what it is, and remove it", .0.display())]
    Foreign(PathBuf),
    #[error("{} changed while it was published: publish again", .0.display())]
    ChangedHere(PathBuf),
    #[error(
        "{}: stores like S3 take no parts below {} MiB, but for the last: raise --memory to {} or more",
        path.display(), least >> 20, least >> 20
    )]
    ShortParts { path: PathBuf, least: u64 },
    #[error(
        "{}: a symbolic link of the user {owner} is on the way, and may lead to what is not theirs: run this as that user, or make the link anew",
        path.display()
    )]
    Link { path: PathBuf, owner: u32 },
    #[error("{}: a name with # and a number at its end is that of a file which is being written: give it another, or remove it", .0.display())]
    Unlisted(PathBuf),
    #[error("{}: more than {most} parts of {part} bytes: raise --memory", path.display())]
    TooLong { path: PathBuf, most: u64, part: u64 },
    #[error(
        "the sets hold {bytes} bytes, over the quota of {quota}: what is left is pinned, open, or changed here; {evicted} bytes were evicted"
    )]
    Quota { bytes: u64, quota: u64, evicted: u64 },
    #[error(
        "the set comes to {bytes} bytes, and the quota is {quota}: {held} bytes of other sets stay, which are pinned, open or being hydrated ({evicted} bytes were evicted): raise --quota, bring in less (--include, --rank), or remove a pinned set"
    )]
    OverQuota { bytes: u64, quota: u64, held: u64, evicted: u64 },
    #[error("{} is not below {}: say which folder the sets of the quota are below (--sets)", folder.display(), root.display())]
    NotBelow { folder: PathBuf, root: PathBuf },
    #[error("{0}: it has no manifest: it was not published, or not to its end")]
    NotPublished(String),
    #[error("{0}: another process published there meanwhile: the set is not valid until one of them publishes again, alone")]
    OtherPublisher(String),
    #[error("{0}: two ranks have different files of this name: the set is not valid until they agree, and publish again")]
    Twice(String),
    #[error("--follow is for programs: standard input has to be their socket, of the type SOCK_SEQPACKET")]
    NoFollower,
    #[error("files get no names any more")]
    Stopped,
    #[error("a task of this program ended: {0}")]
    Task(#[from] tokio::task::JoinError),
    #[error("{0}")]
    Runtime(std::io::Error),
}

/// Where machines of a cloud ask for credentials (the instance metadata service).
const METADATA_SERVICE: &str = "169.254.169.254";

/// What a store said, or why it could not be asked, without how often it was.
fn in_words(error: &object_store::Error) -> String {
    let text = error.to_string();
    if text.contains(METADATA_SERVICE) {
        return "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE".to_owned();
    }
    let mut innermost: &dyn std::error::Error = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    let why = innermost.to_string();
    if text.contains(&why) { text } else { format!("{text}: {why}") }
}

fn shown(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" and ")
}

impl Error {
    /// What the store said of `name`.
    pub fn store(name: impl Into<String>) -> impl FnOnce(object_store::Error) -> Error {
        let name = name.into();
        move |source| Error::Store { name, source }
    }

    /// A listing of `name` gives no more names, and does not end.
    pub fn silent(name: &str) -> Error {
        Error::Answer { name: name.into(), why: "its listing goes on, and nothing new comes".into() }
    }

    /// What a system call on `path` said.
    pub fn path<E: IntoErrno>(path: impl Into<PathBuf>, action: &'static str) -> impl FnOnce(E) -> Error {
        let path = path.into();
        move |error| Error::Path { path, action, errno: error.errno() }
    }
}

/// Errors of system calls, as rustix and the standard library have them.
pub trait IntoErrno {
    /// Its number.
    fn errno(&self) -> Errno;
}

impl IntoErrno for Errno {
    fn errno(&self) -> Errno {
        *self
    }
}

impl IntoErrno for std::io::Error {
    fn errno(&self) -> Errno {
        Errno::from_io_error(self).unwrap_or(Errno::IO)
    }
}
