//! A device that records its writes, and every state in which a power cut could leave it. It loses
//! as much as NVMe allows (NVM Command Set specification, Flush and Force Unit Access): a write is
//! durable only after a flush that was *submitted* after the write's completion had been
//! *collected*, and that is itself completed; anything else may be lost, kept, or torn at 512
//! bytes, each independently. What was discarded reads as garbage.
use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use gpunvme_blockdev::{BlockDevice, Completion, Geometry, Op, Queue, Region, Request, Result, Wait};
use parking_lot::Mutex;

use crate::completions::Completions;
use crate::memory::{Image, Memory, gather, geometry};

/// What a power cut tears writes at.
pub const SECTOR: u64 = 512;

/// Something that happened at the device. Reads change nothing and are not recorded.
#[derive(Debug, Clone)]
pub enum Event {
    /// A write was submitted.
    Write {
        /// First byte.
        offset: u64,
        /// What was written.
        data: Arc<[u8]>,
        /// Whether it is durable when done.
        fua: bool,
    },
    /// A flush was submitted, of the writes to these bytes.
    Flush(Range<u64>),
    /// A discard was submitted.
    Discard {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// A fill with zeroes was submitted.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The completion of an earlier event was collected; it is given by its number in the log.
    Done(usize),
}

impl Event {
    /// Whether it changed these bytes.
    fn is_within(&self, bytes: &Range<u64>) -> bool {
        match self {
            Event::Write { offset, .. } | Event::Discard { offset, .. } | Event::WriteZeroes { offset, .. } => {
                bytes.contains(offset)
            }
            Event::Flush(_) | Event::Done(_) => false,
        }
    }
}

/// What happened to a device since it began with some contents.
#[derive(Clone)]
pub struct Log {
    base: Image,
    events: Vec<Event>,
}

/// A device in RAM that records. [`Recorder::log`] at any time.
pub struct Recorder {
    recording: Arc<Recording>,
}

struct Recording {
    memory: Arc<Memory>,
    /// Locked while a command runs, so that the log is in the order in which the memory changed.
    log: Mutex<Log>,
}

impl Recorder {
    /// A device that begins with these contents and an empty log. Its geometry is that of
    /// [`crate::MemoryDevice::new`].
    pub fn new(base: Image) -> Arc<Self> {
        let memory = Memory::garbling("recorder", base.clone(), geometry(base.len()));
        Arc::new(Self { recording: Arc::new(Recording { memory, log: Mutex::new(Log { base, events: Vec::new() }) }) })
    }

    /// Devices of the same size, one behind the other on this one. Each loses and keeps its own
    /// writes: a flush of one is none of another.
    ///
    /// # Panics
    /// Unless the size can be divided so.
    pub fn members(&self, count: u64) -> Vec<Arc<dyn BlockDevice>> {
        self.members_of(count, self.recording.memory.geometry.len.get() / count)
    }

    /// The same; each shows only its first `shown` bytes until it is looked at again: then it has
    /// grown.
    ///
    /// # Panics
    /// As [`Recorder::members`].
    pub fn members_of(&self, count: u64, shown: u64) -> Vec<Arc<dyn BlockDevice>> {
        let len = self.recording.memory.geometry.len.get() / count;
        assert_eq!(len * count, self.recording.memory.geometry.len.get());
        let member = |number: u64| -> Arc<dyn BlockDevice> {
            let name = format!("member {}", number + 1).into();
            Arc::new(Member { name, geometry: geometry(shown), len, start: number * len, recording: self.recording.clone() })
        };
        (0..count).map(member).collect()
    }

    /// All that happened so far.
    pub fn log(&self) -> Log {
        self.recording.log.lock().clone()
    }

    /// How many events there are so far: what a test remembers when an fsync returns, to know from
    /// which cut on it counts.
    pub fn position(&self) -> usize {
        self.recording.log.lock().events.len()
    }

    /// The contents now, as reads see them.
    pub fn snapshot(&self) -> Image {
        self.recording.memory.snapshot()
    }
}

impl BlockDevice for Recorder {
    fn name(&self) -> &str {
        &self.recording.memory.name
    }

    fn geometry(&self) -> &Geometry {
        &self.recording.memory.geometry
    }

    fn open_queue(&self) -> Result<Box<dyn Queue>> {
        let bytes = 0..self.recording.memory.geometry.len.get();
        Ok(Box::new(RecordingQueue { recording: self.recording.clone(), bytes, completions: Completions::default() }))
    }

