//! Names for operations: who called them.

use crate::config::conversions;
use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::Arc;

/// A name that costs nothing to copy.
#[derive(Debug, Clone)]
pub struct ScopeName(Kind);

#[derive(Debug, Clone)]
enum Kind {
    Static(&'static str),
    Shared(Arc<str>),
}

conversions! { ScopeName:
    &'static str => |name| Self(Kind::Static(name)),
    Arc<str> => |name| Self(Kind::Shared(name)),
    &Arc<str> => |name| Self(Kind::Shared(name.clone())),
    String => |name| Self(Kind::Shared(name.into())),
}

impl ScopeName {
    fn text(&self) -> &str {
        match &self.0 {
            Kind::Static(name) => name,
            Kind::Shared(name) => name,
        }
    }
}

thread_local! {
    static SCOPES: RefCell<Vec<ScopeName>> = const { RefCell::new(Vec::new()) };
}

/// Names the operations that this thread starts while the scope lives; see [`collective_scope`].
#[derive(Debug)]
#[must_use = "operations are named as long as the scope lives"]
pub struct CollectiveScope(PhantomData<*const ()>);

/// Names the operations between ranks that this thread starts until the scope is dropped, by what they are for: the fqn of
/// a module, a hook. The names are shown if an operation fails, and are in the record of the last operations. Scopes may be
/// nested: `training_step / layers.3`. One of the same name as the one around it is shown once.
///
/// ```
/// use voltaic::distributed::collective_scope;
///
/// let _scope = collective_scope("layers.3");
/// // group.all_gather(..) is now "from layers.3"
/// ```
pub fn collective_scope(name: impl Into<ScopeName>) -> CollectiveScope {
    SCOPES.with_borrow_mut(|scopes| scopes.push(name.into()));
    CollectiveScope(PhantomData)
}

impl Drop for CollectiveScope {
    fn drop(&mut self) {
        SCOPES.with_borrow_mut(|scopes| scopes.pop());
    }
}

/// Writes the names of this thread's scopes to the end of `buffer`, the innermost last; returns where they start. Of names
/// that are too long the end is kept.
pub(super) fn write_names(buffer: &mut [u8]) -> usize {
    SCOPES.with_borrow(|scopes| {
        let mut start = buffer.len();
        let mut inner: Option<&str> = None;
        for scope in scopes.iter().rev().map(ScopeName::text) {
            let separator: &[u8] = if inner.is_none() { b"" } else { b" / " };
            if inner.replace(scope) == Some(scope) {
                continue;
            }
            for part in [separator, scope.as_bytes()] {
                let len = part.len().min(start);
                buffer[start - len..start].copy_from_slice(&part[part.len() - len..]);
                start -= len;
            }
        }
        start
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes_are_nested_and_of_long_names_the_end_is_kept() {
        let _outer = collective_scope("training_step");
        {
            let _inner = collective_scope("layers.3".to_owned());
            let mut buffer = [0; 32];
            let start = write_names(&mut buffer);
            assert_eq!(&buffer[start..], b"training_step / layers.3");
            let mut buffer = [0; 16];
            assert_eq!((write_names(&mut buffer), &buffer), (0, b"_step / layers.3"));
            let _again = collective_scope("layers.3");
            let mut buffer = [0; 32];
            let start = write_names(&mut buffer);
            assert_eq!(&buffer[start..], b"training_step / layers.3", "a name that repeats is shown once");
        }
        let mut buffer = [0; 16];
        let start = write_names(&mut buffer);
        assert_eq!(&buffer[start..], b"training_step");
    }
}
