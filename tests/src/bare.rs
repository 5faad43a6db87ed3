//! The bare device: io_uring with O_DIRECT, host memory, nothing in between.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::error::Error;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, types};

/// What threads do with each device.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Whether they write.
    pub write: bool,
    /// Bytes of an operation.
    pub size: u64,
    /// Whether operations are at random places: else one behind the other.
    pub random: bool,
    /// Threads of each device.
    pub threads: usize,
    /// Operations that each of them has in flight.
    pub depth: usize,
    /// Bytes of each device, from its beginning on; none for all.
    pub len: Option<u64>,
}

/// Operations a second, of all these devices or files together.
///
/// # Errors
/// One cannot be opened, or answers less than it was asked for.
pub fn measure(paths: &[&Path], work: &Work, time: Duration) -> Result<f64, Box<dyn Error>> {
    let open = |path: &&Path| -> Result<(File, u64), Box<dyn Error>> {
        let file = OpenOptions::new().read(true).write(work.write).custom_flags(libc::O_DIRECT).open(path)?;
        let len = length(&file)?;
        Ok((file, work.len.unwrap_or(len).min(len)))
    };
    let files = paths.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let start = Instant::now();
    let counts: Vec<Result<u64, String>> = std::thread::scope(|scope| {
        let threads: Vec<_> = files
            .iter()
            .flat_map(|file| (0..work.threads).map(move |number| (file, number)))
            .map(|((file, len), number)| {
                scope.spawn(move || one(file, *len, work, number as u64, time).map_err(|error| error.to_string()))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a thread that does not panic")).collect()
    });
    let elapsed = start.elapsed().as_secs_f64();
    let mut operations = 0;
    for count in counts {
        operations += count?;
    }
    Ok(operations as f64 / elapsed)
}

fn length(file: &File) -> Result<u64, Box<dyn Error>> {
    if file.metadata()?.file_type().is_block_device() {
        return Ok(rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?);
    }
    Ok(file.metadata()?.len())
}

fn one(file: &File, len: u64, work: &Work, number: u64, time: Duration) -> Result<u64, Box<dyn Error>> {
    let memory = Memory::new(work.size as usize * work.depth);
    let mut ring = IoUring::new(work.depth.next_power_of_two() as u32)?;
    let blocks = len / work.size;
    let share = blocks / work.threads as u64;
    if share == 0 {
        return Err(format!("{len} bytes are too few for {} threads with operations of {} bytes", work.threads, work.size).into());
    }
    let (mut state, mut position) = (0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(number + 1), 0);
    let mut offset = || {
        if !work.random {
            position += 1;
            return (number * share + (position - 1) % share) * work.size;
        }
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % blocks * work.size
    };
    let mut entry = |slot: usize| {
        let (fd, at) = (types::Fd(file.as_raw_fd()), memory.at(slot * work.size as usize));
        let entry = if work.write {
            opcode::Write::new(fd, at, work.size as u32).offset(offset()).build()
        } else {
            opcode::Read::new(fd, at, work.size as u32).offset(offset()).build()
        };
        entry.user_data(slot as u64)
    };
    let (start, mut done, mut in_flight) = (Instant::now(), 0, 0);
    for slot in 0..work.depth {
        // SAFETY: the slot lies in `memory`, which is freed after the last completion was taken,
        // below; the file outlives the call.
        unsafe { ring.submission().push(&entry(slot)) }?;
        in_flight += 1;
    }
    while in_flight > 0 {
        ring.submit_and_wait(1)?;
        let over = start.elapsed() >= time;
        let ready: Vec<_> = ring.completion().collect();
        for completion in ready {
            in_flight -= 1;
            if completion.result() != work.size as i32 {
                // What is still in flight must not write to memory that was freed.
                std::mem::forget(memory);
                return Err(format!("the bare device answered {}", completion.result()).into());
            }
            done += 1;
            if !over {
                // SAFETY: as above.
                unsafe { ring.submission().push(&entry(completion.user_data() as usize)) }?;
                in_flight += 1;
            }
        }
    }
    Ok(done)
}

/// Page-aligned memory.
struct Memory {
    start: *mut u8,
    layout: Layout,
}

impl Memory {
    fn new(len: usize) -> Memory {
        let layout = Layout::from_size_align(len, 4096).expect("a size that fits");
        // SAFETY: the size is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() {
            handle_alloc_error(layout);
        }
        Memory { start, layout }
    }

    fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset < self.layout.size());
        // SAFETY: inside of what was allocated.
        unsafe { self.start.add(offset) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and nothing uses it any more.
        unsafe { dealloc(self.start, self.layout) }
    }
}
