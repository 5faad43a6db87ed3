//! The ways in which bytes get to and from a subject. A mover serves one thread.

use std::error::Error;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use gpunvme::{Operation, Segment};
use gpunvme_blockdev::{BlockDevice, OpenMode, Queue, Region, Request, Wait};
use gpunvme_tests::tree;

use crate::data::Data;

/// Address and length of memory for O_DIRECT are multiples of this.
const PAGE: usize = 4096;
const HUGE_PAGE: usize = 2 << 20;

/// Moves blocks of one size, in one direction.
pub trait Mover: Send {
    /// Moves a block at each of the offsets, all of them at once where there is a way to, and waits
    /// for all.
    fn go(&mut self, offsets: &[u64]) -> Result<(), Box<dyn Error>>;

    /// Makes what was written durable.
    fn sync(&mut self) -> Result<(), Box<dyn Error>>;
}

/// The right mover for a file on a mounted filesystem.
pub fn of_file(path: &Path, data: &Data) -> Result<Box<dyn Mover>, Box<dyn Error>> {
    if data.depth > 1 {
        // The code that drives the bare device drives the file: the comparison is of what is below
        // it.
        let file = gpunvme_blockdev::open(path.to_str().ok_or("a path that is not UTF-8")?, OpenMode::ReadWrite)?;
        return of_device(&file, 0, data);
    }
    let flags = if data.direct { libc::O_DIRECT } else { 0 };
    let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
    let memory = tree::pattern(1, data.block as usize + PAGE);
    let start = memory.as_ptr().align_offset(PAGE);
    Ok(Box::new(Calls { file, memory, start, block: data.block as usize, write: data.write }))
}

/// Moves through the device's own queue, with its own memory, from `base` on.
pub fn of_device(device: &Arc<dyn BlockDevice>, base: u64, data: &Data) -> Result<Box<dyn Mover>, Box<dyn Error>> {
    // In huge pages, as are all buffers here of this size or more. Each page is written first, so
    // that none is the kernel's shared zero page.
    let region = Region::allocate((data.block as usize * data.depth).max(HUGE_PAGE))?;
    region.write_at(0, &tree::pattern(1, region.len()))?;
    device.map(&region)?;
    let queue = device.open_queue()?;
    Ok(Box::new(Queued { _device: device.clone(), queue, region, base, block: data.block as usize, write: data.write }))
}

/// Moves through the ioctl, one segment a block.
pub fn of_ioctl(path: &Path, data: &Data) -> Result<Box<dyn Mover>, Box<dyn Error>> {
    let file = if data.write { gpunvme::File::create(path)? } else { gpunvme::File::open(path)? };
    file.set_caching(Some(gpunvme::gpu::Caching::Never)); // the device is measured
    let mut memory = gpunvme::Buffer::memfd(data.block as usize * data.depth)?;
    memory.fill(1);
    let buffer = file.mount()?.register(memory)?;
    Ok(Box::new(Ioctl { file, buffer, block: data.block, write: data.write, segments: Vec::new() }))
}

/// Moves through a ring, one operation a block.
pub fn of_ring(path: &Path, data: &Data) -> Result<Box<dyn Mover>, Box<dyn Error>> {
    let file = if data.write { gpunvme::File::create(path)? } else { gpunvme::File::open(path)? };
    let mount = file.mount()?;
    let mut memory = gpunvme::Buffer::memfd(data.block as usize * data.depth)?;
    memory.fill(1);
    let buffer = mount.register(memory)?.share();
    let ring = gpunvme::Ring::new(&mount, (data.depth as u32).next_power_of_two())?;
    let attached = ring.attach(&file)?;
    Ok(Box::new(Ring { file, ring, attached, buffer, block: data.block, write: data.write, completed: Vec::new() }))
}

struct Calls {
    file: File,
    memory: Vec<u8>,
    start: usize,
    block: usize,
    write: bool,
}

