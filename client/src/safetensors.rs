//! The headers of files of safetensors: where each tensor lies.
//!
//! A header may have come from anywhere, so that nothing in it is taken for granted. It guards that
//! a tensor's bytes are its own, and as many as its type and shape have.

use crate::error::{Error, Result};
use crate::file::File;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use std::collections::HashSet;
use std::fmt;
use std::ops::Range;

/// The longest header that the format allows, in bytes.
const LONGEST_HEADER: u64 = 100_000_000;

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// Its type, such as `BF16`.
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Where its bytes are in the file: as many as its type and shape have.
    pub range: Range<u64>,
}

impl File {
    /// The tensors of a file of safetensors, in the order in which they lie in it.
    ///
    /// As the format says, each name is there once, types are those of the format, and tensors lie
    /// one behind the other from the header's end on, each as long as its type and shape say, and
    /// within the file. What is behind the last one is not looked at. A header takes some times its
    /// length of memory, whatever is in it, and is at most 100 MB long.
    ///
    /// # Errors
    /// [`Error::WrongKind`] where it is none, or its header does not describe it; [`Error::Path`]
    /// where it cannot be read.
    pub fn safetensors(&self) -> Result<Vec<Tensor>> {
        let wrong = |needed| Error::WrongKind { path: self.path().to_owned(), needed };
        let size = self.size()?;
        let mut start = [0; 8];
        if size < 8 {
            return Err(wrong("must be a file of safetensors: it has no header"));
        }
        self.read_at(&mut start, 0)?;
        let len = u64::from_le_bytes(start);
        if len > LONGEST_HEADER || len > size - 8 {
            return Err(wrong("must be a file of safetensors: its header is longer than it can be"));
        }
        let mut header = vec![0; len as usize];
        self.read_at(&mut header, 8)?;
        let Header(mut entries) = serde_json::from_slice(&header).map_err(|error| {
            let is_json = error.is_data(); // and no tensors
            wrong(match is_json {
                true => "must be a file of safetensors: its header does not describe tensors",
                false => "must be a file of safetensors: its header is no JSON",
            })
        })?;
        drop(header);
        let mut names = HashSet::with_capacity(entries.len());
        if !entries.iter().all(|(name, _)| names.insert(name.as_str())) {
            return Err(wrong("must be a file of safetensors: two tensors have one name"));
        }
        entries.sort_by_key(|(_, entry)| entry.data_offsets);
        let (data, mut at) = (8 + len, 0);
        let tensors = entries.into_iter().map(|(name, Entry { dtype, shape, data_offsets: [begin, end] })| {
            let len = bytes(&dtype, &shape)
                .ok_or_else(|| wrong("must be a file of safetensors: a tensor's type is unknown, or its shape impossible"))?;
            if begin != at || begin.checked_add(len) != Some(end) || end > size - data {
                return Err(wrong("must be a file of safetensors: a tensor lies where it cannot"));
            }
            at = end;
            Ok(Tensor { name, dtype, shape, range: data + begin..data + end })
        });
        tensors.collect()
    }
}

/// What a header says of tensors, by their names.
struct Header(Vec<(String, Entry)>);

/// What a header says of one.
#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    /// From the header's end on.
    data_offsets: [u64; 2],
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Header, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("tensors by their names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Header, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        entries.push((name, map.next_value()?));
                    }
                }
                Ok(Header(entries))
            }
        }

        deserializer.deserialize_map(Entries)
    }
}

/// How many bytes a tensor has; `None` for unknown types, parts of a byte, and too many.
fn bytes(dtype: &str, shape: &[u64]) -> Option<u64> {
    let bits = match dtype {
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" => 8,
        "I16" | "U16" | "F16" | "BF16" => 16,
        "I32" | "U32" | "F32" => 32,
        "C64" | "F64" | "I64" | "U64" => 64,
        _ => return None,
    };
    let bits = shape.iter().try_fold(1u64, |count, len| count.checked_mul(*len))?.checked_mul(bits)?;
    bits.is_multiple_of(8).then_some(bits / 8)
}
