//! The blocks with fixed places: superblock and copies, anchors, journal, state. A mount needs all
//! of them; a check goes on with what is left of them, as long as one superblock can be read.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpunvme_blockdev::Io;
use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::features::READ_ONLY_COMPATIBLE;
use gpunvme_layout::geometry::{ANCHORS, DESCRIPTORS_PER_BLOCK, GROUP_BLOCKS, STATE};
use gpunvme_layout::key::INO_ROOT;
use gpunvme_layout::{Anchor, Block, COUNT_MAX, Corrupt, State, Superblock};

use super::finding::{Findings, Fix, Kind, Place};
use super::stop::Stop;
use super::walk::reason;
use crate::error::FsError;
use crate::volume::Volume;
use crate::volume::io::{check_block, read_blocks, write_block};
use crate::volume::journal::anchors::read_anchors;
use crate::volume::journal::recovery::{self, Recovered, SEQUENCE_GAP};

/// Blocks that are read at once where many follow one another.
const PIECE: u64 = 256;
/// Counts that are left to a mount after a repair, until it is refused.
const COUNTS_LEFT: u64 = 1 << 40;
/// Value from which exhausted counts begin again.
const FIRST: u64 = 1;

/// Result of opening a volume for a check.
pub(crate) struct Opened {
    /// The volume; its state may be a makeshift one.
    pub volume: Volume,
    /// The journal holds nothing, and says so.
    pub clean: bool,
    /// The journal holds what may be taken for part of what follows, and has to be erased before.
    pub erase_journal: bool,
    /// Superblocks as they should be, of those that are damaged.
    pub superblocks: Vec<Block>,
}

/// Opens a volume for a check. Writes nothing.
pub(crate) fn open(io: Arc<Io>, read_only: bool, cache: usize, stop: &Stop, findings: &mut Findings) -> Result<Opened, FsError> {
    let (superblock, good) = find_superblock(&io)?;
    stop.check()?;
    if superblock.unknown_ro_compat != 0 {
        let names = READ_ONLY_COMPATIBLE.names(superblock.unknown_ro_compat);
        let what = format!("uses features that this program does not know, and cannot check: {names}; use a newer one");
        return Err(Corrupt::Superblock(what).into());
    }
    let superblocks = compare_superblocks(&io, &superblock, &good, findings)?;
    let (mut recovered, clean) = recover(&io, &superblock, findings)?;
    stop.check()?;
    let ends = |count: u64| count > COUNT_MAX - COUNTS_LEFT;
    if ends(recovered.sequence) || ends(recovered.anchors.generation()) {
        let what = "sequences or generations are at their end, and begin again";
        findings.add(Kind::Anchor, Place::Journal, Fix::Elsewhere, || what.into());
        recovered.begin_again(FIRST);
    }
    recovered.images.retain(|address, block| match check_block(block, *address, &superblock.uuid) {
        Ok(()) => true,
        Err(error) => {
            let what = || format!("image of block {address}: {}", reason(&error));
            findings.add(Kind::Journal, Place::Journal, Fix::Elsewhere, what);
            false
        }
    });
    let stored = match recovered.images.get(&STATE) {
        Some(block) => Ok(block.clone()),
        None => read_blocks(&io, STATE, 1).map(|mut blocks| blocks.swap_remove(0)),
    };
    let geometry = superblock.geometry();
    let state = stored.map_err(|error| error.to_string()).and_then(|block| {
        block.verify_any_kind(STATE, &superblock.uuid).map_err(|e| reason(&e))?;
        let state = State::decode(&block, &geometry).map_err(|e| reason(&e))?;
        Ok((block, state))
    });
    let state = state.unwrap_or_else(|why| {
        findings.add(Kind::State, Place::State, Fix::Elsewhere, || why);
        recovered.images.remove(&STATE);
        // With a root that cannot be: should it get to the device before the tree is known again,
        // it is still no state.
        let regions = (geometry.regions().len() - 1) as u16;
        let (next_ino, inodes) = (INO_ROOT + 1, 0);
        let state = State { root: 0, level: 0, next_ino, inodes, free_blocks: 0, free_chunks: 0, regions };
        (state.encode(&superblock.uuid), state)
    });
    let volume = Volume::assemble(io, superblock, read_only, recovered, state, cache);
    let erase_journal = [Kind::Anchor, Kind::Journal].iter().any(|kind| findings.counts.contains_key(kind));
    Ok(Opened { volume, clean, erase_journal, superblocks })
}

