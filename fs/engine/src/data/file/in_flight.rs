//! Writes of a file that are on their way to the device.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use crate::data::page_map::PageMap;
use crate::data::pages::Pages;

/// Writes of a file that are in flight, flushes that wait for them, and operations that keep direct
/// writes from beginning.
#[derive(Default)]
pub(crate) struct InFlight {
    /// Pages that are being written. They do not change any more.
    pub pages: PageMap<Arc<Pages>>,
    /// Blocks that direct writes in flight replace: their content on the device is undefined until
    /// the writes have landed.
    pub direct: Vec<Range<u64>>,
    /// Batches of pages, and direct writes.
    pub writes: WritesInFlight,
    /// Nodes that are promised to the batches.
    pub nodes: BatchNodes,
    /// Write-backs of the whole file.
    pub flushes: Flushes,
    /// Operations that quiesce the file: they wait for the writes in flight, and no direct write
    /// begins.
    pub quiescers: u32,
}

/// Nodes that are promised to batches in flight, in parts, in the order in which the batches began.
/// Those of a batch may be needed by the batches before it, too.
#[derive(Default)]
pub(crate) struct BatchNodes(VecDeque<Batch>);

struct Batch {
    number: u64,
    parts: u64,
    is_over: bool,
}

impl BatchNodes {
    /// A batch begins.
    pub fn begin(&mut self, number: u64, parts: u64) {
        self.0.push_back(Batch { number, parts, is_over: false });
    }

    /// All that is promised.
    pub fn parts(&self) -> u64 {
        self.0.iter().map(|batch| batch.parts).sum()
    }

    /// Takes out what was needed. Returns what is missing.
    pub fn redeem(&mut self, mut parts: u64) -> u64 {
        for batch in &mut self.0 {
            let redeemed = batch.parts.min(parts);
            batch.parts -= redeemed;
            parts -= redeemed;
        }
        parts
    }

    /// A batch is over. Returns what is needed no more.
    pub fn end(&mut self, number: u64) -> u64 {
        self.0.iter_mut().filter(|batch| batch.number == number).for_each(|batch| batch.is_over = true);
        let mut parts = 0;
        while self.0.front().is_some_and(|batch| batch.is_over) {
            parts += self.0.pop_front().map_or(0, |batch| batch.parts);
        }
        parts
    }
}

/// Flushes of a file: when one is over, the device has everything that was in memory or on its way
/// when it began.
#[derive(Default)]
pub(crate) struct Flushes {
    /// How many have begun.
    pub begun: u64,
    /// The highest number of a flush that is over.
    pub done: u64,
}

/// Writes of a file that are in flight, numbered in the order in which they began.
#[derive(Default)]
pub(crate) struct WritesInFlight {
    begun: u64,
    /// In order.
    in_flight: VecDeque<u64>,
}

impl WritesInFlight {
    /// A write begins. Returns its number.
    pub fn begin(&mut self) -> u64 {
        self.begun += 1;
        self.in_flight.push_back(self.begun);
        self.begun
    }

    /// A write is over.
    pub fn end(&mut self, number: u64) {
        if let Ok(at) = self.in_flight.binary_search(&number) {
            self.in_flight.remove(at);
        }
    }

    /// How many have begun so far: the number of the last.
    pub fn begun(&self) -> u64 {
        self.begun
    }

    /// Whether all up to this number are over.
    pub fn are_over(&self, number: u64) -> bool {
        self.in_flight.front().is_none_or(|first| *first > number)
    }

    /// Whether none is in flight.
    pub fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Whether this one is all that is in flight.
    pub fn is_last(&self, number: u64) -> bool {
        self.in_flight.iter().eq([&number])
    }
}
