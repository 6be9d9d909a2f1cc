//! Ready-made models against PyTorch: names, shapes, initial weights, one forward and backward pass. See
//! fixtures/models.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::sync::LazyLock;

use serde_json::Value;
use tch::Kind;
use voltaic::models::*;
use voltaic::nn::{Forward, Module, ModuleExt, functional};
use voltaic::{Result, Tensor};

use crate::rng::seeded;

static FIXTURE: LazyLock<Value> = LazyLock::new(|| {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/models.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
});

/// The numbers between -1 and 1 that the fixture's script calls by the same name.
fn probe(shape: &[i64]) -> Tensor {
    let count: i64 = shape.iter().product();
    let steps = Tensor::arange(count, (Kind::Double, tch::Device::Cpu));
    (steps * 1.7 + 0.3).sin().to_kind(Kind::Float).reshape(shape)
}

/// Compares the norm of `tensor` and its product with fixed numbers, which depend on every element, with the last two
/// values of `expected`; the first ones are its name and shape, where given.
fn assert_summary(tensor: &Tensor, expected: &Value, tolerance: f64, what: &str) {
    let expected = expected.as_array().unwrap();
    if let Some(shape) = expected.iter().find_map(Value::as_array) {
        assert_eq!(
            tensor.size(),
            shape.iter().map(|size| size.as_i64().unwrap()).collect::<Vec<_>>(),
            "{what}"
        );
    }
    let tensor = tensor.to_kind(Kind::Double);
    let norm = tensor.norm().double_value(&[]);
    let product = (&tensor * probe(&tensor.size())).sum(Kind::Double).double_value(&[]);
    let [.., expected_norm, expected_product] = &expected[..] else { panic!("{what}: {expected:?}") };
    let (expected_norm, expected_product) =
        (expected_norm.as_f64().unwrap(), expected_product.as_f64().unwrap());
    // the product may cancel, so its error is measured by the norm
    let bound = tolerance * expected_norm + 1e-9;
    assert!((norm - expected_norm).abs() <= bound, "{what}: norm {norm} is not {expected_norm}");
    assert!(
        (product - expected_product).abs() <= bound,
        "{what}: product {product} is not {expected_product}"
    );
}

fn names(list: &Value) -> Vec<&str> {
    list.as_array().unwrap().iter().map(|entry| entry[0].as_str().unwrap()).collect()
}

fn compare<M: Forward>(case: &str, make: impl FnOnce() -> Result<M>, inputs: &Tensor, targets: &Tensor) {
    let expected = &FIXTURE[case];
    let guard = seeded(0);
    let mut model = make().unwrap();
    drop(guard);
    let state = model.state_dict();
    assert_eq!(
        state.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
        names(&expected["state"]),
        "{case}"
    );
    for ((name, tensor), expected) in state.iter().zip(expected["state"].as_array().unwrap()) {
        // the weights are equal bit for bit; only the order of this sum is not
        assert_summary(tensor, expected, 1e-12, &format!("{case}: initial {name}"));
    }

    let guard = seeded(1);
    let logits = model.forward(inputs).unwrap();
    drop(guard);
    assert_summary(&logits, &expected["logits"], 1e-5, &format!("{case}: logits"));
    let rows = logits.reshape([-1, logits.size()[logits.dim() - 1]]);
    let loss = functional::cross_entropy(&rows, &targets.reshape([-1])).unwrap();
    let expected_loss = expected["loss"].as_f64().unwrap();
    assert!((loss.double_value(&[]) - expected_loss).abs() <= 1e-5 * expected_loss, "{case}: {loss}");
    loss.backward();
    let parameters = model.named_parameters();
    let trained: Vec<&str> = parameters.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(trained, names(&expected["grads"]), "{case}");
    for ((name, parameter), expected) in parameters.iter().zip(expected["grads"].as_array().unwrap()) {
        assert_summary(&parameter.grad(), expected, 1e-5, &format!("{case}: grad of {name}"));
    }
    model.eval();
    let logits = model.forward(inputs).unwrap();
    assert_summary(&logits, &expected["eval_logits"], 1e-5, &format!("{case}: eval logits"));
}

fn labels() -> Tensor {
    Tensor::from_slice(&[3_i64, 0, 9])
}

#[test]
fn lenet_is_pytorchs() {
    compare("lenet", || LeNet::new(LeNetConfig::default()), &probe(&[3, 1, 28, 28]), &labels());
}

#[test]
fn conv_net_is_pytorchs() {
    compare("conv_net", || ConvNet::new(ConvNetConfig::default()), &probe(&[3, 1, 28, 28]), &labels());
}

#[test]
fn mlp_is_pytorchs() {
    compare("mlp", || Mlp::new(MlpConfig::default()), &probe(&[3, 1, 28, 28]), &labels());
}

