//! Activation checkpointing from public pieces: an interceptor that drops what a segment computes, and computes it again in backward.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use voltaic::ffi::{autograd_function, autograd_grad, grad_is_enabled};
use voltaic::nn::{CallInterceptor, InterceptorLevel, Module, ModuleExt, Next};
use voltaic::{Kind, Tensor};

/// How gradients of the segment's parameters come about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gradients {
    /// By `autograd_grad`: the outer backward pass accumulates them.
    Outer,
    /// By a backward pass of its own, as `torch.utils.checkpoint` with `use_reentrant=True`.
    Nested,
}

pub struct Checkpoint {
    pub gradients: Gradients,
    pub segment: fn(&dyn Module) -> bool,
    /// Without it, calls run as usual.
    pub is_on: Arc<AtomicBool>,
    /// Segments that were recomputed.
    pub recomputed: Arc<AtomicUsize>,
}

impl Checkpoint {
    pub fn new(gradients: Gradients, segment: fn(&dyn Module) -> bool) -> Self {
        Self { gradients, segment, is_on: Arc::new(true.into()), recomputed: Arc::default() }
    }

    pub fn recomputed(&self) -> usize {
        self.recomputed.load(Ordering::Relaxed)
    }
}

impl CallInterceptor for Checkpoint {
    fn level(&self) -> InterceptorLevel {
        InterceptorLevel::Activations
    }

    fn intercepts(&self, module: &dyn Module) -> bool {
        self.is_on.load(Ordering::Relaxed) && (self.segment)(module)
    }

    fn call(&self, module: &dyn Module, inputs: &[Tensor], next: &Next) -> anyhow::Result<Vec<Tensor>> {
        if !grad_is_enabled() {
            return next.run(inputs);
        }
        let recompute = next.recompute_fn()?;
        let outputs = tch::no_grad(|| next.run(inputs))?;
        let params = module.parameters().into_iter().filter(|parameter| parameter.requires_grad());
        let params: Vec<Tensor> = params.map(|parameter| parameter.leaf().shallow_clone()).collect();
        let saved: Vec<(Tensor, bool)> =
            inputs.iter().map(|input| (input.detach(), input.requires_grad())).collect();
        // a pass of its own needs something that requires grad for autograd to come by
        let dummy = [Tensor::zeros([1], (Kind::Float, tch::Device::Cpu)).set_requires_grad(true)];
        let others = if self.gradients == Gradients::Outer { &params[..] } else { &dummy };
        let leaves: Vec<Tensor> = inputs.iter().chain(others).map(Tensor::shallow_clone).collect();
        let (gradients, recomputed) = (self.gradients, self.recomputed.clone());
        autograd_function(&leaves, &outputs, move |grads| {
            recomputed.fetch_add(1, Ordering::Relaxed);
            let inputs: Vec<Tensor> =
                saved.iter().map(|(input, trained)| input.detach().set_requires_grad(*trained)).collect();
            let outputs = tch::with_grad(|| recompute.run(&inputs))?;
            let trained = inputs.iter().filter(|input| input.requires_grad());
            match gradients {
                Gradients::Outer => {
                    let leaves: Vec<Tensor> = trained.chain(&params).map(Tensor::shallow_clone).collect();
                    let mut found = autograd_grad(&outputs, grads, &leaves)?.into_iter();
                    let mut grads: Vec<Option<Tensor>> = saved
                        .iter()
                        .map(|(_, trained)| found.by_ref().take(usize::from(*trained)).next()?)
                        .collect();
                    grads.extend(found);
                    Ok(grads)
                }
                Gradients::Nested => {
                    let weighted = |(output, grad): (&Tensor, &Tensor)| (output * grad).sum(output.kind());
                    let loss: Tensor = tch::with_grad(|| outputs.iter().zip(grads).map(weighted).sum());
                    loss.f_backward()?;
                    let grads = inputs.iter().map(|input| Some(input.grad()).filter(Tensor::defined));
                    Ok(grads.chain([None]).collect())
                }
            }
        })?;
        Ok(outputs)
    }
}
