//! Decodes the bytes of an ioctl to a request whose form is valid. Total: every input gives a
//! request or a typed error, and none panics.
//!
//! It guards the daemon against whatever a process puts into an ioctl or a socket message. What
//! depends on state (does the buffer exist, does the segment lie inside it) is not decided here.

use crate::codes::Route;
use crate::command::{Command, IOC_READ_WRITE};
use crate::flags::{GrowFlags, RegisterFlags, ResolveFlags, TransferFlags};
use crate::ring::{Attach, Detach, MAX_RING_TRANSFER, RING_ENTRIES, Ring, Submission};
use crate::structures::{
    Grant, Grow, Log, MAGIC, MAX_NEW_DEVICES, MAX_OFFSET, MAX_SIZE, MAX_TRANSFER, Metrics, NewDevice, Register, Resolve, Segment,
    Sync, TopList, Transfer, Trim, Unregister, VERSION,
};
use smallvec::{SmallVec, smallvec};
use zerocopy::{FromBytes, Immutable, KnownLayout};

/// A request whose form is right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// `INFO`.
    Info,
    /// `REGISTER`: `len` is not zero.
    Register(Register),
    /// `UNREGISTER`.
    Unregister(Unregister),
    /// `RESOLVE`: `offset` is a file offset, and the capacity is what the argument has room for.
    Resolve(Resolve),
    /// `READ`, and what shows that the caller may.
    Read(TransferRequest, Claim),
    /// `WRITE`, and what shows that the caller may.
    Write(TransferRequest, Claim),
    /// `STATS`.
    Stats,
    /// `RING`: the number of entries is one that a ring can have.
    Ring(Ring),
    /// `ATTACH`.
    Attach(Attach),
    /// `DETACH`.
    Detach(Detach),
    /// `GRANT`.
    Grant(Grant),
    /// `SYNC`.
    Sync(Sync),
    /// `METRICS`: the capacity is what the argument has room for.
    Metrics(Metrics),
    /// `LOG`: the filter is UTF-8 with a zero byte behind it.
    Log(Log),
    /// `TOP`: the capacity is what the argument has room for.
    Top(TopList),
    /// `TRIM`.
    Trim(Trim),
    /// `GROW`, and the names of new devices.
    Grow(Grow, Vec<String>),
}

impl Request {
    /// The command.
    pub fn command(&self) -> Command {
        match self {
            Request::Info => Command::Info,
            Request::Register(_) => Command::Register,
            Request::Unregister(_) => Command::Unregister,
            Request::Resolve(_) => Command::Resolve,
            Request::Read(..) => Command::Read,
            Request::Write(..) => Command::Write,
            Request::Stats => Command::Stats,
            Request::Ring(_) => Command::Ring,
            Request::Attach(_) => Command::Attach,
            Request::Detach(_) => Command::Detach,
            Request::Grant(_) => Command::Grant,
            Request::Sync(_) => Command::Sync,
            Request::Metrics(_) => Command::Metrics,
            Request::Log(_) => Command::Log,
            Request::Top(_) => Command::Top,
            Request::Trim(_) => Command::Trim,
            Request::Grow(..) => Command::Grow,
        }
    }
}

/// What a caller gives to show that its process has a file open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Number of a descriptor.
    pub descriptor: i32,
    /// A grant that it was given before; 0 for none.
    pub grant: u64,
}

/// A `READ` or `WRITE`: each segment ends at or before [`MAX_OFFSET`], and together they are at
/// most [`MAX_TRANSFER`] bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferRequest {
    /// The buffer.
    pub buffer: u64,
    /// What the caller insists on, at most one route, and whether it has written back.
    pub flags: TransferFlags,
    /// The pieces, in the caller's order.
    pub segments: SmallVec<[Segment; 1]>,
}

impl TransferRequest {
    /// The route that the caller insists on.
    pub fn required_route(&self) -> Option<Route> {
        required_route(self.flags)
    }
}

