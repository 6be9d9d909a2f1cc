//! Operators by element, and random masks.

use tch::{Kind, Tensor};

use super::calls::{Calls, is_near};
use super::draw::Among;
use super::rows::Group;
use crate::beside::compare_drawn;

fn draw(calls: &mut Calls) {
    for round in 0..120 {
        let kind = calls.draw.kind();
        let dim = calls.draw.between(0, 4);
        let sizes: Vec<i64> = (0..dim)
            .map(|_| if dim > 2 { calls.draw.side(6, 12) } else { calls.draw.side(40, 150) })
            .collect();
        // libtorch's vectors and scalars differ on GELU of infinity
        let (layout, x) = calls.draw.tensor(&sizes, kind, Among::Nan);
        let what = format!("{kind:?} {layout} {sizes:?}");
        let is_plain = x.is_contiguous() && x.numel() > 0;
        let approximate = calls.draw.one_of(&["none", "tanh", "none", "tanh", "erf"]);
        if is_plain && approximate != "erf" {
            note(calls, "Gelu", kind);
        }
        calls.call(&format!("gelu {approximate} {what}"), &[&x], |x| Ok(vec![x[0].f_gelu(approximate)?]));
        calls.write(&format!("gelu {what}"), (&sizes, kind, Some(&x)), |out| x.f_gelu_out(out, approximate));
        let (other, grad) = calls.draw.tensor(&sizes, kind, Among::Finite);
        calls.write(&format!("gelu backward {other} {what}"), (&sizes, kind, Some(&grad)), |out| {
            x.f_gelu_backward_grad_input(out, &grad, approximate)
        });

        let (layout, x) = calls.draw.tensor(&sizes, kind, Among::All);
        let what = format!("exact {kind:?} {layout} {sizes:?}");
        if x.is_contiguous() && x.numel() > 0 {
            note(calls, "Relu", kind);
        }
        calls.call(&format!("relu {what}"), &[&x], |x| Ok(vec![(&x[0] * 1.0).f_relu()?]));
        calls.call(&format!("relu_ {what}"), &[&x], |x| Ok(vec![x[0].copy().f_relu_()?]));
        let threshold = calls.draw.one_of(&[0.0, 0.0, 0.25]);
        calls.write(&format!("relu backward {what}"), (&sizes, kind, Some(&grad)), |out| {
            x.f_threshold_backward_grad_input(out, &grad, threshold)
        });

        let second = calls.draw.one_of(&[kind, kind, Kind::Float, Kind::BFloat16]);
        let others: Vec<i64> =
            sizes.iter().map(|size| if calls.draw.once_in(8) { 1 } else { *size }).collect();
        let (other, y) = calls.draw.tensor(&others, second, Among::All);
        let what = format!("{other} {second:?} {others:?} to {what}");
        if x.is_contiguous() && y.is_contiguous() && x.size() == y.size() && x.numel() > 0 && second == kind {
            note(calls, "Add", kind);
        }
        calls.call(&format!("add {what}"), &[&x, &y], |x| Ok(vec![x[0].f_add(&x[1])?]));
        calls.call(&format!("add_ {what}"), &[&x, &y], |x| Ok(vec![x[0].copy().f_add_(&x[1])?]));
        calls.call(&format!("sub {what}"), &[&x, &y], |x| Ok(vec![x[0].f_sub(&x[1])?]));
        calls.write(&format!("add {what}"), (&sizes, kind, Some(&x)), |out| x.f_add_out(out, &y));
        calls.write(&format!("add turned {what}"), (&sizes, kind, Some(&x)), |out| y.f_add_out(out, &x));

        let to = calls.draw.one_of(&[Kind::Float, Kind::BFloat16, Kind::Double, Kind::Half]);
        if x.is_contiguous() && x.numel() > 0 && to != kind {
            note(calls, "Convert", if kind == Kind::Float { to } else { kind });
        }
        calls.call(&format!("to {to:?} {what}"), &[&x], |x| Ok(vec![x[0].f_to_kind(to)?]));
        calls.write(&format!("to {to:?} {what}"), (&sizes, to, Some(&x)), |out| {
            x.f_internal_to_copy_out(out, false)
        });

        let p = calls.draw.one_of(&[0.0, 0.1, 0.5, 1.0, 1.5, f64::NAN]);
        tch::manual_seed(round);
        let (layout, mask) = calls.draw.tensor(&sizes, kind, Among::All);
        if mask.is_contiguous() && mask.numel() > 0 {
            note(calls, "Bernoulli", kind);
        }
        let mask = mask.detach().f_bernoulli_float_(p);
        calls.push(&format!("{round} exact mask of {p} {layout} {kind:?} {sizes:?}"), mask);
        calls.push(
            &format!("{round} exact numbers after a mask"),
            Tensor::f_rand([3], (Kind::Float, tch::Device::Cpu)),
        );
    }
}

fn note(calls: &mut Calls, operator: &str, kind: Kind) {
    let dtype = if kind == Kind::Float { "Float32" } else { "Bfloat16" };
    if [Kind::Float, Kind::BFloat16].contains(&kind) {
        calls.note(&format!("operators of {dtype} by {operator}"));
    }
}

#[test]
fn drawn_operators_by_element_are_libtorchs() {
    let test = "drawn::elements::drawn_operators_by_element_are_libtorchs";
    compare_drawn(test, Group::Elements, draw, 2, |both| {
        is_near(both)?;
        if both.name.contains("exact") && !both.name.contains("twice") {
            both.are_close(0.0, 1.0)
        } else {
            Ok(())
        }
    });
}
