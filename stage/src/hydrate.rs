//! The command `hydrate`: a set's objects become files of a folder.
//!
//! Parts arrive in parallel in registered buffers, and are written from there to a partial file,
//! which gets its name when it is whole, checked and durable. The manifest knows what is there, so
//! that what is interrupted goes on from there.

use crate::checksums::{Expected, Kind, Sum};
use crate::error::{Error, Result};
use crate::evict::Evicted;
use crate::folder::{Folder, Lock};
use crate::follower::{Event, Follower, Part as Told};
use crate::manifest::{Entry, Manifest, Set};
use crate::memory::{Data, Pool};
use crate::own::Own;
use crate::progress::Progress;
use crate::reservation::{Limit, Reservation};
use crate::selection::{Selected, Selection, bytes};
use crate::store::{Fetched, Object, Store};
use futures_util::stream::{self, StreamExt, TryStreamExt};
use gpunvme_programs::terminal::complain;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::mpsc;

/// How often an object that changes while it is fetched is begun again.
const CHANGES: u32 = 4;

/// Most files that get their names together.
const GROUP: usize = 1024;

/// What is to be done.
pub struct Hydration {
    pub source: Store,
    pub folder: PathBuf,
    pub selection: Selection,
    pub concurrency: usize,
    pub memory: u64,
    pub progress: bool,
    pub follow: bool,
    pub verify: bool,
    pub pin: bool,
    pub limit: Option<Limit>,
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
    #[serde(flatten)]
    pub evicted: Evicted,
}

/// A partial file that is whole and checked.
struct Settled {
    partial: String,
    name: String,
    entry: Entry,
}

/// A time of modification as a program is told of it. One beyond the year 2262 is none.
fn modified(nanoseconds: i128) -> i64 {
    nanoseconds.try_into().unwrap_or_default()
}

/// What earlier runs left of files that are not whole.
struct Sorted {
    /// Bytes of those that this run goes on with, and of others.
    taken: u64,
    others: u64,
    /// The names of the others.
    stays: HashSet<String>,
}

/// A part that is in the partial file.
struct Part {
    offset: u64,
    len: u64,
    crc32c: u32,
    /// Of the kind that the object's checksum is of.
    sum: Option<u64>,
    /// The time that the file has, where the part is all of it.
    settled: Option<i128>,
}

/// What the tasks of a run share.
struct Run {
    source: Store,
    folder: Folder,
    /// Until the last task is over, also where another one has failed.
    _lock: Lock,
    manifest: Mutex<Manifest>,
    pool: Arc<Pool>,
    progress: Progress,
    follower: Option<Arc<Follower>>,
    concurrency: usize,
    verify: bool,
    reservation: Option<Arc<Mutex<Reservation>>>,
}

