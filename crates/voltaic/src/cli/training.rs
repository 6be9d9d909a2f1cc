//! Joins the registry to the trainer: what `fit`, `validate`, `test` and `predict` do.

use std::io::Write;
use std::path::Path;

use tch::{Kind, Tensor};

use super::console::{print, print_metrics};
use super::generate::generate;
use super::quantize::quantize;
use super::registry::{FromConfig, Registry};
use super::request::{RunRequest, Verb};
use super::show::show;
use crate::checkpoint::write_atomically;
use crate::data::{DataModule, Loaders, MnistData, MnistDataConfig, ShakespeareData, ShakespeareDataConfig};
use crate::error::ConfigError;
use crate::generation::CausalLm;
use crate::models::{
    Classifier, ConvNet, ConvNetConfig, Gpt, GptConfig, LeNet, LeNetConfig, Mlp, MlpConfig, ResNet18,
    ResNet18Config,
};
use crate::module::{LightningModule, OutputValue, StepOutput};
use crate::optim::OptimizerConfig;
use crate::trainer::{LrSchedulerSettings, Trainer, TrainerBuilder, TrainerConfig, seed_everything};

impl Registry {
    /// A registry for training, without models and data.
    pub fn new() -> Self {
        Self::empty()
            .section::<TrainerConfig>("trainer", "The trainer.")
            .optional_section::<OptimizerConfig>("optimizer", "Optimizer in place of the model's own.")
            .optional_section::<LrSchedulerSettings>("lr_scheduler", "Learning rate schedule of `optimizer`.")
            .check_with(&["trainer", "optimizer", "lr_scheduler"], check)
            .check_with(&["weights"], |request| request.weights().map(drop))
            .seed_with(|seed| Ok(seed_everything(seed)?))
    }

    /// The models and data that ship with voltaic.
    #[inline] // compiled, with all loops for each model, in the crates that call it alone
    pub fn builtin() -> Self {
        Self::new()
            .model::<Classifier<LeNet>>("LeNet")
            .model::<Classifier<ConvNet>>("ConvNet")
            .model::<Classifier<Mlp>>("Mlp")
            .model::<Classifier<ResNet18>>("ResNet18")
            .language_model::<Gpt>("Gpt")
            .data::<MnistData>("MnistData")
            .data::<ShakespeareData>("ShakespeareData")
    }

    /// Adds a model under the name that `--model` takes.
    #[must_use]
    pub fn model<M: LightningModule + FromConfig>(self, name: &str) -> Self {
        self.model_with::<M, dyn DataModule<Batch = M::Batch>>(name, short_type_name::<M::Batch>(), run)
    }

    /// Adds a model that has loaders of its own, such as [`LightningModule::train_dataloader`]: it runs without `--data`. Data
    /// that is chosen all the same comes first.
    #[must_use]
    pub fn model_with_loaders<M: LightningModule + FromConfig>(self, name: &str) -> Self {
        self.model::<M>(name)
            .own_data_with::<dyn DataModule<Batch = M::Batch>>(name, || Box::new(Loaders::<M::Batch>::new()))
    }

    /// Adds a model that `generate` can continue prompts with, too.
    #[must_use]
    pub fn language_model<M: LightningModule + CausalLm + FromConfig>(self, name: &str) -> Self {
        self.model::<M>(name)
            .generate_with::<M, dyn DataModule<Batch = M::Batch>>(name, |request, model, data| {
                generate(request, builder(request)?, model, data.tokenizer()?)
            })
    }

    /// Adds a data module under the name that `--data` takes.
    #[must_use]
    pub fn data<D: DataModule + FromConfig>(self, name: &str) -> Self {
        self.data_with::<D, dyn DataModule<Batch = D::Batch>>(name, short_type_name::<D::Batch>(), |data| {
            Box::new(data)
        })
    }
}

impl Default for Registry {
    fn default() -> Self {
        Self::new()
    }
}

