//! The command `publish`: a folder's files become objects, and a set.
//!
//! What makes the set valid goes last: its manifest, and before it the files that readers begin
//! with. An older manifest goes first, so that at no moment one stands beside objects that are not
//! its own.

use crate::error::{Error, Result};
use crate::folder::{Folder, Lock};
use crate::journal::{Journal, Sent};
use crate::memory::{Data, Pool};
use crate::names::{self, OWN, SET_MANIFEST};
use crate::progress::Progress;
use crate::ranks::{self, Part, Rank};
use crate::store::{Published, SetManifest, Store};
use crate::upload::{self, LEAST_PART_TAKEN, MOST_PARTS, Upload};
use bytes::Bytes;
use futures_util::stream::{self, StreamExt, TryStreamExt};
use gpunvme_programs::terminal::complain;
use object_store::{ObjectStoreExt, PutPayload};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Least bytes of a part, where the memory allows it: what S3 takes. A store with many cores is
/// kept busy by many parts rather than by long ones.
const LEAST_PART: u64 = LEAST_PART_TAKEN;

/// What is to be done.
pub struct Publication {
    pub folder: PathBuf,
    pub destination: Store,
    pub rank: Option<Rank>,
    pub keep: Option<usize>,
    pub concurrency: usize,
    pub memory: u64,
    pub progress: bool,
}

/// What was done.
#[derive(Debug, Default, serde::Serialize)]
pub struct Done {
    pub files: usize,
    pub bytes: u64,
    pub sent_files: usize,
    pub sent_bytes: u64,
    pub removed_sets: usize,
    /// How many publish the set, and how many of them are done in this attempt.
    pub ranks: usize,
    pub ranks_there: usize,
    pub direct: bool,
}

/// A file of the folder.
#[derive(Clone, Debug)]
struct Found {
    name: String,
    /// Under which name it is sent: another one if it is held back.
    stored: String,
    state: Sent,
}

struct Run {
    folder: Folder,
    /// Until the last task is over, also where another one has failed.
    _lock: Arc<Lock>,
    destination: Store,
    journal: Mutex<Journal>,
    pool: Arc<Pool>,
    progress: Progress,
    concurrency: usize,
}

/// Sends what the store does not have, and the set's manifest, or this rank's part of it.
///
/// # Errors
/// All of [`Error`]. What was sent counts the next time; the set is not valid until then.
pub async fn publish(what: Publication) -> Result<Done> {
    let mut files = Vec::new();
    walk(&what.folder, "", what.rank.is_some(), &mut files)?;
    files.sort_by(|a, b| a.name.cmp(&b.name));
    if files.is_empty() && what.rank.is_none() {
        return Err(Error::Nothing(what.folder.display().to_string()));
    }
    let folder = Folder::create(&what.folder)?;
    if folder.mount.is_none() {
        complain(format_args!("gpunvme: {} is on no gpunvme mount: the plain path", what.folder.display()));
    }
    let shown = what.folder.clone();
    let wait = move || complain(format_args!("gpunvme: another process has the set in {}; waiting", shown.display()));
    let (folder, lock) = tokio::task::spawn_blocking(move || folder.lock(wait).map(|lock| (folder, Arc::new(lock)))).await??;
    let journal = Journal::open(folder.own(), what.destination.url())?;

    // What the store has, and had from here.
    let there = what.destination.versions().await?;
    let is_sent = |file: &Found| journal.has(&file.stored, &file.state, there.get(&file.stored));
    let (sent, missing): (Vec<_>, Vec<_>) = files.iter().cloned().partition(is_sent);
    let published = |file: &Found| Published { size: file.state.size, crc32c: journal.crc32c(&file.stored) };
    let objects: BTreeMap<_, _> = sent.iter().map(|file| (file.name.clone(), published(file))).collect();
    let sum = |files: &[Found]| files.iter().map(|file| file.state.size).sum::<u64>();
    let mut done = Done { files: files.len(), bytes: sum(&files), direct: folder.mount.is_some(), ..Done::default() };
    (done.sent_files, done.sent_bytes) = (missing.len(), sum(&missing));
    done.ranks = what.rank.as_ref().map_or(1, |rank| rank.share.of);
    done.ranks_there = done.ranks;
    let mut end = End { rank: what.rank, objects, held: Vec::new() };
    end.held.extend(files.iter().filter(|file| file.stored != file.name).map(|file| file.name.clone()));
    if !missing.is_empty() || !end.is_made(&what.destination).await? {
        let buffers = what.concurrency.min((what.memory / LEAST_PART).max(1) as usize);
        let largest = missing.iter().max_by_key(|file| file.state.size);
        let longest = largest.map_or(0, |file| file.state.size);
        let pool = Pool::new(folder.mount.clone(), what.memory, buffers, longest, longest.div_ceil(MOST_PARTS));
        if let Some(file) = largest.filter(|file| file.state.size > pool.part())
            && what.destination.multipart().is_some()
        {
            let path = folder.path_of(&file.name);
            if pool.part() < LEAST_PART_TAKEN {
                return Err(Error::ShortParts { path, least: LEAST_PART_TAKEN });
            }
            if file.state.size.div_ceil(pool.part()) > MOST_PARTS {
                return Err(Error::TooLong { path, most: MOST_PARTS, part: pool.part() });
            }
        }
        end.unmake(&what.destination).await?;
        let journal = Mutex::new(journal);
        give_up(&what.destination, &journal, &missing).await?;
        let run = Arc::new(Run {
            folder,
            _lock: lock.clone(),
            destination: what.destination.clone(),
            journal,
            pool,
            progress: Progress::new(done.sent_bytes, what.progress),
            concurrency: what.concurrency,
        });
        let (first, last): (Vec<_>, Vec<_>) = missing.into_iter().partition(|file| !is_begun_with(&file.name));
        for files in [first, last] {
            let sending = stream::iter(files).map(|file| {
                let task = tokio::spawn(send(run.clone(), file));
                async move { task.await? }
            });
            let sent: Vec<(String, Published)> = sending.buffer_unordered(run.concurrency).try_collect().await?;
            end.objects.extend(sent);
        }
        // Who published another folder there meanwhile has some of its objects replaced.
        if end.rank.is_none() && what.destination.manifest().await?.is_some() {
            what.destination.remove(SET_MANIFEST).await?;
            return Err(Error::OtherPublisher(what.destination.url().into()));
        }
        done.ranks_there = end.make(&what.destination).await?;
        run.progress.finish();
    }
    if let Some(keep) = what.keep.filter(|_| done.ranks_there == done.ranks) {
        done.removed_sets = what.destination.retain(keep).await?;
    }
    Ok(done)
}

