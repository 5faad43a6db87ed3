//! The command line of `gpunvme-stage`, which `gpunvme` has too, and hands on: what speaks HTTP
//! and TLS is no part of the program that root runs on controllers.

// What is said of a structure would be the help of the command that it is of.
#![allow(missing_docs)]

use clap::{Args, Subcommand, ValueEnum};
use std::path::PathBuf;
use std::str::FromStr;

/// The name of the program.
pub const PROGRAM: &str = "gpunvme-stage";

#[derive(Debug, Subcommand)]
pub enum Stage {
    /// What the sets below a folder hold, and when they were used
    Status {
        /// The folder
        folder: PathBuf,
        /// Also name the files that were evicted
        #[arg(long)]
        evicted: bool,
    },
}

#[derive(Debug, Args)]
pub struct Evict {
    /// The folder that the sets are below
    pub folder: PathBuf,
    /// What they may hold together: bytes, with K, M, G or T, or a percentage of the filesystem
    #[arg(long, value_name = "QUOTA")]
    pub quota: Quota,
    /// Tell what would go if nothing is open, and remove nothing
    #[arg(long)]
    pub dry_run: bool,
}

#[derive(Debug, Args)]
pub struct Limits {
    /// How many parts are in flight: unless told 16 that come, or 48 that go
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub concurrency: Option<u16>,
    /// Memory for parts, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub memory: u32,
    /// Say on standard error how far it is, in lines of JSON
    #[arg(long)]
    pub progress: bool,
}

#[derive(Debug, Args)]
pub struct Hydrate {
    /// s3://BUCKET/PREFIX, gs://, az://, https://, file:///PATH, or a folder
    pub source: String,
    /// The folder; made where there is none
    pub folder: PathBuf,
    /// Only objects whose names in the set match: `*` stands for any characters, `?` for one
    #[arg(long, value_name = "PATTERN")]
    pub include: Vec<String>,
    /// Only each N-th object, beginning with the I-th
    #[arg(long, value_name = "I/N")]
    pub rank: Option<Share>,
    /// What of an object is compared before its file appears
    #[arg(long, value_enum, default_value_t = Verify::Checksum)]
    pub verify: Verify,
    /// Never evict the set
    #[arg(long)]
    pub pin: bool,
    /// What the sets below the folder of --sets may hold together, this one among them: bytes, with
    /// K, M, G or T, or a percentage of the filesystem. Others go before anything is fetched
    #[arg(long, value_name = "QUOTA")]
    pub quota: Option<Quota>,
    /// The folder that the sets of the quota are below; the one above FOLDER unless told
    #[arg(long, value_name = "DIR", requires = "quota")]
    pub sets: Option<PathBuf>,
    /// Fail unless the set was published whole
    #[arg(long)]
    pub published: bool,
    /// Tell what would be fetched, and fetch nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Tell a program, by a socket that is standard input, which bytes of which files are there,
    /// and lend it the memory that they arrived in
    #[arg(long)]
    pub follow: bool,
    #[command(flatten)]
    pub limits: Limits,
}

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Verify {
    /// Its length, and the checksum that the set's manifest has, or else the store
    Checksum,
    /// Its length
    None,
}

#[derive(Debug, Args)]
pub struct Publish {
    /// The folder
    pub folder: PathBuf,
    /// s3://BUCKET/PREFIX, gs://, az://, file:///PATH, or a folder
    pub destination: String,
    /// The folder is the I-th of N that the set is published from; the last of them makes it valid
    #[arg(long, value_name = "I/N", requires = "attempt")]
    pub rank: Option<Share>,
    /// What all ranks of one set have in common, and no earlier try to publish it there had
    #[arg(long, value_name = "NAME", requires = "rank")]
    pub attempt: Option<String>,
    /// Of the published sets beside the destination, itself among them, keep the N newest
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub keep: Option<u32>,
    #[command(flatten)]
    pub limits: Limits,
}

/// How many bytes the sets may hold together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quota {
    Bytes(u64),
    /// Of the filesystem that the folder is on.
    Percent(u64),
}

/// A plain number up to this one lacks its unit.
const MOST_WITHOUT_UNIT: u64 = 1000;

impl FromStr for Quota {
    type Err = &'static str;

    fn from_str(text: &str) -> std::result::Result<Quota, Self::Err> {
        const WRONG: &str = "a quota is a number of bytes, with K, M, G or T, or a percentage such as 80%";
        if let Some(percent) = text.strip_suffix('%') {
            return percent.parse().ok().filter(|&percent| percent <= 100).map(Quota::Percent).ok_or(WRONG);
        }
        let power = text.chars().last().and_then(|unit| "KMGT".find(unit));
        let number = if power.is_some() { &text[..text.len() - 1] } else { text };
        let factor = power.map_or(1, |power| 1024_u64.pow(power as u32 + 1));
        let bytes = number.parse::<u64>().ok().and_then(|number| number.checked_mul(factor)).ok_or(WRONG)?;
        if power.is_none() && (1..=MOST_WITHOUT_UNIT).contains(&bytes) {
            return Err("a quota of so few bytes keeps nothing: write 80% or 80G, or 0 for nothing at all");
        }
        Ok(Quota::Bytes(bytes))
    }
}

/// The I-th of N, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    pub index: usize,
    pub of: usize,
}

impl FromStr for Share {
    type Err = &'static str;

    fn from_str(text: &str) -> std::result::Result<Share, Self::Err> {
        let parsed = text.split_once('/').and_then(|(index, of)| Some((index.parse().ok()?, of.parse().ok()?)));
        match parsed {
            Some((index, of)) if index < of => Ok(Share { index, of }),
            _ => Err("a share is I/N, with I from 0 to N-1"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotas_are_bytes_or_a_percentage() {
        for (text, quota) in
            [("0", Quota::Bytes(0)), ("3K", Quota::Bytes(3072)), ("2T", Quota::Bytes(2 << 40)), ("80%", Quota::Percent(80))]
        {
            assert_eq!(text.parse(), Ok(quota));
        }
        assert_eq!("1001".parse(), Ok(Quota::Bytes(1001)));
        for wrong in ["", "K", "%", "101%", "80", "1000", "-1", "1.5G", "1k", "99999999999T", "ü"] {
            assert!(wrong.parse::<Quota>().is_err(), "{wrong}");
        }
    }
}
