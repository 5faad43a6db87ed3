//! INIT: what the kernel and this program have in common.

use std::io;

use crate::uring::Size;
use crate::wire::{InitFlags, InitIn, InitOut, MAJOR, MINOR, OLDEST_MINOR};

/// Bytes of a page, in which the kernel counts requests.
const PAGE: u32 = 4096;

/// What a filesystem asks of the kernel.
#[derive(Clone, Copy, Debug)]
pub struct Wishes {
    /// Capabilities that it handles, where the kernel has them.
    pub capabilities: InitFlags,
    /// The largest WRITE and READ in bytes, a multiple of 4 KiB.
    pub max_write: u32,
    /// Requests that no process waits for, at once.
    pub max_background: u16,
    /// How many of them make the mount congested.
    pub congestion: u16,
    /// Whether requests are to travel through io_uring, where that can be.
    pub io_uring: bool,
}

/// What was agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// The minor version of the protocol.
    pub minor: u32,
    /// The capabilities.
    pub capabilities: InitFlags,
    /// The largest WRITE in bytes.
    pub max_write: u32,
    /// The most pages of a request.
    pub max_pages: u16,
}

/// What an INIT is answered with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Agreed(InitOut, Negotiated),
    /// The kernel speaks a newer major version, and is to ask again in this one.
    Again(InitOut),
}

