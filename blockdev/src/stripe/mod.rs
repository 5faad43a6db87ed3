//! A stripe: several devices, its *members*, that are used as one. Unit after unit lies on member
//! after member, so that a long request is in flight on all of them at once. It can be given
//! further *sets* of members while it is in use, which hold what comes behind.
//!
//! `map` knows where what lies, and cuts requests; `queue` runs them on a queue of each member;
//! here are the device, and what its queues share: which members a flush has to go to.
mod growing;
mod map;
mod queue;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, RwLock};

pub use map::{Place, StripeMap, StripeSet};

use growing::Growing;
use queue::{Members, StripeQueue};

use crate::mappings::MAX_DEVICES;
use crate::{BlockDevice, Error, Geometry, Length, NoPeerToPeer, Queue, Region, Result};

/// Several devices as one.
///
/// A request is cut where units end; what of it lies on one member goes there as one request. It
/// is over when all of them are. An error names the member, and has the offset there.
///
/// Locks: `joining` before `users`. The first is shared by those who open queues and map memory
/// that is not this process's own, also while they wait for a member: none of them waits for
/// another. Members that join have it for themselves, and wait for those. The second is held for
/// moments only.
pub struct StripeDevice {
    shared: Arc<Shared>,
    joining: RwLock<()>,
    users: Mutex<Users>,
}

/// What the device and its queues share. What grows gets the members first, and the map of them
/// last.
struct Shared {
    names: Growing<Arc<str>>,
    geometry: Geometry,
    maps: Growing<StripeMap>,
    members: Growing<Arc<dyn BlockDevice>>,
    written: [Written; MAX_DEVICES],
}

/// Who has to know of members that are added.
#[derive(Default)]
struct Users {
    queues: Vec<Weak<Members>>,
    /// Memory of other processes and of devices. What is this process's own goes through a bounce
    /// buffer to and from members that it is not mapped for.
    mapped: Vec<Weak<Region>>,
}

/// How far a member's writes are durable, in writes counted at their completion. A flush covers
/// those that were counted when it was submitted.
#[derive(Debug)]
struct Written {
    completed: AtomicU64,
    durable: AtomicU64,
}

impl Default for Written {
    /// What earlier users wrote may not be durable: the first flush goes to all.
    fn default() -> Written {
        Written { completed: AtomicU64::new(1), durable: AtomicU64::new(0) }
    }
}

impl StripeDevice {
    /// Makes a device of members, in this order, of which the volume that lies on them as `map`
    /// says takes `len` bytes in all.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for more than 16 members, a member that is too short, or one whose
    /// logical block is larger than the unit.
    pub fn new(members: Vec<Arc<dyn BlockDevice>>, map: StripeMap, len: u64) -> Result<Arc<StripeDevice>> {
        let name = name(&members);
        if members.len() != map.members() || members.len() > MAX_DEVICES {
            return Err(unsupported(&name, format!("{} devices cannot be one: up to {MAX_DEVICES} can", members.len())));
        }
        fits(&members, &map, len)?;
        let geometry = geometry(&members, len);
        let shared = Shared {
            names: Growing::of(name),
            geometry,
            maps: Growing::of(map),
            members: members.into_iter().collect(),
            written: Default::default(),
        };
        Ok(Arc::new(StripeDevice { shared: Arc::new(shared), joining: RwLock::default(), users: Mutex::default() }))
    }

    fn queue(&self, is_busy: bool) -> Result<Box<dyn Queue>> {
        let _joining = self.joining.read_recursive();
        let others = self.users.lock().queues();
        let threads = is_busy.then(|| queue::threads_beside(others.iter().map(|queue| queue.threads()).sum()));
        drop(others);
        let queue = StripeQueue::open(self.shared.clone(), threads)?;
        let mut users = self.users.lock();
        users.queues.retain(|queue| queue.strong_count() > 0);
        users.queues.push(Arc::downgrade(queue.members()));
        Ok(Box::new(queue))
    }
}

fn unsupported(device: &str, reason: String) -> Error {
    Error::Unsupported { device: device.into(), reason }
}

fn name(members: &[Arc<dyn BlockDevice>]) -> Arc<str> {
    let names: Vec<&str> = members.iter().map(|member| member.name()).collect();
    names.join("+").into()
}

/// Whether a stripe of that length can lie so on these members.
fn fits(members: &[Arc<dyn BlockDevice>], map: &StripeMap, len: u64) -> Result<()> {
    for (member, (end, StripeSet { unit, data, .. })) in members.iter().zip(map.needs(len)) {
        let Geometry { len, logical_block, .. } = member.geometry();
        if len.get() < end {
            let reason = format!("has {} bytes, and {end} are needed of each device", len.get());
            return Err(unsupported(member.name(), reason));
        }
        if !unit.is_multiple_of((*logical_block).into()) || !data.is_multiple_of((*logical_block).into()) {
            return Err(unsupported(member.name(), format!("has blocks of {logical_block} bytes in a unit of {unit}")));
        }
    }
    Ok(())
}

