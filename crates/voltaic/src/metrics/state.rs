//! Accumulated tensors behind a lock.

use std::sync::{Mutex, PoisonError};

use tch::{Kind, Tensor};

use crate::error::{ModuleError, Result};

/// Tensors that are added up or put one after the other, by name.
#[derive(Debug)]
pub(super) struct State {
    metric: &'static str,
    /// Names, and whether the tensors are added up.
    parts: &'static [(&'static str, Reduction)],
    tensors: Mutex<Vec<Tensor>>,
}

/// How the tensors of two batches become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reduction {
    Sum,
    Cat,
}

impl State {
    pub fn new(metric: &'static str, parts: &'static [(&'static str, Reduction)]) -> Self {
        Self { metric, parts, tensors: Mutex::new(Vec::new()) }
    }

    /// Adds the tensors of a batch, in the order of the parts.
    pub fn add(&self, batch: Vec<Tensor>) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let mut tensors = self.tensors.lock().unwrap_or_else(PoisonError::into_inner);
        if tensors.is_empty() {
            *tensors = batch;
            return Ok(());
        }
        let mut sums = Vec::with_capacity(batch.len());
        for (((_, reduction), old), new) in self.parts.iter().zip(tensors.iter()).zip(&batch) {
            sums.push(match reduction {
                Reduction::Sum => old.f_add(&new.f_to_device(old.device())?)?,
                Reduction::Cat => Tensor::f_cat(&[old, &new.f_to_device(old.device())?], 0)?,
            });
        }
        *tensors = sums;
        Ok(())
    }

    /// The tensors, in the order of the parts.
    pub fn get(&self) -> Result<Vec<Tensor>> {
        let tensors = self.tensors.lock().unwrap_or_else(PoisonError::into_inner);
        if tensors.is_empty() {
            return Err(ModuleError::Shape {
                layer: self.metric.to_owned(),
                shape: vec![0],
                expected: "update has to be called before compute".to_owned(),
            }
            .into());
        }
        Ok(tensors.iter().map(Tensor::shallow_clone).collect())
    }

    pub fn reset(&self) {
        self.tensors.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    pub fn save(&self) -> Vec<(String, Tensor)> {
        let tensors = self.tensors.lock().unwrap_or_else(PoisonError::into_inner);
        self.parts
            .iter()
            .zip(tensors.iter())
            .map(|((name, _), t)| ((*name).to_owned(), t.shallow_clone()))
            .collect()
    }

    pub fn merge(&self, saved: &[(String, Tensor)]) -> Result<()> {
        if saved.is_empty() {
            return Ok(());
        }
        let find = |(name, _): &(&str, Reduction)| saved.iter().find(|(other, _)| other == name);
        let found: Vec<Tensor> = self.parts.iter().filter_map(find).map(|(_, t)| t.shallow_clone()).collect();
        if found.len() != self.parts.len() {
            let names: Vec<&str> = self.parts.iter().map(|(name, _)| *name).collect();
            let expected = format!("a state of {} is needed", names.join(", "));
            return Err(refuse(self.metric, &[saved.len() as i64], expected));
        }
        self.add(found)
    }
}

pub(super) fn refuse(metric: &'static str, shape: &[i64], expected: impl Into<String>) -> crate::Error {
    ModuleError::Shape { layer: metric.to_owned(), shape: shape.to_vec(), expected: expected.into() }.into()
}

/// `a / b`, and 0 where `b` is 0.
pub(super) fn safe_divide(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (a, b) = (a.f_to_kind(Kind::Float)?, b.f_to_kind(Kind::Float)?);
    let is_zero = b.f_eq(0.0)?;
    Ok(a.f_div(&b.f_masked_fill(&is_zero, 1.0)?)?.f_masked_fill(&is_zero, 0.0)?)
}

macro_rules! metric_by_state {
    () => {
        fn reset(&self) {
            self.state.reset();
        }

        fn state_dict(&self) -> Vec<(String, tch::Tensor)> {
            self.state.save()
        }

        fn merge(&self, state: &[(String, tch::Tensor)]) -> crate::error::Result<()> {
            self.state.merge(state)
        }
    };
}
pub(super) use metric_by_state;
