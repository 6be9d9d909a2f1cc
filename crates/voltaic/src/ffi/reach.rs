//! References that outlive no scope: what runs within it reaches a value that was borrowed outside.

use std::cell::Cell;
use std::ptr::NonNull;
use std::thread::LocalKey;

/// A value that is lent to what runs within a scope, to be kept in a `thread_local!`.
///
/// The one who lends holds a borrow for the whole scope, so that nothing in the value moves meanwhile; the one who
/// reaches for it gets a reference for a closure, which cannot be kept:
///
/// ```compile_fail
/// # use voltaic::ffi::Lent;
/// thread_local!(static WORD: Lent<str> = const { Lent::new() });
/// let kept: &str = WORD.with(|word| word.reach(|word| word.unwrap()));
/// ```
pub struct Lent<T: ?Sized + 'static> {
    value: Cell<Option<NonNull<T>>>,
}

/// Gives back what was lent before, also when the scope ends by a panic.
struct Before<T: ?Sized + 'static> {
    lent: &'static LocalKey<Lent<T>>,
    value: Option<NonNull<T>>,
}

impl<T: ?Sized + 'static> Drop for Before<T> {
    fn drop(&mut self) {
        self.lent.with(|lent| lent.value.set(self.value));
    }
}

impl<T: ?Sized + 'static> Lent<T> {
    /// Nothing is lent.
    pub const fn new() -> Self {
        Self { value: Cell::new(None) }
    }

    /// Lends `value` while `body` runs; within another scope it takes the place of what that has lent.
    pub fn lend<R>(lent: &'static LocalKey<Self>, value: &T, body: impl FnOnce() -> R) -> R {
        let value = lent.with(|lent| lent.value.replace(Some(NonNull::from(value))));
        let _before = Before { lent, value };
        body()
    }

    /// Gives `body` what is lent now, if anything is.
    pub fn reach<R>(&self, body: impl FnOnce(Option<&T>) -> R) -> R {
        let value = self.value.get();
        // SAFETY: the pointer was made from a reference in `lend`, whose caller holds that borrow until `lend` returns. The
        // pointer is in `self.value` only meanwhile: `Before` takes it away first, also if `body` panics. `Lent` is neither
        // Sync nor shared by a `lend` on another thread (a Cell is in it), so this call runs within that `lend`. The
        // reference is for `body` alone, whose result cannot contain it, and is shared as the one that was lent.
        body(value.map(|value| unsafe { value.as_ref() }))
    }
}

impl<T: ?Sized + 'static> Default for Lent<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    thread_local!(static WORD: Lent<str> = const { Lent::new() });

    fn word() -> Option<String> {
        WORD.with(|word| word.reach(|word| word.map(str::to_owned)))
    }

    fn within<R>(value: &str, body: impl FnOnce() -> R) -> R {
        Lent::lend(&WORD, value, body)
    }

    #[test]
    fn it_is_lent_within_the_scope_only() {
        assert_eq!(word(), None);
        let outer = String::from("outer");
        within(&outer, || {
            assert_eq!(word().as_deref(), Some("outer"));
            within("inner", || assert_eq!(word().as_deref(), Some("inner")));
            assert_eq!(word().as_deref(), Some("outer"));
        });
        assert_eq!(word(), None);
    }

    #[test]
    fn a_panic_ends_the_scope() {
        let text = String::from("gone");
        let caught = catch_unwind(AssertUnwindSafe(|| within(&text, || panic!("within"))));
        assert!(caught.is_err());
        drop(text);
        assert_eq!(word(), None);
    }

    #[test]
    fn another_thread_reaches_nothing() {
        within("here", || std::thread::spawn(|| assert_eq!(word(), None)).join().unwrap());
    }

    #[test]
    fn a_scope_within_a_reach_does_not_end_the_outer_one() {
        within("outer", || {
            WORD.with(|lent| {
                lent.reach(|outer| {
                    within("inner", || assert_eq!(word().as_deref(), Some("inner")));
                    assert_eq!(outer, Some("outer"));
                });
            });
        });
    }
}
