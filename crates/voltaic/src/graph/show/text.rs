//! The text of a shown graph, 120 columns wide.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::shown_graph::{GraphTotals, ShownGraph, bytes, traffic};
use crate::graph::ir::Operand;

/// Results that a summary shows.
const NUM_LARGEST: usize = 10;
/// Columns of the whole, of a name of an operator, of a result, and of what is beside them.
const WIDTH: usize = 120;
const OP: usize = 30;
const RESULT: usize = 22;

impl ShownGraph {
    /// Totals before and after the passes, chains, why others are none, and the largest results; with `all` every operator, too.
    pub fn text(&self, all: bool) -> String {
        let mut text = format!("{}\n\n{}", self.label(), self.totals());
        text.push_str(&self.chain_lines());
        text.push_str(&self.recomputed_lines());
        text.push_str(&self.frozen_line());
        text.push_str(&self.why_lines());
        if all {
            text.push_str("\noperators\n");
            self.write_operators(&mut text, 0..self.graph.nodes.len());
        } else {
            let mut largest: Vec<usize> =
                (0..self.graph.nodes.len()).filter(|&node| self.program.runs[node]).collect();
            largest.sort_by_key(|&node| (std::cmp::Reverse(self.result_bytes(node)), node));
            largest.truncate(NUM_LARGEST);
            text.push_str("\nlargest results (--all shows every operator)\n");
            self.write_operators(&mut text, largest);
        }
        text
    }

    fn totals(&self) -> String {
        let (before, after) = (self.recorded(), self.compiled());
        let mut text = format!("{:<28}{:>12}{:>12}\n", "", "recorded", "compiled");
        let mut row = |what: &str, of: &dyn Fn(GraphTotals) -> String, note: String| {
            let line = format!("{what:<28}{:>12}{:>12}{note}", of(before), of(after));
            _ = writeln!(text, "{}", line.trim_end());
        };
        let all = self.graph.nodes.len();
        row("operators that run", &|of| of.num_calls.to_string(), format!("  of {all}"));
        row("bytes read", &|of| human(of.read_bytes), String::new());
        row("bytes written", &|of| human(of.written_bytes), String::new());
        row("memory planned", &|of| human(of.planned_bytes), String::new());
        row("most in use at once", &|of| human(of.peak_bytes), String::new());
        row("at operator", &|of| of.peak_at.to_string(), String::new());
        let kept = human(self.plan_stats().kept_bytes);
        _ = writeln!(text, "{:<28}{kept:>12}{kept:>12}", "kept for what follows");
        text
    }

    /// Chains of the same operators, sizes and ends are one line.
    fn chain_lines(&self) -> String {
        let mut kinds: BTreeMap<(usize, String, String), (usize, usize)> = BTreeMap::new();
        for chain in &self.program.chains {
            let names: Vec<&str> = chain.members.iter().map(|&node| self.graph.nodes[node].name()).collect();
            let node = chain.planned.node;
            let result = self.result(node);
            let kind = kinds.entry((chain.members.len(), result, names.join(" "))).or_insert((0, node));
            *kind = (kind.0 + 1, kind.1.min(node));
        }
        if kinds.is_empty() {
            return "\nno chains\n".to_owned();
        }
        let mut kinds: Vec<_> = kinds.into_iter().collect();
        kinds.sort_by_key(|(_, (times, first))| (std::cmp::Reverse(*times), *first));
        let stats = self.plan_stats();
        let mut text = format!(
            "\nchains: {} of {} operators; {} results lie in the memory of operands; {} equal results are computed once\n",
            self.program.chains.len(),
            self.program.chains.iter().map(|chain| chain.members.len()).sum::<usize>(),
            stats.num_in_place,
            stats.num_merged
        );
        let head = ["times", "last", "result", "operators", "ends there"];
        _ = writeln!(text, "{:>5} {:>5}  {:<RESULT$} {:<42} {}", head[0], head[1], head[2], head[3], head[4]);
        for ((_, result, names), (times, node)) in kinds {
            let line = format!(
                "{times:>5} {node:>5}  {:<RESULT$} {:<42} {}",
                cut(&result, RESULT),
                cut(&names, 42),
                self.why(node).unwrap_or_default()
            );
            _ = writeln!(text, "{}", cut(line.trim_end(), WIDTH));
        }
        text
    }

