//! The command `publish`: a folder's files become objects, and a set.
//!
//! What makes the set valid goes last: its manifest, and before it the files that readers begin
//! with. An older manifest goes first, so that at no moment one stands beside objects that are not
//! its own.

use crate::error::{Error, Result};
use crate::folder::Folder;
use crate::journal::{Journal, Sent};
use crate::memory::{Data, Pool};
use crate::names::{self, OWN, SET_MANIFEST};
use crate::progress::Progress;
use crate::store::{Published, SetManifest, Store};
use crate::upload::{self, MOST_PARTS, Upload};
use bytes::Bytes;
use futures_util::stream::{self, StreamExt, TryStreamExt};
use object_store::{ObjectStoreExt, PutPayload};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Least bytes of a part, where the memory allows it: S3 takes none below 5 MiB.
const LEAST_PART: u64 = 8 << 20;

/// What is to be done.
pub struct Publication {
    pub folder: PathBuf,
    pub destination: Store,
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
    pub direct: bool,
}

/// A file of the folder.
#[derive(Clone, Debug)]
struct Found {
    name: String,
    state: Sent,
}

struct Run {
    folder: Folder,
    destination: Store,
    journal: Mutex<Journal>,
    pool: Arc<Pool>,
    progress: Progress,
    concurrency: usize,
}

/// Sends what the store does not have, and the set's manifest.
///
/// # Errors
/// All of [`Error`]. What was sent counts the next time; the set is not valid until then.
pub async fn publish(what: Publication) -> Result<Done> {
    let mut files = Vec::new();
    walk(&what.folder, "", &mut files)?;
    files.sort_by(|a, b| a.name.cmp(&b.name));
    if files.is_empty() {
        return Err(Error::Nothing(what.folder.display().to_string()));
    }
    let folder = Folder::create(&what.folder)?;
    if folder.mount.is_none() {
        eprintln!("gpunvme: {} is on no gpunvme mount: the plain path", what.folder.display());
    }
    let shown = what.folder.clone();
    let wait = move || eprintln!("gpunvme: another process has the set in {}; waiting", shown.display());
    let (folder, _lock) = tokio::task::spawn_blocking(move || folder.lock(wait).map(|lock| (folder, lock))).await??;
    let journal = Journal::open(&what.folder.join(OWN).join("published"), what.destination.url())?;

    // What the store has, and had from here.
    let there = what.destination.versions().await?;
    let is_sent = |file: &Found| journal.has(&file.name, &file.state, there.get(&file.name));
    let (sent, missing): (Vec<_>, Vec<_>) = files.iter().cloned().partition(is_sent);
    let mut manifest = SetManifest::default();
    for file in &sent {
        manifest.objects.insert(file.name.clone(), Published { size: file.state.size, crc32c: journal.crc32c(&file.name) });
    }
    let sum = |files: &[Found]| files.iter().map(|file| file.state.size).sum::<u64>();
    let mut done = Done { files: files.len(), bytes: sum(&files), direct: folder.mount.is_some(), ..Done::default() };
    (done.sent_files, done.sent_bytes) = (missing.len(), sum(&missing));
    let (store, key) = what.destination.object(SET_MANIFEST)?;
    let is_valid = missing.is_empty() && what.destination.manifest().await?.as_ref() == Some(&manifest);
    if !is_valid {
        match store.delete(&key).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => {}
            Err(source) => return Err(Error::Store { name: SET_MANIFEST.into(), source }),
        }
        // Of files that changed, or are gone.
        let is_sent_now = |name: &str, state: &Sent| missing.iter().any(|file| file.name == name && file.state == *state);
        let journal = Mutex::new(journal);
        let over: Vec<_> = journal
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .all_begun()
            .filter(|(name, state)| !is_sent_now(name, state))
            .map(|(name, _)| name.to_owned())
            .collect();
        for name in over {
            upload::drop_begun(&what.destination, &journal, &name).await?;
        }
        let buffers = what.concurrency.min((what.memory / LEAST_PART).max(1) as usize);
        let largest = missing.iter().map(|file| file.state.size).max().unwrap_or(0);
        let pool = Pool::new(folder.mount.clone(), what.memory, buffers, largest);
        let run = Arc::new(Run {
            folder,
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
            manifest.objects.extend(sent);
        }
        let text = serde_json::to_vec(&manifest).expect("names and numbers have a form in JSON");
        store.put(&key, text.into()).await.map_err(Error::store(SET_MANIFEST))?;
        run.progress.finish();
    }
    if let Some(keep) = what.keep {
        done.removed_sets = what.destination.retain(keep).await?;
    }
    Ok(done)
}

