//! Expected content of files: for each byte, the writes that some legal order could leave there,
//! and for each file, its possible sizes.
//!
//! Every write has bytes of its own, by which it is recognized. A read may see it from when it
//! began; and once it is over, and nothing can take it back any more, it hides the writes that were
//! over before it began. The content expected after a power cut is kept separately: there a write
//! hides those before it only when an fsync has made it durable.

use std::collections::BTreeMap;
use std::ops::Range;

/// A write, by number. The first one is what a new file holds: zeros.
pub type Id = usize;
/// Bytes that are compared together.
const SECTOR: usize = 512;
/// The end of every range without a bound.
const END: u64 = u64::MAX;

/// A write, or any other operation that changes content or size: a truncation, a punch.
pub struct Write {
    pub ino: u64,
    /// Description, for the message of a failure.
    pub what: String,
    pub began: u64,
    /// Turn in which it was over, however it ended.
    ended: Option<u64>,
    /// It ended with an error: it may be there, or not, or in part.
    failed: bool,
    /// Turn from which it was sure to stay, whatever the device does except lose power.
    settled: Option<u64>,
    /// Turn from which it was sure to survive a power cut.
    durable: Option<u64>,
    ranges: Vec<Range<u64>>,
    /// It leaves zeros.
    zero: bool,
}

/// Effect of a write on the size of its file.
#[derive(Clone, Copy)]
pub enum Size {
    /// It is at least this.
    Grows(u64),
    /// It is this.
    Set(u64),
}

/// Writes that may be found in a piece of a file.
#[derive(Clone, Default)]
struct Candidates {
    /// By a read.
    live: Vec<Id>,
    /// After a power cut.
    left: Vec<Id>,
}

struct Content {
    /// By their first byte; each reaches to the next.
    pieces: BTreeMap<u64, Candidates>,
    sizes: Vec<(Id, Size)>,
}

/// A read in flight.
pub struct Reading {
    ino: u64,
    began: u64,
    range: Range<u64>,
    pieces: Vec<(Range<u64>, Vec<Id>)>,
}

/// Expected content of a volume.
pub struct Expected {
    pub writes: Vec<Write>,
    files: BTreeMap<u64, Content>,
    reads: BTreeMap<u64, Reading>,
    next_read: u64,
    /// The device may fail what was answered: then only an fsync settles it.
    pub lossy: bool,
}

impl Expected {
    pub fn new(lossy: bool) -> Expected {
        let nothing = Write {
            ino: 0,
            what: "nothing".into(),
            began: 0,
            ended: Some(0),
            failed: false,
            settled: Some(0),
            durable: Some(0),
            ranges: vec![],
            zero: true,
        };
        Expected { writes: vec![nothing], files: BTreeMap::new(), reads: BTreeMap::new(), next_read: 0, lossy }
    }

    /// Notes a new file.
    pub fn created(&mut self, ino: u64) {
        let pieces = BTreeMap::from([(0, Candidates { live: vec![0], left: vec![0] })]);
        self.files.insert(ino, Content { pieces, sizes: vec![(0, Size::Set(0))] });
    }

