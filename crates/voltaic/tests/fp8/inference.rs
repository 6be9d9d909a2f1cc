//! fp8 inference: layers against PyTorch's operators, measuring and quantizing by the trainer, files, and accuracy.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};
use tch::{Kind, Tensor};
use voltaic::Module;
use voltaic::data::{DataLoader, DataModule, Loaders, MnistData, MnistDataConfig, MnistSet, TensorDataset};
use voltaic::models::{Classifier, LeNet, LeNetConfig};
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::quant::{self, Converted};
use voltaic::nn::{Callable, Conv2d, Forward, Linear, Matmul, ModuleExt, Softmax, te};
use voltaic::optim::{AdamW, Optimizers};
use voltaic::precision::HpuPrecisionPlugin;
use voltaic::precision::fp8::{QuantConfig, ScaleMethod};
use voltaic::trainer::{Trainer, TrainerBuilder, seed_everything};

use crate::alone;
use crate::compare::assert_same;
use crate::operators::{CPU, HPU, start_hpu};
use crate::runs::{short_text, tiny_gpt, waves};
use crate::silent::silent;

#[derive(Deserialize)]
struct Fixture {
    x: Vec<f32>,
    weight: Vec<f32>,
    bias: Vec<f32>,
    linear: Vec<LinearCase>,
    image: Vec<f32>,
    kernel: Vec<f32>,
    shift: Vec<f32>,
    conv2d: Vec<ConvCase>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    matmul: Vec<f32>,
    softmax: Vec<f32>,
    attention: Vec<f32>,
}

#[derive(Deserialize)]
struct LinearCase {
    method: ScaleMethod,
    device: String,
    format: String,
    codes: Vec<f32>,
    output: Vec<f32>,
}

#[derive(Deserialize)]
struct ConvCase {
    method: ScaleMethod,
    output: Vec<f32>,
}

fn fixture() -> Fixture {
    serde_json::from_str(include_str!("../fixtures/fp8/quant.json")).unwrap()
}

fn tensor(values: &[f32], shape: &[i64]) -> Tensor {
    Tensor::from_slice(values).reshape(shape)
}

pub fn settings(given: Value) -> QuantConfig {
    let Value::Object(given) = given else { panic!("a mapping") };
    QuantConfig::from_dict(given, "quant").unwrap()
}

/// Measures what `calls` does with the module in `folder`, and quantizes by these settings.
pub fn quantize<M: ModuleExt>(module: &mut M, given: Value, folder: &Path, calls: impl Fn(&M)) {
    let mut given = given;
    given["dump_stats_path"] = json!(folder.join("measure"));
    let config = settings(given);
    if !matches!(config.scale_method, ScaleMethod::UnitScale | ScaleMethod::HwAlignedSingleScale) {
        let measure = QuantConfig { mode: QuantConfig::measure().mode, ..config.clone() };
        assert!(matches!(quant::convert(module, &measure).unwrap(), Converted::Measured(1..)));
        calls(module);
        quant::finish_measurements(module, folder).unwrap().unwrap();
    }
    assert!(matches!(quant::convert(module, &config).unwrap(), Converted::Quantized { layers: 1.., .. }));
}

fn assert_close(what: &str, found: &Tensor, expected: &[f32], bound: f64) {
    let expected = tensor(expected, &found.size()).to_kind(Kind::Double);
    let most = expected.abs().max().double_value(&[]);
    let apart = (found.to_device(CPU).to_kind(Kind::Double) - expected).abs().max().double_value(&[]);
    assert!(apart <= bound * most, "{what}: {apart} of {most}");
}

#[test]
fn linear_layers_compute_as_by_the_formulas_with_every_scale_method() {
    let _alone = alone();
    let fixture = fixture();
    let (x, folder) = (tensor(&fixture.x, &[5, 8]), tempfile::tempdir().unwrap());
    for LinearCase { method, device, format, codes, output } in &fixture.linear {
        let mut fc = Linear::new(8, 6).unwrap();
        fc.weight.set_data(&tensor(&fixture.weight, &[6, 8])).unwrap();
        fc.bias.as_ref().unwrap().set_data(&tensor(&fixture.bias, &[6])).unwrap();
        let observer = if method.name().contains("smooth") { "maxabs_per_channel" } else { "maxabs" };
        let given = json!({
            "scale_method": method.name(), "device_type": device, "fp8_config": format, "observer": observer,
        });
        quantize(&mut fc, given, folder.path(), |fc| drop(fc.forward(&x).unwrap()));
        let what = format!("{method} {device} {format}");
        assert_eq!(fc.weight.kind() == Kind::Float8e4m3fn, format == "E4M3");
        let weight = fc.weight.to_kind(Kind::Float).flatten(0, 1);
        assert_eq!(Vec::<f32>::try_from(&weight).unwrap(), *codes, "{what}");
        assert_close(&what, &fc.forward(&x).unwrap(), output, 2e-6);
        assert_close(&what, &fc.forward(&x.reshape([1, 5, 8])).unwrap(), output, 2e-6);
    }
}

