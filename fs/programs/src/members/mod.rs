//! Volumes of several devices: from the name of one of them to the whole volume, claimed and
//! opened as one device.
//!
//! [`open`] claims what it is given, and where that is a member, `search` finds the others by what
//! they say of themselves; `copies` reads and writes the two superblocks that each member has;
//! `set` judges whether the members are all, and all of the same moment; [`format()`] makes them.
//!
//! What was found is believed only after it was read again from claimed devices. A volume that is
//! opened for writing gets a new generation on all members first, so that a member that is not
//! there cannot come back later unnoticed.

mod copies;
mod growth;
mod search;
mod set;

use std::cell::OnceCell;
use std::sync::Arc;

use gpunvme_blockdev::{BlockDevice, OpenMode, StripeDevice, StripeMap, StripeSet, path_of, split_names};
use gpunvme_layout::member::Generation;
use gpunvme_layout::superblock::Names;
use gpunvme_layout::{Geometry, Member, Striping, Superblock};

use crate::claim::{ClaimError, claim_beside, claim_by, listed_mount};
use crate::names::Superblocks;
use crate::random::random;
use copies::{Copies, WriteFailed};
pub use growth::{add, grow, may_add};
pub(crate) use search::block_devices;
pub use set::GrowError;
use set::Set;

/// Claims the volume that `device` names, and opens it. Where it is a member of a volume of several
/// devices, the others are found, or are those in `others`; what comes back is all of them as one
/// device. Opened for writing, it is of a new generation.
///
/// # Errors
/// A device cannot be claimed or read; a member is missing, foreign, stale or there twice.
pub fn open(device: &str, others: &[String], mode: OpenMode) -> Result<Arc<dyn BlockDevice>, ClaimError> {
    match claim_all(device, others, mode)? {
        Claimed::Whole(device) => Ok(device),
        Claimed::Members(members) => assemble(members, mode).map_err(ClaimError::Device),
    }
}

/// An open device, and what claims it.
pub type ClaimedBy<T> = (Arc<dyn BlockDevice>, T);

/// As [`open`], for a `device` that is a path, and is not a member of a volume of several devices:
/// `claim` claims and opens it. None: it is such a member.
///
/// # Errors
/// As [`open`].
pub fn open_alone<T>(
    device: &str,
    mode: OpenMode,
    claim: impl Fn() -> gpunvme_blockdev::Result<ClaimedBy<T>>,
) -> Result<Option<ClaimedBy<T>>, ClaimError> {
    if glance(device).is_some() {
        return Ok(None);
    }
    let (opened, with) = claim_by(device, mode, claim)?;
    // It was not claimed when it was looked at.
    let is_member = Copies::read(&opened).map_err(ClaimError::Device)?.is_some();
    Ok((!is_member).then_some((opened, with)))
}

/// The names of all devices of the volume that `device` is a member of, itself first; of what is no
/// member, or cannot be read, its own alone. Nothing is claimed: what was read may change.
///
/// # Errors
/// A text: a member is missing or there twice.
pub fn look(device: &str) -> Result<Vec<String>, String> {
    let own = std::iter::once(device.to_owned());
    match glance(device) {
        Some(copies) => Ok(own.chain(search::others(device, &copies)?).collect()),
        None => Ok(own.collect()),
    }
}

/// What a device that has a path says of itself, where it is a member that this program can use.
fn glance(device: &str) -> Option<Copies> {
    path_of(device).and_then(|path| search::glance(path).ok().flatten())
}

/// Claims the volume that `device` names, alone or with `others` as [`open`] does, and gives it the
/// names that `change` makes of its superblock. A power cut at any point leaves the old names or
/// the new ones. Returns the superblock before and after.
///
/// # Errors
/// As [`open`]; and there is no volume, or one that this program cannot write. Where a device
/// failed, the volume may have the new names.
pub fn rename(device: &str, others: &[String], change: impl FnOnce(&Superblock) -> Names) -> Result<[Superblock; 2], ClaimError> {
    let mode = OpenMode::ReadWrite;
    let renamed = match claim_all(device, others, mode)? {
        Claimed::Whole(device) => rename_whole(&device, change),
        Claimed::Members(members) => rename_members(members, change),
    };
    renamed.map_err(ClaimError::Device)
}

/// Gives a volume that is open for the caller alone, on one device, other names: as [`rename`].
///
/// # Errors
/// A text: there is no volume, or one that this program cannot write, or the device failed.
pub fn rename_whole(device: &Arc<dyn BlockDevice>, change: impl FnOnce(&Superblock) -> Names) -> Result<[Superblock; 2], String> {
    let mut superblocks = Superblocks::read(device)?;
    let before = superblocks.superblock().clone();
    superblocks.rename(&change(&before))?;
    Ok([before, superblocks.superblock().clone()])
}

/// The same for a volume of several devices. Its names count as the members have them; the next
/// opening for writing finishes a change of which no more was written ([`assemble`]).
///
/// # Errors
/// As [`rename_whole`] and [`assemble`].
pub fn rename_members(
    devices: Vec<(String, Arc<dyn BlockDevice>)>,
    change: impl FnOnce(&Superblock) -> Names,
) -> Result<[Superblock; 2], String> {
    let set = judged(devices)?;
    let volume = stripe(set.devices(), set.sets())?;
    let mut superblocks = Superblocks::read(&volume)?;
    let before = Superblock { names: set.names().clone(), ..superblocks.superblock().clone() };
    let names = change(&before);
    set.begin_generation(&names).map_err(|error| error.to_string())?;
    superblocks.rename(&names)?;
    Ok([before, superblocks.superblock().clone()])
}