/// Negotiates. `entries`: those of each queue of io_uring, where there are queues.
///
/// # Errors
/// The kernel's protocol is too old.
pub(crate) fn negotiate(asked: &InitIn, wishes: &Wishes, entries: Option<Size>) -> io::Result<Answer> {
    let mut out = InitOut {
        major: MAJOR,
        minor: MINOR,
        max_readahead: 0,
        flags: 0,
        max_background: 0,
        congestion_threshold: 0,
        max_write: 0,
        time_gran: 0,
        max_pages: 0,
        map_alignment: 0,
        flags2: 0,
        max_stack_depth: 0,
        request_timeout: 0,
        unused: [0; 11],
    };
    if asked.major > MAJOR {
        return Ok(Answer::Again(out));
    }
    if asked.major < MAJOR || asked.minor < OLDEST_MINOR {
        let text = format!(
            "the kernel speaks version {}.{} of the FUSE protocol; {MAJOR}.{OLDEST_MINOR} (Linux 5.4) or newer is needed",
            asked.major, asked.minor
        );
        return Err(io::Error::new(io::ErrorKind::Unsupported, text));
    }
    let mut offered = u64::from(asked.flags);
    if InitFlags::from_bits_retain(offered).contains(InitFlags::INIT_EXT) {
        offered |= u64::from(asked.flags2) << 32;
    }
    // These have no price and change no request.
    let always = InitFlags::ASYNC_READ | InitFlags::BIG_WRITES | InitFlags::MAX_PAGES | InitFlags::INIT_EXT;
    let mut wanted = wishes.capabilities | always;
    wanted.set(InitFlags::OVER_IO_URING, entries.is_some());
    let capabilities = InitFlags::from_bits_retain(offered) & wanted;
    let minor = asked.minor.min(MINOR);
    // The kernel asks for entries of the largest request that was agreed on (`fuse_uring_create`).
    let entries = entries.filter(|_| capabilities.contains(InitFlags::OVER_IO_URING));
    let most = entries.and_then(|entries| u32::try_from(entries.payload).ok()).unwrap_or(u32::MAX);
    let background = entries.map_or(u16::MAX, |entries| entries.background());
    let (max_write, max_readahead) = (wishes.max_write.min(most), asked.max_readahead.min(most));
    out.minor = minor;
    out.max_readahead = max_readahead;
    out.flags = capabilities.bits() as u32;
    out.flags2 = (capabilities.bits() >> 32) as u32;
    out.max_background = wishes.max_background.min(background);
    out.congestion_threshold = wishes.congestion.min(background);
    out.max_write = max_write;
    out.time_gran = 1;
    out.max_pages = u16::try_from(max_write.max(max_readahead).div_ceil(PAGE)).unwrap_or(u16::MAX);
    Ok(Answer::Agreed(out, Negotiated { minor, capabilities, max_write, max_pages: out.max_pages }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WISHES: Wishes = Wishes {
        capabilities: InitFlags::POSIX_ACL.union(InitFlags::CREATE_SUPP_GROUP),
        max_write: 1 << 20,
        max_background: 256,
        congestion: 192,
        io_uring: false,
    };

    fn ask_with(major: u32, minor: u32, flags: InitFlags, entries: Option<Size>) -> io::Result<Answer> {
        let (low, high) = (flags.bits() as u32, (flags.bits() >> 32) as u32);
        let asked = InitIn { major, minor, max_readahead: 131_072, flags: low, flags2: high, unused: [0; 11] };
        negotiate(&asked, &WISHES, entries)
    }

    fn ask(major: u32, minor: u32, flags: InitFlags) -> io::Result<Answer> {
        ask_with(major, minor, flags, None)
    }

    #[test]
    fn requests_through_io_uring_are_as_large_as_the_entries_and_leave_some_of_them() {
        let entries = Some(Size { depth: 8, payload: 65_536 });
        let Ok(Answer::Agreed(out, agreed)) = ask_with(7, 45, InitFlags::all(), entries) else { panic!("refused") };
        assert!(agreed.capabilities.contains(InitFlags::OVER_IO_URING));
        assert_eq!((out.max_write, out.max_readahead, out.max_pages), (65_536, 65_536, 16));
        assert_eq!((out.max_background, out.congestion_threshold), (6, 6));
        // Where the kernel has none, they stay as large as they were to be.
        let old = InitFlags::all() - InitFlags::OVER_IO_URING;
        let Ok(Answer::Agreed(out, agreed)) = ask_with(7, 41, old, entries) else { panic!("refused") };
        assert!(!agreed.capabilities.contains(InitFlags::OVER_IO_URING));
        assert_eq!((out.max_write, out.max_readahead, out.max_pages), (1 << 20, 131_072, 256));
        assert_eq!((out.max_background, out.congestion_threshold), (256, 192));
    }

    #[test]
    fn capabilities_are_those_that_both_have() {
        let Ok(Answer::Agreed(out, agreed)) = ask(7, 45, InitFlags::all()) else { panic!("refused") };
        let always = InitFlags::ASYNC_READ | InitFlags::BIG_WRITES | InitFlags::MAX_PAGES | InitFlags::INIT_EXT;
        assert_eq!(agreed.capabilities, WISHES.capabilities | always);
        assert_eq!((out.minor, out.max_write, out.max_pages, out.flags2), (45, 1 << 20, 256, 1 << 2));
        // `flags2` counts only with its flag.
        let Ok(Answer::Agreed(out, agreed)) = ask(7, 31, InitFlags::all() - InitFlags::INIT_EXT) else { panic!("refused") };
        assert_eq!((agreed.minor, out.flags2), (31, 0));
        assert!(!agreed.capabilities.contains(InitFlags::CREATE_SUPP_GROUP));
        let Ok(Answer::Agreed(_, agreed)) = ask(7, 99, InitFlags::empty()) else { panic!("refused") };
        assert_eq!(
            (agreed.minor, agreed.capabilities),
            (MINOR, InitFlags::empty()),
            "a newer kernel is spoken to in this version"
        );
    }

    #[test]
    fn another_major_version_is_asked_for_or_refused() {
        assert!(matches!(ask(8, 0, InitFlags::all()), Ok(Answer::Again(out)) if out.major == 7));
        let refused = ask(7, 30, InitFlags::all()).unwrap_err();
        assert!(refused.to_string().contains("7.30"), "{refused}");
        assert!(ask(6, 99, InitFlags::all()).is_err());
    }
}