/// Whether a member can be added to those of a stripe in use, which go on as they do: all that they
/// promise, it has to do.
fn can_join(member: &dyn BlockDevice, first: &dyn BlockDevice, stripe: &Geometry) -> Result<()> {
    let own = member.geometry();
    let why = if member.pins() != first.pins() || member.peer_to_peer().is_ok() != first.peer_to_peer().is_ok() {
        "is run by another driver than those before it".into()
    } else if own.read_only {
        "is read-only".into()
    } else if own.logical_block.max(own.memory_alignment) > stripe.logical_block || own.memory_alignment > stripe.memory_alignment
    {
        let (block, most) = (own.logical_block.max(own.memory_alignment), stripe.logical_block);
        format!("has blocks of {block} bytes, and the volume is used in blocks of {most}")
    } else if own.max_transfer < stripe.max_transfer {
        format!("takes requests of {} bytes at the most, and those before it of {}", own.max_transfer, stripe.max_transfer)
    } else if own.max_queues < stripe.max_queues {
        format!("has {} queues, and those before it have {}", own.max_queues, stripe.max_queues)
    } else if own.volatile_cache && !stripe.volatile_cache {
        "has a cache that loses what it holds when the power fails, and those before it have none".into()
    } else if stripe.discard && !own.discard {
        "cannot discard, and those before it can".into()
    } else if stripe.write_zeroes && !own.write_zeroes {
        "cannot write zeroes by itself, and those before it can".into()
    } else {
        return Ok(());
    };
    Err(unsupported(member.name(), why))
}

/// What all members can do.
fn geometry(members: &[Arc<dyn BlockDevice>], len: u64) -> Geometry {
    let all = || members.iter().map(|member| member.geometry());
    let expect = "a stripe has members";
    Geometry {
        len: Length::new(len),
        // A request is cut at any of its blocks, and so is its memory.
        logical_block: all().map(|one| one.logical_block.max(one.memory_alignment)).max().expect(expect),
        memory_alignment: all().map(|one| one.memory_alignment).max().expect(expect),
        max_transfer: all().map(|one| one.max_transfer).min().expect(expect),
        queue_depth: all().map(|one| one.queue_depth).fold(0, u32::saturating_add),
        max_queues: all().map(|one| one.max_queues).min().expect(expect),
        volatile_cache: all().any(|one| one.volatile_cache),
        discard: all().all(|one| one.discard),
        write_zeroes: all().all(|one| one.write_zeroes),
        read_only: all().any(|one| one.read_only),
    }
}

impl BlockDevice for StripeDevice {
    /// The names of the members, with `+` between them.
    fn name(&self) -> &str {
        self.shared.names.last()
    }

    fn geometry(&self) -> &Geometry {
        &self.shared.geometry
    }

    /// A queue of each member.
    fn open_queue(&self) -> Result<Box<dyn Queue>> {
        self.queue(false)
    }

    fn open_busy_queue(&self, _beside: Option<&dyn Queue>) -> Result<Box<dyn Queue>> {
        self.queue(true)
    }

    fn map(&self, region: &Arc<Region>) -> Result<()> {
        if region.is_private() {
            // A member that joins needs no mapping of it, so this does not wait for that.
            return map_for(&self.members(), region);
        }
        let _joining = self.joining.read_recursive();
        map_for(&self.members(), region)?;
        let mut users = self.users.lock();
        users.mapped.retain(|mapped| mapped.strong_count() > 0);
        users.mapped.push(Arc::downgrade(region));
        Ok(())
    }

    fn unmap(&self, region: &Region) {
        if region.is_private() {
            return self.shared.members.iter().for_each(|member| member.unmap(region));
        }
        let _joining = self.joining.read_recursive();
        self.users.lock().mapped.retain(|mapped| mapped.strong_count() > 0 && !std::ptr::eq(mapped.as_ptr(), region));
        self.shared.members.iter().for_each(|member| member.unmap(region));
    }

    /// Where all members can.
    fn peer_to_peer(&self) -> std::result::Result<(), NoPeerToPeer> {
        self.shared.members.iter().try_for_each(|member| member.peer_to_peer())
    }

    fn pins(&self) -> bool {
        self.shared.members.iter().any(|member| member.pins())
    }

    fn member_names(&self) -> Vec<&str> {
        self.shared.members.iter().map(|member| member.name()).collect()
    }

    fn lengthen(&self, len: u64) -> Result<()> {
        fits(&self.members(), self.shared.maps.last(), len)?;
        self.shared.geometry.len.grow(len);
        Ok(())
    }

    fn may_add_set(&self, members: &[Arc<dyn BlockDevice>], map: &StripeMap, len: u64) -> Result<()> {
        let shared = &self.shared;
        let all: Vec<_> = self.members().into_iter().chain(members.iter().cloned()).collect();
        if all.len() != map.members() || all.len() > MAX_DEVICES || map.sets() != shared.maps.last().sets() + 1 {
            return Err(unsupported(&name(members), format!("{} devices cannot be one: {MAX_DEVICES} can", all.len())));
        }
        fits(&all, map, len)?;
        members.iter().try_for_each(|member| can_join(&**member, &*all[0], &shared.geometry))
    }

