//! Where the memory of what a replay runs lies: planned once for all replays.
//!
//! Views cost nothing in a replay, since memory never moves. Each buffer lives from the node that
//! makes it to the last one that uses it, and buffers whose lifetimes do not overlap share memory.

use super::ir::{Graph, Value};
use super::passes::{Life, Owner, Piece, Program, Recomputed, pieces};
use crate::ffi::{GraphPlan, MovedValue, RepeatedCall};

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
    /// Results that are computed once more rather than kept from forward to backward.
    pub num_recomputed: usize,
    /// Memory that a replay works in beside what is kept.
    pub arena_bytes: u64,
    /// What it would be if no buffer were used twice.
    pub unshared_bytes: u64,
    /// Memory that outlives the recording, and is written again by each replay.
    pub kept_bytes: u64,
}

/// Plans the replay of a program.
pub(super) fn plan(program: Program, uses_out_variants: bool) -> (GraphPlan, PlanStats) {
    // on a card memory is the card's own
    let mut pieces = if program.graph.is_on_card { Vec::new() } else { pieces(&program) };
    let Program {
        graph,
        runs,
        frozen,
        merged,
        chains,
        num_merged,
        moved,
        num_joined,
        num_in_place,
        recomputed,
        ..
    } = program;
    let unshared_bytes = pieces.iter().map(|piece| padded(piece.bytes)).sum();
    pieces.sort_by_key(|piece| (std::cmp::Reverse(piece.bytes), piece.lives.first().copied()));
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
        repeated: Vec::new(),
        moved: moved.into_iter().map(|value| moved_value(&graph, value)).collect(),
    };
    for (piece, start) in place(pieces) {
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
        num_calls: runs.iter().filter(|runs| **runs).count() - num_frozen + recomputed.len(),
        num_frozen,
        num_fused: chains.iter().map(|chain| chain.members.len()).filter(|len| *len > 1).sum(),
        num_merged,
        num_in_place,
        num_joined,
        num_recomputed: recomputed.len(),
        arena_bytes: plan.arena_bytes,
        unshared_bytes,
        kept_bytes: graph.buffers.iter().filter(|buffer| buffer.is_kept).map(|buffer| buffer.bytes).sum(),
    };
    plan.chains = chains.into_iter().map(|chain| chain.planned).collect();
    let repeated =
        |again: Recomputed| RepeatedCall { node: again.node, before: again.before, chain: again.chain };
    plan.repeated = recomputed.into_iter().map(repeated).collect();
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

/// Start of each piece: the lowest place that is free during all of its life, the pieces taken in the order given.
fn place(pieces: Vec<Piece>) -> Vec<(Piece, u64)> {
    let mut placed: Vec<(Piece, u64)> = Vec::with_capacity(pieces.len()); // by start
    for piece in pieces {
        let size = padded(piece.bytes);
        let mut start = 0;
        for (other, at) in &placed {
            if !overlap(&other.lives, &piece.lives) {
                continue;
            }
            if start + size <= *at {
                break;
            }
            start = start.max(at + padded(other.bytes));
        }
        let index = placed.partition_point(|(_, at)| *at <= start);
        placed.insert(index, (piece, start));
    }
    placed
}

/// Whether two pieces are in use at once.
fn overlap(a: &[Life], b: &[Life]) -> bool {
    a.iter().any(|a| b.iter().any(|b| a.0 <= b.1 && b.0 <= a.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(first: usize, last: usize, bytes: u64) -> Piece {
        Piece { lives: vec![(first, last)], bytes, owner: Owner::Block(0) }
    }

    #[test]
    fn pieces_of_other_times_share_their_place() {
        let mut again = piece(0, 1, 640);
        again.lives.push((4, 4));
        let pieces = vec![again, piece(2, 3, 640), piece(1, 2, 64), piece(3, 4, 64)];
        let placed = place(pieces);
        for (at, (a, start)) in placed.iter().enumerate() {
            for (b, other) in &placed[at + 1..] {
                let in_space = *start < other + padded(b.bytes) && *other < start + padded(a.bytes);
                assert!(!overlap(&a.lives, &b.lives) || !in_space, "{placed:?}");
            }
        }
        let end = placed.iter().map(|(piece, start)| start + padded(piece.bytes)).max();
        assert_eq!(end, Some(padded(640) + padded(64)), "{placed:?}");
    }
}
