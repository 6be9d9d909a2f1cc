//! A picture of memory over the operators of a step, as SVG.

use std::fmt::Write as _;

use super::shown_graph::{ShownGraph, Side};
use super::text::human;

/// Pixels.
const WIDTH: f64 = 1200.0;
const MARGIN: f64 = 80.0;
const PLOT: f64 = 240.0;
const PANEL: f64 = PLOT + 60.0;

/// What a chain gives, what other operators give, and what kernels need while they run.
const COLORS: [(&str, &str); 3] = [
    ("#ff7f0e", "result of a chain"),
    ("#1f77b4", "other result"),
    ("#7f7f7f", "needed while a kernel runs"),
];

impl ShownGraph {
    /// Draws graphs below each other, each before and after the passes: over the operators a bar for each piece of memory, from its first
    /// use to its last, where it lies in the planned memory. A viewer shows the operator of a bar that is pointed at.
    pub fn picture(graphs: &[Self]) -> String {
        let height = 30.0 + 2.0 * PANEL * graphs.len() as f64;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" font-family=\"sans-serif\" \
             font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
        );
        for (at, (color, what)) in COLORS.into_iter().enumerate() {
            let x = MARGIN + 220.0 * at as f64;
            _ = writeln!(svg, "<rect x=\"{x}\" y=\"10\" width=\"12\" height=\"12\" fill=\"{color}\"/>");
            _ = writeln!(svg, "<text x=\"{}\" y=\"20\">{what}</text>", x + 18.0);
        }
        for (at, graph) in graphs.iter().enumerate() {
            let top = 30.0 + 2.0 * PANEL * at as f64;
            graph.draw(&mut svg, ("recorded", &graph.recorded), top);
            graph.draw(&mut svg, ("compiled", &graph.compiled), top + PANEL);
        }
        svg + "</svg>\n"
    }

    fn draw(&self, svg: &mut String, (what, side): (&str, &Side), top: f64) {
        let most = self.recorded.totals.planned_bytes.max(self.compiled.totals.planned_bytes).max(1);
        let (bottom, right) = (top + 30.0 + PLOT, WIDTH - 20.0);
        let x = |node: usize| MARGIN + (right - MARGIN) * node as f64 / self.graph.nodes.len().max(1) as f64;
        let y = |bytes: u64| bottom - PLOT * bytes as f64 / most as f64;
        let (planned, calls) = (human(side.totals.planned_bytes), side.totals.num_calls);
        let caption = format!("{}, {what}: {calls} operators run in {planned}", self.label());
        _ = writeln!(
            svg,
            "<text x=\"{MARGIN}\" y=\"{}\" font-size=\"14\">{}</text>",
            top + 20.0,
            escaped(&caption)
        );
        for (text, height) in [(human(most), top + 42.0), ("0".to_owned(), bottom)] {
            _ = writeln!(
                svg,
                "<text x=\"{}\" y=\"{height}\" text-anchor=\"end\">{text}</text>",
                MARGIN - 6.0
            );
        }
        let (end, below) = (self.graph.nodes.len(), bottom + 16.0);
        _ = writeln!(svg, "<text x=\"{MARGIN}\" y=\"{below}\">operator 0</text>");
        _ = writeln!(svg, "<text x=\"{right}\" y=\"{below}\" text-anchor=\"end\">{end}</text>");
        _ = writeln!(
            svg,
            "<path d=\"M{MARGIN} {} V{bottom} H{right}\" fill=\"none\" stroke=\"black\"/>",
            bottom - PLOT
        );
        for piece in &side.pieces {
            let is_of_chain = what == "compiled"
                && self.program.chains.iter().any(|chain| chain.members.contains(&piece.node));
            let (color, _) = match piece.buffer {
                Some(_) if is_of_chain => COLORS[0],
                Some(_) => COLORS[1],
                None => COLORS[2],
            };
            let end = piece.start + piece.bytes;
            let (left, width) = (x(piece.first), x(piece.last + 1) - x(piece.first));
            _ = writeln!(
                svg,
                "<rect x=\"{left:.1}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"{:.1}\" fill=\"{color}\" fill-opacity=\"0.7\" \
                 stroke=\"white\" stroke-width=\"0.3\"><title>{}, in use from {} to {}, {}</title></rect>",
                y(end),
                y(piece.start) - y(end),
                escaped(&self.describe_node(piece.node)),
                piece.first,
                piece.last,
                human(piece.bytes)
            );
        }
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
