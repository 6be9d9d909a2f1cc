//! Adds up the time of operators, and writes a table of them.

use std::collections::HashMap;

use crate::ffi::{EventScope, KinetoEvent};

/// By what the rows of a table may be sorted; torch's names.
pub(in crate::profiler) const SORT_KEYS: [(&str, SortKey); 4] = [
    ("cpu_time_total", SortKey::Total),
    ("self_cpu_time_total", SortKey::Own),
    ("cpu_time", SortKey::Mean),
    ("count", SortKey::Calls),
];

/// By what the rows of a table are sorted, the largest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::profiler) enum SortKey {
    Total,
    Own,
    Mean,
    Calls,
}

/// All calls of one operator, or of one operator with inputs of one shape.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Row {
    pub name: String,
    pub shapes: String,
    pub calls: u64,
    /// Nanoseconds; calls within a call of the same operator are not counted twice.
    pub total_ns: i64,
    /// Nanoseconds without what was called within.
    pub own_ns: i64,
    pub flops: i64,
}

/// The time of operators, over all traces.
#[derive(Debug, Default)]
pub(super) struct Averages {
    by_shape: bool,
    rows: HashMap<(String, String), Row>,
}

/// An event that has not ended where the walk stands.
struct Open {
    index: usize,
    end_ns: i64,
    within_ns: i64,
}

impl Averages {
    /// One row for each operator, or for each operator and shape of its inputs.
    pub fn new(by_shape: bool) -> Self {
        Self { by_shape, rows: HashMap::new() }
    }

    /// Adds the events of a trace.
    pub fn add(&mut self, events: &[KinetoEvent]) {
        let mut threads: HashMap<u64, Vec<usize>> = HashMap::new();
        for (index, event) in events.iter().enumerate() {
            if event.scope != EventScope::Other && event.device_type == 0 {
                threads.entry(event.thread).or_default().push(index);
            }
        }
        for mut indices in threads.into_values() {
            // what began earlier, or at the same time and ended later, is around what follows
            indices.sort_by_key(|&index| {
                (events[index].start_ns, std::cmp::Reverse(events[index].duration_ns), index)
            });
            self.add_thread(events, &indices);
        }
    }

    fn add_thread(&mut self, events: &[KinetoEvent], indices: &[usize]) {
        let mut open: Vec<Open> = Vec::new();
        for &index in indices {
            let event = &events[index];
            while let Some(last) = open.pop_if(|last| last.end_ns <= event.start_ns) {
                self.close(events, last, &open);
            }
            if let Some(outer) = open.last_mut() {
                outer.within_ns += event.duration_ns;
            }
            open.push(Open { index, end_ns: event.start_ns + event.duration_ns, within_ns: 0 });
        }
        while let Some(last) = open.pop() {
            self.close(events, last, &open);
        }
    }

    fn close(&mut self, events: &[KinetoEvent], closed: Open, around: &[Open]) {
        let event = &events[closed.index];
        let is_nested = around.iter().any(|outer| events[outer.index].name == event.name);
        let shapes = if self.by_shape { event.shapes.clone() } else { String::new() };
        let row = self.rows.entry((event.name.clone(), shapes)).or_insert_with(|| Row {
            name: event.name.clone(),
            shapes: if self.by_shape { event.shapes.clone() } else { String::new() },
            ..Row::default()
        });
        row.calls += 1;
        row.own_ns += (event.duration_ns - closed.within_ns).max(0);
        if !is_nested {
            row.total_ns += event.duration_ns;
            row.flops += event.flops;
        }
    }

    /// All rows, the largest first.
    pub fn rows(&self, key: SortKey) -> Vec<&Row> {
        let mut rows: Vec<&Row> = self.rows.values().collect();
        rows.sort_by(|a, b| {
            let value = |row: &Row| match key {
                SortKey::Total => row.total_ns,
                SortKey::Own => row.own_ns,
                SortKey::Mean => row.total_ns / row.calls.max(1) as i64,
                SortKey::Calls => row.calls as i64,
            };
            value(b).cmp(&value(a)).then_with(|| (&a.name, &a.shapes).cmp(&(&b.name, &b.shapes)))
        });
        rows
    }

