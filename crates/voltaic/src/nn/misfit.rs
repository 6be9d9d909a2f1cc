//! Which module refused its input last, so that an error can name its place in the tree.

use std::cell::Cell;

use crate::nn::module::{Identity, Module, identity};
use crate::nn::tree::ModuleExt;

thread_local! {
    static LAST: Cell<Option<Identity>> = const { Cell::new(None) };
}

/// The module's input does not fit.
#[cold]
pub(super) fn note_misfit(module: &dyn Module) {
    LAST.set(Some(identity(module)));
}

/// The fqn below `root` of the module that refused its input last on this thread, since this was asked last; none if that is
/// the root itself, or no part of it.
pub(crate) fn fqn_of_misfit(root: &dyn Module) -> Option<String> {
    let last = LAST.take()?;
    let found = root.named_modules().into_iter().find(|(_, module)| identity(*module) == last);
    found.map(|(fqn, _)| fqn).filter(|fqn| !fqn.is_empty())
}
