//! Floating-point operations are counted as PyTorch counts them (fixtures/flops).

use serde_json::Value;
use tempfile::TempDir;
use voltaic::callback::{ModelSummary, ModelSummaryConfig};
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::graph::Flops;
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::functional::scaled_dot_product_attention;
use voltaic::nn::{Conv2d, ConvTranspose2d, Forward, Linear, ModuleExt, Relu, Sequential};
use voltaic::optim::{Optimizers, Sgd};
use voltaic::trainer::GraphMode;
use voltaic::{Kind, Module, Tensor};

use crate::probe::{own_process, plays, silent, text_of};
use crate::rng::seeded;

#[derive(Module)]
struct Attention {
    qkv: Linear,
    out: Linear,
    is_fused: bool,
}

impl Forward for Attention {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        let qkv = self.qkv.forward(x)?.f_chunk(3, -1)?;
        let [q, k, v] = &qkv[..] else { anyhow::bail!("three parts") };
        let mixed = if self.is_fused {
            let heads = |t: &Tensor| t.f_unsqueeze(1);
            scaled_dot_product_attention(&heads(q)?, &heads(k)?, &heads(v)?, None, 0.0, false)?
                .f_squeeze_dim(1)?
        } else {
            q.f_matmul(&k.f_transpose(1, 2)?)?.f_softmax(-1, Kind::Float)?.f_matmul(v)?
        };
        self.out.forward(&mixed)
    }
}

/// Trains a network to give small sums.
#[derive(Module)]
struct Summed<N: Forward> {
    net: N,
}

impl<N: Forward> LightningModule for Summed<N> {
    type Batch = Tensor;

    fn training_step(&self, x: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        ctx.log("epoch", ctx.current_epoch() as f64); // what no graph could replay is counted, too
        Ok(self.net.forward(x)?.f_sum(Kind::Float)?)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Sgd::new(0.1).into()
    }
}

fn data(size: &[i64]) -> Loaders<Tensor> {
    let x = Tensor::ones(size, (Kind::Float, tch::Device::Cpu));
    Loaders::new()
        .train(DataLoader::new(TensorDataset::new(x).unwrap()).batch_size(size[0] as usize).build().unwrap())
}

fn measured<N: Forward>(net: N, size: &[i64]) -> Flops {
    let mut net = Summed { net };
    let before: Vec<Tensor> = net.parameters().iter().map(|p| p.detach().copy()).collect();
    let flops = silent().build().unwrap().measure_flops(&mut net, &mut data(size)).unwrap();
    assert!(net.parameters().iter().zip(&before).all(|(p, before)| p.detach().equal(before)));
    flops
}

fn check(name: &str, flops: &Flops) {
    let fixture: Value = serde_json::from_str(include_str!("../fixtures/flops/flops.json")).unwrap();
    let number = |key: &str| fixture[name][key].as_u64().unwrap();
    assert_eq!((flops.forward, flops.total), (number("forward"), number("total")), "{name}: {flops:?}");
}

fn layers(name: &str) -> Vec<(String, u64)> {
    let fixture: Value = serde_json::from_str(include_str!("../fixtures/flops/flops.json")).unwrap();
    let layers = fixture[name]["layers"].as_object().unwrap();
    layers.iter().map(|(layer, count)| (format!("net.{layer}"), count.as_u64().unwrap())).collect()
}

fn mlp() -> Sequential {
    Sequential::new().add(Linear::new(8, 16).unwrap()).add(Relu).add(Linear::new(16, 3).unwrap())
}

