//! Pages of a file that are registered read-only, held as a GPU's driver holds them: pinned, each
//! by itself. What the process sees at their addresses later may be other pages.

use rustix::io::Errno;
use rustix::pipe::{IoSliceRaw, PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, tee, vmsplice};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;

/// Bytes that one pipe holds, by pages.
const CHUNK: usize = 1 << 20;

/// Pages that are held.
pub struct PinnedPages {
    /// Each holds the next [`CHUNK`] bytes.
    pipes: Vec<OwnedFd>,
    len: usize,
    /// A pipe for what is looked at.
    copies: Mutex<(OwnedFd, OwnedFd)>,
}

fn pipe() -> Result<(OwnedFd, OwnedFd), Errno> {
    let (out, into) = pipe_with(PipeFlags::CLOEXEC)?;
    fcntl_setpipe_size(&into, CHUNK)?;
    Ok((out, into))
}

impl PinnedPages {
    /// Holds the pages that are mapped now.
    ///
    /// # Safety
    /// `len` bytes from `base` on, a page's beginning, may be read.
    ///
    /// # Errors
    /// Those of pipe(2) and vmsplice(2): `EFAULT` for pages that do not exist.
    pub unsafe fn new(base: *mut u8, len: usize) -> Result<PinnedPages, Errno> {
        let mut pipes = Vec::new();
        for start in (0..len).step_by(CHUNK) {
            let (out, into) = pipe()?;
            let end = (start + CHUNK).min(len);
            let mut at = start;
            while at < end {
                // SAFETY: the range is the caller's.
                let rest = IoSliceRaw::from_slice(unsafe { std::slice::from_raw_parts(base.add(at), end - at) });
                // SAFETY: the bytes are not given away; they stay what they are.
                at += unsafe { vmsplice(&into, &[rest], SpliceFlags::NONBLOCK) }?;
            }
            pipes.push(out);
        }
        Ok(PinnedPages { pipes, len, copies: Mutex::new(pipe()?) })
    }

    /// What the pages hold now, from an offset on.
    ///
    /// # Panics
    /// If the kernel does not show it.
    pub fn read(&self, mut offset: usize, mut len: usize) -> Vec<u8> {
        assert!(offset + len <= self.len, "{len} bytes at {offset} of {}", self.len);
        let copies = self.copies.lock().unwrap();
        let (out, into) = &*copies;
        let mut bytes = Vec::with_capacity(len);
        while len > 0 {
            let (chunk, skip) = (offset / CHUNK, offset % CHUNK);
            let whole = CHUNK.min(self.len - chunk * CHUNK);
            let seen = tee(self.pipes[chunk].as_fd(), into, whole, SpliceFlags::NONBLOCK).expect("pages that are held");
            assert_eq!(seen, whole, "all of a pipe");
            let mut all = vec![0; whole];
            let mut at = 0;
            while at < whole {
                at += rustix::io::read(out, &mut all[at..]).expect("what was copied");
            }
            let part = len.min(whole - skip);
            bytes.extend_from_slice(&all[skip..skip + part]);
            (offset, len) = (offset + part, len - part);
        }
        bytes
    }
}
