//! An array over a file for kernels, and the memory of its cache.

use super::layout::{ArrayState, Changes, KernelArray, Word};
use super::memory::Own;
use super::ring::{BLOCK, GivenUp, GpuRing};
use crate::error::{Error, Result};
use crate::file::File;
use crate::gpu::request::Segment;
use crate::gpu::transfers::Transfers;
use crate::ring::Attached;
use rustix::io::Errno;
use std::sync::Arc;

/// The shortest page.
const SHORTEST_PAGE: usize = 512;
/// Frames whose words are looked at together: a set has a multiple of them.
const WAYS: u32 = 4;

/// What the cache of a [`GpuArray`] is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuArraySettings {
    /// Bytes of a page, which is read and written back as a whole: a power of two from 512 to the
    /// ring's slot. 4096 unless told.
    pub page: usize,
    /// Bytes of the cache, in memory of the GPU: whole sets, as far as they fit, and no more than
    /// the array has pages, but at least one. 256 MiB unless told.
    pub cache: usize,
    /// Frames of a set, in which a page may lie: a multiple of 4 up to 64. 8 unless told.
    pub ways: u32,
    /// Bytes of the array: those behind the file's end are zeros, and become part of the file when
    /// they are written back. As long as the file is now unless told.
    pub len: Option<u64>,
    /// Whether kernels may change it. Not unless told.
    pub writable: bool,
}

impl Default for GpuArraySettings {
    fn default() -> Self {
        GpuArraySettings { page: 4096, cache: 256 << 20, ways: 8, len: None, writable: false }
    }
}

/// What kernels found in a [`GpuArray`] since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuArrayStats {
    /// Accesses whose page was in the cache.
    pub hits: u64,
    /// Pages read from the file.
    pub misses: u64,
    /// Pages written back by kernels.
    pub written: u64,
}

/// A file that kernels use as an array, by `gpunvme_array.h`, with a cache in memory of the GPU.
///
/// ```no_run
/// use gpunvme::gpu::{GpuArraySettings, GpuRing, GpuRingSettings};
/// use gpunvme::{File, Mount};
///
/// let ring = GpuRing::on_gpu(&Mount::open("/data")?, 0, GpuRingSettings::default())?;
/// let weights = ring.array(&File::open("/data/weights")?, GpuArraySettings::default())?;
/// // The parameter of a kernel: gpunvme::array<float>.
/// let parameter = weights.for_kernels();
/// # let _ = parameter;
/// # Ok::<(), gpunvme::Error>(())
/// ```
///
/// What kernels changed is in the file when it was flushed, by them or by [`GpuArray::flush`];
/// dropping the array drops it. Kernels use an array no longer than its ring.
#[derive(Debug)]
pub struct GpuArray {
    _file: Attached,
    /// Device and inode of the file.
    identity: (u64, u64),
    /// Its ring's, too, when it is dropped before a write has ended that a kernel gave up.
    state: Arc<Own>,
    given_up: GivenUp,
    /// Until it is dropped.
    frames: Option<Own>,
    place: ArrayState,
    page: usize,
    for_kernels: KernelArray,
}

impl GpuRing {
    /// Makes an array over a file, whose kernels use this ring. The file may be closed afterwards.
    ///
    /// # Errors
    /// As [`GpuRing::attach`]; [`Error::Path`] with `EINVAL` where the settings are none, with
    /// `EBADF` where the array is to be writable and the file is not open for both;
    /// [`Error::Memory`] and [`Error::Cuda`] where there is not as much memory.
    pub fn array(&self, file: &File, settings: GpuArraySettings) -> Result<GpuArray> {
        let GpuArraySettings { page, cache, ways, .. } = settings;
        let failed = |action, errno| Error::Path { path: file.path().to_owned(), action, errno };
        if !page.is_power_of_two() || page < SHORTEST_PAGE || page > self.slot() {
            let action = "make an array with pages that are no power of two from 512 to the ring's slot, over it";
            return Err(failed(action, Errno::INVAL));
        }
        if ways == 0 || !ways.is_multiple_of(WAYS) || ways > 64 {
            return Err(failed("make an array with ways that are no multiple of 4 up to 64, over it", Errno::INVAL));
        }
        if settings.writable && !file.is_writable()? {
            return Err(failed("make an array for changes over it: it is not open for reading and writing", Errno::BADF));
        }
        let len = settings.len.map_or_else(|| file.size(), Ok)?;
        let pages = len.div_ceil(page as u64).max(1);
        // Pages have 40 bits in a frame's word.
        if pages > 1 << 40 {
            return Err(failed("make an array of more than 2^40 pages over it", Errno::FBIG));
        }
        let enough = pages.div_ceil(ways.into());
        let sets = ((cache / page / ways as usize) as u64).clamp(1, enough.min(1 << 25)) as u32;
        let place = ArrayState::new(sets, ways);
        let (path, gpu) = (file.path(), self.gpu());
        let mut state = Own::new(path, gpu, place.bytes)?;
        state.put(path, 0, &vec![0; place.bytes])?;
        let frames = Own::new(path, gpu, place.frames as usize * page)?;
        let attached = self.attach(file)?;
        let for_kernels = KernelArray {
            ring: self.for_kernels(),
            file: attached.name(),
            bytes: len,
            words: state.address() + place.words as u64,
            sets: state.address() + place.sets as u64,
            frames: frames.address(),
            counters: state.address(),
            ways,
            sets_count: sets,
            page_bits: page.ilog2(),
            writable: settings.writable.into(),
        };
        debug_assert!(page <= BLOCK || page.is_multiple_of(BLOCK));
        let (state, given_up) = (Arc::new(state), self.given_up());
        Ok(GpuArray {
            _file: attached,
            identity: file.identity()?,
            state,
            given_up,
            frames: Some(frames),
            place,
            page,
            for_kernels,
        })
    }
}

