//! Questions that may never be answered: to a filesystem whose daemon was stopped, or whose server
//! is out of reach.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// What `ask` returns; `None` where that takes longer than `limit`. Then its thread is left to
/// itself. Until it gets its answer it uses the mount that it asks, as any call does, by a path or
/// by a descriptor: `umount` there is `EBUSY`. `umount -l` is not.
pub fn within<T: Send + 'static>(limit: Duration, ask: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (sender, answer) = mpsc::sync_channel(1);
    // After the limit no thread is there to be told.
    let ask = move || drop(sender.send(ask()));
    thread::Builder::new().name("question".to_owned()).spawn(ask).ok()?;
    answer.recv_timeout(limit).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_not_waited_for_longer_than_said() {
        assert_eq!(within(Duration::from_secs(60), || 7), Some(7));
        let (_never, question) = mpsc::channel::<()>();
        assert_eq!(within(Duration::from_millis(1), move || question.recv()), None);
    }
}
