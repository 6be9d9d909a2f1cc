//! Precision: what operators cast, and what runs make of it. The lists belong to the process, which is why these tests
//! are in a binary whose tests run one after the other.

use std::cell::Cell;
use std::sync::{Arc, Mutex};

use tch::{Kind, Tensor};
use tempfile::TempDir;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::graph::{HpuGraph, WrapOptions, graph, wrap_in_hpu_graph};
use voltaic::models::{Gpt, GptConfig, LeNet, LeNetConfig};
use voltaic::module::LightningModule;
use voltaic::nn::functional::cross_entropy;
use voltaic::nn::{Forward, Linear, ModuleExt, Parameter};
use voltaic::optim::AdamW;
use voltaic::precision::{
    Cast, HpuPrecisionPlugin, OpLists, OptLevel, autocast, autocast_dtype, autocast_enabled,
    is_autocast_enabled, observe_casts, reset_op_lists, set_op_lists, with_autocast,
};
use voltaic::trainer::{GraphMode, PluginConfig, TrainerBuilder, seed_everything};
use voltaic::{Device, Module};

use crate::losses::Losses;
use crate::ops::{Op, SAMPLES};
use crate::silent::silent;
use crate::support::{CPU, HPU, start};
use crate::trainer::trainer;

const SIDES: [(Device, tch::Device); 2] = [(Device::Cpu, CPU), (Device::Hpu(0), HPU)];

/// Names of Habana's lists that are not operators of libtorch, and one that tch does not offer.
const NO_OPERATORS: [&str; 3] = ["iadd", "truediv", "multi_margin_loss"];

const LOWER_FIRST: [&str; 4] = ["layer_norm", "group_norm", "instance_norm", "batch_norm"];

static CASTS: Mutex<Vec<Cast>> = Mutex::new(Vec::new());

fn note(cast: &Cast) {
    CASTS.lock().unwrap().push(cast.clone());
}

fn names(lower: &[&str], fp32: &[&str]) -> OpLists {
    let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
    OpLists { lower: owned(lower), fp32: owned(fp32), promote: Vec::new() }
}

fn result(op: Op, place: tch::Device, kinds: [Kind; 2]) -> Kind {
    let [a, b] = kinds.map(|kind| Tensor::rand([4, 4], (Kind::Float, CPU)).to_kind(kind).to_device(place));
    op(&a, &b).kind()
}

/// Dtype of the result of an operator on inputs of such dtypes, and which arguments it has cast from what to what.
fn call(name: &str, place: tch::Device, kinds: [Kind; 2]) -> (Kind, Vec<(usize, Kind, Kind)>) {
    let op =
        SAMPLES.iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("no sample of {name}")).1;
    CASTS.lock().unwrap().clear();
    let kind = result(op, place, kinds);
    let casts = std::mem::take(&mut *CASTS.lock().unwrap());
    let seen = casts.into_iter().map(|cast| {
        assert_eq!(cast.operator, name, "nothing else is called");
        (cast.argument, cast.from, cast.to)
    });
    (kind, seen.collect())
}

/// Calls every operator of the lists under autocast; gives how many those are.
fn check_lists((device, place): (Device, tch::Device), lists: &OpLists) -> [usize; 3] {
    const F32: Kind = Kind::Float;
    const BF16: Kind = Kind::BFloat16;
    set_op_lists(device, lists).unwrap();
    observe_casts(Some(note));
    let region = autocast(device, BF16).unwrap();
    let callable = |names: &[String]| -> Vec<String> {
        names.iter().filter(|name| !NO_OPERATORS.contains(&name.as_str())).cloned().collect()
    };
    let (lower, fp32) = (callable(&lists.lower), callable(&lists.fp32));
    let promote: Vec<String> = callable(&lists.promote)
        .into_iter()
        .filter(|name| !lower.contains(name) && !fp32.contains(name))
        .collect();
    for name in &lower {
        let (kind, casts) = call(name, place, [F32, F32]);
        assert_eq!(kind, BF16, "{name} computes in bfloat16");
        assert!(!casts.is_empty() && casts.iter().all(|&(_, from, to)| (from, to) == (F32, BF16)), "{name}");
        if LOWER_FIRST.contains(&name.as_str()) {
            assert_eq!(casts, [(0, F32, BF16)], "{name} leaves weight and bias alone");
        }
        assert_eq!(call(name, place, [BF16, BF16]), (BF16, vec![]), "{name} has nothing to cast");
    }
    for name in &fp32 {
        let (kind, casts) = call(name, place, [BF16, BF16]);
        assert_eq!(kind, F32, "{name} computes in float32");
        assert!(!casts.is_empty() && casts.iter().all(|&(_, from, to)| (from, to) == (BF16, F32)), "{name}");
        assert_eq!(call(name, place, [F32, F32]), (F32, vec![]), "{name} has nothing to cast");
    }
    for name in &promote {
        assert_eq!(call(name, place, [BF16, BF16]), (BF16, vec![]), "{name} stays");
        assert_eq!(call(name, place, [F32, F32]), (F32, vec![]), "{name} stays");
        if name == "exp" {
            continue; // has one argument
        }
        let (kind, casts) = call(name, place, [BF16, F32]);
        assert_eq!(kind, F32, "{name} takes the widest");
        assert!(!casts.is_empty() && casts.iter().all(|&(_, from, to)| (from, to) == (BF16, F32)), "{name}");
    }
    drop(region);
    observe_casts(None);
    reset_op_lists(device).unwrap();
    [lower.len(), fp32.len(), promote.len()]
}

