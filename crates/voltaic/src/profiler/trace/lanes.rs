//! What devices, memory and kernels did, as events of a Chrome trace.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::Value;

use super::nest::Nest;
use crate::ffi::{Activity, ActivityRow, EventScope, KinetoEvent, MemoryChange, Profile};

/// What a trace says of its run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Facts {
    /// `emulated gaudi2`; empty without HPUs.
    pub device_name: String,
    /// Bytes of a device's memory.
    pub device_memory: u64,
    pub rank: usize,
    pub world_size: usize,
    /// Whether each change of memory is included, beside the memory in use on devices.
    pub memory_changes: bool,
}

/// Where times of a trace count from, and whose it is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Base {
    /// Nanoseconds since the epoch.
    pub base_ns: i64,
    pub process: u32,
}

/// Rows of the host that are no threads.
const HOST_ROWS: i64 = 1_000_000_000;
/// Rows that one kind of activity may take if several overlap in time.
const MOST_LANES: usize = 100;
/// What changes of a device's memory say: libtorch's number of CUDA, since TensorBoard's plugin fails with types other than this
/// and the CPU. It shows the first HPU as "GPU0".
const DEVICE_TYPE: u8 = 1;

impl Base {
    /// Microseconds, as traces have them.
    fn micros(self, ns: i64) -> String {
        let ns = ns - self.base_ns;
        format!("{}.{:03}", ns.div_euclid(1000), ns.rem_euclid(1000))
    }
}

/// Where an activity is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    process: i64,
    row: i64,
}

/// Writes events of a trace, each followed by a comma.
pub(super) fn events(profile: &Profile, base: Base, facts: &Facts) -> String {
    let nest = Nest::new(&profile.events);
    let mut text = String::new();
    let places = place(&profile.activities, base);
    let mut named: BTreeMap<Place, &'static str> = BTreeMap::new();
    for (number, (activity, place)) in profile.activities.iter().zip(&places).enumerate() {
        write_activity(&mut text, &nest, base, activity, *place, number + 1);
        if activity.row != ActivityRow::Kernels {
            named.insert(*place, row_name(activity));
        }
    }
    for range in profile.events.iter().filter(|event| !event.is_in_trace) {
        write_range(&mut text, base, range);
    }
    for change in &profile.memory {
        write_memory(&mut text, base, facts, change);
    }
    let devices = profile.activities.iter().filter_map(|activity| activity.device);
    let mut devices: Vec<usize> =
        devices.chain(profile.memory.iter().filter_map(|change| change.device)).collect();
    devices.sort_unstable();
    devices.dedup();
    for device in devices {
        let name = Value::from(format!("hpu:{device} ({})", facts.device_name));
        meta(&mut text, device as i64, 0, "process_name", &format!("\"name\": {name}"));
        meta(&mut text, device as i64, 0, "process_labels", "\"labels\": \"HPU\"");
        meta(
            &mut text,
            device as i64,
            0,
            "process_sort_index",
            &format!("\"sort_index\": {}", 5_000_000 + device),
        );
    }
    for (Place { process, row }, name) in named {
        meta(&mut text, process, row, "thread_name", &format!("\"name\": \"{name}\""));
        meta(&mut text, process, row, "thread_sort_index", &format!("\"sort_index\": {row}"));
    }
    text
}

pub(super) fn row_name(activity: &Activity) -> &'static str {
    match (activity.row, activity.device) {
        (ActivityRow::Operators, Some(_)) => "operators",
        (ActivityRow::Operators, None) => "replayed operators",
        (ActivityRow::Copies, _) => "memory copies",
        (ActivityRow::Graphs, _) => "graphs",
        (ActivityRow::Collectives, _) => "collectives",
        (ActivityRow::Kernels, _) => "kernels",
    }
}

/// A row for each activity: those that overlap, as collectives do, are on several.
pub(super) fn place(activities: &[Activity], base: Base) -> Vec<Place> {
    let mut order: Vec<usize> = (0..activities.len()).collect();
    order.sort_by_key(|&at| activities[at].start_ns);
    let mut places = vec![Place { process: 0, row: 0 }; activities.len()];
    let mut ends: BTreeMap<(Option<usize>, ActivityRow), Vec<i64>> = BTreeMap::new();
    for at in order {
        let activity = &activities[at];
        let process = activity.device.map_or(i64::from(base.process), |device| device as i64);
        if activity.row == ActivityRow::Kernels {
            places[at] = Place { process, row: activity.system_thread };
            continue;
        }
        let lanes = ends.entry((activity.device, activity.row)).or_default();
        let end = activity.start_ns + activity.duration_ns;
        let free = lanes.iter().position(|&ended| ended <= activity.start_ns);
        let lane = match free {
            Some(lane) => lane,
            None if lanes.len() < MOST_LANES => {
                lanes.push(0);
                lanes.len() - 1
            }
            None => MOST_LANES - 1,
        };
        lanes[lane] = end;
        let first = if activity.device.is_some() { 0 } else { HOST_ROWS };
        places[at] = Place { process, row: first + activity.row as i64 * MOST_LANES as i64 + lane as i64 };
    }
    places
}

