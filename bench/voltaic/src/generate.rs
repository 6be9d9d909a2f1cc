//! voltaic's side of the benchmark of generation: its GPT, continued by its public `Generator`.

use std::cell::RefCell;
use std::path::Path;

use anyhow::bail;
use measure::generate::{GenerateJob, GenerateReport, GenerateTask, TaskReport};
use voltaic::accelerator::accelerator;
use voltaic::checkpoint::{read_weights, write_weights};
use voltaic::generation::{GenerationConfig, Generator};
use voltaic::models::{Gpt, GptConfig};
use voltaic::nn::{init, quant};
use voltaic::precision::fp8::{QuantConfig, QuantMode};
use voltaic::prelude::*;
use voltaic::strategy::{DeepSpeedStrategy, TensorParallel};

use crate::data;

/// Does the job: writes weights, or generates with them.
pub fn run(job: &GenerateJob) -> anyhow::Result<()> {
    accelerator("cpu")?.setup()?;
    let mut gpt = init::without_draws(|| Gpt::new(GptConfig { dropout: 0.0, ..GptConfig::mini() }))?;
    gpt.eval();
    let use_graph = match job.variant.as_str() {
        "weights" => {
            data::set_weights(&gpt.named_parameters())?;
            let _no_grad = tch::no_grad_guard();
            for (_, weight) in gpt.named_parameters().iter().filter(|(name, _)| name.contains("c_attn")) {
                // else the text soon is one token again and again
                let _ = weight.shallow_clone().f_mul_scalar_(1.5)?;
            }
            write_weights(&gpt.state_dict(), &job.weights)?;
            println!("{}", job.weights.display());
            return Ok(());
        }
        "eager" | "tp2" => false,
        "graphs" => true,
        other => bail!("variant: there is no {other}; use weights, eager, graphs or tp2"),
    };
    gpt.load_state_dict(&read_weights(&job.weights)?, true)?;
    match job.format.as_str() {
        "f32" => {}
        "bf16" => gpt.to_dtype(Kind::BFloat16)?,
        "fp8" => quantize(&mut gpt)?,
        other => bail!("format: there is no {other}; use f32, bf16 or fp8"),
    }
    if job.variant == "tp2" {
        return on_two_ranks(gpt, job);
    }
    let tasks = job.tasks.iter().map(|task| generate(&gpt, task, use_graph)).collect::<Result<_, _>>()?;
    GenerateReport::print(tasks, tch::get_num_threads().try_into()?)
}

fn generate(gpt: &Gpt, task: &GenerateTask, use_graph: bool) -> anyhow::Result<TaskReport> {
    let _no_grad = tch::no_grad_guard();
    let logits = gpt.forward(&Tensor::f_from_slice(&task.prompts[0])?.f_unsqueeze(0)?)?;
    let logits = Vec::try_from(&logits.f_select(1, -1)?.f_flatten(0, -1)?.f_to_kind(Kind::Float)?)?;
    let config = GenerationConfig {
        max_new_tokens: task.new_tokens,
        temperature: 0.0,
        use_graph,
        ..GenerationConfig::default()
    };
    let last = task.prompts.len() - 1;
    task.run(logits, |is_there| {
        let on_token = |index: usize, _| {
            if index == last {
                is_there();
            }
            Ok(())
        };
        let done = Generator::new(gpt, config.clone())?.on_token(on_token).generate(&task.prompts)?;
        Ok(done.sequences.into_iter().map(|sequence| sequence.tokens).collect())
    })
}

/// A GPT whose layers two ranks share, as `trainer.predict` hands it over.
#[derive(Module)]
struct Shared {
    gpt: Gpt,
    #[module(skip)]
    tasks: Vec<GenerateTask>,
    #[module(skip)]
    reports: RefCell<Vec<TaskReport>>,
}

impl LightningModule for Shared {
    type Batch = Tensor;

    fn training_step(&self, _batch: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        bail!("it does not train")
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(Optimizers::none())
    }

    fn predict_step(&self, _batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        for task in &self.tasks {
            self.reports.borrow_mut().push(generate(&self.gpt, task, false)?);
        }
        Ok(ctx.no_prediction())
    }
}

fn on_two_ranks(gpt: Gpt, job: &GenerateJob) -> anyhow::Result<()> {
    let strategy = DeepSpeedStrategy {
        tensor_parallel: Some(TensorParallel::size(2)),
        dtype: Some(if job.format == "bf16" { "bf16" } else { "float" }.to_owned()),
        ..DeepSpeedStrategy::default()
    };
    let builder = Trainer::builder().accelerator("cpu").devices(2).strategy(strategy);
    let builder = builder.default_root_dir(std::env::temp_dir()).use_distributed_sampler(false);
    let builder = builder.logger(false).enable_checkpointing(false).enable_model_summary(false);
    let mut trainer = builder.enable_progress_bar(false).build()?;
    trainer.return_predictions(false);
    let mut shared = Shared { gpt, tasks: job.tasks.clone(), reports: RefCell::default() };
    let one = TensorDataset::new(Tensor::f_zeros([1], (Kind::Float, tch::Device::Cpu))?)?;
    trainer.predict(&mut shared, &mut Loaders::new().predict(DataLoader::new(one).build()?))?;
    if !trainer.is_global_zero() {
        return Ok(());
    }
    GenerateReport::print(shared.reports.take(), tch::get_num_threads().try_into()?)
}

/// Measures a pass over random text, and makes linear layers, keys and values float8.
fn quantize(gpt: &mut Gpt) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let measures = folder.path().join("measure");
    let config = QuantConfig { dump_stats_path: Some(measures), ..QuantConfig::quantize() };
    quant::convert(gpt, &QuantConfig { mode: QuantMode::Measure, ..config.clone() })?;
    measure(gpt, folder.path())?;
    quant::convert(gpt, &config)?;
    Ok(())
}

fn measure(gpt: &Gpt, folder: &Path) -> anyhow::Result<()> {
    let _no_grad = tch::no_grad_guard();
    let GptConfig { vocab_size, block_size, .. } = *gpt.config();
    let _ = gpt.forward(&Tensor::f_randint(vocab_size, [4, block_size], (Kind::Int64, tch::Device::Cpu))?)?;
    quant::finish_measurements(gpt, folder)?;
    Ok(())
}
