//! Layers against PyTorch: state-dict names, initial weights, outputs and gradients. See fixtures/nn.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::HashMap;
use std::marker::PhantomData;
use std::path::PathBuf;
use std::sync::LazyLock;

use tch::{Kind, Reduction};
use voltaic::ffi::SharedTensor;
use voltaic::models::{ResNet18, ResNet18Config};
use voltaic::nn::functional::{self, CrossEntropyOptions};
use voltaic::nn::init::{self, FanMode, Nonlinearity};
use voltaic::nn::*;
use voltaic::{Result, Tensor};

use crate::rng::seeded;

/// Tensors and JSON that make_fixtures.py wrote.
struct Fixture {
    tensors: HashMap<String, SharedTensor>,
    json: serde_json::Value,
}

static FIXTURE: LazyLock<Fixture> = LazyLock::new(|| {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/nn");
    let tensors = Tensor::read_safetensors(folder.join("layers.safetensors")).unwrap();
    let text = std::fs::read_to_string(folder.join("layers.json")).unwrap();
    Fixture {
        tensors: tensors.into_iter().map(|(name, tensor)| (name, SharedTensor::new(&tensor))).collect(),
        json: serde_json::from_str(&text).unwrap(),
    }
});

impl Fixture {
    fn get(&self, case: &str, key: &str) -> Tensor {
        self.find(case, key).unwrap_or_else(|| panic!("no {case}/{key} in the fixture"))
    }

    fn find(&self, case: &str, key: &str) -> Option<Tensor> {
        self.tensors.get(&format!("{case}/{key}")).map(|tensor| tensor.get().shallow_clone())
    }
}

/// The numbers between -1 and 1 that the fixture's script calls by the same name.
fn probe(shape: &[i64]) -> Tensor {
    let count: i64 = shape.iter().product();
    let steps = Tensor::arange(count, (Kind::Double, tch::Device::Cpu));
    (steps * 1.7 + 0.3).sin().to_kind(Kind::Float).reshape(shape)
}

fn assert_close(actual: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!(actual.size(), expected.size(), "{what}");
    assert_eq!(actual.kind(), expected.kind(), "{what}");
    let (actual, expected) = (actual.to_kind(Kind::Double), expected.to_kind(Kind::Double));
    assert!(actual.allclose(&expected, 1e-6, 1e-6, false), "{what}: {actual} is not {expected}");
}

/// Makes a layer as the fixture did and compares everything that was recorded.
fn compare<M: Module>(
    case: &str,
    make: impl FnOnce() -> Result<M>,
    call: impl Fn(&M, &[Tensor]) -> anyhow::Result<Vec<Tensor>>,
) {
    let guard = seeded(0);
    let layer = make().unwrap();
    let next_draw = Tensor::rand([1], (Kind::Float, tch::Device::Cpu)).double_value(&[0]);
    drop(guard);
    let expected = FIXTURE.json["next_draw"][case].as_f64().unwrap();
    assert_eq!(next_draw as f32, expected as f32, "{case}: the random stream");

    let state = layer.state_dict();
    let names: Vec<&str> = state.iter().map(|(name, _)| name.as_str()).collect();
    let expected = FIXTURE.json["names"][case].as_array().unwrap();
    assert_eq!(names, expected.iter().map(|name| name.as_str().unwrap()).collect::<Vec<_>>(), "{case}");
    for (name, tensor) in &state {
        assert_eq!(*tensor, FIXTURE.get(case, &format!("state/{name}")), "{case}: initial {name}");
    }

    let inputs: Vec<Tensor> = (0..)
        .map_while(|i| FIXTURE.find(case, &format!("input{i}")))
        .map(|t| if t.is_floating_point() { t.copy().set_requires_grad(true) } else { t })
        .collect();
    let outputs = call(&layer, &inputs).unwrap();
    assert!(FIXTURE.find(case, &format!("output{}", outputs.len())).is_none(), "{case}: outputs are missing");
    let mut loss = Tensor::from(0.0_f32);
    for (i, output) in outputs.iter().enumerate() {
        assert_close(output, &FIXTURE.get(case, &format!("output{i}")), &format!("{case}: output{i}"));
        loss += (output * probe(&output.size())).sum(Kind::Float);
    }
    loss.backward();
    for (name, parameter) in layer.named_parameters() {
        assert_close(
            &parameter.grad(),
            &FIXTURE.get(case, &format!("grad/{name}")),
            &format!("{case}: grad of {name}"),
        );
    }
    for (i, input) in inputs.iter().enumerate().filter(|(_, input)| input.is_floating_point()) {
        assert_close(
            &input.grad(),
            &FIXTURE.get(case, &format!("grad_input{i}")),
            &format!("{case}: grad of input{i}"),
        );
    }
    for (name, buffer) in layer.named_buffers() {
        assert_close(
            buffer,
            &FIXTURE.get(case, &format!("after/{name}")),
            &format!("{case}: {name} afterwards"),
        );
    }
}

