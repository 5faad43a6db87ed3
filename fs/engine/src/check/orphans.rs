//! What a crash left to do: truncations that were cut short, and inodes without a name. Each may
//! take as many operations as the file has extents; none begins after the end was asked for.

use std::ops::ControlFlow;

use gpunvme_layout::key::INO_NONE;
use gpunvme_layout::{Key, Kind};

use super::stop::Stop;
use crate::error::{Attempt, FsError};
use crate::volume::meta::Blocks;
use crate::volume::{Volume, tree};

/// Does it on a sound volume. What is not done stays noted for the next mount.
pub(crate) fn finish(volume: &Volume, stop: &Stop) -> Result<(), FsError> {
    let mut from = Some(0);
    while let Some(first) = from
        && let Some(ino) = volume.wait(|| next(&*volume.meta.read(), first))?
    {
        stop.check()?;
        while volume.wait(|| volume.truncate_step(ino))? || volume.wait(|| volume.reap_step(ino))? {
            stop.check()?;
        }
        from = ino.checked_add(1);
    }
    Ok(())
}

/// The first inode that is noted, of those whose number is not below `from`.
fn next(blocks: &impl Blocks, from: u64) -> Attempt<Option<u64>> {
    let found = tree::scan(blocks, Key::new(INO_NONE, Kind::Orphan, from), |key, _| Ok(ControlFlow::Break(key)))?;
    Ok(found.filter(|key| key.is(INO_NONE, Kind::Orphan)).map(|key| key.offset()))
}
