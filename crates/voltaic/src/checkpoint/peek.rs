//! What a checkpoint says of itself, without its tensors, and whether the file is whole.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use safetensors::tensor::Metadata;
use serde::Deserialize;
use serde_json::Value;

use super::format::{Header, METADATA_KEY, NO_CHECKSUM, check_json, checksum_at, refuse_torch, unreadable};
use crate::config::open_file;
use crate::error::{Error, Result};

/// Longest header that safetensors allows.
const MAX_HEADER: u64 = 100_000_000;
/// A file is read in pieces of so many bytes.
const PIECE: usize = 1 << 20;

/// The beginning of a checkpoint.
#[derive(Debug)]
pub(crate) struct Beginning {
    /// The training state that is not tensors; `None` if the file holds weights only.
    pub training: Option<Value>,
    /// Optimizer steps done.
    pub global_step: u64,
    /// When it was written, in microseconds since 1970; later than all that the run that wrote it has written or read. `None` in
    /// files of earlier versions and of others.
    pub saved_at: Option<u64>,
}

/// The beginning of a file, whose rest is not checked.
///
/// # Errors
/// If the file is missing or not voltaic's, nor safetensors.
pub(super) fn peek_file(path: &Path) -> Result<Beginning> {
    let (_, header) = open_header(path)?;
    beginning(&header, path)
}

/// The beginning of a file, whose length and checksum are verified. Reads it once, in pieces.
///
/// # Errors
/// As [`peek_file`], and if the file is damaged.
pub(super) fn peek_whole_file(path: &Path) -> Result<Beginning> {
    let (mut file, header) = open_header(path)?;
    let beginning = beginning(&header, path)?;
    check_whole(&mut file, &header, path)?;
    Ok(beginning)
}

/// What the header of an open file says of its tensors, none of which lies on another one or beyond the end. The rest of the file is
/// read in pieces: its length and checksum are right.
pub(super) fn check_whole(file: &mut File, header: &[u8], path: &Path) -> Result<Metadata> {
    let fail = |e| Error::io("read checkpoint", path, e);
    let metadata = serde_json::from_slice::<Metadata>(&header[8..]);
    let metadata = metadata.map_err(|e| unreadable(path, e.to_string()))?;
    let expected = header.len() as u64 + metadata.data_len() as u64;
    let found = file.metadata().map_err(fail)?.len();
    if found != expected {
        return Err(unreadable(path, format!("it has {found} bytes, its header says {expected}")));
    }
    let Some(at) = checksum_at(header) else { return Ok(metadata) };
    let end = at + NO_CHECKSUM.len();
    let mut crc = crc32fast::Hasher::new();
    [&header[..at], NO_CHECKSUM, &header[end..]].into_iter().for_each(|bytes| crc.update(bytes));
    let mut piece = vec![0; PIECE];
    loop {
        match file.read(&mut piece).map_err(fail)? {
            0 => break,
            read => crc.update(&piece[..read]),
        }
    }
    let computed = format!("{:08x}", crc.finalize());
    if header[at..end] != *computed.as_bytes() {
        let found = String::from_utf8_lossy(&header[at..end]).into_owned();
        return Err(unreadable(
            path,
            format!("its checksum is {computed} but should be {found}: the file is damaged"),
        ));
    }
    Ok(metadata)
}

/// The file, and its length and header.
pub(super) fn open_header(path: &Path) -> Result<(File, Vec<u8>)> {
    let fail = |e| Error::io("read checkpoint", path, e);
    let mut file = open_file(path).map_err(fail)?;
    let total = file.metadata().map_err(fail)?.len();
    let mut bytes = Vec::new();
    (&mut file).take(8).read_to_end(&mut bytes).map_err(fail)?;
    refuse_torch(&bytes, path)?;
    let length = bytes[..].try_into().map(u64::from_le_bytes).unwrap_or(u64::MAX);
    if length > MAX_HEADER || length + 8 > total {
        return Err(unreadable(path, "it is not a whole safetensors file"));
    }
    (&mut file).take(length).read_to_end(&mut bytes).map_err(fail)?;
    if bytes.len() as u64 != length + 8 {
        return Err(unreadable(path, "it is not a whole safetensors file"));
    }
    Ok((file, bytes))
}

/// Of all that the header has.
#[derive(Deserialize)]
struct Outer {
    #[serde(rename = "__metadata__")]
    metadata: Option<HashMap<String, String>>,
}

fn beginning(header: &[u8], path: &Path) -> Result<Beginning> {
    let outer = serde_json::from_slice::<Outer>(&header[8..]);
    let outer = outer.map_err(|e| unreadable(path, format!("it is not a safetensors file: {e}")))?;
    let Some(own) = outer.metadata.as_ref().and_then(|metadata| metadata.get(METADATA_KEY)) else {
        return Ok(Beginning { training: None, global_step: 0, saved_at: None });
    };
    check_json(own, path)?;
    let own = serde_json::from_str::<Header>(own)
        .map_err(|e| unreadable(path, format!("its training state is not understood: {e}")))?;
    Ok(Beginning { training: own.training, global_step: own.meta.global_step, saved_at: own.saved_at })
}
