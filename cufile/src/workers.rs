//! Threads for requests of batches that have to be waited for: of ordinary memory, and of files
//! that gpunvme does not serve. They start when there is something to do, and end with the driver.
//!
//! Locks: `Shared::queue`, for moments.

use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Threads at most.
const THREADS: usize = 8;

type Task = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    threads: usize,
    idle: usize,
    ending: bool,
}

/// The threads.
#[derive(Default)]
pub struct Workers {
    shared: Arc<Shared>,
}

impl Workers {
    /// Has a thread do it; this one, where the system gives no other.
    pub fn run(&self, task: impl FnOnce() + Send + 'static) {
        let mut queue = self.shared.queue.lock();
        queue.tasks.push_back(Box::new(task));
        if queue.idle >= queue.tasks.len() || queue.threads == THREADS {
            self.shared.changed.notify_one();
            return;
        }
        let shared = self.shared.clone();
        match std::thread::Builder::new().name("gpunvme-cufile".into()).spawn(move || work(&shared)) {
            Ok(_) => queue.threads += 1,
            Err(_) if queue.threads > 0 => {}
            Err(_) => {
                let task = queue.tasks.pop_back();
                drop(queue);
                task.into_iter().for_each(|task| task());
            }
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.queue.lock().ending = true;
        self.shared.changed.notify_all();
    }
}

fn work(shared: &Shared) {
    let mut queue = shared.queue.lock();
    loop {
        if let Some(task) = queue.tasks.pop_front() {
            drop(queue);
            // The thread does what comes afterwards.
            if catch_unwind(AssertUnwindSafe(task)).is_err() {
                tracing::error!("a request of a batch panicked: an error of gpunvme");
            }
            queue = shared.queue.lock();
        } else if queue.ending {
            return;
        } else {
            queue.idle += 1;
            shared.changed.wait(&mut queue);
            queue.idle -= 1;
        }
    }
}