/// What is wrong with an argument.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Another driver's command, or one of a later version.
    #[error("ioctl {request:#010x} is no gpunvme command")]
    UnknownCommand {
        /// The ioctl request number.
        request: u32,
    },
    /// The size in the request number fits the command with no number of entries.
    #[error("{command:?} does not take an argument of {size} bytes")]
    Size {
        /// The command.
        command: Command,
        /// The size that the request number gives.
        size: usize,
    },
    /// Fewer or more bytes came than the request number says.
    #[error("{command:?} should have brought {expected} bytes, and brought {got}")]
    Length {
        /// The command.
        command: Command,
        /// The size that the request number gives.
        expected: usize,
        /// Bytes that came.
        got: usize,
    },
    /// The structure's version is not this one.
    #[error("{command:?} is of version {version}; this daemon speaks version {VERSION}")]
    Version {
        /// The command.
        command: Command,
        /// The version it gives.
        version: u32,
    },
    /// Flags without a meaning, or that contradict each other.
    #[error("{command:?} has flags {flags:#x}, which are unknown or exclude each other")]
    Flags {
        /// The command.
        command: Command,
        /// All its flags.
        flags: u32,
    },
    /// A field has a value that it cannot have.
    #[error("{command:?}: {field} cannot be {value}")]
    Field {
        /// The command.
        command: Command,
        /// The field, by its name in the structure.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// A segment ends past the largest file offset, or past the end of any address space.
    #[error("{command:?}: segment {segment} ends past the largest {field}")]
    Segment {
        /// The command.
        command: Command,
        /// Its index.
        segment: usize,
        /// The field, by its name in the structure.
        field: &'static str,
    },
    /// The segments are too much for one call.
    #[error("{command:?}: the segments add up to more than {MAX_TRANSFER} bytes")]
    TooLong {
        /// The command.
        command: Command,
    },
}

impl DecodeError {
    /// The errno that the ioctl fails with.
    pub fn errno(&self) -> i32 {
        // From include/uapi/asm-generic/errno{-base,}.h; spelled out so that applications, which
        // share this module, need no libc for it.
        const ENOTTY: i32 = 25;
        const EINVAL: i32 = 22;
        const EPROTONOSUPPORT: i32 = 93;
        match self {
            DecodeError::UnknownCommand { .. } => ENOTTY,
            DecodeError::Version { .. } => EPROTONOSUPPORT,
            _ => EINVAL,
        }
    }
}

/// Decodes an ioctl: `request` is the kernel's `cmd`, `bytes` what came with it.
///
/// # Errors
/// Names the first thing that is wrong; its [`DecodeError::errno`] is the answer to give.
pub fn decode(request: u32, bytes: &[u8]) -> Result<Request, DecodeError> {
    let command = command_of(request).ok_or(DecodeError::UnknownCommand { request })?;
    let size = (request >> 16) as usize & MAX_SIZE;
    if bytes.len() != size {
        return Err(DecodeError::Length { command, expected: size, got: bytes.len() });
    }
    // First of what the bytes say: another version's structures may have other sizes.
    if bytes.len() >= size_of::<u32>() && u32_at(bytes, 0) != VERSION {
        return Err(DecodeError::Version { command, version: u32_at(bytes, 0) });
    }
    let entries = entries_of(command, size).ok_or(DecodeError::Size { command, size })?;
    let flags = u32_at(bytes, 4);
    if !flags_are_known(command, flags) {
        return Err(DecodeError::Flags { command, flags });
    }
    match command {
        Command::Info => Ok(Request::Info),
        Command::Stats => Ok(Request::Stats),
        Command::Register => register(header(bytes)),
        Command::Unregister => Ok(Request::Unregister(header(bytes))),
        Command::Resolve => resolve(header(bytes), entries),
        Command::Read => transfer(command, header(bytes), entries, bytes).map(|(request, claim)| Request::Read(request, claim)),
        Command::Write => transfer(command, header(bytes), entries, bytes).map(|(request, claim)| Request::Write(request, claim)),
        Command::Ring => ring(header(bytes)),
        Command::Attach => attach(header(bytes)),
        Command::Detach => detach(header(bytes)),
        Command::Grant => grant(header(bytes)),
        Command::Sync => sync(header(bytes)),
        Command::Metrics => metrics(header(bytes), entries),
        Command::Log => log(header(bytes)),
        Command::Top => top(header(bytes), entries),
        Command::Trim => trim(header(bytes)),
        Command::Grow => grow(header(bytes), entries, bytes),
    }
}

fn command_of(request: u32) -> Option<Command> {
    let is_ours = request & IOC_READ_WRITE == IOC_READ_WRITE && (request >> 8) as u8 == MAGIC;
    Command::ALL.into_iter().find(|&command| is_ours && request as u8 == command as u8)
}

