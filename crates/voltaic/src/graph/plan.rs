//! Where the memory of what a replay runs lies: planned once for all replays.
//!
//! Views cost nothing in a replay, since memory never moves. Each buffer lives from the node that
//! makes it to the last one that uses it, and buffers whose lifetimes do not overlap share memory.

use super::ir::{Graph, Value};
use super::passes::Program;
use crate::ffi::{GraphPlan, MovedValue};

/// Sizes and counts of a plan.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PlanStats {
    /// Operators that were recorded.
    pub num_nodes: usize,
    /// What a replay calls; operators that run as one are one call.
    pub num_calls: usize,
    /// Operators whose results are kept: they run in the first replay, and after weights have changed.
    pub num_frozen: usize,
    /// Operators that are compiled into others: those that run as one with more of them.
    pub num_fused: usize,
    /// Operators that are not run, since another one has the same result.
    pub num_merged: usize,
    /// Results that lie in the memory of an operand which nothing reads later.
    pub num_in_place: usize,
    /// Concatenations that are not run, since their parts are written there in the first place.
    pub num_joined: usize,
    /// Memory that a replay works in beside what is kept.
    pub arena_bytes: u64,
    /// What it would be if no buffer were used twice.
    pub unshared_bytes: u64,
    /// Memory that outlives the recording, and is written again by each replay.
    pub kept_bytes: u64,
}

/// A piece of memory, in use from node `first` to node `last`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    pub(super) first: usize,
    pub(super) last: usize,
    pub(super) bytes: u64,
    pub(super) owner: Owner,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    Buffer(usize),
    /// Index over the blocks of all nodes.
    Block(usize),
}

/// Plans the replay of a program.
pub(super) fn plan(program: Program, uses_out_variants: bool) -> (GraphPlan, PlanStats) {
    let mut pieces = pieces(&program);
    let Program { graph, runs, frozen, merged, chains, num_merged, moved, num_joined, num_in_place, .. } =
        program;
    let unshared_bytes = pieces.iter().map(|piece| padded(piece.bytes)).sum();
    pieces.sort_by_key(|piece| (std::cmp::Reverse(piece.bytes), piece.first));
    let num_blocks = graph.nodes.iter().map(|node| node.blocks.len()).sum();
    let mut plan = GraphPlan {
        runs: runs
            .iter()
            .zip(&frozen)
            .map(|(&runs, &frozen)| if runs && frozen { GraphPlan::FROZEN } else { runs.into() })
            .collect(),
        buffer_offsets: vec![GraphPlan::NOWHERE; graph.buffers.len()],
        block_offsets: vec![GraphPlan::NOWHERE; num_blocks],
        constants: graph.buffers.iter().map(|buffer| u8::from(buffer.is_constant)).collect(),
        arena_bytes: 0,
        uses_out_variants,
        merged: merged.iter().map(|&buffer| buffer as u64).collect(),
        chains: Vec::new(),
        moved: moved.into_iter().map(|value| moved_value(&graph, value)).collect(),
    };
    for (piece, start) in place(&pieces) {
        let offset = start + GraphPlan::HEADER_BYTES;
        plan.arena_bytes = plan.arena_bytes.max(start + padded(piece.bytes));
        match piece.owner {
            Owner::Buffer(index) => plan.buffer_offsets[index] = offset,
            Owner::Block(index) => plan.block_offsets[index] = offset,
        }
    }
    let num_frozen = plan.runs.iter().filter(|runs| **runs == GraphPlan::FROZEN).count();
    let stats = PlanStats {
        num_nodes: graph.nodes.len(),
        num_calls: runs.iter().filter(|runs| **runs).count() - num_frozen,
        num_frozen,
        num_fused: chains.iter().map(|chain| chain.members.len()).filter(|len| *len > 1).sum(),
        num_merged,
        num_in_place,
        num_joined,
        arena_bytes: plan.arena_bytes,
        unshared_bytes,
        kept_bytes: graph.buffers.iter().filter(|buffer| buffer.is_kept).map(|buffer| buffer.bytes).sum(),
    };
    plan.chains = chains.into_iter().map(|chain| chain.planned).collect();
    (plan, stats)
}