    /// Notes a write that begins.
    pub fn begin(&mut self, now: u64, ino: u64, ranges: Vec<Range<u64>>, zero: bool, size: Option<Size>, what: String) -> Id {
        let id = self.writes.len();
        let content = self.files.get_mut(&ino).expect("it was created");
        content.sizes.extend(size.map(|size| (id, size)));
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            content.split(range.start);
            content.split(range.end);
            for (_, piece) in content.pieces.range_mut(range.clone()) {
                piece.live.push(id);
                piece.left.push(id);
            }
            for reading in self.reads.values_mut().filter(|reading| reading.ino == ino) {
                reading.pieces.push((range.clone(), vec![id]));
            }
        }
        self.writes.push(Write { ino, what, began: now, ended: None, failed: false, settled: None, durable: None, ranges, zero });
        id
    }

    /// Notes that a write is over. `sure`: it is sure to stay, even where the device may fail.
    pub fn end(&mut self, now: u64, id: Id, ok: bool, sure: bool) {
        (self.writes[id].ended, self.writes[id].failed) = (Some(now), !ok);
        if ok && (sure || !self.lossy) {
            self.settle(now, id);
        }
    }

    fn settle(&mut self, now: u64, id: Id) {
        if self.writes[id].settled.is_some() {
            return;
        }
        self.writes[id].settled = Some(now);
        self.prune(id, |piece| &mut piece.live);
    }

    /// Takes out what a write hides.
    fn prune(&mut self, id: Id, of: fn(&mut Candidates) -> &mut Vec<Id>) {
        let (ino, began) = (self.writes[id].ino, self.writes[id].began);
        for range in self.writes[id].ranges.clone().into_iter().filter(|range| !range.is_empty()) {
            let content = self.files.get_mut(&ino).expect("it was created");
            for (_, piece) in content.pieces.range_mut(range) {
                let hidden = |write: &Write| write.ended.is_some_and(|ended| ended < began);
                of(piece).retain(|other| *other == id || !hidden(&self.writes[*other]));
            }
        }
    }

    /// Notes that an fsync of a file, begun at `began`, has succeeded for a descriptor that has
    /// been told of all errors before `since`.
    pub fn synced(&mut self, now: u64, ino: u64, began: u64, since: u64) {
        let of_file =
            |write: &Write| write.ino == ino && write.ended.is_some_and(|ended| ended < began) && write.durable.is_none();
        let all: Vec<Id> = (0..self.writes.len()).filter(|id| of_file(&self.writes[*id])).collect();
        for id in all {
            let write = &self.writes[id];
            if write.failed || (write.settled.is_none() && (write.began < since || !self.lossy)) {
                continue;
            }
            self.settle(now, id);
            self.writes[id].durable = Some(now);
            self.prune(id, |piece| &mut piece.left);
        }
        // Of writes that overlapped, and are all over, the one that is seen is the one that stays.
        let Some(content) = self.files.get_mut(&ino) else { return };
        for piece in content.pieces.values_mut() {
            if piece.live.iter().all(|id| self.writes[*id].durable.is_some()) {
                piece.left = piece.live.clone();
            }
        }
    }

    /// Notes a read that begins.
    pub fn begin_read(&mut self, now: u64, ino: u64, range: Range<u64>) -> u64 {
        let content = self.files.get_mut(&ino).expect("it was created");
        let pieces = content.within(&range).map(|(range, piece)| (range, piece.live.clone())).collect();
        self.next_read += 1;
        self.reads.insert(self.next_read, Reading { ino, began: now, range, pieces });
        self.next_read
    }

    /// Forgets a read that failed.
    pub fn forget_read(&mut self, read: u64) {
        self.reads.remove(&read);
    }

    /// Judges what a read found.
    pub fn end_read(&mut self, read: u64, found: &[u8]) -> Result<(), String> {
        let Reading { ino, began, range, pieces } = self.reads.remove(&read).expect("it began");
        let end = range.start + found.len() as u64;
        let sizes = self.sizes(ino, |write| write.settled.is_some_and(|at| at <= began));
        let fits = |size: &Range<u64>| {
            if end < range.end { size.contains(&end) || (found.is_empty() && size.start <= range.start) } else { size.end > end }
        };
        if !sizes.iter().any(fits) {
            return Err(format!("inode {ino}: {} of {range:?} were read, and the size may be {sizes:?}", found.len()));
        }
        let mut possible: BTreeMap<u64, Vec<Id>> = BTreeMap::new();
        let edges = pieces.iter().flat_map(|(part, _)| [part.start, part.end]).filter(|at| range.contains(at));
        edges.chain([range.start]).for_each(|at| drop(possible.insert(at, Vec::new())));
        for (part, ids) in &pieces {
            possible.range_mut(part.clone()).for_each(|(_, all)| all.extend(ids));
        }
        let starts: Vec<u64> = possible.keys().copied().chain([range.end]).collect();
        for (part, ids) in starts.windows(2).zip(possible.values()) {
            let part = part[0]..part[1].min(end);
            if part.start < part.end {
                let bytes = &found[(part.start - range.start) as usize..(part.end - range.start) as usize];
                self.judge(ino, part.start, bytes, ids)?;
                self.choose(ino, part, bytes, ids, began);
            }
        }
        Ok(())
    }

    /// Where several writes that overlapped were over when a read began, the read decides which of
    /// them is there.
    fn choose(&mut self, ino: u64, part: Range<u64>, bytes: &[u8], ids: &[Id], began: u64) {
        if self.lossy || ids.len() < 2 || ids.iter().any(|id| self.writes[*id].settled.is_none_or(|at| at >= began)) {
            return;
        }
        let content = self.files.get_mut(&ino).expect("it was created");
        content.split(part.start);
        content.split(part.end);
        for (start, piece) in content.pieces.range_mut(part.clone()) {
            // Of writes that began since, the read says nothing.
            if piece.live.iter().any(|id| !ids.contains(id)) || *start != part.start {
                continue;
            }
            let fit: Vec<Id> =
                ids.iter().copied().filter(|id| self.writes[*id].bytes(*id, part.start, bytes.len()) == bytes).collect();
            if let [one] = fit[..]
                && bytes.len() >= 8
            {
                piece.live = vec![one];
            }
        }
    }

    /// Each byte has to be that of one of these writes.
    fn judge(&self, ino: u64, at: u64, bytes: &[u8], ids: &[Id]) -> Result<(), String> {
        (at..).step_by(SECTOR).zip(bytes.chunks(SECTOR)).try_for_each(|(at, sector)| self.judge_sector(ino, at, sector, ids))
    }

    fn judge_sector(&self, ino: u64, at: u64, bytes: &[u8], ids: &[Id]) -> Result<(), String> {
        // Mostly all of it is of one, and of a late one.
        if ids.iter().rev().any(|id| self.writes[*id].bytes(*id, at, bytes.len()) == bytes) {
            return Ok(());
        }
        let mut fits = vec![false; bytes.len()];
        for id in ids {
            let written = self.writes[*id].bytes(*id, at, bytes.len());
            fits.iter_mut().zip(written.iter().zip(bytes)).for_each(|(fits, (a, b))| *fits |= a == b);
        }
        let Some(wrong) = fits.iter().position(|fits| !fits) else { return Ok(()) };
        let some = &bytes[wrong..bytes.len().min(wrong + 16)];
        let at = at + wrong as u64;
        let whose = self.whose(at, some);
        let possible: Vec<String> = ids.iter().map(|id| self.name(*id)).collect();
        Err(format!("inode {ino}, byte {at}: {some:?} is {whose}; it may be of\n  {}", possible.join("\n  ")))
    }

    fn name(&self, id: Id) -> String {
        let write = &self.writes[id];
        format!(
            "{id}: inode {}: {} ({}..{:?}, settled {:?}, durable {:?})",
            write.ino, write.what, write.began, write.ended, write.settled, write.durable
        )
    }

    /// Whose bytes these are: of any file, and of any place in it.
    fn whose(&self, at: u64, bytes: &[u8]) -> String {
        if bytes.iter().all(|byte| *byte == 0) {
            return "zeros".into();
        }
        let all = (1..self.writes.len()).filter(|id| !self.writes[*id].zero);
        match all.clone().find(|id| self.writes[*id].bytes(*id, at, bytes.len()) == bytes) {
            Some(id) => format!("of {}", self.name(id)),
            None => "no operation's".into(),
        }
    }

    /// The sizes that a file may have, where those writes are certain that `certain` says.
    fn sizes(&self, ino: u64, certain: impl Fn(&Write) -> bool) -> Vec<Range<u64>> {
        let content = &self.files[&ino];
        let write = |id: Id| &self.writes[id];
        let is_before = |a: Id, b: Id| write(a).ended.is_some_and(|ended| ended < write(b).began);
        let sets =
            content.sizes.iter().filter_map(|(id, size)| if let Size::Set(size) = size { Some((*id, *size)) } else { None });
        let grows =
            content.sizes.iter().filter_map(|(id, size)| if let Size::Grows(size) = size { Some((*id, *size)) } else { None });
        let mut possible = Vec::new();
        let floor = sets.clone().map(|(_, size)| size).min().unwrap_or(0);
        for (set, size) in sets.clone() {
            if sets.clone().any(|(other, _)| is_before(set, other) && certain(write(other))) {
                continue;
            }
            let behind = |grown: Id| set == 0 || is_before(set, grown);
            let least = grows.clone().filter(|(id, _)| certain(write(*id)) && behind(*id)).map(|(_, to)| to).max();
            let least = least.unwrap_or(0).max(size);
            possible.push(least..least + 1);
            if !certain(write(set)) {
                // One that grows may have come to any point, too.
                possible.push(size.min(floor)..size + 1);
            }
            // A write that was in flight beside it, is in flight, or failed, may count to any
            // point.
            possible.extend(grows.clone().filter(|(id, to)| !is_before(*id, set) && *to > least).map(|(_, to)| least..to + 1));
        }
        possible
    }

    /// Judges a size.
    pub fn judge_size(&self, ino: u64, began: u64, size: u64) -> Result<(), String> {
        let sizes = self.sizes(ino, |write| write.settled.is_some_and(|at| at <= began));
        let fits = sizes.iter().any(|possible| possible.contains(&size));
        if fits { Ok(()) } else { Err(format!("inode {ino}: it has {size} bytes, and may have {sizes:?}")) }
    }

    /// Judges what is in a file after a power cut. `kept`: turn before which all that was over then
    /// must be there.
    pub fn judge_left(&self, ino: u64, found: &[u8], kept: Option<u64>) -> Result<(), String> {
        let durable =
            |write: &Write| write.durable.is_some() || kept.is_some_and(|kept| write.settled.is_some_and(|at| at < kept));
        let sizes = self.sizes(ino, durable);
        let len = found.len() as u64;
        if !sizes.iter().any(|size| size.contains(&len)) {
            return Err(format!("inode {ino}: it has {len} bytes, and may have {sizes:?}"));
        }
        for (part, piece) in self.files[&ino].within(&(0..len)) {
            let is_hidden = |id: &Id| {
                let ended = self.writes[*id].ended;
                piece
                    .left
                    .iter()
                    .any(|by| durable(&self.writes[*by]) && ended.is_some_and(|ended| ended < self.writes[*by].began))
            };
            let ids: Vec<Id> = piece.left.iter().copied().filter(|id| !is_hidden(id)).collect();
            self.judge(ino, part.start, &found[part.start as usize..part.end as usize], &ids)?;
        }
        Ok(())
    }
}

