//! Which operators cast, by lists of names.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::op_files::{OpFile, files_of_env};
use crate::accelerator::HpuEmulator;
use crate::device::Device;
use crate::error::Result;
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

// Habana's lists of HMP.
#[rustfmt::skip]
const HMP_O1_BF16: [&str; 23] = [
    "addmm", "batch_norm", "bmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "dot", "dropout", "group_norm", "instance_norm", "layer_norm", "leaky_relu", "linear",
    "matmul", "mean", "mm", "mul", "mv", "relu", "t",
];
#[rustfmt::skip]
const HMP_O1_FP32: [&str; 14] = [
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy_loss", "div", "divide", "embedding_bag",
    "log", "log2", "log_softmax", "nll_loss", "smooth_l1_loss", "softmax", "topk", "truediv",
];
/// Products and convolutions; `linear` and `matmul` are made of them.
#[rustfmt::skip]
const HMP_O2_BF16: [&str; 13] = [
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "bmm", "addmm", "mm",
    "mv", "dot", "linear", "matmul",
];
/// Operators in no other list that O2 computes in float32.
#[rustfmt::skip]
const HMP_O2_FP32: [&str; 16] = [
    "cumprod", "cumsum", "elu", "gelu", "hardtanh", "log_sigmoid", "norm", "prod", "rsub", "sigmoid", "silu", "sqrt",
    "std", "sum", "tanh", "var",
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
        let lists: [&[&str]; 6] =
            [&HMP_O1_BF16, &HMP_O1_FP32, &HPU_PROMOTE, &HPU_LOWER, &HPU_FP32, &HMP_O2_FP32];
        let mut fp32: Vec<String> = Vec::new();
        for &name in lists.into_iter().flatten().filter(|name| !HMP_O2_BF16.contains(name)) {
            if !fp32.iter().any(|known| known == name) {
                fp32.push(name.to_owned());
            }
        }
        Self { lower: owned(&HMP_O2_BF16), fp32, promote: Vec::new() }
    }

    /// [`OpLists::hpu`], with the lists that the environment names in their place:
    /// `PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST` and `PT_HPU_AUTOCAST_FP32_OPS_LIST`, or their older names
    /// `LOWER_LIST` and `FP32_LIST`. An empty variable is none.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn from_env() -> Result<Self> {
        Self::hpu().with_op_files(&files_of_env()?, false)
    }

    /// These lists, with those read from files in their place. A file has one operator a line; blank lines are skipped.
    /// Names that libtorch does not have are warnings. With `ignore_unreadable`, so are files that cannot be read.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn with_files(
        self,
        lower: Option<&Path>,
        fp32: Option<&Path>,
        ignore_unreadable: bool,
    ) -> Result<Self> {
        let file = |key: &str, path: Option<&Path>| path.map(|path| OpFile::new(key, path));
        self.with_op_files(&[file("OpLists.lower", lower), file("OpLists.fp32", fp32)], ignore_unreadable)
    }

    /// The same with files for the lower dtype and for float32.
    pub(super) fn with_op_files(
        mut self,
        files: &[Option<OpFile>; 2],
        ignore_unreadable: bool,
    ) -> Result<Self> {
        let read = |file: &Option<OpFile>| -> Result<Option<Vec<String>>> {
            Ok(file.as_ref().map(|file| file.read(ignore_unreadable)).transpose()?.flatten())
        };
        let [lower, fp32] = files;
        let (lower, fp32) = (read(lower)?, read(fp32)?);
        // what a file asks for must not be undone by a default
        match (&lower, &fp32) {
            (None, Some(names)) => self.lower.retain(|name| !names.contains(name)),
            (Some(names), None) => self.fp32.retain(|name| !names.contains(name)),
            _ => {}
        }
        self.lower = lower.unwrap_or(self.lower);
        self.fp32 = fp32.unwrap_or(self.fp32);
        Ok(self)
    }

    /// Operators that are in the lists of both dtypes.
    pub(super) fn in_both(&self) -> Vec<&str> {
        self.lower.iter().filter(|name| self.fp32.contains(name)).map(String::as_str).collect()
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

/// Whose lists HPUs have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    /// None yet: those of the device's software, which the emulator has not got.
    Nobody,
    Default,
    /// A trainer's.
    Run,
    /// [`set_op_lists`].
    User,
}

