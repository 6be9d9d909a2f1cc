//! Attention and its gradients.

use tch::{Device, Kind, Tensor};

use crate::{assert_close, install};

struct Case {
    kind: Kind,
    /// batch, heads, queries, keys, dim
    sizes: [i64; 5],
    is_causal: bool,
}

/// Query, key and value as a model has them: views of `[batch, row, head, dim]`.
fn inputs(case: &Case) -> [Tensor; 3] {
    let [batch, heads, queries, keys, dim] = case.sizes;
    [queries, keys, keys].map(|rows| {
        let tensor =
            Tensor::randn([batch, rows, heads, 2 * dim], (Kind::Float, Device::Cpu)).to_kind(case.kind);
        tensor.narrow(3, dim / 2, dim).transpose(1, 2).detach()
    })
}

fn attend(inputs: &[Tensor; 3], is_causal: bool, scale: Option<f64>) -> Tensor {
    let [query, key, value] = inputs;
    Tensor::scaled_dot_product_attention(query, key, value, None::<Tensor>, 0.0, is_causal, scale, false)
}

/// The output and the gradients of the inputs, for a gradient of the output that differs everywhere.
fn results(inputs: &[Tensor; 3], is_causal: bool, scale: Option<f64>) -> Vec<Tensor> {
    let inputs = [0, 1, 2].map(|i| inputs[i].detach().set_requires_grad(true));
    let out = attend(&inputs, is_causal, scale);
    let weights = Tensor::arange(out.numel() as i64, (Kind::Double, Device::Cpu)).sin().view_as(&out);
    (&out * weights.to_kind(out.kind())).sum(out.kind()).backward();
    let mut results = vec![out.detach()];
    results.extend(inputs.iter().map(Tensor::grad));
    results
}

#[test]
fn attention_agrees_with_float64() {
    install();
    tch::manual_seed(6);
    let mut cases = Vec::new();
    for kind in [Kind::Float, Kind::BFloat16] {
        for is_causal in [false, true] {
            for sizes in [
                [1, 1, 1, 1, 4],
                [2, 3, 65, 65, 8],
                [1, 2, 70, 130, 16],
                [2, 1, 130, 33, 40],
                [3, 2, 17, 17, 64],
            ] {
                cases.push(Case { kind, sizes, is_causal });
            }
        }
    }
    // a token of a language model
    for (kind, sizes) in [(Kind::Float, [2, 3, 1, 37, 20]), (Kind::BFloat16, [1, 2, 1, 300, 64])] {
        cases.push(Case { kind, sizes, is_causal: false });
    }
    for case in &cases {
        let inputs = inputs(case);
        let in_float64 = [0, 1, 2].map(|i| inputs[i].to_kind(Kind::Double));
        let scale = (case.sizes[4] == 40).then_some(0.3);
        let expected = results(&in_float64, case.is_causal, scale);
        let tolerance = if case.kind == Kind::Float { 2e-6 } else { 2e-2 };
        let names = ["output", "grad of query", "grad of key", "grad of value"];
        for ((name, a), b) in names.iter().zip(results(&inputs, case.is_causal, scale)).zip(&expected) {
            let what = format!("{name}, {:?} {:?} causal {}", case.kind, case.sizes, case.is_causal);
            if case.sizes[3] == 1 && ["grad of query", "grad of key"].contains(name) {
                // a single key has weight 1 whatever its score, so these are 0 but for rounding
                let largest = a.to_kind(Kind::Double).abs().max().double_value(&[]);
                assert!(largest <= 1e-7, "{what}: {largest:e} is not 0");
                continue;
            }
            assert_close(&what, &a, b, tolerance);
        }
    }
}

#[test]
fn large_scores_do_not_overflow_and_a_nan_is_not_lost() {
    install();
    let ones = || Tensor::ones([1, 1, 4, 8], (Kind::Float, Device::Cpu));
    let large = [ones() * 1e3, ones() * 1e3, ones()];
    assert_close("large", &attend(&large, true, None), &ones(), 1e-6);
    let broken = [ones() * f64::NAN, ones(), ones()];
    assert_eq!(attend(&broken, true, None).isnan().sum(Kind::Int64).int64_value(&[]), 32);
}

#[test]
fn a_mask_or_dropout_is_libtorchs() {
    install();
    tch::manual_seed(7);
    let case = Case { kind: Kind::Float, sizes: [1, 2, 5, 6, 8], is_causal: false };
    let [query, key, value] = inputs(&case);
    let mask = Tensor::randn([5, 6], (Kind::Float, Device::Cpu));
    let with = |mask: &Tensor, tensors: [&Tensor; 3]| {
        let [query, key, value] = tensors;
        Tensor::scaled_dot_product_attention(query, key, value, Some(mask), 0.0, false, None, false)
    };
    let doubles = [&query, &key, &value].map(|tensor| tensor.to_kind(Kind::Double));
    let expected = with(&mask.to_kind(Kind::Double), [&doubles[0], &doubles[1], &doubles[2]]);
    assert_close("mask", &with(&mask, [&query, &key, &value]), &expected, 2e-6);
}

