//! Feature bits of the superblock: three sets, by what a program does where it meets a bit that it
//! does not know. Here, and nowhere else, a feature gets its bit and its name; then it is *known*.

/// One set of features: a word of the superblock.
#[derive(Debug)]
pub struct FeatureSet {
    /// Bits of the features that this program implements.
    known: u64,
    /// Names of features by bit, known ones and ones that the format may have one day.
    names: &'static [&'static str],
}

/// Features that a program may ignore where it does not know them.
pub const COMPATIBLE: FeatureSet = FeatureSet { known: 0, names: &[] };
/// Features that let a program read, but not write, where it does not know them.
pub const READ_ONLY_COMPATIBLE: FeatureSet = FeatureSet { known: 0, names: &[] };
/// Features for which a program refuses the volume where it does not know them.
pub const INCOMPATIBLE: FeatureSet = FeatureSet {
    known: SEVERAL_DEVICES | CHANGED_UUID | REPLACED_NAMES | SEVERAL_REGIONS,
    names: &[
        "data checksums",
        "shared extents",
        "inline data",
        "several devices",
        "changed UUID",
        "replaced names",
        "several regions",
    ],
};

/// The incompatible feature of member superblocks ([`crate::member`]).
pub const SEVERAL_DEVICES: u64 = 1 << 3;
/// The incompatible feature of a superblock, of a volume or a member, that holds another UUID than
/// the headers of the volume's blocks ([`crate::superblock`]).
pub const CHANGED_UUID: u64 = 1 << 4;
/// The incompatible feature of a dump of metadata with other names than the volume has: they lie
/// where those did, not under their own hash ([`crate::key::NameHash`]).
pub const REPLACED_NAMES: u64 = 1 << 5;

/// The incompatible feature of a volume that has grown: it has regions behind the first
/// ([`crate::geometry`]).
pub const SEVERAL_REGIONS: u64 = 1 << 6;

impl FeatureSet {
    /// The bits of `bits` that this program does not know.
    pub const fn unknown(&self, bits: u64) -> u64 {
        bits & !self.known
    }

    /// The names of the features in `bits`, separated by commas: `bit N` for one without a name.
    pub fn names(&self, bits: u64) -> String {
        let set = (0..64).filter(|bit| bits >> bit & 1 == 1);
        let names: Vec<_> =
            set.map(|bit| self.names.get(bit).map_or_else(|| format!("bit {bit}"), ToString::to_string)).collect();
        names.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_known_feature_has_a_name_and_is_not_unknown() {
        for set in [COMPATIBLE, READ_ONLY_COMPATIBLE, INCOMPATIBLE] {
            assert!(!set.names(set.known).contains("bit"), "{set:?}");
            assert_eq!(set.unknown(set.known), 0);
            assert_eq!(set.unknown(u64::MAX), !set.known);
        }
    }

    #[test]
    fn unknown_features_are_named_or_numbered() {
        let set = FeatureSet { known: 0b1, names: &["one", "two"] };
        assert_eq!(set.names(set.unknown(0b111)), "two, bit 2");
    }
}
