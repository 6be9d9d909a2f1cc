//! `convert`: checkpoints of voltaic, Lightning, PyTorch and safetensors into each other.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::checkpoint::{
    Checkpoint, ReadLimits, from_hugging_face, read_torch_within, to_hugging_face, write_torch, write_weights,
};
use crate::cli::args::{ConvertArgs, Format, Names};
use crate::cli::outcome::Failure;
use crate::config::{open_file, read_file};
use crate::error::{ConfigError, Error};
use crate::trainer::{Converted, from_lightning, state_dict, to_lightning};

/// A longer file of names is none.
const MAX_NAMES: u64 = 64 << 20;

/// Converts a file; returns what to tell the user.
pub(in crate::cli) fn convert(arguments: &ConvertArgs) -> Result<String, Failure> {
    run(arguments).map_err(|error| Failure::run(error.into()))
}

fn run(arguments: &ConvertArgs) -> Result<String, Error> {
    let ConvertArgs { input, output, .. } = arguments;
    refuse_same_file(input, output)?;
    let limits = ReadLimits { max_growth: arguments.max_growth };
    let is_torch = starts_with_zip(input)?;
    let Converted { value: mut checkpoint, mut notes } = if is_torch || !is_safetensors(input)? {
        let names = arguments.param_names.as_deref().map(read_lines).transpose()?;
        from_lightning(&read_torch_within(input, limits)?, names.as_deref(), arguments.weights_only)?
    } else {
        Converted { value: Checkpoint::load(input)?, notes: Vec::new() }
    };
    if arguments.weights_only {
        checkpoint.training = None;
    }
    match arguments.names {
        Some(Names::FromHuggingface) => checkpoint.weights = from_hugging_face(&checkpoint.weights)?,
        Some(Names::ToHuggingface) => checkpoint.weights = to_hugging_face(&checkpoint.weights)?,
        None => {}
    }
    let extension = output.extension().and_then(|extension| extension.to_str());
    let format = arguments.to.unwrap_or(match extension {
        Some("safetensors") => Format::Safetensors,
        Some("pt" | "pth" | "bin") => Format::StateDict,
        _ if is_torch => Format::Voltaic,
        _ => Format::Lightning,
    });
    if checkpoint.training.is_some() && matches!(format, Format::Safetensors | Format::StateDict) {
        notes.push("the training state is left out: this format holds weights only".to_owned());
    }
    match format {
        Format::Voltaic => checkpoint.save(output)?,
        Format::Safetensors => write_weights(&checkpoint.weights, output)?,
        Format::StateDict => write_torch(&state_dict(&checkpoint.weights), output)?,
        Format::Lightning => {
            let converted = to_lightning(&checkpoint)?;
            notes.extend(converted.notes);
            write_torch(&converted.value, output)?;
        }
    }
    let mut text = notes.iter().map(|note| format!("note: {note}\n")).collect::<String>();
    let training =
        if checkpoint.training.is_some() && !matches!(format, Format::Safetensors | Format::StateDict) {
            " and the training state"
        } else {
            ""
        };
    text += &format!(
        "{}: {} tensors{training}, epoch {}, global_step {}\n",
        output.display(),
        checkpoint.weights.len(),
        checkpoint.meta.epoch,
        checkpoint.meta.global_step
    );
    Ok(text)
}

/// The output would take the place of the only copy of what is converted.
fn refuse_same_file(input: &Path, output: &Path) -> Result<(), Error> {
    let identity = |path: &Path| path.metadata().ok().map(|metadata| (metadata.dev(), metadata.ino()));
    if identity(output).is_none_or(|output| identity(input) != Some(output)) {
        return Ok(());
    }
    let what = format!("{} is the file that is converted", output.display());
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
