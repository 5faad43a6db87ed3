//! Settings of a mount, from three sources: `-o` options, the configuration file, and the defaults,
//! in that order of precedence. The names are the same in the first two.

use std::fmt;
use std::fs;
use std::io::{self, Read};
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use serde::Deserialize;

use super::error::MountError;

/// The configuration file that is read when `config=FILE` names no other and it exists.
pub const DEFAULT_CONFIG: &str = "/etc/gpunvme.toml";

/// The longest configuration file, in bytes: far more than all settings together.
const MAX_CONFIG: usize = 64 << 10;

/// Bytes that the metadata cache may use when nothing else is said.
pub const DEFAULT_CACHE: u64 = 256 << 20;
/// The smallest metadata cache that the engine works well with: one large transaction fits.
pub const MIN_CACHE: u64 = 16 << 20;
/// Bytes of small writes that may wait in memory when nothing else is said.
pub const DEFAULT_WRITE_BUFFER: u64 = 64 << 20;
/// The smallest write buffer: a few of the largest FUSE requests.
pub const MIN_WRITE_BUFFER: u64 = 4 << 20;
/// Seconds between two commits of the journal when nothing else is said: what a crash can cost an
/// application that never calls fsync.
pub const DEFAULT_COMMIT: u64 = 5;
/// Longest time between two commits, in seconds.
pub const MAX_COMMIT: u64 = 300;
/// More FUSE loops than this cost memory and win nothing.
pub const MAX_THREADS: usize = 256;
/// Default filter of the log, in the syntax of `RUST_LOG`.
pub const DEFAULT_LOG: &str = "info";

/// The largest size that a setting may have.
const MOST: Size = Size(1 << 40);

/// A number of bytes, written as a plain number or with a suffix: `64M`, `1G`, `512KiB`. Suffixes
/// are powers of 1024.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
pub struct Size(pub u64);

impl fmt::Display for Size {
    /// With the largest suffix that leaves a whole number.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shift = [40, 30, 20, 10].into_iter().find(|shift| self.0 > 0 && self.0.is_multiple_of(1 << shift));
        match shift {
            Some(shift) => write!(f, "{}{}", self.0 >> shift, [' ', 'K', 'M', 'G', 'T'][shift / 10]),
            None => write!(f, "{}", self.0),
        }
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not a size: a number of bytes, or one with K, M, G or T, as in 512M");
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
            "" | "B" => 0,
            "K" | "KB" | "KIB" => 10,
            "M" | "MB" | "MIB" => 20,
            "G" | "GB" | "GIB" => 30,
            "T" | "TB" | "TIB" => 40,
            _ => return Err(wrong()),
        };
        let count: u64 = digits.parse().map_err(|_| wrong())?;
        count.checked_mul(1 << shift).map(Self).ok_or_else(wrong)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Size;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a number of bytes, or a string like \"512M\"")
            }

            fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<Size, E> {
                u64::try_from(value).map(Size).map_err(|_| E::custom("a size cannot be negative"))
            }

            fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Size, E> {
                Ok(Size(value))
            }

            fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Size, E> {
                value.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

/// How the kernel's requests are to come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Transport {
    /// The one that is best for most: `/dev/fuse`.
    #[default]
    Auto,
    /// By `/dev/fuse`.
    Classic,
    /// By io_uring, where the system has it; else by `/dev/fuse`, with a warning.
    IoUring,
}

impl FromStr for Transport {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "classic" => Ok(Self::Classic),
            "io_uring" => Ok(Self::IoUring),
            _ => Err(format!("{text:?} is no transport: auto, classic or io_uring")),
        }
    }
}

/// Settings from one source; those that it leaves open are `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Partial {
    /// Mount read-only.
    pub ro: Option<bool>,
    /// Let users other than the one who mounts in.
    pub allow_other: Option<bool>,
    /// Bytes of the metadata cache.
    pub cache: Option<Size>,
    /// Bytes of small writes that wait in memory.
    pub write_buffer: Option<Size>,
    /// FUSE loops.
    pub threads: Option<usize>,
    /// How the kernel's requests are to come.
    pub transport: Option<Transport>,
    /// Seconds between two commits of the journal.
    pub commit: Option<u64>,
    /// Tell the device of blocks that files gave up.
    pub discard: Option<bool>,
    /// Filter of the log, in the syntax of `RUST_LOG`.
    pub log: Option<String>,
}

/// The text of a file, or as much of it as shows that it is too long.
fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    fs::File::open(path)?.take(MAX_CONFIG as u64 + 1).read_to_string(&mut text)?;
    Ok(text)
}