    fn map(&self, _region: &Arc<Region>) -> Result<()> {
        Ok(())
    }

    fn unmap(&self, _region: &Region) {}
}

/// A part of a recorder as a device of its own.
struct Member {
    name: Arc<str>,
    geometry: Geometry,
    /// Its length, which it may not show yet.
    len: u64,
    /// Where it begins on the recorder.
    start: u64,
    recording: Arc<Recording>,
}

impl BlockDevice for Member {
    fn name(&self) -> &str {
        &self.name
    }

    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn open_queue(&self) -> Result<Box<dyn Queue>> {
        let bytes = self.start..self.start + self.len;
        Ok(Box::new(RecordingQueue { recording: self.recording.clone(), bytes, completions: Completions::default() }))
    }

    fn map(&self, _region: &Arc<Region>) -> Result<()> {
        Ok(())
    }

    fn unmap(&self, _region: &Region) {}

    fn look_again(&self) -> Result<u64> {
        self.geometry.len.grow(self.len);
        Ok(self.len)
    }
}

struct RecordingQueue {
    recording: Arc<Recording>,
    /// The device's bytes on the recorder.
    bytes: Range<u64>,
    /// Each with the number of the event that it ends.
    completions: Completions<(Completion, Option<usize>)>,
}

impl RecordingQueue {
    fn run(&self, request: Request) -> (Completion, Option<usize>) {
        let offset = if request.op == Op::Flush { 0 } else { self.bytes.start + request.offset };
        let request = Request { offset, ..request };
        let mut log = self.recording.log.lock();
        let mut event = None;
        let result = self.recording.memory.run(&request).and_then(|()| {
            let (offset, len) = (request.offset, request.len);
            let happened = match request.op {
                Op::Read => return Ok(()),
                Op::Write { fua } => Event::Write { offset, data: gather(&request)?.into(), fua },
                Op::Flush => Event::Flush(self.bytes.clone()),
                Op::Discard => Event::Discard { offset, len },
                Op::WriteZeroes => Event::WriteZeroes { offset, len },
            };
            event = Some(log.events.len());
            log.events.push(happened);
            Ok(())
        });
        (Completion { tag: request.tag, result }, event)
    }
}

impl Queue for RecordingQueue {
    fn submit(&self, requests: &mut Vec<Request>) {
        let finished: Vec<_> = requests.drain(..).map(|request| self.run(request)).collect();
        self.completions.extend(finished);
    }

    fn complete(&self, wait: Wait, out: &mut Vec<Completion>) -> Result<usize> {
        let finished = self.completions.take(wait);
        let count = finished.len();
        let mut log = self.recording.log.lock();
        for (completion, event) in finished {
            log.events.extend(event.map(Event::Done));
            out.push(completion);
        }
        Ok(count)
    }

    fn wake(&self) {
        self.completions.wake();
    }

    fn sleep_on(&self, _since: Instant) -> Result<Option<BorrowedFd<'_>>> {
        Ok(self.completions.sleep_on())
    }
}

impl Log {
    /// A log that was recorded elsewhere, as events in the order in which they ended: the
    /// completion of each is collected right after it.
    pub fn new(base: Image, events: Vec<Event>) -> Self {
        let mut log = Self { base, events: Vec::with_capacity(2 * events.len()) };
        for event in events {
            let number = log.events.len();
            log.events.extend([event, Event::Done(number)]);
        }
        log
    }

    /// In the order in which they happened.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// The positions where a power cut is worth trying: before everything, after each event that
    /// adds to what may be on the device, and after each that adds to what must be. A position is
    /// a number of events; the cut comes after them.
    pub fn cuts(&self) -> impl Iterator<Item = usize> + '_ {
        let matters = |event: &Event| match event {
            Event::Write { .. } | Event::Discard { .. } | Event::WriteZeroes { .. } => true,
            Event::Flush(_) => false,
            Event::Done(of) => matches!(self.events[*of], Event::Flush(_) | Event::Write { fua: true, .. }),
        };
        let after = self.events.iter().enumerate().filter(move |(_, event)| matters(event)).map(|(number, _)| number + 1);
        std::iter::once(0).chain(after)
    }

    /// For building the states after power cuts. Fast where the cuts asked for go forward through
    /// the log.
    pub fn power_cuts(&self) -> PowerCuts<'_> {
        PowerCuts { log: self, position: 0, settled: self.base.clone(), unsettled: VecDeque::new() }
    }
}

