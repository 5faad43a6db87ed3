//! Pseudo-random choices that a seed makes repeatable.

/// Numbers that a seed decides.
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    /// Less than `limit`, or 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) % limit.max(1)
    }

    /// Below `limit`, as often aligned in one way as in another.
    pub fn place(&mut self, limit: u64) -> u64 {
        let alignment = [1, 4, 512, 4096, 4096, 65536][self.below(6) as usize];
        let at = self.below(limit);
        at - at % alignment
    }
}
