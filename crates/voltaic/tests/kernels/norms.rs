//! Batch norm.

use tch::{Device, Kind, Tensor};

use crate::{assert_close, channels_last, install};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

/// A norm with weights that are not 1.
struct Norm {
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    running_mean: Tensor,
    running_var: Tensor,
}

impl Norm {
    fn new(channels: i64, is_affine: bool) -> Self {
        let draw = || (Tensor::rand([channels], FLOAT) + 0.5).set_requires_grad(true);
        let (weight, bias) = (is_affine.then(draw), is_affine.then(draw));
        Self { weight, bias, running_mean: draw().detach(), running_var: draw().detach() }
    }

    /// The same numbers in float64.
    fn in_float64(&self) -> Self {
        let copy = |x: &Tensor| x.detach().to_kind(Kind::Double);
        let leaf = |x: &Option<Tensor>| x.as_ref().map(|x| copy(x).set_requires_grad(true));
        let (running_mean, running_var) = (copy(&self.running_mean), copy(&self.running_var));
        Self { weight: leaf(&self.weight), bias: leaf(&self.bias), running_mean, running_var }
    }

    /// The output, and the gradients of the input, of weights and biases.
    fn run(&self, x: &Tensor, grad: &Tensor) -> Vec<Tensor> {
        let x = x.detach().set_requires_grad(true);
        let (mean, var) = (Some(&self.running_mean), Some(&self.running_var));
        let y = x.batch_norm(self.weight.as_ref(), self.bias.as_ref(), mean, var, true, 0.2, 1e-5, false);
        let leaves = [Some(&x), self.weight.as_ref(), self.bias.as_ref()].into_iter().flatten();
        let leaves: Vec<Tensor> = leaves.map(Tensor::shallow_clone).collect();
        let grads = voltaic::ffi::autograd_grad(&[y.shallow_clone()], &[grad.shallow_clone()], &leaves);
        [y.detach()].into_iter().chain(grads.unwrap().into_iter().flatten()).collect()
    }
}

#[test]
fn batch_norm_and_its_gradients() {
    install();
    tch::manual_seed(8);
    // channels that fill tiles of 64 and 16, or leave a rest; pixels that fill blocks, or leave a rest
    for size in [[2, 3, 5, 7], [3, 83, 9, 5], [16, 64, 30, 31], [2, 600, 2, 2], [1, 4, 2, 3]] {
        for (kind, tolerance) in [(Kind::Float, 2e-6), (Kind::BFloat16, 8e-3)] {
            for is_affine in [true, false] {
                let [x, grad] = [3.0, 0.0].map(|shift| (Tensor::randn(size, FLOAT) + shift).to_kind(kind));
                let [x64, grad64] = [&x, &grad].map(|x| x.to_kind(Kind::Double));
                let norm = Norm::new(size[1], is_affine);
                let norm64 = norm.in_float64();
                let results = norm.run(&channels_last(&x), &grad); // a gradient of another layout
                let expected = norm64.run(&x64, &grad64);
                assert_eq!(results.len(), if is_affine { 4 } else { 2 });
                for (i, (result, expected)) in results.iter().zip(&expected).enumerate() {
                    let what = format!("result {i} of {size:?} {kind:?}");
                    let is_vector = i > 1;
                    let tolerance = if is_vector { 5e-6 } else { tolerance };
                    assert_close(&what, result, expected, tolerance);
                    let is_in_float32 = kind == Kind::Float || is_vector;
                    assert_eq!(result.kind(), if is_in_float32 { Kind::Float } else { kind }, "{what}");
                    assert!(is_vector || result.stride() == channels_last(&x).stride(), "{what}");
                }
                // libtorch's own, which sums less well with one thread
                let is_libtorchs = kind == Kind::BFloat16 && !is_affine;
                let tolerance = if is_libtorchs { 1e-5 } else { 2e-6 };
                assert_close("running mean", &norm.running_mean, &norm64.running_mean, tolerance);
                assert_close("running variance", &norm.running_var, &norm64.running_var, tolerance);
            }
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit_of_batch_norm() {
    install();
    tch::manual_seed(9);
    let [x, grad] = [0, 1].map(|_| channels_last(&Tensor::randn([8, 48, 40, 40], FLOAT)));
    let results: Vec<Vec<Tensor>> = [1, 2, 3]
        .into_iter()
        .map(|threads| {
            tch::manual_seed(10);
            voltaic::ffi::set_thread_num_threads(threads);
            Norm::new(48, true).run(&x, &grad)
        })
        .collect();
    assert!(results[1..].iter().all(|result| *result == results[0]));
}

#[test]
fn a_large_mean_does_not_hide_the_variance() {
    install();
    let x =
        channels_last(&(Tensor::arange(2 * 20 * 8 * 8, FLOAT).remainder(2.0) + 1000.0).view([2, 20, 8, 8]));
    let y = Norm::new(20, false).run(&x, &x)[0].abs();
    assert!(y.allclose(&y.ones_like(), 1e-4, 1e-4, false), "{}", y.max());
}
