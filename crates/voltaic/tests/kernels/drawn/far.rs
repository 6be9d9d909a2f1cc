//! Numbers that lie further apart than 32 bits count: of tensors of which only some pages are ever touched.

use tch::{Device, Kind, Tensor};

use crate::beside::{Results, compare};

/// From one row to the next, more bytes than an `i32` counts.
const FAR: i64 = (1 << 30) + 64;

/// `rows` rows that are far apart, of `columns` numbers that are next to each other.
fn far(rows: i64, columns: i64, kind: Kind, phase: f64) -> Tensor {
    let all = Tensor::empty([(rows - 1) * FAR + columns], (kind, Device::Cpu));
    let far = all.as_strided([rows, columns], [FAR, 1], 0);
    let numbers = (Tensor::arange(rows * columns, (Kind::Float, Device::Cpu)) * 0.37 + phase).sin();
    far.shallow_clone().copy_(&numbers.view([rows, columns]));
    far
}

fn calls() -> Results {
    let mut results = Results::new();
    for kind in [Kind::Float, Kind::BFloat16] {
        let mut push = |name: &str, result: Tensor| results.push((format!("{name} {kind:?}"), Ok(result)));
        let near = far(1, 9 * 40, kind, 0.5).view([9, 40]);
        {
            let a = far(3, 40, kind, 0.1);
            push("left rows", a.mm(&near.tr()));
            push("right rows", near.narrow(1, 0, 3).mm(&a));
            push("right columns", near.mm(&a.tr()));
            push("left columns", a.tr().mm(&near.narrow(0, 0, 3)));
            let out = far(3, 9, kind, 0.0);
            push("written", a.f_mm_out(&out, &near.tr()).unwrap().contiguous());
        }
        // batches and heads that are far apart
        let far = far(2, 3 * 40 * 8, kind, 0.3);
        let batches = far.view([2, 1, 3 * 40, 8]);
        push("batches", batches.select(1, 0).bmm(&batches.select(1, 0).transpose(1, 2)));
        for heads in [batches.shallow_clone(), batches.transpose(0, 1)] {
            let none: Option<Tensor> = None;
            push(
                "heads",
                Tensor::scaled_dot_product_attention(&heads, &heads, &heads, none, 0.0, true, None, false),
            );
        }
        let images = far.view([2, 10, 12, 8]).permute([0, 3, 1, 2]);
        push("pool", images.max_pool2d([2, 2], [2, 2], [0, 0], [1, 1], false));
        let ones = Tensor::ones([8], (Kind::Float, Device::Cpu));
        let none = None::<&Tensor>;
        push("batch norm", images.batch_norm(Some(&ones), none, none, none, true, 0.1, 0.05, false));
        push("cast", far.to_kind(if kind == Kind::Float { Kind::BFloat16 } else { Kind::Float }));
        push("sum", &far + &far);
        push("relu", far.relu());
        push("gelu", far.gelu("none"));
    }
    let names = results.iter_mut().enumerate();
    names.for_each(|(i, (name, _))| name.insert_str(0, &format!("{i} ")));
    results
}

#[test]
fn numbers_far_apart_are_found() {
    compare("drawn::far::numbers_far_apart_are_found", calls, |both| {
        both.lie_alike()?;
        both.are_close(
            if both.name.contains("BFloat16") || both.name.contains("cast") { 3e-2 } else { 1e-5 },
            1.0,
        )
    });
}
