//! `ModelSummary` of a module that has an example of its inputs.

use std::cell::Cell;

use voltaic::data::Loaders;
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::{BatchNorm1d, Callable, Dropout, Linear, Sequential};
use voltaic::optim::{Optimizers, Sgd};
use voltaic::trainer::Trainer;
use voltaic::{Kind, Module, Tensor};

use crate::probe::{own_process, plays, silent, text_of};
use crate::rng::seeded;
use crate::stages::loader;

#[derive(Module)]
struct Net {
    net: Sequential,
    #[module(skip)]
    has_example: bool,
    #[module(skip)]
    fails: bool,
    #[module(skip)]
    examples: Cell<u32>,
}

impl LightningModule for Net {
    type Batch = Tensor;

    fn training_step(&self, batch: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        Ok(self.net.call(batch)?.f_square()?.f_mean(Kind::Float)?)
    }

    fn example_input_array(&self) -> Option<Vec<Tensor>> {
        self.has_example.then(|| vec![Tensor::rand([5, 2], (Kind::Float, tch::Device::Cpu))])
    }

    fn forward_example(&self, inputs: &[Tensor]) -> anyhow::Result<()> {
        anyhow::ensure!(!self.fails, "no forward of it");
        self.examples.set(self.examples.get() + 1);
        let output = self.net.call(&inputs[0])?;
        anyhow::ensure!(!output.requires_grad(), "it ran with grad");
        Ok(())
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Sgd::new(0.125).into()
    }
}

fn net(has_example: bool) -> Net {
    let net = Sequential::new()
        .add(Linear::new(2, 3).unwrap())
        .add(BatchNorm1d::new(3).unwrap())
        .add(Dropout::new(0.5).unwrap());
    Net { net, has_example, fails: false, examples: Cell::new(0) }
}

#[test]
fn sizes_are_there_before_the_first_batch() {
    if plays("summary") {
        let builder = Trainer::builder().accelerator("cpu").logger(false).enable_checkpointing(false);
        let builder = builder.enable_progress_bar(false).limit_train_batches(0).max_epochs(1);
        builder.build().unwrap().fit(&mut net(true), &mut Loaders::new().train(loader(4))).unwrap();
        return;
    }
    let output = own_process("summary").output().unwrap();
    text_of(&output);
    let printed = String::from_utf8_lossy(&output.stderr);
    let table = "\
Name | Type       | Params | In sizes | Out sizes
-------------------------------------------------
net  | Sequential |     15 |   [5, 2] |    [5, 3]
15 parameters, 15 trainable, 0.00 MB
";
    assert!(printed.contains(table), "{printed}");
}

#[test]
fn a_run_is_the_same_with_and_without_an_example() {
    let weights = |has_example, enable_model_summary| {
        let _seeded = seeded(1);
        let mut net = net(has_example);
        let builder = silent().accelerator("cpu").max_epochs(2).enable_model_summary(enable_model_summary);
        builder.build().unwrap().fit(&mut net, &mut Loaders::new().train(loader(16))).unwrap();
        assert_eq!(net.examples.get(), u32::from(has_example && enable_model_summary));
        let state = voltaic::nn::ModuleExt::try_state_dict(&net).unwrap();
        state
            .into_iter()
            .map(|(name, tensor)| (name, format!("{tensor:?} {}", tensor.to_string(80).unwrap())))
            .collect::<Vec<_>>()
    };
    let without = weights(false, true);
    assert_eq!(weights(true, true), without);
    assert_eq!(weights(true, false), without);
}

#[test]
fn an_error_of_the_example_names_it() {
    let _seeded = seeded(1);
    let mut net = Net { fails: true, ..net(true) };
    let mut trainer = silent().accelerator("cpu").max_epochs(1).enable_model_summary(true).build().unwrap();
    assert_error!(trainer.fit(&mut net, &mut Loaders::new().train(loader(4))), "forward_example");
}
