//! The settings that the profilers for operators have in common, written down once.

use crate::error::ConfigError;

/// Declares the settings of a profiler for operators: those that all have, with the defaults in which they differ, and some of
/// its own; and `trace_options`, which checks those that all have.
macro_rules! trace_config {
    (
        $(#[$about:meta])*
        pub struct $name:ident {
            export_to_html: $export_to_html:expr,
            record_module_names: $record_module_names:expr,
            $($(#[$about_own:meta])* pub $own:ident: $own_type:ty = $own_default:expr,)*
        }
    ) => {
        $(#[$about])*
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            /// Folder of traces and reports; that of the run unless set.
            pub dirpath: Option<PathBuf>,
            /// Write the table to `<stage>-<filename>.txt`, with `-<rank>` if there are several ranks. Without this and `dirpath`
            /// rank 0 prints it.
            pub filename: Option<String>,
            /// A row for each operator and shape of its inputs. Shapes are recorded then.
            pub group_by_input_shapes: bool,
            /// Write a Chrome trace for each window of steps.
            pub export_to_chrome: bool,
            /// Write a page for each window of steps, one HTML file for any browser: timeline, flame graph, memory, table.
            pub export_to_html: bool,
            /// Rows of the table; all if null.
            pub row_limit: Option<usize>,
            /// By what the rows are sorted: unless set by `hpu_time_total` in `HPUProfiler` on HPUs, else by `cpu_time_total`;
            /// or `self_cpu_time_total`, `cpu_time`, `cpu_memory_usage`, `self_cpu_memory_usage`, the same of `hpu`, or `count`.
            pub sort_by_key: Option<String>,
            /// Record each call of a module, as `[module]Linear: fc1`.
            pub record_module_names: bool,
            /// Which steps are recorded.
            pub schedule: Option<ProfilerSchedule>,
            /// Record the shapes of inputs.
            pub record_shapes: bool,
            /// Count floating point operations of products and convolutions. Shapes are recorded then.
            pub with_flops: bool,
            /// Record memory: each change as an event of the trace, and by operator in the table. How much is in use on HPUs
            /// is in a trace also without this.
            pub profile_memory: bool,
            /// As `record_module_names`.
            pub with_modules: bool,
            /// Without effect: there are no Python functions. A flame graph shows ranges, modules and operators.
            pub with_stack: bool,
            /// Write the stacks of a flame graph beside each trace, for `flamegraph.pl`, inferno or speedscope.
            pub export_to_flame_graph: bool,
            /// What a flame graph shows: `self_cpu_time_total` or `self_hpu_time_total`.
            pub metric: String,
            $($(#[$about_own])* pub $own: $own_type,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self {
                    dirpath: None,
                    filename: None,
                    group_by_input_shapes: false,
                    export_to_chrome: true,
                    export_to_html: $export_to_html,
                    row_limit: Some(20),
                    sort_by_key: None,
                    record_module_names: $record_module_names,
                    schedule: None,
                    record_shapes: false,
                    with_flops: false,
                    profile_memory: false,
                    with_modules: false,
                    with_stack: false,
                    export_to_flame_graph: false,
                    metric: "self_cpu_time_total".to_owned(),
                    $($own: $own_default,)*
                }
            }
        }

        impl $name {
            fn trace_options(&self, unless_sorted: SortKey) -> Result<TraceOptions, ConfigError> {
                if let Some(schedule) = self.schedule {
                    schedule.check()?;
                }
                let sort_key = one_of("sort_by_key", self.sort_by_key.as_deref(), "a column of the table", &SORT_KEYS)?;
                let metric = one_of("metric", Some(&self.metric), "a time that a flame graph shows", &METRICS)?;
                Ok(TraceOptions {
                    dirpath: self.dirpath.clone(),
                    filename: self.filename.clone(),
                    schedule: self.schedule,
                    kineto: KinetoOptions {
                        record_shapes: self.record_shapes || self.group_by_input_shapes || self.with_flops,
                        with_flops: self.with_flops,
                        ..KinetoOptions::default()
                    },
                    group_by_input_shapes: self.group_by_input_shapes,
                    export_to_chrome: self.export_to_chrome,
                    export_to_html: self.export_to_html,
                    row_limit: self.row_limit,
                    sort_key: sort_key.unwrap_or(unless_sorted),
                    is_sorted_by_user: sort_key.is_some(),
                    record_module_names: self.record_module_names || self.with_modules,
                    profile_memory: self.profile_memory,
                    records_devices: true,
                    flame_graph: metric.filter(|_| self.export_to_flame_graph),
                    says_stacks_are_none: self.with_stack,
                    is_for_hpus: false,
                })
            }
        }
    };
}

/// The value of a key that takes one of some names.
pub(in crate::profiler) fn one_of<T: Copy>(
    key: &str,
    name: Option<&str>,
    what: &str,
    known: &[(&str, T)],
) -> Result<Option<T>, ConfigError> {
    let Some(name) = name else { return Ok(None) };
    if let Some((_, value)) = known.iter().find(|(known, _)| *known == name) {
        return Ok(Some(*value));
    }
    let names = known.iter().map(|(known, _)| *known).collect::<Vec<_>>().join(", ");
    let (key, what) = (format!("trainer.profiler.{key}"), format!("`{name}` is not {what}"));
    Err(ConfigError::new(&key, what, format!("use one of {names}")))
}

pub(in crate::profiler) use trace_config;
