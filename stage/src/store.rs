//! A set in an object store, or in a folder: what it has, and the bytes of it.

mod local;
mod retention;

use crate::checksums::{Crc32c, Expected};
use crate::error::{Error, Result};
use crate::listing::Listing;
use crate::memory::Lease;
use crate::names::{self, SET_MANIFEST};
use crate::remote::Remote;
use futures_util::stream::{self, StreamExt};
use object_store::local::LocalFileSystem;
use object_store::multipart::MultipartStore;
use object_store::path::Path as Key;
use object_store::{GetOptions, GetRange, GetResultPayload, ObjectMeta, ObjectStore, ObjectStoreExt, WriteMultipart};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use url::Url;

/// Most bytes of a published set's manifest.
const MOST_MANIFEST: u64 = 1 << 30;
/// How often a part is asked for again while nothing of it comes, and the first pause between.
const TRIES: u32 = 8;
const PAUSE: Duration = Duration::from_millis(50);

/// What an answer has to bring, or else it counts as one of these tries: a store that sends a byte
/// now and then would never come to an end.
const LEAST: u64 = 64 << 10;
/// Most bytes of an ETag, which manifests keep.
const LONGEST_TAG: usize = 1024;

/// How many objects a web server is asked for at once.
const HEADS: usize = 16;

/// A place in a store.
#[derive(Clone)]
pub struct Store {
    store: Arc<dyn ObjectStore>,
    /// The same, where uploads in parts have names by which they can go on.
    multipart: Option<Arc<dyn MultipartStore>>,
    prefix: Key,
    /// As the manifest and messages name it.
    url: String,
    /// Whether it tells what it has: a web server does not.
    lists: bool,
}

/// An object of a set, as it was when it was listed.
#[derive(Clone, Debug)]
pub struct Object {
    /// Its name in the set.
    pub name: String,
    /// Its name in the store.
    pub key: Key,
    /// Its length in bytes.
    pub size: u64,
    /// Which version of it; empty where the store tells none.
    pub version: String,
    e_tag: Option<String>,
    /// When it was last changed, in nanoseconds since 1970.
    pub modified: i128,
    /// The CRC32C of its bytes, where the set has a manifest.
    pub crc32c: Option<u32>,
}

/// The last object of a published set.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetManifest {
    /// The objects by their names in the set.
    pub objects: BTreeMap<String, Published>,
}

/// What a set's manifest says of an object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Published {
    /// Its length in bytes.
    pub size: u64,
    /// The CRC32C of its bytes.
    pub crc32c: u32,
}

/// How a part arrived.
pub enum Fetched {
    Whole {
        lease: Lease,
        /// Of these bytes, taken while they were in the processor's cache.
        crc32c: u32,
        /// What the store says its object's checksum is, where the part is all of it.
        told: Option<Expected>,
    },
    /// The object is another one by now, or gone.
    Changed,
}

impl Store {
    /// The place that `text` names, a folder or a URL, to read from.
    ///
    /// # Errors
    /// [`Error::NoUrl`], [`Error::Credentials`], or [`Error::Store`] where the store's settings are
    /// incomplete.
    pub fn source(text: &str) -> Result<Store> {
        Store::open(text, false)
    }

    /// As [`Store::source`], to write to: a folder is made where there is none.
    ///
    /// # Errors
    /// Those of [`Store::source`].
    pub fn destination(text: &str) -> Result<Store> {
        Store::open(text, true)
    }

    fn open(text: &str, make: bool) -> Result<Store> {
        let folder = match Url::parse(text) {
            Ok(url) if url.scheme() == "file" => url.to_file_path().map_err(|()| Error::NoUrl(text.into()))?,
            Ok(url) => return Store::remote(&url, !make),
            Err(_) if !text.contains("://") => PathBuf::from(text),
            Err(_) => return Err(Error::NoUrl(text.into())),
        };
        let folder = spelled(&folder).map_err(Error::path(&folder, "find it"))?;
        if make {
            std::fs::create_dir_all(&folder).map_err(Error::path(&folder, "make it"))?;
        }
        let local = LocalFileSystem::new().with_fsync(true);
        let prefix = key_of(&folder)?;
        let url = format!("file://{}", folder.display());
        Ok(Store { store: Arc::new(local), multipart: None, prefix, url, lists: true })
    }

