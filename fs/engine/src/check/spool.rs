//! Records that may be more than fit into memory: collected in any order, given back sorted. What exceeds the limit goes to
//! an unlinked temporary file, in sorted runs that are merged when they are read back.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use gpunvme_blockdev::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::error::FsError;

/// Something of a fixed size that can be stored and sorted.
pub(crate) trait Record: Copy + Ord + FromBytes + IntoBytes + Immutable {}

impl<T: Copy + Ord + FromBytes + IntoBytes + Immutable> Record for T {}

/// Records read from a run at a time.
const PAGE: usize = 2048;

/// Collects records.
pub(crate) struct Spool<T> {
    memory: Vec<T>,
    limit: usize,
    file: Option<File>,
    /// Ends of the runs in the file, counted in records.
    runs: Vec<u64>,
}

impl<T: Record> Spool<T> {
    /// Keeps at most `bytes` in memory.
    pub fn new(bytes: usize) -> Spool<T> {
        Spool { memory: Vec::new(), limit: (bytes / size_of::<T>()).max(2 * PAGE), file: None, runs: Vec::new() }
    }

    /// Adds a record.
    pub fn push(&mut self, record: T) -> Result<(), FsError> {
        if self.memory.len() >= self.limit {
            self.spill().map_err(temporary("writing"))?;
        }
        self.memory.push(record);
        Ok(())
    }

    fn spill(&mut self) -> std::io::Result<()> {
        self.memory.sort_unstable();
        let start = self.stored();
        let file = match &self.file {
            Some(file) => file,
            None => self.file.insert(tempfile::tempfile()?),
        };
        file.write_all_at(self.memory.as_slice().as_bytes(), start * size_of::<T>() as u64)?;
        self.runs.push(start + self.memory.len() as u64);
        self.memory.clear();
        Ok(())
    }

    fn stored(&self) -> u64 {
        self.runs.last().copied().unwrap_or(0)
    }

    /// Number of records.
    pub fn len(&self) -> u64 {
        self.stored() + self.memory.len() as u64
    }

    /// Record `index` of those that were pushed in ascending order.
    pub fn get(&self, index: u64) -> Result<T, FsError> {
        let stored = self.stored();
        if index >= stored {
            return Ok(self.memory[(index - stored) as usize]);
        }
        let mut record = [T::new_zeroed()];
        read(self.file.as_ref(), index, &mut record)?;
        Ok(record[0])
    }

    /// All records in ascending order.
    pub fn sorted(mut self) -> Result<Sorted<T>, FsError> {
        self.memory.sort_unstable();
        let mut merge = Sorted { file: self.file, runs: Vec::new(), heads: BinaryHeap::new() };
        let mut start = 0;
        for end in self.runs {
            merge.runs.push(Run { next: start, end, page: Vec::new(), at: 0 });
            start = end;
        }
        merge.runs.push(Run { next: 0, end: 0, page: self.memory, at: 0 });
        for run in 0..merge.runs.len() {
            merge.advance(run)?;
        }
        Ok(merge)
    }
}

struct Run<T> {
    /// Next record in the file, and the end of the run.
    next: u64,
    end: u64,
    page: Vec<T>,
    at: usize,
}

/// Gives records back in ascending order.
pub(crate) struct Sorted<T> {
    file: Option<File>,
    runs: Vec<Run<T>>,
    heads: BinaryHeap<Reverse<(T, usize)>>,
}

impl<T: Record> Sorted<T> {
    /// Looks at the next record.
    pub fn peek(&self) -> Option<T> {
        self.heads.peek().map(|Reverse((record, _))| *record)
    }

    /// The next record.
    pub fn next(&mut self) -> Result<Option<T>, FsError> {
        let Some(Reverse((record, run))) = self.heads.pop() else { return Ok(None) };
        self.advance(run)?;
        Ok(Some(record))
    }

    /// The next record, if it is one that the caller wants.
    pub fn next_if(&mut self, wanted: impl FnOnce(&T) -> bool) -> Result<Option<T>, FsError> {
        match self.peek() {
            Some(record) if wanted(&record) => self.next(),
            _ => Ok(None),
        }
    }

    fn advance(&mut self, number: usize) -> Result<(), FsError> {
        let run = &mut self.runs[number];
        if run.at == run.page.len() && run.next < run.end {
            let count = (run.end - run.next).min(PAGE as u64);
            run.page = vec![T::new_zeroed(); count as usize];
            read(self.file.as_ref(), run.next, &mut run.page)?;
            run.next += count;
            run.at = 0;
        }
        if let Some(record) = run.page.get(run.at) {
            run.at += 1;
            self.heads.push(Reverse((*record, number)));
        }
        Ok(())
    }
}

fn read<T: Record>(file: Option<&File>, index: u64, out: &mut [T]) -> Result<(), FsError> {
    let file = file.expect("only what was written is read");
    file.read_exact_at(out.as_mut_bytes(), index * size_of::<T>() as u64).map_err(temporary("reading"))
}

fn temporary(action: &'static str) -> impl FnOnce(std::io::Error) -> FsError {
    move |error| {
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        Error::System { device: "temporary file".into(), action, errno }.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_back_sorted_whether_they_fit_or_not() {
        for count in [0u64, 10, 100_000] {
            let mut spool = Spool::new(1);
            let mut expected: Vec<u64> = (0..count).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
            for record in &expected {
                spool.push(*record).unwrap();
            }
            assert_eq!(spool.file.is_some(), count == 100_000);
            expected.sort_unstable();
            let mut sorted = spool.sorted().unwrap();
            let mut found = Vec::new();
            while let Some(record) = sorted.next().unwrap() {
                found.push(record);
            }
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn ascending_records_can_be_looked_up() {
        let mut spool = Spool::new(1);
        (0..20_000u64).for_each(|i| spool.push(3 * i).unwrap());
        assert!([0, 1, 4095, 4096, 12_000, 19_999].iter().all(|i| spool.get(*i).unwrap() == 3 * i));
    }
}
