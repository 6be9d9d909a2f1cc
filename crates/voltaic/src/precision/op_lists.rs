//! Which operators cast, by lists of names.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::{LazyLock, Mutex, PoisonError};

use crate::accelerator::{HpuEmulator, RuntimeFlags};
use crate::config::nearest;
use crate::device::Device;
use crate::error::{ConfigError, Error, Result};
use crate::ffi::{self, AutocastPolicy};

/// Operators by what autocast does with their arguments, by ATen's names without overloads. An operator that is in
/// several lists is treated as in the first of them; one that is in none takes its arguments as they are.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OpLists {
    /// Arguments are cast to the autocast dtype; of normalizations only the first, so that weights and biases keep
    /// their dtype.
    pub lower: Vec<String>,
    /// Arguments are cast to float32.
    pub fp32: Vec<String>,
    /// Arguments are cast to float32 if one of them is, else to the autocast dtype.
    pub promote: Vec<String>,
}

/// Of these only the first argument is cast.
const LOWER_FIRST: [&str; 4] = ["layer_norm", "group_norm", "instance_norm", "batch_norm"];

#[rustfmt::skip]
const HPU_LOWER: [&str; 27] = [
    "addmm", "addbmm", "batch_norm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "dot", "dropout", "feature_dropout", "group_norm", "instance_norm",
    "layer_norm", "leaky_relu", "linear", "matmul", "mean", "mm", "mul", "mv", "softmax", "log_softmax",
    "scaled_dot_product_attention",
];
#[rustfmt::skip]
const HPU_FP32: [&str; 49] = [
    "acos", "addcdiv", "asin", "atan2", "bilinear", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "cdist", "cosh", "cosine_embedding_loss", "cosine_similarity", "cross_entropy_loss", "dist", "div", "divide",
    "embedding", "embedding_bag", "erfinv", "exp", "expm1", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss",
    "log", "log10", "log1p", "log2", "logsumexp", "margin_ranking_loss", "mse_loss", "multi_margin_loss",
    "multilabel_margin_loss", "nll_loss", "pdist", "poisson_nll_loss", "pow", "reciprocal", "renorm", "rsqrt", "sinh",
    "smooth_l1_loss", "soft_margin_loss", "softplus", "tan", "topk", "triplet_margin_loss", "truediv", "true_divide",
];
const HPU_PROMOTE: [&str; 12] =
    ["add", "addcmul", "addcdiv", "cat", "div", "exp", "mul", "pow", "sub", "iadd", "truediv", "stack"];

#[rustfmt::skip]
const HMP_O1_BF16: [&str; 25] = [
    "addmm", "batch_norm", "bmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "dot", "dropout", "group_norm", "instance_norm", "layer_norm", "leaky_relu", "linear",
    "matmul", "mean", "mm", "mul", "mv", "relu", "t", "baddbmm", "addbmm",
];
#[rustfmt::skip]
const HMP_O1_FP32: [&str; 13] = [
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy_loss", "div", "divide", "embedding_bag",
    "log", "log2", "log_softmax", "nll_loss", "smooth_l1_loss", "softmax", "topk",
];
/// Products and convolutions; `linear` and `matmul` are made of them.
#[rustfmt::skip]
const HMP_O2_BF16: [&str; 13] = [
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "bmm", "addmm", "mm",
    "mv", "dot", "linear", "matmul",
];

