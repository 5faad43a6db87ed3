//! What a crash left to do: truncations that were cut short, and inodes without a name. Each may
//! take as many operations as the file has extents; none begins after the end was asked for.

use super::stop::Stop;
use crate::error::FsError;
use crate::volume::Volume;

/// Does it on a sound volume. What is not done stays noted for the next mount.
pub(crate) fn finish(volume: &Volume, stop: &Stop) -> Result<(), FsError> {
    let mut from = Some(0);
    while let Some(first) = from
        && let Some(ino) = volume.wait(|| volume.next_orphan(first))?
    {
        stop.check()?;
        while volume.wait(|| volume.truncate_step(ino))? || volume.wait(|| volume.reap_step(ino))? {
            stop.check()?;
        }
        from = ino.checked_add(1);
    }
    Ok(())
}