/// Builds the states in which a power cut can leave the device.
pub struct PowerCuts<'log> {
    log: &'log Log,
    /// Events gone through.
    position: usize,
    /// The contents that all the events before the first of `unsettled` left, for certain.
    settled: Image,
    /// Events that changed contents, in order, from the first on that may be lost.
    unsettled: VecDeque<Change>,
}

struct Change {
    event: usize,
    /// Where in the log its completion was collected.
    done: Option<usize>,
    durable: bool,
}

impl PowerCuts<'_> {
    /// The contents after a cut behind the first `cut` events. `survives(event, sector)` says of
    /// each event that may be lost whether it reached the medium, for each of its sectors of 512
    /// bytes, counted from 0 in each event; the same answer for all of them keeps the event whole,
    /// and different ones tear it.
    ///
    /// # Panics
    ///
    /// If the log has fewer events.
    pub fn image(&mut self, cut: usize, mut survives: impl FnMut(usize, u64) -> bool) -> Image {
        self.advance(cut);
        let mut image = self.settled.clone();
        for change in &self.unsettled {
            apply(&mut image, &self.log.events[change.event], |sector| change.durable || survives(change.event, sector));
        }
        image
    }

    /// The numbers of the events that a cut behind the first `cut` events may lose, in order.
    ///
    /// # Panics
    ///
    /// If the log has fewer events.
    pub fn pending(&mut self, cut: usize) -> Vec<usize> {
        self.advance(cut);
        self.unsettled.iter().filter(|change| !change.durable).map(|change| change.event).collect()
    }

    fn advance(&mut self, cut: usize) {
        if cut < self.position {
            *self = self.log.power_cuts();
        }
        for number in self.position..cut {
            match &self.log.events[number] {
                Event::Flush(_) => {}
                Event::Done(of) => self.done(number, *of),
                Event::Write { .. } | Event::Discard { .. } | Event::WriteZeroes { .. } => {
                    self.unsettled.push_back(Change { event: number, done: None, durable: false });
                }
            }
        }
        self.position = cut;
    }

    /// Accounts for the event `of` having been done at `number`.
    fn done(&mut self, number: usize, of: usize) {
        let events = &self.log.events;
        let fua = match &events[of] {
            Event::Flush(bytes) => {
                let is_covered =
                    |change: &Change| change.done.is_some_and(|done| done < of) && events[change.event].is_within(bytes);
                for change in self.unsettled.iter_mut().filter(|change| is_covered(change)) {
                    change.durable = true;
                }
                self.settle();
                return;
            }
            Event::Write { fua, .. } => *fua,
            _ => false,
        };
        if let Ok(place) = self.unsettled.binary_search_by_key(&of, |change| change.event) {
            let change = &mut self.unsettled[place];
            change.done = Some(number);
            change.durable |= fua;
        }
        self.settle();
    }

    fn settle(&mut self) {
        while self.unsettled.front().is_some_and(|change| change.durable) {
            let change = self.unsettled.pop_front().expect("there is a first change");
            apply(&mut self.settled, &self.log.events[change.event], |_| true);
        }
    }
}

/// Does those sectors of an event that survive.
fn apply(image: &mut Image, event: &Event, mut survives: impl FnMut(u64) -> bool) {
    match event {
        Event::Write { offset, data, .. } => {
            for (sector, bytes) in (0..).zip(data.chunks(SECTOR as usize)) {
                if survives(sector) {
                    image.write_at(offset + sector * SECTOR, bytes);
                }
            }
        }
        Event::Discard { offset, len } | Event::WriteZeroes { offset, len } => {
            let mut run = 0..0u64;
            for sector in 0..=len / SECTOR {
                // One past the last sector ends the last run.
                if sector < len / SECTOR && survives(sector) {
                    run = if run.is_empty() { sector..sector + 1 } else { run.start..sector + 1 };
                } else if !run.is_empty() {
                    let (at, len) = (offset + run.start * SECTOR, (run.end - run.start) * SECTOR);
                    if let Event::Discard { .. } = event {
                        image.garble(at, len)
                    } else {
                        image.zero(at, len)
                    }
                    run = 0..0;
                }
            }
        }
        Event::Flush(_) | Event::Done(_) => {}
    }
}