    /// A table of at most so many rows.
    pub fn table(&self, key: SortKey, row_limit: Option<usize>) -> String {
        let rows = self.rows(key);
        let all: i64 = rows.iter().map(|row| row.own_ns).sum();
        let share = |part: i64| format!("{:.2}%", 100.0 * part as f64 / all.max(1) as f64);
        let has_flops = rows.iter().any(|row| row.flops > 0);
        let mut cells: Vec<Vec<String>> = Vec::new();
        let titles =
            ["Name", "Self CPU %", "Self CPU", "CPU total %", "CPU total", "CPU time avg", "# of Calls"];
        let mut header: Vec<String> = titles.map(str::to_owned).to_vec();
        header.extend(has_flops.then(|| "Total MFLOPs".to_owned()));
        header.extend(self.by_shape.then(|| "Input Shapes".to_owned()));
        cells.push(header);
        for row in rows.iter().take(row_limit.unwrap_or(usize::MAX)) {
            let mean = row.total_ns / row.calls.max(1) as i64;
            let mut line = vec![
                shortened(&row.name),
                share(row.own_ns),
                time(row.own_ns),
                share(row.total_ns),
                time(row.total_ns),
                time(mean),
                row.calls.to_string(),
            ];
            let flops = (row.flops > 0).then(|| format!("{:.3}", row.flops as f64 / 1e6));
            line.extend(has_flops.then(|| flops.unwrap_or_else(|| "--".to_owned())));
            line.extend(self.by_shape.then(|| row.shapes.clone()));
            cells.push(line);
        }
        format!("{}Self CPU time total: {}\n", aligned(&cells), time(all))
    }
}

/// Columns of equal width, with rules around the header and at the end.
fn aligned(cells: &[Vec<String>]) -> String {
    let columns = cells.first().map_or(0, Vec::len);
    let width = |column: usize| cells.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let rule = widths.iter().map(|&width| "-".repeat(width)).collect::<Vec<_>>().join("  ") + "\n";
    let mut text = rule.clone();
    for (index, line) in cells.iter().enumerate() {
        let padded = line.iter().zip(&widths).map(|(cell, &width)| format!("{cell:>width$}"));
        text.push_str(padded.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
        if index == 0 {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn event(name: &str, start_ns: i64, duration_ns: i64, thread: u64) -> KinetoEvent {
        KinetoEvent {
            name: name.to_owned(),
            shapes: "[[2]]".to_owned(),
            start_ns,
            duration_ns,
            thread,
            flops: 10,
            bytes: 0,
            scope: EventScope::Operator,
            device_type: 0,
        }
    }

    #[test]
    fn own_time_is_without_what_is_called_within() {
        let mut averages = Averages::new(false);
        averages.add(&[
            event("linear", 0, 100, 1),
            event("addmm", 10, 50, 1),
            event("copy", 10, 20, 1),   // begins with addmm, and ends before
            event("linear", 70, 10, 1), // within a call of its own
            event("linear", 0, 40, 2),  // of another thread: within nothing
            event("copy", 100, 5, 1),   // begins when linear ends
        ]);
        let rows = averages.rows(SortKey::Own);
        let seen: Vec<_> =
            rows.iter().map(|row| (row.name.as_str(), row.calls, row.total_ns, row.own_ns)).collect();
        assert_eq!(seen, [("linear", 3, 140, 90), ("addmm", 1, 50, 30), ("copy", 2, 25, 25)]);
        assert_eq!(rows[0].flops, 20);
    }

    #[test]
    fn rows_are_sorted_and_limited() {
        let mut averages = Averages::new(true);
        averages.add(&[
            event("b", 0, 1_500, 1),
            event("a", 2_000, 2_500_000, 1),
            event("b", 3_000_000, 500, 1),
        ]);
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
}
