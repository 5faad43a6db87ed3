//! Routes between a mount and GPU memory, proved: a pattern goes to a file and back each way, and
//! what came is compared with what CUDA's copies and ordinary reads see.

use super::numa;
use crate::gpu::{self, Memory};
use crate::report::Failure;
use crate::scratch;
use gpunvme::gpu::{Segment, Transfers};
use gpunvme::{Error, File, Moved, Reason, Require, Route, Transfer};
use gpunvme_cuda::{CudaError, Gpu};
use rustix::io::Errno;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Bytes that go each way, if the volume has room for twice that and the GPU for that; and the
/// least.
const LEN: u64 = 256 << 20;
const LEAST: u64 = 1 << 20;
/// Bytes that are compared at a time.
const STEP: usize = 16 << 20;

/// The outcome of the proof of one route.
pub enum Outcome {
    /// Both ways, and every byte was right.
    Proved(Proof),
    /// The transfer did not take the route, for this reason.
    NotTaken(Reason),
    /// Bytes were wrong, or took another route.
    Wrong(&'static str),
}

/// How a route did.
pub struct Proof {
    /// Bytes each way.
    pub bytes: u64,
    /// What the first use took: with `p2p` the memory is exported and registered then, with `cache`
    /// the file's pages are.
    pub first_use: Duration,
    /// None for a route that only reads take.
    pub write: Option<Duration>,
    pub read: Duration,
    /// Of the pattern, and so of what came back.
    pub sha256: String,
    /// Of `cache`, where the pages lie, if the kernel tells.
    pub nodes: Vec<OnNode>,
}

/// Cached pages on a NUMA node.
pub struct OnNode {
    pub node: u32,
    pub bytes: u64,
    /// How many bytes were read for this: of ranges most of which lies there.
    pub read_bytes: u64,
    pub read: Duration,
}

/// A file without a name on a mount, and GPU memory of its length.
pub struct Ground {
    file: File,
    ordinary: std::fs::File,
    memory: Memory,
    transfers: Transfers,
    /// A number that makes this run's patterns differ from those of other runs.
    salt: u64,
}

impl Ground {
    pub fn new(gpu: &Gpu, directory: &Path) -> Result<Ground, Failure> {
        let mount = gpunvme::Mount::open(directory)?;
        let mut len = LEN.min(mount.info()?.free / 2) / LEAST * LEAST;
        let memory = loop {
            match Memory::new(gpu, len.max(LEAST) as usize) {
                Err(error) if error.code == CudaError::OUT_OF_MEMORY && len > LEAST => len = len / 2 / LEAST * LEAST,
                other => break other?,
            }
        };
        let ordinary = scratch::file(directory)?;
        let file = File::of(ordinary.try_clone()?, directory)?;
        Ok(Ground { file, ordinary, memory, transfers: gpu::transfers(&mount)?, salt: RandomState::new().hash_one(()) })
    }

    /// Sends a pattern of its own through a route, and back.
    pub fn prove(&self, route: Route) -> Result<Outcome, Failure> {
        let transfers = self.transfers.requiring(Require { route: Some(route), direct: false });
        let segment = self.segment();
        let start = Instant::now();
        self.transfers.route(segment.address)?;
        let first_use = start.elapsed();
        // SAFETY: the memory is this ground's.
        let tried = unsafe { transfers.read(&self.file, &[Segment { len: 4096, ..segment }]) };
        if let Err(Error::Transfer { errno: Errno::OPNOTSUPP, reason, .. }) = tried {
            return Ok(Outcome::NotTaken(reason));
        }
        tried?;
        let Some((write, moved)) = self.write(&transfers, route)? else {
            return Ok(Outcome::Wrong("the file is not what was written"));
        };
        if by(&moved, route) != segment.len {
            return Ok(Outcome::Wrong("bytes went another way"));
        }
        self.read(&transfers, route, first_use, Some(write))
    }

    /// Has a pattern read out of the page cache.
    pub fn prove_cache(&self) -> Result<Outcome, Failure> {
        let len = self.segment().len;
        if self.write(&self.transfers, Route::Cache)?.is_none() {
            return Ok(Outcome::Wrong("the file is not what was written"));
        }
        let start = Instant::now();
        match self.transfers.prepare(&self.file, 0, len) {
            Ok(prepared) if prepared == len => {}
            Ok(_) => return Ok(Outcome::NotTaken(Reason::NotCached)),
            Err(Error::Path { errno: Errno::OPNOTSUPP, .. } | Error::Cuda { .. }) => {
                return Ok(Outcome::NotTaken(Reason::RouteNotAvailable));
            }
            Err(error) => return Err(error.into()),
        }
        let transfers = self.transfers.requiring(Require { route: Some(Route::Cache), direct: false });
        let mut outcome = self.read(&transfers, Route::Cache, start.elapsed(), None)?;
        if let Outcome::Proved(proof) = &mut outcome {
            proof.nodes = self.by_node(&transfers)?;
        }
        Ok(outcome)
    }

