//! Splits a command line into a verb, its fixed options, and dotted keys.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

use super::outcome::Failure;
use super::request::{GenerateArgs, QuantizeArgs, ShowArgs, Verb, renamed};
use crate::checkpoint::ReadLimits;
use crate::config::{Assignment, nearest};

/// Options of a run that are not configuration keys, as typed.
const FIXED_OPTIONS: [&str; 3] = ["config", "print_config", "help"];

/// Options of `generate` that take a value, beside those.
const GENERATE_OPTIONS: [&str; 8] =
    ["prompt", "max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "stop", "seed"];

/// Options of `quantize` that take a value, beside those.
const QUANTIZE_OPTIONS: [&str; 4] = ["output", "scale_method", "quant", "stage"];

/// Options of `graph show`, beside those; the first takes a value.
const SHOW_OPTIONS: [&str; 2] = ["picture", "all"];

/// Options of launchers, as torchrun writes them, and the keys that they are.
const LAUNCHER_OPTIONS: [(&str, &str); 1] = [("max-restarts", "trainer.max_restarts")];

/// What the user asked for.
pub(super) enum Command {
    /// Print this.
    Text(String),
    Version,
    Models,
    Schema,
    Completion(Shell),
    Devices(DevicesArgs),
    Env(EnvArgs),
    New(PathBuf),
    Plot(PlotArgs),
    Bundle(BundleArgs),
    Launch(LaunchArgs),
    Convert(ConvertArgs),
    Run(Box<RunArgs>),
}

/// A `fit`, `validate`, `test`, `predict`, `generate`, `quantize` or `graph show`.
pub(super) struct RunArgs {
    pub verb: Verb,
    /// Of `generate`.
    pub generate: Option<GenerateArgs>,
    /// Of `quantize`.
    pub quantize: Option<QuantizeArgs>,
    /// Of `graph show`.
    pub show: Option<ShowArgs>,
    pub config: Vec<PathBuf>,
    pub print_config: Option<String>,
    pub help: bool,
    pub assignments: Vec<Assignment>,
}

/// Trains, validates, tests and predicts with registered models.
#[derive(Parser)]
#[command(disable_version_flag = true, disable_help_subcommand = true, after_help = EXAMPLES)]
struct Cli {
    /// Print the versions of this program and of libtorch.
    #[arg(short = 'V', long)]
    version: bool,
    #[command(subcommand)]
    verb: Option<VerbArgs>,
}

const EXAMPLES: &str = "Each key of the configuration is an option: --trainer.max_epochs=3, --model=NAME, --model.KEY=VALUE.\n\
     See them with `fit --help`, and those of one model with `fit --model=NAME --help`.";

#[derive(Subcommand)]
enum VerbArgs {
    /// Train a model, validating as it goes.
    Fit(FixedArgs),
    /// Run the validation data once.
    Validate(FixedArgs),
    /// Run the test data once.
    Test(FixedArgs),
    /// Compute predictions.
    Predict(FixedArgs),
    /// Continue a prompt with a language model, token by token.
    ///
    /// Without --config, the configuration of the run that wrote the checkpoint is used, where it lies beside it.
    Generate {
        #[command(flatten)]
        generate: GenerateArgs,
        #[command(flatten)]
        fixed: FixedArgs,
    },
    /// List the registered models and data modules.
    Models,
    /// Print the JSON schema of configuration files, for editors.
    Schema,
    /// Print a script that completes verbs, options and keys: `voltaic completion bash > ~/.local/share/bash-completion/completions/voltaic`.
    Completion {
        /// The shell.
        shell: Shell,
    },
    /// List the devices of this machine, and why an accelerator is not available.
    Devices(DevicesArgs),
    /// Describe this build, machine and environment, for a bug report.
    Env(EnvArgs),
    /// Convert a checkpoint from or to Lightning, DeepSpeed, PyTorch or safetensors.
    Convert(ConvertArgs),
    /// Measure a trained model for fp8 inference, and write its weights in float8 with their scales.
    ///
    /// Prints what was done to each layer. The file is for validate, test and predict, as --ckpt_path.
    Quantize {
        #[command(flatten)]
        quantize: QuantizeArgs,
        #[command(flatten)]
        fixed: FixedArgs,
    },
    /// Draw the metrics of several runs in one picture, as PNG.
    Plot(PlotArgs),
    /// Put the program into a folder with the libraries that it needs, to be copied to other machines.
    Bundle(BundleArgs),
    /// Run a verb with several processes, by torchrun's flags: `voltaic run --nproc_per_node=2 fit --config run.yaml`.
    #[command(name = "run")]
    Launch(LaunchArgs),
    /// Look into graphs.
    Graph {
        #[command(subcommand)]
        action: GraphAction,
    },
    /// Make a crate with a model and data of its own, to start from.
    New {
        /// Its folder; the last part is its name.
        #[arg(value_name = "NAME")]
        path: PathBuf,
    },
}

#[derive(Subcommand)]
enum GraphAction {
    /// Show what a compiled training step of the first batch consists of, before and after the passes of compile.
    ///
    /// Takes what `fit` takes. The step is captured by trainer.compile in a short run, which leaves nothing behind: operators with their
    /// results and lifetimes, which were fused into chains and why others were not, bytes read and written, memory.
    Show {
        #[command(flatten)]
        show: ShowArgs,
        #[command(flatten)]
        fixed: FixedArgs,
    },
}

/// Options of `convert`.
#[derive(Args)]
pub(super) struct ConvertArgs {
    /// A checkpoint of voltaic (a file, or the folder of a sharded run), Lightning or DeepSpeed (the folder with `latest`, or that of a
    /// tag), a file of torch.save, or safetensors.
    pub input: PathBuf,
    /// Where to write.
    pub output: PathBuf,
    /// The format to write; unless given: by the name .safetensors, .pt, .pth or .bin, else voltaic's for a file of PyTorch or
    /// Lightning and for a folder, also of DeepSpeed, and Lightning's for a file of voltaic.
    #[arg(long, value_enum)]
    pub to: Option<Format>,
    /// Rename GPT-2's or ResNet's weights.
    #[arg(long, value_enum)]
    pub names: Option<Names>,
    /// Begin names with TO that begin with FROM, which may be empty: `--rename model.= --rename backbone.=features.`; of several the
    /// first that fits. Of weights alone.
    #[arg(long, value_name = "FROM=TO", value_parser = renamed)]
    pub rename: Vec<(String, String)>,
    /// Leave out the training state.
    #[arg(long = "weights_only")]
    pub weights_only: bool,
    /// File with the names of the optimizer's parameters in its order, one a line.
    #[arg(long = "param_names", value_name = "FILE")]
    pub param_names: Option<PathBuf>,
    /// Write weights in the 16 bits of the run; unless given, in float32 where the checkpoint has master weights, but for a checkpoint
    /// of voltaic with its training state.
    #[arg(long = "no_master_weights")]
    pub no_master_weights: bool,
    /// Of a checkpoint of DeepSpeed: the folder to read, unless given that which `latest` names; the folder to write, unless given
    /// global_step<N>.
    #[arg(long, value_name = "TAG")]
    pub tag: Option<String>,
    /// The stage of ZeRO in which DeepSpeed's folder is written.
    #[arg(long, value_name = "1|2|3", value_parser = clap::value_parser!(u8).range(1..=3))]
    pub stage: Option<u8>,
    /// The number of ranks that a folder, voltaic's or DeepSpeed's, is sharded among; that of the run unless given.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub partitions: Option<u32>,
    /// How many times the size of a file of PyTorch or Lightning, or of a folder, its values and tensors may take, and 64 MiB more.
    #[arg(long = "max_growth", value_name = "N", default_value_t = ReadLimits::default().max_growth)]
    pub max_growth: u64,
}

/// A format of checkpoints.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    /// voltaic's own, to be resumed.
    Voltaic,
    /// voltaic's own as a folder that is sharded among ranks, to be resumed by any number of them.
    Folder,
    /// DeepSpeed's folder, in stage 2 unless --stage is given: to be resumed there, or read by its scripts.
    #[value(name = "deepspeed")]
    DeepSpeed,
    /// DeepSpeed's universal checkpoint, with a folder for each parameter: to be resumed there by any number of ranks in stage 1 or 2.
    Universal,
    /// Lightning's .ckpt, to be resumed there.
    Lightning,
    /// A state dict as torch.save writes it.
    #[value(name = "state_dict")]
    StateDict,
    /// Weights as safetensors.
    Safetensors,
}