    /// What is computed again in backward, lines of the same operators together.
    fn recomputed_lines(&self) -> String {
        let recomputed = &self.program.recomputed;
        if recomputed.is_empty() {
            return String::new();
        }
        let mut kinds: BTreeMap<(&str, String), (usize, usize, usize)> = BTreeMap::new();
        let mut total = 0;
        for again in recomputed {
            let (_, writes) = self.program.recomputes(again);
            total += writes.iter().map(|&value| bytes(&self.graph.values[value])).sum::<u64>();
            let result = writes.first().map_or_else(String::new, |&value| self.graph.describe(value));
            let kind = kinds.entry((self.graph.nodes[again.node].name(), result)).or_insert((
                0,
                again.node,
                again.before,
            ));
            kind.0 += 1;
        }
        let mut kinds: Vec<_> = kinds.into_iter().collect();
        kinds.sort_by_key(|(_, (times, first, _))| (std::cmp::Reverse(*times), *first));
        let mut text = format!(
            "\nrecomputed: {} results, {}, are computed again in backward, and their memory is free until then\n",
            recomputed.len(),
            human(total)
        );
        let head = ["times", "first", "result", "operator", "again before"];
        _ = writeln!(text, "{:>5} {:>5}  {:<RESULT$} {:<42} {}", head[0], head[1], head[2], head[3], head[4]);
        for ((name, result), (times, node, before)) in kinds {
            let next = &self.graph.nodes[before].op;
            let line =
                format!("{times:>5} {node:>5}  {:<RESULT$} {name:<42} {before} {next}", cut(&result, RESULT));
            _ = writeln!(text, "{}", cut(&line, WIDTH));
        }
        text
    }

    /// How many results are kept from replay to replay, and why no more are.
    fn frozen_line(&self) -> String {
        match self.plan_stats().num_frozen {
            0 => "\nconstant: no operator; a step that trains its weights does not freeze them\n".to_owned(),
            number => format!(
                "\nconstant: {number} operators run in the first replay only; a step that trains its weights does not freeze them\n"
            ),
        }
    }

    /// Why operators run by themselves, with how many of each name.
    fn why_lines(&self) -> String {
        let reasons: Vec<(usize, String)> = (0..self.graph.nodes.len())
            .filter(|&node| !self.program.chains.iter().any(|chain| chain.planned.node == node))
            .filter_map(|node| Some((node, self.why(node)?)))
            .collect();
        let mut whys: BTreeMap<String, BTreeMap<&str, usize>> = BTreeMap::new();
        for (node, why) in &reasons {
            // without the operator that is in the way
            let why = why
                .rsplit_once(" aten::")
                .map_or_else(|| why.clone(), |(what, _)| format!("{what} another operator"));
            *whys.entry(why).or_default().entry(self.graph.nodes[*node].op.as_str()).or_default() += 1;
        }
        let mut whys: Vec<_> =
            whys.into_iter().map(|(why, ops)| (ops.values().sum::<usize>(), why, ops)).collect();
        whys.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
        let mut text = format!("\nin no chain: {}\n", reasons.len());
        for (number, why, ops) in whys {
            _ = writeln!(text, "{number:>5}  {why}");
            let mut ops: Vec<(&str, usize)> = ops.into_iter().collect();
            ops.sort_by_key(|(op, number)| (std::cmp::Reverse(*number), *op));
            let mut line = String::new();
            for (op, number) in ops {
                let next = format!("{op} {number}  ");
                if !line.is_empty() && line.len() + next.len() > WIDTH - 7 {
                    _ = writeln!(text, "       {}", std::mem::take(&mut line).trim_end());
                }
                line.push_str(&next);
            }
            _ = writeln!(text, "       {}", line.trim_end());
        }
        text
    }

