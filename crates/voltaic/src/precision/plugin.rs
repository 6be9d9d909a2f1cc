//! `HpuPrecisionPlugin`: precision with lists of operators, and HMP, its older form.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use voltaic_macros::Defaults;

use super::fp8::recipe::Recipe;
use super::fp8::settings::{Fp8Settings, InferenceKeys, fp8_plugin};
use super::op_files::{OpFile, files_of_env};
use super::op_lists::OpLists;
use super::precision::{Precision, is_hmp};
use crate::error::{ConfigError, Result};

/// How many operators HMP lets compute in bfloat16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OptLevel {
    /// Many.
    O1,
    /// Products and convolutions.
    O2,
}

/// Precision of a run on an HPU, with your own lists of operators. Given in place of `trainer.precision`.
///
/// A list comes from the file named here, else from that of the environment ([`OpLists::from_env`]), else it is the
/// default one.
///
/// `opt_level`, or a precision of `16`, chooses HMP, the interface before autocast, which is deprecated: it goes by its
/// own lists, in bfloat16 only, and otherwise does the same. Its level is `O1` if there are files, else Lightning's
/// default, `O2`.
///
/// Source: `lightning_habana.pytorch.plugins.HPUPrecisionPlugin`, and Habana's `hmp`.
#[derive(Defaults, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct HpuPrecisionPlugin {
    /// `32-true`, `bf16-mixed`, `16-mixed`, and the other values of `trainer.precision`.
    #[default(Value::from("32-true"))]
    pub precision: Value,
    /// Kind of device; `hpu`.
    #[default("hpu".to_owned())]
    pub device: String,
    /// File with the operators that compute in the lower dtype, one a line, in place of the default list.
    pub bf16_file_path: Option<PathBuf>,
    /// File with the operators that compute in float32, one a line, in place of the default list.
    pub fp32_file_path: Option<PathBuf>,
    /// HMP's level (deprecated): `O1` or `O2`. `O2` uses no files.
    pub opt_level: Option<OptLevel>,
    /// Log the lists, and each kind of cast when it is first done.
    pub verbose: bool,
    /// Use the default list, with a warning, in place of a file that cannot be read.
    pub ignore_unreadable_files: bool,
    /// With precision fp8: layers of the module compute in float8, if it has none that do.
    pub replace_layers: bool,
    /// With precision fp8: how scales come about; `DelayedScaling` with its defaults if it is null.
    pub recipe: Option<Recipe>,
    /// With `replace_layers`: modules whose layers stay as they are, by type, fqn, or a pattern of fqns with `*`.
    pub exclude_layers: Vec<String>,
    /// With `replace_layers`: layers with fewer weights stay as they are.
    pub min_weights: i64,
    /// With precision fp8: layers measure, or compute in float8 with scales of measurements, in validate, test and predict.
    pub inference: bool,
    /// With `inference`: false measures, true quantizes, a path or a mapping has the settings; null: `QUANT_CONFIG`, else true.
    pub quant: Value,
    /// With `inference`: the folder of the measurements; null: `HABANA_LOGS`, else the folder of the run.
    pub fp8_data_path: Option<PathBuf>,
}

fp8_plugin!(HpuPrecisionPlugin);

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
        let refuse = |key: &str, what: String, remedy: &'static str| {
            ConfigError::new(format!("HpuPrecisionPlugin.{key}"), what, remedy)
        };
        if self.device != "hpu" || accelerator != "hpu" {
            let what = format!("device {} on accelerator {accelerator}", self.device);
            return Err(
                refuse("device", what, "use it with accelerator=hpu, or set trainer.precision").into()
            );
        }
        let precision = Precision::parse(&self.precision, accelerator)
            .map_err(|problem| ConfigError::at("HpuPrecisionPlugin.precision", problem))?;
        self.fp8(precision)?;
        let has_files = self.bf16_file_path.is_some() || self.fp32_file_path.is_some();
        if precision.autocast_dtype().is_none() && (has_files || self.opt_level.is_some()) {
            let what = format!("{precision} casts no operators, and lists of them are given");
            return Err(refuse("precision", what, "use bf16-mixed, or leave the lists out").into());
        }
        if precision == Precision::Fp16Mixed && self.opt_level.is_some() {
            let what = format!("{precision} with HMP, which computes in bfloat16");
            return Err(refuse("opt_level", what, "leave it out, or use bf16-mixed").into());
        }
        Ok((precision, self.op_lists(precision)?))
    }

    /// The lists of an HPU; none if they are the default ones.
    pub(crate) fn op_lists(&self, precision: Precision) -> Result<Option<OpLists>> {
        if precision.autocast_dtype().is_none() {
            return Ok(None);
        }
        let own = |key: &str, path: &Option<PathBuf>| {
            path.as_ref().map(|path| OpFile::new(format!("HpuPrecisionPlugin.{key}"), path))
        };
        let [lower, fp32] = files_of_env()?;
        let files = [
            own("bf16_file_path", &self.bf16_file_path).or(lower),
            own("fp32_file_path", &self.fp32_file_path).or(fp32),
        ];
        let has_files = files.iter().any(Option::is_some);
        let level_of_files = if has_files { OptLevel::O1 } else { OptLevel::O2 };
        let level = self.opt_level.or(is_hmp(&self.precision).then_some(level_of_files));
        if level.is_some() {
            tracing::warn!(
                "HMP (opt_level, or precision=16 on an HPU) is deprecated; use precision=bf16-mixed"
            );
        }
        let lists = match level {
            Some(OptLevel::O2) => {
                for file in files.iter().flatten() {
                    tracing::warn!("{}: opt_level O2 has a fixed list; the file is not used", file.key);
                }
                OpLists::hmp_o2()
            }
            Some(OptLevel::O1) => OpLists::hmp_o1().with_op_files(&files, self.ignore_unreadable_files)?,
            None if has_files || self.verbose => {
                OpLists::hpu().with_op_files(&files, self.ignore_unreadable_files)?
            }
            None => return Ok(None),
        };
        check_apart(&lists, level.is_some())?;
        if self.verbose {
            tracing::info!("lower precision: {}", lists.lower.join(" "));
            tracing::info!("float32: {}", lists.fp32.join(" "));
            tracing::info!("widest of the arguments: {}", lists.promote.join(" "));
        }
        Ok(Some(lists))
    }
}

