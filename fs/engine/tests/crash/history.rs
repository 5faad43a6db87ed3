//! History of a volume: what happened, in order, and what was promised. It judges every state that
//! a power cut leaves.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpunvme_engine::Filesystem;
use gpunvme_layout::Timestamp;

use super::view::View;
use crate::common::assert_sound;

const SECTOR: usize = 512;

/// Content of a file, from a moment on.
pub struct Version {
    /// Events of the device's log when the operation that made it began.
    pub began: usize,
    /// The operation, for the message of a failure.
    what: String,
    /// Content.
    pub content: Arc<Vec<u8>>,
}

/// Everything but content, from a moment on.
struct Moment {
    began: usize,
    view: View,
    hash: u64,
}

/// Something that must survive every cut behind `position` events of the log.
struct Promise {
    position: usize,
    /// The moment that the volume must not fall behind.
    moment: usize,
    /// The versions that files must not fall behind.
    files: Vec<(u64, usize)>,
}

/// All that happened below one directory since it was made.
#[derive(Default)]
pub struct History {
    pub root: u64,
    moments: Vec<Moment>,
    pub files: BTreeMap<u64, Vec<Version>>,
    /// Times that were set, and the moment; none where a write has changed it since.
    times: BTreeMap<u64, Vec<(usize, Option<Timestamp>)>>,
    promises: Vec<Promise>,
    /// A name that was replaced: from that moment on, that file must not fall behind that version.
    replaced: Vec<(usize, u64, usize)>,
}

/// A claim: the state that a promise about to be made has to cover.
pub struct Claim {
    moment: usize,
    files: Vec<(u64, usize)>,
}

impl History {
    /// Notes how things are after an operation that began at `began`.
    pub fn moment(&mut self, began: usize, view: View) {
        let hash = view.hash();
        self.moments.push(Moment { began, view, hash });
    }

    /// How things are.
    pub fn now(&self) -> &View {
        &self.moments.last().expect("it begins with one").view
    }

    /// Notes a file that was created.
    pub fn created(&mut self, ino: u64, began: usize) {
        self.files.insert(ino, vec![Version { began, what: "create".into(), content: Arc::default() }]);
    }

    /// Notes that a file was changed by an operation that began at `began`.
    pub fn changed(&mut self, ino: u64, began: usize, what: String, change: impl FnOnce(&mut Vec<u8>)) {
        let versions = self.files.get_mut(&ino).expect("it was created");
        let mut content = versions.last().expect("it was created").content.to_vec();
        change(&mut content);
        versions.push(Version { began, what, content: Arc::new(content) });
        self.time(ino, None);
    }

    /// Gives up on a file: an operation on it was done by half, as it may where there is no space.
    pub fn forget(&mut self, ino: u64) {
        self.files.remove(&ino);
    }

    /// Notes that a file's time was set, or changed by writing.
    pub fn time(&mut self, ino: u64, time: Option<Timestamp>) {
        self.times.entry(ino).or_default().push((self.moments.len() - 1, time));
    }

    /// The latest content of a file.
    pub fn content(&self, ino: u64) -> &Arc<Vec<u8>> {
        &self.files[&ino].last().expect("it was created").content
    }

    /// The versions of a file, for the message of a failure: number, events of the log before it,
    /// the operation that made it, size in bytes.
    pub fn story(&self, ino: u64) -> String {
        let versions = self.files[&ino].iter().enumerate();
        versions.map(|(number, v)| format!("\n{number}: at {}: {}: {}", v.began, v.what, v.content.len())).collect()
    }

    /// Notes that a file has taken another's name, at the moment that was noted last.
    pub fn replaced(&mut self, ino: u64) {
        if let Some(versions) = self.files.get(&ino) {
            self.replaced.push((self.moments.len() - 1, ino, versions.len() - 1));
        }
    }

    /// A claim to everything done so far, and to the content of these files.
    pub fn claim(&self, files: impl IntoIterator<Item = u64>) -> Claim {
        let files = files.into_iter().filter_map(|ino| Some((ino, self.files.get(&ino)?.len() - 1)));
        Claim { moment: self.moments.len() - 1, files: files.collect() }
    }

    /// Notes that it was promised.
    pub fn promise(&mut self, claim: Claim, position: usize) {
        self.promises.push(Promise { position, moment: claim.moment, files: claim.files });
    }

