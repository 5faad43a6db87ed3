//! Files to and from memory that cannot be registered: a vector, a stack, another library's
//! allocation. The device moves the bytes to and from a registered buffer, and the CPU copies them
//! on, one piece while the others are in flight.

use crate::buffer::{Buffer, Shared};
use crate::error::{Error, Result};
use crate::file::File;
use crate::mount::Mount;
use crate::ring::{Attached, Completed, Operation, Ring, Wait};
use crate::transfer::Transfer;
use gpunvme_abi::{Command, Reason, Segment, TransferFlags};
use std::sync::Arc;

/// Bytes of a piece.
const PIECE: usize = 2 << 20;
/// Pieces in flight; a power of two, and not more than the smallest ring has entries.
const PIECES: usize = 4;

/// Moves files of one mount to and from any memory, with a copy by the CPU: slower than registered
/// memory, and without the page cache. It has 8 MiB of registered memory, and is for one thread at
/// a time.
///
/// ```no_run
/// use gpunvme::{Copier, File, Mount};
///
/// let file = File::open("/data/header")?;
/// let mut header = vec![0; 1 << 20];
/// let done = Copier::new(&Mount::open("/data")?)?.read(&file, 0, &mut header)?;
/// header.truncate(done.bytes() as usize); // the file may be shorter
/// # Ok::<(), gpunvme::Error>(())
/// ```
#[derive(Debug)]
pub struct Copier {
    buffer: Arc<Shared>,
    ring: Ring,
    completed: Vec<Completed>,
}

/// The caller's side of a copy.
enum Memory<'a> {
    Read(&'a mut [u8]),
    Write(&'a [u8]),
}

impl Memory<'_> {
    fn len(&self) -> usize {
        match self {
            Memory::Read(memory) => memory.len(),
            Memory::Write(memory) => memory.len(),
        }
    }
}

impl Copier {
    /// Makes one for files of this mount.
    ///
    /// # Errors
    /// Those of [`Buffer::memfd`], [`Mount::register`] and [`Ring::new`].
    pub fn new(mount: &Mount) -> Result<Copier> {
        let buffer = mount.register(Buffer::memfd(PIECE * PIECES)?)?.share();
        Ok(Copier { buffer, ring: Ring::new(mount, PIECES as u32)?, completed: Vec::new() })
    }

    /// Reads from `offset` on, and waits for it. Ends early, and successfully, where the file
    /// does. The bytes count as `host`, `hole` and `edge`, with the reason
    /// [`Reason::NotRegistered`].
    ///
    /// # Errors
    /// [`Error::Transfer`] says what was moved before; the memory behind that may have changed
    /// too. [`Error::RingClosed`] where the volume was unmounted. [`Error::Path`], also for a file
    /// of another mount.
    pub fn read(&mut self, file: &File, offset: u64, memory: &mut [u8]) -> Result<Transfer> {
        self.copy(file, offset, Memory::Read(memory))
    }

    /// Writes from `offset` on, and waits for it. The file becomes longer where it ends before.
    /// Like write(2) it is durable after fsync(2).
    ///
    /// # Errors
    /// As [`Copier::read`]; bytes behind those that were moved may have been written too.
    pub fn write(&mut self, file: &File, offset: u64, memory: &[u8]) -> Result<Transfer> {
        self.copy(file, offset, Memory::Write(memory))
    }

    fn copy(&mut self, file: &File, offset: u64, mut memory: Memory<'_>) -> Result<Transfer> {
        self.drain()?; // a call that could not wait has left them
        let mut done = match memory.len() {
            0 => Ok(Transfer::default()),
            len if len <= PIECE => self.copy_piece(file, offset, &mut memory),
            _ => self.copy_pieces(file, offset, &mut memory),
        };
        let told = match &mut done {
            Ok(done) | Err(Error::Transfer { done, .. }) => &mut done.reason,
            Err(_) => return done,
        };
        *told = told.map(|_| Reason::NotRegistered);
        done
    }

