//! File contents on a device: the least that can be between FUSE and a device, by the code with
//! which the daemon reads and writes its own. Each file has a fixed place; there is nothing to look
//! up, to allocate or to recover.
//!
//! It takes whole blocks. What is written without O_DIRECT is gathered to pieces that are worth a
//! request; it is on the device, and to be read, after an fsync.

use std::collections::hash_map::Entry;
use std::sync::Arc;

use fuser::{Errno, ReplyData, ReplyEmpty, ReplyWrite};
use gpunvme_blockdev::{Buffer, BufferPool, Error, Io, OpenMode, Request};
use parking_lot::{Condvar, Mutex};
use rustc_hash::FxHashMap;

const BLOCK: u64 = 4096;
/// Bytes that are gathered before they are written.
const PIECE: usize = 1 << 20;
/// Gathered pieces in flight at the most.
const IN_FLIGHT: usize = 64;

/// The device.
pub struct Disk {
    io: Arc<Io>,
    buffers: Arc<BufferPool>,
    /// Bytes of a file's place.
    file_len: u64,
    gathered: Mutex<FxHashMap<u64, Gathered>>,
    in_flight: Arc<InFlight>,
}

/// Bytes of one file that wait for more.
struct Gathered {
    offset: u64,
    buffer: Buffer,
    len: usize,
}

/// Gathered pieces that are being written, and whether one failed.
#[derive(Default)]
struct InFlight {
    state: Mutex<(usize, Option<Error>)>,
    over: Condvar,
}

impl Disk {
    /// A device with room for files of `file_len` bytes each, and a queue for each of so many
    /// loops.
    pub fn open(device: &str, file_len: u64, loops: usize) -> Result<Disk, Error> {
        let device = gpunvme_blockdev::open(device, OpenMode::ReadWrite)?;
        let buffers = BufferPool::new(device.clone(), 64 << 20);
        let io = Io::threaded(device, loops)?;
        Ok(Disk { io, buffers, file_len, gathered: Mutex::default(), in_flight: Arc::default() })
    }

    /// Where these bytes of a file are.
    fn place(&self, inode: u64, offset: u64, len: usize) -> Result<u64, Errno> {
        if offset.checked_add(len as u64).is_none_or(|end| end > self.file_len) {
            return Err(Errno::EFBIG);
        }
        let files = self.io.device().geometry().len.get() / self.file_len;
        Ok(inode % files * self.file_len + offset)
    }

    /// Reads bytes that lie below the end of a file, from the beginning of a block on.
    pub fn read(&self, inode: u64, offset: u64, len: usize, reply: ReplyData) {
        if len == 0 {
            return reply.data(&[]);
        }
        let whole = len.next_multiple_of(BLOCK as usize);
        match self.place(inode, offset, whole).and_then(|place| Ok((place, self.buffer(whole)?))) {
            Ok((place, mut buffer)) => {
                let request = Request::read(place, [buffer.span(0..whole)]);
                self.io.submit([request], move |result| match result {
                    Ok(()) => reply.data(&buffer.bytes()[..len]),
                    Err(error) => reply.error(Errno::from_i32(error.errno())),
                });
            }
            Err(errno) => reply.error(errno),
        }
    }

    /// Writes whole blocks; `direct`: it is answered when the device has them.
    pub fn write(&self, inode: u64, offset: u64, data: &[u8], direct: bool, reply: ReplyWrite) {
        let len = data.len();
        if !(offset | len as u64).is_multiple_of(BLOCK) {
            return reply.error(Errno::EINVAL);
        }
        if !direct {
            return match self.gather(inode, offset, data) {
                Ok(()) => reply.written(len as u32),
                Err(errno) => reply.error(errno),
            };
        }
        match self.place(inode, offset, len).and_then(|place| Ok((place, self.buffer(len)?))) {
            Ok((place, mut buffer)) => {
                buffer.bytes_mut()[..len].copy_from_slice(data);
                let request = Request::write(place, [buffer.span(0..len)], false);
                self.io.submit([request], move |result| {
                    drop(buffer);
                    match result {
                        Ok(()) => reply.written(len as u32),
                        Err(error) => reply.error(Errno::from_i32(error.errno())),
                    }
                });
            }
            Err(errno) => reply.error(errno),
        }
    }

    /// Writes what was gathered of a file, and makes everything durable.
    pub fn sync(&self, inode: u64, reply: ReplyEmpty) {
        let gathered = self.gathered.lock().remove(&inode);
        let written = gathered.map_or(Ok(()), |gathered| self.write_whole(inode, gathered));
        let mut state = self.in_flight.state.lock();
        self.in_flight.over.wait_while(&mut state, |(count, _)| *count > 0);
        let failed = state.1.take();
        drop(state);
        let flushed = failed.map_or_else(|| self.io.run([Request::flush()]), Err);
        match written.and(flushed.map_err(|error| Errno::from_i32(error.errno()))) {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }

    fn gather(&self, inode: u64, mut offset: u64, mut data: &[u8]) -> Result<(), Errno> {
        self.place(inode, offset, data.len())?;
        let mut files = self.gathered.lock();
        while !data.is_empty() {
            let mut file = match files.entry(inode) {
                Entry::Occupied(file) => file,
                Entry::Vacant(file) => file.insert_entry(Gathered { offset, buffer: self.buffer(PIECE)?, len: 0 }),
            };
            let gathered = file.get_mut();
            let fits = if gathered.offset + gathered.len as u64 == offset { data.len().min(PIECE - gathered.len) } else { 0 };
            gathered.buffer.bytes_mut()[gathered.len..gathered.len + fits].copy_from_slice(&data[..fits]);
            gathered.len += fits;
            if gathered.len == PIECE || fits == 0 {
                let gathered = file.remove();
                self.write_whole(inode, gathered)?;
            }
            (offset, data) = (offset + fits as u64, &data[fits..]);
        }
        Ok(())
    }

    fn write_whole(&self, inode: u64, gathered: Gathered) -> Result<(), Errno> {
        let Gathered { offset, mut buffer, len } = gathered;
        let place = self.place(inode, offset, len)?;
        let mut state = self.in_flight.state.lock();
        self.in_flight.over.wait_while(&mut state, |(count, _)| *count == IN_FLIGHT);
        state.0 += 1;
        drop(state);
        let in_flight = self.in_flight.clone();
        let request = Request::write(place, [buffer.span(0..len)], false);
        self.io.submit([request], move |result| {
            drop(buffer);
            let mut state = in_flight.state.lock();
            state.0 -= 1;
            state.1 = state.1.take().or(result.err());
            in_flight.over.notify_all();
        });
        Ok(())
    }

    fn buffer(&self, len: usize) -> Result<Buffer, Errno> {
        self.buffers.get(len).map_err(|error| Errno::from_i32(error.errno()))
    }
}
