//! Adds up the time of operators, and writes a table of them.

use std::collections::{BTreeMap, HashMap};

use super::nest::Nest;
use crate::ffi::{Activity, ActivityRow, EventScope, KERNELS, Profile};

/// By what the rows of a table may be sorted; torch's names.
pub(in crate::profiler) const SORT_KEYS: [(&str, SortKey); 11] = [
    ("cpu_time_total", SortKey::Total),
    ("self_cpu_time_total", SortKey::Own),
    ("cpu_time", SortKey::Mean),
    ("hpu_time_total", SortKey::DeviceTotal),
    ("self_hpu_time_total", SortKey::DeviceOwn),
    ("hpu_time", SortKey::DeviceMean),
    ("cpu_memory_usage", SortKey::Memory),
    ("self_cpu_memory_usage", SortKey::MemoryOwn),
    ("hpu_memory_usage", SortKey::DeviceMemory),
    ("self_hpu_memory_usage", SortKey::DeviceMemoryOwn),
    ("count", SortKey::Calls),
];

/// By what the rows of a table are sorted, the largest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::profiler) enum SortKey {
    Total,
    Own,
    Mean,
    DeviceTotal,
    DeviceOwn,
    DeviceMean,
    Memory,
    MemoryOwn,
    DeviceMemory,
    DeviceMemoryOwn,
    Calls,
}

impl SortKey {
    /// The title of its column.
    pub fn title(self) -> &'static str {
        match self {
            Self::Total => "CPU total",
            Self::Own => "Self CPU",
            Self::Mean => "CPU time avg",
            Self::DeviceTotal => "HPU total",
            Self::DeviceOwn => "Self HPU",
            Self::DeviceMean => "HPU time avg",
            Self::Memory => "CPU Mem",
            Self::MemoryOwn => "Self CPU Mem",
            Self::DeviceMemory => "HPU Mem",
            Self::DeviceMemoryOwn => "Self HPU Mem",
            Self::Calls => "# of Calls",
        }
    }
}

/// Of the operator alone, and with what it called.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Sum {
    pub own: i64,
    /// Calls within a call of the same operator are not counted twice.
    pub total: i64,
}

/// All calls of one operator, or of one operator with inputs of one shape.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Row {
    pub name: String,
    pub shapes: String,
    /// A range around operators, such as `ProfilerStep*`, and no operator.
    pub is_range: bool,
    pub calls: u64,
    /// Nanoseconds of the host.
    pub time: Sum,
    /// Nanoseconds of the HPUs.
    pub device_time: Sum,
    /// Bytes of the host that were taken and not given back.
    pub memory: Sum,
    /// The same of the HPUs.
    pub device_memory: Sum,
    pub flops: i64,
    /// Calls of voltaic's own kernels that served the operator, by kernel.
    pub kernels: BTreeMap<String, u64>,
}

impl Row {
    fn mean(&self, total: i64) -> i64 {
        total / i64::try_from(self.calls.max(1)).unwrap_or(i64::MAX)
    }

    fn value(&self, key: SortKey) -> i64 {
        match key {
            SortKey::Total => self.time.total,
            SortKey::Own => self.time.own,
            SortKey::Mean => self.mean(self.time.total),
            SortKey::DeviceTotal => self.device_time.total,
            SortKey::DeviceOwn => self.device_time.own,
            SortKey::DeviceMean => self.mean(self.device_time.total),
            SortKey::Memory => self.memory.total,
            SortKey::MemoryOwn => self.memory.own,
            SortKey::DeviceMemory => self.device_memory.total,
            SortKey::DeviceMemoryOwn => self.device_memory.own,
            SortKey::Calls => self.calls as i64,
        }
    }
}

/// The time of operators, over all traces.
#[derive(Debug, Default)]
pub(super) struct Averages {
    by_shape: bool,
    with_memory: bool,
    rows: HashMap<(String, String), Row>,
}

impl Averages {
    /// One row for each operator, or for each operator and shape of its inputs; with columns for memory or without.
    pub fn new(by_shape: bool, with_memory: bool) -> Self {
        Self { by_shape, with_memory, rows: HashMap::new() }
    }