fn compare_forward<M: Forward>(case: &str, make: impl FnOnce() -> Result<M>) {
    compare(case, make, |layer, inputs| Ok(vec![layer.forward(&inputs[0])?]));
}

#[test]
fn linear_is_pytorchs() {
    compare_forward("linear", || Linear::new(7, 5));
    compare_forward("linear_no_bias", || Linear::builder(7, 5).bias(false).build());
}

#[test]
fn convolutions_are_pytorchs() {
    compare_forward("conv1d", || Conv1d::builder(4, 6, 3).stride(2).padding(1).dilation(2).groups(2).build());
    compare_forward("conv2d", || Conv2d::new(2, 4, 3));
    compare_forward("conv2d_options", || {
        Conv2d::builder(4, 6, (3, 2))
            .stride((2, 1))
            .padding([1, 0])
            .dilation((1, 2))
            .groups(2)
            .bias(false)
            .build()
    });
    compare_forward("conv_transpose2d", || ConvTranspose2d::new(4, 3, 3));
    compare_forward("conv_transpose2d_options", || {
        ConvTranspose2d::builder(4, 6, 3).stride(2).padding(1).output_padding(1).groups(2).bias(false).build()
    });
}

#[test]
fn norms_are_pytorchs() {
    compare_forward("batch_norm1d", || BatchNorm1d::new(5));
    compare_forward("batch_norm2d", || BatchNorm2d::builder(3).eps(1e-3).momentum(0.3).build());
    compare_forward("batch_norm2d_eval", || {
        let mut layer = BatchNorm2d::new(3)?;
        layer.eval();
        Ok(layer)
    });
    compare_forward("batch_norm2d_bare", || {
        BatchNorm2d::builder(3).affine(false).track_running_stats(false).build()
    });
    compare_forward("layer_norm", || LayerNorm::new(6));
    compare_forward("layer_norm_no_bias", || LayerNorm::builder([3, 6]).eps(1e-3).bias(false).build());
    compare_forward("group_norm", || GroupNorm::new(2, 6));
}

#[test]
fn embedding_is_pytorchs() {
    compare_forward("embedding", || Embedding::new(11, 4));
    compare_forward("embedding_padding", || Embedding::builder(11, 4).padding_idx(1).build());
}