/// What a name of a device leads to.
enum Claimed {
    /// A volume of one device, or anything else.
    Whole(Arc<dyn BlockDevice>),
    /// Devices with their names: the first is a member of a volume of several.
    Members(Vec<(String, Arc<dyn BlockDevice>)>),
}

fn claim_all(device: &str, others: &[String], mode: OpenMode) -> Result<Claimed, ClaimError> {
    let mut names: Vec<String> = split_names(device).into_iter().map(str::to_owned).collect();
    names.extend(others.iter().cloned());
    let first = claim(&names[0], mode).map_err(|error| member_error(&names, 0, error))?;
    let Some(copies) = Copies::read(&first).map_err(|why| member_error(&names, 0, ClaimError::Device(why)))? else {
        return match names.get(1) {
            None => Ok(Claimed::Whole(first)),
            Some(_) => Err(member_error(&names, 0, ClaimError::Device("not a member of a volume of several devices".into()))),
        };
    };
    if names.len() == 1 {
        names.extend(search::others(&names[0], &copies).map_err(ClaimError::Device)?);
    }
    let mut devices = vec![first];
    for number in 1..names.len() {
        devices.push(claim(&names[number], mode).map_err(|error| member_error(&names, number, error))?);
    }
    Ok(Claimed::Members(names.into_iter().zip(devices).collect()))
}

/// Claims one device. A mount that names another member of its volume has it as well.
///
/// # Errors
/// The device is mounted, in use, or cannot be opened.
pub fn claim(device: &str, mode: OpenMode) -> Result<Arc<dyn BlockDevice>, ClaimError> {
    let members = OnceCell::new();
    claim_beside(device, mode, || {
        let others = members.get_or_init(|| look(device).unwrap_or_default()).iter().skip(1);
        Ok(others.map(|other| listed_mount(other)).collect::<Result<Vec<_>, _>>()?.into_iter().flatten().next())
    })
}

/// Puts the members of a volume together, which are open for the caller alone, in any order. For
/// writing they are of a new generation then.
///
/// # Errors
/// A text: a device cannot be read, or is missing, foreign, stale or there twice.
pub fn assemble(devices: Vec<(String, Arc<dyn BlockDevice>)>, mode: OpenMode) -> Result<Arc<dyn BlockDevice>, String> {
    let set = judged(devices)?;
    let volume = stripe(set.devices(), set.sets())?;
    if mode == OpenMode::ReadWrite {
        set.begin_generation(set.names()).map_err(|error| error.to_string())?;
        finish_rename(&volume, &set)?;
    }
    Ok(volume)
}

/// Gives the volume on members the names that the members have. They differ where a change was cut
/// short. What has no superblock that can be read is left to those who mount or check it.
fn finish_rename(volume: &Arc<dyn BlockDevice>, set: &Set) -> Result<(), String> {
    match Superblocks::read(volume) {
        Ok(mut superblocks) if superblocks.superblock().uuid == set.volume() => {
            let is_right = superblocks.superblock().names == *set.names();
            if is_right { Ok(()) } else { superblocks.rename(set.names()) }
        }
        _ => Ok(()),
    }
}

/// The members of a volume, all of them and of the same moment.
fn judged(devices: Vec<(String, Arc<dyn BlockDevice>)>) -> Result<Set, String> {
    let mut members = Vec::with_capacity(devices.len());
    for (name, device) in devices {
        let copies = Copies::read(&device).map_err(|why| format!("{name}: {why}"))?;
        members.push((name, device, copies));
    }
    set::judge(members)
}

/// An error of a device that the user did not name, or not alone: with its name.
fn member_error(names: &[String], number: usize, error: ClaimError) -> ClaimError {
    if names.len() == 1 { error } else { ClaimError::Member { device: names[number].clone(), error: Box::new(error) } }
}

/// The members of all sets, in their order, as one device.
///
/// # Errors
/// A text: a member is too small, or has blocks that are too large.
pub fn stripe(devices: Vec<Arc<dyn BlockDevice>>, sets: &[Striping]) -> Result<Arc<dyn BlockDevice>, String> {
    let total = sets.iter().map(Striping::total_blocks).sum();
    let device = StripeDevice::new(devices, map(sets), Geometry::byte(total));
    device.map(|device| device as Arc<dyn BlockDevice>).map_err(|error| error.to_string())
}

/// Where the bytes of the sets lie.
fn map(sets: &[Striping]) -> StripeMap {
    let set = |striping: &Striping| StripeSet {
        members: striping.members.into(),
        unit: Geometry::byte(striping.unit.into()),
        data: Geometry::byte(striping.data),
        data_len: Geometry::byte(striping.data_blocks),
    };
    StripeMap::new(&sets.iter().map(set).collect::<Vec<_>>())
}

/// Makes devices the members of a volume, in this order. Until it is done, they are none; the
/// volume's content has to be there before.
///
/// # Errors
/// A text with the device's name: it failed.
pub fn format(devices: &[Arc<dyn BlockDevice>], like: &Member, uuids: &[[u8; 16]]) -> Result<(), String> {
    let members: Vec<Member> = devices
        .iter()
        .zip(uuids)
        .zip(0..)
        .map(|((device, uuid), index)| Member { uuid: *uuid, index, blocks: copies::blocks_of(device), ..like.clone() })
        .collect();
    // First the copies at the end: a volume is there when all are.
    for copy in [1, 0] {
        copies::write_all(devices.iter().zip(&members), copy).map_err(WriteFailed::into_text)?;
    }
    Ok(())
}

/// A generation that never was before.
///
/// # Errors
/// The system has no random numbers.
pub fn generation(number: u64) -> Result<Generation, String> {
    Ok(Generation { number, stamp: random()? })
}
