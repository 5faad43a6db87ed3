//! The command line.

use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::str::FromStr;

/// Files of a gpunvme mount, by way of the device itself
#[derive(Parser)]
#[command(name = "gpunvme", version, arg_required_else_help = true)]
pub struct Args {
    /// Print JSON
    #[arg(long, global = true)]
    pub json: bool,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Tell what a mount is and can do
    Info {
        /// The mount, or anything in it
        mount: PathBuf,
    },
    /// Tell where a file lies on the device
    Map {
        /// The file
        file: PathBuf,
    },
    /// Read a file into registered memory, and tell how it moved
    Read(Read),
    /// Write a file from registered memory, and tell how it moved
    Write(Write),
    /// Tell what a mount did since it was mounted
    Stats {
        /// The mount, or anything in it
        mount: PathBuf,
    },
}

#[derive(clap::Args)]
pub struct Read {
    /// The file
    pub file: PathBuf,
    /// The memory to read into: `host`
    #[arg(long, value_name = "MEMORY", default_value = "host")]
    pub to: Memory,
    /// Where in the file to begin, in bytes (K, M, G and T count in powers of 1024)
    #[arg(long, value_name = "BYTES", value_parser = size, default_value = "0")]
    pub offset: u64,
    /// How much to read, in bytes; otherwise to the end of the file
    #[arg(long, value_name = "BYTES", value_parser = size)]
    pub length: Option<u64>,
    /// Print the SHA-256 of what arrived in the buffer
    #[arg(long)]
    pub checksum: bool,
    /// Copy what arrived to a file, or to standard output (`-`)
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

#[derive(clap::Args)]
pub struct Write {
    /// The file; created where there is none
    pub file: PathBuf,
    /// The memory to write from: `host`
    #[arg(long, value_name = "MEMORY", default_value = "host")]
    pub from: Memory,
    /// Where the data comes from; otherwise, and for `-`, standard input
    #[arg(long, value_name = "FILE")]
    pub input: Option<PathBuf>,
    /// Where in the file to write, in bytes, and leave the rest of it; otherwise the file is replaced
    #[arg(long, value_name = "BYTES", value_parser = size)]
    pub offset: Option<u64>,
    /// Print the SHA-256 of what was in the buffer
    #[arg(long)]
    pub checksum: bool,
}

/// Where the buffer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    Host,
}

impl FromStr for Memory {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split(':').next() {
            Some("host") if text == "host" => Ok(Memory::Host),
            Some("gpu") => Err("this build cannot move data to or from GPU memory; use host".into()),
            _ => Err("the memory must be host".into()),
        }
    }
}

fn size(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (&text[..at], 10),
        Some((at, 'm' | 'M')) => (&text[..at], 20),
        Some((at, 'g' | 'G')) => (&text[..at], 30),
        Some((at, 't' | 'T')) => (&text[..at], 40),
        _ => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| "must be a number of bytes, such as 4096, 64K or 1G".to_owned())?;
    number
        .checked_mul(1 << shift)
        .filter(|&bytes| bytes <= i64::MAX as u64)
        .ok_or_else(|| "is more than a file can hold".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_suffixes() {
        assert_eq!([size("0"), size("4096"), size("64K"), size("2g")], [Ok(0), Ok(4096), Ok(65536), Ok(2 << 30)]);
        for wrong in ["", "K", "-1", "1.5M", "8388608T", "99999999999999999999", "1é"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn gpus_are_refused_in_words() {
        assert_eq!("host".parse(), Ok(Memory::Host));
        assert!("gpu:0".parse::<Memory>().unwrap_err().contains("GPU memory"));
        assert!("host:0".parse::<Memory>().is_err());
    }
}
