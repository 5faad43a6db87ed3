//! Which published sets stay beside a new one, and what goes of the others.

use super::{Store, below, key_of};
use crate::error::{Error, Result};
use crate::listing::SILENCE;
use crate::names::{self, OWN, SET_MANIFEST};
use crate::sets;
use futures_util::stream::{self, StreamExt};
use object_store::ObjectStoreExt;
use object_store::path::Path as Key;
use rustix::fs::AtFlags;
use rustix::io::Errno;
use std::path::Path;

impl Store {
    /// Of the published sets beside this one, itself among them, removes all but the `keep` newest,
    /// and returns how many. What goes is what their manifests list, and what the program keeps in
    /// them; a set's manifest goes first. A symbolic link is no set, and none is followed.
    ///
    /// # Errors
    /// [`Error::Nothing`] where the place has none beside it, [`Error::Store`], [`Error::Path`].
    pub async fn retain(&self, keep: usize) -> Result<usize> {
        let failed = || Error::store(&self.url);
        let this = match self.folder() {
            Some(folder) => key_of(&folder.canonicalize().map_err(Error::path(folder, "find it"))?)?,
            None => self.prefix.clone(),
        };
        let mut parts: Vec<_> = this.parts().collect();
        parts.pop().ok_or_else(|| Error::Nothing(self.url.clone()))?;
        let parent: Key = parts.into_iter().collect();
        let listing = tokio::time::timeout(SILENCE, self.store.list_with_delimiter(Some(&parent))).await;
        let sets = listing.map_err(|_| Error::silent(&self.url))?.map_err(failed())?;
        let mut published = Vec::new();
        for set in sets.common_prefixes {
            let set = self.beside(set);
            if set.folder().is_some_and(Path::is_symlink) {
                continue;
            }
            match self.store.head(&below(&set.prefix, SET_MANIFEST)?).await {
                // The one that was just published is the newest, whatever the store's clock says.
                Ok(found) => published.push((set.prefix != this, std::cmp::Reverse(found.last_modified), set.prefix)),
                Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => return Err(failed()(error)),
            }
        }
        published.sort();
        let mut removed = 0;
        for (_, _, set) in published.into_iter().skip(keep) {
            match self.beside(set).remove_published().await {
                Ok(()) => removed += 1,
                Err(error @ Error::SetManifest(..)) => sets::pass_over(&error),
                Err(error) => return Err(error),
            }
        }
        Ok(removed)
    }

    /// A place of the same store.
    fn beside(&self, prefix: Key) -> Store {
        let url = match self.folder() {
            Some(_) => format!("file:///{prefix}"),
            None => format!("{}/{}", self.url.rsplit_once('/').map_or("", |(above, _)| above), prefix.filename().unwrap_or("")),
        };
        Store { prefix, url, ..self.clone() }
    }

    /// Removes a set that was published, and nothing else that lies in its place.
    async fn remove_published(&self) -> Result<()> {
        let published = self.manifest().await?.unwrap_or_default();
        let mut names: Vec<_> = published.objects.into_keys().filter(|name| names::check(name).is_ok()).collect();
        let own = below(&self.prefix, OWN)?;
        let mut listing = self.listing(&own);
        while let Some(found) = listing.next().await? {
            names.push(self.name_of(&found.location));
        }
        drop(listing);
        if let Some(folder) = self.folder().map(Path::to_owned) {
            let remove = move || {
                std::iter::once(SET_MANIFEST).chain(names.iter().map(String::as_str)).try_for_each(|name| unlink(&folder, name))
            };
            return tokio::task::spawn_blocking(remove).await?;
        }
        self.remove(SET_MANIFEST).await?;
        let keys: Vec<_> = names.iter().map(|name| below(&self.prefix, name)).collect::<Result<_>>()?;
        let mut removing = self.store.delete_stream(stream::iter(keys).map(Ok).boxed());
        while let Some(removed) = removing.next().await {
            match removed {
                Ok(_) | Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => return Err(Error::store(&self.url)(error)),
            }
        }
        Ok(())
    }
}

/// Removes a file of a set in a folder, unless it is gone, or a symbolic link leads there.
fn unlink(set: &Path, name: &str) -> Result<()> {
    let path = set.join(name);
    let (Some(root), Some(folder), Some(file)) = (set.parent(), path.parent(), path.file_name()) else { return Ok(()) };
    let folder = match sets::open(root, folder) {
        Err(Error::Path { errno: Errno::NOENT | Errno::NOTDIR | Errno::LOOP, .. }) => return Ok(()),
        folder => folder?,
    };
    match rustix::fs::unlinkat(&folder, file, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT | Errno::ISDIR) => Ok(()),
        Err(errno) => Err(Error::path(path, "remove it")(errno)),
    }
}
