//! The idle FUSE loops: how many of a mount's loops wait for the kernel's requests. They are few,
//! so that they and their processors stay awake.
//!
//! The kernel gives a request to the loop that has waited longest (`fuse_dev_do_read` waits
//! exclusively, first in, first out). With many loops and few clients each loop waits so long
//! between two requests that its processor sleeps, and waking that takes longer than the request
//! itself. So a loop that has served its request stands aside while others wait for the next, and
//! the last of the waiting loops calls one back when it gets a request.
//!
//! It guards that no request is left waiting while a loop stands aside: one is called whenever no
//! loop is known to wait, and all are when one ends, which it does only because the mount has
//! ended.

use std::cell::{Cell, OnceCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};

/// Loops that wait at the most before others stand aside. One is not enough: there are requests
/// that their clients do not wait for, and the next one comes while they are served.
const WAITING: usize = 3;

/// The loops of one mount.
pub(crate) struct IdleLoops {
    /// Loops that wait at the most.
    most: usize,
    /// Loops that wait, of those whose last request is known to be over. (Whether the others wait
    /// is unknown.)
    waiting: AtomicUsize,
    aside: Mutex<Aside>,
    called: Condvar,
}

#[derive(Default)]
struct Aside {
    loops: usize,
    /// Number of loops that are called back.
    calls: usize,
    ended: bool,
}

/// A loop that serves a request, until this is dropped.
pub(crate) struct BusyLoop<'a>(&'a Arc<IdleLoops>);

/// A loop's thread, which ends when its mount has ended.
struct Loop {
    loops: Arc<IdleLoops>,
    /// Whether it is one of those that wait.
    waits: Cell<bool>,
}

thread_local! {
    static LOOP: OnceCell<Loop> = const { OnceCell::new() };
}

impl IdleLoops {
    /// The loops of a mount with so many.
    pub fn new(loops: usize) -> Arc<IdleLoops> {
        Arc::new(IdleLoops {
            most: WAITING.min(loops),
            waiting: AtomicUsize::new(0),
            aside: Mutex::default(),
            called: Condvar::new(),
        })
    }

    /// Notes that this thread, a loop, has a request. The loop drops the result when it is done
    /// with the request; the drop may stand aside for as long as the mount exists.
    pub fn busy(self: &Arc<Self>) -> BusyLoop<'_> {
        self.leave();
        BusyLoop(self)
    }

    /// Notes that this thread, a loop, has a request. It counts as waiting again only after the
    /// drop of a [`BusyLoop`].
    fn leave(self: &Arc<Self>) {
        if self.waits(false) && self.waiting.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.call();
        }
    }

    /// Notes whether this thread is one of the loops that wait. Returns whether it was.
    fn waits(self: &Arc<Self>, waits: bool) -> bool {
        LOOP.with(|this| this.get_or_init(|| Loop { loops: self.clone(), waits: Cell::new(false) }).waits.replace(waits))
    }

    fn call(&self) {
        let mut aside = self.aside.lock();
        if aside.calls < aside.loops {
            aside.calls += 1;
            self.called.notify_one();
        }
    }

    /// Waits until this loop is called.
    fn stand_aside(&self) {
        let mut aside = self.aside.lock();
        aside.loops += 1;
        // The last loop that waited may have looked before this and found no loop to call.
        while !aside.ended && aside.calls == 0 && self.waiting.load(Ordering::SeqCst) > 0 {
            self.called.wait(&mut aside);
        }
        aside.loops -= 1;
        aside.calls = aside.calls.saturating_sub(1);
    }
}

impl Drop for BusyLoop<'_> {
    fn drop(&mut self) {
        if self.0.waiting.load(Ordering::SeqCst) >= self.0.most {
            self.0.stand_aside();
        }
        self.0.waits(true);
        self.0.waiting.fetch_add(1, Ordering::SeqCst);
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        self.loops.aside.lock().ended = true;
        self.loops.called.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread::{self, JoinHandle};
    use std::time::Duration;

    use super::*;

    /// Loops that each serve what comes through a channel of their own: a request is over when the
    /// second message comes.
    struct Threads {
        loops: Vec<(mpsc::Sender<()>, JoinHandle<()>)>,
        done: mpsc::Receiver<usize>,
    }

    impl Threads {
        fn new(count: usize) -> Threads {
            let loops = IdleLoops::new(count);
            let (report, done) = mpsc::channel();
            let loops = (0..count).map(|number| {
                let (sender, receiver) = mpsc::channel::<()>();
                let (loops, report) = (loops.clone(), report.clone());
                let serve = move || {
                    while receiver.recv().is_ok() {
                        let busy = loops.busy();
                        receiver.recv().unwrap();
                        drop(busy);
                        report.send(number).unwrap();
                    }
                };
                (sender, thread::spawn(serve))
            });
            let loops = loops.collect();
            Threads { loops, done }
        }

        fn next(&self) -> Option<usize> {
            self.done.recv_timeout(Duration::from_millis(300)).ok()
        }

        /// Half of a request: its beginning, or its end.
        fn send(&self, number: usize) {
            self.loops[number].0.send(()).unwrap();
        }

        fn all_have_had_one(&self) {
            for number in 0..self.loops.len() {
                self.send(number);
                self.send(number);
            }
            for _ in 0..WAITING {
                assert!(self.next().is_some());
            }
            assert_eq!(self.next(), None, "the others stand aside");
        }
    }

    #[test]
    fn loops_beyond_a_few_stand_aside_until_all_others_are_busy() {
        let threads = Threads::new(8);
        threads.all_have_had_one();
        // A loop that stands aside does not look.
        for number in 0..8 {
            threads.send(number);
        }
        assert!(threads.next().is_some(), "one is called when the last that waited is busy");
    }

    #[test]
    fn a_loop_that_does_not_say_when_it_is_done_does_not_count_as_one_that_waits() {
        let loops = IdleLoops::new(8);
        let barrier = Arc::new(std::sync::Barrier::new(WAITING));
        let at_forgets = |_| {
            let (loops, barrier) = (loops.clone(), barrier.clone());
            thread::spawn(move || {
                drop(loops.busy());
                loops.leave();
                loops.leave();
                // All of them are at it at once, and none ends meanwhile.
                barrier.wait();
                barrier.wait();
            })
        };
        let threads: Vec<_> = (1..WAITING).map(at_forgets).collect();
        drop(loops.busy());
        loops.leave();
        barrier.wait();
        assert_eq!(loops.waiting.load(Ordering::SeqCst), 0);
        // A loop that comes now must not stand aside.
        drop(loops.busy());
        assert_eq!(loops.waiting.load(Ordering::SeqCst), 1);
        barrier.wait();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }

    #[test]
    fn loops_that_stand_aside_end_with_the_mount() {
        let threads = Threads::new(6);
        threads.all_have_had_one();
        let Threads { loops, .. } = threads;
        let (senders, handles): (Vec<_>, Vec<_>) = loops.into_iter().unzip();
        drop(senders);
        for handle in handles {
            handle.join().unwrap();
        }
    }

    #[test]
    fn no_loop_is_left_aside_while_none_waits() {
        // Many threads in and out at once: each has to come to its end.
        let loops = IdleLoops::new(8);
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let loops = loops.clone();
                thread::spawn(move || {
                    for _ in 0..20_000 {
                        drop(loops.busy());
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
    }
}