#[test]
fn every_operator_of_every_list_casts_as_its_list_says() {
    let _rng = start();
    for side in SIDES {
        assert_eq!(check_lists(side, &OpLists::hpu()), [27, 49 - 2, 5], "two of the 49 cannot be called");
        assert_eq!(check_lists(side, &OpLists::hmp_o1()), [23, 14 - 1, 8]);
        let [lower, fp32, promote] = check_lists(side, &OpLists::hmp_o2());
        assert_eq!((lower, promote), (13, 0));
        assert!(fp32 > 80, "{fp32}");
    }
}

#[test]
fn integers_and_float64_are_left_alone() {
    let _rng = start();
    let device = Device::Cpu;
    set_op_lists(device, &OpLists::hpu()).unwrap();
    let region = autocast(device, Kind::BFloat16).unwrap();
    for kind in [Kind::Int64, Kind::Double] {
        assert_eq!(result(|a, b| a.mm(b), CPU, [kind; 2]), kind);
        assert_eq!(result(|a, b| a + b, CPU, [kind; 2]), kind);
    }
    assert_eq!(result(|a, b| a / b, CPU, [Kind::Int64; 2]), Kind::Float);
    drop(region);
    reset_op_lists(device).unwrap();
}

#[test]
fn lists_take_effect_when_they_are_set() {
    let _rng = start();
    for (device, place) in SIDES {
        let kinds = || {
            let _region = autocast(device, Kind::BFloat16).unwrap();
            let kind = |op| result(op, place, [Kind::Float; 2]);
            (kind(|a, b| a.mm(b)), kind(|a, _| a.tan()))
        };
        assert_eq!(kinds(), (Kind::BFloat16, Kind::Float), "the default lists of {device}");
        set_op_lists(device, &names(&["tan"], &["mm"])).unwrap();
        assert_eq!(kinds(), (Kind::Float, Kind::BFloat16), "swapped");
        set_op_lists(device, &names(&["mm"], &["tan"])).unwrap();
        assert_eq!(kinds(), (Kind::BFloat16, Kind::Float), "and back");
        set_op_lists(device, &names(&[], &[])).unwrap();
        assert_eq!(kinds(), (Kind::Float, Kind::Float), "in no list");
        reset_op_lists(device).unwrap();
        assert_eq!(kinds(), (Kind::BFloat16, Kind::Float));
    }
    // no GPU computes here, but its lists can be set
    set_op_lists(Device::Cuda(0), &names(&["tan"], &["mm"])).unwrap();
    reset_op_lists(Device::Cuda(0)).unwrap();
}

#[test]
fn graphs_follow_lists_that_are_swapped() {
    let _rng = start();
    for (device, place) in SIDES {
        let net = Linear::new(4, 4).unwrap();
        net.to_device(device).unwrap();
        let net = wrap_in_hpu_graph(net, WrapOptions::default());
        let x = Tensor::rand([4, 4], (Kind::Float, CPU)).to_device(place);
        for (lists, expected) in [
            (names(&["linear"], &[]), Kind::BFloat16),
            (names(&[], &["linear"]), Kind::Float),
            (names(&["linear"], &[]), Kind::BFloat16),
        ] {
            set_op_lists(device, &lists).unwrap();
            for call in 0..3 {
                let _region = autocast(device, Kind::BFloat16).unwrap();
                let y = tch::no_grad(|| net.forward(&x)).unwrap();
                assert_eq!(y.kind(), expected, "call {call} on {device}");
            }
        }
        assert!(net.stats().hits > 0, "graphs were replayed");
        reset_op_lists(device).unwrap();
    }
}

