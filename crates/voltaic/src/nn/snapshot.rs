//! What a module holds, copied to be put back.

use std::sync::Arc;

use tch::Tensor;

use super::metric::Metric;
use super::module::Module;
use super::tree::ModuleExt;
use crate::error::{CheckpointError, Result};
use crate::ffi;

type Tensors = Vec<(String, Tensor)>;

/// What of a module a [`Snapshot`] holds.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SnapshotParts {
    pub parameters: bool,
    /// Those too that no state dict has.
    pub buffers: bool,
    /// Gradients that are there.
    pub grads: bool,
    /// States of metrics.
    pub metrics: bool,
    /// Copies lie on the host, so that they take nothing of a device's memory.
    pub on_host: bool,
}

/// Copies of what a module holds, by fqn: a module that was made again since takes them, too.
pub(crate) struct Snapshot {
    parameters: Tensors,
    buffers: Tensors,
    grads: Tensors,
    metrics: Vec<(Arc<dyn Metric>, Tensors)>,
}

impl Snapshot {
    /// Copies these parts of `module`.
    pub(crate) fn of(module: &(impl ModuleExt + ?Sized), parts: SnapshotParts) -> Result<Self> {
        let copies = |tensors: Vec<(String, Tensor)>| -> Result<Tensors> {
            tensors.into_iter().map(|(fqn, tensor)| Ok((fqn, copy(&tensor, parts.on_host)?))).collect()
        };
        let parameters = module.named_parameters();
        let grads = parameters.iter().map(|(fqn, parameter)| (fqn.clone(), parameter.grad()));
        let grads = grads.filter(|(_, grad)| parts.grads && grad.defined()).collect();
        let values = parameters.iter().map(|(fqn, parameter)| (fqn.clone(), parameter.shallow_clone()));
        let buffers = module.named_buffers().into_iter();
        let buffers = buffers.map(|(fqn, buffer)| (fqn, buffer.shallow_clone()));
        let metrics = if parts.metrics { module.named_metrics() } else { Vec::new() };
        let metrics = metrics.into_iter().map(|(_, metric)| {
            let state = metric.state().named()?;
            Ok((metric, state))
        });
        Ok(Self {
            parameters: copies(values.filter(|_| parts.parameters).collect())?,
            buffers: copies(buffers.filter(|_| parts.buffers).collect())?,
            grads: copies(grads)?,
            metrics: metrics.collect::<Result<_>>()?,
        })
    }

    /// Puts the copies back. Gradients that were not there then stay.
    ///
    /// # Errors
    /// [`CheckpointError::Mismatch`] if the module has no longer what was copied.
    pub(crate) fn restore(&self, module: &(impl ModuleExt + ?Sized)) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let parameters = module.named_parameters();
        let values = parameters.iter().map(|(fqn, p)| (fqn.as_str(), p.tensor()));
        put_back(module.as_dyn(), &self.parameters, values.collect())?;
        let buffers = module.named_buffers();
        let values = buffers.iter().map(|(fqn, buffer)| (fqn.as_str(), buffer.tensor()));
        put_back(module.as_dyn(), &self.buffers, values.collect())?;
        for (fqn, grad) in &self.grads {
            if let Some((_, parameter)) = parameters.iter().find(|(name, _)| name == fqn) {
                ffi::set_grad(parameter, grad)?;
            }
        }
        self.metrics.iter().try_for_each(|(metric, state)| metric.state().restore(state))
    }
}

/// A copy laid out as the tensor is.
fn copy(tensor: &Tensor, on_host: bool) -> Result<Tensor> {
    let tensor = tensor.f_detach()?;
    if on_host && tensor.device() != tch::Device::Cpu {
        return Ok(tensor.f_to_device(tch::Device::Cpu)?);
    }
    let _no_grad = tch::no_grad_guard();
    let mut copy = tensor.f_empty_like()?;
    copy.f_copy_(&tensor)?;
    Ok(copy)
}

fn put_back(module: &dyn Module, copies: &Tensors, own: Vec<(&str, &Tensor)>) -> Result<()> {
    let own: std::collections::HashMap<&str, &Tensor> = own.into_iter().collect();
    for (fqn, copy) in copies {
        match own.get(fqn.as_str()) {
            Some(tensor) if tensor.size() == copy.size() => tensor.shallow_clone().f_copy_(copy)?,
            found => {
                let found =
                    found.map_or_else(|| "nothing".to_owned(), |tensor| format!("{:?}", tensor.size()));
                let what = format!("{fqn} had shape {:?} before, now it is {found}", copy.size());
                let remedy = "let setup and configure_model make the same layers each time".to_owned();
                let module = module.type_name().to_owned();
                return Err(CheckpointError::Mismatch { module, what, remedy }.into());
            }
        }
    }
    Ok(())
}
