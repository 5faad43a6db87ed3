//! Mounts that are read at the same time, each by a thread of its own: one that does not answer
//! holds up no other, and no more than its thread.

use super::Reading;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};
use std::thread;
use std::time::{Duration, Instant};

/// How long a mount may take to answer.
const LIMIT: Duration = Duration::from_secs(2);
/// Questions to one mount that may wait for others.
const WAITING: usize = 64;

/// What reads one mount, for as long as the process lives.
pub struct Reader {
    mount: PathBuf,
    questions: SyncSender<Sender<gpunvme::Result<Reading>>>,
}

impl Reader {
    /// Of each of these mounts.
    pub fn start(mounts: &[PathBuf]) -> std::io::Result<Vec<Reader>> {
        mounts.iter().map(|mount| Reader::of(mount)).collect()
    }

    fn of(mount: &Path) -> std::io::Result<Reader> {
        let (questions, asked) = mpsc::sync_channel::<Sender<_>>(WAITING);
        let path = mount.to_owned();
        thread::Builder::new().spawn(move || {
            // A caller that does not wait any more need not be told.
            asked.iter().for_each(|who| drop(who.send(Reading::of(&path))));
        })?;
        Ok(Reader { mount: mount.to_owned(), questions })
    }

    fn ask(&self) -> Receiver<gpunvme::Result<Reading>> {
        let (sender, answer) = mpsc::channel();
        // Where too many wait, this one is told by the end of the channel.
        let _ = self.questions.try_send(sender);
        answer
    }
}

/// What each mount answers, or why it does not.
pub fn read(readers: &[Reader]) -> Vec<(&Path, Result<Reading, String>)> {
    let until = Instant::now() + LIMIT;
    let asked: Vec<_> = readers.iter().map(|reader| (reader.mount.as_path(), reader.ask())).collect();
    let answered = |(mount, answer): (_, Receiver<gpunvme::Result<Reading>>)| {
        let reading = match answer.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(reading) => reading.map_err(|error| error.to_string()),
            Err(_) => Err(format!("{}: the mount does not answer", Path::display(mount))),
        };
        (mount, reading)
    };
    asked.into_iter().map(answered).collect()
}