#[test]
fn a_quantized_linear_layer_has_the_same_bits_on_the_cpu_and_on_an_emulated_hpu() {
    let _alone = alone();
    start_hpu();
    let folder = tempfile::tempdir().unwrap();
    let methods = ["maxabs_hw", "maxabs_arbitrary", "act_maxabs_hw_weights_pcs_maxabs_pow2"];
    for (method, kind, [rows, from, to]) in methods.into_iter().flat_map(|method| {
        let sizes = [[1, 64, 48], [8, 33, 17], [9, 70, 40], [64, 784, 256], [130, 300, 65]];
        let kinds = [Kind::Float, Kind::BFloat16];
        kinds.into_iter().flat_map(move |kind| sizes.into_iter().map(move |size| (method, kind, size)))
    }) {
        let mut fc = Linear::new(from, to).unwrap();
        for (number, parameter) in fc.parameters().into_iter().enumerate() {
            parameter.set_data(&(waves(&parameter.size(), number as f64) * 0.3)).unwrap();
        }
        let x = waves(&[rows, from], 5.0).to_kind(kind);
        let given = json!({"scale_method": method});
        quantize(&mut fc, given, folder.path(), |fc| drop(fc.forward(&x.to_kind(Kind::Float)).unwrap()));
        let cpu = fc.forward(&x).unwrap();
        fc.to_device(voltaic::Device::Hpu(0)).unwrap();
        let hpu = fc.forward(&x.to_device(HPU)).unwrap().to_device(CPU);
        let apart = (&cpu - &hpu).to_kind(Kind::Double).abs().max().double_value(&[]);
        assert!(cpu.equal(&hpu), "{method}, {kind:?}, {rows} rows, {from} to {to}: {apart}");
    }
}

#[derive(Module)]
struct Rest {
    conv: Conv2d,
    matmul: Matmul,
    softmax: Softmax,
    attention: te::FusedAttention,
}

#[test]
fn convolutions_products_softmax_and_attention_compute_as_by_the_formulas() {
    let _alone = alone();
    start_hpu();
    let fixture = fixture();
    let folder = tempfile::tempdir().unwrap();
    for (device, place) in [(voltaic::Device::Cpu, CPU), (voltaic::Device::Hpu(0), HPU)] {
        let of = |values: &[f32], shape: &[i64]| tensor(values, shape).to_device(place);
        let image = of(&fixture.image, &[2, 3, 7, 7]);
        let [q, k, v] = [&fixture.q, &fixture.k, &fixture.v].map(|values| of(values, &[2, 2, 5, 4]));
        let outputs = |net: &Rest| {
            [
                net.conv.forward(&image).unwrap(),
                net.matmul.multiply(&q, &k.transpose(-2, -1)).unwrap(),
                net.softmax.forward(&q).unwrap(),
                net.attention.attend(&q, &k, &v, None, true).unwrap(),
            ]
        };
        let net = || {
            let conv = Conv2d::builder(3, 4, 3).stride(2).padding(1).build().unwrap();
            conv.weight.set_data(&tensor(&fixture.kernel, &[4, 3, 3, 3])).unwrap();
            conv.bias.as_ref().unwrap().set_data(&tensor(&fixture.shift, &[4])).unwrap();
            let attention = te::FusedAttention::new(0.0).unwrap();
            let net = Rest { conv, matmul: Matmul::new(), softmax: Softmax::new(-1), attention };
            net.to_device(device).unwrap();
            net
        };
        let mut whole = net();
        quantize(&mut whole, json!({}), folder.path(), |net| drop(outputs(net)));
        let found = outputs(&whole);
        let expected = [&fixture.conv2d[0].output, &fixture.matmul, &fixture.softmax, &fixture.attention];
        for ((found, expected), name) in
            found.iter().zip(expected).zip(["conv", "matmul", "softmax", "attention"])
        {
            assert_close(&format!("{name} on {device}"), found, expected, 2e-6);
        }
        for ConvCase { method, output } in &fixture.conv2d {
            let mut net = net();
            let given = json!({"scale_method": method.name(), "allowlist": {"types": ["torch.nn.Conv2d"]}});
            quantize(&mut net, given, folder.path(), |net| drop(outputs(net)));
            assert_close(method.name(), &outputs(&net)[0], output, 2e-6);
        }
    }
}

