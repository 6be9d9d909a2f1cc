//! Work that must not hold up a run for longer than it may.

use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

/// What `body` gives on a thread of its own; none if it takes longer than `limit`, and then it is left alone.
pub(super) fn within<T: Send + 'static>(
    limit: Duration,
    body: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    on_thread(body).recv_timeout(limit).ok()
}

/// What `body` gives, from a thread of its own.
pub(super) fn on_thread<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(body()));
    receiver
}