    /// Adds what a trace has.
    pub fn add(&mut self, profile: &Profile) {
        let nest = Nest::new(&profile.events);
        let len = nest.nodes.len();
        let mut device = vec![0; len];
        let mut own_ns = nest.own_ns();
        self.add_activities(&nest, &profile.activities, &mut device, &mut own_ns);
        let (mut memory, mut device_memory) = (vec![0; len], vec![0; len]);
        let changes = if self.with_memory { &profile.memory[..] } else { &[] };
        for change in changes {
            let own = if change.device.is_some() { &mut device_memory } else { &mut memory };
            match nest.innermost(change.thread, change.at_ns) {
                Some(at) => own[at] += change.bytes,
                // taken or given back between operators
                None => {
                    let row = self.row("[memory]", "");
                    let sum = if change.device.is_some() { &mut row.device_memory } else { &mut row.memory };
                    sum.own += change.bytes;
                    sum.total += change.bytes;
                }
            }
        }
        self.add_kernels(&nest, &profile.activities);
        let totals = [&device, &memory, &device_memory].map(|own| nest.totals(own));
        for (at, node) in nest.nodes.iter().enumerate() {
            let is_within = nest.is_within_its_like(at);
            let row = self.row(&node.event.name, &node.event.shapes);
            row.is_range = node.event.scope == EventScope::Range;
            row.calls += 1;
            row.time.own += own_ns[at];
            row.device_time.own += device[at];
            row.memory.own += memory[at];
            row.device_memory.own += device_memory[at];
            if !is_within {
                row.time.total += node.event.duration_ns;
                row.device_time.total += totals[0][at];
                row.memory.total += totals[1][at];
                row.device_memory.total += totals[2][at];
                row.flops += node.event.flops;
            }
        }
    }

    /// The device's time goes to the operators that asked for it. What no operator asked for, as in a replayed graph, has
    /// rows of its own.
    fn add_activities(
        &mut self,
        nest: &Nest<'_>,
        activities: &[Activity],
        device: &mut [i64],
        own_ns: &mut [i64],
    ) {
        for activity in activities {
            let is_work = match activity.row {
                ActivityRow::Operators => true,
                ActivityRow::Copies | ActivityRow::Collectives => activity.device.is_some(),
                ActivityRow::Graphs | ActivityRow::Kernels => false,
            };
            if !is_work {
                continue;
            }
            let launched_by = nest.innermost(activity.thread, activity.start_ns);
            let is_range = |at: &usize| nest.nodes[*at].event.scope == EventScope::Range;
            // what runs on no device is of a replay, which no operator starts, wherever libtorch's clock has them
            match launched_by.filter(|at| activity.device.is_some() && !is_range(at)) {
                Some(at) => device[at] += activity.duration_ns,
                None => {
                    let row = self.row(&activity.name, "");
                    row.calls += 1;
                    let sum = if activity.device.is_some() { &mut row.device_time } else { &mut row.time };
                    sum.own += activity.duration_ns;
                    sum.total += activity.duration_ns;
                    let range = launched_by.and_then(|at| nest.ancestors(at).find(is_range));
                    if let (Some(at), None) = (range, activity.device) {
                        own_ns[at] = (own_ns[at] - activity.duration_ns).max(0); // it has a row of its own
                    }
                    for at in launched_by.iter().flat_map(|&at| nest.ancestors(at)) {
                        if activity.device.is_some() && !nest.is_within_its_like(at) {
                            let event = nest.nodes[at].event;
                            self.row(&event.name, &event.shapes).device_time.total += activity.duration_ns;
                        }
                    }
                }
            }
        }
    }