impl Content {
    /// Makes a piece begin at a byte.
    fn split(&mut self, at: u64) {
        if at == END || self.pieces.contains_key(&at) {
            return;
        }
        let piece = self.pieces.range(..at).next_back().expect("one begins with the file").1.clone();
        self.pieces.insert(at, piece);
    }

    /// The pieces within a range, cut to it.
    fn within(&self, range: &Range<u64>) -> impl Iterator<Item = (Range<u64>, &Candidates)> {
        let first = self.pieces.range(..=range.start).next_back().map_or(0, |(start, _)| *start);
        let ends = self.pieces.range(first..).skip(1).map(|(start, _)| *start).chain([END]);
        let (start, end) = (range.start, range.end);
        self.pieces
            .range(first..end.max(first))
            .zip(ends)
            .map(move |((from, piece), to)| ((*from).max(start)..to.min(end), piece))
    }
}

impl Write {
    /// The bytes that this write has at a place.
    fn bytes(&self, id: Id, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        if !self.zero {
            fill(id, at, &mut bytes);
        }
        bytes
    }
}

/// The bytes that write `id` has from `at` on.
pub fn fill(id: Id, at: u64, out: &mut [u8]) {
    let word = |number: u64| {
        let mixed = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (id as u64).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((mixed ^ (mixed >> 29)).wrapping_mul(0x94d0_49bb_1331_11eb) | 0x0101_0101_0101_0101).to_le_bytes()
    };
    let mut done = 0;
    while done < out.len() {
        let place = at + done as u64;
        let skip = (place % 8) as usize;
        let len = (8 - skip).min(out.len() - done);
        out[done..done + len].copy_from_slice(&word(place / 8)[skip..skip + len]);
        done += len;
    }
}