impl GpuArray {
    /// What kernels get as their `gpunvme::array`. It is valid as long as this and the ring.
    pub fn for_kernels(&self) -> KernelArray {
        self.for_kernels
    }

    /// Bytes of the cache.
    pub fn cache(&self) -> usize {
        self.place.frames as usize * self.page
    }

    /// What kernels found, also while they run.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn stats(&self) -> Result<GpuArrayStats> {
        let counters = self.state.get(0, ArrayState::COUNTERS)?;
        let sum = |at: usize| {
            let of_each = counters.chunks(ArrayState::COUNTER).map(|counter| &counter[at..at + 8]);
            of_each.map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes"))).sum()
        };
        Ok(GpuArrayStats { hits: sum(0), misses: sum(8), written: sum(16) })
    }

    /// Writes to the file what kernels changed, and returns how many bytes that were. `file` is the
    /// one that the array was made over, open for writing; no kernel uses the array meanwhile.
    ///
    /// # Errors
    /// [`Error::Path`] with `EINVAL` for another file, with `ETIMEDOUT`, when all others are
    /// written, for pages whose write a kernel gave up, and which may still happen; as
    /// [`Transfers::write`]. What could not be written is still in the cache.
    pub fn flush(&mut self, file: &File) -> Result<u64> {
        if file.identity()? != self.identity {
            let action = "flush an array that was made over another file to it";
            return Err(Error::Path { path: file.path().to_owned(), action, errno: Errno::INVAL });
        }
        let mut words = self.words()?;
        let changes = Changes::take(&mut words);
        let segment = |frame: &usize| {
            let file_offset = words[*frame].page() * self.page as u64;
            let len = (self.for_kernels.bytes - file_offset).min(self.page as u64);
            Segment { file_offset, address: self.for_kernels.frames + (frame * self.page) as u64, len }
        };
        let segments: Vec<Segment> = changes.frames.iter().map(segment).collect();
        if !segments.is_empty() {
            self.write_segments(file, &segments)?;
        }
        let state = Arc::get_mut(&mut self.state).expect("it is this array's alone until that is dropped");
        for frames in changes.words {
            let bytes: Vec<u8> = words[frames.clone()].iter().flat_map(|word| word.0.to_le_bytes()).collect();
            state.put(file.path(), self.place.words + frames.start * 8, &bytes)?;
        }
        if changes.is_unsettled {
            let action = "flush a page whose write was given up, and may still happen, to it";
            return Err(Error::Path { path: file.path().to_owned(), action, errno: Errno::TIMEDOUT });
        }
        Ok(segments.iter().map(|segment| segment.len).sum())
    }

    /// The words of its frames, as they are at some moment.
    fn words(&self) -> Result<Vec<Word>> {
        Ok(Word::all_of(&self.state.get(self.place.words, self.place.frames as usize * 8)?))
    }

    fn write_segments(&self, file: &File, segments: &[Segment]) -> Result<()> {
        match self.frames.as_ref().expect("it is there until the array is dropped") {
            Own::Gpu { .. } => {
                let transfers = Transfers::new(&file.mount()?)?;
                // SAFETY: they are frames of this array, which the caller of `flush` says no kernel
                // uses.
                unsafe { transfers.write(file, segments) }?;
            }
            Own::Cpu { memory } => {
                for segment in segments {
                    let at = (segment.address - self.for_kernels.frames) as usize;
                    file.write_at(&memory[at..at + segment.len as usize], segment.file_offset)?;
                }
            }
        }
        Ok(())
    }
}

impl Drop for GpuArray {
    fn drop(&mut self) {
        // Waits for kernels that use it: from then on no write begins.
        self.frames = None;
        // Whichever kernel takes the completion of such a write changes the word of its frame.
        let may_be_written = || self.words().map_or(true, |words| words.iter().any(|word| word.is_being_written()));
        if self.for_kernels.writable != 0 && may_be_written() {
            self.given_up.lock().push(self.state.clone());
        }
    }
}
