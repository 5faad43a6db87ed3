//! Threads that serve requests of host memory which their callers do not wait for.

use parking_lot::Mutex;
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

/// How many there are for a mount.
const WORKERS: usize = 4;

type Job = Box<dyn FnOnce() + Send>;

/// Threads that do what they are given, started with the first of it.
#[derive(Default)]
pub struct Workers {
    jobs: Mutex<Option<Sender<Job>>>,
}

impl Workers {
    /// Has a thread do something.
    ///
    /// # Errors
    /// `EAGAIN` where there can be no thread.
    pub fn run(&self, job: Job) -> std::result::Result<(), Errno> {
        let mut jobs = self.jobs.lock();
        if jobs.is_none() {
            let (sender, receiver) = channel::<Job>();
            let receiver = Arc::new(Mutex::new(receiver));
            for _ in 0..WORKERS {
                let receiver = receiver.clone();
                let thread = std::thread::Builder::new().name("gpunvme-host".into());
                thread.spawn(move || serve(&receiver)).map_err(|_| Errno::AGAIN)?;
            }
            *jobs = Some(sender);
        }
        let sender = jobs.as_ref().expect("it was just made");
        sender.send(job).map_err(|_| Errno::AGAIN)
    }
}

fn serve(jobs: &Mutex<Receiver<Job>>) {
    loop {
        let job = jobs.lock().recv();
        match job {
            Ok(job) => job(),
            Err(_) => return,
        }
    }
}
