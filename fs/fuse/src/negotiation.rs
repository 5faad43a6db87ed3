//! INIT: what the kernel and this program have in common.

use std::io;

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
}

/// What an INIT is answered with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Agreed(InitOut, Negotiated),
    /// The kernel speaks a newer major version, and is to ask again in this one.
    Again(InitOut),
}

/// Negotiates.
///
/// # Errors
/// The kernel's protocol is too old.
pub(crate) fn negotiate(asked: &InitIn, wishes: &Wishes) -> io::Result<Answer> {
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
    let capabilities = InitFlags::from_bits_retain(offered) & (wishes.capabilities | always);
    let minor = asked.minor.min(MINOR);
    out.minor = minor;
    out.max_readahead = asked.max_readahead;
    out.flags = capabilities.bits() as u32;
    out.flags2 = (capabilities.bits() >> 32) as u32;
    out.max_background = wishes.max_background;
    out.congestion_threshold = wishes.congestion;
    out.max_write = wishes.max_write;
    out.time_gran = 1;
    out.max_pages = u16::try_from(wishes.max_write.max(asked.max_readahead).div_ceil(PAGE)).unwrap_or(u16::MAX);
    Ok(Answer::Agreed(out, Negotiated { minor, capabilities, max_write: wishes.max_write }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WISHES: Wishes = Wishes {
        capabilities: InitFlags::POSIX_ACL.union(InitFlags::CREATE_SUPP_GROUP),
        max_write: 1 << 20,
        max_background: 256,
        congestion: 192,
    };

    fn ask(major: u32, minor: u32, flags: InitFlags) -> io::Result<Answer> {
        let (low, high) = (flags.bits() as u32, (flags.bits() >> 32) as u32);
        negotiate(&InitIn { major, minor, max_readahead: 131_072, flags: low, flags2: high, unused: [0; 11] }, &WISHES)
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