fn owned(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

impl OpLists {
    /// The lists of Habana's autocast.
    pub fn hpu() -> Self {
        Self { lower: owned(&HPU_LOWER), fp32: owned(&HPU_FP32), promote: owned(&HPU_PROMOTE) }
    }

    /// The lists of the older HMP at its first level: many operators in bfloat16.
    pub fn hmp_o1() -> Self {
        Self { lower: owned(&HMP_O1_BF16), fp32: owned(&HMP_O1_FP32), promote: owned(&HPU_PROMOTE) }
    }

    /// The lists of the older HMP at its second level: products and convolutions in bfloat16, all else in float32.
    pub fn hmp_o2() -> Self {
        let is_lower = |name: &&&str| HMP_O2_BF16.contains(name);
        let others =
            HMP_O1_BF16.iter().chain(&HMP_O1_FP32).chain(&HPU_PROMOTE).filter(|name| !is_lower(name));
        Self {
            lower: owned(&HMP_O2_BF16),
            fp32: others.map(|&name| name.to_owned()).collect(),
            promote: Vec::new(),
        }
    }

    /// [`OpLists::hpu`], with the lists that the environment names in their place:
    /// `PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST` and `PT_HPU_AUTOCAST_FP32_OPS_LIST`, or their older names
    /// `LOWER_LIST` and `FP32_LIST`.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn from_env() -> Result<Self> {
        let flags = RuntimeFlags::from_env()?;
        let file = |name: &str, old: &str| {
            if let Some(path) = flags.text(name) {
                return Some(path.to_owned());
            }
            let path = flags.text(old)?;
            tracing::warn!("{old} is deprecated; use {name}");
            Some(path.to_owned())
        };
        let lower = file("PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST", "LOWER_LIST");
        let fp32 = file("PT_HPU_AUTOCAST_FP32_OPS_LIST", "FP32_LIST");
        Self::hpu().with_files(lower.as_ref().map(Path::new), fp32.as_ref().map(Path::new), false)
    }

    /// These lists, with those read from files in their place. A file has one operator a line; blank lines are skipped.
    /// A name that libtorch does not know is a warning. With `ignore_unreadable` a file that cannot be read is one too.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn with_files(
        mut self,
        lower: Option<&Path>,
        fp32: Option<&Path>,
        ignore_unreadable: bool,
    ) -> Result<Self> {
        let lower_read = lower.map(|path| read_list(path, ignore_unreadable)).transpose()?.flatten();
        let fp32_read = fp32.map(|path| read_list(path, ignore_unreadable)).transpose()?.flatten();
        if let Some(names) = &fp32_read {
            // what a file asks for must not be undone by a default
            self.lower.retain(|name| !names.contains(name));
            self.fp32.clone_from(names);
        }
        if let Some(names) = lower_read {
            self.lower = names;
        }
        Ok(self)
    }

    /// Names with their policies, those that win first.
    fn policies(&self) -> Vec<(&str, AutocastPolicy)> {
        let lower = self.lower.iter().map(|name| {
            let is_first = LOWER_FIRST.contains(&name.as_str());
            (name.as_str(), if is_first { AutocastPolicy::LowerFirst } else { AutocastPolicy::Lower })
        });
        let fp32 = self.fp32.iter().map(|name| (name.as_str(), AutocastPolicy::Fp32));
        let promote = self.promote.iter().map(|name| (name.as_str(), AutocastPolicy::Promote));
        lower.chain(fp32).chain(promote).collect()
    }
}

/// The names in a file; none if it cannot be read and that is to be ignored.
fn read_list(path: &Path, ignore_unreadable: bool) -> Result<Option<Vec<String>>> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if ignore_unreadable => {
            tracing::warn!(
                "the list of operators {} cannot be read ({error}); the default list is used",
                path.display()
            );
            return Ok(None);
        }
        Err(error) => return Err(Error::io("read the list of operators", path, error)),
    };
    let known = known_operators()?;
    let mut names = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let name = line.trim();
        if name.is_empty() {
            continue;
        }
        let name = if name == "cross_entropy" { "cross_entropy_loss" } else { name }; // Python's name of it
        if !known.contains(name) {
            let meant = nearest(name, known.iter().map(String::as_str));
            let meant = meant.map_or_else(String::new, |meant| format!("; did you mean {meant}"));
            tracing::warn!("{}:{}: libtorch has no operator `{name}`{meant}", path.display(), number + 1);
        }
        names.push(name.to_owned());
    }
    if names.is_empty() {
        let what = format!("{} names no operator", path.display());
        return Err(ConfigError::new("list of operators", what, "write one operator a line").into());
    }
    Ok(Some(names))
}

fn known_operators() -> Result<&'static BTreeSet<String>> {
    static KNOWN: LazyLock<BTreeSet<String>> = LazyLock::new(|| ffi::operator_names().unwrap_or_default());
    Ok(&KNOWN)
}

