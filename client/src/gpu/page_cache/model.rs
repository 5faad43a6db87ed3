//! The protocol of cached ranges, tried in every order with what changes a file: a search through
//! all states of a file of two pages, of the kernel, and of a process that reads by a cached range.
//!
//! A page has two units, and each unit a value. The kernel's steps are those of Linux 6.12
//! (mm/truncate.c, mm/vmscan.c, mm/filemap.c, fs/fuse/file.c): it locks a page, takes it out of all
//! mappings, then out of the page cache, and no fault comes between these. The process does what
//! [`super::cached_range`] does, in its order: the sentinel, the registration, copies unit by unit,
//! the check. What is delivered has to be what the file held at some time since the read began:
//! before or after each change that was in flight.

use super::cached_range::counts;
use std::collections::HashSet;

/// What a unit holds: 0 for zeros, or the number of the change that wrote it.
type Value = u8;
/// Behind the end of the file.
const NOTHING: Value = 7;
const UNITS: usize = 4;
/// Where the file ends at first: in the middle of a page.
const SIZE: u8 = 3;
/// How many changes there are, one after the other.
const CHANGES: u8 = 2;
/// How many cached ranges are made, and how often is read.
const RANGES: u8 = 2;
const READS: u8 = 2;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
enum Held {
    #[default]
    None,
    /// The one that the page cache has.
    Cached,
    /// One that has left the page cache, with what it held then.
    Left([Value; 2]),
}

