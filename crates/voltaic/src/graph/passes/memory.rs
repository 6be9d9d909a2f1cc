//! What memory a program needs: when it holds something that is read later, and how much of it does so at once.

use super::program::Program;

/// From one node to another, both included.
pub(in crate::graph) type Life = (usize, usize);

/// A piece of memory.
#[derive(Debug, Clone)]
pub(in crate::graph) struct Piece {
    /// When it is in use; more than once if what it held is computed again.
    pub(in crate::graph) lives: Vec<Life>,
    pub(in crate::graph) bytes: u64,
    pub(in crate::graph) owner: Owner,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::graph) enum Owner {
    Buffer(usize),
    /// Index over the blocks of all nodes.
    Block(usize),
}

/// The memory that the running nodes need beside what is kept.
pub(in crate::graph) fn pieces(program: &Program) -> Vec<Piece> {
    let Program { graph, runs, recomputed, .. } = program;
    let mut pieces = Vec::new();
    let mut block = 0;
    for (index, node) in graph.nodes.iter().enumerate() {
        let temporary =
            node.blocks.iter().enumerate().filter(|(_, block)| runs[index] && block.is_temporary());
        pieces.extend(temporary.map(|(at, taken)| {
            let again = recomputed.iter().filter(|again| again.node == index && again.chain.is_none());
            let lives =
                [index].into_iter().chain(again.map(|again| again.before)).map(|at| (at, at)).collect();
            Piece { lives, bytes: taken.bytes, owner: Owner::Block(block + at) }
        }));
        block += node.blocks.len();
    }
    for (index, (buffer, lives)) in graph.buffers.iter().zip(lives(program)).enumerate() {
        if !lives.is_empty() && buffer.made_by().is_some() && !buffer.is_kept && buffer.bytes > 0 {
            pieces.push(Piece { lives, bytes: buffer.bytes, owner: Owner::Buffer(index) });
        }
    }
    pieces
}

/// When each buffer is in use: from where it is made, or made again, to where it is used for the last time.
fn lives(program: &Program) -> Vec<Vec<Life>> {
    let Program { graph, runs, frozen, recomputed, .. } = program;
    let end = graph.nodes.len().saturating_sub(1);
    let mut lives: Vec<Vec<Life>> = vec![Vec::new(); graph.buffers.len()];
    let mut note = |buffer: usize, index: usize, is_new: bool| {
        let lives = &mut lives[buffer];
        match lives.last_mut() {
            Some(life) if !is_new || life.1 >= index => life.1 = life.1.max(index),
            _ => lives.push((index, index)),
        }
        if !frozen[index] && program.is_kept_frozen(buffer) {
            *lives = vec![(0, end)]; // nothing else lies there, in this replay and in the next
        }
    };
    let mut recomputed = recomputed.iter().peekable();
    for (index, node) in graph.nodes.iter().enumerate() {
        while let Some(again) = recomputed.next_if(|again| again.before == index) {
            let (reads, writes) = program.recomputes(again);
            reads.into_iter().for_each(|value| note(graph.values[value].buffer, index, false));
            writes.into_iter().for_each(|value| note(graph.values[value].buffer, index, true));
        }
        if runs[index] {
            node.values().for_each(|value| note(graph.values[value].buffer, index, false));
        }
    }
    lives
}

/// Bytes in use over the nodes, as a tree of which each node knows the most below it.
pub(super) struct Usage {
    /// Of what is below, without what was added further up.
    most: Vec<i64>,
    added: Vec<i64>,
    width: usize,
}

impl Usage {
    pub(super) fn of(program: &Program) -> Self {
        let width = program.graph.nodes.len().next_power_of_two();
        let mut usage = Self { most: vec![0; 2 * width], added: vec![0; 2 * width], width };
        for piece in pieces(program) {
            piece.lives.iter().for_each(|&life| usage.add(life, piece.bytes as i64));
        }
        usage
    }

    /// Has so many bytes more be in use.
    pub(super) fn add(&mut self, life: Life, bytes: i64) {
        if life.0 <= life.1 {
            self.add_below(1, (0, self.width - 1), life, bytes);
        }
    }

    fn add_below(&mut self, at: usize, (start, end): Life, life: Life, bytes: i64) {
        if life.1 < start || end < life.0 {
            return;
        }
        if life.0 <= start && end <= life.1 {
            self.added[at] += bytes;
            self.most[at] += bytes;
            return;
        }
        let middle = usize::midpoint(start, end);
        self.add_below(2 * at, (start, middle), life, bytes);
        self.add_below(2 * at + 1, (middle + 1, end), life, bytes);
        self.most[at] = self.added[at] + self.most[2 * at].max(self.most[2 * at + 1]);
    }

    /// The most bytes in use at once, and the first node where they are.
    pub(super) fn peak(&self) -> (i64, usize) {
        let mut at = 1;
        while at < self.width {
            at = if self.most[2 * at] >= self.most[2 * at + 1] { 2 * at } else { 2 * at + 1 };
        }
        (self.most[1], at - self.width)
    }
}
