//! The software controller's options, as a DEVICE string gives them: `sim:PATH,lba=4096,mdts=5`.
//! The driver's options have been taken out before.
use super::faults::Fault;
use crate::Result;
use crate::device_name::DeviceName;

/// Which SGLs the controller takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sgls {
    None,
    /// Addresses and lengths are multiples of four.
    Dword,
    Byte,
}

/// What namespaces are kept on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kept {
    /// The file or block device of the DEVICE string: namespace 1. Namespace N is on `PATH.N`.
    OnFiles,
    /// In memory, with this many bytes each.
    InMemory(u64),
    /// Nowhere, with this many bytes each.
    Nowhere(u64),
}

/// The controller's options.
#[derive(Debug, Clone)]
pub(super) struct Options {
    /// `lba=512|4096`: bytes of a logical block. Default 512.
    pub(super) block: u64,
    /// `mdts=N`: a transfer has at most 2^N of the smallest pages; 0 is no limit. Default 7.
    pub(super) mdts: u8,
    /// `mpsmin=N`: the smallest memory page has 2^(12 + N) bytes. Default 0.
    pub(super) mpsmin: u8,
    /// `namespaces=N`. Default 1.
    pub(super) namespaces: u32,
    /// `io-queues=N`: I/O queue pairs that it grants. Default 64.
    pub(super) io_queues: u16,
    /// `entries=N`: entries of the largest queue. Default 1024.
    pub(super) entries: u32,
    /// `dstrd=N`: doorbells are 2^(2 + N) bytes apart. Default 0.
    pub(super) dstrd: u8,
    /// `sgls=none|dword|byte`. Default `byte`.
    pub(super) sgls: Sgls,
    /// `dbbuf=on|off`: shadow doorbells. Default `off`.
    pub(super) shadow_doorbells: bool,
    /// `vwc=on|off`: a volatile write cache. Default `on`.
    pub(super) volatile_cache: bool,
    /// `vectors=N`: interrupts; 0 for none. Default 65.
    pub(super) vectors: u32,
    /// `dmrsl=N`: logical blocks of the largest range of a deallocation; 0 is no limit. Default 0.
    pub(super) dmrsl: u32,
    /// `rtd3e=N`: how long a shutdown may take, in microseconds; 0: not told. Default 0.
    pub(super) rtd3e: u32,
    /// `seed=N`: of everything that looks random. Default 0.
    pub(super) seed: u64,
    /// `inline=on|off`: whether commands are done by the thread that rings the doorbell, before it
    /// goes on. Default `off`: by a thread of the controller's own.
    pub(super) inline: bool,
    /// `memory=BYTES` or `null=BYTES`, with K, M, G or T behind the number: instead of a file.
    pub(super) kept: Kept,
    /// `fault=...`, any number of times.
    pub(super) faults: Vec<Fault>,
}

impl Options {
    /// Takes the controller's options out of a DEVICE string.
    pub(super) fn take(name: &mut DeviceName<'_>) -> Result<Self> {
        fn number<T: std::str::FromStr + PartialOrd>(range: std::ops::RangeInclusive<T>) -> impl Fn(&str) -> Option<T> {
            move |value| value.parse().ok().filter(|number| range.contains(number))
        }
        let switch = |value: &str| match value {
            "on" => Some(true),
            "off" => Some(false),
            _ => None,
        };
        let block = |value: &str| value.parse().ok().filter(|block| matches!(block, 512 | 4096));
        let sgls = |value: &str| match value {
            "none" => Some(Sgls::None),
            "dword" => Some(Sgls::Dword),
            "byte" => Some(Sgls::Byte),
            _ => None,
        };
        let size = "a number of bytes, such as 64M";
        let in_memory = name.take_as("memory", size, bytes)?.map(Kept::InMemory);
        let nowhere = name.take_as("null", size, bytes)?.map(Kept::Nowhere);
        let mut faults = Vec::new();
        while let Some(fault) = name.take_as("fault", "EFFECT:on=KIND:times=N and so on", Fault::parse)? {
            faults.push(fault);
        }
        Ok(Self {
            block: name.take_as("lba", "512 or 4096", block)?.unwrap_or(512),
            mdts: name.take_as("mdts", "a number from 0 to 255", number(0..=255))?.unwrap_or(7),
            mpsmin: name.take_as("mpsmin", "a number from 0 to 15", number(0..=15))?.unwrap_or(0),
            namespaces: name.take_as("namespaces", "a number from 1 to 64", number(1..=64))?.unwrap_or(1),
            io_queues: name.take_as("io-queues", "a number from 1 to 1024", number(1..=1024))?.unwrap_or(64),
            entries: name.take_as("entries", "a number from 1 to 65536", number(1..=65536))?.unwrap_or(1024),
            dstrd: name.take_as("dstrd", "a number from 0 to 15", number(0..=15))?.unwrap_or(0),
            sgls: name.take_as("sgls", "none, dword or byte", sgls)?.unwrap_or(Sgls::Byte),
            shadow_doorbells: name.take_as("dbbuf", "on or off", switch)?.unwrap_or(false),
            volatile_cache: name.take_as("vwc", "on or off", switch)?.unwrap_or(true),
            vectors: name.take_as("vectors", "a number from 0 to 2048", number(0..=2048))?.unwrap_or(65),
            dmrsl: name.take_as("dmrsl", "a number of blocks", number(0..=u32::MAX))?.unwrap_or(0),
            rtd3e: name.take_as("rtd3e", "a number of microseconds", number(0..=u32::MAX))?.unwrap_or(0),
            seed: name.take_as("seed", "a number", number(0..=u64::MAX))?.unwrap_or(0),
            inline: name.take_as("inline", "on or off", switch)?.unwrap_or(false),
            kept: in_memory.or(nowhere).unwrap_or(Kept::OnFiles),
            faults,
        })
    }
}

/// `64M`: bytes, at least a block of 4096.
fn bytes(value: &str) -> Option<u64> {
    let (number, shift) = match value.split_at_checked(value.len().checked_sub(1)?)? {
        (number, "K") => (number, 10),
        (number, "M") => (number, 20),
        (number, "G") => (number, 30),
        (number, "T") => (number, 40),
        _ => (value, 0),
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift).filter(|bytes| (4096..=1 << 60).contains(bytes))
}
