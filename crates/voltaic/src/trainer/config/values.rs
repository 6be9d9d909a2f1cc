//! Values that keys of the configuration have.

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::callback::TimeSpan;
use crate::checkpoint::HpuCheckpointIo;
use crate::config::conversions;
use crate::distributed::SlurmEnvironment;
use crate::precision::{DeepSpeedPrecisionPlugin, HpuPrecisionPlugin};

/// A number of batches, or a fraction of all of them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Limit {
    /// So many batches.
    Batches(u64),
    /// This part of them, from 0.0 to 1.0.
    Fraction(f64),
}

conversions! { Limit:
    u64 => |batches| Self::Batches(batches),
    /// A negative number becomes a fraction that is refused when the trainer is built.
    i32 => |batches| u64::try_from(batches).map_or(Self::Fraction(f64::from(batches)), Self::Batches),
    f64 => |fraction| Self::Fraction(fraction),
}

/// When validation is due within an epoch: batches, a fraction of the epoch, or time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum ValCheckInterval {
    /// Every so many training batches, or after this part of an epoch.
    Batches(Limit),
    /// Whenever so much time has passed since the last.
    Time(TimeSpan),
}

impl<T: Into<Limit>> From<T> for ValCheckInterval {
    fn from(limit: T) -> Self {
        Self::Batches(limit.into())
    }
}

conversions! { ValCheckInterval:
    TimeSpan => |span| Self::Time(span),
    std::time::Duration => |time| Self::Time(time.into()),
}

/// `true`, `false` or `warn`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Deterministic {
    /// Operations without a deterministic kernel fail, or run.
    Flag(bool),
    /// They run with a warning.
    Warn(WarnText),
}

/// The word `warn`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum WarnText {
    /// `warn`
    Warn,
}

impl From<bool> for Deterministic {
    fn from(flag: bool) -> Self {
        Self::Flag(flag)
    }
}

/// `true`, `false`, or a number of batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum FastDevRun {
    /// One batch of each kind, or a normal run.
    Flag(bool),
    /// So many batches of each kind.
    Batches(u64),
}

impl FastDevRun {
    /// Batches of each kind; `None` for a normal run.
    pub(crate) fn batches(self) -> Option<u64> {
        match self {
            Self::Flag(false) | Self::Batches(0) => None,
            Self::Flag(true) => Some(1),
            Self::Batches(batches) => Some(batches),
        }
    }
}

conversions! { FastDevRun:
    bool => |flag| Self::Flag(flag),
    u64 => |batches| Self::Batches(batches),
}

/// How gradients are clipped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum GradientClipAlgorithm {
    /// Scale all gradients so that their common L2 norm is at most the value.
    #[default]
    Norm,
    /// Limit each element to plus or minus the value.
    Value,
}

/// A part of the trainer that you choose, by class name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "class_path", content = "init_args", deny_unknown_fields)]
pub enum PluginConfig {
    /// Precision on an HPU with lists of operators; in place of `trainer.precision`.
    #[serde(alias = "HPUPrecisionPlugin")]
    HpuPrecisionPlugin(HpuPrecisionPlugin),
    /// Precision with a DeepSpeed strategy; in place of `trainer.precision`.
    DeepSpeedPrecisionPlugin(DeepSpeedPrecisionPlugin),
    /// The same on an HPU.
    #[serde(alias = "HPUDeepSpeedPrecisionPlugin")]
    HpuDeepSpeedPrecisionPlugin(DeepSpeedPrecisionPlugin),
    /// Writes checkpoints while training continues.
    #[serde(alias = "AsyncCheckpointIO")]
    AsyncCheckpointIo,
    /// Writes checkpoints with all tensors on the host first, as is done on an HPU anyway.
    #[serde(alias = "HPUCheckpointIO")]
    HpuCheckpointIo,
    /// What the run does in a Slurm job.
    #[serde(alias = "SLURMEnvironment")]
    SlurmEnvironment(SlurmEnvironment),
}

conversions! { PluginConfig:
    HpuPrecisionPlugin => |plugin| Self::HpuPrecisionPlugin(plugin),
    DeepSpeedPrecisionPlugin => |plugin| Self::DeepSpeedPrecisionPlugin(plugin),
    SlurmEnvironment => |plugin| Self::SlurmEnvironment(plugin),
    HpuCheckpointIo => |_| Self::HpuCheckpointIo,
}

/// Which checkpoint a call starts from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CkptPath {
    /// What the newest checkpoint names as the best of its run.
    Best,
    /// The newest.
    Last,
    /// The newest that a run has saved when Slurm said that the time of its job is over: `hpc_ckpt_<n>.ckpt` in
    /// `default_root_dir`.
    Hpc,
    /// This one.
    At(PathBuf),
}

impl From<&str> for CkptPath {
    /// `best`, `last`, `hpc`, or a path.
    fn from(text: &str) -> Self {
        match text {
            "best" => Self::Best,
            "last" => Self::Last,
            "hpc" => Self::Hpc,
            path => Self::At(PathBuf::from(path)),
        }
    }
}

conversions! { CkptPath:
    /// As of `&str`.
    String => |text| Self::from(text.as_str()),
    /// As of `&str`.
    &String => |text| Self::from(text.as_str()),
    /// A path, whatever it is called.
    PathBuf => |path| Self::At(path),
    /// A path, whatever it is called.
    &Path => |path| Self::At(path.to_path_buf()),
    /// A path, whatever it is called.
    &PathBuf => |path| Self::At(path.clone()),
}

/// Weights that a call begins with, as [`Trainer::weights`](crate::trainer::Trainer::weights) takes them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct InitialWeights {
    pub path: PathBuf,
    pub strict: bool,
    /// What names begin with, and what they do instead.
    pub rename: Vec<(String, String)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_words_are_not_paths() {
        assert_eq!(CkptPath::from("best"), CkptPath::Best);
        assert_eq!(CkptPath::from("last".to_owned()), CkptPath::Last);
        assert_eq!(CkptPath::from("hpc"), CkptPath::Hpc);
        assert_eq!(CkptPath::from("last.ckpt"), CkptPath::At(PathBuf::from("last.ckpt")));
        assert_eq!(
            CkptPath::from(Path::new("last")),
            CkptPath::At(PathBuf::from("last")),
            "a path is a path"
        );
    }
}
