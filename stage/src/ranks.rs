//! A set that several publish, each from a folder of its own: the ranks of one checkpoint.
//!
//! Each sends its files, and then its part of the set's manifest. Whoever then finds the parts of
//! all closes the set: the files that readers begin with, which were held back, get their names,
//! and then comes the manifest. Nobody waits for another.

use crate::error::{Error, Result};
use crate::names::{OWN, SET_MANIFEST};
use crate::store::{Published, SetManifest, Store};
use gpunvme_programs::sets::Share;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Which of the publishers of a set.
#[derive(Clone, Debug)]
pub struct Rank {
    pub share: Share,
    /// What those of one set have in common, and those of an earlier try with its place have not.
    pub attempt: String,
}

/// What one of them has sent.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    attempt: String,
    /// Its objects by their names in the set.
    pub objects: BTreeMap<String, Published>,
    /// Those of them that are held back.
    held: Vec<String>,
}

/// Where an object lies that is held back.
pub fn held(name: &str) -> String {
    format!("{OWN}/held/{name}")
}

impl Rank {
    /// The part of this one, with its objects, and the names of those that are held back.
    pub fn part(&self, objects: BTreeMap<String, Published>, held: Vec<String>) -> Part {
        Part { attempt: self.attempt.clone(), objects, held }
    }

    /// Where the part of publisher `index` lies.
    fn place(&self, index: usize) -> String {
        format!("{OWN}/part-{index}-of-{}", self.share.of)
    }

    /// Whether the store has this part already.
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::SetManifest`].
    pub async fn is_sent(&self, store: &Store, part: &Part) -> Result<bool> {
        Ok(store.json::<Part>(&self.place(self.share.index)).await?.as_ref() == Some(part))
    }

    /// The store has nothing of this one: its files are to change.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub async fn withdraw(&self, store: &Store) -> Result<()> {
        store.remove(&self.place(self.share.index)).await
    }

    /// Sends a part, and closes the set if all parts are there then; says how many are.
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::SetManifest`]; [`Error::Twice`] where two have sent different
    /// files of one name.
    pub async fn send(&self, store: &Store, part: &Part) -> Result<usize> {
        store.put_json(&self.place(self.share.index), part).await?;
        loop {
            let parts = self.parts(store).await?;
            let mut manifest = SetManifest::default();
            for (name, published) in parts.iter().flat_map(|part| &part.objects) {
                if manifest.objects.insert(name.clone(), published.clone()).is_some_and(|other| other != *published) {
                    return Err(Error::Twice(name.clone()));
                }
            }
            // Another may have closed it at the same moment.
            if parts.len() < self.share.of || store.manifest().await?.as_ref() == Some(&manifest) {
                return Ok(parts.len());
            }
            for name in parts.iter().flat_map(|part| &part.held) {
                store.copy(&held(name), name).await?;
            }
            store.put_json(SET_MANIFEST, &manifest).await?;
            // A rank that begins again withdraws its part first, and then removes the manifest: it
            // may have done so before this one was put.
            if self.parts(store).await? == parts {
                return Ok(parts.len());
            }
            store.remove(SET_MANIFEST).await?;
        }
    }

    /// The parts of this attempt that the store has.
    async fn parts(&self, store: &Store) -> Result<Vec<Part>> {
        let mut parts = Vec::new();
        for index in 0..self.share.of {
            parts.extend(store.json::<Part>(&self.place(index)).await?.filter(|part| part.attempt == self.attempt));
        }
        Ok(parts)
    }
}
