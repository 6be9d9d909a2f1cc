//! Section `zero_optimization`.

use super::document::{Data, Entry};
use super::section::{Findings, Section};

/// Section `zero_optimization` with DeepSpeed's defaults.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ZeroSection {
    /// 0 to 3.
    pub stage: u64,
    pub reduce_bucket_size: u64,
    pub allgather_bucket_size: u64,
    pub reduce_scatter: bool,
    /// Whether gradients travel during backward; by the stage unless set.
    pub overlap_comm: Option<bool>,
    pub sub_group_size: u64,
    pub prefetch_bucket_size: u64,
    pub param_persistence_threshold: u64,
    pub model_persistence_threshold: u64,
    pub max_live_parameters: u64,
    pub max_reuse_distance: u64,
    pub gather_16bit_weights_on_model_save: bool,
    pub ignores_unused_parameters: bool,
    /// Modules that are gathered and reduced as a whole: types, fqns, or ends of fqns.
    pub leaf_modules: Vec<String>,
    pub computes_grad_norm: bool,
}

impl Default for ZeroSection {
    fn default() -> Self {
        Self {
            stage: 0,
            reduce_bucket_size: 500_000_000,
            allgather_bucket_size: 500_000_000,
            reduce_scatter: true,
            overlap_comm: None,
            sub_group_size: 1_000_000_000,
            prefetch_bucket_size: 50_000_000,
            param_persistence_threshold: 100_000,
            model_persistence_threshold: i64::MAX as u64,
            max_live_parameters: 1_000_000_000,
            max_reuse_distance: 1_000_000_000,
            gather_16bit_weights_on_model_save: false,
            ignores_unused_parameters: true,
            leaf_modules: Vec::new(),
            computes_grad_norm: true,
        }
    }
}

/// Reads the section; `zero_optimization: true` is stage 1.
pub(super) fn read_zero(top: &mut Section<'_>, found: &mut Findings) -> ZeroSection {
    const KEY: &str = "zero_optimization";
    match top.get(KEY).map(|entry| &entry.data) {
        None => ZeroSection::default(),
        Some(Data::Bool(is_on)) => ZeroSection { stage: u64::from(*is_on), ..ZeroSection::default() },
        Some(_) => match top.section(found, KEY) {
            Some(section) => read(section, found),
            None => ZeroSection::default(),
        },
    }
}

fn read(mut section: Section<'_>, found: &mut Findings) -> ZeroSection {
    let standard = ZeroSection::default();
    let stage = section.count(found, "stage", 0).unwrap_or(0);
    if stage > 3
        && let Some(entry) = section.get("stage")
    {
        section.refuse(found, "stage", entry, format!("{stage} is not a stage"), "use 0, 1, 2 or 3");
    }
    let size = |section: &mut Section<'_>, found: &mut Findings, key, old, default| {
        let entry = section.get_either(found, key, old);
        section.as_count(found, key, entry, 0).unwrap_or(default)
    };
    let count = |section: &mut Section<'_>, found: &mut Findings, key, default| {
        section.count(found, key, 1).unwrap_or(default)
    };
    let zero = ZeroSection {
        stage: stage.min(3),
        reduce_bucket_size: count(&mut section, found, "reduce_bucket_size", standard.reduce_bucket_size),
        allgather_bucket_size: count(
            &mut section,
            found,
            "allgather_bucket_size",
            standard.allgather_bucket_size,
        ),
        reduce_scatter: section.flag(found, "reduce_scatter", true),
        overlap_comm: read_overlap(&mut section, found),
        sub_group_size: section.count(found, "sub_group_size", 1).unwrap_or(standard.sub_group_size),
        prefetch_bucket_size: size(
            &mut section,
            found,
            "stage3_prefetch_bucket_size",
            "prefetch_bucket_size",
            standard.prefetch_bucket_size,
        ),
        param_persistence_threshold: size(
            &mut section,
            found,
            "stage3_param_persistence_threshold",
            "param_persistence_threshold",
            standard.param_persistence_threshold,
        ),
        model_persistence_threshold: size(
            &mut section,
            found,
            "stage3_model_persistence_threshold",
            "model_persistence_threshold",
            standard.model_persistence_threshold,
        ),
        max_live_parameters: size(
            &mut section,
            found,
            "stage3_max_live_parameters",
            "max_live_parameters",
            standard.max_live_parameters,
        ),
        max_reuse_distance: size(
            &mut section,
            found,
            "stage3_max_reuse_distance",
            "max_reuse_distance",
            standard.max_reuse_distance,
        ),
        gather_16bit_weights_on_model_save: read_gather(&mut section, found),
        ignores_unused_parameters: section.flag(found, "ignore_unused_parameters", true),
        leaf_modules: read_leaf_modules(&mut section, found),
        computes_grad_norm: section.flag(found, "compute_grad_norm", true),
    };
    refuse_values(&mut section, found, &zero);
    read_offload(&mut section, found, zero.stage);
    note_and_refuse(&mut section, found, &zero);
    section.finish(found);
    zero
}