    /// One piece, by an ioctl: to attach the file to the ring takes as long.
    fn copy_piece(&mut self, file: &File, offset: u64, memory: &mut Memory<'_>) -> Result<Transfer> {
        let segment = Segment { file_offset: offset, buffer_offset: 0, len: memory.len() as u64 };
        let registered = self.buffer.registered();
        match memory {
            Memory::Read(memory) => {
                let done = file.transfer(Command::Read, registered, &[segment], TransferFlags::empty())?;
                self.buffer.copy_out(0, &mut memory[..done.bytes() as usize]);
                Ok(done)
            }
            Memory::Write(memory) => {
                self.buffer.copy_in(0, memory);
                file.transfer(Command::Write, registered, &[segment], TransferFlags::empty())
            }
        }
    }

    /// Many, by the ring. They end in any order, and are copied in theirs.
    fn copy_pieces(&mut self, file: &File, offset: u64, memory: &mut Memory<'_>) -> Result<Transfer> {
        let is_written_back = file.write_back(offset, memory.len() as u64)?;
        let attached = self.ring.attach(file)?;
        let mut outcomes: [Option<Result<Transfer>>; PIECES] = Default::default();
        let (mut begun, mut ended, mut count) = (0, 0, memory.len().div_ceil(PIECE));
        let (mut sum, mut failed) = (Transfer::default(), None);
        while ended < count {
            while begun < count.min(ended + PIECES) {
                self.begin(&attached, offset, memory, begun, is_written_back)?;
                begun += 1;
            }
            self.ring.complete(Wait::Forever, &mut self.completed)?;
            for Completed { user_data, result, .. } in self.completed.drain(..) {
                outcomes[user_data as usize % PIECES] = Some(result);
            }
            while ended < count
                && let Some(outcome) = outcomes[ended % PIECES].take()
            {
                let piece = piece(ended, memory.len());
                ended += 1;
                match outcome {
                    Ok(done) => {
                        if done.bytes() < piece.len() as u64 {
                            count = ended; // the file ends here
                        }
                        if let Memory::Read(memory) = memory {
                            self.buffer.copy_out(slot(ended - 1), &mut memory[piece][..done.bytes() as usize]);
                        }
                        sum.add(&done);
                    }
                    Err(error) => (failed, count) = (Some(error), ended),
                }
            }
        }
        self.drain()?;
        match failed {
            None => Ok(sum),
            Some(Error::Transfer { path, action, errno, reason, segment, offset, done }) => {
                sum.add(&done);
                Err(Error::Transfer { path, action, errno, reason, segment, offset, done: sum })
            }
            Some(other) => Err(other),
        }
    }

    /// Waits for what is in flight.
    fn drain(&mut self) -> Result<()> {
        while self.ring.in_flight() > 0 {
            self.ring.complete(Wait::Forever, &mut self.completed)?;
        }
        self.completed.clear();
        Ok(())
    }

    fn begin(&mut self, file: &Attached, offset: u64, memory: &Memory<'_>, number: usize, is_written_back: bool) -> Result<()> {
        let (range, at) = (piece(number, memory.len()), slot(number));
        let (file_offset, len) = (offset.saturating_add(range.start as u64), range.len() as u64);
        let operation = match memory {
            Memory::Read(_) => Operation::read(file, file_offset, &self.buffer, at as u64, len),
            Memory::Write(memory) => {
                self.buffer.copy_in(at, &memory[range]);
                Operation::write(file, file_offset, &self.buffer, at as u64, len)
            }
        };
        self.ring.push(&operation.tagged(number as u64).written_back(is_written_back))
    }
}

/// Where a piece lies in the caller's memory of `len` bytes.
fn piece(number: usize, len: usize) -> std::ops::Range<usize> {
    number * PIECE..len.min((number + 1) * PIECE)
}

/// Where a piece lies in the registered buffer.
fn slot(number: usize) -> usize {
    number % PIECES * PIECE
}
