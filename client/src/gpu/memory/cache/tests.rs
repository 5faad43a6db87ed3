//! The cache on a machine that the tests make up: allocations come and go, room is short, and some
//! memory is refused.

use super::*;
use proptest::prelude::*;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// A GPU and a daemon.
#[derive(Debug, Default)]
struct Machine {
    allocations: Vec<Allocation>,
    /// What is registered now, and what for, by number.
    live: BTreeMap<u64, Export>,
    last: u64,
    /// Bytes that it takes.
    room: u64,
    /// Calls of `register`.
    asked: u64,
    /// It refuses every allocation whose number is divisible by this.
    refuses: u64,
    /// It refuses all.
    refuses_all: bool,
}

#[derive(Clone, Debug)]
struct Shared(Rc<RefCell<Machine>>);

#[derive(Debug)]
struct Registration {
    id: u64,
    machine: Shared,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.machine.0.borrow_mut().live.remove(&self.id).expect("only this unregisters it");
    }
}

impl Registrar for Shared {
    type Registration = Registration;

    fn register(&self, export: Export) -> Result<Registration, Refusal> {
        let mut machine = self.0.borrow_mut();
        machine.asked += 1;
        if machine.refuses_all {
            return Err(Refusal::Gpu(Reason::MmapRefused));
        }
        if export.allocation.buffer_id.is_multiple_of(machine.refuses) {
            return Err(Refusal::Allocation(Reason::ExportRefused));
        }
        let used: u64 = machine.live.values().map(|export| export.len).sum();
        if used + export.len > machine.room {
            return Err(Refusal::NoRoom(Reason::TotalLimit));
        }
        machine.last += 1;
        let id = machine.last;
        machine.live.insert(id, export);
        Ok(Registration { id, machine: self.clone() })
    }

    fn exists(&self, allocation: &Allocation) -> bool {
        self.0.borrow().allocations.contains(allocation)
    }
}

fn machine(room: u64) -> Shared {
    Shared(Rc::new(RefCell::new(Machine { room, refuses: u64::MAX, ..Machine::default() })))
}

impl Shared {
    /// Adds an allocation.
    fn allocate(&self, base: u64, len: u64) -> Allocation {
        let mut machine = self.0.borrow_mut();
        machine.last += 1;
        let allocation = Allocation { buffer_id: machine.last, base, len };
        machine.allocations.push(allocation);
        allocation
    }

    fn asked(&self) -> u64 {
        self.0.borrow().asked
    }
}

const MIB: u64 = 1 << 20;
/// Where the GPU's memory begins.
const START: u64 = 0x7f00_0000_0000;

#[test]
fn the_second_use_is_a_hit() {
    let machine = machine(u64::MAX);
    let cache = Cache::new(machine.clone(), 64 * MIB);
    // In the middle of a granule, as small allocations lie.
    let allocation = machine.allocate(START + 512, 100_000);
    let now = Instant::now();
    let first = cache.get(&allocation, START + 512, now).unwrap();
    let second = cache.get(&allocation, START + 70_000, now).unwrap();
    assert_eq!((first.id, first.offset, first.len), (second.id, 512, 100_000));
    assert_eq!((second.offset, second.len), (70_000, 30_512));
    assert_eq!((machine.asked(), cache.bytes()), (1, 2 * GRANULE));
}

#[test]
fn long_allocations_are_several_exports() {
    let machine = machine(u64::MAX);
    let cache = Cache::new(machine.clone(), u64::MAX);
    let allocation = machine.allocate(START + GRANULE / 2, 2 * MAX_EXPORT);
    let (now, end) = (Instant::now(), allocation.base + allocation.len);
    let mut at = allocation.base;
    let mut parts = Vec::new();
    while at < end {
        let lease = cache.get(&allocation, at, now).unwrap();
        parts.push((lease.offset, lease.len));
        at += lease.len;
    }
    assert_eq!(parts, [(GRANULE / 2, MAX_EXPORT - GRANULE / 2), (0, MAX_EXPORT), (0, GRANULE / 2)]);
    assert!(machine.0.borrow().live.values().all(|export| export.len < 4 << 30 && export.address % GRANULE == 0));
}

#[test]
fn a_gpu_that_refuses_is_asked_once() {
    let machine = machine(u64::MAX);
    machine.0.borrow_mut().refuses_all = true;
    let cache = Cache::new(machine.clone(), u64::MAX);
    for number in 0..5 {
        let allocation = machine.allocate(START + number * MIB, MIB);
        assert_eq!(cache.get(&allocation, allocation.base, Instant::now()).unwrap_err(), Reason::MmapRefused);
    }
    assert_eq!(machine.asked(), 1);
}

