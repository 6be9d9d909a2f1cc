//! A profile as one HTML file: timeline, flame graph, memory over time, and the table. Drawn by Apache ECharts, which is in it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use serde_json::{Value, json};

use super::flame::{Metric, stacks};
use super::lanes::{Base, place, row_name};
use super::nest::{Nest, Node};
use crate::ffi::{Activity, ActivityRow, EventScope, KERNELS, MemoryChange, Profile};

const PAGE: &str = include_str!("../../../assets/profile/page.html");
const ECHARTS: &str = include_str!("../../../assets/echarts/echarts.min.js");
/// Boxes that a browser draws in a moment; the shortest are left out.
const MOST_SLICES: usize = 20_000;
const MOST_FLAMES: usize = 4_000;
/// Points of a line of memory.
const MOST_POINTS: usize = 5_000;

/// What a box is; the page has a color for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Range,
    Backward,
    Operator,
    Kernel,
    Device,
    Copy,
    Graph,
    Collective,
}

/// Names, each once.
#[derive(Default)]
struct Names<'a> {
    all: Vec<&'a str>,
    known: HashMap<&'a str, usize>,
}

impl<'a> Names<'a> {
    fn number(&mut self, name: &'a str) -> usize {
        *self.known.entry(name).or_insert_with(|| {
            self.all.push(name);
            self.all.len() - 1
        })
    }
}

/// A box of the timeline, in a row of a lane.
struct Slice<'a> {
    lane: usize,
    depth: usize,
    start_ns: i64,
    duration_ns: i64,
    kind: Kind,
    name: &'a str,
}

fn kind_of(node: &Node<'_>) -> Kind {
    match node.event.scope {
        _ if node.event.name.starts_with(KERNELS) => Kind::Kernel,
        EventScope::Range => Kind::Range,
        EventScope::Backward => Kind::Backward,
        EventScope::Operator | EventScope::Other => Kind::Operator,
    }
}

/// The page of one trace. `table` is titles and rows, sorted by the column of the title `sorted`.
pub(super) fn page(
    title: &str,
    about: &str,
    profile: &Profile,
    table: &[Vec<String>],
    sorted: &str,
) -> String {
    let nest = Nest::new(&profile.events);
    let starts = nest.nodes.iter().map(|node| node.event.start_ns);
    let starts = starts.chain(profile.activities.iter().map(|activity| activity.start_ns));
    let zero = starts.min().unwrap_or_default();
    let mut names = Names::default();
    let (lanes, mut slices) = slices(&nest, &profile.activities);
    slices.sort_by_key(|slice| Reverse(slice.duration_ns));
    let left_out = slices.len().saturating_sub(MOST_SLICES);
    slices.truncate(MOST_SLICES);
    let (rows, first_rows) = rows(&lanes, &slices);
    let micros = |ns: i64| ns as f64 / 1e3;
    let end = slices.iter().map(|slice| slice.start_ns + slice.duration_ns - zero).max().unwrap_or(1);
    let slices: Vec<Value> = slices
        .iter()
        .map(|slice| {
            let start = slice.start_ns - zero;
            let (row, name) = (first_rows[slice.lane] + slice.depth, names.number(slice.name));
            json!([row, micros(start), micros(start + slice.duration_ns), slice.kind as u8, name])
        })
        .collect();
    let flame = flame(profile, &nest, &mut names);
    let about = match left_out {
        0 => about.to_owned(),
        _ => format!("{about}; the {left_out} shortest boxes of the timeline are left out"),
    };
    let data = json!({
        "about": about,
        "rows": rows,
        "slices": slices,
        "end": micros(end),
        "flame": flame,
        "memory": memory(&profile.memory, zero),
        "table": table,
        "sorted": sorted,
        "names": names.all,
    });
    // nothing in a name may end the script
    let data = data.to_string().replace('<', "\\u003c");
    let title = title.replace('&', "&amp;").replace('<', "&lt;");
    PAGE.replace("{title}", &title).replacen("{echarts}", ECHARTS, 1).replacen("{profile}", &data, 1)
}