impl Partial {
    /// Reads a configuration file. Without `path` that is [`DEFAULT_CONFIG`], which need not
    /// exist.
    ///
    /// # Errors
    /// With the file's name, and the line where one is at fault: the file cannot be read, is no
    /// TOML, has a key that does not exist, or a value of the wrong type.
    pub fn from_config(path: Option<&Path>) -> Result<Self, MountError> {
        let file = path.unwrap_or(Path::new(DEFAULT_CONFIG));
        let text = match read(file) {
            Ok(text) if text.len() > MAX_CONFIG => {
                let why = format!("{}: longer than a configuration file can be: {MAX_CONFIG} bytes", file.display());
                return Err(MountError::Usage(why));
            }
            Ok(text) => text,
            Err(error) if path.is_none() && error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => return Err(MountError::Usage(format!("{}: {error}", file.display()))),
        };
        let settings: Self = toml::from_str(&text).map_err(|error| {
            let line = error.span().map_or(1, |span| 1 + text[..span.start].matches('\n').count());
            MountError::Usage(format!("{}:{line}: {}", file.display(), error.message()))
        })?;
        // Here it is known where a value comes from.
        let complete = settings.clone().complete(true, 1);
        complete.map_err(|error| MountError::Usage(format!("{}: {error}", file.display())))?;
        Ok(settings)
    }

    /// These settings, and those of `lower` where these leave something open.
    pub fn over(self, lower: Self) -> Self {
        Self {
            ro: self.ro.or(lower.ro),
            allow_other: self.allow_other.or(lower.allow_other),
            cache: self.cache.or(lower.cache),
            write_buffer: self.write_buffer.or(lower.write_buffer),
            threads: self.threads.or(lower.threads),
            transport: self.transport.or(lower.transport),
            commit: self.commit.or(lower.commit),
            discard: self.discard.or(lower.discard),
            log: self.log.or(lower.log),
        }
    }

    /// Everything set: what is still open gets its default. `root` says whether root mounts,
    /// `cores` how many processors there are.
    ///
    /// # Errors
    /// If a value is outside its range.
    pub fn complete(self, root: bool, cores: usize) -> Result<Settings, MountError> {
        fn within<T: PartialOrd + fmt::Display>(name: &str, value: T, min: T, max: T) -> Result<T, MountError> {
            if value < min || value > max {
                return Err(MountError::Usage(format!("{name}={value} is out of range: {min} to {max}")));
            }
            Ok(value)
        }
        let cache = self.cache.map_or(DEFAULT_CACHE, |size| size.0);
        let write_buffer = self.write_buffer.map_or(DEFAULT_WRITE_BUFFER, |size| size.0);
        let commit = within("commit", self.commit.unwrap_or(DEFAULT_COMMIT), 1, MAX_COMMIT)?;
        Ok(Settings {
            read_only: self.ro.unwrap_or(false),
            allow_other: self.allow_other.unwrap_or(root),
            cache: within("cache", Size(cache), Size(MIN_CACHE), MOST)?.0,
            write_buffer: within("write_buffer", Size(write_buffer), Size(MIN_WRITE_BUFFER), MOST)?.0,
            threads: within("threads", self.threads.unwrap_or(cores.clamp(2, 16)), 1, MAX_THREADS)?,
            transport: self.transport.unwrap_or_default(),
            commit: Duration::from_secs(commit),
            discard: self.discard.unwrap_or(false),
            log: self.log.unwrap_or_else(|| DEFAULT_LOG.to_owned()),
        })
    }
}

