//! Which module a graph is of, wherever that lies.

use std::any::TypeId;

use crate::nn::{Member, Module, identity};

/// Tells a module from others by its type and its parameters, so that it may move, and two that change places keep their
/// graphs. One without parameters is known by where it lies.
#[derive(Debug)]
pub(super) struct Known {
    type_id: TypeId,
    address: usize,
    parameters: Vec<u64>,
}

impl Known {
    pub(super) fn of(module: &dyn Module) -> Self {
        let (address, type_id) = identity(module);
        let mut parameters = Vec::new();
        each_id(module, &mut |id| parameters.push(id));
        Self { type_id, address, parameters }
    }

    pub(super) fn is(&self, module: &dyn Module) -> bool {
        let (address, type_id) = identity(module);
        if type_id != self.type_id {
            return false;
        }
        let (mut count, mut is_same) = (0, true);
        each_id(module, &mut |id| {
            is_same = is_same && self.parameters.get(count) == Some(&id);
            count += 1;
        });
        is_same && count == self.parameters.len() && (count > 0 || address == self.address)
    }
}

fn each_id(module: &dyn Module, visit: &mut dyn FnMut(u64)) {
    module.members(&mut |_, member| match member {
        Member::Parameter(parameter) => visit(parameter.id()),
        Member::Module(child) => each_id(child, visit),
        Member::Buffer(_) => {}
    });
}