impl Format {
    /// What a file in this format is.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Voltaic => "voltaic's format",
            Self::Folder => "voltaic's folder",
            Self::DeepSpeed => "DeepSpeed's folder",
            Self::Universal => "DeepSpeed's universal checkpoint",
            Self::Lightning => "Lightning's format",
            Self::StateDict => "a state dict of PyTorch",
            Self::Safetensors => "safetensors",
        }
    }
}

/// How weights are renamed.
#[derive(Clone, Copy, ValueEnum)]
pub(super) enum Names {
    /// From the names of Hugging Face's transformers.
    #[value(name = "from_huggingface")]
    FromHuggingface,
    /// To the names of Hugging Face's transformers.
    #[value(name = "to_huggingface")]
    ToHuggingface,
}

/// Options of `devices`.
#[derive(Args)]
pub(super) struct DevicesArgs {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// Print the variables of the environment that describe HPUs too, with what each does.
    #[arg(long)]
    pub env: bool,
}

/// Options of `run`: they come before the verb.
#[derive(Args)]
pub(super) struct LaunchArgs {
    /// Ranks of this node, or `auto`: trainer.devices.
    #[arg(long = "nproc_per_node", alias = "nproc-per-node", value_name = "N")]
    pub nproc_per_node: Option<String>,
    /// Nodes: trainer.num_nodes.
    #[arg(long, value_name = "N")]
    pub nnodes: Option<u64>,
    /// The number of this node, from 0: NODE_RANK.
    #[arg(long = "node_rank", alias = "node-rank", value_name = "N")]
    pub node_rank: Option<u64>,
    /// Name or address of node 0: MASTER_ADDR.
    #[arg(long = "master_addr", alias = "master-addr", value_name = "HOST")]
    pub master_addr: Option<String>,
    /// A free port of node 0: MASTER_PORT.
    #[arg(long = "master_port", alias = "master-port", value_name = "PORT")]
    pub master_port: Option<u16>,
    /// How often ranks are started again: trainer.max_restarts.
    #[arg(long = "max_restarts", alias = "max-restarts", value_name = "N")]
    pub max_restarts: Option<u64>,
    /// The verb and its options.
    #[arg(value_name = "VERB", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<String>,
}

