//! Other names for those of a volume: as long as they were, different where they were different,
//! and for those who see them alone as good as random.
//!
//! Each name goes through a permutation of all names of its length, which a random key and the
//! inode that the name belongs to choose: a Feistel network over its letters. So the node of a
//! directory and its older image in the journal have the same names, and none has to be remembered.

use std::hash::Hasher;

use siphasher::sip::SipHasher13;

/// Rounds of the network; ten are what NIST SP 800-38G takes for its like.
const ROUNDS: u64 = 10;
/// The portable filename character set of POSIX.
const PORTABLE: &[u8; 65] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";

/// The other names that a key leads to.
pub struct Aliases {
    key: [u8; 16],
}

/// Letters that names of a class are made of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Letters {
    /// Those of portable names.
    Portable,
    /// All bytes that a name can have.
    Any,
}

impl Letters {
    fn count(self) -> u16 {
        match self {
            Letters::Portable => PORTABLE.len() as u16,
            Letters::Any => 254,
        }
    }

    fn digit(self, byte: u8) -> u8 {
        match self {
            Letters::Portable => PORTABLE.iter().position(|letter| *letter == byte).expect("it is of this class") as u8,
            // Without the zero byte and the slash.
            Letters::Any => byte - 1 - u8::from(byte > b'/'),
        }
    }

    fn byte(self, digit: u8) -> u8 {
        match self {
            Letters::Portable => PORTABLE[usize::from(digit)],
            Letters::Any => digit + 1 + u8::from(digit + 1 >= b'/'),
        }
    }

    /// The class of a name.
    fn of(name: &[u8]) -> Letters {
        if name.iter().all(|byte| PORTABLE.contains(byte)) { Letters::Portable } else { Letters::Any }
    }
}

impl Aliases {
    /// The names that this key leads to: with a random one, nothing is known of the names before.
    pub fn new(key: [u8; 16]) -> Aliases {
        Aliases { key }
    }

    /// Another name for one that belongs to the inode `ino`. What cannot be in a name, a zero byte
    /// or a slash, stays where it is, and `.` and `..` stay what they are.
    pub fn name(&self, ino: u64, name: &[u8]) -> Vec<u8> {
        let is_letter = |byte: &&u8| !matches!(**byte, 0 | b'/');
        let old: Vec<u8> = name.iter().filter(is_letter).copied().collect();
        let mut new = self.permuted(ino, &old).into_iter();
        name.iter().map(|byte| if is_letter(&byte) { new.next().expect("there are as many") } else { *byte }).collect()
    }

    /// A number for bytes: the same for the same ones.
    pub fn digest(&self, bytes: &[u8]) -> u128 {
        let half = |step| u128::from(self.hash(0, Letters::Any, step, bytes));
        half(0) << 64 | half(1)
    }

    /// The permutation of all names of a class and a length.
    fn permuted(&self, ino: u64, name: &[u8]) -> Vec<u8> {
        if matches!(name, b"" | b"." | b"..") {
            return name.to_vec();
        }
        let letters = Letters::of(name);
        let mut digits: Vec<u8> = name.iter().map(|byte| letters.digit(*byte)).collect();
        // Where it leaves the names of the class, going on leads back into them.
        loop {
            if digits.len() == 1 {
                self.exchange(ino, letters, &mut digits[0])
            } else {
                self.mix(ino, letters, &mut digits)
            }
            let new: Vec<u8> = digits.iter().map(|digit| letters.byte(*digit)).collect();
            if Letters::of(&new) == letters && !matches!(new[..], [b'.'] | [b'.', b'.']) {
                return new;
            }
        }
    }

    /// The network: each half in turn is changed by what the other is.
    fn mix(&self, ino: u64, letters: Letters, digits: &mut [u8]) {
        let (left, right) = digits.split_at_mut(digits.len() / 2);
        for round in 0..ROUNDS {
            let (changed, by) = if round % 2 == 0 { (&mut *left, &*right) } else { (&mut *right, &*left) };
            for (at, digit) in (0..).zip(changed) {
                let sum = u64::from(*digit) + self.hash(ino, letters, round << 32 | at, by) % u64::from(letters.count());
                *digit = (sum % u64::from(letters.count())) as u8;
            }
        }
    }

    /// Of names of one letter there are so few that all can be put in another order.
    fn exchange(&self, ino: u64, letters: Letters, digit: &mut u8) {
        let mut order: Vec<u8> = (0..letters.count() as u8).collect();
        order.sort_by_cached_key(|other| (self.hash(ino, letters, 0, &[*other]), *other));
        *digit = order[usize::from(*digit)];
    }

    fn hash(&self, ino: u64, letters: Letters, step: u64, bytes: &[u8]) -> u64 {
        let mut hasher = SipHasher13::new_with_key(&self.key);
        hasher.write_u64(ino);
        hasher.write_u64(step);
        hasher.write_u16(letters.count());
        hasher.write(bytes);
        hasher.finish()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn aliases() -> Aliases {
        Aliases::new([3; 16])
    }

    #[test]
    fn names_of_a_length_are_permuted_within_their_class() {
        let any: Vec<Vec<u8>> = (1..=255).filter(|byte| *byte != b'/').map(|byte| vec![byte]).collect();
        let pairs = PORTABLE.iter().flat_map(|a| PORTABLE.iter().map(|b| vec![*a, *b]));
        let long = (0..5000).map(|n| format!("a name that is longer, {n:04}").into_bytes());
        for names in [any, pairs.collect(), long.collect()] {
            let others: BTreeSet<Vec<u8>> = names.iter().map(|name| aliases().name(7, name)).collect();
            assert_eq!(others.len(), names.len(), "no two became one");
            for name in &names {
                let other = aliases().name(7, name);
                assert_eq!((other.len(), Letters::of(&other) == Letters::of(name)), (name.len(), true));
                assert!(!other.contains(&0) && !other.contains(&b'/'));
                assert_eq!(matches!(name[..], [b'.'] | [b'.', b'.']), matches!(other[..], [b'.'] | [b'.', b'.']));
            }
        }
    }

    #[test]
    fn every_byte_has_a_digit_and_back() {
        for byte in (1..=255).filter(|byte| *byte != b'/') {
            assert_eq!(Letters::Any.byte(Letters::Any.digit(byte)), byte);
        }
    }

    #[test]
    fn inode_and_key_change_all_names() {
        let name = b"Makefile.am";
        let others = [aliases().name(1, name), aliases().name(2, name), Aliases::new([4; 16]).name(1, name)];
        assert_eq!(others.iter().collect::<BTreeSet<_>>().len(), 3);
        assert_eq!(aliases().name(1, name), others[0], "and nothing else does");
        assert!(others.iter().all(|other| other != name));
    }

    #[test]
    fn what_cannot_be_a_name_still_cannot() {
        let other = aliases().name(1, b"one/two\0three");
        assert_eq!((other.len(), other[3], other[7]), (13, b'/', 0));
        for name in [&b""[..], b".", b"..", b"/"] {
            assert_eq!(aliases().name(1, name), name);
        }
    }
}
