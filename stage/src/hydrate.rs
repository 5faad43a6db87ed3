//! The command `hydrate`: a set's objects become files of a folder.
//!
//! Parts arrive in parallel in registered buffers, and are written from there to a partial file,
//! which gets its name when it is whole, checked and durable. The manifest knows what is there, so
//! that what is interrupted goes on from there.

use crate::error::{Error, Result};
use crate::folder::Folder;
use crate::manifest::{Entry, Manifest, Set};
use crate::memory::{Data, Lease, Pool};
use crate::progress::Progress;
use crate::store::{Fetched, Object, Store};
use futures_util::stream::{self, StreamExt, TryStreamExt};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::mpsc;

/// How often an object that changes while it is fetched is begun again.
const CHANGES: u32 = 4;

/// Most files that get their names together.
const GROUP: usize = 1024;

/// Which share of a set: `I/N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    index: usize,
    of: usize,
}

impl std::str::FromStr for Share {
    type Err = &'static str;

    fn from_str(text: &str) -> std::result::Result<Share, Self::Err> {
        let parsed = text.split_once('/').and_then(|(index, of)| Some((index.parse().ok()?, of.parse().ok()?)));
        match parsed {
            Some((index, of)) if index < of => Ok(Share { index, of }),
            _ => Err("a share is I/N, with I from 0 to N-1"),
        }
    }
}

/// What is to be done.
#[derive(Debug)]
pub struct Hydration {
    pub source: Store,
    pub folder: PathBuf,
    pub include: Vec<String>,
    pub share: Option<Share>,
    pub concurrency: usize,
    pub memory: u64,
    pub progress: bool,
    pub verify: bool,
    pub pin: bool,
    pub published: bool,
    pub dry_run: bool,
}

/// What was done.
#[derive(Debug, Default, serde::Serialize)]
pub struct Done {
    pub objects: usize,
    pub bytes: u64,
    pub fetched_objects: usize,
    pub fetched_bytes: u64,
    pub direct: bool,
}

/// A partial file that is whole, checked and durable.
struct Settled {
    partial: String,
    name: String,
    entry: Entry,
}

/// What the tasks of a run share.
struct Run {
    source: Store,
    folder: Folder,
    manifest: Mutex<Manifest>,
    pool: Arc<Pool>,
    progress: Progress,
    concurrency: usize,
    verify: bool,
}

/// Brings in what of the set is not there.
///
/// # Errors
/// All of [`Error`]. What has arrived stays, and counts the next time.
pub async fn hydrate(what: Hydration) -> Result<Done> {
    let mut objects = what.source.list(&what.include, what.published).await?;
    if let Some(share) = what.share {
        objects = objects.into_iter().skip(share.index).step_by(share.of).collect();
    }
    let sum = |objects: &[Object]| objects.iter().map(|object| object.size).sum::<u64>();
    let mut done = Done { objects: objects.len(), bytes: sum(&objects), ..Done::default() };
    if what.dry_run {
        let known = match what.folder.join(crate::names::OWN).join("manifest") {
            path if path.exists() => Some(Manifest::read(&path)?),
            _ => None,
        };
        let is_there = |object: &Object| known.as_ref().is_some_and(|known| is_there(known, &what.folder, object));
        objects.retain(|object| !is_there(object));
        (done.fetched_objects, done.fetched_bytes) = (objects.len(), sum(&objects));
        return Ok(done);
    }

    let folder = Folder::create(&what.folder)?;
    done.direct = folder.mount.is_some();
    if !done.direct {
        eprintln!("gpunvme: {} is on no gpunvme mount: the plain path", what.folder.display());
    }
    let shown = what.folder.clone();
    let wait = move || eprintln!("gpunvme: another process changes the set in {}; waiting", shown.display());
    let (folder, lock) = tokio::task::spawn_blocking(move || folder.lock(wait).map(|lock| (folder, lock))).await??;
    let mut manifest = Manifest::open(&folder.manifest())?;
    describe(&mut manifest, &what)?;

    lock.used().map_err(Error::path(&what.folder, "note that it is used"))?;
    objects.retain(|object| !is_there(&manifest, &what.folder, object));
    let partials: std::collections::HashSet<_> = objects.iter().map(partial_name).collect();
    let taken = folder.clean(|name| partials.contains(name))?;
    let (needed, free) = (sum(&objects), folder.free()?);
    if needed > free.saturating_add(taken) {
        return Err(Error::Space { needed, free });
    }
    let largest = objects.iter().map(|object| object.size).max().unwrap_or(0);
    let pool = Pool::new(folder.mount.clone(), what.memory, what.concurrency, largest);
    let run = Arc::new(Run {
        source: what.source,
        folder,
        manifest: Mutex::new(manifest),
        pool,
        progress: Progress::new(needed, what.progress),
        concurrency: what.concurrency,
        verify: what.verify,
    });
    (done.fetched_objects, done.fetched_bytes) = (objects.len(), needed);
    let (settled, waiting) = mpsc::channel(GROUP);
    let naming = tokio::task::spawn_blocking({
        let run = run.clone();
        move || run.name(waiting)
    });
    let brought = stream::iter(objects)
        .map(|object| {
            let task = tokio::spawn(bring(run.clone(), object, settled.clone()));
            async move { task.await? }
        })
        .buffer_unordered(run.concurrency)
        .try_collect::<()>()
        .await;
    drop(settled);
    match brought {
        // No name was given because of what the naming says.
        Ok(()) | Err(Error::Stopped) => naming.await??,
        Err(error) => return Err(error),
    }
    run.manifest().compact()?;
    run.progress.finish();
    Ok(done)
}