/// Checks a recurrent layer in its simplest form, with all options, and with sequences of different lengths.
macro_rules! recurrent_is_pytorchs {
    ($case:literal, $layer:ident, |$state:ident: $type:ty| $flat:expr, |$given:ident| $states:expr) => {
        let flat =
            |(output, $state): (Tensor, $type)| std::iter::once(output).chain($flat).collect::<Vec<Tensor>>();
        compare($case, || $layer::new(4, 3), |layer, x| Ok(flat(layer.run(&x[0], None)?)));
        compare(
            $case,
            || $layer::new(4, 3),
            |layer, x| {
                let (output, state) = layer.run(&x[0], None)?;
                Ok(flat((layer.forward(&x[0])?.f_mul_scalar(0.5)? + output * 0.5, state)))
            },
        );
        let options = || {
            let builder = $layer::builder(4, 3).num_layers(2).bias(false).batch_first(true);
            let mut layer = builder.bidirectional(true).dropout(0.5).build()?;
            layer.eval();
            Ok(layer)
        };
        compare(concat!($case, "_options"), options, |layer, x| {
            let $given = [x[1].shallow_clone(), x[x.len() - 1].shallow_clone()];
            Ok(flat(layer.run(&x[0], Some(&$states))?))
        });
        let packed = || $layer::builder(4, 3).bidirectional(true).batch_first(true).build();
        compare(concat!($case, "_packed"), packed, |layer, x| {
            let (output, state) = layer.run_packed(&PackedSequence::pack(&x[0], &[2, 5, 4], true)?, None)?;
            let (output, lengths) = output.pad(true, 0.0)?;
            assert_eq!(lengths, [2, 5, 4]);
            Ok(flat((output, state)))
        });
    };
}

#[test]
fn recurrent_layers_are_pytorchs() {
    recurrent_is_pytorchs!("rnn", Rnn, |state: Tensor| [state], |given| given[0]);
    recurrent_is_pytorchs!("gru", Gru, |state: Tensor| [state], |given| given[0]);
    recurrent_is_pytorchs!("lstm", Lstm, |state: (Tensor, Tensor)| [state.0, state.1], |given| {
        let [h, c] = given;
        (h, c)
    });
}