    fn write_operators(&self, text: &mut String, nodes: impl IntoIterator<Item = usize>) {
        let line = |node: &str, op: &str, result: &str, numbers: [&str; 3], place: &str| {
            let [moved, lives, fate] = numbers;
            let (op, result) = (cut(op, OP), cut(result, RESULT));
            let line =
                format!("{node:>5}  {op:<OP$} {result:<RESULT$} {moved:>9} {lives:>15}  {fate:<9} {place}");
            cut(line.trim_end(), WIDTH) + "\n"
        };
        let head = ["result", "lives", "runs"];
        text.push_str(&line("", "operator", "dtype and shape", head, "where"));
        for node in nodes {
            let (moved, life, fate) = (human(self.result_bytes(node)), self.life(node), self.fate(node));
            let op = self.graph.nodes[node].op.trim_start_matches("aten::");
            let numbers = [moved.as_str(), &life, &fate];
            text.push_str(&line(&node.to_string(), op, &self.result(node), numbers, &self.place(node)));
        }
    }

    /// The module or the node of autograd that called it, or what weights it comes after.
    fn place(&self, node: usize) -> String {
        match &self.graph.nodes[node] {
            of if !of.scope.is_empty() => of.scope.clone(),
            of if !of.backward_node.is_empty() => of.backward_node.clone(),
            _ => self.graph.place(node),
        }
    }

    /// Dtype and shape of the first result.
    fn result(&self, node: usize) -> String {
        let mut results = self.graph.nodes[node].results.iter().flat_map(Operand::values);
        results.next().map_or_else(String::new, |value| self.graph.describe(value))
    }

    fn result_bytes(&self, node: usize) -> u64 {
        let results = self.graph.nodes[node].results.iter().flat_map(Operand::values);
        results.map(|value| bytes(&self.graph.values[value])).sum()
    }

    /// The first and the last operator that use the memory of the first result, more than once if it is computed again; or `kept` after the step, or there `before` it.
    fn life(&self, node: usize) -> String {
        let Some(value) = self.graph.nodes[node].results.iter().flat_map(Operand::values).next() else {
            return String::new();
        };
        let recorded = self.graph.buffer_of(value);
        if recorded.made_by().is_none() {
            return "before".to_owned();
        }
        if recorded.is_kept {
            return "kept".to_owned();
        }
        let buffer = self.program.merged[self.program.graph.values[value].buffer];
        let pieces = self.compiled.pieces.iter().filter(|piece| piece.buffer == Some(buffer));
        let lives: Vec<String> = pieces.map(|piece| format!("{}-{}", piece.first, piece.last)).collect();
        if lives.is_empty() { "-".to_owned() } else { lives.join(" ") }
    }

    /// A line for a node, for the picture.
    pub(super) fn describe_node(&self, node: usize) -> String {
        let (read, written) = traffic(&self.graph, node);
        format!(
            "{node} {} {} {}, {}, reads {}, writes {}",
            self.graph.nodes[node].op,
            self.result(node),
            self.place(node),
            self.fate(node),
            human(read),
            human(written)
        )
    }
}

/// Bytes in three digits or four.
pub(super) fn human(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut number, mut unit) = (bytes as f64, 0);
    while number >= 1000.0 && unit + 1 < units.len() {
        (number, unit) = (number / 1024.0, unit + 1);
    }
    let decimals = if unit == 0 || number >= 100.0 { 0 } else { 1 };
    format!("{number:.decimals$} {}", units[unit])
}

/// The beginning of a text that is too long, with a mark.
fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width - 2).chain("..".chars()).collect()
}
