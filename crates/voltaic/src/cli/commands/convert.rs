//! `convert`: checkpoints of voltaic, Lightning, PyTorch and safetensors into each other.

use std::path::Path;

use crate::checkpoint::{
    Checkpoint, from_hugging_face, read_torch, to_hugging_face, write_torch, write_weights,
};
use crate::cli::args::{ConvertArgs, Format, Names};
use crate::cli::outcome::Failure;
use crate::error::Error;
use crate::trainer::{Converted, from_lightning, state_dict, to_lightning};

/// Converts a file; returns what to tell the user.
pub(in crate::cli) fn convert(arguments: &ConvertArgs) -> Result<String, Failure> {
    run(arguments).map_err(|error| Failure::run(error.into()))
}

fn run(arguments: &ConvertArgs) -> Result<String, Error> {
    let ConvertArgs { input, output, .. } = arguments;
    let is_torch = starts_with_zip(input)?;
    let Converted { value: mut checkpoint, mut notes } = if is_torch || !is_safetensors(input)? {
        let names = arguments.param_names.as_deref().map(read_lines).transpose()?;
        from_lightning(&read_torch(input)?, names.as_deref(), arguments.weights_only)?
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

fn head(path: &Path) -> Result<Vec<u8>, Error> {
    use std::io::Read;
    let mut head = Vec::new();
    let file = std::fs::File::open(path).map_err(|e| Error::io("read checkpoint", path, e))?;
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
    let text = std::fs::read_to_string(path).map_err(|e| Error::io("read", path, e))?;
    Ok(text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect())
}
