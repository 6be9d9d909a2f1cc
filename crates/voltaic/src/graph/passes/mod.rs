//! Passes over a recording before it is planned: each in a file, with a check of the program after each (`verify`).
//!
//! | pass | variable that leaves it out, as the option of its name does |
//! |---|---|
//! | `dead_code` | none: graphs that are not compiled have it, too |
//! | `common_subexpressions` | `PT_HPU_DISABLE_common_subexpressions=1` |
//! | `constant_folding` | `PT_HPU_DISABLE_constant_folding=1` |
//! | `freezing` | none: it runs with `use_graph_freezing` alone, where nothing has gradients |
//! | `concatenations` | `PT_HPU_DISABLE_concatenations=1` |
//! | `fuse_elementwise` | `PT_HPU_DISABLE_fuse_elementwise=1` |
//! | `recomputation` | none: it runs with the option `recomputation` alone, or `PT_HPU_DISABLE_recomputation=0` |
//! | `in_place` | `PT_HPU_DISABLE_in_place=1` |

mod common_subexpressions;
mod concatenations;
mod dead_code;
mod elementwise;
mod freezing;
mod fuse_elementwise;
mod in_place;
mod memory;
mod program;
mod recomputation;
mod rows;
mod verify;

use super::ir::Graph;
use super::options::{CompileConfig, has_pass};
use crate::ffi;

pub(super) use memory::{Life, Owner, Piece, pieces};
use program::Notes;
pub(super) use program::{Program, Recomputed};

/// Which passes run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Passes {
    common_subexpressions: bool,
    constant_folding: bool,
    freezing: bool,
    concatenations: bool,
    fuse_elementwise: bool,
    recomputation: bool,
    in_place: bool,
}

impl Passes {
    /// Those of a graph that is replayed as it was recorded.
    pub(crate) const NONE: Self = Self {
        common_subexpressions: false,
        constant_folding: false,
        freezing: false,
        concatenations: false,
        fuse_elementwise: false,
        recomputation: false,
        in_place: false,
    };

    /// Those of compile, without those that its options or the environment leave out.
    pub(crate) fn of(compile: Option<CompileConfig>) -> Self {
        let Some(CompileConfig { options, .. }) = compile.filter(|config| config.options.changes_graphs())
        else {
            return Self::NONE;
        };
        Self {
            common_subexpressions: has_pass(options.common_subexpressions, "common_subexpressions"),
            constant_folding: has_pass(options.constant_folding, "constant_folding"),
            freezing: false,
            concatenations: ffi::has_kernels() && has_pass(options.concatenations, "concatenations"),
            // chains are run by a kernel of voltaic's
            fuse_elementwise: ffi::has_kernels() && has_pass(options.fuse_elementwise, "fuse_elementwise"),
            recomputation: options.recomputes(),
            in_place: options.in_place(),
        }
    }

    /// The same with `freezing`: for a graph whose weights are watched.
    pub(super) fn freezing(self) -> Self {
        Self { freezing: true, ..self }
    }
}

/// Name of a pass, whether it is on, and what it does.
type Pass = (&'static str, bool, fn(&mut Program));

/// Runs the passes over a recording. If `notes` are asked for, the program has what they say of single operators.
pub(super) fn run(graph: &Graph, passes: Passes, notes: bool) -> Program {
    let mut program = Program::of(graph.clone());
    dead_code::run(&mut program);
    program.notes = notes.then(Notes::default);
    let later: [Pass; 7] = [
        ("common_subexpressions", passes.common_subexpressions, common_subexpressions::run),
        ("constant_folding", passes.constant_folding, freezing::of_constants),
        ("freezing", passes.freezing, freezing::of_weights),
        ("concatenations", passes.concatenations, concatenations::run),
        ("fuse_elementwise", passes.fuse_elementwise, fuse_elementwise::run),
        ("recomputation", passes.recomputation, recomputation::run),
        ("in_place", passes.in_place, in_place::run),
    ];
    for (name, _, pass) in later.into_iter().filter(|(_, is_on, _)| *is_on) {
        let before = program.clone();
        pass(&mut program);
        if let Err(problem) = verify::check(&program, &before) {
            debug_assert!(false, "{name}: {problem}");
            tracing::error!("compile: the pass {name} is left out, since its result is wrong: {problem}");
            program = before;
            continue;
        }
        let Program { notes: Some(notes), runs, .. } = &mut program else { continue };
        let left_out = (0..runs.len()).filter(|&node| before.runs[node] && !runs[node]);
        notes.left_out.extend(left_out.map(|node| (node, name)));
    }
    program
}