/// As when its BAR is full: the driver's word for that is the same.
#[test]
fn a_gpu_that_refuses_what_it_once_allowed_is_short_of_room() {
    let machine = machine(u64::MAX);
    let cache = Cache::new(machine.clone(), u64::MAX);
    let (one, other) = (machine.allocate(START, MIB), machine.allocate(START + MIB, MIB));
    let now = Instant::now();
    cache.get(&one, one.base, now).unwrap();
    machine.0.borrow_mut().refuses_all = true;
    assert_eq!(cache.get(&other, other.base, now).unwrap_err(), Reason::MmapRefused);
    machine.0.borrow_mut().refuses_all = false;
    assert_eq!(cache.get(&other, other.base, now).unwrap_err(), Reason::MmapRefused, "patience");
    cache.get(&other, other.base, now + PATIENCE).unwrap();
}

#[test]
fn what_is_in_use_outlives_its_entry() {
    let machine = machine(u64::MAX);
    let cache = Cache::new(machine.clone(), 4 * MIB);
    let allocation = machine.allocate(START, 4 * MIB);
    let now = Instant::now();
    let lease = cache.get(&allocation, START, now).unwrap();
    cache.forget(START + MIB, 1);
    assert_eq!((machine.0.borrow().live.len(), cache.bytes()), (1, 4 * MIB));
    let other = machine.allocate(START + 4 * MIB, MIB);
    assert_eq!(cache.get(&other, other.base, now).unwrap_err(), Reason::NoRoom, "it counts until its transfer is over");
    drop(lease);
    assert_eq!((machine.0.borrow().live.len(), cache.bytes()), (0, 0));
}

#[test]
fn a_hit_does_not_wait_for_a_registration() {
    /// Registers what lies at an even granule only when it is told to.
    struct Slow(parking_lot::RwLock<()>);
    impl Registrar for Slow {
        type Registration = ();
        fn register(&self, export: Export) -> Result<(), Refusal> {
            if (export.address / GRANULE).is_multiple_of(2) {
                let _until = self.0.read();
            }
            Ok(())
        }
        fn exists(&self, _: &Allocation) -> bool {
            true
        }
    }
    let cache = Cache::new(Slow(parking_lot::RwLock::new(())), u64::MAX);
    let [slow, fast] = [0, 1].map(|number| Allocation { buffer_id: number, base: START + number * GRANULE, len: GRANULE });
    cache.get(&fast, fast.base, Instant::now()).unwrap();
    let stopped = cache.registrar.0.write();
    std::thread::scope(|scope| {
        let registering = scope.spawn(|| cache.get(&slow, slow.base, Instant::now()).map(drop));
        while cache.registering.try_lock().is_some() {
            std::thread::yield_now();
        }
        cache.get(&fast, fast.base, Instant::now()).unwrap();
        assert!(!registering.is_finished());
        drop(stopped);
        registering.join().unwrap().unwrap();
    });
}

#[derive(Clone, Debug)]
enum Step {
    /// So many bytes, at so many granules and this distance from the start.
    Allocate(u64, u64, u64),
    Free(prop::sample::Index),
    /// An allocation, and where in it; whether the lease is kept.
    Get(prop::sample::Index, prop::sample::Index, bool),
    End(prop::sample::Index),
    Forget(prop::sample::Index),
    Room(u64),
    Wait(u64),
}

fn step() -> impl Strategy<Value = Step> {
    use prop::sample::Index;
    prop_oneof![
        2 => (1..40 * GRANULE, 0..200u64, 0..GRANULE).prop_map(|(len, at, within)| Step::Allocate(len, at, within / 256 * 256)),
        1 => any::<Index>().prop_map(Step::Free),
        8 => any::<(Index, Index, bool)>().prop_map(|(allocation, at, keep)| Step::Get(allocation, at, keep)),
        2 => any::<Index>().prop_map(Step::End),
        1 => any::<Index>().prop_map(Step::Forget),
        1 => (0..100 * GRANULE).prop_map(Step::Room),
        1 => (0..1500u64).prop_map(Step::Wait),
    ]
}

const BUDGET: u64 = 80 * GRANULE;

/// What has to hold of a cache, whatever it does.
struct Judge {
    machine: Shared,
    cache: Cache<Shared>,
    now: Instant,
    leases: Vec<Lease<Registration>>,
    /// When a registration was last asked for, by its number.
    used: BTreeMap<u64, u64>,
    clock: u64,
    /// Registrations that the cache must still know.
    known: BTreeMap<u64, Export>,
    /// Exports for which there was no room, and when.
    waiting: Vec<(Export, Instant)>,
}

