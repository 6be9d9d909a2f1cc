//! Ranks that do not run the same are told what differs before they train.

use std::process::Stdio;

use tempfile::TempDir;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::error::DistributedError;
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::{Linear, ModuleExt};
use voltaic::optim::{AdamW, LrSchedulerSpec, Optimizers, Sgd, StepLr};
use voltaic::strategy::{Ddp, DdpConfig, DeepSpeedStrategy};
use voltaic::trainer::{TrainerBuilder, seed_everything};
use voltaic::{Error, Module, Tensor};

use crate::ddp::{FOLDER, Net, folder_of_parent, numbers};
use crate::distributed::free_port;
use crate::probe::{own_process, plays, silent, text_of};

/// The net, with an optimizer that differs.
#[derive(Module)]
struct Differing {
    net: Net,
    more: Option<Linear>,
    #[module(skip)]
    how: &'static str,
}

impl LightningModule for Differing {
    type Batch = (Tensor, Tensor);

    fn training_step(&self, batch: &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        self.net.training_step(batch, ctx)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        match self.how {
            "learning rate" => AdamW::new(0.02).into(),
            "optimizer" => Sgd::new(0.01).into(),
            "betas" => AdamW::new(0.01).betas((0.8, 0.9)).into(),
            "schedule" => {
                Ok(Optimizers::new(AdamW::new(0.01)).scheduler(LrSchedulerSpec::new(StepLr::new(1, 0.5))))
            }
            "no schedule" => {
                Ok(Optimizers::new(AdamW::new(0.01)).scheduler(LrSchedulerSpec::new(StepLr::new(1, 0.1))))
            }
            _ => AdamW::new(0.01).into(),
        }
    }

    fn hyper_parameters(&self) -> serde_json::Value {
        let secret = format!("hunter-{}", std::process::id());
        match self.how {
            "hyper-parameters" => serde_json::json!({"width": 7, "api_key": secret}),
            _ => serde_json::json!({"width": 3}),
        }
    }
}

fn data(how: &str) -> Loaders<(Tensor, Tensor)> {
    let (samples, batch_size) = match how {
        "data" => (40, 4),
        "batch size" => (48, 2),
        _ => (48, 4),
    };
    let set = TensorDataset::new((numbers(&[samples, 5], 3.0), numbers(&[samples, 3], 4.0))).unwrap();
    Loaders::new().train(DataLoader::new(set).batch_size(batch_size).build().unwrap())
}

fn config(how: &str, builder: TrainerBuilder) -> TrainerBuilder {
    match how {
        "clipping" => builder.gradient_clip_val(0.5),
        "precision" => builder.precision("bf16-mixed"),
        "limit" => builder.limit_train_batches(3),
        "interval" => builder.accumulate_grad_batches(2_u64),
        "epochs" => builder.max_epochs(3),
        "bucket" => builder.strategy(DdpConfig { bucket_cap_mb: 1, ..DdpConfig::default() }),
        "allowed seed" => {
            builder.strategy(DdpConfig { allow_differences: vec!["seed".to_owned()], ..DdpConfig::default() })
        }
        "zero's allowed seed" => builder.strategy(DeepSpeedStrategy {
            allow_differences: vec!["seed".to_owned()],
            ..DeepSpeedStrategy::stage(1)
        }),
        "own strategy" => {
            builder.strategy(|world| Ok(Box::new(Ddp::new("mine", world, DdpConfig::default())) as _))
        }
        _ => builder.strategy("ddp"),
    }
}

/// Trains on a rank that differs from the other in `how`.
fn train(how: &'static str) -> voltaic::Result<()> {
    let is_second = std::env::var("LOCAL_RANK").is_ok_and(|rank| rank == "1");
    let its = if is_second || how.ends_with("allowed seed") || how == "own strategy" { how } else { "" };
    seed_everything(if is_second && how.ends_with("seed") { 8 } else { 7 })?;
    let builder = silent().accelerator("cpu").devices(2).max_epochs(2).limit_val_batches(0);
    let mut trainer = config(its, builder.default_root_dir(folder_of_parent())).build()?;
    let its = match how {
        "own strategy" if is_second => "learning rate",
        "schedule" if !is_second => "no schedule",
        _ => its,
    };
    let more = (its == "module").then(|| Linear::new(2, 2).unwrap());
    let mut module = Differing { net: Net::new(), more, how: its };
    if its == "frozen" {
        module.net.set_requires_grad(false);
    }
    trainer.fit(&mut module, &mut data(its))
}