#[test]
fn recurrent_layers_refuse_what_does_not_fit() {
    let lstm = Lstm::builder(4, 3).num_layers(2).dropout(0.1).build().unwrap();
    assert_eq!(format!("{lstm:?}"), "Lstm(4, 3, num_layers=2, dropout=0.1)");
    let h = probe(&[1, 2, 3]);
    let errors = [
        lstm.run(&probe(&[5, 2, 3]), None).unwrap_err(),
        lstm.run(&probe(&[5, 2, 4]), Some(&(h.shallow_clone(), h))).unwrap_err(),
        PackedSequence::pack(&probe(&[5, 2, 4]), &[5, 6], false).unwrap_err(),
        PackedSequence::pack(&probe(&[5, 2]), &[5, 5], false).unwrap_err(),
        Gru::builder(4, 0).build().unwrap_err(),
        Rnn::builder(4, 3).dropout(1.5).build().unwrap_err(),
    ]
    .map(|error| error.to_string());
    for (error, expected) in errors.iter().zip([
        "Lstm(4, 3, num_layers=2, dropout=0.1): input of shape [5, 2, 3] does not fit: [time, batch, 4] is needed",
        "input of shape [1, 2, 3] does not fit: a state of [2, 2, 3] is needed",
        "PackedSequence: lengths [5, 6] of sequences in [5, 2, 4]; give 2 lengths from 1 to 5",
        "PackedSequence: input of shape [5, 2] does not fit: three dimensions are needed",
        "Gru: hidden_size is 0; give at least 1",
        "Rnn: p is 1.5; give a probability between 0 and 1",
    ]) {
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn attention_is_pytorchs() {
    let batch_first = || MultiheadAttention::builder(8, 2).batch_first(true).build();
    let later = Tensor::ones([5, 5], (Kind::Bool, tch::Device::Cpu)).triu(1);
    let padding = Tensor::from_slice2(&[[false; 5], [false, false, false, true, true]]);
    compare_forward("attention", || MultiheadAttention::new(8, 2));
    compare_forward("attention_no_bias", || {
        MultiheadAttention::builder(8, 2).bias(false).batch_first(true).build()
    });
    compare("attention_causal", batch_first, |layer, x| {
        Ok(vec![layer.attend(&x[0], &x[0], &x[0], &AttentionMask::causal())?])
    });
    for mask in [
        AttentionMask { attn_mask: Some(&later), key_padding_mask: Some(&padding), is_causal: false },
        AttentionMask { is_causal: true, ..AttentionMask::key_padding(&padding) },
    ] {
        compare("attention_masks", batch_first, |layer, x| {
            let (output, weights) = layer.attend_with_weights(&x[0], &x[0], &x[0], &mask)?;
            assert_close(&layer.attend(&x[0], &x[0], &x[0], &mask)?, &output, "fused and plain attention");
            Ok(vec![output, weights])
        });
    }
    compare("attention_cross", batch_first, |layer, x| {
        Ok(vec![layer.attend(&x[0], &x[1], &x[2], &AttentionMask::key_padding(&padding))?])
    });
}

#[test]
fn activations_and_pools_are_pytorchs() {
    compare_forward("relu", || Ok(Relu));
    compare_forward("gelu", || Ok(Gelu::new()));
    compare_forward("gelu_tanh", || Ok(Gelu::tanh()));
    compare_forward("silu", || Ok(Silu));
    compare_forward("tanh", || Ok(Tanh));
    compare_forward("sigmoid", || Ok(Sigmoid));
    compare_forward("softmax", || Ok(Softmax::new(1)));
    compare_forward("leaky_relu", || Ok(LeakyRelu::new(0.2)));
    compare_forward("identity", || Ok(Identity));
    compare_forward("max_pool2d", || MaxPool2d::new(2));
    compare_forward("max_pool2d_options", || {
        MaxPool2d::builder(3).stride(2).padding(1).ceil_mode(true).build()
    });
    compare_forward("avg_pool2d", || AvgPool2d::new(2));
    compare_forward("avg_pool2d_options", || {
        AvgPool2d::builder((3, 2)).stride(2).padding(1).count_include_pad(false).build()
    });
    compare_forward("adaptive_avg_pool2d", || AdaptiveAvgPool2d::new((2, 3)));
    compare_forward("flatten", || Ok(Flatten::new()));
}

#[derive(Module)]
struct Block {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    downsample: Option<Sequential>,
}

impl Block {
    fn new(inputs: i64, outputs: i64) -> Result<Self> {
        Ok(Self {
            conv1: Conv2d::builder(inputs, outputs, 3).padding(1).bias(false).build()?,
            bn1: BatchNorm2d::new(outputs)?,
            downsample: match inputs == outputs {
                true => None,
                false => Some(
                    Sequential::new()
                        .add(Conv2d::builder(inputs, outputs, 1).bias(false).build()?)
                        .add(BatchNorm2d::new(outputs)?),
                ),
            },
        })
    }
}

impl Forward for Block {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        let out = self.bn1.forward(&self.conv1.forward(x)?)?.relu();
        Ok(match &self.downsample {
            Some(downsample) => out + downsample.forward(x)?,
            None => out + x,
        })
    }
}

/// Declared out of PyTorch's order of members and children: a buffer after a child.
#[derive(Module)]
struct Nested {
    scale: Parameter,
    layers: Vec<Block>,
    offset: Buffer,
    fc: Linear,
    #[module(skip)]
    _cache: Option<std::cell::Cell<f64>>,
}

impl Forward for Nested {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        let mut x = x * self.scale.view([-1, 1, 1]) + self.offset.view([-1, 1, 1]);
        for layer in &self.layers {
            x = layer.forward(&x)?;
        }
        self.fc.forward(&x.mean_dim([2_i64, 3].as_slice(), false, None))
    }
}

#[test]
fn nested_modules_have_pytorchs_names_and_order() {
    let cpu = (Kind::Float, tch::Device::Cpu);
    compare_forward("nested", || {
        Ok(Nested {
            scale: Parameter::new(Tensor::ones([3], cpu)),
            layers: vec![Block::new(3, 3)?, Block::new(3, 4)?],
            offset: Buffer::new(Tensor::zeros([3], cpu)),
            fc: Linear::new(4, 2)?,
            _cache: None,
        })
    });
}

/// Generic over its norm, with a raw identifier and an array.
#[derive(Module)]
struct Generic<N, T> {
    r#type: N,
    pair: [Linear; 2],
    dtype: PhantomData<T>,
    nothing: Option<Parameter>,
}

