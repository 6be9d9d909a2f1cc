//! A lock for a few instructions of work.

use std::cell::UnsafeCell;
use std::hint;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// The number of attempts at a taken lock before the thread yields.
const SPINS: u32 = 64;

/// A spin lock: one atomic exchange to take it, one store to give it back.
///
/// Half the cost of an uncontended `std::sync::Mutex`. A thread that waits yields its core soon, since
/// the holder may have been put to sleep.
pub(super) struct SpinLock<T> {
    taken: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached through a SpinGuard only, and `taken` lets one guard exist at a time; so sharing
// the lock moves access to T from thread to thread, which is what `T: Send` allows.
unsafe impl<T: Send> Sync for SpinLock<T> {}

impl<T> SpinLock<T> {
    pub(super) const fn new(value: T) -> Self {
        Self { taken: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    #[inline]
    pub(super) fn lock(&self) -> SpinGuard<'_, T> {
        if self.taken.swap(true, Ordering::Acquire) {
            self.wait();
        }
        SpinGuard { lock: self }
    }

    #[cold]
    fn wait(&self) {
        let mut looks = 0;
        while self.taken.load(Ordering::Relaxed) || self.taken.swap(true, Ordering::Acquire) {
            looks += 1;
            if looks % SPINS == 0 {
                thread::yield_now();
            } else {
                hint::spin_loop();
            }
        }
    }

    /// Gives back a lock whose guard was forgotten.
    ///
    /// # Safety
    /// A guard of this lock was passed to `mem::forget` and the lock has not been given back since.
    pub(super) unsafe fn unlock(&self) {
        self.taken.store(false, Ordering::Release);
    }
}

/// Access to the value of a [`SpinLock`].
pub(super) struct SpinGuard<'a, T> {
    lock: &'a SpinLock<T>,
}

impl<T> Deref for SpinGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this guard is the only one, so there is no other reference to the value.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for SpinGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard is the only one and is borrowed mutably, so the reference is unique.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for SpinGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.lock.taken.store(false, Ordering::Release);
    }
}
