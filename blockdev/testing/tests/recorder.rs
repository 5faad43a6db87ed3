//! What a power cut may do to a recorded device, and what it may not.
use std::collections::BTreeSet;
use std::sync::Arc;

use gpunvme_blockdev::{BlockDevice, Io, Queue, Region, Request, Wait};
use gpunvme_blockdev_testing::{Event, Image, Log, Recorder, SECTOR};
use proptest::prelude::*;

const LEN: u64 = 64 << 10;

fn filled(byte: u8, len: usize) -> Arc<Region> {
    let region = Region::allocate(len).expect("memory");
    region.write_at(0, &vec![byte; len]).expect("inside");
    region
}

fn write(offset: u64, byte: u8, len: usize, fua: bool) -> Request {
    Request::write(offset, vec![filled(byte, len).span(0..len)], fua)
}

fn first_bytes(image: &Image, count: u64) -> Vec<u8> {
    (0..count)
        .map(|sector| {
            let mut bytes = [0; SECTOR as usize];
            image.read_at(sector * SECTOR, &mut bytes);
            let is_one = |bytes: &[u8]| bytes.iter().all(|byte| *byte == bytes[0]);
            // What was discarded is a pattern of 16 bytes.
            assert!(is_one(&bytes) || bytes.chunks(16).all(|chunk| chunk == b"*was discarded!*"), "a sector is never torn");
            bytes[0]
        })
        .collect()
}

fn finish(queue: &dyn Queue, count: usize) {
    let mut out = Vec::new();
    while out.len() < count {
        queue.complete(Wait::Forever, &mut out).expect("the queue works");
    }
    assert!(out.iter().all(|completion| completion.result.is_ok()));
}

/// Every state in which a cut can leave the first `sectors` sectors, by trying every subset of
/// what may be lost.
fn states(log: &Log, cut: usize, sectors: u64) -> BTreeSet<Vec<u8>> {
    let mut cuts = log.power_cuts();
    let mut asked = BTreeSet::new();
    cuts.image(cut, |event, sector| asked.insert((event, sector)));
    let asked: Vec<_> = asked.into_iter().collect();
    (0u32..1 << asked.len())
        .map(|subset| {
            let survives = |event, sector| {
                let place = asked.binary_search(&(event, sector)).expect("the same sectors are asked for again");
                subset & 1 << place != 0
            };
            first_bytes(&cuts.image(cut, survives), sectors)
        })
        .collect()
}

#[test]
fn a_flush_makes_durable_what_was_collected_before_it() {
    let recorder = Recorder::new(Image::new(LEN));
    let io = Io::inline(recorder.clone()).expect("io");
    io.run(vec![write(0, 1, 512, false)]).expect("written");
    let before = recorder.position();
    io.run(vec![Request::flush()]).expect("flushed");
    let after = recorder.position();
    let log = recorder.log();
    assert_eq!(states(&log, before, 1), BTreeSet::from([vec![0], vec![1]]));
    assert_eq!(states(&log, after, 1), BTreeSet::from([vec![1]]));
}

#[test]
fn a_flush_does_not_cover_writes_in_flight_beside_it() {
    let recorder = Recorder::new(Image::new(LEN));
    let queue = recorder.open_queue().expect("a queue");
    // In one batch, and also where the write's completion was there but not collected yet.
    queue.submit(&mut vec![write(0, 1, 512, false), Request::flush()]);
    queue.submit(&mut vec![Request::flush()]);
    finish(&*queue, 3);
    let log = recorder.log();
    assert_eq!(states(&log, log.events().len(), 1), BTreeSet::from([vec![0], vec![1]]));
}

#[test]
fn a_durable_write_is_durable_when_collected_and_not_before() {
    let recorder = Recorder::new(Image::new(LEN));
    let queue = recorder.open_queue().expect("a queue");
    queue.submit(&mut vec![write(512, 7, 512, false), write(0, 1, 512, true)]);
    let submitted = recorder.position();
    finish(&*queue, 2);
    let log = recorder.log();
    assert_eq!(states(&log, submitted, 2).len(), 4);
    assert_eq!(states(&log, log.events().len(), 2), BTreeSet::from([vec![1, 0], vec![1, 7]]), "and covers no other");
}

#[test]
fn writes_discards_and_zeroes_tear_at_sectors() {
    let base = {
        let mut base = Image::new(LEN);
        base.write_at(0, &[9; 2048]);
        base
    };
    let recorder = Recorder::new(base);
    let io = Io::inline(recorder.clone()).expect("io");
    io.run(vec![write(0, 1, 1024, false)]).expect("written");
    io.run(vec![Request::discard(1024, 1024)]).expect("discarded");
    let log = recorder.log();
    let states = states(&log, log.events().len(), 4);
    assert_eq!(states.len(), 16);
    // The first byte of what is garbage.
    let g = b'*';
    assert!(states.contains(&vec![9, 1, 9, g]) && states.contains(&vec![9, 9, 9, 9]) && states.contains(&vec![1, 1, g, g]));
    // As a fill with zeroes does.
    let recorder = Recorder::new(recorder.snapshot());
    let io = Io::inline(recorder.clone()).expect("io");
    io.run(vec![Request::write_zeroes(0, 1024)]).expect("zeroed");
    let log = recorder.log();
    assert_eq!(self::states(&log, log.events().len(), 3).len(), 4);
}

