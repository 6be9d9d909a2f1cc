//! Training and evaluation mode of all modules of a tree.

use super::module::{Member, Module};
use super::parameter::Parameter;

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

/// What the code of a module and of all modules below it depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ModuleKind {
    /// Number of the modes.
    modes: usize,
    /// Hash of the plain values in their fields.
    settings: u64,
}

impl ModuleKind {
    /// Whether the plain values are those of another.
    pub(crate) fn has_settings_of(&self, other: &Self) -> bool {
        self.settings == other.settings
    }
}

/// A hash of numbers in their order (FNV-1a, by whole numbers).
#[derive(Debug, Clone, Copy)]
pub(crate) struct NumberHash(u64);

impl NumberHash {
    pub(crate) fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    pub(crate) fn add(&mut self, number: u64) {
        // the high bits of a product reach the low ones by the rotation
        self.0 = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }

    pub(crate) fn get(self) -> u64 {
        self.0
    }
}

/// Visits all parameters, tied ones each time, without making a list of them.
pub(crate) fn each_parameter(module: &dyn Module, visit: &mut dyn FnMut(&Parameter)) {
    module.members(&mut |_, member| match member {
        Member::Parameter(parameter) => visit(parameter),
        Member::Module(child) => each_parameter(child, visit),
        Member::Buffer(_) => {}
    });
}

fn hash_settings(module: &dyn Module, hash: &mut NumberHash) {
    module.settings(&mut |number| hash.add(number));
    module.members(&mut |_, member| {
        if let Member::Module(child) = member {
            hash_settings(child, hash);
        }
    });
}

/// Numbers the modes that a module and all modules below it have had.
#[derive(Debug, Default)]
pub(crate) struct ModeNumbers {
    known: Vec<Vec<bool>>,
    last: usize,
}

impl ModeNumbers {
    /// The modes and settings that `module`, always the same one, has now.
    pub(crate) fn kind(&mut self, module: &dyn Module) -> ModuleKind {
        let mut hash = NumberHash::new();
        hash_settings(module, &mut hash);
        ModuleKind { modes: self.number(module), settings: hash.get() }
    }

    /// The number of the modes that `module`, always the same one, is in.
    fn number(&mut self, module: &dyn Module) -> usize {
        if self.known.get(self.last).is_some_and(|known| has_modes(module, known)) {
            return self.last;
        }
        let modes = training_modes(module);
        self.last = self.known.iter().position(|known| *known == modes).unwrap_or_else(|| {
            self.known.push(modes);
            self.known.len() - 1
        });
        self.last
    }
}

/// Whether the modes are these, without making a list of them.
fn has_modes(module: &dyn Module, modes: &[bool]) -> bool {
    fn compare(module: &dyn Module, rest: &mut std::slice::Iter<bool>) -> bool {
        let mut is_same = module.is_training().is_none_or(|mode| rest.next() == Some(&mode));
        module.members(&mut |_, member| {
            if let Member::Module(child) = member {
                is_same = is_same && compare(child, rest);
            }
        });
        is_same
    }
    let mut rest = modes.iter();
    compare(module, &mut rest) && rest.next().is_none()
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