/// The modules that are gathered and reduced as a whole: types by their name or path, and modules by fqn or the end of it.
fn read_leaf_modules(section: &mut Section<'_>, found: &mut Findings) -> Vec<String> {
    let Some(mut inner) = section.section(found, "leaf_module") else { return Vec::new() };
    let classes = inner.texts(found, "classes").unwrap_or_default();
    let names = ["names", "name_suffixes"].map(|key| inner.texts(found, key).unwrap_or_default());
    inner.finish(found);
    let classes = classes.into_iter().map(|path| path.rsplit('.').next().unwrap_or_default().to_owned());
    let names = names.into_iter().flatten().map(|name| name.trim_start_matches('.').to_owned());
    classes.chain(names).collect()
}

/// Values that cannot be, or not together.
fn refuse_values(section: &mut Section<'_>, found: &mut Findings, zero: &ZeroSection) {
    if zero.allgather_bucket_size % 2 == 1
        && let Some(entry) = section.get("allgather_bucket_size")
    {
        let what = format!("{} is odd", entry.shown());
        section.refuse(found, "allgather_bucket_size", entry, what, "use a multiple of 2");
    }
    if !zero.computes_grad_norm
        && !(1..=2).contains(&zero.stage)
        && let Some(entry) = section.get("compute_grad_norm")
    {
        let what = format!("false with stage {}", zero.stage);
        section.refuse(found, "compute_grad_norm", entry, what, "use stage 1 or 2, or true");
    }
}

fn read_overlap(section: &mut Section<'_>, found: &mut Findings) -> Option<bool> {
    let entry = section.get("overlap_comm");
    section.as_flag(found, "overlap_comm", entry)
}

/// The flag under its three names.
fn read_gather(section: &mut Section<'_>, found: &mut Findings) -> bool {
    let entry = section.get_either(
        found,
        "stage3_gather_16bit_weights_on_model_save",
        "gather_16bit_weights_on_model_save",
    );
    let entry = entry.or(section.get("stage3_gather_fp16_weights_on_model_save"));
    section.as_flag(found, "stage3_gather_16bit_weights_on_model_save", entry).unwrap_or(false)
}