/// `(Tensor, Tensor)` rather than `(tch::wrappers::tensor::Tensor, ...)`, as far as a type has one path.
fn short_type_name<T>() -> &'static str {
    let name = std::any::type_name::<T>();
    match name {
        "(tch::wrappers::tensor::Tensor, tch::wrappers::tensor::Tensor)" => "(Tensor, Tensor)",
        "tch::wrappers::tensor::Tensor" => "Tensor",
        name => name,
    }
}

/// What samples of the models and data that ship are.
const IMAGES: Option<&str> = Some("images and their classes");
const TEXT: Option<&str> = Some("tokens of a text and the next ones");

macro_rules! classifier_from_config {
    ($($net:ident: $config:ident;)*) => {$(
        impl FromConfig for Classifier<$net> {
            type Config = $config;
            const SAMPLES: Option<&'static str> = IMAGES;

            fn from_config(config: $config) -> anyhow::Result<Self> {
                config.check()?;
                let hyper_parameters = serde_json::to_value(&config)?;
                Ok(Self::new($net::new(config)?).with_hyper_parameters(hyper_parameters))
            }
        }
    )*};
}
classifier_from_config! {
    LeNet: LeNetConfig;
    ConvNet: ConvNetConfig;
    Mlp: MlpConfig;
    ResNet18: ResNet18Config;
}

impl FromConfig for Gpt {
    type Config = GptConfig;
    const SAMPLES: Option<&'static str> = TEXT;

    fn from_config(config: GptConfig) -> anyhow::Result<Self> {
        config.check()?;
        Ok(Self::new(config)?)
    }
}

impl FromConfig for MnistData {
    type Config = MnistDataConfig;
    const SAMPLES: Option<&'static str> = IMAGES;

    fn from_config(config: MnistDataConfig) -> anyhow::Result<Self> {
        config.check()?;
        Ok(Self::new(config))
    }
}

impl FromConfig for ShakespeareData {
    type Config = ShakespeareDataConfig;
    const SAMPLES: Option<&'static str> = TEXT;

    fn from_config(config: ShakespeareDataConfig) -> anyhow::Result<Self> {
        config.check()?;
        Ok(Self::new(config))
    }
}