/// Whether this version of an object is in the folder, and was not changed there.
fn is_there(manifest: &Manifest, folder: &Path, object: &Object) -> bool {
    manifest.entry(object).is_some_and(|entry| Folder::has(folder, &object.name, entry))
}

/// Sees to it that the manifest is of this set.
fn describe(manifest: &mut Manifest, what: &Hydration) -> Result<()> {
    let source = what.source.url().to_owned();
    let pinned = what.pin || manifest.set.as_ref().is_some_and(|set| set.pinned);
    match &manifest.set {
        Some(set) if set.source != source => {
            Err(Error::OtherSet { folder: what.folder.clone(), there: set.source.clone(), asked: source })
        }
        Some(set) if set.pinned == pinned => Ok(()),
        _ => manifest.begin(Set { source, pinned }),
    }
}

/// The name of the partial file of one version of an object.
fn partial_name(object: &Object) -> String {
    let mut hash = Sha256::new();
    for text in [&object.name, &object.version, &object.size.to_string()] {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    }
    hash.finalize()[..16].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Brings one object, in the version that the store has.
async fn bring(run: Arc<Run>, mut object: Object, settled: mpsc::Sender<Settled>) -> Result<()> {
    for _ in 0..=CHANGES {
        let partial = partial_name(&object);
        if run.clone().bring_version(&object, &partial, &settled).await? {
            return Ok(());
        }
        run.discard(&partial)?;
        object = run.source.again(&object).await?;
    }
    Err(Error::Changing { name: object.name })
}

impl Run {
    fn manifest(&self) -> MutexGuard<'_, Manifest> {
        self.manifest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn discard(&self, partial: &str) -> Result<()> {
        self.folder.remove_partial(partial)?;
        self.manifest().drop_parts(partial)
    }

    /// Brings an object, unless it changes meanwhile.
    async fn bring_version(self: Arc<Run>, object: &Object, partial: &str, settled: &mpsc::Sender<Settled>) -> Result<bool> {
        let (data, is_old) = self.folder.partial(partial, object.size)?;
        if !is_old {
            self.manifest().drop_parts(partial)?;
        }
        let known = self.manifest().parts(partial);
        let data = Arc::new(data);
        let mut missing = Vec::new();
        let mut at = 0;
        while at < object.size {
            let len = match known.get(&at) {
                Some(&(len, _)) if len > 0 && len <= object.size - at => {
                    self.progress.add(len);
                    len
                }
                _ => {
                    // Up to the next part that is there, which another size of parts may have put.
                    let next = known.range(at + 1..).next().map_or(object.size, |(&next, _)| next.min(object.size));
                    let len = self.pool.part().min(next - at);
                    missing.push((at, len));
                    len
                }
            };
            at += len;
        }
        let is_single = missing.len() == 1 && missing[0].1 == object.size;
        let parts = stream::iter(missing)
            .map(|(offset, len)| {
                let (run, object, data, partial) = (self.clone(), object.clone(), data.clone(), partial.to_owned());
                let task = tokio::spawn(async move { run.bring_part(&object, data, &partial, offset, len, is_single).await });
                async move { task.await? }
            })
            .buffer_unordered(self.concurrency)
            .try_collect::<Vec<_>>()
            .await?;
        let Some(parts) = parts.into_iter().collect::<Option<Vec<_>>>() else { return Ok(false) };

        let mut all = known;
        all.extend(parts.into_iter().map(|(offset, len, crc32c)| (offset, (len, crc32c))));
        let crc32c = all.range(..object.size).fold(0, |sum, (_, &(len, part))| crc32c::crc32c_combine(sum, part, len as usize));
        if let Some(expected) = object.crc32c.filter(|&expected| self.verify && expected != crc32c) {
            self.discard(partial)?;
            return Err(Error::Checksum { name: object.name.clone(), expected, found: crc32c });
        }
        let (run, Object { name, size, version, modified, .. }) = (self.clone(), object.clone());
        let name = tokio::task::spawn_blocking(move || run.folder.settle(&data, &name, modified).map(|()| name)).await??;
        let file = Settled { partial: partial.into(), name, entry: Entry { size, version, crc32c, modified } };
        settled.send(file).await.map_err(|_| Error::Stopped)?;
        Ok(true)
    }

    /// Gives files their names, in groups: those that were settled while the last group was made
    /// durable are the next, so that small objects share the syncs of their folders.
    fn name(&self, mut settled: mpsc::Receiver<Settled>) -> Result<()> {
        let mut group = Vec::new();
        while settled.blocking_recv_many(&mut group, GROUP) > 0 {
            self.folder.appear(group.iter().map(|file: &Settled| (&*file.partial, &*file.name)))?;
            let mut manifest = self.manifest();
            let partials: Vec<_> = group.iter().map(|file| file.partial.clone()).collect();
            manifest.add_files(group.drain(..).map(|file| (file.name, file.entry)))?;
            for partial in partials {
                manifest.drop_parts(&partial)?;
            }
        }
        Ok(())
    }

    /// Brings a part into the partial file, and returns where it lies, its length and its CRC32C.
    /// Unless it is the only one, it is durable, and in the manifest.
    async fn bring_part(
        self: Arc<Run>,
        object: &Object,
        data: Arc<Data>,
        partial: &str,
        offset: u64,
        len: u64,
        is_single: bool,
    ) -> Result<Option<(u64, u64, u32)>> {
        let lease = self.pool.lease().await?.shortened(len as usize);
        let Fetched::Whole(lease) = self.source.fetch(object, offset..offset + len, lease).await? else { return Ok(None) };
        let (run, path, partial) = (self.clone(), self.folder.path_of(&object.name), partial.to_owned());
        let crc32c = tokio::task::spawn_blocking(move || {
            let crc32c = write(&data, &lease, offset, &path)?;
            if !is_single {
                data.file().sync_data().map_err(Error::path(&path, "make it durable"))?;
                run.manifest().add_part(&partial, offset, len, crc32c)?;
            }
            Ok::<_, Error>(crc32c)
        })
        .await??;
        self.progress.add(len);
        Ok(Some((offset, len, crc32c)))
    }
}

fn write(data: &Data, lease: &Lease, offset: u64, path: &Path) -> Result<u32> {
    data.write(lease, offset, path)?;
    Ok(crc32c::crc32c(lease))
}