    /// Which kernels stood in for libtorch's: below the operator that they served, one that a graph replays included.
    fn add_kernels(&mut self, nest: &Nest<'_>, activities: &[Activity]) {
        let of_row = |row| activities.iter().filter(move |activity| activity.row == row);
        let mut replayed: Vec<&Activity> = of_row(ActivityRow::Operators).collect();
        replayed.sort_by_key(|operator| (operator.thread, operator.start_ns));
        for kernel in of_row(ActivityRow::Kernels) {
            let at = (kernel.thread, kernel.start_ns);
            let begun = replayed.partition_point(|operator| (operator.thread, operator.start_ns) <= at);
            let last = begun.checked_sub(1).map(|last| replayed[last]);
            let is_around = |operator: &&Activity| {
                operator.thread == at.0 && operator.start_ns + operator.duration_ns >= at.1
            };
            let around = nest.innermost(at.0, at.1).map(|around| nest.nodes[around].event);
            let called = around.filter(|event| event.scope != EventScope::Range);
            match (last.filter(is_around), called) {
                // libtorch's clock may be some microseconds apart, the operator's here is the kernel's
                (Some(operator), called) if called.is_none_or(|event| event.name != operator.name) => {
                    self.add_kernel(&operator.name, "", &kernel.name);
                }
                (_, Some(event)) => self.add_kernel(&event.name, &event.shapes, &kernel.name),
                (_, None) => {}
            }
        }
        for node in nest.nodes.iter().filter(|node| node.event.name.starts_with(KERNELS)) {
            if let Some(served) = node.parent.map(|parent| nest.nodes[parent].event) {
                self.add_kernel(&served.name, &served.shapes, &node.event.name);
            }
        }
    }

    fn add_kernel(&mut self, operator: &str, shapes: &str, kernel: &str) {
        let kernel = kernel.strip_prefix(KERNELS).unwrap_or(kernel).to_owned();
        *self.row(operator, shapes).kernels.entry(kernel).or_default() += 1;
    }

    fn row(&mut self, name: &str, shapes: &str) -> &mut Row {
        // all steps are one row, as in torch's tables
        let name = if name.starts_with("ProfilerStep#") { "ProfilerStep*" } else { name };
        let shapes = if self.by_shape { shapes } else { "" };
        self.rows.entry((name.to_owned(), shapes.to_owned())).or_insert_with(|| Row {
            name: name.to_owned(),
            shapes: shapes.to_owned(),
            ..Row::default()
        })
    }

    /// All rows, the largest first: those of operators, then those of ranges, which last longer than all within them.
    pub fn rows(&self, key: SortKey) -> Vec<&Row> {
        let mut rows: Vec<&Row> = self.rows.values().collect();
        rows.sort_by(|a, b| {
            let larger = a.is_range.cmp(&b.is_range).then(b.value(key).cmp(&a.value(key)));
            let larger = larger.then(b.time.total.cmp(&a.time.total));
            larger.then_with(|| (&a.name, &a.shapes).cmp(&(&b.name, &b.shapes)))
        });
        rows
    }

    /// Whether HPUs did anything.
    pub fn has_device_time(&self) -> bool {
        self.rows.values().any(|row| row.device_time.own > 0)
    }

