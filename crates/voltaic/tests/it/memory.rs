//! A trainer's steady state asks the system for no memory.

use voltaic::callback::Callback;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::ffi;
use voltaic::models::{Classifier, Mlp, MlpConfig};
use voltaic::module::HookContext;
use voltaic::{Kind, Module, Tensor};

use crate::probe::{own_process, plays, silent, text_of};

/// Blocks that the pool has taken from the system after each step.
#[derive(Default)]
struct SystemAllocs(Vec<u64>);

impl Callback for SystemAllocs {
    fn on_train_batch_end(&mut self, _ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        self.0.push(ffi::host_pool().stats().total_system_allocs);
        Ok(())
    }

    fn on_train_end(&mut self, _ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        let steady = &self.0[20..];
        anyhow::ensure!(steady.len() == 100 && steady[0] > 0, "{} steps", self.0.len());
        anyhow::ensure!(steady.iter().all(|allocs| *allocs == steady[0]), "{:?}", self.0);
        Ok(())
    }
}

#[test]
fn a_built_trainer_uses_the_pool_and_a_hundred_steps_take_nothing_from_the_system() {
    if !plays("steps") {
        text_of(&own_process("steps").env("VOLTAIC_HOST_POOL", "1").output().unwrap());
        return;
    }
    let options = (Kind::Float, tch::Device::Cpu);
    let mut trainer = silent().max_steps(120).callback(SystemAllocs::default()).build().unwrap();
    let x = Tensor::rand([640, 64], options);
    let y = Tensor::randint(10, [640], (Kind::Int64, tch::Device::Cpu));
    let train = DataLoader::new(TensorDataset::new((x, y)).unwrap()).batch_size(32).shuffle(true);
    let config = MlpConfig { in_features: 64, hidden_features: 32, num_classes: 10 };
    let mut net = Classifier::new(Mlp::new(config).unwrap());
    trainer.fit(&mut net, &mut Loaders::new().train(train.build().unwrap())).unwrap();
}
