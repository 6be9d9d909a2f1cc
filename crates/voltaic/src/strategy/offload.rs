//! What a rank keeps off its device (ZeRO-Offload, arXiv:2101.06840; ZeRO-Infinity, arXiv:2104.07857): DeepSpeed's sections
//! `offload_optimizer`, `offload_param` and `aio`.

use std::time::Duration;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use voltaic_macros::Defaults;

use crate::config::Document;
use crate::ffi::{FileBackend, FileOptions};

/// Where something is kept that is off the device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OffloadDevice {
    /// The device of the weights.
    #[default]
    None,
    /// Memory of the host.
    Cpu,
    /// Files.
    Nvme,
}

/// Where this rank's master weights, their gradients and the optimizer states are, which are updated there. The keys and defaults are
/// DeepSpeed's.
///
/// ```
/// use voltaic::strategy::{OffloadDevice, OffloadOptimizer, ZeroConfig, ZeroStage};
/// let offload_optimizer = OffloadOptimizer { device: OffloadDevice::Cpu, ..OffloadOptimizer::default() };
/// let config = ZeroConfig { offload_optimizer, ..ZeroConfig::of_stage(ZeroStage::Two) };
/// # assert!(config.offload_param.device == OffloadDevice::None);
/// ```
#[derive(Defaults, Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("x-refused" = json!({
    "super_offload": {"what": "voltaic does not have it", "remedy": "set false", "unless_off": true},
}), "x-no-effect" = json!({
    "fast_init": "files are written with the first step",
    "cpuadam_cores_perc": "the update runs on the threads of the rank (OMP_NUM_THREADS)",
})))]
pub struct OffloadOptimizer {
    /// `none`, `cpu` or `nvme`.
    pub device: OffloadDevice,
    /// Folder on a fast disk, for `nvme`.
    pub nvme_path: Option<String>,
    /// Number of buffers, for `nvme`.
    #[schemars(range(min = 1))]
    #[default(4)]
    pub buffer_count: u64,
    /// Memory of the host is pinned, where the device can copy from pinned memory faster.
    pub pin_memory: bool,
    /// Reads the next part while one is updated, for `nvme`.
    pub pipeline_read: bool,
    /// Writes the last part while one is updated, for `nvme`.
    pub pipeline_write: bool,
    /// Both.
    pub pipeline: bool,
    /// Share of the elements that is off the device, from 0 to 1; the rest is updated on the device (Twin-Flow of ZeRO-Offload++).
    /// Below 1 with stage 3 only.
    #[schemars(range(min = 0))]
    #[default(1.0)]
    pub ratio: f64,
}

/// Stage 3: where this rank's shard of the weights is, from which they are unsharded. The keys and defaults are DeepSpeed's.
#[derive(Defaults, Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct OffloadParam {
    /// `none`, `cpu` or `nvme`.
    pub device: OffloadDevice,
    /// Folder on a fast disk, for `nvme`.
    pub nvme_path: Option<String>,
    /// Number of buffers, for `nvme`.
    #[schemars(range(min = 1))]
    #[default(5)]
    pub buffer_count: u64,
    /// Elements of a buffer, for `nvme`.
    #[schemars(range(min = 1))]
    #[default(100_000_000)]
    pub buffer_size: u64,
    /// Most elements that stay in the host's memory, for `nvme`.
    #[default(1_000_000_000)]
    pub max_in_cpu: u64,
    /// Memory of the host is pinned, where the device can copy from pinned memory faster.
    pub pin_memory: bool,
}

/// How files of an offload are read and written. The keys and defaults are DeepSpeed's.
#[derive(Defaults, Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("x-refused" = aio_refused(), "x-old-names" = json!({"thread_count": "intra_op_parallelism"}),
    "x-ignores-unknown" = "DeepSpeed"))]