/// A page of the file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
struct Page {
    /// What the page cache has.
    cached: Option<[Value; 2]>,
    locked: bool,
    in_sentinel: bool,
    /// What CUDA holds.
    held: Held,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Change {
    /// write(2) of a unit.
    Write(u8),
    /// A direct write of a unit.
    Direct(u8),
    /// A page.
    Punch(u8),
    Truncate(u8),
    Extend(u8),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Process {
    /// Makes a cached range, and did so many steps.
    Makes(u8),
    Has,
    /// Reads, and did so many steps.
    Reads(u8),
    Ends,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct State {
    pages: [Page; 2],
    device: [Value; UNITS],
    size: u8,
    /// What the file holds as far as changes have ended, and will hold when that which is in flight
    /// has.
    before: [Value; UNITS],
    after: [Value; UNITS],
    /// The change that is in flight, how many steps of it are done, and whether the page of a
    /// write(2) left the page cache meanwhile.
    change: Option<(Change, u8)>,
    has_left: bool,
    /// Whether the change holds the lock of the page that it removes.
    holds_lock: bool,
    changes: u8,
    /// The page that the kernel tries to reclaim.
    reclaimed: Option<u8>,
    process: Process,
    /// Units of the cached range.
    len: u8,
    copied: [Value; UNITS],
    /// What a read may deliver of each unit: a bit for each value.
    allowed: [u8; UNITS],
    ranges: u8,
    reads: u8,
}

/// The steps of a process. Other than these they are mutations, which the search has to catch.
#[derive(Clone, Copy)]
struct Protocol {
    checks: Checks,
    looks_at_size: bool,
    populates_first: bool,
    /// Nothing has pages mapped in the sentinel later.
    leaves_sentinel_alone: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Checks {
    AfterTheCopy,
    WhenMade,
    Never,
}

const PROTOCOL: Protocol =
    Protocol { checks: Checks::AfterTheCopy, looks_at_size: true, populates_first: true, leaves_sentinel_alone: true };

/// What came of all orders.
#[derive(Default, Debug)]
struct Found {
    states: usize,
    delivered: usize,
    /// Of those, with the bytes of a change.
    delivered_changed: usize,
    thrown_away: usize,
}

impl State {
    fn first() -> State {
        let values = [0, 0, 0, NOTHING];
        State {
            pages: [Page::default(); 2],
            device: [0; UNITS],
            size: SIZE,
            before: values,
            after: values,
            change: None,
            has_left: false,
            holds_lock: false,
            changes: 0,
            reclaimed: None,
            process: Process::Makes(0),
            len: 0,
            copied: [0; UNITS],
            allowed: [0; UNITS],
            ranges: 0,
            reads: 0,
        }
    }

    fn units_of(page: usize) -> std::ops::Range<usize> {
        2 * page..2 * page + 2
    }

    /// Whether a fault finds the page, or reads it in. `None`: it waits for the lock.
    fn fault(&mut self, page: usize) -> Option<bool> {
        if self.pages[page].locked {
            return None;
        }
        if 2 * page >= usize::from(self.size) {
            return Some(false);
        }
        let device = [self.device[2 * page], self.device[2 * page + 1]];
        self.pages[page].cached.get_or_insert(device);
        Some(true)
    }

    /// The kernel locks a page that the page cache has, and takes it out of all mappings. `None`
    /// while another holds it.
    fn unmap(&mut self, page: usize) -> Option<bool> {
        let page = &mut self.pages[page];
        if page.locked {
            return None;
        }
        if page.cached.is_some() {
            (page.locked, page.in_sentinel) = (true, false);
        }
        Some(page.locked)
    }

    /// The same by the change that is in flight. False while it waits.
    fn unmap_for_change(&mut self, page: usize) -> bool {
        self.unmap(page).inspect(|locked| self.holds_lock = *locked).is_some()
    }

    /// It goes on with such a page.
    fn remove_for_change(&mut self, page: usize) {
        if std::mem::take(&mut self.holds_lock) {
            self.remove(page);
        }
    }

    /// The kernel takes a page that it has locked out of the page cache.
    fn remove(&mut self, number: usize) {
        let page = &mut self.pages[number];
        page.locked = false;
        if let Some(values) = page.cached.take() {
            if page.held == Held::Cached {
                page.held = Held::Left(values);
            }
            self.has_left = true;
        }
    }

    /// What the change that begins now does to each unit.
    fn begin(&mut self, change: Change) {
        let number = self.changes + 1;
        (self.change, self.changes, self.has_left) = (Some((change, 0)), number, false);
        let size = usize::from(self.size);
        for unit in 0..UNITS {
            let value = match change {
                Change::Write(at) | Change::Direct(at) if unit == usize::from(at) => number,
                Change::Punch(page) if State::units_of(page.into()).contains(&unit) && unit < size => 0,
                Change::Truncate(size) if unit >= size.into() => NOTHING,
                Change::Extend(to) if (size..to.into()).contains(&unit) => 0,
                _ => self.before[unit],
            };
            self.after[unit] = value;
        }
        self.allow();
    }

    /// A read that is in flight, or begins, may deliver what the file holds before and after the
    /// change. In between read(2) finds zeros in what is cut off: the device has it no more, and
    /// the kernel not yet the new size.
    fn allow(&mut self) {
        for unit in 0..UNITS {
            self.allowed[unit] |= 1 << self.before[unit] | 1 << self.after[unit];
            if let Some((Change::Truncate(size), _)) = self.change
                && unit >= size.into()
                && self.before[unit] != NOTHING
            {
                self.allowed[unit] |= 1;
            }
        }
    }

    /// The next step of the change that is in flight. False while it waits.
    fn go_on(&mut self, change: Change, step: u8) -> bool {
        let number = self.changes;
        let is_over = match (change, step) {
            // A page that the page cache has not stays locked until its bytes are written.
            (Change::Write(at), 0) => {
                let (page, within) = (&mut self.pages[usize::from(at) / 2], usize::from(at) % 2);
                if page.locked {
                    return false;
                }
                match &mut page.cached {
                    Some(values) => values[within] = number,
                    None => page.locked = true,
                }
                false
            }
            (Change::Write(at), 1) => {
                self.device[usize::from(at)] = number;
                let page = &mut self.pages[usize::from(at) / 2];
                let kept_locked = page.locked && page.cached.is_none();
                page.locked &= !kept_locked;
                kept_locked || !self.has_left
            }
            // The daemon has what was read anew before the bytes arrived invalidated.
            (Change::Write(at), 2) | (Change::Direct(at), 0 | 3) => {
                if !self.unmap_for_change(usize::from(at) / 2) {
                    return false;
                }
                false
            }
            (Change::Direct(at), 1) => {
                self.remove_for_change(usize::from(at) / 2);
                false
            }
            (Change::Direct(at), 2) => {
                self.device[usize::from(at)] = number;
                false
            }
            (Change::Write(at) | Change::Direct(at), _) => {
                self.remove_for_change(usize::from(at) / 2);
                true
            }
            (Change::Punch(page), 0) => {
                State::units_of(page.into()).for_each(|unit| self.device[unit] = 0);
                false
            }
            (Change::Punch(page), 1) => {
                if !self.unmap_for_change(page.into()) {
                    return false;
                }
                false
            }
            (Change::Punch(page), _) => {
                self.remove_for_change(page.into());
                true
            }
            (Change::Truncate(size), 0) => {
                self.device[size.into()..].fill(0);
                false
            }
            (Change::Truncate(size), 1) => {
                self.size = size;
                false
            }
            // The rest of a page in which the file ends is zeroed where it is.
            (Change::Truncate(size), 2) => {
                let page = &mut self.pages[usize::from(size) / 2 % 2];
                if size % 2 == 1 {
                    if page.locked {
                        return false;
                    }
                    page.cached.iter_mut().for_each(|values| values[1] = 0);
                }
                size > 2
            }
            (Change::Truncate(_), 3) => {
                if !self.unmap_for_change(1) {
                    return false;
                }
                false
            }
            (Change::Truncate(size), 4) => {
                self.remove_for_change(1);
                size > 0
            }
            (Change::Truncate(_), 5) => {
                if !self.unmap_for_change(0) {
                    return false;
                }
                false
            }
            (Change::Truncate(_), _) => {
                self.remove_for_change(0);
                true
            }
            (Change::Extend(size), _) => {
                self.size = size;
                true
            }
        };
        self.change = (!is_over).then_some((change, step + 1));
        if is_over {
            self.before = self.after;
            self.has_left = false;
        }
        true
    }

    /// Those that can begin.
    fn possible_changes(&self) -> Vec<Change> {
        let mut found = Vec::new();
        if self.change.is_none() && self.changes < CHANGES {
            // The other unit of a page would be as this one.
            found.extend((0..self.size).step_by(2).flat_map(|unit| [Change::Write(unit), Change::Direct(unit)]));
            found.extend((0..self.size.div_ceil(2)).map(Change::Punch));
            found.extend((0..self.size).map(Change::Truncate));
            found.extend((self.size + 1..=UNITS as u8).map(Change::Extend));
        }
        found
    }

    fn pages_of_range(&self) -> usize {
        usize::from(self.len).div_ceil(2)
    }

    /// As [`super::cached_range::CachedRange::is_true`].
    fn is_true(&self, protocol: Protocol) -> bool {
        let has_all = || self.pages[..self.pages_of_range()].iter().all(|page| page.in_sentinel);
        let size = if protocol.looks_at_size { self.size } else { u8::MAX };
        counts(has_all, || Some(size.into()), self.len.into())
    }

    /// There is no cached range any more; perhaps another one is made.
    fn gives_range_up(&mut self) {
        self.pages.iter_mut().for_each(|page| (page.in_sentinel, page.held) = (false, Held::None));
        (self.len, self.copied) = (0, [0; UNITS]);
        self.process = if self.ranges < RANGES && self.reads < READS { Process::Makes(0) } else { Process::Ends };
    }

    /// The next step of the process. False while it waits.
    fn act(&mut self, protocol: Protocol, found: &mut Found) -> Result<bool, Broken> {
        match self.process {
            Process::Makes(0) => {
                (self.len, self.ranges) = (self.size, self.ranges + 1);
                self.process = if self.len == 0 { Process::Ends } else { Process::Makes(1) };
            }
            Process::Makes(step) => {
                let pages = self.pages_of_range();
                let at = usize::from(step) - 1;
                if at == 2 * pages {
                    self.process = Process::Has;
                    if protocol.checks != Checks::Never && !self.is_true(protocol) {
                        self.gives_range_up();
                    }
                    return Ok(true);
                }
                let (page, populates) = (at % pages, (at < pages) == protocol.populates_first);
                match self.fault(page) {
                    None => return Ok(false),
                    Some(false) => self.gives_range_up(),
                    Some(true) => {
                        let page = &mut self.pages[page];
                        if populates {
                            page.in_sentinel = true;
                        } else {
                            page.held = Held::Cached;
                        }
                        self.process = Process::Makes(step + 1);
                    }
                }
            }
            Process::Has => {
                self.allow();
                self.reads += 1;
                self.process = Process::Reads(0);
            }
            Process::Reads(step) if step < self.len => {
                let page = &self.pages[usize::from(step) / 2];
                let values = match page.held {
                    Held::Cached => page.cached.expect("what is held is in the page cache"),
                    Held::Left(values) => values,
                    Held::None => unreachable!("a cached range holds its pages"),
                };
                self.copied[usize::from(step)] = values[usize::from(step) % 2];
                self.process = Process::Reads(step + 1);
            }
            Process::Reads(_) => {
                if protocol.checks == Checks::AfterTheCopy && !self.is_true(protocol) {
                    found.thrown_away += 1;
                    self.gives_range_up();
                    return Ok(true);
                }
                let copied = &self.copied[..self.len.into()];
                if let Some(unit) = copied.iter().zip(self.allowed).position(|(value, allowed)| allowed & 1 << value == 0) {
                    return Err(Broken { unit, state: *self });
                }
                found.delivered += 1;
                found.delivered_changed += usize::from(copied.iter().any(|value| *value > 0));
                self.copied = [0; UNITS];
                self.process = if self.reads < READS { Process::Has } else { Process::Ends };
            }
            Process::Ends => return Ok(false),
        }
        if !matches!(self.process, Process::Reads(_)) {
            self.allowed = [0; UNITS];
        }
        Ok(true)
    }
}

/// A unit was delivered that the file did not hold while it was read.
#[derive(Debug)]
#[allow(dead_code, reason = "shown where a search fails")]
struct Broken {
    unit: usize,
    state: State,
}

/// Goes through all states that can be reached.
fn search(protocol: Protocol) -> Result<Found, Broken> {
    let (mut seen, mut coming, mut found) = (HashSet::new(), vec![State::first()], Found::default());
    while let Some(state) = coming.pop() {
        if state.process == Process::Ends || !seen.insert(state) {
            continue;
        }
        let mut then = |next: &dyn Fn(&mut State) -> bool| {
            let mut after = state;
            if next(&mut after) && after != state {
                coming.push(after);
            }
        };
        for change in state.possible_changes() {
            then(&|state| {
                state.begin(change);
                true
            });
        }
        if let Some((change, step)) = state.change {
            then(&|state| state.go_on(change, step));
        }
        for page in 0..2 {
            // read(2), of anything.
            then(&|state| state.fault(page) == Some(true));
            match state.reclaimed {
                None => then(&|state| {
                    state.reclaimed = Some(page as u8);
                    state.unmap(page) == Some(true)
                }),
                Some(reclaimed) if reclaimed == page as u8 => {
                    // It succeeds or, where the page is held, not.
                    then(&|state| {
                        state.reclaimed = None;
                        state.remove(page);
                        true
                    });
                    then(&|state| {
                        (state.reclaimed, state.pages[page].locked) = (None, false);
                        true
                    });
                }
                Some(_) => {}
            }
            if !protocol.leaves_sentinel_alone && matches!(state.process, Process::Has | Process::Reads(_)) {
                then(&|state| {
                    let is_there = state.fault(page) == Some(true);
                    state.pages[page].in_sentinel |= is_there;
                    is_there
                });
            }
        }
        let mut after = state;
        if after.act(protocol, &mut found)? {
            coming.push(after);
        }
    }
    found.states = seen.len();
    Ok(found)
}

#[test]
fn every_order_of_the_page_cache_s_protocol() {
    let found = search(PROTOCOL).unwrap();
    println!("{found:?}");
    assert!(found.states > 100_000 && found.delivered > 0, "{found:?}");
    assert!(found.delivered_changed > 0 && found.thrown_away > 0, "{found:?}");
}

/// Each part of the protocol is needed: without it there is an order that delivers what the file
/// did not hold.
#[test]
fn a_protocol_that_leaves_something_out_is_caught() {
    for (name, protocol) in [
        ("no check", Protocol { checks: Checks::Never, ..PROTOCOL }),
        ("a check when it is made, and none of copies", Protocol { checks: Checks::WhenMade, ..PROTOCOL }),
        ("no look at the size", Protocol { looks_at_size: false, ..PROTOCOL }),
        ("a sentinel that comes after the registration", Protocol { populates_first: false, ..PROTOCOL }),
        ("a sentinel that is touched", Protocol { leaves_sentinel_alone: false, ..PROTOCOL }),
    ] {
        assert!(search(protocol).is_err(), "{name} is not noticed");
    }
}
