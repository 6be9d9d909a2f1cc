//! Products of matrices.

use tch::{Kind, Tensor};
use voltaic::kernels::{Dtype, ProductShape, product_kernel};

use super::calls::{Calls, is_near};
use super::draw::Among;
use super::rows::Group;
use crate::beside::compare_drawn;

fn pair(tensor: &Tensor) -> [isize; 2] {
    let strides = tensor.stride();
    let last = strides.len() - 2;
    [strides[last] as isize, strides[last + 1] as isize]
}

/// Notes the kernel of a product, `batches` of them.
fn note(calls: &mut Calls, a: &Tensor, b: &Tensor, batches: i64) {
    let dtype = match a.kind() {
        Kind::Float => Dtype::Float32,
        Kind::BFloat16 => Dtype::Bfloat16,
        _ => return,
    };
    let (sizes, right) = (a.size(), b.size());
    let [rows, depth] = [sizes[sizes.len() - 2], sizes[sizes.len() - 1]].map(|size| size as usize);
    let columns = right[right.len() - 1] as usize;
    if [batches as usize, rows, columns, depth].contains(&0) {
        return;
    }
    let out = [columns as isize, 1];
    let shape = ProductShape { batches: batches as usize, rows, columns, depth, out, a: pair(a), b: pair(b) };
    if let Some(kernel) = product_kernel(dtype, &shape) {
        calls.note(&format!("products of {dtype:?} by {kernel:?}"));
    }
}

fn draw(calls: &mut Calls) {
    for round in 0..120 {
        let kind = match round % 48 {
            0 | 12 => Kind::Float,
            24 | 36 => Kind::BFloat16,
            _ => calls.draw.kind(),
        };
        let mut side = || calls.draw.side(40, 150);
        let [batches, rows, columns] = [side().min(4), side(), side()];
        // long columns have kernels of their own
        let depth = if round % 12 == 0 { calls.draw.between(257, 700) } else { calls.draw.side(40, 150) };
        let rows = match round % 24 {
            0 => calls.draw.between(128, 150),
            12 => calls.draw.between(16, 100),
            _ => rows,
        };
        let is_plain = round % 12 == 0; // whose right factor is a layer's weight
        let mut factor = |sizes: &[i64]| calls.draw.tensor(sizes, kind, Among::All);
        let (left, mut a) = factor(&[rows, depth]);
        let (right, b) = if is_plain {
            let (layout, weight) = factor(&[columns.max(2), depth]);
            a = a.contiguous();
            (layout, weight.contiguous().tr())
        } else {
            factor(&[depth, columns])
        };
        let columns = b.size()[1];
        let what = format!("{kind:?} {left} by {right} {rows} {columns} {depth}");
        note(calls, &a, &b, 1);
        calls.call(&format!("mm {what}"), &[&a, &b], |x| Ok(vec![x[0].f_mm(&x[1])?]));
        let sizes = calls.draw.one_of(&[
            vec![columns],
            vec![1, columns],
            vec![rows, columns],
            vec![rows, 1],
            vec![1],
        ]);
        let (layout, bias) = calls.draw.tensor(&sizes, kind, Among::All);
        calls.call(&format!("addmm {layout} {sizes:?} {what}"), &[&bias, &a, &b], |x| {
            Ok(vec![x[0].f_addmm(&x[1], &x[2])?])
        });
        calls.write(&format!("mm {what}"), (&[rows, columns], kind, None), |out| a.f_mm_out(out, &b));
        calls.write(&format!("addmm {what}"), (&[rows, columns], kind, None), |out| {
            bias.f_addmm_out(out, &a, &b)
        });

        let (left, a) = calls.draw.tensor(&[batches, rows, depth], kind, Among::All);
        let (right, b) = calls.draw.tensor(&[batches, depth, columns], kind, Among::All);
        let what = format!("bmm {kind:?} {left} by {right} {batches} {rows} {columns} {depth}");
        note(calls, &a, &b, batches);
        calls.call(&what, &[&a, &b], |x| Ok(vec![x[0].f_bmm(&x[1])?]));
        calls.write(&what, (&[batches, rows, columns], kind, None), |out| a.f_bmm_out(out, &b));
    }
    for round in 0..8 {
        few_rows(calls, if round % 2 == 0 { Kind::Float } else { Kind::BFloat16 });
    }
}

/// Few rows and a layer's weight, which have a kernel of their own.
fn few_rows(calls: &mut Calls, kind: Kind) {
    let sizes = [(1, 8), (100, 150), (257, 700)];
    let [rows, columns, depth] = sizes.map(|(low, high)| calls.draw.between(low, high));
    let (left, a) = calls.draw.tensor(&[rows, depth], kind, Among::All);
    let (right, weight) = calls.draw.tensor(&[columns, depth], kind, Among::All);
    let (_, bias) = calls.draw.tensor(&[columns], kind, Among::All);
    let (a, b) = (a.contiguous(), weight.contiguous().tr());
    let what = format!("few rows {kind:?} {left} by {right} {rows} {columns} {depth}");
    note(calls, &a, &b, 1);
    calls.call(&format!("mm {what}"), &[&a, &b], |x| Ok(vec![x[0].f_mm(&x[1])?]));
    calls.call(&format!("addmm {what}"), &[&bias, &a, &b], |x| Ok(vec![x[0].f_addmm(&x[1], &x[2])?]));
    calls.write(&format!("mm {what}"), (&[rows, columns], kind, None), |out| a.f_mm_out(out, &b));
}

#[test]
fn drawn_products_are_libtorchs() {
    compare_drawn("drawn::products::drawn_products_are_libtorchs", Group::Products, draw, 1, is_near);
}