pub struct Aio {
    /// The system calls: `auto`, `io_uring` or `threads`. DeepSpeed does not have this key.
    pub backend: FileBackend,
    /// Tensors of fewer bytes stay in memory; 1 MiB, or `block_size` if that is more, unless set. DeepSpeed does not have this key.
    #[schemars(range(min = 1))]
    pub min_bytes: Option<u64>,
    /// Bytes of one read or write.
    #[schemars(range(min = 1))]
    #[default(1_048_576)]
    pub block_size: u64,
    /// Reads and writes under way at a time.
    #[schemars(range(min = 1))]
    #[default(8)]
    pub queue_depth: u64,
    /// Threads of one read or write.
    #[schemars(range(min = 1))]
    #[default(1)]
    pub intra_op_parallelism: u64,
    /// Submits reads and writes one by one.
    pub single_submit: bool,
    /// Submits reads and writes while others are under way.
    #[default(true)]
    pub overlap_events: bool,
}

impl Aio {
    /// The same for [`FileEngine`](crate::ffi::FileEngine), whose reads and writes may take so long.
    pub(super) fn options(&self, timeout: Duration) -> FileOptions {
        let size = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        let Self { backend, single_submit, overlap_events, .. } = *self;
        FileOptions {
            backend,
            block_size: size(self.block_size),
            queue_depth: size(self.queue_depth),
            intra_op_parallelism: size(self.intra_op_parallelism),
            single_submit,
            overlap_events,
            timeout,
        }
    }
}

fn aio_refused() -> Value {
    json!({"use_gds": {"what": "it is for GPUs only", "remedy": "set false", "unless_off": true}})
}

/// Whether something is kept off the device.
pub(super) fn offloads(optimizer: &OffloadOptimizer, param: &OffloadParam) -> bool {
    [optimizer.device, param.device] != [OffloadDevice::None; 2]
}

/// Checks both sections, each with its older form as a flag, which is taken over.
pub(super) fn check(
    stage: u64,
    (optimizer, cpu_offload): (&mut OffloadOptimizer, bool),
    (param, cpu_offload_param): (&mut OffloadParam, bool),
    document: &mut Document,
) {
    const SECTION: &str = "zero_optimization";
    for (key, old, is_old, device) in [
        ("offload_optimizer", "cpu_offload", cpu_offload, &mut optimizer.device),
        ("offload_param", "cpu_offload_param", cpu_offload_param, &mut param.device),
    ] {
        let [full, old] = [key, old].map(|key| format!("{SECTION}.{key}"));
        if document.has(&full) && document.has(&old) {
            document.refuse(
                &old,
                format!("is given beside {key}, which is the same"),
                "remove one of the two",
            );
        }
        let key = if is_old { old } else { full };
        if is_old {
            *device = OffloadDevice::Cpu;
        }
        if *device == OffloadDevice::None {
            continue;
        }
        let (what, remedy) = match (key.contains("param"), stage) {
            (true, 0..=2) => (format!("offloads parameters with stage {stage}"), "use stage 3"),
            (false, 0) => ("offloads optimizer states with stage 0".to_owned(), "use stage 1, 2 or 3"),
            _ => continue,
        };
        document.refuse(&key, what, remedy);
        *device = OffloadDevice::None;
    }
    for (key, device, path) in [
        ("offload_optimizer", &mut optimizer.device, &optimizer.nvme_path),
        ("offload_param", &mut param.device, &param.nvme_path),
    ] {
        if *device != OffloadDevice::Nvme {
            continue;
        }
        if stage < 3 {
            *device = OffloadDevice::Cpu;
            let why = format!("stage {stage} keeps optimizer states in memory of the host, as with cpu");
            document.note(&format!("{SECTION}.{key}.device=nvme"), &why);
        } else if path.is_none() {
            let what = "is missing with device nvme".to_owned();
            document.refuse(&format!("{SECTION}.{key}.nvme_path"), what, "name a folder");
        }
    }
    let ratio = optimizer.ratio;
    let key = format!("{SECTION}.offload_optimizer.ratio");
    if !(0.0..=1.0).contains(&ratio) {
        document.refuse(&key, format!("{ratio} is not a share"), "set a number from 0 to 1");
    } else if ratio < 1.0 && stage < 3 {
        document.refuse(&key, format!("{ratio} with stage {stage}"), "set 1, or use stage 3");
    }
}