/// The settings of one mount, complete and in range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Mount read-only.
    pub read_only: bool,
    /// Let users other than the one who mounts in.
    pub allow_other: bool,
    /// Bytes of the metadata cache.
    pub cache: u64,
    /// Bytes of small writes that wait in memory.
    pub write_buffer: u64,
    /// FUSE loops.
    pub threads: usize,
    /// How the kernel's requests are to come.
    pub transport: Transport,
    /// Time between two commits of the journal.
    pub commit: Duration,
    /// Tell the device of blocks that files gave up.
    pub discard: bool,
    /// Filter of the log, in the syntax of `RUST_LOG`.
    pub log: String,
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn config(text: &str) -> Result<Partial, String> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        let name = file.path().display().to_string();
        Partial::from_config(Some(file.path())).map_err(|error| error.to_string().replace(&name, "FILE"))
    }

    #[test]
    fn sizes_have_binary_suffixes() {
        let size = |text: &str| text.parse::<Size>().map(|size| size.0);
        assert_eq!(size("4096"), Ok(4096));
        assert_eq!(size("64k"), Ok(64 << 10));
        assert_eq!(size("512M"), Ok(512 << 20));
        assert_eq!(size("3GiB"), Ok(3 << 30));
        assert_eq!(size("1T"), Ok(1 << 40));
        for wrong in ["", "M", "1.5G", "-1", "10X", "99999999999T", "1 G"] {
            assert!(size(wrong).unwrap_err().contains("is not a size"), "{wrong}");
        }
    }

    #[test]
    fn the_configuration_file_sets_everything() {
        let text = "ro = true\nallow_other = false\ncache = \"1G\"\nwrite_buffer = 8388608\nthreads = 3\ntransport = \"io_uring\"\ncommit = 30\ndiscard = true\nlog = \"debug\"\n";
        let settings = config(text).unwrap().complete(true, 2).unwrap();
        assert_eq!(
            settings,
            Settings {
                read_only: true,
                allow_other: false,
                cache: 1 << 30,
                write_buffer: 8 << 20,
                threads: 3,
                transport: Transport::IoUring,
                commit: Duration::from_secs(30),
                discard: true,
                log: "debug".to_owned(),
            }
        );
    }

    #[test]
    fn a_wrong_configuration_file_is_refused_with_its_line() {
        let unknown = config("# sizes\ncache = \"1G\"\ncach = 3\n").unwrap_err();
        assert!(unknown.starts_with("FILE:3: unknown field `cach`"), "{unknown}");
        let size = config("\ncache = \"lots\"\n").unwrap_err();
        assert!(size.starts_with("FILE:2: \"lots\" is not a size"), "{size}");
        let negative = config("cache = -1\n").unwrap_err();
        assert!(negative.starts_with("FILE:1: a size cannot be negative"), "{negative}");
        let kind = config("threads = 2\nro = 1\n").unwrap_err();
        assert!(kind.starts_with("FILE:2: invalid type"), "{kind}");
        let range = config("commit = 900\n").unwrap_err();
        assert!(range.starts_with("FILE: commit=900 is out of range"), "{range}");
        let syntax = config("ro = true\n\ncache 1G\n").unwrap_err();
        assert!(syntax.starts_with("FILE:3: "), "{syntax}");
    }

    #[test]
    fn a_file_without_end_is_refused() {
        let error = Partial::from_config(Some(Path::new("/dev/zero"))).unwrap_err();
        assert!(error.to_string().starts_with("/dev/zero: longer than a configuration file can be"), "{error}");
    }

    #[test]
    fn only_a_named_configuration_file_must_exist() {
        let error = Partial::from_config(Some(Path::new("/nonexistent/gpunvme.toml"))).unwrap_err();
        assert_eq!(error.exit_code(), 1);
        assert!(error.to_string().starts_with("/nonexistent/gpunvme.toml: No such file"), "{error}");
    }

    #[test]
    fn the_upper_source_wins_setting_by_setting() {
        let upper = Partial { threads: Some(1), ro: Some(false), ..Partial::default() };
        let lower = Partial { threads: Some(8), ro: Some(true), commit: Some(9), ..Partial::default() };
        let settings = upper.over(lower).complete(false, 4).unwrap();
        assert_eq!(settings.threads, 1);
        assert!(!settings.read_only);
        assert_eq!(settings.commit, Duration::from_secs(9));
        assert_eq!(settings.cache, DEFAULT_CACHE);
    }

    #[test]
    fn defaults_follow_the_caller_and_the_machine() {
        let root = Partial::default().complete(true, 4).unwrap();
        assert!(root.allow_other);
        assert_eq!(root.threads, 4);
        let user = Partial::default().complete(false, 1).unwrap();
        assert!(!user.allow_other);
        assert_eq!(user.threads, 2);
    }

    #[test]
    fn values_out_of_range_are_refused_by_name() {
        let refuse = |partial: Partial| partial.complete(true, 2).unwrap_err().to_string();
        let threads = refuse(Partial { threads: Some(0), ..Partial::default() });
        assert_eq!(threads, "threads=0 is out of range: 1 to 256");
        let commit = refuse(Partial { commit: Some(301), ..Partial::default() });
        assert_eq!(commit, "commit=301 is out of range: 1 to 300");
        let cache = refuse(Partial { cache: Some(Size(MIN_CACHE - 1)), ..Partial::default() });
        assert!(cache.starts_with("cache=16777215 is out of range"), "{cache}");
    }
}