    /// The titles of the columns, and the cells of at most so many operators and as many ranges.
    pub fn cells(&self, key: SortKey, row_limit: Option<usize>) -> Vec<Vec<String>> {
        let rows = self.rows(key);
        let sum = |value: fn(&Row) -> i64| rows.iter().map(|row| value(row)).sum::<i64>();
        let (all, all_device) = (sum(|row| row.time.own), sum(|row| row.device_time.own));
        let has_flops = rows.iter().any(|row| row.flops > 0);
        let has_device_memory = rows.iter().any(|row| row.device_memory != Sum::default());
        type Column = (&'static str, Box<dyn Fn(&Row) -> String>);
        let column = |title, cell: fn(&Row) -> String| -> Column { (title, Box::new(cell)) };
        let mut columns: Vec<Column> = vec![
            column("Name", |row| shortened(&row.name)),
            ("Self CPU %", Box::new(move |row| share(row.time.own, all))),
            column(SortKey::Own.title(), |row| time(row.time.own)),
            ("CPU total %", Box::new(move |row| share(row.time.total, all))),
            column(SortKey::Total.title(), |row| time(row.time.total)),
            column(SortKey::Mean.title(), |row| time(row.mean(row.time.total))),
        ];
        if all_device > 0 {
            columns.push(column(SortKey::DeviceOwn.title(), |row| time(row.device_time.own)));
            columns.push(("Self HPU %", Box::new(move |row| share(row.device_time.own, all_device))));
            columns.push(column(SortKey::DeviceTotal.title(), |row| time(row.device_time.total)));
            columns.push(column(SortKey::DeviceMean.title(), |row| time(row.mean(row.device_time.total))));
        }
        if self.with_memory {
            columns.push(column(SortKey::Memory.title(), |row| bytes(row.memory.total)));
            columns.push(column(SortKey::MemoryOwn.title(), |row| bytes(row.memory.own)));
        }
        if has_device_memory {
            columns.push(column(SortKey::DeviceMemory.title(), |row| bytes(row.device_memory.total)));
            columns.push(column(SortKey::DeviceMemoryOwn.title(), |row| bytes(row.device_memory.own)));
        }
        columns.push(column(SortKey::Calls.title(), |row| row.calls.to_string()));
        if has_flops {
            columns.push(column("Total MFLOPs", |row| match row.flops {
                0 => "--".to_owned(),
                flops => format!("{:.3}", flops as f64 / 1e6),
            }));
        }
        if rows.iter().any(|row| !row.kernels.is_empty()) {
            columns.push(column("Kernels", |row| {
                let kernels = row.kernels.iter().map(|(kernel, calls)| format!("{kernel} x {calls}"));
                kernels.collect::<Vec<_>>().join(", ")
            }));
        }
        if self.by_shape {
            columns.push(column("Input Shapes", |row| row.shapes.clone()));
        }
        let mut cells = vec![columns.iter().map(|(title, _)| (*title).to_owned()).collect()];
        for row in shown(&rows, row_limit) {
            cells.push(columns.iter().map(|(_, cell)| cell(row)).collect());
        }
        cells
    }

    /// A table of at most so many operators, with as many ranges below.
    pub fn table(&self, key: SortKey, row_limit: Option<usize>) -> String {
        let rows = self.rows(key);
        let all: i64 = rows.iter().map(|row| row.time.own).sum();
        let all_device: i64 = rows.iter().map(|row| row.device_time.own).sum();
        let num_operators = shown(&rows, row_limit).filter(|row| !row.is_range).count();
        let mut text = aligned(&self.cells(key, row_limit), 1 + num_operators);
        text += &format!("Self CPU time total: {}\n", time(all));
        if all_device > 0 {
            text += &format!("Self HPU time total: {}\n", time(all_device));
        }
        text
    }
}

/// At most so many of the rows of operators, and of those of ranges.
fn shown<'a>(rows: &'a [&'a Row], row_limit: Option<usize>) -> impl Iterator<Item = &'a Row> {
    let of = move |ranges| rows.iter().copied().filter(move |row| row.is_range == ranges);
    let limit = row_limit.unwrap_or(usize::MAX);
    of(false).take(limit).chain(of(true).take(limit))
}

fn share(part: i64, all: i64) -> String {
    format!("{:.2}%", 100.0 * part as f64 / all.max(1) as f64)
}

/// Columns of equal width, with rules around the header, before line `second`, and at the end.
fn aligned(cells: &[Vec<String>], second: usize) -> String {
    let columns = cells.first().map_or(0, Vec::len);
    let width = |column: usize| cells.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let rule = widths.iter().map(|&width| "-".repeat(width)).collect::<Vec<_>>().join("  ") + "\n";
    let mut text = rule.clone();
    for (index, line) in cells.iter().enumerate() {
        let padded = line.iter().zip(&widths).map(|(cell, &width)| format!("{cell:>width$}"));
        text.push_str(padded.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
        if index == 0 || (index + 1 == second && second < cells.len()) {
            text.push_str(&rule);
        }
    }
    text + &rule
}

/// At most 55 characters, as torch's tables have.
fn shortened(name: &str) -> String {
    const LONGEST: usize = 55;
    match name.chars().count() > LONGEST {
        true => name.chars().take(LONGEST - 3).collect::<String>() + "...",
        false => name.to_owned(),
    }
}

fn time(nanoseconds: i64) -> String {
    let microseconds = nanoseconds as f64 / 1e3;
    match microseconds {
        us if us >= 1e6 => format!("{:.3}s", us / 1e6),
        us if us >= 1e3 => format!("{:.3}ms", us / 1e3),
        us => format!("{us:.3}us"),
    }
}

/// As torch's tables write it: `4 B`, `1.50 KB`, `-2.00 MB`.
fn bytes(bytes: i64) -> String {
    let number = bytes as f64;
    match number.abs() {
        size if size >= 1024.0 * 1024.0 * 1024.0 => format!("{:.2} GB", number / (1024.0 * 1024.0 * 1024.0)),
        size if size >= 1024.0 * 1024.0 => format!("{:.2} MB", number / (1024.0 * 1024.0)),
        size if size >= 1024.0 => format!("{:.2} KB", number / 1024.0),
        _ => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::MemoryChange;
    use crate::profiler::trace::nest::event;

    fn profile(events: Vec<crate::ffi::KinetoEvent>) -> Profile {
        Profile { events, ..Profile::default() }
    }

    fn activity(name: &str, start_ns: i64, duration_ns: i64) -> Activity {
        Activity {
            name: name.to_owned(),
            details: String::new(),
            launch_ns: 0,
            start_ns,
            duration_ns,
            row: ActivityRow::Operators,
            device: Some(0),
            thread: 1,
            system_thread: 1,
        }
    }

    #[test]
    fn own_time_is_without_what_is_called_within() {
        let mut averages = Averages::new(false, false);
        averages.add(&profile(vec![
            event("linear", 0, 100, 1),
            event("addmm", 10, 50, 1),
            event("copy", 10, 20, 1),   // begins with addmm, and ends before
            event("linear", 70, 10, 1), // within a call of its own
            event("linear", 0, 40, 2),  // of another thread: within nothing
            event("copy", 100, 5, 1),   // begins when linear ends
        ]));
        let rows = averages.rows(SortKey::Own);
        let seen: Vec<_> =
            rows.iter().map(|row| (row.name.as_str(), row.calls, row.time.total, row.time.own)).collect();
        assert_eq!(seen, [("linear", 3, 140, 90), ("addmm", 1, 50, 30), ("copy", 2, 25, 25)]);
        assert_eq!(rows[0].flops, 20);
    }

    #[test]
    fn operators_have_the_kernels_that_stood_in_for_libtorchs() {
        let kernel = |name: &str, start_ns| Activity {
            row: ActivityRow::Kernels,
            device: None,
            ..activity(name, start_ns, 5)
        };
        let mut averages = Averages::new(false, false);
        averages.add(&Profile {
            activities: vec![
                kernel("voltaic::product (Gemm)", 12),
                kernel("voltaic::product (Strips)", 72),
                Activity { device: None, duration_ns: 20, ..activity("mm", 490, 20) }, // of a graph
                kernel("voltaic::product (Mkl)", 500),
                kernel("voltaic::gelu", 600), // of no operator
            ],
            ..profile(vec![
                event("linear", 0, 100, 1),
                event("addmm", 10, 50, 1),
                event("addmm", 70, 10, 1),
                event("addmm", 85, 10, 1), // by libtorch
                event("backward", 200, 50, 1),
                event("voltaic::taps", 210, 20, 1),
            ])
        });
        let cells = averages.cells(SortKey::Own, None);
        let at = cells[0].iter().position(|title| title == "Kernels").unwrap();
        let seen: Vec<_> = cells[1..].iter().map(|row| (row[0].as_str(), row[at].as_str())).collect();
        assert_eq!(
            seen,
            [
                ("addmm", "product (Gemm) x 1, product (Strips) x 1"),
                ("linear", ""),
                ("backward", "taps x 1"),
                ("mm", "product (Mkl) x 1"),
                ("voltaic::taps", ""),
            ]
        );
    }

    #[test]
    fn rows_are_sorted_and_limited() {
        let mut averages = Averages::new(true, false);
        averages.add(&profile(vec![
            event("b", 0, 1_500, 1),
            event("a", 2_000, 2_500_000, 1),
            event("b", 3_000_000, 500, 1),
        ]));
        let table = averages.table(SortKey::Calls, Some(1));
        let lines: Vec<&str> = table.lines().collect();
        assert!(lines[1].ends_with("Total MFLOPs  Input Shapes"), "{table}");
        assert_eq!(
            lines[3].split_whitespace().collect::<Vec<_>>()[..3],
            ["b", "0.08%", "2.000us"],
            "{table}"
        );
        assert_eq!(lines.len(), 6, "{table}");
        assert_eq!(lines[5], "Self CPU time total: 2.502ms");
        assert_eq!(averages.rows(SortKey::Mean)[0].name, "a");
    }

    #[test]
    fn ranges_are_listed_below_the_operators_within_them() {
        let range = |name: &str, start, duration| crate::ffi::KinetoEvent {
            scope: EventScope::Range,
            ..event(name, start, duration, 1)
        };
        let mut averages = Averages::new(false, false);
        averages.add(&profile(vec![
            range("ProfilerStep#1", 0, 900),
            range("[pl][profile]run_training_batch", 10, 800),
            event("linear", 20, 300, 1),
            event("addmm", 30, 200, 1),
            event("copy", 400, 5, 1),
        ]));
        let names = |limit| {
            let cells = averages.cells(SortKey::Total, limit);
            cells[1..].iter().map(|row| row[0].clone()).collect::<Vec<_>>().join(" ")
        };
        let ranges = "ProfilerStep* [pl][profile]run_training_batch";
        assert_eq!(names(None), format!("linear addmm copy {ranges}"));
        assert_eq!(names(Some(1)), "linear ProfilerStep*");
        let table = averages.table(SortKey::Total, None);
        let lines: Vec<&str> = table.lines().collect();
        assert!(lines[6].starts_with("--") && lines[7].contains("ProfilerStep*"), "{table}");
    }

    #[test]
    fn time_and_memory_of_the_device_go_to_the_operator_that_asked_for_it() {
        let mut averages = Averages::new(false, true);
        let change = |at_ns, bytes, device| MemoryChange {
            at_ns,
            device,
            bytes,
            address: 1,
            allocated: 0,
            reserved: 0,
            thread: 1,
            system_thread: 1,
        };
        let mut replay = event("replay", 200, 50, 1);
        replay.scope = EventScope::Range;
        averages.add(&Profile {
            events: vec![event("linear", 0, 100, 1), event("addmm", 10, 50, 1), replay],
            activities: vec![activity("addmm", 20, 30), activity("add", 70, 5), activity("mul", 210, 10)],
            memory: vec![change(15, 4096, Some(0)), change(80, -96, Some(0)), change(150, 8, None)],
            left_out: 0,
        });
        let found = |name: &str| {
            let rows = averages.rows(SortKey::DeviceTotal);
            let row = rows.into_iter().find(|row| row.name == name).unwrap();
            (row.device_time, row.device_memory, row.memory)
        };
        let sum = |own, total| Sum { own, total };
        assert_eq!(found("linear"), (sum(5, 35), sum(-96, 4000), sum(0, 0)));
        assert_eq!(found("addmm"), (sum(30, 30), sum(4096, 4096), sum(0, 0)));
        assert_eq!((found("mul").0, found("replay").0), (sum(10, 10), sum(0, 10)));
        assert_eq!(found("[memory]"), (sum(0, 0), sum(0, 0), sum(8, 8)));
        let table = averages.table(SortKey::DeviceTotal, None);
        assert!(table.contains("Self HPU Mem") && table.contains("3.91 KB"), "{table}");
        assert!(table.ends_with("Self HPU time total: 0.045us\n"), "{table}");
    }
}
