//! What the profilers for operators have in common: ranges for actions, windows of steps, traces and the table.

use std::cell::RefCell;
use std::fmt;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use super::export::save;
use super::flame::{self, Metric};
use super::lanes::Facts;
use super::page::page;
use super::schedule::{Phase, ProfilerSchedule};
use super::table::{Averages, SortKey};
use crate::accelerator::HpuEmulator;
use crate::checkpoint::write_atomically;
use crate::data::Stage;
use crate::device::Device;
use crate::error::{Error, ProfilerError, Result};
use crate::ffi::{EventScope, Kineto, KinetoOptions, Profile, ProfileRange, Recorded};
use crate::profiler::actions;
use crate::profiler::profiler::ProfiledRun;
use crate::profiler::report::Output;

/// What is recorded, and what becomes of it.
#[derive(Debug, Clone)]
pub(in crate::profiler) struct TraceOptions {
    pub dirpath: Option<PathBuf>,
    pub filename: Option<String>,
    pub schedule: Option<ProfilerSchedule>,
    pub kineto: KinetoOptions,
    pub group_by_input_shapes: bool,
    pub export_to_chrome: bool,
    pub export_to_html: bool,
    pub row_limit: Option<usize>,
    pub sort_key: SortKey,
    pub is_sorted_by_user: bool,
    pub record_module_names: bool,
    /// Columns and events for memory.
    pub profile_memory: bool,
    /// Write the stacks of each trace, with this time.
    pub flame_graph: Option<Metric>,
    /// Record what devices do.
    pub records_devices: bool,
    /// Stacks of Python were asked for.
    pub says_stacks_are_none: bool,
    /// Whether this profiler is for HPUs: what a run without them has is said.
    pub is_for_hpus: bool,
}

/// The steps of one loop; each is counted by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loop {
    Train,
    Validate,
    Test,
    Predict,
}

impl Loop {
    /// The loop whose step this action is.
    fn of(action: &str) -> Option<Self> {
        let ends = |step: &str| action.strip_suffix(step).is_some_and(|before| before.ends_with('.'));
        match () {
            () if action == actions::TRAINING_BATCH => Some(Self::Train),
            () if ends("validation_step") => Some(Self::Validate),
            () if ends("test_step") => Some(Self::Test),
            () if ends("predict_step") => Some(Self::Predict),
            () => None,
        }
    }

    /// The loop whose next batch this action fetches.
    fn of_fetch(action: &str) -> Option<Self> {
        let fetches = |stage| action == actions::next_eval_batch(stage);
        match () {
            () if action == actions::NEXT_TRAINING_BATCH => Some(Self::Train),
            () if fetches(Stage::Validate) => Some(Self::Validate),
            () if fetches(Stage::Test) => Some(Self::Test),
            () if fetches(Stage::Predict) => Some(Self::Predict),
            () => None,
        }
    }

    /// What its step is called.
    fn step(self) -> &'static str {
        match self {
            Self::Train => actions::TRAINING_BATCH,
            Self::Validate => "validation_step",
            Self::Test => "test_step",
            Self::Predict => "predict_step",
        }
    }
}

/// Traces of the steps of a run. The thread that trains starts and stops libtorch's profiler, which sees its operators and
/// those of backward passes. Ranges are seen on all threads.
#[derive(Debug)]
pub(in crate::profiler) struct Tracer {
    id: u64,
    options: TraceOptions,
    output: Output,
    averages: Averages,
    facts: Facts,
    steps: [u64; 4],
    /// The loop whose steps are being recorded.
    recorded: Option<Loop>,
    /// Whether one of its steps has begun since the recording did.
    has_step: bool,
    /// What is recorded is thrown away when the next step begins, which is the first that is kept.
    starts_again: bool,
    /// Traces of this run.
    traces: Vec<PathBuf>,
    /// What was written since the last report, for the log.
    files: Vec<(&'static str, PathBuf)>,
    has_trace: bool,
    /// Why a trace could not be written: the error that the run returns at its end.
    failure: Option<Error>,
    on_ready: Option<OnReady>,
}

/// What is called with each trace.
struct OnReady(Box<dyn FnMut(&Path) + Send>);

impl fmt::Debug for OnReady {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnReady")
    }
}

/// What a thread has begun. Ranges and libtorch's profiler end on the thread on which they began.
#[derive(Default)]
struct OfThread {
    /// Those that are open; one without a range has ended with its recording.
    ranges: Vec<(u64, String, Option<ProfileRange>)>,
    recording: Option<(u64, Kineto)>,
    /// The number of a step and its range.
    step: Option<(u64, ProfileRange)>,
}

/// Ends of the names of hooks that are called after the last step of a loop.
const EPOCH_ENDS: [&str; 4] =
    [".on_train_epoch_end", ".on_validation_epoch_end", ".on_test_epoch_end", ".on_predict_epoch_end"];

