//! What is left of a configuration without what is wrong with it, so that the rest can be looked at more closely.

use std::collections::HashSet;

use super::defaults::narrow;
use super::node::{Data, Node, join};
use super::schema::View;

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
