//! Relates units to the tree of modules, and moves buffers.

use tch::Kind;

use super::unit_set::UnitSet;
use crate::error::Result;
use crate::nn::{Module, ModuleExt, Parameter};

/// Moves and casts the buffers.
pub(super) fn move_buffers(module: &dyn Module, device: tch::Device, dtype: Option<Kind>) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    for (_, buffer) in module.named_buffers() {
        let moved = buffer.tensor().f_to_device(device)?;
        let dtype = dtype.filter(|_| moved.is_floating_point());
        buffer.set_data(&dtype.map_or_else(|| Ok(moved.shallow_clone()), |dtype| moved.f_to_kind(dtype))?)?;
    }
    Ok(())
}

/// Whether a parameter of the module has its place in a unit.
pub(super) fn has_some(set: &UnitSet, module: &dyn Module) -> bool {
    module.parameters().iter().any(|parameter| set.place_of_id(parameter.id()).is_some())
}

/// Whether the units have all parameters of the module, under their names, and no others.
pub(super) fn has_all(set: &UnitSet, module: &dyn Module) -> bool {
    let params = module.named_parameters();
    let is_placed = |(fqn, parameter): &(String, Parameter)| {
        let place = set.place_of_id(parameter.id());
        place.is_some_and(|(unit, index)| set.units[unit].layout.places[index].fqn == *fqn)
    };
    let placed: usize = set.units.iter().map(|unit| unit.layout.places.len()).sum();
    params.len() == placed && params.iter().all(is_placed)
}