/// Options of `plot`.
#[derive(Args)]
pub(super) struct PlotArgs {
    /// Folders of runs, which have metrics.csv, or CSV files with a column `step`.
    #[arg(value_name = "RUN", required = true)]
    pub runs: Vec<PathBuf>,
    /// Where to write.
    #[arg(short, long, value_name = "FILE", default_value = "runs.png")]
    pub output: PathBuf,
}

/// Options of `bundle`.
#[derive(Args)]
pub(super) struct BundleArgs {
    /// The folder, which is made.
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
    /// A program that `voltaic_build::link` linked, in place of this one.
    #[arg(long, value_name = "FILE")]
    pub program: Option<PathBuf>,
}

/// Options of `env`.
#[derive(Args)]
pub(super) struct EnvArgs {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
#[command(disable_help_flag = true)]
struct FixedArgs {
    /// YAML file with configuration keys; may be given several times, later files win.
    #[arg(short, long, value_name = "FILE")]
    config: Vec<PathBuf>,
    /// Print the whole configuration as YAML and end; `=skip_default`, `=comments` or both choose how.
    #[arg(
        long = "print_config",
        value_name = "HOW",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = ""
    )]
    print_config: Option<String>,
    /// Print help with all keys; those of a class too, if one is chosen.
    #[arg(short, long)]
    help: bool,
}