    fn remote(url: &Url, reads: bool) -> Result<Store> {
        let shown = format!("{}://{}{}", url.scheme(), url.host_str().unwrap_or_default(), url.path());
        if !url.username().is_empty() || url.password().is_some() || url.query().is_some() || url.fragment().is_some() {
            return Err(Error::Credentials(shown));
        }
        if url.scheme() == "http" {
            return Err(Error::NoUrl(shown));
        }
        let Remote { store, multipart, prefix, lists } = Remote::open(url, &shown, reads)?;
        Ok(Store { store, multipart, prefix, url: url.as_str().trim_end_matches('/').into(), lists })
    }

    /// As the manifest and messages name it; without credentials.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The folder, where it is one of this machine.
    pub fn folder(&self) -> Option<&Path> {
        self.url.strip_prefix("file://").map(Path::new)
    }

    /// The store itself, and the name in it of an object of the set.
    ///
    /// # Errors
    /// [`Error::Store`] for a name that no store can have.
    pub fn object(&self, name: &str) -> Result<(&Arc<dyn ObjectStore>, Key)> {
        Ok((&self.store, below(&self.prefix, name)?))
    }

    /// The store itself, where uploads in parts have names by which they can go on.
    pub fn multipart(&self) -> Option<&Arc<dyn MultipartStore>> {
        self.multipart.as_ref()
    }

    /// The manifest of a published set, where this is one.
    ///
    /// # Errors
    /// [`Error::SetManifest`] where there is something else in its place, [`Error::Store`].
    pub async fn manifest(&self) -> Result<Option<SetManifest>> {
        self.json(SET_MANIFEST).await
    }

