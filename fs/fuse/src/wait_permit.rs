//! Loops that wait for something else than the kernel's next request, such as a device. What a
//! request waits for on its own loop wakes the client when it comes; on another thread it wakes
//! that first. At most half of a mount's loops may, so that others always serve.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The permits of one mount.
pub(crate) struct Permits {
    most: usize,
    given: AtomicUsize,
}

/// Lets the calling thread wait, until it is dropped.
pub struct WaitPermit {
    permits: Arc<Permits>,
    /// It is the thread's.
    _thread: PhantomData<*const ()>,
}

thread_local! {
    /// Of the mount of which this thread is a loop.
    static PERMITS: RefCell<Option<Arc<Permits>>> = const { RefCell::new(None) };
}

impl Permits {
    /// Of a mount with so many loops.
    pub fn new(loops: usize) -> Arc<Permits> {
        Arc::new(Permits { most: loops / 2, given: AtomicUsize::new(0) })
    }

    /// Notes that the calling thread is a loop.
    pub fn enter(self: &Arc<Self>) {
        PERMITS.set(Some(self.clone()));
    }
}

/// Whether the calling thread may wait for longer than moments. None where it is no loop by
/// `/dev/fuse`, and where too many loops wait already: then another thread has to wait.
pub fn may_wait() -> Option<WaitPermit> {
    PERMITS.with_borrow(|permits| {
        let permits = permits.as_ref()?;
        if permits.given.fetch_add(1, Ordering::Relaxed) >= permits.most {
            permits.given.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(WaitPermit { permits: permits.clone(), _thread: PhantomData })
    })
}

impl Drop for WaitPermit {
    fn drop(&mut self) {
        self.permits.given.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_loops_may_wait_and_other_threads_never() {
        assert!(may_wait().is_none());
        let permits = Permits::new(5);
        permits.enter();
        let first = may_wait();
        let second = may_wait();
        assert!(first.is_some() && second.is_some());
        assert!(may_wait().is_none());
        std::thread::spawn(|| assert!(may_wait().is_none())).join().unwrap();
        drop(first);
        assert!(may_wait().is_some());
    }

    #[test]
    fn the_only_loop_never_waits() {
        Permits::new(1).enter();
        assert!(may_wait().is_none());
    }
}
