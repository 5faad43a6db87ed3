//! The differences of gpunvme from ext4, on purpose or because FUSE allows no more.

/// How a difference is kept from being found again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// It is not compared.
    NotCompared,
    /// ext4 is asked for something else, which means the same.
    AskedOtherwise,
    /// Neither is asked.
    NotAsked,
}

impl How {
    /// As docs/reference/posix.md says it.
    pub fn words(self) -> &'static str {
        match self {
            Self::NotCompared => "not compared",
            Self::AskedOtherwise => "ext4 is asked otherwise",
            Self::NotAsked => "not asked",
        }
    }
}

/// All of them, by their names in docs/reference/posix.md. Where the fuzzer leaves one out, a
/// comment has its name.
pub const DIFFERENCES: &[(&str, How)] = &[
    ("access-times", How::AskedOtherwise),
    ("directory-sizes", How::NotCompared),
    ("directory-positions", How::NotAsked),
    ("unchanged-owner", How::NotAsked),
    ("some-capabilities", How::NotAsked),
    ("far-times", How::NotCompared),
    ("times-of-failures", How::NotCompared),
    ("refused-fallocate", How::NotCompared),
    ("fifo-times", How::NotCompared),
    ("mapped-times", How::NotCompared),
    ("unaligned-direct", How::AskedOtherwise),
    ("unwritten-data", How::NotAsked),
    ("largest-file", How::NotAsked),
    ("direct-program", How::NotCompared),
    ("rwf-noappend", How::NotAsked),
    ("whiteouts", How::NotAsked),
    ("reflink", How::NotAsked),
    ("collapse-insert", How::NotAsked),
    ("file-flags", How::NotAsked),
];

/// The names and the treatment in the list below the heading `## Against ext4` of
/// docs/reference/posix.md, whose items read "- `name` (treatment): what is different".
pub fn documented(posix: &str) -> Vec<(String, String)> {
    let section = posix.split("## Against ext4").nth(1).unwrap_or_default().split("\n## ").next().unwrap_or_default();
    let items = section.lines().filter_map(|line| line.strip_prefix("- `"));
    items
        .map(|item| {
            let (name, rest) = item.split_once('`').unwrap_or((item, ""));
            let treatment = rest.split_once('(').and_then(|(_, rest)| rest.split_once(')')).unwrap_or_default().0;
            (name.to_owned(), treatment.to_owned())
        })
        .collect()
}
