//! Habana's metrics in a file, as the variables `PT_HPU_METRICS_...` ask for it.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::json;

use super::metrics::{LISTENER, MARK_STEP, METRICS, process_metrics};
use crate::accelerator::RuntimeFlags;
use crate::error::{Error, Result};
use crate::ffi;

/// How a dump of metrics is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricsFormat {
    /// An array with an object for each metric.
    Json,
    /// Lines.
    Text,
}

const TRIGGERS: [&str; 4] = ["process_exit", "mark_step", "metric_change", "user"];

/// What the environment asks for.
struct Saver {
    path: PathBuf,
    format: MetricsFormat,
    triggers: Vec<&'static str>,
    /// Made at the first dump.
    file: Mutex<Option<File>>,
}

/// That of this process among several, if a trainer has said so.
static RANK: OnceLock<usize> = OnceLock::new();

static SAVER: OnceLock<Option<Saver>> = OnceLock::new();

/// From now on metrics are dumped as the environment asks for it: called when a device is set up, with the rank if there are several, and
/// when there is a graph.
pub(crate) fn dump_metrics_if_asked(rank: Option<usize>) {
    rank.into_iter().for_each(|rank| _ = RANK.set(rank));
    let saver = SAVER.get_or_init(Saver::of_env);
    if let Some(saver) = saver
        && LISTENER.set(changed).is_ok()
        && saver.triggers.contains(&"process_exit")
    {
        ffi::at_exit(|| dump("process_exit", &METRICS));
    }
}

fn changed(metric: &'static str) {
    match metric {
        MARK_STEP => dump("mark_step", &METRICS),
        metric => dump("metric_change", &[metric]),
    }
}

/// Adds metrics to the file of the environment, if that is a trigger.
fn dump(trigger: &str, metrics: &[&str]) {
    let Some(Some(saver)) = SAVER.get() else { return };
    if saver.triggers.contains(&trigger)
        && let Err(error) = saver.write(trigger, metrics)
    {
        tracing::warn!("PT_HPU_METRICS_FILE: {error}");
    }
}

/// Writes the metrics of this process, counted on all threads, to a file of this name, or with `.1`, `.2` and so on behind it if there is
/// one. Returns the name. With several ranks each has `-rank<rank>` in it. If `PT_HPU_METRICS_DUMP_TRIGGERS` names `user`, they are added to
/// the file of `PT_HPU_METRICS_FILE`, too.
///
/// # Errors
/// [`Error::Io`] if the file cannot be written.
///
/// Source: `habana_frameworks.torch.hpu.metrics.metrics_dump`.
pub fn metrics_dump(path: impl AsRef<Path>, format: MetricsFormat) -> Result<PathBuf> {
    dump("user", &METRICS);
    let (path, mut file) = create(&with_rank(path.as_ref()))?;
    write(&mut file, format, "user", &METRICS).map_err(|error| Error::io("write", &path, error))?;
    Ok(path)
}

impl Saver {
    fn of_env() -> Option<Self> {
        let path =
            ["PT_HPU_METRICS_FILE", "HABANA_PT_METRICS_FILE"].into_iter().find_map(RuntimeFlags::of_env)?;
        let format = match RuntimeFlags::of_env("PT_HPU_METRICS_FILE_FORMAT") {
            Some(word) if word.eq_ignore_ascii_case("text") => MetricsFormat::Text,
            _ => MetricsFormat::Json,
        };
        let words = RuntimeFlags::of_env("PT_HPU_METRICS_DUMP_TRIGGERS");
        let words = words.unwrap_or_else(|| TRIGGERS[0].to_owned());
        let mut triggers = Vec::new();
        for word in words.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            match TRIGGERS.into_iter().find(|known| *known == word) {
                Some(known) => triggers.push(known),
                None => tracing::warn!(
                    "PT_HPU_METRICS_DUMP_TRIGGERS: `{word}` is none of {}; it is left out of account",
                    TRIGGERS.join(", ")
                ),
            }
        }
        Some(Self { path: with_rank(Path::new(&path)), format, triggers, file: Mutex::new(None) })
    }

    fn write(&self, trigger: &str, metrics: &[&str]) -> Result<()> {
        let Ok(mut slot) = self.file.lock() else { return Ok(()) };
        let file = match &mut *slot {
            Some(file) => file,
            None => slot.insert(create(&self.path)?.1),
        };
        write(file, self.format, trigger, metrics).map_err(|error| Error::io("write", &self.path, error))
    }
}

/// With the rank before the ending.
fn with_rank(path: &Path) -> PathBuf {
    let of_trainer = RANK.get().map(ToString::to_string);
    let of_env = || ["RANK", "OMPI_COMM_WORLD_RANK"].into_iter().find_map(|name| std::env::var(name).ok());
    let Some(rank) = of_trainer.or_else(of_env) else { return path.to_owned() };
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let ending = path.extension().map(|ending| format!(".{}", ending.to_string_lossy())).unwrap_or_default();
    path.with_file_name(format!("{stem}-rank{rank}{ending}"))
}

/// A new file, with a number behind its name if there is one of this name.
fn create(path: &Path) -> Result<(PathBuf, File)> {
    let mut name = path.to_owned();
    for number in 1_u64.. {
        match OpenOptions::new().write(true).create_new(true).open(&name) {
            Ok(file) => return Ok((name, file)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                name = PathBuf::from(format!("{}.{number}", path.display()));
            }
            Err(error) => return Err(Error::io("create", &name, error)),
        }
    }
    Err(Error::io("create", path, ErrorKind::AlreadyExists.into()))
}

/// Adds metrics to a file, which is a whole array after each call if it is JSON.
fn write(file: &mut File, format: MetricsFormat, trigger: &str, metrics: &[&str]) -> std::io::Result<()> {
    const END: &str = "\n]\n";
    let (now, counted) = (iso(SystemTime::now()), process_metrics());
    let statistics = metrics.iter().filter_map(|metric| Some((metric, counted.statistics(metric)?)));
    match format {
        MetricsFormat::Json => {
            let is_first = file.stream_position()? == 0;
            if !is_first {
                file.seek(SeekFrom::End(-(END.len() as i64)))?;
            }
            let entries = statistics.map(|(metric, statistics)| {
                json!({"metric_name": metric, "triggered_by": trigger, "generated_on": now, "statistics": statistics})
                    .to_string()
            });
            let entries = entries.collect::<Vec<_>>().join(",\n");
            write!(file, "{}{entries}{END}", if is_first { "[\n" } else { ",\n" })?;
        }
        MetricsFormat::Text => {
            for (metric, statistics) in statistics {
                write!(
                    file,
                    "Metric name: {metric}\nTriggered by: {trigger}\nGenerated on: {now}\nStatistics:\n"
                )?;
                for (tag, value) in statistics {
                    writeln!(file, "\t{tag}: {value}")?;
                }
                writeln!(file)?;
            }
        }
    }
    file.flush()
}

/// A time as `2026-01-31T12:00:00.000001`, in UTC.
fn iso(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (seconds, micros) = (since.as_secs(), since.subsec_micros());
    let (mut days, mut year) = (seconds / 86_400, 1970);
    let is_leap =
        |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year}-{month:02}-{:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}", days + 1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_are_dates() {
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00.000000"),
            (951_782_400, "2000-02-29T00:00:00.000000"),
            (1_767_225_599, "2025-12-31T23:59:59.000000"),
        ] {
            assert_eq!(iso(UNIX_EPOCH + Duration::from_secs(seconds)), expected);
        }
    }
}
