//! Parameters that a pass has no gradient for, though autograd calls their hooks: experts within a module that has hooks of its
//! backward pass, where the loss takes some of its outputs.

use tch::Tensor;
use voltaic::callback::LambdaCallback;
use voltaic::nn::{Callable, Linear};
use voltaic::optim::AdamW;
use voltaic::{Kind, Module};

use crate::ladder::trained;
use crate::models::{Batch, loaders, numbered};
use crate::ranks::{STAGES, assert_within, on_ranks, silent};

#[derive(Module)]
struct Experts {
    left: Linear,
    right: Linear,
}

impl Callable<(Tensor, Tensor)> for Experts {
    type Output = (Tensor, Tensor);

    fn forward_with(&self, (x, y): &(Tensor, Tensor)) -> anyhow::Result<(Tensor, Tensor)> {
        Ok((self.left.call(x)?, self.right.call(y)?))
    }
}

/// The loss takes the output of one expert in each batch.
#[derive(Module)]
struct Mixture {
    first: Linear,
    experts: Experts,
    last: Linear,
}

lightning_module!(Mixture, Batch, AdamW::new(0.01), |net, (x, y), ctx| {
    let x = net.first.call(x)?;
    let (left, right) = net.experts.call(&(x.shallow_clone(), x))?;
    let chosen = if ctx.batch_idx() % 5 == 2 { right } else { left };
    Ok((net.last.call(&chosen)? - y).square().mean(Kind::Float))
});

#[test]
fn parameters_without_a_gradient_are_left_alone_within_a_module_with_hooks() {
    on_ranks(
        "experts::parameters_without_a_gradient_are_left_alone_within_a_module_with_hooks",
        2,
        |ranks, folder| {
            let net = || {
                numbered(Mixture {
                    first: Linear::new(5, 7).unwrap(),
                    experts: Experts { left: Linear::new(7, 7).unwrap(), right: Linear::new(7, 7).unwrap() },
                    last: Linear::new(7, 3).unwrap(),
                })
            };
            let ddp = "ddp_find_unused_parameters_true";
            for window in [1_u64, 2] {
                let builder =
                    |strategy| silent(ranks, strategy, folder).max_epochs(2).accumulate_grad_batches(window);
                let expected = trained(builder(ddp), net(), loaders(24));
                for strategy in STAGES.into_iter().chain([ddp]) {
                    let found = trained(
                        // autograd goes through a function of the outputs, and one of the inputs
                        builder(strategy).callback(LambdaCallback::new().on_train_start(|ctx, _| {
                            let _ =
                                ctx.module_hooks().register_full_backward_hook("experts", |_, _, _| Ok(()));
                            Ok(())
                        })),
                        net(),
                        loaders(24),
                    );
                    let limit = if window == 1 { 0.0 } else { 1e-6 }; // sums of windows have another order
                    assert_within(&format!("{strategy}, windows of {window}"), &found, &expected, limit);
                }
            }
        },
    );
}
