//! Which module refused its input last, so that an error can name its place in the tree.

use std::cell::Cell;
use std::fmt;

use crate::error::{Error, ModuleError};
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

/// The fqn below `root` of the module that last rejected its input on this thread, since the last call of this; none if that is
/// the root itself, or no part of it.
fn fqn_of_misfit(root: &dyn Module) -> Option<String> {
    let last = LAST.take()?;
    let found = root.named_modules().into_iter().find(|(_, module)| identity(*module) == last);
    found.map(|(fqn, _)| fqn).filter(|fqn| !fqn.is_empty())
}

/// The place of the layer that refused its input, in the sequences around it.
#[derive(Debug, Clone)]
struct LayerPlace(String);

impl fmt::Display for LayerPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layer {}", self.0)
    }
}

fn is_misfit(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(Error::Module(ModuleError::Shape { .. } | ModuleError::Input { .. })))
}

/// An error that has no other context than the layer's place in sequences: that place, and the error without it.
fn split_place(error: anyhow::Error) -> (Option<LayerPlace>, anyhow::Error) {
    let place = error.downcast_ref::<LayerPlace>().filter(|_| error.chain().count() == 2).cloned();
    match place {
        None => (None, error),
        Some(place) => match error.downcast::<Error>() {
            Ok(error) => (Some(place), error.into()),
            Err(error) => (None, error),
        },
    }
}

/// The error of a layer that refused its input, with its place in a sequence.
#[cold]
pub(super) fn in_sequence(place: usize, error: anyhow::Error) -> anyhow::Error {
    if !is_misfit(&error) {
        return error;
    }
    let (within, error) = split_place(error);
    error.context(LayerPlace(
        within.map_or_else(|| place.to_string(), |within| format!("{place}.{}", within.0)),
    ))
}

/// The error of a layer that refused its input, with the layer's fqn in place of its place in sequences, if `root` has it.
pub(crate) fn with_fqn(root: &dyn Module, error: anyhow::Error) -> anyhow::Error {
    match fqn_of_misfit(root).filter(|_| is_misfit(&error)) {
        Some(fqn) => split_place(error).1.context(fqn),
        None => error,
    }
}
