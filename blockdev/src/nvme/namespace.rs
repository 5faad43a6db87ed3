//! What a namespace has to be so that this driver can use it.
use crate::spec::identify::IdentifyNamespace;
use crate::{Error, Result};

/// What the driver needs to know of a namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Namespace {
    /// Bytes on it.
    pub(super) len: u64,
    /// Bytes of a logical block.
    pub(super) logical_block: u32,
}

impl Namespace {
    /// Judges what namespace `number` of a device says of itself.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub(super) fn judge(device: &str, number: u32, identity: &IdentifyNamespace) -> Result<Self> {
        let unsupported = |reason| Error::Unsupported { device: device.into(), reason };
        let format = identity.lbaf[identity.format()];
        if format.ms.get() > 0 || identity.dps & 7 != 0 {
            let reason = format!(
                "namespace {number} has {} bytes of metadata a block, which is not supported; format it without",
                format.ms
            );
            return Err(unsupported(reason));
        }
        if !(9..=12).contains(&format.lbads) {
            let reason = format!("namespace {number} has blocks of 2^{} bytes; 512 to 4096 are supported", format.lbads);
            return Err(unsupported(reason));
        }
        let len = identity.bytes().ok_or_else(|| {
            let blocks = identity.nsze;
            unsupported(format!("namespace {number} has {blocks} blocks of 2^{} bytes, more than can be", format.lbads))
        })?;
        Ok(Self { len, logical_block: 1 << format.lbads })
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;
    use zerocopy::little_endian::{U16, U64};

    use super::*;

    /// A namespace with one format.
    fn namespace(blocks: u64, lbads: u8) -> IdentifyNamespace {
        let mut identity = IdentifyNamespace::new_zeroed();
        identity.nsze = U64::new(blocks);
        identity.lbaf[0].lbads = lbads;
        identity
    }

    #[test]
    fn a_namespace_is_as_long_as_its_blocks_or_refused() {
        let judge = |identity: &IdentifyNamespace| Namespace::judge("sim:test", 1, identity);
        assert_eq!(judge(&namespace(8, 12)), Ok(Namespace { len: 32 << 10, logical_block: 4096 }));
        let most = (1 << 52) - 1;
        assert_eq!(judge(&namespace(most, 12)), Ok(Namespace { len: most << 12, logical_block: 4096 }));
        let mut metadata = namespace(8, 9);
        metadata.lbaf[0].ms = U16::new(8);
        let mut protected = namespace(8, 9);
        protected.dps = 1;
        for (identity, named) in [
            (namespace(1 << 52, 12), "4503599627370496 blocks"),
            (namespace(u64::MAX, 9), "blocks of 2^9"),
            (namespace(8, 0), "2^0"),
            (namespace(8, 13), "2^13"),
            (namespace(8, 255), "2^255"),
            (metadata, "8 bytes of metadata"),
            (protected, "metadata"),
        ] {
            let error = judge(&identity).expect_err(named).to_string();
            assert!(error.contains(named), "{error}");
        }
    }
}