/// Classes of two numbers, with a layer that is called for some inputs alone.
#[derive(Module)]
struct Net {
    first: Linear,
    second: Linear,
    rare: Linear,
    #[module(skip)]
    calls_rare: bool,
}

impl Net {
    fn new() -> Self {
        let net = Self {
            first: Linear::new(6, 16).unwrap(),
            second: Linear::new(16, 4).unwrap(),
            rare: Linear::new(4, 4).unwrap(),
            calls_rare: false,
        };
        for (number, parameter) in net.parameters().into_iter().enumerate() {
            parameter.set_data(&(waves(&parameter.size(), number as f64) * 0.3)).unwrap();
        }
        net
    }

    fn run(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        let y = self.second.call(&self.first.call(x)?.relu())?;
        if self.calls_rare { self.rare.call(&y) } else { Ok(y) }
    }
}

impl LightningModule for Net {
    type Batch = Tensor;

    fn training_step(&self, x: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        Ok(self.run(x)?.square().mean(Kind::Float))
    }

    fn predict_step(&self, x: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        self.run(x)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        AdamW::new(0.1).into()
    }
}

/// Samples of which each is larger than the one before.
fn loaders(samples: i64) -> Loaders<Tensor> {
    let x = waves(&[samples, 6], 3.0) * Tensor::arange(samples, (Kind::Float, CPU)).reshape([-1, 1]);
    let loader = || DataLoader::new(TensorDataset::new(x.copy()).unwrap()).batch_size(4).build().unwrap();
    Loaders::new().train(loader()).predict(loader())
}

fn plugin(quant: impl Into<Value>, folder: &Path) -> HpuPrecisionPlugin {
    let plugin = HpuPrecisionPlugin { fp8_data_path: Some(folder.into()), ..HpuPrecisionPlugin::new("fp8") };
    plugin.inference(quant)
}

fn trainer(plugin: HpuPrecisionPlugin) -> Trainer {
    silent().accelerator("hpu").devices(1).plugins([plugin]).build().unwrap()
}

fn predicted(trainer: &mut Trainer, net: &mut Net) -> Tensor {
    let all = trainer.predict(net, &mut loaders(16)).unwrap();
    Tensor::cat(&all.into_iter().flatten().collect::<Vec<_>>(), 0).to_device(CPU)
}

