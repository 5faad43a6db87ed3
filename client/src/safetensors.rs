//! The headers of files of safetensors: where each tensor lies. A header may have come from
//! anywhere, so that nothing in it is taken for granted.

use crate::error::{Error, Result};
use crate::file::File;
use serde_json::Value;
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
    /// Where its bytes are in the file.
    pub range: Range<u64>,
}

impl File {
    /// The tensors of a file of safetensors, in the order in which they lie in it.
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
        let parsed: Value =
            serde_json::from_slice(&header).map_err(|_| wrong("must be a file of safetensors: its header is no JSON"))?;
        let entries = parsed.as_object().ok_or_else(|| wrong("must be a file of safetensors: its header is no JSON object"))?;
        let tensors = entries.iter().filter(|(name, _)| *name != "__metadata__").map(|(name, entry)| {
            tensor(name, entry, 8 + len, size)
                .ok_or_else(|| wrong("must be a file of safetensors: a tensor lies where it cannot"))
        });
        let mut tensors = tensors.collect::<Result<Vec<_>>>()?;
        tensors.sort_by_key(|tensor| (tensor.range.start, tensor.range.end));
        Ok(tensors)
    }
}

/// What a header says of a tensor, if that can be; the data begin at `data`.
fn tensor(name: &str, entry: &Value, data: u64, size: u64) -> Option<Tensor> {
    let shape = entry.get("shape")?.as_array()?.iter().map(Value::as_u64).collect::<Option<Vec<_>>>()?;
    let [begin, end] = entry.get("data_offsets")?.as_array()?.as_slice() else { return None };
    let (begin, end) = (begin.as_u64()?.checked_add(data)?, end.as_u64()?.checked_add(data)?);
    let dtype = entry.get("dtype")?.as_str()?.to_owned();
    (begin <= end && end <= size).then(|| Tensor { name: name.to_owned(), dtype, shape, range: begin..end })
}
