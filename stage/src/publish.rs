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
use bytes::Bytes;
use futures_util::stream::{self, StreamExt, TryStreamExt};
use object_store::{MultipartUpload, ObjectStoreExt, PutPayload};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Most parts of an upload, as S3 has it.
const MOST_PARTS: u64 = 10_000;
/// Least bytes of a part, where the memory allows it: S3 takes none below 5 MiB.
const LEAST_PART: u64 = 8 << 20;

/// What is to be done.
#[derive(Debug)]
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
        let buffers = what.concurrency.min((what.memory / LEAST_PART).max(1) as usize);
        let largest = missing.iter().map(|file| file.state.size).max().unwrap_or(0);
        let pool = Pool::new(folder.mount.clone(), what.memory, buffers, largest);
        let run = Arc::new(Run {
            folder,
            destination: what.destination.clone(),
            journal: Mutex::new(journal),
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
    let state = |file: &File| file.metadata().map(|meta| Sent::of(&meta)).map_err(Error::path(&path, "ask what it is"));
    if state(&file)? != found.state {
        return Err(Error::ChangedHere(path.clone()));
    }
    let data = Arc::new(Data::new(OwnedFd::from(file), &path, run.folder.mount.is_some())?);
    let part = run.pool.part();
    let (store, key) = run.destination.object(&found.name)?;
    let failed = || Error::store(&found.name);
    let (crc32c, version) = if size <= part {
        let (bytes, crc32c) = run.part(&data, 0, size, &path).await?;
        let put = store.put(&key, PutPayload::from_bytes(bytes)).await.map_err(failed())?;
        run.progress.add(size);
        (crc32c, put.e_tag)
    } else {
        if size.div_ceil(part) > MOST_PARTS {
            return Err(Error::TooLong { path: path.clone(), most: MOST_PARTS, part });
        }
        let mut upload = store.put_multipart(&key).await.map_err(failed())?;
        match run.parts(&data, size, &path, &found.name, &mut *upload).await {
            Ok(crc32c) if state(data.file())? == found.state => (crc32c, upload.complete().await.map_err(failed())?.e_tag),
            other => {
                // Stores keep, and charge for, the parts of what is neither completed nor aborted.
                let _ = upload.abort().await;
                return Err(other.err().unwrap_or(Error::ChangedHere(path.clone())));
            }
        }
    };
    if state(data.file())? != found.state {
        return Err(Error::ChangedHere(path.clone()));
    }
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

    /// Sends the parts of a file, in their order, several at once, and returns the file's CRC32C.
    async fn parts(&self, data: &Arc<Data>, size: u64, path: &Path, name: &str, upload: &mut dyn MultipartUpload) -> Result<u32> {
        let mut crc32c = 0;
        let mut sending = stream::FuturesUnordered::new();
        let mut offset = 0;
        while offset < size {
            let len = self.pool.part().min(size - offset);
            // A buffer may come free only as these get on.
            let reading = self.part(data, offset, len, path);
            tokio::pin!(reading);
            let (bytes, part_crc32c) = loop {
                tokio::select! {
                    read = &mut reading => break read?,
                    Some(sent) = sending.next() => { let sent: object_store::Result<u64> = sent; self.progress.add(sent.map_err(Error::store(name))?) }
                }
            };
            crc32c = crc32c::crc32c_combine(crc32c, part_crc32c, len as usize);
            let part = upload.put_part(PutPayload::from_bytes(bytes));
            sending.push(async move { part.await.map(|()| len) });
            offset += len;
        }
        while let Some(sent) = sending.next().await {
            self.progress.add(sent.map_err(Error::store(name))?);
        }
        Ok(crc32c)
    }
}