    fn add_set(
        &self,
        members: &[Arc<dyn BlockDevice>],
        map: StripeMap,
        len: u64,
        begin: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        self.may_add_set(members, &map, len)?;
        // Large regions and new queues take long, and others map and open theirs meanwhile.
        let mut mapped = Mapped { members, regions: Vec::new() };
        let regions = self.users.lock().mapped();
        regions.into_iter().try_for_each(|region| mapped.add(region))?;
        let open = |queue: Arc<Members>| queue.open(members).map(|further| (queue, further));
        let queues = self.users.lock().queues();
        let mut opened = queues.into_iter().map(open).collect::<Result<Vec<_>>>()?;
        // From now on no queue is opened, and no memory mapped or unmapped that others may reach.
        let _joining = self.joining.write();
        let regions = self.users.lock().mapped();
        mapped.keep(&regions);
        regions.into_iter().try_for_each(|region| mapped.add(region))?;
        let queues = self.users.lock().queues();
        for queue in queues {
            if !opened.iter().any(|(other, _)| Arc::ptr_eq(other, &queue)) {
                opened.push(open(queue)?);
            }
        }
        begin()?;
        mapped.regions.clear();
        for (queue, further) in opened {
            queue.add(further);
        }
        let shared = &self.shared;
        members.iter().for_each(|member| shared.members.push(member.clone()));
        shared.names.push(name(&self.members()));
        shared.maps.push(map);
        // At last: a thread that sees the length finds all the rest.
        shared.geometry.len.grow(len);
        Ok(())
    }

    fn members(&self) -> Vec<Arc<dyn BlockDevice>> {
        self.shared.members.iter().cloned().collect()
    }

    fn without_discard(&self) -> Option<&str> {
        self.shared.members.iter().find_map(|member| member.without_discard())
    }

    fn stripe(&self) -> Option<&StripeMap> {
        Some(self.shared.maps.last())
    }
}

impl Users {
    fn queues(&self) -> Vec<Arc<Members>> {
        self.queues.iter().filter_map(Weak::upgrade).collect()
    }

    fn mapped(&self) -> Vec<Arc<Region>> {
        self.mapped.iter().filter_map(Weak::upgrade).collect()
    }
}

/// Regions that are mapped for members which are about to join; those that are still in here when
/// it is dropped are unmapped.
struct Mapped<'a> {
    members: &'a [Arc<dyn BlockDevice>],
    regions: Vec<Arc<Region>>,
}

impl Mapped<'_> {
    /// Maps one that is not there yet.
    fn add(&mut self, region: Arc<Region>) -> Result<()> {
        if !self.regions.iter().any(|other| Arc::ptr_eq(&region, other)) {
            map_for(self.members, &region)?;
            self.regions.push(region);
        }
        Ok(())
    }

    /// Unmaps what is none of these.
    fn keep(&mut self, regions: &[Arc<Region>]) {
        let is_gone = |region: &mut Arc<Region>| !regions.iter().any(|other| Arc::ptr_eq(region, other));
        let gone = self.regions.extract_if(.., is_gone).collect();
        drop(Mapped { members: self.members, regions: gone });
    }
}

impl Drop for Mapped<'_> {
    fn drop(&mut self) {
        let Mapped { members, regions } = self;
        regions.iter().for_each(|region| members.iter().for_each(|member| member.unmap(region)));
    }
}

/// Maps a region for all of these, or for none.
fn map_for(members: &[Arc<dyn BlockDevice>], region: &Arc<Region>) -> Result<()> {
    for (number, member) in members.iter().enumerate() {
        if let Err(error) = member.map(region) {
            members[..number].iter().for_each(|member| member.unmap(region));
            return Err(error);
        }
    }
    Ok(())
}

impl Shared {
    /// How the stripe lies on its members now.
    fn map(&self) -> &StripeMap {
        self.maps.last()
    }

    fn name(&self) -> &Arc<str> {
        self.names.last()
    }

    fn member(&self, number: usize) -> &Arc<dyn BlockDevice> {
        self.members.get(number).expect("the map names members that are there")
    }

    /// Accounts for a write of a member that is over.
    fn wrote(&self, member: usize) {
        self.written[member].completed.fetch_add(1, Ordering::AcqRel);
    }

    /// The writes of a member that a flush submitted now would cover; none where all of them are
    /// durable.
    fn to_flush(&self, member: usize) -> Option<u64> {
        let Written { completed, durable } = &self.written[member];
        let completed = completed.load(Ordering::Acquire);
        let has_cache = self.member(member).geometry().volatile_cache;
        (has_cache && durable.load(Ordering::Acquire) < completed).then_some(completed)
    }

    /// Accounts for a flush of a member that covered so many writes.
    fn flushed(&self, member: usize, covered: u64) {
        self.written[member].durable.fetch_max(covered, Ordering::AcqRel);
    }
}
