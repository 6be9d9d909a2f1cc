//! `fit`, `validate`, `test`, `predict`, `generate`, `quantize` and `graph show`.

use std::path::{Path, PathBuf};

use crate::cli::args::{RunArgs, meant_option};
use crate::cli::console::Console;
use crate::cli::help::run_help;
use crate::cli::outcome::{Failure, config_error};
use crate::cli::registry::Registry;
use crate::cli::request::{RunRequest, Verb};
use crate::config::{Layers, PrintConfig};
use crate::error::ConfigProblem;

const YELLOW: u8 = 33;

/// Gathers the configuration, then prints help or the configuration, or runs.
pub(in crate::cli) fn run(
    registry: &Registry,
    program: &str,
    arguments: &RunArgs,
    variables: Vec<(String, String)>,
    console: &mut Console<'_>,
) -> Result<(), Failure> {
    let verbs = Verb::ALL.map(Verb::as_str);
    // a step is shown as fit runs it
    let section = if arguments.verb == Verb::Graph { Verb::Fit } else { arguments.verb };
    let mut layers = Layers::new(registry.schema()).with_sections(section.as_str(), verbs);
    layers = layers.with_class_sections(&["trainer", "callbacks"]);
    layers.lightning_env(section.as_str(), variables.iter().cloned());
    for path in shown(arguments).iter().chain(&arguments.config).chain(&config_beside_checkpoint(arguments)) {
        layers.file(path);
    }
    layers.env(variables);
    for assignment in &arguments.assignments {
        layers.assign(assignment);
    }
    if arguments.help {
        return console.print(&run_help(program, arguments.verb, &layers));
    }
    if let Some(words) = &arguments.print_config {
        let text = layers.print_config(PrintConfig::parse(words)?).map_err(|mut error| {
            name_options(&mut error.problems);
            error
        })?;
        return console.print(&text);
    }
    let mut survey = layers.survey()?;
    for note in &survey.settings.notes {
        console.complain("note", YELLOW, note);
    }
    name_options(&mut survey.problems);
    let request =
        RunRequest::new(arguments.verb, survey.settings.clone()).with_generate(arguments.generate.clone());
    let request = request.with_quantize(arguments.quantize.clone()).with_show(arguments.show.clone());
    registry.execute(&request, survey).map_err(|error| annotate(&request, error))
}

/// Of `graph show`: the file that is named, or config.yaml of the run that is.
fn shown(arguments: &RunArgs) -> Option<PathBuf> {
    let source = arguments.show.as_ref()?.source.as_ref()?;
    Some(if source.is_dir() { source.join("config.yaml") } else { source.clone() })
}

/// Of `generate` and `quantize` without `--config`: that of the run that wrote the checkpoint, `RUN/config.yaml` of `RUN/checkpoints/FILE`.
fn config_beside_checkpoint(arguments: &RunArgs) -> Option<PathBuf> {
    let checkpoint = arguments.assignments.iter().rev().find(|assignment| assignment.key == "ckpt_path");
    let checkpoint = checkpoint?
        .value
        .as_ref()
        .filter(|_| arguments.generate.is_some() || arguments.quantize.is_some())?;
    let config = Path::new(checkpoint).parent()?.parent()?.join("config.yaml");
    (arguments.config.is_empty() && config.is_file()).then_some(config)
}

/// A misspelt `--config` looks like an unknown key; says so.
fn name_options(problems: &mut [ConfigProblem]) {
    for ConfigProblem { key, problem, .. } in problems {
        let is_own = problem.what == "unknown key" && !problem.remedy.starts_with("did you mean");
        if is_own && let Some(option) = meant_option(key) {
            problem.remedy = format!("did you mean --{option}").into();
        }
    }
}

/// Adds origins to the problems that the trainer finds in its section.
fn annotate(request: &RunRequest, error: anyhow::Error) -> Failure {
    match config_error(&error).cloned() {
        Some(mut config) => {
            request.origins().annotate(&mut config);
            config.into()
        }
        None => Failure::run(error),
    }
}
