//! What a strategy that divides gradients is told: that a unit's backward pass begins, and that its gradients are complete.

use std::sync::{Arc, Mutex};

use voltaic::data::Loaders;
use voltaic::distributed::World;
use voltaic::nn::{Callable, Linear, Module, ModuleExt, ModuleHooks, RemovableHandle, UnitGrads};
use voltaic::optim::Sgd;
use voltaic::strategy::{Strategy, Votes};
use voltaic::{Kind, Result, Tensor};

use crate::probe::silent;
use crate::rng::seeded;
use crate::stages::loader;

type Log = Arc<Mutex<Vec<String>>>;

#[derive(Module)]
struct Net {
    first: Linear,
    second: Linear,
}

lightning_module!(Net, Tensor, Sgd::new(0.125), |net, batch, _| {
    let hidden = net.first.call(batch)?.f_tanh()?;
    Ok(net.second.call(&hidden)?.f_square()?.f_mean(Kind::Float)?)
});

fn net() -> Net {
    Net { first: Linear::new(2, 2).unwrap(), second: Linear::new(2, 2).unwrap() }
}

/// Notes what it is told of each child of the module.
#[derive(Debug)]
struct Units {
    world: World,
    votes: Votes,
    log: Log,
    before: Vec<RemovableHandle>,
    grads: Vec<UnitGrads>,
}

impl Strategy for Units {
    fn name(&self) -> &'static str {
        "units"
    }

    fn world(&self) -> &World {
        &self.world
    }

    fn prepare(&mut self, module: &dyn Module, calls: &ModuleHooks) -> Result<()> {
        for (fqn, unit) in module.named_modules().into_iter().filter(|(fqn, _)| !fqn.is_empty()) {
            let (log, name) = (self.log.clone(), fqn.clone());
            self.before.push(calls.register_full_backward_pre_hook(fqn, move |call, grads| {
                assert!(grads.iter().all(Option::is_some));
                log.lock().unwrap().push(format!("before {}", call.fqn()));
                Ok(())
            }));
            let (log, parameters) = (self.log.clone(), unit.parameters());
            self.grads.push(UnitGrads::register(unit.parameters(), move |missing| {
                assert!(missing.is_empty() && parameters.iter().all(|parameter| parameter.grad().defined()));
                log.lock().unwrap().push(format!("grads {name}"));
                Ok(())
            })?);
        }
        Ok(())
    }

    fn begin_backward(&mut self, _loss: &Tensor, _syncs: bool, votes: Votes) -> Result<()> {
        self.votes = votes;
        self.grads.iter().for_each(UnitGrads::begin);
        Ok(())
    }

    fn end_backward(&mut self, done: Result<()>) -> Result<Votes> {
        self.log.lock().unwrap().push("end".to_owned());
        done.map(|()| self.votes)
    }

    fn teardown(&mut self) {
        self.before.drain(..).for_each(|handle| handle.remove());
        self.grads.clear();
    }
}

#[test]
fn a_strategy_is_told_of_each_units_backward_pass() {
    let _seeded = seeded(1);
    let log = Log::default();
    let kept = log.clone();
    let units = move |world: World| {
        let (votes, log) = (Votes::default(), kept.clone());
        Ok(Box::new(Units { world, votes, log, before: Vec::new(), grads: Vec::new() }) as Box<dyn Strategy>)
    };
    let mut trainer = silent().accelerator("cpu").max_epochs(1).strategy(units).build().unwrap();
    for _ in 0..2 {
        trainer.fit(&mut net(), &mut Loaders::new().train(loader(4))).unwrap();
        let told = std::mem::take(&mut *log.lock().unwrap());
        let step = ["before second", "grads second", "before first", "grads first", "end"];
        assert_eq!(told, [step, step].concat());
    }
    assert!(trainer.module_hooks().is_empty());
}

/// A unit of both layers, and what it was told: how many parameters had no gradient.
fn unit(net: &Net) -> (UnitGrads, Arc<Mutex<Vec<usize>>>) {
    let told = Arc::new(Mutex::new(Vec::new()));
    let kept = told.clone();
    let unit = UnitGrads::register(net.parameters(), move |missing| {
        kept.lock().unwrap().push(missing.len());
        Ok(())
    });
    (unit.unwrap(), told)
}

#[test]
fn a_unit_with_unused_or_tied_parameters_is_told_of_once() {
    let _seeded = seeded(1);
    let net = net();
    let (_unit, told) = unit(&net);
    let input = Tensor::ones([1, 2], (Kind::Float, tch::Device::Cpu));
    let both = || net.second.call(&net.first.call(&input).unwrap()).unwrap().sum(Kind::Float);
    both().backward();
    assert_eq!(*told.lock().unwrap(), [0]);
    net.second.call(&input).unwrap().sum(Kind::Float).backward();
    assert_eq!(*told.lock().unwrap(), [0, 2], "weight and bias of `first` have no part in the loss");
    (both() + both()).backward();
    input.sum(Kind::Float).f_add(&both()).unwrap().backward();
    assert_eq!(*told.lock().unwrap(), [0, 2, 0, 0], "a parameter that is used twice has one gradient");
    let again = net.parameters().into_iter().chain(net.parameters());
    let _twice = UnitGrads::register(again, |missing| {
        assert!(missing.is_empty());
        Ok(())
    })
    .unwrap();
    both().backward();
}

#[test]
fn an_error_of_a_unit_fails_backward_and_the_next_pass_begins_again() {
    let _seeded = seeded(1);
    let net = net();
    let (unit, told) = unit(&net);
    let fails = UnitGrads::register(net.first.parameters(), |_| anyhow::bail!("rank 1 is gone")).unwrap();
    let input = Tensor::ones([1, 2], (Kind::Float, tch::Device::Cpu));
    let both = || net.second.call(&net.first.call(&input).unwrap()).unwrap().sum(Kind::Float);
    assert!(both().f_backward().is_err());
    assert_eq!(fails.take_failure().unwrap().to_string(), "rank 1 is gone");
    drop(fails);
    unit.begin();
    told.lock().unwrap().clear();
    both().backward();
    assert_eq!(*told.lock().unwrap(), [0]);
}