    /// What an object of the set says in JSON, if there is one.
    ///
    /// # Errors
    /// As [`Store::manifest`].
    pub async fn json<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let (store, key) = self.object(name)?;
        let wrong = || Error::SetManifest(self.url.clone(), MOST_MANIFEST);
        let found = match store.get(&key).await {
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            // What lies below a single object.
            Err(object_store::Error::Generic { .. }) if self.folder().is_some() => return Ok(None),
            found => found.map_err(Error::store(format!("{}/{name}", self.url)))?,
        };
        if found.meta.size > MOST_MANIFEST {
            return Err(wrong());
        }
        let bytes = found.bytes().await.map_err(Error::store(name))?;
        serde_json::from_slice(&bytes).map(Some).map_err(|_| wrong())
    }

    /// Makes an object of the set that says something in JSON.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub async fn put_json(&self, name: &str, what: &impl Serialize) -> Result<()> {
        let (store, key) = self.object(name)?;
        let text = serde_json::to_vec(what).expect("names and numbers have a form in JSON");
        store.put(&key, text.into()).await.map(drop).map_err(Error::store(name))
    }

    /// Gives an object of the set another name too. One that has the name is replaced at once: at
    /// no moment there is none.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub async fn copy(&self, from: &str, to: &str) -> Result<()> {
        let ((store, from), (_, to)) = (self.object(from)?, self.object(to)?);
        let copied = match self.folder() {
            // It would be a link to the same file, and such a one replaces no other.
            Some(_) => copy_bytes(store, &from, &to).await,
            None => store.copy(&from, &to).await,
        };
        copied.map_err(Error::store(to.as_ref()))
    }

    /// Removes an object of the set, if there is one.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub async fn remove(&self, name: &str) -> Result<()> {
        let (store, key) = self.object(name)?;
        match store.delete(&key).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(Error::store(name)(error)),
        }
    }

    /// All objects of the set, sorted by name: those of its manifest where it has one, otherwise
    /// those that the store lists. Their names were not looked at ([`names::check`]).
    ///
    /// # Errors
    /// [`Error::TooMany`], [`Error::Nothing`]; [`Error::NotPublished`] where the set must have a
    /// manifest and has none.
    pub async fn list(&self, must_be_published: bool) -> Result<Vec<Object>> {
        let mut published = match self.manifest().await {
            // What web servers say of what they do not have.
            Err(Error::Store { source, .. }) if !self.lists && !must_be_published && is_refused(&source) => None,
            found => found?,
        };
        if must_be_published && published.is_none() {
            return Err(Error::NotPublished(self.url.clone()));
        }
        let mut objects = Vec::new();
        let mut listing = match &published {
            _ if self.lists => self.listing(&self.prefix),
            None => Listing::new(&self.url, stream::empty().boxed()),
            Some(manifest) => {
                let keys: Vec<_> = manifest.objects.keys().map(|name| below(&self.prefix, name)).collect::<Result<_>>()?;
                let store = self.store.clone();
                let head = move |key| {
                    let store = store.clone();
                    async move { store.head(&key).await }
                };
                Listing::new(&self.url, stream::iter(keys).map(head).buffered(HEADS).boxed())
            }
        };
        while let Some(found) = listing.next().await? {
            let name = self.name_of(&found.location);
            // An object of no bytes whose name ends in a slash, which consoles make for a folder.
            if name.is_empty() || name == SET_MANIFEST || name.split('/').any(|part| part == names::OWN) {
                continue;
            }
            let crc32c = match &mut published {
                Some(manifest) => match manifest.objects.remove(&name) {
                    Some(entry) if entry.size == found.size => Some(entry.crc32c),
                    Some(_) => return Err(Error::Answer { name, why: "its size is not that of the set's manifest".into() }),
                    None => continue,
                },
                None => None,
            };
            objects.push(Object::new(name, self.tagged(found)?, crc32c));
        }
        if let (None, Some(folder)) = (&published, self.folder().map(Path::to_owned)) {
            tokio::task::spawn_blocking(move || local::check_listed(&folder)).await??;
        }
        if let Some(name) = published.and_then(|rest| rest.objects.into_keys().next()) {
            return Err(Error::Answer { name, why: "the set's manifest lists it, and the store does not have it".into() });
        }
        if objects.is_empty() {
            objects.push(self.single().await?);
        }
        drop_markers(&mut objects);
        objects.sort_by(|a, b| a.name.cmp(&b.name));
        // One that is listed twice is as it was listed last.
        objects.dedup_by(|last, first| {
            let is_same = last.key == first.key;
            if is_same {
                std::mem::swap(last, first);
            }
            is_same
        });
        Ok(objects)
    }

    /// The sizes and versions of all objects, by their names in the set.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub async fn versions(&self) -> Result<HashMap<String, (u64, Option<String>)>> {
        let mut versions = HashMap::new();
        let mut listing = self.listing(&self.prefix);
        while let Some(found) = listing.next().await? {
            let found = self.tagged(found)?;
            versions.insert(self.name_of(&found.location), (found.size, found.e_tag));
        }
        Ok(versions)
    }

    /// What the store lists below a place of it.
    fn listing(&self, prefix: &Key) -> Listing<'_> {
        Listing::new(&self.url, self.store.list(Some(prefix)))
    }

    /// An ETag as answers have it: some stores leave the quotation marks away when they list.
    pub fn tag(&self, tag: Option<String>) -> Option<String> {
        let is_bare = self.folder().is_none() && tag.as_ref().is_some_and(|tag| !tag.ends_with('"'));
        if is_bare { tag.map(|tag| format!("\"{tag}\"")) } else { tag }
    }

    fn tagged(&self, found: ObjectMeta) -> Result<ObjectMeta> {
        if found.e_tag.as_ref().is_some_and(|tag| tag.len() > LONGEST_TAG) {
            let why = format!("its ETag is longer than {LONGEST_TAG} bytes");
            return Err(Error::Answer { name: found.location.to_string(), why });
        }
        Ok(ObjectMeta { e_tag: self.tag(found.e_tag), ..found })
    }

    /// The name in the set of an object of the store; empty for the place itself.
    fn name_of(&self, key: &Key) -> String {
        let parts: Vec<_> = key.prefix_match(&self.prefix).into_iter().flatten().collect();
        parts.iter().map(|part| part.as_ref()).collect::<Vec<_>>().join("/")
    }

    /// The object that the URL itself names.
    async fn single(&self) -> Result<Object> {
        match (self.prefix.filename(), self.store.head(&self.prefix).await) {
            (Some(name), Ok(found)) => Ok(Object::new(name.into(), self.tagged(found)?, None)),
            (None, _) | (_, Err(object_store::Error::NotFound { .. })) => Err(Error::Nothing(self.url.clone())),
            (_, Err(source)) => Err(Error::Store { name: self.url.clone(), source }),
        }
    }

    /// The object as it is now.
    ///
    /// # Errors
    /// [`Error::Store`], also where it is gone.
    pub async fn again(&self, object: &Object) -> Result<Object> {
        let found = self.store.head(&object.key).await.map_err(Error::store(&object.name))?;
        Ok(Object::new(object.name.clone(), self.tagged(found)?, object.crc32c))
    }

    /// What the store says that the checksum of an object is, where it says so. An object that is
    /// another one by now has none.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub async fn checksum(&self, object: &Object) -> Result<Option<Expected>> {
        if self.folder().is_some() {
            return Ok(None);
        }
        let options = GetOptions { head: true, if_match: object.if_match(), ..GetOptions::default() };
        match self.store.get_opts(&object.key, options).await {
            Ok(found) if object.differs(&self.tagged(found.meta.clone())?) => Ok(None),
            Ok(found) => Ok(found.extensions.get().cloned()),
            Err(object_store::Error::Precondition { .. } | object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(Error::store(&object.name)(error)),
        }
    }

    /// Brings a range of an object, of as many bytes as the buffer's content is long. What comes
    /// cut, late or not at all is asked for again from where it ended. Where more comes than was
    /// asked for, nothing of it counts.
    ///
    /// # Errors
    /// [`Error::Store`] where the store refuses, or nothing more comes; [`Error::Answer`].
    pub async fn fetch(&self, object: &Object, range: Range<u64>, mut lease: Lease) -> Result<Fetched> {
        let (mut at, mut failures) = (range.start, 0);
        let (mut told, mut sum) = (None, Crc32c::new());
        while at < range.end {
            // With the whole object comes its checksum.
            let is_all = (at, range.end) == (0, object.size);
            let options = GetOptions {
                range: (!is_all).then_some(GetRange::Bounded(at..range.end)),
                if_match: object.if_match(),
                ..GetOptions::default()
            };
            let (before, sum_before, mut came) = (at, sum.clone(), "nothing");
            let failed = match self.store.get_opts(&object.key, options).await {
                Ok(found) if object.differs(&self.tagged(found.meta.clone())?) => return Ok(Fetched::Changed),
                Ok(found) if found.range != (at..range.end) => {
                    let why = format!("{:?} for {:?}", found.range, at..range.end);
                    return Err(Error::Answer { name: object.name.clone(), why });
                }
                Ok(found) => {
                    told = found.extensions.get().cloned().or(told);
                    match found.payload {
                        GetResultPayload::File(file, _) => {
                            let offset = (at - range.start) as usize;
                            let (folder, name) = (PathBuf::from(format!("/{}", self.prefix)), self.name_of(&object.key));
                            let (is_that, read, read_sum) = tokio::task::spawn_blocking(move || {
                                let is_that = local::read(&file, &folder, &name, &mut lease[offset..], at)?;
                                sum.add(&lease[offset..]);
                                Ok::<_, Error>((is_that, lease, sum))
                            })
                            .await??;
                            if !is_that {
                                return Ok(Fetched::Changed);
                            }
                            (lease, sum, at) = (read, read_sum, range.end);
                            None
                        }
                        GetResultPayload::Stream(mut stream) => {
                            let mut failed = None;
                            while let Some(chunk) = stream.next().await {
                                match chunk {
                                    Ok(bytes) => {
                                        let offset = (at - range.start) as usize;
                                        let Some(room) = lease.get_mut(offset..offset + bytes.len()) else {
                                            (at, sum, came) = (before, sum_before, "more bytes than were asked for");
                                            break;
                                        };
                                        sum.copy(room, &bytes);
                                        at += bytes.len() as u64;
                                    }
                                    Err(error) => {
                                        failed = Some(error);
                                        break;
                                    }
                                }
                            }
                            failed
                        }
                    }
                }
                Err(object_store::Error::Precondition { .. } | object_store::Error::NotFound { .. }) => {
                    return Ok(Fetched::Changed);
                }
                Err(error) => Some(error),
            };
            failures = if at - before >= LEAST { 0 } else { failures + 1 };
            match failed {
                _ if at == range.end => break,
                Some(source) if failures > TRIES || !may_pass(&source) => {
                    return Err(Error::Store { name: object.name.clone(), source });
                }
                None if failures > TRIES => {
                    return Err(Error::Answer { name: object.name.clone(), why: came.into() });
                }
                _ => tracing::debug!(name = object.name, at, "asked for again"),
            }
            tokio::time::sleep(PAUSE * 2_u32.pow(failures)).await;
        }
        Ok(Fetched::Whole { lease, crc32c: sum.finish(), told })
    }
}