/// Runs one verb.
fn run<M: LightningModule>(
    request: &RunRequest,
    model: &mut M,
    data: &mut (dyn DataModule<Batch = M::Batch> + 'static),
) -> anyhow::Result<()> {
    if request.verb() == Verb::Quantize {
        return quantize(request, builder(request)?, model, data);
    }
    if request.verb() == Verb::Graph {
        return show(request, builder(request)?, model, data);
    }
    let mut trainer = builder(request)?.build()?;
    request.begin(&mut trainer)?;
    if request.weights_are_drawn() && trainer.is_global_zero() {
        tracing::warn!(
            "{} without ckpt_path or weights: the weights are drawn at random, unless the model loads some itself; give \
             --ckpt_path=FILE, last or best, or --weights=FILE",
            request.verb().as_str()
        );
    }
    match request.verb() {
        Verb::Fit => {
            let keeps_files =
                trainer.config().loggers().is_enabled() && trainer.config().fast_dev_run.batches().is_none();
            let saved = match trainer.is_global_zero() && keeps_files {
                true => save_config(request, trainer.log_dir()),
                false => Ok(()),
            };
            trainer.compare_written(saved)?;
            trainer.fit(model, data)?;
            if trainer.is_global_zero()
                && let Err(error) = print_files(&trainer)
            {
                tracing::warn!("{error:#}: the names of this run's files were not written"); // the run went well
            }
        }
        Verb::Validate | Verb::Test => {
            let (what, metrics) = match request.verb() {
                Verb::Test => ("test", trainer.test(model, data)?),
                _ => ("validation", trainer.validate(model, data)?),
            };
            if trainer.is_global_zero() {
                print_metrics(what, &metrics)?;
            }
        }
        Verb::Predict => {
            print_predictions(&trainer.predict_outputs(model, data)?)?;
            for path in trainer.files() {
                print(&format!("predictions  {}\n", path.display()))?;
            }
        }
        Verb::Generate | Verb::Quantize | Verb::Graph => {
            anyhow::bail!("{} is run elsewhere", request.verb().as_str())
        }
    }
    Ok(())
}

fn check(request: &RunRequest) -> Result<(), ConfigError> {
    let builder = builder(request)?;
    if request.verb() == Verb::Fit { builder.check_fit() } else { builder.check() }
}

fn builder(request: &RunRequest) -> Result<TrainerBuilder, ConfigError> {
    let config: TrainerConfig = request.section("trainer")?;
    let mut builder = Trainer::builder().config(config);
    if request.verb() != Verb::Fit {
        builder = builder.without_logging(); // nothing is trained, so there is no run to log
    }
    let optimizer: Option<OptimizerConfig> = request.section("optimizer")?;
    let lr_scheduler: Option<LrSchedulerSettings> = request.section("lr_scheduler")?;
    match (optimizer, lr_scheduler) {
        (Some(optimizer), lr_scheduler) => Ok(builder.optimizer(optimizer, lr_scheduler)),
        (None, Some(_)) => Err(ConfigError::new(
            "lr_scheduler",
            "given without an optimizer, whose learning rate it would set",
            "add --optimizer, for example --optimizer=AdamW --optimizer.lr=0.001",
        )),
        (None, None) => Ok(builder.prefer_optimizer_of_settings()),
    }
}

/// Keeps the whole configuration beside the run, ready to be given to `--config`.
fn save_config(request: &RunRequest, folder: &Path) -> crate::Result<()> {
    let text = request.config_yaml();
    write_atomically(&folder.join("config.yaml"), |file| file.write_all(text.as_bytes()))
}

fn print_files(trainer: &Trainer) -> anyhow::Result<()> {
    let checkpoint = trainer.best_model_path().or_else(|| trainer.last_model_path());
    let checkpoint = checkpoint.filter(|path| path.exists());
    let mut text = String::new();
    for path in checkpoint.into_iter().chain(trainer.files()) {
        let label = match path.extension().and_then(|extension| extension.to_str()) {
            Some("ckpt") => "checkpoint",
            Some("csv" | "jsonl") => "metrics",
            Some("png") => path.file_stem().and_then(|stem| stem.to_str()).unwrap_or("picture"),
            _ => "file",
        };
        text.push_str(&format!("{label:<10}  {}\n", path.display()));
    }
    print(&text)
}

/// One line per batch: its predictions, separated by blanks; then a line with its name for all that was given by name.
fn print_predictions(predictions: &[Vec<StepOutput>]) -> anyhow::Result<()> {
    for output in predictions.iter().flatten() {
        if let Some(prediction) = output.prediction() {
            print(&format!("{}\n", numbers(prediction)))?;
        }
        for (name, value) in output.named() {
            print(&format!("{name}: {}\n", shown(value)))?;
        }
    }
    Ok(())
}

fn shown(value: &OutputValue) -> String {
    match value {
        OutputValue::Tensor(tensor) => numbers(tensor),
        OutputValue::Value { value, type_name } => match value.downcast_ref::<String>() {
            Some(text) => text.clone(),
            None => format!(
                "(not shown: a {type_name}; tensors and String are; write it with a PredictionWriter of your own)"
            ),
        },
    }
}

fn numbers(tensor: &Tensor) -> String {
    let flat = tensor.f_flatten(0, -1).and_then(|flat| flat.f_to_kind(Kind::Double));
    match flat.and_then(|flat| Vec::<f64>::try_from(&flat)) {
        Ok(numbers) => numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "),
        Err(_) => format!("(not shown: a tensor of {:?})", tensor.kind()),
    }
}