/// How many entries follow the header in an argument of `size` bytes.
fn entries_of(command: Command, size: usize) -> Option<usize> {
    let rest = size.checked_sub(command.header_size())?;
    match command.entry_size() {
        0 => (rest == 0).then_some(0),
        entry => rest.is_multiple_of(entry).then_some(rest / entry),
    }
}

/// `decode` has checked that the bytes hold it.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn header<T: FromBytes + KnownLayout + Immutable>(bytes: &[u8]) -> T {
    T::read_from_prefix(bytes).expect("the size of the argument was checked against the header's").0
}

fn flags_are_known(command: Command, flags: u32) -> bool {
    match command {
        Command::Register => RegisterFlags::from_bits(flags).is_some(),
        Command::Read | Command::Write => TransferFlags::from_bits(flags).is_some_and(is_one_route),
        Command::Resolve => ResolveFlags::from_bits(flags).is_some(),
        Command::Grow => GrowFlags::from_bits(flags).is_some(),
        _ => flags == 0,
    }
}

/// Whether at most one route is insisted on.
fn is_one_route(flags: TransferFlags) -> bool {
    flags.intersection(ROUTES).bits().count_ones() <= 1
}

/// Whether a range ends at an offset that a file can have.
fn is_offset_range(start: u64, len: u64) -> bool {
    start.checked_add(len).is_some_and(|end| end <= MAX_OFFSET)
}

const ROUTES: TransferFlags = TransferFlags::REQUIRE_P2P.union(TransferFlags::REQUIRE_BOUNCE).union(TransferFlags::REQUIRE_HOST);

fn required_route(flags: TransferFlags) -> Option<Route> {
    let routes = [
        (TransferFlags::REQUIRE_P2P, Route::P2p),
        (TransferFlags::REQUIRE_BOUNCE, Route::Bounce),
        (TransferFlags::REQUIRE_HOST, Route::Host),
    ];
    routes.into_iter().find(|&(flag, _)| flags.contains(flag)).map(|(_, route)| route)
}

fn zero(command: Command, field: &'static str, value: u64) -> Result<(), DecodeError> {
    if value == 0 { Ok(()) } else { Err(DecodeError::Field { command, field, value }) }
}

fn register(header: Register) -> Result<Request, DecodeError> {
    let command = Command::Register;
    zero(command, "reserved", header.reserved.into())?;
    zero(command, "reserved2", header.reserved2[0] | header.reserved2[1])?;
    // What mmap can take at all; it keeps every sum with an offset inside the buffer far from
    // overflow.
    if header.len == 0 || header.len > MAX_OFFSET {
        return Err(DecodeError::Field { command, field: "len", value: header.len });
    }
    Ok(Request::Register(header))
}

fn ring(header: Ring) -> Result<Request, DecodeError> {
    let command = Command::Ring;
    zero(command, "reserved", header.reserved.into_iter().fold(0, |all, word| all | word))?;
    if !header.entries.is_power_of_two() || !RING_ENTRIES.contains(&header.entries) {
        return Err(DecodeError::Field { command, field: "entries", value: header.entries.into() });
    }
    Ok(Request::Ring(header))
}

fn attach(header: Attach) -> Result<Request, DecodeError> {
    zero(Command::Attach, "reserved", header.reserved.into())?;
    Ok(Request::Attach(header))
}

fn detach(header: Detach) -> Result<Request, DecodeError> {
    zero(Command::Detach, "reserved", header.reserved[0] | header.reserved[1])?;
    Ok(Request::Detach(header))
}

fn grant(header: Grant) -> Result<Request, DecodeError> {
    zero(Command::Grant, "reserved", header.reserved[0] | header.reserved[1])?;
    Ok(Request::Grant(header))
}

fn sync(header: Sync) -> Result<Request, DecodeError> {
    zero(Command::Sync, "reserved", header.reserved)?;
    Ok(Request::Sync(header))
}

fn trim(header: Trim) -> Result<Request, DecodeError> {
    zero(Command::Trim, "reserved", header.reserved[0] | header.reserved[1])?;
    Ok(Request::Trim(header))
}

