//! Tells a unit of changes to its weights that no optimizer has made.

use std::sync::{Arc, Mutex, PoisonError};

use super::reducer::Reducer;
use crate::error::Result;
use crate::nn::{Gather, Parameter};

/// Keeps master weights beside weights that are always whole.
#[derive(Debug)]
pub(super) struct Keeper(pub Arc<Mutex<Reducer>>);

impl Gather for Keeper {
    fn gather(&self, parameter: &Parameter) -> Result<()> {
        parameter.set_away(false)
    }

    fn release(&self, parameter: &Parameter, is_changed: bool) -> Result<()> {
        let reducer = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match reducer.place_of_id(parameter.id()).filter(|_| is_changed) {
            Some((unit, index)) => reducer.units[unit].take_over(index),
            None => Ok(()),
        }
    }
}