#[test]
fn regions_nest_on_an_hpu() {
    let _rng = start();
    let device = Device::Hpu(0);
    let product = || result(|a, b| a.mm(b), HPU, [Kind::Float; 2]);
    assert!(!is_autocast_enabled(device).unwrap());
    {
        let _outer = autocast(device, Kind::BFloat16).unwrap();
        assert_eq!((product(), autocast_dtype(device).unwrap()), (Kind::BFloat16, Kind::BFloat16));
        {
            let _off = autocast_enabled(device, Kind::BFloat16, false).unwrap();
            assert_eq!((product(), is_autocast_enabled(device).unwrap()), (Kind::Float, false));
            let _half = autocast(device, Kind::Half).unwrap();
            assert_eq!((product(), autocast_dtype(device).unwrap()), (Kind::Half, Kind::Half));
        }
        assert_eq!(product(), Kind::BFloat16);
        assert!(!is_autocast_enabled(Device::Cpu).unwrap(), "of its kind of device only");
    }
    assert_eq!(product(), Kind::Float);
    assert_eq!(with_autocast(device, Kind::BFloat16, product).unwrap(), Kind::BFloat16);
}

#[test]
fn weights_are_cast_once_a_region_in_graphs_too() {
    let _rng = start();
    for (device, place) in SIDES {
        let weight = Parameter::new(Tensor::rand([4, 4], (Kind::Float, CPU)).to_device(place));
        let x = Tensor::rand([4, 4], (Kind::BFloat16, place));
        let step = || {
            let _region = autocast(device, Kind::BFloat16).unwrap();
            x.mm(weight.tensor()) + x.mm(weight.tensor())
        };
        let captured = HpuGraph::new();
        let capture = graph(&captured).unwrap();
        let y = step();
        capture.end().unwrap();
        let recorded = captured.graphs().next().unwrap();
        let counts = recorded.op_counts();
        let count =
            |name: &str| counts.iter().filter(|(op, _)| op.contains(name)).map(|(_, n)| n).sum::<usize>();
        assert_eq!((count("_to_copy"), count("mm")), (1, 2), "{counts:?}");
        // a new region sees new weights
        tch::no_grad(|| weight.tensor().shallow_clone().copy_(&(weight.tensor() * 2.0)));
        captured.replay().unwrap();
        assert_eq!(y.kind(), Kind::BFloat16);
        assert!(y.equal(&step()), "on {device}");
    }
}

fn fit<M: LightningModule<Batch = (Tensor, Tensor)>>(
    accelerator: &str,
    make: impl Fn() -> M,
    (x, y): &(Tensor, Tensor),
    configure: impl Fn(TrainerBuilder) -> TrainerBuilder,
) -> Vec<f64> {
    let root = TempDir::new().unwrap();
    seed_everything(3).unwrap();
    let (mut module, losses) = (make(), Losses::default());
    let data = TensorDataset::new((x.shallow_clone(), y.shallow_clone())).unwrap();
    let train = DataLoader::new(data).batch_size(4).shuffle(true).build().unwrap();
    let builder = trainer(root.path(), accelerator).enable_checkpointing(false).logger(false);
    let mut trainer = configure(builder.callback(losses.clone())).build().unwrap();
    trainer.fit(&mut module, &mut Loaders::new().train(train)).unwrap();
    let losses = losses.0.lock().unwrap();
    losses.clone()
}

fn mean_of_last(losses: &[f64]) -> f64 {
    losses[losses.len() - 8..].iter().sum::<f64>() / 8.0
}

#[test]
fn gpt_tiny_reaches_the_loss_of_float32() {
    let _rng = start();
    // a language of 16 letters, each of which says which the next one is
    let text = Tensor::arange(8 * 65, (Kind::Int64, CPU)).square().fmod(61).fmod(16).reshape([8, 65]);
    let data = (text.narrow(1, 0, 64), text.narrow(1, 1, 64));
    let make = || Gpt::new(GptConfig { vocab_size: 16, ..GptConfig::tiny() }).unwrap();
    let train = |accelerator: &str, precision: &str| {
        fit(accelerator, make, &data, |t| t.precision(precision).max_epochs(15))
    };
    let full = train("cpu", "32-true");
    assert!(mean_of_last(&full) < 0.8 * full[0], "it trains: {full:?}");
    for accelerator in ["cpu", "hpu"] {
        let mixed = train(accelerator, "bf16-mixed");
        assert_ne!(mixed, full, "it does something on {accelerator}");
        let error = (mean_of_last(&mixed) / mean_of_last(&full) - 1.0).abs();
        assert!(error < 0.02, "{accelerator}: {error}");
    }
}

/// LeNet that casts in its own forward pass, whatever the trainer's precision.
#[derive(Module)]
struct CastsItself {
    net: LeNet,
    #[module(skip)]
    device: Device,
    #[module(skip)]
    was_enabled: Arc<Mutex<Vec<bool>>>,
}

lightning_module!(CastsItself, (Tensor, Tensor), AdamW::new(1e-3), |net, (x, y), _| {
    net.was_enabled.lock().unwrap().push(is_autocast_enabled(net.device)?);
    let logits = with_autocast(net.device, Kind::BFloat16, || net.net.forward(x))??;
    Ok(cross_entropy(&logits, y)?)
});