/// The first superblock that can be read: the one at the start, else the one at the end, else the
/// one before the journal.
fn find_superblock(io: &Io) -> Result<(Superblock, Block), FsError> {
    let device_blocks = io.device().geometry().len.get() / BLOCK_SIZE as u64;
    if device_blocks == 0 {
        return Err(Corrupt::Superblock("the device is too small for a gpunvme filesystem".into()).into());
    }
    let mut first = None;
    let mut there = false;
    for address in [Superblock::ADDRESS, device_blocks - 1] {
        let Ok(mut blocks) = read_blocks(io, address, 1) else { continue };
        let block = blocks.swap_remove(0);
        there |= Superblock::recognize(block.bytes());
        match Superblock::decode(&block, address, device_blocks) {
            Ok(superblock) => return Ok((superblock, block)),
            // An intact superblock that says something else is not overruled by a copy.
            Err(error) if Superblock::is_intact(&block, address) => return Err(error.into()),
            Err(error) => first = first.or(Some(error)),
        }
    }
    // The middle one lies behind the bitmaps, and how many those are, only a superblock says.
    let groups = device_blocks.div_ceil(GROUP_BLOCKS);
    let end = (4 + groups.div_ceil(DESCRIPTORS_PER_BLOCK) + groups + 1).min(device_blocks);
    for start in (4..end).step_by(PIECE as usize) {
        let Ok(blocks) = read_blocks(io, start, PIECE.min(end - start)) else { continue };
        for (address, block) in (start..).zip(blocks) {
            if let Ok(superblock) = Superblock::decode(&block, address, device_blocks) {
                return Ok((superblock, block));
            }
        }
    }
    let nothing = "no gpunvme filesystem is here, nor what is left of one: no copy of a superblock was found";
    let first = first.map(|error| if there { error } else { Corrupt::Superblock(nothing.into()) });
    Err(first.unwrap_or(Corrupt::Superblock("it cannot be read".into())).into())
}

/// Compares the copies with the one that counts. Returns those that have to be written again.
fn compare_superblocks(io: &Io, superblock: &Superblock, good: &Block, findings: &mut Findings) -> Result<Vec<Block>, FsError> {
    let mut wrong = Vec::new();
    for address in superblock.geometry().superblocks() {
        let right = good.moved_to(address);
        let mut kind = Kind::Superblock;
        let why = match read_blocks(io, address, 1).map(|mut blocks| blocks.swap_remove(0)) {
            Ok(block) if block == right => continue,
            Ok(block) if address == Superblock::ADDRESS && Superblock::is_displaced(&block) => {
                kind = Kind::Foreign;
                "something else is here; if another filesystem was made on the device since, this volume is gone".to_owned()
            }
            Ok(block) => match Superblock::decode(&block, address, superblock.geometry().total_blocks) {
                Ok(_) => "differs from the superblock that counts".to_owned(),
                Err(_) if !Superblock::recognize(block.bytes()) => "no copy of the superblock is here".to_owned(),
                Err(error) => reason(&error),
            },
            Err(error) => error.to_string(),
        };
        findings.add(kind, Place::Block(address), Fix::Elsewhere, || why);
        wrong.push(right);
    }
    Ok(wrong)
}