/// HMP takes no operator in both lists; autocast takes the lower precision.
fn check_apart(lists: &OpLists, is_hmp: bool) -> Result<()> {
    let both = lists.in_both().join(", ");
    if both.is_empty() {
        return Ok(());
    }
    if is_hmp {
        let what = format!("{both} in both the bf16 and the fp32 list");
        let key = "HpuPrecisionPlugin.bf16_file_path";
        return Err(ConfigError::new(key, what, "name each operator once").into());
    }
    tracing::warn!("{both} in the lists of both dtypes; the lower precision holds");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn it_gives_precision_and_lists() {
        let plugin = HpuPrecisionPlugin::new("bf16-mixed");
        assert_eq!(plugin.resolve("hpu").unwrap(), (Precision::Bf16Mixed, None));
        for precision in [Value::from(16), Value::from("16")] {
            let hmp = HpuPrecisionPlugin::new(precision);
            assert_eq!(hmp.resolve("hpu").unwrap(), (Precision::Bf16Mixed, Some(OpLists::hmp_o2())));
        }
        let level = |opt_level| HpuPrecisionPlugin { opt_level, ..HpuPrecisionPlugin::new("bf16") };
        assert_eq!(level(Some(OptLevel::O1)).resolve("hpu").unwrap().1, Some(OpLists::hmp_o1()));
        assert_eq!(level(Some(OptLevel::O2)).resolve("hpu").unwrap().1, Some(OpLists::hmp_o2()));
        assert_eq!(level(None).resolve("hpu").unwrap().1, None);
        let verbose = HpuPrecisionPlugin { verbose: true, ..HpuPrecisionPlugin::new("bf16-mixed") };
        assert_eq!(verbose.resolve("hpu").unwrap().1, Some(OpLists::hpu()));
    }

    #[test]
    fn files_choose_the_level_of_hmp_that_has_lists() {
        let folder = tempfile::tempdir().unwrap();
        let [bf16, fp32] = ["bf16.txt", "fp32.txt"].map(|name| folder.path().join(name));
        fs::write(&bf16, "linear\nrelu\nmm\n").unwrap();
        fs::write(&fp32, "cross_entropy\ntan\n").unwrap();
        let plugin = |opt_level| HpuPrecisionPlugin {
            opt_level,
            bf16_file_path: Some(bf16.clone()),
            fp32_file_path: Some(fp32.clone()),
            ..HpuPrecisionPlugin::new(16)
        };
        for level in [Some(OptLevel::O1), None] {
            let lists = plugin(level).resolve("hpu").unwrap().1.unwrap();
            assert_eq!(lists.lower, ["linear", "relu", "mm"]);
            assert_eq!(lists.fp32, ["cross_entropy_loss", "tan"]);
            assert_eq!(lists.promote, OpLists::hmp_o1().promote);
        }
        assert_eq!(plugin(Some(OptLevel::O2)).resolve("hpu").unwrap().1, Some(OpLists::hmp_o2()), "as HMP");
        let one = HpuPrecisionPlugin { opt_level: None, precision: "bf16-mixed".into(), ..plugin(None) };
        assert_eq!(one.resolve("hpu").unwrap().1.unwrap().promote, OpLists::hpu().promote);
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
                HpuPrecisionPlugin { opt_level: Some(OptLevel::O1), ..HpuPrecisionPlugin::new("16-mixed") },
                "hpu",
                "16-mixed with HMP",
            ),
            (HpuPrecisionPlugin { replace_layers: true, ..base() }, "hpu", "replace_layers: is for float8"),
            (HpuPrecisionPlugin { recipe: Some(Recipe::default()), ..base() }, "hpu", "recipe: is"),
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
