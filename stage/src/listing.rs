//! What a store lists, which comes to an end whatever the store does.

use crate::error::{Error, Result};
use futures_util::stream::{BoxStream, StreamExt};
use object_store::ObjectMeta;
use std::time::Duration;

/// Most objects that a store may list.
const MOST_OBJECTS: usize = 4_000_000;

/// How long a listing may go on without a name.
pub const SILENCE: Duration = Duration::from_secs(600);

/// A listing of a place.
pub struct Listing<'a> {
    url: &'a str,
    found: BoxStream<'a, object_store::Result<ObjectMeta>>,
    left: usize,
    silence: Duration,
}

impl<'a> Listing<'a> {
    /// What is found in the place that messages name `url`.
    pub fn new(url: &'a str, found: BoxStream<'a, object_store::Result<ObjectMeta>>) -> Listing<'a> {
        Listing { url, found, left: MOST_OBJECTS, silence: SILENCE }
    }

    /// The next object; each counts, whether it is of use or not.
    ///
    /// # Errors
    /// [`Error::TooMany`], [`Error::Answer`] where nothing comes, [`Error::Store`].
    pub async fn next(&mut self) -> Result<Option<ObjectMeta>> {
        let found = tokio::time::timeout(self.silence, self.found.next()).await.map_err(|_| Error::silent(self.url))?;
        let Some(found) = found else { return Ok(None) };
        self.left = self.left.checked_sub(1).ok_or(Error::TooMany(MOST_OBJECTS))?;
        found.map(Some).map_err(Error::store(self.url))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::stream;
    use object_store::path::Path as Key;

    fn marker() -> ObjectMeta {
        ObjectMeta { location: Key::default(), last_modified: Default::default(), size: 0, e_tag: None, version: None }
    }

    #[tokio::test]
    async fn a_listing_without_end_ends() {
        let mut listing = Listing::new("s3://bucket", stream::repeat_with(|| Ok(marker())).boxed());
        listing.left = 3;
        for _ in 0..3 {
            assert_eq!(listing.next().await.unwrap(), Some(marker()));
        }
        assert!(matches!(listing.next().await, Err(Error::TooMany(MOST_OBJECTS))));
    }

    #[tokio::test]
    async fn a_listing_that_falls_silent_ends() {
        let mut listing = Listing::new("s3://bucket", stream::iter([Ok(marker())]).chain(stream::pending()).boxed());
        listing.silence = Duration::from_millis(10);
        assert_eq!(listing.next().await.unwrap(), Some(marker()));
        assert!(matches!(listing.next().await, Err(Error::Answer { .. })));
    }
}