/// Reads the arguments after the program's name.
pub(super) fn parse(program: &str, arguments: Vec<OsString>, has_colour: bool) -> Result<Command, Failure> {
    let arguments = arguments
        .into_iter()
        .map(|argument| {
            argument.into_string().map_err(|bytes| {
                Failure::usage(format!("argument {} is not UTF-8 text; rename the file", bytes.display()))
            })
        })
        .collect::<Result<Vec<String>, Failure>>()?;
    let arguments = verb_first(arguments);
    let is_run = arguments.first().is_some_and(|verb| Verb::parse(verb).is_some());
    let (fixed, assignments) = if is_run { split(&arguments)? } else { (arguments, Vec::new()) };
    let colour = if has_colour { clap::ColorChoice::Auto } else { clap::ColorChoice::Never };
    let mut command = Cli::command().color(colour).bin_name(program);
    check_verb(&command, fixed.first())?;
    let words = std::iter::once(program.to_owned()).chain(fixed);
    let matches = match command.try_get_matches_from_mut(words) {
        Ok(matches) => matches,
        Err(error) if !error.use_stderr() => return Ok(Command::Text(error.render().to_string())),
        Err(error) if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            return Err(Failure::usage("`graph` alone does nothing; write `graph show`, see graph --help"));
        }
        Err(error) => return Err(Failure::usage(clap_message(&error))),
    };
    let cli = Cli::from_arg_matches(&matches).map_err(|error| Failure::usage(clap_message(&error)))?;
    let run = |verb, fixed: FixedArgs, generate, quantize, show| {
        let FixedArgs { config, print_config, help } = fixed;
        let arguments = RunArgs { verb, generate, quantize, show, config, print_config, help, assignments };
        Command::Run(Box::new(arguments))
    };
    Ok(match cli.verb {
        _ if cli.version => Command::Version,
        Some(VerbArgs::Fit(fixed)) => run(Verb::Fit, fixed, None, None, None),
        Some(VerbArgs::Validate(fixed)) => run(Verb::Validate, fixed, None, None, None),
        Some(VerbArgs::Test(fixed)) => run(Verb::Test, fixed, None, None, None),
        Some(VerbArgs::Predict(fixed)) => run(Verb::Predict, fixed, None, None, None),
        Some(VerbArgs::Generate { generate, fixed }) => {
            run(Verb::Generate, fixed, Some(generate), None, None)
        }
        Some(VerbArgs::Quantize { quantize, fixed }) => {
            run(Verb::Quantize, fixed, None, Some(quantize), None)
        }
        Some(VerbArgs::Graph { action: GraphAction::Show { show, fixed } }) => {
            run(Verb::Graph, fixed, None, None, Some(show))
        }
        Some(VerbArgs::Devices(arguments)) => Command::Devices(arguments),
        Some(VerbArgs::Env(arguments)) => Command::Env(arguments),
        Some(VerbArgs::Models) => Command::Models,
        Some(VerbArgs::Schema) => Command::Schema,
        Some(VerbArgs::Completion { shell }) => Command::Completion(shell),
        Some(VerbArgs::Plot(arguments)) => Command::Plot(arguments),
        Some(VerbArgs::Bundle(arguments)) => Command::Bundle(arguments),
        Some(VerbArgs::Launch(arguments)) => Command::Launch(arguments),
        Some(VerbArgs::New { path }) => Command::New(path),
        Some(VerbArgs::Convert(arguments)) => Command::Convert(arguments),
        None => {
            let verbs = verbs(&Cli::command()).join(", ");
            return Err(Failure::usage(format!("no verb is given; the verbs are {verbs}; see --help")));
        }
    })
}

/// Files may stand before the verb, as with LightningCLI: `--config run.yaml fit`.
fn verb_first(mut arguments: Vec<String>) -> Vec<String> {
    let mut at = 0;
    while let Some(argument) = arguments.get(at) {
        at += match argument.as_str() {
            "--config" | "-c" => 2,
            argument if argument.starts_with("--config=") => 1,
            argument => {
                if Verb::parse(argument).is_some() {
                    arguments[..=at].rotate_right(1);
                }
                break;
            }
        };
    }
    arguments
}

/// All verbs with their options, but for the keys of the configuration.
pub(super) fn command() -> clap::Command {
    Cli::command()
}

fn verbs(command: &clap::Command) -> Vec<String> {
    command.get_subcommands().map(|verb| verb.get_name().to_owned()).collect()
}

