//! Operators element by element that follow each other run as one, block by block through the first cache, with float32 between them.
//!
//! A chain runs in the place of its last operator. So each of the others moves there, which is safe if none that runs in between
//! reads what it writes, or writes what it reads or writes. Memory that a chain writes is that of the graph alone, and all of the chain
//! reads and writes it number by number at the same place; what is seen nowhere else is not written.

use std::collections::{BTreeMap, BTreeSet};

use super::elementwise::{Access, Elementwise};
use super::program::{Chain, Program};
use crate::ffi::PlannedChain;
use crate::graph::ir::Operand;
use crate::kernels::{self, ChainStep};

/// How far an operator may be from the one before it in the chain, in operators that run.
const MAX_DISTANCE: usize = 64;

/// Fuses what can be.
pub(super) fn run(program: &mut Program) {
    if program.graph.values.iter().any(|value| value.dtype.starts_with("Complex")) {
        return; // their views may say that numbers are negative, which a recording does not tell
    }
    let mut users = vec![BTreeSet::new(); program.graph.buffers.len()];
    for node in (0..program.graph.nodes.len()).filter(|node| program.runs[*node]) {
        note_user(program, node, &mut users);
    }
    let mut is_taken = vec![false; program.graph.nodes.len()];
    for first in 0..program.graph.nodes.len() {
        if is_taken[first] || !program.runs[first] {
            continue;
        }
        let Some(start) = Elementwise::of(&program.graph, first) else { continue };
        let group = Group::grow(program, start, &is_taken);
        if group.members.len() > 1
            && let Some(chain) = group.chain(program, &users)
        {
            chain.members.iter().for_each(|&member| is_taken[member] = true);
            let node = chain.planned.node;
            apply(program, chain);
            note_user(program, node, &mut users);
        }
    }
    program.chains.sort_by_key(|chain| chain.planned.node);
}

/// Nodes that run and read or write a buffer, by buffer.
type Users = [BTreeSet<usize>];

fn note_user(program: &Program, node: usize, users: &mut Users) {
    let (reads, writes) = program.accesses(node);
    for buffer in reads.into_iter().chain(writes) {
        users[buffer].insert(node);
    }
}

/// The last member is the chain, the others do not run.
fn apply(program: &mut Program, chain: Chain) {
    for &member in &chain.members {
        program.runs[member] = member == chain.planned.node;
    }
    let node = &mut program.graph.nodes[chain.planned.node];
    node.op = "voltaic::chain".to_owned();
    node.arguments = vec![Operand::Tensors(chain.planned.inputs.clone())];
    node.results = vec![Operand::Tensors(chain.planned.outputs.clone())];
    (node.writes, node.written) = (false, Vec::new());
    program.chains.push(chain);
}

/// Where numbers lie: buffer, offset, dtype.
type Place = (usize, i64, String);

/// Operators that are to be one.
struct Group {
    members: Vec<Elementwise>,
    reads: BTreeSet<usize>,
    writes: BTreeSet<usize>,
    /// Of each buffer: the place that all read and write, number by number; none if it is read otherwise.
    places: BTreeMap<usize, Option<Place>>,
}

impl Group {
    /// Takes the operators that follow for as long as it is safe.
    fn grow(program: &Program, start: Elementwise, is_taken: &[bool]) -> Self {
        let first = start.node;
        let mut group = Self {
            members: Vec::new(),
            reads: BTreeSet::new(),
            writes: BTreeSet::new(),
            places: BTreeMap::new(),
        };
        group.take(program, start);
        let mut distance = 0;
        for (index, is_taken) in is_taken.iter().enumerate().skip(first + 1) {
            if !program.runs[index] {
                continue;
            }
            let next = (!is_taken).then(|| Elementwise::of(&program.graph, index)).flatten();
            if let Some(next) = next.filter(|next| group.may_take(program, next)) {
                group.take(program, next);
                distance = 0;
                continue;
            }
            distance += 1;
            if group.conflicts(program, index) || distance > MAX_DISTANCE {
                break;
            }
        }
        group
    }

    /// Whether the members must not move behind a node.
    fn conflicts(&self, program: &Program, index: usize) -> bool {
        let (reads, writes) = program.accesses(index);
        !reads.is_disjoint(&self.writes)
            || !writes.is_disjoint(&self.writes)
            || !writes.is_disjoint(&self.reads)
    }

    fn may_take(&self, program: &Program, next: &Elementwise) -> bool {
        let place_of = |value: usize| place(program, value);
        let is_related = next.operands.iter().any(|(value, access)| {
            *access == Access::Whole && self.places.get(&place_of(*value).0) == Some(&Some(place_of(*value)))
        });
        let may_read = next.operands.iter().all(|(value, access)| {
            let place = place_of(*value);
            !self.writes.contains(&place.0)
                || (*access == Access::Whole && self.places.get(&place.0) == Some(&Some(place)))
        });
        let written = place_of(next.result);
        let may_write = self.places.get(&written.0).is_none_or(|known| *known == Some(written));
        let registers: usize =
            self.members.iter().chain([next]).map(|member| member.operands.len() + 1).sum();
        next.len == self.members[0].len
            && is_related
            && may_read
            && may_write
            && registers <= kernels::Chain::REGISTERS
    }