#[derive(Module)]
struct Tuple(Linear, #[module(skip)] std::time::Duration, Dropout);

#[derive(Module)]
struct Flag {
    #[module(training)]
    training: bool,
    inner: Option<Box<dyn Module>>,
}

#[test]
fn the_derive_takes_generics_tuples_boxes_and_flags() {
    let _guard = seeded(0);
    let generic = Generic {
        r#type: LayerNorm::new(2).unwrap(),
        pair: [Linear::new(2, 2).unwrap(), Linear::new(2, 2).unwrap()],
        dtype: PhantomData::<f32>,
        nothing: None,
    };
    let children: Vec<String> = generic.named_children().into_iter().map(|(name, _)| name).collect();
    assert_eq!(children, ["type", "pair.0", "pair.1"]);
    assert_eq!(generic.type_name(), "Generic");
    assert!(generic.nothing.is_none());

    let mut tuple = Tuple(Linear::new(2, 3).unwrap(), std::time::Duration::ZERO, Dropout::new(0.5).unwrap());
    let names: Vec<String> = tuple.named_modules().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["", "0", "2"]);
    assert_eq!(tuple.1, std::time::Duration::ZERO);
    tuple.eval();
    assert_eq!(tuple.2.active_p(), 0.0);
    tuple.train(true);
    assert_eq!(tuple.2.active_p(), 0.5);

    let inner = Flag { training: true, inner: None };
    let mut flag = Flag { training: true, inner: Some(Box::new(inner)) };
    flag.eval();
    assert!(!flag.training);
    assert_eq!(flag.named_children()[0].1.type_name(), "Flag");
    let conv = Conv1d::new(1, 1, 1).unwrap();
    assert_eq!(conv.type_name(), "Conv1d");
    assert_eq!(BatchNorm2d::new(1).unwrap().type_name(), "BatchNorm2d");
}

#[test]
fn a_sequence_prints_its_layers_and_changes_mode_with_them() {
    let _guard = seeded(0);
    let mut sequence = Sequential::new().add(Linear::new(4, 2).unwrap());
    sequence.push(Dropout::new(1.0).unwrap());
    let ones = Tensor::ones([1, 4], (Kind::Float, tch::Device::Cpu));
    assert_eq!(format!("{sequence:?}"), "Sequential(Linear, Dropout)");
    assert_eq!(sequence.forward(&ones).unwrap().abs().sum(Kind::Float).double_value(&[]), 0.0);
    sequence.eval();
    assert_ne!(sequence.forward(&ones).unwrap().abs().sum(Kind::Float).double_value(&[]), 0.0);
    assert_eq!(sequence.len(), 2);
    assert!(Sequential::new().is_empty());
}

#[test]
fn modules_made_without_draws_hold_zeros_and_leave_the_generator_alone() {
    let _guard = seeded(3);
    let expected = Tensor::rand([4], (Kind::Float, tch::Device::Cpu));
    tch::manual_seed(3);
    let net =
        init::without_draws(|| ResNet18::new(ResNet18Config { width: 4, ..Default::default() })).unwrap();
    let weight = Tensor::ones([3, 3], (Kind::Float, tch::Device::Cpu));
    init::without_draws(|| init::trunc_normal_(&weight, 0.5, 1.0, 0.0, 1.0)).unwrap();
    assert_eq!(weight.sum(Kind::Float).double_value(&[]), 0.0);
    for (fqn, parameter) in net.named_parameters() {
        let is_norm = fqn.contains("bn") || fqn.contains("downsample.1");
        let expected = if is_norm && fqn.ends_with("weight") { 1.0 } else { 0.0 };
        assert_eq!(parameter.abs().max().double_value(&[]), expected, "{fqn}");
    }
    assert_eq!(Tensor::rand([4], (Kind::Float, tch::Device::Cpu)), expected);
    let refused = std::panic::catch_unwind(|| init::without_draws(|| panic!("while it is made")));
    assert!(refused.is_err());
    let drawn = Linear::new(4, 4).unwrap();
    assert_ne!(drawn.weight.abs().max().double_value(&[]), 0.0, "layers are drawn again after it");
}