fn json_of(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn the_trainer_measures_and_quantizes_in_one_process_and_in_two() {
    let _alone = alone();
    start_hpu();
    let folder = tempfile::tempdir().unwrap();
    let files = folder.path().join("inc_output");
    let mut net = Net::new();
    let plain = predicted(&mut trainer(HpuPrecisionPlugin::new("32-true")), &mut net);
    let measure = plugin(false, folder.path());
    measure.convert_modules(&mut net).unwrap();
    assert!(predicted(&mut trainer(measure), &mut net).equal(&plain), "measuring changes no number");
    let names =
        ["measure_hooks_maxabs.json", "measure_hooks_maxabs.npz", "measure_hooks_maxabs_mod_list.json"];
    let mut found: Vec<String> = std::fs::read_dir(&files)
        .unwrap()
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    found.sort();
    assert_eq!(found, names);
    let measured = json_of(&files.join(names[0]));
    let most = |tensor: &Tensor| tensor.abs().max().double_value(&[]);
    let x = waves(&[16, 6], 3.0) * Tensor::arange(16, (Kind::Float, CPU)).reshape([-1, 1]);
    let number = |at: &str| measured.pointer(at).unwrap().as_f64().unwrap();
    assert_eq!(measured["Mode"], "DynamicRange");
    assert_eq!(measured["LocalRank"], Value::Null);
    assert_eq!(number("/Nodes/first/inputs/0/0/0"), most(&x));
    assert_eq!(number("/Nodes/first/params/weight/0/0"), most(&net.first.weight.to_device(CPU)));
    assert!(measured["Nodes"].get("rare").is_none(), "it was not called");
    assert_eq!(json_of(&files.join(names[2])), json!(["first", "second"]));

    plugin(true, folder.path()).convert_modules(&mut net).unwrap();
    let quantized = predicted(&mut trainer(HpuPrecisionPlugin::new("fp8")), &mut net);
    // by libtorch's casts and products
    let named = quant::state_dict(&net).unwrap();
    let layer = |x: &Tensor, fqn: &str| {
        let of = |name: &str| {
            let fqn = format!("{fqn}.{name}");
            named.iter().find(|(known, _)| *known == fqn).unwrap().1.to_device(CPU).to_kind(Kind::Float)
        };
        let scale = of("input_scale");
        let x = (x / &scale).clamp(-240.0, 240.0).to_kind(Kind::Float8e4m3fn).to_kind(Kind::Float);
        x.matmul(&of("weight").tr()) * (scale * of("weight_scale")) + of("bias")
    };
    let expected = layer(&layer(&x, "first").relu(), "second");
    let apart = most(&(&quantized - expected)) / most(&quantized);
    assert!(apart < 1e-6 && !quantized.equal(&plain), "{apart}");
    // by the plugin of a run, which finds them there
    let mut other = Net::new();
    let found = predicted(&mut trainer(plugin(true, folder.path())), &mut other);
    assert!(found.equal(&quantized) && quant::is_quantized(&other));
    // as a module that is saved, on the CPU
    let file = folder.path().join("quantized.safetensors");
    quant::save(&other, &file).unwrap();
    let mut loaded = Net::new();
    quant::load(&mut loaded, &file).unwrap();
    let cpu = silent().accelerator("cpu").build();
    assert!(predicted(&mut cpu.unwrap(), &mut loaded).equal(&quantized));
    // by ckpt_path
    let mut restored = Net::new();
    let mut by_path = trainer(HpuPrecisionPlugin::new("32-true"));
    by_path.ckpt_path(file.to_str().unwrap());
    assert!(predicted(&mut by_path, &mut restored).equal(&quantized));
    let again = folder.path().join("again.ckpt");
    by_path.save_weights(&restored, &again, None).unwrap();
    let mut again_loaded = Net::new();
    quant::load(&mut again_loaded, &again).unwrap();
    assert!(predicted(&mut trainer(HpuPrecisionPlugin::new("32-true")), &mut again_loaded).equal(&quantized));
}

#[test]
fn observers_note_channels_outputs_and_shapes() {
    let _alone = alone();
    start_hpu();
    let folder = tempfile::tempdir().unwrap();
    let measured = |given: Value, file: &str| {
        let mut net = Net::new();
        plugin(given, folder.path()).convert_modules(&mut net).unwrap();
        let _ = predicted(&mut trainer(HpuPrecisionPlugin::new("fp8")), &mut net);
        json_of(&folder.path().join("inc_output").join(file))["Nodes"]["first"].clone()
    };
    let x = waves(&[16, 6], 3.0) * Tensor::arange(16, (Kind::Float, CPU)).reshape([-1, 1]);
    let columns = |tensor: &Tensor| -> Vec<Value> {
        let most = tensor.abs().amax([0_i64].as_slice(), false);
        Vec::<f32>::try_from(&most).unwrap().into_iter().map(|most| json!([most])).collect()
    };
    let given = json!({"mode": "MEASURE", "observer": "maxabs_per_channel", "measure_exclude": "NONE"});
    let node = measured(given, "measure_hooks_maxabs_per_channel.json");
    assert_eq!(node["inputs"], json!([columns(&x)]));
    assert_eq!(node["params"]["weight"], json!(columns(&Net::new().first.weight)));
    assert_eq!(node["outputs"][0].as_array().unwrap().len(), 16);
    let node = measured(json!({"mode": "SHAPE"}), "measure_hooks_shape.json");
    assert_eq!(node["inputs"], json!([[[4.0], [6.0]]]));
    assert_eq!(node["outputs"], json!([]));
    let mut net = Net::new();
    plugin(json!({"mode": "NONE"}), folder.path()).convert_modules(&mut net).unwrap();
    assert!(!quant::is_quantized(&net) && net.first.weight.kind() == Kind::Float);
}

/// The names of the files in a folder.
fn files_in(folder: &Path) -> Vec<String> {
    let files = std::fs::read_dir(folder).unwrap();
    let mut found: Vec<String> = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    found.sort();
    found
}

#[test]
fn tensors_of_layers_are_saved() {
    let _alone = alone();
    start_hpu();
    let folder = tempfile::tempdir().unwrap();
    let mut net = Net::new();
    let plain = predicted(&mut trainer(HpuPrecisionPlugin::new("32-true")), &mut net);
    let given = json!({"mode": "MEASURE", "observer": "save", "measure_exclude": "NONE", "blocklist": {"names": ["rare"]}});
    plugin(given, folder.path()).convert_modules(&mut net).unwrap();
    let again = predicted(&mut trainer(HpuPrecisionPlugin::new("fp8")), &mut net);
    assert!(again.equal(&plain), "saving changes no number");
    assert_eq!(files_in(&folder.path().join("inc_output")), ["tensors"]);
    let tensors = folder.path().join("inc_output/tensors");
    let mut expected: Vec<String> = ["first", "second"].map(|fqn| format!("{fqn}_module.pt")).to_vec();
    for (fqn, what) in
        [("first", "input0"), ("first", "output0"), ("second", "input0"), ("second", "output0")]
    {
        expected.extend((0..4).map(|call| format!("{fqn}_{what}_iter{call}.pt")));
    }
    expected.sort();
    assert_eq!(files_in(&tensors), expected);
    let read = |name: &str| voltaic::checkpoint::read_torch(&tensors.join(name)).unwrap();
    let x = waves(&[16, 6], 3.0) * Tensor::arange(16, (Kind::Float, CPU)).reshape([-1, 1]);
    for call in 0..4 {
        let of = |what: &str| read(&format!("{what}_iter{call}.pt"));
        assert_eq!(of("first_input0").as_tensor().unwrap(), &x.narrow(0, 4 * call, 4));
        assert_eq!(of("second_output0").as_tensor().unwrap(), &plain.narrow(0, 4 * call, 4));
    }
    let module = read("second_module.pt");
    let of = |name: &str| module.get(name).unwrap().as_tensor().unwrap();
    assert_eq!(of("weight"), &net.second.weight.to_device(CPU));
    assert_eq!(of("bias"), &net.second.bias.as_ref().unwrap().to_device(CPU));
    let nowhere = settings(json!({"mode": "MEASURE", "observer": "save"}));
    assert_contains!(message(quant::convert(&mut Net::new(), &nowhere)), "observer", "dump_stats_path");
}

#[test]
fn scales_are_written_beside_the_measurements() {
    let _alone = alone();
    start_hpu();
    let folder = tempfile::tempdir().unwrap();
    let files = folder.path().join("inc_output");
    let mut net = Net::new();
    plugin(false, folder.path()).convert_modules(&mut net).unwrap();
    let _ = predicted(&mut trainer(HpuPrecisionPlugin::new("fp8")), &mut net);
    let before = files_in(&files);
    for (method, name) in [
        ("maxabs_pow2", "MAXABS_POW2"),
        ("act_maxabs_hw_weights_pcs_maxabs_pow2", "ACT_MAXABS_HW_WEIGHTS_PCS_MAXABS_POW2"),
    ] {
        let mut net = Net::new();
        // the scales of an earlier method, or damaged ones, are not taken for those of this one
        let json = files.join(format!("measure_hooks_maxabs_{name}.json"));
        std::fs::write(&json, "{").unwrap();
        plugin(json!({"scale_method": method}), folder.path()).convert_modules(&mut net).unwrap();
        let written = json_of(&json);
        assert_eq!(written["Mode"], "Scale");
        let named = quant::state_dict(&net).unwrap();
        for (fqn, name, at) in
            [("first", "input_scale", "inputs/0"), ("second", "weight_scale", "params/weight")]
        {
            let scales = &named.iter().find(|(known, _)| *known == format!("{fqn}.{name}")).unwrap().1;
            let columns: Vec<Value> =
                Vec::<f32>::try_from(scales).unwrap().into_iter().map(|scale| json!([scale])).collect();
            assert_eq!(written.pointer(&format!("/Nodes/{fqn}/{at}")), Some(&json!(columns)), "{method}");
        }
        assert!(files.join(format!("measure_hooks_maxabs_{name}.npz")).is_file());
        assert!(written["Nodes"].get("rare").is_none());
    }
    assert_eq!(files_in(&files).len(), before.len() + 4);
}

#[test]
fn layers_without_measurements_raise_when_they_are_called() {
    let _alone = alone();
    start_hpu();
    let folder = tempfile::tempdir().unwrap();
    let mut net = Net::new();
    plugin(false, folder.path()).convert_modules(&mut net).unwrap();
    let _ = predicted(&mut trainer(HpuPrecisionPlugin::new("fp8")), &mut net);
    for ignores in [false, true] {
        let mut net = Net { calls_rare: true, ..Net::new() };
        let config = json!({"ignore_modules_wo_measures": ignores.to_string()});
        plugin(config, folder.path()).convert_modules(&mut net).unwrap();
        let done = trainer(HpuPrecisionPlugin::new("fp8")).predict(&mut net, &mut loaders(4));
        match ignores {
            true => assert_eq!(net.rare.weight.kind(), Kind::Float, "{:?}", done.map(drop)),
            false => {
                let message = format!("{:#}", anyhow::Error::from(done.unwrap_err()));
                let expected =
                    "Layer 'rare' was called but was not quantized because no measures were supplied";
                assert!(message.contains(expected), "{message}");
            }
        }
    }
}

fn message<T>(done: voltaic::Result<T>) -> String {
    match done {
        Ok(_) => panic!("no error"),
        Err(error) => format!("{:#}", anyhow::Error::from(error)),
    }
}

#[test]
fn what_cannot_be_is_refused_with_what_to_do() {
    let _alone = alone();
    start_hpu();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_path_buf();
    let convert = |quant: Value, net: &mut Net| plugin(quant, &path).convert_modules(net);
    assert_contains!(message(convert(json!(true), &mut Net::new())), "Failed to load file", "fp8_data_path");
    let mut net = Net::new();
    convert(json!(false), &mut net).unwrap();
    let _ = predicted(&mut trainer(HpuPrecisionPlugin::new("fp8")), &mut net);
    let json = path.join("inc_output/measure_hooks_maxabs.json");
    let (right, before) = (std::fs::read(&json).unwrap(), Net::new().state_dict());
    for (content, expected) in [
        ("{", "Failed to load file"),
        (r#"{"Nodes": {"first": {"inputs": [["NaN"]]}}}"#, "Failed to load file"),
        (r#"{"Nodes": {"first": {"inputs": [[[1e999]]]}}}"#, "Failed to load file"),
        (r#"{"Nodes": {"first": {"inputs": [[[-1.0]]]}}}"#, "infinite or no number"),
        (r#"{"Nodes": {"first": {"inputs": []}}}"#, "0 of 1 inputs"),
        (r#"{"Nodes": {"fc": {"inputs": [[[1.0]]]}}}"#, "no layer of Net was measured"),
    ] {
        std::fs::write(&json, content).unwrap();
        let mut net = Net::new();
        let found = message(convert(json!(true), &mut net));
        assert!(found.contains(expected), "{content}: {found}");
        assert_same("a module that was not converted", &net.state_dict(), &before);
    }
    std::fs::write(&json, right).unwrap();
    let found = message(convert(json!({"observer": "maxabs_per_channel"}), &mut Net::new()));
    assert!(found.contains("measure_hooks_maxabs_per_channel.json"), "{found}");
    convert(json!(true), &mut net).unwrap();
    convert(json!(true), &mut net).unwrap(); // nothing more is done
    assert_contains!(message(convert(json!(false), &mut net)), "is quantized already");
    assert_contains!(message(net.load_state_dict(&before, true).map(drop)), "the module is quantized");
    let fit = trainer(HpuPrecisionPlugin::new("fp8")).fit(&mut net, &mut loaders(4));
    assert!(message(fit).contains("which cannot be trained"));
    let fit = trainer(plugin(true, &path)).fit(&mut Net::new(), &mut loaders(4));
    assert!(message(fit).contains("inference: true, which fit cannot do"));
    // files of other modules, and files that were changed
    let file = path.join("quantized.safetensors");
    let named = quant::state_dict(&net).unwrap();
    let with = |name: &str, tensor: Option<Tensor>| {
        let mut all: Vec<(String, Tensor)> =
            named.iter().map(|(name, tensor)| (name.clone(), tensor.to_device(CPU))).collect();
        all.retain(|(known, _)| known != name);
        all.extend(tensor.map(|tensor| (name.to_owned(), tensor)));
        voltaic::checkpoint::write_weights(&all, &file).unwrap();
        message(quant::load(&mut Net::new(), &file))
    };
    for (name, tensor, expected) in [
        ("first.input_scale", None, "scales are missing"),
        ("first.input_scale", Some(Tensor::from_slice(&[0.0_f32])), "input_scale has 1 numbers"),
        ("first.input_scale", Some(Tensor::from_slice(&[f32::NAN])), "input_scale has 1 numbers"),
        ("first.weight_scale", Some(Tensor::from_slice(&[1.0_f32, 1.0])), "weight_scale has 2 numbers"),
        ("third.weight_scale", Some(Tensor::from_slice(&[1.0_f32])), "scales of third"),
        ("first.weight", Some(Tensor::zeros([16, 6], (Kind::Float, CPU))), "first.weight is no float8"),
    ] {
        let found = with(name, tensor);
        assert!(found.contains(expected), "{name}: {found}");
    }
    let plain = Net::new();
    quant::save(&net, &file).unwrap();
    let found = message(plain.load_state_dict(&voltaic::checkpoint::read_weights(&file).unwrap(), false));
    assert!(found.contains("weights are Float8e4m3fn"), "{found}");
}

#[test]
fn quantized_layers_take_half_the_memory_of_bfloat16() {
    let _alone = alone();
    let mut net = LeNet::new(LeNetConfig::default()).unwrap();
    let of = |net: &LeNet, name: &str| {
        let all = net.state_dict().into_iter();
        all.filter(|(known, _)| known.ends_with(name))
            .map(|(_, t)| t.numel() * t.kind().elt_size_in_bytes())
            .sum()
    };
    net.to_dtype(Kind::BFloat16).unwrap();
    let narrow: usize = of(&net, "weight");
    quant::convert(&mut net, &settings(json!({"scale_method": "unit_scale"}))).unwrap();
    assert_eq!(2 * of(&net, "weight"), narrow);
    net.to_dtype(Kind::Float).unwrap();
    assert_eq!(2 * of(&net, "weight"), narrow, "conversions leave them");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("lenet.safetensors");
    quant::save(&net, &file).unwrap();
    let bytes = std::fs::metadata(&file).unwrap().len();
    assert!(bytes < 61_706 + 236 * 3 + 4096, "{bytes}");
}

/// On each rank: what it measures is written for all, and all quantize alike.
fn measure_on_ranks(ranks: usize, folder: &Path) {
    start_hpu();
    for (strategy, separate) in [("ddp", true), ("ddp", false), ("zero2", true), ("zero3", true)] {
        let folder = folder.join(format!("{strategy}_{separate}"));
        let config = json!({"mode": "MEASURE", "seperate_measure_files": separate});
        let run = |quant: Value, net: &mut Net| {
            let builder = crate::ranks::silent(ranks, strategy, &folder).accelerator("hpu");
            let mut trainer = builder.plugins([plugin(quant, &folder)]).build().unwrap();
            trainer.predict(net, &mut loaders(16)).unwrap();
            trainer.world().rank
        };
        let rank = run(config, &mut Net::new());
        let mut net = Net::new();
        if strategy == "zero3" || !separate {
            // by hand; zero3 divides weights, so that they must be quantized before
            plugin(true, &folder).convert_modules(&mut net).unwrap();
        }
        run(json!(true), &mut net);
        let named = quant::state_dict(&net).unwrap();
        let named: Vec<_> = named.into_iter().map(|(name, tensor)| (name, tensor.to_device(CPU))).collect();
        voltaic::checkpoint::write_weights(&named, &folder.join(format!("{rank}.safetensors"))).unwrap();
    }
}

#[test]
fn ranks_measure_and_quantize_as_one_process() {
    const RANKS: usize = 2;
    if let Some(folder) = crate::ranks::folder_of_rank() {
        return measure_on_ranks(RANKS, &folder);
    }
    let _alone = alone();
    start_hpu();
    let (test, folder) = (std::thread::current().name().unwrap().to_owned(), tempfile::tempdir().unwrap());
    let output = crate::ranks::output(&test, RANKS, folder.path(), &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut net = Net::new();
    plugin(false, folder.path()).convert_modules(&mut net).unwrap();
    let _ = predicted(&mut trainer(HpuPrecisionPlugin::new("fp8")), &mut net);
    plugin(true, folder.path()).convert_modules(&mut net).unwrap();
    let mut own = quant::state_dict(&net).unwrap();
    own.iter_mut().for_each(|(_, tensor)| *tensor = tensor.to_device(CPU).to_kind(Kind::Float));
    own.sort_by(|(a, _), (b, _)| a.cmp(b));
    for turn in ["ddp_true", "ddp_false", "zero2_true", "zero3_true"] {
        let folder = folder.path().join(turn);
        let is_there = |name: &str| folder.join("inc_output").join(name).is_file();
        let separate = turn.ends_with("true");
        assert_eq!(is_there("measure_hooks_maxabs_0_2.json"), separate);
        assert_eq!(is_there("measure_hooks_maxabs_1_2_mod_list.json"), separate);
        assert_eq!(is_there("measure_hooks_maxabs.npz"), !separate);
        for rank in 0..RANKS {
            let path = folder.join(format!("{rank}.safetensors"));
            let mut all = voltaic::checkpoint::read_weights(&path).unwrap();
            all.iter_mut().for_each(|(_, tensor)| *tensor = tensor.to_kind(Kind::Float));
            all.sort_by(|(a, _), (b, _)| a.cmp(b));
            assert_same(&format!("{turn} on rank {rank}"), &all, &own);
        }
    }
}

/// A metric of a trained module, in bf16-mixed and quantized by `maxabs_hw` after measuring on a part of the same data.
fn compared<M: LightningModule, D: DataModule<Batch = M::Batch>>(
    make: impl Fn(&mut D) -> M,
    mut data: D,
    metric: &str,
    (epochs, seed): (i64, u64),
) -> [f64; 2] {
    start_hpu();
    tch::set_num_threads(1);
    seed_everything(seed).unwrap();
    let mut net = make(&mut data);
    let with = |plugin: HpuPrecisionPlugin| silent().accelerator("hpu").devices(1).plugins([plugin]);
    let bf16 = || HpuPrecisionPlugin::new("bf16-mixed");
    with(bf16()).max_epochs(epochs).limit_val_batches(0).build().unwrap().fit(&mut net, &mut data).unwrap();
    let mut validated = |trainer: TrainerBuilder, net: &mut M| {
        let mut trainer = trainer.build().unwrap();
        match metric.starts_with("test") {
            true => trainer.test(net, &mut data).unwrap(),
            false => trainer.validate(net, &mut data).unwrap(),
        };
        trainer.metric(metric).unwrap()
    };
    let before = validated(with(bf16()), &mut net);
    let folder = tempfile::tempdir().unwrap();
    plugin(false, folder.path()).convert_modules(&mut net).unwrap();
    let part = with(HpuPrecisionPlugin::new("fp8")).limit_val_batches(0.25).limit_test_batches(0.25);
    validated(part, &mut net);
    plugin(true, folder.path()).convert_modules(&mut net).unwrap();
    let after = validated(with(HpuPrecisionPlugin::new("fp8")), &mut net);
    for layer in quant::report(&net) {
        println!("{layer:?}");
    }
    println!("{metric}: {before} with bf16-mixed, {after} quantized");
    [before, after]
}

#[test]
fn a_quantized_lenet_is_as_accurate_as_with_bf16_mixed() {
    let _alone = alone();
    let data = || MnistData::new(MnistDataConfig { set: MnistSet::Subset, ..MnistDataConfig::default() });
    let make = |_: &mut MnistData| Classifier::new(LeNet::new(LeNetConfig::default()).unwrap());
    // 0.2 points are 4 of 2000 digits, as many as change by chance in one net: the mean of several is taken
    let nets: Vec<[f64; 2]> = (0..4).map(|seed| compared(make, data(), "test_acc", (2, seed))).collect();
    let [before, after] = [0, 1].map(|which| nets.iter().map(|net| net[which]).sum::<f64>() / 4.0);
    assert!(before > 0.95 && (before - after).abs() <= 0.002, "{before} {after}: {nets:?}");
}

#[test]
fn a_quantized_gpt_is_as_perplexed_as_with_bf16_mixed() {
    let _alone = alone();
    let [before, after] = compared(tiny_gpt, short_text(), "val_loss", (1, 7));
    assert!(((after - before).exp() - 1.0).abs() < 0.01, "{before} {after}");
}
