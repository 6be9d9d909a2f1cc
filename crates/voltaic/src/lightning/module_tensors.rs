//! Tensors that a module keeps in a checkpoint beside its weights.

use tch::Tensor;

use crate::device::Device;
use crate::error::{ConfigError, Result};

/// Tensors that a module keeps in a checkpoint beside its weights, by name: a queue of embeddings, a histogram. They come
/// back with their shape and dtype, on the host if they were there, else on the device of the run.
///
/// ```
/// # use voltaic::module::ModuleTensors;
/// # struct Net { queue: voltaic::Tensor, num_seen: u64 }
/// # impl Net {
/// fn on_save_checkpoint(&mut self, tensors: &mut ModuleTensors) -> anyhow::Result<serde_json::Value> {
///     tensors.insert("queue", &self.queue)?;
///     Ok(serde_json::json!({"num_seen": self.num_seen}))
/// }
///
/// fn on_load_checkpoint(
///     &mut self,
///     saved: &serde_json::Value,
///     tensors: &ModuleTensors,
/// ) -> anyhow::Result<()> {
///     self.queue = tensors.get("queue")?.shallow_clone();
///     self.num_seen = saved["num_seen"].as_u64().unwrap_or(0);
///     Ok(())
/// }
/// # }
/// ```
#[derive(Debug, Default)]
pub struct ModuleTensors {
    tensors: Vec<(String, Tensor)>,
}

impl ModuleTensors {
    /// Adds a tensor, which is read when the checkpoint is written. Names are the module's own: they may be those of
    /// weights.
    ///
    /// # Errors
    /// [`ConfigError`] if the name is empty or taken, or the tensor has no value.
    pub fn insert(&mut self, name: impl Into<String>, tensor: &Tensor) -> Result<()> {
        let name = name.into();
        let refuse = |what: String, remedy: &'static str| {
            Err(ConfigError::new("on_save_checkpoint", what, remedy).into())
        };
        if name.is_empty() {
            return refuse("a tensor has an empty name".to_owned(), "give it one");
        }
        if self.find(&name).is_some() {
            let what = format!("there is a tensor `{name}` already");
            return refuse(what, "give each tensor a name of its own");
        }
        if !tensor.defined() {
            return refuse(format!("the tensor `{name}` has no value"), "leave it out until it has one");
        }
        self.tensors.push((name, tensor.f_detach()?));
        Ok(())
    }

    /// The tensor of this name.
    ///
    /// # Errors
    /// [`ConfigError`] if there is none, with those there are.
    pub fn get(&self, name: &str) -> Result<&Tensor> {
        self.find(name).ok_or_else(|| {
            let known = self.names().collect::<Vec<_>>().join(", ");
            let what = format!("the checkpoint has no tensor `{name}` of the module, but: {known}");
            ConfigError::new("on_load_checkpoint", what, "ask for one of these, or use find").into()
        })
    }

    /// The tensor of this name, if there is one.
    pub fn find(&self, name: &str) -> Option<&Tensor> {
        self.tensors.iter().find(|(own, _)| own == name).map(|(_, tensor)| tensor)
    }

    /// All names, in the order in which they were added; in that of the file once they were saved.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|(name, _)| name.as_str())
    }

    /// The tensors, and the names of those that are not on the host.
    pub(crate) fn into_parts(self) -> (Vec<(String, Tensor)>, Vec<String>) {
        let on_device = self.tensors.iter().filter(|(_, tensor)| tensor.device() != tch::Device::Cpu);
        let on_device = on_device.map(|(name, _)| name.clone()).collect();
        (self.tensors, on_device)
    }

    /// What a checkpoint has, with the tensors that were on the device of the run on that of this one.
    pub(crate) fn of_checkpoint(
        saved: &[(String, Tensor)],
        on_device: &[String],
        device: Device,
    ) -> Result<Self> {
        let tensors = saved.iter().map(|(name, tensor)| {
            let device = if on_device.contains(name) { device.tch() } else { tch::Device::Cpu };
            Ok((name.clone(), tensor.f_to_device(device)?))
        });
        Ok(Self { tensors: tensors.collect::<Result<_>>()? })
    }
}