static HPU_LISTS: Mutex<Source> = Mutex::new(Source::Nobody);

fn hpu_lists() -> MutexGuard<'static, Source> {
    HPU_LISTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes operators on `device`'s kind of device cast by these lists and no others, from now on and on all threads. No
/// operator may run meanwhile.
///
/// # Errors
/// If libtorch has no autocast for this kind of device.
pub fn set_op_lists(device: Device, lists: &OpLists) -> Result<()> {
    let mut source = hpu_lists();
    ffi::set_autocast_lists(device, &lists.policies(), true)?;
    if matches!(device, Device::Hpu(_)) {
        *source = Source::User;
    }
    Ok(())
}

/// Back to the default: libtorch's own lists for cpu and cuda, [`OpLists::from_env`] for hpu.
///
/// # Errors
/// If libtorch has no autocast for this kind of device.
pub fn reset_op_lists(device: Device) -> Result<()> {
    let mut source = hpu_lists();
    ffi::reset_autocast_lists(device)?;
    if matches!(device, Device::Hpu(_)) {
        *source = Source::Nobody;
    }
    Ok(())
}

/// The lists of a run that begins. Without any, those of an earlier run give way to the default. What [`set_op_lists`]
/// has set stays unless the run has lists of its own, not only those of the environment (`are_default`).
pub(crate) fn set_run_lists(device: Device, lists: Option<&OpLists>, are_default: bool) -> Result<()> {
    if !matches!(device, Device::Hpu(_)) {
        return Ok(());
    }
    let mut source = hpu_lists();
    match lists {
        Some(_) if are_default && *source == Source::User => {}
        Some(lists) => {
            ffi::set_autocast_lists(device, &lists.policies(), true)?;
            *source = Source::Run;
        }
        None if *source == Source::Run => {
            ffi::reset_autocast_lists(device)?;
            *source = Source::Nobody;
        }
        None => {}
    }
    Ok(())
}

/// Gives HPUs their default lists, unless they have some. Without files of the environment a card keeps its plugin's.
pub(super) fn ensure_op_lists(device: Device) -> Result<()> {
    if !matches!(device, Device::Hpu(_)) {
        return Ok(());
    }
    let mut source = hpu_lists();
    if *source != Source::Nobody {
        return Ok(());
    }
    let files = files_of_env()?;
    if HpuEmulator::get().is_some() || files.iter().any(Option::is_some) {
        let lists = OpLists::hpu().with_op_files(&files, false)?;
        ffi::set_autocast_lists(device, &lists.policies(), true)?;
    }
    *source = Source::Default;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

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
        let marked = file("marked.txt", "\u{feff}tan\n");
        let lists = OpLists::hmp_o1().with_files(Some(&marked), None, false).unwrap();
        assert_eq!((lists.lower, lists.fp32), (vec!["tan".to_owned()], OpLists::hmp_o1().fp32));
        let softmax = file("softmax.txt", "softmax\n");
        let lists = OpLists::hmp_o1().with_files(Some(&softmax), None, false).unwrap();
        assert!(!lists.fp32.contains(&"softmax".to_owned()), "asked for in bfloat16");
        let empty = file("empty.txt", "\n");
        let lists = OpLists::hpu().with_files(None, Some(&empty), false).unwrap();
        assert_eq!((lists.fp32.len(), lists.lower), (0, OpLists::hpu().lower));
        let missing = folder.path().join("missing.txt");
        let message = OpLists::hpu().with_files(Some(&missing), None, false).unwrap_err().to_string();
        assert!(message.contains("missing.txt"), "{message}");
        assert_eq!(OpLists::hpu().with_files(Some(&missing), None, true).unwrap(), OpLists::hpu());
    }

    #[test]
    fn hmp_o2_keeps_all_but_products_in_float32() {
        let lists = OpLists::hmp_o2();
        for name in ["relu", "layer_norm", "add", "softmax", "gelu", "exp", "embedding"] {
            assert!(lists.fp32.contains(&name.to_owned()), "{name}");
        }
        assert!(lists.in_both().is_empty());
        let known = ffi::operator_names().unwrap();
        let unknown: Vec<&String> = lists.fp32.iter().filter(|name| !known.contains(*name)).collect();
        assert_eq!(unknown, ["truediv", "iadd"], "Habana's names for operators of Python");
    }
}