/// What makes the set valid: its manifest, or this rank's part of it.
struct End {
    rank: Option<Rank>,
    objects: BTreeMap<String, Published>,
    held: Vec<String>,
}

impl End {
    fn part(&self, rank: &Rank) -> Part {
        rank.part(self.objects.clone(), self.held.clone())
    }

    /// Whether the store has it, and nothing is to be done.
    async fn is_made(&self, store: &Store) -> Result<bool> {
        let Some(manifest) = store.manifest().await? else { return Ok(false) };
        match &self.rank {
            None => Ok(manifest.objects == self.objects),
            Some(rank) => {
                let all_there = self.objects.iter().all(|(name, published)| manifest.objects.get(name) == Some(published));
                Ok(all_there && rank.is_sent(store, &self.part(rank)).await?)
            }
        }
    }

    /// Sees to it that the store has it not while objects change.
    async fn unmake(&self, store: &Store) -> Result<()> {
        if let Some(rank) = &self.rank {
            rank.withdraw(store).await?;
        }
        store.remove(SET_MANIFEST).await
    }

    /// Sends it when all objects are there, and says how many ranks' parts the store has then.
    async fn make(self, store: &Store) -> Result<usize> {
        match &self.rank {
            Some(rank) => rank.send(store, &self.part(rank)).await,
            None => store.put_json(SET_MANIFEST, &SetManifest { objects: self.objects }).await.map(|()| 1),
        }
    }
}

/// Gives up the uploads that were begun, of files that changed or are gone.
async fn give_up(destination: &Store, journal: &Mutex<Journal>, missing: &[Found]) -> Result<()> {
    let is_sent_now = |name: &str, state: &Sent| missing.iter().any(|file| file.stored == name && file.state == *state);
    let over: Vec<_> = {
        let journal = journal.lock().unwrap_or_else(PoisonError::into_inner);
        let over = journal.all_begun().filter(|(name, state)| !is_sent_now(name, state));
        over.map(|(name, _)| name.to_owned()).collect()
    };
    for name in over {
        upload::drop_begun(destination, journal, &name).await?;
    }
    Ok(())
}

/// Whether readers of a set begin with this file: PyTorch's distributed checkpoints, sharded
/// models, and what Hadoop's heirs write.
fn is_begun_with(name: &str) -> bool {
    let last = name.rsplit('/').next().unwrap_or(name);
    matches!(last, ".metadata" | "_SUCCESS" | "latest" | "latest_checkpointed_iteration.txt") || last.ends_with(".index.json")
}

/// The regular files below a folder, by their names in the set; with `holds` those that readers
/// begin with are held back.
fn walk(folder: &Path, prefix: &str, holds: bool, found: &mut Vec<Found>) -> Result<()> {
    for entry in std::fs::read_dir(folder).map_err(Error::path(folder, "read it"))? {
        let entry = entry.map_err(Error::path(folder, "read it"))?;
        let path = entry.path();
        let Some(own_name) = entry.file_name().to_str().map(str::to_owned) else {
            return Err(Error::Name { name: path.display().to_string(), why: "it is not UTF-8" });
        };
        let name = format!("{prefix}{own_name}");
        // Also what `hydrate` keeps for a set below this folder.
        if own_name == OWN || name == SET_MANIFEST {
            continue;
        }
        names::check(&name)?;
        let meta = entry.metadata().map_err(Error::path(&path, "ask what it is"))?;
        if meta.is_dir() {
            walk(&path, &format!("{name}/"), holds, found)?;
        } else if meta.is_file() {
            let stored = if holds && is_begun_with(&name) { ranks::held(&name) } else { name.clone() };
            found.push(Found { name, stored, state: Sent::of(&meta) });
        } else {
            return Err(Error::Name { name, why: "it is no regular file, and stores have nothing else" });
        }
    }
    Ok(())
}