const CASES: [(&str, &str); 19] = [
    ("learning rate", "optimizers.0.groups.0.lr is 0.01 on rank 0 and 0.02 on rank 1"),
    ("optimizer", "optimizers.0 is AdamW on rank 0 and SGD on rank 1"),
    ("betas", "optimizers.0.groups.0.betas is [0.9,0.999] on rank 0 and [0.8,0.9] on rank 1"),
    ("schedule", "optimizers.0.groups.0.lr is 0.001 on rank 0 and 0.005 on rank 1"),
    ("batch size", "data.train.0.batch_size is 4 on rank 0 and 2 on rank 1"),
    ("data", "data.train.0.samples is 48 on rank 0 and 40 on rank 1"),
    ("seed", "seed is 7 on rank 0 and 8 on rank 1"),
    ("clipping", "trainer.gradient_clip_val is not set on rank 0 and Norm(0.5) on rank 1"),
    ("precision", "trainer.precision is 32-true on rank 0 and bf16-mixed on rank 1"),
    ("limit", "trainer.limit_train_batches is 1.0 on rank 0 and 3 on rank 1"),
    ("interval", "trainer.accumulate_grad_batches is 1 on rank 0 and 2 on rank 1"),
    ("epochs", "trainer.max_epochs is 2 on rank 0 and 3 on rank 1"),
    ("bucket", "trainer.strategy.bucket_cap_mb is 25 on rank 0 and 1 on rank 1"),
    ("module", "module.more.weight is nothing on rank 0 and Float of shape [2, 2], trained on rank 1"),
    (
        "frozen",
        "module.net.first.weight is Float of shape [16, 5], trained on rank 0 and Float of shape [16, 5], frozen",
    ),
    ("hyper-parameters", "module.hyper_parameters.width is 3 on rank 0 and 7 on rank 1"),
    ("own strategy", "optimizers.0.groups.0.lr is 0.01 on rank 0 and 0.02 on rank 1"),
    ("allowed seed", ""),
    ("zero's allowed seed", ""),
];

#[test]
fn ranks_that_differ_are_told_in_what_before_they_train() {
    if plays("differ") {
        for (how, _) in CASES {
            let told = match train(how) {
                Ok(()) => "trained".to_owned(),
                Err(error) => {
                    assert!(matches!(
                        error,
                        Error::Distributed(
                            DistributedError::Different { .. } | DistributedError::Rendezvous { .. }
                        )
                    ));
                    error.to_string()
                }
            };
            println!("\n{how}: {told}");
        }
        return;
    }
    let folder = TempDir::new().unwrap();
    let first = text_of(&own_process("differ").env(FOLDER, folder.path()).output().unwrap());
    let second = std::fs::read_to_string(folder.path().join("rank_logs/rank_1.log")).unwrap();
    for text in [first, second] {
        for (how, expected) in CASES {
            let told = text.lines().find_map(|line| line.strip_prefix(&format!("{how}: ")));
            let told = told.unwrap_or_else(|| panic!("{how}: {text}"));
            match expected {
                "" => assert_eq!(told, "trained", "{how}"),
                expected => assert!(told.contains(expected), "{how}: {told}"),
            }
        }
        assert!(!text.contains("hunter"), "a secret is shown: {text}");
    }
}

#[test]
fn nodes_with_other_options_on_the_command_line_are_told() {
    let folder = TempDir::new().unwrap();
    let port = free_port();
    let nodes: Vec<_> = (0..2)
        .map(|node_rank| {
            let clip = format!("--trainer.gradient_clip_val={}", 0.5 * f64::from(node_rank + 1));
            let lr = format!("--optimizer.lr={}", 0.01 * f64::from(node_rank + 1));
            let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_voltaic"));
            command.args(["fit", "--model=Mlp", "--data=MnistData", "--optimizer=SGD", &lr, &clip]);
            command.args(["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.num_nodes=2"]);
            command.args(["--trainer.max_epochs=1", "--trainer.limit_train_batches=1"]);
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
            command.env("NODE_RANK", node_rank.to_string()).current_dir(folder.path());
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    for node in nodes {
        let output = node.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{text}");
        let expected = "trainer.gradient_clip_val is Norm(0.5) on rank 0 and Norm(1.0) on rank 1";
        assert!(text.contains(expected), "{text}");
    }
}
