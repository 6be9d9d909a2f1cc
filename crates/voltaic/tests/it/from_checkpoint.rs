//! Modules that are made from checkpoints: `LightningModule::load_from_checkpoint`.

use serde_json::{Value, json};
use tempfile::TempDir;
use voltaic::checkpoint::Checkpoint;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::module::{LightningModule, ModuleTensors, StepContext};
use voltaic::nn::{Forward, Linear, Module, ModuleExt};
use voltaic::optim::{Optimizers, Sgd};
use voltaic::{Kind, Tensor};

use crate::probe::silent;

/// It saves a tensor and a number beside its weights.
#[derive(Module)]
struct Net {
    fc: Linear,
    #[module(skip)]
    width: i64,
    #[module(skip)]
    queue: Option<Tensor>,
}

#[derive(serde::Deserialize)]
struct Width {
    width: i64,
}

impl Net {
    fn new(Width { width }: Width) -> anyhow::Result<Self> {
        Ok(Self { fc: Linear::new(2, width)?, width, queue: None })
    }
}

impl LightningModule for Net {
    type Batch = Tensor;

    fn training_step(&self, x: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        Ok(self.fc.forward(x)?.f_mean(Kind::Float)?)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(Sgd::new(0.1).into())
    }

    fn hyper_parameters(&self) -> Value {
        json!({"width": self.width})
    }

    fn on_save_checkpoint(&mut self, tensors: &mut ModuleTensors) -> anyhow::Result<Value> {
        tensors.insert("queue", &Tensor::from_slice(&[1.0_f32, 2.0]))?;
        Ok(json!("saved"))
    }

    fn on_load_checkpoint(&mut self, saved: &Value, tensors: &ModuleTensors) -> anyhow::Result<()> {
        anyhow::ensure!(saved == "saved", "{saved}");
        self.queue = Some(tensors.get("queue")?.shallow_clone());
        Ok(())
    }
}

#[test]
fn a_module_is_made_of_the_values_and_the_weights_that_were_saved() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("last.ckpt");
    let mut net = Net::new(Width { width: 3 }).unwrap();
    let mut trainer = silent().max_epochs(1).build().unwrap();
    let x = Tensor::ones([4, 2], (Kind::Float, tch::Device::Cpu));
    let loader = DataLoader::new(TensorDataset::new(x).unwrap()).build().unwrap();
    let mut data = Loaders::new().train(loader);
    trainer.fit(&mut net, &mut data).unwrap();
    trainer.save_checkpoint(&mut net, &mut data, &path, None).unwrap();
    let made = Net::load_from_checkpoint(&path, true, Net::new).unwrap();
    assert_eq!(made.state_dict(), net.state_dict());
    assert_eq!(made.queue, Some(Tensor::from_slice(&[1.0_f32, 2.0])));

    let other = |_: Value| Net::new(Width { width: 4 });
    let shape = Net::load_from_checkpoint(&path, false, other);
    assert_error!(shape, "last.ckpt: fc.weight has shape [3, 2], the module's is [4, 2]");
    let wrong = Net::load_from_checkpoint(&path, true, |_: u8| Net::new(Width { width: 3 }));
    assert_error!(wrong, "last.ckpt: its hyper-parameters are {\"width\":3}, which are not those");
    let refused = |_: Value| -> anyhow::Result<Net> { anyhow::bail!("no memory") };
    assert_error!(Net::load_from_checkpoint(&path, true, refused), "no memory");

    let mut saved = Checkpoint::load(&path).unwrap();
    saved.weights.iter_mut().find(|(name, _)| name == "fc.bias").unwrap().0 = "head".to_owned();
    saved.save(&path).unwrap();
    assert_error!(
        Net::load_from_checkpoint(&path, true, Net::new),
        "last.ckpt: missing fc.bias, unexpected head"
    );
    let made = Net::load_from_checkpoint(&path, false, Net::new).unwrap();
    assert!(made.fc.weight.detach().equal(&net.fc.weight.detach()));
}
