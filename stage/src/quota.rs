//! How many bytes sets may hold together.

use crate::error::Result;
use crate::folder::Folder;
use std::path::Path;

/// How many bytes the sets may hold together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quota {
    Bytes(u64),
    /// Of the filesystem that the folder is on.
    Percent(u64),
}

impl std::str::FromStr for Quota {
    type Err = &'static str;

    fn from_str(text: &str) -> std::result::Result<Quota, Self::Err> {
        const WRONG: &str = "a quota is a number of bytes, with K, M, G or T, or a percentage such as 80%";
        if let Some(percent) = text.strip_suffix('%') {
            return percent.parse().ok().filter(|&percent| percent <= 100).map(Quota::Percent).ok_or(WRONG);
        }
        let power = text.chars().last().and_then(|unit| "KMGT".find(unit));
        let number = if power.is_some() { &text[..text.len() - 1] } else { text };
        let factor = power.map_or(1, |power| 1024_u64.pow(power as u32 + 1));
        number.parse::<u64>().ok().and_then(|number| number.checked_mul(factor)).map(Quota::Bytes).ok_or(WRONG)
    }
}

impl Quota {
    /// In bytes, for the sets below a folder.
    ///
    /// # Errors
    /// [`Error::Path`](crate::error::Error::Path).
    pub fn of(self, root: &Path) -> Result<u64> {
        match self {
            Quota::Bytes(bytes) => Ok(bytes),
            Quota::Percent(percent) => Ok(Folder::capacity(root)? / 100 * percent),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotas_are_bytes_or_a_percentage() {
        for (text, quota) in
            [("0", Quota::Bytes(0)), ("3K", Quota::Bytes(3072)), ("2T", Quota::Bytes(2 << 40)), ("80%", Quota::Percent(80))]
        {
            assert_eq!(text.parse(), Ok(quota));
        }
        for wrong in ["", "K", "%", "101%", "-1", "1.5G", "1k", "99999999999T", "ü"] {
            assert!(wrong.parse::<Quota>().is_err(), "{wrong}");
        }
    }
}