/// Whether the lists of HPUs are set.
static HPU_LISTS_ARE_SET: Mutex<bool> = Mutex::new(false);

/// Makes operators on `device`'s kind of device cast by these lists and no others, from now on and on all threads. No
/// operator may run meanwhile.
///
/// # Errors
/// If libtorch has no autocast for this kind of device.
pub fn set_op_lists(device: Device, lists: &OpLists) -> Result<()> {
    let mut are_set = HPU_LISTS_ARE_SET.lock().unwrap_or_else(PoisonError::into_inner);
    ffi::set_autocast_lists(device, &lists.policies(), true)?;
    *are_set |= matches!(device, Device::Hpu(_));
    Ok(())
}

/// Back to the default: libtorch's own lists for cpu and cuda, [`OpLists::from_env`] for hpu.
///
/// # Errors
/// If libtorch has no autocast for this kind of device.
pub fn reset_op_lists(device: Device) -> Result<()> {
    let mut are_set = HPU_LISTS_ARE_SET.lock().unwrap_or_else(PoisonError::into_inner);
    ffi::reset_autocast_lists(device)?;
    if matches!(device, Device::Hpu(_)) {
        *are_set = false;
    }
    Ok(())
}

/// Gives an emulated HPU its lists, unless it has some. A card has its plugin's.
pub(super) fn ensure_op_lists(device: Device) -> Result<()> {
    if !matches!(device, Device::Hpu(_)) || HpuEmulator::get().is_none() {
        return Ok(());
    }
    let mut are_set = HPU_LISTS_ARE_SET.lock().unwrap_or_else(PoisonError::into_inner);
    if !*are_set {
        ffi::set_autocast_lists(device, &OpLists::from_env()?.policies(), true)?;
        *are_set = true;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_list_wins() {
        let lists = OpLists::hpu();
        let policy = |name: &str| {
            lists.policies().into_iter().find(|(known, _)| *known == name).map(|(_, policy)| policy)
        };
        for (name, expected) in [
            ("mul", Some(AutocastPolicy::Lower)),
            ("layer_norm", Some(AutocastPolicy::LowerFirst)),
            ("addcdiv", Some(AutocastPolicy::Fp32)),
            ("add", Some(AutocastPolicy::Promote)),
            ("relu", None),
        ] {
            assert_eq!(policy(name), expected, "{name}");
        }
    }

    #[test]
    fn files_take_the_place_of_lists() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::write(&path, text).unwrap();
            path
        };
        let lower = file("lower.txt", "tan\r\n\n  mm \n");
        let fp32 = file("fp32.txt", "linear\ncross_entropy\nno_such_operator\n");
        let lists = OpLists::hpu().with_files(Some(&lower), Some(&fp32), false).unwrap();
        assert_eq!(lists.lower, ["tan", "mm"]);
        assert_eq!(lists.fp32, ["linear", "cross_entropy_loss", "no_such_operator"]);
        let lists = OpLists::hpu().with_files(None, Some(&fp32), false).unwrap();
        assert!(!lists.lower.contains(&"linear".to_owned()) && lists.lower.contains(&"mm".to_owned()));
        let empty = file("empty.txt", "\n");
        assert!(OpLists::hpu().with_files(Some(&empty), None, false).is_err());
        let missing = folder.path().join("missing.txt");
        let message = OpLists::hpu().with_files(Some(&missing), None, false).unwrap_err().to_string();
        assert!(message.contains("missing.txt"), "{message}");
        assert_eq!(OpLists::hpu().with_files(Some(&missing), None, true).unwrap(), OpLists::hpu());
    }

    #[test]
    fn hmp_o2_keeps_all_but_products_in_float32() {
        let lists = OpLists::hmp_o2();
        for name in ["relu", "layer_norm", "add", "softmax"] {
            assert!(lists.fp32.contains(&name.to_owned()), "{name}");
        }
        assert!(lists.lower.iter().all(|name| !lists.fp32.contains(name)));
    }
}
