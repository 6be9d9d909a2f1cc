//! `convert`: checkpoints of voltaic, Lightning, DeepSpeed, PyTorch and safetensors into each other.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use signal_hook::low_level;

use crate::checkpoint::{
    Checkpoint, DeepSpeedRead, DeepSpeedWrite, ReadLimits, Shards, export_weights, from_hugging_face,
    is_deepspeed, is_folder, read_deepspeed, read_torch_within, read_within, remove_leftovers,
    remove_unfinished, to_hugging_face, use_master_weights, write_deepspeed, write_folder, write_torch,
    write_weights,
};
use crate::cli::args::{ConvertArgs, Format, Names};
use crate::cli::outcome::Failure;
use crate::config::{open_file, read_file};
use crate::distributed::Signals;
use crate::error::{ConfigError, Error};
use crate::trainer::{Converted, from_lightning, state_dict, to_lightning};

/// A longer file of names is none.
const MAX_NAMES: u64 = 64 << 20;

const LEFT_OUT: &str = "the training state is left out: this format holds weights only";

/// How long a signal may wait.
const PATIENCE: Duration = Duration::from_millis(20);

/// Converts a file; returns the message for the user. A signal that ends the process leaves no temporary file, and those of killed
/// conversions are removed.
pub(in crate::cli) fn convert(arguments: &ConvertArgs) -> Result<String, Failure> {
    remove_leftovers(match arguments.output.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    });
    let failed = |error: Error| Failure::run(error.into());
    let signals = Signals::watch().map_err(failed)?;
    let (done, waiting) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while waiting.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                signals.received().into_iter().for_each(end);
            }
        });
        let converted = run(arguments);
        drop(done);
        converted.map_err(failed)
    })
}

/// Ends the process with the default action of a signal.
fn end((number, name): (i32, &str)) {
    if !["SIGINT", "SIGTERM", "SIGHUP"].contains(&name) {
        return;
    }
    remove_unfinished();
    let _ = low_level::emulate_default_handler(number);
    low_level::exit(128 + number);
}

fn run(arguments: &ConvertArgs) -> Result<String, Error> {
    let ConvertArgs { input, output, .. } = arguments;
    refuse_same_file(input, output)?;
    let limits = ReadLimits { max_growth: arguments.max_growth };
    let extension = output.extension().and_then(|extension| extension.to_str());
    let by_extension = match extension {
        Some("safetensors") => Some(Format::Safetensors),
        Some("pt" | "pth" | "bin") => Some(Format::StateDict),
        _ => None,
    };
    let is_deepspeed = is_deepspeed(input);
    let is_folder = is_folder(input) && !is_deepspeed;
    let is_of_weights = |format: Format| matches!(format, Format::Safetensors | Format::StateDict);
    let chosen = arguments.to.or(by_extension);
    refuse_unused(arguments, is_deepspeed)?;
    let keeps_names = arguments.names.is_none() && arguments.rename.is_empty();
    if is_folder && keeps_names && chosen == Some(Format::Safetensors) {
        return export(arguments, limits);
    }
    let is_torch = !is_folder && !is_deepspeed && starts_with_zip(input)?;
    let weights_only = arguments.weights_only || chosen.is_some_and(is_of_weights);
    let Converted { value: mut checkpoint, mut notes } = if is_deepspeed {
        read_deepspeed(input, &how_to_read(arguments, weights_only)?)?
    } else if is_folder {
        read_folder(arguments, limits, weights_only)?
    } else if is_torch || !is_safetensors(input)? {
        let names = arguments.param_names.as_deref().map(read_lines).transpose()?;
        from_lightning(&read_torch_within(input, limits)?, names.as_deref(), arguments.weights_only)?
    } else {
        Converted { value: Checkpoint::load(input)?, notes: Vec::new() }
    };
    let is_folder = is_folder || is_deepspeed;
    // a folder is more often converted to one file of voltaic than to a file for Lightning
    let format = chosen.unwrap_or(if is_torch || is_folder { Format::Voltaic } else { Format::Lightning });
    // a run that resumes reads its master weights from the training state
    let has_masters =
        matches!(format, Format::Voltaic | Format::Folder | Format::DeepSpeed | Format::Universal);
    if (arguments.weights_only || !has_masters) && !arguments.no_master_weights {
        let replaced = use_master_weights(&mut checkpoint, &|_| true)?;
        notes.extend(of_masters(replaced, checkpoint.weights.len()));
    }
    if arguments.weights_only {
        checkpoint.training = None;
    }
    match arguments.names {
        Some(Names::FromHuggingface) => checkpoint.weights = from_hugging_face(&checkpoint.weights)?,
        Some(Names::ToHuggingface) => checkpoint.weights = to_hugging_face(&checkpoint.weights)?,
        None => {}
    }
    rename(&mut checkpoint, &arguments.rename, is_of_weights(format))?;
    if is_of_weights(format) && (checkpoint.training.is_some() || is_folder) {
        notes.push(LEFT_OUT.to_owned());
    }
    match format {
        Format::Voltaic => checkpoint.save(output)?,
        Format::Folder => write_folder(&checkpoint, output, partitions_of(arguments, &checkpoint))?,
        Format::DeepSpeed | Format::Universal => {
            let partitions = partitions_of(arguments, &checkpoint);
            let is_universal = format == Format::Universal;
            let how = DeepSpeedWrite { is_universal, ..how_to_write(arguments, partitions, is_deepspeed) };
            notes.extend(write_deepspeed(&checkpoint, output, &how)?);
        }
        Format::Safetensors => write_weights(&checkpoint.weights, output)?,
        Format::StateDict => write_torch(&state_dict(&checkpoint.weights), output)?,
        Format::Lightning => {
            let converted = to_lightning(&checkpoint)?;
            notes.extend(converted.notes);
            write_torch(&converted.value, output)?;
        }
    }
    let mut text = notes.iter().map(|note| format!("note: {note}\n")).collect::<String>();
    let has_training = checkpoint.training.is_some() && !is_of_weights(format);
    let training = if has_training { " and the training state" } else { "" };
    text += &format!(
        "{}: {}, {} tensors{training}, epoch {}, global_step {}\n",
        output.display(),
        format.describe(),
        checkpoint.weights.len(),
        checkpoint.meta.epoch,
        checkpoint.meta.global_step
    );
    Ok(text)
}