fn note_and_refuse(section: &mut Section<'_>, found: &mut Findings, zero: &ZeroSection) {
    let removed = ["mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"];
    for key in removed {
        if let Some(entry) = section.get(key) {
            let what = "DeepSpeed has had it in older versions only".to_owned();
            section.refuse(found, key, entry, what, "remove it");
        }
    }
    section.refused(found, &["legacy_stage1"], "DeepSpeed has removed the old stage 1", "remove it");
    let quantized =
        ["zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"];
    section.refused(found, &quantized, "what travels is not quantized", "set false");
    section.refused(found, &["zenflow"], "voltaic does not have it", "remove it");
    if let Some(size) = section.count(found, "zero_hpz_partition_size", 1).filter(|size| *size > 1)
        && let Some(entry) = section.get("zero_hpz_partition_size")
    {
        let what = format!("{size}: there is no second division within a node");
        section.refuse(found, "zero_hpz_partition_size", entry, what, "set 1");
    }
    if !zero.computes_grad_norm {
        section.note(found, "compute_grad_norm", "the norm is computed only where somebody needs it");
    }
    if !zero.ignores_unused_parameters {
        section.note(found, "ignore_unused_parameters", "parameters without a gradient are left alone");
    }
    for (keys, why) in [
        (&["contiguous_gradients"][..], "gradients always lie in one piece"),
        (&["allgather_partitions", "use_multi_rank_bucket_allreduce"], "which collectives are used is fixed"),
        (&["round_robin_gradients", "parameter_alignment"], "how parameters are divided is fixed"),
        (&["memory_efficient_linear", "override_module_apply"], "it is for PyTorch's modules"),
        (
            &["pipeline_loading_checkpoint", "load_from_fp32_weights"],
            "master weights are always loaded as saved",
        ),
        (&["overlap_comm"], "gradients always travel while backward runs"),
        (&["allgather_bucket_size"], "weights are gathered in the pieces in which they lie"),
        (&["sub_group_size"], "a rank updates its part at once"),
        (&["save_muon_momentum_buffer_in_memory"], "nothing is offloaded"),
        (
            &["stage3_model_persistence_threshold", "model_persistence_threshold"],
            "the size of each parameter decides (param_persistence_threshold)",
        ),
        (
            &[
                "stage3_gather_16bit_weights_on_model_save",
                "gather_16bit_weights_on_model_save",
                "stage3_gather_fp16_weights_on_model_save",
            ],
            "checkpoints have the whole weights",
        ),
        (&["elastic_checkpoint"], "a checkpoint can be loaded with any number of ranks as it is"),
        (&["log_trace_cache_warnings", "enable_sanity_checks"], "it is for finding faults in DeepSpeed"),
        (
            &[
                "stage3_module_granularity_threshold",
                "module_granularity_threshold",
                "stage3_use_all_reduce_for_fetch_params",
                "use_all_reduce_for_fetch_params",
                "stage3_allgather_sequential",
                "allgather_sequential",
            ],
            "which weights are gathered together follows from the modules",
        ),
    ] {
        section.idle(found, keys, why);
    }
}

/// Offloading is checked, and refused until it exists.
fn read_offload(section: &mut Section<'_>, found: &mut Findings, stage: u64) {
    for (key, old) in [("offload_optimizer", "cpu_offload"), ("offload_param", "cpu_offload_param")] {
        let (new, deprecated) = (section.get(key), section.get(old));
        if let (Some(_), Some(entry)) = (new, deprecated) {
            let what = format!("is given beside {key}, which is the same");
            section.refuse(found, old, entry, what, "remove one of the two");
        }
        if let (Some(true), Some(entry)) = (section.as_flag(found, old, deprecated), deprecated) {
            refuse_offload(section, found, old, entry, "cpu");
        }
        let Some(mut inner) = section.section(found, key) else { continue };
        let devices = [("none", "none"), ("cpu", "cpu"), ("nvme", "nvme")];
        let device = inner.choice(found, "device", &devices).unwrap_or("none");
        let path = inner.text(found, "nvme_path");
        if let (Some(entry), "nvme", None) = (inner.get("device"), device, path) {
            inner.refuse(
                found,
                "nvme_path",
                entry,
                "is missing with device nvme".to_owned(),
                "name a folder",
            );
        }
        inner.count(found, "buffer_count", 1);
        inner.flag(found, "pin_memory", false);
        if key == "offload_param" {
            inner.count(found, "buffer_size", 1);
            inner.count(found, "max_in_cpu", 0);
        } else {
            for flag in ["pipeline_read", "pipeline_write", "pipeline", "fast_init"] {
                inner.flag(found, flag, false);
            }
            inner.number(found, "ratio", 0.0);
            inner.number(found, "cpuadam_cores_perc", 0.0);
            inner.refused(found, &["super_offload"], "voltaic does not have it", "set false");
        }
        inner.finish(found);
        let Some(entry) = new.filter(|_| device != "none") else { continue };
        match (key, stage) {
            ("offload_param", 0..=2) => {
                let what = format!("offloads parameters with stage {stage}");
                section.refuse(found, key, entry, what, "use stage 3");
            }
            (_, 0) => {
                let what = "offloads optimizer states with stage 0".to_owned();
                section.refuse(found, key, entry, what, "use stage 1, 2 or 3");
            }
            _ => refuse_offload(section, found, key, entry, device),
        }
    }
}

fn refuse_offload(section: &Section<'_>, found: &mut Findings, key: &str, entry: &Entry, device: &str) {
    let what = format!("offloading to {device} is not there yet");
    section.refuse(found, key, entry, what, "remove it");
}