#[test]
fn counts_are_pytorchs() {
    let _rng = seeded(1);
    let flops = measured(mlp(), &[4, 8]);
    check("mlp", &flops);
    assert_eq!(flops.layers, layers("mlp"));
    let conv = Sequential::new()
        .add(Conv2d::builder(3, 8, 3).padding(1).build().unwrap())
        .add(Relu)
        .add(Conv2d::builder(8, 16, 3).stride(2).build().unwrap())
        .add(ConvTranspose2d::builder(16, 4, 2).stride(2).build().unwrap());
    let flops = measured(conv, &[2, 3, 12, 12]);
    check("conv", &flops);
    assert_eq!(flops.layers, layers("conv"));

    let attention = |is_fused| {
        let (qkv, out) = (Linear::new(16, 48).unwrap(), Linear::new(16, 16).unwrap());
        measured(Attention { qkv, out, is_fused }, &[2, 5, 16])
    };
    let flops = attention(false);
    check("attention", &flops);
    let products = 2 * 2 * 2 * 5 * 5 * 16;
    // products without weights count for the layer before them
    let mut expected = layers("attention");
    expected[0].1 += products;
    assert_eq!(flops.layers, expected);
    // the fused kernel does the same, and computes the scores again on its way back
    let fused = attention(true);
    assert_eq!((&fused.layers, fused.total), (&flops.layers, flops.total + products / 2));
}

#[test]
fn the_summary_has_a_column_for_them_and_throughput_uses_them() {
    if plays("summary") {
        let root = TempDir::new().unwrap();
        let config = serde_json::json!({
            "max_steps": 3, "enable_progress_bar": false, "enable_checkpointing": false, "log_every_n_steps": 1,
            "default_root_dir": root.path(), "accelerator": "cpu",
            "logger": [{"class_path": "JsonLinesLogger", "init_args": {}}],
            "callbacks": [
                {"class_path": "ModelSummary", "init_args": {"max_depth": 2, "flops": true, "sizes": true}},
                {"class_path": "ThroughputMonitor", "init_args": {"window_size": 2, "available_flops": 1e12}},
            ],
        });
        let builder = voltaic::trainer::Trainer::builder().config(serde_json::from_value(config).unwrap());
        let mut trainer = builder.build().unwrap();
        trainer.fit(&mut Summed { net: mlp() }, &mut data(&[4, 8])).unwrap();
        let rows = std::fs::read_to_string(trainer.log_dir().join("metrics.jsonl")).unwrap();
        print!("{rows}");
        return;
    }
    let output = own_process("summary").output().unwrap();
    let rows = text_of(&output);
    let printed = String::from_utf8_lossy(&output.stderr);
    let table = "\
Name  | Type       | Params | FLOPs | In sizes | Out sizes
----------------------------------------------------------
net   | Sequential |    195 | 1.4 K |   [4, 8] |    [4, 3]
net.0 | Linear     |    144 | 1.0 K |   [4, 8] |   [4, 16]
net.1 | Relu       |      0 |     0 |  [4, 16] |   [4, 16]
net.2 | Linear     |     51 |   384 |  [4, 16] |    [4, 3]
195 parameters, 195 trainable, 0.00 MB
3.2 K floating-point operations of a training batch, 1.4 K of them forward
";
    assert!(printed.contains(table), "{printed}");
    assert!(printed.matches("Params").count() == 1, "one summary: {printed}");
    let row: Value = rows
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .find(|row: &Value| row["train/device/mfu"].is_number())
        .expect(&rows);
    let number = |name: &str| row[name].as_f64().unwrap();
    let flops = 3200.0 * number("train/device/batches_per_sec");
    assert!((number("train/device/flops_per_sec") / flops - 1.0).abs() < 1e-9, "{row}");
    assert!((number("train/device/mfu") / (flops / 1e12) - 1.0).abs() < 1e-9, "{row}");
}

#[test]
fn what_cannot_be_counted_is_explained() {
    let _rng = seeded(1);
    let config = ModelSummaryConfig { max_depth: -2, flops: false, sizes: false };
    assert_error!(ModelSummary::new(config), "ModelSummary.max_depth: -2 levels; use -1 for all");
    let mut net = Summed { net: mlp() };
    let none = silent().limit_train_batches(0).build().unwrap();
    let error = none.measure_flops(&mut net, &mut data(&[4, 8])).unwrap_err().to_string();
    assert!(error.contains("measure_flops: there is no training batch"), "{error}");
    let trainer = silent().graph(GraphMode::Step).build().unwrap();
    check("mlp", &trainer.measure_flops(&mut net, &mut data(&[4, 8])).unwrap());
}