fn rename(
    checkpoint: &mut Checkpoint,
    rules: &[(String, String)],
    drops_training: bool,
) -> Result<(), ConfigError> {
    let key = "convert --rename";
    if !rules.is_empty() && checkpoint.training.is_some() && !drops_training {
        return Err(ConfigError::new(key, "the training state has the names, too", "add --weights_only"));
    }
    checkpoint.rename(rules, key)
}

fn how_to_read(arguments: &ConvertArgs, weights_only: bool) -> Result<DeepSpeedRead, Error> {
    Ok(DeepSpeedRead {
        tag: arguments.tag.clone(),
        weights_only,
        keep_16_bits: arguments.no_master_weights,
        param_names: arguments.param_names.as_deref().map(read_lines).transpose()?,
        limits: ReadLimits { max_growth: arguments.max_growth },
    })
}

fn how_to_write(arguments: &ConvertArgs, partitions: usize, is_deepspeed: bool) -> DeepSpeedWrite {
    // of a folder that is read the tag is that one's
    let tag = arguments.tag.clone().filter(|_| !is_deepspeed);
    DeepSpeedWrite { stage: arguments.stage.unwrap_or(2), partitions, tag, is_universal: false }
}

/// The ranks of a folder: as many as the run had, unless given.
fn partitions_of(arguments: &ConvertArgs, checkpoint: &Checkpoint) -> usize {
    let of_run = || checkpoint.training.as_ref().and_then(|training| training.json["world_size"].as_u64());
    let ranks = arguments.partitions.map(u64::from).or_else(of_run).unwrap_or(1);
    usize::try_from(ranks).unwrap_or(1)
}

