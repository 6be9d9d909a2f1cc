//! Training and evaluation mode of all modules of a tree.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::nn::module::{Member, Module};

/// How often a mode was set in this process.
static CHANGES: AtomicU64 = AtomicU64::new(0);

/// Tells graphs that a module's mode was set. A [`Module::set_training`] that keeps a flag of its own calls it, as
/// `#[module(training)]` does.
pub fn mode_changed() {
    CHANGES.fetch_add(1, Ordering::Relaxed);
}

/// Sets the mode of `module` and of all modules below it.
pub fn set_training(module: &mut dyn Module, training: bool) {
    module.set_training(training);
    module.children_mut(&mut |_, child| set_training(child, training));
}

/// The modes of `module` and of all modules below it that have one, in the order of [`set_training_modes`].
pub(crate) fn training_modes(module: &dyn Module) -> Vec<bool> {
    fn collect(module: &dyn Module, modes: &mut Vec<bool>) {
        modes.extend(module.is_training());
        module.members(&mut |_, member| {
            if let Member::Module(child) = member {
                collect(child, modes);
            }
        });
    }
    let mut modes = Vec::new();
    collect(module, &mut modes);
    modes
}

/// Sets the modes that [`training_modes`] gave.
pub(crate) fn set_training_modes(module: &mut dyn Module, modes: &mut impl Iterator<Item = bool>) {
    if module.is_training().is_some()
        && let Some(mode) = modes.next()
    {
        module.set_training(mode);
    }
    module.children_mut(&mut |_, child| set_training_modes(child, modes));
}

/// Numbers the modes that a module and all modules below it have had, and looks at them again only after some module's
/// mode was set: telling that nothing has changed takes no longer for more layers.
#[derive(Debug, Default)]
pub(crate) struct ModeNumbers {
    known: Vec<Vec<bool>>,
    /// How many changes there had been, and the number of the modes then.
    last: Option<(u64, usize)>,
}

impl ModeNumbers {
    /// The number of the modes that `module`, always the same one, is in.
    pub(crate) fn number(&mut self, module: &dyn Module) -> usize {
        let changes = CHANGES.load(Ordering::Relaxed);
        if let Some((seen, number)) = self.last
            && seen == changes
        {
            return number;
        }
        let modes = training_modes(module);
        let number = self.known.iter().position(|known| *known == modes).unwrap_or_else(|| {
            self.known.push(modes);
            self.known.len() - 1
        });
        self.last = Some((changes, number));
        number
    }

    /// Looks at the modes again next time, even if none was set.
    pub(crate) fn look_again(&mut self) {
        self.last = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::{Dropout, Sequential};

    #[test]
    fn modes_keep_their_number() {
        let mut net = Sequential::new();
        net.push(Dropout::new(0.5).unwrap());
        net.push(Dropout::new(0.5).unwrap());
        let mut numbers = ModeNumbers::default();
        assert_eq!((numbers.number(&net), numbers.number(&net)), (0, 0));
        set_training(&mut net, false);
        assert_eq!(numbers.number(&net), 1);
        net.children_mut(&mut |name, child| child.set_training(name == "0"));
        assert_eq!(numbers.number(&net), 2);
        set_training(&mut net, true);
        assert_eq!(numbers.number(&net), 0);
    }
}