#[test]
fn later_writes_lie_over_earlier_ones() {
    let recorder = Recorder::new(Image::new(LEN));
    let io = Io::inline(recorder.clone()).expect("io");
    io.run(vec![write(0, 1, 512, false)]).expect("written");
    io.run(vec![write(0, 2, 512, true)]).expect("written");
    let log = recorder.log();
    assert_eq!(states(&log, log.events().len(), 1), BTreeSet::from([vec![2]]));
}

#[test]
fn refused_requests_leave_no_event() {
    let recorder = Recorder::new(Image::new(LEN));
    let io = Io::inline(recorder.clone()).expect("io");
    io.run(vec![write(LEN, 1, 512, false)]).expect_err("out of range");
    io.run(vec![Request::read(0, vec![filled(0, 512).span(0..512)])]).expect("read");
    assert_eq!(recorder.position(), 0);
}

#[derive(Debug, Clone)]
enum Step {
    Write { sector: u64, sectors: u64, byte: u8, fua: bool },
    Zeroes { sector: u64, sectors: u64 },
    Flush,
    Collect,
}

fn step() -> impl Strategy<Value = Step> {
    let range = (0..16u64, 1..5u64);
    prop_oneof![
        5 => (range.clone(), 1..255u8, prop::bool::weighted(0.2))
            .prop_map(|((sector, sectors), byte, fua)| Step::Write { sector, sectors, byte, fua }),
        1 => range.prop_map(|(sector, sectors)| Step::Zeroes { sector, sectors }),
        2 => Just(Step::Flush),
        3 => Just(Step::Collect),
    ]
}

proptest! {
    /// The cheap forward walk against the rule written down once more, from the base and without
    /// any state.
    #[test]
    fn states_follow_the_rule(steps in proptest::collection::vec(step(), 1..40), luck in any::<u64>()) {
        let recorder = Recorder::new(Image::new(LEN));
        let queue = recorder.open_queue().expect("a queue");
        for step in &steps {
            match *step {
                Step::Write { sector, sectors, byte, fua } => {
                    queue.submit(&mut vec![write(sector * SECTOR, byte, (sectors * SECTOR) as usize, fua)]);
                }
                Step::Zeroes { sector, sectors } => {
                    queue.submit(&mut vec![Request::write_zeroes(sector * SECTOR, sectors * SECTOR)]);
                }
                Step::Flush => queue.submit(&mut vec![Request::flush()]),
                Step::Collect => {
                    queue.complete(Wait::No, &mut Vec::new()).expect("the queue works");
                }
            }
        }
        let log = recorder.log();
        let events = log.events();
        let survives = |event: usize, sector: u64| {
            (luck ^ (event as u64 * 31) ^ (sector * 17)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 63 == 1
        };
        let mut cuts = log.power_cuts();
        for cut in (0..=events.len()).chain([events.len() / 2]) {
            let done = |of: usize| events[..cut].iter().position(|event| matches!(event, Event::Done(e) if *e == of));
            let durable = |of: usize| {
                let Some(collected) = done(of) else { return false };
                let fua = matches!(events[of], Event::Write { fua: true, .. });
                fua || (collected..cut).any(|e| matches!(events[e], Event::Flush(_)) && done(e).is_some())
            };
            let mut expected = [0u8; 20];
            for (number, event) in events[..cut].iter().enumerate() {
                let (offset, len, byte) = match event {
                    Event::Write { offset, data, .. } => (*offset, data.len() as u64, data[0]),
                    Event::WriteZeroes { offset, len } => (*offset, *len, 0),
                    _ => continue,
                };
                for sector in 0..len / SECTOR {
                    if durable(number) || survives(number, sector) {
                        expected[(offset / SECTOR + sector) as usize] = byte;
                    }
                }
            }
            prop_assert_eq!(first_bytes(&cuts.image(cut, survives), 20), expected);
            let changes = |number: &usize| matches!(events[*number], Event::Write { .. } | Event::WriteZeroes { .. });
            let pending: Vec<usize> = (0..cut).filter(changes).filter(|number| !durable(*number)).collect();
            prop_assert_eq!(cuts.pending(cut), pending);
        }
        // Cuts left out show nothing new: their states are those of the cut before.
        let tried: BTreeSet<usize> = log.cuts().collect();
        for cut in (1..=events.len()).filter(|cut| !tried.contains(cut)) {
            let before = cuts.pending(cut - 1);
            prop_assert_eq!(cuts.pending(cut), before);
        }
    }
}
