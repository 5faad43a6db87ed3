//! Which of several: `I/N`.

/// The I-th of N, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    pub index: usize,
    pub of: usize,
}

impl std::str::FromStr for Share {
    type Err = &'static str;

    fn from_str(text: &str) -> std::result::Result<Share, Self::Err> {
        let parsed = text.split_once('/').and_then(|(index, of)| Some((index.parse().ok()?, of.parse().ok()?)));
        match parsed {
            Some((index, of)) if index < of => Ok(Share { index, of }),
            _ => Err("a share is I/N, with I from 0 to N-1"),
        }
    }
}