    fn take(&mut self, program: &Program, next: Elementwise) {
        for (value, access) in &next.operands {
            let place = place(program, *value);
            let buffer = place.0;
            self.reads.insert(buffer);
            let now = (*access == Access::Whole).then_some(place);
            let known = self.places.entry(buffer).or_insert_with(|| now.clone());
            if *known != now {
                *known = None;
            }
        }
        let place = place(program, next.result);
        self.writes.insert(place.0);
        self.places.insert(place.0, Some(place));
        self.members.push(next);
    }

    /// The chain; none if an operator reads and writes what cannot be told apart, or nothing is seen of it.
    fn chain(&self, program: &Program, users: &Users) -> Option<Chain> {
        let last = self.members.last()?.node;
        let mut builder = Builder::default();
        for member in &self.members {
            for (value, access) in &member.operands {
                builder.read(place(program, *value), *value, *access, member.len);
            }
            builder.writes.insert(place(program, member.result));
        }
        for member in &self.members {
            builder.step(program, member)?;
        }
        let (mut outputs, mut registers) = (Vec::new(), Vec::new());
        for (buffer, place) in &self.places {
            if !self.writes.contains(buffer) || !self.is_seen(program, *buffer, users) {
                continue;
            }
            let (value, register) = *builder.written.get(place.as_ref()?)?;
            outputs.push(value as i64);
            registers.push(register as i32);
        }
        let planned = PlannedChain {
            node: last,
            len: self.members[0].len,
            steps: builder.steps,
            inputs: builder.inputs.iter().map(|(value, _)| *value as i64).collect(),
            periods: builder.inputs.iter().map(|(_, period)| *period).collect(),
            outputs,
            registers,
        };
        let is_useful = !planned.outputs.is_empty() && !planned.steps.is_empty();
        is_useful.then(|| Chain { members: self.members.iter().map(|member| member.node).collect(), planned })
    }

    /// Whether anything else uses a buffer.
    fn is_seen(&self, program: &Program, buffer: usize, users: &Users) -> bool {
        let is_member = |node: usize| self.members.iter().any(|member| member.node == node);
        program.graph.buffers[buffer].is_kept
            || users[buffer].iter().any(|&node| program.runs[node] && !is_member(node))
    }
}

fn place(program: &Program, value: usize) -> Place {
    let value = &program.graph.values[value];
    (value.buffer, value.offset, value.dtype.clone())
}

/// The registers of a chain: inputs first, then a step each.
#[derive(Default)]
struct Builder {
    /// Values with how many numbers they have.
    inputs: Vec<(usize, i64)>,
    /// Registers of inputs that are read whole, by place, and of others by value.
    whole: BTreeMap<Place, usize>,
    repeated: BTreeMap<usize, usize>,
    /// What was written so far, while inputs are looked for.
    writes: BTreeSet<Place>,
    steps: Vec<ChainStep>,
    /// What is at a place now: the value and its register.
    written: BTreeMap<Place, (usize, usize)>,
}

impl Builder {
    /// Notes an input, unless the chain has written it before.
    fn read(&mut self, place: Place, value: usize, access: Access, len: i64) {
        let next = self.inputs.len();
        match access {
            Access::Whole if self.writes.contains(&place) || self.whole.contains_key(&place) => {}
            Access::Whole => {
                self.whole.insert(place, next);
                self.inputs.push((value, len));
            }
            Access::Repeated(_) if self.repeated.contains_key(&value) => {}
            Access::Repeated(period) => {
                self.repeated.insert(value, next);
                self.inputs.push((value, period));
            }
        }
    }

    fn step(&mut self, program: &Program, member: &Elementwise) -> Option<()> {
        let register = |(value, access): &(usize, Access)| match access {
            Access::Repeated(_) => self.repeated.get(value).copied(),
            Access::Whole => {
                let place = place(program, *value);
                let written = self.written.get(&place).map(|(_, register)| *register);
                written.or_else(|| self.whole.get(&place).copied())
            }
        };
        let operands: Vec<usize> = member.operands.iter().map(register).collect::<Option<_>>()?;
        let result = match member.op {
            None => operands[0],
            Some(op) => {
                let (a, b) = (operands[0], *operands.last()?);
                self.steps.push(ChainStep { op, a, b, number: member.number });
                self.inputs.len() + self.steps.len() - 1
            }
        };
        self.written.insert(place(program, member.result), (member.result, result));
        Some(())
    }
}
