//! Command identifiers. An identifier is the number of a slot and, in the remaining bits of 16, a
//! count that goes up with each use of the slot: a completion that comes twice names a command
//! that is over, and is not taken for that of the next. FFFFh is left out: the Error Information
//! log names no command by it (Base 5.16.1.2).

/// What no command is called.
const NONE: u16 = 0xffff;

pub(super) struct CommandIds {
    /// Of the slot's number.
    bits: u32,
    /// The last identifier of each slot.
    last: Vec<u16>,
}

impl CommandIds {
    /// For this many slots, 65535 at the most: the last slot is then FFFEh.
    pub(super) fn new(slots: u32) -> Self {
        Self { bits: slots.next_power_of_two().ilog2(), last: (0..slots).map(|slot| slot as u16).collect() }
    }

    /// The next identifier of a slot.
    #[inline]
    pub(super) fn next(&mut self, slot: u16) -> u16 {
        let last = &mut self.last[usize::from(slot)];
        *last = (u32::from(*last) + (1 << self.bits)) as u16;
        if *last == NONE {
            *last = (u32::from(*last) + (1 << self.bits)) as u16;
        }
        *last
    }

    /// The slot that an identifier names, if there is such.
    #[inline]
    pub(super) fn slot(&self, id: u16) -> u16 {
        (u32::from(id) & ((1 << self.bits) - 1)) as u16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identifier_names_its_slot_and_comes_again_late() {
        for slots in [1, 2, 3, 256, 257, 16384] {
            let mut ids = CommandIds::new(slots);
            let slot = (slots - 1) as u16;
            let first = ids.next(slot);
            assert!(ids.slot(first) == slot && ids.next(slot) != first, "{slots} slots");
        }
        let mut ids = CommandIds::new(256);
        let first = ids.next(7);
        assert_eq!((0..).take_while(|_| ids.next(7) != first).count(), 255);
        let mut ids = CommandIds::new(256);
        assert_eq!((0..1000).filter(|_| ids.next(255) == NONE).count(), 0, "of slot 255, one in 256 would be FFFFh");
        let mut full = CommandIds::new(65534);
        assert_eq!((full.next(65533), full.next(65533), full.slot(65533)), (65533, 65533, 65533), "there are no bits left");
    }
}
