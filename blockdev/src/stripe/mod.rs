//! A stripe: several devices, its *members*, that are used as one. Unit after unit lies on member
//! after member, so that a long request is in flight on all of them at once.
//!
//! `map` knows where what lies, and cuts requests; `queue` runs them on a queue of each member;
//! here are the device, and what its queues share: which members a flush has to go to.
mod map;
mod queue;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use map::{Place, StripeMap};

use queue::StripeQueue;

use crate::mappings::MAX_DEVICES;
use crate::{BlockDevice, Error, Geometry, Length, NoPeerToPeer, Queue, Region, Result};

/// Several devices as one.
///
/// A request is cut where units end; what of it lies on one member goes there as one request. It
/// is over when all of them are. An error names the member, and has the offset there.
pub struct StripeDevice {
    shared: Arc<Shared>,
}

/// What the device and its queues share.
struct Shared {
    name: Arc<str>,
    geometry: Geometry,
    map: StripeMap,
    members: Vec<Arc<dyn BlockDevice>>,
    written: Vec<Written>,
}

/// How far a member's writes are durable, in writes counted at their completion. A flush covers
/// those that were counted when it was submitted.
struct Written {
    completed: AtomicU64,
    durable: AtomicU64,
}

impl StripeDevice {
    /// Makes a device of members, in this order. Each has the same length of data, of which the
    /// volume that `map` describes takes `len` bytes in all.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for more than 16 members, a member that is too short, or one whose
    /// logical block is larger than the unit.
    pub fn new(members: Vec<Arc<dyn BlockDevice>>, map: StripeMap, len: u64) -> Result<Arc<StripeDevice>> {
        let names: Vec<&str> = members.iter().map(|member| member.name()).collect();
        let name: Arc<str> = names.join("+").into();
        let unsupported = |device: &str, reason: String| Error::Unsupported { device: device.into(), reason };
        if members.len() != map.members() || members.len() > MAX_DEVICES {
            return Err(unsupported(&name, format!("{} devices cannot be one: 2 to {MAX_DEVICES} can", members.len())));
        }
        let end = map.member_end(len);
        for member in &members {
            let (len, logical_block) = (member.geometry().len.get(), member.geometry().logical_block);
            if len < end {
                return Err(unsupported(member.name(), format!("has {len} bytes, and {end} are needed of each device")));
            }
            if !map.unit().is_multiple_of(logical_block.into()) || !map.data().is_multiple_of(logical_block.into()) {
                let unit = map.unit();
                return Err(unsupported(member.name(), format!("has blocks of {logical_block} bytes in a unit of {unit}")));
            }
        }
        let geometry = geometry(&members, len);
        // What earlier users wrote may not be durable: the first flush goes to all.
        let written = members.iter().map(|_| Written { completed: AtomicU64::new(1), durable: AtomicU64::new(0) }).collect();
        Ok(Arc::new(StripeDevice { shared: Arc::new(Shared { name, geometry, map, members, written }) }))
    }
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
        &self.shared.name
    }

    fn geometry(&self) -> &Geometry {
        &self.shared.geometry
    }

    /// A queue of each member.
    fn open_queue(&self) -> Result<Box<dyn Queue>> {
        Ok(Box::new(StripeQueue::open(self.shared.clone(), false)?))
    }

    fn open_busy_queue(&self, _beside: Option<&dyn Queue>) -> Result<Box<dyn Queue>> {
        Ok(Box::new(StripeQueue::open(self.shared.clone(), true)?))
    }

    fn map(&self, region: &Arc<Region>) -> Result<()> {
        let members = &self.shared.members;
        for (number, member) in members.iter().enumerate() {
            if let Err(error) = member.map(region) {
                members[..number].iter().for_each(|member| member.unmap(region));
                return Err(error);
            }
        }
        Ok(())
    }

    fn unmap(&self, region: &Region) {
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
        let end = self.shared.map.member_end(len);
        if let Some(member) = self.shared.members.iter().find(|member| member.geometry().len.get() < end) {
            let reason = format!("has {} bytes, and {end} are needed of each device", member.geometry().len.get());
            return Err(Error::Unsupported { device: member.name().into(), reason });
        }
        self.shared.geometry.len.grow(len);
        Ok(())
    }

    fn members(&self) -> &[Arc<dyn BlockDevice>] {
        &self.shared.members
    }

    fn without_discard(&self) -> Option<&str> {
        self.shared.members.iter().find_map(|member| member.without_discard())
    }

    fn stripe(&self) -> Option<StripeMap> {
        Some(self.shared.map)
    }
}

impl Shared {
    /// Accounts for a write of a member that is over.
    fn wrote(&self, member: usize) {
        self.written[member].completed.fetch_add(1, Ordering::AcqRel);
    }

    /// The writes of a member that a flush submitted now would cover; none where all of them are
    /// durable.
    fn to_flush(&self, member: usize) -> Option<u64> {
        let Written { completed, durable } = &self.written[member];
        let completed = completed.load(Ordering::Acquire);
        (self.members[member].geometry().volatile_cache && durable.load(Ordering::Acquire) < completed).then_some(completed)
    }

    /// Accounts for a flush of a member that covered so many writes.
    fn flushed(&self, member: usize, covered: u64) {
        self.written[member].durable.fetch_max(covered, Ordering::AcqRel);
    }
}
