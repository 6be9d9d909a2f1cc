//! `HpuPrecisionPlugin`: precision with lists of operators, and HMP, its older form.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::op_lists::OpLists;
use super::{PRECISIONS, Precision};
use crate::error::{ConfigError, Result};

/// How many operators HMP lets compute in bfloat16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OptLevel {
    /// Many.
    O1,
    /// Products and convolutions.
    O2,
}

/// Precision of a run on an HPU, with lists of operators of one's own. Given in place of `trainer.precision`. The lists
/// belong to the process: they hold until others are set.
///
/// `opt_level`, or a precision of `16`, chooses HMP, the interface before autocast, which is deprecated: it goes by its
/// own lists, and otherwise does the same.
///
/// Source: `lightning_habana.pytorch.plugins.HPUPrecisionPlugin`, and Habana's `hmp`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct HpuPrecisionPlugin {
    /// `32-true`, `bf16-mixed`, `16-mixed`, and the other values of `trainer.precision`.
    pub precision: Value,
    /// Kind of device; `hpu`.
    pub device: String,
    /// File with the operators that compute in the lower dtype, one a line, in place of the default list.
    pub bf16_file_path: Option<PathBuf>,
    /// File with the operators that compute in float32, one a line, in place of the default list.
    pub fp32_file_path: Option<PathBuf>,
    /// HMP's level (deprecated): `O1` or `O2`. `O2` knows no files.
    pub opt_level: Option<OptLevel>,
    /// Log the lists.
    pub verbose: bool,
    /// Use the default list, with a warning, in place of a file that cannot be read.
    pub ignore_unreadable_files: bool,
}

impl Default for HpuPrecisionPlugin {
    fn default() -> Self {
        Self {
            precision: Value::from("32-true"),
            device: "hpu".to_owned(),
            bf16_file_path: None,
            fp32_file_path: None,
            opt_level: None,
            verbose: false,
            ignore_unreadable_files: false,
        }
    }
}

impl HpuPrecisionPlugin {
    /// The plugin for a precision, such as `bf16-mixed`.
    pub fn new(precision: impl Into<Value>) -> Self {
        Self { precision: precision.into(), ..Self::default() }
    }

    /// What it means: the precision, and the lists if they are not the default ones.
    ///
    /// # Errors
    /// All that is wrong with it; a file that cannot be read.
    pub fn resolve(&self, accelerator: &str) -> Result<(Precision, Option<OpLists>)> {
        let refuse = |key: &str, what: String, remedy: &str| {
            ConfigError::new(format!("HpuPrecisionPlugin.{key}"), what, remedy)
        };
        if self.device != "hpu" || accelerator != "hpu" {
            let what = format!("device {} on accelerator {accelerator}", self.device);
            return Err(
                refuse("device", what, "use it with accelerator=hpu, or set trainer.precision").into()
            );
        }
        let precision = Precision::parse(&self.precision, accelerator).map_err(|message| {
            let (what, remedy) = message.split_once("; ").unwrap_or((&message, PRECISIONS));
            refuse("precision", what.to_owned(), remedy)
        })?;
        let files = [&self.bf16_file_path, &self.fp32_file_path];
        let has_files = files.iter().any(|path| path.is_some());
        if precision.autocast_dtype().is_none() && (has_files || self.opt_level.is_some()) {
            let what = format!("{precision} casts no operators, and lists of them are given");
            return Err(refuse("precision", what, "use bf16-mixed, or leave the lists out").into());
        }
        if self.opt_level == Some(OptLevel::O2) && has_files {
            let what = "O2 has a fixed list, and files are given".to_owned();
            return Err(refuse("opt_level", what, "use O1, or leave the files out").into());
        }
        let is_hmp = matches!(&self.precision, Value::Number(_)) || self.precision == "16";
        let level =
            self.opt_level.or((is_hmp && precision.autocast_dtype().is_some()).then_some(OptLevel::O1));
        let lists = match level {
            Some(OptLevel::O1) => OpLists::hmp_o1(),
            Some(OptLevel::O2) => OpLists::hmp_o2(),
            None if has_files => OpLists::hpu(),
            None => return Ok((precision, None)),
        };
        if level.is_some() {
            tracing::warn!("HMP is deprecated; use precision=bf16-mixed without opt_level");
        }
        let [lower, fp32] = files.map(|path| path.as_deref());
        let lists = lists.with_files(lower, fp32, self.ignore_unreadable_files)?;
        check_apart(&lists, level.is_some())?;
        if self.verbose {
            tracing::info!("lower precision: {}", lists.lower.join(" "));
            tracing::info!("float32: {}", lists.fp32.join(" "));
            tracing::info!("widest of the arguments: {}", lists.promote.join(" "));
        }
        Ok((precision, Some(lists)))
    }
}

/// HMP takes no operator in both lists.
fn check_apart(lists: &OpLists, is_hmp: bool) -> Result<()> {
    let both: Vec<&str> =
        lists.lower.iter().filter(|name| lists.fp32.contains(name)).map(String::as_str).collect();
    if both.is_empty() || !is_hmp {
        return Ok(());
    }
    let what = format!("{} in both the bf16 and the fp32 list", both.join(", "));
    Err(ConfigError::new("HpuPrecisionPlugin.bf16_file_path", what, "name each operator once").into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn it_gives_precision_and_lists() {
        let plugin = HpuPrecisionPlugin::new("bf16-mixed");
        assert_eq!(plugin.resolve("hpu").unwrap(), (Precision::Bf16Mixed, None));
        let hmp = HpuPrecisionPlugin::new(16);
        assert_eq!(hmp.resolve("hpu").unwrap(), (Precision::Bf16Mixed, Some(OpLists::hmp_o1())));
        let o2 = HpuPrecisionPlugin { opt_level: Some(OptLevel::O2), ..HpuPrecisionPlugin::new("bf16") };
        assert_eq!(o2.resolve("hpu").unwrap().1, Some(OpLists::hmp_o2()));
    }

    #[test]
    fn contradictions_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ops.txt");
        fs::write(&file, "mm\n").unwrap();
        let base = || HpuPrecisionPlugin::new("bf16-mixed");
        let both = HpuPrecisionPlugin {
            opt_level: Some(OptLevel::O1),
            bf16_file_path: Some(file.clone()),
            fp32_file_path: Some(file.clone()),
            ..base()
        };
        for (plugin, accelerator, expected) in [
            (base(), "cpu", "accelerator=hpu"),
            (HpuPrecisionPlugin::new("fp7"), "hpu", "fp7"),
            (
                HpuPrecisionPlugin { bf16_file_path: Some(file.clone()), ..HpuPrecisionPlugin::default() },
                "hpu",
                "32-true",
            ),
            (
                HpuPrecisionPlugin {
                    opt_level: Some(OptLevel::O2),
                    bf16_file_path: Some(file.clone()),
                    ..base()
                },
                "hpu",
                "O2",
            ),
            (both, "hpu", "mm in both"),
            (
                HpuPrecisionPlugin { fp32_file_path: Some("/nowhere.txt".into()), ..base() },
                "hpu",
                "/nowhere.txt",
            ),
        ] {
            let message = plugin.resolve(accelerator).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }
}
