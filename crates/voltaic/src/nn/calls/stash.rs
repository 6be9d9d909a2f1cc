//! What layers decide in the forward pass of a checkpointed segment, and its recomputation takes again.

use std::any::Any;
use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{ModuleError, Problem, Result};

/// Of one segment, in the order in which its code asks.
#[derive(Clone, Default)]
pub(crate) struct Stash(Arc<Mutex<Vec<Box<dyn Any + Send>>>>);

struct Open {
    stash: Stash,
    /// In a recomputation: how many were taken so far.
    taken: Option<usize>,
}

thread_local!(static OPEN: RefCell<Vec<Open>> = const { RefCell::new(Vec::new()) });

/// A segment's code runs, until this is dropped.
pub(crate) struct StashScope(PhantomData<*const ()>);

impl Stash {
    /// The forward pass.
    pub(crate) fn fill(&self) -> StashScope {
        self.open(None)
    }

    /// A recomputation.
    pub(crate) fn take(&self) -> StashScope {
        self.open(Some(0))
    }

    fn open(&self, taken: Option<usize>) -> StashScope {
        OPEN.with_borrow_mut(|open| open.push(Open { stash: self.clone(), taken }));
        StashScope(PhantomData)
    }
}

impl Drop for StashScope {
    fn drop(&mut self) {
        OPEN.with_borrow_mut(Vec::pop);
    }
}

/// What `make` gives, or in a recomputation what was kept of it: what `keep` makes of it for later. `share` gives a second handle.
///
/// # Errors
/// Those of `make` and `keep`; if a recomputation asks for what its forward pass has not asked for.
pub(crate) fn stashed<T: Any + Send>(
    make: impl FnOnce() -> Result<T>,
    keep: impl FnOnce(&T) -> Result<T>,
    share: impl Fn(&T) -> T,
) -> Result<T> {
    let is_open = OPEN.with_borrow(|open| !open.is_empty());
    if !is_open {
        return make();
    }
    // the innermost recomputation; segments within it run their forward pass again
    let known = OPEN.with_borrow_mut(|open| {
        let known = open.iter_mut().rev().find_map(|open| Some((&open.stash, open.taken.as_mut()?)));
        known.map(|(stash, taken)| {
            *taken += 1;
            let values = stash.0.lock().unwrap_or_else(PoisonError::into_inner);
            values.get(*taken - 1).and_then(|value| value.downcast_ref::<T>()).map(&share)
        })
    });
    let (value, kept) = match known {
        Some(Some(value)) => {
            let kept = share(&value);
            (value, kept)
        }
        Some(None) => {
            let what = "a recomputation calls other layers than the forward pass of its segment";
            let problem = Problem::new(what, "let the code do the same each time");
            return Err(ModuleError::Hook { problem }.into());
        }
        None => {
            let value = make()?;
            let kept = keep(&value)?;
            (value, kept)
        }
    };
    OPEN.with_borrow(|open| {
        for open in open.iter().rev().take_while(|open| open.taken.is_none()) {
            open.stash.0.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(share(&kept)));
        }
    });
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(number: u64) -> Result<u64> {
        stashed(|| Ok(number), |number| Ok(number + 100), |number| *number)
    }

    #[test]
    fn a_recomputation_takes_what_was_kept_in_order() {
        assert_eq!(ask(1).unwrap(), 1);
        let (outer, inner) = (Stash::default(), Stash::default());
        {
            let _outer = outer.fill();
            assert_eq!(ask(2).unwrap(), 2);
            let _inner = inner.fill();
            assert_eq!(ask(3).unwrap(), 3);
        }
        for _ in 0..2 {
            let _outer = outer.take();
            assert_eq!(ask(9).unwrap(), 102);
            let again = Stash::default();
            {
                let _inner = again.fill();
                assert_eq!(ask(9).unwrap(), 103);
            }
            assert!(ask(9).unwrap_err().to_string().contains("other layers"));
            let _inner = again.take();
            assert_eq!(ask(9).unwrap(), 103);
        }
        let _inner = inner.take();
        assert_eq!(ask(9).unwrap(), 103);
    }
}