fn moved_value(graph: &Graph, value: usize) -> MovedValue {
    let Value { buffer, offset, stride, .. } = &graph.values[value];
    MovedValue { value, buffer: *buffer, offset: *offset, strides: stride.clone() }
}

/// Bytes of a piece with its header, a multiple of the alignment.
fn padded(bytes: u64) -> u64 {
    GraphPlan::HEADER_BYTES + bytes.next_multiple_of(GraphPlan::HEADER_BYTES)
}

/// The memory that the running nodes need beside what is kept.
pub(super) fn pieces(program: &Program) -> Vec<Piece> {
    let Program { graph, runs, frozen, .. } = program;
    let last = graph.nodes.len().saturating_sub(1);
    let mut lives: Vec<Option<(usize, usize)>> = vec![None; graph.buffers.len()];
    let mut pieces = Vec::new();
    let mut block = 0;
    for (index, node) in graph.nodes.iter().enumerate() {
        if runs[index] {
            for value in node.values() {
                let buffer = graph.values[value].buffer;
                let life = lives[buffer].get_or_insert((index, index));
                life.1 = life.1.max(index);
                if !frozen[index] && program.is_kept_frozen(buffer) {
                    *life = (0, last); // nothing else lies there, in this replay and in the next
                }
            }
            pieces.extend(node.blocks.iter().enumerate().filter(|(_, block)| block.is_temporary()).map(
                |(at, taken)| Piece {
                    first: index,
                    last: index,
                    bytes: taken.bytes,
                    owner: Owner::Block(block + at),
                },
            ));
        }
        block += node.blocks.len();
    }
    for (index, (buffer, life)) in graph.buffers.iter().zip(lives).enumerate() {
        if let Some((first, last)) = life
            && buffer.made_by().is_some()
            && !buffer.is_kept
            && buffer.bytes > 0
        {
            pieces.push(Piece { first, last, bytes: buffer.bytes, owner: Owner::Buffer(index) });
        }
    }
    pieces
}

/// Start of each piece: the lowest place that is free during all of its life, the pieces taken in the order given.
fn place(pieces: &[Piece]) -> Vec<(Piece, u64)> {
    let mut placed: Vec<(Piece, u64)> = Vec::with_capacity(pieces.len()); // by start
    for piece in pieces {
        let size = padded(piece.bytes);
        let mut start = 0;
        for (other, at) in &placed {
            if other.last < piece.first || piece.last < other.first {
                continue;
            }
            if start + size <= *at {
                break;
            }
            start = start.max(at + padded(other.bytes));
        }
        let index = placed.partition_point(|(_, at)| *at <= start);
        placed.insert(index, (*piece, start));
    }
    placed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(first: usize, last: usize, bytes: u64) -> Piece {
        Piece { first, last, bytes, owner: Owner::Block(0) }
    }

    #[test]
    fn pieces_of_other_times_share_their_place() {
        let pieces = [piece(0, 1, 640), piece(2, 3, 640), piece(1, 2, 64), piece(4, 4, 100)];
        let placed = place(&pieces);
        for (at, (a, start)) in placed.iter().enumerate() {
            for (b, other) in &placed[at + 1..] {
                let overlap_in_time = a.first <= b.last && b.first <= a.last;
                let overlap = *start < other + padded(b.bytes) && *other < start + padded(a.bytes);
                assert!(!overlap_in_time || !overlap, "{placed:?}");
            }
        }
        let end = placed.iter().map(|(piece, start)| start + padded(piece.bytes)).max();
        assert_eq!(end, Some(padded(640) + padded(64)), "{placed:?}");
    }
}
