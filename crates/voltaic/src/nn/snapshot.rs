//! What a module holds, copied to be put back.

use std::collections::HashMap;
use std::sync::Arc;

use tch::Tensor;

use super::buffer::Buffer;
use super::metric::Metric;
use super::module::Module;
use super::parameter::Parameter;
use super::te::fp8_layers;
use super::tree::ModuleExt;
use crate::error::{CheckpointError, Error, Problem, Result};
use crate::ffi;
use crate::precision::fp8::Fp8State;

type Tensors = Vec<(String, Tensor)>;

/// What of a module a [`Snapshot`] holds.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SnapshotParts {
    pub parameters: bool,
    /// Those too that no state dict has, and scales of layers that compute in float8.
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
    /// Scales of layers that compute in float8.
    fp8: Vec<(String, Fp8State)>,
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
        let values = parameters.iter().filter(|_| parts.parameters);
        let _no_grad = tch::no_grad_guard();
        let values = values.map(|(fqn, parameter)| {
            parameter.with_unsharded(|tensor| Ok((fqn.clone(), copy(tensor, parts.on_host)?)))
        });
        let buffers = module.named_buffers().into_iter();
        let buffers = buffers.map(|(fqn, buffer)| (fqn, buffer.shallow_clone()));
        let metrics = if parts.metrics { module.named_metrics() } else { Vec::new() };
        let metrics = metrics.into_iter().map(|(_, metric)| {
            let state = metric.state().named()?;
            Ok((metric, state))
        });
        let fp8 = if parts.buffers { fp8_layers(module.as_dyn()) } else { Vec::new() };
        let fp8 = fp8.into_iter().map(|(fqn, meta)| Ok((fqn, meta.state()?)));
        Ok(Self {
            fp8: fp8.collect::<Result<_>>()?,
            parameters: values.collect::<Result<_>>()?,
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
        let own: HashMap<&str, &Parameter> = parameters.iter().map(|(fqn, p)| (fqn.as_str(), p)).collect();
        for (fqn, copy) in &self.parameters {
            let own = own.get(fqn.as_str());
            check_size(module.as_dyn(), fqn, copy, own.map(|parameter| parameter.size()))?;
            own.map_or(Ok(()), |own| own.update(|tensor| Ok(tensor.shallow_clone().f_copy_(copy)?)))?;
        }
        let buffers = module.named_buffers();
        let own: HashMap<&str, &Buffer> = buffers.iter().map(|(fqn, b)| (fqn.as_str(), *b)).collect();
        for (fqn, copy) in &self.buffers {
            let own = own.get(fqn.as_str());
            check_size(module.as_dyn(), fqn, copy, own.map(|buffer| buffer.size()))?;
            own.map_or(Ok(()), |own| Ok::<_, Error>(own.shallow_clone().f_copy_(copy)?))?;
        }
        for (fqn, grad) in &self.grads {
            if let Some((_, parameter)) = parameters.iter().find(|(name, _)| name == fqn) {
                ffi::set_grad(parameter.leaf(), grad)?;
            }
        }
        for (fqn, meta) in fp8_layers(module.as_dyn()) {
            if let Some((_, state)) = self.fp8.iter().find(|(known, _)| *known == fqn) {
                meta.load_state(state)?;
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

/// An error if what the module has under a name is not what was copied.
fn check_size(module: &dyn Module, fqn: &str, copy: &Tensor, found: Option<Vec<i64>>) -> Result<()> {
    if found.as_ref() == Some(&copy.size()) {
        return Ok(());
    }
    let found = found.map_or_else(|| "nothing".to_owned(), |size| format!("{size:?}"));
    let what = format!("{fqn} had shape {:?} before, now it is {found}", copy.size());
    let problem = Problem::new(what, "let setup and configure_model make the same layers each time");
    Err(CheckpointError::Mismatch { module: module.type_name().to_owned(), problem }.into())
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;
    use crate::nn::{Buffer, Parameter};

    #[derive(Module)]
    struct Net {
        weight: Parameter,
        seen: Buffer,
    }

    fn net(size: i64) -> Net {
        let ones = || Tensor::ones([size], (Kind::Float, tch::Device::Cpu));
        Net { weight: Parameter::new(ones()), seen: Buffer::non_persistent(ones()) }
    }

    #[test]
    fn what_was_copied_comes_back_in_place_and_nothing_else_does() {
        let _no_grad = tch::no_grad_guard();
        let net = net(2);
        let address = net.weight.data_ptr();
        let all = SnapshotParts { parameters: true, buffers: true, ..SnapshotParts::default() };
        let buffers = SnapshotParts { buffers: true, ..SnapshotParts::default() };
        for (parts, weight) in [(all, 1.0), (buffers, 3.0)] {
            let before = Snapshot::of(&net, parts).expect("copies");
            let _ = net.weight.shallow_clone().fill_(3.0);
            let _ = net.seen.shallow_clone().fill_(3.0);
            before.restore(&net).expect("restores");
            assert_eq!(Vec::<f32>::try_from(net.weight.tensor()).expect("floats"), [weight; 2]);
            assert_eq!(
                Vec::<f32>::try_from(net.seen.tensor()).expect("floats"),
                [1.0; 2],
                "no state dict has it"
            );
        }
        assert_eq!(net.weight.data_ptr(), address);
    }

    #[test]
    fn gradients_that_were_there_come_back() {
        let net = net(2);
        let grad = Tensor::from_slice(&[1.0_f32, 2.0]);
        ffi::set_grad(&net.weight, &grad).expect("sets");
        let parts = SnapshotParts { grads: true, ..SnapshotParts::default() };
        let before = Snapshot::of(&net, parts).expect("copies");
        let _ = net.weight.grad().fill_(9.0);
        before.restore(&net).expect("restores");
        assert_eq!(Vec::<f32>::try_from(net.weight.grad()).expect("floats"), [1.0, 2.0]);
    }

    #[test]
    fn a_module_that_has_become_another_is_refused() {
        let parts = SnapshotParts { parameters: true, ..SnapshotParts::default() };
        let before = Snapshot::of(&net(2), parts).expect("copies");
        let error = before.restore(&net(3)).expect_err("another size").to_string();
        assert!(error.contains("weight had shape [2] before, now it is [3]"), "{error}");
    }
}
