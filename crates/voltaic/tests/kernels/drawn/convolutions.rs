//! Convolutions.

use tch::{Kind, Tensor};
use voltaic::kernels::{Convolution, Dtype, Part, convolution_kernel};

use super::calls::{Calls, is_near};
use super::draw::Among;
use super::rows::Group;
use crate::beside::compare_drawn;

/// What a convolution is called with.
struct Call {
    stride: [i64; 2],
    padding: [i64; 2],
    dilation: [i64; 2],
    groups: i64,
}

impl Call {
    fn draw(calls: &mut Calls) -> Self {
        let draw = &mut calls.draw;
        let mut pair = |usual: i64, low: i64, high: i64| {
            if draw.once_in(6) { [draw.between(low, high), draw.between(low, high)] } else { [usual; 2] }
        };
        let (stride, padding, dilation) = (pair(1, 1, 3), pair(1, 0, 3), pair(1, 1, 2));
        let stride = if draw.once_in(4) { [2, 2] } else { stride };
        Self { stride, padding, dilation, groups: if draw.once_in(8) { 2 } else { 1 } }
    }

    /// Whether each tap sees a pixel: oneDNN does not write the gradients of those that see none.
    fn all_taps_see(&self, size: [i64; 2], kernel: [i64; 2]) -> bool {
        (0..2).all(|dim| {
            let spanned = self.dilation[dim] * (kernel[dim] - 1) + 1;
            let room = size[dim] + 2 * self.padding[dim] - spanned;
            let outputs = if room < 0 { 0 } else { room / self.stride[dim] + 1 };
            (0..kernel[dim]).all(|tap| {
                (0..outputs).any(|output| {
                    let pixel = output * self.stride[dim] - self.padding[dim] + tap * self.dilation[dim];
                    (0..size[dim]).contains(&pixel)
                })
            })
        })
    }

    fn note(&self, calls: &mut Calls, x: &Tensor, weight: &Tensor) {
        let dtype = match x.kind() {
            Kind::Float => Dtype::Float32,
            Kind::BFloat16 => Dtype::Bfloat16,
            _ => return,
        };
        if self.dilation != [1, 1] || self.groups != 1 || x.numel() == 0 || weight.numel() == 0 {
            return;
        }
        let (sizes, of_weight) = (x.size(), weight.size());
        let is_last = |x: &Tensor| x.permute([0, 2, 3, 1]).is_contiguous();
        let pair = |pair: [i64; 2]| pair.map(|number| number as usize);
        let out =
            |dim: usize| (sizes[dim + 2] + 2 * self.padding[dim] - of_weight[dim + 2]) / self.stride[dim] + 1;
        let sizes = Convolution {
            dtype,
            are_channels_last: is_last(x) || is_last(weight),
            images: sizes[0] as usize,
            in_channels: sizes[1] as usize,
            out_channels: of_weight[0] as usize,
            in_size: pair([sizes[2], sizes[3]]),
            out_size: pair([out(0), out(1)]),
            kernel: pair([of_weight[2], of_weight[3]]),
            stride: pair(self.stride),
            padding: pair(self.padding),
        };
        for part in [Part::Output, Part::WeightGrad] {
            if let Some(kernel) = convolution_kernel(&sizes, part, is_last(x) && is_last(weight)) {
                calls.note(&format!("convolutions of {dtype:?} by {kernel:?}"));
            }
        }
    }
}

/// Images, channels, outputs, height, width, kernel.
fn draw_sizes(calls: &mut Calls, round: i64) -> [i64; 6] {
    let draw = &mut calls.draw;
    if round % 15 == 1 {
        return [2, 32, 32, 16, 16, 3];
    }
    if round % 15 == 0 {
        return [2, 256, 512, 4, 4, 3];
    }
    let channels = [1, 3, 16, 16, 32, 32, 48, 64, 128];
    let side = |draw: &mut super::draw::Draw| draw.one_of(&[1, 2, 3, 5, 8, 8, 12, 16]);
    let images = draw.one_of(&[1, 1, 2, 2, 3, 0]);
    let kernel = draw.one_of(&[3, 3, 3, 3, 3, 1, 2, 5]);
    [images, draw.one_of(&channels), draw.one_of(&channels), side(draw), side(draw), kernel]
}

fn draw(calls: &mut Calls) {
    for round in 0..60 {
        let kind = if round % 15 <= 1 {
            if round % 30 < 15 { Kind::Float } else { Kind::BFloat16 }
        } else {
            calls.draw.kind()
        };
        let [images, channels, outputs, height, width, kernel] = draw_sizes(calls, round);
        let mut call = Call::draw(calls);
        if round % 15 <= 1 {
            let stride = if round % 15 == 1 { 1 } else { 1 + round / 30 };
            call = Call { stride: [stride; 2], padding: [1, 1], dilation: [1, 1], groups: 1 };
        }
        if channels % call.groups != 0 || outputs % call.groups != 0 {
            call.groups = 1;
        }
        if !call.all_taps_see([height, width], [kernel, kernel]) {
            continue;
        }
        let of_weight = [outputs, channels / call.groups, kernel, kernel];
        let last = |x: Tensor| x.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2]);
        let (first, mut x) = calls.draw.tensor(&[images, channels, height, width], kind, Among::All);
        let (second, mut weight) = calls.draw.tensor(&of_weight, kind, Among::All);
        if round % 15 == 0 || calls.draw.once_in(4) {
            (x, weight) = (last(x), last(weight));
        }
        let (third, bias) = calls.draw.tensor(&[outputs], kind, Among::Finite);
        call.note(calls, &x, &weight);
        let Call { stride, padding, dilation, groups } = call;
        let what = format!(
            "{kind:?} {first} {second} {third} {images} {channels} to {outputs} {height} {width} by {kernel} stride {stride:?} padding {padding:?} dilation {dilation:?} groups {groups}"
        );
        if calls.draw.once_in(2) {
            calls.call(&format!("convolution {what}"), &[&x, &weight, &bias], |x| {
                Ok(vec![x[0].f_conv2d(&x[1], Some(&x[2]), stride, padding, dilation, groups)?])
            });
        } else {
            calls.call(&format!("convolution without bias {what}"), &[&x, &weight], |x| {
                Ok(vec![x[0].f_conv2d(&x[1], None::<&Tensor>, stride, padding, dilation, groups)?])
            });
        }
        // lists that are too long, or too short
        if calls.draw.once_in(6) {
            let stride = calls.draw.one_of(&[vec![1], vec![1, 1, 1], vec![], vec![0, 0], vec![-1, 1]]);
            let padding = calls.draw.one_of(&[vec![1], vec![1, 1, 1], vec![], vec![-1, 0]]);
            calls.call(&format!("convolution {what}, {stride:?} {padding:?}"), &[&x, &weight], |x| {
                Ok(vec![x[0].f_conv2d(&x[1], None::<&Tensor>, &*stride, &*padding, [1, 1], groups)?])
            });
        }
        if calls.draw.once_in(6) && groups == 1 {
            calls.call(&format!("transposed {what}"), &[&x, &weight], |x| {
                let weight = x[1].transpose(0, 1);
                Ok(vec![x[0].f_conv_transpose2d(
                    &weight,
                    None::<&Tensor>,
                    stride,
                    padding,
                    [0, 0],
                    1,
                    dilation,
                )?])
            });
        }
    }
}

#[test]
fn drawn_convolutions_are_libtorchs() {
    compare_drawn(
        "drawn::convolutions::drawn_convolutions_are_libtorchs",
        Group::Convolutions,
        draw,
        4,
        is_near,
    );
}
