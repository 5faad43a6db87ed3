//! Measures what an attack costs others: the daemon's memory, threads and descriptors, and how long
//! a victim's calls take.

use std::fs;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::process::Pid;

/// What a process has at a moment, from `/proc`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figures {
    /// Bytes of anonymous memory that is resident.
    pub anonymous: u64,
    /// Bytes of shared memory that is resident in its mappings: of registered buffers too, which
    /// others may have paid for.
    pub shared: u64,
    /// Threads.
    pub threads: usize,
    /// Descriptors.
    pub descriptors: usize,
}

impl Figures {
    /// Those of a process.
    ///
    /// # Panics
    /// If it is gone.
    pub fn of(process: Pid) -> Figures {
        let folder = format!("/proc/{}", process.as_raw_nonzero());
        let status = fs::read_to_string(format!("{folder}/status")).expect("a living process");
        let figure = |name: &str| -> u64 {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a line of its status");
            line.split_whitespace().next().and_then(|number| number.parse().ok()).expect("a number")
        };
        Figures {
            anonymous: figure("RssAnon:") << 10,
            shared: figure("RssShmem:") << 10,
            threads: figure("Threads:") as usize,
            descriptors: fs::read_dir(format!("{folder}/fd")).expect("a living process").count(),
        }
    }
}

/// A call that a victim makes again and again, on a thread of its own.
#[derive(Debug)]
pub struct Victim {
    calls: Arc<Mutex<Calls>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Calls {
    /// When the one in flight began.
    since: Instant,
    longest: Duration,
    count: u64,
    end: bool,
}

impl Victim {
    /// Makes this call until [`Victim::end`], with a millisecond between two.
    pub fn begin(mut call: impl FnMut() + Send + 'static) -> Victim {
        let calls = Arc::new(Mutex::new(Calls { since: Instant::now(), longest: Duration::ZERO, count: 0, end: false }));
        let thread = std::thread::spawn({
            let calls = calls.clone();
            move || loop {
                {
                    let mut calls = calls.lock();
                    if calls.end {
                        return;
                    }
                    calls.since = Instant::now();
                }
                call();
                {
                    let mut calls = calls.lock();
                    calls.longest = calls.longest.max(calls.since.elapsed());
                    calls.count += 1;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        Victim { calls, thread: Some(thread) }
    }

    /// How many calls ended so far.
    pub fn count(&self) -> u64 {
        self.calls.lock().count
    }

    /// How long the longest call took so far, the one in flight included.
    ///
    /// # Panics
    /// If a call failed.
    pub fn longest(&self) -> Duration {
        assert!(self.thread.as_ref().is_some_and(|thread| !thread.is_finished()), "a victim's call failed");
        let calls = self.calls.lock();
        calls.longest.max(calls.since.elapsed())
    }

    /// Ends it, and returns how long the longest call took. It fails where a call failed.
    pub fn end(mut self) -> Duration {
        self.calls.lock().end = true;
        self.thread.take().expect("it was not ended").join().expect("the victim's calls succeed");
        self.calls.lock().longest
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        // A test that fails does not wait for it.
        self.calls.lock().end = true;
    }
}