/// Sends a file.
async fn send(run: Arc<Run>, found: Found) -> Result<(String, Published)> {
    let path = run.folder.path_of(&found.name);
    let size = found.state.size;
    let file = run.folder.open(&found.name)?;
    let data = Arc::new(Data::new(OwnedFd::from(file), &path, run.folder.mount.is_some())?);
    run.unchanged(&data, &found, &path)?;
    let (crc32c, version) = if size <= run.pool.part() {
        let (store, key) = run.destination.object(&found.stored)?;
        let (bytes, crc32c) = run.part(&data, 0, size, &path).await?;
        let put = store.put(&key, PutPayload::from_bytes(bytes)).await.map_err(Error::store(&found.name))?;
        run.progress.add(size);
        (crc32c, put.e_tag)
    } else {
        run.upload(&data, &found, &path).await?
    };
    run.unchanged(&data, &found, &path)?;
    let mut journal = run.journal.lock().unwrap_or_else(PoisonError::into_inner);
    journal.add(&found.stored, &found.state, crc32c, run.destination.tag(version))?;
    Ok((found.name.clone(), Published { size, crc32c }))
}

impl Run {
    /// The bytes of a part, and their CRC32C. The buffer goes back when they are sent.
    async fn part(&self, data: &Arc<Data>, offset: u64, len: u64, path: &Path) -> Result<(Bytes, u32)> {
        let mut lease = self.pool.lease().await?.shortened(len as usize);
        let (data, path) = (data.clone(), path.to_owned());
        tokio::task::spawn_blocking(move || {
            data.read(&mut lease, offset, &path)?;
            let crc32c = crc_fast::crc32_iscsi(&lease);
            Ok((Bytes::from_owner(lease), crc32c))
        })
        .await?
    }

    /// Whether the file is still what was found.
    fn unchanged(&self, data: &Data, found: &Found, path: &Path) -> Result<()> {
        let now = data.file().metadata().map_err(Error::path(path, "ask what it is"))?;
        if Sent::of(&now) == found.state { Ok(()) } else { Err(Error::ChangedHere(path.into())) }
    }

    /// Sends a file in parts, and returns its CRC32C and its version. An upload of an earlier run
    /// goes on; one that the store has no more begins anew.
    async fn upload(&self, data: &Arc<Data>, found: &Found, path: &Path) -> Result<(u32, Option<String>)> {
        loop {
            let mut upload = Upload::of(&self.destination, &self.journal, &found.stored, &found.state, self.pool.part()).await?;
            let sent = match self.parts(data, found.state.size, path, &found.name, &mut upload).await {
                Ok(crc32c) => match self.unchanged(data, found, path) {
                    Ok(()) => upload.complete().await.map(|version| (crc32c, version)),
                    Err(error) => Err(error),
                },
                Err(error) => Err(error),
            };
            match sent {
                Ok(sent) => return Ok(sent),
                Err(error) if upload.failed(&self.destination, &self.journal, &error).await? => {
                    tracing::warn!(%error, "the upload begins anew");
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends the parts of a file that the store does not have, in their order, several at once, and
    /// returns the file's CRC32C.
    async fn parts(&self, data: &Arc<Data>, size: u64, path: &Path, name: &str, upload: &mut Upload) -> Result<u32> {
        let mut crc32c = 0;
        let mut sending = stream::FuturesUnordered::new();
        for (index, offset) in (0..size).step_by(upload.part() as usize).enumerate() {
            let len = upload.part().min(size - offset);
            if let Some(part) = upload.has(index) {
                crc32c = crc32c::crc32c_combine(crc32c, part, len as usize);
                self.progress.add(len);
                continue;
            }
            // A buffer may come free only as these get on.
            let reading = self.part(data, offset, len, path);
            tokio::pin!(reading);
            let (bytes, part) = loop {
                tokio::select! {
                    read = &mut reading => break read?,
                    Some(sent) = sending.next() => self.sent(sent, name, upload)?,
                }
            };
            crc32c = crc32c::crc32c_combine(crc32c, part, len as usize);
            let put = upload.put(index, PutPayload::from_bytes(bytes));
            sending.push(async move { put.await.map(|tag| SentPart { index, tag, crc32c: part, len }) });
        }
        while let Some(sent) = sending.next().await {
            self.sent(sent, name, upload)?;
        }
        Ok(crc32c)
    }

    fn sent(&self, sent: object_store::Result<SentPart>, name: &str, upload: &mut Upload) -> Result<()> {
        let SentPart { index, tag, crc32c, len } = sent.map_err(Error::store(name))?;
        self.progress.add(len);
        upload.sent(&self.journal, index, tag, crc32c)
    }
}

/// A part that the store has, and what it calls it.
struct SentPart {
    index: usize,
    tag: String,
    crc32c: u32,
    len: u64,
}
