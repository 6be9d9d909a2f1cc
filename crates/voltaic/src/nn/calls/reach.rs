//! Modules that are needed again after their call, such as in the backward pass.

use std::any::Any;

use crate::ffi::Lent;
use crate::nn::module::{Identity, Member, Module, identity};

thread_local! {
    /// The root of the tree whose modules can be reached on this thread. Nothing in the tree moves meanwhile, since it is borrowed.
    pub(super) static ROOT: Lent<dyn Module> = const { Lent::new() };
}

/// Which module it was, to be found again in the tree of the scope that holds then. It keeps no reference, and what it
/// finds is checked: a module that has moved, or is no longer there, is not found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reach(Identity);

impl Reach {
    pub(crate) fn of(module: &dyn Module) -> Self {
        Self(identity(module))
    }

    /// Gives `body` the module, or the outermost of its wrappers, if the tree that is lent now has it.
    pub(crate) fn with<R>(self, body: impl FnOnce(Option<&dyn Module>) -> R) -> R {
        ROOT.with(|lent| lent.reach(|root| body(root.and_then(|root| self.find(root)))))
    }

    /// The same as the type that it is.
    #[cfg(test)]
    fn with_typed<M: Module, R>(self, body: impl FnOnce(Option<&M>) -> R) -> R {
        self.with(|module| body(module.and_then(unwrapped)))
    }

    fn find(self, module: &dyn Module) -> Option<&dyn Module> {
        if identity(module) == self.0 {
            return Some(module);
        }
        let mut found = None;
        module.members(&mut |_, member| {
            if let (None, Member::Module(child)) = (&found, member) {
                found = self.find(child);
            }
        });
        found
    }
}

/// The module that a module wraps, or itself.
pub(crate) fn innermost(mut module: &dyn Module) -> &dyn Module {
    while let Some(inner) = module.wrapped() {
        module = inner;
    }
    module
}

/// A module as the type that it, or what it wraps, is.
pub(crate) fn unwrapped<M: Module>(mut module: &dyn Module) -> Option<&M> {
    loop {
        let any: &dyn Any = module;
        if let Some(module) = any.downcast_ref() {
            return Some(module);
        }
        module = module.wrapped()?;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::nn::{Identity as Nothing, Linear, Module, ModuleExt, Relu, Sequential};

    #[derive(Module)]
    struct Tower {
        layers: Vec<Linear>,
        boxed: Box<Linear>,
        #[module(skip)]
        hidden: RefCell<Option<Linear>>,
    }

    fn within<R>(root: &dyn Module, body: impl FnOnce() -> R) -> R {
        Lent::lend(&ROOT, root, body)
    }

    fn linear(outputs: i64) -> Linear {
        Linear::new(2, outputs).unwrap()
    }

    fn outputs(reach: Reach) -> Option<i64> {
        reach.with_typed(|layer: Option<&Linear>| layer.map(|layer| layer.weight.size()[0]))
    }

    #[test]
    fn a_module_is_found_where_it_was_and_nowhere_else() {
        let mut tower = Tower {
            layers: vec![linear(3)],
            boxed: Box::new(linear(5)),
            hidden: RefCell::new(Some(linear(7))),
        };
        let first = Reach::of(&tower.layers[0]);
        let boxed = Reach::of(tower.boxed.as_ref());
        let hidden = Reach::of(tower.hidden.borrow().as_ref().unwrap());
        assert_eq!(Reach::of(&tower.boxed), boxed, "a box is what it holds");
        assert_eq!(outputs(first), None, "nothing is lent");
        within(&tower, || {
            assert_eq!((outputs(first), outputs(boxed)), (Some(3), Some(5)));
            // a cell is not a part of the tree, and may be emptied at any time
            tower.hidden.replace(None);
            assert_eq!(outputs(hidden), None);
        });

        // the vector grows and moves its layers: whatever lies at the old place is not taken for the layer
        for outputs in 10..40 {
            tower.layers.push(linear(outputs));
        }
        within(&tower, || {
            let found = outputs(first);
            let is_there = std::ptr::from_ref(&tower.layers[0]).addr() == first.0.0;
            assert_eq!(found, is_there.then_some(3));
            assert_eq!(outputs(boxed), Some(5), "what a box holds stays where it is");
        });

        let moved = Box::new(tower);
        within(&*moved, || assert_eq!(outputs(boxed), Some(5)));
        let removed = Reach::of(&moved.layers[0]);
        let Tower { layers, .. } = *moved;
        drop(layers);
        let other = Sequential::new().add(linear(2));
        within(&other, || assert_eq!(outputs(removed).filter(|outputs| *outputs != 2), None));
    }

    #[test]
    fn another_type_at_the_same_place_is_not_taken_for_it() {
        #[derive(Module)]
        struct Outer {
            inner: Inner,
        }
        #[derive(Module)]
        struct Inner {
            layer: Linear,
        }
        let outer = Outer { inner: Inner { layer: linear(4) } };
        let places = [Reach::of(&outer), Reach::of(&outer.inner), Reach::of(&outer.inner.layer)];
        within(&outer, || {
            for (reach, name) in places.into_iter().zip(["Outer", "Inner", "Linear"]) {
                assert_eq!(reach.with(|module| module.map(Module::type_name)), Some(name));
            }
            places[2].with_typed(|inner: Option<&Inner>| assert!(inner.is_none()));
        });
    }

    #[test]
    fn modules_without_fields_may_share_a_place_but_not_with_another_type() {
        let net = Sequential::new().add(Relu).add(Nothing).add(Relu);
        let children = net.named_children();
        within(&net, || {
            for (_, child) in children {
                let found = Reach::of(child).with(|module| module.map(Module::type_name));
                assert_eq!(found, Some(child.type_name()));
            }
        });
    }

    #[test]
    fn a_tree_within_a_tree_takes_its_place_until_it_ends() {
        let (outer, inner) = (Sequential::new().add(linear(3)), linear(5));
        let (of_outer, of_inner) = (Reach::of(outer.named_children()[0].1), Reach::of(&inner));
        within(&outer, || {
            within(&inner, || assert_eq!((outputs(of_outer), outputs(of_inner)), (None, Some(5))));
            assert_eq!((outputs(of_outer), outputs(of_inner)), (Some(3), None));
        });
    }
}