impl Mover for Calls {
    fn go(&mut self, offsets: &[u64]) -> Result<(), Box<dyn Error>> {
        let memory = &mut self.memory[self.start..self.start + self.block];
        for &offset in offsets {
            if self.write {
                self.file.write_all_at(memory, offset)?;
            } else {
                self.file.read_exact_at(memory, offset)?;
            }
        }
        Ok(())
    }

    fn sync(&mut self) -> Result<(), Box<dyn Error>> {
        Ok(self.file.sync_data()?)
    }
}

struct Queued {
    _device: Arc<dyn BlockDevice>,
    queue: Box<dyn Queue>,
    region: Arc<Region>,
    base: u64,
    block: usize,
    write: bool,
}

impl Queued {
    fn run(&self, mut requests: Vec<Request>) -> Result<(), Box<dyn Error>> {
        let count = requests.len();
        self.queue.submit(&mut requests);
        let mut done = Vec::with_capacity(count);
        while done.len() < count {
            self.queue.complete(Wait::Forever, &mut done)?;
        }
        done.into_iter().try_for_each(|completion| Ok(completion.result?))
    }
}

impl Mover for Queued {
    fn go(&mut self, offsets: &[u64]) -> Result<(), Box<dyn Error>> {
        let request = |(slot, &offset): (usize, &u64)| {
            let span = self.region.span(slot * self.block..(slot + 1) * self.block);
            if self.write {
                Request::write(self.base + offset, vec![span], false)
            } else {
                Request::read(self.base + offset, vec![span])
            }
        };
        self.run(offsets.iter().enumerate().map(request).collect())
    }

    fn sync(&mut self) -> Result<(), Box<dyn Error>> {
        self.run(vec![Request::flush()])
    }
}

struct Ioctl {
    file: gpunvme::File,
    buffer: gpunvme::Registered,
    block: u64,
    write: bool,
    segments: Vec<Segment>,
}

impl Mover for Ioctl {
    fn go(&mut self, offsets: &[u64]) -> Result<(), Box<dyn Error>> {
        self.segments.clear();
        self.segments.extend(offsets.iter().enumerate().map(|(slot, &offset)| Segment {
            file_offset: offset,
            buffer_offset: slot as u64 * self.block,
            len: self.block,
        }));
        let done = if self.write {
            self.file.write(&self.buffer, &self.segments)?
        } else {
            self.file.read(&mut self.buffer, &self.segments)?
        };
        if done.bytes() != offsets.len() as u64 * self.block {
            return Err(format!("the ioctl moved {} bytes of {}", done.bytes(), offsets.len() as u64 * self.block).into());
        }
        Ok(())
    }

    fn sync(&mut self) -> Result<(), Box<dyn Error>> {
        Ok(rustix::fs::fdatasync(&self.file)?)
    }
}

struct Ring {
    file: gpunvme::File,
    ring: gpunvme::Ring,
    attached: gpunvme::Attached,
    buffer: Arc<gpunvme::Shared>,
    block: u64,
    write: bool,
    completed: Vec<gpunvme::Completed>,
}

impl Mover for Ring {
    fn go(&mut self, offsets: &[u64]) -> Result<(), Box<dyn Error>> {
        for (slot, &offset) in offsets.iter().enumerate() {
            let operation = if self.write { Operation::write } else { Operation::read };
            self.ring.push(&operation(&self.attached, offset, &self.buffer, slot as u64 * self.block, self.block))?;
        }
        while self.ring.in_flight() > 0 {
            self.ring.complete(gpunvme::Wait::Forever, &mut self.completed)?;
        }
        for completed in self.completed.drain(..) {
            let moved = completed.result?.bytes();
            if moved != self.block {
                return Err(format!("the ring moved {moved} bytes of {}", self.block).into());
            }
        }
        Ok(())
    }

    fn sync(&mut self) -> Result<(), Box<dyn Error>> {
        Ok(rustix::fs::fdatasync(&self.file)?)
    }
}
