//! Which names of a store may become files: none leaves the folder, and none takes the place of
//! what the program keeps there.

use crate::error::{Error, Result};
use std::collections::BTreeSet;

/// The folder in a set's folder that the program keeps for itself. One below it is another set's.
pub const OWN: &str = ".gpunvme-stage";

/// The object that lists a published set, in the set's own folder of the store.
pub const SET_MANIFEST: &str = "gpunvme-manifest.json";

/// Most bytes of a name, as `PATH_MAX` leaves room for the folder.
const LONGEST: usize = 3000;

/// Whether `name`, relative to the set, may become a file.
///
/// # Errors
/// [`Error::Name`] with the reason.
pub fn check(name: &str) -> Result<()> {
    let wrong = |why| Err(Error::Name { name: name.chars().take(200).collect(), why });
    if name.len() > LONGEST {
        return wrong("it is longer than 3000 bytes");
    }
    for part in name.split('/') {
        match part {
            "" => return wrong("a part of it is empty"),
            "." | ".." => return wrong("it would leave the folder"),
            OWN => return wrong("gpunvme keeps its own files there"),
            part if part.len() > 255 => return wrong("a part of it is longer than 255 bytes"),
            part if part.chars().any(char::is_control) => return wrong("it has a control character"),
            _ => {}
        }
    }
    Ok(())
}

/// Whether sorted names may be files beside each other: none is the folder of another.
///
/// # Errors
/// [`Error::Name`] of the first that may not.
pub fn check_together<'a>(names: impl Iterator<Item = &'a str> + Clone) -> Result<()> {
    let mut all = BTreeSet::new();
    for name in names.clone() {
        if !all.insert(name) {
            return Err(Error::Name { name: name.into(), why: "the set has it twice" });
        }
    }
    for name in names {
        let folders = name.match_indices('/').map(|(at, _)| &name[..at]);
        if let Some(folder) = folders.into_iter().find(|folder| all.contains(folder)) {
            return Err(Error::Name { name: folder.into(), why: "it is also the folder of others" });
        }
    }
    Ok(())
}

/// Whether a name matches a pattern: `*` stands for any characters, also `/`, and `?` for one.
pub fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    let (mut p, mut n, mut star) = (0, 0, None);
    while n < name.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(&c) if c == '?' || c == name[n] => {
                p += 1;
                n += 1;
            }
            // The last star takes one character more.
            _ => match star {
                Some((at, taken)) => {
                    star = Some((at, taken + 1));
                    p = at + 1;
                    n = taken + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&c| c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_leaves_the_folder() {
        for good in ["a", "a/b.c", "..a", ".hidden", "ä/ö", "a b", "sub/.gpunvme-stage2"] {
            assert!(check(good).is_ok(), "{good}");
        }
        let long = "a".repeat(256);
        let deep = "a/".repeat(1600) + "a";
        for bad in [
            "",
            "/etc/passwd",
            "../a",
            "a/../b",
            "a/..",
            ".",
            "a//b",
            "a/",
            "a\nb",
            "a\0",
            ".gpunvme-stage/lock",
            "a/.gpunvme-stage/lock",
            &long,
            &deep,
        ] {
            assert!(matches!(check(bad), Err(Error::Name { .. })), "{bad}");
        }
    }

    #[test]
    fn no_file_is_a_folder() {
        assert!(check_together(["a", "b/c", "b/d", "b.c"].into_iter()).is_ok());
        assert!(check_together(["a", "a/b"].into_iter()).is_err());
        assert!(check_together(["a", "a!", "a/b/c"].into_iter()).is_err());
        assert!(check_together(["a", "a"].into_iter()).is_err());
    }

    #[test]
    fn patterns_match() {
        for (pattern, name) in [("*", ""), ("*.json", "a/b.json"), ("a?c*", "abc"), ("**b*", "ab"), ("x", "x")] {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [("*.json", "a.jso"), ("a", "ab"), ("?", ""), ("a*b", "ac")] {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
    }
}