/// Lanes by name, and the boxes in them.
fn slices<'a>(nest: &Nest<'a>, activities: &'a [Activity]) -> (Vec<String>, Vec<Slice<'a>>) {
    let (mut lanes, mut slices) = (Vec::new(), Vec::new());
    let mut threads: BTreeMap<u64, usize> = BTreeMap::new();
    let mut depths: Vec<usize> = Vec::with_capacity(nest.nodes.len());
    for node in &nest.nodes {
        let depth = node.parent.map_or(0, |parent| depths[parent] + 1);
        depths.push(depth);
        let lane = *threads.entry(node.event.thread).or_insert_with(|| {
            lanes.push(format!("thread {}", node.event.thread));
            lanes.len() - 1
        });
        slices.push(Slice {
            lane,
            depth,
            start_ns: node.event.start_ns,
            duration_ns: node.event.duration_ns,
            kind: kind_of(node),
            name: &node.event.name,
        });
    }
    let mut own_lanes = BTreeMap::new();
    let places = place(activities, Base { base_ns: 0, process: u32::MAX });
    for (activity, place) in activities.iter().zip(places) {
        let (lane, depth) = match activity.row {
            ActivityRow::Kernels => {
                let around = nest.innermost(activity.thread, activity.start_ns);
                let Some((at, lane)) = around.zip(threads.get(&activity.thread)) else { continue };
                (*lane, depths[at] + 1)
            }
            _ => (
                *own_lanes.entry(place).or_insert_with(|| {
                    let device = activity.device.map(|device| format!("hpu:{device} ")).unwrap_or_default();
                    lanes.push(format!("{device}{}", row_name(activity)));
                    lanes.len() - 1
                }),
                0,
            ),
        };
        let kind = match activity.row {
            ActivityRow::Operators => Kind::Device,
            ActivityRow::Copies => Kind::Copy,
            ActivityRow::Graphs => Kind::Graph,
            ActivityRow::Collectives => Kind::Collective,
            ActivityRow::Kernels => Kind::Kernel,
        };
        let (start_ns, duration_ns) = (activity.start_ns, activity.duration_ns);
        slices.push(Slice { lane, depth, start_ns, duration_ns, kind, name: &activity.name });
    }
    (lanes, slices)
}

/// The labels of all rows, of which each lane has as many as it is deep, and the first row of each lane.
fn rows(lanes: &[String], slices: &[Slice<'_>]) -> (Vec<String>, Vec<usize>) {
    let mut depths = vec![1; lanes.len()];
    for slice in slices {
        depths[slice.lane] = depths[slice.lane].max(slice.depth + 1);
    }
    let (mut labels, mut first) = (Vec::new(), Vec::new());
    for (lane, depth) in lanes.iter().zip(depths) {
        first.push(labels.len());
        labels.push(lane.clone());
        labels.extend(std::iter::repeat_n(String::new(), depth - 1));
    }
    (labels, first)
}

/// A name within others.
#[derive(Default)]
struct Flame<'a> {
    own_ns: i64,
    within: BTreeMap<&'a str, Flame<'a>>,
}

impl Flame<'_> {
    fn total_ns(&self) -> i64 {
        self.own_ns + self.within.values().map(Flame::total_ns).sum::<i64>()
    }
}

/// Boxes of the flame graph: depth, start, end, kind, name, own time; in microseconds.
fn flame<'a>(profile: &'a Profile, nest: &Nest<'a>, names: &mut Names<'a>) -> Vec<Value> {
    let mut root = Flame::default();
    for (stack, own_ns) in stacks(profile, Metric::Host) {
        let mut at = &mut root;
        for name in stack {
            at = at.within.entry(name).or_default();
        }
        at.own_ns += own_ns;
    }
    let kinds = nest.nodes.iter().map(|node| (node.event.name.as_str(), kind_of(node)));
    let kernels = profile.activities.iter().filter(|activity| activity.row == ActivityRow::Kernels);
    let kinds: HashMap<&str, Kind> =
        kinds.chain(kernels.map(|kernel| (kernel.name.as_str(), Kind::Kernel))).collect();
    let micros = |ns: i64| ns as f64 / 1e3;
    let mut boxes: Vec<(i64, Value)> = Vec::new();
    let mut open: Vec<(usize, i64, &str, &Flame<'_>)> = Vec::new();
    let mut start = 0;
    for (&name, within) in &root.within {
        open.push((0, start, name, within));
        start += within.total_ns();
    }
    while let Some((depth, start, name, flame)) = open.pop() {
        let total = flame.total_ns();
        let kind = kinds.get(name).copied().unwrap_or(Kind::Operator) as u8;
        let number = names.number(name);
        boxes.push((
            total,
            json!([depth, micros(start), micros(start + total), kind, number, micros(flame.own_ns)]),
        ));
        let mut start = start;
        for (&name, within) in &flame.within {
            open.push((depth + 1, start, name, within));
            start += within.total_ns();
        }
    }
    boxes.sort_by_key(|(total, _)| Reverse(*total));
    boxes.truncate(MOST_FLAMES);
    boxes.into_iter().map(|(_, flame)| flame).collect()
}

/// How much is in use over time, by pool. Of many points the highest of each stretch is kept.
fn memory(changes: &[MemoryChange], zero: i64) -> Vec<Value> {
    let mut lines: BTreeMap<Option<usize>, Vec<(i64, u64)>> = BTreeMap::new();
    for change in changes {
        lines.entry(change.device).or_default().push((change.at_ns - zero, change.allocated));
    }
    let line = |(device, mut points): (Option<usize>, Vec<(i64, u64)>)| {
        points.sort_unstable();
        let most = points.iter().map(|&(_, bytes)| bytes).max().unwrap_or_default();
        let stretch = points.len().div_ceil(MOST_POINTS).max(1);
        let highest = points.chunks(stretch).filter_map(|part| part.iter().max_by_key(|(_, bytes)| *bytes));
        let points: Vec<Value> = highest.map(|&(at, bytes)| json!([at as f64 / 1e3, bytes])).collect();
        let name = device.map_or("host".to_owned(), |device| format!("hpu:{device}"));
        json!({"name": name, "most": most, "points": points})
    };
    lines.into_iter().map(line).collect()
}