/// Copies an object by its bytes.
async fn copy_bytes(store: &Arc<dyn ObjectStore>, from: &Key, to: &Key) -> object_store::Result<()> {
    let mut bytes = store.get(from).await?.into_stream();
    let mut copy = WriteMultipart::new(store.put_multipart(to).await?);
    while let Some(chunk) = bytes.next().await {
        copy.wait_for_capacity(1).await?;
        copy.put(chunk?);
    }
    copy.finish().await.map(drop)
}

/// Drops the objects without bytes that stand for folders: consoles make them, with a slash at the
/// end, which is not part of a name here.
fn drop_markers(objects: &mut Vec<Object>) {
    let empty: HashSet<_> = objects.iter().filter(|object| object.size == 0).map(|object| object.name.as_str()).collect();
    let folders = objects.iter().flat_map(|object| object.name.match_indices('/').map(|(at, _)| &object.name[..at]));
    let markers: HashSet<_> = folders.filter(|folder| empty.contains(folder)).map(str::to_owned).collect();
    objects.retain(|object| object.size > 0 || !markers.contains(&object.name));
}

/// The name in the store of what lies below `prefix`, which is taken as it is: nothing is encoded.
fn below(prefix: &Key, name: &str) -> Result<Key> {
    let separator = if prefix.is_root() { "" } else { "/" };
    Key::parse(format!("{prefix}{separator}{name}")).map_err(|error| Error::Store { name: name.into(), source: error.into() })
}

