//! Calls during which signals come whose handlers do not have them go on (no `SA_RESTART`), as
//! those of Python.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Calls something on this thread, which gets a signal every few microseconds meanwhile.
pub fn interrupted<T>(call: impl FnOnce() -> T) -> T {
    extern "C" fn ignore(_: libc::c_int) {}
    // SAFETY: zeros are a valid action, and the handler does nothing.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = ignore as *const () as usize;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()), 0);
    }
    // SAFETY: it takes nothing.
    let thread = unsafe { libc::pthread_self() };
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Acquire) {
                // SAFETY: the thread waits for this one at the scope's end.
                assert_eq!(unsafe { libc::pthread_kill(thread, libc::SIGUSR1) }, 0);
                std::thread::sleep(Duration::from_micros(5));
            }
        });
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call));
        is_over.store(true, Ordering::Release);
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
