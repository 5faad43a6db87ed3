//! A sharded table by inode number, which many threads use at once: each shard has a lock of its
//! own.

use parking_lot::{Mutex, MutexGuard};

/// Shards of a table: threads that are at different inodes rarely meet.
const SHARDS: usize = 16;

/// A shard. A processor that changes one does not take the next one's memory from another
/// processor.
#[derive(Default)]
#[repr(align(64))]
struct Shard<S>(Mutex<S>);

/// A table by inode number, whose shards hold an `S` each.
#[derive(Default)]
pub struct Sharded<S>([Shard<S>; SHARDS]);

impl<S> Sharded<S> {
    /// The shard that an inode belongs to.
    pub fn lock(&self, ino: u64) -> MutexGuard<'_, S> {
        self.0[shard_of(ino)].0.lock()
    }

    /// The shard of that number, counted round.
    pub fn nth(&self, number: usize) -> MutexGuard<'_, S> {
        self.0[number % SHARDS].0.lock()
    }

    /// All shards, one after the other.
    pub fn lock_each(&self) -> impl Iterator<Item = MutexGuard<'_, S>> {
        self.0.iter().map(|shard| shard.0.lock())
    }

    /// Calls `visit` with each shard that some of `inos` belong to, and with the places of these
    /// in `inos`. Each lock is taken once, and none while another is held.
    pub fn lock_all(&self, inos: &[u64], mut visit: impl FnMut(&[usize], &mut S)) {
        // Sorted by shard, by counting.
        let mut begins = [0; SHARDS + 1];
        inos.iter().for_each(|ino| begins[shard_of(*ino) + 1] += 1);
        (0..SHARDS).for_each(|shard| begins[shard + 1] += begins[shard]);
        let mut places = vec![0; inos.len()];
        for (place, ino) in inos.iter().enumerate() {
            let next = &mut begins[shard_of(*ino)];
            places[*next] = place;
            *next += 1;
        }
        for group in places.chunk_by(|a, b| shard_of(inos[*a]) == shard_of(inos[*b])) {
            visit(group, &mut self.lock(inos[group[0]]));
        }
    }
}

/// Numbers that are a multiple of something apart spread over all shards, too (multiplicative
/// hashing by the golden ratio).
fn shard_of(ino: u64) -> usize {
    (ino.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (64 - SHARDS.ilog2())) as usize
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn inodes_at_any_distance_spread_over_the_shards() {
        for distance in [1, 2, 7, 16, 48, 1024, 1 << 20] {
            let mut counts = [0; SHARDS];
            (0..1600).for_each(|n| counts[shard_of(n * distance)] += 1);
            assert!(counts.iter().all(|count| (50..200).contains(count)), "{distance}: {counts:?}");
        }
    }

    #[test]
    fn each_inode_is_visited_once_with_the_shard_that_it_belongs_to() {
        let table = Sharded::<HashMap<u64, Vec<usize>>>::default();
        let inos: Vec<u64> = (0..100).map(|n| n * n + 7).chain([7, 7]).collect();
        table
            .lock_all(&inos, |places, shard| places.iter().for_each(|place| shard.entry(inos[*place]).or_default().push(*place)));
        for (place, ino) in inos.iter().enumerate() {
            let places = table.lock(*ino)[ino].clone();
            assert!(places.contains(&place) && places.iter().all(|place| inos[*place] == *ino));
        }
        assert_eq!(table.lock_each().map(|shard| shard.values().map(Vec::len).sum::<usize>()).sum::<usize>(), inos.len());
    }
}
