//! Buffers that a thread keeps from one call of a kernel to the next.
//!
//! [`scratch_bytes`] counts them. Idle buffers are freed after a while, and all at once when memory runs short. A thread that finds its buffer in another's hands makes a new one.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::thread::LocalKey;

use crate::held::Held;

/// Buffers that no call used for so long go back, in seconds.
const IDLE_SECS: u64 = 30;

/// Bytes of all buffers.
static BYTES: AtomicUsize = AtomicUsize::new(0);
static WINDOW_START_SECS: AtomicU64 = AtomicU64::new(0);
static ALL: Mutex<Vec<Weak<dyn Release + Send + Sync>>> = Mutex::new(Vec::new());

/// A thread's buffer, for a variable of a thread.
pub(crate) struct Scratch<T: Held>(Arc<Slot<T>>);

#[derive(Default)]
struct Slot<T> {
    value: Mutex<T>,
    bytes: AtomicUsize,
    /// Whether a call used it since the window began.
    is_used: AtomicBool,
}

trait Release {
    /// Frees the buffer, unless a call uses it now. Returns how many bytes it was.
    fn release(&self) -> usize;
    /// Starts a window. Whether a call used the buffer in the one before.
    fn start_window(&self) -> bool;
}

impl<T: Held> Default for Scratch<T> {
    fn default() -> Self {
        let slot = Arc::<Slot<T>>::default();
        let weak: Weak<Slot<T>> = Arc::downgrade(&slot);
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|other| other.strong_count() > 0);
        all.push(weak);
        Self(slot)
    }
}

impl<T: Held> Drop for Scratch<T> {
    fn drop(&mut self) {
        self.0.release();
    }
}

impl<T: Held> Slot<T> {
    fn with<R>(&self, call: impl FnOnce(&mut T) -> R) -> R {
        let mut own = self.lock();
        let mut other = None;
        // one place for the call, so that a kernel is compiled into it once
        let value = match own.as_deref_mut() {
            Some(value) => value,
            None => other.get_or_insert_with(T::default),
        };
        let result = call(value);
        if let Some(value) = own {
            self.is_used.store(true, Ordering::Relaxed);
            self.count(value.bytes());
        }
        result
    }

    /// None if a call uses the buffer now.
    #[inline]
    fn lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.value.try_lock() {
            Ok(value) => Some(value),
            Err(TryLockError::Poisoned(value)) => Some(value.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The buffer has so many bytes now.
    #[inline]
    fn count(&self, bytes: usize) {
        let before = self.bytes.load(Ordering::Relaxed);
        if bytes != before {
            self.bytes.store(bytes, Ordering::Relaxed);
            BYTES.fetch_add(bytes.wrapping_sub(before), Ordering::Relaxed);
        }
    }
}

impl<T: Held> Release for Slot<T> {
    fn release(&self) -> usize {
        let Some(mut value) = self.lock() else { return 0 };
        *value = T::default();
        let bytes = self.bytes.load(Ordering::Relaxed);
        self.count(0);
        bytes
    }

    fn start_window(&self) -> bool {
        self.is_used.swap(false, Ordering::Relaxed)
    }
}

/// The use of a thread's buffer, by the name of a `RefCell`'s.
pub(crate) trait WithScratch<T> {
    /// Calls `call` with this thread's buffer, or with an empty one if it is in use.
    fn with_borrow_mut<R>(&'static self, call: impl FnOnce(&mut T) -> R) -> R;
}

impl<T: Held> WithScratch<T> for LocalKey<Scratch<T>> {
    fn with_borrow_mut<R>(&'static self, call: impl FnOnce(&mut T) -> R) -> R {
        self.with(|scratch| scratch.0.with(call))
    }
}

/// Bytes of the buffers that threads keep for kernels of the CPU.
pub fn scratch_bytes() -> usize {
    BYTES.load(Ordering::Relaxed)
}

/// Frees all buffers that no call uses now. Returns how many bytes they were.
pub fn release_idle() -> usize {
    release_those(|_| true)
}

/// Frees those that nothing used in the window, if it has ended at `now_secs`.
pub fn end_window(now_secs: u64) {
    if now_secs.saturating_sub(WINDOW_START_SECS.load(Ordering::Relaxed)) >= IDLE_SECS {
        WINDOW_START_SECS.store(now_secs, Ordering::Relaxed);
        release_those(|slot| !slot.start_window());
    }
}

fn release_those(choose: impl Fn(&dyn Release) -> bool) -> usize {
    // taken out of the list first: freeing a buffer under its lock may end the last thread's use of another
    let Ok(all) = ALL.try_lock().map(|all| all.iter().filter_map(Weak::upgrade).collect::<Vec<_>>()) else {
        return 0; // a thread makes its first buffer
    };
    all.iter().filter(|slot| choose(slot.as_ref())).map(|slot| slot.release()).sum()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    thread_local!(static BUFFER: Scratch<Vec<u64>> = Scratch::default());

    fn capacity() -> usize {
        BUFFER.with_borrow_mut(|buffer| buffer.capacity())
    }

    #[test]
    fn buffers_stay_count_and_go_back_when_idle_or_with_their_thread() {
        let grow = || BUFFER.with_borrow_mut(|buffer| buffer.resize(1 << 20, 1));
        let before = scratch_bytes();
        grow();
        assert!(scratch_bytes() >= before + (8 << 20));
        assert!(capacity() >= 1 << 20, "the next call finds it");

        let (to_thread, from_main) = mpsc::channel::<()>();
        let (to_main, from_thread) = mpsc::channel::<()>();
        let thread = thread::spawn(move || {
            grow();
            to_main.send(()).unwrap();
            from_main.recv().unwrap();
        });
        from_thread.recv().unwrap();
        assert!(scratch_bytes() >= before + (16 << 20), "of all threads");
        assert!(release_idle() >= 16 << 20, "those of sleeping threads, too");
        assert_eq!(capacity(), 0);
        to_thread.send(()).unwrap();
        thread.join().unwrap();

        thread::spawn(grow).join().unwrap();
        assert!(scratch_bytes() < before + (8 << 20), "a thread that ends keeps nothing");
    }

    #[test]
    fn a_buffer_in_use_is_neither_freed_nor_lent_twice() {
        BUFFER.with_borrow_mut(|buffer| {
            buffer.resize(1000, 7);
            thread::spawn(release_idle).join().unwrap();
            assert_eq!(buffer[999], 7);
            BUFFER.with_borrow_mut(|other| assert!(other.is_empty()));
        });
        assert!(capacity() >= 1000);
    }

    #[test]
    fn a_window_frees_what_nobody_used_in_it() {
        BUFFER.with_borrow_mut(|buffer| buffer.resize(1000, 7));
        let now = WINDOW_START_SECS.load(Ordering::Relaxed) + (1 << 40);
        end_window(now);
        assert!(BUFFER.with(|scratch| scratch.0.bytes.load(Ordering::Relaxed)) >= 8000, "it was used");
        end_window(now + IDLE_SECS - 1);
        assert!(BUFFER.with(|scratch| scratch.0.bytes.load(Ordering::Relaxed)) >= 8000, "no window ended");
        end_window(now + IDLE_SECS);
        assert_eq!(BUFFER.with(|scratch| scratch.0.bytes.load(Ordering::Relaxed)), 0);
        WINDOW_START_SECS.store(0, Ordering::Relaxed);
    }
}