/// Suggests a verb for a misspelt one; clap does so only for words that are very similar.
fn check_verb(command: &clap::Command, first: Option<&String>) -> Result<(), Failure> {
    let Some(word) = first.filter(|word| !word.starts_with('-')) else { return Ok(()) };
    let verbs = verbs(command);
    if verbs.contains(word) {
        return Ok(());
    }
    let remedy = match nearest(word, verbs.iter().map(String::as_str)) {
        Some(verb) => format!("did you mean {verb}"),
        None => format!("the verbs are {}", verbs.join(", ")),
    };
    Err(Failure::usage(format!("`{word}` is not a verb; {remedy}")))
}

/// clap's message without its own `error:` label, its usage and its pointer to `--help`.
fn clap_message(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let text = text.trim_start_matches("error:").trim();
    let kept = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let kept: Vec<&str> = kept.filter(|line| !line.is_empty()).collect();
    let line = kept.join("; ").replace("tip: ", "");
    if kept.len() > 1 { line } else { format!("{line}; see --help") }
}

/// Takes the dotted keys out of a run's arguments; what is left is for clap.
fn split(arguments: &[String]) -> Result<(Vec<String>, Vec<Assignment>), Failure> {
    let mut fixed = vec![arguments[0].clone()];
    let mut assignments = Vec::new();
    let mut rest = arguments[1..].iter().peekable();
    while let Some(argument) = rest.next() {
        let Some(option) = argument.strip_prefix("--").filter(|option| !option.is_empty()) else {
            let takes_value = argument == "-c";
            // clap takes the words after `graph`, and refuses those that are too many
            let is_word = fixed[0] == Verb::Graph.as_str() && !argument.starts_with('-');
            if is_word {
                fixed.push(argument.clone());
                continue;
            }
            if !argument.starts_with('-') || argument == "--" {
                return Err(stray(argument));
            }
            fixed.push(argument.clone());
            fixed.extend(rest.next_if(|_| takes_value).cloned());
            continue;
        };
        let mut assignment = Assignment::parse(option);
        if let Some((_, key)) = LAUNCHER_OPTIONS.iter().find(|(option, _)| *option == assignment.key) {
            assignment.key = (*key).to_owned();
        }
        let is_of = |verb: Verb, options: &[&str]| {
            fixed[0] == verb.as_str() && options.contains(&assignment.key.as_str())
        };
        let takes_value = assignment.key == "config"
            || is_of(Verb::Generate, &GENERATE_OPTIONS)
            || is_of(Verb::Quantize, &QUANTIZE_OPTIONS)
            || is_of(Verb::Graph, &SHOW_OPTIONS[..1]);
        let is_fixed = FIXED_OPTIONS.contains(&assignment.key.as_str()) || takes_value;
        if is_fixed || is_of(Verb::Generate, &["graph"]) || is_of(Verb::Graph, &SHOW_OPTIONS) {
            fixed.push(argument.clone());
            let takes_value = takes_value && assignment.value.is_none();
            fixed.extend(rest.next_if(|_| takes_value).cloned());
            continue;
        }
        if assignment.value.is_none() {
            assignment.value = rest.next_if(|next| is_value(next)).cloned();
        }
        assignments.push(assignment);
    }
    Ok((fixed, assignments))
}

/// Whether an argument is the value of the option before it: negative numbers are, options are not.
fn is_value(argument: &str) -> bool {
    match argument.strip_prefix('-') {
        Some(rest) => rest.starts_with(|c: char| c.is_ascii_digit() || c == '.'),
        None => true,
    }
}

fn stray(argument: &str) -> Failure {
    let is_file = [".yaml", ".yml"].iter().any(|end| argument.ends_with(end));
    Failure::usage(match argument {
        "--" => "unexpected argument `--`; leave it out".to_owned(),
        _ if is_file => format!("unexpected argument `{argument}`; did you mean --config {argument}"),
        _ if argument.contains('=') => format!("unexpected argument `{argument}`; did you mean --{argument}"),
        _ => format!("unexpected argument `{argument}`; keys are written --KEY=VALUE"),
    })
}

/// The fixed option that a misspelt key without a dot was meant to be.
pub(super) fn meant_option(key: &str) -> Option<&'static str> {
    nearest(key, FIXED_OPTIONS)
}
