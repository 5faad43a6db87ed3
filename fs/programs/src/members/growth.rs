//! Growth: the volume gets more of its members, whose devices have become larger while it is in
//! use.
//!
//! How much of them it has belongs to a generation: the members begin one that says so, and then
//! the volume's own blocks may lie there. A crash leaves the old generation, or the new one.

use std::sync::Arc;

use gpunvme_blockdev::BlockDevice;
use gpunvme_layout::{Geometry, Striping};

use super::copies::blocks_of;
use super::judged;
use crate::claim::reason;

/// Looks how large a device is, or all members of one; of members, the volume has all of them from
/// now on, as far as the smallest reaches. `device` is open for writing. Returns what keeps the
/// members from giving more than they did, if that is so.
///
/// # Errors
/// A text with the name of the device that failed, or is too small.
pub fn grow(device: &Arc<dyn BlockDevice>) -> Result<Option<String>, String> {
    let look = |device: &Arc<dyn BlockDevice>| device.look_again().map_err(|error| reason(device.name(), &error));
    let members = device.members();
    if members.is_empty() {
        return look(device).map(|_| None);
    }
    for member in members {
        look(member)?;
    }
    let set = judged(members.iter().map(|member| (member.name().to_owned(), member.clone())).collect())?;
    let blocks: Vec<u64> = members.iter().map(blocks_of).collect();
    let old = set.striping();
    let Some(grown) = old.grown(&blocks) else {
        let smallest = members.iter().min_by_key(|member| member.geometry().len.get()).expect("a stripe has members");
        let (has, name) = (smallest.geometry().len.get(), smallest.name());
        let why = "the volume takes as much of each member as the smallest has: make it larger, too";
        // After a failure the members may have begun to be larger than the volume knows.
        lengthen(device, &old)?;
        return Ok(Some(format!("{name} has {has} bytes, and {why}")));
    };
    set.begin_larger(grown, &blocks)?;
    lengthen(device, &grown)?;
    Ok(None)
}

fn lengthen(device: &Arc<dyn BlockDevice>, striping: &Striping) -> Result<(), String> {
    device.lengthen(Geometry::byte(striping.total_blocks())).map_err(|error| reason(device.name(), &error))
}
