//! Operators element by element and row by row that follow each other run as one, block by block through the first cache, with float32
//! between them.
//!
//! A chain runs in the place of its last operator. So each of the others moves there, which is safe if none that runs in between
//! reads what it writes, or writes what it reads or writes. Memory that a chain writes is that of the graph alone, and all of the chain
//! reads and writes it number by number at the same place; what is seen nowhere else is not written.

use std::collections::{BTreeMap, BTreeSet};

use super::elementwise::{self, Access, Member, Source};
use super::program::{Chain, Program, Why};
use super::rows;
use crate::ffi::PlannedChain;
use crate::graph::ir::Operand;
use crate::kernels::{self, ChainOp, ChainStep};

/// How far an operator may be from the one before it in the chain, in operators that run.
const MAX_DISTANCE: usize = 64;

/// A node as a part of a chain, or why it can be none.
fn member(program: &Program, index: usize) -> Result<Member, &'static str> {
    match rows::of(&program.graph, index) {
        Some(by_row) => by_row,
        None => elementwise::of(&program.graph, index),
    }
}

/// Fuses what can be.
pub(super) fn run(program: &mut Program) {
    if program.graph.values.iter().any(|value| value.dtype.starts_with("Complex")) {
        // their views may say that numbers are negative, which a recording does not tell
        let why = Why { what: "a step with complex numbers has no chains", node: None };
        let nodes: Vec<usize> = (0..program.runs.len()).filter(|&node| program.runs[node]).collect();
        nodes.into_iter().for_each(|node| note(program, node, why));
        return;
    }
    let mut users = vec![BTreeSet::new(); program.graph.buffers.len()];
    for node in (0..program.graph.nodes.len()).filter(|node| program.runs[*node]) {
        note_user(program, node, &mut users);
    }
    let mut is_taken = vec![false; program.graph.nodes.len()];
    for first in 0..program.graph.nodes.len() {
        if is_taken[first] || !program.runs[first] || program.frozen[first] {
            continue;
        }
        let start = match member(program, first) {
            Ok(start) => start,
            Err(what) => {
                note(program, first, Why { what, node: None });
                continue;
            }
        };
        let group = Group::grow(program, start, &is_taken);
        let is_worth_it = group.members.len() > 1 || group.members[0].is_faster_alone();
        if !is_worth_it {
            note(program, first, group.end);
        } else if let Some(chain) = group.chain(program, &users) {
            chain.members.iter().for_each(|&member| is_taken[member] = true);
            let node = chain.planned.node;
            apply(program, chain);
            note(program, node, group.end);
            note_user(program, node, &mut users);
        } else {
            note(program, first, Why { what: "what it writes cannot be told apart", node: None });
        }
    }
    program.chains.sort_by_key(|chain| chain.planned.node);
}

/// Says why a node is no part of a chain, or a chain that ends there no longer one, if that is asked for.
fn note(program: &mut Program, node: usize, why: Why) {
    program.notes.iter_mut().for_each(|notes| _ = notes.whys.insert(node, why));
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
    members: Vec<Member>,
    reads: BTreeSet<usize>,
    writes: BTreeSet<usize>,
    /// Of each buffer: the place that all read and write, number by number; none if it is read otherwise.
    places: BTreeMap<usize, Option<Place>>,
    /// Why there are no more: the first that was not taken though it reads what they give, else where they had to end.
    end: Why,
}

/// Of operators that have nothing to do with a group.
const UNRELATED: &str = "nothing that chains have works on it in the next 64 operators";

impl Group {
    /// Takes the operators that follow for as long as it is safe.
    fn grow(program: &Program, start: Member, is_taken: &[bool]) -> Self {
        let first = start.node;
        let mut group = Self {
            members: Vec::new(),
            reads: BTreeSet::new(),
            writes: BTreeSet::new(),
            places: BTreeMap::new(),
            end: Why { what: UNRELATED, node: None },
        };
        group.take(program, start);
        let (mut distance, mut refused) = (0, None);
        for (index, is_taken) in is_taken.iter().enumerate().skip(first + 1) {
            if !program.runs[index] || program.frozen[index] {
                continue; // what is frozen reads and writes nothing that a group writes
            }
            let next = if *is_taken { None } else { member(program, index).ok() };
            if let Some(next) = next {
                match group.may_take(program, &next) {
                    Ok(()) => {
                        group.take(program, next);
                        distance = 0;
                        continue;
                    }
                    Err(UNRELATED) => {}
                    Err(what) => _ = refused.get_or_insert(Why { what, node: Some(index) }),
                }
            }
            distance += 1;
            if group.conflicts(program, index) {
                let what = "used next by";
                group.end = Why { what, node: Some(index) };
                break;
            }
            if distance > MAX_DISTANCE {
                break;
            }
        }
        group.end = refused.unwrap_or(group.end);
        group
    }

    /// Whether the members must not move behind a node.
    fn conflicts(&self, program: &Program, index: usize) -> bool {
        let (reads, writes) = program.accesses(index);
        !reads.is_disjoint(&self.writes)
            || !writes.is_disjoint(&self.writes)
            || !writes.is_disjoint(&self.reads)
    }

