//! Housekeeping: the thread that writes back, commits and checkpoints by time, removes what a
//! crash left, and keeps what is in memory within its limits.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::shared::Front;

/// How long written data stays in memory at the most; a sync or a full buffer writes it back
/// before.
const WRITE_BACK: Duration = Duration::from_secs(1);
/// How often the thread looks.
const TICK: Duration = Duration::from_millis(200);
/// Operations at a time that finish what earlier mounts left: as many small files without a name,
/// or parts of a large one.
const FINISH: usize = 64;
/// About how long it goes on with them before it looks at the rest again: what is written and
/// committed by time waits for them.
const FINISH_TIME: Duration = Duration::from_millis(100);

/// The thread that keeps house. Dropping it ends the thread.
pub(super) struct Housekeeping {
    ending: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Housekeeping {
    /// Starts the thread. `commit`: the time between two commits.
    ///
    /// # Errors
    /// If the system has no thread to give.
    pub fn start(front: Arc<Front>, commit: Duration) -> io::Result<Housekeeping> {
        let ending = Arc::new((Mutex::new(false), Condvar::new()));
        let thread = thread::Builder::new().name("housekeeping".into()).spawn({
            let ending = ending.clone();
            move || keep(&front, commit, &ending)
        })?;
        Ok(Housekeeping { ending, thread: Some(thread) })
    }
}

impl Drop for Housekeeping {
    fn drop(&mut self) {
        *self.ending.0.lock() = true;
        self.ending.1.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic there was reported there
        }
    }
}

/// Tells the device of blocks that files gave up, on a thread that may wait: a device may take its
/// time for that.
fn discard_freed(front: &Arc<Front>) {
    if front.fs.volume().has_to_discard() && !front.discarding.swap(true, Ordering::AcqRel) {
        let front = front.clone();
        front.clone().general.run(move || {
            front.fs.volume().discard_freed(|| !front.general.is_ending());
            front.discarding.store(false, Ordering::Release);
        });
    }
}

fn keep(front: &Arc<Front>, commit: Duration, (ending, changed): &(Mutex<bool>, Condvar)) {
    let fs = &front.fs;
    let (mut written, mut committed, mut finished) = (Instant::now(), Instant::now(), false);
    loop {
        {
            let mut ending = ending.lock();
            if !*ending {
                changed.wait_for(&mut ending, TICK);
            }
            if *ending {
                return;
            }
        }
        front.forget_lost();
        // The kernel decides how many inodes it knows; what counts them is taken from the cache.
        fs.volume().give_way(front.lookups.memory());
        if fs.volume().is_read_only() {
            continue;
        }
        fs.volume().look_again();
        // A caller that writes or syncs learns of an error, and a failed commit is logged where it
        // fails: nothing to add here.
        if written.elapsed() >= WRITE_BACK || fs.wants_flush() {
            let _ = fs.volume().look_before_writing();
            let _ = fs.write_back();
            written = Instant::now();
        }
        if committed.elapsed() >= commit {
            let _ = fs.commit();
            let _ = fs.volume().give_back();
            committed = Instant::now();
        } else if fs.volume().wants_commit() {
            let _ = fs.commit();
        }
        discard_freed(front);
        if fs.volume().wants_checkpoint() {
            let _ = fs.volume().checkpoint();
        }
        let until = Instant::now() + FINISH_TIME;
        while !finished && Instant::now() < until && !*ending.lock() {
            // One that cannot be finished is not tried again; the others are the next time.
            let Ok(are_all) = fs.finish_orphans(FINISH) else { break };
            finished = are_all;
            if finished {
                let _ = fs.volume().find_emptied_chunks();
            }
        }
    }
}
