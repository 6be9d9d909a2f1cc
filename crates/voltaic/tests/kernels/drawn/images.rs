//! Pools and norms of images.

use tch::{Device, Kind, Tensor};

use super::calls::{Calls, is_near};
use super::draw::Among;
use super::rows::Group;
use crate::beside::compare_drawn;

fn is_last(x: &Tensor) -> bool {
    x.dim() == 4 && x.permute([0, 2, 3, 1]).is_contiguous()
}

fn note(calls: &mut Calls, operator: &str, x: &Tensor) {
    if x.numel() > 0 && is_last(x) && [Kind::Float, Kind::BFloat16].contains(&x.kind()) {
        let dtype = if x.kind() == Kind::Float { "Float32" } else { "Bfloat16" };
        calls.note(&format!("operators of {dtype} by {operator}"));
    }
}

fn pools(calls: &mut Calls) {
    let kind = calls.draw.kind();
    let side = |calls: &mut Calls| {
        let side = calls.draw.side(6, 12);
        if calls.draw.once_in(6) { side } else { 2 * side }
    };
    let mut sizes = vec![calls.draw.side(3, 4), calls.draw.side(20, 40), side(calls), side(calls)];
    if calls.draw.once_in(6) {
        sizes.remove(0);
    }
    let (layout, x) = calls.draw.tensor(&sizes, kind, Among::All);
    note(calls, "MaxPool2d", &x);
    let lists: [&[i64]; 6] = [&[2], &[2, 2], &[2, 2], &[2, 2], &[2, 3], &[2, 2, 2]];
    let window = calls.draw.one_of(&lists);
    let stride = calls.draw.one_of(&[&[][..], &[2], &[2, 2], &[2, 2], &[1, 1], &[2, 2, 2]]);
    let padding = calls.draw.one_of(&[&[0][..], &[0, 0], &[0, 0], &[0, 0], &[1, 1], &[0, 0, 0]]);
    let dilation = calls.draw.one_of(&[&[1][..], &[1, 1], &[1, 1], &[1, 1], &[2, 1], &[1, 1, 1]]);
    let ceils = calls.draw.once_in(3);
    let what = format!(
        "pool {kind:?} {layout} {sizes:?} {window:?} {stride:?} {padding:?} {dilation:?} ceils {ceils}"
    );
    calls.call(&what, &[&x], |x| {
        let (y, places) = x[0].f_max_pool2d_with_indices(window, stride, padding, dilation, ceils)?;
        Ok(vec![y, places])
    });
    let pooled: Vec<i64> = sizes
        .iter()
        .enumerate()
        .map(|(dim, size)| if dim + 2 < sizes.len() { *size } else { size / 2 })
        .collect();
    let places = calls.draw.out(&pooled, Kind::Int64, None).1;
    calls.write(&what, (&pooled, kind, None), |out| {
        Ok(x.f_max_pool2d_with_indices_out(out, &places, [2, 2], [2, 2], [0, 0], [1, 1], false)?.0)
    });
    let Ok((y, places)) = x.f_max_pool2d_with_indices([2, 2], [2, 2], [0, 0], [1, 1], false) else { return };
    let (layout, grad) = calls.draw.tensor(&y.size(), kind, Among::All);
    calls.write(&format!("gradient {layout} of {what}"), (&sizes, kind, None), |out| {
        x.f_max_pool2d_with_indices_backward_grad_input(
            out,
            &grad,
            [2, 2],
            [2, 2],
            [0, 0],
            [1, 1],
            false,
            &places,
        )
    });
}

fn norms(calls: &mut Calls) {
    let kind = calls.draw.kind();
    let sizes =
        [calls.draw.side(3, 4), calls.draw.side(20, 70), calls.draw.side(6, 12), calls.draw.side(6, 12)];
    let channels = sizes[1];
    let (layout, x) = calls.draw.tensor(&sizes, kind, Among::All);
    note(calls, "BatchNorm", &x);
    let of_weights = if kind == Kind::BFloat16 && calls.draw.once_in(2) { Kind::Float } else { kind };
    let (first, weight) = calls.draw.tensor(&[channels], of_weights, Among::Finite);
    // the backward pass of libtorch reads memory after it if it is not in one piece and the channels are last
    let weight = weight.contiguous();
    let (second, bias) = calls.draw.tensor(&[channels], of_weights, Among::Finite);
    let moments: Vec<Tensor> = (0..2)
        .map(|_| calls.draw.tensor(&[channels], of_weights, Among::Finite).1.contiguous().abs())
        .collect();
    let (has_weight, has_bias, has_moments) =
        (!calls.draw.once_in(4), !calls.draw.once_in(4), calls.draw.once_in(2));
    let is_training = !calls.draw.once_in(8);
    let momentum = calls.draw.one_of(&[0.1, 0.0, 1.0, 0.5]);
    let what = format!(
        "batch norm {kind:?} {layout} {sizes:?} {of_weights:?} {first} {second} weight {has_weight} bias {has_bias} moments {has_moments} training {is_training} momentum {momentum}"
    );
    let eps = 0.05; // of channels that are one number it is all that they are divided by
    let [mean, var] = [&moments[0], &moments[1]];
    calls.call(&what, &[&x, &weight, &bias], |x| {
        let given = has_moments.then(|| [mean.copy(), var.copy()]);
        let (first, second) = given.as_ref().map_or((None, None), |[mean, var]| (Some(mean), Some(var)));
        let (weight, bias) = (has_weight.then_some(&x[1]), has_bias.then_some(&x[2]));
        let y = x[0].f_batch_norm(weight, bias, first, second, is_training, momentum, eps, false)?;
        Ok([y].into_iter().chain(given.into_iter().flatten()).collect())
    });
    let saved = calls.draw.out(&[channels], Kind::Float, None).1;
    let inverse = Tensor::zeros([channels], (Kind::Float, Device::Cpu));
    let saved = if calls.draw.once_in(3) { saved } else { inverse.zeros_like() };
    calls.write(&what, (&sizes, kind, None), |out| {
        let none = None::<&Tensor>;
        Ok(x.f_native_batch_norm_out(out, &saved, &inverse, Some(&weight), none, none, none, true, 0.1, eps)?
            .0)
    });
}

fn draw(calls: &mut Calls) {
    for _ in 0..150 {
        pools(calls);
        norms(calls);
    }
}

#[test]
fn drawn_pools_and_norms_are_libtorchs() {
    compare_drawn("drawn::images::drawn_pools_and_norms_are_libtorchs", Group::Images, draw, 5, is_near);
}
