//! Attention.

use tch::{Kind, Tensor};

use super::calls::{Calls, is_near};
use super::draw::Among;
use super::rows::Group;
use crate::beside::compare_drawn;

fn draw(calls: &mut Calls) {
    for _ in 0..160 {
        let kind = calls.draw.kind();
        // libtorch divides by the number of heads, and the process ends if there is none
        let [batches, heads] = [calls.draw.side(3, 4), calls.draw.side(3, 4).max(1)];
        let [queries, keys] = [calls.draw.side(40, 150), calls.draw.side(40, 150)];
        let keys = if calls.draw.once_in(3) { queries } else { keys };
        let dim = calls.draw.side(40, 96);
        let values = if calls.draw.once_in(10) { dim + 1 } else { dim };
        let is_causal = calls.draw.once_in(2);
        // libtorch multiplies what a causal mask hides: 0 by infinity, and -infinity by a scale of 0 or below it. And it loses a
        // NaN of a query or a key for some lengths
        let among = if is_causal { Among::Finite } else { Among::All };
        let (first, query) = calls.draw.tensor(&[batches, heads, queries, dim], kind, Among::Finite);
        let (second, key) = calls.draw.tensor(&[batches, heads, keys, dim], kind, Among::Finite);
        let (third, value) = calls.draw.tensor(&[batches, heads, keys, values], kind, among);
        let scales = [None, None, None, Some(0.4), Some(7.0), Some(0.0), Some(-0.7), Some(-7.0)];
        let scale = calls.draw.one_of(if is_causal { &scales[..5] } else { &scales[..] });
        let what = format!(
            "{kind:?} {first} {second} {third} {batches} {heads} {queries} {keys} {dim} causal {is_causal} scale {scale:?}"
        );
        for part in ["factors of attention of", "operators of"] {
            let dtype = if kind == Kind::Float { "Float32" } else { "Bfloat16" };
            if !what.contains(" 0 ") && query.is_contiguous() && [Kind::Float, Kind::BFloat16].contains(&kind)
            {
                for kernel in ["Strips", "Matrix", "Attention"] {
                    calls.note(&format!("{part} {dtype} by {kernel}"));
                }
            }
        }
        calls.call(&format!("attention {what}"), &[&query, &key, &value], |x| {
            let [query, key, value] = x else { unreachable!() };
            Ok(vec![Tensor::f_scaled_dot_product_attention(
                query,
                key,
                value,
                None::<Tensor>,
                0.0,
                is_causal,
                scale,
                false,
            )?])
        });
    }
}

#[test]
fn drawn_attention_is_libtorchs() {
    compare_drawn("drawn::attentions::drawn_attention_is_libtorchs", Group::Attentions, draw, 3, |both| {
        // of such scores, softmax makes what rounded them many times as large
        if both.name.contains("7.0)") && !both.name.contains("Float16") {
            both.lie_alike()?;
            return both.are_close(if both.name.contains("Half") { 3e-2 } else { 1e-4 }, 1.0);
        }
        is_near(both)
    });
}
