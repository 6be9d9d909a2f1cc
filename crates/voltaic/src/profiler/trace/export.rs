//! Chrome traces: libtorch's, with what it does not see.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use super::lanes::{self, Base, Facts};
use crate::checkpoint::write_atomically;
use crate::error::{Error, Result};
use crate::ffi::{Kineto, Profile, unescaped_name};

const EVENTS: &str = "\"traceEvents\": [";
const DEVICES: &str = "\"deviceProperties\": [";
const BASE: &str = "\"baseTimeNanoseconds\":";

/// Stops a recording, and writes its trace whole or not at all.
pub(super) fn save(recording: Kineto, path: &Path, facts: &Facts) -> Result<Profile> {
    let folder = path.parent().unwrap_or(path);
    let failed = |doing, source| Error::io(doing, path, source);
    fs::create_dir_all(folder).map_err(|source| Error::io("create", folder, source))?;
    // Kineto does not say when it cannot write: what is there is looked at afterwards. It leaves files of its own when a disk is full,
    // which go with their folder.
    let own = tempfile::Builder::new().prefix(".trace.").suffix(".tmp").tempdir_in(folder);
    let own = own.map_err(|source| Error::io("create a folder in", folder, source))?;
    let temporary = own.path().join("trace.json");
    let written = recording.stop(Some(&temporary)).map_err(Error::from).and_then(|profile| {
        let text = match fs::read(&temporary) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(), // nothing could be written
            text => text.map_err(|source| failed("read", source))?,
        };
        let cut = || failed("write", io::Error::new(io::ErrorKind::StorageFull, "the trace was cut off"));
        let text = String::from_utf8_lossy(&text);
        if !text.trim_ascii_end().ends_with('}') {
            return Err(cut());
        }
        let parts = merged(&text, &profile, facts).ok_or_else(cut)?;
        write_atomically(path, |file| parts.iter().try_for_each(|part| file.write_all(part.as_bytes())))?;
        Ok(profile)
    });
    let removed = own.close().map_err(|source| Error::io("remove", &temporary, source));
    let profile = written?;
    removed?;
    Ok(profile)
}

/// libtorch's trace with the events of devices, memory and kernels, in parts; none if it is not as libtorch writes it.
fn merged(text: &str, profile: &Profile, facts: &Facts) -> Option<Vec<String>> {
    let at = text.find(EVENTS)?;
    let (head, rest) = text.split_at(at);
    let number = head.split_once(BASE)?.1.trim_start();
    let digits = number.find(|c: char| !c.is_ascii_digit()).unwrap_or(number.len());
    let base = Base { base_ns: number[..digits].parse().ok()?, process: std::process::id() };
    let mut head = head.to_owned();
    if let (false, Some(at)) = (facts.device_name.is_empty(), head.find(DEVICES)) {
        let name = serde_json::Value::from(facts.device_name.as_str());
        let memory = facts.device_memory;
        let device = format!("\n    {{\"id\": 0, \"name\": {name}, \"totalGlobalMem\": {memory}}}");
        let is_empty = head[at + DEVICES.len()..].trim_start().starts_with(']');
        head.insert_str(at + DEVICES.len(), &format!("{device}{}", if is_empty { "" } else { "," }));
    }
    if facts.world_size > 1 {
        let Facts { rank, world_size, .. } = facts;
        head += &format!(
            "\"distributedInfo\": {{\"backend\": \"gloo\", \"rank\": {rank}, \"world_size\": {world_size}}},\n  "
        );
    }
    let mut events = lanes::events(profile, base, facts);
    let rest = &rest[EVENTS.len()..];
    if rest.trim_start().starts_with(']') {
        events.truncate(events.trim_end().trim_end_matches(',').len());
    }
    Some(vec![head, format!("{EVENTS}\n"), events, with_names(rest)])
}

/// With the names of ranges as programs gave them, which libtorch's trace cannot hold.
fn with_names(text: &str) -> String {
    const NAME: &str = "\"name\": \"%%";
    let mut parts = text.split(NAME);
    let mut named = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (name, rest) = part.split_once('"').unwrap_or((part, ""));
        named += &format!("\"name\": {}", serde_json::Value::from(unescaped_name(&format!("%%{name}"))));
        named += rest;
    }
    named
}
