//! Convolutions with weights that see padding only: their gradients are 0. oneDNN leaves them unwritten in bfloat16.

use tch::{Device, Kind, Tensor};

use crate::install;

/// A convolution of any number of dimensions, with the same numbers in each.
#[derive(Clone, Copy, Debug)]
struct Case {
    num_dims: usize,
    size: i64,
    kernel: i64,
    stride: i64,
    padding: i64,
    dilation: i64,
    groups: i64,
    is_transposed: bool,
    is_channels_last: bool,
}

const POINT: Case = Case {
    num_dims: 2,
    size: 1,
    kernel: 3,
    stride: 2,
    padding: 1,
    dilation: 1,
    groups: 1,
    is_transposed: false,
    is_channels_last: false,
};
const CHANNELS: i64 = 32;

impl Case {
    fn forward(self, input: &Tensor, weight: &Tensor) -> Tensor {
        let all = |number| vec![number; self.num_dims];
        let (stride, padding, dilation) = (all(self.stride), all(self.padding), all(self.dilation));
        let bias = None::<Tensor>;
        input.convolution(weight, bias, stride, padding, dilation, self.is_transposed, all(0), self.groups)
    }

    /// Leaves of values that bfloat16 and float16 have: input and weight.
    fn leaves(self) -> [Tensor; 2] {
        let draw = |first: [i64; 2], side| {
            let sizes = [first.to_vec(), vec![side; self.num_dims]].concat();
            Tensor::randint_low(-2, 3, sizes, (Kind::Double, Device::Cpu))
        };
        let leaves = [draw([4, CHANNELS], self.size), draw([CHANNELS, CHANNELS / self.groups], self.kernel)];
        leaves.map(|leaf| if self.is_channels_last { crate::channels_last(&leaf) } else { leaf })
    }
}

fn grads(case: Case, leaves: &[Tensor; 2], grad: &Tensor, kind: Kind) -> [Tensor; 2] {
    let leaves = leaves.each_ref().map(|leaf| leaf.detach().to_kind(kind).set_requires_grad(true));
    let out = case.forward(&leaves[0], &leaves[1]);
    dirty(&leaves);
    (out * grad.to_kind(kind)).sum(kind).backward();
    leaves.map(|leaf| leaf.grad())
}

/// What the allocator gives next has large numbers in it.
fn dirty(like: &[Tensor]) {
    let used: Vec<Tensor> = (0..8)
        .flat_map(|_| like.iter())
        .flat_map(|tensor| [tensor.kind(), Kind::Float].map(|kind| tensor.full_like(1e4).to_kind(kind)))
        .collect();
    drop(used);
}

/// All numbers are small integers, so that sums are exact in float32, and rounded once in 16 bits.
#[test]
fn gradients_of_weights_that_see_padding_only_are_zero() {
    install();
    voltaic::ffi::manual_seed(5).unwrap();
    let mut cases = Vec::new();
    for num_dims in [1, 2, 3] {
        let point = Case { num_dims, ..POINT };
        cases.extend([
            point,
            Case { kernel: 2, ..point },
            Case { groups: 2, ..point },
            Case { stride: 1, size: 2, dilation: 2, padding: 2, ..point },
            Case { stride: 3, size: 2, padding: 2, ..point },
            Case { is_transposed: true, size: 2, stride: 1, padding: 1, ..point },
            Case { is_transposed: true, ..point },
            Case { size: 5, ..point }, // each sees something
        ]);
    }
    cases.extend([
        Case { is_channels_last: true, ..POINT },
        Case { is_channels_last: true, kernel: 2, ..POINT },
    ]);
    for case in cases {
        let leaves = case.leaves();
        let out = case.forward(&leaves[0], &leaves[1]);
        let grad = Tensor::randint_low(-2, 3, out.size(), (Kind::Double, Device::Cpu));
        let expected = grads(case, &leaves, &grad, Kind::Double);
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
            for _ in 0..3 {
                let got = grads(case, &leaves, &grad, kind);
                for (what, (got, expected)) in ["input", "weight"].iter().zip(got.iter().zip(&expected)) {
                    crate::assert_close(&format!("{case:?}, {kind:?}, {what}"), got, expected, 0.02);
                }
            }
        }
    }
}