    /// Holds a volume that was opened after a cut behind `cut` events to what was promised.
    pub fn judge(&self, fs: &Arc<Filesystem>, cut: usize, what: &str) {
        assert_sound(fs, what);
        let promises = || self.promises.iter().filter(|p| p.position <= cut);
        let first = promises().map(|p| p.moment).max().expect("the first one holds from the start");
        let last = self.moments.iter().rposition(|m| m.began < cut).unwrap_or(first).max(first);
        let view = View::of(fs, self.root);
        let hash = view.hash();
        let Some(at) = (first..=last).find(|at| self.moments[*at].hash == hash) else {
            panic!("{what}: of no moment from {first} to {last}: {view:#?}\nfirst: {:#?}", self.moments[first].view);
        };
        let mut floors: BTreeMap<u64, usize> = BTreeMap::new();
        let replaced = self.replaced.iter().filter(|r| r.0 <= at).map(|r| (r.1, r.2));
        for (ino, version) in promises().flat_map(|p| p.files.iter().copied()).chain(replaced) {
            let floor = floors.entry(ino).or_default();
            *floor = (*floor).max(version);
        }
        for ino in view.files() {
            let floor = floors.get(&ino).copied().unwrap_or(0);
            let Some(versions) = self.files.get(&ino).map(|versions| &versions[floor..]) else { continue };
            let possible: Vec<&[u8]> =
                versions.iter().enumerate().filter(|(i, v)| *i == 0 || v.began < cut).map(|(_, v)| &v.content[..]).collect();
            let size = fs.wait(|| fs.attributes(ino)).expect("it was listed").inode.size;
            let found = fs.read(ino, 0, size as usize).expect("a sound volume can be read");
            if let Err(wrong) = judge_content(&found, &possible) {
                panic!("{what}: inode {ino}: {wrong}; promised was version {floor} of {}", self.story(ino));
            }
            if let Some(time) = self.time_at(ino, first, last) {
                let found = fs.wait(|| fs.attributes(ino)).expect("it was listed").inode.mtime;
                assert_eq!(found, time, "{what}: inode {ino}: time of modification");
            }
        }
        // Inodes that had no name any more are gone, and life goes on.
        while !fs.finish_orphans(usize::MAX).expect("nothing fails") {}
        let all = View::of(fs, crate::common::ROOT).nodes.len() as u64;
        assert_eq!(fs.usage().inodes, all, "{what}: inodes without a name");
        fs.close().expect("a recovered volume can be closed");
    }

    /// The time of a file that was set before the moment `first` and not touched up to `last`.
    fn time_at(&self, ino: u64, first: usize, last: usize) -> Option<Timestamp> {
        let times = self.times.get(&ino)?;
        if times.iter().any(|(moment, _)| *moment >= first && *moment <= last) {
            return None;
        }
        times.iter().rfind(|(moment, _)| *moment < first)?.1
    }
}

/// Each sector has to be that of some possible content, or zeros where it may be new; if there is
/// one possible content, it has to be that.
pub fn judge_content(found: &[u8], possible: &[&[u8]]) -> Result<(), String> {
    let sizes = possible.iter().map(|p| p.len());
    let (min, max) = (sizes.clone().min().unwrap_or(0), sizes.max().unwrap_or(0));
    if found.len() < min || found.len() > max {
        return Err(format!("{} bytes, should have {min} to {max}", found.len()));
    }
    for (at, sector) in (0..).step_by(SECTOR).zip(found.chunks(SECTOR)) {
        if possible.iter().any(|content| holds(content, at, sector)) {
            continue;
        }
        let is_new = possible.windows(2).any(|w| !holds(w[0], at, &zero_extended(w[1], at, sector.len())));
        if !is_new || sector.iter().any(|byte| *byte != 0) {
            let head = &sector[..sector.len().min(16)];
            return Err(format!("at {at} of {} bytes ({} possibilities): {head:?} ...", found.len(), possible.len()));
        }
    }
    Ok(())
}

/// Whether a file with this content has these bytes at `at`; beyond its end it has zeros.
fn holds(content: &[u8], at: usize, bytes: &[u8]) -> bool {
    let part = &content[at.min(content.len())..(at + bytes.len()).min(content.len())];
    bytes[..part.len()] == *part && bytes[part.len()..].iter().all(|byte| *byte == 0)
}

fn zero_extended(content: &[u8], at: usize, len: usize) -> Vec<u8> {
    let mut bytes = content[at.min(content.len())..(at + len).min(content.len())].to_vec();
    bytes.resize(len, 0);
    bytes
}