fn grow(header: Grow, entries: usize, bytes: &[u8]) -> Result<Request, DecodeError> {
    let command = Command::Grow;
    zero(command, "reserved", header.reserved.iter().fold(0, |all, word| all | word))?;
    if entries > MAX_NEW_DEVICES {
        return Err(DecodeError::Field { command, field: "devices", value: entries as u64 });
    }
    let devices = bytes[size_of::<Grow>()..].chunks_exact(size_of::<NewDevice>()).zip(0..);
    let names = devices.map(|(bytes, number)| {
        let end = bytes.iter().position(|&byte| byte == 0).filter(|end| *end > 0);
        let name = end.and_then(|end| str::from_utf8(&bytes[..end]).ok());
        name.map(str::to_owned).ok_or(DecodeError::Field { command, field: "name", value: number })
    });
    Ok(Request::Grow(header, names.collect::<Result<_, _>>()?))
}

fn log(header: Log) -> Result<Request, DecodeError> {
    let command = Command::Log;
    zero(command, "reserved", header.reserved)?;
    let end = header.filter.iter().position(|&byte| byte == 0);
    if end.is_none_or(|end| str::from_utf8(&header.filter[..end]).is_err()) {
        return Err(DecodeError::Field { command, field: "filter", value: header.filter.len() as u64 });
    }
    Ok(Request::Log(header))
}

fn metrics(header: Metrics, entries: usize) -> Result<Request, DecodeError> {
    let command = Command::Metrics;
    if header.capacity as usize != entries || entries == 0 {
        return Err(DecodeError::Field { command, field: "capacity", value: header.capacity.into() });
    }
    Ok(Request::Metrics(header))
}

fn top(header: TopList, entries: usize) -> Result<Request, DecodeError> {
    let command = Command::Top;
    if header.capacity as usize != entries || entries == 0 {
        return Err(DecodeError::Field { command, field: "capacity", value: header.capacity.into() });
    }
    Ok(Request::Top(header))
}

fn resolve(header: Resolve, entries: usize) -> Result<Request, DecodeError> {
    let command = Command::Resolve;
    if header.capacity as usize != entries || entries == 0 {
        return Err(DecodeError::Field { command, field: "capacity", value: header.capacity.into() });
    }
    if header.offset > MAX_OFFSET {
        return Err(DecodeError::Field { command, field: "offset", value: header.offset });
    }
    Ok(Request::Resolve(header))
}

fn transfer(command: Command, header: Transfer, entries: usize, bytes: &[u8]) -> Result<(TransferRequest, Claim), DecodeError> {
    if header.segments as usize != entries {
        return Err(DecodeError::Field { command, field: "segments", value: header.segments.into() });
    }
    let mut total = 0u64;
    let mut segments = SmallVec::with_capacity(entries);
    for (index, bytes) in bytes[size_of::<Transfer>()..].chunks_exact(size_of::<Segment>()).enumerate() {
        let segment = Segment::read_from_bytes(bytes).expect("a chunk has the size of a segment");
        for (field, at) in [("file_offset", segment.file_offset), ("buffer_offset", segment.buffer_offset)] {
            if !is_offset_range(at, segment.len) {
                return Err(DecodeError::Segment { command, segment: index, field });
            }
        }
        total = total.saturating_add(segment.len);
        segments.push(segment);
    }
    if total > MAX_TRANSFER {
        return Err(DecodeError::TooLong { command });
    }
    let flags = TransferFlags::from_bits_retain(header.flags);
    Ok((TransferRequest { buffer: header.buffer, flags, segments }, Claim { descriptor: header.descriptor, grant: header.grant }))
}

impl Attach {
    /// What shows how the file is open.
    pub fn claim(&self) -> Claim {
        Claim { descriptor: self.descriptor, grant: self.grant }
    }
}

impl Submission {
    /// `READ` or `WRITE` and its request, if it can mean anything: its ranges end at offsets, its
    /// flags are known.
    pub fn decode(&self) -> Option<(Command, TransferRequest)> {
        let command = [Command::Read, Command::Write].into_iter().find(|command| *command as u32 == self.command)?;
        let flags = TransferFlags::from_bits(self.flags).filter(|flags| is_one_route(*flags))?;
        let segment = Segment { file_offset: self.file_offset, buffer_offset: self.buffer_offset, len: self.len };
        let fits = is_offset_range(segment.file_offset, segment.len) && is_offset_range(segment.buffer_offset, segment.len);
        if !fits || self.len > MAX_RING_TRANSFER || self.reserved != 0 {
            return None;
        }
        Some((command, TransferRequest { buffer: self.buffer, flags, segments: smallvec![segment] }))
    }
}
