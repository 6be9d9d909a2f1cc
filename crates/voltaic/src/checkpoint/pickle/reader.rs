//! The machine that pickles are programs for, with data as its only instructions.
//!
//! Values live in an arena, since a pickle may share them, refer in circles and nest without end; the result is a tree
//! of bounded depth and size.

use std::collections::HashMap;

use tch::{Kind, Tensor};

use super::globals::{self, Global};
use super::value::Value;
use crate::checkpoint::budget::Budget;
use crate::dtype::bytes_of;

/// A tree deeper than this is refused.
const MAX_DEPTH: usize = 64;
/// libtorch's operators take no more dimensions.
const MAX_DIMS: usize = 64;
/// How a storage begins in the format from before PyTorch 1.6: its magic number and its version, each a pickle.
const OLD_STORAGE: &[u8] = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\x02M\xe9\x03.";
/// What an entry of the memo takes, at most.
const MEMO_ENTRY: usize = 32;

/// A tensor of a file: which elements of which storage, within which it lies.
#[derive(Debug, Clone, Copy)]
pub(in crate::checkpoint) struct Stored<'a> {
    pub key: &'a str,
    pub kind: Kind,
    /// Elements of the storage.
    pub numel: usize,
    pub offset: i64,
    pub size: &'a [i64],
    pub stride: &'a [i64],
}

impl Stored<'_> {
    /// Its elements in a tensor of their own order, of the whole storage.
    ///
    /// # Errors
    /// libtorch's; that too much is made of the file.
    pub fn of(&self, storage: &Tensor, budget: &mut Budget) -> Result<Tensor, String> {
        let view =
            storage.f_as_strided(self.size, self.stride, self.offset).map_err(|error| error.to_string())?;
        if !view.is_contiguous() {
            budget.take(bytes_of(&view))?;
        }
        view.f_contiguous().map_err(|error| error.to_string())
    }
}