/// The activity, and for one of a device how the host asked for it, with an arrow from there.
fn write_activity(
    text: &mut String,
    nest: &Nest<'_>,
    base: Base,
    activity: &Activity,
    place: Place,
    number: usize,
) {
    let Place { process, row } = place;
    let (start, duration) = (base.micros(activity.start_ns), duration(activity.duration_ns));
    let name = Value::from(activity.name.as_str());
    let launched_by = nest.innermost(activity.thread, activity.start_ns);
    let operator = launched_by.filter(|&at| nest.nodes[at].event.scope != EventScope::Range);
    let id = operator.or(launched_by).map_or(0, |at| nest.nodes[at].event.id);
    let category = match activity.row {
        ActivityRow::Operators if activity.device.is_none() => "cpu_op",
        ActivityRow::Operators => "Kernel",
        ActivityRow::Copies => "Memcpy",
        ActivityRow::Graphs | ActivityRow::Collectives => "Runtime",
        ActivityRow::Kernels => "voltaic_kernel",
    };
    let mut args = format!("\"External id\": {id}");
    if let Some(device) = activity.device {
        let _ = write!(args, ", \"correlation\": {number}, \"device\": {device}, \"stream\": 0");
    }
    if !activity.details.is_empty() {
        let _ = write!(args, ", {}", activity.details);
    }
    let _ = writeln!(
        text,
        "  {{\"ph\": \"X\", \"cat\": \"{category}\", \"name\": {name}, \"pid\": {process}, \"tid\": {row}, \
         \"ts\": {start}, \"dur\": {duration}, \"args\": {{{args}}}}},"
    );
    if activity.device.is_none() || matches!(activity.row, ActivityRow::Graphs | ActivityRow::Collectives) {
        return;
    }
    let launch = if activity.launch_ns == 0 { activity.start_ns } else { activity.launch_ns };
    let (host, thread) = (base.process, activity.system_thread);
    let (launched, took) = (base.micros(launch), self::duration(activity.start_ns - launch));
    let _ = writeln!(
        text,
        "  {{\"ph\": \"X\", \"cat\": \"Runtime\", \"name\": \"launch\", \"pid\": {host}, \"tid\": {thread}, \
         \"ts\": {launched}, \"dur\": {took}, \"args\": {{\"External id\": {id}, \"correlation\": {number}}}}},\n  \
         {{\"ph\": \"s\", \"id\": {number}, \"pid\": {host}, \"tid\": {thread}, \"ts\": {launched}, \"cat\": \"ac2g\", \
         \"name\": \"ac2g\"}},\n  \
         {{\"ph\": \"f\", \"id\": {number}, \"pid\": {process}, \"tid\": {row}, \"ts\": {start}, \"cat\": \"ac2g\", \
         \"name\": \"ac2g\", \"bp\": \"e\"}},"
    );
}

/// A range of a thread that libtorch's profiler does not see, as libtorch writes those that it sees.
fn write_range(text: &mut String, base: Base, range: &KinetoEvent) {
    let (process, thread) = (base.process, range.system_thread);
    let (start, duration) = (base.micros(range.start_ns), duration(range.duration_ns));
    let name = Value::from(range.name.as_str());
    let _ = writeln!(
        text,
        "  {{\"ph\": \"X\", \"cat\": \"user_annotation\", \"name\": {name}, \"pid\": {process}, \"tid\": {thread}, \
         \"ts\": {start}, \"dur\": {duration}, \"args\": {{\"External id\": 0}}}},"
    );
}

fn duration(ns: i64) -> String {
    let ns = ns.max(0);
    format!("{}.{:03}", ns / 1000, ns % 1000)
}

fn write_memory(text: &mut String, base: Base, facts: &Facts, change: &MemoryChange) {
    let ts = base.micros(change.at_ns);
    let MemoryChange { bytes, address, allocated, reserved, system_thread, device, .. } = change;
    if let Some(device) = device {
        let _ = writeln!(
            text,
            "  {{\"ph\": \"C\", \"name\": \"memory\", \"pid\": {device}, \"ts\": {ts}, \
             \"args\": {{\"in use\": {allocated}}}}},"
        );
    }
    if facts.memory_changes {
        let process = base.process;
        let (kind, index) = device.map_or((0, -1), |device| (DEVICE_TYPE, device as i64));
        let _ = writeln!(
            text,
            "  {{\"ph\": \"i\", \"cat\": \"cpu_instant_event\", \"s\": \"t\", \"name\": \"[memory]\", \"pid\": {process}, \
             \"tid\": {system_thread}, \"ts\": {ts}, \"args\": {{\"Addr\": {address}, \"Bytes\": {bytes}, \
             \"Device Type\": {kind}, \"Device Id\": {index}, \"Total Allocated\": {allocated}, \
             \"Total Reserved\": {reserved}}}}},"
        );
    }
}

fn meta(text: &mut String, process: i64, row: i64, what: &str, args: &str) {
    let _ = writeln!(
        text,
        "  {{\"ph\": \"M\", \"name\": \"{what}\", \"pid\": {process}, \"tid\": {row}, \"args\": {{{args}}}}},"
    );
}