    /// Whether an operator may be the next one, or why not.
    fn may_take(&self, program: &Program, next: &Member) -> Result<(), &'static str> {
        let place_of = |value: usize| place(program, value);
        let is_related = next.operands.iter().any(|(value, access)| {
            *access == Access::Whole && self.places.get(&place_of(*value).0) == Some(&Some(place_of(*value)))
        });
        let may_read = next.operands.iter().all(|(value, access)| {
            let place = place_of(*value);
            !self.writes.contains(&place.0)
                || (*access == Access::Whole && self.places.get(&place.0) == Some(&Some(place)))
        });
        let may_write = next.results.iter().all(|(value, ..)| {
            let place = place_of(*value);
            self.places.get(&place.0).is_none_or(|known| *known == Some(place))
        });
        let row = self.row();
        let registers: usize = self.members.iter().chain([next]).map(Member::registers).sum();
        let numbers = registers * row.or(next.row).unwrap_or(0) as usize;
        let is_row_same = row.is_none() || next.row.is_none() || row == next.row;
        let rules = [
            (is_related, UNRELATED),
            (next.len == self.members[0].len, "another number of elements in"),
            (is_row_same, "rows of another length in"),
            (may_read && may_write, "the same memory in another order in"),
            (registers <= kernels::Chain::REGISTERS, "as long as chains can be, without"),
            (numbers <= kernels::Chain::ROWS, "rows too long for the first cache with"),
        ];
        rules.into_iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, what)| Err(what))
    }

    /// Numbers of a row, if a member goes by rows.
    fn row(&self) -> Option<i64> {
        self.members.iter().find_map(|member| member.row)
    }

    fn take(&mut self, program: &Program, next: Member) {
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
        for (value, ..) in &next.results {
            let place = place(program, *value);
            self.writes.insert(place.0);
            self.places.insert(place.0, Some(place));
        }
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
            builder.writes.extend(member.results.iter().map(|(value, ..)| place(program, *value)));
        }
        for member in &self.members {
            builder.steps(program, member)?;
        }
        let len = self.members[0].len;
        let (mut outputs, mut registers, mut output_periods) = (Vec::new(), Vec::new(), Vec::new());
        for (buffer, place) in &self.places {
            if !self.writes.contains(buffer) || !self.is_seen(program, *buffer, users) {
                continue;
            }
            let written = builder.written.get(place.as_ref()?)?;
            outputs.push(written.value as i64);
            registers.push(written.register as i32);
            output_periods.push(written.access.period(len));
        }
        let planned = PlannedChain {
            node: last,
            len,
            row: self.row().unwrap_or(0),
            steps: builder.steps,
            inputs: builder.inputs.iter().map(|(value, _)| *value as i64).collect(),
            periods: builder.inputs.iter().map(|(_, period)| *period).collect(),
            outputs,
            registers,
            output_periods,
        };
        (!planned.outputs.is_empty())
            .then(|| Chain { members: self.members.iter().map(|member| member.node).collect(), planned })
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
    others: BTreeMap<usize, usize>,
    /// What was written so far, while inputs are looked for.
    writes: BTreeSet<Place>,
    steps: Vec<ChainStep>,
    /// What is at a place now.
    written: BTreeMap<Place, Written>,
}

/// What a chain has written to a place.
struct Written {
    value: usize,
    access: Access,
    register: usize,
    /// Readers round the register first, as a write to memory does.
    is_to_be_rounded: bool,
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
            _ if self.others.contains_key(&value) => {}
            _ => {
                self.others.insert(value, next);
                self.inputs.push((value, access.period(len)));
            }
        }
    }

    fn steps(&mut self, program: &Program, member: &Member) -> Option<()> {
        let operands = member.operands.iter().map(|(value, access)| match access {
            Access::Whole => self.register(&place(program, *value), member.is_norm()),
            _ => self.others.get(value).copied(),
        });
        let operands: Vec<usize> = operands.collect::<Option<_>>()?;
        let first = self.inputs.len() + self.steps.len();
        let register = |source: Source| match source {
            Source::Operand(operand) => operands[operand],
            Source::Step(step) => first + step,
        };
        for step in &member.steps {
            let (a, b) = (register(step.a), register(step.b));
            self.steps.push(ChainStep { op: step.op, a, b, number: step.number as f32 });
        }
        for &(value, access, source) in &member.results {
            let place = place(program, value);
            let is_to_be_rounded = member.is_cast() && place.2 == "BFloat16";
            self.written
                .insert(place, Written { value, access, register: register(source), is_to_be_rounded });
        }
        Some(())
    }

    /// The register of what is at a place now. With `as_in_memory` its numbers are those that writing it to memory gives.
    fn register(&mut self, place: &Place, as_in_memory: bool) -> Option<usize> {
        let Some(written) = self.written.get_mut(place) else { return self.whole.get(place).copied() };
        if written.is_to_be_rounded || as_in_memory && place.2 == "BFloat16" {
            let a = written.register;
            written.register = self.inputs.len() + self.steps.len();
            written.is_to_be_rounded = false;
            self.steps.push(ChainStep { op: ChainOp::Round, a, b: a, number: 0.0 });
        }
        Some(written.register)
    }
}
