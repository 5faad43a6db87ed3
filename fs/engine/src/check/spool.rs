//! Records that may be more than fit into memory: collected in any order, given back sorted. What
//! exceeds the limit goes to an unlinked temporary file, in sorted runs that are merged when they
//! are read back: as many at a time as there is memory for a page of each, in several passes if
//! need be.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::rc::Rc;

use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::stop::Stop;
use crate::error::FsError;

/// A value of a fixed size that can be stored and sorted.
pub(crate) trait Record: Copy + Ord + FromBytes + IntoBytes + Immutable {}

impl<T: Copy + Ord + FromBytes + IntoBytes + Immutable> Record for T {}

/// Records read from a run at a time.
const PAGE: usize = 2048;

/// Collects records.
pub(crate) struct Spool<T> {
    memory: Vec<T>,
    limit: usize,
    file: Option<Rc<File>>,
    /// Ends of the runs in the file, counted in records.
    runs: Vec<u64>,
    /// The last record in the file.
    last: Option<T>,
    stop: Stop,
}

impl<T: Record> Spool<T> {
    /// Keeps at most `bytes` in memory.
    pub fn new(bytes: usize, stop: &Stop) -> Spool<T> {
        let limit = (bytes / size_of::<T>()).max(2 * PAGE);
        Spool { memory: Vec::new(), limit, file: None, runs: Vec::new(), last: None, stop: stop.clone() }
    }

    /// Adds a record.
    pub fn push(&mut self, record: T) -> Result<(), FsError> {
        self.stop.check()?;
        if self.memory.len() >= self.limit {
            self.spill()?;
        }
        self.memory.push(record);
        Ok(())
    }

    fn spill(&mut self) -> Result<(), FsError> {
        self.memory.sort_unstable();
        let (Some(first), Some(last)) = (self.memory.first(), self.memory.last()) else { return Ok(()) };
        let start = self.stored();
        let file = match &self.file {
            Some(file) => file,
            None => self.file.insert(Rc::new(tempfile::tempfile().map_err(temporary("made"))?)),
        };
        let bytes = self.memory.as_slice().as_bytes();
        file.write_all_at(bytes, start * size_of::<T>() as u64).map_err(temporary("written"))?;
        // A run that continues the last one is joined with it: records that are pushed in ascending
        // order make one run.
        if self.last.is_some_and(|before| before <= *first) {
            self.runs.pop();
        }
        self.last = Some(*last);
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
        self.stop.check()?;
        let stored = self.stored();
        if index >= stored {
            return Ok(self.memory[(index - stored) as usize]);
        }
        let mut record = [T::new_zeroed()];
        read(self.file.as_deref(), index, &mut record)?;
        Ok(record[0])
    }

    /// All records in ascending order.
    pub fn sorted(mut self) -> Result<Sorted<T>, FsError> {
        if self.file.is_none() {
            self.memory.sort_unstable();
            return Sorted::merge(None, &[], self.memory, self.stop);
        }
        self.spill()?;
        self.memory = Vec::new();
        let at_once = self.limit / PAGE;
        while self.runs.len() > at_once {
            self = self.merged(at_once)?;
        }
        Sorted::merge(self.file.clone(), &self.bounds(), Vec::new(), self.stop)
    }

    /// Where the runs begin and end.
    fn bounds(&self) -> Vec<(u64, u64)> {
        let starts = std::iter::once(0).chain(self.runs.iter().copied());
        starts.zip(self.runs.iter().copied()).collect()
    }

    /// The same records in fewer runs: so many are merged into one at a time.
    fn merged(self, at_once: usize) -> Result<Spool<T>, FsError> {
        let mut merged =
            Spool { memory: Vec::new(), limit: PAGE, file: None, runs: Vec::new(), last: None, stop: self.stop.clone() };
        for part in self.bounds().chunks(at_once) {
            let mut records = Sorted::merge(self.file.clone(), part, Vec::new(), self.stop.clone())?;
            while let Some(record) = records.next()? {
                merged.push(record)?;
            }
            merged.spill()?;
        }
        merged.limit = self.limit;
        Ok(merged)
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
    file: Option<Rc<File>>,
    runs: Vec<Run<T>>,
    heads: BinaryHeap<Reverse<(T, usize)>>,
    stop: Stop,
}

impl<T: Record> Sorted<T> {
    /// Merges runs of a file, and sorted records in memory.
    fn merge(file: Option<Rc<File>>, runs: &[(u64, u64)], memory: Vec<T>, stop: Stop) -> Result<Sorted<T>, FsError> {
        let stored = runs.iter().map(|(start, end)| Run { next: *start, end: *end, page: Vec::new(), at: 0 });
        let runs: Vec<Run<T>> = stored.chain([Run { next: 0, end: 0, page: memory, at: 0 }]).collect();
        let mut merge = Sorted { file, heads: BinaryHeap::with_capacity(runs.len()), runs, stop };
        (0..merge.runs.len()).try_for_each(|run| merge.advance(run))?;
        Ok(merge)
    }