/// The name in the store of all folders of this machine.
fn key_of(folder: &Path) -> Result<Key> {
    Key::from_absolute_path(folder).map_err(|_| Error::NoUrl(folder.display().to_string()))
}

/// A folder's path as manifests keep it: absolute, without slashes at its end, `.` and `..`. What
/// it says of symbolic links stays, for they may lead elsewhere the next time.
fn spelled(folder: &Path) -> std::io::Result<PathBuf> {
    std::path::absolute(folder)?.components().try_fold(PathBuf::new(), |path, part| match part {
        // What is above the folder that a link leads to.
        Component::ParentDir => path.canonicalize().map(|path| path.parent().unwrap_or(&path).into()),
        part => Ok(path.join(part)),
    })
}

/// Whether a store keeps something from the one that asks.
fn is_refused(error: &object_store::Error) -> bool {
    matches!(error, object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. })
}

/// Whether an error may be gone when the same is asked again.
fn may_pass(error: &object_store::Error) -> bool {
    matches!(error, object_store::Error::Generic { .. } | object_store::Error::JoinError { .. })
}

impl Object {
    fn new(name: String, found: ObjectMeta, crc32c: Option<u32>) -> Object {
        let version = found.e_tag.clone().unwrap_or_else(|| found.last_modified.timestamp_millis().to_string());
        let time = found.last_modified;
        let modified = i128::from(time.timestamp()) * 1_000_000_000 + i128::from(time.timestamp_subsec_nanos());
        Object { name, key: found.location, size: found.size, version, e_tag: found.e_tag, modified, crc32c }
    }

    /// The ETag by which a store sends this version and no other: a weak one is of several.
    fn if_match(&self) -> Option<String> {
        self.e_tag.clone().filter(|tag| !tag.starts_with("W/"))
    }

    fn differs(&self, now: &ObjectMeta) -> bool {
        let is_other = match (&self.e_tag, &now.e_tag) {
            (Some(then), Some(now)) => then != now,
            // Answers have times in whole seconds, and listings more of them.
            _ => self.modified.div_euclid(1_000_000_000) != i128::from(now.last_modified.timestamp()),
        };
        now.size != self.size || is_other
    }
}