    /// Where the file's pages lie, and at what speed they are read from there.
    fn by_node(&self, transfers: &Transfers) -> Result<Vec<OnNode>, Failure> {
        let mapped = numa::mapped(&self.ordinary);
        let mut found: BTreeMap<u32, (u64, Vec<Segment>)> = BTreeMap::new();
        for (offset, nodes) in &mapped {
            nodes.iter().for_each(|(node, bytes)| found.entry(*node).or_default().0 += bytes);
            if let Some(node) = numa::most(nodes) {
                let address = self.memory.address() + offset;
                let len = nodes.values().sum();
                found.entry(node).or_default().1.push(Segment { file_offset: *offset, address, len });
            }
        }
        let read = |(node, (bytes, segments)): (u32, (u64, Vec<Segment>))| {
            let start = Instant::now();
            // SAFETY: the memory is this ground's, and as long as the file.
            let done = match unsafe { transfers.read(&self.file, &segments) } {
                // The kernel moved a page meanwhile: there is no figure, and the proof stays one.
                Err(Error::Transfer { errno: Errno::OPNOTSUPP, .. }) => Transfer::default(),
                done => done?,
            };
            Ok(OnNode { node, bytes, read_bytes: done.bytes(), read: start.elapsed() })
        };
        found.into_iter().map(read).collect()
    }

    fn segment(&self) -> Segment {
        Segment { file_offset: 0, address: self.memory.address(), len: self.memory.len() as u64 }
    }

    /// Writes a route's pattern to the file, and returns how long that took, and how it moved;
    /// nothing if an ordinary read finds something else there.
    fn write(&self, transfers: &Transfers, route: Route) -> Result<Option<(Duration, Moved)>, Failure> {
        self.fill(|at, bytes| self.pattern(route, at, bytes))?;
        let start = Instant::now();
        // SAFETY: the memory is this ground's.
        let written = unsafe { transfers.write(&self.file, &[self.segment()]) }?;
        let write = start.elapsed();
        let found = self.compare(route, |at, bytes| Ok(self.ordinary.read_exact_at(bytes, at as u64)?))?;
        Ok(found.map(|_| (write, written.moved)))
    }

    /// Reads the pattern that was written.
    fn read(
        &self,
        transfers: &Transfers,
        route: Route,
        first_use: Duration,
        write: Option<Duration>,
    ) -> Result<Outcome, Failure> {
        let segment = self.segment();
        self.fill(|_, bytes| bytes.fill(0))?;
        let start = Instant::now();
        // SAFETY: the memory is this ground's.
        let arrived = unsafe { transfers.read(&self.file, &[segment]) }?;
        let read = start.elapsed();
        let Some(sha256) = self.compare(route, |at, bytes| Ok(self.memory.get(at, bytes)?))? else {
            return Ok(Outcome::Wrong("the memory is not what was read"));
        };
        if by(&arrived.moved, route) != segment.len {
            return Ok(Outcome::Wrong("bytes went another way"));
        }
        Ok(Outcome::Proved(Proof { bytes: segment.len, first_use, write, read, sha256, nodes: Vec::new() }))
    }

    /// Where the steps through the memory begin, and how long they are.
    fn steps(&self) -> impl Iterator<Item = (usize, usize)> {
        let len = self.memory.len();
        (0..len).step_by(STEP).map(move |at| (at, STEP.min(len - at)))
    }

    /// Copies into the memory what `make` makes.
    fn fill(&self, make: impl Fn(usize, &mut [u8])) -> Result<(), Failure> {
        let mut bytes = vec![0; STEP];
        for (at, len) in self.steps() {
            make(at, &mut bytes[..len]);
            self.memory.put(at, &bytes[..len])?;
        }
        Ok(())
    }

    /// The SHA-256 of what `get` gets, if it is a route's pattern.
    fn compare(
        &self,
        route: Route,
        mut get: impl FnMut(usize, &mut [u8]) -> Result<(), Failure>,
    ) -> Result<Option<String>, Failure> {
        let (mut found, mut expected, mut hash) = (vec![0; STEP], vec![0; STEP], Sha256::new());
        for (at, len) in self.steps() {
            get(at, &mut found[..len])?;
            self.pattern(route, at, &mut expected[..len]);
            if found[..len] != expected[..len] {
                return Ok(None);
            }
            hash.update(&found[..len]);
        }
        Ok(Some(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// Bytes that are different at every offset, for every route and in every run.
    fn pattern(&self, route: Route, at: usize, bytes: &mut [u8]) {
        let salt = self.salt ^ u64::from(route.code()) << 56;
        for (number, word) in bytes.chunks_exact_mut(8).enumerate() {
            let place = (at / 8 + number) as u64;
            let mixed = (place ^ salt).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            word.copy_from_slice(&(mixed ^ mixed >> 29).to_le_bytes());
        }
    }
}

fn by(moved: &Moved, route: Route) -> u64 {
    match route {
        Route::P2p => moved.p2p,
        Route::Bounce => moved.bounce,
        Route::Host => moved.host,
        Route::Cache => moved.cache,
        Route::None => 0,
    }
}