#[test]
fn initialisations_are_pytorchs() {
    type Init = fn(&Tensor) -> Result<()>;
    let cases: [(&str, Init); 7] = [
        ("kaiming_uniform", |t| init::kaiming_uniform_(t, Nonlinearity::LeakyRelu(0.1), FanMode::FanIn)),
        ("kaiming_normal", |t| init::kaiming_normal_(t, Nonlinearity::Relu, FanMode::FanOut)),
        ("xavier_uniform", |t| init::xavier_uniform_(t, Nonlinearity::Tanh.gain())),
        ("xavier_normal", |t| init::xavier_normal_(t, 1.0)),
        ("trunc_normal", |t| init::trunc_normal_(t, 0.1, 0.7, -0.5, 1.1)),
        ("normal", |t| init::normal_(t, 0.5, 0.02)),
        ("uniform", |t| init::uniform_(t, -2.0, 3.0)),
    ];
    for (case, fill) in cases {
        let expected = FIXTURE.get(&format!("init_{case}"), "value");
        let tensor = Tensor::zeros(expected.size(), (Kind::Float, tch::Device::Cpu));
        let _guard = seeded(0);
        fill(&tensor).unwrap();
        assert_eq!(tensor, expected, "{case}");
    }
    let error = init::xavier_normal_(&Tensor::from(1.0_f32), 1.0).unwrap_err().to_string();
    assert!(error.contains("xavier_normal_") && error.contains("two or more dimensions"), "{error}");
}

#[test]
fn losses_and_metrics_are_pytorchs() {
    let [logits, targets, weight] = ["logits", "targets", "weight"].map(|key| FIXTURE.get("functional", key));
    let options = CrossEntropyOptions {
        weight: Some(&weight),
        reduction: Reduction::Sum,
        ignore_index: 2,
        label_smoothing: 0.1,
    };
    let query = probe(&[2, 2, 4, 6]);
    let other = logits.roll(1, 0);
    for (case, value) in [
        ("cross_entropy", functional::cross_entropy(&logits, &targets)),
        ("cross_entropy_options", functional::cross_entropy_with(&logits, &targets, &options)),
        ("mse_loss", functional::mse_loss(&logits, &other)),
        ("l1_loss", functional::l1_loss(&logits, &other)),
        ("smooth_l1_loss", functional::smooth_l1_loss(&logits, &other, 0.5)),
        ("binary_cross_entropy", functional::binary_cross_entropy(&logits.sigmoid(), &other.sigmoid())),
        (
            "binary_cross_entropy_with_logits",
            functional::binary_cross_entropy_with_logits(&logits, &other.sigmoid()),
        ),
        ("nll_loss", functional::nll_loss(&logits.log_softmax(-1, None), &targets)),
        ("kl_div", functional::kl_div(&logits.log_softmax(-1, None), &other.softmax(-1, None))),
        ("accuracy", functional::accuracy(&logits, &targets)),
        (
            "scaled_dot_product_attention",
            functional::scaled_dot_product_attention(
                &query,
                &query.flip(2),
                &query.roll(1, 2),
                None,
                0.0,
                true,
            ),
        ),
    ] {
        assert_close(&value.unwrap(), &FIXTURE.get(case, "value"), case);
    }
    assert!(functional::cross_entropy(&logits, &targets.narrow(0, 0, 3)).is_err());
    for loss in [functional::mse_loss, functional::l1_loss, functional::kl_div] {
        assert_error!(loss(&logits, &logits.narrow(0, 0, 1)), "targets have shape [1, 5]");
    }
}

#[test]
fn dropout_draws_as_pytorch_and_stops_in_evaluation() {
    let ones = Tensor::ones([40], (Kind::Float, tch::Device::Cpu));
    let mut dropout = Dropout::new(0.3).unwrap();
    let guard = seeded(7);
    assert_eq!(dropout.forward(&ones).unwrap(), FIXTURE.get("dropout", "output"));
    drop(guard);
    dropout.eval();
    assert_eq!(dropout.forward(&ones).unwrap(), ones);
    assert!(
        Dropout::new(1.5).unwrap_err().to_string().contains("p is 1.5; give a probability between 0 and 1")
    );
}