/// Brings in what of the set is not there.
///
/// # Errors
/// All of [`Error`]. What has arrived stays, and counts the next time.
pub async fn hydrate(what: Hydration) -> Result<Done> {
    let list = async || what.selection.of(what.source.list(what.published).await?);
    let before = Manifest::state(&what.folder);
    let mut selected = list().await?;
    let count = |Selected { objects, .. }: &Selected| Done { objects: objects.len(), bytes: bytes(objects), ..Done::default() };
    let mut done = count(&selected);
    if what.dry_run {
        let Selected { mut objects, .. } = selected;
        let mut stays = 0;
        if let Ok(root) = std::fs::File::open(&what.folder)
            && let Some(own) = Own::open(&root, &what.folder)?
            && let Some(known) = Manifest::read(&Arc::new(own))?
        {
            is_same_set(&known, &what)?;
            let is_there = |object: &Object| known.entry(object).is_some_and(|entry| Folder::has(&root, &object.name, entry));
            objects.retain(|object| !is_there(object));
            stays = known.bytes(|name, entry| Folder::has(&root, name, entry));
        }
        (done.fetched_objects, done.fetched_bytes) = (objects.len(), bytes(&objects));
        if let Some(limit) = what.limit.filter(|_| done.fetched_bytes > 0) {
            done.evicted = limit.dry_run(&what.folder, stays.saturating_add(done.fetched_bytes))?;
        }
        return Ok(done);
    }

    let folder = Folder::create(&what.folder)?;
    if folder.mount.is_none() {
        complain(format_args!("gpunvme: {} is on no gpunvme mount: the plain path", what.folder.display()));
    }
    let shown = what.folder.clone();
    let wait = move || complain(format_args!("gpunvme: another process changes the set in {}; waiting", shown.display()));
    let (folder, lock) = tokio::task::spawn_blocking(move || folder.lock(wait).map(|lock| (folder, lock))).await??;
    let leftovers = folder.partials()?;
    if Manifest::state(&what.folder) != before || !leftovers.is_empty() {
        // Another process may have brought, or begun, versions for which this list was too early.
        selected = list().await?;
        done = count(&selected);
    }
    done.direct = folder.mount.is_some();
    let mut manifest = folder.manifest()?;
    describe(&mut manifest, &what)?;

    lock.used().map_err(Error::path(&what.folder, "note that it is used"))?;
    let is_there = |object: &Object| manifest.entry(object).is_some_and(|entry| folder.has_file(&object.name, entry));
    let (there, objects): (Vec<_>, Vec<_>) = selected.objects.into_iter().partition(is_there);
    let Sorted { taken, others, stays } = sort(leftovers, &objects, &selected.others, &folder, &mut manifest)?;
    make_way(&objects, &folder, &mut manifest)?;
    let needed = bytes(&objects);
    let mut reservation = None;
    if let Some(limit) = what.limit.filter(|_| needed > 0) {
        // What is replaced stays until then.
        let most = manifest.bytes(|name, entry| folder.has_file(name, entry)).saturating_add(needed).saturating_add(others);
        let (place, own) = (what.folder.clone(), folder.own().clone());
        let (reserved, evicted) = tokio::task::spawn_blocking(move || limit.reserve(&place, &own, most)).await??;
        (reservation, done.evicted) = (Some(Arc::new(Mutex::new(reserved))), evicted);
    }
    let free = folder.free()?;
    if needed > free.saturating_add(taken) {
        return Err(Error::Space { needed, free });
    }
    let largest = objects.iter().map(|object| object.size).max().unwrap_or(0);
    let pool = Pool::new(folder.mount.clone(), what.memory, what.concurrency, largest, 0);
    let follower = if what.follow { Some(Follower::of_standard_input(pool.count())?) } else { None };
    let run = Arc::new(Run {
        source: what.source,
        folder,
        _lock: lock,
        manifest: Mutex::new(manifest),
        pool,
        progress: Progress::new(needed, what.progress),
        follower,
        concurrency: what.concurrency,
        verify: what.verify,
        reservation,
    });
    there.iter().for_each(|object| {
        run.tell(&Event::There { name: &object.name, size: object.size, modified: modified(object.modified) })
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
    run.manifest().compact(|partial| stays.contains(partial))?;
    run.tell(&Event::Ended {});
    run.progress.finish();
    Ok(done)
}

/// Removes partial files that no run will go on with: those of objects that are another version by
/// now, or gone. What is not asked for this time may be the next time, and goes on then.
fn sort(
    leftovers: Vec<(String, u64)>,
    wanted: &[Object],
    others: &[Object],
    folder: &Folder,
    manifest: &mut Manifest,
) -> Result<Sorted> {
    let mut sorted = Sorted { taken: 0, others: 0, stays: HashSet::new() };
    if leftovers.is_empty() {
        return Ok(sorted);
    }
    let names = |objects: &[Object]| objects.iter().map(partial_name).collect::<HashSet<_>>();
    let (wanted, others) = (names(wanted), names(others));
    for (name, bytes) in leftovers {
        if wanted.contains(&name) {
            sorted.taken += bytes;
        } else if others.contains(&name) {
            sorted.others += bytes;
            sorted.stays.insert(name);
        } else {
            manifest.drop_parts(&name)?;
            folder.remove_partial(&name)?;
        }
    }
    Ok(sorted)
}

/// Sees to it that the manifest is of this set.
fn describe(manifest: &mut Manifest, what: &Hydration) -> Result<()> {
    let source = what.source.url().to_owned();
    let pinned = what.pin || manifest.set.as_ref().is_some_and(|set| set.pinned);
    is_same_set(manifest, what)?;
    match &manifest.set {
        Some(set) if set.pinned == pinned => Ok(()),
        _ => manifest.begin(Set { source, pinned }),
    }
}

fn is_same_set(manifest: &Manifest, what: &Hydration) -> Result<()> {
    match &manifest.set {
        Some(set) if set.source.trim_end_matches('/') != what.source.url() => {
            let asked = what.source.url().to_owned();
            Err(Error::OtherSet { folder: what.folder.clone(), there: set.source.clone(), asked })
        }
        _ => Ok(()),
    }
}

/// Removes files that were objects of the set and whose names are folders by now, as a marker that
/// a console made for a folder; and the other way round, folders that have nothing in them but
/// such files, and whose names are objects by now.
fn make_way(objects: &[Object], folder: &Folder, manifest: &mut Manifest) -> Result<()> {
    let folders = objects.iter().flat_map(|object| object.name.match_indices('/').map(|(at, _)| &object.name[..at]));
    let in_the_way: BTreeMap<_, _> = folders.filter_map(|name| manifest.files.get_key_value(name)).collect();
    let in_the_way: Vec<_> = in_the_way.into_iter().map(|(name, entry)| (name.clone(), entry.clone())).collect();
    for (name, entry) in in_the_way {
        folder.remove(&name, &entry)?;
        manifest.evict(&name)?;
    }
    let gone = folder.remove_folders(objects.iter().map(|object| &*object.name), |name| manifest.files.get(name))?;
    gone.iter().try_for_each(|name| manifest.evict(name))
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

/// Brings one object, in the version that the store has. One whose checksum is wrong is fetched
/// once more.
async fn bring(run: Arc<Run>, mut object: Object, settled: mpsc::Sender<Settled>) -> Result<()> {
    let mut is_wrong = false;
    for _ in 0..=CHANGES {
        let partial = partial_name(&object);
        let brought = run.clone().bring_version(&object, &partial, &settled).await;
        match &brought {
            Ok(true) => return Ok(()),
            Ok(false) | Err(Error::Checksum { .. }) => {
                run.tell(&Event::Dropped { name: &object.name });
                run.discard(&partial)?;
            }
            Err(_) => {}
        }
        match brought {
            Err(error @ Error::Checksum { .. }) if !is_wrong => {
                tracing::warn!(%error, "fetched once more");
                is_wrong = true;
            }
            Err(error) => return Err(error),
            Ok(_) => {
                let new = run.source.again(&object).await?;
                run.reserve(new.size.saturating_sub(object.size)).await?;
                object = new;
            }
        }
    }
    Err(Error::Changing { name: object.name })
}

impl Run {
    fn manifest(&self) -> MutexGuard<'_, Manifest> {
        self.manifest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the program that reads along, if there is one.
    fn tell(&self, event: &Event<'_>) {
        if let Some(follower) = &self.follower {
            follower.tell(event);
        }
    }

    /// Sees to it that so many bytes more keep the quota.
    async fn reserve(&self, more: u64) -> Result<()> {
        match self.reservation.clone().filter(|_| more > 0) {
            Some(reservation) => {
                let raise = move || reservation.lock().unwrap_or_else(PoisonError::into_inner).raise(more).map(drop);
                tokio::task::spawn_blocking(raise).await?
            }
            None => Ok(()),
        }
    }

    fn discard(&self, partial: &str) -> Result<()> {
        self.manifest().drop_parts(partial)?;
        self.folder.remove_partial(partial)
    }

    /// Brings an object, unless it changes meanwhile.
    async fn bring_version(self: Arc<Run>, object: &Object, partial: &str, settled: &mpsc::Sender<Settled>) -> Result<bool> {
        let (data, is_old) = self.folder.partial(partial, object.size, object.size > self.pool.part())?;
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
                    self.tell(&Event::Written(Told { name: &object.name, partial, offset: at, len, size: object.size }));
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
        // What comes whole brings its checksum with it.
        let expected = match object.crc32c {
            _ if !self.verify || object.size == 0 => None,
            Some(crc32c) => Some(Expected::published(crc32c)),
            None if is_single => None,
            None => self.source.checksum(object).await?,
        };
        let kind = expected.as_ref().map(|expected| expected.kind);
        let parts: Vec<_> = if is_single {
            vec![self.clone().bring_part(object, data.clone(), partial, 0..object.size, kind).await?]
        } else {
            let parts = stream::iter(missing).map(|(offset, len)| {
                let (run, object, data, partial) = (self.clone(), object.clone(), data.clone(), partial.to_owned());
                let task = tokio::spawn(async move { run.bring_part(&object, data, &partial, offset..offset + len, kind).await });
                async move { task.await? }
            });
            parts.buffer_unordered(self.concurrency).try_collect().await?
        };
        let Some(mut parts) = parts.into_iter().collect::<Option<Vec<Part>>>() else { return Ok(false) };

        let mut all = known.clone();
        all.extend(parts.iter().map(|part| (part.offset, (part.len, part.crc32c))));
        let sums = all.range(..object.size).map(|(_, &(len, part))| (len, part));
        let whole = sums.reduce(|(before, sum), (len, part)| (before + len, crc32c::crc32c_combine(sum, part, len as usize)));
        let crc32c = whole.map_or(0, |(_, sum)| sum);
        if let Some(expected) = expected {
            parts.sort_by_key(|part| part.offset);
            let sums: Option<Vec<_>> = parts.iter().map(|part| Some((part.sum?, part.len))).collect();
            let found = match (expected.kind, sums.filter(|_| known.is_empty())) {
                (Kind::Crc32c, _) => crc32c.to_be_bytes().into(),
                (kind, sums) => match sums.and_then(|sums| kind.combined(sums.into_iter())) {
                    Some(sum) => sum,
                    None => self.sum(kind, &data, object).await?,
                },
            };
            expected.check(&object.name, &found)?;
        }
        let Object { name, size, version, modified, .. } = object.clone();
        let modified = match parts.first().and_then(|part| part.settled) {
            Some(settled) => settled,
            None => {
                let (run, name) = (self.clone(), name.clone());
                tokio::task::spawn_blocking(move || run.folder.settle(&data, &name, modified)).await??
            }
        };
        let file = Settled { partial: partial.into(), name, entry: Entry { size, version, crc32c, modified } };
        settled.send(file).await.map_err(|_| Error::Stopped)?;
        Ok(true)
    }

    /// Makes files durable and gives them their names, in groups: those that were settled meanwhile
    /// are the next, so that small objects share what that costs. The first that cannot have its
    /// name is the error, once the others have theirs.
    fn name(&self, mut settled: mpsc::Receiver<Settled>) -> Result<()> {
        let (mut group, mut all) = (Vec::new(), Ok(()));
        while settled.blocking_recv_many(&mut group, GROUP) > 0 {
            self.folder.sync(group.iter().map(|file: &Settled| &*file.partial))?;
            let named = group.iter().map(|file| (file.partial.clone(), file.name.clone(), file.entry.clone()));
            self.manifest().name_files(named)?;
            let appeared = self.folder.appear(group.iter().map(|file: &Settled| (&*file.partial, &*file.name)))?;
            let (named, refused): (Vec<_>, Vec<_>) = group.drain(..).zip(appeared).partition(|(_, appeared)| appeared.is_ok());
            all = refused.into_iter().fold(all, |all, (_, refused)| all.and(refused));
            let mut manifest = self.manifest();
            named.iter().for_each(|(file, _)| {
                self.tell(&Event::There { name: &file.name, size: file.entry.size, modified: modified(file.entry.modified) })
            });
            let partials: Vec<_> = named.iter().map(|(file, _)| file.partial.clone()).collect();
            manifest.add_files(named.into_iter().map(|(file, _)| (file.name, file.entry)))?;
            for partial in partials {
                manifest.drop_parts(&partial)?;
            }
        }
        all
    }

    /// Brings a part into the partial file, with its sum of `kind`. The only one settles the file;
    /// any other is durable afterwards, and in the manifest.
    async fn bring_part(
        self: Arc<Run>,
        object: &Object,
        data: Arc<Data>,
        partial: &str,
        range: Range<u64>,
        kind: Option<Kind>,
    ) -> Result<Option<Part>> {
        let (offset, len) = (range.start, range.end - range.start);
        let lease = self.pool.lease().await?.shortened(len as usize);
        let Fetched::Whole { lease, told, crc32c } = self.source.fetch(object, range, lease).await? else { return Ok(None) };
        let (run, path, partial) = (self.clone(), self.folder.path_of(&object.name), partial.to_owned());
        let (name, modified, size) = (object.name.clone(), object.modified, object.size);
        let told = told.filter(|_| self.verify && kind.is_none());
        let part = tokio::task::spawn_blocking(move || {
            match told {
                Some(told) if told.kind == Kind::Crc32c => told.check(&name, &crc32c.to_be_bytes())?,
                Some(told) => {
                    let mut sum = Sum::new(told.kind);
                    sum.add(&lease);
                    told.check(&name, &sum.finish())?;
                }
                None => {}
            }
            let told = Told { name: &name, partial: &partial, offset, len, size };
            let lease = Arc::new(lease);
            let is_lent = run.follower.as_ref().is_some_and(|follower| follower.lend(told, &lease));
            data.write(&lease, offset, &path)?;
            if !is_lent {
                run.tell(&Event::Written(told));
            }
            let sum = kind.filter(|kind| *kind != Kind::Crc32c).and_then(|kind| kind.part(&lease));
            let mut part = Part { offset, len, crc32c, sum, settled: None };
            if len == size {
                part.settled = Some(run.folder.settle(&data, &name, modified)?);
            } else {
                data.file().sync_data().map_err(Error::path(&path, "make it durable"))?;
                run.manifest().add_part(&partial, offset, len, part.crc32c)?;
            }
            Ok::<_, Error>(part)
        })
        .await??;
        self.progress.add(len);
        Ok(Some(part))
    }

    /// The sum of what was written, read again: of kinds that are no sums of parts, and where
    /// parts came in an earlier run.
    async fn sum(self: &Arc<Run>, kind: Kind, data: &Arc<Data>, object: &Object) -> Result<Vec<u8>> {
        let mut sum = Sum::new(kind);
        let mut offset = 0;
        while offset < object.size {
            let len = self.pool.part().min(object.size - offset);
            let mut lease = self.pool.lease().await?.shortened(len as usize);
            let (data, path) = (data.clone(), self.folder.path_of(&object.name));
            sum = tokio::task::spawn_blocking(move || {
                data.read(&mut lease, offset, &path)?;
                sum.add(&lease);
                Ok::<_, Error>(sum)
            })
            .await??;
            offset += len;
        }
        Ok(sum.finish())
    }
}