#[test]
fn bfloat16_by_float32_products_is_what_processors_without_its_own_get() {
    use voltaic::kernels::{AttentionHead, AttentionScratch, Bf16, Element, GradHead, Rows};

    const ROWS: usize = 70;
    const DIM: usize = 12;
    let numbers =
        |phase: f32| -> Vec<f32> { (0..ROWS * DIM).map(|i| (i as f32 * 0.37 + phase).sin()).collect() };
    let [query, key, value, grad] = [0.0, 1.0, 2.0, 3.0].map(numbers);
    let [q16, k16, v16, g16] =
        [&query, &key, &value, &grad].map(|x| x.iter().map(|x| Bf16::from_f32(*x)).collect::<Vec<_>>());
    let shape = |numbers: &[f32]| {
        Tensor::from_slice(numbers).to_kind(Kind::BFloat16).to_kind(Kind::Double).view([
            1,
            1,
            ROWS as i64,
            DIM as i64,
        ])
    };
    let inputs = [&query, &key, &value].map(|x| shape(x).set_requires_grad(true));
    let expected = attend(&inputs, true, None);
    (&expected * shape(&grad)).sum(Kind::Double).backward();

    let rows = |x| Rows::new(x, [ROWS, DIM], DIM);
    let scale = 1.0 / (DIM as f32).sqrt();
    let head = AttentionHead {
        query: rows(&q16),
        key: rows(&k16),
        value: rows(&v16),
        queries: ROWS,
        keys: ROWS,
        scale,
        is_causal: true,
    };
    let mut scratch = AttentionScratch::default();
    let (mut out, mut log_sum_exp) = (Vec::new(), Vec::new());
    head.forward::<f32>(0..ROWS, &mut scratch, |_, rows, sums| {
        out.extend_from_slice(rows);
        log_sum_exp.extend_from_slice(sums);
    });
    let assert_rows = |what: &str, rows: &[f32], expected: &Tensor, tolerance| {
        assert_close(what, &Tensor::from_slice(rows).view_as(expected), expected, tolerance);
    };
    assert_rows("output", &out, &expected.detach(), 2e-6);
    let out: Vec<_> = out.iter().map(|x| Bf16::from_f32(*x)).collect();
    let grads = GradHead {
        out: rows(&out),
        grad_out: rows(&g16),
        log_sum_exp: Rows::new(&log_sum_exp, [ROWS, 1], 1),
    };
    let mut grad_query = Vec::new();
    let (grad_key, grad_value) =
        head.backward::<f32>(&grads, &mut scratch, |_, rows| grad_query.extend_from_slice(rows));
    // the output, from which gradients are computed, is rounded
    for (what, rows, input) in [("query", &grad_query[..], 0), ("key", grad_key, 1), ("value", grad_value, 2)]
    {
        assert_rows(what, rows, &inputs[input].grad(), 4e-3);
    }
}

/// What a tensor that was expanded, or unfolded, has: on processors without products of bfloat16 such rows are copied.
#[test]
fn bfloat16_rows_may_share_numbers() {
    use voltaic::kernels::{AttentionHead, AttentionScratch, Bf16, Element, GradHead, Rows};

    const ROWS: usize = 70;
    const DIM: usize = 12;
    let numbers = |phase: f32| -> Vec<Bf16> {
        (0..ROWS * DIM).map(|i| Bf16::from_f32((i as f32 * 0.37 + phase).sin())).collect()
    };
    let [all, grad] = [0.0, 1.0].map(numbers);
    let results = |rows: [Rows<'_, Bf16>; 2]| {
        let [key, value] = rows;
        let query = Rows::new(&all, [ROWS, DIM], DIM);
        let (queries, keys) = (ROWS, ROWS);
        let head = AttentionHead { query, key, value, queries, keys, scale: 0.3, is_causal: false };
        let mut scratch = AttentionScratch::default();
        let (mut out, mut log_sum_exp) = (Vec::new(), Vec::new());
        head.forward::<f32>(0..ROWS, &mut scratch, |_, rows, sums| {
            out.extend(rows.iter().map(|x| Bf16::from_f32(*x)));
            log_sum_exp.extend_from_slice(sums);
        });
        let grads = GradHead {
            out: Rows::new(&out, [ROWS, DIM], DIM),
            grad_out: Rows::new(&grad, [ROWS, DIM], DIM),
            log_sum_exp: Rows::new(&log_sum_exp, [ROWS, 1], 1),
        };
        let mut grad_query = Vec::new();
        let (grad_key, grad_value) =
            head.backward::<f32>(&grads, &mut scratch, |_, rows| grad_query.extend_from_slice(rows));
        let (grad_key, grad_value) = (grad_key.to_vec(), grad_value.to_vec());
        (out, log_sum_exp, grad_query, grad_key, grad_value)
    };
    for stride in [0, 1, 5, DIM - 1, DIM, DIM + 3] {
        let len = (ROWS - 1) * stride + DIM;
        let memory: Vec<Bf16> = all.iter().chain(&all).copied().collect();
        let copy: Vec<Bf16> =
            (0..ROWS).flat_map(|row| &memory[row * stride..row * stride + DIM]).copied().collect();
        let (shared, apart) =
            (Rows::new(&memory[..len], [ROWS, DIM], stride), Rows::new(&copy, [ROWS, DIM], DIM));
        assert_eq!(results([shared, shared]), results([apart, apart]), "rows {stride} apart");
    }
}
