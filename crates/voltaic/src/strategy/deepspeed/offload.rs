//! Sections `offload_optimizer`, `offload_param` and `aio`: checked, and refused until there is an offload.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::config::Document;

/// Where something is kept that is off the device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum OffloadDevice {
    #[default]
    None,
    Cpu,
    Nvme,
}

/// Section `offload_optimizer`, with DeepSpeed's defaults.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("x-refused" = json!({
    "super_offload": {"what": "voltaic does not have it", "remedy": "set false", "unless_off": true},
})))]
pub(crate) struct OffloadOptimizer {
    /// `none`, `cpu` or `nvme`.
    pub device: OffloadDevice,
    /// Folder on a fast disk, for `nvme`.
    pub nvme_path: Option<String>,
    /// Number of buffers, for `nvme`.
    #[schemars(range(min = 1))]
    pub buffer_count: u64,
    /// Whether memory of the host is pinned.
    pub pin_memory: bool,
    /// Reads the next part while one is updated, for `nvme`.
    pub pipeline_read: bool,
    /// Writes the last part while one is updated, for `nvme`.
    pub pipeline_write: bool,
    /// Both.
    pub pipeline: bool,
    /// Fast initialization, for `nvme`.
    pub fast_init: bool,
    /// Part of the states that is off the device.
    #[schemars(range(min = 0))]
    pub ratio: f64,
    /// Part of the cores that update.
    #[schemars(range(min = 0))]
    pub cpuadam_cores_perc: f64,
}

impl Default for OffloadOptimizer {
    fn default() -> Self {
        Self {
            device: OffloadDevice::None,
            nvme_path: None,
            buffer_count: 4,
            pin_memory: false,
            pipeline_read: false,
            pipeline_write: false,
            pipeline: false,
            fast_init: false,
            ratio: 1.0,
            cpuadam_cores_perc: 0.8,
        }
    }
}

/// Section `offload_param`, with DeepSpeed's defaults.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
pub(crate) struct OffloadParam {
    /// `none`, `cpu` or `nvme`.
    pub device: OffloadDevice,
    /// Folder on a fast disk, for `nvme`.
    pub nvme_path: Option<String>,
    /// Number of buffers, for `nvme`.
    #[schemars(range(min = 1))]
    pub buffer_count: u64,
    /// Elements of a buffer, for `nvme`.
    #[schemars(range(min = 1))]
    pub buffer_size: u64,
    /// Most elements that stay in the host's memory, for `nvme`.
    pub max_in_cpu: u64,
    /// Whether memory of the host is pinned.
    pub pin_memory: bool,
}

impl Default for OffloadParam {
    fn default() -> Self {
        Self {
            device: OffloadDevice::None,
            nvme_path: None,
            buffer_count: 5,
            buffer_size: 100_000_000,
            max_in_cpu: 1_000_000_000,
            pin_memory: false,
        }
    }
}

/// Section `aio`: how files of an offload are read and written.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("x-refused" = aio_refused(), "x-old-names" = json!({"thread_count": "intra_op_parallelism"}),
    "x-ignores-unknown" = "DeepSpeed"))]
pub(crate) struct Aio {
    /// Bytes of one read or write.
    #[schemars(range(min = 1))]
    pub block_size: u64,
    /// Reads and writes under way at a time.
    #[schemars(range(min = 1))]
    pub queue_depth: u64,
    /// Threads of one read or write.
    #[schemars(range(min = 1))]
    pub intra_op_parallelism: u64,
    /// Submits reads and writes one by one.
    pub single_submit: bool,
    /// Submits reads and writes while others are under way.
    pub overlap_events: bool,
}

impl Default for Aio {
    fn default() -> Self {
        Self {
            block_size: 1_048_576,
            queue_depth: 8,
            intra_op_parallelism: 1,
            single_submit: false,
            overlap_events: true,
        }
    }
}

fn aio_refused() -> Value {
    json!({"use_gds": {"what": "it is for GPUs only", "remedy": "set false", "unless_off": true}})
}

/// Checks both sections, each with its older form as a flag, and refuses what they ask for.
pub(super) fn check(
    stage: u64,
    (optimizer, cpu_offload): (&OffloadOptimizer, bool),
    (param, cpu_offload_param): (&OffloadParam, bool),
    document: &mut Document,
) {
    for (key, old, is_old, device, path) in [
        ("offload_optimizer", "cpu_offload", cpu_offload, optimizer.device, &optimizer.nvme_path),
        ("offload_param", "cpu_offload_param", cpu_offload_param, param.device, &param.nvme_path),
    ] {
        let [key, old] = [key, old].map(|key| format!("zero_optimization.{key}"));
        if document.has(&key) && document.has(&old) {
            let what = format!("is given beside {}, which is the same", &key["zero_optimization.".len()..]);
            document.refuse(&old, what, "remove one of the two");
        }
        if is_old {
            document.refuse(&old, "offloading to cpu is not there yet".to_owned(), "remove it");
        }
        if device == OffloadDevice::Nvme && path.is_none() {
            let what = "is missing with device nvme".to_owned();
            document.refuse(&format!("{key}.nvme_path"), what, "name a folder");
        }
        let name = match device {
            OffloadDevice::None => continue,
            OffloadDevice::Cpu => "cpu",
            OffloadDevice::Nvme => "nvme",
        };
        let (what, remedy) = match (key.ends_with("param"), stage) {
            (true, 0..=2) => (format!("offloads parameters with stage {stage}"), "use stage 3"),
            (false, 0) => ("offloads optimizer states with stage 0".to_owned(), "use stage 1, 2 or 3"),
            _ => (format!("offloading to {name} is not there yet"), "remove it"),
        };
        document.refuse(&key, what, remedy);
    }
}