impl Judge {
    fn get(&mut self, allocation: &Allocation, address: u64, keep: bool) {
        let export = allocation.export(address);
        let before = self.machine.0.borrow().live.clone();
        let asked = self.machine.asked();
        let in_use: Vec<u64> = self.leases.iter().map(|lease| lease.id).collect();
        let hit = self.known.iter().find(|(_, known)| **known == export).map(|(id, _)| *id);
        let result = self.cache.get(allocation, address, self.now);
        self.clock += 1;
        let live = self.machine.0.borrow().live.clone();
        let gone: Vec<u64> = before.keys().filter(|id| !live.contains_key(id)).copied().collect();
        self.known.retain(|id, _| live.contains_key(id));
        match &result {
            Ok(lease) => {
                assert_eq!(live[&lease.id], export);
                assert_eq!(export.address + lease.offset, address);
                assert_eq!(lease.len, (export.address + export.len).min(allocation.base + allocation.len) - address);
                assert!(export.address.is_multiple_of(GRANULE) && export.len.is_multiple_of(GRANULE));
                if let Some(hit) = hit {
                    assert_eq!((lease.id, self.machine.asked()), (hit, asked), "it was registered already");
                }
                self.used.insert(lease.id, self.clock);
                self.known.insert(lease.id, export);
            }
            Err(Reason::ExportRefused) => {
                assert!(allocation.buffer_id.is_multiple_of(self.machine.0.borrow().refuses));
            }
            Err(Reason::NoRoom | Reason::TotalLimit) => {
                let held: u64 = live.iter().filter(|(id, _)| in_use.contains(id)).map(|(_, export)| export.len).sum();
                let room = BUDGET.min(self.machine.0.borrow().room);
                if self.machine.asked() > asked || held + export.len > room {
                    assert!(held + export.len > room, "unused registrations could have gone");
                    self.waiting.push((export, self.now));
                } else {
                    assert!(
                        self.waiting.iter().any(|(other, since)| *other == export && self.now < *since + PATIENCE)
                            || export.len > BUDGET
                    );
                }
            }
            Err(reason) => panic!("{reason}"),
        }
        if hit.is_some() {
            assert!(result.is_ok());
        }
        if self.machine.asked() > asked {
            let leaked = live.iter().find(|(id, export)| !self.machine.exists(&export.allocation) && !in_use.contains(id));
            assert_eq!(leaked, None, "freed, and what was registered of it still holds the memory");
        }
        // Least recently used first, except for what was freed.
        let exists = |id: &u64| self.machine.exists(&before[id].allocation);
        for gone in gone.iter().filter(|id| exists(id)) {
            assert!(!in_use.contains(gone));
            let idle = self.known.keys().filter(|id| before.contains_key(id) && !in_use.contains(id));
            for stays in idle {
                assert!(self.used[stays] > self.used[gone], "{stays} was used before {gone}");
            }
        }
        if let (Ok(lease), true) = (result, keep) {
            self.leases.push(lease);
        }
    }

    fn check(&self) {
        let live = self.machine.0.borrow().live.clone();
        assert_eq!(self.cache.bytes(), live.values().map(|export| export.len).sum::<u64>());
        assert!(self.cache.bytes() <= BUDGET);
        for lease in &self.leases {
            assert!(live.contains_key(&lease.id), "in use, and unregistered");
        }
    }
}

proptest! {
    #[test]
    fn every_history_is_in_order(steps in prop::collection::vec(step(), 1..120), refuses in 5..20u64) {
        let machine = machine(u64::MAX);
        machine.0.borrow_mut().refuses = refuses;
        let mut judge = Judge {
            cache: Cache::new(machine.clone(), BUDGET),
            machine: machine.clone(),
            now: Instant::now(),
            leases: Vec::new(),
            used: BTreeMap::new(),
            clock: 0,
            known: BTreeMap::new(),
            waiting: Vec::new(),
        };
        for step in steps {
            let allocations = machine.0.borrow().allocations.clone();
            match step {
                Step::Allocate(len, at, within) => {
                    let base = START + at * GRANULE + within;
                    let overlaps = |other: &Allocation| base < other.base + other.len && other.base < base + len;
                    if !allocations.iter().any(overlaps) {
                        machine.allocate(base, len);
                    }
                }
                Step::Free(which) if !allocations.is_empty() => {
                    let freed = machine.0.borrow_mut().allocations.swap_remove(which.index(allocations.len()));
                    judge.known.retain(|_, export| export.allocation != freed);
                }
                Step::Get(which, at, keep) if !allocations.is_empty() => {
                    let allocation = allocations[which.index(allocations.len())];
                    judge.get(&allocation, allocation.base + at.index(allocation.len as usize) as u64, keep);
                }
                Step::End(which) if !judge.leases.is_empty() => {
                    let ended = which.index(judge.leases.len());
                    judge.leases.swap_remove(ended);
                }
                Step::Forget(which) if !allocations.is_empty() => {
                    let Allocation { base, len, .. } = allocations[which.index(allocations.len())];
                    judge.cache.forget(base, len);
                    judge.known.retain(|_, export| export.address >= base + len || export.address + export.len <= base);
                    judge.waiting.retain(|(export, _)| export.address >= base + len || export.address + export.len <= base);
                }
                Step::Room(room) => machine.0.borrow_mut().room = room,
                Step::Wait(milliseconds) => judge.now += Duration::from_millis(milliseconds),
                _ => {}
            }
            judge.check();
        }
        drop(judge);
        assert!(machine.0.borrow().live.is_empty());
    }
}
