//! Growth: the volume gets more of its members, whose devices have become larger while it is in
//! use, or a further set of members behind those that it has.
//!
//! What the members hold of it belongs to a generation: they begin one that says so, and then the
//! volume's own blocks may lie there. A crash leaves the old generation, or the new one.

use std::sync::Arc;

use gpunvme_blockdev::{BlockDevice, Error};
use gpunvme_layout::Striping;
use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::member::MEMBERS_MAX;

use super::copies::blocks_of;
use super::set::{GrowError, Set};
use super::{judged, map};
use crate::claim::reason;
use crate::wipe;

/// The smallest device that a volume takes, in bytes.
const LEAST: u64 = 16 << 20;

/// Looks how large a device is, or all members of one; of those of the last set, the volume has all
/// from now on, as far as the smallest reaches. `device` is open for writing. `may_have`: why the
/// volume cannot become so long, in bytes, if it cannot. Returns what keeps members that are larger
/// from giving more than they did, if that is so.
///
/// # Errors
/// A device failed, or has become smaller.
pub fn grow(device: &Arc<dyn BlockDevice>, may_have: &dyn Fn(u64) -> Result<(), String>) -> Result<Option<String>, GrowError> {
    let look = |device: &Arc<dyn BlockDevice>| {
        let now = device.look_again().map_err(|error| reason(device.name(), &error))?;
        let (name, had) = (device.name(), device.geometry().len.get());
        match now < had {
            true => Err(format!("{name} has {now} bytes, and had {had}: a volume never shrinks; make it as large as it was")),
            false => Ok(()),
        }
    };
    let members = device.members();
    if members.is_empty() {
        look(device)?;
        return Ok(None);
    }
    members.iter().try_for_each(look)?;
    let set = own(&members)?;
    let (last, before) = set.sets().split_last().expect("a volume has a set");
    let of_last = &members[members.len() - usize::from(last.members)..];
    let blocks: Vec<u64> = of_last.iter().map(blocks_of).collect();
    // After a failure the members may have begun to be larger than the volume knows.
    let as_they_are = |why| lengthen(device, set.sets()).map(|()| Some(why)).map_err(GrowError::from);
    if !set.has_more() {
        lengthen(device, set.sets())?;
        return Ok(None);
    }
    let Some(grown) = last.grown(before.iter().map(Striping::total_blocks).sum(), &blocks) else {
        let smallest = of_last.iter().min_by_key(|member| member.geometry().len.get()).expect("a set has members");
        let (has, name) = (smallest.geometry().len.get(), smallest.name());
        let why = match before {
            [] => "the volume takes as much of each member as the smallest has: make it larger, too",
            _ => "of the members that were added last, the volume takes as much as the smallest has: make it larger",
        };
        return as_they_are(format!("{name} has {has} bytes, and {why}"));
    };
    let sets = [before, &[grown]].concat();
    // Members that have begun to be larger cannot become smaller any more.
    if let Err(why) = may_have(len_of(&sets)) {
        return as_they_are(why);
    }
    set.begin_larger(grown)?;
    lengthen(device, &sets)?;
    Ok(None)
}

/// Whether a volume of several devices can have these as well, as far as can be said without
/// looking at what they hold.
///
/// # Errors
/// A text with the name of the device that cannot be a member.
pub fn may_add(device: &Arc<dyn BlockDevice>, devices: &[Arc<dyn BlockDevice>]) -> Result<(), String> {
    let sets = with_set(device, devices)?;
    device.may_add_set(devices, &map(&sets), len_of(&sets)).map_err(|error| error.to_string())
}

/// How the volume lies on its members and these.
fn with_set(device: &Arc<dyn BlockDevice>, devices: &[Arc<dyn BlockDevice>]) -> Result<Vec<Striping>, String> {
    let members = device.members();
    let (name, has, most) = (device.name(), members.len(), usize::from(MEMBERS_MAX));
    if members.is_empty() {
        return Err(format!(
            "{name} is all of the volume: it takes further ones only where mkfs made it of several, or --growable"
        ));
    }
    if has + devices.len() > most {
        return Err(format!("the volume has {has} devices, and {most} are the most: {} more are too many", devices.len()));
    }
    for device in devices {
        let (name, has) = (device.name(), device.geometry().len.get());
        if has < LEAST {
            return Err(format!("{name} has {has} bytes, and {LEAST} are the least of a further member"));
        }
    }
    let set = own(&members)?;
    let blocks: Vec<u64> = devices.iter().map(blocks_of).collect();
    let before = set.sets().iter().map(Striping::total_blocks).sum();
    let added = Striping::behind(before, &blocks, set.sets()[0].unit)
        .ok_or_else(|| format!("{} cannot be {} more members of the volume", names(devices), devices.len()))?;
    Ok([set.sets(), &[added]].concat())
}

/// Gives a volume of several devices, which is open for writing, a further set of members: these
/// devices, open for the caller alone, whose ends are zero. With an error, the volume goes on as it
/// was. If it may have them at the next mount all the same, they stay claimed until this process
/// ends.
///
/// # Errors
/// A device failed, or cannot be a member.
pub fn add(device: &Arc<dyn BlockDevice>, devices: &[Arc<dyn BlockDevice>]) -> Result<(), GrowError> {
    let sets = with_set(device, devices)?;
    for device in devices {
        let name = device.name();
        if !wipe::is_wiped(device).map_err(|error| format!("{name}: {}", reason(name, &error)))? {
            return Err(format!("{name} carries data: its first and last MiB have to be zero").into());
        }
    }
    let set = own(&device.members())?;
    let added = *sets.last().expect("it was just added");
    let mut begun = Ok(());
    let begin = &mut || {
        begun = set.begin_set(added, devices);
        begun.clone().map_err(|why| Error::Unsupported { device: names(devices).into(), reason: why.to_string() })
    };
    let done = device.add_set(devices, map(&sets), len_of(&sets), begin);
    if let Err(why) = begun {
        // With one more generation of the old shape, what the devices say of themselves is stale.
        let undone = own(&device.members()).map_err(GrowError::from).and_then(|set| set.begin_generation(set.names()));
        let Err(not_undone) = undone else { return Err(why) };
        std::mem::forget(devices.to_vec());
        return Err(match [why, not_undone] {
            [GrowError::NotDurable(error), _] | [_, GrowError::NotDurable(error)] => GrowError::NotDurable(error),
            // First the way out: the answer of an ioctl cuts off the end.
            [why, _] => {
                let names = names(devices);
                format!("keep what is there, and mount the volume again: {names} may be the volume's at the next mount; {why}")
                    .into()
            }
        });
    }
    Ok(done.map_err(|error| error.to_string())?)
}

fn own(members: &[Arc<dyn BlockDevice>]) -> Result<Set, String> {
    judged(members.iter().map(|member| (member.name().to_owned(), member.clone())).collect())
}

fn names(devices: &[Arc<dyn BlockDevice>]) -> String {
    devices.iter().map(|device| device.name()).collect::<Vec<_>>().join("+")
}

fn lengthen(device: &Arc<dyn BlockDevice>, sets: &[Striping]) -> Result<(), String> {
    device.lengthen(len_of(sets)).map_err(|error| reason(device.name(), &error))
}

/// Bytes of all sets.
fn len_of(sets: &[Striping]) -> u64 {
    sets.iter().map(Striping::total_blocks).sum::<u64>() * BLOCK_SIZE as u64
}
