//! What `generate` does: a prediction whose one batch is the prompts.

use std::cell::Cell;
use std::sync::Arc;

use serde_json::Value;
use tch::Tensor;

use super::console::print;
use super::request::{GenerateArgs, RunRequest};
use crate::data::{DataLoader, Loaders, TensorDataset, Tokenizer};
use crate::error::ConfigError;
use crate::generation::{CausalLm, GenerationConfig, Generations, Generator};
use crate::module::{LightningModule, ModuleTensors, StepContext};
use crate::nn::{Member, Metric, Module};
use crate::optim::Optimizers;
use crate::trainer::TrainerBuilder;

/// Continues the prompts of the command line, with the weights of `ckpt_path`.
pub(super) fn generate<M: LightningModule + CausalLm>(
    request: &RunRequest,
    builder: TrainerBuilder,
    model: M,
    tokenizer: Option<Arc<dyn Tokenizer>>,
) -> anyhow::Result<()> {
    let Some(arguments) = request.generate() else { anyhow::bail!("generate without its options") };
    let Some(tokenizer) = tokenizer else {
        let what = format!("{} has no tokenizer", request.class("data")?);
        let remedy = "choose data that is text, such as ShakespeareData, or implement DataModule::tokenizer";
        return Err(ConfigError::new("data", what, remedy).into());
    };
    if request.weights_are_drawn() {
        let remedy = "give --ckpt_path=FILE, last or best, or --weights=FILE";
        return Err(
            ConfigError::new("ckpt_path", "not set, so that the weights would be random", remedy).into()
        );
    }
    let config = config(arguments, &model, tokenizer.as_ref())?;
    let mut trainer = builder.use_distributed_sampler(false).enable_progress_bar(false).build()?;
    request.begin(&mut trainer)?;
    trainer.return_predictions(false);
    let is_printer = trainer.is_global_zero();
    let mut module = Generating {
        model,
        arguments: arguments.clone(),
        config,
        tokenizer,
        is_printer,
        done: Cell::default(),
    };
    let one = TensorDataset::new(Tensor::f_zeros([1], (tch::Kind::Float, tch::Device::Cpu))?)?;
    trainer.predict(&mut module, &mut Loaders::new().predict(DataLoader::new(one).build()?))?;
    if is_printer && let Some(done) = module.done.take() {
        let tokens: usize = done.sequences.iter().map(|sequence| sequence.tokens.len()).sum();
        tracing::info!(
            "{tokens} tokens; {:.3} s to the first, then {:.1} tokens/s; keys and values take {} bytes",
            done.prefill.as_secs_f64(),
            done.tokens_per_second(),
            done.cache_bytes
        );
        let report = trainer.graph_report();
        if report.captured_by_hand > 0 {
            tracing::info!(
                "graphs of a token: {} captured, {} replays",
                report.captured_by_hand,
                report.replayed_by_hand
            );
        }
    }
    Ok(())
}

fn config(
    arguments: &GenerateArgs,
    model: &impl CausalLm,
    tokenizer: &dyn Tokenizer,
) -> anyhow::Result<GenerationConfig> {
    let stop = arguments.stop.iter().map(|stop| tokenizer.encode(stop)).collect::<Result<_, _>>()?;
    let config = GenerationConfig {
        max_new_tokens: arguments.max_new_tokens,
        temperature: arguments.temperature,
        top_k: arguments.top_k,
        top_p: arguments.top_p,
        repetition_penalty: arguments.repetition_penalty,
        stop,
        seed: arguments.seed,
        vocab_size: Some(tokenizer.vocab_size().min(model.vocab_size())),
        use_graph: arguments.graph,
    };
    config.check()?;
    Ok(config)
}

/// A language model whose prediction is the text after the prompts.
struct Generating<M> {
    model: M,
    arguments: GenerateArgs,
    config: GenerationConfig,
    tokenizer: Arc<dyn Tokenizer>,
    is_printer: bool,
    done: Cell<Option<Generations>>,
}

impl<M: Module> Module for Generating<M> {
    fn members<'a>(&'a self, visit: &mut dyn FnMut(&str, Member<'a>)) {
        self.model.members(visit);
    }

    fn children_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&str, &'a mut dyn Module)) {
        self.model.children_mut(visit);
    }

    fn settings(&self, visit: &mut dyn FnMut(u64)) {
        self.model.settings(visit);
    }

    fn set_training(&mut self, training: bool) {
        self.model.set_training(training);
    }

    fn is_training(&self) -> Option<bool> {
        self.model.is_training()
    }

    fn metric(&self) -> Option<Arc<dyn Metric>> {
        self.model.metric()
    }

    fn wrapped(&self) -> Option<&dyn Module> {
        Some(self.model.as_module())
    }

    fn type_name(&self) -> &'static str {
        self.model.type_name()
    }
}

impl<M: LightningModule + CausalLm> LightningModule for Generating<M> {
    type Batch = Tensor;

    fn training_step(&self, _batch: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        anyhow::bail!("generate does not train")
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(Optimizers::none())
    }

    fn predict_step(&self, _batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let prompts = &self.arguments.prompt;
        let encoded =
            prompts.iter().map(|prompt| self.tokenizer.encode(prompt)).collect::<Result<Vec<_>, _>>()?;
        let is_alone = prompts.len() == 1 && self.is_printer;
        if is_alone {
            print(&prompts[0])?;
        }
        let mut generator = Generator::new(&self.model, self.config.clone())?;
        if is_alone {
            generator = generator.on_token(|_, token| print(&self.tokenizer.decode(&[token])?));
        }
        if let Some(ranks) = ctx.process_group() {
            generator = generator.ranks(ranks);
        }
        let done = generator.generate(&encoded)?;
        match is_alone {
            true => print("\n")?,
            false if self.is_printer => {
                for (prompt, sequence) in prompts.iter().zip(&done.sequences) {
                    print(&format!("{prompt}{}\n", self.tokenizer.decode(&sequence.tokens)?))?;
                }
            }
            false => {}
        }
        drop(generator);
        self.done.set(Some(done));
        Ok(ctx.no_prediction())
    }

    fn configure_model(&mut self) -> anyhow::Result<()> {
        self.model.configure_model()
    }

    fn on_load_checkpoint(&mut self, state: &Value, tensors: &ModuleTensors) -> anyhow::Result<()> {
        self.model.on_load_checkpoint(state, tensors)
    }
}
