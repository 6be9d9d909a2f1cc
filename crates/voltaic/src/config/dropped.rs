//! What is left of a configuration without what is wrong with it, so that the rest can be looked at more closely.

use std::collections::HashSet;

use super::check::{Checked, check};
use super::defaults::{fill, narrow};
use super::node::{Data, Node, join};
use super::schema::View;

/// So often are classes dropped because others within them were. Classes are hardly nested deeper.
const MAX_ROUNDS: usize = 4;

/// A configuration without what is wrong with it.
pub(super) struct Left {
    /// With defaults in place of what was dropped.
    pub tree: Node,
    /// The elements of its lists that others were taken out before.
    pub moved: Moved,
    /// Keys that are wrong even so.
    pub wrong: Vec<String>,
}

impl Left {
    /// What is left of `tree` without the keys `dropped`, to which a class is added that lacks a key it needs.
    pub fn of(tree: &Node, view: &View<'_>, dropped: &mut Vec<String>) -> Self {
        let mut left = Self::without(tree, view, dropped);
        for _ in 1..MAX_ROUNDS {
            let known: HashSet<&str> = dropped.iter().map(String::as_str).collect();
            let classes = left
                .wrong
                .iter()
                .filter_map(|key| Some(left.moved.original(key.rsplit_once(".init_args")?.0)));
            let useless: HashSet<String> = classes.filter(|class| !known.contains(class.as_str())).collect();
            if useless.is_empty() {
                break;
            }
            dropped.extend(useless);
            left = Self::without(tree, view, dropped);
        }
        left
    }

    fn without(tree: &Node, view: &View<'_>, dropped: &[String]) -> Self {
        let gone = dropped.iter().map(String::as_str).collect();
        let mut tree = tree.clone();
        tree.remove(&gone);
        let moved = Moved::take_out(&mut tree, view, &gone);
        fill(&mut tree, view, view.default);
        let Checked { problems, more_unknown, more } = check(&tree, view);
        let wrong = problems.into_iter().map(|found| found.key).chain(more_unknown).chain(more).collect();
        Self { tree, moved, wrong }
    }
}

/// Lists of classes that have lost elements: the key of each, and the numbers that its elements had.
#[derive(Debug, Clone, Default)]
pub(super) struct Moved(Vec<(String, Vec<usize>)>);

impl Moved {
    /// Takes the elements at the keys `gone` out of lists of classes, where null, which stands for them, cannot be.
    pub fn take_out(node: &mut Node, view: &View<'_>, gone: &HashSet<&str>) -> Self {
        let mut moved = Self::default();
        moved.visit(node, view, "", gone);
        moved
    }

    fn visit(&mut self, node: &mut Node, view: &View<'_>, key: &str, gone: &HashSet<&str>) {
        if let Data::List(items) = &mut node.data {
            let has_classes = !view.item(0).classes().is_empty();
            let mut kept = Vec::new();
            for (index, mut item) in std::mem::take(items).into_iter().enumerate() {
                let at = join(key, &index.to_string());
                if has_classes && gone.contains(at.as_str()) {
                    continue;
                }
                self.visit(&mut item, &view.item(index), &at, gone);
                kept.push(index);
                items.push(item);
            }
            if kept.last().is_some_and(|last| last + 1 != kept.len()) {
                self.0.push((key.to_owned(), kept));
            }
            return;
        }
        let Some((view, _)) = narrow(node, view, None) else { return };
        let Data::Map(entries) = &mut node.data else { return };
        for (name, child) in entries {
            if let Some(place) = view.child(name) {
                self.visit(child, &place, &join(key, name), gone);
            }
        }
    }

    /// The key that an element's key was, before others were taken out. Lists within lists come first, as `visit` leaves them.
    pub fn original(&self, key: &str) -> String {
        let mut key = key.to_owned();
        for (list, kept) in self.0.iter().rev() {
            let Some(rest) = key.strip_prefix(list.as_str()).and_then(|rest| rest.strip_prefix('.')) else {
                continue;
            };
            let (index, rest) = rest.split_once('.').map_or((rest, ""), |(index, rest)| (index, rest));
            if let Some(own) = index.parse::<usize>().ok().and_then(|index| kept.get(index)) {
                let element = join(list, &own.to_string());
                key = if rest.is_empty() { element } else { join(&element, rest) };
            }
        }
        key
    }
}