/// Whether readers of a set begin with this file: PyTorch's distributed checkpoints, sharded
/// models, and what Hadoop's heirs write.
fn is_begun_with(name: &str) -> bool {
    let last = name.rsplit('/').next().unwrap_or(name);
    matches!(last, ".metadata" | "_SUCCESS" | "latest" | "latest_checkpointed_iteration.txt") || last.ends_with(".index.json")
}

/// The regular files below a folder, by their names in the set.
fn walk(folder: &Path, prefix: &str, found: &mut Vec<Found>) -> Result<()> {
    for entry in std::fs::read_dir(folder).map_err(Error::path(folder, "read it"))? {
        let entry = entry.map_err(Error::path(folder, "read it"))?;
        let path = entry.path();
        let Some(own_name) = entry.file_name().to_str().map(str::to_owned) else {
            return Err(Error::Name { name: path.display().to_string(), why: "it is not UTF-8" });
        };
        let name = format!("{prefix}{own_name}");
        if name == OWN || name == SET_MANIFEST {
            continue;
        }
        names::check(&name)?;
        let meta = entry.metadata().map_err(Error::path(&path, "ask what it is"))?;
        if meta.is_dir() {
            walk(&path, &format!("{name}/"), found)?;
        } else if meta.is_file() {
            found.push(Found { name, state: Sent::of(&meta) });
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
    let file = File::open(&path).map_err(Error::path(&path, "open it"))?;
    let data = Arc::new(Data::new(OwnedFd::from(file), &path, run.folder.mount.is_some())?);
    run.unchanged(&data, &found, &path)?;
    let (crc32c, version) = if size <= run.pool.part() {
        let (store, key) = run.destination.object(&found.name)?;
        let (bytes, crc32c) = run.part(&data, 0, size, &path).await?;
        let put = store.put(&key, PutPayload::from_bytes(bytes)).await.map_err(Error::store(&found.name))?;
        run.progress.add(size);
        (crc32c, put.e_tag)
    } else if size.div_ceil(run.pool.part()) > MOST_PARTS {
        return Err(Error::TooLong { path, most: MOST_PARTS, part: run.pool.part() });
    } else {
        run.upload(&data, &found, &path).await?
    };
    run.unchanged(&data, &found, &path)?;
    let mut journal = run.journal.lock().unwrap_or_else(PoisonError::into_inner);
    journal.add(&found.name, &found.state, crc32c, version)?;
    Ok((found.name.clone(), Published { size, crc32c }))
}

impl Run {
    /// The bytes of a part, and their CRC32C. The buffer goes back when they are sent.
    async fn part(&self, data: &Arc<Data>, offset: u64, len: u64, path: &Path) -> Result<(Bytes, u32)> {
        let mut lease = self.pool.lease().await?.shortened(len as usize);
        let (data, path) = (data.clone(), path.to_owned());
        tokio::task::spawn_blocking(move || {
            data.read(&mut lease, offset, &path)?;
            let crc32c = crc32c::crc32c(&lease);
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
            let mut upload = Upload::of(&self.destination, &self.journal, &found.name, &found.state, self.pool.part()).await?;
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