#[test]
fn a_tied_weight_is_one_parameter_with_two_names() {
    let _guard = seeded(0);
    #[derive(Module)]
    struct Tied {
        wte: Embedding,
        head: Linear,
    }
    let mut tied =
        Tied { wte: Embedding::new(5, 3).unwrap(), head: Linear::builder(3, 5).bias(false).build().unwrap() };
    tied.wte.weight = tied.head.weight.clone();
    let parameters: Vec<String> = tied.named_parameters().into_iter().map(|(name, _)| name).collect();
    let state: Vec<String> = tied.state_dict().into_iter().map(|(name, _)| name).collect();
    assert_eq!(parameters, ["wte.weight"]);
    assert_eq!(state, ["wte.weight", "head.weight"]);
    tied.to_dtype(Kind::Double).unwrap();
    let tokens = Tensor::from_slice(&[1_i64, 4]);
    tied.head.forward(&tied.wte.forward(&tokens).unwrap()).unwrap().sum(Kind::Double).backward();
    assert_eq!(tied.wte.weight.grad(), tied.head.weight.grad());
    // both names must have the same values, or one of them would be lost without a word
    let own = |value: f64| Tensor::full([5, 3], value, (Kind::Double, tch::Device::Cpu));
    let state = |second| vec![("wte.weight".to_owned(), own(1.0)), ("head.weight".to_owned(), own(second))];
    tied.load_state_dict(&state(1.0), true).unwrap();
    assert_error!(
        tied.load_state_dict(&state(2.0), true),
        "wte.weight and head.weight are one parameter, and have different values; leave one of the two names out, or"
    );
    assert_eq!(*tied.wte.weight.tensor(), own(1.0));
    // one of the names is enough
    for (kept, value) in [(0, 1.0), (1, 3.0)] {
        for strict in [true, false] {
            let keys = tied.load_state_dict(&[state(3.0).swap_remove(kept)], strict).unwrap();
            assert_eq!((*tied.wte.weight.tensor() == own(value), keys.missing_keys.len()), (true, 0));
        }
    }
    let none = [("bias".to_owned(), own(0.0))];
    assert_error!(tied.load_state_dict(&none, false), "2 missing (wte.weight, head.weight)");
}

#[test]
fn channels_may_be_last_in_memory() {
    let _rng = seeded(4);
    let net = || {
        let conv = Conv2d::builder(3, 5, 3).padding(1).build().unwrap();
        Sequential::new().add(conv).add(BatchNorm2d::new(5).unwrap()).add(Relu)
    };
    let (first, last) = (net(), net());
    last.load_state_dict(&first.state_dict(), true).unwrap();
    last.to_channels_last().unwrap();
    let kernels = [&first, &last].map(|net| net.parameters().remove(0));
    assert_eq!(kernels[0].stride(), [27, 9, 3, 1]);
    assert_eq!(kernels[1].stride(), [27, 1, 9, 3]);
    assert!(kernels[0].equal(&kernels[1]));

    let input = Tensor::rand([2, 3, 8, 6], (Kind::Float, tch::Device::Cpu));
    let outputs = [&first, &last].map(|net| net.forward(&input).unwrap());
    assert_eq!(outputs[1].size(), [2, 5, 8, 6]);
    assert_eq!(outputs[1].stride(), [240, 1, 30, 5]);
    assert!(outputs[0].allclose(&outputs[1], 1e-5, 1e-6, false));

    // what is drawn is the same, wherever it lies
    for kernel in &kernels {
        voltaic::ffi::manual_seed(9).unwrap();
        init::normal_(kernel, 0.0, 1.0).unwrap();
    }
    assert!(kernels[0].equal(&kernels[1]));
    assert_eq!(kernels[1].stride(), [27, 1, 9, 3]);
}
