//! voltaic's side of the benchmark: its shipping models, trained by its public `Trainer`.

mod data;
mod generate;
mod peak;
mod timed;

use anyhow::bail;
use measure::Job;
use measure::generate::GenerateJob;
use voltaic::graph::CompileBackend;
use voltaic::models::{ConvNet, ConvNetConfig, Gpt, GptConfig, Mlp, MlpConfig, ResNet18, ResNet18Config};
use voltaic::nn::{Forward, ModuleExt, init, te};
use voltaic::optim::{Adam, AdamW, Optimizers, Sgd};
use voltaic::prelude::*;
use voltaic::trainer::{GraphMode, TrainerBuilder};

use crate::data::Batches;
use crate::timed::Timed;

fn main() -> anyhow::Result<()> {
    if let Some(job) = GenerateJob::from_args()? {
        return generate::run(&job);
    }
    let job = Job::from_args()?;
    seed_everything(1)?;
    match job.workload.as_str() {
        "matmul" => peak::print(&job.accelerator),
        "mlp" => train(
            &job,
            || Mlp::new(MlpConfig::default()),
            Batches::images(64, 1, 28),
            |_| Ok(AdamW::new(1e-3).into()),
        ),
        "cnn" => train(
            &job,
            || ConvNet::new(ConvNetConfig::default()),
            Batches::images(64, 1, 28),
            |_| Ok(Adam::new(1e-3).into()),
        ),
        "resnet18" => train(
            &job,
            || ResNet18::new(ResNet18Config::default()),
            Batches::images(32, 3, 32),
            |_| Ok(Sgd::new(0.01).momentum(0.9).into()),
        ),
        "gpt-tiny" => train_gpt(&job, GptConfig::tiny(), 12),
        "gpt-mini" => train_gpt(&job, GptConfig { dropout: 0.0, ..GptConfig::mini() }, 4),
        "gpt2" => {
            let (block_size, vocab_size) = (1024, 50304);
            let config = GptConfig {
                block_size,
                vocab_size,
                n_layer: 12,
                n_head: 12,
                n_embd: 768,
                ..GptConfig::tiny()
            };
            train_gpt(&job, config, 8)
        }
        other => {
            bail!("workload: there is no {other}; use matmul, mlp, cnn, resnet18, gpt-tiny, gpt-mini or gpt2")
        }
    }
}

fn train_gpt(job: &Job, config: GptConfig, batch_size: i64) -> anyhow::Result<()> {
    let batches = Batches::tokens(batch_size, config.block_size, config.vocab_size);
    train(job, || Gpt::new(config), batches, LightningModule::configure_optimizers)
}

fn train<N: Forward>(
    job: &Job,
    make: impl FnOnce() -> voltaic::Result<N>,
    batches: Batches,
    optimizers: fn(&N) -> anyhow::Result<Optimizers>,
) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    // several processes share the folder, and the one that starts them does not come back to remove it
    let root = if job.processes > 1 { &std::env::temp_dir() } else { folder.path() };
    let builder = Trainer::builder().default_root_dir(root).max_steps(job.total_steps() as i64);
    // with bfloat16 activations the network enters the region of float8 by itself
    let (fp8, is_bf16) = (job.variant.starts_with("fp8"), job.precision == "bf16-mixed");
    let builder = builder.precision(if fp8 && !is_bf16 { "fp8" } else { job.precision.as_str() });
    let bare = |builder: TrainerBuilder| {
        builder
            .logger(false)
            .enable_checkpointing(false)
            .enable_progress_bar(false)
            .enable_model_summary(false)
    };
    let given = job.accelerator.as_str();
    let (builder, logs) = match job.variant.as_str() {
        "bare" => (bare(builder).accelerator(given).devices(job.processes as i64), false),
        "defaults" => (builder.accelerator(given).devices(1), true),
        "fp8" => (bare(builder).accelerator(given), false),
        "graphs" => (bare(builder).accelerator(given).graph(GraphMode::Step), false),
        "fp8-graphs" => (bare(builder).accelerator(given).graph(GraphMode::Step), false),
        "compiled" => (bare(builder).accelerator(given).compile(CompileBackend::HpuBackend), false),
        "checkpointed" => (bare(builder).accelerator(given).activation_checkpointing(["Block"]), false),
        "hpu" => (bare(builder).accelerator("hpu").devices(1), false),
        "hpu-graphs" => (bare(builder).accelerator("hpu").devices(1).graph(GraphMode::Step), false),
        "zero1" | "zero2" | "zero3" => {
            let builder = bare(builder).accelerator(given).devices(job.processes as i64);
            (builder.strategy(job.variant.as_str()), false)
        }
        other => bail!(
            "variant: there is no {other}; use bare, defaults, graphs, compiled, checkpointed, fp8, fp8-graphs, hpu, hpu-graphs, zero1, zero2 or zero3"
        ),
    };
    let mut trainer = builder.build()?;
    let net = init::without_draws(make)?;
    if fp8 {
        te::convert(&net, &te::recipe::Fp8Settings::default())?;
    }
    data::set_weights(&net.named_parameters())?;
    let mut loaders = Loaders::new().train(batches.loader(job.total_steps() * job.processes)?);
    let mut net = Timed::new(net, optimizers, [logs, fp8 && is_bf16], job)?;
    trainer.fit(&mut net, &mut loaders)?;
    if trainer.is_global_zero() { net.print_report() } else { Ok(()) }
}
