//! What is done by hand in a run, and what is seen of it.

use std::sync::{Arc, Mutex};

use voltaic::callback::Callback;
use voltaic::module::{HookContext, StepHook};
use voltaic::nn::ModuleExt;
use voltaic::{Module, Tensor, ffi};

use super::net::{Batch, Net, stored};
use super::plan::{Deed, Plan};
use super::{Bits, described};
use crate::random_net::When;

/// Does by hand what a plan asks for, and looks at each batch.
pub struct Hands {
    plan: Plan,
    seen: Arc<Mutex<Vec<(String, Bits)>>>,
}

impl Hands {
    pub fn new(plan: &Plan, seen: Arc<Mutex<Vec<(String, Bits)>>>) -> Self {
        Self { plan: plan.clone(), seen }
    }

    fn at(&self, when: When, ctx: &mut HookContext, module: &dyn Module) {
        let Some((_, deed, number)) = self.plan.by_hand.filter(|(own, ..)| *own == when) else { return };
        let step = ctx.current_epoch() as usize * self.plan.batches + ctx.batch_idx();
        if when != When::EpochStart && step % 3 != 1 {
            return;
        }
        let parameters = module.parameters();
        let of = &parameters[number % parameters.len()];
        let write = |tensor: &Tensor| {
            if tensor.defined() {
                let _ = tch::no_grad(|| tensor.shallow_clone().multiply_scalar_(0.75));
            }
        };
        match deed {
            Deed::WriteWeight => write(of.tensor()),
            Deed::WriteGrad => write(&of.grad()),
            Deed::ReplaceGrad => {
                if of.grad().defined() {
                    let own = tch::no_grad(|| of.grad() * 0.5);
                    ffi::set_grad(of.leaf(), &own).unwrap();
                }
            }
            Deed::DropGrad => ffi::clear_grads([of.tensor()]).unwrap(),
            Deed::Freeze => drop(of.set_requires_grad(step % 2 == 1)),
            Deed::SetRate => self.groups(ctx, |group| group.lr *= 0.75),
            Deed::SetDecay => self.groups(ctx, |group| group.weight_decay += 0.125),
            Deed::SetData => of.set_data(&tch::no_grad(|| of.tensor() * 0.5)).unwrap(),
        }
    }

    fn groups(&self, ctx: &mut HookContext, change: impl Fn(&mut voltaic::optim::ParamGroup)) {
        for optimizer in ctx.optimizers_mut() {
            optimizer.param_groups_mut().iter_mut().for_each(&change);
        }
    }

    fn note(&self, name: String, tensor: &Tensor) {
        self.seen.lock().unwrap().push((name, described(tensor)));
    }
}

impl Callback for Hands {
    fn on_step_hook(
        &mut self,
        hook: StepHook,
        ctx: &mut HookContext,
        module: &dyn Module,
    ) -> anyhow::Result<()> {
        self.at(When::of(hook), ctx, module);
        Ok(())
    }

    fn on_train_epoch_start(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        self.at(When::EpochStart, ctx, module);
        Ok(())
    }

    fn on_train_batch_start(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        self.at(When::BatchStart, ctx, module);
        if self.plan.cuts && ctx.batch_idx() % 3 == 1 {
            let (x, y) = ctx.batch_mut::<Batch>()?;
            if x.size()[0] > 1 {
                (*x, *y) = (x.narrow(0, 1, x.size()[0] - 1), y.narrow(0, 1, y.size()[0] - 1));
            }
        }
        Ok(())
    }

    fn on_train_batch_end(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        let place = format!("epoch {} batch {}", ctx.current_epoch(), ctx.batch_idx());
        if let Some(loss) = ctx.loss() {
            self.note(format!("{place} loss"), loss);
        }
        for name in ["hidden"] {
            if let Ok(output) = ctx.outputs().tensor(name) {
                self.note(format!("{place} output"), output);
            }
        }
        self.note(format!("{place} target"), &ctx.batch::<Batch>()?.1);
        let mut found = Vec::new();
        module.downcast_mut::<Net>()?.blocks.iter().for_each(|block| stored(block, &mut found));
        for tensor in found {
            self.note(format!("{place} stored"), &tensor);
        }
        for (number, optimizer) in ctx.optimizers().iter().enumerate() {
            for group in optimizer.param_groups() {
                self.note(format!("{place} rate {number}"), &Tensor::from(group.lr));
            }
        }
        self.at(When::BatchEnd, ctx, module);
        Ok(())
    }
}
