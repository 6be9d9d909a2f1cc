//! What a field of a module may be: the calls that `#[derive(Module)]` makes for each one.

use std::io::Write;
use std::marker::PhantomData;

use crate::nn::buffer::Buffer;
use crate::nn::metric::MetricState;
use crate::nn::module::{Member, Module};
use crate::nn::parameter::Parameter;

/// A type that may be a field of a `#[derive(Module)]` struct. Only the derive calls it.
///
/// It is open, so that a user's own container of modules can be a field.
#[doc(hidden)]
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be a field of a module",
    label = "neither a Parameter, Buffer or module, nor a plain number, bool or string",
    note = "if the field holds no weights, mark it with `#[module(skip)]`",
    note = "a `Tensor` is either trained (`Parameter::new(tensor)`) or not (`Buffer::new(tensor)`)"
)]
pub trait Field {
    /// Visits the members that this field stands for.
    fn members<'a>(&'a self, name: &str, visit: &mut dyn FnMut(&str, Member<'a>));

    /// Visits the sub-modules that this field stands for.
    fn children_mut<'a>(&'a mut self, name: &str, visit: &mut dyn FnMut(&str, &'a mut dyn Module));

    /// Visits the plain values that this field stands for, each as a number.
    fn settings(&self, _visit: &mut dyn FnMut(u64)) {}
}

impl Field for Parameter {
    fn members<'a>(&'a self, name: &str, visit: &mut dyn FnMut(&str, Member<'a>)) {
        visit(name, Member::Parameter(self));
    }

    fn children_mut<'a>(&'a mut self, _: &str, _: &mut dyn FnMut(&str, &'a mut dyn Module)) {}
}

impl Field for Buffer {
    fn members<'a>(&'a self, name: &str, visit: &mut dyn FnMut(&str, Member<'a>)) {
        visit(name, Member::Buffer(self));
    }

    fn children_mut<'a>(&'a mut self, _: &str, _: &mut dyn FnMut(&str, &'a mut dyn Module)) {}
}

impl<M: Module> Field for M {
    fn members<'a>(&'a self, name: &str, visit: &mut dyn FnMut(&str, Member<'a>)) {
        visit(name, Member::Module(self));
    }

    fn children_mut<'a>(&'a mut self, name: &str, visit: &mut dyn FnMut(&str, &'a mut dyn Module)) {
        visit(name, self);
    }
}

impl<F: Field> Field for Option<F> {
    fn members<'a>(&'a self, name: &str, visit: &mut dyn FnMut(&str, Member<'a>)) {
        if let Some(field) = self {
            field.members(name, visit);
        }
    }

    fn children_mut<'a>(&'a mut self, name: &str, visit: &mut dyn FnMut(&str, &'a mut dyn Module)) {
        if let Some(field) = self {
            field.children_mut(name, visit);
        }
    }

    fn settings(&self, visit: &mut dyn FnMut(u64)) {
        visit(u64::from(self.is_some()));
        if let Some(field) = self {
            field.settings(visit);
        }
    }
}

/// Gives `body` the name of the element `index` of what is called `name`. It takes nothing from the heap, so that walks over
/// modules are cheap: graphs look at all modes at each call.
pub(super) fn with_index<R>(name: &str, index: usize, body: impl FnOnce(&str) -> R) -> R {
    const ROOM: usize = 64;
    let separator = if name.is_empty() { "" } else { "." };
    let mut buffer = [0; ROOM];
    let mut rest = &mut buffer[..];
    let fits = write!(rest, "{name}{separator}{index}").is_ok();
    let length = ROOM - rest.len();
    match std::str::from_utf8(&buffer[..length]) {
        Ok(text) if fits => body(text),
        _ => body(&format!("{name}{separator}{index}")),
    }
}

impl<F: Field> Field for [F] {
    fn members<'a>(&'a self, name: &str, visit: &mut dyn FnMut(&str, Member<'a>)) {
        for (index, field) in self.iter().enumerate() {
            with_index(name, index, |name| field.members(name, visit));
        }
    }

    fn children_mut<'a>(&'a mut self, name: &str, visit: &mut dyn FnMut(&str, &'a mut dyn Module)) {
        for (index, field) in self.iter_mut().enumerate() {
            with_index(name, index, |name| field.children_mut(name, visit));
        }
    }

    fn settings(&self, visit: &mut dyn FnMut(u64)) {
        visit(self.len() as u64);
        self.iter().for_each(|field| field.settings(visit));
    }
}

impl<F: Field> Field for Vec<F> {
    fn members<'a>(&'a self, name: &str, visit: &mut dyn FnMut(&str, Member<'a>)) {
        self.as_slice().members(name, visit);
    }

    fn children_mut<'a>(&'a mut self, name: &str, visit: &mut dyn FnMut(&str, &'a mut dyn Module)) {
        self.as_mut_slice().children_mut(name, visit);
    }

    fn settings(&self, visit: &mut dyn FnMut(u64)) {
        self.as_slice().settings(visit);
    }
}

impl<F: Field, const N: usize> Field for [F; N] {
    fn members<'a>(&'a self, name: &str, visit: &mut dyn FnMut(&str, Member<'a>)) {
        self.as_slice().members(name, visit);
    }

    fn children_mut<'a>(&'a mut self, name: &str, visit: &mut dyn FnMut(&str, &'a mut dyn Module)) {
        self.as_mut_slice().children_mut(name, visit);
    }

    fn settings(&self, visit: &mut dyn FnMut(u64)) {
        self.as_slice().settings(visit);
    }
}

/// What a metric has accumulated is saved by the trainer, not with the weights.
impl Field for MetricState {
    fn members<'a>(&'a self, _: &str, _: &mut dyn FnMut(&str, Member<'a>)) {}

    fn children_mut<'a>(&'a mut self, _: &str, _: &mut dyn FnMut(&str, &'a mut dyn Module)) {}
}

impl<T: ?Sized> Field for PhantomData<T> {
    fn members<'a>(&'a self, _: &str, _: &mut dyn FnMut(&str, Member<'a>)) {}

    fn children_mut<'a>(&'a mut self, _: &str, _: &mut dyn FnMut(&str, &'a mut dyn Module)) {}
}

/// Plain values: sizes, probabilities, names. They are settings of a module, not state.
macro_rules! leaf {
    ($($plain:ty => |$value:ident, $visit:ident| $visits:expr;)*) => {$(
        impl Field for $plain {
            fn members<'a>(&'a self, _: &str, _: &mut dyn FnMut(&str, Member<'a>)) {}

            fn children_mut<'a>(&'a mut self, _: &str, _: &mut dyn FnMut(&str, &'a mut dyn Module)) {}

            fn settings(&self, $visit: &mut dyn FnMut(u64)) {
                let $value = self;
                $visits;
            }
        }
    )*};
}

macro_rules! integers {
    ($($plain:ty),*) => { leaf! { $($plain => |value, visit| visit(*value as u64);)* } };
}

integers!(bool, i8, i16, i32, i64, isize, u8, u16, u32, u64, usize, char);

leaf! {
    f32 => |value, visit| visit(u64::from(value.to_bits()));
    f64 => |value, visit| visit(value.to_bits());
    String => |value, visit| visit_text(value, visit);
    &'static str => |value, visit| visit_text(value, visit);
}

fn visit_text(text: &str, visit: &mut dyn FnMut(u64)) {
    visit(text.len() as u64);
    text.bytes().for_each(|byte| visit(byte.into()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_elements_may_be_of_any_length() {
        assert_eq!(with_index("", 12, str::to_owned), "12");
        assert_eq!(with_index("layers", 0, str::to_owned), "layers.0");
        for length in [60, 61, 62, 63, 64, 65, 200] {
            let name = "é".repeat(length / 2);
            assert_eq!(with_index(&name, 10, str::to_owned), format!("{name}.10"));
        }
    }
}