/// An option that would have no effect is a mistake.
fn refuse_unused(arguments: &ConvertArgs, is_deepspeed: bool) -> Result<(), Error> {
    let [to_deepspeed, to_universal, to_folder] =
        [Format::DeepSpeed, Format::Universal, Format::Folder].map(|format| arguments.to == Some(format));
    let unused = [
        (
            "tag",
            arguments.tag.is_some() && !is_deepspeed && !to_deepspeed && !to_universal,
            "--to=deepspeed or --to=universal, or a folder of DeepSpeed",
        ),
        ("stage", arguments.stage.is_some() && !to_deepspeed, "--to=deepspeed"),
        (
            "partitions",
            arguments.partitions.is_some() && !to_deepspeed && !to_folder,
            "--to=deepspeed or --to=folder",
        ),
    ];
    match unused.into_iter().find(|(_, is_unused, _)| *is_unused) {
        Some((name, _, needs)) => {
            let what = "it has no effect here";
            Err(ConfigError::new(format!("convert --{name}"), what, format!("use it with {needs}")).into())
        }
        None => Ok(()),
    }
}

/// Writes the weights of a folder to one file, tensor by tensor.
fn export(arguments: &ConvertArgs, limits: ReadLimits) -> Result<String, Error> {
    let ConvertArgs { input, output, .. } = arguments;
    let shards = Shards::open(input)?;
    let masters = if arguments.no_master_weights { HashMap::new() } else { shards.masters(limits)? };
    let num_tensors = export_weights(&shards, &masters, limits, output)?;
    let meta = shards.meta();
    let left_out = shards.has_training().then(|| LEFT_OUT.to_owned());
    let notes = of_masters(masters.len(), num_tensors).into_iter().chain(left_out);
    let notes: String = notes.map(|note| format!("note: {note}\n")).collect();
    Ok(format!(
        "{notes}{}: {}, {num_tensors} tensors, epoch {}, global_step {}\n",
        output.display(),
        Format::Safetensors.describe(),
        meta.epoch,
        meta.global_step
    ))
}

/// The message about weights that are written in another precision than they have in the checkpoint.
fn of_masters(replaced: usize, all: usize) -> Option<String> {
    let text = || {
        format!(
            "{replaced} of {all} weights are the float32 master weights; --no_master_weights writes those of 16 bits"
        )
    };
    (replaced > 0).then(text)
}

fn read_folder(
    arguments: &ConvertArgs,
    limits: ReadLimits,
    weights_only: bool,
) -> Result<Converted<Checkpoint>, Error> {
    let input = &arguments.input;
    if !weights_only {
        return Ok(Converted { value: read_within(input, limits)?, notes: Vec::new() });
    }
    let shards = Shards::open(input)?;
    let masters = if arguments.no_master_weights { HashMap::new() } else { shards.masters(limits)? };
    let (weights, meta) = (shards.all_weights(&masters, limits)?, shards.meta().clone());
    let notes = of_masters(masters.len(), weights.len()).into_iter().collect();
    Ok(Converted { value: Checkpoint { weights, meta, ..Checkpoint::default() }, notes })
}

/// The output would take the place of the only copy of what is converted.
fn refuse_same_file(input: &Path, output: &Path) -> Result<(), Error> {
    let identity = |path: &Path| path.metadata().ok().map(|metadata| (metadata.dev(), metadata.ino()));
    let is_within =
        is_folder(input) && output.parent().and_then(identity).is_some_and(|at| identity(input) == Some(at));
    if !is_within && identity(output).is_none_or(|output| identity(input) != Some(output)) {
        return Ok(());
    }
    let is = if is_within { "in the folder" } else { "the file" };
    let what = format!("{} is {is} that is converted", output.display());
    Err(ConfigError::new("convert OUTPUT", what, "give another name").into())
}

fn head(path: &Path) -> Result<Vec<u8>, Error> {
    use std::io::Read;
    let mut head = Vec::new();
    let file = open_file(path).map_err(|e| Error::io("read checkpoint", path, e))?;
    file.take(9).read_to_end(&mut head).map_err(|e| Error::io("read checkpoint", path, e))?;
    Ok(head)
}

fn starts_with_zip(path: &Path) -> Result<bool, Error> {
    Ok(head(path)?.starts_with(b"PK\x03\x04"))
}

/// Eight bytes of length, then JSON.
fn is_safetensors(path: &Path) -> Result<bool, Error> {
    Ok(head(path)?.get(8) == Some(&b'{'))
}

fn read_lines(path: &Path) -> Result<Vec<String>, Error> {
    let failed = |e| Error::io("read", path, e);
    let text = read_file(path, MAX_NAMES).map_err(failed)?;
    let text = String::from_utf8(text).map_err(|e| failed(std::io::Error::other(e)))?;
    Ok(text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect())
}