/// Reads the live part of the journal. Also returns whether it was left empty on purpose.
fn recover(io: &Io, superblock: &Superblock, findings: &mut Findings) -> Result<(Recovered, bool), FsError> {
    let anchors = read_anchors(io, superblock)?;
    let mut damaged = false;
    for (address, anchor) in ANCHORS.into_iter().zip(&anchors) {
        if let Err(error) = anchor {
            findings.add(Kind::Anchor, Place::Block(address), Fix::Elsewhere, || reason(error));
            damaged = true;
        }
    }
    let anchor = match Anchor::choose(anchors) {
        Ok(anchor) => anchor,
        Err(_) => {
            let what = "without an anchor, the transactions that belong together are taken from the journal itself";
            findings.add(Kind::Journal, Place::Journal, Fix::Elsewhere, || what.into());
            let found = transactions(io, superblock, findings)?;
            let recovered = recover_latest(io, superblock, 1, &found)?;
            return Ok((recovered, false));
        }
    };
    let mut recovered = recovery::recover_from(io, superblock, &anchor)?;
    if damaged {
        recovered.leave_out_data(&superblock.geometry());
    }
    if let Some(error) = &recovered.stopped {
        findings.add(Kind::Journal, Place::Journal, Fix::Elsewhere, || error.to_string());
    }
    let next = recovered.sequence - SEQUENCE_GAP;
    if anchor.clean && !damaged {
        return Ok((recovered, true));
    }
    // A commit begins when the one before is durable: what lies behind the end cannot be later
    // than it.
    let found = transactions(io, superblock, findings)?;
    let later = found.range(next + 1..).count();
    if later == 0 {
        return Ok((recovered, anchor.clean));
    }
    let what = || format!("transaction {next} is damaged or gone, and {later} later ones are there");
    findings.add(Kind::Journal, Place::Journal, Fix::Elsewhere, what);
    // With an anchor lost, the other one may be of a time long gone.
    if damaged {
        return Ok((recover_latest(io, superblock, anchor.generation, &found)?, false));
    }
    Ok((recovered, anchor.clean))
}

/// As [`recovery::transactions`]; blocks that the device cannot read are findings.
fn transactions(io: &Io, superblock: &Superblock, findings: &mut Findings) -> Result<BTreeMap<u64, u64>, FsError> {
    recovery::transactions(io, superblock, |error| {
        if let Corrupt::Field { address, .. } = error {
            findings.add(Kind::Journal, Place::Block(address), Fix::Elsewhere, || reason(&error));
        }
        Ok(())
    })
}

/// Reads the latest transactions that follow one another, as many as are whole. Those before the
/// last checkpoint change nothing, where what they wrote is metadata still. Anchors that are
/// written from now on follow on `generation`, so that one which is still there does not count
/// more than they do.
fn recover_latest(io: &Io, superblock: &Superblock, generation: u64, found: &BTreeMap<u64, u64>) -> Result<Recovered, FsError> {
    let geometry = superblock.geometry();
    let mut chain: Option<Anchor> = None;
    for (sequence, position) in found.iter().rev() {
        if chain.is_some_and(|c| c.sequence != sequence + 1) {
            break;
        }
        match recovery::read_transaction(io, superblock, &geometry, *position, *sequence, geometry.journal_blocks) {
            Ok(Some(whole)) => {
                let next = (position + whole.blocks) % geometry.journal_blocks;
                if chain.is_some_and(|c| c.tail != next) {
                    break;
                }
                chain = Some(Anchor { generation, tail: *position, sequence: *sequence, clean: false });
            }
            Ok(None) | Err(FsError::Corrupt(_)) if chain.is_none() => {}
            Ok(None) | Err(FsError::Corrupt(_)) => break,
            Err(error) => return Err(error),
        }
    }
    let highest = found.keys().next_back().copied().unwrap_or(0);
    let none = Anchor { generation, tail: 0, sequence: highest + 1, clean: true };
    let mut recovered = recovery::recover_from(io, superblock, &chain.unwrap_or(none))?;
    recovered.sequence = recovered.sequence.max(highest + SEQUENCE_GAP);
    recovered.leave_out_data(&geometry);
    Ok(recovered)
}

/// Writes the superblocks again that are damaged, one after the other.
pub(crate) fn write_superblocks(io: &Io, superblocks: &[Block]) -> Result<(), FsError> {
    for block in superblocks.iter().rev() {
        write_block(io, block, block.address())?;
    }
    Ok(())
}
