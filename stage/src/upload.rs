//! An object that is sent in parts. The journal knows the upload, by the name that the store gave
//! it, and the parts that the store has, so that an upload that was interrupted goes on.

use crate::error::{Error, Result};
use crate::journal::{Begun, Journal, Sent};
use crate::store::Store;
use futures_util::future::BoxFuture;
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path as Key;
use object_store::{MultipartUpload, ObjectStoreExt, PutPayload};
use std::sync::{Arc, Mutex, PoisonError};

/// Most parts of an upload, and the least bytes of each but the last, as S3 has it.
pub const MOST_PARTS: u64 = 10_000;
pub const LEAST_PART_TAKEN: u64 = 5 << 20;

/// What an upload is to the store.
enum Way {
    /// It has a name, and so have its parts.
    Named { store: Arc<dyn MultipartStore>, begun: Begun },
    /// It has none: of a folder.
    Plain(Box<dyn MultipartUpload>),
}

/// An upload.
pub struct Upload {
    way: Way,
    name: String,
    key: Key,
    part: u64,
    /// Whether an earlier run began it.
    pub is_old: bool,
}

impl Upload {
    /// That of the file `name` in this state: the one that the journal knows, or a new one with
    /// parts of at most `part` bytes.
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Path`].
    pub async fn of(destination: &Store, journal: &Mutex<Journal>, name: &str, state: &Sent, part: u64) -> Result<Upload> {
        let (store, key) = destination.object(name)?;
        let new = |way, part, is_old| Upload { way, name: name.into(), key: key.clone(), part, is_old };
        let Some(named) = destination.multipart().cloned() else {
            let upload = store.put_multipart(&key).await.map_err(Error::store(name))?;
            return Ok(new(Way::Plain(upload), part, false));
        };
        let goes_on =
            |begun: &Begun| begun.state == *state && begun.part <= part && state.size.div_ceil(begun.part) <= MOST_PARTS;
        let known = locked(journal).begun(name);
        if let Some(begun) = known.filter(goes_on) {
            let part = begun.part;
            return Ok(new(Way::Named { store: named, begun }, part, true));
        }
        drop_begun(destination, journal, name).await?;
        let id = named.create_multipart(&key).await.map_err(Error::store(name))?;
        let begun = Begun { state: state.clone(), id, part, parts: Default::default() };
        locked(journal).begin(name, begun.clone())?;
        Ok(new(Way::Named { store: named, begun }, part, false))
    }

    /// Bytes of each part but the last.
    pub fn part(&self) -> u64 {
        self.part
    }

    /// The CRC32C of a part that the store has.
    pub fn has(&self, index: usize) -> Option<u32> {
        match &self.way {
            Way::Named { begun, .. } => begun.parts.get(&index).map(|(_, crc32c)| *crc32c),
            Way::Plain(_) => None,
        }
    }

    /// Sends a part; those of a folder have to come in their order. It returns what the store calls
    /// the part.
    pub fn put(&mut self, index: usize, bytes: PutPayload) -> BoxFuture<'static, object_store::Result<String>> {
        match &mut self.way {
            Way::Named { store, begun } => {
                let (store, key, id) = (store.clone(), self.key.clone(), begun.id.clone());
                Box::pin(async move { store.put_part(&key, &id, index, bytes).await.map(|part| part.content_id) })
            }
            Way::Plain(upload) => {
                let sent = upload.put_part(bytes);
                Box::pin(async move { sent.await.map(|()| String::new()) })
            }
        }
    }

    /// The store has a part.
    ///
    /// # Errors
    /// [`Error::Path`].
    pub fn sent(&mut self, journal: &Mutex<Journal>, index: usize, tag: String, crc32c: u32) -> Result<()> {
        let Way::Named { begun, .. } = &mut self.way else { return Ok(()) };
        begun.parts.insert(index, (tag.clone(), crc32c));
        locked(journal).add_part(&self.name, index, tag, crc32c)
    }

    /// All parts are there, and become the object, whose version this returns.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub async fn complete(&mut self) -> Result<Option<String>> {
        let done = match &mut self.way {
            Way::Named { store, begun } => {
                let parts = begun.parts.values().map(|(tag, _)| PartId { content_id: tag.clone() }).collect();
                store.complete_multipart(&self.key, &begun.id, parts).await
            }
            Way::Plain(upload) => upload.complete().await,
        };
        Ok(done.map_err(Error::store(&self.name))?.e_tag)
    }

    /// It failed, and its parts go unless a later run can go on with them. Says whether it is gone
    /// in the store, and may succeed anew.
    ///
    /// # Errors
    /// [`Error::Path`].
    pub async fn failed(&mut self, destination: &Store, journal: &Mutex<Journal>, why: &Error) -> Result<bool> {
        match &mut self.way {
            Way::Plain(upload) => {
                let _ = upload.abort().await;
                Ok(false)
            }
            Way::Named { .. } => {
                let is_gone = is_gone(why);
                if is_gone || matches!(why, Error::ChangedHere(_)) {
                    drop_begun(destination, journal, &self.name).await?;
                }
                Ok(is_gone && self.is_old)
            }
        }
    }
}

/// The journal knows an upload of `name` no more, and the store has its parts no longer than it
/// takes to say so: stores keep, and charge for, those of what is neither completed nor aborted.
///
/// # Errors
/// [`Error::Path`].
pub async fn drop_begun(destination: &Store, journal: &Mutex<Journal>, name: &str) -> Result<()> {
    let Some(begun) = locked(journal).begun(name) else { return Ok(()) };
    let (_, key) = destination.object(name)?;
    if let Some(store) = destination.multipart()
        && let Err(error) = store.abort_multipart(&key, &begun.id).await
    {
        tracing::debug!(name, %error, "an upload was not aborted");
    }
    locked(journal).drop_begun(name)
}

/// Whether the store has the upload, or a part of it, no more.
fn is_gone(why: &Error) -> bool {
    match why {
        Error::Store { source: object_store::Error::NotFound { .. }, .. } => true,
        Error::Store { source, .. } => ["NoSuchUpload", "InvalidPart"].iter().any(|code| source.to_string().contains(code)),
        _ => false,
    }
}

fn locked(journal: &Mutex<Journal>) -> std::sync::MutexGuard<'_, Journal> {
    journal.lock().unwrap_or_else(PoisonError::into_inner)
}