fn digits() -> (Tensor, Tensor) {
    let images = Tensor::arange(24 * 784, (Kind::Float, CPU)).sin().reshape([24, 1, 28, 28]);
    (images, Tensor::arange(24, (Kind::Int64, CPU)).fmod(10))
}

#[test]
fn a_part_of_a_model_casts_without_a_precision() {
    let _rng = start();
    for (device, _) in SIDES {
        let accelerator = if device == Device::Cpu { "cpu" } else { "hpu" };
        let enabled = Arc::new(Mutex::new(Vec::new()));
        let make = || CastsItself {
            net: LeNet::new(LeNetConfig::default()).unwrap(),
            device,
            was_enabled: enabled.clone(),
        };
        let own = fit(accelerator, make, &digits(), |t| t);
        let seen = std::mem::take(&mut *enabled.lock().unwrap());
        assert!(!seen.is_empty() && !seen.contains(&true), "the trainer casts nothing");
        assert_eq!(own, fit(accelerator, make, &digits(), |t| t.graph(GraphMode::Step)), "replayed");
        enabled.lock().unwrap().clear();
        let mixed = fit(accelerator, make, &digits(), |t| t.precision("bf16-mixed"));
        assert!(enabled.lock().unwrap().iter().all(|&enabled| enabled), "in all steps");
        for (own, mixed) in own.iter().zip(&mixed) {
            assert!((own / mixed - 1.0).abs() < 1e-2, "{own} is not {mixed}");
        }
    }
}

/// A product and a tangent, whose dtypes tell which lists hold.
#[derive(Module)]
struct Probe {
    weight: Parameter,
    #[module(skip)]
    kinds: Cell<Option<(Kind, Kind)>>,
}

lightning_module!(Probe, (Tensor, Tensor), AdamW::new(1e-3), |net, (x, _), _| {
    let x = x.flatten(1, -1).narrow(1, 0, 4);
    let y = x.matmul(net.weight.tensor());
    net.kinds.set(Some((y.kind(), x.tan().kind())));
    Ok(y.sum(Kind::Float))
});

/// The dtypes in a fit with such switches.
fn probe(configure: impl Fn(TrainerBuilder) -> TrainerBuilder) -> (Kind, Kind) {
    let root = TempDir::new().unwrap();
    let mut module =
        Probe { weight: Parameter::new(Tensor::ones([4, 4], (Kind::Float, CPU))), kinds: Cell::new(None) };
    let (x, y) = digits();
    let train = DataLoader::new(TensorDataset::new((x, y)).unwrap()).batch_size(4).build().unwrap();
    let builder = silent().accelerator("hpu").devices(1).max_epochs(1).default_root_dir(root.path());
    let mut trainer = configure(builder).build().unwrap();
    trainer.fit(&mut module, &mut Loaders::new().train(train)).unwrap();
    module.kinds.get().unwrap()
}

#[test]
fn the_lists_of_a_run_hold_for_that_run() {
    const DEFAULT: (Kind, Kind) = (Kind::BFloat16, Kind::Float);
    const SWAPPED: (Kind, Kind) = (Kind::Float, Kind::BFloat16);
    let _rng = start();
    let folder = TempDir::new().unwrap();
    let [lower, fp32] = [("lower.txt", "tan\n"), ("fp32.txt", "matmul\r\nmm\r\n\r\n")].map(|(name, text)| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    });
    let swapped = HpuPrecisionPlugin {
        bf16_file_path: Some(lower),
        fp32_file_path: Some(fp32),
        ..HpuPrecisionPlugin::new("bf16-mixed")
    };
    let with = |plugin: &HpuPrecisionPlugin| {
        let plugin = PluginConfig::HpuPrecisionPlugin(plugin.clone());
        probe(|t| t.plugins(vec![plugin.clone()]))
    };
    let plain = || probe(|t| t.precision("bf16-mixed"));
    assert_eq!(plain(), DEFAULT);
    assert_eq!(with(&swapped), SWAPPED);
    assert_eq!(plain(), DEFAULT, "the lists went with their run");
    assert_eq!(with(&HpuPrecisionPlugin { precision: 16.into(), ..swapped.clone() }), SWAPPED, "HMP, O1");
    let o2 = HpuPrecisionPlugin { opt_level: Some(OptLevel::O2), ..swapped };
    assert_eq!(with(&o2), DEFAULT, "a fixed list");
    assert_eq!(probe(|t| t.precision(16)), DEFAULT);
    set_op_lists(Device::Hpu(0), &names(&["tan"], &["matmul"])).unwrap();
    assert_eq!(plain(), SWAPPED, "what was set by hand stays");
    reset_op_lists(Device::Hpu(0)).unwrap();
    assert_eq!(plain(), DEFAULT);
}