/// Gives a tensor, and takes what it needs from the budget.
pub(in crate::checkpoint) type Loaded<'a> =
    dyn FnMut(&Stored<'_>, &mut Budget) -> Result<Tensor, String> + 'a;

/// Reads a pickle; `load` gives its tensors. All that is made is taken from the budget.
///
/// # Errors
/// What is wrong, and at which byte.
pub(in crate::checkpoint) fn read(
    bytes: &[u8],
    budget: &mut Budget,
    load: &mut Loaded,
) -> Result<Value, String> {
    let mut machine = Machine {
        bytes,
        at: 0,
        nodes: Vec::new(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: HashMap::new(),
        budget,
        load,
        is_inner: false,
    };
    let root = machine.run().map_err(|what| format!("{what} (byte {} of its pickle)", machine.at))?;
    let Machine { nodes, budget, .. } = machine;
    tree(&nodes, root, 0, budget)
}

type Id = usize;
type Step<T = ()> = Result<T, String>;

#[derive(Debug)]
enum Node {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    Bytes(Vec<u8>),
    List(Vec<Id>),
    Tuple(Vec<Id>),
    Dict {
        entries: Vec<(Id, Id)>,
        is_namespace: bool,
    },
    Global(Global),
    Storage {
        kind: Option<Kind>,
        key: String,
        numel: usize,
    },
    Tensor(Tensor),
    /// A storage whose elements are in the pickle.
    Elements(Tensor),
}

struct Machine<'a, 'l> {
    bytes: &'a [u8],
    at: usize,
    nodes: Vec<Node>,
    stack: Vec<Id>,
    /// Heights of the stack at each open mark.
    marks: Vec<usize>,
    memo: HashMap<u64, Id>,
    budget: &'l mut Budget,
    load: &'l mut Loaded<'l>,
    /// It reads what a storage in a pickle begins with.
    is_inner: bool,
}

impl Machine<'_, '_> {
    fn run(&mut self) -> Step<Id> {
        loop {
            let opcode = self.take(1)?[0];
            if opcode == b'.' {
                return self.pop();
            }
            self.step(opcode)?;
        }
    }

    fn take(&mut self, count: usize) -> Step<&[u8]> {
        let end = self.at.checked_add(count).filter(|end| *end <= self.bytes.len());
        let end = end.ok_or("it ends in the middle")?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    /// A little-endian number of so many bytes.
    fn number(&mut self, width: usize) -> Step<u64> {
        Ok(self.take(width)?.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn bytes(&mut self, width: usize) -> Step<Vec<u8>> {
        let length = usize::try_from(self.number(width)?).map_err(|_| "a length is too large")?;
        Ok(self.take(length)?.to_vec())
    }

    fn text(&mut self, width: usize) -> Step<String> {
        String::from_utf8(self.bytes(width)?).map_err(|_| "a text is not UTF-8".to_owned())
    }

    fn line(&mut self) -> Step<String> {
        let length =
            self.bytes[self.at..].iter().position(|byte| *byte == b'\n').ok_or("it ends in the middle")?;
        let line = String::from_utf8(self.take(length)?.to_vec()).map_err(|_| "a text is not UTF-8")?;
        self.at += 1;
        Ok(line)
    }

    fn push(&mut self, node: Node) -> Step {
        self.budget.take(node.size())?;
        self.nodes.push(node);
        self.push_id(self.nodes.len() - 1)
    }

    fn push_id(&mut self, id: Id) -> Step {
        self.budget.take(size_of::<Id>())?;
        self.stack.push(id);
        Ok(())
    }

    fn pop(&mut self) -> Step<Id> {
        let floor = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() <= floor {
            return Err("it takes a value where there is none".to_owned());
        }
        self.stack.pop().ok_or_else(|| "it takes a value where there is none".to_owned())
    }

    /// The values above the last mark, which goes too.
    fn pop_mark(&mut self) -> Step<Vec<Id>> {
        let height = self.marks.pop().ok_or("it takes a mark where there is none")?;
        Ok(self.stack.split_off(height.min(self.stack.len())))
    }

    fn top(&self) -> Step<Id> {
        let floor = self.marks.last().copied().unwrap_or(0);
        self.stack[floor.min(self.stack.len())..]
            .last()
            .copied()
            .ok_or_else(|| "it takes a value where there is none".to_owned())
    }

    /// One instruction. The numbers are those of `pickletools`.
    fn step(&mut self, opcode: u8) -> Step {
        match opcode {
            0x80 => match self.number(1)? {
                version @ 6.. => Err(format!("its pickle protocol {version} is unknown")),
                _ => Ok(()),
            },
            0x95 => self.number(8).map(drop), // frame
            b'(' => {
                self.marks.push(self.stack.len());
                self.budget.take(size_of::<usize>())
            }
            b'0' => self.pop().map(drop),
            b'1' => self.pop_mark().map(drop),
            b'2' => {
                let top = self.top()?;
                self.push_id(top)
            }
            b'N' => self.push(Node::None),
            0x88 => self.push(Node::Bool(true)),
            0x89 => self.push(Node::Bool(false)),
            b'I' | b'L' | b'F' | b'V' | b'S' => self.text_scalar(opcode),
            b'J' => {
                let bits = self.number(4)? as u32;
                self.push(Node::Int(i64::from(bits.cast_signed())))
            }
            b'K' => self.number(1).and_then(|n| self.push(Node::Int(n as i64))),
            b'M' => self.number(2).and_then(|n| self.push(Node::Int(n as i64))),
            0x8a => self.bytes(1).and_then(|bytes| self.long(&bytes)),
            0x8b => self.bytes(4).and_then(|bytes| self.long(&bytes)),
            b'G' => {
                let bytes: [u8; 8] = self.take(8)?.try_into().map_err(|_| "it ends in the middle")?;
                self.push(Node::Float(f64::from_be_bytes(bytes)))
            }
            b'X' => self.text(4).and_then(|text| self.push(Node::Text(text))),
            0x8c => self.text(1).and_then(|text| self.push(Node::Text(text))),
            0x8d => self.text(8).and_then(|text| self.push(Node::Text(text))),
            b'T' => self.text(4).and_then(|text| self.push(Node::Text(text))),
            b'U' => self.text(1).and_then(|text| self.push(Node::Text(text))),
            b'B' => self.bytes(4).and_then(|bytes| self.push(Node::Bytes(bytes))),
            b'C' => self.bytes(1).and_then(|bytes| self.push(Node::Bytes(bytes))),
            0x8e | 0x96 => self.bytes(8).and_then(|bytes| self.push(Node::Bytes(bytes))),
            _ => self.compound(opcode),
        }
    }

    /// An instruction on values that hold others.
    fn compound(&mut self, opcode: u8) -> Step {
        match opcode {
            b']' | 0x8f => self.push(Node::List(Vec::new())),
            b'}' => self.push(Node::Dict { entries: Vec::new(), is_namespace: false }),
            b')' => self.push(Node::Tuple(Vec::new())),
            b'l' | 0x91 => self.pop_mark().and_then(|items| self.push(Node::List(items))),
            b't' => self.pop_mark().and_then(|items| self.push(Node::Tuple(items))),
            0x85..=0x87 => {
                let mut items = (0..opcode - 0x84).map(|_| self.pop()).collect::<Step<Vec<_>>>()?;
                items.reverse();
                self.push(Node::Tuple(items))
            }
            b'd' => {
                let items = self.pop_mark()?;
                let entries = pairs(&items)?;
                self.push(Node::Dict { entries, is_namespace: false })
            }
            b'a' => self.pop().and_then(|item| self.append(vec![item])),
            b'e' | 0x90 => self.pop_mark().and_then(|items| self.append(items)),
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.set(vec![(key, value)])
            }
            b'u' => self.pop_mark().and_then(|items| pairs(&items)).and_then(|entries| self.set(entries)),
            b'q' => self.number(1).and_then(|index| self.memoize(index)),
            b'r' => self.number(4).and_then(|index| self.memoize(index)),
            b'p' => self
                .line()
                .and_then(|index| self.memoize(index.parse().map_err(|_| "a memo index is not a number")?)),
            0x94 => self.memoize(self.memo.len() as u64),
            b'h' => self.number(1).and_then(|index| self.recall(index)),
            b'j' => self.number(4).and_then(|index| self.recall(index)),
            b'g' => self
                .line()
                .and_then(|index| self.recall(index.parse().map_err(|_| "a memo index is not a number")?)),
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.global(&module, &name)
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                let (Node::Text(module), Node::Text(name)) = (&self.nodes[module], &self.nodes[name]) else {
                    return Err("a global is named by something other than text".to_owned());
                };
                let (module, name) = (module.clone(), name.clone());
                self.global(&module, &name)
            }
            b'R' | 0x81 => {
                let (arguments, callee) = (self.pop()?, self.pop()?);
                self.call(callee, arguments)
            }
            b'b' => self.build(),
            b'Q' => self.persistent(),
            other => Err(format!("instruction {other:#04x} is unknown, or makes more than plain data")),
        }
    }

    fn text_scalar(&mut self, opcode: u8) -> Step {
        let line = self.line()?;
        let bad = || format!("`{line}` is not a number");
        match opcode {
            b'I' if line == "00" || line == "01" => self.push(Node::Bool(line == "01")),
            b'I' | b'L' => {
                let int = line.trim_end_matches('L').parse().map_err(|_| bad())?;
                self.push(Node::Int(int))
            }
            b'F' => {
                let float = line.parse().map_err(|_| bad())?;
                self.push(Node::Float(float))
            }
            b'S' => self.push(Node::Text(line.trim_matches(['\'', '"']).to_owned())),
            _ => self.push(Node::Text(line)),
        }
    }

    /// A little-endian two's complement number.
    fn long(&mut self, bytes: &[u8]) -> Step {
        if bytes.len() > 8 {
            return Err(format!("a whole number of {} bytes is too large", bytes.len()));
        }
        let fill = if bytes.last().is_some_and(|byte| byte & 0x80 != 0) { 0xff } else { 0 };
        let mut full = [fill; 8];
        full[..bytes.len()].copy_from_slice(bytes);
        self.push(Node::Int(i64::from_le_bytes(full)))
    }

    fn append(&mut self, items: Vec<Id>) -> Step {
        self.budget.take(size_of_val(&items[..]))?;
        let top = self.top()?;
        match &mut self.nodes[top] {
            Node::List(list) => {
                list.extend(items);
                Ok(())
            }
            _ => Err("it appends to something other than a list".to_owned()),
        }
    }

    fn set(&mut self, items: Vec<(Id, Id)>) -> Step {
        self.budget.take(size_of_val(&items[..]))?;
        let top = self.top()?;
        match &mut self.nodes[top] {
            Node::Dict { entries, .. } => {
                entries.extend(items);
                Ok(())
            }
            _ => Err("it sets an item of something other than a dictionary".to_owned()),
        }
    }

    fn memoize(&mut self, index: u64) -> Step {
        let top = self.top()?;
        self.memo.insert(index, top);
        self.budget.take(MEMO_ENTRY)
    }

    fn recall(&mut self, index: u64) -> Step {
        let id = *self.memo.get(&index).ok_or_else(|| format!("memo {index} is used before it is set"))?;
        self.push_id(id)
    }

    fn global(&mut self, module: &str, name: &str) -> Step {
        let global = globals::find(module, name).ok_or_else(|| {
            format!("the global `{module}.{name}` is refused, since only plain data is read")
        })?;
        self.push(Node::Global(global))
    }

    fn items(&self, id: Id) -> Option<&[Id]> {
        if let Node::Tuple(items) | Node::List(items) = &self.nodes[id] { Some(items) } else { None }
    }

    fn call(&mut self, callee: Id, arguments: Id) -> Step {
        let &Node::Global(global) = &self.nodes[callee] else {
            return Err("it calls something that is not a class or function".to_owned());
        };
        let arguments = self.items(arguments).ok_or("arguments are not a tuple")?.to_vec();
        self.budget.take(size_of_val(&arguments[..]))?;
        let first = arguments.first().copied();
        let text = |id: Id| if let Node::Text(text) = &self.nodes[id] { Some(text.clone()) } else { None };
        let node = match global {
            Global::Dict | Global::Namespace => {
                let entries = match first.map(|id| &self.nodes[id]) {
                    Some(Node::Dict { entries, .. }) => entries.clone(),
                    Some(Node::List(list)) => {
                        let pairs = list
                            .iter()
                            .map(|id| self.items(*id).and_then(|pair| Some((*pair.first()?, *pair.get(1)?))));
                        pairs
                            .collect::<Option<_>>()
                            .ok_or("a dictionary is made of something other than pairs")?
                    }
                    _ => Vec::new(),
                };
                Node::Dict { entries, is_namespace: global == Global::Namespace }
            }
            Global::Opaque => Node::Dict { entries: Vec::new(), is_namespace: true },
            Global::List => Node::List(first.and_then(|id| self.items(id)).unwrap_or_default().to_vec()),
            Global::Tuple => Node::Tuple(first.and_then(|id| self.items(id)).unwrap_or_default().to_vec()),
            Global::Tensor | Global::TypedTensor => Node::Tensor(self.tensor(global, &arguments)?),
            Global::WithAttributes => {
                let (function, inner) = match arguments[..] {
                    [function, _, inner, ..] => (&self.nodes[function], self.items(inner)),
                    _ => return Err("a tensor with attributes has too few arguments".to_owned()),
                };
                match (function, inner) {
                    (&Node::Global(function @ (Global::Tensor | Global::TypedTensor)), Some(inner)) => {
                        let inner = inner.to_vec();
                        self.budget.take(size_of_val(&inner[..]))?;
                        Node::Tensor(self.tensor(function, &inner)?)
                    }
                    _ => return Err("a tensor with attributes is made by another function".to_owned()),
                }
            }
            Global::First => return self.push_id(first.ok_or("a parameter without a tensor")?),
            Global::Device => {
                let kind = first.and_then(text).ok_or("a device without a name")?;
                match arguments.get(1).map(|id| &self.nodes[*id]) {
                    Some(Node::Int(index)) => Node::Text(format!("{kind}:{index}")),
                    _ => Node::Text(kind),
                }
            }
            Global::Encode => {
                let text = first.and_then(text).ok_or("it encodes something other than text")?;
                let bytes = text.chars().map(|c| u8::try_from(u32::from(c)));
                Node::Bytes(bytes.collect::<Result<_, _>>().map_err(|_| "encoded text is not latin1")?)
            }
            Global::Bytes | Global::Buffer if arguments.is_empty() => Node::Bytes(Vec::new()),
            Global::StorageBytes => match first.map(|id| &self.nodes[id]) {
                Some(Node::Bytes(bytes)) => {
                    self.budget.take(bytes.len())?;
                    let bytes = bytes.clone();
                    Node::Elements(self.storage_of(&bytes)?)
                }
                _ => return Err("a storage is made of something other than bytes".to_owned()),
            },
            Global::Path => {
                let length =
                    |id: &Id| if let Node::Text(text) = &self.nodes[*id] { text.len() + 1 } else { 0 };
                self.budget.take(arguments.iter().map(length).sum())?;
                let parts = arguments.iter().map(|id| text(*id)).collect::<Option<Vec<_>>>();
                let parts = parts.ok_or("a path is made of something other than text")?;
                let path: std::path::PathBuf = parts.iter().collect();
                Node::Text(path.to_string_lossy().into_owned())
            }
            Global::Bytes | Global::Buffer | Global::Storage(_) | Global::Dtype(..) | Global::TensorClass => {
                return Err(format!("it calls {global:?}, which is refused, since only plain data is read"));
            }
        };
        self.push(node)
    }

    /// The elements of a storage in the format from before PyTorch 1.6: behind its beginning are pickles of what machine has written it,
    /// of the storage and of its key, then the number of elements, and they.
    fn storage_of(&mut self, bytes: &[u8]) -> Step<Tensor> {
        if self.is_inner || !bytes.starts_with(OLD_STORAGE) {
            return Err("bytes are no storage".to_owned());
        }
        let mut refuse = |_: &Stored<'_>, _: &mut Budget| Err("a storage is made of a tensor".to_owned());
        let mut inner = Machine {
            bytes,
            at: OLD_STORAGE.len(),
            nodes: Vec::new(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
            budget: self.budget,
            load: &mut refuse,
            is_inner: true,
        };
        let [machine, storage, _] = [inner.run()?, inner.run()?, inner.run()?];
        let is_text = |id: &Id, text: &str| matches!(&inner.nodes[*id], Node::Text(own) if own == text);
        if let Node::Dict { entries, .. } = &inner.nodes[machine]
            && let Some((_, order)) = entries.iter().find(|(key, _)| is_text(key, "little_endian"))
            && matches!(inner.nodes[*order], Node::Bool(false))
        {
            return Err("a storage was written on a machine with another byte order".to_owned());
        }
        let &Node::Storage { kind: Some(kind), numel, .. } = &inner.nodes[storage] else {
            return Err("bytes are no storage".to_owned());
        };
        let written = inner.number(8)?;
        if written != numel as u64 {
            return Err(format!("a storage has {written} elements, and should have {numel}"));
        }
        let length = numel.checked_mul(kind.elt_size_in_bytes()).ok_or("a storage is too large")?;
        inner.budget.take(length)?;
        let elements = inner.take(length)?;
        Tensor::f_from_data_size(elements, &[numel as i64], kind).map_err(|error| error.to_string())
    }

    /// State given to an object after it was made: attributes of a namespace, the content of a buffer; those of other values are left out.
    fn build(&mut self) -> Step {
        let (state, object) = (self.pop()?, self.top()?);
        if let (Node::Bytes(own), Some(&[content, ..])) = (&self.nodes[object], self.items(state))
            && let (true, Node::Bytes(content)) = (own.is_empty(), &self.nodes[content])
        {
            self.budget.take(content.len())?;
            self.nodes[object] = Node::Bytes(content.clone());
            return Ok(());
        }
        let attributes = match &self.nodes[state] {
            Node::Dict { entries, .. } => entries.clone(),
            _ => Vec::new(),
        };
        self.budget.take(size_of_val(&attributes[..]))?;
        match &mut self.nodes[object] {
            Node::Dict { entries, is_namespace: true } => entries.extend(attributes),
            Node::Dict { .. } | Node::Tensor(_) => {}
            _ => return Err("it gives state to something other than an object".to_owned()),
        }
        Ok(())
    }

    /// `('storage', class, key, location, numel)`; in the format from before PyTorch 1.6 with the part of a storage that it is, which is none.
    fn persistent(&mut self) -> Step {
        let id = self.pop()?;
        let storage = self.items(id).filter(|items| (5..=6).contains(&items.len())).and_then(|items| {
            let nodes: Vec<&Node> = items.iter().map(|id| &self.nodes[*id]).collect();
            match nodes[..] {
                [
                    Node::Text(tag),
                    Node::Global(Global::Storage(kind)),
                    Node::Text(key),
                    _,
                    Node::Int(numel),
                    ref view @ ..,
                ] if matches!(view, [] | [Node::None]) && tag == "storage" => {
                    let numel = usize::try_from(*numel).ok()?;
                    Some(Node::Storage { kind: *kind, key: key.clone(), numel })
                }
                _ => None,
            }
        });
        self.push(storage.ok_or("a reference to something other than a storage of a known dtype")?)
    }

    fn integers(&self, id: Id) -> Option<Vec<i64>> {
        let int = |id: &Id| if let Node::Int(int) = self.nodes[*id] { Some(int) } else { None };
        self.items(id).filter(|items| items.len() <= MAX_DIMS)?.iter().map(int).collect()
    }

    fn tensor(&mut self, global: Global, arguments: &[Id]) -> Step<Tensor> {
        let bad = || "a tensor is made of something other than storage, offset, size and stride".to_owned();
        let &[storage, offset, size, stride, ..] = arguments else { return Err(bad()) };
        let &Node::Int(offset) = &self.nodes[offset] else { return Err(bad()) };
        let (size, stride) = (self.integers(size).ok_or_else(bad)?, self.integers(stride).ok_or_else(bad)?);
        if let Node::Elements(elements) = &self.nodes[storage] {
            let (key, kind, numel) = ("in its pickle", elements.kind(), elements.numel());
            check_geometry(key, numel, offset, &size, &stride)?;
            let stored = Stored { key, kind, numel, offset, size: &size, stride: &stride };
            return stored.of(elements, self.budget);
        }
        let Node::Storage { kind, key, numel } = &self.nodes[storage] else { return Err(bad()) };
        let (kind, numel) = match (global, arguments.get(6).map(|id| &self.nodes[*id]), kind) {
            (Global::TypedTensor, Some(Node::Global(Global::Dtype(_, kind))), None) => {
                (*kind, numel / kind.elt_size_in_bytes())
            }
            (_, _, Some(kind)) => (*kind, *numel),
            _ => return Err("a tensor has no dtype".to_owned()),
        };
        check_geometry(key, numel, offset, &size, &stride)?;
        self.budget.take(key.len())?;
        let key = key.clone();
        let stored = Stored { key: &key, kind, numel, offset, size: &size, stride: &stride };
        (self.load)(&stored, self.budget)
    }
}

impl Node {
    /// Bytes that it takes, but for those of a tensor, which are counted where they are made.
    fn size(&self) -> usize {
        size_of::<Self>()
            + match self {
                Self::Text(text) => text.len(),
                Self::Bytes(bytes) => bytes.len(),
                Self::List(items) | Self::Tuple(items) => size_of_val(&items[..]),
                Self::Dict { entries, .. } => size_of_val(&entries[..]),
                Self::Storage { key, .. } => key.len(),
                _ => 0,
            }
    }
}

/// What is at `id`, with a copy of its own of everything that is shared.
fn tree(nodes: &[Node], id: Id, depth: usize, budget: &mut Budget) -> Step<Value> {
    if depth > MAX_DEPTH {
        return Err(format!("its values nest deeper than {MAX_DEPTH}"));
    }
    let node = &nodes[id];
    // callers that read tensors may copy each, also shared ones
    let elements = if let Node::Tensor(tensor) = node { bytes_of(tensor) } else { 0 };
    budget.take(size_of::<Value>() + node.size() - size_of::<Node>() + elements)?;
    let mut list =
        |items: &[Id]| items.iter().map(|id| tree(nodes, *id, depth + 1, budget)).collect::<Step<Vec<_>>>();
    Ok(match node {
        Node::None => Value::None,
        Node::Bool(flag) => Value::Bool(*flag),
        Node::Int(int) => Value::Int(*int),
        Node::Float(float) => Value::Float(*float),
        Node::Text(text) => Value::Text(text.clone()),
        Node::Bytes(bytes) => Value::Bytes(bytes.clone()),
        Node::List(items) => Value::List(list(items)?),
        Node::Tuple(items) => Value::Tuple(list(items)?),
        Node::Dict { entries, .. } => {
            let mut dict = Vec::new();
            for (key, value) in entries {
                let key = tree(nodes, *key, depth + 1, budget)?;
                dict.push((key, tree(nodes, *value, depth + 1, budget)?));
            }
            Value::Dict(dict)
        }
        Node::Tensor(tensor) => Value::Tensor(tensor.shallow_clone()),
        Node::Global(Global::Dtype(name, _)) => Value::Text(format!("torch.{name}")),
        Node::Global(global) => Value::Text(format!("{global:?}")),
        Node::Storage { key, .. } => return Err(format!("storage {key} is used without a tensor")),
        Node::Elements(_) => return Err("a storage is used without a tensor".to_owned()),
    })
}

fn pairs(items: &[Id]) -> Step<Vec<(Id, Id)>> {
    let chunks = items.chunks_exact(2);
    if chunks.remainder().is_empty() {
        Ok(chunks.map(|pair| (pair[0], pair[1])).collect())
    } else {
        Err("a dictionary has a key without a value".to_owned())
    }
}

/// A tensor must lie within its storage, and not be larger.
fn check_geometry(key: &str, numel: usize, offset: i64, size: &[i64], stride: &[i64]) -> Step {
    let wrong = || {
        format!(
            "a tensor of size {size:?} and stride {stride:?} at {offset} does not fit into storage {key} of {numel} elements"
        )
    };
    if size.len() != stride.len() || offset < 0 || size.iter().chain(stride).any(|n| *n < 0) {
        return Err(wrong());
    }
    let count = size.iter().try_fold(1_i64, |count, n| count.checked_mul(*n)).ok_or_else(wrong)?;
    if count == 0 {
        return Ok(());
    }
    let last = size
        .iter()
        .zip(stride)
        .try_fold(offset, |at, (n, stride)| at.checked_add((n - 1).checked_mul(*stride)?));
    let numel = i64::try_from(numel).map_err(|_| wrong())?;
    match last {
        Some(last) if last < numel && count <= numel => Ok(()),
        Some(last) if last < numel => {
            Err(format!("{}; it was expanded: call contiguous() before saving", wrong()))
        }
        _ => Err(wrong()),
    }
}