    /// Looks at the next record.
    pub fn peek(&self) -> Option<T> {
        self.heads.peek().map(|Reverse((record, _))| *record)
    }

    /// The next record.
    pub fn next(&mut self) -> Result<Option<T>, FsError> {
        self.stop.check()?;
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
            run.page.resize(count as usize, T::new_zeroed());
            read(self.file.as_deref(), run.next, &mut run.page)?;
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
    file.read_exact_at(out.as_mut_bytes(), index * size_of::<T>() as u64).map_err(temporary("read"))
}

fn temporary(action: &'static str) -> impl FnOnce(std::io::Error) -> FsError {
    move |error| {
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        FsError::Temporary { directory: std::env::temp_dir(), action, errno }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_back_sorted_whether_they_fit_or_not() {
        for count in [0u64, 10, 100_000] {
            let mut spool = Spool::new(1, &Stop::default());
            let mut expected: Vec<u64> = (0..count).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
            for record in &expected {
                spool.push(*record).unwrap();
            }
            assert_eq!(spool.file.is_some(), count == 100_000);
            assert_eq!(spool.runs.len() as u64, count.saturating_sub(1) / 4096, "more than are merged at once");
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
    fn records_are_taken_and_given_back_up_to_when_the_end_is_asked_for() {
        let filled = |stop: &Stop| {
            let mut spool = Spool::new(1, stop);
            (0..40_000u64).for_each(|i| spool.push(i % 7).unwrap());
            spool
        };
        let stop = Stop::default();
        let (mut spool, mut sorted) = (filled(&stop), filled(&stop).sorted().unwrap());
        stop.ask();
        assert!(matches!(spool.push(7), Err(FsError::Cancelled)));
        assert!(matches!(spool.get(0), Err(FsError::Cancelled)));
        assert!(matches!(sorted.next(), Err(FsError::Cancelled)));
        assert!(matches!(spool.sorted().err(), Some(FsError::Cancelled)), "its runs are merged in several passes");
    }

    #[test]
    fn ascending_records_can_be_looked_up() {
        let mut spool = Spool::new(1, &Stop::default());
        (0..20_000u64).for_each(|i| spool.push(3 * i).unwrap());
        assert_eq!(spool.runs.len(), 1);
        assert!([0, 1, 4095, 4096, 12_000, 19_999].iter().all(|i| spool.get(*i).unwrap() == 3 * i));
    }

    #[test]
    fn a_full_directory_for_temporary_files_is_named_with_the_way_out() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut spool = Spool { file: Some(Rc::new(full)), ..Spool::new(1, &Stop::default()) };
        let error = (0..=2 * PAGE as u64).find_map(|record| spool.push(record).err()).expect("it does not fit into memory");
        let expected = format!(
            "{}: a temporary file could not be written: No space left on device (os error 28); name a directory with more room \
             in TMPDIR, or give fsck.gpunvme more --memory",
            std::env::temp_dir().display()
        );
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn the_way_out_fits_what_went_wrong_with_a_temporary_file() {
        let said = |action, errno| temporary(action)(std::io::Error::from_raw_os_error(errno)).to_string();
        for errno in [libc::ENOSPC, libc::EDQUOT, libc::EFBIG] {
            assert!(said("written", errno).contains("; name a directory with more room in TMPDIR, or give"), "{errno}");
        }
        for errno in [libc::EMFILE, libc::ENFILE] {
            assert!(said("made", errno).contains("; let more files be open, or give"), "{errno}");
        }
        for (action, errno) in [("made", libc::EACCES), ("made", libc::EROFS), ("made", libc::ENOENT), ("read", libc::EIO)] {
            assert!(said(action, errno).contains("; name another directory in TMPDIR, or give"), "{errno}");
        }
    }
}