fn end_step() {
    OF_THREAD.with_borrow_mut(|own| own.step = None);
}

thread_local! {
    static OF_THREAD: RefCell<OfThread> = RefCell::default();
}

impl Tracer {
    pub fn new(options: TraceOptions) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            output: Output::new(options.dirpath.clone(), options.filename.clone()),
            averages: Averages::new(options.group_by_input_shapes, options.profile_memory),
            options,
            facts: Facts::default(),
            steps: [0; 4],
            recorded: None,
            has_step: false,
            starts_again: false,
            traces: Vec::new(),
            files: Vec::new(),
            has_trace: false,
            failure: None,
            on_ready: None,
        }
    }

    pub fn records_modules(&self) -> bool {
        self.options.record_module_names
    }

    pub fn on_trace_ready(&mut self, call: impl FnMut(&Path) + Send + 'static) {
        self.on_ready = Some(OnReady(Box::new(call)));
    }

    /// The traces that were written, the oldest first.
    pub fn traces(&self) -> &[PathBuf] {
        &self.traces
    }

    pub fn setup(&mut self, run: &ProfiledRun) -> Result<()> {
        self.output.setup(run);
        self.steps = [0; 4];
        self.has_trace = false;
        let TraceOptions { export_to_chrome, export_to_html, flame_graph, .. } = &self.options;
        if *export_to_chrome || *export_to_html || flame_graph.is_some() {
            let path = self.output.path("x");
            let folder = path.parent().unwrap_or(&path);
            fs::create_dir_all(folder).map_err(|source| Error::io("create", folder, source))?;
            tempfile::NamedTempFile::new_in(folder)
                .map_err(|source| Error::io("write to", folder, source))?;
        }
        if run.rank == 0 {
            tracing::info!("profiler: {}", self.what_is_recorded());
            if self.options.says_stacks_are_none {
                tracing::warn!(
                    "profiler: with_stack has no effect: there are no Python functions; modules (record_module_names) \
                     and ranges of your own show where operators are called"
                );
            }
        }
        self.set_device(run);
        Ok(())
    }

    /// What there is to record beside operators depends on the device.
    fn set_device(&mut self, run: &ProfiledRun) {
        let emulator = HpuEmulator::get().filter(|_| matches!(run.device, Device::Hpu(_)));
        let (is_emulated, with_memory) = (emulator.is_some(), self.options.profile_memory);
        let memory = with_memory || is_emulated && self.options.records_devices;
        self.options.kineto.with_cuda = matches!(run.device, Device::Cuda(_));
        self.options.kineto.recorded = Recorded {
            devices: self.options.records_devices,
            memory,
            kernels: !self.options.kineto.without_operators,
        };
        self.facts = Facts {
            rank: run.rank,
            world_size: run.world_size,
            memory_changes: with_memory,
            ..Facts::default()
        };
        if let Some(emulator) = emulator {
            let settings = emulator.settings();
            self.facts.device_name = format!("emulated {}", settings.generation.name());
            self.facts.device_memory = settings.memory_bytes as u64;
        }
        let has_pool = std::env::var_os("VOLTAIC_HOST_POOL").is_none_or(|value| value != "0");
        if with_memory && !has_pool && !is_emulated && run.rank == 0 {
            tracing::warn!(
                "profiler: memory is not recorded, since VOLTAIC_HOST_POOL=0 leaves it to libtorch"
            );
        }
        if !self.options.is_for_hpus || run.rank > 0 || is_emulated {
            return;
        }
        match run.device {
            Device::Hpu(_) => tracing::warn!(
                "HPUProfiler: only the host is recorded: what a Gaudi card does is recorded by Habana's own profiler, \
                 which needs Python; see docs/profilers.md"
            ),
            device => tracing::info!("HPUProfiler: the run is on {device}: only the host is recorded"),
        }
    }

    fn what_is_recorded(&self) -> String {
        let schedule = self.schedule();
        let first = schedule.skip_first + schedule.wait + schedule.warmup + 1;
        let last = schedule.steps_to_trace();
        let steps = match first == last {
            true => format!("step {first} is"),
            false => format!("steps {first} to {last} are"),
        };
        let again = match schedule.repeat {
            1 => String::new(),
            0 => format!(", and so on every {} steps", schedule.wait + schedule.warmup + schedule.active),
            times => format!(", {times} times in all"),
        };
        format!("{steps} recorded{again}; times are longer under a profiler")
    }

    fn schedule(&self) -> ProfilerSchedule {
        self.options.schedule.unwrap_or_default()
    }

    /// The phase of the next step of a loop. Without a schedule of the user's nothing is thrown away before there is a trace,
    /// since the run may be short.
    fn phase(&self, of: Loop) -> Phase {
        let step = self.steps[of as usize];
        match self.schedule().phase(step) {
            Phase::Off if self.options.schedule.is_none() && step < self.schedule().steps_to_trace() => {
                Phase::Warmup
            }
            phase => phase,
        }
    }

    pub fn start(&mut self, action: &str) -> Result<()> {
        let is_running = OF_THREAD.with_borrow(|own| {
            own.ranges.iter().any(|(id, name, _)| (*id, name.as_str()) == (self.id, action))
        });
        if is_running {
            return Err(ProfilerError::AlreadyStarted { action: action.to_owned() }.into());
        }
        if let Some(of) = Loop::of(action) {
            match self.recorded {
                Some(other) if other != of => self.cut(other),
                Some(_) if std::mem::take(&mut self.starts_again) => self.end(None)?,
                _ => {}
            }
            if self.recorded.is_none() && self.phase(of) != Phase::Off {
                self.begin(of)?;
            }
            if self.recorded == Some(of) {
                self.has_step = true;
                self.begin_step(of)?;
            }
        } else if let Some(of) = Loop::of_fetch(action) {
            end_step(); // of any loop
            if self.recorded == Some(of) {
                self.begin_step(of)?;
            }
        } else if EPOCH_ENDS.iter().any(|hook| action.ends_with(hook)) {
            end_step();
        }
        let range = ProfileRange::begin(&format!("[pl][profile]{action}"))?;
        OF_THREAD.with_borrow_mut(|own| own.ranges.push((self.id, action.to_owned(), Some(range))));
        Ok(())
    }

    pub fn stop(&mut self, action: &str) -> Result<()> {
        let ended = OF_THREAD.with_borrow_mut(|own| {
            let at =
                own.ranges.iter().rposition(|(id, name, _)| (*id, name.as_str()) == (self.id, action))?;
            Some(own.ranges.remove(at))
        });
        if ended.is_none() {
            return Err(ProfilerError::NeverStarted { action: action.to_owned() }.into());
        }
        drop(ended);
        if action == actions::TRAINING_EPOCH {
            end_step();
        }
        match Loop::of(action) {
            Some(of) if self.recorded.is_none_or(|recorded| recorded == of) => self.step(of, action),
            _ => Ok(()), // a step within the recording of another loop is not counted
        }
    }

    /// A step has ended.
    fn step(&mut self, of: Loop, action: &str) -> Result<()> {
        let phase = self.phase(of);
        self.steps[of as usize] += 1;
        let next = self.phase(of);
        self.starts_again = next.is_kept() && !phase.is_kept();
        if self.recorded.is_some() && (phase == Phase::RecordAndSave || next == Phase::Off) {
            let ended = self.end(phase.is_kept().then_some(action));
            self.failure = self.failure.take().or(ended.err());
        }
        match (self.recorded, next) {
            (None, Phase::Off) => Ok(()),
            (None, _) => self.begin(of),
            (Some(_), _) => Ok(()),
        }
    }

    /// Ends the recording of a loop early, since another loop continues, possibly for long.
    fn cut(&mut self, recorded: Loop) {
        let is_kept =
            self.phase(recorded).is_kept() && !std::mem::take(&mut self.starts_again) && self.has_step;
        let ended = self.end(is_kept.then_some(recorded.step()));
        self.failure = self.failure.take().or(ended.err());
    }

    fn begin(&mut self, of: Loop) -> Result<()> {
        let recording = Kineto::start(self.options.kineto)?;
        OF_THREAD.with_borrow_mut(|own| own.recording = Some((self.id, recording)));
        self.recorded = Some(of);
        self.has_step = false;
        Ok(())
    }

    /// The range of the step that is next, which TensorBoard's plugin looks for. It contains the fetch of the batch, and what
    /// follows the step until the next fetch or the end of the loop.
    fn begin_step(&self, of: Loop) -> Result<()> {
        if OF_THREAD
            .with_borrow(|own| own.step.as_ref().is_some_and(|(step, _)| *step == self.steps[of as usize]))
        {
            return Ok(()); // it has begun with the fetch
        }
        end_step();
        let step = self.steps[of as usize];
        let range = ProfileRange::begin(&format!("ProfilerStep#{step}"))?;
        OF_THREAD.with_borrow_mut(|own| own.step = Some((step, range)));
        Ok(())
    }

    /// Ends a recording; with an action it becomes a trace of this name, without one it is thrown away.
    fn end(&mut self, kept_as: Option<&str>) -> Result<()> {
        self.recorded = None;
        let recording = OF_THREAD.with_borrow_mut(|own| {
            own.step = None;
            // a range that ended later would write to an event that libtorch has freed
            own.ranges.iter_mut().rev().for_each(|(_, _, range)| *range = None);
            own.recording.take_if(|(id, _)| *id == self.id)
        });
        let Some((_, recording)) = recording else {
            return Err(ProfilerError::OtherThread.into());
        };
        let Some(action) = kept_as else {
            drop(recording);
            return Ok(());
        };
        let path = self.trace_path(action);
        let profile = match self.options.export_to_chrome {
            true => save(recording, &path, &self.facts)?,
            false => recording.stop(None)?,
        };
        self.has_trace = true;
        self.averages.add(&profile);
        if profile.left_out > 0 {
            tracing::warn!(
                "profiler: {} events of devices and memory were left out of {}: record fewer steps",
                profile.left_out,
                path.display()
            );
        }
        if let Some(metric) = self.options.flame_graph {
            self.write(&path, "stacks", "stack", &flame::folded(&profile, metric))?;
        }
        if self.options.export_to_html {
            let key = self.page_key();
            let cells = self.averages.cells(key, None);
            let page = page(&self.page_title(action), &self.about(&profile), &profile, &cells, key.title());
            self.write(&path, "page", "html", &page)?;
        }
        if self.options.export_to_chrome {
            if let Some(OnReady(call)) = &mut self.on_ready {
                call(&path);
            }
            self.files.push(("trace", path.clone()));
            self.traces.push(path);
        }
        Ok(())
    }

    fn page_title(&self, action: &str) -> String {
        let stem = self.output.path("x").with_extension("");
        let stem = stem.file_name().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        format!("Profile {stem}, {action}")
    }

    /// What a page says of its profile.
    fn about(&self, profile: &Profile) -> String {
        let Facts { rank, world_size, device_name, .. } = &self.facts;
        let steps = profile.events.iter().filter(|event| event.name.starts_with("ProfilerStep#")).count();
        let device = if device_name.is_empty() { "host" } else { device_name };
        let operators = profile.events.iter().filter(|event| event.scope == EventScope::Operator).count();
        format!("{steps} steps, rank {rank} of {world_size}, {device}, {operators} operators")
    }

    /// By what a page is sorted, which has all rows: unless the user has chosen, by own time, so that operators come before the
    /// steps and actions that contain them.
    fn page_key(&self) -> SortKey {
        match self.options.sort_key {
            key if self.options.is_sorted_by_user => key,
            SortKey::DeviceTotal if self.averages.has_device_time() => SortKey::DeviceOwn,
            _ => SortKey::Own,
        }
    }

    /// Writes a file beside a trace, whole or not at all.
    fn write(&mut self, trace: &Path, what: &'static str, ending: &str, text: &str) -> Result<()> {
        let name = trace.file_name().unwrap_or_default().to_string_lossy();
        let path = trace.with_file_name(format!("{}.{ending}", name.trim_end_matches(".pt.trace.json")));
        let folder = path.parent().unwrap_or(&path);
        fs::create_dir_all(folder).map_err(|source| Error::io("create", folder, source))?;
        write_atomically(&path, |file| file.write_all(text.as_bytes()))?;
        self.files.push((what, path));
        Ok(())
    }

    /// `<stage>-<filename>-<rank>-<action>.<time>.pt.trace.json`
    fn trace_path(&self, action: &str) -> PathBuf {
        let mut name = String::new();
        for c in action.chars() {
            let c = if c.is_ascii_alphanumeric() { c } else { '_' };
            if c != '_' || !name.ends_with('_') {
                name.push(c);
            }
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let stem = self.output.path("x").with_extension("");
        let stem = stem.file_name().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        let name = name.trim_matches('_');
        self.output.path("x").with_file_name(format!("{stem}-{name}.{now}.pt.trace.json"))
    }

    pub fn summary(&self) -> String {
        format!(
            "{}\n{}",
            self.output.title(),
            self.averages.table(self.options.sort_key, self.options.row_limit)
        )
    }

    /// Writes what is left, and the table.
    pub fn describe(&mut self) -> Result<()> {
        if let Some(of) = self.recorded {
            let is_kept = self.phase(of).is_kept() || (self.options.schedule.is_none() && !self.has_trace);
            let is_kept = is_kept && self.has_step;
            self.end(is_kept.then_some(of.step()))?;
        }
        if let Some(error) = self.failure.take() {
            return Err(error);
        }
        if !self.has_trace {
            let seen = self.steps.iter().max().copied().unwrap_or_default();
            tracing::warn!(
                "profiler: the run ended after {seen} steps, before the {} that the schedule needs for a trace; \
                 nothing was recorded. Use a shorter schedule or a longer run",
                self.schedule().steps_to_trace()
            );
            return Ok(());
        }
        for (what, path) in self.files.drain(..) {
            tracing::info!("profiler: {what} in {}", path.display());
        }
        self.output.write(&self.summary())
    }
}
