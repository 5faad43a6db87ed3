//! What gpunvme does otherwise than ext4, on purpose or because FUSE allows no more.

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

/// All of them, by their names in docs/reference/posix.md. Where the fuzzer leaves one out, a comment has its name.
pub const DIFFERENCES: &[(&str, How)] = &[
    ("access-times", How::AskedOtherwise),
    ("directory-sizes", How::NotCompared),
    ("directory-positions", How::NotAsked),
    ("unchanged-owner", How::NotAsked),
    ("created-for-ioctls", How::NotAsked),
    ("far-times", How::NotCompared),
    ("times-of-failures", How::NotCompared),
    ("fifo-times", How::NotCompared),
    ("mapped-times", How::NotCompared),
    ("unaligned-direct", How::AskedOtherwise),
    ("unwritten-data", How::NotAsked),
    ("largest-file", How::NotAsked),
    ("rwf-noappend", How::NotAsked),
    ("whiteouts", How::NotAsked),
    ("tmpfile", How::NotAsked),
    ("reflink", How::NotAsked),
    ("collapse-insert", How::NotAsked),
    ("file-flags", How::NotAsked),
];

/// The names and the treatment in the table below the heading `## Against ext4` of docs/reference/posix.md.
pub fn documented(posix: &str) -> Vec<(String, String)> {
    let section = posix.split("## Against ext4").nth(1).unwrap_or_default().split("\n## ").next().unwrap_or_default();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| {
        let mut cells = row.split('|').map(str::trim).skip(1);
        (cells.next().unwrap_or_default().trim_matches('`').to_owned(), cells.next().unwrap_or_default().to_owned())
    })
    .collect()
}