#[test]
fn resnet18_is_pytorchs() {
    let narrow = || ResNet18::new(ResNet18Config { width: 8, ..Default::default() });
    compare("resnet18_width_8", narrow, &probe(&[3, 3, 16, 16]), &labels());
}

#[test]
fn resnet18_of_full_width_has_torchvisions_names_and_shapes() {
    let guard = seeded(0);
    let net = ResNet18::new(ResNet18Config::default()).unwrap();
    drop(guard);
    let state: Vec<Value> =
        net.state_dict().iter().map(|(name, tensor)| serde_json::json!([name, tensor.size()])).collect();
    assert_eq!(Value::from(state), FIXTURE["resnet18"]["state"]);
    assert_eq!(net.num_parameters(true), 11_173_962);
}

#[test]
fn gpt_is_nanogpts() {
    let tokens = (Tensor::arange(24, (Kind::Int64, tch::Device::Cpu)) * 7).remainder(65).reshape([2, 12]);
    let targets = tokens.roll(-1, 1);
    let config = GptConfig {
        vocab_size: 65,
        block_size: 16,
        n_layer: 2,
        n_head: 4,
        n_embd: 32,
        dropout: 0.0,
        bias: false,
    };
    compare("gpt", || Gpt::new(config.clone()), &tokens, &targets);
    let gpt = {
        let _guard = seeded(0);
        Gpt::new(config.clone()).unwrap()
    };
    let loss = gpt.loss(&tokens, &targets).unwrap().double_value(&[]);
    assert!((loss - FIXTURE["gpt"]["loss"].as_f64().unwrap()).abs() < 1e-5);
    compare(
        "gpt_dropout_bias",
        || Gpt::new(GptConfig { dropout: 0.1, bias: true, ..config }),
        &tokens,
        &targets,
    );
}

#[test]
fn gpt_explains_what_does_not_fit() {
    let guard = seeded(0);
    let small = GptConfig { block_size: 4, n_layer: 1, n_embd: 8, ..GptConfig::tiny() };
    let gpt = Gpt::new(small.clone()).unwrap();
    let heads = Gpt::new(GptConfig { n_head: 3, ..small.clone() }).err().unwrap().to_string();
    let layers = Gpt::new(GptConfig { n_layer: 0, ..small }).err().unwrap().to_string();
    drop(guard);
    assert_eq!(
        heads,
        "Gpt: n_head = 3 does not divide n_embd = 8; choose n_head among the divisors of n_embd"
    );
    assert_eq!(layers, "Gpt: n_layer is 0; give at least 1");
    for (shape, token, message) in [
        ([2, 5], 0, "Gpt: input of shape [2, 5] does not fit: [batch, time] is needed, with time at most 4"),
        ([1, 4], 256, "Embedding(256, 8): the indices reach from 256 to 256; give integers in 0..256"),
    ] {
        let tokens = Tensor::full(shape, token, (Kind::Int64, tch::Device::Cpu));
        assert_eq!(gpt.forward(&tokens).unwrap_err().to_string(), message);
    }
}

#[test]
fn the_sizes_named_in_the_docs_are_true() {
    let guard = seeded(0);
    let tiny = Gpt::new(GptConfig::tiny()).unwrap();
    drop(guard);
    assert_eq!(tiny.type_name(), "Gpt");
    // 4 blocks of 12 c² + 2 c, the embeddings of 256 tokens and 64 positions, and the last norm
    assert_eq!(tiny.num_parameters(true), 4 * (12 * 128 * 128 + 2 * 128) + (256 + 64) * 128 + 128);
    let mini = GptConfig::mini();
    assert_eq!((mini.n_layer, mini.n_embd, mini.n_head, mini.block_size), (6, 384, 6, 256));
}

#[test]
fn configs_take_partial_yaml_and_refuse_unknown_keys() {
    let config: GptConfig = serde_json::from_str(r#"{"n_layer": 2}"#).unwrap();
    assert_eq!(config, GptConfig { n_layer: 2, ..GptConfig::tiny() });
    for error in [
        serde_json::from_str::<GptConfig>(r#"{"n_layers": 2}"#).unwrap_err(),
        serde_json::from_str::<LeNetConfig>(r#"{"classes": 2}"#).unwrap_err(),
        serde_json::from_str::<ConvNetConfig>(r#"{"dropout": 0.1}"#).unwrap_err(),
        serde_json::from_str::<MlpConfig>(r#"{"hidden": 2}"#).unwrap_err(),
        serde_json::from_str::<ResNet18Config>(r#"{"depth": 2}"#).unwrap_err(),
    ] {
        assert!(error.to_string().contains("unknown field"), "{error}");
    }
    let schema = serde_json::to_value(schemars::schema_for!(GptConfig)).unwrap();
    for (key, property) in schema["properties"].as_object().unwrap() {
        assert!(
            property["description"].as_str().is_some_and(|text| text.len() > 10),
            "{key} has no help text"
        );
    }
}
